"""Every schedule x every optimizer x both orders: the properties that all of them must have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from decent_jax import optim, topology
from decent_jax.topology import Schedule

N = 8
STEPS, MIX_EVERY, WINDOW = 8, 2, 3
B1, B2, EPS, DECAY = 0.8, 0.9, 1e-3, 0.1
MASK = {"kernel": True, "bias": False}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def learning_rate(step):
    """Counts every step, mixing or not: 0-based."""
    return 0.2 / (1 + 0.5 * step)


def schedule_of(name) -> Schedule:
    """Random ones of two rounds: each is compiled."""
    options = {"rounds": 2} if name in ("random_matching", "equi_dynamic") else {}
    if name == "periodic_average":
        options = {"every": 3}
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

# Mixing is linear in the matrix whatever its graph, so these schedules differ in what they send
# only, and two algorithms of different orders are enough for them.
ALL_ALGORITHMS = topology.NAMES[:6]
FEW = [ALGORITHMS[2], ALGORITHMS[5]]


def algorithms_of(name):
    return ALGORITHMS if name in ALL_ALGORITHMS else FEW


def wrapped(schedule, name, combine):
    return optim.decentralized(OPTIMIZERS[name], schedule, combine)


# --- the recursion of DESIGN 5, in NumPy ----------------------------------------------------------


class Local:
    """One leaf of one optimizer on all replicas (they do not interact here), step by step."""

    def __init__(self, name, x, decay):
        self.name, self.decay, self.t = name, decay, 0
        self.m, self.v, self.a = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)

    def update(self, g, xhat):
        """What replaces ``xhat``."""
        lr = learning_rate(self.t)
        self.t += 1
        if self.name == "sgd":
            self.m = 0.9 * self.m + g
            return xhat - lr * self.m
        s = WINDOW if self.name.startswith("accum") else 1
        if self.name == "accum_adam":
            g = g + self.decay * xhat
        if self.name == "accum_adamw":
            xhat = (1 - lr * self.decay) * xhat
        k = -(-self.t // s)
        self.a = self.a + g / s
        m = B1 * self.m + (1 - B1) * g
        v = B2 * self.v + (1 - B2) * g**2
        x = xhat - lr / (1 - B1**k) * m / (np.sqrt(v) / np.sqrt(1 - B2**k) + EPS)
        if self.t % s == 0:
            self.m = B1 * self.m + (1 - B1) * self.a
            self.v = B2 * self.v + (1 - B2) * self.a**2
            self.a = np.zeros_like(self.a)
        return x


def simulate(schedule, name, combine, x, curvature, noise):
    """Parameters after every step, {leaf: (steps, n, ...)}; gradient curvature * x - noise."""
    out = {}
    for leaf, start in x.items():
        local = Local(name, start, DECAY if MASK[leaf] else 0.0)
        now, history = start, []
        for t in range(len(noise[leaf])):
            matrix = np.eye(N)
            if (t + 1) % MIX_EVERY == 0:
                matrix = schedule.matrix((t // MIX_EVERY) % schedule.period)
            g = curvature * now - noise[leaf][t]
            if combine == "with":
                now = local.update(g, matrix @ now)
            else:
                now = matrix @ local.update(g, now)
            history.append(now)
        out[leaf] = np.stack(history)
    return out


# --- the library, in two layouts ------------------------------------------------------------------


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


def step_of(tx, round):
    def step(params, state, curvature, noise):
        grads = jax.tree.map(lambda x, b: curvature * x - b, params, noise)
        updates, state = tx.update(grads, state, params, round=round)
        return optim.apply_updates(params, updates), state

    return step


def on_devices(step, mesh, check_vma):
    def body(params, states, curvature, noise):
        own = jax.tree.map(lambda x: x[0], (params, states, noise))
        out = step(own[0], own[1], curvature, own[2])
        return jax.tree.map(lambda x: x[None], out)

    split = P("replica")
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(split, split, P(), split),
        out_specs=split,
        check_vma=check_vma,
    )


def run(txs, schedule, x, curvature, noise, mesh=None):
    """Parameters after every step for several algorithms at once; {key: {leaf: (steps, n, ..)}}.

    Without a mesh op by op under vmap, where nothing is compiled but single operations.
    """

    def all_steps(round):
        steps = {key: step_of(tx, round) for key, tx in txs.items()}

        def step(params, states, curvature, noise):
            out = {k: steps[k](params[k], states[k], curvature, noise) for k in steps}
            return {k: p for k, (p, _) in out.items()}, {k: s for k, (_, s) in out.items()}

        return step

    @functools.cache
    def executable(round):
        if mesh is None:
            return jax.vmap(all_steps(round), in_axes=(0, 0, None, 0), axis_name="replica")
        return jax.jit(on_devices(all_steps(round), mesh, not schedule.partial_groups))

    params = {key: jax.tree.map(jnp.asarray, x) for key in txs}
    states = {key: jax.vmap(tx.init)(params[key]) for key, tx in txs.items()}
    history = []
    for t in range(STEPS):
        one = executable(schedule.round_at(t, MIX_EVERY))
        now = {leaf: b[t] for leaf, b in noise.items()}
        params, states = one(params, states, curvature, now)
        history.append(params)
    return {
        key: {leaf: np.stack([np.asarray(h[key][leaf]) for h in history]) for leaf in x}
        for key in txs
    }


@pytest.mark.parametrize("name", topology.NAMES)
def test_vmap_is_the_recursion(name):
    """float64, mix_every = 2, two windows closed and a third begun."""
    schedule = schedule_of(name)
    x, noise = problem()
    txs = {key: wrapped(schedule, *key) for key in algorithms_of(name)}
    got = run(txs, schedule, x, 0.5, noise)
    for key in txs:
        wanted = simulate(schedule, *key, x, 0.5, noise)
        for leaf in x:
            assert got[key][leaf].dtype == np.float64
            np.testing.assert_allclose(
                got[key][leaf], wanted[leaf], rtol=1e-12, atol=1e-12, err_msg=str((key, leaf))
            )


# One or two algorithms a schedule: the layouts differ in `gossip` only (see test_gossip.py).
ON_DEVICES = {
    "complete": [0, 3],
    "ring": [4],
    "bidirectional_ring": [2, 5],
    "one_peer_exp": [1, 6],
    "hypercube": [7],
    "alternating_exp_ring": [0],
    "static_exp": [3],
    "base_k": [2],
    "grid": [4],
    "torus": [5],
    "star": [0],
    "random_matching": [6],
    "random_regular": [7],
    "erdos_renyi": [1],
    "equi_dynamic": [2],
    "hierarchical": [5],
    "periodic_average": [1],
}


def test_every_schedule_and_algorithm_runs_on_devices():
    assert set(ON_DEVICES) == set(topology.NAMES)
    assert set().union(*ON_DEVICES.values()) == set(range(len(ALGORITHMS)))


@pytest.mark.parametrize("name", ON_DEVICES)
def test_devices_are_the_recursion(name, mesh8):
    schedule = schedule_of(name)
    x, noise = problem(seed=1)
    txs = {ALGORITHMS[i]: wrapped(schedule, *ALGORITHMS[i]) for i in ON_DEVICES[name]}
    got = run(txs, schedule, x, 0.5, noise, mesh8)
    for key in txs:
        wanted = simulate(schedule, *key, x, 0.5, noise)
        for leaf in x:
            np.testing.assert_allclose(
                got[key][leaf], wanted[leaf], rtol=1e-12, atol=1e-12, err_msg=str((key, leaf))
            )


@pytest.mark.parametrize("name", ["one_peer_exp", "alternating_exp_ring"])
def test_blocks_are_the_recursion(name):
    """Two replicas a device: the whole update under vmap, with both axes' names."""
    schedule = schedule_of(name)
    x, noise = problem(seed=5)
    mesh = jax.make_mesh(
        (4,), ("replica",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    keys = [("accum_adamw", "with"), ("sgd", "then")]
    txs = {
        key: optim.decentralized(OPTIMIZERS[key[0]], schedule, key[1], ("replica", "block"))
        for key in keys
    }

    @functools.partial(jax.jit, static_argnames="round")
    def step(params, states, noise, round):
        def one(params, states, noise):
            out = {k: step_of(tx, round)(params[k], states[k], 0.5, noise) for k, tx in txs.items()}
            return {k: p for k, (p, _) in out.items()}, {k: s for k, (_, s) in out.items()}

        split = P("replica")
        block = jax.vmap(one, axis_name="block")
        return jax.shard_map(block, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)(
            params, states, noise
        )

    params = {key: jax.tree.map(jnp.asarray, x) for key in keys}
    states = {key: jax.vmap(tx.init)(params[key]) for key, tx in txs.items()}
    for t in range(STEPS):
        now = {leaf: b[t] for leaf, b in noise.items()}
        params, states = step(params, states, now, schedule.round_at(t, MIX_EVERY))
    for key in keys:
        wanted = simulate(schedule, *key, x, 0.5, noise)
        for leaf in x:
            np.testing.assert_allclose(params[key][leaf], wanted[leaf][-1], rtol=1e-12, atol=1e-12)


# --- mixing alone ---------------------------------------------------------------------------------


def spread(x):
    """Consensus distance of (n, ...)."""
    return np.sqrt(np.square(x - x.mean(0)).reshape(len(x), -1).sum(1).mean())


@pytest.mark.parametrize("name", topology.NAMES)
def test_mixing_keeps_the_mean_and_contracts(name):
    """Without gradients: as fast as the matrices promise, and from the slowest start no faster."""
    schedule = schedule_of(name)
    x, noise = problem(seed=2)
    products = [np.eye(N)]
    for t in range(STEPS):
        r = schedule.round_at(t, MIX_EVERY)
        products.append(products[-1] if r is None else schedule.matrix(r) @ products[-1])
    products = products[1:]
    rates = [np.linalg.norm(product - 1 / N, 2) for product in products]
    assert rates[-1] < 1
    if schedule.period <= STEPS // MIX_EVERY:  # the rate of one period, from the schedule
        after_a_period = rates[schedule.period * MIX_EVERY - 1]
        gap = 1 - after_a_period ** (1 / schedule.period)
        assert schedule.spectral_gap() == pytest.approx(gap, abs=1e-4)
    last = max((t for t in range(STEPS) if rates[t] > 1e-9), default=None)
    _, _, right = np.linalg.svd(products[-1 if last is None else last] - 1 / N)
    slow = 3 + np.stack([right[0], 2 * right[0]], axis=1)
    noise = {leaf: 0 * b for leaf, b in noise.items()}
    keys = algorithms_of(name)
    for start, tight, kinds in ((x["bias"], False, keys), (slow, True, keys[3:5] or keys[:1])):
        txs = {key: wrapped(schedule, *key) for key in kinds}
        got = run(txs, schedule, {**x, "bias": start}, 0.0, noise)
        for key in kinds:
            history = got[key]["bias"]  # not decayed
            for t in range(STEPS):
                wanted = products[t] @ start
                np.testing.assert_allclose(history[t], wanted, atol=1e-13, err_msg=str(key))
                np.testing.assert_allclose(history[t].mean(0), start.mean(0), atol=1e-13)
                assert spread(history[t]) <= rates[t] * spread(start) + 1e-13
            if tight and last is not None:
                assert spread(history[last]) == pytest.approx(rates[last] * spread(start))
            if key[0] == "accum_adamw":  # the decayed leaf shrinks, and its mean with it
                shrunk = np.prod([1 - learning_rate(t) * DECAY for t in range(STEPS)])
                means = got[key]["kernel"].mean(1)
                np.testing.assert_allclose(means[-1], shrunk * x["kernel"].mean(0), atol=1e-13)
        if not tight and schedule.period == 1 and name == "complete":
            assert last == 0  # one step without mixing


# --- against one replica --------------------------------------------------------------------------


def alone(tx, x, curvature, noise):
    """One replica's own trajectory, {leaf: (steps, ...)}."""
    params, history = x, []
    state = tx.init(params)
    for t in range(STEPS):
        grads = {leaf: curvature * params[leaf] - noise[leaf][t] for leaf in x}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return {leaf: np.stack([np.asarray(h[leaf]) for h in history]) for leaf in x}


def test_equal_replicas_are_one_replica():
    """On ``complete`` and equal data both orders and all-reduce are the inner optimizer."""
    x, noise = problem(equal=True)
    schedule = schedule_of("complete")
    txs = {key: wrapped(schedule, *key) for key in ALGORITHMS}
    txs |= {(name, "all_reduce"): optim.all_reduce(tx) for name, tx in OPTIMIZERS.items()}
    got = run(txs, schedule, x, 0.5, noise)
    for name, tx in OPTIMIZERS.items():
        own = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), x)
        wanted = alone(tx, own, 0.5, {leaf: b[:, 0] for leaf, b in noise.items()})
        for how in ("with", "then", "all_reduce"):
            for leaf in x:
                np.testing.assert_allclose(
                    got[name, how][leaf],
                    np.broadcast_to(wanted[leaf][:, None], got[name, how][leaf].shape),
                    rtol=1e-12,
                    err_msg=str((name, how)),
                )


def test_all_reduce_is_the_optimizer_of_the_mean_gradient():
    """Different data, equal start; the gradient's mean, neither its sum nor the replica's own."""
    x, _ = problem(equal=True)
    _, noise = problem(seed=4)
    txs = {name: optim.all_reduce(tx) for name, tx in OPTIMIZERS.items()}
    got = run(txs, schedule_of("complete"), x, 0.5, noise)
    mean = {leaf: b.mean(1) for leaf, b in noise.items()}
    for name, tx in OPTIMIZERS.items():
        own = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), x)
        wanted = alone(tx, own, 0.5, mean)
        for leaf in x:
            assert np.ptp(got[name][leaf], axis=1).max() == 0  # bit for bit alike
            np.testing.assert_allclose(got[name][leaf][:, 3], wanted[leaf], rtol=1e-12, atol=1e-14)


# --- under jit ------------------------------------------------------------------------------------


def avals(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", topology.NAMES)
def test_state_keeps_its_structure_and_dtypes(name, dtype):
    schedule = schedule_of(name)
    with jax.enable_x64(False):
        params = {
            "kernel": jax.ShapeDtypeStruct((N, 3), dtype),
            "bias": jax.ShapeDtypeStruct((N, 2), dtype),
        }
        for key in algorithms_of(name):
            tx = wrapped(schedule, *key)
            state = jax.eval_shape(jax.vmap(tx.init), params)
            for round in (None, schedule.period - 1):
                step = jax.vmap(step_of(tx, round), in_axes=(0, 0, None, 0), axis_name="replica")
                got = jax.eval_shape(step, params, state, 0.5, params)
                assert avals(got) == avals((params, state)), key


@pytest.mark.parametrize("layout", ["vmap", "devices"])
def test_one_executable_a_round(layout, mesh8, programs):
    """The second call of a round compiles nothing; a round is a static argument."""
    schedule = schedule_of("bidirectional_ring")
    traced = []
    kinds = ALGORITHMS if layout == "vmap" else ALGORITHMS[2:5]
    txs = {key: wrapped(schedule, *key) for key in kinds}

    def all_steps(params, states, curvature, noise, round):
        traced.append(round)
        out = {
            k: step_of(tx, round)(params[k], states[k], curvature, noise) for k, tx in txs.items()
        }
        return {k: p for k, (p, _) in out.items()}, {k: s for k, (_, s) in out.items()}

    def step(params, states, curvature, noise, round):
        if layout == "vmap":
            one = jax.vmap(
                lambda *args: all_steps(*args, round), in_axes=(0, 0, None, 0), axis_name="replica"
            )
        else:
            one = on_devices(lambda *args: all_steps(*args, round), mesh8, True)
        return one(params, states, curvature, noise)

    step = jax.jit(step, static_argnames="round")
    x, noise = problem()
    sharding = jax.sharding.NamedSharding(mesh8, P("replica"))
    place = (lambda t: jax.device_put(t, sharding)) if layout == "devices" else (lambda t: t)
    params = place({key: jax.tree.map(jnp.asarray, x) for key in txs})
    states = place({key: jax.vmap(tx.init)(params[key]) for key, tx in txs.items()})
    for t in range(6):
        now = place({leaf: jnp.asarray(b[t]) for leaf, b in noise.items()})
        round = schedule.round_at(t, MIX_EVERY)
        params, states = step(params, states, 0.5, now, round=round)
    assert traced == [None, 0]
    assert programs.count("jit(step)") == 2
    for key in kinds:
        wanted = simulate(schedule, *key, x, 0.5, {leaf: b[:6] for leaf, b in noise.items()})
        np.testing.assert_allclose(params[key]["bias"], wanted["bias"][-1], rtol=1e-12, atol=1e-12)
