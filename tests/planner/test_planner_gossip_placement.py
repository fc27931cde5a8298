"""Schedules on networks: closed forms, brute force over orders."""

import itertools

import numpy as np
import pytest

from decent_jax import topology
from decent_jax.planner import costs
from decent_jax.planner import network as networks
from decent_jax.planner.gossip_placement import (
    disagreement_s,
    evaluate,
    place_schedule,
)

MODEL_BYTES = 498e6  # GPT-2 124M in float32


def matrices(name, n, **options):
    return [one.matrix for one in topology.make(name, n, **options).rounds]


def shuffled(network, seed):
    return network.take(np.random.default_rng(seed).permutation(network.num_devices))


def exact(network, schedule, order):
    placed = network.take(order)
    return sum(costs.round_s(placed, schedule, r, MODEL_BYTES) for r in range(schedule.period))


# --- disagreement --------------------------------------------------------------------------------


def test_disagreement_of_exact_schedules():
    """After k rounds of one_peer_exp n / 2^k - 1 of the n - 1 directions are left, until none."""
    assert disagreement_s(matrices("complete", 8), [3.0]) == pytest.approx(4.5)
    for n in (2, 8, 16):
        left = sum((n / 2**k - 1) / (n - 1) for k in range(int(np.log2(n))))
        for name in ("one_peer_exp", "hypercube"):
            rounds = matrices(name, n)
            assert disagreement_s(rounds, [2.0] * len(rounds)) == pytest.approx(2 * (0.5 + left))
    assert disagreement_s(matrices("complete", 1), [3.0]) == 0


def test_disagreement_is_what_drifting_replicas_settle_at():
    """Unequal rounds of an unsymmetric schedule, by adding up what is left of every past drift."""
    rounds = matrices("one_peer_exp", 6)
    seconds = np.array([0.5, 2.0, 1.0])
    centre = np.eye(6) - 1 / 6
    at_start = np.zeros(3)
    for r in range(3):
        product, past = centre, r
        for _ in range(200):
            past = (past - 1) % 3
            at_start[r] += seconds[past] * np.sum(product**2) / 5
            product = product @ rounds[past]
    # In a round it grows by 1 a second.
    wanted = sum(seconds * (at_start + seconds / 2)) / seconds.sum()
    assert disagreement_s(rounds, seconds) == pytest.approx(wanted)


def test_disagreement_grows_without_bound_where_nothing_contracts():
    apart = np.kron(np.eye(2), np.full((2, 2), 0.5))
    assert disagreement_s([apart], [1.0]) == np.inf
    assert disagreement_s([np.eye(4)], [1.0]) == np.inf


def test_no_round_is_shorter_than_the_step_that_hides_it():
    network = networks.preset("dtfm_case3").take(range(28, 36))
    schedule = topology.make("hypercube", 8)
    inside, across = (0.001 + MODEL_BYTES / 6.25e8), (0.011 + MODEL_BYTES / 1.4e8)
    placed = evaluate(network, schedule, MODEL_BYTES)
    assert placed.round_s == pytest.approx([inside, inside, across])
    placed = evaluate(network, schedule, MODEL_BYTES, compute_s=1.0)
    assert placed.round_s == pytest.approx([1.0, 1.0, across])
    assert placed.mean_round_s == pytest.approx((2 + across) / 3)


# --- orders --------------------------------------------------------------------------------------


def uneven(n, seed):
    rng = np.random.default_rng(seed)
    latency, rate = (np.triu(rng.uniform(low, high, (n, n)), 1) for low, high in ((0, 0.1), (7, 9)))
    return networks.from_matrices(latency + latency.T, 10 ** (rate + rate.T))


SIX = networks.regions({"Oregon": 1, "Tokyo": 2, "London": 3})
FOUR = networks.regions({"Oregon": 2, "Ohio": 1, "Tokyo": 1})
ODD = networks.from_matrices(  # no two links are alike
    np.full((7, 7), 1e-3), 10 ** np.add.outer(x := np.random.default_rng(0).uniform(3, 5, 7), x)
)
CARDS = networks.cluster([4, 1, 1], networks.PCIE, networks.ETHERNET_25G)


@pytest.mark.parametrize(
    ("network", "schedule", "steps"),
    [
        (shuffled(SIX, 1), topology.make("one_peer_exp", 6), 600),
        (uneven(6, 1), topology.make("ring", 6), 600),
        (shuffled(FOUR, 2), topology.make("alternating_exp_ring", 4, replicas_per_node=2), 60),
        (ODD, topology.make("bidirectional_ring", 7), 600),
        (shuffled(CARDS, 3), topology.make("one_peer_exp", 6), 600),
        (uneven(5, 0), topology.make("complete", 5), 3),  # a ring of all devices has an order too
    ],
    ids=["pairs", "ring", "groups", "odd", "shared cards", "mean"],
)
def test_the_best_of_all_orders_is_found(network, schedule, steps):
    orders = itertools.permutations(range(network.num_devices))
    best = min(exact(network, schedule, order) for order in orders)
    found = place_schedule(network, schedule, MODEL_BYTES, steps=steps, time_limit_s=60)
    assert sum(found.round_s) == pytest.approx(best, rel=1e-12)
    assert exact(network, schedule, found.order) == pytest.approx(best, rel=1e-12)


def test_whole_groups_are_put_in_the_best_of_all_orders():
    """Five regions of two: all orders of the regions, of which none splits one."""
    counts = {"Oregon": 2, "Tokyo": 2, "London": 2, "Ohio": 2, "Sydney": 2}
    network, schedule = (
        networks.regions(counts),
        topology.make("hierarchical(complete, one_peer_exp)", 10, replicas_per_node=2),
    )
    best = min(
        exact(network, schedule, [d for region in regions for d in (2 * region, 2 * region + 1)])
        for regions in itertools.permutations(range(5))
    )
    found = place_schedule(shuffled(network, 8), schedule, MODEL_BYTES, steps=800, time_limit_s=60)
    assert sum(found.round_s) == pytest.approx(best, rel=1e-12)


def test_one_replica_stays_where_it_is():
    alone = networks.cluster([1], networks.NVLINK, networks.ETHERNET_25G)
    found = place_schedule(alone, topology.make("hierarchical", 1), MODEL_BYTES, time_limit_s=60)
    assert (found.order.tolist(), found.disagreement_s) == ([0], 0.0)
