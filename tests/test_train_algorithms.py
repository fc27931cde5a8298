"""Algorithms with a state of their own in the trainer: resume, another n, what is reported."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from decent_jax import train
from decent_jax.text import format_number
from decent_jax.train import ConfigError, algorithm
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib

pytestmark = pytest.mark.usefixtures("compile_once")

ALGORITHMS = {
    "gradient_tracking": {"schedule": "bidirectional_ring", "comm_dtype": "bfloat16"},
    "choco": {"schedule": "bidirectional_ring", "optimizer": {"name": "sgd"}},
    "swarm": {"schedule": "random_matching(rounds=2)", "swarm": {"bits": 8}},
    "diloco": {"schedule": "complete", "mix_every": 2, "diloco": {"fragments": 2, "delay": 1}},
    "push_sum": {"schedule": "random_out(seed=2)", "optimizer": {"name": "sgd"}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data") / "text")


def config(data, name, steps=6, **changes):
    return tiny.config(data, algorithm=name, steps=steps, **ALGORITHMS[name], **changes)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resumes_bit_for_bit_and_with_another_number(name, data, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    summary = train.run(config(data, name), whole)
    tiny.run(config(data, name, steps=3), halves)
    tiny.run(config(data, name), halves)
    tiny.assert_same_state(whole, halves, 6)
    losses = tiny.losses(whole)
    np.testing.assert_array_equal(tiny.losses(halves), losses)
    tiny.run(config(data, name, steps=8, num_replicas=2), halves)
    assert len(tiny.losses(halves)) == 8 and tiny.losses(halves)[-1] < losses[0]
    # What is reported is what the algorithm declares.
    parameters = summary["parameters"]
    factor = {
        "gradient_tracking": 2 * 2 / 4 * 2,
        "choco": 2 * 0.1 * 2,
        "swarm": 1 / 4,
        "diloco": 2 * 3 / 4 / 2 / 2,
        "push_sum": 2,
    }[name]
    sent = json.loads((whole / "summary.json").read_text())["bytes_sent_per_step"]
    assert sent == pytest.approx(4 * parameters * factor, rel=0.02)


# Of a method with its schedule and numbers the sentences are the methods' own (test_methods.py):
# here that they arrive, and what the config alone can know.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "d2", "schedule": "bidirectional_ring", "mix_every": 2}, "with mix_every=2"),
        ({"schedule": "random_out(seed=2)"}, "decentralized averages, .*random_out.*use push_sum"),
        ({"schedule": "complete", "comm_dtype": "int8"}, "complete averages in groups"),
        ({"algorithm": "sgd"}, "algorithm must be one of all_reduce, .*, swarm, got 'sgd'"),
        (
            {"algorithm": "decentralized_adam", "optimizer": {"name": "sgd"}},
            "decentralized_adam works with optimizer.name adam, got 'sgd'",
        ),
        ({"algorithm": "quasi_global_sgd"}, "quasi_global_sgd adds weight decay to the gradient"),
        (
            {"algorithm": "gradient_tracking", "gamma": 0.5},
            "gamma is not a number of algorithm gradient_tracking",
        ),
        (
            {"algorithm": "gradient_tracking", "max_consensus_distance": 0.5},
            "max_consensus_distance averages parameters only, and gradient_tracking keeps",
        ),
        ({"comm_dtype": "fp8"}, "comm_dtype must be one of float32, bfloat16, int8, got 'fp8'"),
        ({"algorithm": "swarm", "schedule": "ring", "swarm": {"bits": 4}}, "swarm.bits must be 8"),
    ],
)
def test_impossible_pairings_are_refused_at_once(changes, message, data):
    with pytest.raises(ConfigError, match=message):
        config_lib.validate(tiny.config(data, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm": "diloco", "schedule": "complete", "diloco": {"fragments": 500}},
            "algorithm diloco: 500 fragments are more than the .* arrays of the parameters",
        ),
        (
            {"algorithm": "gossiped_momentum", "optimizer": {"name": "sgd", "momentum": 0.0}},
            "algorithm gossiped_momentum: .*needs an optimizer with momentum",
        ),
    ],
)
def test_what_the_model_does_not_allow_is_one_sentence_too(changes, message, data, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train.run(tiny.config(data, **changes), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "replica", "node"),
    [
        ({"schedule": "hierarchical", "local_size": 4}, 1.75, 1.0),
        ({"schedule": "alternating_exp_ring", "local_size": 4}, (1.5 + 1.75) / 2, 0.5),
        ({"schedule": "one_peer_exp", "local_size": 4}, 1.0, (1 + 2 + 4) / 3),
        ({"schedule": "one_peer_exp", "local_size": 4, "mix_every": 2}, 0.5, 7 / 6),
        ({"algorithm": "all_reduce", "local_size": 4}, 1.75, 1.75),
    ],
)
def test_what_a_replica_and_a_node_send(changes, replica, node, data):
    one = tiny.config(data, num_replicas=8, **changes)
    schedule = config_lib.make_schedule(one)
    params = {"w": jax.ShapeDtypeStruct((8, 250_000), jnp.float32)}
    cost = algorithm.cost(one, schedule, step_lib.TrainState(params, (), (), None))
    assert (cost.sent_a_step, cost.sent_by_node) == pytest.approx((replica * 1e6, node * 1e6))
    said = algorithm.describe(one, schedule, cost)
    assert f"sends {format_number(replica)} MB per step (a node of 4 sends " in said
    assert f"{format_number(node)} MB to other nodes) and keeps 1.00 MB of parameters" in said
    one.local_size = 1
    if one.schedule == "one_peer_exp":
        assert "node" not in algorithm.describe(one, schedule, cost)
