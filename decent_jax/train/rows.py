"""Rows of metrics.jsonl: the measurements of a run's steps, written one step late."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.cluster import supervise
from decent_jax.ground.errors import TrainingFailed
from decent_jax.ground.json_files import Json
from decent_jax.ground.progress import Progress
from decent_jax.ground.pytree import PyTree
from decent_jax.monitor.goodput import Clock
from decent_jax.monitor.goodput_file import shares
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.replicas import Consensus
from decent_jax.train.evaluation import Model
from decent_jax.train.experiment import Experiment

Evaluate = Callable[[Callable[[], None]], tuple[dict[str, float], Model]]

MOST_FAILING_STEPS = 20  # consecutive steps without a finite update on any replica
_MOST_REPLICAS = 64  # with more replicas, a row does not list the loss of each


class Observed(Protocol):
    """The part of `decent_jax.train.loop.Runner` that rows and observers use.

    Attributes:
      experiment: the run.
      state: the state to save; None if other processes hold it and save it themselves.
      evaluate: ``pause -> (the eval/ metrics, the evaluated model)``; ``pause()`` is called between
        two batches, equally often in every process, and may raise. None: another process evaluates
        the run, accounts for its time and shows the time left.
    """

    experiment: Experiment

    @property
    def state(self) -> PyTree: ...

    @property
    def evaluate(self) -> Evaluate | None: ...

    def consensus(self) -> Consensus:
        """The consensus distance of the state; its arrays need not be computed yet."""
        ...

    def measured(self, done: int, steps: int, seconds: float) -> dict[str, float]:
        """Further entries for the row of the last ``steps`` steps, which took ``seconds``."""
        ...


def passed(every: int, before: int, done: int) -> bool:
    """Whether work with period ``every`` (0: never) fell due after step ``before``, up to ``done``.

    If a message overlaps several steps, the work waits until the message has arrived.

    >>> [passed(10, 18, done) for done in (19, 20, 21)], passed(0, 18, 20)
    ([False, True, True], False)
    """
    return every > 0 and before // every < done // every


class Rows:
    """Waits for steps one step late, writes and shows their rows, and reports problems.

    Each `add` waits for the steps of the previous `add` and writes their row, while the devices
    compute the new steps; `settle` does so without new steps.

    The losses and the gradient norm of a row are means over the steps since the previous row, and
    over all replicas (``loss_max`` and ``loss_min`` are those of single replicas). The learning
    rate, the skipped updates (since the start) and the consensus distance are taken at its last
    step.

    Args:
      runner: the runner, which measures the steps.
      clock: the run's clock.
      writer: the writer of the rows.
      progress: the progress bar, which shows metrics of the rows, and problems.
      steps: the total number of steps; a row ends with the last one.
      what_next: function that returns a sentence on what the same command would do next.

    Attributes:
      clock, writer: as above.
      done: steps so far, including steps that are still running.
      step_s: seconds per step in the last row.
    """

    def __init__(
        self,
        runner: Observed,
        clock: Clock,
        writer: MetricWriter,
        progress: Progress,
        steps: int,
        what_next: Callable[[], str],
    ):
        experiment = runner.experiment
        self._runner, self._config, self._task = runner, experiment.config, experiment.task
        self.clock, self.writer, self._progress = clock, writer, progress
        self.done, self._last, self._what_next = 0, steps, what_next
        everywhere = experiment.placement.replicated
        self._add = jax.jit(_add)
        self._summarize = jax.jit(_summarize, out_shardings=everywhere)
        self._gather = jax.jit(lambda sums: sums, out_shardings=everywhere)
        self._compiled = False
        self.step_s = math.inf
        # The unfinished row:
        self._sums: PyTree = None
        self._steps = 0
        self._measured: list[dict[str, float]] = []  # the task's own numbers, step by step
        # The metrics of the last step, and their summary if a row is due.
        self._pending: tuple[Json, PyTree] | None = None
        self._skipped = np.zeros(self._config.num_replicas, int)  # (n,) as last reported

    def begun(self, wait: bool = True) -> Json:
        """The unfinished row, saved in checkpoints so that a resumed run writes the same row.

        With ``wait``, its sums are lists of numbers, equal in all processes; without, they are (n,)
        arrays that need not be computed yet.
        """
        sums = self._sums
        if wait and sums is not None:
            gathered = jax.device_get(self._gather(sums))
            sums = {name: x.tolist() for name, x in gathered.items()}
        return {
            "steps": self._steps,
            "seconds": self.clock.of_row(),
            "waited": self.clock.waited,
            "record": self.clock.record(),
            "sums": sums,
            "measured": list(self._measured),
            "skipped": self._skipped.tolist(),
        }

    def resume(self, start: int, meta: Json) -> None:
        """Continue the row in a checkpoint's ``meta``, unless replicas or batch size have changed.

        In that case, a new row starts.
        """
        row, self.done = meta.get("row"), start
        if not row:
            return
        config = self._config
        if (meta["num_replicas"], meta["batch_size"]) != (config.num_replicas, config.batch_size):
            self._skipped[0] = sum(row["skipped"])  # the old replicas are gone
            return
        kinds = {"loss": np.float32, "grad_norm": np.float32, "steps": np.int32}
        sums = row["sums"] and {
            k: v if isinstance(v, jax.Array) else np.array(v, kinds[k])
            for k, v in row["sums"].items()
        }
        self._sums, self._steps, self._measured = sums, row["steps"], list(row["measured"])
        self._skipped = np.array(row["skipped"], int)
        self.clock.begin_row(row["seconds"], row["waited"])

    def ends(self, before: int, done: int) -> bool:
        """Whether a row ends with the steps after ``before`` up to ``done``."""
        return passed(self._config.log.every, before, done) or done == self._last

    def add(self, of_steps: Sequence[Json]) -> None:
        """Write the row of the previous steps if it is due, then start to sum up the new ones.

        Args:
          of_steps: metrics of the new steps, see `decent_jax.train.loop.Runner.step`.

        Raises:
          TrainingFailed: see `settle`.
        """
        self.settle()
        before, self.done = self.done, self.done + len(of_steps)
        with contextlib.nullcontext() if self._compiled else self.clock.of("compiling"):
            for metrics in of_steps:
                self._measured.append(metrics.pop("measured", {}))
                self._sums = self._add(self._sums, metrics)
            self._steps += len(of_steps)
            ends = self.ends(before, self.done)
            self._pending = of_steps[-1], self._summary(of_steps[-1]) if ends else None

    def _summary(self, metrics: PyTree) -> PyTree:
        summary = self._summarize(self._sums, metrics), self._runner.consensus()
        self._sums, self._compiled = None, True
        return summary

    def finish(self) -> None:
        """Write the row of the last steps when the run ends; raises as `settle`."""
        if self._pending is not None and self._pending[1] is None:
            self._pending = self._pending[0], self._summary(self._pending[0])
        self.settle()

    def settle(self, wait: bool = True) -> None:
        """Wait for the last steps and write their row, if they end one.

        Args:
          wait: whether to wait for them even if they end no row.

        Raises:
          TrainingFailed: no replica made a finite update in `MOST_FAILING_STEPS` steps.
        """
        if self._pending is None or not (wait or self._pending[1]):
            return
        (metrics, summary), self._pending = self._pending, None
        jax.block_until_ready(metrics)
        if summary is None:
            self._progress.update(self.done)
        else:
            self._write(*jax.device_get(summary))

    def _write(self, numbers: Json, consensus: Consensus) -> None:
        """Write the row of the steps since the last row."""
        done = self.done
        skipped, failing = numbers.pop("skipped"), int(numbers.pop("failing"))
        of_replicas = numbers.pop("of_replicas")
        steps, self._steps = self._steps, 0
        seconds, waited = self.clock.lap()
        rate = self._config.batch_size * self._task.units_per_example * steps / seconds
        self.step_s = seconds / steps
        row = {f"train/{name}": value for name, value in numbers.items()}
        row |= {
            "train/consensus_distance": float(consensus.distance),
            "train/consensus_distance_relative": float(consensus.relative),
            "perf/step_time_s": self.step_s,
            f"perf/{self._task.unit}_per_s": rate,
            "perf/data_wait_s": waited / steps,
            "perf/wall_time_s": self.clock.seconds,
        }
        if self._runner.evaluate is not None:  # this process accounts for the time of the run
            row["goodput"] = shares(self.clock.spent())["goodput"]
        row |= self._runner.measured(done, steps, seconds)
        if 1 < len(of_replicas) <= _MOST_REPLICAS:
            row |= {f"replicas/{k}/loss": loss for k, loss in enumerate(of_replicas)}
        measured, self._measured = self._measured[:steps], self._measured[steps:]
        row |= {k: float(np.mean([numbers[k] for numbers in measured])) for k in measured[0]}
        self._look_at(done, failing, skipped)
        self.writer.write(done, row)
        self._progress.update(done, shown(row, self._task.unit))
        supervise.reached(done)

    def _look_at(self, done: int, failing: int, skipped: np.ndarray) -> None:
        """Report updates that were not finite, and end a run that makes no progress.

        ``failing`` counts consecutive steps without a finite update on any replica; ``skipped``,
        (n,), counts each replica's updates that were not finite so far.
        """
        new, self._skipped = skipped - self._skipped, skipped
        if new.any():
            self._progress.note(
                f"step {done}: {new.sum()} updates were not finite and were skipped in whole or in "
                f"part (most on replica {new.argmax()}); {skipped.sum()} since the start"
            )
        if failing >= MOST_FAILING_STEPS:
            raise TrainingFailed(
                f"no replica has made a finite update in the last {failing} steps, up to step "
                f"{done}; {self._what_next()}. Lower the learning rate, or clip gradients "
                "(optimizer.clip_norm)"
            )


def shown(row: Json, unit: str, **more: float) -> dict[str, float]:
    """The numbers of a row for the progress bar; ``unit`` is the unit of the throughput."""
    return {
        "loss": float(row["train/loss"]),
        "consensus": float(row["train/consensus_distance_relative"]),
        **more,
        f"{unit}/s": row[f"perf/{unit}_per_s"],
    }


def _add(sums: dict[str, jax.Array] | None, metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums of each replica's metrics, (n,), over its steps with a finite loss, and their number."""
    fine = jnp.isfinite(metrics["loss"])
    new = {name: jnp.where(fine, metrics[name], 0) for name in ("loss", "grad_norm")}
    new["steps"] = fine.astype(jnp.int32)
    return new if sums is None else jax.tree.map(jnp.add, sums, new)


def _summarize(sums: dict[str, jax.Array], metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A row of metrics.jsonl: means over its steps, and values of the last step."""
    steps = sums["steps"]
    of_replicas = sums["loss"] / steps  # NaN where no step was finite
    return {
        "loss": sums["loss"].sum() / steps.sum(),
        "loss_max": of_replicas.max(),
        "loss_min": jnp.where(steps > 0, of_replicas, jnp.inf).min(),
        "grad_norm": sums["grad_norm"].sum() / steps.sum(),
        "learning_rate": metrics["learning_rate"],
        "skipped_updates": metrics["skipped"].sum(),
        "of_replicas": of_replicas,
        "skipped": metrics["skipped"],
        "failing": metrics["failing"].min(),
    }
