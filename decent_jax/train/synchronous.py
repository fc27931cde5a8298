"""Synchronous replicas: one program on all devices, in one process or several."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decent_jax import optim, replicas
from decent_jax.checkpoints.executables import NO_CACHE, ExecutableCache, open_cache
from decent_jax.checkpoints.in_memory import MemoryCheckpoints, open_memory_checkpoints
from decent_jax.checkpoints.on_disk import Checkpointer
from decent_jax.cluster import watch
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import format_bytes, format_duration, format_number
from decent_jax.ground.json_files import flat
from decent_jax.monitor.comm_metrics import CommMetrics, Times
from decent_jax.monitor.goodput import Clock, Idle, peak
from decent_jax.monitor.step_trace import StepTrace
from decent_jax.replicas import TrainState
from decent_jax.train import algorithm, loop, xla
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.delayed_step import Blocks
from decent_jax.train.evaluation import Evaluator, Model
from decent_jax.train.experiment import Experiment, open_experiment, train_batches
from decent_jax.train.on_device import read_records, steps_together
from decent_jax.train.saver import Saver
from decent_jax.train.settings import Config
from decent_jax.train.step import Resident, make_step
from decent_jax.train.workdir import Workdir

FIRST = np.int32(0)  # the number of the first step, as `decent_jax.train.step.make_step` takes it
TIMED = 3  # steps of each kind in a dry run
COMPILERS = 2  # threads: compilation takes some GiB per program, and cores that steps need

check = config_lib.check  # the interface of `decent_jax.train.config.TRAINERS`


@watch.lost_peers_told()
def run(config: Config, workdir: str | Path) -> dict[str, Any]:
    """See `decent_jax.train.run`."""
    with open_experiment(config, workdir) as (experiment, work):
        work.check_shared()
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

    evaluates, first = True, FIRST

    def __init__(self, experiment: Experiment, work: Workdir):
        self.experiment, self.work = experiment, work
        placement = experiment.placement

        def averaged(params, weights):
            return placement.place_all(replicas.resize(params, placement.num_replicas, weights))

        self._averaged = jax.jit(averaged, donate_argnums=0)
        self.peak = peak(experiment.placement.mesh.devices.flat)
        self.shapes = jax.eval_shape(lambda: init(experiment))
        self.cost = announce_cost(experiment, work, self.shapes)
        self.messages = algorithm.messages(self.cost, experiment.hosts, experiment.per_host)
        self.comm_metrics = CommMetrics(work.path)
        self.checkpoints = Checkpointer(work.path, experiment.config.checkpoint.keep)
        self.evaluator = Evaluator(experiment.config, experiment.task, experiment.placement)
        self.memory: MemoryCheckpoints | None = open_memory_checkpoints(
            experiment.config.recovery, work.path, self.shapes, experiment.placement, work.say
        )
        self.state: Any = None
        self._batches: Any = None  # of the next steps, or the error that prevents them

    def restore(self) -> tuple[int, dict[str, Any]]:
        """See `decent_jax.train.loop.Runner`."""
        experiment, work = self.experiment, self.work
        window, saved = experiment.config.optimizer.accum_steps, self.checkpoints.steps()
        newest = saved[-1] if saved else -1
        found = None
        if self.memory is not None:
            found = self.memory.restore(self.shapes, experiment.placement, window, after=newest)
        if found is None and saved:
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
        folder = None if self.memory is None else self.memory.folder
        cache = open_cache(flat(experiment.config), folder, experiment.placement)
        self.programs = Programs(experiment, work, clock, self.cost, self.first, cache)
        self._profile = StepTrace(experiment.config.profile.count, work.path, work.say)
        self._steps, fed, self._records = experiment.steps, experiment, None
        if experiment.config.data.on_device:
            with work.announce("reading all training records"):
                self._records, fed = read_records(experiment)
        self._feed = Feed(fed, start + ahead, clock)
        self._done = start
        with self.programs, self._feed, self._profile:
            self._read_ahead(start)
            try:
                yield
            finally:
                self._batches = None  # may be a reader's shared memory
            self._profile.finish(self._done, self.state)

    def over(self, done: int) -> bool:
        """See `decent_jax.train.loop.Runner`."""
        return False

    def step(self, done: int, until: int) -> list[dict[str, Any]]:
        """Dispatch a step, or the steps that a message overlaps; then get the next batches."""
        if isinstance(self._batches, DataError):
            raise self._batches
        if self._records is not None:
            together = steps_together(self.experiment.config.log.every)
            count = together if until - done >= together else 1
            self._batches = [self._feed.next() for _ in range(count)]
        batches, measured = zip(*self._batches, strict=True)
        (rnd, count), one = self.programs.blocks.due(done, self._steps), batches[0]
        soon = (rnd for rnd, _ in self.programs.blocks.cycle(done, self._steps))
        if self._records is not None:
            rnd, count, one, soon = None, len(batches), Resident(self._records, batches), ()
        key = rnd, shapes_of(one)
        if key not in self.programs.compiled:
            self.programs.compile(self.state, one, *key, soon=soon)
        self._profile.turn(done, count, self.state)
        batch = batches if self.programs.blocks.spans_steps(rnd) else one
        compiled = self.programs.compiled[key]
        waits = done + count >= until  # this process, anyway
        if rnd is not None and waits and hasattr(compiled, "timed"):
            args = self.state, batch, np.int32(done)
            (self.state, metrics), times = compiled.timed(*args)
            self.comm_metrics.measured = Times(*times).entries()
        else:
            metrics = self._run(compiled, batch, done)
        made = metrics if isinstance(metrics, list) else [metrics]
        self._feed.idle.begin(made[-1]["loss"])
        self._done = done + count
        self._read_ahead(self._done)
        return [one | {"measured": its} for one, its in zip(made, measured, strict=True)]

    def _run(self, compiled: Any, batch: Any, t: int) -> Any:
        """Dispatch the program at step t; its metrics."""
        self.state, metrics = compiled(self.state, batch, np.int32(t))
        return metrics

    def _read_ahead(self, done: int) -> None:
        if done >= self._steps or self._records is not None:  # a step knows how many it takes
            return
        try:
            count = self.programs.blocks.due(done, self._steps)[1]
            self._batches = [self._feed.next() for _ in range(count)]
        except DataError as error:  # told when the steps before it have been looked at
            self._batches = error

    def consensus(self) -> replicas.Consensus:
        """See `decent_jax.train.loop.Runner`."""
        return self.evaluator.distance(self.state.params)

    def average(self) -> None:
        """See `decent_jax.train.loop.Runner`."""
        weights = optim.consensus_weights(self.state.opt_state)
        self.state = self.state._replace(params=self._averaged(self.state.params, weights))

    def evaluate(self, pause: Callable[[], None]) -> tuple[dict[str, float], Model]:
        """See `decent_jax.train.loop.Runner`."""
        self.evaluator.pause = pause
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
            clock,
            steps=done,
            training_seconds=round(clock.seconds, 3),
            memory_bytes_per_device=memory and memory._asdict(),
        )


class Feed:
    """The batches of this process on their way to the devices; a context that stops its threads.

    Attributes:
      idle: notified of each step, because waiting for data costs nothing while the devices work.
    """

    def __init__(self, experiment: Experiment, start_step: int, clock: Clock):
        task = experiment.task
        self._placement, self._clock = experiment.placement, clock
        self.idle = Idle(clock.now)
        self._measure = getattr(task, "measure", None)
        self._batches = train_batches(
            experiment.config, task, experiment.placement, start_step, experiment.partition
        )

    def next(self) -> tuple[Any, dict[str, float]]:
        """The next batch, and the task's measurements of it.

        Raises:
          DataError: a record cannot be used.
        """
        began = self._clock.now()
        block = next(self._batches)
        self._clock.waited_for_data(self.idle.seconds(began, self._clock.now()))
        measured = self._measure(block) if self._measure is not None else {}
        return self._placement.put(block), measured

    def __enter__(self) -> "Feed":
        self._batches.__enter__()
        self.idle.__enter__()
        return self

    def __exit__(self, *exc_info) -> None:
        self.idle.__exit__(*exc_info)
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
    """Compute and log the cost of a replica."""
    config, schedule, per_host = experiment.config, experiment.schedule, experiment.per_host
    several = 1 < per_host < config.num_replicas
    cost = algorithm.cost(
        config, schedule, shapes, per_host if several else config.replicas_per_node
    )
    work.say(algorithm.describe(config, schedule, cost))
    return cost


def time_steps(experiment: Experiment, work: Workdir, steps: int) -> None:
    """Compile and time both kinds of step, with and without communication, and log the times.

    Args:
      experiment: to try.
      work: logs.
      steps: of the run.
    """
    shapes = jax.eval_shape(lambda: init(experiment))
    clock = Clock()
    programs = Programs(experiment, work, clock, announce_cost(experiment, work, shapes))
    with Feed(experiment, 0, clock) as feed:
        batch, _ = feed.next()
    cycle = list(programs.blocks.cycle())
    rounds = [rnd for rnd, count in cycle for _ in range(count)]
    silent, seconds = rounds.count(None) / len(rounds), {}
    state = init(experiment)
    for rnd, count in sorted(
        {rnd is None: (rnd, k) for rnd, k in reversed(cycle)}.values(), key=str
    ):
        key = rnd, shapes_of(batch)
        programs.compile(state, batch, *key)
        given, times = (batch,) * count if programs.blocks.spans_steps(rnd) else batch, []
        for t in range(1 + TIMED):  # the first does not count
            began = time.perf_counter()
            state, metrics = programs.compiled[key](state, given, np.int32(t))
            jax.block_until_ready((state, metrics))
            times.append((time.perf_counter() - began) / count)
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


# --- Programs -------------------------------------------------------------------------------------


class Programs:
    """The compiled step of each round and each shape of batches.

    The first round of a shape is compiled before its step, the others in background threads, so a
    run with many rounds starts as soon as one with few. It is a context that stops the threads.

    Attributes:
      blocks: the start of each round.
      compiled: by round and shapes of a batch; call one as in `decent_jax.train.step.make_step`.
      memory: of the largest program so far.
    """

    def __init__(
        self,
        experiment: Experiment,
        work: Workdir,
        clock: Clock,
        cost: algorithm.Cost,
        first: Any = FIRST,
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
        self.compiled: dict[tuple, Any] = {}
        self.memory: xla.Memory | None = None
        self._threads = ThreadPoolExecutor(COMPILERS, thread_name_prefix="compiler")
        self._coming: dict[tuple, Future] = {}  # by the same key as `compiled`

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *exc_info) -> None:
        self._threads.shutdown(cancel_futures=True)

    def compile(
        self,
        state: TrainState,
        batch: Any,
        rnd: int | None,
        shapes: tuple,
        soon: Iterable[int | None] = (),
    ) -> None:
        """Compile the step of a round for batches of these shapes; log the cost of the first one.

        Args:
          state, batch: of the step, or with the same shapes.
          rnd, shapes: the key in `compiled`.
          soon: the following rounds, which are compiled in the background.
        """

        def compiled_for(rnd, state=state, batch=batch):
            batch = (batch,) * self.blocks.delay if self.blocks.spans_steps(rnd) else batch

            def compiled():
                return self._step.lower(state, batch, self._first, round=rnd).compile()

            return self._cache.get(f"step {rnd} {shapes}", compiled)

        what = f"the step ({self._name(rnd, shapes)})"
        if isinstance(batch, Resident):
            what = f"{len(batch.numbers)} steps at once"
        message = f"compiling {what}"
        coming = self._coming.pop((rnd, shapes), None)
        with self._clock.of("compiling"), self._work.announce(message):
            compiled = compiled_for(rnd) if coming is None else coming.result()
            watch.barrier(self._experiment.config.cluster.exchange_s)
        first = self.memory is None
        both = filter(None, [self.memory, xla.memory_of(compiled)])
        self.memory = max(both, key=sum, default=None)
        if first and self.memory is not None:
            config, task = self._experiment.config, self._experiment.task
            flops = task.flops_per_example * config.batch_size / config.num_replicas
            self._work.say(
                f"a step: {self.memory}, {format_number(flops / 1e9)} GFLOP of the model and "
                f"{format_bytes(self._cost.sent_a_step)} sent per replica"
            )
        self.compiled[rnd, shapes] = compiled
        like = jax.tree.map(_like, (state, batch))
        for other in dict.fromkeys(soon):
            key = other, shapes
            if key not in self.compiled and key not in self._coming:
                self._coming[key] = self._threads.submit(compiled_for, other, *like)

    def _name(self, rnd, shapes) -> str:
        name = "without communication" if rnd is None else f"round {rnd}"
        if self.blocks.spans_steps(rnd):
            name += f" overlapping {self.blocks.delay} steps"
        if self._synchronous:
            name = "all-reduce"
        if any(shapes != other for _, other in self.compiled):  # the task has several
            arrays = ("x".join(map(str, shape)) for shape in shapes if len(shape) > 1)
            name += f", batches of {' and '.join(arrays)}"
        return name


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The abstract array for compilation; a step may donate the array itself meanwhile."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
