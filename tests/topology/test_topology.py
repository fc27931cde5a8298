"""Schedules against closed forms, published lists and tables, and their own definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing import group_list, groups, norm, product, rebuild
from refusals import refuses

from decent_jax.topology import NAMES, make, repeat

quick = settings(database=None, deadline=None, max_examples=60)


def exists(name, n, local):
    try:
        return bool(make(name, n, replicas_per_node=local))
    except ValueError:
        return False


# (name, n, replicas_per_node): every schedule at the sizes it exists for, and with parameters.
CASES = [
    *((name, n, 2) for name in NAMES for n in (1, 2, 3, 4, 6, 7, 8, 16) if exists(name, n, 2)),
    *((name, n, 4) for name in ("alternating_exp_ring", "hierarchical") for n in (8, 16, 32)),
    *(("static_exp", 9, 1), ("base_k", 25, 1), ("grid", 12, 1), ("torus", 9, 1), ("torus", 12, 1)),
    *(("base_k(max_degree=2)", 24, 1), ("base_k(max_degree=9)", 25, 1), ("grid(rows=3)", 6, 1)),
    *(("torus(rows=8)", 8, 1), ("random_matching(rounds=5, seed=2)", 9, 1)),
    *(("random_matching(seed=3, degree=3)", 8, 1), ("equi_dynamic(rounds=3, seed=4)", 12, 1)),
    ("random_matching(rounds=12, degree=2, probability=0.5)", 7, 1),
    ("random_regular(degree=2, seed=3)", 9, 1),
    ("random_regular(degree=7)", 8, 1),
    ("erdos_renyi(probability=0.4, seed=1)", 10, 1),
    ("alternating_exp_ring", 6, 3),
    ("hierarchical(ring, one_peer_exp)", 12, 4),
    ("hierarchical(complete, complete)", 6, 3),
    ("hierarchical(one_peer_exp, complete)", 9, 3),
    ("hierarchical(base_k(max_degree=2), random_matching(rounds=4, seed=1))", 15, 3),
    ("periodic_average(base_k(max_degree=2), every=3)", 5, 1),
    ("periodic_average(bidirectional_ring, every=4)", 6, 1),
]


def test_a_round_that_repeats_is_one_round():
    """Each is compiled once: 4 of the 12 rounds."""
    schedule = make("periodic_average(one_peer_exp, every=4)", 8)
    assert schedule.period == 12
    rounds = [schedule.round_at(t) for t in range(24)]
    assert rounds == 2 * [0, 1, 2, 3, 1, 2, 0, 3, 2, 0, 1, 3]
    wanted = make("one_peer_exp", 8)
    for t in range(12):
        matrix = np.full((8, 8), 1 / 8) if t % 4 == 3 else wanted.matrix(t % 3)
        np.testing.assert_array_equal(schedule.matrix(rounds[t]), matrix)
        np.testing.assert_array_equal(schedule.matrix(t), matrix)


def test_repeated_rounds_are_rounds_of_their_own():
    schedule = repeat(make("complete", 4), 3)
    assert [schedule.round_at(t, 2) for t in range(8)] == [None, 0, None, 1, None, 2, None, 0]


# --- every schedule -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "n", "local"), CASES)
def test_rounds_are_doubly_stochastic_and_say_how_they_are_sent(name, n, local):
    schedule = make(name, n, replicas_per_node=local)
    assert (schedule.name, schedule.num_replicas) == (name, n)
    assert schedule.period == len(schedule.rounds) >= 1
    for r, one in enumerate(schedule.rounds):
        matrix = schedule.matrix(r)
        assert matrix.dtype == np.float64 and matrix.shape == (n, n) and matrix.min() >= 0
        np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-15)
        np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-15)
        np.testing.assert_allclose(rebuild(one), matrix, atol=1e-15)
        for send in one.sends:
            heard = send.sources[send.sources >= 0]
            assert len(set(heard.tolist())) == len(heard)
            assert not send.weights[send.sources < 0].any()
        senders = (matrix - np.diag(np.diag(matrix)) > 0).sum(1)
        assert schedule.degree(r) == senders.max()
    whole = product(schedule, range(schedule.period))
    assert norm(whole) < 1
    np.testing.assert_allclose(schedule.period_matrix(), whole, atol=1e-15)
    if norm(whole) > 1e-9:
        gap = 1 - norm(whole) ** (1 / schedule.period)
        assert schedule.spectral_gap() == pytest.approx(gap, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_one_replica_is_the_identity(name):
    for local in (1, 2, 4):
        schedule = make(name, 1, replicas_per_node=local)
        assert schedule.period == 1 and schedule.degree(0) == 0
        np.testing.assert_array_equal(schedule.matrix(0), [[1.0]])
        assert schedule.bytes_sent(100) == 0
        assert schedule.rounds_to_consensus() == 0
        assert schedule.spectral_gap() == 1 and schedule.consensus_rate() == 0
        assert not schedule.rounds[0].sends and not schedule.partial_groups


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if not name.startswith(("alternating", "hierarchical", "periodic"))],
)
def test_two_replicas_are_one_pair(name):
    schedule = make(name, 2)
    assert schedule.period == 1 and schedule.degree(0) == 1
    np.testing.assert_array_equal(schedule.matrix(0), np.full((2, 2), 0.5))
    assert schedule.bytes_sent(10) == 10 and schedule.rounds_to_consensus() == 1


@given(
    step=st.integers(0, 10_000),
    every=st.integers(1, 9),
    case=st.sampled_from([case for case in CASES if "periodic_average" not in case[0]]),
)
@quick
def test_round_at_is_its_definition(step, every, case):
    schedule = make(case[0], case[1], replicas_per_node=case[2])
    got = schedule.round_at(step, every)
    if (step + 1) % every == 0:
        assert got == (step // every) % schedule.period and type(got) is int
    else:
        assert got is None


@pytest.mark.parametrize(
    ("name", "n", "local", "node", "wanted"),
    [
        ("complete", 4, 1, 1, [1.5]),  # reduce-scatter and all-gather
        ("ring", 8, 1, 1, [1, 1]),
        ("bidirectional_ring", 8, 1, 1, [2]),
        ("one_peer_exp", 6, 1, 1, [1, 1, 1]),
        ("static_exp", 8, 1, 1, [3]),
        ("star", 8, 1, 1, [7]),
        ("torus", 9, 1, 1, [4]),
        ("hierarchical", 16, 4, 1, [1.75, 1.75]),
        ("hierarchical(ring, one_peer_exp)", 8, 4, 1, [3, 3]),
        ("alternating_exp_ring", 8, 4, 1, [1.5, 1.75]),
        ("alternating_exp_ring", 8, 2, 1, [1.5, 1.5, 1.5, 1.5]),
        # To other nodes.
        ("complete", 8, 1, 1, [1.75]),
        ("complete", 8, 4, 4, [1.75]),  # a ring over the replicas leaves a node once
        ("complete", 8, 8, 8, [0]),
        ("one_peer_exp", 8, 4, 4, [1, 2, 4]),
        ("ring", 8, 2, 2, [0, 2]),
        ("hierarchical", 16, 4, 4, [1, 1]),
        ("hierarchical(ring, one_peer_exp)", 8, 4, 4, [8]),
        ("hierarchical(complete, bidirectional_ring)", 16, 4, 4, [2]),
        ("alternating_exp_ring", 8, 4, 4, [0, 1]),
        ("alternating_exp_ring", 8, 2, 2, [1, 1, 1, 1]),
    ],
)
def test_bytes_sent(name, n, local, node, wanted):
    schedule = make(name, n, replicas_per_node=local)
    got = [one.models_sent_by_nodes(node) for one in schedule.rounds]
    assert node > 1 or len(got) == len(wanted)
    assert got[: len(wanted)] == pytest.approx(wanted)
    assert schedule.bytes_sent(1000, replicas_per_node=node) == pytest.approx(1000 * np.mean(got))


@given(case=st.sampled_from(CASES))
@quick
def test_groups_that_send_are_the_round_of_their_means(case):
    for one in make(case[0], case[1], replicas_per_node=case[2]).rounds:
        between = one.between_groups
        if between is not None:
            g = one.group_size
            mean = np.full((g, g), 1 / g)
            np.testing.assert_allclose(np.kron(between.matrix, mean), one.matrix, atol=1e-15)
            np.testing.assert_allclose(rebuild(between), between.matrix, atol=1e-15)


# --- closed forms and published values ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cliques"),
    [
        ("one_peer_exp", [12, 6, 3, 3]),  # a shift by k: n / gcd(n, k)
        ("ring", [2, 2]),
        ("bidirectional_ring", [12]),
        ("complete", [12]),
        ("hierarchical(complete, one_peer_exp)", [4, 4]),
    ],
)
def test_cliques(name, cliques):
    schedule = make(name, 12, replicas_per_node=4)
    assert [rnd.largest_clique for rnd in schedule.rounds] == cliques


@pytest.mark.parametrize("n", range(3, 34))
def test_bidirectional_ring_rate(n):
    schedule = make("bidirectional_ring", n)
    wanted = 1 / 3 + 2 / 3 * np.cos(2 * np.pi / n)  # for n=3 this is 0
    assert schedule.spectral_gap() == pytest.approx(1 - wanted, abs=1e-12)
    assert schedule.consensus_rate() == pytest.approx(wanted, abs=1e-12)
    row = np.zeros(n)
    row[[0, 1, -1]] = 1 / 3
    np.testing.assert_allclose(schedule.matrix(0)[0], row, atol=1e-16)


@pytest.mark.parametrize("n", [4, 6, 8, 10, 16, 30])
def test_ring_rates(n):
    schedule, wanted = make("ring", n), abs(np.cos(2 * np.pi / n))
    wanted = wanted if n > 4 else 0  # but for rounding
    assert norm(schedule.period_matrix()) == pytest.approx(wanted, abs=1e-12)
    assert schedule.spectral_gap() == pytest.approx(1 - wanted**0.5)
    # The period's spectral radius is the square of its norm: it is not a normal matrix.
    assert schedule.consensus_rate() == pytest.approx(wanted)


@pytest.mark.parametrize("n", range(2, 66))
def test_one_peer_exp_closed_form(n):
    schedule = make("one_peer_exp", n)
    tau = int(np.ceil(np.log2(n)))
    assert schedule.period == tau
    for k in range(tau):
        matrix = np.zeros((n, n))
        for i in range(n):
            matrix[i, i] += 0.5
            matrix[i, (i - 2**k) % n] += 0.5
        np.testing.assert_array_equal(schedule.matrix(k), matrix)
    modes = np.pi * np.arange(1, n) / n
    wanted = np.abs(np.sin(modes * 2**tau) / (2**tau * np.sin(modes))).max()
    assert norm(schedule.period_matrix()) == pytest.approx(wanted, abs=1e-12)
    assert schedule.consensus_rate() == pytest.approx(
        wanted ** (1 / tau) if wanted > 1e-12 else 0, abs=1e-9
    )


@pytest.mark.parametrize(
    ("name", "n", "lists"),
    [
        ("ring", 8, ["0,1 2,3 4,5 6,7", "0,7 1,2 3,4 5,6"]),
        ("hypercube", 8, ["0,1 2,3 4,5 6,7", "0,2 1,3 4,6 5,7", "0,4 1,5 2,6 3,7"]),
        ("alternating_exp_ring", 8, ["0-3 4-7", "0-7"]),
        (
            "alternating_exp_ring",
            16,
            ["0-3 4-7 8-15", "0-7 8-11 12-15", "0-3 8-11 4-7,12-15", "0-3,8-11 4-7 12-15"],
        ),
    ],
)
def test_published_lists(name, n, lists):
    schedule = make(name, n, replicas_per_node=4)
    got = [groups(schedule.matrix(r)) for r in range(schedule.period)]
    assert got == [group_list(text) for text in lists]
    for r, rnd in enumerate(got):  # the mean of a group, not only its members
        for group in rnd:
            rows = schedule.matrix(r)[np.ix_(group, group)]
            np.testing.assert_allclose(rows, 1 / len(group), atol=1e-16)


@pytest.mark.parametrize(
    ("n", "local", "nodes_log"), [(8, 4, 1), (16, 4, 2), (32, 8, 2), (32, 4, 3), (64, 8, 3)]
)
def test_alternating_exp_ring_is_exact_after_one_period(n, local, nodes_log):
    schedule = make("alternating_exp_ring", n, replicas_per_node=local)
    assert schedule.period == schedule.rounds_to_consensus() == 2 * nodes_log
    one_later = product(schedule, [(r + 1) % schedule.period for r in range(schedule.period)])
    if nodes_log == 1:
        assert norm(one_later) < 1e-12
    else:  # exact one round later from an odd phase
        assert norm(one_later) > 0.1
        assert norm(schedule.matrix(1) @ one_later) < 1e-12


def test_what_a_schedule_refuses():
    with refuses("ring", 3):
        make("ring", 16).rounds_to_consensus(limit=3)
    with refuses("replicas_per_node", 0):
        make("ring", 4).bytes_sent(1000, replicas_per_node=0)
    for every in (0, -1):
        with refuses("mix_every", every):
            make("ring", 4).round_at(3, mix_every=every)
