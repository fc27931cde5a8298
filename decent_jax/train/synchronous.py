"""Synchronous replicas: one program on all devices, in one process or several."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import numpy as np

from decent_jax import replicas
from decent_jax.checkpoints.in_memory import open_memory_checkpoints
from decent_jax.cluster import watch
from decent_jax.ground.format import format_duration, format_number
from decent_jax.ground.json_files import Json
from decent_jax.monitor.goodput import Clock
from decent_jax.replicas import TrainState
from decent_jax.train import conclusion, loop
from decent_jax.train import config as config_lib
from decent_jax.train.evaluation import Evaluator, Model
from decent_jax.train.experiment import Experiment, open_experiment
from decent_jax.train.saver import Saver
from decent_jax.train.settings import Config
from decent_jax.train.stepper import Feed, Programs, Stepper, announce_cost, init, shapes_of
from decent_jax.train.workdir import Workdir, check_shared

TIMED = 3  # timed steps of each kind in a dry run

check = config_lib.check  # the interface of `decent_jax.train.config.TRAINERS`


@watch.lost_peers_told()
def run(config: Config, workdir: str | Path) -> Json:
    """See `decent_jax.train.run`."""
    with open_experiment(config, workdir) as (experiment, work):
        check_shared(work.path)
        runner = Synchronous(experiment, work)
        with runner.memory or contextlib.nullcontext():
            return loop.train(runner, work)


@watch.lost_peers_told()
def dry_run(config: Config) -> None:
    """See `decent_jax.train.dry_run`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_experiment(config, folder) as (experiment, work),
    ):
        time_steps(experiment, work, experiment.steps)


class Synchronous:
    """See `decent_jax.train.loop.Runner`."""

    def __init__(self, experiment: Experiment, work: Workdir):
        self.experiment, self._work = experiment, work
        self.stepper = stepper = Stepper(experiment, work)
        self.checkpoints, self.messages = stepper.checkpoints, stepper.messages
        self.step, self.measured = stepper.step, stepper.measured
        self.memory = open_memory_checkpoints(
            experiment.config.recovery,
            work.path,
            stepper.shapes,
            experiment.placement,
            work.console.say,
        )
        self._evaluator = Evaluator(experiment.config, experiment.task, experiment.placement)

    @property
    def state(self) -> TrainState:
        """See `decent_jax.train.loop.Runner`."""
        return self.stepper.state

    def restore(self) -> tuple[int, Json]:
        """See `decent_jax.train.loop.Runner`."""
        return self.stepper.restore(self.memory)

    def training(self, start: int, ahead: int, clock: Clock) -> AbstractContextManager[None]:
        """See `decent_jax.train.loop.Runner`."""
        return self.stepper.training(start, ahead, clock, self.memory)

    def consensus(self) -> replicas.Consensus:
        """See `decent_jax.train.loop.Runner`."""
        return self._evaluator.distance(self.state.params)

    def evaluate(self, pause: Callable[[], None]) -> tuple[dict[str, float], Model]:
        """See `decent_jax.train.loop.Runner`."""
        self._evaluator.pause = pause
        with self._work.console.announce("evaluating the consensus model", once=True):
            return self._evaluator.row(self.state)

    def finish(self, done: int, saver: Saver, clock: Clock) -> Json:
        """See `decent_jax.train.loop.Runner`."""
        memory = self.stepper.programs.memory
        return conclusion.conclude(
            self.experiment,
            self._work,
            self._evaluator,
            self.state,
            self.stepper.cost,
            saver,
            clock,
            steps=done,
            training_seconds=round(clock.seconds, 3),
            memory_bytes_per_device=memory and memory._asdict(),
        )


def time_steps(experiment: Experiment, work: Workdir, steps: int) -> None:
    """Compile and time both kinds of step, with and without communication, and log the times.

    Args:
      experiment: the run to try.
      work: its directory, whose console receives the times.
      steps: total number of steps, for the estimate of the whole run.
    """
    shapes = jax.eval_shape(lambda: init(experiment))
    clock = Clock()
    programs = Programs(experiment, work, clock, announce_cost(experiment, work, shapes))
    with Feed(experiment, 0, clock) as feed:
        batch, _ = feed.next()
    cycle = list(programs.blocks.cycle())
    rounds = [rnd for rnd, count in cycle for _ in range(count)]
    silent = rounds.count(None) / len(rounds)
    seconds: dict[bool, float] = {}  # by whether the step has no round
    state = init(experiment)
    for rnd, count in sorted(
        {rnd is None: (rnd, k) for rnd, k in reversed(cycle)}.values(), key=str
    ):
        key = rnd, shapes_of(batch)
        programs.compile(state, batch, *key)
        batches = (batch,) * count if programs.blocks.spans_steps(rnd) else batch
        times: list[float] = []
        for t in range(1 + TIMED):  # the first step is a warm-up
            began = time.perf_counter()
            state, metrics = programs.compiled[key](state, batches, np.int32(t))
            jax.block_until_ready((state, metrics))
            times.append((time.perf_counter() - began) / count)
        seconds[rnd is None] = statistics.median(times[1:])
    mean = sum(seconds[kind] * (silent if kind else 1 - silent) for kind in seconds)
    on_average = ""
    if len(seconds) > 1:
        words = (f"{format_number(1e3 * seconds[kind])} ms" for kind in (False, True))
        on_average = " on average ({} with communication, {} without)".format(*words)
    work.console.say(
        f"the config is valid: {steps} steps, {len(set(rounds))} rounds to compile; a step takes "
        f"{format_number(1e3 * mean)} ms here{on_average}, all steps take "
        f"{format_duration(mean * steps)}"
    )
