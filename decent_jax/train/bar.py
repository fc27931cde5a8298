"""The bar of a run: how far it is, its numbers, and the time left."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from tqdm import tqdm

from decent_jax.progress import announce, columns, fitted
from decent_jax.text import format_clock, format_number


class Progress:
    """Shows how far a run is, its numbers, and the time left.

    A bar on a terminal and in a notebook with ipywidgets, lines elsewhere.

    Args:
      total_steps: the step at which the run ends.
      start_step: steps that an earlier session has done (a resumed run).
      quiet: show nothing; for every process but the first.
      stream: where to write; None: `sys.stderr`.

    The time left is estimated from the steps of this session after its first row of numbers, so
    neither an earlier session nor what the first steps compile counts; nor do the waits in
    `announce`.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        quiet: bool = False,
        stream: TextIO | None = None,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._total = total_steps
        self._quiet = quiet
        self._waits = 0  # announcements that are open
        self._inside_line = False  # one of them left the cursor behind its message
        self._waited = 0.0  # seconds spent in announcements since the first row
        self._first = None  # (step, time) of the first row
        self._bar = None
        kind = _Bar if columns(self._stream) else _notebook_bar() if stream is None else None
        if not quiet and kind is not None:
            self._bar = kind(
                total=total_steps,
                initial=start_step,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def update(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Show that `step` steps are done.

        `metrics` are shown as they are named: {"loss": 2.413, "tokens/s": 81234.0}. Without them
        only the bar moves, which is cheap enough for every step.
        """
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
        if not metrics:
            return
        left = self._time_left(step)
        numbers = [_named(name, value) for name, value in metrics.items()]
        time_left = []
        if left is not None and step < self._total:
            time_left = [f"{format_clock(left)} left"]
        if self._bar is None:
            self.note("  ".join([f"step {step}/{self._total}", *numbers, *time_left]))
        else:
            self._bar.set_postfix_str("  ".join(self._fitting(time_left + numbers)))

    def note(self, message: str) -> None:
        """Print a line without breaking the bar."""
        if self._quiet:
            return
        if self._bar is None or self._waits:
            print("\n" * self._inside_line + str(message), file=self._stream, flush=True)
            self._inside_line = False
        elif isinstance(self._bar, _Bar):
            self._bar.write(fitted(str(message), self._stream), file=self._stream)
        else:
            print(message)  # a notebook's stderr is red

    @contextlib.contextmanager
    def announce(self, message: str) -> Iterator[None]:
        """`decent_jax.progress.announce` without breaking the bar; for rare waits."""
        if self._bar is not None:
            self._bar.clear()
        started = time.monotonic()
        self._waits += 1
        self._inside_line = True
        try:
            with announce(message, quiet=self._quiet, stream=self._stream, after_s=0):
                yield
        finally:
            self._waits -= 1
            self._inside_line = False
            if self._waits == 0 and self._first is not None:
                self._waited += time.monotonic() - started
            if self._bar is not None and self._waits == 0:
                self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is and end its line; closing twice is harmless."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _fitting(self, words: list[str]) -> list[str]:
        """Those that leave a bar of ten columns on this terminal, the first first."""
        if not isinstance(self._bar, _Bar):
            return words
        room = columns(self._stream) - len(f"100% |{10 * '#'}| {self._total}/{self._total}, ")
        fitting: list[str] = []
        for word in words:
            if len("  ".join([*fitting, word])) <= room:
                fitting.append(word)
        return fitting

    def _time_left(self, step):
        """Seconds to go at the pace since the first row; None where this is it."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        if step <= first_step:
            return None
        return (now - first_time - self._waited) / (step - first_step) * (self._total - step)


def _named(name: str, value) -> str:
    """ "loss 2.413", but "81.2k tokens/s"."""
    value = value if isinstance(value, int) else float(value)
    return (
        f"{format_number(value)} {name}"
        if name.endswith("/s")
        else f"{name} {format_number(value, digits=4)}"
    )


def _notebook_bar() -> type[tqdm] | None:
    """tqdm's bar of widgets where this is a notebook that can show it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if "IPKernelApp" not in getattr(shell, "config", ()):
        return None
    if importlib.util.find_spec("ipywidgets") is None:
        return None
    from tqdm.notebook import tqdm as notebook_bar

    return notebook_bar


class _Bar(tqdm):
    monitor_interval = 0  # no thread that redraws the bar in the middle of an announcement
