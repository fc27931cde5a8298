"""Local optimizers and learning rates, and optax inside and around `optim.decentralized`."""

import math

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from refusals import refuses

from decent_jax import optim, topology
from decent_jax.optim.accum_adam import bias_correction

N, STEPS, MIX_EVERY, WINDOW = 8, 8, 2, 3
HYPER = {"b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
MASK = {"kernel": True, "bias": False}


def learning_rate(step):
    """Counts every step, mixing or not: 0-based."""
    return 0.2 / (1 + 0.5 * step)


def schedule_of(name):
    return topology.make(name, N, replicas_per_node=4)


OPTIMIZERS = {
    "accum_adam": optim.accum_adam(learning_rate, **HYPER, mask=MASK, accum_steps=WINDOW),
    "accum_adamw": optim.accum_adamw(learning_rate, **HYPER, mask=MASK, accum_steps=WINDOW),
    "sgd": optax.sgd(learning_rate, momentum=0.9),
    "adam": optax.adam(learning_rate, 0.8, 0.9, 1e-3),
}


def problem(equal=False, seed=0):
    """Start, and the gradients' noise: (steps, n, ...), the same for all replicas if equal."""
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (3,), "bias": (2,)}
    replicas = 1 if equal else N
    x = {k: np.broadcast_to(rng.normal(size=(replicas, *s)), (N, *s)) for k, s in shapes.items()}
    noise = {
        k: np.broadcast_to(rng.normal(size=(STEPS, replicas, *s)), (STEPS, N, *s))
        for k, s in shapes.items()
    }
    return x, noise


def gradient(x, noise):
    return jax.tree.map(lambda x, b: 0.5 * x - b, x, noise)


def gradients(xs, noise):
    """Of several algorithms, see `harness.together`."""
    return {key: gradient(x, noise) for key, x in xs.items()}


# --- accumulated Adam -----------------------------------------------------------------------------


def test_windows(x64):
    """Parameters and state after every one of 11 steps, float64; all in one program."""
    rng = np.random.default_rng(0)
    x, grads = rng.normal(size=4), rng.normal(size=(11, 4)) * np.float64([1, 1e-3, 10, 1e-9])
    given = {"b1": 0.9, "b2": 0.98, "eps": 1e-6, "weight_decay": 0.2}
    makes = {True: optim.accum_adamw, False: optim.accum_adam}
    keys = [(s, decoupled) for s in (1, 2, 3, 5) for decoupled in makes]
    txs = {(s, d): makes[d](0.03, accum_steps=s, **given) for s, d in keys}
    step = jax.jit(harness.step_of(harness.together(txs), lambda _, g: dict.fromkeys(txs, g), 0))
    params = dict.fromkeys(txs, jnp.asarray(x))
    state, history = harness.together(txs).init(params), []
    for g in grads:
        params, state = step(params, state, g)
        history.append((params, state))
    for s, decoupled in txs:
        kept, numbers = [], {"accum_steps": s, "decoupled": decoupled}
        numbers |= {"record": kept} | given
        wanted = oracles.run(
            "accum_adam", lambda t: None, lambda _, t: grads[t][None], x[None], 11, 0.03, **numbers
        )
        for t, (params, state) in enumerate(history):
            adam, (m, v, a) = state[s, decoupled][0 if decoupled else 1], kept[t]
            assert isinstance(adam, optim.ScaleByAccumAdamState)
            np.testing.assert_allclose(params[s, decoupled], wanted[t, 0], rtol=1e-12)
            np.testing.assert_allclose(adam.mu, m[0], rtol=1e-12, atol=1e-20)
            np.testing.assert_allclose(adam.nu, v[0], rtol=1e-12, atol=1e-25)
            # With s = 1 a window is a step, and is not kept.
            assert adam.count == t + 1 and (adam.window is None) == (s == 1)
            if s > 1:
                np.testing.assert_allclose(adam.window, a[0], rtol=1e-12, atol=1e-20)
                assert ((t + 1) % s == 0) == (not adam.window.any())


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.99999])
def test_bias_correction_in_float32(decay):
    """A float32 power has a relative error of 1e-4 and more where 1 - b is small."""
    for count in (1, 2, 100, 100_000):
        got = bias_correction(decay, jnp.int32(count))
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, 1 - decay**count, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_complex_numbers_as_in_optax():
    rng = np.random.default_rng(0)
    x, *gradients = jnp.asarray(rng.normal(size=(5, 3)) + 1j * rng.normal(size=(5, 3)))
    both = []
    for tx in (optim.accum_adamw(0.1, accum_steps=1), optax.adam(0.1)):
        state, update = tx.init(x), jax.jit(tx.update)
        for g in gradients:
            updates, state = update(g, state, x)
        both.append(updates)
    np.testing.assert_allclose(*both, rtol=1e-9)


def test_moments_are_shaped_like_the_parameters_in_float32_at_least():
    params = {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": jnp.zeros(4, jnp.complex64)}
    alone, state = (optim.scale_by_accum_adam(accum_steps=s).init(params) for s in (1, 2))
    for part in (alone.mu, alone.nu, state.mu, state.nu, state.window):
        assert {key: x.shape for key, x in part.items()} == {"a": (2, 3), "b": (4,)}
        assert {key: x.dtype for key, x in part.items()} == {"a": jnp.float32, "b": jnp.complex64}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b1": 1.0}, "b1 1.0"),
        ({"b2": -0.1}, "b2 -0.1"),
        ({"b2": 1}, "b2 1"),
        ({"eps": -1e-8}, "eps -1e-08"),
        ({"accum_steps": 0}, "accum_steps 0"),
        ({"accum_steps": 2.5}, "accum_steps 2.5"),
    ],
)
def test_accum_adam_refuses(given, message):
    with refuses(*message.split()):
        optim.accum_adamw(0.1, **given)


# --- learning rates -------------------------------------------------------------------------------


def test_inverse_sqrt_schedule():
    """REFERENCE E1: .99 (step + 1) / 4000 + .01 below step 4000, else sqrt(4000 / (step + 1))."""
    schedule = optim.inverse_sqrt_schedule(7e-4, 4000)
    for step in (0, 1, 1999, 3998, 3999, 4000, 4001, 15_999, 129_999):
        factor = 0.99 * (step + 1) / 4000 + 0.01 if step < 4000 else math.sqrt(4000 / (step + 1))
        assert float(schedule(step)) == pytest.approx(7e-4 * factor, rel=1e-6), step
        assert float(schedule(jnp.int32(step))) == float(schedule(step))


def test_warmup_cosine_schedule():
    """REFERENCE E3: from 1/2000 of the peak over 2000 steps, then a cosine over 598k to 6e-5."""
    make = optim.linear_warmup_cosine_schedule
    schedule = make(6e-4, 2000, 600_000, start_factor=1 / 2000, end=6e-5)
    wanted = {0: 3e-7, 1000: 3e-4, 2000: 6e-4, 301_000: 3.3e-4, 600_000: 6e-5, 700_000: 6e-5}
    for step, rate in wanted.items():
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-3), step
    without = make(1.0, 0, 10, end=0.1)
    assert [float(without(t)) for t in (0, 5, 10, 11)] == pytest.approx([1, 0.55, 0.1, 0.1])
    nothing_else = make(1.0, 4, 4)
    assert [float(nothing_else(t)) for t in (0, 1, 3, 4)] == pytest.approx([0, 0.25, 0.75, 1])


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


# --- with optax ----------------------------------------------------------------------------------


def trajectories(txs, schedule, change=None):
    """{key: parameters after every step} of methods in one program, and their last states.

    ``change(t, states)`` may replace the states before a step.
    """
    x, noise = problem()
    tx, history = harness.together(txs), []
    step, x = harness.stepper(tx, gradients), dict.fromkeys(txs, x)
    states = jax.vmap(tx.init)(x)
    for t, matrix in enumerate(harness.matrices_of(schedule, STEPS, MIX_EVERY)):
        states = states if change is None else change(t, states)
        x, states = step(matrix, x, states, {leaf: b[t] for leaf, b in noise.items()})
        history.append(x)
    return jax.tree.map(lambda *rows: np.stack(rows), *history), states


def assert_close(got, wanted, rtol=1e-11, atol=0.0):
    for leaf in wanted:
        np.testing.assert_allclose(got[leaf], wanted[leaf], rtol=rtol, atol=atol)


def test_clipping_inside_is_of_each_replicas_own_norm(x64):
    schedule, (x, noise) = schedule_of("ring"), problem()
    norms = np.sqrt(sum(np.square(0.5 * x[k] - noise[k][0]).sum(1) for k in x))
    limit = float(np.median(norms))
    inner = optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0))
    got, _ = trajectories({"one": optim.decentralized(inner, schedule)}, schedule)
    scale = np.minimum(1, limit / norms)[:, None]
    assert 0 < (scale < 1).sum() < N
    assert_close(
        {k: v[0] for k, v in got["one"].items()},
        {k: x[k] - scale * (0.5 * x[k] - noise[k][0]) for k in x},
    )


def test_inject_hyperparams(x64):
    """A learning rate changed by hand, with accum_steps traced outside and static inside; and a
    schedule with a callable mask."""
    schedule, given = schedule_of("hypercube"), HYPER | {"accum_steps": WINDOW}
    inject = optax.inject_hyperparams

    def outside(learning_rate, b1, b2, eps, weight_decay, accum_steps):
        adam = optim.accum_adamw(learning_rate, b1, b2, eps, weight_decay, MASK, accum_steps)
        return optim.decentralized(adam, schedule)

    inside = inject(optim.accum_adamw, static_args="accum_steps")
    changed = {
        "outside": inject(outside)(learning_rate=0.1, **given),
        "inside": optim.decentralized(inside(learning_rate=0.1, mask=MASK, **given), schedule),
    }
    scheduled = inject(optim.accum_adam, static_args=("mask", "accum_steps"))(
        learning_rate=learning_rate, mask=lambda params: dict(MASK), **given
    )
    rates = optax.piecewise_constant_schedule(0.1, {5: 0.2})
    by_rates = optim.accum_adamw(rates, mask=MASK, **given)
    txs = changed | {
        "by a schedule": optim.decentralized(by_rates, schedule),
        "scheduled": optim.decentralized(scheduled, schedule),
        "plain": optim.decentralized(OPTIMIZERS["accum_adam"], schedule),
    }

    def change(t, states):
        for key in changed if t == 5 else ():
            injected = states[key] if key == "outside" else states[key].inner
            rate = injected.hyperparams["learning_rate"]
            injected.hyperparams["learning_rate"] = jnp.full_like(rate, 0.02)
        return states

    got, states = trajectories(txs, schedule, change)
    for key in changed:
        assert_close(got[key], got["by a schedule"], rtol=1e-6, atol=1e-7)
    assert_close(got["scheduled"], got["plain"])
    rate = states["scheduled"].inner.hyperparams["learning_rate"]
    np.testing.assert_allclose(rate, np.full(N, learning_rate(STEPS - 1)))


def test_inject_hyperparams_around_decentralized():
    """Its consensus factor becomes a traced number then, also where it is left at 1."""
    schedule = topology.make("ring", 2)
    x = jnp.array([0.0, 8.0])
    for given, wanted in (({}, [4.0, 4.0]), ({"gamma": 0.25}, [1.0, 7.0])):
        tx = optax.inject_hyperparams(optim.decentralized)(optax.sgd(0.1), schedule, **given)
        step = harness.on_stack(harness.step_of(tx, jnp.zeros_like, 0), "vmap", 2)
        assert step(x, jax.vmap(tx.init)(x))[0].tolist() == wanted
    traced = optax.inject_hyperparams(optim.decentralized)(optax.sgd(0.1), schedule, mix_rounds=2)
    with refuses("mix_rounds", "static_args"):
        traced.init(x)


# --- side by side --------------------------------------------------------------------------------


def alone(tx, x, noise):
    """One replica's own trajectory, {leaf: (steps, ...)}."""

    def step(carry, noise):
        params, state = carry
        updates, state = tx.update(gradient(params, noise), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    x = jax.tree.map(jnp.asarray, x)
    return jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), noise)[1])(x)


def test_all_reduce_of_the_active_replicas():
    """The others take the update, too: all stay equal. Nobody's gradient changes nothing."""
    tx = optim.all_reduce(optax.sgd(0.1, momentum=0.9))
    x, grads = jnp.ones((4, 2)), jnp.arange(8.0).reshape(4, 2).at[3].set(jnp.nan)

    def step(x, state, g, active):
        updates, state = tx.update(g, state, x, value=g.sum(), active=active)
        return optim.apply_updates(x, updates), state

    run = harness.on_stack(step, "vmap", 4)
    x, state = run(x, jax.vmap(tx.init)(x), grads, jnp.array([True, False, True, False]))
    np.testing.assert_allclose(x, np.tile([0.8, 0.7], (4, 1)), rtol=1e-6)
    same, state = run(x, state, grads, jnp.zeros(4, bool))
    np.testing.assert_array_equal(same, x)
    assert state.skipped.tolist() == [0] * 4


def test_all_reduce_is_the_optimizer_of_the_mean_gradient(x64):
    """Different data, equal start; the gradient's mean, neither its sum nor the replica's own."""
    x, noise = problem(equal=True)[0], problem(seed=4)[1]
    tx = harness.together({name: optim.all_reduce(tx) for name, tx in OPTIMIZERS.items()})
    given = {name: {leaf: rows[None] for leaf, rows in x.items()} for name in OPTIMIZERS}
    matrices = harness.matrices_of(schedule_of("complete"), STEPS, MIX_EVERY)[None]
    got = harness.simulated(tx, gradients, given, noise, matrices)
    mean = {leaf: b.mean(1) for leaf, b in noise.items()}
    for name, tx in OPTIMIZERS.items():
        wanted = alone(tx, {leaf: rows[0] for leaf, rows in x.items()}, mean)
        for leaf in x:
            found = got[name][leaf][0]
            assert np.ptp(found, axis=1).max() == 0  # bit for bit alike
            np.testing.assert_allclose(found[:, 3], wanted[leaf], rtol=1e-12, atol=1e-14)


def avals(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("one_peer_exp", "bfloat16"), ("hierarchical", "float32"), ("complete", "bfloat16")],
)
def test_state_keeps_its_structure_and_dtypes(name, dtype):
    """A permutation, groups that send, and a mean of all."""
    schedule = schedule_of(name)
    own = {"kernel": jax.ShapeDtypeStruct((N, 3), dtype)}
    own["bias"] = jax.ShapeDtypeStruct((N, 2), dtype)
    txs = {
        (key, combine): optim.decentralized(inner, schedule, combine)
        for key, inner in OPTIMIZERS.items()
        for combine in ("awc", "atc")
    }
    tx, params = harness.together(txs), dict.fromkeys(txs, own)
    state = jax.eval_shape(jax.vmap(tx.init), params)
    for round in (None, schedule.period - 1):
        step = jax.vmap(harness.step_of(tx, gradients, round), axis_name="replica")
        assert avals(jax.eval_shape(step, params, state, own)) == avals((params, state))


def test_one_executable_a_round(programs):
    """The second call of a round compiles nothing; a round is a static argument."""
    schedule, traced = schedule_of("bidirectional_ring"), []
    tx = optim.decentralized(OPTIMIZERS["accum_adamw"], schedule)

    def step(params, state, noise, round):
        traced.append(round)
        one = harness.step_of(tx, gradient, round)
        return harness.on_stack(one, "devices", N, N)(params, state, noise)

    step = jax.jit(step, static_argnames="round")
    sharding = jax.sharding.NamedSharding(harness.mesh_of(N), jax.P("replica"))
    x, noise = jax.tree.map(jnp.float32, problem())
    params, state = jax.device_put((x, jax.vmap(tx.init)(x)), sharding)
    for t in range(6):
        now = jax.device_put({leaf: b[t] for leaf, b in noise.items()}, sharding)
        params, state = step(params, state, now, round=schedule.round_at(t, MIX_EVERY))
    assert traced == [None, 0]
    assert programs.count("jit(step)") == 2
