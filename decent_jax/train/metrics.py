"""The numbers of a run: rows of metrics.jsonl, and their copies elsewhere.

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
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.json_files import plain, write_atomic
from decent_jax.run_folder import METRICS, read_metrics


class MetricWriter:
    """Appends scalars to `workdir/metrics.jsonl`; steps are unique and never go back.

    A row is with the operating system when `write` returns, so a killed process loses nothing; a
    second `write` of the same step is merged into its row. `close` also puts them on the disk.

    When the file exists (a resumed run), a torn last line and the rows past `start_step` are
    dropped first: the run is about to write those steps again.

    Not-a-number and the infinities are written as the strings "NaN", "Infinity" and "-Infinity",
    so that every line is strict JSON; `read_metrics` turns them back into floats.

    Args:
      workdir: the run directory; made where it is missing.
      tensorboard, wandb: also write there.
      start_step: see above.
      quiet: write nothing at all; for every process but the first.

    Raises:
      ImportError: tensorboardX or wandb is not installed.
      ValueError: the file is damaged.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        tensorboard: bool = False,
        wandb: bool = False,
        start_step: int = 0,
        quiet: bool = False,
    ):
        self._mirrors = []  # the same scalars elsewhere
        self._file = None
        if quiet:
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        if tensorboard:
            self._mirrors.append(_TensorBoard(workdir, start_step))
        if wandb:
            self._mirrors.append(_WandB(workdir))
        path = workdir / METRICS
        rows = read_metrics(path) if path.exists() else []
        kept = [row for row in rows if row["step"] <= start_step]
        write_atomic(path, b"".join(map(_line, kept)))
        self._row = kept[-1] if kept else {"step": -1}
        self._file = path.open("r+b")
        end = self._file.seek(0, os.SEEK_END)
        self._row_start = end - len(_line(self._row)) if kept else end

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        """Write one number under each name (a Python, NumPy or JAX scalar) for this step."""
        if self._file is None:
            return
        step, last = int(step), self._row["step"]
        scalars = {name: _number(name, value) for name, value in scalars.items()}
        if step < last:
            raise ValueError(f"metrics of step {step} come after those of step {last}.")
        if step == last:
            self._row |= scalars
            self._file.seek(self._row_start)
        else:
            self._row = {"step": step} | scalars
            self._row_start = self._file.seek(0, os.SEEK_END)
        self._file.write(_line(self._row))  # over the old row if there is one, in one system call
        self._file.truncate()  # flushes first; cuts only where the merged row is shorter
        for mirror in self._mirrors:
            mirror.write(step, scalars)

    def close(self) -> None:
        """Put every row on the disk, and close; closing twice is harmless."""
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        for mirror in self._mirrors:
            mirror.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class _TensorBoard:
    """The same scalars as event files in `workdir/tensorboard`."""

    def __init__(self, workdir: Path, start_step: int):
        from tensorboardX import SummaryWriter

        # purge_step hides what an earlier session wrote past the step it is resumed from.
        self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """The same scalars in a Weights & Biases run; a resumed run continues it."""

    def __init__(self, workdir: Path):
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = workdir / "wandb_run_id.txt"
        if not id_file.exists():
            write_atomic(id_file, uuid.uuid4().hex.encode())
        config = workdir / "config.json"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "decent_jax"),
            name=workdir.resolve().name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(workdir),
            config=json.loads(config.read_text()) if config.exists() else None,
        )

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


def _number(name, value):
    """`value` as the plain int or float that is written in the fewest digits."""
    if name == "step":
        raise ValueError("'step' names the step of a row and cannot name a metric.")
    if isinstance(value, str) or np.size(value) != 1:
        shape = "text" if isinstance(value, str) else f"of shape {np.shape(value)}"
        raise ValueError(f"metric {name!r} must be one number, it is {shape}.")
    array = np.asarray(value).reshape(())
    if array.dtype.kind in "iub":
        return int(array)
    return float(str(array[()]))  # float32 2.3 is written 2.3 and not 2.299999952316284


def _line(row):
    return json.dumps(plain(row), allow_nan=False).encode() + b"\n"
