"""The terminal output of a run."""

import contextlib
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager

import jax

from decent_jax.ground.progress import Progress, announce


class Console:
    """Shows lines, waits and progress on the terminal; only process 0 prints.

    Attributes:
      quiet: True in all processes but the first.
    """

    def __init__(self):
        self.quiet = jax.process_index() != 0
        self._progress: Progress | None = None  # the bar, which lines must not break
        self._announced: set[str] = set()
        self._accepted = False

    def say(self, message: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.quiet:
            return
        if self._progress is not None:
            self._progress.note(message)
        else:
            print(message, file=sys.stderr, flush=True)

    def announce(self, message: str, once: bool = False) -> AbstractContextManager[None]:
        """A context that prints what the user is waiting for; ``once``: only the first time."""
        if once and message in self._announced:
            return contextlib.nullcontext()
        self._announced.add(message)
        if self._progress is not None:
            return self._progress.announce(message)
        return announce(message, quiet=self.quiet, brief=self._accepted)

    def accept(self) -> None:
        """From now on, also announce brief waits; a run refused earlier prints only the reason."""
        self._accepted = True

    @contextlib.contextmanager
    def show_progress(self, steps: int | None, start: int) -> Generator[Progress]:
        """A context with a `Progress` bar from ``start`` to ``steps``, None if unknown."""
        with Progress(steps, start, quiet=self.quiet) as self._progress:
            try:
                yield self._progress
            finally:
                self._progress = None
