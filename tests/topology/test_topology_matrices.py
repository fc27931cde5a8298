"""Schedules of matrices of one's own: what is accepted, how it is sent, what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing import norm, rebuild
from refusals import refuses

from decent_jax.topology import Schedule
from decent_jax.topology.rounds import round_of

quick = settings(database=None, deadline=None, max_examples=60)


@st.composite
def permutation_mixtures(draw):
    """A doubly stochastic matrix: a convex combination of permutations (Birkhoff)."""
    n = draw(st.integers(2, 9))
    count = draw(st.integers(1, 4))
    parts = [draw(st.permutations(range(n))) for _ in range(count)]
    weights = np.array([draw(st.integers(1, 8)) for _ in range(count)], float)
    matrix = np.zeros((n, n))
    for weight, permutation in zip(weights / weights.sum(), parts, strict=True):
        matrix[np.arange(n), list(permutation)] += weight
    return matrix


def check_sends(matrix):
    one = round_of(matrix)
    np.testing.assert_array_equal(rebuild(one), matrix)
    for send in one.sends:
        heard = send.sources[send.sources >= 0]
        assert len(set(heard.tolist())) == len(heard)
        assert (send.sources != np.arange(len(matrix))).all()
        assert not send.weights[send.sources < 0].any()
    arrows = matrix - np.diag(np.diag(matrix)) > 0
    assert len(one.sends) == max(arrows.sum(0).max(), arrows.sum(1).max())


@given(st.integers(1, 8), st.data())
@quick
def test_sends_rebuild_any_matrix(n, data):
    numbers = st.lists(st.integers(0, 3), min_size=n * n, max_size=n * n)
    matrix = np.array(data.draw(numbers), float).reshape(n, n) + np.eye(n)
    check_sends(matrix / matrix.sum(1, keepdims=True))


@given(permutation_mixtures())
@quick
def test_from_matrices_accepts_or_says_why(matrix):
    """Half on oneself rules periodicity out, so exactly the disconnected ones are refused."""
    lazy = (matrix + np.eye(len(matrix))) / 2
    reach = np.linalg.matrix_power(lazy, len(lazy)) > 0
    if reach.all():
        schedule = Schedule.from_matrices([lazy, lazy])
        assert schedule.consensus_rate() < 1
        assert schedule.period == 2 and schedule.num_replicas == len(lazy)
    else:
        with refuses("consensus"):
            Schedule.from_matrices([lazy, lazy])


def test_rounds_may_leave_replicas_idle_if_the_period_connects_them():
    first, second = np.eye(3), np.eye(3)
    first[:2, :2] = second[1:, 1:] = 0.5
    schedule = Schedule.from_matrices([first, second])
    assert [schedule.degree(r) for r in range(2)] == [1, 1]
    assert not schedule.matrix(0).flags.writeable
    assert schedule.rounds[0].sends[0].sources.tolist() == [1, 0, -1]
    assert norm(schedule.period_matrix()) == pytest.approx(0.5)


HALF = np.full((2, 2), 0.5)


@pytest.mark.parametrize(
    ("matrices", "options", "message"),
    [
        ([], {}, "none"),
        ([np.ones((2, 3)) / 3], {}, "round 0 (2, 3) 2"),
        ([np.ones(3)], {}, "(3,)"),
        ([np.ones((0, 0))], {}, "(0, 0)"),
        ([HALF, np.eye(3)], {}, "round 1: (3, 3)"),
        ([HALF, [[1.5, -0.5], [-0.5, 1.5]]], {}, "round 1: -0.5"),
        ([[[np.nan, 1.0], [1.0, 0.0]]], {}, "round 0: nan"),
        ([HALF, HALF + 0j], {}, "round 1: complex128"),
        ([[["a", "b"], ["b", "a"]]], {}, "round 0: real"),
        ([[[0.5, 0.5], [1.0]]], {}, "round 0: real"),
        ([HALF, [[0.5, 0.5], [0.5, 0.4]]], {}, "round 1: row 1 0.9"),
        ([[[0.5, 0.5], [0.5, 0.5 + 1e-8]]], {}, "round 0: row 1 1.00000001"),
        ([[[1.0, 0.0], [0.5, 0.5]]], {}, "round 0: column 0 1.5"),
        ([np.eye(2)], {}, "'custom' [0] [1]"),
        ([np.kron(np.eye(2), HALF)], {"name": "two"}, "'two' [0, 1] [2, 3]"),
        ([[[0.0, 1.0], [1.0, 0.0]]], {}, "'custom' consensus"),
    ],
)
def test_from_matrices_refuses(matrices, options, message):
    with refuses(*message.split()):
        Schedule.from_matrices(matrices, **options)


def test_sums_may_be_off_by_rounding():
    Schedule.from_matrices([[[0.5, 0.5], [0.5, 0.5 + 5e-10]]])


def test_a_weight_that_rounding_left_below_0_is_0():
    given = np.kron(np.eye(2), HALF)
    given[0, 3] = -2e-16
    rnd, _ = Schedule.from_matrices([given, np.roll(given, (1, 1), (0, 1))]).rounds
    assert rnd.matrix.min() == 0 and rnd.degree == 1 and given[0, 3] < 0
