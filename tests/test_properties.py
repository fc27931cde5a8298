"""Properties of mixing, of optimizers side by side, and of a step under jit."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decent_jax import optim, topology

N = 8
STEPS, MIX_EVERY, WINDOW = 8, 2, 3
B1, B2, EPS, DECAY = 0.8, 0.9, 1e-3, 0.1
MASK = {"kernel": True, "bias": False}

pytestmark = pytest.mark.usefixtures("x64")


def learning_rate(step):
    """Counts every step, mixing or not: 0-based."""
    return 0.2 / (1 + 0.5 * step)


def schedule_of(name):
    options = {"every": 3} if name == "periodic_average" else {}
    return topology.make(name, N, local_size=4, **options)


OPTIMIZERS = {
    "accum_adam": optim.accum_adam(learning_rate, B1, B2, EPS, DECAY, MASK, WINDOW),
    "accum_adamw": optim.accum_adamw(
        learning_rate, B1, B2, EPS, DECAY, lambda params: dict(MASK), WINDOW
    ),
    "sgd": optax.sgd(learning_rate, momentum=0.9),
    "adam": optax.adam(learning_rate, B1, B2, EPS),
}
ALGORITHMS = [(name, combine) for name in OPTIMIZERS for combine in ("with", "then")]


def wrapped(schedule, name, combine):
    return optim.decentralized(OPTIMIZERS[name], schedule, combine)


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


# --- mixing alone ---------------------------------------------------------------------------------


def spread(x):
    """Consensus distance of (n, ...)."""
    return np.sqrt(np.square(x - x.mean(0)).reshape(len(x), -1).sum(1).mean())


@functools.cache
def without_gradients(combine):
    """Of all schedules, each from a random start and from its slowest one: the parameters.

    Returns {name: (products of rounds, their rates, the last step that still contracts, the starts,
    {leaf: (starts, steps, n, ...)})}.
    """
    x, noise = problem(seed=2)
    matrices, starts, out = [], [], {}
    for name in topology.NAMES:
        mixed = harness.matrices_of(schedule_of(name), STEPS, MIX_EVERY)
        products = [np.eye(N)]
        for matrix in mixed:
            products.append(matrix @ products[-1])
        rates = [np.linalg.norm(product - 1 / N, 2) for product in products[1:]]
        last = max((t for t in range(STEPS) if rates[t] > 1e-9), default=None)
        _, _, right = np.linalg.svd(products[0 if last is None else last + 1] - 1 / N)
        slow = 3 + np.stack([right[0], 2 * right[0]], axis=1)
        matrices += [mixed] * 2
        starts += [x["bias"], slow]
        out[name] = (products[1:], rates, last, starts[-2:])
    given = {"bias": np.stack(starts), "kernel": np.tile(x["kernel"], (len(starts), 1, 1))}
    nothing = jax.tree.map(lambda b: 0 * b, noise)
    tx = wrapped(schedule_of("ring"), "accum_adamw", combine)
    got = harness.simulated(tx, lambda x, b: b, given, nothing, np.stack(matrices))
    for k, name in enumerate(topology.NAMES):
        out[name] += ({leaf: rows[2 * k : 2 * k + 2] for leaf, rows in got.items()},)
    return out


@pytest.mark.parametrize("combine", ["with", "then"])
@pytest.mark.parametrize("name", topology.NAMES)
def test_mixing_keeps_the_mean_and_contracts(name, combine):
    """As fast as the matrices promise, and from the slowest start no faster."""
    schedule = schedule_of(name)
    products, rates, last, starts, got = without_gradients(combine)[name]
    assert rates[-1] < 1
    if schedule.period <= STEPS // MIX_EVERY:  # the rate of one period, from the schedule
        after_a_period = rates[schedule.period * MIX_EVERY - 1]
        gap = 1 - after_a_period ** (1 / schedule.period)
        assert schedule.spectral_gap() == pytest.approx(gap, abs=1e-4)
    if name == "complete":
        assert last == 0  # one step without mixing
    for history, start in zip(got["bias"], starts, strict=True):  # the bias is not decayed
        for t in range(STEPS):
            np.testing.assert_allclose(history[t], products[t] @ start, atol=1e-13)
            np.testing.assert_allclose(history[t].mean(0), start.mean(0), atol=1e-13)
            assert spread(history[t]) <= rates[t] * spread(start) + 1e-13
    if last is not None:
        assert spread(got["bias"][1, last]) == pytest.approx(rates[last] * spread(starts[1]))
    # The decayed leaf shrinks, and its mean with it.
    shrunk = np.prod([1 - learning_rate(t) * DECAY for t in range(STEPS)])
    wanted = shrunk * problem(seed=2)[0]["kernel"].mean(0)
    np.testing.assert_allclose(got["kernel"][:, -1].mean(1), [wanted, wanted], atol=1e-13)


# --- against one replica --------------------------------------------------------------------------


def alone(tx, x, noise):
    """One replica's own trajectory, {leaf: (steps, ...)}."""

    def step(carry, noise):
        params, state = carry
        updates, state = tx.update(gradient(params, noise), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    x = jax.tree.map(jnp.asarray, x)
    return jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), noise)[1])(x)


def side_by_side(txs, x, noise):
    """{key: {leaf: (steps, n, ...)}} of algorithms on ``complete``, in one program."""
    matrices = harness.matrices_of(schedule_of("complete"), STEPS, MIX_EVERY)[None]
    given = {key: {leaf: rows[None] for leaf, rows in x.items()} for key in txs}
    got = harness.simulated(harness.together(txs), gradients, given, noise, matrices)
    return jax.tree.map(lambda rows: rows[0], got)


def test_equal_replicas_are_one_replica():
    """On ``complete`` and equal data both orders and all-reduce are the inner optimizer."""
    x, noise = problem(equal=True)
    txs = {key: wrapped(schedule_of("complete"), *key) for key in ALGORITHMS}
    txs |= {(name, "all_reduce"): optim.all_reduce(tx) for name, tx in OPTIMIZERS.items()}
    got = side_by_side(txs, x, noise)
    for name, how in txs:
        own = {leaf: rows[0] for leaf, rows in x.items()}
        wanted = alone(OPTIMIZERS[name], own, {leaf: b[:, 0] for leaf, b in noise.items()})
        for leaf, rows in got[name, how].items():
            everywhere = np.broadcast_to(wanted[leaf][:, None], rows.shape)
            np.testing.assert_allclose(rows, everywhere, rtol=1e-12, err_msg=f"{name} {how}")


def test_all_reduce_is_the_optimizer_of_the_mean_gradient():
    """Different data, equal start; the gradient's mean, neither its sum nor the replica's own."""
    x, _ = problem(equal=True)
    _, noise = problem(seed=4)
    got = side_by_side({k: optim.all_reduce(tx) for k, tx in OPTIMIZERS.items()}, x, noise)
    mean = {leaf: b.mean(1) for leaf, b in noise.items()}
    for name, tx in OPTIMIZERS.items():
        wanted = alone(tx, {leaf: rows[0] for leaf, rows in x.items()}, mean)
        for leaf in x:
            assert np.ptp(got[name][leaf], axis=1).max() == 0  # bit for bit alike
            np.testing.assert_allclose(got[name][leaf][:, 3], wanted[leaf], rtol=1e-12, atol=1e-14)


# --- under jit ------------------------------------------------------------------------------------


def avals(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["one_peer_exp", "hierarchical", "complete"])
def test_state_keeps_its_structure_and_dtypes(name, dtype):
    """A permutation, groups that send, and a mean of all."""
    schedule = schedule_of(name)
    with jax.enable_x64(False):
        own = {"kernel": jax.ShapeDtypeStruct((N, 3), dtype)}
        own["bias"] = jax.ShapeDtypeStruct((N, 2), dtype)
        tx = harness.together({key: wrapped(schedule, *key) for key in ALGORITHMS})
        params = dict.fromkeys(ALGORITHMS, own)
        state = jax.eval_shape(jax.vmap(tx.init), params)
        for round in (None, schedule.period - 1):
            step = jax.vmap(harness.step_of(tx, gradients, round), axis_name="replica")
            assert avals(jax.eval_shape(step, params, state, own)) == avals((params, state))


@pytest.mark.parametrize("form", ["vmap", "devices"])
def test_one_executable_a_round(form, programs):
    """The second call of a round compiles nothing; a round is a static argument."""
    schedule = schedule_of("bidirectional_ring")
    traced = []
    keys = [("accum_adamw", "with"), ("sgd", "then")]
    tx = harness.together({key: wrapped(schedule, *key) for key in keys})

    def step(params, states, noise, round):
        traced.append(round)
        one = harness.step_of(tx, gradients, round)
        return harness.on_stack(one, form, N, 8)(params, states, noise)

    step = jax.jit(step, static_argnames="round")
    x, noise = problem()
    sharding = jax.sharding.NamedSharding(harness.mesh_of(8), jax.P("replica"))
    place = (lambda t: jax.device_put(t, sharding)) if form == "devices" else jax.device_put
    params = place(dict.fromkeys(keys, x))
    states = place(jax.vmap(tx.init)(params))
    for t in range(6):
        now = place({leaf: b[t] for leaf, b in noise.items()})
        params, states = step(params, states, now, round=schedule.round_at(t, MIX_EVERY))
    assert traced == [None, 0]
    assert programs.count("jit(step)") == 2
