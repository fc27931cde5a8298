"""Replicas that step together: one program on all devices, in one process or several."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from decent_jax import replicas
from decent_jax.cluster.watch import lost_peers_told
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import format_duration, format_number
from decent_jax.train import algorithm, hosts, loop
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.checkpoint import Checkpointer
from decent_jax.train.evaluation import Evaluator, Model
from decent_jax.train.experiment import Experiment, open_experiment, train_batches
from decent_jax.train.metrics import Clock
from decent_jax.train.programs import FIRST, Profile, Programs
from decent_jax.train.saver import Saver
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import Workdir

TIMED = 3  # steps of each kind in a dry run

check = config_lib.check  # this room is the first of `decent_jax.train.config.trainer_of`


@lost_peers_told()
def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """See `decent_jax.train.run`."""
    with open_experiment(config, workdir) as (experiment, work):
        return loop.train(Synchronous(experiment, work), work)


@lost_peers_told()
def dry_run(config: ConfigDict) -> None:
    """See `decent_jax.train.dry_run`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_experiment(config, folder) as (experiment, work),
    ):
        time_steps(experiment, work, experiment.steps)


class Synchronous:
    """See `decent_jax.train.loop.Runner`."""

    evaluates, first = True, FIRST

    def __init__(self, experiment: Experiment, work: Workdir):
        self.experiment, self.work = experiment, work
        self.shapes = jax.eval_shape(lambda: init(experiment))
        self.cost = announce_cost(experiment, work, self.shapes)
        self.checkpoints = Checkpointer(work.path, experiment.config.checkpoint.keep)
        self.evaluator = Evaluator(experiment.config, experiment.task, experiment.placement)
        self.state: Any = None
        replicated = experiment.placement.replicated
        self._distance = jax.jit(replicas.consensus_distance, out_shardings=replicated)
        self._batch: Any = None  # of the next step, or the error with which it cannot be had

    def restore(self) -> tuple[int, dict[str, Any]]:
        """See `decent_jax.train.loop.Runner`."""
        experiment, work = self.experiment, self.work
        found = None
        if self.checkpoints.steps():
            window = experiment.config.optimizer.window
            with work.announce("restoring the newest checkpoint"):
                found = self.checkpoints.restore_newest(
                    self.shapes, experiment.placement, window, say=work.say
                )
        if found is None:
            with work.announce("creating the replicas"):
                self.state = jax.block_until_ready(init(experiment))
            return 0, {}
        self.state, meta = found
        return meta["step"], meta

    @contextlib.contextmanager
    def training(self, start: int, ahead: int, clock: Clock) -> Iterator[None]:
        """See `decent_jax.train.loop.Runner`."""
        experiment, work = self.experiment, self.work
        self.programs = Programs(experiment, work, clock, self.cost, self.first)
        self._profile = Profile(experiment.config.profile.count, work.path, work.say)
        self._steps = experiment.steps
        self._feed = Feed(experiment, start + ahead, clock)
        self._done = start
        with self._feed, self._profile:
            self._read_ahead(start)
            yield
            self._profile.finish(self._done, self.state)

    def over(self, done: int) -> bool:
        """See `decent_jax.train.loop.Runner`."""
        return False

    def step(self, done: int, until: int) -> list[dict[str, Any]]:
        """Dispatch one step, and get the batch of the next one meanwhile."""
        if isinstance(self._batch, DataError):
            raise self._batch
        batch, measured = self._batch
        key = self.programs.rounds[done % len(self.programs.rounds)], shapes_of(batch)
        if key not in self.programs.compiled:
            self.programs.compile(self.state, batch, *key)
        if done in self._profile.turns:
            self._profile.turn(done, self.state)
        metrics = self._run(self.programs.compiled[key], batch, done)
        self._done = done + 1
        self._read_ahead(done + 1)
        return [metrics | {"measured": measured}]

    def _run(self, compiled: Any, batch: Any, t: int) -> dict[str, Any]:
        """Dispatch step t; its metrics."""
        self.state, metrics = compiled(self.state, batch, np.int32(t))
        return metrics

    def _read_ahead(self, done: int) -> None:
        if done >= self._steps:
            return
        try:
            self._batch = self._feed.next()
        except DataError as error:  # told when the steps before it have been looked at
            self._batch = error

    def consensus(self) -> replicas.Consensus:
        """See `decent_jax.train.loop.Runner`."""
        return self._distance(self.state.params)

    def evaluate(self) -> tuple[dict[str, float], Model]:
        """See `decent_jax.train.loop.Runner`."""
        with self.work.announce("evaluating the consensus model", once=True):
            return self.evaluator.row(self.state)

    def finish(self, done: int, saver: Saver, clock: Clock) -> dict[str, Any]:
        """See `decent_jax.train.loop.Runner`."""
        memory = self.programs.memory
        return loop.conclude(
            self.experiment,
            self.work,
            self.evaluator,
            self.state,
            self.cost,
            saver,
            steps=done,
            training_seconds=round(clock.seconds, 3),
            memory_bytes_per_device=memory and memory._asdict(),
        )


class Feed:
    """The batches of this process on their way to the devices; a context that stops its threads."""

    def __init__(self, experiment: Experiment, start_step: int, clock: Clock):
        task = experiment.task
        self._placement, self._clock = experiment.placement, clock
        self._measure = getattr(task, "measure", None)
        self._batches = train_batches(
            experiment.config, task, experiment.placement, start_step, experiment.partition
        )

    def next(self) -> tuple[Any, dict[str, float]]:
        """The next batch, and the task's numbers about it.

        Raises:
          DataError: a record cannot be used.
        """
        began = self._clock.now()
        block = next(self._batches)
        self._clock.waited += self._clock.now() - began
        measured = self._measure(block) if self._measure is not None else {}
        return self._placement.put(block), measured

    def __enter__(self) -> "Feed":
        self._batches.__enter__()
        return self

    def __exit__(self, *exc_info) -> None:
        self._batches.__exit__(*exc_info)


def init(experiment: Experiment) -> TrainState:
    """The state before step 0."""
    return step_lib.init_state(
        experiment.config, experiment.task, experiment.tx, experiment.placement
    )


def shapes_of(batch: Any) -> tuple:
    """The shapes of a batch's arrays, without the replica dimension."""
    return tuple(x.shape[1:] for x in jax.tree.leaves(batch))


def announce_cost(experiment: Experiment, work: Workdir, shapes: TrainState) -> algorithm.Cost:
    """What a replica sends and keeps, and what another schedule would save between hosts."""
    config, schedule, per_host = experiment.config, experiment.schedule, experiment.per_host
    several = 1 < per_host < config.num_replicas
    cost = algorithm.cost(config, schedule, shapes, per_host if several else config.local_size)
    work.say(algorithm.describe(config, schedule, cost))
    advice = hosts.advice(config, schedule, per_host, shapes)
    if advice is not None:
        work.say(advice)
    return cost


def time_steps(experiment: Experiment, work: Workdir, steps: int) -> None:
    """Compile and time both kinds of step, with and without communication, and say what they take.

    Args:
      experiment: to be tried.
      work: says it.
      steps: of the run.
    """
    shapes = jax.eval_shape(lambda: init(experiment))
    clock = Clock()
    programs = Programs(experiment, work, clock, announce_cost(experiment, work, shapes))
    with Feed(experiment, 0, clock) as feed:
        batch, _ = feed.next()
    rounds = programs.rounds
    silent, seconds = rounds.count(None) / len(rounds), {}
    state = init(experiment)
    for rnd in sorted({rnd is None: rnd for rnd in reversed(rounds)}.values(), key=str):
        key = rnd, shapes_of(batch)
        programs.compile(state, batch, *key)
        times = []
        for t in range(1 + TIMED):  # the first does not count
            began = time.perf_counter()
            state, metrics = programs.compiled[key](state, batch, np.int32(t))
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - began)
        seconds[rnd is None] = statistics.median(times[1:])
    mean = sum(seconds[kind] * (silent if kind else 1 - silent) for kind in seconds)
    both = ""
    if len(seconds) > 1:
        words = (f"{format_number(1e3 * seconds[kind])} ms" for kind in (False, True))
        both = " on average ({} with communication, {} without)".format(*words)
    work.say(
        f"the config is good for {steps} steps; {len(set(rounds))} rounds to compile; a step takes "
        f"{format_number(1e3 * mean)} ms here{both}, {steps} of them "
        f"{format_duration(mean * steps)}"
    )
