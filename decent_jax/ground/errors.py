"""The errors that refuse a run or end it early.

Their messages are for a terminal: one line of at most ``longest`` characters. Messages that would
be longer, because they quote a long value or path, are cut in the middle of their longest words.
Control characters are escaped.
"""

import contextlib
import os
import tempfile
import traceback
from pathlib import Path

from decent_jax.ground.format import printable, shorten, shown


class Foreseen(Exception):
    """An error that a command reports by its message alone, before it exits with ``code``."""

    longest = 600  # characters: messages about files contain paths and library errors
    code = 1  # the exit code of a command

    def __init__(self, message: object = ""):
        line, short = printable(" ".join(str(message).splitlines())), self.longest // 5
        while len(line) > self.longest:  # the requirement and the remedy consist of short words
            word = max(line.split(" "), key=len)
            if len(word) <= short:
                break
            most = len(word) + self.longest - len(line)
            line = line.replace(word, shorten(word, max(short, most)))
        super().__init__(shorten(line, self.longest))


class ConfigError(Foreseen, ValueError):
    """A config that cannot be run; the message is one sentence with the reason and the remedy.

    Args:
      message: the sentence, with field and value.
      field: the field as the user writes it: ``"model.width"``, ``"--out"``.
      value: the value received.
    """

    longest = 276  # at most 300 with the name of the command
    code = 2

    def __init__(self, message: object = "", *, field: str = "", value: object = None):
        super().__init__(message)
        self.field, self.value = field, value

    @classmethod
    def about(cls, field: str, value: object, why: str) -> "ConfigError":
        """The error with the sentence ``FIELD WHY, got VALUE``, the form of most refusals."""
        printed = shorten(str(value), 120) if isinstance(value, Path) else shown(value)
        return cls(f"{field} {why}, got {printed}", field=field, value=value)


class DataError(Foreseen, ValueError):
    """Data or a folder that cannot be used; the message has the reason and the remedy."""


class RunError(Foreseen):
    """A run directory that cannot be read; the message is one sentence with the reason."""


class TrainingFailed(Foreseen, RuntimeError):
    """Training that cannot continue; the message names the step and the last good checkpoint."""


class CheckpointError(Foreseen, RuntimeError):
    """A run without a usable checkpoint; the message lists the checkpoints tried, with reasons."""


class Interrupted(Foreseen, RuntimeError):
    """An end by Ctrl-C or SIGTERM (number ``signal``), after a checkpoint was saved."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.code = 128 + signal


PEER_LOST = 75  # exit code (EX_TEMPFAIL): another process was lost; run the same command again


class PeerLost(Foreseen, RuntimeError):
    """A failed exchange with other processes; if the lost process is known, this one exits."""

    code = PEER_LOST


def unforeseen(error: BaseException) -> str:
    """A sentence about an unexpected error, such as one in a user's task.

    The sentence names the last traceback line in the user's files (or, if there is none, in a
    package's) and the file with the traceback.
    """
    frames = traceback.extract_tb(error.__traceback__) or [traceback.FrameSummary("?", 0, "?")]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (own or frames)[-1]
    said = (str(error).strip().splitlines() or [""])[0]
    path = Path(tempfile.gettempdir()) / f"decent_jax-traceback-{os.getpid()}.txt"
    with contextlib.suppress(OSError):
        path.write_text("".join(traceback.format_exception(error)), errors="backslashreplace")
    return shorten(
        printable(
            f"{type(error).__name__}: {shorten(said, 150)} ({Path(last.filename).name}, line "
            f"{last.lineno}); the traceback is in {path}"
        ),
        300,
    )
