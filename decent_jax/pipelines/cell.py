"""What a run of pipelines is made of: in the process of `train.py`, and in each of its cells."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from decent_jax import replicas, tasks
from decent_jax.actors.process import leave_launcher
from decent_jax.cluster.start import limit_exchanges
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.progress import announce as announce_on_stderr
from decent_jax.pipelines import part as parts
from decent_jax.pipelines.part import Part
from decent_jax.pipelines.stage import Stage
from decent_jax.plan.plan_file import Plan
from decent_jax.train import config as config_lib
from decent_jax.train import experiment, xla
from decent_jax.train.experiment import Experiment
from decent_jax.train.workdir import Workdir, open_workdir

LOGS = "cells"  # of a run: cells/REPLICA-STAGE.txt


class Cell(NamedTuple):
    """Which cell of the grid an actor is."""

    config: dict[str, Any]
    workdir: str
    replica: int
    stage: int
    counts: list[int]  # layers of each stage

    @property
    def name(self) -> str:
        """For messages."""
        return f"stage {self.stage} of replica {self.replica}"

    @property
    def log(self) -> Path:
        """The file of its output."""
        return Path(self.workdir) / LOGS / f"{self.replica}-{self.stage}.txt"


@contextlib.contextmanager
def open_run(
    config: ConfigDict, workdir: str | Path
) -> Iterator[tuple[Experiment, Workdir, Plan | None, list[int]]]:
    """Check the config, and open the run directory and the data, in the process of `train.py`.

    Returns:
      The experiment, placed on this process's device for one replica; the run directory; the plan;
      and the layers of each stage.

    Raises:
      ConfigError: see `decent_jax.train.run`.
    """
    config_lib.validate(config)
    leave_launcher()
    plan = config_lib.load_plan(config)
    schedule = config_lib.make_schedule(config, plan)
    if plan is not None:
        config = config_lib.config_of_plan(config, plan)
    with open_workdir(workdir, config) as work:
        task = _task(config, work.path, work.announce)
        counts = parts.layers_of(config, task.config, plan)
        steps, every, rate = experiment.durations(config, task)
        placement = replicas.place(1, jax.local_devices()[:1])
        tx = parts.method(config, schedule, rate, placement)
        made = Experiment(config, task, schedule, placement, None, steps, every, rate, tx, 1)
        work.accept()
        yield made, work, plan, counts


def open_stage(cell: Cell) -> Stage:
    """The programs of a cell, where jax has been started with its replicas.

    Raises:
      ConfigError: its machine has too little memory, or its data cannot be used.
    """
    config = ConfigDict(cell.config)
    xla.use_cache()
    schedule = config_lib.make_schedule(config)
    task = _task(config, Path(cell.workdir), announce_on_stderr)
    rate = experiment.durations(config, task)[2]
    placement = parts.place(config.num_replicas)
    tx = parts.method(config, schedule, rate, placement)
    part = Part(task, cell.stage, cell.counts)
    params, _ = jax.eval_shape(part.init, jax.random.key(0))
    experiment.check_state(placement, (params, jax.eval_shape(tx.init, params)))
    return Stage(config, schedule, placement, tx, part)


def free_address(host: str) -> str:
    """ "host:port" with a port of this machine, the ``host``, that is free."""
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{host}:{free.getsockname()[1]}"


def join(coordinator: str, count: int, index: int, exchange_s: int, **options: Any) -> None:
    """Let jax join the processes of other actors, as number ``index``; gloo connects CPUs."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    limit_exchanges(exchange_s)
    jax.distributed.initialize(
        *(coordinator, count, index), cluster_detection_method="deactivate", **options
    )


def _task(config: ConfigDict, workdir: Path, announce: Callable) -> Any:
    try:
        return tasks.find(config.task).make(config, workdir, announce)
    except DataError as error:
        raise ConfigError(str(error)) from None
