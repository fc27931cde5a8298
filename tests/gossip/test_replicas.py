"""The stacked state: where it lives, its mean, its spread, another number of replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from refusals import refuses
from trees import assert_close, assert_equal

from decent_jax import gossip, optim, replicas, topology
from decent_jax.checkpoints import arrays
from decent_jax.replicas import TrainState


def init(key):
    first, second = jax.random.split(key)
    return {"kernel": jax.random.normal(first, (2, 3)), "bias": jax.random.normal(second, (3,))}


def flat(stacked):
    """(n, numbers of one replica) float64."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(stacked)]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


# --- making ---------------------------------------------------------------------------------------


def test_create_identical():
    key = jax.random.key(0)
    stacked = replicas.create(init, 5, key)
    own = init(key)
    assert jax.tree.map(jnp.shape, stacked) == {"kernel": (5, 2, 3), "bias": (5, 3)}
    for i in range(5):
        assert_equal(replicas.take(stacked, i), own)
    assert_equal(stacked, replicas.broadcast(own, 5))


def test_create_a_draw_each():
    key = jax.random.key(0)
    stacked = replicas.create(init, 3, key, identical=False)
    for i, own_key in enumerate(jax.random.split(key, 3)):
        assert_close(replicas.take(stacked, i), init(own_key), rtol=1e-6, atol=0)
    gaps = flat(stacked)[:, None] - flat(stacked)[None]
    assert (abs(gaps).max(-1) + np.eye(3) > 0.1).all()


# --- mean and distance ----------------------------------------------------------------------------


def spread_state(bad=(), poison=np.nan):
    rng = np.random.default_rng(1)
    stacked = {key: rng.normal(size=(6, *s)) for key, s in {"kernel": (2, 3), "bias": (3,)}.items()}
    stacked["bias"][list(bad), 1] = poison
    return jax.tree.map(jnp.float32, stacked)


@pytest.mark.parametrize(
    ("bad", "poison"), [((), 0), ((2,), np.nan), ((0, 5), np.inf), ((1, 2, 3, 4, 5), -np.inf)]
)
def test_consensus_against_numpy(bad, poison):
    stacked = spread_state(bad, poison)
    ok = np.array([i not in bad for i in range(6)])
    assert replicas.finite(stacked).tolist() == ok.tolist()

    x = flat(stacked)
    wanted = x[ok].mean(0)
    mean = jax.jit(replicas.consensus_mean)(stacked)
    assert jax.tree.map(jnp.shape, mean) == {"kernel": (2, 3), "bias": (3,)}
    got = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(mean)])
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    distances = np.linalg.norm(x - wanted, axis=1)
    consensus = jax.jit(replicas.consensus_distance)(stacked)
    distance = np.sqrt(np.square(distances[ok]).mean())
    np.testing.assert_allclose(consensus.distance, distance, rtol=1e-5, atol=1e-6)
    relative = distance / np.linalg.norm(wanted)
    np.testing.assert_allclose(consensus.relative, relative, rtol=1e-5, atol=1e-6)


def test_a_lost_replica_has_no_weight():
    stacked = {"x": jnp.array([[1.0], [3.0], [jnp.nan]])}
    mean = replicas.consensus_mean(stacked, jnp.array([1.0, 3.0, 2.0]))
    assert mean["x"].tolist() == [2.5]


def test_distance_is_computed_in_float32():
    stacked = {"a": jnp.bfloat16(np.tile([[1.0], [1.0078125]], (1, 300)))}
    consensus = jax.jit(replicas.consensus_distance)(stacked)
    assert consensus.distance.dtype == jnp.float32
    # Both are as far from a mean that bfloat16 cannot hold.
    np.testing.assert_allclose(consensus.distance, 0.00390625 * 300**0.5, rtol=1e-5)
    assert replicas.consensus_mean(stacked)["a"].dtype == jnp.bfloat16


def test_distance_of_complex_numbers():
    stacked = {"a": jnp.array([[3 + 4j], [3 - 4j]])}
    assert replicas.consensus_distance(stacked).distance == 4
    assert replicas.consensus_mean(stacked)["a"].tolist() == [3]


# --- another number -------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "bad"), [(1, ()), (3, (4,)), (6, (4,)), (8, ())])
def test_resize(n, bad):
    params = spread_state(bad)
    count = jnp.int32([4, 5, 5, 5, 3, 5])
    stacked = {"params": params, "count": count, "moment": jnp.bfloat16(np.arange(6.0))}
    got = jax.jit(replicas.resize, static_argnums=1)(stacked, n)
    assert jax.tree.structure(got) == jax.tree.structure(stacked)
    for leaf, old in zip(jax.tree.leaves(got), jax.tree.leaves(stacked), strict=True):
        assert leaf.shape == (n, *old.shape[1:]) and leaf.dtype == old.dtype
    ok = [i not in bad for i in range(6)]
    np.testing.assert_allclose(
        flat(got["params"]), np.tile(flat(params)[ok].mean(0), (n, 1)), rtol=1e-5, atol=1e-6
    )
    assert got["count"].tolist() == [5] * n
    # A bad replica is left out whole, also of leaves in which it is finite.
    assert got["moment"].tolist() == [float(jnp.bfloat16(np.arange(6.0)[ok].mean()))] * n


# --- placement ------------------------------------------------------------------------------------


def test_place_on_all_devices_in_order():
    placement = replicas.place(16)
    assert placement.mesh.shape == {"replica": 8} and placement.block == 2
    assert placement.mesh.devices.tolist() == jax.devices()
    assert placement.axis_name == ("replica", "block")
    assert replicas.place(8).axis_name == "replica" and replicas.place(8).block == 1
    x = jax.device_put(jnp.arange(16.0), placement.stacked)
    assert [shard.data.tolist() for shard in x.addressable_shards[:2]] == [[0, 1], [2, 3]]
    y = jax.device_put(jnp.arange(2.0), placement.replicated)
    assert len(y.addressable_shards) == 8
    assert all(shard.data.tolist() == [0, 1] for shard in y.addressable_shards)


@pytest.mark.parametrize(("n", "count"), [(6, 4), (4, 8), (9, 2), (12, None)])
def test_place_refuses(n, count):
    devices = None if count is None else jax.devices()[:count]
    with refuses(n, count or 8):
        replicas.place(n, devices)


def training_step(placement, schedule, loop):
    """As the training loop does it: map over the block, one mix, map over the block."""

    def body(params, targets):
        ids = placement.replica_ids()
        gradient = placement.per_replica_alone(
            lambda p, b, i: (jax.tree.map(lambda x: x - b[0] * (1 + i), p), i), loop=loop
        )
        grads, seen = gradient(params, targets, ids)
        mixing = placement.per_replica(lambda p: gossip.mix(p, schedule, 1, placement.axis_name))
        mixed = mixing(params)
        update = placement.per_replica(lambda x, g: jax.tree.map(lambda x, g: x - 0.1 * g, x, g))
        return update(mixed, grads), seen

    split = P("replica")
    return jax.jit(placement.on_devices(body, split, split))


@pytest.mark.parametrize(("devices", "loop"), [(8, False), (4, False), (4, True), (1, True)])
def test_placements_agree(devices, loop):
    """A result depends on the number of replicas, never on where they live."""
    schedule = topology.make("one_peer_exp", 8)
    placement = replicas.place(8, jax.devices()[:devices])
    assert placement.block == 8 // devices
    stacked = replicas.create(init, 8, jax.random.key(3), identical=False)
    targets = jnp.linspace(-1, 1, 8)[:, None]
    args = jax.device_put((stacked, targets), placement.stacked)
    got, seen = training_step(placement, schedule, loop)(*args)
    assert seen.tolist() == list(range(8))
    for key, leaf in stacked.items():
        x = np.asarray(leaf)
        b = (np.asarray(targets)[:, 0] * np.arange(1, 9)).reshape(8, *[1] * (x.ndim - 1))
        wanted = np.einsum("ij,j...->i...", schedule.matrix(1), x) - 0.1 * (x - b)
        np.testing.assert_allclose(got[key], wanted, rtol=1e-5, atol=1e-6)
        assert got[key].sharding.is_equivalent_to(placement.stacked, x.ndim)


@pytest.mark.parametrize("devices", [8, 4])
def test_what_is_donated_is_updated_in_place(devices, users_hlo):
    placement = replicas.place(8, jax.devices()[:devices])
    update = placement.per_replica(lambda x, g: jnp.where(jnp.isfinite(x), x, 0) - 0.1 * g)
    run = placement.on_devices(update, P("replica"), P("replica"))
    x = jax.device_put(jnp.ones((8, 16, 24)), placement.stacked)
    memory = jax.jit(run, donate_argnums=0).lower(x, x).compile().memory_analysis()
    assert memory.alias_size_in_bytes == x.nbytes // devices
    assert memory.temp_size_in_bytes == 0


def test_push_sum_is_resized_to_what_it_conserves():
    """sum(w z) / sum(w), which no round changes; the plain mean of z does change."""
    schedule = topology.make("random_out(seed=1)", 4)
    tx = optim.push_sum(optax.sgd(0.0), schedule)
    z = {"x": jax.random.normal(jax.random.key(0), (4, 5))}
    state, kept = jax.vmap(tx.init)(z), z["x"].mean(0)

    def step(z, state):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, z), state, z, round=0)
        return optim.apply_updates(z, updates), state

    z, state = jax.jit(jax.vmap(step, axis_name="replica"))(z, state)
    weights = optim.consensus_weights(state)
    assert np.ptp(weights) > 0.1
    mean = replicas.consensus_mean(z, weights)["x"]
    np.testing.assert_allclose(mean, kept, atol=1e-6)
    assert abs(replicas.consensus_mean(z)["x"] - kept).max() > 1e-3
    state = TrainState(z, {}, state)
    resized = arrays.change_replicas(state, replicas.place(2, jax.devices()[:1]), 1)
    np.testing.assert_allclose(resized.params["x"], np.stack([kept] * 2), atol=1e-6)
    np.testing.assert_array_equal(resized.opt_state.own.w, np.ones(2))


def test_an_infinity_of_an_optimizers_state_loses_no_replica():
    """The best loss of `reduce_on_plateau` is infinite before there is one, on all or on some."""
    tx = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(accumulation_size=100))
    x = jnp.arange(12.0).reshape(4, 3)
    state = jax.vmap(tx.init)(x)
    resize = jax.jit(replicas.resize, static_argnums=1)
    (y, alone), both = resize((x, state), 2), resize(state, 2)
    np.testing.assert_allclose(y, np.broadcast_to(np.asarray(x).mean(0), (2, 3)))
    for found in (alone, both):
        assert np.isinf(found[1].best_value).all()
        assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(found))
    # Of one replica only, and a moment of another: their parameters are finite, so they count.
    state = (state[0], state[1]._replace(best_value=jnp.array([jnp.inf, 1.0, 2.0, 3.0])))
    moved = resize((x, state), 2, counts=replicas.finite(x))
    np.testing.assert_allclose(moved[0], y)
    np.testing.assert_allclose(moved[1][1].best_value, [2.0, 2.0])


def test_a_replica_whose_parameters_are_lost_does_not_count():
    x = {"a": jnp.array([[1.0], [2.0], [6.0]]), "b": jnp.array([1.0, jnp.nan, 3.0])}
    y = jax.jit(replicas.resize, static_argnums=1)(x, 2)
    np.testing.assert_allclose(y["a"], [[3.5], [3.5]])
    np.testing.assert_allclose(y["b"], [2.0, 2.0])


@pytest.mark.parametrize("jitted", [False, True])
def test_any_state_becomes_that_of_another_number_of_replicas(jitted):
    """Random keys of both kinds, whole numbers, empty states, 16-bit numbers."""
    keys = jax.random.split(jax.random.key(0), 4)
    state = {
        "typed": keys,
        "raw": jax.random.key_data(keys),
        "counts": jnp.arange(4),
        "flags": jnp.ones(4, bool),
        "none": jnp.zeros((4, 0)),
        "half": jnp.full((4, 2), 30000, jnp.float16),
        "sgd": jax.vmap(optax.sgd(0.1).init)(jnp.zeros((4, 2))),
    }
    resize = jax.jit(replicas.resize, static_argnums=1) if jitted else replicas.resize
    for tree in (state, state["sgd"], {"k": keys}, {"counts": jnp.arange(4)})[: 4 if jitted else 1]:
        found = resize(tree, 2)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
            assert new.dtype == old.dtype and new.shape == (2, *old.shape[1:])
    assert jax.jit(replicas.consensus_distance)(state).distance == 0
    assert jax.jit(replicas.finite)(state).shape == (4,)
    three = jax.jit(replicas.resize, static_argnums=1)(state, 3)
    np.testing.assert_array_equal(three["half"], np.full((3, 2), 30000))
