"""A cell of the grid as an actor: one stage of one replica."""

import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from decent_jax.actors import handles, messages
from decent_jax.actors.messages import Address
from decent_jax.pipelines.cell import Cell, free_address, join, open_stage
from decent_jax.pipelines.messages import Channel, Key, Mailbox
from decent_jax.pipelines.worker import Worker, open_batches
from decent_jax.train.checkpoint import reason_of


class CellActor:
    """Ray calls its methods from threads of a pool; `train` and the like take one at a time.

    Args:
      cell: which one it is.
      secret: that stages of this run know.
    """

    def __init__(self, cell: Cell, secret: bytes):
        os.environ.setdefault("PJRT_NPROC", str(max(4, os.cpu_count() or 1)))  # messages wait in it
        self._cell, self._secret, self._mailbox = cell, secret, Mailbox()
        self._channels: list[Channel] = []
        # From when it is open: a `Stage`, its `Worker`, and what writes checkpoints.
        self._stage: Any = None
        self._worker: Any = None
        self._writer: Any = None

    def addresses(self) -> tuple[str, Address]:
        """A free port of its machine, as "host:port", where its replica 0 coordinates the stage;
        and where messages of other stages arrive."""
        host = handles.own_host()
        _, address = messages.listen(host, self._secret, self._mailbox.fill)
        return free_address(host), address

    def open(self, coordinator: str, addresses: list[Address]) -> None:
        """Start jax, and make the programs.

        Args:
          coordinator: the first of `addresses` of replica 0 of its stage.
          addresses: the second of `addresses` of the stages of its replica.
        """
        cluster, count = self._cell.config["cluster"], self._cell.config["num_replicas"]
        if count > 1:
            join(
                *(coordinator, count, self._cell.replica),
                cluster["exchange_s"],
                initialization_timeout=cluster["timeout_s"],
                # Later than `Cells`, which can say which cell is silent.
                heartbeat_timeout_seconds=2 * cluster["heartbeat_s"] + 10,
            )
        self._stage = open_stage(self._cell)
        self._channels = [Channel(address, self._secret) for address in addresses]

    def connect(self) -> None:
        """Exchange a number with the other replicas of the stage; called when all cells are open.

        gloo connects when processes first exchange something, and gives the slower one 30 s. That
        is too little if it compiles a large program meanwhile; this small one compiles at once.
        """
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("open")
        self._writer = ocp.StandardCheckpointer()

    def restore(self, checkpoint: Path, meta: dict[str, Any]) -> str:
        """Take its arrays from a checkpoint; returns why it cannot, or nothing."""
        try:
            self._stage.restore(checkpoint, meta)
        except Exception as error:  # orbax and tensorstore raise many kinds
            return f"{self._cell.name}: {reason_of(error)}"
        return ""

    def begin(self, start: int, ahead: int) -> None:
        """Make ready to train from step ``start``, whose data are those of ``start + ahead``."""
        batches = open_batches(self._stage, start + ahead)
        self._worker = Worker(self._stage, self._mailbox, self._send, batches)

    def train(self, start: int, stop: int, row: bool) -> Any:
        """See `Worker.train`."""
        return self._worker.train(start, stop, row)

    def evaluate(self) -> Any:
        """See `Worker.evaluate`."""
        return self._worker.evaluate()

    def save(self, draft: Path) -> dict[str, int]:
        """Copy its state, and let it be written while training goes on; see `Stage.save`."""
        return self._stage.save(self._writer, draft)

    def save_model(self, draft: Path) -> dict[str, int]:
        """The same with its part of the consensus model."""
        return self._stage.save_model(self._writer, draft)

    def saved(self) -> None:
        """Wait until what was saved is on the disk."""
        self._writer.wait_until_finished()

    def beat(self) -> int:
        """Its process id, as a sign of life."""
        return os.getpid()

    def _send(self, stage: int, key: Key, value: Any) -> None:
        self._channels[stage].send(key, value)
