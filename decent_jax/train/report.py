"""What a run looks at, one step late: its rows, its clock, what goes wrong, and a trace."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax import optim, replicas
from decent_jax.errors import TrainingFailed
from decent_jax.progress import Progress
from decent_jax.text import format_number
from decent_jax.train.metrics import MetricWriter
from decent_jax.train.saver import Saver
from decent_jax.train.setup import Experiment
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import Workdir

DRIFT_FACTOR = 3.0  # a replica this many times as far from the mean as the median one drifts
TRACED_AFTER = 10  # steps of a run before the trace; the first ones compile


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
      experiment: the run.
      work: its directory, which prints.
      saver: names the newest checkpoint.
      state: at the start.
      clock: of the run.
      writer: gets the rows.
      progress: shows their numbers.
      measured: ``(steps)`` to the task's own measurements of the batches of so many steps.
    """

    def __init__(
        self,
        experiment: Experiment,
        work: Workdir,
        saver: Saver,
        state: TrainState,
        *,
        clock: Clock,
        writer: MetricWriter,
        progress: Progress,
        measured: Callable[[int], dict[str, float]],
    ):
        self._config, self._task, self._work = experiment.config, experiment.task, work
        self._saver, self._clock, self._measured = saver, clock, measured
        self._writer, self._progress = writer, progress
        placement = experiment.placement
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

    def average(self, state: TrainState) -> TrainState:
        """The state with all replicas at their mean; donates the old parameters."""
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
            self._work.say(
                f"step {done}: {new.sum()} updates were not finite and were skipped (replica "
                f"{new.argmax()} most); {skipped.sum()} since the start"
            )
        if failing >= self._config.max_failing_steps:
            raise TrainingFailed(
                f"no replica has made a finite update in the last {failing} steps, up to step "
                f"{done}; {self._saver.newest()}. Lower the learning rate, or clip gradients "
                "(optimizer.clip_norm)"
            )
        self._look_for_drift(done, np.asarray(consensus.per_replica))
        bound = self._config.max_consensus_distance
        past_bound = bool(bound) and not consensus.relative <= bound
        if past_bound:
            self._work.say(
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
            self._work.say(
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


class Profile:
    """Traces ``count`` steps after the first `TRACED_AFTER` of a run; 0 traces none.

    Scopes are named ``forward_backward``, ``mix`` and ``update``. Every process writes its own file
    under ``workdir/profile``.

    Attributes:
      turns: the 0-based steps before which `turn` must be called; empty without a trace.
    """

    def __init__(self, count: int, workdir: Path, say: Callable[[str], None]):
        self.turns = {TRACED_AFTER, TRACED_AFTER + count} if count else set()
        self._folder, self._say = workdir / "profile", say
        self._tracing = False

    def turn(self, t: int, state: Any) -> None:
        """Begin or end the trace, once ``state`` is computed."""
        self.finish(t, state)
        if t == TRACED_AFTER:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def finish(self, t: int, state: Any) -> None:
        """End the trace, if there is one, after ``t`` steps of the run."""
        if self._tracing:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._tracing = False
            self._say(f"a trace of steps {TRACED_AFTER + 1} to {t} is in {self._folder}")

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._tracing:  # the run ended early: keep what there is
            jax.profiler.stop_trace()
