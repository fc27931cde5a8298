"""Observers, which act between the steps of a run, as `decent_jax.train.saver.Saver` does."""

from typing import Protocol

from decent_jax.checkpoints.in_memory import AUTOMATIC, MemoryCheckpoints
from decent_jax.cluster import supervise
from decent_jax.cluster.agreement import Agreement
from decent_jax.monitor import goodput_file
from decent_jax.train.console import Console
from decent_jax.train.rows import Observed, Rows, passed
from decent_jax.train.saver import Saver
from decent_jax.train.signals import Halted, Signals


class Observer(Protocol):
    """Work that falls due between two steps, after the same steps in all processes.

    Attributes:
      waits: whether the observer acts only once the steps have ended; otherwise, the loop waits for
        the steps only if they end a row.
    """

    waits: bool

    def due(self, before: int, done: int) -> bool:
        """Whether the work fell due after step ``before``, up to step ``done``."""
        ...

    def act(self, done: int) -> None:
        """Do the work, after ``done`` steps."""
        ...


class Evaluating:
    """Evaluates the run, and writes a row with the evaluation and the goodput so far."""

    waits = True

    def __init__(
        self, runner: Observed, rows: Rows, saver: Saver, console: Console, pause: "Pause"
    ):
        self._runner, self._rows, self._saver, self._console = runner, rows, saver, console
        self._pause = pause

    def due(self, before: int, done: int) -> bool:
        """See `Observer`."""
        experiment = self._runner.experiment
        return done >= experiment.steps or passed(experiment.every["eval.every"], before, done)

    def act(self, done: int) -> None:
        """See `Observer`; does nothing if this step has already been evaluated.

        Raises:
          Halted: a signal stops the run, before or during the evaluation.
        """
        if self._saver.evaluated.get("step") == done:
            return
        if self._pause.stops:
            raise Halted
        clock, writer = self._rows.clock, self._rows.writer
        with clock.of("evaluation"):
            assert self._runner.evaluate is not None
            row, model = self._runner.evaluate(self._pause)
        with clock.of("checkpoints"):  # of the model, if it is the best
            self._saver.evaluation(done, row, model, writer, self._console)
        writer.write(done, goodput_file.shares(clock.spent()))


class Pause:
    """Boundaries between steps, or batches, at which all processes agree to save or to stop.

    Attributes:
      stops: whether all processes have agreed to stop.
    """

    def __init__(self, agreement: Agreement, signals: Signals, saver: Saver):
        self._agreement, self._signals, self._saver = agreement, signals, saver
        self.stops = False

    def agree(self, between_steps: bool) -> None:
        """Reach a boundary; only between two steps can elapsed time lead to a checkpoint."""
        received = self._signals.received is not None
        late = between_steps and self._saver.late()
        saves, self.stops = self._agreement.at_boundary(late, received)
        self._saver.agreed |= saves or self.stops

    def __call__(self) -> None:
        """Call between two batches of an evaluation; raises Halted, in all processes, soon after a
        process has received a signal."""
        self.agree(between_steps=False)
        if self.stops:
            raise Halted


class SavingInMemory:
    """Saves in-memory checkpoints, without waiting for the steps to end."""

    waits = False

    def __init__(self, runner: Observed, memory: MemoryCheckpoints, rows: Rows, saver: Saver):
        self._runner, self._memory, self._rows, self._saver = runner, memory, rows, saver

    def due(self, before: int, done: int) -> bool:
        """See `Observer`; due at each row until `AUTOMATIC` has become a period."""
        every = self._memory.every
        return self._rows.ends(before, done) if every == AUTOMATIC else passed(every, before, done)

    def act(self, done: int) -> None:
        """See `Observer`."""
        if self._memory.settle(self._rows.step_s):
            return
        row = self._rows.begun(wait=False)
        meta = self._saver.meta(done, self._rows.clock.seconds, row)
        self._memory.begin(done, self._runner.state, meta)
        supervise.reached(done)
