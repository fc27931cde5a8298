"""The steps of a stage: the order of its micro-batches, its messages, and its updates."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.data import loader
from decent_jax.ground import connections
from decent_jax.ground.connections import Address
from decent_jax.ground.errors import PeerLost
from decent_jax.ground.pytree import PyTree
from decent_jax.pipelines.part import TABLE, total_norm
from decent_jax.pipelines.stage import Stage
from decent_jax.plan import orders
from decent_jax.train.evaluation import eval_batches
from decent_jax.train.experiment import train_batches


class Key(NamedTuple):
    """The identity of a message, equal at its sender and its receiver."""

    kind: str
    t: int  # step
    k: int  # micro-batch
    sender: int  # stage


class Mailbox:
    """Messages for one stage, which one thread puts in and another takes out."""

    def __init__(self):
        self._messages: dict[Key, PyTree] = {}
        self._changed = threading.Condition()

    def put(self, key: Key, value: PyTree) -> None:
        """Keep a message until it is taken."""
        with self._changed:
            self._messages[key] = value
            self._changed.notify_all()

    def take(self, key: Key, seconds: float) -> PyTree:
        """Wait for a message, then remove and return it.

        Raises:
          PeerLost: it did not arrive within ``seconds``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._messages, seconds):
                raise PeerLost(
                    f"stage {key.sender} has sent no {key.kind} of step {key.t} within "
                    f"cluster.exchange_s ({seconds:g} s)"
                )
            return self._messages.pop(key)

    def fill(self, connection: Connection) -> None:
        """Put in all messages of a `Channel` from this connection, until it ends."""
        while True:
            key, value = connections.receive(connection)
            self.put(Key(*key), value)


class Channel:
    """Sends messages to one stage, in order; a thread waits for the device and the network.

    Args:
      address: address at which the stage listens; the first message opens the connection.
      secret: shared by the workers of the run.
    """

    def __init__(self, address: Address, secret: bytes):
        self._address, self._secret = address, secret
        self._messages: queue.SimpleQueue[tuple[Key, PyTree]] = queue.SimpleQueue()
        self._broken: Exception | None = None
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, key: Key, value: PyTree) -> None:
        """Send None, or a tree of tuples, dicts and arrays, which need not be computed yet.

        Raises:
          PeerLost: an earlier message could not be sent.
        """
        if self._broken is not None:
            raise PeerLost(f"{key.kind} of step {key.t} could not be sent: {self._broken}")
        self._messages.put((key, value))

    def _send_all(self) -> None:
        try:
            key, value = self._messages.get()
            with connections.connect(self._address, self._secret) as connection:
                while True:
                    connections.send(connection, key, value)
                    key, value = self._messages.get()
        except Exception as error:  # raised by the next message, in the training thread
            self._broken = error


Send = Callable[[int, Key, PyTree], None]  # to a stage of the same replica; does not wait


class Span(NamedTuple):
    """A stage's report on several steps; arrays are (L,), one entry per replica of the process."""

    losses: list[np.ndarray]  # per step
    norms: list[np.ndarray]  # per step, of the gradient over all stages
    skipped: np.ndarray  # see `Stage.skipped`
    failing: np.ndarray  # see `Stage.skipped`
    distance: np.ndarray | None  # see `Stage.consensus`; None if not requested
    waited: float  # seconds spent waiting for batches
    seconds: dict[str, float]  # of the last timed gradient; see `StageExecutor`


def open_batches(stage: Stage, start: int) -> loader.Batches | None:
    """The batches of a stage from step ``start`` on; None if it reads neither tokens nor
    targets."""
    if not (stage.part.is_first or stage.part.is_last):
        return None
    return train_batches(stage.config, stage.part.task, stage.placement, start)


class StageExecutor:
    """Trains one stage of the replicas of this process.

    Args:
      stage: the programs and the state of the stage.
      mailbox: messages from other stages.
      send: function that sends a message to another stage.
      batches: tokens of this process's rows for each step, if the stage reads them; see
        `open_batches`.
    """

    def __init__(
        self, stage: Stage, mailbox: Mailbox, send: Send, batches: Iterator[PyTree] | None = None
    ):
        self.stage, self._mailbox, self._send = stage, mailbox, send
        self.config, self.part = stage.config, stage.part
        self._stages = len(self.part.counts)
        self._evaluations = itertools.count()
        pipeline = self.config.pipeline
        cuts = self._micro_batches = pipeline.micro_batches
        self._order = orders.order(pipeline.order, self._stages, cuts, self.part.stage)
        self._batches = batches
        self._waited = 0.0  # for batches, in the current steps
        self._latest: PyTree = None  # last dispatched result of the current gradient
        self._timed, self._missed, self._seconds = False, 0.0, {}  # see `_timed_gradient`

    # --- Training ---------------------------------------------------------------------------------

    def train(self, start: int, stop: int, row: bool) -> Span:
        """Make the steps ``start`` to ``stop - 1``; ``row``: whether to measure for a row."""
        self._waited = 0.0
        steps = [self._step(t, timed=row and t == stop - 1) for t in range(start, stop)]
        losses, norms = ([step[i] for step in steps] for i in (0, 1))
        distance = self.stage.consensus() if row else None
        return Span(losses, norms, *self.stage.skipped(), distance, self._waited, self._seconds)

    def _step(self, t: int, timed: bool) -> tuple[np.ndarray, np.ndarray]:
        """Make step ``t``; returns (L,) losses and gradient norms."""
        stage = self.stage
        synchronous = self.config.algorithm == "all_reduce"
        rnd = None if synchronous else stage.schedule.round_at(t, self.config.mix_every)
        mixed = stage.begin_mix(rnd)  # overlaps the micro-batches
        loss, grads = self._timed_gradient(t) if timed else self.gradient(t)
        value = loss
        if synchronous:
            value, grads = stage.mean(loss, grads)
        loss, value, norm = self._exchange((loss, value, stage.squares(grads)), t)
        stage.update(value, norm, grads, rnd, mixed)
        return loss, norm

    def gradient(self, t: int) -> tuple[PyTree, PyTree]:
        """(L,) losses over the batches of step ``t``, and gradients (L, ...) of this stage."""
        stage, part = self.stage, self.part
        params = stage.rows(stage.state.params)
        borrowed = self._lend(params, "table", t)
        loss, (grads, back) = self._forward_backward(params, borrowed, t)
        if part.borrows:
            self._send(0, self._key("table gradient", t), back[TABLE])
        if part.lends:
            table = self._take("table gradient", t, sender=self._stages - 1)
            grads = {**grads, TABLE: jax.tree.map(lambda a, b: a + b, grads[TABLE], table)}
        self._latest = None
        return loss, grads

    def _timed_gradient(self, t: int) -> tuple[PyTree, PyTree]:
        """As `gradient`; measures how long this stage computes, and waits for other stages."""
        self._timed, self._missed, waited = True, 0.0, self._waited
        began = time.monotonic()
        result = jax.block_until_ready(self.gradient(t))
        seconds = time.monotonic() - began - (self._waited - waited)
        self._timed = False
        self._seconds = {"compute_s": seconds - self._missed, "wait_s": self._missed}
        return result

    def _forward_backward(self, params: PyTree, borrowed: PyTree, t: int) -> PyTree:
        """Forward and backward pass of all micro-batches; (loss, gradients) as in `Stage.zeros`."""
        stage, part = self.stage, self.part
        began = time.monotonic()
        tokens = next(self._batches) if self._batches is not None else None
        self._waited += time.monotonic() - began
        total = stage.zeros(params, borrowed)
        inputs: dict[int, PyTree] = {}
        for action, k in self._order:
            cut = None if tokens is None else tokens[:, k :: self._micro_batches]
            if action == "forward":
                x = None if part.is_first else self._take("activation", t, k, part.stage - 1)
                inputs[k] = x
                if not part.is_last:  # the backward pass of the last stage computes the loss
                    self._latest = stage.forward(params, borrowed, x, cut, t, k)
                    self._send(part.stage + 1, self._key("activation", t, k), self._latest)
                continue
            dy = None if part.is_last else self._take("gradient", t, k, part.stage + 1)
            total, dx = stage.backward(params, borrowed, inputs.pop(k), cut, total, dy, t, k)
            self._latest = total
            if not part.is_first:
                self._send(part.stage - 1, self._key("gradient", t, k), dx)
        return total

    def _exchange(self, own: PyTree, t: int) -> PyTree:
        """Exchange losses and sums of squares between stages; returns losses and gradient norms.

        All stages of a replica must clip by the same norm, and all accept or all reject the update.
        """
        own = jax.tree.map(np.asarray, own)
        parts = {self.part.stage: own}
        others = [s for s in range(self._stages) if s != self.part.stage]
        for other in others:
            self._send(other, self._key("norm", t), own)
        for other in others:
            parts[other] = self._take("norm", t, sender=other)
        losses, values, _ = parts[self._stages - 1]
        rows = zip(*(parts[s][2] for s in range(self._stages)), strict=True)
        norms = [total_norm([float(squares) for squares in row]) for row in rows]
        return losses, values, np.array(norms, np.float32)

    def _lend(self, params: PyTree, kind: str, t: int) -> PyTree:
        """Send or receive the shared table, if any; returns what this stage borrows."""
        if self.part.lends:
            copy = {TABLE: jax.tree.map(jnp.copy, params[TABLE])}  # the update donates the table
            self._send(self._stages - 1, self._key(kind, t), copy)
        return self._take(kind, t, sender=0) if self.part.borrows else {}

    # --- Evaluation -------------------------------------------------------------------------------

    def evaluate(self) -> np.ndarray | None:
        """Evaluate the consensus model on the validation source.

        Returns:
          From the last stage, (2,): sum and number of losses in this process's rows; else None.
        """
        stage, part = self.stage, self.part
        number, allowed = next(self._evaluations), 2 * self._stages  # batches in flight
        model = stage.consensus_model()
        borrowed = self._lend(model, "table to evaluate", number)
        total = np.zeros(2)
        with eval_batches(self.config, part.task, stage.placement) as batches:
            for k, (tokens, weights) in enumerate(batches):
                tokens, weights = (x.reshape(-1, *x.shape[2:]) for x in (tokens, weights))
                if part.is_first and not part.is_last and k >= allowed:
                    self._take("credit", number, k - allowed, self._stages - 1)
                x = None
                if not part.is_first:
                    x = self._take("evaluated activation", number, k, part.stage - 1)
                y = stage.evaluate(model, borrowed, x, tokens, weights)
                if not part.is_last:
                    self._send(part.stage + 1, self._key("evaluated activation", number, k), y)
                    continue
                total += np.array(jax.device_get(y))
                if not part.is_first:
                    self._send(0, self._key("credit", number, k), None)
            if part.is_first and not part.is_last:  # leave none for the next evaluation
                for j in range(max(0, k + 1 - allowed), k + 1):
                    self._take("credit", number, j, self._stages - 1)
        return total if part.is_last else None

    # --- Data and messages ------------------------------------------------------------------------

    def _key(self, kind: str, t: int, k: int = 0) -> Key:
        return Key(kind, t, k, self.part.stage)

    def _take(self, kind: str, t: int, k: int = 0, sender: int = 0) -> PyTree:
        if self._timed:
            jax.block_until_ready(self._latest)
        began = time.monotonic()
        message = self._mailbox.take(Key(kind, t, k, sender), self.config.cluster.exchange_s)
        self._missed += time.monotonic() - began
        return message
