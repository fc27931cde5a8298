"""The process of `train.py`: starts the cells, lets them train, and shows the run as a whole."""

import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
from ml_collections import ConfigDict

from decent_jax.ground import json_files
from decent_jax.ground.errors import CheckpointError, ConfigError, TrainingFailed
from decent_jax.ground.format import format_bytes, format_duration, format_number
from decent_jax.peers.start import check_address, ray_for
from decent_jax.pipelines import files
from decent_jax.pipelines.part import bytes_between_stages
from decent_jax.pipelines.setup import Run, open_run
from decent_jax.pipelines.watched import Watched, strategies
from decent_jax.pipelines.worker import Span
from decent_jax.train import algorithm, loop
from decent_jax.train.checkpoint import DAMAGED, change_of, put_aside
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.metrics import shown
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import Signals, check_there

_LONGEST_SPAN_S = 5.0  # steps that cells make without a word from here


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train pipelines as ``config`` says, in ``workdir``; resume the run that is there.

    Returns, raises: as `decent_jax.train.run`.
    """
    check_address(config, "pipeline")
    with open_run(config, workdir) as made:
        config = made.experiment.config
        cells = config.num_replicas * len(made.counts)
        with ray_for(config, "pipeline", cells):
            placed = strategies(made.plan, ray.nodes(), cells)
            with Watched(config, made.work.path, made.counts, placed) as actors:
                return _Driver(made, actors).run()


def dry_run(config: ConfigDict) -> None:
    """Let all cells make a few steps, the first of which compile, and time the others.

    Raises:
      ConfigError: the run would be refused.
    """
    check_address(config, "pipeline")
    with tempfile.TemporaryDirectory() as folder, open_run(config, folder) as made:
        config, work = made.experiment.config, made.work
        cells, steps = config.num_replicas * len(made.counts), made.experiment.steps
        with ray_for(config, "pipeline", cells):
            placed = strategies(made.plan, ray.nodes(), cells)
            with Watched(config, work.path, made.counts, placed) as actors:
                driver = _Driver(made, actors)
                work.say(driver._describe(driver._cost()))
                with work.announce(f"starting {cells} cells"):
                    actors.open(None, 0)
                several = 0, config.mix_every, False  # the steps to a round, and it
                with work.announce("compiling the steps"):
                    actors.all("train", *several)
                began = time.perf_counter()
                for _ in range(loop.TIMED):
                    actors.all("train", *several)
                seconds = (time.perf_counter() - began) / loop.TIMED / config.mix_every
        work.say(
            f"the config is good for {steps} steps; a step takes {format_number(1e3 * seconds)} ms "
            f"on average here, {steps} of them {format_duration(seconds * steps)}"
        )


class _Driver:
    """One session of a run."""

    def __init__(self, made: Run, actors: Watched):
        self.experiment, self.work, self.actors = made.experiment, made.work, actors
        self.counts, self.config = made.counts, made.experiment.config
        self.crossing = bytes_between_stages(self.config, made.model)
        self.folder, self.best_folder = (self.work.path / n for n in (files.FOLDER, files.BEST))
        self.seconds, self.best, self.ahead = 0.0, math.inf, 0
        self.evaluated: dict[str, Any] = {}
        self._writing: tuple[Path, dict[str, Any], list[Any]] | None = None
        self._saved = -1
        self._last_save = time.monotonic()

    def run(self) -> dict[str, Any]:
        experiment, work, actors = self.experiment, self.work, self.actors
        cost = self._cost()
        work.say(self._describe(cost))
        start, checkpoint = self._newest()
        with work.announce(f"starting {len(actors.cells)} cells"):
            actors.open(checkpoint, self.ahead)
        work.write_config()
        if start:
            work.say(f"resuming after step {start}")
        steps = max(experiment.steps, start)
        with (
            work.open_metrics(start) as writer,
            work.show_progress(steps, start) as progress,
            Signals() as signals,
        ):
            done = start
            pace = math.inf  # seconds per step
            row_steps, row_seconds = 0, 0.0
            while done < steps:
                stop = self._next(done, steps, pace)
                is_row = loop.divides(self.config.log.every, stop) or stop == steps
                began = time.monotonic()
                spans: list[Span] = actors.all("train", done, stop, is_row)
                seconds = time.monotonic() - began
                if done > start:  # the first step compiles
                    self.seconds += seconds
                    row_seconds += seconds
                    row_steps += stop - done
                    pace = seconds / (stop - done)
                done = stop
                progress.update(done)
                self._check(spans, done)
                if self._writing is not None and actors.over(self._writing[2]):
                    self._finish_saving()  # a checkpoint counts, or fails, as soon as it is written
                if is_row:
                    row = self._row(spans, done, row_seconds / row_steps if row_steps else seconds)
                    row_steps, row_seconds = 0, 0.0
                    writer.write(done, row)
                    progress.update(done, shown(row, experiment.task.unit))
                if loop.divides(experiment.every["eval.every"], done) and done < steps:
                    self._evaluate(done, writer)
                stops = signals.received is not None and done < steps
                if stops or self._due(done):
                    self._save(done)
                if stops:
                    self._finish_saving()
                    loop.stop(done, work, signals, self.seconds)
            self._evaluate(steps, writer)
            self._save(steps)
            with work.announce("waiting until the checkpoint is written"):
                self._finish_saving()
        return self._finish(steps, cost)

    # --- Parts of a run ---------------------------------------------------------------------------

    def _next(self, done: int, steps: int, pace: float) -> int:
        """The step up to which the cells train without a call from this process."""
        every = self.experiment.every
        periods = (self.config.log.every, every["eval.every"], every["checkpoint.every"])
        ends = [done + period - done % period for period in periods if period]
        return min([steps, *ends, done + max(1, int(_LONGEST_SPAN_S / pace))])

    def _check(self, spans: list[Span], done: int) -> None:
        failing = min(int(span.failing.min()) for span in spans)
        if failing >= self.config.max_failing_steps:
            raise TrainingFailed(
                f"no replica has made a finite update in the last {failing} steps, up to step "
                f"{done}. Lower the learning rate, or clip gradients (optimizer.clip_norm)"
            )

    def _row(self, spans: list[Span], done: int, seconds: float) -> dict[str, Any]:
        """The row of metrics.jsonl, of the last step."""
        both = list(zip(self.actors.cells, spans, strict=True))
        of_replicas = [span for cell, span in both if cell.stage == 0]
        losses = np.concatenate([span.losses[-1] for span in of_replicas])
        norms = np.concatenate([span.norms[-1] for span in of_replicas])
        skipped = sum(int(span.skipped.sum()) for span in of_replicas)
        fine = np.isfinite(losses)
        squares = [span.distance for cell, span in both if cell.replica == 0]
        distance, norm = np.sqrt(np.sum(np.array(squares, float), axis=0))
        task, examples = self.experiment.task, self.config.batch_size / seconds
        return {
            "train/loss": losses[fine].mean() if fine.any() else np.nan,
            "train/loss_max": losses.max(),
            "train/loss_min": losses[fine].min() if fine.any() else np.nan,
            "train/grad_norm": norms[fine].mean() if fine.any() else np.nan,
            "train/learning_rate": float(np.asarray(self.experiment.rate(done - 1))),
            "train/skipped_updates": skipped,
            "train/consensus_distance": distance,
            "train/consensus_distance_relative": distance / norm if norm else 0.0,
            "perf/step_time_s": seconds,
            f"perf/{task.unit}_per_s": examples * task.units_per_example,
            "perf/wall_time_s": self.seconds,
        }

    def _evaluate(self, done: int, writer: Any) -> None:
        with self.work.announce("evaluating the consensus model", once=True):
            sums = [found for found in self.actors.all("evaluate") if found is not None]
        total, count = np.sum(sums, axis=0)
        loss = total / count
        row = {"eval/loss": loss}
        writer.write(done, row)
        self.work.say(f"step {done}: validation loss {loss:.4f} of the consensus model")
        self.evaluated = {"step": done, **row}
        if loss < self.best:
            self.best = loss
            folder = self.best_folder / str(done)
            shutil.rmtree(folder, ignore_errors=True)
            self.actors.all("write_model", str(folder))
            meta = {"num_replicas": 1, "eval_loss": self.best}
            files.finish(folder, self._meta(done) | meta, keep=1)

    def _due(self, done: int) -> bool:
        minutes = self.config.checkpoint.every_minutes
        late = minutes > 0 and loop.minutes_since(self._last_save) >= minutes
        return late or loop.divides(self.experiment.every["checkpoint.every"], done)

    # --- Checkpoints ------------------------------------------------------------------------------

    def _newest(self) -> tuple[int, tuple[str, dict] | None]:
        """The step of the newest checkpoint that is whole, its folder and manifest."""
        meta = files.newest(self.folder, files.check, self.work.say)
        if meta is None:
            if any(self.folder.glob("*/params")):
                raise ConfigError(
                    f"{self.work.path} holds a run without stages; take another --workdir, or set "
                    "pipeline.stages to 0"
                )
            self._forget_after(0)
            return 0, None
        step = meta["step"]
        self.seconds, self.best = meta["seconds"], meta["best"]
        if not self._forget_after(step) or self.best is None:
            self.best = math.inf
        self.ahead = meta["examples"] // self.config.batch_size - step
        if meta["num_replicas"] != self.config.num_replicas:
            self.work.say(change_of(meta["num_replicas"], self.config.num_replicas))
        return step, (str(self.folder / str(step)), meta)

    def _forget_after(self, step: int) -> bool:
        """Keep nothing of later steps, which are to come; whether there is a best model."""
        for later in files.steps(self.folder):
            if later > step:  # it is damaged, and would be kept as the newest one
                aside = self.work.path / DAMAGED
                self.work.say(f"the checkpoint of step {later} was moved to {aside}")
                put_aside(self.work.path, later)
        for later in files.steps(self.best_folder):
            if later > step:
                shutil.rmtree(self.best_folder / str(later))
        return bool(files.steps(self.best_folder))

    def _save(self, done: int) -> None:
        """Copy the state of all cells, and let them write it while training goes on."""
        if done == self._saved:
            return
        self._finish_saving()
        check_there(self.work.path)
        self._saved, self._last_save = done, time.monotonic()
        folder = self.folder / str(done)
        shutil.rmtree(folder, ignore_errors=True)
        self.actors.all("snapshot")
        self._writing = folder, self._meta(done), self.actors.begin("write", str(folder))

    def _finish_saving(self) -> None:
        if self._writing is None:
            return
        (folder, meta, calls), self._writing = self._writing, None
        try:
            self.actors.wait(calls)
        except TrainingFailed as error:
            raise CheckpointError(f"a checkpoint could not be written: {error}") from None
        files.finish(folder, meta, self.config.checkpoint.keep)

    def _meta(self, done: int) -> dict[str, Any]:
        config = self.config
        return {
            "step": done,
            "stages": len(self.counts),
            "layers": self.counts,
            "num_replicas": config.num_replicas,
            "schedule": self.experiment.schedule.name,
            "batch_size": config.batch_size,
            "examples": (done + self.ahead) * config.batch_size,
            "seconds": self.seconds,
            "best": self.best if math.isfinite(self.best) else None,
            "config": json_files.flat(config),
        }

    # --- The end ----------------------------------------------------------------------------------

    def _finish(self, steps: int, cost: algorithm.Cost) -> dict[str, Any]:
        found = files.restore_model(self.work.path, "last")
        assert found is not None
        params = jax.tree.map(lambda x: jnp.asarray(x)[None], found[0])
        evaluator = Evaluator(self.config, self.experiment.task, self.experiment.placement)
        return loop.finish(
            *(self.experiment, self.work, evaluator, TrainState(params, {}, (), None), cost),
            steps=steps,
            final=self.evaluated,
            best_eval_loss=self.best,
            training_seconds=round(self.seconds, 3),
            pipeline={
                "layers": self.counts,
                "order": self.config.pipeline.order,
                "micro_batches": self.config.pipeline.micro_batches,
                "wire": self.config.pipeline.wire,
                "bytes_between_stages_per_step": self.crossing,
            },
        )

    def _cost(self) -> algorithm.Cost:
        """The cost of whole replicas; each of several stages sends its share."""
        experiment, n = self.experiment, self.config.num_replicas
        params, _ = jax.eval_shape(experiment.task.init, jax.random.key(0))
        state = TrainState(params, {}, jax.eval_shape(experiment.tx.init, params), None)
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), state)
        return algorithm.cost(self.config, experiment.schedule, stacked, experiment.per_host)

    def _describe(self, cost: algorithm.Cost) -> str:
        pipeline, layers = self.config.pipeline, " + ".join(map(str, self.counts))
        return (
            f"{algorithm.describe(self.config, self.experiment.schedule, cost)}, in "
            f"{len(self.counts)} stages of {layers} layers; {pipeline.micro_batches} micro-batches "
            f"per step ({pipeline.order}) bring {format_bytes(self.crossing)} from stage to "
            f"stage and as much back ({pipeline.wire})"
        )
