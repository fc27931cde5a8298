"""A trace of some steps, for TensorBoard's or XProf's profile page, or Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

START = 10  # steps of a run before the trace; the first ones compile


class Profile:
    """Traces ``count`` steps after the first `START` of a run; 0 traces none.

    Scopes are named ``forward_backward``, ``mix`` and ``update``. Every process writes its own file
    under ``workdir/profile``.

    Attributes:
      turns: the 0-based steps before which `turn` must be called; empty without a trace.
    """

    def __init__(self, count: int, workdir: Path, say: Callable[[str], None]):
        self.turns = {START, START + count} if count else set()
        self._folder, self._say = workdir / "profile", say
        self._tracing = False

    def turn(self, t: int, state: Any) -> None:
        """Begin or end the trace, once ``state`` is computed."""
        self.finish(t, state)
        if t == START:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def finish(self, t: int, state: Any) -> None:
        """End the trace, if there is one, after ``t`` steps of the run."""
        if self._tracing:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._tracing = False
            self._say(f"a trace of steps {START + 1} to {t} is in {self._folder}")

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._tracing:  # the run ended early: keep what there is
            jax.profiler.stop_trace()
