"""SwarmSGD's simulator against exact expectations: all edges and all matchings of small n.

Every expectation runs through `swarm` itself; what is only sampled says how far it may be off.
"""

import numpy as np
import pytest
from mixing import in_rounds
from refusals import refuses

from decent_jax.gossip.codecs import Lattice
from decent_jax.simulate import (
    Interaction,
    interactions,
    matchings,
    swarm,
)


def meet(i, j, steps_i=0, steps_j=0):
    return Interaction(int(i), int(j), steps_i, steps_j, 0.0)


def no_gradient(i, x, k, rng):
    raise AssertionError("no local steps are meant to be taken")


def noise(i, x, k, rng):
    return rng.standard_normal(x.shape)


def spread_of(x):
    return np.square(x - x.mean(axis=0)).sum()


def expected_factor(x0, equally_likely, **options):
    """E Gamma' / Gamma over rounds of which each is as likely as the other."""
    after = [swarm(x0, [one], no_gradient, 0.0, **options).spread[-1] for one in equally_likely]
    return np.mean(after) / spread_of(x0)


def edges_of(adjacency):
    return [[meet(i, j)] for i, j in np.argwhere(np.triu(adjacency, 1))]


def complete(n):
    return np.ones((n, n)) - np.eye(n)


def hypercube(dimensions):
    n = 2**dimensions
    i = np.arange(n)
    return np.isin(i[:, None] ^ i, 2 ** np.arange(dimensions)).astype(float)


def cycle(n):
    return np.roll(np.eye(n), 1, axis=0) + np.roll(np.eye(n), -1, axis=0)


def perfect_matchings(replicas):
    if not replicas:
        return [[]]
    first, *others = replicas
    return [
        [meet(first, partner), *rest]
        for partner in others
        for rest in perfect_matchings([one for one in others if one != partner])
    ]


def one_factorization(n):
    """The circle method: n - 1 disjoint perfect matchings that are all edges of K_n."""
    ring = n - 1
    return [
        [meet(n - 1, r), *(meet((r + k) % ring, (r - k) % ring) for k in range(1, n // 2))]
        for r in range(ring)
    ]


def start(n, d=5, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)) + 3.0


# --- what averaging alone does --------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_one_edge_of_the_complete_graph(n):
    factor = expected_factor(start(n), edges_of(complete(n)))
    assert factor == pytest.approx(1 - 1 / (n - 1), rel=1e-12, abs=1e-15)


def colours(n, r):
    """The edges of a cycle of n, or of a hypercube of degree r, as r perfect matchings."""
    if r == 2:
        return [[meet(a, (a + 1) % n) for a in range(c, n, 2)] for c in (0, 1)]
    return [[meet(a, a ^ 2**k) for a in range(n) if a < a ^ 2**k] for k in range(r)]


@pytest.mark.parametrize(
    ("adjacency", "groups"),
    [
        *((graph, edges_of(graph)) for graph in (cycle(8), hypercube(3), cycle(5), complete(6))),
        *((cycle(8), colours(8, 2)), (hypercube(4), colours(16, 4))),
    ],
)
def test_one_edge_or_colour_of_a_regular_graph(adjacency, groups):
    """The slowest vector shrinks as the second eigenvalue says, and no other less."""
    n, r = len(adjacency), int(adjacency[0].sum())
    eigenvalues, vectors = np.linalg.eigh(r * np.eye(n) - adjacency)
    assert sum(map(len, groups)) == n * r / 2
    bound = 1 - len(groups[0]) * eigenvalues[1] / (n * r)
    assert expected_factor(vectors[:, 1:2], groups) == pytest.approx(bound, rel=1e-12)
    for seed in range(5):
        assert expected_factor(start(n, seed=seed), groups) <= bound + 1e-12


@pytest.mark.parametrize("n", [4, 6, 8])
@pytest.mark.parametrize("family", [lambda n: perfect_matchings(list(range(n))), one_factorization])
def test_a_random_perfect_matching(n, family):
    factor = expected_factor(start(n), family(n))
    assert factor == pytest.approx((n - 2) / (2 * (n - 1)), rel=1e-12)


# --- the spread that local steps keep up ----------------------------------------------------------


def stationary_spread(n, equally_likely, steps, **options):
    """Gamma* of one coordinate and unit noise a local step, exactly.

    From the unit vectors, and with every local step along a coordinate of its own, `swarm` returns
    the matrices W and B of ``x' = W x + B noise``; the covariance C' = E[W C W' + B B'] is iterated
    on what deviates from the mean.
    """

    def own_direction(i, x, k, rng):
        step = np.zeros_like(x)
        step[n + steps * i + k] = 1.0
        return step

    basis = np.hstack([np.eye(n), np.zeros((n, n * steps))])
    maps = np.stack(
        [swarm(basis, [one], own_direction, 1.0, **options).models for one in equally_likely]
    )
    w, b = maps[:, :, :n], maps[:, :, n:]
    fresh = np.mean(b @ b.transpose(0, 2, 1), axis=0)
    centre = np.eye(n) - 1 / n
    covariance = np.zeros((n, n))
    for _ in range(80 * n):
        mixed = np.mean(w @ covariance @ w.transpose(0, 2, 1), axis=0)
        covariance = centre @ (mixed + fresh) @ centre
    return np.trace(covariance)


def stepping(groups, steps):
    return [[meet(one.i, one.j, steps, steps) for one in group] for group in groups]


@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("steps", [1, 3])
def test_stationary_spread_exactly(n, steps):
    pairs = edges_of(complete(n))
    both = stepping(pairs, steps)
    matched = stepping(perfect_matchings(list(range(n))), steps)
    before, after = (n - 1) * (n - 2) / n, 2 * (n - 1) ** 2 / n
    for groups, blocking, wanted in (
        (both, True, before),
        (matched, True, before),
        (both, False, after),
        (matched, False, after),
    ):
        found = stationary_spread(n, groups, steps, blocking=blocking)
        assert found == pytest.approx(steps * wanted, rel=1e-9)


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_floor_of_quantization(stochastic):
    """Matching rounds of 8; s = 1 and noise 0.8 a step, so that all fractions are as likely.

    (n - 1) s_q d for both sides, because the two errors of a pair are opposite.
    """
    n, d, sigma = 8, 4000, 0.8
    result = swarm(
        np.zeros((n, d)), matchings(n, 250, seed=2), noise, sigma,
        quantizer=Lattice(8, 1.0), stochastic=stochastic, record_every=4,
    )  # fmt: skip
    floor = (1 / 6 if stochastic else 1 / 12) * d * (n - 1)
    without = sigma**2 * d * (n - 1) * (n - 2) / n
    late = result.spread[20:].mean()
    assert result.failed_decodes == 0
    assert late == pytest.approx(without + floor, rel=0.01)
    assert late - without == pytest.approx(floor, rel=0.1)


# --- swarm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
def test_quantized_averaging_keeps_the_mean(blocking):
    drawn = interactions(6, 300, local_steps=2, geometric=True, seed=3)
    options = {"quantizer": Lattice(8, 0.05), "stochastic": True, "blocking": blocking}
    result = swarm(start(6, 20), drawn, noise, 0.1, **options)
    assert result.failed_decodes == 0 and result.mean_drift.max() < 1e-12


def test_a_failed_decode_drops_the_pair():
    x0 = np.zeros((2, 3))
    x0[1, 2] = 100.0
    quantizer = Lattice(4, 0.1)
    result = swarm(x0, [meet(0, 1)], no_gradient, 0.0, quantizer=quantizer)
    assert np.array_equal(result.models, x0)
    assert (result.failed_decodes, result.failed) == (2, 1)
    assert result.bits_sent == 2 * (3 * 4 + 64)


def test_one_of_two_that_cannot_decode_drops_both():
    """Half a period is 0.8: 0.56 is 0.84 from 1.4, what 1.39 rounds to; 1.39 is 0.79 from 0.6."""
    x0 = np.array([[0.56], [1.39]])
    quantizer = Lattice(4, 0.1)
    heard = [
        bool(np.isfinite(quantizer.decode(quantizer.encode(x0[a]), x0[b])).all())
        for a, b in ((1, 0), (0, 1))
    ]
    assert sorted(heard) == [False, True]
    result = swarm(x0, [meet(0, 1)], no_gradient, 0.0, quantizer=quantizer)
    assert np.array_equal(result.models, x0)
    assert (result.failed_decodes, result.failed) == (1, 1)


COARSE = Lattice(8, 0.05)


@pytest.mark.parametrize(  # each two of the options in all their values
    ("quantizer", "blocking", "momentum"),
    [(None, True, 0.0), (None, False, 0.9), (COARSE, True, 0.9), (COARSE, False, 0.0)],
)
def test_the_order_of_disjoint_interactions_does_not_matter(quantizer, blocking, momentum):
    drawn = interactions(10, 200, degree=3, local_steps=2, geometric=True, seed=4)
    grouped = in_rounds(drawn)
    shuffled = [
        [group[k] for k in np.random.default_rng(5).permutation(len(group))] for group in grouped
    ]
    flat = [one for group in shuffled for one in group]
    assert flat != drawn and sorted(flat) == sorted(drawn)

    def train(given):
        return swarm(
            start(10), given, lambda i, x, k, rng: 0.1 * x + rng.standard_normal(x.shape), 0.05,
            quantizer=quantizer, stochastic=quantizer is not None, blocking=blocking,
            momentum=momentum, seed=6,
        )  # fmt: skip

    one_by_one = train(drawn)
    for given in (grouped, flat, shuffled):
        other = train(given)
        assert np.array_equal(other.models, one_by_one.models)
        assert np.array_equal(other.local_steps, one_by_one.local_steps)
        assert other.bits_sent == one_by_one.bits_sent
    grouped_spread = train(grouped)
    at = np.searchsorted(one_by_one.interactions, grouped_spread.interactions)
    np.testing.assert_allclose(grouped_spread.spread, one_by_one.spread[at], rtol=1e-12)


def test_matchings_are_bulk_synchronous_training():
    """Against the same in a few lines: all step, W averages all pairs."""
    n, d, steps, rate, momentum = 8, 5, 3, 0.1, 0.9
    drawn = matchings(n, 20, local_steps=steps, seed=7)
    targets = start(n, d, seed=8)
    x, velocity = start(n, d), np.zeros((n, d))
    for group in drawn:
        for _ in range(steps):
            velocity = momentum * velocity + (x - targets)
            x = x - rate * velocity
        w = np.zeros((n, n))
        for one in group:
            w[np.ix_(one[:2], one[:2])] = 0.5
        x = w @ x
    result = swarm(start(n, d), drawn, lambda i, x, k, rng: x - targets[i], rate, momentum=momentum)
    np.testing.assert_allclose(result.models, x, rtol=1e-12)
    assert np.array_equal(result.local_steps, np.full(n, 60))


def test_stale_averaging_by_hand():
    """Replica 1 meets 0, then 2; every gradient is 1, lr 1, so a step takes off 1."""
    drawn = [meet(0, 1, 1, 2), meet(1, 2, 1, 1)]
    x0 = np.array([[0.0], [10.0], [20.0]])
    result = swarm(x0, drawn, lambda i, x, k, rng: np.ones(1), 1.0, blocking=False)
    # 0 and 1: average 5, minus 1 and 2; then 1 shows 3, and 2 its first 20: 11.5, minus 1 each
    np.testing.assert_allclose(result.models[:, 0], [4.0, 10.5, 10.5])
    blocking = swarm(x0, drawn, lambda i, x, k, rng: np.ones(1), 1.0)
    # -1 and 8: 3.5; then 2.5 and 19: 10.75
    np.testing.assert_allclose(blocking.models[:, 0], [3.5, 10.75, 10.75])


def test_records_rates_and_what_is_observed():
    drawn = interactions(4, 10, local_steps=2)
    seen = []
    rates = []

    def rate(k):
        rates.append(k)
        return 0.1

    result = swarm(
        start(4), drawn, noise, rate, record_every=4,
        observe=lambda count, x: seen.append((count, spread_of(x))),
    )  # fmt: skip
    assert result.interactions.tolist() == [0, 4, 8, 10]
    assert [count for count, _ in seen] == [0, 4, 8, 10]
    np.testing.assert_allclose([value for _, value in seen], result.spread, rtol=1e-12)
    assert max(rates) == result.local_steps.max() - 1 and len(rates) == 40
    assert result.bits_sent == 10 * 2 * 32 * 5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: swarm(np.zeros(3), [], noise, 0.1), "(3,)"),
        (lambda: swarm(np.zeros((3, 1)), [], noise, 0.1, record_every=0), "record_every 0"),
        (lambda: swarm(np.zeros((3, 1)), [meet(0, 3)], noise, 0.1), "3 0"),
        (lambda: swarm(np.zeros((3, 1)), [meet(-1, 0)], noise, 0.1), "3 -1"),
        (lambda: swarm(np.zeros((3, 1)), [meet(1, 1)], noise, 0.1), "at most once"),
        (lambda: swarm(np.zeros((3, 1)), [[meet(0, 1), meet(1, 2)]], noise, 0.1), "at most once"),
        (
            lambda: swarm(np.full((2, 1), 2.0**60), [meet(0, 1)], noise, 0.1, quantizer=COARSE),
            "2^62 1.15292e+18",
        ),
        (lambda: swarm(np.full((2, 1), np.inf), [], noise, 0.1), "lower the learning rate"),
        (lambda: swarm(np.eye(2) * 1e200, [], noise, 0.1), "lower the learning rate"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_swarm_refuses(call, words):
    with refuses(*words.split()):
        call()


# --- draws ----------------------------------------------------------------------------------------


def test_edges_are_uniform():
    """40,000 draws of 12 edges in both directions; 10% is more than four standard deviations."""
    drawn = interactions(8, 40_000, degree=3, seed=1)
    counts = np.zeros((8, 8))
    np.add.at(counts, tuple(np.array([one[:2] for one in drawn]).T), 1)
    assert ((counts > 0) == (counts.T > 0)).all() and ((counts > 0).sum(axis=0) == 3).all()
    np.testing.assert_allclose(counts[counts > 0], 40_000 / 24, rtol=0.1)
    assert drawn[-1][2:] == (1, 1, 10_000)


def test_a_random_regular_graph():
    drawn = interactions(10, 3000, degree=4, seed=2)
    partners = [{one.i + one.j - k for one in drawn if k in one[:2]} for k in range(10)]
    assert all(len(others) == 4 for others in partners)
    assert interactions(10, 3000, degree=4, seed=2) == drawn
    assert interactions(10, 3000, degree=4, seed=3) != drawn


def test_geometric_steps():
    """Geometric(1/4): mean 4, standard deviation sqrt(12), of 20,000 draws: 2% is three of its."""
    drawn = interactions(8, 10_000, local_steps=4, geometric=True, seed=5)
    steps = np.array([one[2:4] for one in drawn]).ravel()
    assert steps.min() == 1
    assert steps.mean() == pytest.approx(4, rel=0.02)
    assert steps.var() == pytest.approx(12, rel=0.06)
    assert np.mean(steps == 1) == pytest.approx(1 / 4, rel=0.05)
    result = swarm(np.zeros((8, 1)), drawn[:200], noise, 0.1)
    taken = [
        sum(one[2 + one[:2].index(k)] for one in drawn[:200] if k in one[:2]) for k in range(8)
    ]
    assert result.local_steps.tolist() == taken and len(set(taken)) > 4
    fixed = swarm(np.zeros((8, 1)), matchings(8, 50, local_steps=4), noise, 0.1)
    assert set(fixed.local_steps) == {200}
    varied = matchings(8, 50, local_steps=4, geometric=True)
    assert len(set(swarm(np.zeros((8, 1)), varied, noise, 0.1).local_steps)) > 1


def test_matchings_are_uniform_and_perfect():
    drawn = matchings(4, 6000, seed=6)
    kinds = [frozenset(frozenset(one[:2]) for one in group) for group in drawn]
    counts = [kinds.count(kind) for kind in set(kinds)]
    assert len(counts) == 3
    np.testing.assert_allclose(counts, 2000, rtol=0.1)
    odd = matchings(5, 10)
    assert all(len({k for one in group for k in one[:2]}) == 4 for group in odd)
    assert [group[0].time for group in odd] == list(range(1, 11))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: interactions(1, 3), "2 1"),
        (lambda: matchings(4, 3, local_steps=0), "1 0"),
        (lambda: interactions(4, 3, local_steps=1.5), "1.5"),
    ],
)
def test_draws_refuse(call, words):
    with refuses(*words.split()):
        call()
