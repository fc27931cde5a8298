"""The checkpoints of a run on disk: when they are due, and their contents besides the state."""

import contextlib
import functools
import math

from decent_jax.checkpoints import on_disk
from decent_jax.checkpoints.on_disk import Checkpointer
from decent_jax.cluster import watch
from decent_jax.ground.errors import CheckpointError
from decent_jax.ground.json_files import Json
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.replicas import TrainState
from decent_jax.train.console import Console
from decent_jax.train.evaluation import Model
from decent_jax.train.experiment import Experiment
from decent_jax.train.rows import Observed, Rows, passed
from decent_jax.train.same_data import check_data, facts_of


class Saver:
    """Saves checkpoints with their metadata; leaving the context waits for all of them.

    After `begin` it is a `decent_jax.train.observers.Observer`.

    Attributes:
      checkpoints: the checkpointer, which writes to disk.
      evaluated: the row of the last evaluation, with its ``step``.
      unevaluated: whether the step of the next checkpoint still has to be evaluated.
      best: the lowest ``eval/loss`` so far.
      seconds: training time of the sessions before this one.
      steps_ahead: data position minus step count, in steps; not 0 after a resume with another
        ``batch_size``.
      agreed: whether all processes have agreed to save at this boundary between two steps.
    """

    waits = True

    def __init__(self, experiment: Experiment, checkpoints: Checkpointer):
        self.checkpoints = checkpoints
        self.evaluated: Json = {}
        self.unevaluated = self.agreed = False
        self.best, self.seconds, self.steps_ahead = math.inf, 0.0, 0
        self._experiment = experiment

    @functools.cached_property
    def _data(self) -> dict[str, str]:
        return facts_of(self._experiment.config, self._experiment.task)

    def restored(self, meta: Json) -> None:
        """Continue from the checkpoint with this ``meta``.

        Raises:
          ConfigError: the data differ from the checkpoint's data.
        """
        before = meta.get("data", self._data)
        step = f"before step {meta['step']}"
        check_data(self._experiment.config, self._data, before, "now", step)
        self.seconds, self.best = meta["seconds"], meta["best"]
        self.steps_ahead = meta["examples"] // self._experiment.config.batch_size - meta["step"]
        if not all(watch.gather(on_disk.drop_best_after(self.checkpoints.workdir, meta["step"]))):
            self.best = math.inf  # in all processes, which save the next best model together

    def meta(self, done: int, seconds: float, row: Json | None = None) -> Json:
        """The metadata saved with the state after ``done`` steps and ``seconds`` of training.

        ``row`` is the unfinished row of metrics, see `decent_jax.train.rows.Rows.begun`.
        """
        config = self._experiment.config
        return {
            "step": done,
            "num_replicas": config.num_replicas,
            "schedule": self._experiment.schedule.name,
            "batch_size": config.batch_size,
            "examples": (done + self.steps_ahead) * config.batch_size,
            "seconds": seconds,
            "best": self.best,
            "unevaluated": self.unevaluated,
            "row": row,
            "data": self._data,
            "config": config.by_name,
        }

    def save(self, done: int, state: TrainState, seconds: float, row: Json | None = None) -> None:
        """Save the state, with its `meta`, in the background."""
        on_disk.check_there(self.checkpoints.workdir)
        self.checkpoints.save(done, state, self.meta(done, seconds, row))

    def evaluation(
        self,
        done: int,
        row: dict[str, float],
        model: Model,
        writer: MetricWriter,
        console: Console,
    ) -> None:
        """Write the evaluation after ``done`` steps; save the model if it is the best so far."""
        writer.write(done, row)
        console.say(f"step {done}: validation loss {row['eval/loss']:.4f} of the consensus model")
        self.evaluated = {"step": done, **row}
        if row["eval/loss"] < self.best:
            self.best = row["eval/loss"]
            self.checkpoints.save_best(done, *model, {"eval_loss": self.best})

    # --- As an observer ---------------------------------------------------------------------------

    def begin(self, runner: Observed, rows: Rows) -> None:
        """From now on, `act` saves the state of the runner and the unfinished row."""
        self._runner, self._rows, self._clock = runner, rows, rows.clock
        self._saved_at = rows.clock.now()

    def late(self) -> bool:
        """Whether ``checkpoint.every_minutes`` have passed, by the clock of this process."""
        minutes = self._experiment.config.checkpoint.every_minutes
        return 0 < minutes <= (self._clock.now() - self._saved_at) / 60

    def due(self, before: int, done: int) -> bool:
        """See `Observer`; raises CheckpointError if the last checkpoint could not be written."""
        self.checkpoints.check()
        return self.agreed or passed(self._experiment.every["checkpoint.every"], before, done)

    def act(self, done: int) -> None:
        """See `Observer`."""
        with self._clock.of("checkpoints"):
            self.save(done, self._runner.state, self._clock.seconds, self._rows.begun())
        self._saved_at, self.agreed = self._clock.now(), False

    def wait(self, console: Console) -> None:
        """Wait until the last checkpoint is written; raises CheckpointError if that fails."""
        announced = console.announce("waiting until the checkpoint is written")
        with self._clock.of("checkpoints"), announced:
            self.checkpoints.wait()

    def what_next(self) -> str:
        """See `decent_jax.checkpoints.on_disk.what_next`, once the newest checkpoint is written."""
        with contextlib.suppress(CheckpointError):
            self.checkpoints.wait()
        return on_disk.what_next(self.checkpoints.workdir)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        # After an error, closing must not hide it with a second one.
        with contextlib.suppress(*[CheckpointError] if exc_type else []):
            self.checkpoints.close()
