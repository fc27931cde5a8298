"""Who meets whom in simulations: draws of interactions, matchings and pulls."""

import numpy as np
import pytest
from refusals import refuses
from test_simulate import cycle, hypercube, noise

from decent_jax.simulate import interactions, matchings, pulls, rounds, swarm


def test_edges_are_uniform():
    """40,000 draws of 12 edges in both directions; 10% is more than four standard deviations."""
    adjacency = hypercube(3)
    drawn = interactions(8, 40_000, graph=adjacency, seed=1)
    counts = np.zeros((8, 8))
    np.add.at(counts, tuple(np.array([one[:2] for one in drawn]).T), 1)
    assert np.array_equal(counts > 0, adjacency > 0)
    np.testing.assert_allclose(counts[counts > 0], 40_000 / 24, rtol=0.1)
    assert drawn[-1].time == 10_000


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


def test_pulls():
    drawn = pulls(4, 3000, local_steps=2, seed=7)
    assert all([one.i for one in group] == [0, 1, 2, 3] for group in drawn)
    heard = [one.j for group in drawn for one in group if one.i == 2]
    np.testing.assert_allclose([heard.count(j) for j in (0, 1, 3)], 1000, rtol=0.15)
    assert {one[2:4] for group in drawn for one in group} == {(2, 0)}


def test_rounds_keep_every_replica_in_order():
    drawn = interactions(9, 500, seed=8)
    grouped = rounds(drawn)
    for group in grouped:
        replicas = [k for one in group for k in one[:2]]
        assert len(replicas) == len(set(replicas)) > 0
    assert [one for group in grouped for one in group] == drawn
    assert rounds([]) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: interactions(1, 3), "2 1"),
        (lambda: matchings(4, 3, local_steps=0), "1 0"),
        (lambda: pulls(4, 3, local_steps=1.5), "1.5"),
        (lambda: interactions(4, 3, degree=2, graph=cycle(4)), "degree graph"),
        (lambda: interactions(4, 3, graph=cycle(5)), "symmetric (4, 4)"),
        (lambda: interactions(4, 3, graph=np.triu(cycle(4))), "symmetric"),
        (lambda: interactions(3, 3, graph=np.diag([1, 1], 1) * 0 + np.eye(3)), "replica 0"),
    ],
)
def test_draws_refuse(call, words):
    with refuses(*words.split()):
        call()
