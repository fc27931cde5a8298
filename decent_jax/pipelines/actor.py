"""A cell of the grid as a Ray actor: one stage of one replica."""

import os
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import ray
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from decent_jax.peers.setup import enter
from decent_jax.pipelines.channels import Address, Channel, Door, Key, Mailbox
from decent_jax.pipelines.setup import Cell, free_address, join, open_cell
from decent_jax.pipelines.stage import Stage
from decent_jax.pipelines.worker import Worker
from decent_jax.train.checkpoint_folder import reason_of


class Actor:
    """Ray calls its methods from threads of a pool; `train` and the like take one at a time.

    Args:
      cell: which one it is.
    """

    def __init__(self, cell: Cell):
        enter(cell.log, cell.launched_from)
        os.environ.setdefault("PJRT_NPROC", str(max(4, os.cpu_count() or 1)))  # messages wait in it
        self._cell, self._mailbox = cell, Mailbox()
        self._door: Door | None = None
        self._channels: list[Channel] = []
        # From when it is open: a `Stage`, its `Worker`, and what writes checkpoints.
        self._stage: Any = None
        self._worker: Any = None
        self._writer: Any = None

    def addresses(self, secret: bytes) -> tuple[str, Address]:
        """A free port of its machine, as "host:port", where its replica 0 coordinates the stage;
        and where messages of stages that know the secret arrive."""
        host = ray.util.get_node_ip_address()
        self._door = Door(host, secret, lambda key, value: self.deliver(key, value))
        return free_address(host), self._door.address

    def open(self, coordinator: str, doors: list[Address], secret: bytes) -> None:
        """Start jax, and make the programs.

        Args:
          coordinator: the first of `addresses` of replica 0 of its stage.
          doors: the second of `addresses` of the stages of its replica.
          secret: that `addresses` got.
        """
        cluster, count = self._cell.config["cluster"], self._cell.config["num_replicas"]
        if count > 1:
            join(
                *(coordinator, count, self._cell.replica),
                cluster["exchange_s"],
                initialization_timeout=cluster["timeout_s"],
                # Later than `Watched`, which can say which cell is silent.
                heartbeat_timeout_seconds=2 * cluster["heartbeat_s"] + 10,
            )
        self._stage = Stage(*open_cell(self._cell))
        if count > 1:
            _meet(cluster["timeout_s"])
        self._writer = ocp.StandardCheckpointer()
        self._channels = [Channel(door, secret) for door in doors]

    def restore(self, checkpoint: Path, meta: dict[str, Any]) -> str:
        """Take its arrays from a checkpoint; returns why it cannot, or nothing."""
        try:
            self._stage.restore(checkpoint, meta)
        except Exception as error:  # orbax and tensorstore raise many kinds
            return f"{self._cell.name}: {reason_of(error)}"
        return ""

    def begin(self, start: int, ahead: int) -> None:
        """Make ready to train from step ``start``, whose data are those of ``start + ahead``."""
        self._worker = Worker(self._stage, self._mailbox, self._send, start, ahead)

    def deliver(self, key: Key, value: Any) -> None:
        """A message of another stage."""
        self._mailbox.put(key, value)

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


def _meet(timeout_s: int) -> None:
    """Wait for the other replicas of the stage, and exchange a number.

    gloo connects when processes first exchange something, and gives the slower one 30 s. That is
    too little if it compiles a large program meanwhile; this small one compiles at once.
    """
    client: Any = global_state.client
    client.wait_at_barrier("decent_jax: the stage is open", 1000 * timeout_s)
    multihost_utils.sync_global_devices("open")
