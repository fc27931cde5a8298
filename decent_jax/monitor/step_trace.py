"""A trace of several steps by jax's profiler."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from decent_jax.ground.fields import changeable

TRACED_AFTER = 10  # steps of a run before the trace; the first ones compile


@dataclass(frozen=True)
class Profile:
    """Whether jax's profiler traces some steps."""

    count: int = changeable(0, "steps to trace into workdir/profile, after 10", at_least=0)


class StepTrace:
    """Traces ``count`` steps after the first `TRACED_AFTER` of a run; 0 traces none.

    Scopes are named ``forward_backward``, ``mix`` and ``update``. Every process writes its own file
    under ``workdir/profile``.

    If a message overlaps several steps, the trace neither starts nor ends during these steps.
    """

    def __init__(self, count: int, workdir: Path, say: Callable[[str], None]):
        self._count, self._folder, self._say = count, workdir / "profile", say
        self._tracing, self._began = False, 0

    def turn(self, t: int, steps: int, state: object) -> None:
        """Before ``steps`` steps from t on, start or end the trace once ``state`` is computed."""
        if t >= self._began + self._count:
            self.finish(t, state)
        if self._count and t <= TRACED_AFTER < t + steps:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._tracing, self._began = True, t

    def finish(self, t: int, state: object) -> None:
        """End the trace, if there is one, after ``t`` steps of the run."""
        if self._tracing:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._tracing = False
            self._say(f"a trace of steps {self._began + 1} to {t} is in {self._folder}")

    def __enter__(self) -> "StepTrace":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._tracing:  # the run ended early: keep the partial trace
            jax.profiler.stop_trace()
