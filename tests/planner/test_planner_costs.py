"""What communication costs, against closed forms, hand counts and a brute-force allocation."""

import dataclasses
import itertools

import numpy as np
import pytest
from clusters import BETWEEN, INSIDE, cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from decent_jax import topology
from decent_jax.planner import costs, network
from decent_jax.planner.network import Link

MODEL = 1e9


def flat(n, latency_s=1e-4, bytes_per_s=1e9):
    """n machines of one device, all links alike."""
    return network.cluster([1] * n, INSIDE, Link(latency_s, bytes_per_s))


def permute_s(whole, sources, num_bytes):
    return costs.total_s([costs.permute_phase(whole, sources, num_bytes)])


# --- transfers ----------------------------------------------------------------------------------


def test_transfers_share_the_card_of_a_node_and_not_its_inside():
    whole = cluster(2, 4)
    across = (np.arange(8) + 4) % 8  # all four devices of each node at once, both directions
    assert permute_s(whole, across, MODEL) == pytest.approx(1e-4 + 4.0)
    inside = np.arange(8) ^ 1
    assert permute_s(whole, inside, MODEL) == pytest.approx(1e-6 + 0.01)


def test_replicas_that_receive_nothing_or_their_own_take_no_time():
    whole = cluster(2, 2)
    assert permute_s(whole, [-1, 1, -1, -1], MODEL) == 0
    stage = costs.permute_phase(whole, [-1, 0, -1, -1], MODEL)
    assert stage.duration_s[2] == stage.duration_s[3] == 0
    assert stage.duration_s[0] == stage.duration_s[1] > 0  # the sender is busy as long


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_rates_are_max_min_fair(seed, count):
    """By its definition: each is as fast as its link, or has the most of a card that is full."""
    rng = np.random.default_rng(seed)
    links, cards = rng.uniform(0.2, 1.0, (6, 6)), rng.uniform(0.2, 1.0, 3)
    whole = network.Network(
        np.zeros((6, 6)), links, np.repeat(np.arange(3), 2), cards, tuple("abcdef")
    )
    pairs = np.array(list(itertools.permutations(range(6), 2)))
    sources, targets = pairs[rng.choice(len(pairs), count, replace=False)].T
    rates = costs.rates(whole, sources, targets)
    most = rates >= links[sources, targets] * (1 - 1e-9)
    assert (rates <= links[sources, targets] * (1 + 1e-9)).all()
    out, into = whole.node[sources], whole.node[targets]
    for card, node in itertools.product((out, into), range(3)):
        users = (card == node) & (out != into)
        assert rates[users].sum() <= cards[node] * (1 + 1e-9)
        if rates[users].sum() >= cards[node] * (1 - 1e-9):
            most |= users & (rates >= rates[users].max() * (1 - 1e-9))
    assert most.all()


# --- all-reduce ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_a_ring_of_equal_links_has_its_closed_form(n):
    """2 (n - 1) steps of latency and of a chunk of 1/n (Patarasuk & Yuan 2009)."""
    wanted = 2 * (n - 1) * (1e-4 + MODEL / n / 1e9)
    assert costs.all_reduce_s(flat(n), MODEL, "ring") == pytest.approx(wanted)
    [stage] = [costs.ring_phase(flat(n), [np.arange(n)], MODEL, laps=1)]
    assert stage.duration_s.max() == pytest.approx(wanted / 2)


def ring_chunk_by_chunk(chunk_s, latency_s, steps):
    """Each link sends when it is free and the chunk is there; loops, no arrays."""
    g = len(chunk_s)
    free, have = [0.0] * g, [0.0] * g
    for _ in range(steps):
        arrives = [0.0] * g
        for h in range(g):
            free[h] = max(free[h], have[h]) + chunk_s[h]
            arrives[(h + 1) % g] = free[h] + latency_s[h]
        have = arrives
    return max(have)


def test_a_ring_of_unequal_links_is_what_a_loop_over_chunks_gives():
    whole = network.regions({"Oregon": 1, "Tokyo": 1, "London": 1, "Ohio": 1})
    even = dataclasses.replace(whole, bandwidth_bytes_per_s=np.full((4, 4), 2e8))
    hop = np.roll(np.arange(4), -1)
    for one in (whole, even):
        chunk_s = MODEL / 4 / one.bandwidth_bytes_per_s[np.arange(4), hop]
        wanted = ring_chunk_by_chunk(chunk_s, one.latency_s[np.arange(4), hop], 6)
        assert costs.all_reduce_s(one, MODEL, "ring") == pytest.approx(wanted)


def test_trees_carry_twice_the_data_on_a_card_and_the_data_once_between_two_nodes():
    for n, hops in ((2, 1), (4, 2), (5, 3), (8, 3)):  # the longest way up, and down again
        bytes_s = (1 if n == 2 else 2) * MODEL / 1e9
        wanted = pytest.approx(bytes_s + 2 * hops * 1e-4, rel=1e-6)
        assert costs.all_reduce_s(flat(n), MODEL, "tree") == wanted


def test_hierarchical_all_reduce_adds_up():
    whole = cluster(4, 8)
    inside = 7 * (1e-6 + MODEL / 8 / 100e9)
    shards = 2 * 3 * (1e-4 + 8 * MODEL / 8 / 4 / 1e9)  # eight rings share a card
    wanted = 2 * inside + shards
    assert costs.all_reduce_s(whole, MODEL, "hierarchical") == pytest.approx(wanted)


@pytest.mark.parametrize(
    "sizes, name",
    [([4, 3], "hierarchical"), ([8], "hierarchical"), ([4, 4], "butterfly")],
)
def test_an_all_reduce_that_does_not_exist_is_refused(sizes, name):
    whole = network.cluster(sizes, INSIDE, BETWEEN)
    with refuses(name):
        costs.all_reduce_s(whole, MODEL, name)


# --- rounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, seconds",
    [
        ("hypercube", [0.01, 0.01, 4.0, 4.0]),
        ("one_peer_exp", [1.0, 2.0, 4.0, 4.0]),
        ("ring", [0.01, 2.0]),  # both ends of a node exchange with the next node
        ("bidirectional_ring", [2.0]),
    ],
)
def test_rounds_of_named_schedules_counted_by_hand(name, seconds):
    """16 replicas, nodes of 4, 1 GB: as many seconds as models share a card."""
    schedule = topology.make(name, 16, replicas_per_node=4)
    found = [costs.round_s(cluster(4, 4), schedule, r, MODEL) for r in range(schedule.period)]
    np.testing.assert_allclose(found, seconds, rtol=0.02)


def test_alternating_exp_ring_sends_a_model_a_node_when_hierarchical_and_four_when_plain():
    schedule = topology.make("alternating_exp_ring", 16, replicas_per_node=4)
    for r in range(schedule.period):
        hierarchical = costs.round_s(cluster(4, 4), schedule, r, MODEL)
        plain = costs.round_s(cluster(4, 4), schedule, r, MODEL, "plain")
        merged = costs.round_s(cluster(4, 4), schedule, r, MODEL, "all_reduce")
        assert hierarchical == pytest.approx(1.0, rel=0.03)
        assert plain == pytest.approx(4.0, rel=0.03)
        assert merged == pytest.approx(1.0, rel=0.03)  # a tree over two nodes
    pairs = topology.make("alternating_exp_ring", 16, replicas_per_node=2)
    plain = costs.round_s(cluster(4, 4), pairs, pairs.period - 1, MODEL, "plain")
    assert plain == pytest.approx(MODEL / 2 * 1e-11 + 2.0, rel=1e-4)  # a mean, and two models


def test_carrying_a_round_out_by_all_reduce_needs_a_mean_over_groups():
    whole = cluster(2, 4)
    with refuses("mean over disjoint groups"):
        costs.round_s(whole, topology.make("one_peer_exp", 8), 1, MODEL, "all_reduce")
    groups = costs.mean_groups(topology.make("hypercube", 8).rounds[1])
    assert [group.tolist() for group in groups] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_a_schedule_for_another_number_of_replicas_is_refused():
    with refuses(16, 8):
        costs.round_s(cluster(2, 4), topology.make("ring", 16), 0, MODEL)
    with refuses("fast"):
        costs.round_s(cluster(2, 4), topology.make("ring", 8), 0, MODEL, "fast")


def test_stages_wait_for_senders_and_receivers():
    start = np.array([0.0, 5.0, 1.0, 0.0])
    ones = np.ones(4)
    permute = costs.Phase(ones, sources=np.array([-1, 0, -1, 2]))  # 0 -> 1, 2 -> 3
    np.testing.assert_array_equal(permute.end_s(start), [6, 6, 2, 2])
    group = costs.Phase(ones, label=np.array([0, 1, 0, 1]))
    np.testing.assert_array_equal(group.end_s(start), [2, 6, 2, 6])
    both = np.stack([start, start + 10])
    np.testing.assert_array_equal(group.end_s(both), [[2, 6, 2, 6], [12, 16, 12, 16]])
