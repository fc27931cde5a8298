"""The oracles against published numbers, exact relations, and recursions written another way.

Accumulated Adam of the oracle is the library's (test_methods), and the library's is that of the
reference's own runs (test_golden).
"""

import numpy as np
import oracles
import pytest
from oracles import assert_same, run

P = oracles.quadratic()
N, LR, B = 8, 0.1, 0.9
ZEROS = np.zeros((N, 1))


def on_ring(method, steps, **numbers):
    return run(method, lambda t: P.ring, P.grad, ZEROS, steps, LR, **numbers)


# The table: replicas 0, 1, 7 after two steps, and max |x - 14/3| after 2000 as printed.

TABLE = [
    ("dpsgd", {"combine": "atc"}, (0.45454861, 0.15045139, 0.77260417), "0.5337"),
    ("dpsgd", {"combine": "awc"}, (0.24166667, 0.05770833, 1.03833333), "0.6275"),
    ("dmsgd", {"combine": "atc"}, (0.67204861, 0.18045139, 1.14010417), "2.032"),
    ("exact_diffusion", {}, (0.34519097, 0.10432292, 0.91064236), "0"),
    ("gradient_tracking", {}, (0.48333333, 0.06604167, 0.74666667), "0"),
    ("gossiped_momentum", {}, (0.65954861, 0.25795139, 1.12760417), "1.322"),
    ("quasi_global_sgd", {}, (0.47504861, 0.16120139, 0.80810417), "0.5337"),
    ("d2", {}, (0.44065972, 0.23656250, 0.75871528), "0"),
    ("dmsgd", {"combine": "awc"}, (0.24166667, 0.08020833, 1.66833333), "2.157"),
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
    """Gradient tracking and exact diffusion reach 14/3 there; D2 diverges."""

    def error(method, **numbers):
        with np.errstate(over="ignore", invalid="ignore"):
            last = run(method, matrices, P.grad, ZEROS, 2000, LR, **numbers)[-1]
        return abs(last - P.optimum).max()

    assert error("exact_diffusion") < 1e-9
    assert error("gradient_tracking") < 1e-9
    assert not error("d2") < 1e3


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


# --- DiLoCo: fixtures of torchft and MaxText -----------------------------------------------------


TORCHFT = [  # delay; fragment 0 at counts 0..9; the global ones at counts 3 and 9
    (0, (1, -1, -3, -11, -13, -15, -17, -19, -21, -35), (-11, -35)),
    (1, (1, -1, -3, -7, -9, -11, -13, -15, -17, -27), (-7, -27)),
]


def never(t):
    """No matrix: DiLoCo ignores them."""


def torchft(delay):
    record = []
    numbers = {"fragments": [[0], [1]], "sync_every": 6, "outer_lr": 2.0, "record": record}
    numbers["delay"] = delay
    start = np.ones((2, 2))
    history = run("diloco", never, lambda x, t: np.full_like(x, 2), start, 12, 1.0, **numbers)
    assert_same(history[:, 0], history[:, 1])
    x, whole = (np.concatenate([[start], found])[:, 0] for found in (history, record))
    return x, whole


@pytest.mark.parametrize("delay, local, whole", TORCHFT)
def test_torchft_fixtures(delay, local, whole):
    x, record = torchft(delay)
    assert x[:10, 0].tolist() == list(local)
    assert record[[3, 9], 0].tolist() == list(whole)


def test_torchft_second_fragment():
    x, record = torchft(0)
    assert x[:7, 1].tolist() == [1, -1, -3, -5, -7, -9, -23]
    assert x[12, 1] == -47
    assert record[[6, 12], 1].tolist() == [-23, -47]


INPUTS = np.array([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])  # MaxText's diloco_test.py
LABELS = np.array([[1.0, 2.0], [2.0, 3.0]])


def residuals(x):
    return np.einsum("nkd,nd->nk", INPUTS, x[:, :2]) + x[:, 2:] - LABELS


def least_squares(x, t):
    """The gradient of each replica's mean squared error in (w_0, w_1, b)."""
    r = residuals(x)
    return np.concatenate([np.einsum("nk,nkd->nd", r, INPUTS), r.sum(1, keepdims=True)], 1)


def test_maxtext_replay():
    start = np.tile([2.0, 1.0, 1.0], (2, 1))
    record = []
    numbers = {"sync_every": 3, "outer_lr": 1.0, "outer_momentum": 0.9, "nesterov": True}
    numbers["record"] = record
    history = run("diloco", never, least_squares, start, 6, 0.1, **numbers)
    losses = [(residuals(x) ** 2).mean(1) for x in (start, *history[:5])]
    assert_same(losses[:3], [[1, 1], [0.49, 0.81], [0.2401, 0.6561]])
    later = [[0.207544, 0.940944], [0.122906, 0.637504], [0.077404, 0.455295]]
    assert_same(losses[3:], later, 5.1e-7)
    assert_same(record[2][0], [1.5345, 1.0494, 0.5839])
    assert_same(record[5][0], [1.26282, 1.247008, 0.509828], 5.1e-7)
    assert_same(history[[2, 5]], np.array(record)[[2, 5]])
    pseudo = [(0.245, -0.026, 0.219), (0.038542, -0.09292, -0.054378)]
    for before, wanted in zip((start, history[2]), pseudo, strict=True):
        local = run("dpsgd", never, least_squares, before, 3, 0.1)[-1]
        assert_same(before[0] - local.mean(0), wanted, 5.1e-7)
