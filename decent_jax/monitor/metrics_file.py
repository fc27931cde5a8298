"""metrics.jsonl: the rows of a run, which trackers also receive.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as workdir:
...     with MetricWriter(workdir) as writer:
...         writer.write(10, {"train/loss": 2.5})
...         writer.write(10, {"eval/loss": 2.25})  # the same step: one row
...         writer.write(20, {"train/loss": float("nan")})
...     read_metrics(workdir)
[{'step': 10, 'train/loss': 2.5, 'eval/loss': 2.25}, {'step': 20, 'train/loss': nan}]
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from decent_jax.ground.fields import changeable
from decent_jax.ground.json_files import Json, plain, write_atomic
from decent_jax.ground.run_folder import METRICS, read_metrics
from decent_jax.monitor.trackers import Trackers


@dataclass(frozen=True)
class Log:
    """The rows of metrics.jsonl, and trackers that also receive them."""

    every: int = changeable(10, "steps per row of metrics.jsonl", at_least=1)
    trackers: str = changeable("", "tensorboard, wandb or your own classes; comma-separated")


class MetricWriter:
    """Appends scalars to `workdir/metrics.jsonl`; steps are unique and increase.

    A row has reached the operating system when `write` returns, so a killed process loses nothing;
    a second `write` of the same step is merged into its row. `close` also syncs the file to disk.

    If the file exists, as in a resumed run, a torn last line and the rows past `start_step` are
    dropped first, because the run will write those steps again.

    NaN and the infinities are written as the strings "NaN", "Infinity" and "-Infinity", so that
    every line is strict JSON; `read_metrics` turns them back into floats.

    Args:
      workdir: the run directory, created if it is missing.
      trackers: the trackers that also receive every row, or None.
      start_step: the step after which the run continues, see above.
      quiet: whether to write nothing, as in every process but the first.

    Raises:
      ValueError: the file is damaged.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        trackers: Trackers | None = None,
        start_step: int = 0,
        quiet: bool = False,
    ):
        self._trackers, self._file = trackers, None
        if quiet:
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / METRICS
        rows = read_metrics(path) if path.exists() else []
        before = [row for row in rows if row["step"] <= start_step]
        write_atomic(path, b"".join(map(_line, before)))
        self._row = before[-1] if before else {"step": -1}
        self._file = path.open("r+b")
        end = self._file.seek(0, os.SEEK_END)
        self._row_start = end - len(_line(self._row)) if before else end

    def write(self, step: int, scalars: Json) -> None:
        """Write one number under each name (a Python, NumPy or JAX scalar) for this step."""
        if self._file is None:
            return
        step = int(step)
        scalars = {name: _number(value) for name, value in scalars.items()}
        if step == self._row["step"]:
            self._row |= scalars
            self._file.seek(self._row_start)
        else:
            self._row = {"step": step} | scalars
            self._row_start = self._file.seek(0, os.SEEK_END)
        self._file.write(_line(self._row))  # over an existing row, in one system call
        self._file.truncate()  # flushes first; truncates only if the merged row is shorter
        if self._trackers is not None:
            self._trackers.log(scalars, step)

    def close(self) -> None:
        """Sync every row to disk and close; closing twice is harmless."""
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _number(value: ArrayLike) -> int | float:
    """`value`, of one element, as the int or float with the fewest digits."""
    array = np.asarray(value).reshape(())
    if array.dtype.kind in "iub":
        return int(array)
    return float(str(array[()]))  # float32 2.3 is written as 2.3, not 2.299999952316284


def _line(row):
    return json.dumps(plain(row), allow_nan=False).encode() + b"\n"
