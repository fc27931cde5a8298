"""A cell of the grid, one stage of one replica: its run, and the actor that trains it."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from decent_jax import replicas, tasks
from decent_jax.actors import handles
from decent_jax.actors.ray_cluster import leave_launcher
from decent_jax.cluster.start import limit_exchanges
from decent_jax.ground import connections
from decent_jax.ground.connections import Address
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.progress import announce as announce_on_stderr
from decent_jax.pipelines import part as parts
from decent_jax.pipelines.part import Part
from decent_jax.pipelines.stage import Stage
from decent_jax.pipelines.worker import Channel, Key, Mailbox, Worker, open_batches
from decent_jax.plan.plan_file import Plan
from decent_jax.train import config as config_lib
from decent_jax.train import experiment, xla
from decent_jax.train.checkpoint import reason_of
from decent_jax.train.comm_metrics import CommMetrics
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
        made = Experiment(config, task, schedule, placement, None, steps, every, rate, tx, [], 1)
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


class CellActor:
    """Ray calls its methods from threads of a pool; `train` and the like take one at a time.

    Args:
      cell: which one it is.
      secret: that stages of this run know.
    """

    def __init__(self, cell: Cell, secret: bytes):
        os.environ.setdefault("PJRT_NPROC", str(max(4, os.cpu_count() or 1)))  # messages wait in it
        self._cell, self._secret, self._mailbox = cell, secret, Mailbox()
        self._channels: list[Channel] = []
        # From when it is open: a `Stage`, its `Worker`, and what writes checkpoints.
        self._stage: Any = None
        self._worker: Any = None
        self._writer: Any = None
        # From when it is ready to train: what it measures, and the steps of its last row.
        self._comm_metrics: Any = None
        self._reported = 0

    def addresses(self) -> tuple[str, Address]:
        """A free port of its machine, as "host:port", where its replica 0 coordinates the stage;
        and where messages of other stages arrive."""
        host = handles.own_host()
        _, address = connections.listen(host, self._secret, self._mailbox.fill)
        return free_address(host), address

    def open(self, coordinator: str, addresses: list[Address]) -> None:
        """Start jax, and make the programs.

        Args:
          coordinator: the first of `addresses` of replica 0 of its stage.
          addresses: the second of `addresses` of the stages of its replica.
        """
        cluster, count = self._cell.config["cluster"], self._cell.config["num_replicas"]
        if count > 1:
            join(
                *(coordinator, count, self._cell.replica),
                cluster["exchange_s"],
                initialization_timeout=cluster["timeout_s"],
                # Later than `Cells`, which can say which cell is silent.
                heartbeat_timeout_seconds=2 * cluster["heartbeat_s"] + 10,
            )
        self._stage = open_stage(self._cell)
        self._channels = [Channel(address, self._secret) for address in addresses]

    def connect(self) -> None:
        """Exchange a number with the other replicas of the stage; called when all cells are open.

        gloo connects when processes first exchange something, and gives the slower one 30 s. That
        is too little if it compiles a large program meanwhile; this small one compiles at once.
        """
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("open")
        self._writer = ocp.StandardCheckpointer()

    def restore(self, checkpoint: Path, meta: dict[str, Any]) -> str:
        """Take its arrays from a checkpoint; returns why it cannot, or nothing."""
        try:
            self._stage.restore(checkpoint, meta)
        except Exception as error:  # orbax and tensorstore raise many kinds
            return f"{self._cell.name}: {reason_of(error)}"
        return ""

    def begin(self, start: int, ahead: int) -> None:
        """Make ready to train from step ``start``, whose data are those of ``start + ahead``."""
        batches = open_batches(self._stage, start + ahead)
        self._worker = Worker(self._stage, self._mailbox, self._send, batches)
        self._comm_metrics = CommMetrics(Path(self._cell.workdir), self._cell.log.stem)
        self._reported = start

    def train(self, start: int, stop: int, row: bool) -> Any:
        """See `Worker.train`."""
        span = self._worker.train(start, stop, row)
        if row and stop > self._reported:
            self._comm_metrics.measured = span.seconds
            self._comm_metrics.row(stop, stop - self._reported)
            self._reported = stop
        return span

    def evaluate(self) -> Any:
        """See `Worker.evaluate`."""
        return self._worker.evaluate()

    def save(self, draft: Path) -> dict[str, int]:
        """Copy its state, and let it be written while training goes on; see `Stage.save`."""
        return self._stage.save(self._writer, draft)

    def save_model(self, draft: Path) -> dict[str, int]:
        """The same with its part of the consensus model."""
        return self._stage.save_model(self._writer, draft)

    def saved(self) -> None:
        """Wait until what was saved is on the disk."""
        self._writer.wait_until_finished()

    def beat(self) -> int:
        """Its process id, as a sign of life."""
        return os.getpid()

    def _send(self, stage: int, key: Key, value: Any) -> None:
        self._channels[stage].send(key, value)
