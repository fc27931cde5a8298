"""DiLoCo, streaming DiLoCo and SlowMo against published runs, the oracle and each other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decent_jax import optim, topology
from decent_jax.optim.outer import _fragments


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def trajectory(tx, schedule, x, grads, steps, mix_every=1):
    """Parameters and states after every step; ``grads(x, t)`` of the stacked x, a tree."""
    state, history = jax.vmap(tx.init)(x), []
    for t in range(steps):
        r = schedule.round_at(t, mix_every)

        def one(x, state, g, r=r):
            updates, state = tx.update(g, state, x, round=r)
            return optim.apply_updates(x, updates), state

        x, state = jax.vmap(one, axis_name="replica")(x, state, grads(x, t))
        history.append((x, state))
    return history


def complete(n, fragments=1):
    return topology.repeat(topology.make("complete", n), fragments)


# --- torchft's regression values --------------------------------------------------------------

# Fragment 0 at steps 0 to 9, and its outer parameters at steps 3 and 9 (../shared/ALGORITHMS.md 5).
TORCHFT = {
    (0, 0.0): ([1, -1, -3, -11, -13, -15, -17, -19, -21, -35], (-11, -35)),
    (0, 0.5): ([1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5], (-11, -29)),
    (0, 1.0): ([1, -1, -3, -5, -7, -9, -11, -13, -15, -17], (-11, -23)),
    (1, 0.0): ([1, -1, -3, -7, -9, -11, -13, -15, -17, -27], (-7, -27)),
    (1, 0.5): ([1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5], (-7, -25)),
    (1, 1.0): ([1, -1, -3, -5, -7, -9, -11, -13, -15, -17], (-7, -23)),
}


@pytest.mark.parametrize(("delay", "alpha"), TORCHFT)
def test_torchft(delay, alpha):
    """Weights 1, gradient 2, inner rate 1, outer 2; two fragments, each every 6 steps."""
    schedule = complete(2, 2)
    tx = optim.diloco(
        optax.sgd(1.0), schedule, optax.sgd(2.0), fragments=2, mix_every=3, delay=delay, alpha=alpha
    )
    x = {"first": jnp.ones((2, 1)), "second": jnp.ones((2, 1))}
    history = trajectory(tx, schedule, x, lambda x, t: jax.tree.map(lambda a: 0 * a + 2, x), 12, 3)
    local, outer = TORCHFT[delay, alpha]
    got = [x["first"] for x, _ in history]
    np.testing.assert_array_equal(np.stack(got)[:9, :, 0], np.tile(local[1:], (2, 1)).T)
    states = [state.own.theta["first"] for _, state in history]
    assert [float(states[k - 1][0, 0]) for k in (3, 9)] == list(outer)
    if (delay, alpha) == (0, 0.0):
        second = [float(x["second"][0, 0]) for x, _ in history]
        assert [second[k - 1] for k in (1, 2, 3, 4, 5, 6, 12)] == [-1, -3, -5, -7, -9, -23, -47]
        assert float(history[11][1].own.theta["second"][0, 0]) == -47


# --- the oracle ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fragments", "mix_every", "delay", "alpha", "momentum"),
    [(1, 4, 0, 0.0, 0.9), (1, 4, 1, 0.3, 0.9), (1, 5, 3, 0.0, 0.5), (2, 3, 2, 0.5, 0.9)],
)
def test_is_the_recursion(fragments, mix_every, delay, alpha, momentum):
    """Nesterov outside; replicas with gradients of their own."""
    n, steps = 4, 22
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.2, 1, (n, 1)), rng.normal(size=(steps, n, 4))
    x0 = np.tile(rng.normal(size=(1, 4)), (n, 1))
    parts = [[0, 1], [2, 3]] if fragments == 2 else None
    wanted = oracles.run(
        "diloco",
        lambda t: None,
        lambda x, t: a * (x - b[t]),
        x0,
        steps,
        0.1,
        sync_every=mix_every * fragments,
        fragments=parts,
        delay=delay,
        alpha=alpha,
        outer_lr=0.7,
        outer_momentum=momentum,
        nesterov=True,
    )
    schedule = complete(n, fragments)
    tx = optim.diloco(
        optax.sgd(0.1),
        schedule,
        optax.sgd(0.7, momentum, nesterov=True),
        fragments=fragments,
        mix_every=mix_every,
        delay=delay,
        alpha=alpha,
    )
    x = {"one": jnp.asarray(x0[:, :2]), "two": jnp.asarray(x0[:, 2:])}

    def grads(x, t):
        return {"one": a * (x["one"] - b[t][:, :2]), "two": a * (x["two"] - b[t][:, 2:])}

    history = trajectory(tx, schedule, x, grads, steps, mix_every)
    got = np.stack([np.concatenate([x["one"], x["two"]], 1) for x, _ in history])
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


# --- each other --------------------------------------------------------------------------------


def noisy(n=4, steps=12):
    rng = np.random.default_rng(3)
    b = jnp.asarray(rng.normal(size=(steps, n, 3)))
    return jnp.zeros((n, 3)), lambda x, t: x - b[t]


def test_plain_diloco_is_local_sgd():
    x, grads = noisy()
    schedule = complete(4)
    local = optim.decentralized(optax.adam(0.1), schedule, "then")
    outer = optim.diloco(optax.adam(0.1), schedule, optax.sgd(1.0), mix_every=3)
    for (a, _), (b, _) in zip(
        trajectory(local, schedule, x, grads, 12, 3),
        trajectory(outer, schedule, x, grads, 12, 3),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)


def test_slowmo_on_local_steps_is_diloco_with_heavy_ball():
    x, grads = noisy()
    schedule = complete(4)
    slow = optim.slowmo(optax.sgd(0.1), schedule, 0.1, alpha=0.8, beta=0.6)
    outer = optim.diloco(optax.sgd(0.1), schedule, optax.sgd(0.8, momentum=0.6), mix_every=3)
    for (a, _), (b, _) in zip(
        trajectory(slow, schedule, x, grads, 12, 3),
        trajectory(outer, schedule, x, grads, 12, 3),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_plain_slowmo_is_gossip_with_averages():
    x, grads = noisy()
    schedule = topology.make("periodic_average(one_peer_exp, every=3)", 4)
    slow = optim.slowmo(optax.sgd(0.1), schedule, 0.1, alpha=1.0, beta=0.0)
    plain = optim.decentralized(optax.sgd(0.1), schedule, "then")
    for (a, _), (b, _) in zip(
        trajectory(slow, schedule, x, grads, 12),
        trajectory(plain, schedule, x, grads, 12),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_rate_of_zero_divides_nothing():
    """The last step of a cosine: SlowMo averages, and its momentum stays."""
    x, grads = noisy()
    schedule = complete(4)
    tx = optim.slowmo(optax.sgd(0.0), schedule, 0.0)
    (mixed, state), *_ = trajectory(tx, schedule, x + jnp.arange(4.0)[:, None], grads, 1)
    np.testing.assert_allclose(mixed, np.full((4, 3), 1.5))
    assert not np.asarray(state.own.u).any()


# --- fragments -------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_fragments_are_all_of_it_in_order(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    fragments = _fragments([np.zeros(size) for size in sizes], count)
    assert [k for part in fragments for k in part] == list(range(len(sizes)))
    assert len(fragments) == count and all(fragments)


def test_equal_arrays_are_cut_evenly():
    assert _fragments([np.zeros(5)] * 6, 3) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 2}, "2 fragments needs a schedule with a round for each, got one of 1"),
        ({"delay": 1}, "delay must be from 0 to mix_every - 1 = 0, got 1"),
        ({"alpha": 1.5}, r"alpha must be in \[0, 1\], got 1.5"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        optim.diloco(optax.sgd(1.0), complete(4), **options)


def test_more_fragments_than_arrays():
    tx = optim.diloco(optax.sgd(1.0), complete(2, 3), fragments=3)
    with pytest.raises(ValueError, match="3 fragments are more than the 1 arrays"):
        tx.init(jnp.zeros(4))
