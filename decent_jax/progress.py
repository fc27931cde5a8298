"""What the user sees while a command works: what it waits for, or a bar."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from tqdm import tqdm

from decent_jax.text import format_duration


@contextlib.contextmanager
def announce(message: str, *, quiet: bool = False, stream: TextIO | None = None) -> Iterator[None]:
    """Print what the user waits for, and afterwards how long it took.

    `with announce("compiling the step for round 0 of 3"): ...` prints
    "compiling the step for round 0 of 3 ... done in 4.2 s".
    """
    stream = sys.stderr if stream is None else stream

    def say(text, end):
        if not quiet:
            print(text, end=end, file=stream, flush=True)

    say(f"{message} ...", end=" ")
    started = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"failed after {format_duration(time.monotonic() - started)}", end="\n")
        raise
    say(f"done in {format_duration(time.monotonic() - started)}", end="\n")


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
