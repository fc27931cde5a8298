"""The training loop of all kinds of runs: clock, rows, checkpoints, signals and conclusion.

A `Runner` makes the steps: synchronous replicas (`decent_jax.train.synchronous`), a peer
(`decent_jax.peers.step_boundary`) or pipelines (`decent_jax.pipelines.runner`). The loop processes
the results of a step while the next one runs.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import jax

from decent_jax.checkpoints.in_memory import MemoryCheckpoints
from decent_jax.checkpoints.on_disk import what_next
from decent_jax.cluster.agreement import Agreement
from decent_jax.ground.errors import DataError, Interrupted, TrainingFailed
from decent_jax.ground.json_files import Json
from decent_jax.monitor import goodput
from decent_jax.monitor.goodput import Clock, Ledger
from decent_jax.train.experiment import Experiment
from decent_jax.train.observers import Evaluating, Observer, Pause, SavingInMemory
from decent_jax.train.rows import Observed, Rows
from decent_jax.train.saver import Saver
from decent_jax.train.signals import Halted, Signals
from decent_jax.train.workdir import Workdir


class Runner(Observed, Protocol):
    """The loop's interface to one kind of run.

    Attributes:
      checkpoints: a `decent_jax.checkpoints.on_disk.Checkpointer`, or an object with its interface.
      memory: in-memory checkpoints (`decent_jax.checkpoints.in_memory`) of ``state``, or None.
      messages: entries of ``run.json``, see `decent_jax.train.algorithm.messages`.
    """

    checkpoints: Any
    messages: dict[str, float]

    @property
    def memory(self) -> MemoryCheckpoints | None: ...

    def restore(self) -> tuple[int, Json]:
        """Restore the newest checkpoint or create a state; returns steps done and its metadata."""
        ...

    def training(self, start: int, ahead: int, clock: Clock) -> AbstractContextManager[None]:
        """A context manager that provides what the steps need, such as data.

        Args:
          start: index of the first step.
          ahead: data position minus step count, in steps.
          clock: the run's clock, which records compilation and data waits.
        """
        ...

    def step(self, done: int, until: int) -> list[Json]:
        """Dispatch steps after ``done``, at most up to ``until``; an empty result ends the run.

        Returns:
          For each step, the metrics of `decent_jax.train.step.make_step` and, under ``measured``,
          the task's measurements of its batch.

        Raises:
          DataError: a record cannot be used; the state is still the one after ``done`` steps.
        """
        ...

    def finish(self, done: int, saver: Saver, clock: Clock) -> Json:
        """Conclude the run after its last checkpoint was saved; returns the summary."""
        ...


def train(
    runner: Runner, work: Workdir, *, clock: Clock | None = None, signals: Signals | None = None
) -> Json:
    """Train from the newest checkpoint, or from the beginning, to the end; returns the summary.

    Args:
      runner: the runner, which makes the steps.
      work: the run directory.
      clock: the run's clock; tests pass their own.
      signals: the signals that end the run, polled after each step; tests pass their own.

    Raises:
      TrainingFailed, CheckpointError, Interrupted: see `decent_jax.train.run`.
    """
    experiment, clock = runner.experiment, clock or goodput.session_clock()
    console, record, leads = work.console, work.record, runner.evaluate is not None
    ledger = Ledger(work.path, clock, writes=leads and not console.quiet)
    with Saver(experiment, runner.checkpoints) as saver, ledger:
        start, meta = runner.restore()
        if meta:
            saver.restored(meta)
            console.say(f"resuming after step {start}")
        record.write_config()
        steps = max(experiment.steps, start)
        record.write_start(steps, experiment.task.unit, experiment.hosts, runner.messages)
        if start >= experiment.steps:
            console.say(f"the run has already ended: {start} of {experiment.steps} steps are done")
        with (
            record.open_metrics(start) as writer,
            console.show_progress(steps if leads else None, start) as progress,
            signals or Signals() as signals,
            Agreement() as agreement,
            runner.training(start, saver.steps_ahead, clock),
        ):
            rows = Rows(runner, clock, writer, progress, steps, saver.what_next)
            ledger.resume(meta)
            clock.begin_row()
            rows.resume(start, meta)
            saver.begin(runner, rows)
            pause = Pause(agreement, signals, saver)
            evaluating = Evaluating(runner, rows, saver, console, pause)
            observers = observers_of(runner, rows, saver, evaluating)
            try:
                if meta.get("unevaluated") and leads and start < steps:
                    evaluating.act(start)
                make_steps(runner, rows, observers, saver, ledger, pause, steps)
                if pause.stops and rows.done < steps:
                    stop(rows, saver, work, signals)
                if leads:
                    evaluating.act(rows.done)
            except Halted:  # the next session evaluates first
                saver.unevaluated = True
                saver.act(rows.done)
                stop(rows, saver, work, signals)
            except DataError as error:  # such as a truncated photograph
                give_up(error, rows, saver, work, signals)
            saver.act(rows.done)
            saver.wait(console)
        with clock.of("evaluation"):
            return runner.finish(rows.done, saver, clock)


def observers_of(
    runner: Runner, rows: Rows, saver: Saver, evaluating: Evaluating
) -> list[Observer]:
    """The observers of a run, in the order in which they act."""
    memory = runner.memory
    return [
        *([evaluating] if runner.evaluate is not None else []),
        saver,
        *([SavingInMemory(runner, memory, rows, saver)] if memory is not None else []),
    ]


def make_steps(
    runner: Runner,
    rows: Rows,
    observers: Sequence[Observer],
    saver: Saver,
    ledger: Ledger,
    pause: Pause,
    steps: int,
) -> None:
    """Make steps until ``steps`` are done or a signal arrives; let observers act between them.

    Every process makes the same steps and runs the same observers, because the processes first
    agree on what only one of them knows: the time, or a signal.
    """
    while (before := rows.done) < steps:
        metrics = runner.step(before, next_due(runner.experiment, before, steps))
        if not metrics:
            break
        rows.add(metrics)
        ledger.keep()
        pause.agree(between_steps=True)
        due = [observer for observer in observers if observer.due(before, rows.done)]
        if due:
            rows.settle(wait=any(observer.waits for observer in due))
        for observer in due:
            observer.act(rows.done)
        if pause.stops:
            break
    rows.finish()


def next_due(experiment: Experiment, done: int, steps: int) -> int:
    """The first step after ``done`` that is followed by a row, an evaluation or a checkpoint.

    >>> from types import SimpleNamespace as Made
    >>> every = {"eval.every": 4, "checkpoint.every": 0}
    >>> run = Made(config=Made(log=Made(every=5)), every=every)
    >>> [next_due(run, done, 14) for done in (0, 3, 4, 5, 10, 12)]
    [4, 4, 5, 8, 12, 14]
    """
    every = experiment.every
    periods = experiment.config.log.every, every["eval.every"], every["checkpoint.every"]
    return min([steps, *(done + period - done % period for period in periods if period)])


# --- The end of a run -----------------------------------------------------------------------------


def give_up(
    error: DataError, rows: Rows, saver: Saver, work: Workdir, signals: Signals
) -> NoReturn:
    """End a run at a record that cannot be used, once the steps before it have ended."""
    rows.settle()
    next_time = f"once fixed, {what_next(saver.checkpoints.workdir)}"
    if jax.process_count() == 1:  # other processes would already be in the next step
        if rows.done:
            saver.act(rows.done)
        next_time = saver.what_next()
        if rows.done and signals.received is not None:  # the signal would have ended the run anyway
            stop(rows, saver, work, signals)
    raise TrainingFailed(f"{error}; {next_time}") from None


def stop(rows: Rows, saver: Saver, work: Workdir, signals: Signals) -> NoReturn:
    """Exit after a signal, once the checkpoint has been written."""
    saver.wait(work.console)
    work.record.summary(
        steps=rows.done,
        interrupted=True,
        training_seconds=round(rows.clock.seconds, 3),
        goodput=goodput.summary(rows.clock),
    )
    raise Interrupted(
        f"interrupted after step {rows.done}; a checkpoint is saved, the same command resumes",
        signals.received or 15,
    )
