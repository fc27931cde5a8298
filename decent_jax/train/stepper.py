"""Steps of the replicas on this process's devices: their state, their programs, their batches."""

import contextlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from decent_jax.checkpoints.executables import NO_CACHE, ExecutableCache, open_cache
from decent_jax.checkpoints.in_memory import MemoryCheckpoints
from decent_jax.checkpoints.on_disk import Checkpointer
from decent_jax.cluster import watch
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import format_bytes, format_number
from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.monitor.comm_metrics import CommMetrics, Times
from decent_jax.monitor.goodput import Clock, Idle, peak
from decent_jax.monitor.step_trace import StepTrace
from decent_jax.replicas import TrainState
from decent_jax.train import algorithm, xla
from decent_jax.train import step as step_lib
from decent_jax.train.delayed_step import Blocks
from decent_jax.train.experiment import Experiment, train_batches
from decent_jax.train.on_device import read_records, steps_together
from decent_jax.train.step import Resident, make_step
from decent_jax.train.workdir import Workdir

FIRST = np.int32(0)  # the first step's number in the form that `make_step` takes
Shapes = tuple[tuple[int, ...], ...]  # of a batch's arrays
Key = tuple[int | None, Shapes]  # round and shapes of a compiled step
COMPILERS = 2  # threads: compilation takes some GiB per program, and cores that steps need


def _call(compiled: jax.stages.Compiled, state: TrainState, batch: PyTree, t: int) -> PyTree:
    return compiled(state, batch, np.int32(t))


class Stepper:
    """Makes the steps of all synchronous replicas, or of one peer.

    Args:
      experiment: the run to train.
      work: the run directory.
      first: an example of ``t`` as ``call`` passes it to a program, for compilation.
      call: ``(program, state, batch, t) -> (state, metrics)`` makes step t.

    Attributes:
      checkpoints: the checkpointer, which saves the state to disk and restores it.
      shapes: shapes and dtypes of the state.
      cost: bytes that a replica sends and keeps.
      messages: see `decent_jax.train.loop.Runner`.
      state: the state after the last step; None before `restore`.
      programs: the compiled steps, inside `training`.
    """

    def __init__(
        self,
        experiment: Experiment,
        work: Workdir,
        first: np.ndarray | np.int32 = FIRST,
        call: Callable[..., PyTree] = _call,
    ):
        self._experiment, self._work, self._first, self._call = experiment, work, first, call
        self.shapes = jax.eval_shape(lambda: init(experiment))
        self.cost = announce_cost(experiment, work, self.shapes)
        self.messages = algorithm.messages(self.cost, experiment.hosts, experiment.per_host)
        self.checkpoints = Checkpointer(work.path, experiment.config.checkpoint.keep)
        self.state: PyTree = None
        self._comm_metrics = CommMetrics(work.path)
        self._peak = peak(experiment.placement.mesh.devices.flat)
        self._batches: Any = None  # of the next steps, or the error that prevents them

    def restore(self, memory: MemoryCheckpoints | None = None) -> tuple[int, Json]:
        """See `decent_jax.train.loop.Runner`; ``memory``: in-memory checkpoints, if any."""
        experiment, work = self._experiment, self._work
        window, saved = experiment.config.optimizer.accum_steps, self.checkpoints.steps()
        restored = None
        if memory is not None:
            newest = saved[-1] if saved else -1
            restored = memory.restore(self.shapes, experiment.placement, window, after=newest)
        if restored is None and saved:
            with work.console.announce("restoring the newest checkpoint"):
                restored = self.checkpoints.restore_newest(
                    self.shapes, experiment.placement, window, say=work.console.say
                )
        if restored is None:
            with work.console.announce("creating the replicas"):
                self.state = jax.block_until_ready(init(experiment))
            return 0, {}
        self.state, meta = restored
        return meta["step"], meta

    @contextlib.contextmanager
    def training(
        self, start: int, ahead: int, clock: Clock, memory: MemoryCheckpoints | None = None
    ) -> Generator[None]:
        """See `decent_jax.train.loop.Runner`; executables are stored with in-memory checkpoints."""
        experiment, work = self._experiment, self._work
        config, folder = experiment.config, None if memory is None else memory.folder
        cache = open_cache(config.by_name, folder, experiment.placement)
        self.programs = Programs(experiment, work, clock, self.cost, self._first, cache)
        self._profile = StepTrace(config.profile.count, work.path, work.console.say)
        fed, self._records = experiment, None
        if config.data.on_device:
            with work.console.announce("reading all training records"):
                self._records, fed = read_records(experiment)
        self._feed = Feed(fed, start + ahead, clock)
        self._done = start
        with self.programs, self._feed, self._profile:
            self._read_ahead()
            try:
                yield
            finally:
                self._batches = None  # may be a reader's shared memory
            self._profile.finish(self._done, self.state)

    def step(self, done: int, until: int) -> list[Json]:
        """Dispatch a step, or the steps that a message overlaps; then get the next batches."""
        if isinstance(self._batches, DataError):
            raise self._batches
        if self._records is not None:
            together = steps_together(self._experiment.config.log.every)
            count = together if until - done >= together else 1
            self._batches = [self._feed.next() for _ in range(count)]
        batches, measured = zip(*self._batches, strict=True)
        programs, steps = self.programs, self._experiment.steps
        (rnd, count), batch = programs.blocks.due(done, steps), batches[0]
        soon = (rnd for rnd, _ in programs.blocks.cycle(done, steps))
        if self._records is not None:
            rnd, count, batch, soon = None, len(batches), Resident(self._records, batches), ()
        compiled = programs.of(self.state, batch, rnd, soon)
        self._profile.turn(done, count, self.state)
        batch = batches if programs.blocks.spans_steps(rnd) else batch
        waits = done + count >= until  # this process waits for such a step anyway
        if rnd is not None and waits and hasattr(compiled, "timed"):
            args = self.state, batch, np.int32(done)
            (self.state, metrics), times = compiled.timed(*args)
            self._comm_metrics.measured = Times(*times).entries()
        else:
            self.state, metrics = self._call(compiled, self.state, batch, done)
        of_steps = list[PyTree](metrics) if isinstance(metrics, list) else [metrics]  # pyright: ignore
        self._feed.idle.begin(of_steps[-1]["loss"])
        self._done = done + count
        self._read_ahead()
        return [of_step | {"measured": m} for of_step, m in zip(of_steps, measured, strict=True)]

    def _read_ahead(self) -> None:
        if self._done >= self._experiment.steps or self._records is not None:
            return  # with resident records, `step` takes as many batches as it needs
        try:
            count = self.programs.blocks.due(self._done, self._experiment.steps)[1]
            self._batches = [self._feed.next() for _ in range(count)]
        except DataError as error:  # raised by the next `step`, once earlier rows are written
            self._batches = error

    def measured(self, done: int, steps: int, seconds: float) -> dict[str, float]:
        """See `decent_jax.train.loop.Runner`: utilization and communication."""
        row = self._comm_metrics.row(done, steps)
        if self._peak is not None:
            task, config = self._experiment.task, self._experiment.config
            flops = task.flops_per_example * config.batch_size * steps
            row["perf/mfu"] = flops / seconds / self._peak
        return row


class Programs:
    """The compiled step for each round and each batch shape.

    The first round for a batch shape is compiled before its step runs, and the following rounds are
    compiled in background threads. A run with many rounds therefore starts as soon as a run with
    few. Leaving the context stops the threads.

    Attributes:
      blocks: when each round starts.
      compiled: programs by round and batch shapes, to call as in `decent_jax.train.step.make_step`.
      memory: memory of the largest program so far.
    """

    def __init__(
        self,
        experiment: Experiment,
        work: Workdir,
        clock: Clock,
        cost: algorithm.Cost,
        first: np.ndarray | np.int32 = FIRST,
        cache: ExecutableCache = NO_CACHE,
    ):
        config, schedule = experiment.config, experiment.schedule
        self._experiment, self._work, self._clock, self._cost = experiment, work, clock, cost
        self._first, self._cache = first, cache
        self._step = make_step(
            config,
            experiment.task,
            experiment.tx,
            experiment.rate,
            schedule,
            experiment.placement,
            cache,
        )
        self._synchronous = config.algorithm == "all_reduce"  # all of its steps are alike
        self.blocks = Blocks.of(config, schedule, experiment.tx)
        self.compiled: dict[Key, Any] = {}
        self.memory: xla.Memory | None = None
        self._threads = ThreadPoolExecutor(COMPILERS, thread_name_prefix="compiler")
        self._coming: dict[Key, Future[jax.stages.Compiled]] = {}  # by the same key as `compiled`

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        # After a signal, there is no time to wait for a compilation, and no way to stop it.
        self._threads.shutdown(wait=exc_type is None, cancel_futures=True)

    def of(
        self, state: TrainState, batch: PyTree, rnd: int | None, soon: Iterable[int | None] = ()
    ) -> Any:
        """The program of a round for batches of these shapes; see `compile`."""
        key = rnd, shapes_of(batch)
        if key not in self.compiled:
            self.compile(state, batch, *key, soon=soon)
        return self.compiled[key]

    def compile(
        self,
        state: TrainState,
        batch: PyTree,
        rnd: int | None,
        shapes: Shapes,
        soon: Iterable[int | None] = (),
    ) -> None:
        """Compile a round's step for batches of these shapes; log the cost of the first program.

        Args:
          state, batch: arguments of the step, or others with the same shapes.
          rnd, shapes: the key in `compiled`.
          soon: the following rounds, which are compiled in the background.
        """

        def compiled_for(rnd: int | None, state: PyTree = state, batch: PyTree = batch):
            batch = (batch,) * self.blocks.delay if self.blocks.spans_steps(rnd) else batch

            def compiled():
                return self._step.lower(state, batch, self._first, round=rnd).compile()

            return self._cache.get(f"step {rnd} {shapes}", compiled)

        what = f"the step ({self._name(rnd, shapes)})"
        if isinstance(batch, Resident):
            what = f"{len(batch.numbers)} steps at once"
        message = f"compiling {what}"
        coming = self._coming.pop((rnd, shapes), None)
        with self._clock.of("compiling"), self._work.console.announce(message):
            compiled = compiled_for(rnd) if coming is None else coming.result()
            watch.barrier(self._experiment.config.cluster.exchange_s)
        first = self.memory is None
        sizes = filter(None, [self.memory, xla.memory_of(compiled)])
        self.memory = max(sizes, key=sum, default=None)
        if first and self.memory is not None:
            config, task = self._experiment.config, self._experiment.task
            flops = task.flops_per_example * config.batch_size / config.num_replicas
            self._work.console.say(
                f"a step: {self.memory}, {format_number(flops / 1e9)} GFLOP of the model and "
                f"{format_bytes(self._cost.sent_a_step)} sent per replica"
            )
        self.compiled[rnd, shapes] = compiled
        like = jax.tree.map(_like, (state, batch))
        for other in dict.fromkeys(soon):
            key = other, shapes
            if key not in self.compiled and key not in self._coming:
                self._coming[key] = self._threads.submit(compiled_for, other, *like)

    def _name(self, rnd: int | None, shapes: Shapes) -> str:
        name = "without communication" if rnd is None else f"round {rnd}"
        if self.blocks.spans_steps(rnd):
            name += f" overlapping {self.blocks.delay} steps"
        if self._synchronous:
            name = "all-reduce"
        if any(shapes != other for _, other in self.compiled):  # batches of several shapes
            arrays = ("x".join(map(str, shape)) for shape in shapes if len(shape) > 1)
            name += f", batches of {' and '.join(arrays)}"
        return name


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The abstract array for compilation; a step may donate the array itself meanwhile."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def shapes_of(batch: PyTree) -> Shapes:
    """The shapes of a batch's arrays, without the replica dimension."""
    return tuple(x.shape[1:] for x in jax.tree.leaves(batch))


class Feed:
    """Reads this process's batches and moves them to the devices; on exit, its threads stop.

    Attributes:
      idle: the meter of idle time, notified of each step: waiting for data while the devices are
        busy costs nothing.
    """

    def __init__(self, experiment: Experiment, start_step: int, clock: Clock):
        task = experiment.task
        self._placement, self._clock = experiment.placement, clock
        self.idle = Idle(clock.now)
        self._measure = getattr(task, "measure", None)
        self._batches = train_batches(
            experiment.config, task, experiment.placement, start_step, experiment.partition
        )

    def next(self) -> tuple[PyTree, dict[str, float]]:
        """The next batch, and the task's measurements of it.

        Raises:
          DataError: a record cannot be used.
        """
        began = self._clock.now()
        block = next(self._batches)
        self._clock.waited_for_data(self.idle.seconds(began, self._clock.now()))
        measured: dict[str, float] = self._measure(block) if self._measure is not None else {}
        return self._placement.put(block), measured

    def __enter__(self) -> "Feed":
        self._batches.__enter__()
        self.idle.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.idle.__exit__(*exc_info)
        self._batches.__exit__(*exc_info)


def init(experiment: Experiment) -> TrainState:
    """The state before step 0."""
    return step_lib.init_state(
        experiment.config, experiment.task, experiment.tx, experiment.placement
    )


def announce_cost(experiment: Experiment, work: Workdir, shapes: TrainState) -> algorithm.Cost:
    """Compute and log a replica's cost; ``shapes`` describe the stacked state, (n, ...)."""
    config, schedule, per_host = experiment.config, experiment.schedule, experiment.per_host
    several = 1 < per_host < config.num_replicas
    cost = algorithm.cost(
        config, schedule, shapes, per_host if several else config.replicas_per_node
    )
    work.console.say(algorithm.describe(config, schedule, cost))
    return cost
