"""The oracles of DiLoCo and SlowMo: fixtures of torchft and MaxText, and relations between them."""

import numpy as np
import oracles
import pytest
from oracles import assert_same, random_problem, run

LR = 0.1

TORCHFT = [  # delay, alpha; fragment 0 at counts 0..9; the global ones at counts 3 and 9
    (0, 0, (1, -1, -3, -11, -13, -15, -17, -19, -21, -35), (-11, -35)),
    (0, 0.5, (1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5), (-11, -29)),
    (0, 1, (1, -1, -3, -5, -7, -9, -11, -13, -15, -17), (-11, -23)),
    (1, 0, (1, -1, -3, -7, -9, -11, -13, -15, -17, -27), (-7, -27)),
    (1, 0.5, (1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5), (-7, -25)),
    (1, 1, (1, -1, -3, -5, -7, -9, -11, -13, -15, -17), (-7, -23)),
]


def never(t):
    """No matrix: DiLoCo ignores them."""


def torchft(delay, alpha):
    record = []
    numbers = {"fragments": [[0], [1]], "sync_every": 6, "outer_lr": 2.0, "record": record}
    numbers |= {"delay": delay, "alpha": alpha}
    start = np.ones((2, 2))
    history = run("diloco", never, lambda x, t: np.full_like(x, 2), start, 12, 1.0, **numbers)
    assert_same(history[:, 0], history[:, 1])
    return np.concatenate([[[1.0, 1.0]], history[:, 0]]), np.array([[1.0, 1.0], *record])


@pytest.mark.parametrize("delay, alpha, local, whole", TORCHFT)
def test_torchft_fixtures(delay, alpha, local, whole):
    x, record = torchft(delay, alpha)
    assert x[:10, 0].tolist() == list(local)
    assert record[[3, 9], 0].tolist() == list(whole)


def test_torchft_second_fragment():
    x, record = torchft(0, 0)
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
    assert_same(record[2], [1.5345, 1.0494, 0.5839])
    assert_same(record[5], [1.26282, 1.247008, 0.509828], 5.1e-7)
    assert_same(history[[2, 5]], np.array(record)[[2, 2, 5, 5]].reshape(2, 2, 3))
    pseudo = [(0.245, -0.026, 0.219), (0.038542, -0.09292, -0.054378)]
    for before, wanted in zip((start, history[2]), pseudo, strict=True):
        local = run("dpsgd", never, least_squares, before, 3, 0.1)[-1]
        assert_same(before[0] - local.mean(0), wanted, 5.1e-7)


def test_slowmo_over_local_sgd_is_diloco():
    """At a constant rate lr u is the outer momentum of the pseudo-gradients."""
    x0, grad = random_problem()
    x0 = np.tile(x0[0], (8, 1))
    slow = run("slowmo", oracles.average_every(8, 3), grad, x0, 13, LR, alpha=0.7, beta=0.6)
    numbers = {"sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.6}
    assert_same(slow, run("diloco", never, grad, x0, 13, LR, **numbers))
