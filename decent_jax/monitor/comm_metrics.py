"""Communication time and bytes, as each process of a run measures them."""

import contextlib
import socket
import time
from pathlib import Path
from typing import NamedTuple

import jax

from decent_jax.ground import machine
from decent_jax.ground.json_files import overwrite_json
from decent_jax.monitor.run_state import PROCESSES


class Times(NamedTuple):
    """Seconds of the two concurrent parts of one step.

    gradient_s: of the forward and backward pass, or of all steps that a delayed message overlaps.
    message_s: until the messages of the other processes have arrived and are mixed, including the
        wait for stragglers.
    """

    gradient_s: float
    message_s: float

    @property
    def exposed_s(self) -> float:
        """Exposed communication: how long the update waited for messages."""
        return max(0.0, self.message_s - self.gradient_s)

    def entries(self) -> dict[str, float]:
        """Entries of a row of ``metrics.jsonl``."""
        entries = self._asdict() | {"exposed_s": self.exposed_s}
        return {f"comm/{name}": seconds for name, seconds in entries.items()}


class CommMetrics:
    """Collects the seconds of timed steps and the bytes that the kernel has counted.

    In a run of several processes, each of them also writes its latest numbers to a file,
    ``processes/NAME.json``. A run of one process records neither bytes nor a file.

    Args:
      folder: the run directory.
      worker: name of a pipeline worker; "": a process of `train.py`, named by its index.

    Attributes:
      measured: seconds of the last timed step by name, see `decent_jax.cpu.overlap`.
    """

    def __init__(self, folder: Path, worker: str = ""):
        self._path = folder / PROCESSES / f"{worker or jax.process_index()}.json"
        self._several = bool(worker) or jax.process_count() > 1
        self._sent = machine.sent_bytes()
        self.measured: dict[str, float] = {}

    def row(self, step: int, steps: int) -> dict[str, float]:
        """This process's entries for the row of ``step``, ``steps`` steps after the last row."""
        entries = dict(self.measured)
        if not self._several:
            return entries
        before, self._sent = self._sent, machine.sent_bytes()
        for kind, count in before.items():
            entries[f"comm/{kind}_bytes"] = (self._sent[kind] - count) / steps
        now = {"host": socket.gethostname(), "step": step, "date": time.time()}
        with contextlib.suppress(OSError):  # a folder that other hosts cannot write
            self._path.parent.mkdir(exist_ok=True)
            overwrite_json(self._path, now | entries)
        return entries
