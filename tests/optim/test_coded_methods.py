"""Methods whose averages travel in few bits, against their recursions in float64."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decent_jax import optim, topology
from decent_jax.gossip.codecs import Codec, Int4, Int8

pytestmark = pytest.mark.usefixtures("x64")
N, LR, EVERY, STEPS = 4, 0.1, 3, 13
COMPLETE = topology.make("complete", N)


@dataclasses.dataclass(frozen=True)
class Grid(Codec):
    """Multiples of ``side`` without chance; a mean of four of them is never on the edge."""

    side: float = 0.05

    def encode(self, x, noise=None):
        return (jnp.floor(x / self.side + 0.3),)

    def decode(self, parts, like):
        return parts[0] * self.side


def on_grid(x):
    return np.floor(x / Grid().side + 0.3) * Grid().side


def problem():
    """Equal replicas (n, d), and for every step each one's target: the gradient is x - b."""
    rng = np.random.default_rng(0)
    return np.tile(rng.normal(size=(1, 5)), (N, 1)), rng.normal(size=(STEPS, N, 5))


def run(tx, every=EVERY, targets=None):
    x0, b = problem()
    b = b if targets is None else targets
    tree = {"one": jnp.asarray(x0[:, :2]), "two": jnp.asarray(x0[:, 2:])}
    data = [{"one": jnp.asarray(rows[:, :2]), "two": jnp.asarray(rows[:, 2:])} for rows in b]
    path = harness.trajectory(
        tx, lambda x, b: jax.tree.map(jnp.subtract, x, b), COMPLETE, tree, data, every
    )
    return np.stack([np.concatenate([x["one"], x["two"]], axis=1) for x, _ in path]), path[-1][1]


def recursion(step, every):
    """Parameters after every step of ``step(x after the local update, is a round)``."""
    (x, b), path = problem(), []
    for t in range(STEPS):
        x = step(x, b[t], (t + 1) % every == 0)
        path.append(x)
    return np.stack(path)


def test_diloco_in_few_bits_is_its_recursion():
    """Nesterov on Q(mean of q), with e <- 0.8 e + movement - q."""
    theta, e, m = problem()[0], np.zeros((N, 5)), np.zeros((1, 5))

    def step(x, b, is_round):
        nonlocal theta, e, m
        x = x - LR * (x - b)
        if not is_round:
            return x
        e = 0.95 * e + theta - x
        q = on_grid(e)
        e = e - q
        delta = on_grid(q.mean(0, keepdims=True))
        m = delta + 0.9 * m
        theta = theta - 0.7 * (delta + 0.9 * m)
        return theta

    tx = optim.diloco(optax.sgd(LR), COMPLETE, codec=Grid())
    np.testing.assert_allclose(run(tx)[0], recursion(step, EVERY), rtol=0, atol=1e-12)


def test_all_reduce_in_few_bits_is_its_recursion():
    e = np.zeros((N, 5))

    def step(x, b, _):
        nonlocal e
        e = e + x - b
        q = on_grid(e)
        e = e - q
        return x - LR * on_grid(q.mean(0, keepdims=True))

    got, _ = run(optim.all_reduce(optax.sgd(LR), codec=Grid()), 1)
    np.testing.assert_allclose(got, recursion(step, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=repr)
def test_what_a_message_loses_comes_later(codec):
    """Equal replicas after each round, and the optimum of the mean is reached."""
    targets = np.broadcast_to(problem()[1][0], (150, N, 5))
    txs = {
        "diloco": (optim.diloco(optax.sgd(LR), COMPLETE, codec=codec), EVERY),
        "all_reduce": (optim.all_reduce(optax.sgd(LR), codec=codec), 1),
    }
    for name, (tx, every) in txs.items():
        path, state = run(tx, every, targets)
        last = path[-1]
        equal = state.own.theta if name == "diloco" else last
        assert all((x == x[:1]).all() for x in jax.tree.leaves(equal)), name
        np.testing.assert_allclose(last[0], targets[0].mean(0), atol=0.05, err_msg=name)


def test_a_gradient_that_is_not_finite_stops_all_replicas_for_one_step():
    _, b = problem()
    b[4, 2, 1] = np.inf
    got, state = run(optim.all_reduce(optax.sgd(LR), codec=Int8()), 1, b)
    np.testing.assert_array_equal(got[4], got[3])
    assert np.isfinite(got).all() and (got[5] != got[4]).any()
    assert state.skipped.tolist() == [1] * N
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.own))
