"""Errors in orbax's threads while they write, such as a full disk: kept instead of printed.

orbax logs such an error with a traceback; if it reports the error at all, it does so when the next
checkpoint is saved.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOGGERS = ("absl", "asyncio")
_WRITERS = ("run", "_finalize_checkpoint")  # functions of orbax whose failure loses a checkpoint


class Failures(logging.Filter):
    """Drops what orbax logs about exceptions, and keeps the first that loses a checkpoint.

    Attributes:
      first: that exception, or None.
    """

    def __init__(self):
        super().__init__()
        self.first: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record may be printed."""
        if record.name == "absl" and "orbax" not in record.pathname:
            return True
        if not record.exc_info or not record.exc_info[1]:
            # What orbax warns of, such as a folder that went away, fails soon after.
            return record.name != "absl" or record.levelno >= logging.ERROR
        if record.name == "absl" and record.funcName in _WRITERS and self.first is None:
            self.first = record.exc_info[1]
        return False


@contextmanager
def kept_failures() -> Iterator[Failures]:
    """`Failures` of this context; once one is kept, also of what comes after it."""
    failures = Failures()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(failures)
    # tensorstore's threads print what they meet by this hook, once orbax has given up waiting.
    shown, sys.unraisablehook = sys.unraisablehook, _without_late_writers(sys.unraisablehook)
    yield failures
    if failures.first is not None:
        return  # threads of a failed checkpoint go on after the run has ended
    sys.unraisablehook = shown
    for name in _LOGGERS:
        logging.getLogger(name).removeFilter(failures)


def _without_late_writers(shown: Callable[..., object]) -> Callable[..., object]:
    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            shown(unraisable)

    return hook
