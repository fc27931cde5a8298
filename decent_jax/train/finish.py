"""The end of a run: test scores, summary.json, curves and a sample of the consensus model."""

from typing import Any

from decent_jax.errors import RunError
from decent_jax.train.algorithm import Cost
from decent_jax.train.evaluation import Evaluator, local
from decent_jax.train.setup import Experiment
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import Workdir


def finish(
    experiment: Experiment,
    work: Workdir,
    evaluator: Evaluator,
    state: TrainState,
    cost: Cost,
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
    from decent_jax import plot  # here, since matplotlib is a third of what a start imports

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
