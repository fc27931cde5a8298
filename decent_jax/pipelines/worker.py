"""A worker of the grid, which trains one stage of one replica: its run and its actor."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from decent_jax import replicas, tasks
from decent_jax.actors import handles
from decent_jax.actors.ray_cluster import leave_launcher
from decent_jax.checkpoints.on_disk import reason_of
from decent_jax.cluster.start import limit_exchanges
from decent_jax.ground import connections
from decent_jax.ground.connections import Address, free_port
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.json_files import Json
from decent_jax.ground.progress import announce as announce_on_stderr
from decent_jax.monitor.comm_metrics import CommMetrics
from decent_jax.pipelines import Config
from decent_jax.pipelines import part as parts
from decent_jax.pipelines.executor import Channel, Key, Mailbox, Span, StageExecutor, open_batches
from decent_jax.pipelines.part import Part
from decent_jax.pipelines.stage import Stage
from decent_jax.plan.plan_file import Plan
from decent_jax.train import algorithm, experiment, xla
from decent_jax.train import config as config_lib
from decent_jax.train.experiment import Experiment
from decent_jax.train.same_data import check_same_as_train_py
from decent_jax.train.workdir import Workdir, open_workdir

LOGS = "workers"  # folder of workers/REPLICA-STAGE.txt


class WorkerSpec(NamedTuple):
    """The position of a worker in the grid, and its run."""

    config: Config
    workdir: str
    replica: int
    stage: int
    counts: list[int]  # layers of each stage

    @property
    def name(self) -> str:
        """The name of the worker in messages."""
        return f"stage {self.stage} of replica {self.replica}"

    @property
    def log(self) -> Path:
        """The file of its console output."""
        return Path(self.workdir) / LOGS / f"{self.replica}-{self.stage}.txt"


@contextlib.contextmanager
def open_run(
    config: Config, workdir: str | Path
) -> Iterator[tuple[Experiment, Workdir, Plan | None, list[int]]]:
    """Check the config and open the run directory and the data, in the process of `train.py`.

    Yields:
      The experiment, placed on this process's device for one replica; the run directory; the plan,
      or None; and the number of layers of each stage.

    Raises:
      ConfigError: see `decent_jax.train.run`.
    """
    config_lib.check_run(config)
    leave_launcher()
    plan = config_lib.load_plan(config)
    schedule = config_lib.make_schedule(config, plan)
    if plan is not None:
        config = config_lib.config_of_plan(config, plan)
    with open_workdir(workdir, config) as work:
        task = _task(config, work.path, work.console.announce)
        counts = parts.layers_of(config, task.config)
        steps, every, rate = experiment.durations(config, task)
        placement = replicas.place(1, jax.local_devices()[:1])
        tx = parts.method(config, schedule, rate, placement)
        run = Experiment(config, task, schedule, placement, None, steps, every, rate, tx, [], 1)
        work.console.accept()
        yield run, work, plan, counts


def needs_of(experiment: Experiment, counts: list[int]) -> list[int]:
    """Bytes of the state of each stage of a replica in host memory; 0 on GPUs."""

    def need(stage: int) -> int:
        part = Part(experiment.task, stage, counts)
        params, _ = jax.eval_shape(part.init, jax.random.key(0))
        return algorithm.bytes_of((params, jax.eval_shape(experiment.tx.init, params)))

    on_gpus = cast(Config, experiment.config).ray.gpus > 0
    return [0 if on_gpus else need(stage) for stage in range(len(counts))]


def open_stage(worker: WorkerSpec, data: dict[str, str]) -> Stage:
    """Create a worker's stage, after jax has connected the replicas of this stage.

    Raises:
      ConfigError: the data cannot be used here, or differ from ``data``, the data of `train.py`.
    """
    config = worker.config
    xla.use_cache()
    schedule = config_lib.make_schedule(config)
    task = _task(config, Path(worker.workdir), announce_on_stderr)
    check_same_as_train_py(config, task, data)
    rate = experiment.durations(config, task)[2]
    placement = parts.place(config.num_replicas)
    tx = parts.method(config, schedule, rate, placement)
    return Stage(config, schedule, placement, tx, Part(task, worker.stage, worker.counts))


def join(coordinator: str, count: int, index: int, exchange_s: int, **options: Any) -> None:
    """Connect jax to the processes of other actors, as process ``index``; on CPUs over gloo."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    limit_exchanges(exchange_s)
    jax.distributed.initialize(
        *(coordinator, count, index), cluster_detection_method="deactivate", **options
    )


def _task(config: Config, workdir: Path, announce: Callable) -> Any:
    try:
        return tasks.find(config.task).make(config, workdir, announce)
    except DataError as error:
        raise ConfigError(str(error)) from None


class Worker:
    """The Ray actor of one pipeline stage of one replica.

    Ray calls its methods from a pool of threads, of which at most one trains.

    Args:
      worker: the worker's position in the grid, and its run.
      secret: shared by all workers of the run.
    """

    def __init__(self, worker: WorkerSpec, secret: bytes):
        # Its threads also wait for messages.
        os.environ.setdefault("PJRT_NPROC", str(max(4, os.cpu_count() or 1)))
        self._spec, self._secret, self._mailbox = worker, secret, Mailbox()
        self._channels: list[Channel] = []
        # Set once it is open: a `Stage`, its `StageExecutor`, and the writer of checkpoints.
        self._stage: Any = None
        self._executor: Any = None
        self._writer: Any = None
        # Set once it is ready to train: its communication metrics, and the step of its last row.
        self._comm_metrics: Any = None
        self._reported = 0

    def addresses(self) -> tuple[str, Address]:
        """The coordinator's "host:port", for use if this is replica 0 of its stage; and the address
        at which it receives messages from other stages."""
        host = handles.own_host()
        _, address = connections.listen(host, self._secret, self._mailbox.fill)
        return f"{host}:{free_port()}", address

    def open(self, coordinator: str, addresses: list[Address], data: dict[str, str]) -> None:
        """Start jax and create the programs.

        Args:
          coordinator: the first result of the method `addresses` of replica 0 of this stage.
          addresses: the second result of that method, from every stage of this replica.
          data: see `open_stage`.
        """
        cluster, count = self._spec.config.cluster, self._spec.config.num_replicas
        if count > 1:
            join(
                *(coordinator, count, self._spec.replica),
                cluster.exchange_s,
                initialization_timeout=cluster.timeout_s,
                # Longer than in `Workers`, which can name the silent worker.
                heartbeat_timeout_seconds=2 * cluster.heartbeat_s + 10,
            )
        self._stage = open_stage(self._spec, data)
        self._channels = [Channel(address, self._secret) for address in addresses]

    def connect(self) -> None:
        """Exchange a number with the other replicas of the stage, once all workers are open.

        gloo connects at the first exchange and waits at most 30 s for the slower process. That is
        too short while a process compiles a large program; this exchange compiles quickly.
        """
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("open")
        self._writer = ocp.StandardCheckpointer()

    def restore(self, checkpoint: Path, meta: Json) -> str:
        """Restore its arrays from a checkpoint; returns "", or the reason why that failed."""
        try:
            self._stage.restore(checkpoint, meta)
        except Exception as error:  # orbax and tensorstore raise many types
            return f"{self._spec.name}: {reason_of(error)}"
        return ""

    def begin(self, start: int, ahead: int) -> None:
        """Prepare to train from step ``start``, with the data of step ``start + ahead``."""
        batches = open_batches(self._stage, start + ahead)
        self._executor = StageExecutor(self._stage, self._mailbox, self._send, batches)
        self._comm_metrics = CommMetrics(Path(self._spec.workdir), self._spec.log.stem)
        self._reported = start

    def train(self, start: int, stop: int, row: bool) -> Span:
        """See `StageExecutor.train`."""
        span = self._executor.train(start, stop, row)
        if row and stop > self._reported:
            self._comm_metrics.measured = span.seconds
            self._comm_metrics.row(stop, stop - self._reported)
            self._reported = stop
        return span

    def evaluate(self) -> np.ndarray | None:
        """See `StageExecutor.evaluate`."""
        return self._executor.evaluate()

    def save(self, draft: Path) -> dict[str, int]:
        """Copy its state and write it in the background; see `Stage.save`."""
        return self._stage.save(self._writer, draft)

    def save_model(self, draft: Path) -> dict[str, int]:
        """As `save`, for its part of the consensus model."""
        return self._stage.save_model(self._writer, draft)

    def saved(self) -> None:
        """Wait until everything saved so far is on disk."""
        self._writer.wait_until_finished()

    def beat(self) -> int:
        """Answer a heartbeat; returns the process id."""
        return os.getpid()

    def _send(self, stage: int, key: Key, value: object) -> None:
        self._channels[stage].send(key, value)
