"""What the user sees while a run trains: a bar on a terminal, plain lines anywhere else."""

import contextlib
import os
import sys
import time

from tqdm import tqdm

from decent_jax.text import format_clock, format_duration, format_number


class Progress:
    """Shows how far a run is, its numbers, and the time left.

    Args:
      total_steps: the step at which the run ends.
      start_step: steps that were done before this session (a resumed run).
      quiet: show nothing; for every process but the first.
      stream: where to write, `sys.stderr` unless told. A terminal gets a bar, anything else lines.

    The time left is estimated from the steps of this session after its first update, so neither
    an earlier session nor the first step's compilation counts; nor do the waits in `announce`.
    """

    def __init__(self, total_steps, start_step=0, quiet=False, stream=None):
        self._stream = sys.stderr if stream is None else stream
        self._total = total_steps
        self._quiet = quiet
        self._waits = 0  # announcements that are open
        self._inside_line = False  # one of them left the cursor behind its message
        self._waited = 0.0  # seconds spent in announcements since the first update
        self._first = None  # (step, time) of the first update
        self._bar = None
        if not quiet and _has_room(self._stream):
            self._bar = _Bar(
                total=total_steps,
                initial=start_step,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def update(self, step, metrics=None):
        """Say that `step` steps are done.

        `metrics` are shown as they are named: {"loss": 2.413, "tokens/s": 81234.0}. Without them
        only the bar moves, which is cheap enough for every step.
        """
        if self._quiet:
            return
        left = self._time_left(step)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
        if not metrics:
            return
        numbers = [_named(name, value) for name, value in metrics.items()]
        time_left = []
        if left is not None and step < self._total:
            time_left = [f"{format_clock(left)} left"]
        if self._bar is None:
            self.note("  ".join([f"step {step}/{self._total}", *numbers, *time_left]))
        else:  # the time first: a narrow terminal cuts the end
            self._bar.set_postfix_str("  ".join(time_left + numbers))

    def note(self, message):
        """Print a line without breaking the bar."""
        if self._quiet:
            return
        if self._bar is None or self._waits:
            print("\n" * self._inside_line + str(message), file=self._stream, flush=True)
            self._inside_line = False
        else:
            self._bar.write(str(message), file=self._stream)

    @contextlib.contextmanager
    def announce(self, message):
        """Like `announce` of this module, beside the bar; for waits that happen only once."""
        if self._bar is not None:
            self._bar.clear()
        started = time.monotonic()
        self._waits += 1
        self._inside_line = True
        try:
            with announce(message, quiet=self._quiet, stream=self._stream):
                yield
        finally:
            self._waits -= 1
            self._inside_line = False
            if self._waits == 0 and self._first is not None:
                self._waited += time.monotonic() - started
            if self._bar is not None and self._waits == 0:
                self._bar.refresh()

    def close(self):
        """Leave the bar as it is and end its line; closing twice is harmless."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _time_left(self, step):
        """Seconds to go at the pace since the first update; None where there is none yet."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        if step <= first_step:
            return None
        return (now - first_time - self._waited) / (step - first_step) * (self._total - step)


@contextlib.contextmanager
def announce(message, *, quiet=False, stream=None):
    """Say what is being waited for, and when it is over how long it took.

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


def progress_bar(total, show, **options):
    """A bar on stderr; in a log file a line every half minute. ``options`` are tqdm's."""
    terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        disable=not show,
        mininterval=0.2 if terminal else 30,
        delay=0.5 if terminal else 30,
        **options,
    )


def _named(name, value):
    """ "loss 2.413", but "81.2k tokens/s"."""
    value = value if isinstance(value, int) else float(value)
    return (
        f"{format_number(value)} {name}"
        if name.endswith("/s")
        else f"{name} {format_number(value, digits=4)}"
    )


def _has_room(stream):
    """Whether this is a terminal with a known size; some pseudo-terminals are 0 by 0."""
    if not stream.isatty():
        return False
    return min(os.get_terminal_size(stream.fileno())) > 0


class _Bar(tqdm):
    monitor_interval = 0  # no thread that redraws the bar in the middle of an announcement
