"""What the messages of a run of several processes take, as each of them measures it."""

import contextlib
import socket
import time
from pathlib import Path
from typing import NamedTuple

import jax

from decent_jax.ground import machine
from decent_jax.ground.json_files import overwrite_json
from decent_jax.ground.run_state import PROCESSES


class Times(NamedTuple):
    """Seconds of the two halves of one step, which run beside each other.

    gradient_s: of the forward and backward pass, or of the steps beside which a message travels.
    message_s: until the messages of the others had come and were mixed; it includes waiting for a
        process that was late.
    """

    gradient_s: float
    message_s: float

    @property
    def exposed_s(self) -> float:
        """For how long the update had to wait for messages."""
        return max(0.0, self.message_s - self.gradient_s)

    def entries(self) -> dict[str, float]:
        """Of a row."""
        found = self._asdict() | {"exposed_s": self.exposed_s}
        return {f"comm/{name}": seconds for name, seconds in found.items()}


class Traffic:
    """Seconds of timed steps, bytes by the kernel's counters, and a file for each process.

    A run of one process has neither bytes nor a file.

    Args:
      folder: of the run; every process writes its newest numbers to ``processes/NAME.json``.
      cell: name of a cell of pipelines; "": a process of `train.py`, whose name is its number.

    Attributes:
      measured: seconds by name, of the newest step that was timed (`decent_jax.cpu.overlap`,
        `decent_jax.pipelines.worker`).
    """

    def __init__(self, folder: Path, cell: str = ""):
        self._path = folder / PROCESSES / f"{cell or jax.process_index()}.json"
        self._several = bool(cell) or jax.process_count() > 1
        self._sent = machine.sent_bytes()
        self.measured: dict[str, float] = {}

    def row(self, step: int, steps: int) -> dict[str, float]:
        """What a row of ``metrics.jsonl`` says of this process, after ``steps`` steps more."""
        found = dict(self.measured)
        if not self._several:
            return found
        before, self._sent = self._sent, machine.sent_bytes()
        for kind, count in before.items():
            found[f"comm/{kind}_bytes"] = (self._sent[kind] - count) / steps
        now = {"host": socket.gethostname(), "step": step, "date": time.time()}
        with contextlib.suppress(OSError):  # a folder that other hosts cannot write
            self._path.parent.mkdir(exist_ok=True)
            overwrite_json(self._path, now | found)
        return found
