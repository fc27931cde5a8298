"""The end of a run: a test of its model, its summary, its curves."""

import statistics

from decent_jax.ground.errors import RunError
from decent_jax.ground.format import format_duration
from decent_jax.ground.json_files import Json
from decent_jax.ground.run_folder import read_metrics
from decent_jax.monitor import goodput, goodput_file
from decent_jax.monitor.goodput import Clock
from decent_jax.replicas import TrainState
from decent_jax.train import algorithm
from decent_jax.train.evaluation import Evaluator, local
from decent_jax.train.experiment import Experiment
from decent_jax.train.saver import Saver
from decent_jax.train.workdir import Workdir


def conclude(
    experiment: Experiment,
    work: Workdir,
    evaluator: Evaluator,
    state: TrainState,
    cost: algorithm.Cost,
    saver: Saver,
    clock: Clock | None = None,
    **entries: object,
) -> Json:
    """Test the consensus model, write the summary, draw the curves, show a sample.

    Args:
      experiment: the run.
      work: its directory.
      evaluator: the evaluator, which computes the consensus model.
      state: the state after the last step.
      cost: bytes that a replica sends and keeps.
      saver: the saver, which holds the last and the best evaluation.
      clock: the run's clock; None: the summary has no goodput.
      **entries: additional entries of the summary.

    Returns:
      The contents of ``summary.json``.
    """
    task, shares = experiment.task, experiment.partition
    mean, model_state = evaluator.model(state)
    model_state = evaluator.consensus_state(mean, model_state)
    test = getattr(task, "test", None)
    tested = {}
    if test is not None and not work.console.quiet:
        tested = {"test": test(local(mean))}
    measured: Json = {
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
        measured["goodput"] = goodput.summary(clock)
    if not work.console.quiet:
        mfu = [row["perf/mfu"] for row in read_metrics(work.path) if "perf/mfu" in row]
        measured |= {"mfu": statistics.median(mfu)} if mfu else {}
    summary = work.record.summary(**measured | entries | task.summary() | tested)
    if work.console.quiet:
        return summary
    try:
        from decent_jax.plots import runs as plot  # matplotlib takes a third of all import time

        plot.plot_runs([work.path])
    except (RunError, OSError, ValueError) as error:  # for example from MPLBACKEND
        work.console.say(f"no curves were drawn: {error}")
    with work.console.announce("trying the consensus model"):
        text = task.demonstrate(*local((mean, model_state)))
    work.console.say(text)
    for scores in tested.values():
        work.console.say(", ".join(f"{name} {value}" for name, value in scores.items()))
    _say_where(work, summary)
    return summary


def _say_where(work: Workdir, summary: Json) -> None:
    """Print the result and the files of a finished run."""
    loss = summary["final"].get("eval/loss", float("nan"))
    work.console.say(
        f"validation loss {loss:.4f} after {summary['steps']} steps, "
        f"{format_duration(summary['training_seconds'])} of training"
    )
    if "goodput" in summary:
        work.console.say(goodput_file.describe(summary["goodput"]["seconds"], summary.get("mfu")))
    work.console.say(
        f"curves       {work.path / 'curves.png'}\n"
        f"metrics      {work.path / 'metrics.jsonl'}\n"
        f"checkpoints  {work.path / 'checkpoints'}\n"
        f"summary      {work.path / 'summary.json'}"
    )
