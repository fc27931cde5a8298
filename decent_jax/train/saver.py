"""Checkpoints of a run, and the best model: what is saved with them, and restored."""

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from decent_jax.ground import json_files
from decent_jax.ground.errors import CheckpointError
from decent_jax.train.checkpoint import Checkpointer, failed
from decent_jax.train.evaluation import Model
from decent_jax.train.experiment import Experiment
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import check_there

# Errors in orbax's threads while they write, such as a full disk, are kept instead of printed.
# orbax logs them with a traceback; if it reports them at all, it does so with the next checkpoint.
_LOGGERS = ("absl", "asyncio")
_WRITERS = ("run", "_finalize_checkpoint")  # functions of orbax whose failure loses a checkpoint


class Saver:
    """Saves checkpoints, and what they must know; a context that waits until all are written.

    Attributes:
      checkpoints: on disk.
      failures: of the threads that write them; the loop asks in each step whether there is one.
      evaluated: the last evaluation, a row with its ``step``.
      best: the lowest ``eval/loss`` so far.
      seconds: of training, in the sessions before this one.
      steps_ahead: data position minus step count, in steps; not 0 after a resume with another
        ``batch_size``.
    """

    def __init__(self, experiment: Experiment, checkpoints: Checkpointer):
        self.checkpoints = checkpoints
        self.evaluated: dict[str, Any] = {}
        self.best, self.seconds, self.steps_ahead = math.inf, 0.0, 0
        self._experiment = experiment
        self._kept, self.failures = contextlib.ExitStack(), Failures()

    def restored(self, meta: dict[str, Any]) -> None:
        """Continue from the checkpoint that has this ``meta``."""
        self.seconds, self.best = meta["seconds"], meta["best"]
        self.steps_ahead = meta["examples"] // self._experiment.config.batch_size - meta["step"]
        if not self.checkpoints.drop_best_after(meta["step"]):
            self.best = math.inf

    def save(self, done: int, state: TrainState, seconds: float, row: Any = None) -> None:
        """Save the state after ``done`` steps and ``seconds`` of training, in the background.

        ``row`` is the row of metrics that has begun, see `decent_jax.train.metrics.Report.begun`.
        """
        check_there(self.checkpoints.workdir)
        config = self._experiment.config
        meta = {
            "num_replicas": config.num_replicas,
            "schedule": self._experiment.schedule.name,
            "batch_size": config.batch_size,
            "examples": (done + self.steps_ahead) * config.batch_size,
            "seconds": seconds,
            "best": self.best,
            "row": row,
            "config": json_files.flat(config),
        }
        self.checkpoints.save(done, state, meta)

    def check(self) -> None:
        """Raises CheckpointError where a thread could not write an earlier checkpoint."""
        self.checkpoints.check()
        if self.failures.first is not None:
            raise failed(self.checkpoints.workdir, self.failures.first)

    def rescue(self, done: int, state: TrainState, seconds: float, row: Any) -> str:
        """Save before the run fails, if this process can do so alone; returns words about it."""
        if jax.process_count() > 1 or not done:
            return ""
        self.save(done, state, seconds, row)
        self.checkpoints.wait()
        return f"; a checkpoint of step {done} is saved"

    def evaluation(self, done: int, row: dict[str, float], model: Model) -> None:
        """Remember the evaluation; save the model if it is the best so far."""
        self.evaluated = {"step": done, **row}
        if row["eval/loss"] < self.best:
            self.best = row["eval/loss"]
            self.checkpoints.save_best(done, *model, {"eval_loss": self.best})

    def newest(self) -> str:
        """Words about the newest checkpoint."""
        saved = self.checkpoints.steps()
        if saved:
            return f"the last checkpoint is of step {saved[-1]}"
        return "no checkpoint has been saved"

    def __enter__(self) -> "Saver":
        self.failures = self._kept.enter_context(kept_failures())
        return self

    def __exit__(self, exc_type: type | None, *_) -> None:
        # After an error, a second one from closing must not hide it.
        with self._kept, contextlib.suppress(*[CheckpointError] if exc_type else []):
            self.checkpoints.close()
            if exc_type is None:
                self.check()


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


@contextlib.contextmanager
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
