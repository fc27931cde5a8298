"""The process of `train.py`: the runner, whose workers do the training."""

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.actors.handles import Actors
from decent_jax.actors.ray_cluster import check_address, running
from decent_jax.checkpoints.on_disk import change_of
from decent_jax.ground.format import format_bytes, format_duration, format_number
from decent_jax.ground.json_files import Json
from decent_jax.monitor.comm_metrics import CommMetrics
from decent_jax.monitor.goodput import Clock
from decent_jax.pipelines import Config
from decent_jax.pipelines.executor import Span
from decent_jax.pipelines.part import bytes_between_stages
from decent_jax.pipelines.worker import needs_of, open_run
from decent_jax.pipelines.workers import WorkerCheckpoints, Workers, nodes_of
from decent_jax.replicas import Consensus, TrainState
from decent_jax.train import algorithm, conclusion, loop
from decent_jax.train.evaluation import Evaluator, Model
from decent_jax.train.experiment import Experiment
from decent_jax.train.rows import passed
from decent_jax.train.same_data import facts_of
from decent_jax.train.saved_model import restore_model
from decent_jax.train.saver import Saver
from decent_jax.train.synchronous import TIMED
from decent_jax.train.workdir import Workdir

_LONGEST_SPAN_S = 5.0  # of steps between two calls of the workers


def run(config: Config, workdir: str | Path) -> Json:
    """Train pipelines in ``workdir``, or resume the run that is already there.

    Returns and raises the same as `decent_jax.train.run`.
    """
    with _started(config, workdir) as runner:
        return loop.train(runner, runner.work)


def dry_run(config: Config) -> None:
    """Let all workers make a few steps; the first ones compile, and the others are timed.

    Raises:
      ConfigError: the run would be refused.
    """
    with tempfile.TemporaryDirectory() as folder, _started(config, folder) as runner:
        runner.time_steps()


@contextlib.contextmanager
def _started(config: Config, workdir: str | Path) -> Iterator["Pipelines"]:
    """Open a run and start its workers."""
    check_address(config.ray)
    with open_run(config, workdir) as (experiment, work, plan, counts):
        config, actors = cast(Config, experiment.config), Actors()
        needs = needs_of(experiment, counts)
        with running(config.ray, config.num_replicas * needs):
            nodes = nodes_of(plan, actors.nodes(), config.num_replicas * len(counts))
            with Workers(config, work.path, counts, nodes, actors, needs=needs) as workers:
                yield Pipelines(experiment, work, counts, workers)


class Pipelines:
    """See `decent_jax.train.loop.Runner`."""

    state = memory = None

    def __init__(self, experiment: Experiment, work: Workdir, counts: list[int], workers: Workers):
        self.experiment, self.work, self._workers = experiment, work, workers
        self._counts, self._config = counts, cast(Config, experiment.config)
        task: Any = experiment.task  # a `decent_jax.tasks.Task` with a `GPT2Config`
        self._crossing = bytes_between_stages(self._config, task.config)
        self._cost = _cost(experiment)
        self.messages = {
            "bytes_sent_per_step": self._cost.sent_a_step,
            "bytes_between_stages_per_step": self._crossing,
            "stages": len(counts),
        }
        work.console.say(self._describe())
        self._comm_metrics = CommMetrics(work.path)
        self.checkpoints = WorkerCheckpoints(work.path, workers, self._config.checkpoint.keep)
        self._pace = math.inf  # seconds per step
        self._distance: Any = None  # a `Consensus`, as of the last row

    def restore(self) -> tuple[int, Json]:
        """See `decent_jax.train.loop.Runner`."""
        with self.work.console.announce(f"starting {len(self._workers.specs)} workers"):
            self._workers.open(facts_of(self._config, self.experiment.task))
        meta = self.checkpoints.newest(self.work.console.say)
        step, ahead, n = 0, 0, self._config.num_replicas
        if meta:
            step = meta["step"]
            ahead = meta["examples"] // self._config.batch_size - step
            if meta["num_replicas"] != n:
                self.work.console.say(change_of(meta["num_replicas"], n))
        self._workers.all("begin", step, ahead)
        return step, meta

    def time_steps(self) -> None:
        """Compile and time a few steps, and print the time per step."""
        every, steps = self._config.mix_every, self.experiment.steps
        self.restore()
        with self.work.console.announce("compiling the steps"):
            self._workers.all("train", 0, every, False)
        began = time.perf_counter()
        for _ in range(TIMED):  # the steps up to a round, and the round
            self._workers.all("train", 0, every, False)
        seconds = (time.perf_counter() - began) / TIMED / every
        self.work.console.say(
            f"the config is valid: {steps} steps; a step takes {format_number(1e3 * seconds)} ms "
            f"on average here, all steps take {format_duration(seconds * steps)}"
        )

    @contextlib.contextmanager
    def training(self, start: int, ahead: int, clock: Clock) -> Iterator[None]:
        """See `decent_jax.train.loop.Runner`."""
        self._start, self._clock = start, clock
        yield

    def step(self, done: int, until: int) -> list[Json]:
        """Let the workers make steps for a few seconds; see `decent_jax.train.loop.Runner`."""
        stop = min(until, done + max(1, int(_LONGEST_SPAN_S / self._pace)))
        logs = passed(self._config.log.every, done, stop) or stop == self.experiment.steps
        compiles = done == self._start
        began, clock = time.monotonic(), self._clock
        with clock.of("compiling") if compiles else contextlib.nullcontext():
            spans: list[Span] = self._workers.all("train", done, stop, logs)
        seconds = max(time.monotonic() - began, 1e-9)
        pairs = list(zip(self._workers.specs, spans, strict=True))
        heads = [span for worker, span in pairs if worker.stage == 0]  # one per replica
        if not compiles:
            self._pace = seconds / (stop - done)
            clock.waited_for_data(max(span.waited for span in heads))  # of the first stage
        elif stop == until:  # otherwise a row that ends with the first step would take no time
            clock.begin_row(clock.of_row() + seconds, clock.waited)
        if logs:
            squares = [span.distance for worker, span in pairs if worker.replica == 0]
            distance, norm = np.sqrt(np.sum(np.array(squares, float), axis=0))
            relative: Any = distance / norm if norm else 0.0
            self._distance = Consensus(distance, relative)
            self._comm_metrics.measured = {
                f"stages/{worker.stage}/{name}": seconds
                for worker, span in pairs
                if worker.replica == 0
                for name, seconds in span.seconds.items()
            }
        last = {
            "skipped": np.concatenate([span.skipped for span in heads]),
            "failing": np.concatenate([span.failing for span in heads]),
        }
        return [
            last
            | {
                "loss": np.concatenate([span.losses[k] for span in heads]),
                "grad_norm": np.concatenate([span.norms[k] for span in heads]),
                "learning_rate": np.asarray(self.experiment.rate(done + k), np.float32),
            }
            for k in range(stop - done)
        ]

    def consensus(self) -> Consensus:
        """See `decent_jax.train.loop.Runner`."""
        return self._distance

    def measured(self, done: int, steps: int, seconds: float) -> dict[str, float]:
        """See `decent_jax.train.loop.Runner`; the peak of the workers' devices is unknown."""
        return self._comm_metrics.row(done, steps)

    def evaluate(self, pause: Callable[[], None]) -> tuple[dict[str, float], Model]:
        """See `decent_jax.train.loop.Runner`; `WorkerCheckpoints` saves the model."""
        with self.work.console.announce("evaluating the consensus model", once=True):
            sums = self._workers.wait(self._workers.begin("evaluate"), pause)
        total, count = np.sum([part for part in sums if part is not None], axis=0)
        return {"eval/loss": float(total / count)}, Model(None, None)

    def finish(self, done: int, saver: Saver, clock: Clock) -> Json:
        """See `decent_jax.train.loop.Runner`."""
        params, _, _ = restore_model(self.work.path, "last")
        params = jax.tree.map(lambda x: jnp.asarray(x)[None], params)
        pipeline = self._config.pipeline
        return conclusion.conclude(
            self.experiment,
            self.work,
            Evaluator(self._config, self.experiment.task, self.experiment.placement),
            TrainState(params, {}, ()),
            self._cost,
            saver,
            clock,
            steps=done,
            training_seconds=round(clock.seconds, 3),
            pipeline={
                "layers": self._counts,
                "order": pipeline.order,
                "micro_batches": pipeline.micro_batches,
                "codec": pipeline.codec,
                "bytes_between_stages_per_step": self._crossing,
            },
        )

    def _describe(self) -> str:
        pipeline, layers = self._config.pipeline, " + ".join(map(str, self._counts))
        return (
            f"{algorithm.describe(self._config, self.experiment.schedule, self._cost)}, in "
            f"{len(self._counts)} stages of {layers} layers; {pipeline.micro_batches} "
            f"micro-batches per step ({pipeline.order}) send {format_bytes(self._crossing)} from "
            f"stage to stage and as much back ({pipeline.codec})"
        )


def _cost(experiment: Experiment) -> algorithm.Cost:
    """The cost of whole replicas; each stage sends its share."""
    n = experiment.config.num_replicas
    params, _ = jax.eval_shape(experiment.task.init, jax.random.key(0))
    state = TrainState(params, {}, jax.eval_shape(experiment.tx.init, params))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), state)
    return algorithm.cost(experiment.config, experiment.schedule, stacked, experiment.per_host)
