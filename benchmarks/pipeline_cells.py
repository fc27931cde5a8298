"""The cells of benchmarks/pipelines.py: computing is a sleep, all else is that of any other run.

Messages, their order, norms, the update, gossip and all-reduce are real, with gradients of 0.
Messages of a stage have their real size. In this way two cores can be eight machines.

The kernel of the machine in use may lack netem. The receiver of a message between stages therefore
holds it back for the latency of the link, but not messages of gossip and all-reduce.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from decent_jax.pipelines.cell import CellActor
from decent_jax.pipelines.worker import Key, Mailbox
from decent_jax.plan import orders

RECEIPT = "receipt"


class Conditions(NamedTuple):
    """The conditions of a run, the same for all cells."""

    order: str
    layer_s: float  # seconds forward of a layer with a micro-batch; backward takes twice as long
    slowness: list[list[float]]  # (D, S) factors of that time
    latency_s: list[list[list[float]]]  # (D, S, S) from stage to stage
    blocking: bool  # whether a stage waits until its message has arrived


class Report(NamedTuple):
    """What a cell measured since its conditions were set."""

    actions: list[tuple[str, int, float, float]]  # what, micro-batch, seconds from and to
    arrivals: list[tuple[str, int, float]]  # what, micro-batch, seconds
    kept: int  # inputs kept for the backward pass, at most
    parameter_bytes: int


class Distant(Mailbox):
    """A mailbox that messages reach after the latency of their link.

    Args:
      arrived: called with the key of each message when it is there.
    """

    def __init__(self, arrived: Callable[[Key], None]):
        super().__init__()
        self._arrived, self.delay_s = arrived, []

    def put(self, key: Key, value: Any) -> None:
        """See `Mailbox.put`."""
        if key.kind == RECEIPT:
            super().put(key, value)
        else:
            threading.Timer(self.delay_s[key.sender], self._put, (key, value)).start()

    def _put(self, key: Key, value: Any) -> None:
        super().put(key, value)
        self._arrived(key)


class Sleeping(CellActor):
    """A cell that sleeps in place of computing."""

    def __init__(self, cell: Any, secret: bytes):
        super().__init__(cell, secret)
        self._mailbox = Distant(self._note)
        self._mailbox.delay_s = [0.0] * len(cell.counts)
        self._computed: tuple[Any, Any] = (None, None)  # the programs that are not run
        self._outputs: dict[int, Any] = {}
        self._seconds, self._blocking = 0.0, False
        self._actions: list[Any] = []
        self._arrivals: list[Any] = []
        self._kept = self._most = 0

    def open(self, *args: Any) -> None:
        """See `CellActor.open`."""
        super().open(*args)
        stage = self._stage
        self._computed = stage.forward, stage.backward
        stage.forward, stage.backward = self._forward, self._backward

    def prepare(self, conditions: Conditions) -> None:
        """Set the conditions of the next steps, and forget earlier measurements."""
        cell, worker = self._cell, self._worker
        layers = cell.counts[cell.stage]
        self._seconds = conditions.layer_s * layers * conditions.slowness[cell.replica][cell.stage]
        self._mailbox.delay_s = [row[cell.stage] for row in conditions.latency_s[cell.replica]]
        self._blocking = conditions.blocking
        cuts = worker.config.pipeline.micro_batches
        worker._order = orders.order(conditions.order, len(cell.counts), cuts, cell.stage)
        self._actions, self._arrivals = [], []
        self._kept = self._most = 0

    def report(self) -> Report:
        """The measurements since then."""
        params = self._worker.stage.rows(self._worker.stage.state.params)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        return Report(self._actions, self._arrivals, self._most, num_bytes)

    # --- In place of computing --------------------------------------------------------------------

    def _forward(self, *args: Any) -> Any:
        self._begin(args[-1])
        return self._like(0, *args)

    def _backward(self, *args: Any) -> Any:
        if self._worker.part.is_last:  # which has not gone forward before
            self._begin(args[-1])
        self._sleep("backward", args[-1], 2 * self._seconds)
        self._kept -= 1
        total = args[4]
        return total, self._like(1, *args)[1]

    def _begin(self, k: int) -> None:
        self._kept += 1
        self._most = max(self._most, self._kept)
        self._sleep("forward", k, self._seconds)

    def _sleep(self, action: str, k: int, seconds: float) -> None:
        began = time.time()
        time.sleep(seconds)
        self._actions.append((action, k, began, time.time()))

    def _like(self, which: int, *args: Any) -> Any:
        """Zeros like the result of the program."""
        *arrays, t, k = args
        if which not in self._outputs:
            program = self._computed[which]
            shapes = jax.eval_shape(lambda *given: program(*given, t, k), *arrays)
            shapes = (None, shapes[1]) if which else shapes  # not the gradients
            self._outputs[which] = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        return self._outputs[which]

    # --- Messages ---------------------------------------------------------------------------------

    def _note(self, key: Key) -> None:
        self._arrivals.append((key.kind, key.k, time.time()))
        if self._blocking:
            receipt = key._replace(kind=RECEIPT, sender=self._cell.stage)
            super()._send(key.sender, receipt, None)

    def _send(self, stage: int, key: Key, value: Any) -> None:
        super()._send(stage, key, value)
        if self._blocking:
            self._mailbox.take(key._replace(kind=RECEIPT, sender=stage), 600)
