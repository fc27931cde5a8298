"""Placement of stages and of schedules: published totals, brute force, and the proof of case 2."""

import itertools
import json

import numpy as np
import pytest
from datafiles import DATA
from refusals import refuses

from decent_jax import topology
from decent_jax.planner import costs, gossip_placement
from decent_jax.planner import network as networks
from decent_jax.planner.placement import (
    Job,
    Problem,
    StageGroups,
    bottleneck_matching,
    evaluate,
)
from decent_jax.planner.search import place

# GPT3-1.3B in 8 stages of 3 layers: 1.3e9 parameters / 8 in float32; activations of 125,000 tokens
# of width 2048 in float16 (DT-FM's own rounding of both).
DTFM_JOB = Job(8, 8, data_parallel_bytes=0.65e9, pipeline_bytes=0.47124922275543213e9)


def random_network(n, seed, levels=None):
    """Symmetric; with few levels there are many ties."""
    rng = np.random.default_rng(seed)
    draw = (lambda: rng.random((n, n))) if levels is None else (
        lambda: rng.integers(1, levels + 1, (n, n)) / levels
    )  # fmt: skip
    latency, bandwidth = (np.triu(draw(), 1) for _ in range(2))
    return networks.from_matrices(
        1e-3 + 0.2 * (latency + latency.T), 1e8 + 1e9 * (bandwidth + bandwidth.T)
    )


def job_of(stages, replicas):
    return Job(stages, replicas, DTFM_JOB.data_parallel_bytes, DTFM_JOB.pipeline_bytes)


def brute_force(network, job):
    """The least total over every choice of devices and of pipelines of them."""
    shape = job.num_stages, job.num_replicas
    every = itertools.permutations(range(network.num_devices), job.num_devices)
    return min(evaluate(network, job, np.reshape(one, shape)).total_s for one in every)


@pytest.fixture(scope="module")
def published():
    return json.loads((DATA / "networks/dtfm_cases.json").read_text())


def case(number):
    return networks.preset(f"dtfm_case{number}")


def test_published_layouts_cost_what_is_published(published):
    for number, wanted in enumerate(published["cases"].values(), 1):
        problem = Problem(case(number), DTFM_JOB)
        consecutive = np.arange(64)
        for name, slots in (
            ("data_parallel_group_is_consecutive", consecutive),
            ("identity_rank_map_pipeline_is_consecutive", consecutive.reshape(8, 8).T.ravel()),
        ):
            layout = wanted["layouts"][name]
            partition = StageGroups(problem, slots)
            assert partition.costs.total_s == pytest.approx(layout["total"], rel=1e-9)
            assert partition.costs.data_parallel_s == pytest.approx(layout["dp"], rel=1e-9)
            assert 2 * partition.costs.pipeline_s == pytest.approx(layout["two_pp"], rel=1e-9)


@pytest.mark.parametrize(
    ("n", "stages", "replicas", "levels"),
    [(6, 3, 2, None), (7, 3, 2, 3), (6, 1, 4, None), (6, 5, 1, 2)],
)
def test_small_instances_are_solved(n, stages, replicas, levels):
    network, job = random_network(n, seed=n + stages, levels=levels), job_of(stages, replicas)
    optimum = brute_force(network, job)
    found = place(network, job, steps=2000, time_limit_s=60)
    assert found.costs.total_s == pytest.approx(optimum, rel=1e-12)
    assert evaluate(network, job, found.stages).total_s == pytest.approx(optimum, rel=1e-12)
    assert found.lower_bound.total_s <= optimum * (1 + 1e-12)
    if found.is_optimal:
        assert found.lower_bound.total_s == pytest.approx(optimum)


@pytest.mark.parametrize("number", [1, 3, 4, 5])
def test_published_costs_are_reached(number):
    wanted = {1: 3.4398, 3: 16.0868, 4: 34.8020, 5: 49.2184}[number]
    network = case(number)
    found = place(network, DTFM_JOB, steps=3000, time_limit_s=60)
    assert found.costs.total_s <= wanted + 5e-5  # four decimals are published
    again = evaluate(network, DTFM_JOB, found.stages)
    assert again == pytest.approx(found.costs, rel=1e-12)


def test_case_2_is_solved_and_proved():
    """32 of 64 devices have no fast link. Hence 7 slow partners for one of them, whatever its
    group; and at most 4 groups without such a device, with at most 3 fast edges among them."""
    found = place(case(2), DTFM_JOB, steps=10_000, time_limit_s=60)
    slow, fast = (DTFM_JOB.pipeline_bytes / (gbps * 1.25e8) for gbps in (1.25, 100))
    optimum = 7 * 2 * 0.65e9 / 8 / (1.25 * 1.25e8) + 2 * (4 * slow + 3 * fast)
    assert optimum == pytest.approx(31.63416, abs=1e-5)
    assert optimum < 43.547
    assert found.lower_bound.total_s == pytest.approx(optimum, rel=1e-12)
    assert found.costs.total_s == pytest.approx(optimum, rel=1e-12)
    assert found.is_optimal
    assert evaluate(case(2), DTFM_JOB, found.stages).total_s == pytest.approx(optimum, rel=1e-12)


@pytest.mark.parametrize("levels", [None, 3])
def test_no_placement_is_below_the_lower_bound(levels):
    rng = np.random.default_rng(1)
    for seed in range(20):
        problem = Problem(random_network(14, seed, levels), job_of(3, 4))
        bound = problem.lower_bound()
        for _ in range(10):
            costs = StageGroups(problem, rng.permutation(14)).costs
            assert costs.data_parallel_s >= bound.data_parallel_s * (1 - 1e-12)
            assert costs.pipeline_s >= bound.pipeline_s * (1 - 1e-12)


@pytest.mark.parametrize("levels", [None, 4])
def test_matchings_are_exact(levels):
    rng, rows = np.random.default_rng(2), np.arange(5)
    for _ in range(200):
        costs = rng.random((5, 5)) if levels is None else rng.integers(0, levels, (5, 5)) * 1.0
        columns, bottleneck = bottleneck_matching(costs)
        assert sorted(columns.tolist()) == list(range(5))
        assert costs[rows, columns].max() == bottleneck
        orders = itertools.permutations(range(5))
        assert bottleneck == min(costs[rows, list(order)].max() for order in orders)


def test_emitted_pipelines_cost_what_is_reported_also_where_links_are_asymmetric():
    """After exchanges, too, which update the cost."""
    rng = np.random.default_rng(3)
    network = random_network(15, 3)
    factor = rng.uniform(1, 1.2, (15, 15))
    network = networks.from_matrices(network.latency_s, network.bandwidth_bytes_per_s * factor)
    job = job_of(4, 3)
    problem = Problem(network, job)
    partition = StageGroups(problem, rng.permutation(15))
    for _ in range(20):
        partition.swap(*rng.choice(15, 2, replace=False).tolist())
        stages = partition.stages()
        assert {frozenset(group) for group in stages.tolist()} == {
            frozenset(group) for group in partition.groups.tolist()
        }
        assert evaluate(network, job, stages) == pytest.approx(partition.costs, rel=1e-12)


def test_the_slower_direction_of_a_link_counts():
    """Device 0 sends slowly to 1 and receives slowly from 2: both links are slow."""
    rate = np.full((3, 3), 1e9)
    rate[0, 1] = rate[2, 0] = 0.8e9
    network, stages = networks.from_matrices(np.zeros((3, 3)), rate), np.array([[0, 1, 2]])
    assert evaluate(network, Job(1, 3, 6e9, 0.0), stages).total_s == 2 * 2 * 2e9 / 0.8e9


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda: place(random_network(7, 0), job_of(4, 2)), (8, 7)),
        (lambda: Job(17, 1, 1.0, 1.0), (17,)),
        (lambda: Job(2, 0, 1.0, 1.0), (0,)),
    ],
)
def test_what_does_not_fit_is_refused(call, values):
    with refuses(*values):
        call()


def test_a_seed_gives_one_result_and_progress_shows_a_bar(capsys):
    network, job = random_network(12, 7), job_of(3, 4)
    one, two = (
        place(network, job, seed=3, steps=60, time_limit_s=60, progress=show)
        for show in (False, True)
    )
    np.testing.assert_array_equal(one.stages, two.stages)
    assert "placing stages" in capsys.readouterr().err


# --- schedules: closed forms, brute force over orders ---------------------------------------------

MODEL_BYTES = 498e6  # GPT-2 124M in float32


def matrices(name, n):
    return [one.matrix for one in topology.make(name, n).rounds]


def shuffled(network, seed):
    return network.take(np.random.default_rng(seed).permutation(network.num_devices))


def exact(network, schedule, order):
    placed = network.take(order)
    return sum(costs.round_s(placed, schedule, r, MODEL_BYTES) for r in range(schedule.period))


# --- disagreement --------------------------------------------------------------------------------


def test_disagreement_of_exact_schedules():
    """After k rounds of one_peer_exp n / 2^k - 1 of the n - 1 directions are left, until none."""
    assert gossip_placement.disagreement_s(matrices("complete", 8), [3.0]) == pytest.approx(4.5)
    for n in (2, 8, 16):
        left = sum((n / 2**k - 1) / (n - 1) for k in range(int(np.log2(n))))
        for name in ("one_peer_exp", "hypercube"):
            rounds = matrices(name, n)
            assert gossip_placement.disagreement_s(rounds, [2.0] * len(rounds)) == pytest.approx(
                2 * (0.5 + left)
            )
    assert gossip_placement.disagreement_s(matrices("complete", 1), [3.0]) == 0


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
    assert gossip_placement.disagreement_s(rounds, seconds) == pytest.approx(wanted)


def test_disagreement_grows_without_bound_where_nothing_contracts():
    apart = np.kron(np.eye(2), np.full((2, 2), 0.5))
    assert gossip_placement.disagreement_s([apart], [1.0]) == np.inf
    assert gossip_placement.disagreement_s([np.eye(4)], [1.0]) == np.inf


def test_no_round_is_shorter_than_the_step_that_hides_it():
    network = networks.preset("dtfm_case3").take(range(28, 36))
    schedule = topology.make("hypercube", 8)
    inside, across = (0.001 + MODEL_BYTES / 6.25e8), (0.011 + MODEL_BYTES / 1.4e8)
    placed = gossip_placement.evaluate(network, schedule, MODEL_BYTES)
    assert placed.round_s == pytest.approx([inside, inside, across])
    placed = gossip_placement.evaluate(network, schedule, MODEL_BYTES, compute_s=1.0)
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
    found = gossip_placement.place_schedule(
        network, schedule, MODEL_BYTES, steps=steps, time_limit_s=60
    )
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
    found = gossip_placement.place_schedule(
        shuffled(network, 8), schedule, MODEL_BYTES, steps=800, time_limit_s=60
    )
    assert sum(found.round_s) == pytest.approx(best, rel=1e-12)


def test_one_replica_stays_where_it_is():
    alone = networks.cluster([1], networks.NVLINK, networks.ETHERNET_25G)
    found = gossip_placement.place_schedule(
        alone, topology.make("hierarchical", 1), MODEL_BYTES, time_limit_s=60
    )
    assert (found.order.tolist(), found.disagreement_s) == ([0], 0.0)
