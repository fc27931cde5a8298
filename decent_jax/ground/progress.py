"""The progress of a command: announcements of longer work, and progress bars.

A terminal, or a notebook with ipywidgets, shows tqdm's bar; anything else gets log lines.
"""

import contextlib
import io
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from decent_jax.ground import extras

extras.need("train", "tqdm")

from tqdm import auto, tqdm

from decent_jax.ground.format import format_duration, format_number


@contextlib.contextmanager
def announce(
    message: str, *, quiet: bool = False, brief: bool = True, after_s: float = 1.0
) -> Iterator[None]:
    """Prints a message on stderr during the work that it announces, and afterwards the duration.

    `with announce("compiling the step for round 0 of 3"): ...` prints
    "compiling the step for round 0 of 3 ... done in 4.2 s".

    Args:
      message: the text without the three dots.
      quiet: whether to print nothing.
      brief: whether to print even if the work ends within ``after_s`` without an error.
      after_s: seconds before the first words, so that a command that is refused sooner prints only
        the reason.
    """
    if quiet:
        yield
        return
    began, told = time.monotonic(), threading.Event()

    def tell() -> None:
        told.set()
        print(f"{message} ...", end=" ", file=sys.stderr, flush=True)

    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    timer.start()
    word = "ended early after"
    try:
        yield
        word = "done in"
    finally:
        timer.cancel()
        timer.join()
        if not told.is_set() and brief and word == "done in":
            tell()
        if told.is_set():
            took = format_duration(time.monotonic() - began)
            print(f"{word} {took}", file=sys.stderr, flush=True)


def progress_bar(total: float | None, show: bool, **options: Any) -> tqdm:
    """A tqdm bar on stderr, with tqdm's ``options``; in a log file, a line every half minute."""
    every_s, after_s = (0.2, 0.5) if sys.stderr.isatty() else (30, 30)
    return tqdm(total=total, disable=not show, mininterval=every_s, delay=after_s, **options)


class _Hidden(tqdm):
    """A bar that measures the time left and shows nothing."""

    def display(self, *_, **__) -> None:
        pass


class Progress:
    """A display of a run's progress, its metrics, and the time left, excluding waits.

    Args:
      total_steps: the step at which the run ends; None: unknown, so no remaining time is shown.
      start_step: steps done by earlier sessions (a resumed run).
      quiet: whether to show nothing, as in every process but the first.
    """

    def __init__(self, total_steps: int | None, start_step: int = 0, quiet: bool = False):
        self._quiet = quiet
        # tqdm imports tqdm.notebook, and IPython with it, only in a notebook with ipywidgets.
        bars = getattr(sys.modules.get("tqdm.notebook"), "tqdm_notebook", ())
        self._has_bar = sys.stderr.isatty() or issubclass(auto.tqdm, bars)
        self._bar = (auto.tqdm if self._has_bar else _Hidden)(
            total=total_steps,
            initial=start_step,
            disable=quiet,
            file=sys.stderr if self._has_bar else io.StringIO(),
            dynamic_ncols=True,
            miniters=1,
            bar_format="{desc}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}",
        )

    def update(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Shows that `step` steps are done.

        `metrics` are shown under their names: {"loss": 2.413, "tokens/s": 81234.0}. Without
        metrics, only the bar advances, which is cheap enough for every step.
        """
        if self._quiet:
            return
        self._bar.update(step - self._bar.n)
        if not metrics:
            return
        numbers = [_named(name, value) for name, value in metrics.items()]
        where, left = f"step {step}", []
        if self._bar.total is not None:
            shown = dict(self._bar.format_dict, bar_format="{remaining} left")
            where, left = f"{where}/{self._bar.total}", [self._bar.format_meter(**shown)]
        if self._has_bar:  # the first words survive on a narrow terminal
            self._bar.set_postfix_str("  ".join([*left, *numbers]))
        else:
            self.note("  ".join([where, *numbers, *left]))

    def note(self, message: str) -> None:
        """Prints a line, above the bar if there is one."""
        if not self._quiet:
            self._bar.write(str(message), file=sys.stderr)

    @contextlib.contextmanager
    def announce(self, message: str) -> Iterator[None]:
        """Like the function `announce`, but a bar shows the message while the wait lasts."""
        if not self._has_bar or self._quiet:
            with announce(message, quiet=self._quiet):
                yield
        else:
            began = time.monotonic()
            self._bar.set_description_str(f"{message} ... ")
            try:
                yield
            finally:
                self._bar.set_description_str()
            self.note(f"{message} ... done in {format_duration(time.monotonic() - began)}")
        self._bar.unpause()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        """Freezes the bar and ends its line."""
        self._bar.close()


def _named(name: str, value) -> str:
    """ "loss 2.413", but "81.2k tokens/s"."""
    value = value if isinstance(value, int) else float(value)
    if name.endswith("/s"):
        return f"{format_number(value)} {name}"
    return f"{name} {format_number(value, digits=4)}"
