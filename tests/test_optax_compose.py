"""`optim.decentralized` inside and around transformations of optax: chains, masks, schedules."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_properties import (
    B1,
    B2,
    DECAY,
    EPS,
    MASK,
    MIX_EVERY,
    OPTIMIZERS,
    STEPS,
    WINDOW,
    N,
    gradient,
    learning_rate,
    problem,
    schedule_of,
)

from decent_jax import optim

HYPER = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY}


pytestmark = pytest.mark.usefixtures("x64")


def trajectory(tx, schedule, x, noise, change=None):
    """Parameters after every step, and the last state; ``change(t, state)`` may replace it."""
    step, history = harness.stepper(tx, gradient), []
    state = jax.vmap(tx.init)(x)
    for t, matrix in enumerate(harness.matrices_of(schedule, STEPS, MIX_EVERY)):
        state = state if change is None else change(t, state)
        x, state = step(matrix, x, state, {leaf: b[t] for leaf, b in noise.items()})
        history.append(x)
    return {leaf: np.stack([h[leaf] for h in history]) for leaf in x}, state


def assert_close(got, wanted, **tolerance):
    for leaf in wanted:
        np.testing.assert_allclose(got[leaf], wanted[leaf], **({"rtol": 1e-11} | tolerance))


@pytest.mark.parametrize("combine", ["with", "then"])
def test_in_a_chain(combine):
    """Before it gradients are clipped, inside it updates; ``round`` finds its way through."""
    schedule = schedule_of("one_peer_exp")
    x, noise = problem()
    inner = OPTIMIZERS["accum_adamw"]
    outside = optax.chain(
        optax.clip_by_global_norm(0.7), optim.decentralized(inner, schedule, combine)
    )
    inside = optim.decentralized(
        optax.chain(optax.clip_by_global_norm(0.7), inner), schedule, combine
    )
    plain = optim.decentralized(inner, schedule, combine)
    got, _ = trajectory(outside, schedule, x, noise)
    assert_close(got, trajectory(inside, schedule, x, noise)[0])
    assert abs(got["bias"] - trajectory(plain, schedule, x, noise)[0]["bias"]).max() > 1e-2


def test_clipping_inside_is_of_each_replicas_own_norm():
    schedule = schedule_of("ring")
    x, noise = problem()
    norms = np.sqrt(sum(np.square(0.5 * x[k] - noise[k][0]).sum(1) for k in x))
    limit = float(np.median(norms))
    tx = optim.decentralized(
        optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0)), schedule, "with"
    )
    got, _ = trajectory(tx, schedule, x, noise)
    scale = np.minimum(1, limit / norms)[:, None]
    assert 0 < (scale < 1).sum() < N
    assert_close(
        {k: v[0] for k, v in got.items()},
        {k: x[k] - scale * (0.5 * x[k] - noise[k][0]) for k in x},
    )


@pytest.mark.parametrize(
    ("outer", "static"),
    [(False, ()), (True, ()), (False, "accum_steps"), (True, ("accum_steps", "b1", "b2"))],
)
def test_inject_hyperparams(outer, static):
    """A learning rate changed by hand, accum_steps traced or static, and both nestings."""
    schedule = schedule_of("hypercube")
    x, noise = problem()

    def decentralized(learning_rate, mask, accum_steps, **given):
        tx = optim.accum_adamw(learning_rate, mask=mask, accum_steps=accum_steps, **given)
        return optim.decentralized(tx, schedule)

    if outer:

        def factory(learning_rate, b1, b2, eps, weight_decay, accum_steps):
            given = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
            return decentralized(learning_rate, MASK, accum_steps, **given)

        make = optax.inject_hyperparams(factory, static_args=static)
        tx = make(learning_rate=0.1, accum_steps=WINDOW, **HYPER)
    else:
        make = optax.inject_hyperparams(optim.accum_adamw, static_args=static)
        tx = optim.decentralized(
            make(learning_rate=0.1, mask=MASK, accum_steps=WINDOW, **HYPER), schedule
        )

    def change(t, state):
        if t == 5:
            injected = state if outer else state.inner
            rate = injected.hyperparams["learning_rate"]
            injected.hyperparams["learning_rate"] = jnp.full_like(rate, 0.02)
        return state

    got, _ = trajectory(tx, schedule, x, noise, change)
    rates = optax.piecewise_constant_schedule(0.1, {5: 0.2})
    tx = optim.decentralized(
        optim.accum_adamw(rates, mask=MASK, accum_steps=WINDOW, **HYPER), schedule
    )
    assert_close(got, trajectory(tx, schedule, x, noise)[0], rtol=1e-6, atol=1e-7)


def test_inject_hyperparams_with_a_schedule_and_a_callable_mask():
    schedule = schedule_of("ring")
    x, noise = problem()
    make = optax.inject_hyperparams(optim.accum_adam, static_args=("mask", "accum_steps"))
    injected = make(
        learning_rate=learning_rate, mask=lambda params: dict(MASK), accum_steps=WINDOW, **HYPER
    )
    got, state = trajectory(optim.decentralized(injected, schedule), schedule, x, noise)
    plain = optim.decentralized(OPTIMIZERS["accum_adam"], schedule)
    assert_close(got, trajectory(plain, schedule, x, noise)[0])
    np.testing.assert_allclose(
        state.inner.hyperparams["learning_rate"], np.full(N, learning_rate(STEPS - 1))
    )


@pytest.mark.parametrize("make", [optim.accum_adam, optim.accum_adamw])
def test_masks(make):
    """A pytree and a callable agree; they differ from no mask exactly in the masked leaf."""
    schedule = schedule_of("one_peer_exp")
    x, noise = problem()

    def got(mask):
        tx = make(learning_rate, mask=mask, accum_steps=WINDOW, **HYPER)
        return trajectory(optim.decentralized(tx, schedule), schedule, x, noise)[0]

    tree, function, none = got(MASK), got(lambda params: jax.tree.map(bool, MASK)), got(None)
    assert_close(tree, function, rtol=0)
    assert_close({"kernel": tree["kernel"]}, {"kernel": none["kernel"]}, rtol=0)
    assert abs(tree["bias"] - none["bias"]).max() > 1e-3


@pytest.mark.parametrize("combine", ["with", "then"])
def test_learning_rate_changes_at_its_boundary(combine):
    """Step t uses schedule(t), also through steps without mixing: moves of 1 until step 3."""
    schedule = schedule_of("complete")
    rates = optax.piecewise_constant_schedule(1.0, {3: 0.1})
    tx = optim.decentralized(optax.sgd(rates), schedule, combine)
    x = {"bias": jnp.zeros((N, 1))}
    down = {"bias": -jnp.ones((N, 1))}
    history = harness.trajectory(tx, lambda x, g: g, schedule, x, [down] * 6, mix_every=2)
    moved = np.array([x["bias"][5, 0] for x, _ in history])
    np.testing.assert_allclose(np.diff(moved, prepend=0), [1, 1, 1, 0.1, 0.1, 0.1], rtol=1e-6)
