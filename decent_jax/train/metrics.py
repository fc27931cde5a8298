"""The numbers of a run: rows of metrics.jsonl and their copies, the clock, a report.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as workdir:
...     with MetricWriter(workdir) as writer:
...         writer.write(10, {"train/loss": 2.5})
...         writer.write(10, {"eval/loss": 2.25})  # the same step: one row
...         writer.write(20, {"train/loss": float("nan")})
...     read_metrics(workdir)
[{'step': 10, 'train/loss': 2.5, 'eval/loss': 2.25}, {'step': 20, 'train/loss': nan}]
"""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from decent_jax import optim, replicas
from decent_jax.ground.errors import TrainingFailed
from decent_jax.ground.format import format_number
from decent_jax.ground.json_files import plain, write_atomic
from decent_jax.ground.progress import Progress
from decent_jax.ground.run_folder import METRICS, read_metrics
from decent_jax.replicas import Placement
from decent_jax.tasks import Task

DRIFT_FACTOR = 3.0  # a replica this many times as far from the mean as the median one drifts


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


class Clock:
    """Seconds of training, without the pauses for evaluation, saving and compiling.

    Attributes:
      seconds: of all rows so far, in this session and those before.
      waited: for data, since the last row.
    """

    def __init__(self, seconds: float):
        self.seconds, self.waited = seconds, 0.0
        self._began, self._paused = time.monotonic(), 0.0

    def restart(self) -> None:
        """Begin a row here."""
        self.waited, self._began, self._paused = 0.0, time.monotonic(), 0.0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose time does not count."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._paused += time.monotonic() - began

    def lap(self) -> tuple[float, float]:
        """(seconds, seconds waited for data) of the row that ends here; begins the next."""
        seconds = max(time.monotonic() - self._began - self._paused, 1e-9)
        waited = self.waited
        self.seconds += seconds
        self.restart()
        return seconds, waited


class Report:
    """Waits for the steps, one step late; writes their rows, shows them, tells what goes wrong.

    Args:
      config: of the run.
      task: names the unit of throughput.
      placement: where the replicas live.
      state: at the start.
      clock: of the run.
      writer: gets the rows.
      progress: shows their numbers, and what goes wrong.
      measured: ``(steps)`` to the task's own measurements of the batches of so many steps.
      newest: ``()`` to words about the newest checkpoint.
    """

    def __init__(
        self,
        config: ConfigDict,
        task: Task,
        placement: Placement,
        state: Any,
        *,
        clock: Clock,
        writer: MetricWriter,
        progress: Progress,
        measured: Callable[[int], dict[str, float]],
        newest: Callable[[], str],
    ):
        self._config, self._task, self._clock = config, task, clock
        self._writer, self._progress = writer, progress
        self._measured, self._newest = measured, newest
        replicated = placement.replicated
        self._add = jax.jit(_add)
        self._summarize = jax.jit(_summarize, out_shardings=replicated)
        self._distance = jax.jit(replicas.consensus_distance, out_shardings=replicated)
        self._average = jax.jit(
            lambda params, weights: placement.place_all(
                replicas.resize(params, placement.num_replicas, weights)
            ),
            donate_argnums=0,
        )
        self._sums = None  # of the steps since the last row
        self._compiled = False
        self._pending = None  # (steps done, metrics, their summary where a row is due)
        self._steps = 0  # since the last row
        counts = jax.jit(jnp.copy, out_shardings=replicated)
        self._skipped = np.asarray(counts(state.opt_state.skipped))  # (n,) as last reported
        self._drifting: int | None = None  # the replica last reported, until it is back

    def pend(self, done: int, metrics: Any, params: Any) -> None:
        """Look at this step later; with ``params`` for a row, whose reductions start now."""
        self._steps += 1
        summary = None
        with contextlib.nullcontext() if self._compiled else self._clock.pause():
            self._sums = self._add(self._sums, metrics)
            if params is not None:
                summary = self._summarize(self._sums, metrics), self._distance(params)
                self._sums, self._compiled = None, True
        self._pending = done, metrics, summary

    def look_at_pending(self) -> bool:
        """Wait for the step, write its row; whether its consensus distance is past the bound.

        Raises:
          TrainingFailed: no replica has made progress in ``config.max_failing_steps``.
        """
        if self._pending is None:
            return False
        (done, metrics, summary), self._pending = self._pending, None
        jax.block_until_ready(metrics)
        if summary is None:
            self._progress.update(done)
            return False
        numbers, consensus = jax.device_get(summary)
        skipped, failing = numbers.pop("skipped"), int(numbers.pop("failing"))
        steps, self._steps = self._steps, 0
        seconds, waited = self._clock.lap()
        rate = self._config.batch_size * self._task.units_per_example * steps / seconds
        row = {f"train/{name}": value for name, value in numbers.items()}
        row |= {
            "train/consensus_distance": float(consensus.distance),
            "train/consensus_distance_relative": float(consensus.relative),
            "perf/step_time_s": seconds / steps,
            f"perf/{self._task.unit}_per_s": rate,
            "perf/data_wait_s": waited / steps,
            "perf/wall_time_s": self._clock.seconds,
        }
        row |= self._measured(steps)
        past_bound = self._look_at(done, consensus, failing, skipped)
        self._writer.write(done, row)
        self._progress.update(done, shown(row, self._task.unit))
        return past_bound

    def average(self, state: Any) -> Any:
        """The `TrainState` with all replicas at their mean; donates the old parameters."""
        weights = optim.consensus_weights(state.opt_state)
        return state._replace(params=self._average(state.params, weights))

    def _look_at(
        self, done: int, consensus: replicas.Consensus, failing: int, skipped: np.ndarray
    ) -> bool:
        """Tell of skipped updates, drift and the bound; whether the distance is past it.

        ``failing`` are steps in a row without a finite update on any replica, ``skipped``, (n,),
        the updates that each has rejected so far.
        """
        new, self._skipped = skipped - self._skipped, skipped
        if new.any():
            self._progress.note(
                f"step {done}: {new.sum()} updates were not finite and were skipped (replica "
                f"{new.argmax()} most); {skipped.sum()} since the start"
            )
        if failing >= self._config.max_failing_steps:
            raise TrainingFailed(
                f"no replica has made a finite update in the last {failing} steps, up to step "
                f"{done}; {self._newest()}. Lower the learning rate, or clip gradients "
                "(optimizer.clip_norm)"
            )
        self._look_for_drift(done, np.asarray(consensus.per_replica))
        bound = self._config.max_consensus_distance
        past_bound = bool(bound) and not consensus.relative <= bound
        if past_bound:
            self._progress.note(
                f"step {done}: the consensus distance {format_number(float(consensus.relative))} "
                f"(relative) is past the bound {bound:g}: all replicas are averaged once"
            )
        return past_bound

    def _look_for_drift(self, done, distances):
        median = float(np.median(distances))
        worst = int(distances.argmax())
        # One of n that is far off draws the mean: it is at most n - 1 times as far as the others.
        factor = min(DRIFT_FACTOR, 0.8 * (len(distances) - 1))
        drifts = len(distances) > 2 and distances[worst] > factor * median > 0
        if drifts and self._drifting != worst:
            self._progress.note(
                f"step {done}: replica {worst} drifts: {format_number(float(distances[worst]))} "
                f"from the consensus model, the median replica {format_number(median)}"
            )
        self._drifting = worst if drifts else None


def shown(row: dict[str, Any], unit: str, **more: float) -> dict[str, float]:
    """What the progress bar shows of a row; ``unit`` is that of the throughput."""
    return {
        "loss": float(row["train/loss"]),
        "consensus": float(row["train/consensus_distance_relative"]),
        **more,
        f"{unit}/s": row[f"perf/{unit}_per_s"],
    }


def _add(sums: dict[str, jax.Array] | None, metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums of each replica's metrics, (n,), over its steps with a finite loss, and their number."""
    fine = jnp.isfinite(metrics["loss"])
    found = {name: jnp.where(fine, metrics[name], 0) for name in ("loss", "grad_norm")}
    found["steps"] = fine.astype(jnp.int32)
    return found if sums is None else jax.tree.map(jnp.add, sums, found)


def _summarize(sums: dict[str, jax.Array], metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A row of metrics.jsonl: means over its steps, and what the last of them says."""
    steps = sums["steps"]
    of_replicas = sums["loss"] / steps  # NaN where no step was finite
    return {
        "loss": sums["loss"].sum() / steps.sum(),
        "loss_max": of_replicas.max(),
        "loss_min": jnp.where(steps > 0, of_replicas, jnp.inf).min(),
        "grad_norm": sums["grad_norm"].sum() / steps.sum(),
        "learning_rate": metrics["learning_rate"],
        "skipped_updates": metrics["skipped"].sum(),
        "skipped": metrics["skipped"],
        "failing": metrics["failing"].min(),
    }
