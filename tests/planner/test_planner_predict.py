"""Predictions, recommendations, and both against what was measured and published."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import optax
import pytest
from clusters import INSIDE, cluster, workload
from refusals import refuses

from decent_jax import optim, topology, train
from decent_jax.gossip import codecs
from decent_jax.models import decoders
from decent_jax.planner import network, predict, recommend, runtime
from decent_jax.planner.network import Link
from decent_jax.planner.runtime import AllReduce, Gossip, LogNormal, Workload
from decent_jax.planner.simulator import simulate
from decent_jax.tasks import language_modeling

# --- predictions --------------------------------------------------------------------------------


def test_the_parts_of_a_prediction_add_up_and_name_the_largest():
    whole = cluster(2, 4)
    for model_bytes, dominant in ((1e3, "compute"), (500e6, "communication")):
        for row in predict.compare(whole, workload(model_bytes, LogNormal(0.1))):
            assert row.compute_s + row.exposed_s + row.waiting_s == pytest.approx(row.step_s)
            assert min(row.exposed_s, row.waiting_s) >= -1e-12
            if row.label not in ("alternating_exp_ring", "hierarchical"):
                assert row.dominant == dominant, row
    slow = predict.predict(whole, workload(1e3, slowness=(1.0, 2.0) * 4), AllReduce())
    assert slow.compute_s == pytest.approx(2 * 0.12 + 0.003)  # an update is not slower
    wild = workload(1e3, LogNormal(1.5))
    [row] = predict.compare(whole, wild, ("all_reduce",))
    assert row.dominant == "stragglers"


def test_all_reduce_is_given_its_best_bucket_size():
    far = network.regions({"Oregon": 2, "Tokyo": 2})
    tuned = predict.algorithm_of("all_reduce", far, workload(500e6))
    assert tuned.bucket_bytes == math.inf  # latency of 100 ms a bucket
    near = predict.algorithm_of("all_reduce", cluster(2, 4), workload(500e6))
    assert near.bucket_bytes == 25e6


# --- recommendation -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, n, replicas_per_node, m",
    [
        ("complete", 8, 1, 1.0),
        ("one_peer_exp", 8, 1, 3.0),
        ("hypercube", 16, 1, 4.0),
        # ring of 8: two rounds leave .7071 of the distance, half its square (REFERENCE.md B)
        ("ring", 8, 1, 4.0),
        ("bidirectional_ring", 8, 1, 1 / (1 - 0.804738**2)),
        # exact after 4 rounds from even phases, after 5 from odd ones
        ("alternating_exp_ring", 16, 4, 5.0),
        ("alternating_exp_ring", 8, 4, 2.0),
    ],
)
def test_steps_per_averaging(name, n, replicas_per_node, m):
    schedule = topology.make(name, n, replicas_per_node=replicas_per_node)
    assert recommend.steps_per_averaging(schedule) == pytest.approx(m, rel=1e-4)


def test_the_recommendation_is_the_fastest_step_and_of_equals_the_one_that_agrees_soonest():
    whole, tried = cluster(4, 4), ("float32", "int8")
    found = recommend.choices(whole, workload(100e6), mix_every=(1, 2), codecs=tried)
    labels = [choice.prediction.label for choice in found]
    assert {"alternating_exp_ring, every 2 steps", "complete, every 2 steps, int8"} < {*labels}
    assert len({*labels}) == len(labels)
    times_s = np.array([choice.prediction.step_s for choice in found])
    equal = int((times_s <= 1.01 * times_s.min()).sum())
    assert 1 < equal < len(found)
    soonest = [choice.averaging_steps for choice in found[:equal]]
    assert soonest == sorted(soonest) and (np.diff(times_s[equal:]) >= -1e-9).all()


def test_a_choice_says_what_it_sends_and_how_soon_replicas_agree():
    every = {"mix_every": (1, 2), "codecs": ("float32", "int8")}
    found = recommend.choices(cluster(8, 1), workload(1e6), schedules=["one_peer_exp"], **every)
    by_label = {one.prediction.label: (one.sent_bytes, one.averaging_steps) for one in found}
    coded = 1e6 * (1 / 4 + 1 / 768)
    assert by_label == {
        "all_reduce": (pytest.approx(2 * 7 / 8 * 1e6), 0),
        "one_peer_exp": (pytest.approx(1e6), pytest.approx(3)),
        "one_peer_exp, every 2 steps": (pytest.approx(5e5), pytest.approx(6)),
        "one_peer_exp, int8": (pytest.approx(coded), pytest.approx(3)),
        "one_peer_exp, every 2 steps, int8": (pytest.approx(coded / 2), pytest.approx(6)),
    }


@pytest.mark.parametrize("name", topology.NAMES)
def test_the_planner_codes_what_gossip_codes(name):
    """They must agree on every schedule."""
    schedule = topology.make(name, 8, replicas_per_node=4)
    for codec in codecs.NAMED:
        try:
            optim.decentralized(optax.sgd(0.1), schedule, codec=codecs.NAMED[codec])
        except ValueError:
            assert codec != "float32" and not runtime.codes(schedule, codec)
            with refuses(name, codec):
                Gossip(schedule, codec=codec)
        else:
            assert Gossip(schedule, codec=codec).codec == codec
    assert tuple(codecs.NAMED) == runtime.CODECS


def test_a_compressed_wire_takes_its_share_of_the_time():
    whole, schedule = cluster(8, 1), topology.make("one_peer_exp", 8)
    step = {
        codec: simulate(whole, workload(1e9), Gossip(schedule, codec=codec), steps=3).step_s - 0.003
        for codec in ("float32", "bfloat16", "int8")
    }
    assert step["bfloat16"] == pytest.approx(step["float32"] / 2, rel=1e-3)
    assert step["int8"] == pytest.approx(step["float32"] * (1 / 4 + 1 / 768), rel=1e-3)
    # A mean of coded messages: 7 permutes of chunks to their owners, and an all-gather.
    coded = predict.step_s(whole, workload(1e9), Gossip(topology.make("complete", 8), codec="int8"))
    each = 1e-4 + 1e9 * (1 / 4 + 1 / 768) / 8 / 1e9
    assert coded - 0.003 == pytest.approx(14 * each, rel=1e-3)


@pytest.mark.parametrize("preset", ["small", "llama_125m"])
def test_a_message_has_the_bytes_that_gossip_sends(preset):
    """In every format, for the shapes of a model; the config says how long its rows are."""
    config = train.default_config("language_modeling")
    config.model.update(preset=preset, vocab_size=512)
    parameters, embedding, rows = language_modeling.count_parameters(config)
    model = language_modeling.model_config(config, 512)
    shapes = [leaf.shape for leaf in jax.tree.leaves(decoders.shapes(model))]
    work = dataclasses.replace(workload(4.0 * parameters), row_length=parameters / rows)
    assert embedding == 512 * model.width
    for name in runtime.CODECS:
        sent = sum(codecs.bytes_sent(codecs.NAMED[name], shape) for shape in shapes)
        assert work.share(name) * work.model_bytes == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize("name", ["erdos_renyi", "random_regular", "star"])
def test_a_step_is_no_shorter_where_compute_takes_longer(name):
    """Also near the point at which the network's time and compute's are equal."""
    whole = network.preset("nvlink_25gbe", 2, 4)
    works = [Workload(496e6, c / 3, 2 * c / 3) for c in np.linspace(0.4, 1.3, 10)]
    steps = [predict.step_s(whole, w, predict.algorithm_of(name, whole, w)) for w in works]
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(steps))
    assert steps[0] == pytest.approx(steps[4]) and steps[-1] == pytest.approx(1.3)


# --- measured -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "measured_s"),
    [
        (Gossip(topology.make("one_peer_exp", 2)), 0.298),
        (AllReduce(bucket_bytes=math.inf), 0.392),
    ],
    ids=["gossip", "all-reduce"],
)
def test_step_times_that_this_project_measured_on_two_hosts(algorithm, measured_s):
    """Throttled links: compute 134 ms, communication 269 ms.

    On CPU hosts nothing overlaps an all-reduce: one bucket, after the backward pass.
    """
    hosts = network.cluster([1, 1], INSIDE, Link(1e-4, 25e6))
    work = Workload(0.269 * 25e6, 0.134 / 3, 2 * 0.134 / 3)
    assert predict.step_s(hosts, work, algorithm) == pytest.approx(measured_s, rel=0.15)
