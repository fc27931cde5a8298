"""The training loop, the same for every kind of run: time, rows, saving, signals and the end.

A `Runner` makes the steps: synchronous replicas (`decent_jax.train.synchronous`), a peer
(`decent_jax.peers.step_boundary`) or pipelines (`decent_jax.pipelines.runner`). The loop processes
the results of a step while the next one runs.
"""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import jax

from decent_jax.checkpoints.in_memory import AUTOMATIC, MemoryCheckpoints
from decent_jax.checkpoints.on_disk import what_next
from decent_jax.cluster import supervise
from decent_jax.cluster.agreement import Agreement
from decent_jax.ground.errors import DataError, Interrupted, RunError, TrainingFailed
from decent_jax.ground.run_folder import read_metrics
from decent_jax.monitor import goodput, goodput_file
from decent_jax.monitor.goodput import Clock, Ledger
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.replicas import TrainState
from decent_jax.train import algorithm
from decent_jax.train.evaluation import Evaluator, Model, local
from decent_jax.train.experiment import Experiment
from decent_jax.train.rows import Report
from decent_jax.train.saver import Saver
from decent_jax.train.workdir import Halted, Signals, Workdir


class Runner(Protocol):
    """The loop's interface to one kind of run.

    Attributes:
      experiment: what is trained.
      checkpoints: on disk, as `decent_jax.checkpoints.on_disk.Checkpointer`.
      state: the state to save; None if the checkpoints know it themselves.
      evaluates: whether it evaluates, accounts for the time of the run and shows the time left, or
        leaves that to another process.
      peak: FLOP/s of its devices, see `decent_jax.monitor.goodput.peak`; None: unknown.
      memory: in-memory checkpoints (`decent_jax.checkpoints.in_memory`) of ``state``, or None.
      comm_metrics: of this process, `decent_jax.monitor.comm_metrics.CommMetrics`.
      messages: their entries in ``run.json``, see `decent_jax.train.algorithm.messages`.
    """

    experiment: Experiment
    checkpoints: Any
    state: Any
    evaluates: bool
    peak: float | None
    memory: Any
    comm_metrics: Any
    messages: dict[str, float]

    def restore(self) -> tuple[int, dict[str, Any]]:
        """Restore the newest checkpoint, or create a state; returns steps done, and the meta."""
        ...

    def training(self, start: int, ahead: int, clock: Clock) -> AbstractContextManager:
        """A context with everything that steps need, such as data.

        Args:
          start: the first step.
          ahead: data position minus step count, in steps.
          clock: records compilation and data waits.
        """
        ...

    def over(self, done: int) -> bool:
        """Whether the run ends after ``done`` steps, even before the last one."""
        ...

    def step(self, done: int, until: int) -> list[dict[str, Any]]:
        """Dispatch some steps after ``done``, at most up to ``until``.

        Returns:
          For each step the metrics of `decent_jax.train.step.make_step`, and under ``measured``
          the task's own numbers about its batch.

        Raises:
          DataError: a record cannot be used; the state is still that after ``done`` steps.
        """
        ...

    def consensus(self) -> Any:
        """The `decent_jax.replicas.Consensus` of the state, which may still be computing."""
        ...

    def average(self) -> None:
        """Set all replicas to their mean."""
        ...

    def evaluate(self, pause: Callable[[], None]) -> tuple[dict[str, float], Model]:
        """The ``eval/`` metrics, and the evaluated model.

        Args:
          pause: called between two batches, equally often in every process; it may raise.
        """
        ...

    def finish(self, done: int, saver: Saver, clock: Clock) -> dict[str, Any]:
        """The summary, after a checkpoint of the last step is saved."""
        ...


def train(
    runner: Runner,
    work: Workdir,
    *,
    clock: Clock | None = None,
    signals: Signals | None = None,
) -> dict[str, Any]:
    """Train from the newest checkpoint, or from the beginning, to the end; the summary.

    Args:
      runner: makes the steps.
      work: the run directory.
      clock: of the run; a test has its own.
      signals: that end it, polled after each step; likewise.

    Raises:
      TrainingFailed, CheckpointError, Interrupted: see `decent_jax.train.run`.
    """
    experiment, clock = runner.experiment, clock or goodput.session_clock()
    config = experiment.config
    ledger = Ledger(work.path, clock, writes=runner.evaluates and not work.quiet)
    with Saver(experiment, runner.checkpoints) as saver, ledger:
        start, meta = runner.restore()
        if meta:
            saver.restored(meta)
            work.say(f"resuming after step {start}")
        work.write_config()
        steps, done = max(experiment.steps, start), start
        work.write_start(steps, experiment.task.unit, experiment.hosts, runner.messages)
        if start >= experiment.steps:
            work.say(f"the run has already ended: {start} of {experiment.steps} steps are done")
        with (
            work.open_metrics(start) as writer,
            work.show_progress(steps if runner.evaluates else None, start) as progress,
            signals or Signals() as signals,
            Agreement() as agreement,
            runner.training(start, saver.steps_ahead, clock),
        ):
            report = Report(runner, clock, writer, progress, what_next=saver.what_next)
            ledger.resume(meta)
            clock.begin_row()
            report.resume(meta)
            saved_at, pause = clock.now(), Pause(agreement, signals)
            try:
                if meta.get("unevaluated") and runner.evaluates and done < steps:
                    evaluate_at(done, runner, clock, work, writer, saver, pause)
                while done < steps and not runner.over(done):
                    made = runner.step(done, next_due(experiment, done, steps))
                    before, done = done, done + len(made)
                    report.look_at_pending()
                    ledger.keep()
                    logs = passed(config.log.every, before, done) or done == steps
                    report.pend(done, made, logs)
                    saver.checkpoints.check()
                    if logs:
                        supervise.reached(done)
                    evaluates = runner.evaluates and (
                        done == steps or passed(experiment.every["eval.every"], before, done)
                    )
                    stops = signals.received is not None
                    minutes, since = config.checkpoint.every_minutes, (clock.now() - saved_at) / 60
                    late, stops = agreement.at_boundary(0 < minutes <= since, stops)
                    saves = late or passed(experiment.every["checkpoint.every"], before, done)
                    # Averaging past the bound must not wait for the next step: a resumed run
                    # averages at the same step as an uninterrupted one.
                    if saves or evaluates or stops or (logs and config.max_consensus_distance):
                        if report.look_at_pending():
                            runner.average()
                        if evaluates and stops:
                            raise Halted
                        if evaluates:
                            evaluate_at(done, runner, clock, work, writer, saver, pause)
                        if saves or stops or pause.saves:
                            with clock.of("checkpoints"):
                                saver.save(done, runner.state, clock.seconds, report.begun())
                            saved_at, pause.saves = clock.now(), False
                    if runner.memory is not None:
                        keep_in_memory(
                            runner.memory, runner.state, before, done, logs, report, saver
                        )
                    if stops and done < steps:
                        with clock.of("checkpoints"):
                            saver.checkpoints.wait()
                        stop(done, work, signals, clock)
                report.finish(done)
                if runner.evaluates and saver.evaluated.get("step") != done:
                    evaluate_at(done, runner, clock, work, writer, saver, pause)
            except Halted:  # the next session evaluates first
                saver.unevaluated = True
                with clock.of("checkpoints"):
                    saver.save(done, runner.state, clock.seconds, report.begun())
                    saver.checkpoints.wait()
                stop(done, work, signals, clock)
            except DataError as error:  # such as a truncated photograph
                report.look_at_pending()
                next_time = f"once fixed, {what_next(saver.checkpoints.workdir)}"
                if jax.process_count() == 1:  # otherwise the others are in the next step
                    if done:
                        saver.save(done, runner.state, clock.seconds, report.begun())
                    next_time = saver.what_next()
                    if done and signals.received is not None:  # which the data did not outlast
                        stop(done, work, signals, clock)
                raise TrainingFailed(f"{error}; {next_time}") from None
            with clock.of("checkpoints"):
                saver.save(done, runner.state, clock.seconds, report.begun())
                with work.announce("waiting until the checkpoint is written"):
                    saver.checkpoints.wait()
        with clock.of("evaluation"):
            return runner.finish(done, saver, clock)


# --- The helpers of the loop ----------------------------------------------------------------------


class Pause:
    """Called between two batches of an evaluation, a boundary of the processes' agreement.

    Attributes:
      saves: whether they agreed on a checkpoint meanwhile.
    """

    def __init__(self, agreement: Agreement, signals: Signals):
        self.saves, self._agreement, self._signals = False, agreement, signals

    def __call__(self) -> None:
        """Raises Halted, in all processes, soon after one of them received a signal."""
        saves, stops = self._agreement.at_boundary(False, self._signals.received is not None)
        self.saves |= saves
        if stops:
            raise Halted


def keep_in_memory(
    memory: MemoryCheckpoints,
    state: TrainState,
    before: int,
    done: int,
    logs: bool,
    report: Report,
    saver: Saver,
) -> None:
    """Start an in-memory checkpoint after ``done`` steps, if one fell due after ``before``."""
    if logs and memory.every == AUTOMATIC:
        report.look_at_pending()
        memory.settle(report.step_s)
    if memory.due(before, done, logs):
        if logs:  # the next row must not contain the steps of this one
            report.look_at_pending()
        memory.begin(done, state, saver.meta(done, report.clock.seconds, report.begun(wait=False)))
        supervise.reached(done)


def passed(every: int, before: int, done: int) -> bool:
    """Whether something that is due ``every`` steps (0: never) became due in these steps.

    If a message overlaps several steps, it waits until the message has arrived.

    >>> [passed(10, 18, done) for done in (19, 20, 21)], passed(0, 18, 20)
    ([False, True, True], False)
    """
    return every > 0 and before // every < done // every


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


def evaluate_at(
    done: int,
    runner: Runner,
    clock: Clock,
    work: Workdir,
    writer: MetricWriter,
    saver: Saver,
    pause: Pause,
) -> None:
    """Evaluate, see `evaluate`, and write the seconds per category until then."""
    with clock.of("evaluation"):
        found = runner.evaluate(pause)
    with clock.of("checkpoints"):  # of the model, if it is the best
        evaluate(*found, done, work, writer, saver)
    writer.write(done, goodput_file.shares(clock.spent()))


def evaluate(
    row: dict[str, float],
    model: Model,
    done: int,
    work: Workdir,
    writer: MetricWriter,
    saver: Saver,
) -> None:
    """Write the evaluation after ``done`` steps; save the model if it is the best so far."""
    writer.write(done, row)
    work.say(f"step {done}: validation loss {row['eval/loss']:.4f} of the consensus model")
    saver.evaluation(done, row, model)


def stop(done: int, work: Workdir, signals: Signals, clock: Clock) -> NoReturn:
    """Exit after a signal, once the checkpoint has been written."""
    work.summary(
        steps=done,
        interrupted=True,
        training_seconds=round(clock.seconds, 3),
        goodput=goodput.summary(clock),
    )
    raise Interrupted(
        f"interrupted after step {done}; a checkpoint is saved, the same command resumes",
        signals.received or 15,
    )


def conclude(
    experiment: Experiment,
    work: Workdir,
    evaluator: Evaluator,
    state: TrainState,
    cost: algorithm.Cost,
    saver: Saver,
    clock: Clock | None = None,
    **entries: Any,
) -> dict[str, Any]:
    """Test the consensus model, write the summary, draw the curves, show a sample.

    Args:
      experiment: the run.
      work: its directory.
      evaluator: of its model.
      state: after the last step.
      cost: of its algorithm.
      saver: has the last and the best evaluation.
      clock: of the run; None: time is not accounted for.
      **entries: additional entries of the summary.

    Returns:
      The contents of ``summary.json``.
    """
    task, shares = experiment.task, experiment.partition
    mean, model_state = evaluator.model(state)
    model_state = evaluator.consensus_state(mean, model_state)
    test = getattr(task, "test", None)
    tested = {}
    if test is not None and not work.quiet:
        tested = {"test": test(local(mean))}
    found = {
        "final": saver.evaluated,
        "best_eval_loss": saver.best,
        "schedule": experiment.schedule.name,
        "schedule_period": experiment.schedule.period,
        "bytes_sent_per_step": round(cost.sent_a_step),
        "bytes_sent_by_node_per_step": round(cost.sent_by_node),
        "state_bytes_per_replica": cost.state,
        "partition": {"name": "iid"} if shares is None else shares.summary(),
    }
    if clock is not None:
        found["goodput"] = goodput.summary(clock)
    if not work.quiet:
        mfu = [row["perf/mfu"] for row in read_metrics(work.path) if "perf/mfu" in row]
        found |= {"mfu": statistics.median(mfu)} if mfu else {}
    summary = work.summary(**found | entries | task.summary() | tested)
    if work.quiet:
        return summary
    try:
        from decent_jax.plots import runs as plot  # matplotlib is a third of the imports of a start

        plot.plot_runs([work.path])
    except (RunError, OSError, ValueError) as error:  # for example from MPLBACKEND
        work.say(f"no curves were drawn: {error}")
    with work.announce("looking at the consensus model"):
        text = task.demonstrate(*local((mean, model_state)))
    if text:
        work.say(text)
    for scores in tested.values():
        work.say(", ".join(f"{name} {value}" for name, value in scores.items()))
    work.say_where(summary)
    return summary
