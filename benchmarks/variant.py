"""A config's compiled steps, to be timed in turn with others; for the benchmarks of this folder."""

import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from decent_jax import replicas, tasks
from decent_jax.cluster import watch
from decent_jax.data import loader
from decent_jax.replicas import Placement
from decent_jax.tasks import Task
from decent_jax.topology import Schedule
from decent_jax.train import ConfigError, algorithm, flags
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.flight import Blocks


class Parts(NamedTuple):
    """What a config's step is made of, and a batch for it."""

    task: Task
    schedule: Schedule
    rate: optax.Schedule
    tx: optax.GradientTransformationExtraArgs
    batch: Any  # of NumPy arrays, stacked over ``held``

    @staticmethod
    def of(config, folder: str | Path, placement: Placement, held: Sequence[int]) -> "Parts":
        """``held``: the replicas whose examples the batch has."""
        task = tasks.find(config.task).make(
            config, Path(folder), lambda message: contextlib.nullcontext()
        )
        schedule = config_lib.make_schedule(config)
        rate = step_lib.learning_rate(config, 1000, 10, [])
        tx = algorithm.transformation(config, schedule, rate, task.decay_mask, placement.axis_name)
        with loader.train_batches(
            task.train_source,
            seed=0,
            num_replicas=config.num_replicas,
            batch_size=config.batch_size,
            replicas=held,
        ) as batches:
            return Parts(task, schedule, rate, tx, next(batches))

    def step(self, config, placement: Placement):
        """As `decent_jax.train.step.make_step` makes it."""
        return step_lib.make_step(config, self.task, self.tx, self.rate, self.schedule, placement)


class Variant:
    """The steps of a config, compiled for ``rounds`` of its schedule, with their state and a batch.

    A round that is None is a step without communication (or, in all-reduce, with its own).
    """

    def __init__(self, config, folder, rounds: Sequence[int | None], devices: list[jax.Device]):
        placement = replicas.place(config.num_replicas, devices)
        parts = Parts.of(config, folder, placement, placement.local_replicas)
        self.schedule = parts.schedule
        self.state = step_lib.init_state(config, parts.task, parts.tx, placement)
        self.cost = algorithm.cost(config, self.schedule, self.state, config.local_size)
        self.batch = placement.put(parts.batch)
        step, blocks = parts.step(config, placement), Blocks.of(config, self.schedule, parts.tx)
        self.steps, self.compile_s, self._given = [], [], []  # a program, its time, what it gets
        for r in rounds:
            count, batch = 1, self.batch
            if blocks.flies(r):
                count, batch = blocks.delay, (self.batch,) * blocks.delay
            lowered = step.lower(self.state, batch, np.int32(0), round=r)
            began = time.perf_counter()
            self.steps.append(lowered.compile())
            self._given.append((count, batch))
            self.compile_s.append(time.perf_counter() - began)
        leaves = jax.tree.leaves(self.state.params)
        self.model_bytes = sum(x.nbytes for x in leaves) // config.num_replicas
        self.units = config.batch_size * parts.task.units_per_example  # a step, over all replicas
        self.seconds: list[float] = []
        watch.meet(config.cluster.exchange_s)  # others may still compile, and gloo waits 30 s only
        self.run(sum(count for count, _ in self._given) + 1)
        self.seconds.clear()

    def run(self, steps: int) -> None:
        """Time so many steps or a few more, with the rounds in turn; ``seconds`` gets the mean."""
        jax.block_until_ready(self.state)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("measure")
        began = time.perf_counter()
        made, metrics = 0, None
        programs = itertools.cycle(zip(self.steps, self._given, strict=True))
        while made < steps:
            program, (count, batch) = next(programs)
            self.state, metrics = program(self.state, batch, np.int32(made))
            made += count
        jax.block_until_ready((self.state, metrics))
        self.seconds.append((time.perf_counter() - began) / made)


def override(config, arguments: Sequence[str]) -> None:
    """Set fields as ``--config.NAME=VALUE`` says; anything else is a ConfigError."""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name.startswith("--config.") or not equals:
            raise ConfigError(f"unknown argument {argument!r} (--help shows how)")
        flags.override(config, name.removeprefix("--config."), value)
