"""Pipelines against the run without stages, in one process."""

import jax
import numpy as np
import pytest
import tiny
from networks import assert_close
from pipeline_threads import Threads

from decent_jax import replicas
from decent_jax.plan import orders
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.experiment import open_experiment
from decent_jax.train.goodput import Clock
from decent_jax.train.step import gradient, make_step
from decent_jax.train.synchronous import Feed, init

pytestmark = pytest.mark.usefixtures("compile_once")
STEPS = 20


def config_of(data, stages, cuts=1, **changes):
    """A run of 20 steps; with ``stages`` 0 the same run without stages."""
    settings = {"num_replicas": 2, "batch_size": 16, "steps": STEPS}
    settings["learning_rate"] = 2e-3  # larger ones amplify what is rounded in another order
    config = tiny.config(data, **(settings | changes))
    config.optimizer.eps = 1e-6  # where a gradient is 0, Adam would turn its rounding into steps
    config.optimizer.clip_norm = 0.5  # clips: the norms are 0.3 to 3
    config.cluster.exchange_s = 200  # a stage that fails must not let others wait for ever
    if config.algorithm != "accum_adam":  # whose programs take long to compile
        config.optimizer.name = "sgd"
    if stages:
        config.pipeline.update(stages=stages, micro_batches=cuts, wire="float32")
    else:
        config.micro_batches = cuts
    return config


def without_stages(config, workdir, gradients):
    """Losses (steps, n), state, evaluator and, if asked for, gradient of step 0 of such a run."""
    with open_experiment(config, workdir) as (experiment, _):
        step = make_step(
            *(experiment.config, experiment.task, experiment.tx, experiment.rate),
            *(experiment.schedule, experiment.placement),
        )
        state, losses, first = init(experiment), [], None
        with Feed(experiment, 0, Clock()) as feed:
            for t in range(STEPS):
                rnd = None
                if config.algorithm != "all_reduce":
                    rnd = experiment.schedule.round_at(t, config.mix_every)
                batch, _ = feed.next()
                if gradients and t == 0:
                    first = gradient_of(experiment, state.params, batch)
                state, metrics = step(state, batch, np.int32(t), round=rnd)
                losses.append(np.asarray(metrics["loss"]))
        evaluator = Evaluator(config, experiment.task, experiment.placement)
        return np.array(losses), state, evaluator, first


def gradient_of(experiment, params, batch):
    """(n, ...) of step 0."""
    config = experiment.config
    key = jax.random.fold_in(jax.random.key(config.seed + 1), 0)

    def of_replica(params, batch, replica):
        rng = jax.random.fold_in(key, replica)
        return gradient(experiment.task.loss, config.micro_batches, params, {}, batch, rng)[2]

    return jax.jit(jax.vmap(of_replica))(params, batch, np.arange(config.num_replicas))


def noted(stage):
    """What it does from now on, in order."""
    done = []

    def noting(name):
        program = getattr(stage, name)

        def run(*args):
            done.append((name, args[-1]))
            return program(*args)

        setattr(stage, name, run)

    noting("forward")
    noting("backward")
    return done


def flat(tree):
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


# Stages, micro-batches, order, tied, replicas, algorithm, dropout.
CASES = [
    (2, 4, "1f1b", True, 2, "accum_adam", 0.0),
    (3, 4, "gpipe", False, 2, "all_reduce", 0.1),
]


@pytest.mark.parametrize(("stages", "cuts", "order", "tied", "n", "algorithm", "dropout"), CASES)
def test_losses_and_parameters_equal_the_run_without_stages(
    stages, cuts, order, tied, n, algorithm, dropout, tiny_data, tmp_path
):
    model = {"tied": tied, "layers": max(stages, 2), "dropout": dropout}
    changes = {"num_replicas": n, "algorithm": algorithm, "model": model}
    plain = config_of(tiny_data, 0, cuts, **changes)
    whole = algorithm == "accum_adam"
    losses, state, evaluator, first = without_stages(plain, tmp_path / "run", gradients=whole)
    config = config_of(tiny_data, stages, cuts, **changes)
    config.pipeline.order = order
    with Threads(config, tmp_path) as threads:
        if whole:
            assert_close(threads.gradient(), flat(first), rtol=1e-6)
        done = [noted(stage) for stage in threads.stages]
        spans = threads.train(0, 7) + threads.train(7, STEPS, row=whole)
        got = np.array(spans[0].losses + spans[-1].losses)
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        assert_close(threads.params(), flat(state.params), rtol=1e-5)
        for s, actions in enumerate(done):
            wanted = orders.order(order, stages, cuts, s)
            if s == stages - 1:  # its backward computes the loss, too
                wanted = [one for one in wanted if one[0] == "backward"]
            assert actions == STEPS * list(wanted)
        if whole:
            squares = np.sum([span.distance for span in spans[stages:]], axis=0)
            distance, relative = replicas.consensus_distance(state.params)
            wanted = [distance, distance / relative]
            np.testing.assert_allclose(squares**0.5, wanted, rtol=1e-3)
            row = evaluator.row(state)[0]
            assert threads.evaluate() == pytest.approx(row["eval/loss"], rel=1e-5)
