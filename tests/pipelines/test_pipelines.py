"""Pipelines against the run without stages, in one process; the order of micro-batches."""

import itertools

import jax
import numpy as np
import pytest
import tiny
from networks import assert_close
from pipeline_threads import Threads
from refusals import refused, refuses

from decent_jax import replicas
from decent_jax.ground.errors import PeerLost
from decent_jax.monitor.goodput import Clock
from decent_jax.pipelines.executor import Mailbox, StageExecutor, open_batches
from decent_jax.pipelines.part import total_norm
from decent_jax.plan import orders
from decent_jax.train import config as config_lib
from decent_jax.train import xla
from decent_jax.train.config import parse
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.experiment import open_experiment
from decent_jax.train.step import make_step
from decent_jax.train.stepper import Feed, init

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
        config.trainer = "pipelines"
        config.pipeline.update(stages=stages, micro_batches=cuts, codec="float32")
    else:
        config.micro_batches = cuts
    return config


def without_stages(config, workdir):
    """Losses (steps, n), state and evaluator of such a run."""
    with open_experiment(parse(config), workdir) as (experiment, _):
        step = make_step(
            *(experiment.config, experiment.task, experiment.tx, experiment.rate),
            *(experiment.schedule, experiment.placement),
        )
        state, losses = init(experiment), []
        with Feed(experiment, 0, Clock()) as feed:
            for t in range(STEPS):
                rnd = None
                if config.algorithm != "all_reduce":
                    rnd = experiment.schedule.round_at(t, config.mix_every)
                batch, _ = feed.next()
                state, metrics = step(state, batch, np.int32(t), round=rnd)
                losses.append(np.asarray(metrics["loss"]))
        evaluator = Evaluator(config, experiment.task, experiment.placement)
        return np.array(losses), state, evaluator


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


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "cuts", "order", "tied", "n", "algorithm", "dropout"), CASES)
def test_losses_and_parameters_equal_the_run_without_stages(
    stages, cuts, order, tied, n, algorithm, dropout, tiny_data, tmp_path
):
    model = {"tied": tied, "layers": max(stages, 2), "dropout": dropout}
    changes = {"num_replicas": n, "algorithm": algorithm, "model": model}
    plain = config_of(tiny_data, 0, cuts, **changes)
    whole = algorithm == "accum_adam"
    losses, state, evaluator = without_stages(plain, tmp_path / "run")
    config = config_of(tiny_data, stages, cuts, **changes)
    config.pipeline.order = order
    with Threads(config, tmp_path) as threads:
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
            seconds = [span.seconds for span in spans[stages:]]
            assert all(one["compute_s"] > 0 and one["wait_s"] > 0 for one in seconds)
            row = evaluator.row(state)[0]
            assert threads.evaluate() == pytest.approx(row["eval/loss"], rel=1e-5)
            # The first stage is at most four batches before the last one, which sends nothing here.
            sent = []
            alone = StageExecutor(
                threads.stages[0], Mailbox(), lambda to, key, _: sent.append((to, key))
            )
            changes = {"eval.batch_size": 2, "cluster.exchange_s": 0}
            alone.config = config_lib.changed(alone.config, **changes)
            with refuses("stage 1 has sent no credit of step 0", error=PeerLost):
                alone.evaluate()
            kinds = ["table to evaluate", *4 * ["evaluated activation"]]
            assert [(to, key.kind) for to, key in sent] == [(1, kind) for kind in kinds]


# --- the order of micro-batches -------------------------------------------------------------------


SIZES = [(s, m) for s in range(1, 9) for m in (*range(1, 10), 16, 31, 32)]


def run(name, stages, micro_batches, forward=1.0, backward=1.0):
    """Seconds of a step in which an action begins when what it needs has come, which may never be.

    Also the largest number of inputs that each stage keeps.
    """
    lists = [orders.order(name, stages, micro_batches, s) for s in range(stages)]
    done, clocks, next_, kept, most = {}, [0.0] * stages, [0] * stages, [0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while next_[s] < len(lists[s]):
                action, k = lists[s][next_[s]]
                needs = [("forward", s - 1, k)] if s else []
                if action == "backward":
                    last = s == stages - 1
                    needs = [("forward", s, k)] + ([] if last else [("backward", s + 1, k)])
                if any(need not in done for need in needs):
                    break
                begins = max([clocks[s], *(done[need] for need in needs)])
                clocks[s] = begins + (forward if action == "forward" else backward)
                assert (action, s, k) not in done
                done[action, s, k] = clocks[s]
                kept[s] += 1 if action == "forward" else -1
                most[s] = max(most[s], kept[s])
                next_[s] += 1
                moved = True
    assert len(done) == 2 * stages * micro_batches, "a deadlock"
    return max(clocks), most


@pytest.mark.parametrize("name", orders.ORDERS)
def test_every_size_ends_in_the_time_of_the_bubble(name):
    """(M + S - 1) (f + b) seconds where links take none, whatever f and b are."""
    for stages, micro_batches in SIZES:
        seconds, most = run(name, stages, micro_batches, forward=1.0, backward=2.0)
        assert seconds == 3.0 * (micro_batches + stages - 1), (stages, micro_batches)
        for s in range(stages):
            waits = name == "gpipe" and s < stages - 1
            bound = micro_batches if waits else min(stages - s, micro_batches)
            assert most[s] == bound, (stages, micro_batches, s)


@pytest.mark.parametrize("last_costs", [0, 1.5, 2])
def test_layers_are_divided_as_well_as_can_be(last_costs):
    def slowest(counts):
        return max(*counts[:-1], counts[-1] + last_costs)

    for layers in range(3, 12):
        every = [c for c in itertools.product(range(1, layers), repeat=3) if sum(c) == layers]
        got = orders.divide(layers, 3, last_costs)
        assert sum(got) == layers and slowest(got) == min(map(slowest, every))


@pytest.mark.parametrize("text", ["3,3", "a,2,4", "0,3,3", "1,2,2"])
def test_layers_that_do_not_fit_are_refused(text):
    assert orders.layers_of("1,2,3", 6, 3, 0.0) == [1, 2, 3]
    with refused("pipeline.layers", text):
        orders.layers_of(text, 6, 3, 0.0)


def test_more_stages_than_layers_are_refused():
    with refused("pipeline.stages", 4):
        orders.divide(3, 4)


def test_a_stage_that_needs_no_other_computes_and_never_waits(tiny_data, tmp_path):
    """Nor does it cut a batch, with its dropout. Without a norm it rejects the update."""
    config = config_of(tiny_data, 1, algorithm="all_reduce", steps=9)
    with Threads(config, tmp_path) as threads:
        (stage,), task = threads.stages, threads.stages[0].part.task
        before = threads.params()
        with open_batches(stage, 0) as batches:
            alone = jax.jit(jax.vmap(lambda *given: task.loss(given[0], {}, *given[1:])[0]))
            key = jax.random.fold_in(jax.random.key(config.seed + 1), 0)
            keys = jax.vmap(lambda k: jax.random.fold_in(key, k))(np.arange(2))
            wanted = alone(stage.rows(stage.state.params), next(batches), keys)
        (span,) = threads.train(0, 1, row=True)
        assert span.seconds["compute_s"] > 0 == span.seconds["wait_s"]
        np.testing.assert_allclose(span.losses[0], wanted, rtol=1e-5)
        after, (_, (grads, _)) = threads.params(), stage.zeros(stage.rows(stage.state.params), {})
        assert any((x != before[name]).any() for name, x in after.items())
        norms = np.array([total_norm([4.0, np.inf]), total_norm([np.nan, np.inf])], np.float32)
        stage.update(np.ones(2, np.float32), norms, grads, None, None)
        assert stage.skipped()[0].tolist() == [1, 1]
        assert_close(threads.params(), after, rtol=0)


def test_a_backward_pass_is_compiled_with_the_options_of_a_step(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(xla, "options_of_step", lambda *_: {"xla_no_such_option": True})
    fails = pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option")
    with Threads(config_of(tiny_data, 1), tmp_path) as threads, fails:
        threads.train(0, 1)
