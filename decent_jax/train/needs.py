"""What a run takes, in memory and time, without the run: `decent-jax train --check`."""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from decent_jax.text import format_duration, format_number
from decent_jax.train.setup import Experiment

TIMES = 3


def check(config: ConfigDict) -> None:
    """Do what a run does before its second step, and no more.

    Opens the data, places the replicas, compiles the first step, and prints what a replica sends
    and keeps and what a step takes; then times that step. The working directory stays as it is.

    Raises:
      ConfigError: the run would be refused.
    """
    from decent_jax.train import loop
    from decent_jax.train.metrics import Clock
    from decent_jax.train.programs import Programs
    from decent_jax.train.setup import open_experiment

    with (
        tempfile.TemporaryDirectory() as folder,
        open_experiment(config, folder) as (experiment, work),
    ):
        shapes = jax.eval_shape(lambda: loop.init(experiment))
        cost = loop.announce_cost(experiment, work, shapes)
        clock = Clock(0.0)
        programs = Programs(experiment, work, clock, cost)
        with loop.Feed(experiment, 0, clock) as feed:
            batch = feed.next(None, 0, None)
        key = programs.rounds[0], loop.shapes_of(batch)
        programs.compile(placed(experiment, shapes), batch, *key)
        seconds = timed(programs.compiled[key], loop.init(experiment), batch)
        rounds = len(set(programs.rounds))
        work.say(
            f"the config is good for {experiment.steps} steps; {rounds} rounds to compile; a step "
            f"takes {format_number(1e3 * seconds)} ms here, {experiment.steps} of them "
            f"{format_duration(seconds * experiment.steps)}"
        )


def timed(step: Callable, state: Any, batch: Any) -> float:
    """Seconds of a step: the median of `TIMES`, after one that does not count."""
    seconds = []
    for t in range(1 + TIMES):
        began = time.perf_counter()
        state, metrics = step(state, batch, np.int32(t))
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def placed(experiment: Experiment, shapes: Any) -> Any:
    """The shapes of a training state, with the shardings that it will have."""
    sharding = experiment.placement.sharding
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.shape)), shapes
    )
