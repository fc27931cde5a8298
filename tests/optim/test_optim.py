"""What wraps an optimizer: updates that are rejected, parameters that recover, refusals."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refuses
from trees import assert_close, assert_equal

from decent_jax import optim, topology
from decent_jax.optim import trees

N = 4


class Replicas:
    """All replicas of a method on one device; the rounds of its schedule share a program."""

    def __init__(self, inner, name, combine):
        self.schedule = topology.make("complete" if name is None else name, N)
        one = optim.decentralized(inner, self.schedule, combine) if name else None
        self.tx = optim.all_reduce(inner) if one is None else one
        self._steps = {}

    def init(self, params):
        return jax.vmap(self.tx.init)(params)

    def step(self, params, state, grads, round, value=None, apply=optim.apply_updates):
        """The next parameters and state."""
        if apply not in self._steps:
            options = {"apply": apply, "has_value": True}
            self._steps[apply] = harness.stepper(
                self.tx, lambda _, value, grads: (value, grads), **options
            )
        value = jnp.zeros(N) if value is None else value
        matrix = None if round is None else self.schedule.matrix(round)
        return self._steps[apply](matrix, params, state, value, grads)


@functools.cache
def replicas_of(inner, name, combine="awc"):
    """Of `optim.decentralized` on a named schedule; of all-reduce where the name is None."""
    return Replicas(inner, name, combine)


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


@pytest.mark.parametrize("combine", ["awc", "atc"])
@pytest.mark.parametrize("how", ["nan gradient", "overflow", "nan loss", "infinite loss"])
def test_bad_update_is_rejected(combine, how):
    """Replica 2 keeps the mix alone; its neighbours never notice."""
    tx = replicas_of(INNER, "one_peer_exp", combine)
    schedule = tx.schedule
    params = start()
    params, state = tx.step(params, tx.init(params), gradients(), 0)
    before = state
    grads, value = gradients(2), jnp.zeros(N)
    if how == "nan gradient":
        bad = poison(grads, 2)
    elif how == "overflow":  # its square is not a float32: Adam's moments would be lost
        bad = poison(grads, 2, 1e20)
    else:
        bad, value = grads, value.at[2].set(jnp.nan if how == "nan loss" else jnp.inf)
    got, state = tx.step(params, before, bad, 1, value)
    good, good_state = tx.step(params, before, grads, 1, jnp.zeros(N))

    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), (got, state)))
    assert state.skipped.tolist() == state.failing.tolist() == [0, 0, 1, 0]
    assert counts_of(state) == ([2, 2, 1, 2], [2, 2, 2, 2])
    # Moments and window stay where they were, the others go on as ever.
    adam, old, wanted = state.inner[0], before.inner[0], good_state.inner[0]
    for field in ("mu", "nu", "window"):
        assert_equal(rows(getattr(adam, field), 2), rows(getattr(old, field), 2))
        assert_equal(rows(getattr(adam, field), [0, 1, 3]), rows(getattr(wanted, field), [0, 1, 3]))
    assert abs(rows(adam.window, 0)["bias"] - rows(old.window, 0)["bias"]).max() > 0.1

    if combine == "awc":  # messages hold old parameters: only replica 2 itself differs
        assert_equal(rows(got, [0, 1, 3]), rows(good, [0, 1, 3]))
        assert_close(rows(got, 2), rows(dense(schedule, 1, params), 2))
    else:
        local, _ = tx.step(params, before, grads, None)
        kept = jax.tree.map(lambda x, y: x.at[2].set(y[2]), local, params)
        assert_close(got, dense(schedule, 1, kept))

    # The next good step: counted in a row no longer, and Adam goes on from where it was.
    _, state = tx.step(got, state, grads, 0)
    assert state.skipped.tolist() == [0, 0, 1, 0] and state.failing.tolist() == [0, 0, 0, 0]
    assert counts_of(state) == ([3, 3, 2, 3], [3, 3, 3, 3])
    window = state.inner[0].window["bias"]
    assert (window[0] == 0).all() and (window[2] != 0).any()  # its own window is a step behind


@pytest.mark.parametrize("shape", [(7,), (1000,), (2, 4096), (257, 131)])
def test_one_bad_number_anywhere_is_found(shape):
    """In arrays long enough for the vector code of a reduction, and in what is left over."""
    all_finite = jax.jit(lambda xs: jax.lax.map(lambda x: trees.all_finite([x, jnp.ones(3)]), xs))
    good = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    places = np.linspace(0, good.size - 1, 60).astype(int)
    bad = np.tile(good.reshape(-1), (61, 1))
    bad[np.arange(60), places] = np.resize([np.nan, np.inf, -np.inf], 60)
    found = all_finite(bad.reshape(61, *shape))
    np.testing.assert_array_equal(found, np.arange(61) == 60)


def test_only_what_overflows_is_rejected():
    """A large gradient is not; a finite gradient of a finite loss is, where lr * g overflows."""
    params = start()
    tx, grads = replicas_of(INNER, "ring"), poison(gradients(), 2, 1e15)
    _, state = tx.step(params, tx.init(params), grads, 0)
    assert state.skipped.tolist() == [0, 0, 0, 0]
    tx, grads = replicas_of(optax.sgd(1e30), "ring"), jax.tree.map(jnp.zeros_like, params)
    got, state = tx.step(params, tx.init(params), poison(grads, 1, 1e10), 0)
    assert state.skipped.tolist() == [0, 1, 0, 0]
    assert_close(got, dense(topology.make("ring", N), 0, params))


@pytest.mark.parametrize("combine", ["awc", "atc"])
def test_single_numbers_that_overflow_are_left_out(combine):
    """Of an update whose smallest array is finite; the rest of it is made, and it is counted."""
    tx = replicas_of(optax.sgd(1e30), "ring", combine)
    schedule = tx.schedule
    params = start()
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-30), params)
    grads["kernel"] = grads["kernel"].at[1, 0, 2].set(1e10)
    got, state = tx.step(params, tx.init(params), grads, 0)
    step = jax.tree.map(lambda x: np.full(x.shape, -1.0, np.float32), params)
    step["kernel"][1, 0, 2] = 0.0
    if combine == "awc":
        wanted = jax.tree.map(np.add, dense(schedule, 0, params), step)
    else:
        wanted = dense(schedule, 0, jax.tree.map(np.add, params, step))
    assert_close(got, wanted)
    assert state.skipped.tolist() == state.failing.tolist() == [0, 1, 0, 0]


def test_failing_counts_in_a_row():
    tx = replicas_of(INNER, "complete")
    params = start()
    state = tx.init(params)
    seen = []
    for bad in ([1], [1, 3], [], [1], [3], [3], [0, 1, 2, 3]):
        grads = gradients()
        for replica in bad:
            grads = poison(grads, replica, -jnp.inf)
        params, state = tx.step(params, state, grads, 0)
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


@pytest.mark.parametrize("combine", ["awc", "atc"])
@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_bad_parameters_recover_from_neighbours(combine, value):
    """In round 0 replica i hears i - 1. Replica 1 is bad: it becomes 0's, and 2 keeps its own."""
    tx = replicas_of(optax.sgd(0.5), "one_peer_exp", combine)
    schedule = tx.schedule
    clean = start()
    params = poison(clean, 1, value)
    state = tx.init(params)
    grads = jax.tree.map(lambda x: 0.2 * x, params)  # bad where the parameters are

    got, new_state = tx.step(params, state, grads, 0)
    x = {k: np.asarray(leaf) for k, leaf in clean.items()}
    for leaf in x:
        own, step = x[leaf], -0.1 * x[leaf]
        if combine == "awc":
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
    again, new_state = tx.step(got, new_state, grads, 1)
    new = jax.tree.map(lambda x: 0.9 * x, got)
    mixed = dense(schedule, 1, got if combine == "awc" else new)
    if combine == "awc":
        mixed = jax.tree.map(lambda mixed, x: mixed - 0.1 * x, mixed, got)
    assert_close(again, mixed)
    assert new_state.skipped.tolist() == [0, 1, 0, 0]
    assert new_state.failing.tolist() == [0, 0, 0, 0]

    # Without a round, or with optax's own apply_updates, it stays bad and harms nobody.
    grads = jax.tree.map(lambda x: 0.2 * x, params)
    for round, apply in ((None, optim.apply_updates), (0, optax.apply_updates)):
        got, _ = tx.step(params, state, grads, round, apply=apply)
        assert np.isfinite(got["bias"]).all(1).tolist() == [True, False, True, True]
        assert np.isfinite(got["kernel"]).all()


@pytest.mark.parametrize("how", ["nan gradient", "overflow", "nan loss"])
def test_all_reduce_rejects_together(how):
    tx = replicas_of(INNER, None)
    params = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), start())
    params, state = tx.step(params, tx.init(params), gradients(), 0)
    grads, value = gradients(), None
    if how == "nan loss":
        value = jnp.zeros(N).at[3].set(jnp.nan)
    else:
        grads = poison(grads, 3, jnp.nan if how == "nan gradient" else 1e21)
    got, new = tx.step(params, state, grads, 0, value)
    assert_equal(got, params)
    assert new.skipped.tolist() == new.failing.tolist() == [1] * N
    assert counts_of(new) == ([1] * N, [2] * N)
    assert_equal(new.inner[0].window, state.inner[0].window)
    got, new = tx.step(got, new, gradients(), 0)
    for leaf in got.values():
        assert_equal(leaf, jnp.broadcast_to(leaf[:1], leaf.shape))
    assert new.failing.tolist() == [0] * N and new.skipped.tolist() == [1] * N
    assert abs(got["bias"] - params["bias"]).max() > 1e-3


def test_injected_learning_rate_goes_on_through_a_rejected_update():
    make = optax.inject_hyperparams(optim.accum_adamw, static_args="accum_steps")
    tx = replicas_of(make(learning_rate, accum_steps=2), "ring")
    params = start()
    state = tx.init(params)
    for grads in (gradients(), poison(gradients(), 2), gradients()):
        params, state = tx.step(params, state, grads, 0)
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
        counts = state._replace(inner=None)  # a donated state must not hold one array twice
        jax.jit(lambda state: state, donate_argnums=0)(counts)


def test_inner_sees_the_loss():
    """`optax.contrib.reduce_on_plateau` halves its scale whenever the loss does not improve."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1e-3)
    tx = replicas_of(optax.chain(optax.sgd(0.1), plateau), "ring")
    params = start()
    state = tx.init(params)
    for t in range(3):
        value = jnp.asarray([1.0, 1.0 - 0.1 * t, 1.0, 1.0 - 0.1 * t])
        params, state = tx.step(params, state, gradients(), 0, value)
    assert state.inner[1].scale.tolist() == [0.25, 1, 0.25, 1]


def test_what_update_needs():
    schedule = topology.make("ring", N)
    tx = optim.decentralized(INNER, schedule)
    with refuses("ring", "0 to 1", 2):
        step = jax.vmap(harness.step_of(tx, lambda x: x, 2), axis_name="replica")
        step(start(), jax.vmap(tx.init)(start()))
    for combine in ("after", "", None):
        with refuses("combine", repr(combine)):
            optim.decentralized(INNER, schedule, combine)


def test_apply_updates():
    """Of finite numbers it is optax's; what is not finite begins again at the update."""
    params = {"a": jnp.float32([1, jnp.nan, -jnp.inf]), "b": jnp.bfloat16([0.5, 2])}
    updates = {"a": jnp.float32([0.25, 3, 4]), "b": jnp.bfloat16([0.25, -1])}
    got = optim.apply_updates(params, updates)
    assert got["a"].tolist() == [1.25, 3, 4] and got["b"].tolist() == [0.75, 1]
    assert got["a"].dtype == jnp.float32 and got["b"].dtype == jnp.bfloat16
    clean = {"a": jnp.float32([1, 2, 3]), "b": params["b"]}
    assert_equal(optim.apply_updates(clean, updates), optax.apply_updates(clean, updates))


@pytest.mark.parametrize("after", [3, 4, 5])
def test_drop_window(after):
    """As if the last completed window had been the end; whatever the state is nested in."""
    tx = replicas_of(INNER, "ring")  # windows of 3
    params = start()
    state = tx.init(params)
    for t in range(after):
        params, state = tx.step(params, state, gradients(t), 0)
    got = optim.drop_window(state, 3)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    adam, old = got.inner[0], state.inner[0]
    assert adam.count.tolist() == [3] * N and old.count.tolist() == [after] * N
    assert not any(leaf.any() for leaf in jax.tree.leaves(adam.window))
    assert any(bool(leaf.any()) for leaf in jax.tree.leaves(old.window)) == (after > 3)
    rest = state._replace(inner=(adam, *state.inner[1:]))
    assert_equal(got, rest)
    assert_equal((adam.mu, adam.nu), (old.mu, old.nu))


def test_drop_window_leaves_adam():
    """`optimizer.accum_steps` means nothing to Adam, whose count goes with its moments."""
    state = optim.accum_adamw(0.1, accum_steps=1).init(jnp.ones(3))
    state = (state[0]._replace(count=jnp.int32(7)), *state[1:])
    assert optim.drop_window(state, 4)[0].count == 7
