"""Optimizers and schedules one by one: windows, rejected updates, boundaries, refusals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decent_jax import optim, topology
from decent_jax.gossip import groups
from decent_jax.optim import guard
from decent_jax.optim.accum_adam import bias_correction

N = 4


def on_replicas(tx, params, state, grads, round, value=None, apply=optim.apply_updates):
    """One step on a stack of replicas, op by op."""

    def step(params, state, grads, value):
        extra = {} if value is None else {"value": value}
        updates, state = tx.update(grads, state, params, round=round, **extra)
        return apply(params, updates), state

    in_axes = (0, 0, 0, None if value is None else 0)
    return jax.vmap(step, in_axes, axis_name="replica")(params, state, grads, value)


def start(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(size=(N, 2, 3)), jnp.float32),
        "bias": jnp.asarray(rng.normal(size=(N, 3)), jnp.float32),
    }


def gradients(seed=1):
    return start(seed)


def poison(tree, replica, value=jnp.nan):
    """One number of one leaf of one replica becomes ``value``."""
    return {**tree, "bias": tree["bias"].at[replica, 1].set(value)}


def rows(tree, replicas):
    return jax.tree.map(lambda x: x[np.asarray(replicas)], tree)


def assert_equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def assert_close(got, wanted, rtol=1e-5, atol=1e-6):
    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)

    jax.tree.map(close, got, wanted)


def dense(schedule, round, tree):
    matrix = schedule.matrix(round)
    return jax.tree.map(lambda x: np.einsum("ij,j...->i...", matrix, np.asarray(x)), tree)


def learning_rate(step):
    return 0.1 / (1 + step)


INNER = optim.accum_adamw(learning_rate, weight_decay=0.1, accum_steps=3)


def counts_of(state):
    """(Adam's count, the learning rate's count), a number a replica each."""
    return state.inner[0].count.tolist(), state.inner[2].count.tolist()


# --- rejected updates -----------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["with", "then"])
@pytest.mark.parametrize("how", ["nan gradient", "overflow", "nan loss", "infinite loss"])
def test_bad_update_is_rejected(combine, how):
    """Replica 2 keeps the mix alone; its neighbours never notice."""
    schedule = topology.make("one_peer_exp", N)
    tx = optim.decentralized(INNER, schedule, combine)
    params = start()
    params, state = on_replicas(tx, params, jax.vmap(tx.init)(params), gradients(), 0)
    before = state
    grads, value = gradients(2), jnp.zeros(N)
    if how == "nan gradient":
        bad = poison(grads, 2)
    elif how == "overflow":  # its square is not a float32: Adam's moments would be lost
        bad = poison(grads, 2, 1e20)
    else:
        bad, value = grads, value.at[2].set(jnp.nan if how == "nan loss" else jnp.inf)
    got, state = on_replicas(tx, params, before, bad, 1, value)
    good, good_state = on_replicas(tx, params, before, grads, 1, jnp.zeros(N))

    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), (got, state)))
    assert state.skipped.tolist() == state.failing.tolist() == [0, 0, 1, 0]
    assert counts_of(state) == ([2, 2, 1, 2], [2, 2, 2, 2])
    # Moments and window stay where they were, the others go on as ever.
    adam, old, wanted = state.inner[0], before.inner[0], good_state.inner[0]
    for field in ("mu", "nu", "window"):
        assert_equal(rows(getattr(adam, field), 2), rows(getattr(old, field), 2))
        assert_equal(rows(getattr(adam, field), [0, 1, 3]), rows(getattr(wanted, field), [0, 1, 3]))
    assert abs(rows(adam.window, 0)["bias"] - rows(old.window, 0)["bias"]).max() > 0.1

    if combine == "with":  # messages hold old parameters: only replica 2 itself differs
        assert_equal(rows(got, [0, 1, 3]), rows(good, [0, 1, 3]))
        assert_close(rows(got, 2), rows(dense(schedule, 1, params), 2))
    else:
        local, _ = on_replicas(tx, params, before, grads, None)
        kept = jax.tree.map(lambda x, y: x.at[2].set(y[2]), local, params)
        assert_close(got, dense(schedule, 1, kept))

    # The next good step: counted in a row no longer, and Adam goes on from where it was.
    _, state = on_replicas(tx, got, state, grads, 0)
    assert state.skipped.tolist() == [0, 0, 1, 0] and state.failing.tolist() == [0, 0, 0, 0]
    assert counts_of(state) == ([3, 3, 2, 3], [3, 3, 3, 3])
    window = state.inner[0].window["bias"]
    assert (window[0] == 0).all() and (window[2] != 0).any()  # its own window is a step behind


@pytest.mark.parametrize("shape", [(7,), (1000,), (2, 4096), (257, 131)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_number_anywhere_is_found(shape, value):
    """In arrays long enough for the vector code of a reduction, and in what is left over."""
    all_finite = jax.jit(guard.all_finite)
    good = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    assert all_finite([good])
    for place in np.linspace(0, good.size - 1, 60).astype(int):
        bad = good.copy()
        bad.reshape(-1)[place] = value
        assert not all_finite([good, bad]), place


def test_large_gradient_is_not_rejected():
    tx = optim.decentralized(INNER, topology.make("ring", N))
    params = start()
    grads = poison(gradients(), 2, 1e15)
    _, state = on_replicas(tx, params, jax.vmap(tx.init)(params), grads, 0)
    assert state.skipped.tolist() == [0, 0, 0, 0]


def test_update_that_overflows_is_rejected():
    """A finite gradient of a finite loss, but lr * g is not finite."""
    tx = optim.decentralized(optax.sgd(1e30), topology.make("ring", N))
    params = start()
    grads = poison(jax.tree.map(jnp.zeros_like, params), 1, 1e10)
    got, state = on_replicas(tx, params, jax.vmap(tx.init)(params), grads, 0)
    assert state.skipped.tolist() == [0, 1, 0, 0]
    assert_close(got, dense(topology.make("ring", N), 0, params))


@pytest.mark.parametrize("combine", ["with", "then"])
def test_single_numbers_that_overflow_are_left_out(combine):
    """Of an update whose smallest array is finite; the rest of it is made."""
    schedule = topology.make("ring", N)
    tx = optim.decentralized(optax.sgd(1e30), schedule, combine)
    params = start()
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-30), params)
    grads["kernel"] = grads["kernel"].at[1, 0, 2].set(1e10)
    got, state = on_replicas(tx, params, jax.vmap(tx.init)(params), grads, 0)
    step = jax.tree.map(lambda x: np.full(x.shape, -1.0, np.float32), params)
    step["kernel"][1, 0, 2] = 0.0
    if combine == "with":
        wanted = jax.tree.map(np.add, dense(schedule, 0, params), step)
    else:
        wanted = dense(schedule, 0, jax.tree.map(np.add, params, step))
    assert_close(got, wanted)
    assert state.skipped.tolist() == [0, 0, 0, 0]


def test_a_round_in_stages_is_held_until_the_gradient_is_known(monkeypatch):
    """Only the order changes: the flag is False. Were it True, nothing would be mixed in."""
    schedule = topology.make("alternating_exp_ring", N, local_size=2)
    tx = optim.decentralized(optax.sgd(0.1), schedule)
    params, grads = start(), gradients()
    state = jax.vmap(tx.init)(params)
    between = [r for r, one in enumerate(schedule.rounds) if one.between_groups is not None]
    got, _ = on_replicas(tx, params, state, grads, between[0])
    step = jax.tree.map(lambda g: -0.1 * np.asarray(g), grads)
    assert_close(got, jax.tree.map(np.add, dense(schedule, between[0], params), step))
    monkeypatch.setattr(groups, "_never", lambda after: jnp.array(True))
    held, _ = on_replicas(tx, params, state, grads, between[0])
    assert_close(held, step)


def test_failing_counts_in_a_row():
    tx = optim.decentralized(INNER, topology.make("complete", N))
    params = start()
    state = jax.vmap(tx.init)(params)
    seen = []
    for bad in ([1], [1, 3], [], [1], [3], [3], [0, 1, 2, 3]):
        grads = gradients()
        for replica in bad:
            grads = poison(grads, replica, -jnp.inf)
        params, state = on_replicas(tx, params, state, grads, 0)
        seen.append((state.skipped.tolist(), state.failing.tolist()))
    assert seen == [
        ([0, 1, 0, 0], [0, 1, 0, 0]),
        ([0, 2, 0, 1], [0, 2, 0, 1]),
        ([0, 2, 0, 1], [0, 0, 0, 0]),
        ([0, 3, 0, 1], [0, 1, 0, 0]),
        ([0, 3, 0, 2], [0, 0, 0, 1]),
        ([0, 3, 0, 3], [0, 0, 0, 2]),
        ([1, 4, 1, 4], [1, 1, 1, 3]),
    ]
    assert all(bool(jnp.isfinite(x).all()) for x in params.values())
    assert state.skipped.dtype == state.failing.dtype == jnp.int32


@pytest.mark.parametrize("combine", ["with", "then"])
@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_bad_parameters_recover_from_neighbours(combine, value):
    """In round 0 replica i hears i - 1. Replica 1 is bad: it becomes 0's, and 2 keeps its own."""
    schedule = topology.make("one_peer_exp", N)
    tx = optim.decentralized(optax.sgd(0.5), schedule, combine)
    clean = start()
    params = poison(clean, 1, value)
    state = jax.vmap(tx.init)(params)
    grads = jax.tree.map(lambda x: 0.2 * x, params)  # bad where the parameters are

    got, new_state = on_replicas(tx, params, state, grads, 0)
    x = {k: np.asarray(leaf) for k, leaf in clean.items()}
    for leaf in x:
        own, step = x[leaf], -0.1 * x[leaf]
        if combine == "with":
            wanted = [
                (own[0] + own[3]) / 2 + step[0],
                own[0],  # the sender's, without an update
                own[2] + step[2],
                (own[3] + own[2]) / 2 + step[3],
            ]
        else:
            new = own + step
            wanted = [(new[0] + new[3]) / 2, new[0], new[2], (new[3] + new[2]) / 2]
        np.testing.assert_allclose(got[leaf], np.stack(wanted), rtol=1e-5, atol=1e-6)
    assert new_state.skipped.tolist() == [0, 1, 0, 0]

    # From then on it takes part.
    grads = jax.tree.map(lambda x: 0.2 * x, got)
    again, new_state = on_replicas(tx, got, new_state, grads, 1)
    new = jax.tree.map(lambda x: 0.9 * x, got)
    mixed = dense(schedule, 1, got if combine == "with" else new)
    if combine == "with":
        mixed = jax.tree.map(lambda mixed, x: mixed - 0.1 * x, mixed, got)
    assert_close(again, mixed)
    assert new_state.skipped.tolist() == [0, 1, 0, 0]
    assert new_state.failing.tolist() == [0, 0, 0, 0]

    # Without a round, or with optax's own apply_updates, it stays bad and harms nobody.
    grads = jax.tree.map(lambda x: 0.2 * x, params)
    for round, apply in ((None, optim.apply_updates), (0, optax.apply_updates)):
        got, _ = on_replicas(tx, params, state, grads, round, apply=apply)
        assert np.isfinite(got["bias"]).all(1).tolist() == [True, False, True, True]
        assert np.isfinite(got["kernel"]).all()


def test_nobody_left_to_hear():
    """All bad: still bad, and all rejected, but nothing raises."""
    tx = optim.decentralized(optax.sgd(0.5), topology.make("complete", N))
    params = jax.tree.map(lambda x: x * jnp.nan, start())
    got, state = on_replicas(tx, params, jax.vmap(tx.init)(params), gradients(), 0)
    assert all(bool(jnp.isnan(x).all()) for x in got.values())
    # Gradients are finite and so is sgd's update: it is the parameters that are lost.
    assert state.skipped.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("how", ["nan gradient", "overflow", "nan loss"])
def test_all_reduce_rejects_together(how):
    tx = optim.all_reduce(INNER)
    params = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), start())
    params, state = on_replicas(tx, params, jax.vmap(tx.init)(params), gradients(), 0)
    grads, value = gradients(), None
    if how == "nan loss":
        value = jnp.zeros(N).at[3].set(jnp.nan)
    else:
        grads = poison(grads, 3, jnp.nan if how == "nan gradient" else 1e21)
    got, new = on_replicas(tx, params, state, grads, 0, value)
    assert_equal(got, params)
    assert new.skipped.tolist() == new.failing.tolist() == [1] * N
    assert counts_of(new) == ([1] * N, [2] * N)
    assert_equal(new.inner[0].window, state.inner[0].window)
    got, new = on_replicas(tx, got, new, gradients(), 0)
    for leaf in got.values():
        assert_equal(leaf, jnp.broadcast_to(leaf[:1], leaf.shape))
    assert new.failing.tolist() == [0] * N and new.skipped.tolist() == [1] * N
    assert abs(got["bias"] - params["bias"]).max() > 1e-3


def test_injected_learning_rate_goes_on_through_a_rejected_update():
    make = optax.inject_hyperparams(optim.accum_adamw, static_args="accum_steps")
    tx = optim.decentralized(make(learning_rate, accum_steps=2), topology.make("ring", N))
    params = start()
    state = jax.vmap(tx.init)(params)
    for grads in (gradients(), poison(gradients(), 2), gradients()):
        params, state = on_replicas(tx, params, state, grads, 0)
    assert state.inner.count.tolist() == [3] * N
    assert state.inner.inner_state[0].count.tolist() == [3, 3, 2, 3]
    np.testing.assert_allclose(
        state.inner.hyperparams["learning_rate"], [learning_rate(2)] * N, rtol=1e-6
    )


# --- the wrappers otherwise -----------------------------------------------------------------------


def test_init_communicates_nothing_and_counts_from_zero():
    params = rows(start(), 0)
    for tx in (optim.decentralized(INNER, topology.make("ring", N)), optim.all_reduce(INNER)):
        state = tx.init(params)  # outside any axis
        assert isinstance(state, optim.GuardedState)
        assert (int(state.skipped), int(state.failing)) == (0, 0)
        assert_equal(state.inner, INNER.init(params))


def test_inner_sees_the_loss():
    """`optax.contrib.reduce_on_plateau` halves its scale whenever the loss does not improve."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1e-3)
    tx = optim.decentralized(optax.chain(optax.sgd(0.1), plateau), topology.make("ring", N))
    params = start()
    state = jax.vmap(tx.init)(params)
    for t in range(3):
        value = jnp.asarray([1.0, 1.0 - 0.1 * t, 1.0, 1.0 - 0.1 * t])
        params, state = on_replicas(tx, params, state, gradients(), 0, value)
    assert state.inner[1].scale.tolist() == [0.25, 1, 0.25, 1]


def test_missing_round_raises():
    tx = optim.decentralized(INNER, topology.make("ring", N))
    params = rows(start(), 0)
    with pytest.raises(TypeError, match="round"):
        tx.update(params, tx.init(params), params)


def test_missing_parameters_raise():
    tx = optim.decentralized(INNER, topology.make("ring", N))
    params = rows(start(), 0)
    with pytest.raises(ValueError, match="mix parameters and got none; call update"):
        tx.update(params, tx.init(params), round=0)


@pytest.mark.parametrize("combine", ["with", "then"])
def test_consensus_factor_follows_a_schedule(combine):
    """Without gradients a step is (1 - gamma) I + gamma W, with the gamma of its count."""
    schedule = topology.make("bidirectional_ring", N)
    factors = jnp.array([0.0, 0.25, 1.0])
    tx = optim.decentralized(optax.sgd(0.1), schedule, combine, gamma=lambda count: factors[count])
    x = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
    state = jax.vmap(tx.init)(x)
    for gamma in factors.tolist():
        wanted = x + gamma * (schedule.matrix(0) @ x - x)
        step = jax.vmap(lambda x, s: tx.update(0 * x, s, x, round=0), axis_name="replica")
        updates, state = step(x, state)
        x = np.asarray(optim.apply_updates(x, updates))
        np.testing.assert_allclose(x, wanted, atol=1e-6)


@pytest.mark.parametrize("combine", ["after", "", None])
def test_unknown_combine(combine):
    with pytest.raises(ValueError, match=f"combine must be 'with' or 'then', got {combine!r}"):
        optim.decentralized(INNER, topology.make("ring", N), combine)


def test_round_beyond_the_period():
    tx = optim.decentralized(INNER, topology.make("ring", N))
    params = start()
    with pytest.raises(ValueError, match="ring has rounds 0 to 1, got round 2"):
        on_replicas(tx, params, jax.vmap(tx.init)(params), gradients(), 2)


def test_apply_updates():
    """Of finite numbers it is optax's; what is not finite begins again at the update."""
    params = {"a": jnp.float32([1, jnp.nan, -jnp.inf]), "b": jnp.bfloat16([0.5, 2])}
    updates = {"a": jnp.float32([0.25, 3, 4]), "b": jnp.bfloat16([0.25, -1])}
    got = optim.apply_updates(params, updates)
    assert got["a"].tolist() == [1.25, 3, 4] and got["b"].tolist() == [0.75, 1]
    assert got["a"].dtype == jnp.float32 and got["b"].dtype == jnp.bfloat16
    clean = {"a": jnp.float32([1, 2, 3]), "b": params["b"]}
    assert_equal(optim.apply_updates(clean, updates), optax.apply_updates(clean, updates))


# --- accumulated Adam -----------------------------------------------------------------------------


def accum_adam_loop(x, grads, s, b1, b2, eps, lr, decay, decoupled):
    """The recursion of DESIGN 5, of one array; also (m, v, A) after every step."""
    m = v = a = np.zeros_like(x)
    out = []
    for t, g in enumerate(grads, start=1):
        k = math.ceil(t / s)
        if decoupled:
            x = (1 - lr * decay) * x
        else:
            g = g + decay * x
        a = a + g / s
        mt, vt = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        x = x - lr / (1 - b1**k) * mt / (np.sqrt(vt) / np.sqrt(1 - b2**k) + eps)
        if t % s == 0:
            m, v, a = b1 * m + (1 - b1) * a, b2 * v + (1 - b2) * a**2, np.zeros_like(a)
        out.append((x, m, v, a))
    return out


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("s", [1, 2, 3, 5])
def test_windows(s, decoupled):
    """Parameters and state after every one of 11 steps, float64."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(s)
        x, grads = rng.normal(size=4), rng.normal(size=(11, 4)) * np.float64([1, 1e-3, 10, 1e-9])
        given = {"b1": 0.9, "b2": 0.98, "eps": 1e-6}
        make = optim.accum_adamw if decoupled else optim.accum_adam
        tx = make(0.03, weight_decay=0.2, accum_steps=s, **given)
        params = jnp.asarray(x)
        state = tx.init(params)
        wanted = accum_adam_loop(x, grads, s, lr=0.03, decay=0.2, decoupled=decoupled, **given)
        for t, (g, (x, m, v, a)) in enumerate(zip(grads, wanted, strict=True), start=1):
            updates, state = tx.update(jnp.asarray(g), state, params)
            params = optax.apply_updates(params, updates)
            adam = state[0 if decoupled else 1]
            assert isinstance(adam, optim.ScaleByAccumAdamState)
            np.testing.assert_allclose(params, x, rtol=1e-12)
            # With s = 1 a window is a step, and is not kept.
            assert adam.count == t and (adam.window is None) == (s == 1)
            np.testing.assert_allclose(adam.mu, m, rtol=1e-12, atol=1e-20)
            np.testing.assert_allclose(adam.nu, v, rtol=1e-12, atol=1e-25)
            if s > 1:
                np.testing.assert_allclose(adam.window, a, rtol=1e-12, atol=1e-20)
                assert (t % s == 0) == (not adam.window.any())


def test_a_window_of_one_is_adam():
    x, grads = jnp.float32([1, -2, 3]), np.random.default_rng(0).normal(size=(5, 3))

    def last(tx):
        params, state = x, tx.init(x)
        for g in grads:
            updates, state = tx.update(jnp.asarray(g, jnp.float32), state, params)
            params = optax.apply_updates(params, updates)
        return np.asarray(params)

    given = {"b1": 0.8, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
    np.testing.assert_allclose(
        last(optim.accum_adamw(0.1, accum_steps=1, **given)),
        last(optax.adamw(0.1, **given)),
        rtol=1e-6,
    )
    window_of_two = last(optim.accum_adamw(0.1, accum_steps=2, **given))
    assert abs(window_of_two - last(optax.adamw(0.1, **given))).max() > 1e-3


@pytest.mark.parametrize("after", [3, 4, 5])
def test_drop_window(after):
    """As if the last completed window had been the end; whatever the state is nested in."""
    tx = optim.decentralized(INNER, topology.make("ring", N))  # windows of 3
    params = start()
    state = jax.vmap(tx.init)(params)
    for t in range(after):
        params, state = on_replicas(tx, params, state, gradients(t), 0)
    got = optim.drop_window(state, 3)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    adam, old = got.inner[0], state.inner[0]
    assert adam.count.tolist() == [3] * N and old.count.tolist() == [after] * N
    assert not any(leaf.any() for leaf in jax.tree.leaves(adam.window))
    assert any(bool(leaf.any()) for leaf in jax.tree.leaves(old.window)) == (after > 3)
    rest = state._replace(inner=(adam, *state.inner[1:]))
    assert_equal(got, rest)
    assert_equal((adam.mu, adam.nu), (old.mu, old.nu))


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.99999])
def test_bias_correction_in_float32(decay):
    """A float32 power has a relative error of 1e-4 and more where 1 - b is small."""
    for count in (1, 2, 100, 100_000):
        got = bias_correction(decay, jnp.int32(count))
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, 1 - decay**count, rtol=1e-6)


def test_moments_are_shaped_and_typed_like_the_parameters():
    params = {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": jnp.zeros(4)}
    state = optim.scale_by_accum_adam(accum_steps=2).init(params)
    for part in (state.mu, state.nu, state.window):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), part) == jax.tree.map(
            lambda x: (x.shape, x.dtype), params
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b1": 1.0}, r"b1 must be in \[0, 1\), got 1.0"),
        ({"b2": -0.1}, r"b2 must be in \[0, 1\), got -0.1"),
        ({"b2": 1}, r"b2 must be in \[0, 1\), got 1"),
        ({"eps": -1e-8}, "eps must not be negative, got -1e-08"),
        ({"accum_steps": 0}, "accum_steps must be a whole number of at least 1, got 0"),
        ({"accum_steps": 2.5}, r"accum_steps must be a whole number of at least 1, got 2\.5"),
    ],
)
@pytest.mark.parametrize("make", [optim.accum_adam, optim.accum_adamw])
def test_accum_adam_refuses(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(0.1, **given)


# --- learning rates -------------------------------------------------------------------------------


def test_inverse_sqrt_schedule():
    """REFERENCE E1: .99 (step + 1) / 4000 + .01 below step 4000, else sqrt(4000 / (step + 1))."""
    schedule = optim.inverse_sqrt_schedule(7e-4, 4000)
    for step in (0, 1, 1999, 3998, 3999, 4000, 4001, 15_999, 129_999):
        factor = 0.99 * (step + 1) / 4000 + 0.01 if step < 4000 else math.sqrt(4000 / (step + 1))
        assert float(schedule(step)) == pytest.approx(7e-4 * factor, rel=1e-6), step
        assert float(schedule(jnp.int32(step))) == float(schedule(step))
    assert float(schedule(3999)) == pytest.approx(7e-4, rel=1e-6)  # the peak
    assert float(schedule(15_999)) == pytest.approx(3.5e-4, rel=1e-6)
    values = [float(schedule(step)) for step in (3998, 3999, 4000)]
    assert values[0] < values[1] > values[2]


def test_inverse_sqrt_schedule_of_one_step():
    schedule = optim.inverse_sqrt_schedule(1.0, 1)
    assert [float(schedule(t)) for t in (0, 3)] == pytest.approx([1, 0.5])


def test_warmup_cosine_schedule():
    """REFERENCE E3: from 1/2000 of the peak over 2000 steps, then a cosine over 598k to 6e-5."""
    peak, end = 6e-4, 6e-5
    schedule = optim.linear_warmup_cosine_schedule(
        peak, 2000, 600_000, start_factor=1 / 2000, end=end
    )
    for step in (0, 1, 1000, 1999, 2000, 2001, 301_000, 599_999, 600_000, 700_000):
        if step < 2000:
            wanted = peak * (1 / 2000 + (1 - 1 / 2000) * step / 2000)
        else:
            done = min(1, (step - 2000) / 598_000)
            wanted = end + (peak - end) * (1 + math.cos(math.pi * done)) / 2
        assert float(schedule(step)) == pytest.approx(wanted, rel=1e-5, abs=3e-7 * peak), step
    assert float(schedule(0)) == pytest.approx(3e-7, rel=1e-4)
    assert float(schedule(2000)) == pytest.approx(peak)
    assert float(schedule(301_000)) == pytest.approx((peak + end) / 2)
    assert float(schedule(600_000)) == float(schedule(10**6)) == pytest.approx(end)


def test_warmup_cosine_schedule_at_its_edges():
    none = optim.linear_warmup_cosine_schedule(1.0, 0, 10, end=0.1)
    assert [float(none(t)) for t in (0, 5, 10, 11)] == pytest.approx([1, 0.55, 0.1, 0.1])
    all_of_it = optim.linear_warmup_cosine_schedule(1.0, 4, 4)
    assert [float(all_of_it(t)) for t in (0, 1, 3, 4)] == pytest.approx([0, 0.25, 0.75, 1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.linear_warmup_cosine_schedule(1, 11, 10), "of 11 steps .*into 10 steps"),
        (lambda: optim.linear_warmup_cosine_schedule(1, -1, 10), "of -1 steps .*into 10 steps"),
        (lambda: optim.inverse_sqrt_schedule(1, 0), "at least one warm-up step, got 0"),
    ],
)
def test_schedules_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()
