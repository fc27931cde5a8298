"""A function in two parts: all that can be known early is, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decent_jax import optim, topology
from decent_jax.train.split import split

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 48).reshape(6, 8), "b": jnp.linspace(0.5, 2.0, 8)}


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def primitives(fn, *args):
    """The names of all equations, also of functions that are called."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            inner = equation.params.get("jaxpr")
            yield from walk(inner.jaxpr) if inner is not None else [equation.primitive.name]

    return list(walk(jax.make_jaxpr(fn)(*args).jaxpr))


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_two_parts_of_any_function_are_the_whole(seed):
    """Random straight programs of five arguments, of which 0 to 5 are known early."""
    rng = np.random.default_rng(seed)
    plan = rng.integers(0, 1000, size=(25, 3))

    def program(early, late):
        arguments = [*early, *late]
        pool = [*arguments]
        for kind, a, b in plan:
            x, y = pool[a % len(pool)], pool[b % len(pool)]
            make = [
                lambda x, y: x + y.sum(),
                lambda x, y: jnp.sin(x) * y.mean(),
                lambda x, y: jnp.broadcast_to(y.sum(), (4, 7)),
                lambda x, y: jnp.where(x > 0, x, y.min()),
                lambda x, y: jnp.zeros((5, 2)) + x.max(),
            ]
            pool.append(make[kind % len(make)](x, y))
        return {"some": pool[6::5], "last": pool[-1], "given": arguments}

    arguments = [jnp.asarray(rng.normal(size=(3, 2)), jnp.float32) for _ in range(5)]
    known = seed % 6
    early, late = arguments[:known], arguments[known:]
    first, second = split(program, early, late)
    assert_same(second(first(early), late), program(early, late))


def test_nothing_is_kept_that_is_made_of_less():
    """Neither constants nor what is broadcast, whatever they are made of."""

    def fn(early, late):
        wide = jnp.broadcast_to(jnp.exp(early).sum(), (100,))
        return wide * 2 + late + jnp.arange(100.0)

    first, second = split(fn, jnp.zeros(10), jnp.zeros(100))
    (kept,) = first(jnp.arange(10.0))
    assert kept.shape == ()
    assert "exp" not in primitives(second, [kept], jnp.zeros(100))
    assert_same(second([kept], jnp.ones(100)), fn(jnp.arange(10.0), jnp.ones(100)))


INNER = {
    "adamw": optim.accum_adamw(0.1, weight_decay=0.1, mask={"w": True, "b": False}, accum_steps=1),
    "accumulated adamw": optim.accum_adamw(0.1, weight_decay=0.1, mask={"w": True, "b": False}),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optim.accum_adamw(lambda t: 0.1 / t)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "decay of all": optim.accum_adamw(0.1, weight_decay=0.1),
    "decay in the gradient": optim.accum_adam(0.1, weight_decay=0.1),
}
NOTHING_EARLY = ("decay of all", "decay in the gradient")


@pytest.mark.parametrize("name", INNER)
def test_the_update_of_a_decentralized_optimizer(name):
    """Moments and direction are made before the mixed parameters are known, where they can be."""
    tx = optim.decentralized(INNER[name], topology.make("one_peer_exp", 4))

    def update(early, late):
        loss, grads, state = early
        params, mixed = late
        changes, state = tx.update(grads, state, params, round=0, value=loss, mixed=mixed)
        return optim.apply_updates(params, changes), state

    state = tx.init(PARAMS)
    grads = jax.tree.map(lambda x: 3 * x - 1, PARAMS)
    mixed = jax.tree.map(lambda x: x + 0.1, PARAMS)
    for value in (1.0, np.nan, 2.0):
        early, late = (jnp.float32(value), grads, state), (PARAMS, mixed)
        first, second = split(update, early, late)
        kept = first(early)
        assert_same(second(kept, late), update(early, late))
        _, state = update(early, late)
    assert nbytes(kept) <= 1.2 * nbytes(early)
    found = primitives(second, kept, late)
    if name in NOTHING_EARLY:
        assert_same(kept, jax.tree.leaves(early))
        assert {"sqrt", "reduce_sum"} <= set(found)
    else:
        assert not {"sqrt", "reduce_sum", "div", "integer_pow"} & set(found)
