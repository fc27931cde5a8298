"""Metrics on disk: one JSON object a line, and TensorBoard or Weights & Biases when asked for.

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
import math
import os
import uuid
from pathlib import Path

import numpy as np

from decent_jax.json_files import plain, write_atomic

FILE_NAME = "metrics.jsonl"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricWriter:
    """Appends scalars to `workdir/metrics.jsonl`; steps are unique and never go back.

    A row is with the operating system when `write` returns, so a killed process loses nothing; a
    second `write` of the same step is merged into its row. `flush` also puts it on the disk.

    When the file exists (a resumed run), a torn last line and the rows past `start_step` are
    dropped first: the run is about to write those steps again.

    Not-a-number and the infinities are written as the strings "NaN", "Infinity" and "-Infinity",
    so that every line is strict JSON; `read_metrics` turns them back into floats.
    """

    def __init__(self, workdir, *, tensorboard=False, wandb=False, start_step=0):
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._mirrors = []  # the same scalars elsewhere
        if tensorboard:
            self._mirrors.append(_TensorBoard(workdir, start_step))
        if wandb:
            self._mirrors.append(_WandB(workdir))
        path = workdir / FILE_NAME
        rows = read_metrics(path) if path.exists() else []
        kept = [row for row in rows if row["step"] <= start_step]
        write_atomic(path, b"".join(map(_line, kept)))
        self._row = kept[-1] if kept else None
        self._file = path.open("r+b")
        end = self._file.seek(0, os.SEEK_END)
        self._row_start = end - len(_line(self._row)) if kept else end

    def write(self, step, scalars):
        """Write one number under each name (a Python, NumPy or JAX scalar) for this step."""
        step = int(step)
        scalars = {name: _number(name, value) for name, value in scalars.items()}
        last = self._row["step"] if self._row else -1
        if step < last:
            raise ValueError(f"metrics of step {step} come after those of step {last}.")
        if step == last:
            row = self._row | scalars
            self._file.seek(self._row_start)
        else:
            row = {"step": step} | scalars
            self._row_start = self._file.seek(0, os.SEEK_END)
        self._file.write(_line(row))  # over the old row where there is one, in one system call
        self._file.truncate()  # flushes first; cuts only where the merged row is shorter
        self._row = row
        for mirror in self._mirrors:
            mirror.write(step, scalars)

    def flush(self):
        """Put every row on the disk: after this, not even a power failure loses them."""
        self._file.flush()
        os.fsync(self._file.fileno())
        for mirror in self._mirrors:
            mirror.flush()

    def close(self):
        """Flush and close; closing twice is harmless."""
        if self._file.closed:
            return
        self.flush()
        self._file.close()
        for mirror in self._mirrors:
            mirror.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class NullWriter:
    """Has the methods of `MetricWriter` and writes nothing: for every process but the first."""

    def write(self, step, scalars):
        """Do nothing."""

    def flush(self):
        """Do nothing."""

    def close(self):
        """Do nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def read_metrics(path):
    """The rows of a metrics file (or of the run folder that has one), as a list of dicts.

    A torn last line, left by a process killed while writing it, is ignored; any other line that
    is not a row raises `ValueError`.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row.get("step"), int):
                raise ValueError
        except (ValueError, AttributeError):
            if number == len(lines):
                break
            raise ValueError(f"{path} line {number} is not a JSON object with a step.") from None
        rows.append({k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()})
    return rows


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


class _TensorBoard:
    """The same scalars as event files in `workdir/tensorboard`."""

    def __init__(self, workdir, start_step):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard output needs tensorboardX: pip install 'decent_jax[tensorboard]'."
            ) from error
        # purge_step hides what an earlier session wrote past the step it is resumed from.
        self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def write(self, step, scalars):
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def flush(self):
        self._writer.flush()

    def close(self):
        self._writer.close()


class _WandB:
    """The same scalars in a Weights & Biases run, which a resumed run continues."""

    def __init__(self, workdir):
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                "Weights & Biases output needs wandb: pip install 'decent_jax[wandb]'."
            ) from error
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

    def write(self, step, scalars):
        self._run.log(scalars, step=step)

    def flush(self):
        """Its own thread sends what is logged."""

    def close(self):
        self._run.finish()
