"""The optimizer of airbench94 under gossip, against the published rule in NumPy's float64."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decent_jax import optim, topology
from decent_jax.models import airbench

pytestmark = pytest.mark.usefixtures("x64")
N, STEPS = 4, 12
SHAPES = {
    "whiten": {"kernel": (2, 2, 3, 4), "bias": (4,)},
    "group1": {"conv1": {"kernel": (3, 3, 4, 5)}, "norm1": {"bias": (5,)}},
    "fc": {"kernel": (5, 3)},
}


def rate(t):
    return 0.24 * (1 - t / STEPS)


def orthogonalized(m):
    """Three steps of Newton and Schulz with the published coefficients, on (rows, outputs)."""
    x = m.reshape(-1, m.shape[-1]).T  # as there: outputs first
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T.reshape(m.shape)


def change(name, x, g, momentum, t, beta):
    """The update of one array, and its new momentum; gradients are of a mean over 2000 images."""
    if name == "whiten/kernel":
        return np.zeros_like(x), momentum
    if x.ndim == 4:  # Nesterov's momentum as an average whose bias is corrected, as in optax
        momentum = beta * momentum + (1 - beta) * g
        looked = beta * momentum / (1 - beta ** (t + 2)) + (1 - beta) * g / (1 - beta ** (t + 1))
        scaled = x * np.sqrt(x.shape[-1]) / np.linalg.norm(x)
        return scaled - rate(t) * orthogonalized(looked) - x, momentum
    peak = 0.67 if name == "fc/kernel" else 0.053
    left = 1 - t / STEPS
    if name == "whiten/bias":
        left = max(0.0, 1 - t / (3 / 8 * STEPS))
    summed = 2000 * g + 2e-6 * 2000 / peak * x
    momentum = 0.85 * momentum + summed
    return -peak * left * (summed + 0.85 * momentum), momentum


def draw(rng, scale=1.0):
    return jax.tree.map(
        lambda shape: scale * rng.normal(size=(N, *shape)),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize(
    ("method", "combine", "beta"),
    [
        (optim.decentralized, "awc", 0.6),
        (optim.decentralized, "atc", 0.6),
        (optim.gossiped_momentum, "atc", 0.85),
    ],
)
def test_gossip_equals_numpy(method, combine, beta):
    """Each replica has its own gradient, that of a quadratic around its own target."""
    schedule = topology.make("one_peer_exp", N)
    x, targets = draw(np.random.default_rng(0)), draw(np.random.default_rng(1), 1e-3)
    own = {} if beta == 0.6 else {"beta": beta}  # 0.6 as published, unless it is given
    tx = method(airbench.optimizer(rate, **own), schedule, combine)

    def gradient(x, target):  # small, as that of a mean over images is where losses are not
        return jax.tree.map(lambda a, b: 1e-5 * (a - b), x, target)

    x = jax.tree.map(jnp.asarray, x)
    got, _ = harness.trajectory(tx, gradient, schedule, x, [targets] * STEPS)[-1]
    names = ["/".join(k.key for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(x)]
    x, targets = (
        dict(zip(names, map(np.asarray, jax.tree.leaves(tree)), strict=True))
        for tree in (x, targets)
    )
    momentum = {name: np.zeros_like(x[name]) for name in names}
    for t in range(STEPS):
        W = schedule.matrix(schedule.round_at(t))
        for name in names:
            own = x[name]
            mixed = np.tensordot(W, own, 1)
            start = mixed if combine == "awc" else own
            moved = np.empty_like(own)
            for i in range(N):
                g = 1e-5 * (own[i] - targets[name][i])
                step, momentum[name][i] = change(name, start[i], g, momentum[name][i], t, beta)
                moved[i] = start[i] + step
            x[name] = moved if combine == "awc" else np.tensordot(W, moved, 1)
            if method is optim.gossiped_momentum:
                momentum[name] = np.tensordot(W, momentum[name], 1)
    for name, value in zip(names, jax.tree.leaves(got), strict=True):
        # Rates, which are functions of an int32 step, are float32.
        np.testing.assert_allclose(value, x[name], rtol=1e-6, atol=2e-7, err_msg=name)


@pytest.mark.parametrize("beta", [-0.1, 1.0, float("nan")])
def test_a_beta_that_would_diverge_is_refused(beta):
    with pytest.raises(ValueError, match=rf"beta must be in \[0, 1\), got {beta}"):
        airbench.optimizer(rate, beta)
