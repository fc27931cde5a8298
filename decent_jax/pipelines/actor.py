"""A cell of the grid as a Ray actor: one stage of one replica."""

import os
import queue
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import ray

from decent_jax.cluster.start import limit_exchanges
from decent_jax.errors import PeerLost
from decent_jax.peers.setup import leave_launcher
from decent_jax.pipelines.messages import Key, Mailbox
from decent_jax.pipelines.setup import Cell


class Actor:
    """Ray calls its methods from threads of a pool; `train` and the like take one at a time.

    Args:
      cell: which one it is.
    """

    def __init__(self, cell: Cell):
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        words = os.open(cell.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(words, 1)
        os.dup2(words, 2)
        leave_launcher()
        os.environ.setdefault("PJRT_NPROC", str(max(4, os.cpu_count() or 1)))  # messages wait in it
        self._cell, self._mailbox = cell, Mailbox()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._broken: Exception | None = None
        self._worker: Any = None
        self._snapshot: list[dict[str, np.ndarray]] = []

    def address(self) -> str:
        """A free port of its machine, as "host:port"; its replica 0 coordinates the stage."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def open(
        self, coordinator: str, stages: list[Any], checkpoint: tuple[str, dict] | None, ahead: int
    ) -> None:
        """Start jax, and make the programs.

        Args:
          coordinator: what `address` of replica 0 of its stage gave.
          stages: the actors of its replica.
          checkpoint: folder and manifest to go on from, or None.
          ahead: data position minus step count, in steps.
        """
        import jax

        from decent_jax.pipelines import files
        from decent_jax.pipelines.setup import open_cell
        from decent_jax.pipelines.stage import Stage
        from decent_jax.pipelines.worker import Worker

        cluster, count = self._cell.config["cluster"], self._cell.config["num_replicas"]
        if count > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            limit_exchanges(cluster["exchange_s"])
            jax.distributed.initialize(
                *(coordinator, count, self._cell.replica),
                cluster_detection_method="deactivate",
                initialization_timeout=cluster["timeout_s"],
                # Later than `Watched`, which can say which cell is silent.
                heartbeat_timeout_seconds=2 * cluster["heartbeat_s"] + 10,
            )
        stage = Stage(*open_cell(self._cell))
        start = 0
        if checkpoint is not None:
            folder, meta = checkpoint
            files.restore(stage, Path(folder), meta)
            start = meta["step"]
        self._stages = stages
        threading.Thread(target=self._send_all, daemon=True).start()
        self._worker = Worker(stage, self._mailbox, self._send, start, ahead)

    def deliver(self, key: Key, value: Any) -> None:
        """A message of another stage."""
        self._mailbox.put(key, value)

    def train(self, start: int, stop: int, row: bool) -> Any:
        """See `Worker.train`."""
        return self._worker.train(start, stop, row)

    def evaluate(self) -> Any:
        """See `Worker.evaluate`."""
        return self._worker.evaluate()

    def snapshot(self) -> None:
        """Copy the state to the host; `write` writes this copy, while training goes on."""
        from decent_jax.pipelines import files

        self._snapshot = files.snapshot(self._worker.stage)

    def write(self, folder: str) -> None:
        """Write the copy of the state."""
        from decent_jax.pipelines import files

        (row,), self._snapshot = self._snapshot, []
        files.write_part(Path(folder), self._cell.stage, self._cell.replica, row)

    def write_model(self, folder: str) -> None:
        """Write this stage of the consensus model; all replicas of a stage must call it."""
        import jax

        from decent_jax.pipelines import files

        model = jax.tree.map(np.asarray, self._worker.stage.consensus_model())
        if self._cell.replica == 0:
            arrays = {f".params{name}": x for name, x in files.by_path(model).items()}
            files.write_part(Path(folder), self._cell.stage, 0, arrays)

    def beat(self) -> int:
        """Its process id: it lives."""
        return os.getpid()

    # --- Its own thread ---------------------------------------------------------------------------

    def _send(self, stage: int, key: Key, value: Any) -> None:
        if self._broken is not None:
            raise PeerLost(f"{self._cell.name} could not send: {self._broken}")
        self._outbox.put((stage, key, value))

    def _send_all(self) -> None:
        """Wait for the device, and push; meanwhile the other thread computes."""
        import jax

        while True:
            stage, key, value = self._outbox.get()
            try:
                on_host = jax.tree.map(np.asarray, value)
                self._stages[stage].deliver.remote(key, on_host)
            except Exception as error:  # told by the next message, in the thread that trains
                self._broken = error
                return
