"""What every method declares that it sends, and that it composes: formats, layouts, another n."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from decent_jax import gossip, optim, replicas, topology
from decent_jax.gossip import permute, wire
from decent_jax.optim import METHODS, Parts

# The ring of 8 is at the bound of D2, see test_methods.py.
pytestmark = pytest.mark.filterwarnings("ignore:d2 on bidirectional_ring")

N = 8
SHAPES = {"kernel": (2, 5), "scale": (7,), "bias": (3,)}
SCHEDULES = {"slowmo": "complete", "diloco": "complete", "swarm": "hypercube"}
SCHEDULES |= {"push_sum": "random_out", "decentralized_adam": "one_peer_exp"}
NAMES = [name for name in METHODS if name != "all_reduce"]
INNER = {"sgd": optax.sgd(0.01, momentum=0.9), "adam": optax.adam(0.01)}
INNER["accum_adam"] = optim.accum_adam(0.01)
NUMBERS = {"choco": [{"fraction": 0.2}, {"compressor": "random_k"}, {"compressor": "int8"}]}
NUMBERS |= {"swarm": [{"bits": 32}, {"bits": 8}, {"bits": 16}]}
VARIANTS = [(name, numbers) for name in NAMES for numbers in NUMBERS.get(name, [{}])]


def parts_of(name, numbers=None, n=N, **changes):
    schedule = topology.make(SCHEDULES.get(name, "bidirectional_ring"), n)
    inner = INNER[METHODS[name].optimizers[0]]
    return Parts(schedule, 0.01, inner, numbers=numbers or {}, **changes)


@functools.cache
def stacked(n=N):
    rng = np.random.default_rng(0)
    return {key: jnp.asarray(rng.normal(size=(n, *s)), jnp.float32) for key, s in SHAPES.items()}


def step_of(tx, round=0):
    """A step towards 0 at a replica's own speed."""

    def step(x, state, speed):
        grads = jax.tree.map(lambda a: speed * a, x)
        updates, state = tx.update(grads, state, x, round=round)
        return optim.apply_updates(x, updates), state

    return step


def on_mesh(step, mesh, block=False):
    def body(*args):
        if block:
            return jax.vmap(step, axis_name="block")(*args)
        own = step(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], own)

    spec = P("replica")
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=not block)
    )


SPEED = jnp.linspace(0.1, 0.8, N)


# --- what is sent --------------------------------------------------------------------------------

WIDTH = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "u16": 2, "pred": 1}


def sent_bytes(text):
    """[bytes of each array of more than 4 numbers or 4 bytes] in collective-permutes."""
    found = []
    for line in text.splitlines():
        match = re.search(r"= (.*?) collective-permute(-start)?\(", line)
        if match:
            for kind, shape in re.findall(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]", match[1]):
                size = int(np.prod([int(k) for k in shape.split(",") if k]))
                found.append((kind, size))
    return found


@pytest.mark.parametrize(("name", "numbers"), VARIANTS)
def test_hlo_sends_what_is_declared(name, numbers, mesh8, monkeypatch):
    """Bytes to a neighbour in a round, read off the compiled step; nothing else travels."""
    monkeypatch.setattr(permute, "SMALL", 0)  # scalars apart from arrays
    parts = parts_of(name, numbers)
    tx = METHODS[name].build(parts)
    x = stacked()
    state = jax.vmap(tx.init)(x)
    text = on_mesh(step_of(tx), mesh8).lower(x, state, SPEED).compile().as_text()
    others = [k for k in ("all-gather", "all-to-all", "reduce-scatter") if f" {k}(" in text]
    assert not others
    declared = METHODS[name].message_bytes(jax.tree.map(lambda a: a[0], x), parts)
    one = parts.schedule.rounds[0]
    if one.group_size > 1:  # a mean of all: one all-reduce an array
        assert not sent_bytes(text) and " all-reduce(" in text
        sizes = [
            int(np.prod([int(k) for k in shape.split(",") if k]))
            for line in text.splitlines()
            if (match := re.search(r"= (.*?) all-reduce(-start)?\(", line))
            for shape in re.findall(r"f32\[([0-9,]*)\]", match[1])
        ]
        assert 4 * sum(size for size in sizes if size > 1) == declared
        return
    assert " all-reduce(" not in text
    # Flags, weights, checksums and steps of a lattice are scalars; so is what top-k keeps of 3.
    scalars = 1 if name != "choco" else 0
    total = sum(WIDTH[kind] * size for kind, size in sent_bytes(text) if size > scalars)
    if name == "choco" and numbers.get("compressor") != "int8":
        flags = [kind for kind, _ in sent_bytes(text) if kind == "pred"]
        total -= len(flags)
    assert total == declared * len(one.sends)


def test_bytes_a_step():
    """Declared bytes, times messages of the schedule, over the steps between two rounds."""
    x = jax.tree.map(lambda a: a[0], stacked())  # 20 numbers
    tracking = parts_of("gradient_tracking", mix_every=4)
    assert METHODS["gradient_tracking"].bytes_sent(x, tracking) == 2 * 2 * 80 / 4
    streaming = parts_of("diloco", {"fragments": 2})
    assert METHODS["diloco"].bytes_sent(x, streaming) == 80 / 2 * 2 * 7 / 8
    half = dataclasses.replace(parts_of("decentralized_adam"), wire=wire.BFloat16())
    assert METHODS["decentralized_adam"].bytes_sent(x, half) == 40
    assert METHODS["swarm"].bytes_sent(x, parts_of("swarm", {"bits": 8})) == 20


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_is_declared(name):
    numbers = {"delay": 2} if name == "diloco" else {}
    parts = parts_of(name, numbers, mix_every=3 if name == "diloco" else 1)
    state = METHODS[name].build(parts).init(jax.tree.map(lambda a: a[0], stacked()))
    kept = sum(leaf.size for leaf in jax.tree.leaves(state.own) if leaf.ndim) / 20
    if name == "diloco":
        assert kept == 3  # the outer parameters, outer momentum, what is sent
    assert kept == METHODS[name].memory_copies(parts)


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "numbers"), VARIANTS)
def test_blocks_and_devices_agree(name, numbers, mesh8):
    """A replica a device, two a device and all on one give the same three steps."""
    x = stacked()
    if name in ("choco", "diloco"):  # they begin equal
        x = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), x)
    mesh4 = jax.make_mesh(
        (4,), ("replica",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )

    def steps(axis_name, run):
        tx = METHODS[name].build(parts_of(name, numbers, axis_name=axis_name))
        params, state = x, jax.vmap(tx.init)(x)
        one = run(step_of(tx))
        for _ in range(3):
            params, state = one(params, state, SPEED)
        return params

    alone = steps("replica", lambda step: jax.jit(jax.vmap(step, axis_name="replica")))
    devices = steps("replica", lambda step: on_mesh(step, mesh8))
    blocks = steps(("replica", "block"), lambda step: on_mesh(step, mesh4, block=True))
    for key in SHAPES:
        np.testing.assert_allclose(devices[key], alone[key], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(blocks[key], alone[key], rtol=2e-5, atol=2e-6)


# --- formats of messages --------------------------------------------------------------------------

WIRES = {"bfloat16": wire.BFloat16(), "int8": wire.Int8()}


@pytest.mark.parametrize("dtype", WIRES)
def test_a_format_keeps_the_mean_and_reaches_consensus(dtype):
    """Differences of decoded arrays: the mean stays, and what is left is below a rounding."""
    schedule = topology.make("one_peer_exp", N)
    x = {k: a + 3 for k, a in stacked().items()}

    def mix(tree, key, r):
        return gossip.mix(tree, schedule, r, wire=WIRES[dtype], key=key)

    runs = [
        jax.jit(jax.vmap(functools.partial(mix, r=r), (0, None), axis_name="replica"))
        for r in range(3)
    ]
    now = x
    for t in range(60):
        now = runs[t % 3](now, jax.random.key(t))
    for key in SHAPES:
        np.testing.assert_allclose(now[key].mean(0), x[key].mean(0), atol=2e-5)
        spread = np.abs(now[key] - now[key].mean(0, keepdims=True)).max()
        assert spread < (2**-7 if dtype == "bfloat16" else 2 / 127) * np.abs(x[key]).max()


def test_int8_is_unbiased():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 50)), jnp.float32)
    draws = jax.vmap(lambda k: wire.Int8().decode(wire.Int8().encode(x, k, 0), x, k))(
        jax.random.split(jax.random.key(0), 4000)
    )
    step = np.abs(x).max(1, keepdims=True) / 127
    error = np.asarray(draws.mean(0) - x) / np.asarray(step)
    assert np.abs(error).max() < 5 * 0.5 / np.sqrt(4000)
    assert np.abs(np.asarray(draws - x[None])).max() <= 1.001 * step.max()


def test_replicas_round_by_different_chance():
    x = jnp.full((N, 64), 0.3, jnp.float32).at[:, 0].set(1.0)
    codes = jax.vmap(lambda a, i: wire.Int8().encode(a, jax.random.key(0), i)[0])(x, jnp.arange(N))
    assert len({tuple(row.tolist()) for row in np.asarray(codes)}) == N


def test_naive_int8_stalls_where_choco_goes_on():
    """Sending rounded parameters leaves a rounding's worth; sending differences does not."""
    schedule = topology.make("bidirectional_ring", N)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(N, 30)) + 10, jnp.float32)

    def naive(x, state, key):
        return gossip.mix(x, schedule, 0, wire=wire.Int8(), key=key), state

    tx = optim.choco(optax.sgd(0.0), schedule, identical_start=False, compressor="int8", gamma=0.8)

    def choco(x, state, key):
        del key
        updates, state = tx.update(0 * x, state, x, round=0)
        return optim.apply_updates(x, updates), state

    left = {}
    for name, step in (("naive", naive), ("choco", choco)):
        now, state = x, jax.vmap(tx.init)(x)
        one = jax.jit(jax.vmap(step, (0, 0, None), axis_name="replica"))
        for t in range(200):
            now, state = one(now, state, jax.random.key(t))
        np.testing.assert_allclose(now.mean(0), x.mean(0), atol=1e-3)
        left[name] = float(np.abs(now - now.mean(0, keepdims=True)).max())
    assert left["naive"] > 1e-2 and left["choco"] < 1e-3


@pytest.mark.parametrize(
    ("compressor", "gamma"), [(wire.TopK(0.1), 0.2), (wire.RandomK(0.2), 0.1), (wire.Int8(), 0.5)]
)
def test_choco_reaches_consensus_on_the_mean(compressor, gamma):
    schedule = topology.make("bidirectional_ring", 4)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 40)), jnp.float32)
    tx = optim.choco(
        optax.sgd(0.0), schedule, identical_start=False, compressor=compressor, gamma=gamma
    )

    def step(carry, _):
        def one(x, state):
            updates, state = tx.update(0 * x, state, x, round=0)
            return optim.apply_updates(x, updates), state

        return jax.vmap(one, axis_name="replica")(*carry), None

    (now, _), _ = jax.lax.scan(step, (x, jax.vmap(tx.init)(x)), length=2000)
    wanted = np.broadcast_to(x.mean(0), x.shape)
    np.testing.assert_allclose(now, wanted, atol=1e-3)


def test_choco_gossip_of_the_notes():
    """../shared/ALGORITHMS.md 4: top-1 of 3 on a ring of 4."""
    with jax.enable_x64(True):
        schedule = topology.make("bidirectional_ring", 4)
        x = jnp.array([[4.0, 0, 1], [0, 8, 2], [1, 1, 12], [16, 2, 0]])
        tx = optim.choco(optax.sgd(0.0), schedule, identical_start=False, fraction=0.3, gamma=0.3)
        state, errors = jax.vmap(tx.init)(x), []
        mean = np.asarray(x.mean(0))

        def one(x, state):
            updates, state = tx.update(0 * x, state, x, round=0)
            return optim.apply_updates(x, updates), state

        step = jax.jit(jax.vmap(one, axis_name="replica"))
        for _ in range(100):
            x, state = step(x, state)
            np.testing.assert_allclose(x.mean(0), mean, rtol=1e-13)
            errors.append(np.abs(x - mean[None]).max())
    assert errors[9] == pytest.approx(0.668, abs=5e-4)
    assert errors[99] == pytest.approx(1.6e-10, rel=0.05)


def test_a_format_of_group_means_is_refused():
    schedule = topology.make("complete", N)
    with pytest.raises(ValueError, match=r"complete averages in groups.*comm_dtype='float32'"):
        jax.vmap(lambda x: gossip.mix(x, schedule, 0, wire=wire.BFloat16()), axis_name="replica")(
            jnp.ones((N, 2))
        )


# --- another number of replicas -------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_goes_on_with_another_number_of_replicas(name):
    """`replicas.resize` makes all equal, parameters and state, and the method goes on."""
    x = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), stacked())
    tx = METHODS[name].build(parts_of(name))
    one = jax.vmap(step_of(tx), axis_name="replica")
    state = jax.vmap(tx.init)(x)
    for _ in range(3):
        x, state = one(x, state, SPEED)
    x, state = replicas.resize((x, state), 4)
    tx = METHODS[name].build(parts_of(name, n=4))
    one = jax.jit(jax.vmap(step_of(tx), axis_name="replica"))
    far = float(optax.tree.norm(x))
    for _ in range(400):
        x, state = one(x, state, SPEED[:4])
    assert float(optax.tree.norm(x)) < 0.6 * far


# --- a matrix in place of a round -----------------------------------------------------------------


def test_a_matrix_is_a_round():
    schedule = topology.make("one_peer_exp", N)
    x = stacked()
    finite = jnp.ones(N, bool).at[3].set(False)
    x = {k: a.at[3].set(jnp.nan) for k, a in x.items()}
    matrix = jnp.asarray(schedule.matrix(1), jnp.float32)

    def both(x, finite, matrix):
        by_number = gossip.mix(x, schedule, 1, finite=finite)
        return by_number, gossip.mix(x, schedule, gossip.Simulated(0, matrix), finite=finite)

    by_number, by_matrix = jax.vmap(both, (0, 0, None), axis_name="replica")(x, finite, matrix)
    for key in SHAPES:
        np.testing.assert_allclose(by_matrix[key], by_number[key], rtol=1e-6, atol=1e-6)


def test_a_matrix_is_refused_on_devices(mesh8):
    schedule = topology.make("one_peer_exp", N)
    mix = jax.shard_map(
        lambda x: gossip.mix(x, schedule, gossip.Simulated(0, jnp.eye(N))),
        mesh=mesh8,
        in_specs=P("replica"),
        out_specs=P("replica"),
    )
    with pytest.raises(
        ValueError, match=r"Simulated round needs all replicas on one device: use jax\.vmap"
    ):
        jax.jit(mix)(jnp.ones((N, 2)))
