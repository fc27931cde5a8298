"""What the user sees while a command works: what it waits for, or a bar."""

import contextlib
import datetime
import importlib.util
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from decent_jax.ground import extras

extras.need("train", "tqdm")

from tqdm import tqdm

from decent_jax.ground.errors import CheckpointError, ConfigError, DataError
from decent_jax.ground.format import format_duration, format_number


@contextlib.contextmanager
def announce(
    message: str,
    *,
    quiet: bool = False,
    stream: TextIO | None = None,
    after_s: float = 1.0,
    kept: list[str] | None = None,
) -> Iterator[None]:
    """Print what the user waits for, and afterwards how long it took.

    `with announce("compiling the step for round 0 of 3"): ...` prints
    "compiling the step for round 0 of 3 ... done in 4.2 s".

    Args:
      quiet: print nothing.
      stream: stderr unless given.
      after_s: seconds before the first words, so that a command refused sooner says only why.
      kept: receives the line about work that is done sooner, for the caller to print.
    """
    if quiet:
        yield
        return
    out: TextIO = sys.stderr if stream is None else stream
    words = fitted(f"{message} ...", out, room=len(" done in 0.1 s"))
    begun = threading.Event()

    def begin():
        begun.set()
        print(words, end=" ", file=out, flush=True)

    def end(word):
        took = f"{word} {format_duration(time.monotonic() - started)}"
        if kept is not None and not begun.is_set():
            kept.append(f"{message} ... {took}")
            return
        if not begun.is_set():
            begin()
        print(took, file=out, flush=True)

    started = time.monotonic()
    timer = threading.Timer(after_s, begin)
    timer.daemon = True
    timer.start() if after_s else begin()
    try:
        try:
            yield
        finally:
            timer.cancel()
            if after_s:
                timer.join()
    except BaseException as error:
        if begun.is_set() or not isinstance(error, ConfigError | DataError | CheckpointError):
            end("failed after")
        raise
    end("done in")


def columns(stream: TextIO) -> int:
    """The width of a terminal; 0 if ``stream`` is none, or has no size (some are 0 by 0)."""
    if not stream.isatty():
        return 0
    size = os.get_terminal_size(stream.fileno())
    return size.columns if size.lines > 0 else 0


def fitted(text: str, stream: TextIO, room: int = 0) -> str:
    """``text`` with no word divided between two lines, where ``stream`` is a terminal.

    The last ``room`` columns stay free. A line with a longer word, such as a path, stays as it is.
    """
    width = columns(stream) - room
    if width <= 0:
        return text
    return "\n".join(
        line
        if len(line) <= width or max(map(len, line.split()), default=0) > width
        else textwrap.fill(line, width, break_on_hyphens=False)
        for line in text.split("\n")
    )


def progress_bar(total: float | None, show: bool, **options: Any) -> tqdm:
    """A bar on stderr; in a log file a line every half minute. ``options`` are tqdm's."""
    terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        disable=not show,
        mininterval=0.2 if terminal else 30,
        delay=0.5 if terminal else 30,
        **options,
    )


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
            time_left = [f"{datetime.timedelta(seconds=round(left))} left"]
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
        """`announce` without breaking the bar; for rare waits."""
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
