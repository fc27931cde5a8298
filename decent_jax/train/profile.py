"""A trace of some steps, for TensorBoard's or XProf's profile page, or Perfetto."""

from collections.abc import Callable
from pathlib import Path

import jax


class Profile:
    """Traces ``count`` steps after the ``start`` first of a run; 0 traces none.

    Scopes are named ``forward_backward``, ``mix`` and ``update``. Every process writes its own file
    under ``workdir/profile``.
    """

    def __init__(self, start: int, count: int, workdir: Path, say: Callable[[str], None]):
        self.start, self.end = start, start + count
        self._folder, self._say = workdir / "profile", say
        self._tracing = False

    def before_step(self, t: int, state) -> None:
        """To be called before the 0-based step ``t``, and once after the last one."""
        if self._tracing and t >= self.end:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._tracing = False
            self._say(f"a trace of steps {self.start + 1} to {t} is in {self._folder}")
        elif t == self.start < self.end:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._tracing:  # the run ended early: what there is is kept
            jax.profiler.stop_trace()
