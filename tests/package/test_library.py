"""What people write in their own loops: the cheap way is cheap, and what would be wrong is said."""

import functools
import re
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refuses
from trees import assert_equal

from decent_jax import gossip, optim, replicas, topology
from decent_jax.gossip.codecs import Int8

N = 8
KINDS = ("collective-permute", "all-reduce", "all-gather", "reduce-scatter", "all-to-all")
SHAPES = {"kernel": (200, 120), "table": (160, 110)}  # larger than what travels together


def mesh_of(axis_type, shape=(N,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def placed(mesh, tree, names="data"):
    return jax.device_put(tree, NamedSharding(mesh, P(names)))


def random_tree(seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(N, *shape)).astype(np.float32) for k, shape in SHAPES.items()}


def count(kind, text):
    return len(re.findall(rf" {kind}(?:-start)?\(", text))


# --- jit without shard_map ------------------------------------------------------------------------


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_step_in_jit_sends_one_message_for_each_array(axis_type, users_hlo):
    """As docs/loop_details.md shows it; the numbers are those of one device."""
    schedule, mesh = topology.make("one_peer_exp", N), mesh_of(axis_type)
    tx = optim.decentralized(optax.sgd(0.1), schedule, axis_name="data")

    def update(grads, state, params, mixed=None):
        updates, state = tx.update(grads, state, params, round=1, mixed=mixed)
        return optim.apply_updates(params, updates), state

    def step(params, state):
        mixed = gossip.mix_on(mesh, params, schedule, 1, "data", finite=replicas.finite(params))
        grads = jax.tree.map(jnp.sign, params)
        return jax.vmap(update)(grads, state, params, mixed)

    params = random_tree()
    params["kernel"][3, 0, 0] = np.nan
    state = jax.jit(jax.vmap(tx.init))(params)
    here = jax.jit(jax.vmap(update, axis_name="data"))
    wanted, _ = here(jax.tree.map(jnp.sign, params), state, params)
    params, state = placed(mesh, params), placed(mesh, state)
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(params, state).compile()
    text = compiled.as_text()
    assert count("collective-permute", text) == len(SHAPES) + 1  # and the flags
    assert count("all-(?:gather|reduce|to-all)", text) == 0
    got, _ = compiled(params, state)
    for key in SHAPES:
        np.testing.assert_allclose(got[key], wanted[key], rtol=1e-5, atol=1e-6)
    assert np.isfinite(got["kernel"]).all()


def test_the_consensus_of_replicas_along_a_mesh_axis():
    """As jax.make_mesh gives it, whose axes are Explicit unless one asks for Auto."""
    params, mesh = random_tree(), mesh_of(AxisType.Explicit)
    there = placed(mesh, params)
    mean, distance = replicas.consensus_mean(there), replicas.consensus_distance(there)
    for key in SHAPES:
        np.testing.assert_allclose(mean[key], params[key].mean(axis=0), rtol=1e-5, atol=1e-6)
    gaps = [np.square(x - x.mean(axis=0)).reshape(N, -1).sum(axis=1) for x in params.values()]
    np.testing.assert_allclose(distance.distance, np.sqrt(sum(gaps).mean()), rtol=1e-5)


def test_mix_on_needs_one_receive_buffer(users_hlo):
    schedule, mesh = topology.make("one_peer_exp", N), mesh_of(AxisType.Auto)
    x = jax.ShapeDtypeStruct((N, 512, 256), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    mix = jax.jit(lambda x: gossip.mix_on(mesh, x, schedule, 0, "data"))
    compiled = mix.lower(x).compile()
    assert count("collective-permute", compiled.as_text()) == 1
    buffer = 512 * 256 * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.1 * buffer


def test_methods_that_mix_inside_go_into_on_mesh_as_a_whole(users_hlo):
    """Four devices of two replicas each, beside an axis that divides each replica."""
    schedule, axes = topology.make("one_peer_exp", N), ("data", "row")
    mesh = mesh_of(AxisType.Auto, (4, 2), ("data", "tensor"))
    params = random_tree()

    def updated(axis_name, over):
        tx = optim.contrib.gradient_tracking(optax.sgd(0.1), schedule, axis_name=axis_name)

        def update(params, state):
            return tx.update(jax.tree.map(jnp.sign, params), state, params, round=2)[0]

        return over(update), jax.jit(jax.vmap(tx.init))(params)

    alone, state = updated("data", lambda fn: jax.vmap(fn, axis_name="data"))
    wanted = jax.jit(alone)(params, state)
    fn, state = updated(axes, lambda fn: gossip.on_mesh(fn, mesh, axes))
    place = NamedSharding(mesh, P("data", "tensor"))
    compiled = jax.jit(fn).lower(jax.device_put(params, place), state).compile()
    assert count("all-gather", compiled.as_text()) == 0
    got = compiled(jax.device_put(params, place), state)
    for key in SHAPES:
        np.testing.assert_allclose(got[key], wanted[key], rtol=1e-5, atol=1e-6)


def test_vmapped_replicas_on_several_devices_are_noticed():
    schedule = topology.make("one_peer_exp", N)
    x = jnp.ones((N, 2))
    mix = jax.vmap(lambda x: gossip.mix(x, schedule, 0, "data"), axis_name="data")
    mix(x)  # on one device: nothing to say
    said = r"'data' lie on several devices.*gossip\.mix_on"
    with jax.set_mesh(mesh_of(AxisType.Auto)), pytest.warns(UserWarning, match=said):
        jax.jit(mix).lower(x)
    with refuses("'data'", "gossip.mix_on"):
        jax.jit(mix).lower(placed(mesh_of(AxisType.Explicit), x))


def test_a_device_with_several_replicas_needs_a_name_for_them():
    schedule, mesh = topology.make("one_peer_exp", 4), mesh_of(AxisType.Auto, (4,))
    with refuses("2 replicas", "('data', 'block')"):
        gossip.mix_on(mesh, jnp.ones((N, 2)), schedule, 0, "data")


# --- rounds ---------------------------------------------------------------------------------------


def test_multi_steps_belongs_inside_or_takes_the_round_of_its_updates():
    """Parameters after every window; ``round_at(t)`` outside never connects the graph."""
    schedule, k, steps = topology.make("one_peer_exp", 16), 4, 256
    targets = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    data = np.broadcast_to(targets, (steps, *targets.shape))
    x = np.zeros((1, 16, 3), np.float32)

    def run(tx, rounds):
        eye = np.eye(16)
        matrices = np.stack([eye if r is None else schedule.matrix(r) for r in rounds])
        matrices = matrices[None].astype(np.float32)
        got = harness.simulated(tx, lambda x, target: x - target, x, data, matrices)
        return np.asarray(got)[0, k - 1 :: k]

    inner = optax.sgd(0.02)
    inside = optim.decentralized(optax.MultiSteps(inner, k), schedule)
    outside = optax.MultiSteps(optim.decentralized(inner, schedule), k)
    right = run(inside, [schedule.round_at(t, mix_every=k) for t in range(steps)])
    np.testing.assert_allclose(
        run(outside, [schedule.round_at(t // k) for t in range(steps)]), right, atol=1e-6
    )
    trap = run(outside, [schedule.round_at(t) for t in range(steps)])
    assert (np.ptp(trap[-1], axis=0) > 4 * np.ptp(right[-1], axis=0)).all()


# --- what is left out or of another kind ----------------------------------------------------------


def test_an_axis_that_nobody_has_named_is_named():
    ring, x = topology.make("ring", 4), jnp.ones(3)
    for tx in (optim.decentralized(optax.sgd(0.1), ring), optim.all_reduce(optax.sgd(0.1))):
        update = functools.partial(tx.update, x[0], tx.init(x[0]), round=0)
        for run in (update, jax.vmap(update, axis_name="row")):
            with refuses("'replica'", "jax.vmap"):
                run(x)


def test_a_leaf_that_is_no_array_is_named():
    class Layer(NamedTuple):  # as a module of equinox: its activation is a leaf, too
        weight: jax.Array
        activation: Any

    def init(key):
        numbers = {"scale": 2.0, "shift": np.float32(0.5)}
        return {"layer": Layer(jax.random.normal(key, (2,)), jax.nn.relu), **numbers}

    for identical in (True, False):
        with refuses("['layer'].activation", "equinox", error=TypeError):
            replicas.create(init, 4, jax.random.key(0), identical=identical)

    def arrays(key):
        return {**init(key), "layer": init(key)["layer"].weight}

    stacked = replicas.create(arrays, 4, jax.random.key(0))
    assert jax.tree.map(jnp.shape, stacked) == {"layer": (4, 2), "scale": (4,), "shift": (4,)}


# --- arrays and optimizers ------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", [jax.random.key(0), jnp.arange(3), np.array(True)], ids=str)
def test_an_array_that_cannot_be_mixed_is_named(leaf):
    schedule = topology.make("one_peer_exp", 4)
    tree = {"kernel": jnp.zeros(3), "noise": leaf}
    with refuses("['noise']", error=TypeError):
        optim.decentralized(optax.adam(0.1), schedule).init(tree)
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 4), tree)
    with refuses("['noise']", error=TypeError):
        jax.vmap(lambda x: gossip.mix(x, schedule, 0), axis_name="replica")(stacked)


def test_empty_arrays_are_mixed_like_others():
    tree = {"a": jnp.arange(8.0).reshape(4, 2), "b": jnp.zeros((4, 0)), "c": jnp.zeros((4, 3, 0))}
    names = ["complete", "hierarchical(complete, ring)"]
    cases = [(name, None) for name in names] + [("ring", Int8())]

    def mix(tree):
        key = jax.random.key(0)
        made = [(topology.make(name, 4, replicas_per_node=2), codec) for name, codec in cases]
        return [gossip.mix(tree, each, 0, codec=codec, key=key) for each, codec in made]

    def both(tree):
        return mix(tree), mix({"a": tree["a"]})

    @jax.jit
    def run(tree):
        distance = replicas.consensus_distance(tree).distance
        return jax.vmap(both, axis_name="replica")(tree), replicas.finite(tree), distance

    (got, alone), finite, distance = run(tree)
    for each, wanted in zip(got, alone, strict=True):
        np.testing.assert_array_equal(each["a"], wanted["a"])
        assert (each["b"].shape, each["c"].shape) == ((4, 0), (4, 3, 0))
    assert finite.all()
    np.testing.assert_allclose(distance, np.sqrt(10), rtol=1e-6)


def test_an_optimizer_may_take_more_than_the_loss():
    """As LBFGS, which searches along a line; four replicas, all alike."""
    tx = optim.decentralized(optax.lbfgs(), topology.make("complete", 4), "atc")

    def loss(x):
        return ((x - 3) ** 2).sum()

    def step(carry, _):
        x, state = carry
        value, grads = jax.value_and_grad(loss)(x)
        more = {"value": value, "grad": grads, "value_fn": loss}
        updates, state = tx.update(grads, state, x, round=0, **more)
        return (optim.apply_updates(x, updates), state), None

    def run(x):
        return jax.lax.scan(step, (x, tx.init(x)), length=30)[0][0]

    got = jax.jit(jax.vmap(run, axis_name="replica"))(jnp.zeros((4, 2)))
    np.testing.assert_allclose(got, 3, atol=1e-3)


def test_a_state_of_optax_goes_on_in_gossip():
    """Equal replicas of equal data go where the one model would have gone."""
    adam = optax.adam(0.1)

    def steps(tx, x, state, **extra):
        for _ in range(3):
            updates, state = tx.update(2 * x, state, x, **extra)
            x = optim.apply_updates(x, updates)
        return x, state

    x, state = steps(adam, jnp.array([3.0, -1.0]), adam.init(jnp.zeros(2)))
    wanted, _ = steps(adam, x, state)
    tx = optim.decentralized(adam, topology.make("ring", 4))
    begun = replicas.broadcast((x, tx.init(x)._replace(inner=state)), 4)
    run = jax.vmap(lambda x, s: steps(tx, x, s, round=0), axis_name="replica")
    got, _ = jax.jit(run)(*begun)
    np.testing.assert_allclose(got, np.tile(wanted, (4, 1)), rtol=1e-6)


# --- several mesh axes ----------------------------------------------------------------------------


def test_several_mesh_axes_count_as_one(users_hlo):
    """All kinds of rounds, with the same numbers and messages as over one axis of 8 devices."""
    names = ("one_peer_exp", "complete", "hierarchical(complete, ring)")
    schedules = [topology.make(name, N, replicas_per_node=2) for name in names]
    x = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)

    def run(mesh, axes):
        @jax.jit
        def mix(x):
            mixed = [gossip.mix_on(mesh, x, each, 0, axes) for each in schedules]
            return mixed, gossip.on_mesh(lambda x: gossip.mean(x, axes), mesh, axes)(x)

        compiled = mix.lower(placed(mesh, x, axes)).compile()
        kinds = [count(kind, compiled.as_text()) for kind in KINDS]
        return compiled(placed(mesh, x, axes)), kinds

    wanted, kinds = run(mesh_of(AxisType.Auto), "data")
    got, same = run(mesh_of(AxisType.Auto, (2, 4), ("dcn", "data")), ("dcn", "data"))
    assert same == kinds
    assert kinds[0] == 2  # a permute for each round that has one
    assert_equal(got, wanted)


# --- what is left out or of another kind ----------------------------------------------------------


RING, X, GRADIENT = topology.make("ring", 4), jnp.ones(3), optax.sgd(0.1)
METHODS = {
    optim.decentralized: "one_peer_exp",
    optim.diloco: "complete",
    optim.swarm: "random_matching",
    optim.push_sum: None,
    optim.contrib.choco: None,
    optim.contrib.d2: None,
}


def test_what_is_left_out_or_of_another_kind_is_refused_in_a_sentence():
    """A name instead of a schedule, a function that was not called, no round, no parameters."""
    made = optim.decentralized(GRADIENT, RING)
    state, error = made.init(X), {"error": TypeError}
    for method in METHODS:
        with refuses("'ring'", "topology.make", **error):
            method(GRADIENT, "ring")
    with refuses("adamw", "optax", **error):
        optim.decentralized(optax.adamw, RING)  # pyright: ignore
    with refuses("0.1", **error):
        optim.all_reduce(0.1)  # pyright: ignore
    with refuses("round", **error):
        made.update(X, state, X)
    with refuses("params", "round"):
        made.update(X, state, round=0)


@pytest.mark.parametrize("method", [None, *METHODS][:4])
def test_a_traced_round_is_refused_in_a_sentence(method):
    schedule = topology.make(METHODS.get(method, "one_peer_exp"), 4)

    def step(x, round):
        if method is None:
            return gossip.mix(x, schedule, round)
        made = method(GRADIENT, schedule)
        return made.update(x, made.init(x), x, round=round)

    def run(x, round):
        return jax.vmap(lambda x: step(x, round), axis_name="replica")(x)

    with refuses("round", "traced", error=TypeError):
        jax.eval_shape(run, jnp.ones((4, 2)), jnp.int32(0))
    with refuses("round", 0.5, error=TypeError):
        jax.eval_shape(lambda x: run(x, 0.5), jnp.ones((4, 2)))
