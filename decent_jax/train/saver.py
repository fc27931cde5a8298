"""What a run saves with its checkpoints and its best model, and takes from them again."""

import contextlib
import math
from typing import Any

import jax

from decent_jax.ground import json_files
from decent_jax.ground.errors import CheckpointError
from decent_jax.train.checkpoint import Checkpointer
from decent_jax.train.evaluation import Model
from decent_jax.train.experiment import Experiment
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import check_there


class Saver:
    """Saves checkpoints, and what they must know; a context that waits until all are written.

    Attributes:
      checkpoints: on disk.
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
        """Raises CheckpointError where an earlier checkpoint could not be written."""
        self.checkpoints.check()

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
        """Words about the newest checkpoint, once it is written."""
        with contextlib.suppress(CheckpointError):
            self.checkpoints.wait()
        saved = self.checkpoints.steps()
        if saved:
            return f"the last checkpoint is of step {saved[-1]}"
        return "no checkpoint has been saved"

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, exc_type: type | None, *_) -> None:
        # After an error, a second one from closing must not hide it.
        with contextlib.suppress(*[CheckpointError] if exc_type else []):
            self.checkpoints.close()
