"""The oracles against published numbers, exact relations, and recursions written another way.

Accumulated Adam of the oracle is the library's (test_methods), and the library's is that of the
reference's own runs (test_golden).
"""

import numpy as np
import oracles
import pytest
from oracles import assert_same, run

P = oracles.quadratic()
N, LR, B, MU = 8, 0.1, 0.9, 0.9
ZEROS = np.zeros((N, 1))


def on_ring(method, steps, **numbers):
    return run(method, lambda t: P.ring, P.grad, ZEROS, steps, LR, **numbers)


# The table: replicas 0, 1, 7 after two steps, and max |x - 14/3| after 2000 as printed.

TABLE = [
    ("dpsgd", {"combine": "then"}, (0.45454861, 0.15045139, 0.77260417), "0.5337"),
    ("dpsgd", {"combine": "with"}, (0.24166667, 0.05770833, 1.03833333), "0.6275"),
    ("dmsgd", {"combine": "then"}, (0.67204861, 0.18045139, 1.14010417), "2.032"),
    ("decentlam", {}, (0.67204861, 0.18045139, 1.14010417), "0.5337"),
    ("exact_diffusion", {}, (0.34519097, 0.10432292, 0.91064236), "0"),
    ("gradient_tracking", {}, (0.48333333, 0.06604167, 0.74666667), "0"),
    ("gossiped_momentum", {}, (0.65954861, 0.25795139, 1.12760417), "1.322"),
    ("quasi_global_sgd", {"mu": MU}, (0.47504861, 0.16120139, 0.80810417), "0.5337"),
    ("d2", {}, (0.44065972, 0.23656250, 0.75871528), "0"),
    ("dmsgd", {"combine": "with"}, (0.24166667, 0.08020833, 1.66833333), "2.157"),
]


@pytest.mark.parametrize("method, numbers, after_two, limit", TABLE)
def test_printed_values(method, numbers, after_two, limit):
    history = on_ring(method, 2000, **numbers)
    assert_same(history[1, [0, 1, 7], 0], after_two, 5.001e-9)
    error = abs(history[-1] - P.optimum).max()
    if limit == "0":
        assert error < 1e-9
    else:
        assert f"{error:.4g}" == limit


@pytest.mark.parametrize("matrices", [oracles.one_peer_exp(8), oracles.hypercube(8)])
def test_time_varying_schedules(matrices):
    """Gradient tracking and exact diffusion reach 14/3 there; D2 and DecentLaM diverge."""

    def error(method, **numbers):
        with np.errstate(over="ignore", invalid="ignore"):
            last = run(method, matrices, P.grad, ZEROS, 2000, LR, **numbers)[-1]
        return abs(last - P.optimum).max()

    assert error("exact_diffusion") < 1e-9
    assert error("gradient_tracking") < 1e-9
    assert not error("d2") < 1e3
    assert not error("decentlam") < 1e3


# Push-sum.

SENT = np.array([[1 / 3, 1 / 3, 1 / 3], [0, 1 / 2, 1 / 2], [1 / 2, 0, 1 / 2]])  # a row a sender


def test_push_sum_printed_values():
    x0 = np.array([[0.0], [3.0], [6.0]])
    history = run("push_sum", lambda t: SENT.T, lambda x, t: 0 * x, x0, 100, LR)
    x, w = SENT.T @ x0, SENT.T @ np.ones((3, 1))
    assert_same(x.T, [[3, 1.5, 4.5]])
    assert_same(w.T, [[0.833333, 0.833333, 1.333333]], 5e-7)
    assert_same(history[0].T, [[3.6, 1.8, 3.375]])
    assert_same(x / w, history[0])
    assert_same(history[-1], np.full((3, 1), 3.0))


# CHOCO.

ROWS = np.array([[4, 0, 1], [0, 8, 2], [1, 1, 12], [16, 2, 0]], float)


def test_choco_gossip_printed_values():
    numbers = {"compress": oracles.top(1), "gamma": 0.3}
    history = run("choco", lambda t: oracles.ring(4), lambda x, t: 0 * x, ROWS, 100, LR, **numbers)
    errors = abs(history - ROWS.mean(0)).max((1, 2))
    assert f"{errors[9]:.3g}" == "0.668"
    assert f"{errors[99]:.2g}" == "1.6e-10"
    assert_same(history.mean(1), np.tile(ROWS.mean(0), (100, 1)))
