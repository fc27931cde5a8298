"""What every method declares that it sends, and that it composes: formats, layouts, another n."""

import functools
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from decent_jax import gossip, optim, replicas, topology
from decent_jax.gossip import permute, wire

# The ring of 8 is at the bound of D2, see test_methods.py.
pytestmark = pytest.mark.filterwarnings("ignore:d2 on bidirectional_ring")

N = 8
SHAPES = {"kernel": (2, 5), "scale": (7,), "bias": (3,)}
SCHEDULES = {"slowmo": "complete", "diloco": "complete", "swarm": "hypercube"}
SCHEDULES |= {"push_sum": "random_out", "decentralized_adam": "one_peer_exp"}
NAMES = [name for name in harness.NAMES if name != "all_reduce"]
INNER = {"sgd": optax.sgd(0.01, momentum=0.9), "adam": optax.adam(0.01)}
INNER["accum_adam"] = optim.accum_adam(0.01)
NUMBERS = {"choco": [{"fraction": 0.2}, {"compressor": "random_k"}, {"compressor": "int8"}]}
NUMBERS |= {"swarm": [{"bits": 32}, {"bits": 8}, {"bits": 16}]}
VARIANTS = [(name, numbers) for name in NAMES for numbers in NUMBERS.get(name, [{}])]


def schedule_of(name, n=N):
    return topology.make(SCHEDULES.get(name, "bidirectional_ring"), n)


def parts(name, numbers=None, n=N, **changes):
    """Arguments of `harness.build` after the name."""
    given = {"inner": INNER[harness.optimizers_of(name)[0]], "learning_rate": 0.01}
    return {"schedule": schedule_of(name, n), "numbers": numbers or {}} | given | changes


def build(name, *args, **given):
    return harness.build(name, **parts(name, *args, **given))


@functools.cache
def stacked(n=N):
    rng = np.random.default_rng(0)
    return {key: jnp.asarray(rng.normal(size=(n, *s)), jnp.float32) for key, s in SHAPES.items()}


def towards_zero(x, speed):
    """The gradient, with a replica's own speed."""
    return jax.tree.map(lambda a: speed * a, x)


def nothing(x):
    return jax.tree.map(jnp.zeros_like, x)


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
def test_hlo_sends_what_is_declared(name, numbers, monkeypatch):
    """Bytes to a neighbour in a round, read off the compiled step; nothing else travels."""
    monkeypatch.setattr(permute, "SMALL", 0)  # scalars apart from arrays
    tx = build(name, numbers)
    x = stacked()
    state = jax.vmap(tx.init)(x)
    step = harness.on_stack(harness.step_of(tx, towards_zero, 0), "devices", N, N)
    text = step.lower(x, state, SPEED).compile().as_text()
    others = [k for k in ("all-gather", "all-to-all", "reduce-scatter") if f" {k}(" in text]
    assert not others
    own = jax.tree.map(lambda a: a[0], x)
    declared = harness.message_bytes(name, own, **parts(name, numbers))
    one = schedule_of(name).rounds[0]
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

    def sent(name, *args, **given):
        return harness.bytes_sent(name, x, **parts(name, *args, **given))

    assert sent("gradient_tracking", mix_every=4) == 2 * 2 * 80 / 4
    assert sent("diloco", {"fragments": 2}) == 80 / 2 * 2 * 7 / 8
    assert sent("decentralized_adam", wire=wire.BFloat16()) == 40
    assert sent("swarm", {"bits": 8}) == 20


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_is_declared(name):
    given = {"numbers": {"delay": 2}, "mix_every": 3} if name == "diloco" else {}
    state = build(name, **given).init(jax.tree.map(lambda a: a[0], stacked()))
    kept = sum(leaf.size for leaf in jax.tree.leaves(harness.own(state)) if leaf.ndim) / 20
    if name == "diloco":
        assert kept == 3  # the outer parameters, outer momentum, what is sent
    assert kept == harness.memory_copies(name, **parts(name, **given))


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("quasi_global_adam", {}),  # one message
        ("gradient_tracking", {}),  # two
        ("choco", {"compressor": "random_k"}),  # coded, by a key and the replica's number
        ("swarm", {"bits": 8}),  # pairs
    ],
)
def test_blocks_and_devices_agree(name, numbers):
    """A replica a device, two a device and all on one give the same three steps.

    A layout is a matter of `gossip` alone, so what it can do to a method is shown by these four.
    """
    x = stacked()
    if name == "choco":  # it begins with equal replicas
        x = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), x)

    def steps(form, devices):
        tx = build(name, numbers, axis_name=harness.axis_of(form))
        params, state = x, jax.vmap(tx.init)(x)
        one = harness.on_stack(harness.step_of(tx, towards_zero, 0), form, N, devices)
        for _ in range(3):
            params, state = one(params, state, SPEED)
        return params

    alone, devices, blocks = steps("vmap", 1), steps("devices", N), steps("block", 4)
    for key in SHAPES:
        np.testing.assert_allclose(devices[key], alone[key], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(blocks[key], alone[key], rtol=2e-5, atol=2e-6)


# --- formats of messages --------------------------------------------------------------------------

WIRES = {"bfloat16": wire.BFloat16(), "int8": wire.Int8()}


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("dtype", WIRES)
def test_a_format_keeps_the_mean_and_reaches_consensus(dtype, guarded):
    """Differences of decoded arrays: the mean stays, and what is left is below a rounding."""
    schedule = topology.make("one_peer_exp", N)
    x = {k: a + 3 for k, a in stacked().items()}

    def mix(tree, key, r):
        finite = jnp.isfinite(tree["bias"]).all() if guarded else None
        return gossip.mix(tree, schedule, r, wire=WIRES[dtype], key=key, finite=finite)

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


def choco(schedule, compressor, gamma):
    options = {"identical_start": False, "compressor": compressor, "gamma": gamma}
    return optim.choco(optax.sgd(0.0), schedule, **options)


def gossiped(step, x, state, steps, key=0):
    """Stacked parameters after every step (steps, n, ...) of ``step(x, state, key)``."""

    def one(carry, key):
        carry = jax.vmap(step, (0, 0, None), axis_name="replica")(*carry, key)
        return carry, carry[0]

    keys = jax.random.split(jax.random.key(key), steps)
    return jax.jit(lambda x, state: jax.lax.scan(one, (x, state), keys)[1])(x, state)


def by_choco(tx, x, steps):
    """Parameters after every step without gradients."""
    step = harness.step_of(tx, lambda x, key: nothing(x), 0)
    return gossiped(step, x, jax.vmap(tx.init)(x), steps)


def test_naive_int8_stalls_where_choco_goes_on():
    """Sending rounded parameters leaves a rounding's worth; sending differences does not."""
    schedule = topology.make("bidirectional_ring", N)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(N, 30)) + 10, jnp.float32)

    def naive(x, state, key):
        return gossip.mix(x, schedule, 0, wire=wire.Int8(), key=key), state

    last = {
        "naive": gossiped(naive, x, jnp.zeros(N), 200)[-1],
        "choco": by_choco(choco(schedule, wire.Int8(), 0.8), x, 200)[-1],
    }
    for now in last.values():
        np.testing.assert_allclose(now.mean(0), x.mean(0), atol=1e-3)
    left = {name: np.abs(now - now.mean(0, keepdims=True)).max() for name, now in last.items()}
    assert left["naive"] > 1e-2 and left["choco"] < 1e-3


@pytest.mark.parametrize(
    ("compressor", "gamma"), [(wire.TopK(0.1), 0.2), (wire.RandomK(0.2), 0.1), (wire.Int8(), 0.5)]
)
def test_choco_reaches_consensus_on_the_mean(compressor, gamma):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 40)), jnp.float32)
    tx = choco(topology.make("bidirectional_ring", 4), compressor, gamma)
    wanted = np.broadcast_to(x.mean(0), x.shape)
    np.testing.assert_allclose(by_choco(tx, x, 2000)[-1], wanted, atol=1e-3)


def test_choco_gossip_of_the_notes(x64):
    """../shared/ALGORITHMS.md 4: top-1 of 3 on a ring of 4."""
    x = jnp.array([[4.0, 0, 1], [0, 8, 2], [1, 1, 12], [16, 2, 0]])
    tx = choco(topology.make("bidirectional_ring", 4), wire.TopK(0.3), 0.3)
    history = np.asarray(by_choco(tx, x, 100))
    mean = np.asarray(x.mean(0))
    np.testing.assert_allclose(history.mean(1), np.tile(mean, (100, 1)), rtol=1e-13)
    errors = np.abs(history - mean).max((1, 2))
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

    def after(n, x, state, steps):
        tx = build(name, n=n)
        step = jax.vmap(harness.step_of(tx, towards_zero, 0), axis_name="replica")
        state = jax.vmap(tx.init)(x) if state is None else state
        run = jax.jit(
            lambda *carry: jax.lax.scan(
                lambda c, _: (step(*c, SPEED[:n]), None), carry, length=steps
            )[0]
        )
        return run(x, state)

    x = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), stacked())
    x, state = replicas.resize(after(N, x, None, 3), 4)
    far = float(optax.tree.norm(x))
    x, _ = after(4, x, state, 400)
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
