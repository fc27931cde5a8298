"""The compiled programs of a run, one per round and shape of batches; a trace of some steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decent_jax.ground.format import format_bytes, format_number
from decent_jax.train import algorithm, xla
from decent_jax.train.experiment import Experiment
from decent_jax.train.metrics import Clock
from decent_jax.train.step import TrainState, make_step
from decent_jax.train.workdir import Workdir

FIRST = np.int32(0)  # the number of the first step, as `decent_jax.train.step.make_step` takes it
TRACED_AFTER = 10  # steps of a run before the trace; the first ones compile


class Programs:
    """The compiled step of each round and each shape of batches.

    Attributes:
      rounds: of a cycle of steps; step t has ``rounds[t % len(rounds)]``, None without one.
      compiled: by round and shapes of a batch; call one with (state, batch, int32 t).
      memory: of the program that takes most, so far.
    """

    def __init__(
        self,
        experiment: Experiment,
        work: Workdir,
        clock: Clock,
        cost: algorithm.Cost,
        first: Any = FIRST,
    ):
        config, schedule = experiment.config, experiment.schedule
        self._experiment, self._work, self._clock, self._cost = experiment, work, clock, cost
        self._first = first
        self._step = make_step(
            config,
            experiment.task,
            experiment.tx,
            experiment.rate,
            schedule,
            experiment.placement,
        )
        self._synchronous = config.algorithm == "all_reduce"  # all of its steps are alike
        cycle = 1 if self._synchronous else schedule.period * config.mix_every
        self.rounds = [
            None if self._synchronous else schedule.round_at(t, config.mix_every)
            for t in range(cycle)
        ]
        self.compiled: dict[tuple, Any] = {}
        self.memory: xla.Memory | None = None

    def compile(self, state: TrainState, batch: Any, rnd: int | None, shapes: tuple) -> None:
        """Compile the step of a round for batches of these shapes; log what the first one needs."""
        message = f"compiling the step ({self._name(rnd, shapes)})"
        with self._clock.pause(), self._work.announce(message):
            compiled = self._step.lower(state, batch, self._first, round=rnd).compile()
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

    def _name(self, rnd, shapes) -> str:
        name = "without communication" if rnd is None else f"round {rnd}"
        if self._synchronous:
            name = "all-reduce"
        if any(shapes != other for _, other in self.compiled):  # the task has several
            arrays = ("x".join(map(str, shape)) for shape in shapes if len(shape) > 1)
            name += f", batches of {' and '.join(arrays)}"
        return name


class Profile:
    """Traces ``count`` steps after the first `TRACED_AFTER` of a run; 0 traces none.

    Scopes are named ``forward_backward``, ``mix`` and ``update``. Every process writes its own file
    under ``workdir/profile``.

    Attributes:
      turns: the 0-based steps before which `turn` must be called; empty without a trace.
    """

    def __init__(self, count: int, workdir: Path, say: Callable[[str], None]):
        self.turns = {TRACED_AFTER, TRACED_AFTER + count} if count else set()
        self._folder, self._say = workdir / "profile", say
        self._tracing = False

    def turn(self, t: int, state: Any) -> None:
        """Begin or end the trace, once ``state`` is computed."""
        self.finish(t, state)
        if t == TRACED_AFTER:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def finish(self, t: int, state: Any) -> None:
        """End the trace, if there is one, after ``t`` steps of the run."""
        if self._tracing:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._tracing = False
            self._say(f"a trace of steps {TRACED_AFTER + 1} to {t} is in {self._folder}")

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._tracing:  # the run ended early: keep what there is
            jax.profiler.stop_trace()
