"""Algorithms with a state of their own in the trainer: resume, what is reported."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
import tiny
from refusals import refused

from decent_jax import topology
from decent_jax.ground.format import format_number
from decent_jax.optim import METHODS
from decent_jax.train import algorithm
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.config import parse

pytestmark = pytest.mark.usefixtures("compile_once")

ALGORITHMS = {
    "diloco": {"schedule": "complete", "mix_every": 3, "outer": {"fragments": 2, "delay": 2}},
    "push_sum": {"schedule": "random_out(seed=2)", "optimizer": {"name": "sgd"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_resumes_bit_for_bit_and_reports_what_it_declares(name, tmp_path):
    def run(folder, steps, **changes):
        changes |= ALGORITHMS[name] | {"model": {"waves": 1000}}
        return tiny.run(tiny.waves(algorithm=name, steps=steps, **changes), tmp_path / folder)

    whole = run("whole", 6, checkpoint={"every": 3})
    small_runs.killed_after(3, whole, tmp_path / "halves")
    halves = run("halves", 6)
    tiny.assert_same_state(whole, halves, 6)
    losses = tiny.losses(whole)
    np.testing.assert_array_equal(tiny.losses(halves), losses)
    # What is reported is what the algorithm declares.
    summary = tiny.summary(whole)
    factor = {"diloco": 2 * 3 / 4 / 2 / 3, "push_sum": 2}[name]
    sent = summary["bytes_sent_per_step"]
    assert sent == pytest.approx(4 * summary["parameters"] * factor, rel=0.03)


DRAWS = [name for name, method in METHODS.items() if "codec" in method.takes and name != "swarm"]
DRAWS += ["choco"]


@pytest.mark.filterwarnings("ignore:d2 on bidirectional_ring")  # at the bound of D2
def test_the_seed_decides_what_messages_are_rounded_by():
    """Of every method whose messages draw; in float32 it changes nothing."""
    x = jax.random.normal(jax.random.key(1), (4, 60))
    x = {name: x if name != "choco" else x[:1].repeat(4, axis=0) for name in DRAWS}

    def step_and_start(seed, codec):
        txs = {}
        for name in DRAWS:
            coded = codec if name != "choco" else "float32"
            config = tiny.waves(algorithm=name, seed=seed, codec=coded)
            config.choco.compressor = "int8" if codec == "int8" else "top_k"
            config.optimizer.decoupled = name != "quasi_global_sgd"
            graph = "complete" if name == "diloco" else "bidirectional_ring"
            txs[name] = algorithm.transformation(parse(config), topology.make(graph, 4), 0.1)
        tx = harness.together(txs)
        one = harness.step_of(tx, lambda x: jax.tree.map(jnp.cos, x), 0)
        return jax.jit(jax.vmap(one, axis_name="replica")), jax.jit(jax.vmap(tx.init))

    def after_two_steps(seed):
        step, start = step_and_start(seed, "int8")
        return jax.tree.map(np.asarray, step(*step(x, start(x)))[0])

    def program(seed):
        step, start = step_and_start(seed, "float32")
        return step.lower(x, jax.eval_shape(start, x)).as_text()

    first, other = map(after_two_steps, (3, 2**40))
    for name in DRAWS:
        assert (first[name] != other[name]).mean() > 0.5, name
    assert program(3) == program(2**40)


def test_gamma_falls_with_the_learning_rate():
    """DSGD-AC: the step at a quarter of the peak averages half as much where the power is 1/2."""
    config = tiny.waves(algorithm="decentralized_sgd", gamma=0.8, gamma_lr_exponent=0.5)
    config.optimizer.update(name="sgd", momentum=0.0, weight_decay=0.0)
    schedule = config_lib.make_schedule(config)
    tx = algorithm.transformation(parse(config), schedule, lambda t: config.learning_rate / 4**t)
    x = np.float32([0, 2, 4, 8])
    state, params = jax.vmap(tx.init)(x), x
    one = jax.vmap(lambda s, x: tx.update(0 * x, s, x, round=0), axis_name="replica")
    step = jax.jit(one)
    for share in (0.8, 0.4, 0.2):
        change, state = step(state, params)
        np.testing.assert_allclose(change, share * (schedule.matrix(0) @ x - x), rtol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "diloco", "schedule": "complete", "outer": {"fragments": 500}},
        {"algorithm": "gossiped_momentum", "optimizer": {"name": "sgd", "momentum": 0.0}},
    ],
)
def test_what_the_model_does_not_allow_is_one_sentence_too(changes, tmp_path):
    with refused("algorithm", changes["algorithm"]):
        tiny.run(tiny.waves(**changes), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "replica", "node"),
    [
        ({"schedule": "hierarchical", "replicas_per_node": 4}, 1.75, 1.0),
        ({"schedule": "alternating_exp_ring", "replicas_per_node": 4}, (1.5 + 1.75) / 2, 0.5),
        ({"schedule": "one_peer_exp", "replicas_per_node": 4}, 1.0, (1 + 2 + 4) / 3),
        ({"schedule": "one_peer_exp", "replicas_per_node": 4, "mix_every": 2}, 0.5, 7 / 6),
        ({"algorithm": "all_reduce", "replicas_per_node": 4}, 1.75, 1.75),
    ],
)
def test_what_a_replica_and_a_node_send(changes, replica, node):
    one = tiny.waves(num_replicas=8, **changes)
    schedule = config_lib.make_schedule(one)
    params = {"w": jax.ShapeDtypeStruct((8, 250_000), jnp.float32)}
    cost = algorithm.cost(parse(one), schedule, step_lib.TrainState(params, (), ()), 4)
    assert (cost.sent_a_step, cost.sent_by_node) == pytest.approx((replica * 1e6, node * 1e6))
    said = algorithm.describe(one, schedule, cost)
    assert f"sends {format_number(replica)} MB per step (a node of 4 sends " in said
    assert f"{format_number(node)} MB to other nodes) and keeps 1.00 MB of parameters" in said
    if one.schedule == "one_peer_exp":
        cost = dataclasses.replace(cost, replicas_per_node=1)
        assert "node" not in algorithm.describe(one, schedule, cost)
