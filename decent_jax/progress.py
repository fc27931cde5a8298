"""What the user sees while a command works: what it waits for, or a bar."""

import contextlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from decent_jax import extras

extras.need("train", "tqdm")

from tqdm import tqdm

from decent_jax.errors import CheckpointError, ConfigError, DataError
from decent_jax.text import format_duration


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
    try:
        with _later(after_s, begin):
            yield
    except BaseException as error:
        if begun.is_set() or not isinstance(error, ConfigError | DataError | CheckpointError):
            end("failed after")
        raise
    end("done in")


@contextlib.contextmanager
def _later(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """A context in which ``action()`` happens once, unless the context ends before that."""
    if not seconds:
        action()
        yield
        return
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


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
