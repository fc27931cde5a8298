"""The time that SwarmSGD takes, by hand and beside the planner's clock."""

import numpy as np
import pytest
from refusals import refuses

from decent_jax import topology
from decent_jax.planner import runtime
from decent_jax.planner.network import Link, cluster, from_matrices
from decent_jax.planner.runtime import AllReduce, Gossip, LogNormal, Workload
from decent_jax.simulate import (
    Interaction,
    interactions,
    matchings,
    planner_timing,
    swarm_timing,
)

MODEL_BYTES = 102.4e6
MESSAGE_S = 50e-6 + MODEL_BYTES / 3.125e9
RESNET50 = Workload(MODEL_BYTES, forward_s=0.03, backward_s=0.06, update_s=0.01)


def ethernet(n, devices=1):
    return cluster([devices] * (n // devices), Link(5e-6, 300e9), Link(50e-6, 3.125e9))


@pytest.mark.parametrize("n", [2, 8, 64])
@pytest.mark.parametrize("steps", [1, 4])
def test_matchings_take_the_same_time_for_any_number_of_replicas(n, steps):
    given = matchings(n, 5, local_steps=steps)
    timing = swarm_timing(given, ethernet(n), RESNET50)
    assert timing.step_s == pytest.approx(0.1 + MESSAGE_S / steps, rel=1e-12)
    assert timing.compute_s == pytest.approx(0.1)
    assert timing.wait_s == pytest.approx(0, abs=1e-12)
    assert timing.overhead == pytest.approx(MESSAGE_S / steps / 0.1)
    assert timing.communication_share == pytest.approx(1 - 0.1 / timing.step_s)
    coded = swarm_timing(given, ethernet(n), RESNET50, message_bytes=MODEL_BYTES / 4)
    assert coded.transfer_s == pytest.approx((50e-6 + MODEL_BYTES / 4 / 3.125e9) / steps)


def test_messages_behind_compute_cost_nothing_unless_they_take_longer():
    given = interactions(8, 200, local_steps=2, geometric=True)
    hidden = swarm_timing(given, ethernet(8), RESNET50, blocking=False)
    assert hidden.step_s == pytest.approx(0.1) and hidden.overhead == pytest.approx(0, abs=1e-12)
    long = swarm_timing(
        matchings(8, 10, local_steps=2), ethernet(8), RESNET50,
        blocking=False, message_bytes=1e9,
    )  # fmt: skip
    assert long.step_s == pytest.approx((50e-6 + 1e9 / 3.125e9) / 2)
    assert long.transfer_s == pytest.approx(long.step_s - 0.1)


def test_waiting_by_hand():
    """Replica 1 takes twice as long: 0.1, 0.2, 0.1 s a step and messages of 1 s."""
    work = Workload(1e6, 0.05, 0.05, slowness=(1.0, 2.0, 1.0))
    network = cluster([1] * 3, Link(0.0, 1e6), Link(0.0, 1e6))
    drawn = [Interaction(0, 1, 1, 1, 0.0), Interaction(1, 2, 1, 2, 0.0)]
    timing = swarm_timing(drawn, network, work)
    # 0 and 1 meet at 0.2 and go on at 1.2; 1 is ready at 1.4, 2 at 0.2, both go on at 2.4
    assert timing.step_s == pytest.approx((1.2 + 2.4 + 2.4) / 5)
    assert timing.compute_s == pytest.approx((0.1 + 0.4 + 0.2) / 5)
    assert timing.transfer_s == pytest.approx(4 / 5)
    assert timing.wait_s == pytest.approx((0.1 + 1.2) / 5)
    stale = swarm_timing(drawn, network, work, blocking=False)
    assert stale.step_s == pytest.approx((1 + (1 + 1) + 1) / 5)
    second = swarm_timing(drawn, network, work, warm_up=1)
    assert second.step_s == pytest.approx((1.2 + 2.4) / 3)
    assert second.transfer_s == pytest.approx(2 / 3)


def test_only_blocking_pairs_wait_for_slow_partners():
    work = Workload(MODEL_BYTES, 0.03, 0.06, compute=LogNormal(0.3))
    given = matchings(16, 100, local_steps=1)
    waits = swarm_timing(given, ethernet(16), work, message_bytes=1.0).wait_s
    everybody = planner_timing(ethernet(16), work, AllReduce(bucket_bytes=np.inf)).wait_s
    assert 0.01 < waits < everybody
    free = swarm_timing(given, ethernet(16), work, message_bytes=1.0, blocking=False)
    assert free.overhead == pytest.approx(0, abs=1e-9)
    in_turn = swarm_timing(interactions(16, 800), ethernet(16), RESNET50, message_bytes=1.0)
    assert in_turn.wait_s > 0.05  # replicas whose partner still has others to meet


def test_a_machine_shares_its_card():
    given = [[Interaction(0, 4, 1, 1, 0.0)], [Interaction(0, 1, 1, 1, 0.0)]]
    across, inside = (
        swarm_timing([one], ethernet(8, devices=4), RESNET50).transfer_s for one in given
    )
    assert across == pytest.approx(50e-6 + MODEL_BYTES / (3.125e9 / 4))
    assert inside == pytest.approx(5e-6 + MODEL_BYTES / 300e9)


def test_a_message_each_way_takes_as_long_as_the_slower():
    network = from_matrices([[0, 0.5], [0.4, 0]], np.full((2, 2), 1e6))
    for pair in ((0, 1), (1, 0)):
        timing = swarm_timing([Interaction(*pair, 1, 1, 0.0)], network, Workload(1e6, 0.1, 0.1))
        assert timing.transfer_s == pytest.approx(0.5 + 1)


def test_planner_timing_is_the_planners():
    network = ethernet(8)
    reduce = planner_timing(network, RESNET50, AllReduce("ring", bucket_bytes=np.inf))
    ring_s = 2 * 7 * (MODEL_BYTES / 8 / 3.125e9 + 50e-6)
    assert reduce.step_s == pytest.approx(0.1 + ring_s) and reduce.wait_s == pytest.approx(0)
    assert reduce.transfer_s == pytest.approx(ring_s)
    varied = Workload(MODEL_BYTES, 0.03, 0.06, 0.01, compute=LogNormal(0.1))
    buckets = planner_timing(network, varied, AllReduce("ring"), steps=4000)
    exact = runtime.all_reduce_step_s(network, varied, AllReduce("ring"))
    assert buckets.step_s == pytest.approx(exact, rel=0.01) and buckets.wait_s > 0
    gossip = planner_timing(network, RESNET50, Gossip(topology.make("one_peer_exp", 8)))
    assert gossip.step_s == pytest.approx(0.1) and gossip.transfer_s == pytest.approx(0)
    slow = Workload(MODEL_BYTES, 0.03, 0.06, slowness=(2.0,) + (1.0,) * 7)
    with_slow = planner_timing(network, slow, AllReduce(bucket_bytes=np.inf))
    assert with_slow.compute_s == pytest.approx(0.09 * 9 / 8)
    assert with_slow.wait_s == pytest.approx(0.09 * 7 / 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: swarm_timing([Interaction(0, 8, 1, 1, 0.0)], ethernet(8), RESNET50),
            "8 devices",
        ),
        (lambda: swarm_timing([], ethernet(8), RESNET50), "no local steps"),
    ],
)
def test_timing_refuses(call, words):
    with refuses(*words.split()):
        call()
