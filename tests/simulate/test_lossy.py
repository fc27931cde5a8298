"""Lost messages: sums, expectations in closed form, and what a biased rule does to the mean."""

import itertools

import numpy as np
import pytest
from refusals import refuses

from decent_jax import topology
from decent_jax.simulate import lose

GRAPHS = ["bidirectional_ring", "one_peer_exp", "static_exp", "hypercube", "star", "grid"]
N, RATE = 8, 0.2


def rounds(name, n=N):
    schedule = topology.make(name, n)
    return np.stack([schedule.matrix(r) for r in range(schedule.period)])


def draws(matrix, rule, count=20_000, rate=RATE):
    """(count, n, n)"""
    tiled = np.broadcast_to(matrix, (count, *matrix.shape))
    return lose(tiled, rate, np.random.default_rng(0), rule=rule)


@pytest.mark.parametrize("name", [*GRAPHS, "random_out"])
@pytest.mark.parametrize(("rule", "axis"), [("receiver", -1), ("renormalise", -1), ("sender", -2)])
def test_sums_stay(name, rule, axis):
    given = np.tile(rounds(name), (50, 1, 1))
    lossy = lose(given, RATE, np.random.default_rng(1), rule=rule)
    np.testing.assert_allclose(lossy.sum(axis), given.sum(axis), rtol=1e-14)
    off = ~np.eye(N, dtype=bool)
    assert (lossy >= 0).all()
    assert ((lossy == 0) | (given > 0))[:, off].all(), "nobody hears whom it did not hear"


@pytest.mark.parametrize("name", ["bidirectional_ring", "hypercube", "star", "grid"])
def test_pairs_drop_both_and_keep_the_mean(name):
    given = rounds(name)[0]
    lossy = draws(given, "receiver", 500)
    np.testing.assert_array_equal(lossy, lossy.swapaxes(-1, -2))
    np.testing.assert_allclose(lossy.sum(-2), 1, rtol=1e-14)
    edges = np.argwhere(np.triu(given, 1))
    gone = np.mean([(lossy[:, i, j] == 0).mean() for i, j in edges])
    assert gone == pytest.approx(1 - (1 - RATE) ** 2, abs=0.02)


def expectation(matrix, rate, rule):
    """E of `lose` in closed form, where no two replicas are a pair, or all that meet are."""
    off = matrix * (1 - np.eye(len(matrix)))
    if rule == "receiver":
        lost = 1 - (1 - rate) ** 2 if (matrix == matrix.T).all() else rate
        return matrix - lost * off + np.diag(lost * off.sum(1))
    if rule == "sender":
        return matrix - rate * off + np.diag(rate * off.sum(0))
    return sum(
        chance * kept / kept.sum(1, keepdims=True) for chance, kept in outcomes(matrix, rate)
    )


def outcomes(matrix, rate):
    """(probability, what is left) of every way in which messages of a small graph can be lost."""
    edges = np.argwhere(matrix * (1 - np.eye(len(matrix))))
    for lost in itertools.product((False, True), repeat=len(edges)):
        kept = matrix.copy()
        for gone, (i, j) in zip(lost, edges, strict=True):
            kept[i, j] *= not gone
        yield rate ** sum(lost) * (1 - rate) ** (len(lost) - sum(lost)), kept


@pytest.mark.parametrize(
    ("name", "n"), [("star", 4), ("bidirectional_ring", 5), ("one_peer_exp", 5)]
)
@pytest.mark.parametrize("rule", ["receiver", "sender", "renormalise"])
def test_expectation(name, n, rule):
    given = rounds(name, n)[0]
    mean = draws(given, rule).mean(axis=0)
    wanted = expectation(given, RATE, rule)
    np.testing.assert_allclose(mean, wanted, atol=0.01)
    if rule != "renormalise":  # columns keep their sums in expectation: the mean is not biased
        np.testing.assert_allclose(wanted.sum(0), given.sum(0), rtol=1e-12)


def test_edges_of_the_rate():
    ring = rounds("bidirectional_ring")[0]
    for rule in ("receiver", "sender", "renormalise"):
        np.testing.assert_array_equal(lose(ring, 0, np.random.default_rng(0), rule=rule), ring)
        alone = lose(ring, 1, np.random.default_rng(0), rule=rule)
        np.testing.assert_allclose(alone, np.eye(N), atol=1e-15)


@pytest.mark.parametrize(
    ("matrix", "rate", "rule", "message"),
    [
        (np.ones((2, 3)), 0.1, "receiver", "square (2, 3)"),
        ([[2, -1], [0, 1]], 0.1, "receiver", "(2, 2) -1"),
        (np.eye(2), 1.5, "receiver", "rate 1.5"),
        (np.eye(2), 0.1, "wait", "rule receiver sender renormalise 'wait'"),
    ],
)
def test_refusals(matrix, rate, rule, message):
    with refuses(*message.split()):
        lose(matrix, rate, np.random.default_rng(0), rule=rule)
