"""The training loop: dispatch a step, then look at the one before it while it runs."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from decent_jax.cluster import start as cluster
from decent_jax.cluster.watch import lost_peers_told
from decent_jax.ground.errors import DataError, Interrupted, RunError, TrainingFailed
from decent_jax.ground.format import format_duration, format_number
from decent_jax.train import algorithm, hosts
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.evaluation import Evaluator, local
from decent_jax.train.experiment import (
    Experiment,
    open_experiment,
    train_batches,
)
from decent_jax.train.metrics import Clock, MetricWriter, Report
from decent_jax.train.programs import Profile, Programs
from decent_jax.train.saver import Saver
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import Signals, Workdir

TIMED = 3  # steps of each kind in a dry run


check = config_lib.check  # see `decent_jax.train.config.TRAINERS`


@lost_peers_told()
def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train replicas that step together; see `decent_jax.train.run`."""
    with open_experiment(config, workdir) as (experiment, work):
        return train_and_evaluate(experiment, work)


@lost_peers_told()
def dry_run(config: ConfigDict) -> None:
    """See `decent_jax.train.dry_run`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_experiment(config, folder) as (experiment, work),
    ):
        time_steps(experiment, work, experiment.steps)


def time_steps(experiment: Experiment, work: Workdir, steps: int) -> None:
    """Compile and time both kinds of step, with and without communication, and say what they take.

    Args:
      experiment: to be tried.
      work: says it.
      steps: of the run.
    """
    shapes = jax.eval_shape(lambda: init(experiment))
    clock = Clock(0.0)
    programs = Programs(experiment, work, clock, announce_cost(experiment, work, shapes))
    with Feed(experiment, 0, clock) as feed:
        batch = feed.next(None, 0, None)
    rounds = programs.rounds
    silent, seconds = rounds.count(None) / len(rounds), {}
    state = init(experiment)
    for rnd in sorted({rnd is None: rnd for rnd in reversed(rounds)}.values(), key=str):
        key = rnd, shapes_of(batch)
        programs.compile(state, batch, *key)
        times = []
        for t in range(1 + TIMED):  # the first does not count
            began = time.perf_counter()
            state, metrics = programs.compiled[key](state, batch, np.int32(t))
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - began)
        seconds[rnd is None] = statistics.median(times[1:])
    mean = sum(seconds[kind] * (silent if kind else 1 - silent) for kind in seconds)
    both = ""
    if len(seconds) > 1:
        words = (f"{format_number(1e3 * seconds[kind])} ms" for kind in (False, True))
        both = " on average ({} with communication, {} without)".format(*words)
    work.say(
        f"the config is good for {steps} steps; {len(set(rounds))} rounds to compile; a step takes "
        f"{format_number(1e3 * mean)} ms here{both}, {steps} of them "
        f"{format_duration(mean * steps)}"
    )


class Between(Protocol):
    """What a peer does between its steps (`decent_jax.peers`); other runs have none."""

    def begin(self, start: int) -> int:
        """The step to begin with, where the newest checkpoint is of step ``start``."""
        ...

    def over(self, done: int) -> bool:
        """Whether the run ends after ``done`` steps."""
        ...

    def step(
        self, compiled: Any, state: TrainState, batch: Any, t: int
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The step t, and what comes before it."""
        ...

    def end(self, done: int, state: TrainState) -> dict[str, Any]:
        """The summary, after a checkpoint of the last step was saved."""
        ...


def train_and_evaluate(
    experiment: Experiment, work: Workdir, between: Between | None = None
) -> dict[str, Any]:
    """Train from the newest checkpoint, or from the beginning, to the end; the summary.

    With ``between`` the run is a peer, which neither evaluates nor writes a summary.
    """
    config, task, placement = experiment.config, experiment.task, experiment.placement
    shapes = jax.eval_shape(lambda: init(experiment))
    cost = announce_cost(experiment, work, shapes)
    with Saver(experiment, work.path) as saver:
        state, start = restore_or_init(experiment, shapes, work, saver)
        if between is not None:
            start = between.begin(start)
        work.write_config()
        steps = max(experiment.steps, start)
        if start >= experiment.steps:
            work.say(f"the run has already ended: {start} of {experiment.steps} steps are done")
        evaluator = Evaluator(config, task, placement)
        clock = Clock(saver.seconds)
        feed = Feed(experiment, start + saver.steps_ahead, clock)
        programs = Programs(experiment, work, clock, cost)
        profile = Profile(config.profile.count, work.path, work.say)
        with (
            work.open_metrics(start) as writer,
            work.show_progress(steps, start) as progress,
            Signals() as signals,
        ):
            report = Report(
                *(config, task, placement, state),
                clock=clock,
                writer=writer,
                progress=progress,
                measured=feed.means,
                newest=saver.newest,
            )
            with feed, profile:
                batch = feed.next(saver, start, state) if start < steps else None
                clock.restart()
                for t in range(start, steps):
                    if between is not None and between.over(t):
                        steps = t
                        break
                    key = programs.rounds[t % len(programs.rounds)], shapes_of(batch)
                    if key not in programs.compiled:
                        programs.compile(state, batch, *key)
                    if t in profile.turns:
                        profile.turn(t, state)
                    compiled = programs.compiled[key]
                    if between is None:
                        state, metrics = compiled(state, batch, np.int32(t))
                    else:
                        state, metrics = between.step(compiled, state, batch, t)
                    done = t + 1
                    if done < steps:
                        batch = feed.next(saver, done, state)
                    report.look_at_pending()
                    logs = done % config.log.every == 0 or done == steps
                    report.pend(done, metrics, state.params if logs else None)
                    evaluates = between is None and (
                        done == steps or divides(experiment.every["eval.every"], done)
                    )
                    saves, stops = due(experiment, saver, signals, done, logs)
                    # Averaging past the bound must not wait for the next step: a resumed run
                    # averages where the uninterrupted one does.
                    if saves or evaluates or stops or (logs and config.max_consensus_distance):
                        if report.look_at_pending():
                            state = report.average(state)
                        with clock.pause():
                            if evaluates:
                                evaluate(evaluator, state, done, work, writer, saver)
                            if saves or stops:
                                saver.save(done, state, clock.seconds)
                    if stops and done < steps:
                        saver.checkpoints.wait()
                        stop(done, work, signals, clock.seconds)
                profile.finish(steps, state)
            if between is None and saver.evaluated.get("step") != steps:
                evaluate(evaluator, state, steps, work, writer, saver)
            saver.save(steps, state, clock.seconds)
        with work.announce("waiting until the checkpoint is written"):
            saver.checkpoints.wait()
        if between is not None:
            return between.end(steps, state)
        return finish(
            *(experiment, work, evaluator, state, cost),
            steps=steps,
            final=saver.evaluated,
            best_eval_loss=saver.best,
            training_seconds=round(clock.seconds, 3),
            memory_bytes_per_device=programs.memory and programs.memory._asdict(),
        )


# --- The helpers of the loop ----------------------------------------------------------------------


class Feed:
    """The batches of this process on their way to the devices; a context that stops its threads."""

    def __init__(self, experiment: Experiment, start_step: int, clock: Clock):
        task = experiment.task
        self._placement, self._clock = experiment.placement, clock
        self._measure = getattr(task, "measure", None)
        self._measured: list[dict[str, float]] = []  # of the batches that no row contains yet
        self._batches = train_batches(
            *(experiment.config, task, experiment.placement), start_step, experiment.partition
        )

    def next(self, saver: Saver | None, done: int, state: TrainState | None) -> Any:
        """The next batch.

        Raises:
          TrainingFailed: a record cannot be used; a ``saver`` saves ``state``, of ``done`` steps.
        """
        began = time.monotonic()
        try:
            block = next(self._batches)
        except DataError as error:  # such as a photograph that is cut short
            saved = saver.rescue(done, state, self._clock.seconds) if saver and state else ""
            raise TrainingFailed(f"{error}{saved}") from None
        self._clock.waited += time.monotonic() - began
        if self._measure is not None:
            self._measured.append(self._measure(block))
        return self._placement.put(block)

    def means(self, steps: int) -> dict[str, float]:
        """The task's measurements of the batches, averaged over the next ``steps`` of them."""
        measured, self._measured = self._measured[:steps], self._measured[steps:]
        names = measured[0] if measured else ()
        return {name: float(np.mean([numbers[name] for numbers in measured])) for name in names}

    def __enter__(self) -> "Feed":
        self._batches.__enter__()
        return self

    def __exit__(self, *exc_info) -> None:
        self._batches.__exit__(*exc_info)


# --- The parts of a run ---------------------------------------------------------------------------


def due(
    experiment: Experiment, saver: Saver, signals: Signals, done: int, logs: bool
) -> tuple[bool, bool]:
    """Whether to save and whether to stop after ``done`` steps; the same on all processes.

    Raises:
      CheckpointError: writing an earlier checkpoint in the background has failed.
    """
    saver.check()
    minutes = experiment.config.checkpoint.every_minutes
    late = minutes > 0 and minutes_since(saver.last_save) >= minutes
    stops = signals.received is not None
    if jax.process_count() > 1:  # processes agree where a row makes them wait anyway
        late = logs and cluster.any_process(late)
        stops = logs and cluster.any_process(stops)
    return late or divides(experiment.every["checkpoint.every"], done), stops


def minutes_since(moment: float) -> float:
    """Minutes since a moment of `time.monotonic`."""
    return (time.monotonic() - moment) / 60


def announce_cost(experiment: Experiment, work: Workdir, shapes: TrainState) -> algorithm.Cost:
    """What a replica sends and keeps, and what another schedule would save between hosts."""
    config, schedule, per_host = experiment.config, experiment.schedule, experiment.per_host
    several = 1 < per_host < config.num_replicas
    cost = algorithm.cost(config, schedule, shapes, per_host if several else config.local_size)
    work.say(algorithm.describe(config, schedule, cost))
    advice = hosts.advice(config, schedule, per_host, shapes)
    if advice is not None:
        work.say(advice)
    return cost


def init(experiment: Experiment) -> TrainState:
    """The state before step 0."""
    return step_lib.init_state(
        experiment.config, experiment.task, experiment.tx, experiment.placement
    )


def restore_or_init(
    experiment: Experiment, shapes: TrainState, work: Workdir, saver: Saver
) -> tuple[TrainState, int]:
    """The state of the newest checkpoint, or a new one; and the number of steps done."""
    found = None
    if saver.checkpoints.steps():
        with work.announce("restoring the newest checkpoint"):
            found = saver.checkpoints.restore_newest(
                shapes, experiment.placement, experiment.config.optimizer.window, say=work.say
            )
    if found is None:
        with work.announce("creating the replicas"):
            return jax.block_until_ready(init(experiment)), 0
    state, meta = found
    saver.restored(meta)
    work.say(f"resuming after step {meta['step']}")
    return state, meta["step"]


def evaluate(
    evaluator: Evaluator,
    state: TrainState,
    done: int,
    work: Workdir,
    writer: MetricWriter,
    saver: Saver,
) -> None:
    """Evaluate the consensus model after ``done`` steps; keep it if it is the best so far."""
    with work.announce("evaluating the consensus model", once=True):
        row, model = evaluator.row(state)
    writer.write(done, row)
    work.say(f"step {done}: validation loss {row['eval/loss']:.4f} of the consensus model")
    saver.evaluation(done, row, model)


def stop(done: int, work: Workdir, signals: Signals, seconds: float) -> NoReturn:
    """Leave after a signal and ``seconds`` of training, when the checkpoint has been written."""
    work.summary(steps=done, interrupted=True, training_seconds=round(seconds, 3))
    raise Interrupted(
        f"interrupted after step {done}; a checkpoint is saved, the same command resumes",
        signals.received or 15,
    )


def finish(
    experiment: Experiment,
    work: Workdir,
    evaluator: Evaluator,
    state: TrainState,
    cost: algorithm.Cost,
    **entries: Any,
) -> dict[str, Any]:
    """Test the consensus model, write the summary, draw the curves, show a sample.

    Args:
      experiment: the run.
      work: its directory.
      evaluator: that has evaluated it.
      state: after the last step.
      cost: of its algorithm.
      **entries: of the summary.

    Returns:
      What ``summary.json`` holds.
    """
    task, shares = experiment.task, experiment.partition
    mean, model_state = evaluator.model(state)
    model_state = evaluator.consensus_state(mean, model_state)
    test = getattr(task, "test", None)
    tested = {}
    if test is not None and not work.quiet:
        tested = {"test": test(local(mean))}
    summary = work.summary(
        **entries,
        schedule=experiment.schedule.name,
        schedule_period=experiment.schedule.period,
        bytes_sent_per_step=round(cost.sent_a_step),
        bytes_sent_by_node_per_step=round(cost.sent_by_node),
        state_bytes_per_replica=cost.state,
        partition={"name": "iid"} if shares is None else shares.summary(),
        **task.summary(),
        **tested,
    )
    if work.quiet:
        return summary
    from decent_jax.plots import (
        runs as plot,  # here, since matplotlib is a third of what a start imports
    )

    try:
        plot.plot_runs([work.path])
    except (RunError, OSError) as error:
        work.say(f"no curves were drawn: {error}")
    with work.announce("looking at the consensus model"):
        text = task.demonstrate(*local((mean, model_state)))
    work.say(text)
    for scores in tested.values():
        work.say(", ".join(f"{name} {value}" for name, value in scores.items()))
    work.say_where(summary)
    return summary


def shapes_of(batch: Any) -> tuple:
    """The shapes of a batch's arrays, without the replica dimension."""
    return tuple(x.shape[1:] for x in jax.tree.leaves(batch))


def divides(every: int, done: int) -> bool:
    """Whether something that is due ``every`` steps (0: never) is due after ``done`` steps."""
    return every > 0 and done % every == 0
