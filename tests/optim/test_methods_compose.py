"""What every method declares that it sends, and that it composes: formats, layouts, another n."""

import functools
import math
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refuses

from decent_jax import gossip, optim, replicas, topology
from decent_jax.gossip import codecs, permute

# The ring of 8 is at the bound of D2, see test_methods.py.
pytestmark = pytest.mark.filterwarnings("ignore:d2 on bidirectional_ring")

N = 8
SHAPES = {"kernel": (2, 5), "scale": (7,), "bias": (3,)}
SCHEDULES = {"sparseloco": "complete", "diloco": "complete", "swarm": "hypercube"}
SCHEDULES |= {"push_sum": "random_out", "decentralized_adam": "one_peer_exp"}
NAMES = [name for name in harness.NAMES if name != "all_reduce"]
INNER = {"sgd": optax.sgd(0.01, momentum=0.9), "adam": optax.adam(0.01)}
INNER["accum_adam"] = optim.accum_adam(0.01)
CODED = {"choco": [{"numbers": {"fraction": 0.2}}, {"numbers": {"compressor": "int8"}}]}
CODED |= {"sparseloco": [{"numbers": {"density": 0.2, "chunk": 4}}]}
CODED |= {"swarm": [{}, {"codec": codecs.Lattice(8)}, {"codec": codecs.Lattice(16)}]}
VARIANTS = [(name, changes) for name in NAMES for changes in CODED.get(name, [{}])]


def schedule_of(name, n=N, numbers=None):
    schedule = topology.make(SCHEDULES.get(name, "bidirectional_ring"), n)
    return topology.repeat(schedule, harness.phases(name, numbers))


def parts(name, numbers=None, n=N, **changes):
    """Arguments of `harness.build` after the name."""
    given = {"inner": INNER[harness.optimizers_of(name)[0]], "learning_rate": 0.01}
    schedule = schedule_of(name, n, numbers)
    return {"schedule": schedule, "numbers": numbers or {}} | given | changes


def build(name, *args, **given):
    return harness.build(name, **parts(name, *args, **given))


@functools.cache
def stacked(n=N):
    rng = np.random.default_rng(0)
    return {key: jnp.asarray(rng.normal(size=(n, *s)), jnp.float32) for key, s in SHAPES.items()}


def towards_zero(x, speed):
    """The gradient, with a replica's own speed."""
    return jax.tree.map(lambda a: speed * a, x)


def all_towards_zero(xs, speed):
    """Of several methods, see `harness.together`."""
    return {name: towards_zero(x, speed) for name, x in xs.items()}


def nothing(x):
    return jax.tree.map(jnp.zeros_like, x)


SPEED = jnp.linspace(0.1, 0.8, N)


# --- steps without an update of one's own ---------------------------------------------------------


@pytest.mark.parametrize("name", harness.NAMES)
def test_a_replica_that_makes_no_update_is_only_mixed(name):
    """Its momentum does not move it, where it is inactive or its gradient is rejected.

    All replicas are equal, so that mixing moves nobody either.
    """
    tx, every_step = build(name), name == "d2"
    x = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), stacked())
    state = jax.vmap(tx.init)(x)

    @functools.partial(jax.vmap, axis_name="replica", in_axes=(0, 0, None, None))
    def step(x, state, speed, active):
        round = 0 if every_step else None
        grads = towards_zero(x, speed)
        updates, state = tx.update(grads, state, x, round=round, active=active)
        return optim.apply_updates(x, updates), state

    step = jax.jit(step)
    for _ in range(3):
        x, state = step(x, state, 0.1, True)
    for speed, active in ((0.1, False), (float("nan"), True)):
        after, _ = step(x, state, speed, active)
        for key in x:
            np.testing.assert_allclose(after[key], x[key], rtol=1e-6)
    assert all(abs(x[key] - stacked()[key][:1]).max() > 1e-4 for key in x)


# --- what is sent --------------------------------------------------------------------------------

WIDTH = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "u16": 2, "pred": 1}


def sent(text, kind):
    """[(dtype, size)] of the arrays that the collectives of a kind send."""
    found = re.findall(rf"= (.*?) {kind}(?:-start)?\(", text)
    shapes = [pair for types in found for pair in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", types)]
    return [(dtype, math.prod(int(k) for k in shape.split(",") if k)) for dtype, shape in shapes]


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_hlo_sends_what_is_declared(name, changes, monkeypatch):
    """Bytes to a neighbour in a round, read off the compiled step; nothing else travels."""
    monkeypatch.setattr(permute, "SMALL", 0)  # scalars apart from arrays
    tx, x, numbers = build(name, **changes), stacked(), changes.get("numbers", {})
    phases = harness.phases(name, numbers)
    text = ""  # of the rounds that the method treats differently
    for r in range(phases):
        step = harness.on_stack(harness.step_of(tx, towards_zero, r), "devices", N, N)
        text += step.lower(x, jax.eval_shape(jax.vmap(tx.init), x), SPEED).compile().as_text()
    gathered_by_all = name == "sparseloco"
    gathers = [] if gathered_by_all else ["all-gather"]
    for kind in (*gathers, "all-to-all", "reduce-scatter"):
        assert f" {kind}(" not in text
    messages, sums = sent(text, "collective-permute"), sent(text, "all-reduce")
    own = jax.tree.map(lambda a: a[0], x)
    given = parts(name, **changes)
    declared = phases * harness.message_bytes(name, own, **given)
    one = schedule_of(name).rounds[0]
    if gathered_by_all:  # each sends its own part of what all have in the end to N - 1 others
        gathered = sum(WIDTH[dtype] * size for dtype, size in sent(text, "all-gather"))
        assert not messages and not sums
        assert gathered / N * (N - 1) == harness.bytes_sent(name, own, **given)
        return
    if one.group_size > 1:  # a mean of all: one all-reduce an array
        assert not messages
        assert sum(WIDTH[dtype] * size for dtype, size in sums if size > 1) == declared
        return
    assert not sums
    # Flags, weights, checksums and sides of a lattice are scalars; so is what top-k keeps of 3.
    coded = name == "choco"
    scalars = 0 if coded else 1
    total = sum(WIDTH[dtype] * size for dtype, size in messages if size > scalars)
    if coded and numbers.get("compressor") != "int8":
        total -= [dtype for dtype, _ in messages].count("pred")
    assert total == declared * len(one.sends)


def test_bytes_a_step():
    """Declared bytes, times messages of the schedule, over the steps between two rounds."""
    x = jax.tree.map(lambda a: a[0], stacked())  # 20 numbers

    def sent(name, *args, **given):
        return harness.bytes_sent(name, x, **parts(name, *args, **given))

    assert sent("gradient_tracking", mix_every=4) == 2 * 2 * 80 / 4
    assert sent("diloco", {"fragments": 2}) == 80 / 2 * 2 * 7 / 8
    assert sent("decentralized_adam", codec=codecs.BFloat16()) == 40
    assert sent("swarm", codec=codecs.Lattice(8)) == 20
    # 7 / 4 models in every step, over whatever schedule.
    given = parts("decentralized_adam", mix_every=4)
    assert harness.bytes_sent("all_reduce", x, **given) == 80 * 7 / 4


def test_bytes_of_narrow_and_of_empty_arrays():
    x = {"a": jnp.zeros((3, 4), jnp.bfloat16), "none": jnp.zeros((0, 3))}
    for name, number in (("decentralized_adam", 24), ("swarm", 24), ("choco", 8)):
        assert harness.message_bytes(name, x, **parts(name)) == number
    assert harness.message_bytes("swarm", x, **parts("swarm", codec=codecs.Lattice(8))) == 12
    assert harness.bytes_sent("sparseloco", x, **parts("sparseloco")) > 0


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_is_declared(name):
    own = jax.tree.map(lambda a: a[0], stacked())
    state = jax.eval_shape(build(name).init, own)
    kept = sum(leaf.size for leaf in jax.tree.leaves(harness.own(state)) if leaf.ndim) / 20
    assert kept == optim.METHODS[name].copies


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_coded_messages_do_not_depend_on_the_layout():
    """Two replicas a device and all on one give the same three steps: messages coded by a key and
    the replica's number, and in pairs. test_methods has the others."""
    coded = {"choco": CODED["choco"][1], "swarm": {"codec": codecs.Lattice(8)}}
    coded["sparseloco"] = {"numbers": {"density": 0.5, "chunk": 4}}
    own = stacked()["kernel"]
    equal = jnp.broadcast_to(own[:1], own.shape)  # as choco and sparseloco begin

    def steps(form, devices):
        axis_name = harness.axis_of(form)
        tx = harness.together({k: build(k, **v, axis_name=axis_name) for k, v in coded.items()})
        params = {"choco": equal, "swarm": own, "sparseloco": equal}
        state = jax.jit(jax.vmap(tx.init))(params)
        one = harness.on_stack(harness.step_of(tx, all_towards_zero, 0), form, N, devices)
        for _ in range(3):
            params, state = one(params, state, SPEED)
        return params

    alone, blocks = steps("vmap", 1), steps("block", 4)
    for name, x in alone.items():
        np.testing.assert_allclose(blocks[name], x, rtol=2e-5, atol=2e-6, err_msg=name)


# --- formats of messages --------------------------------------------------------------------------

CODECS = {"bfloat16": codecs.BFloat16(), "int8": codecs.Int8()}


def test_a_format_keeps_the_mean_and_reaches_consensus():
    """Differences of decoded arrays: the mean stays, and what is left is below a rounding."""
    schedule = topology.make("bidirectional_ring", N)
    x = {k: a + 3 for k, a in stacked().items()}

    def mixed(forms, state, key):
        out = {}
        for (dtype, guarded), tree in forms.items():
            finite = jnp.isfinite(tree["bias"]).all() if guarded else None
            options = {"codec": CODECS[dtype], "key": key, "finite": finite}
            out[dtype, guarded] = gossip.mix(tree, schedule, 0, **options)
        return out, state

    forms = {(dtype, guarded): x for dtype in CODECS for guarded in (False, True)}
    last = jax.tree.map(lambda a: a[-1], gossiped(mixed, forms, jnp.zeros(N), 60))
    for (dtype, guarded), now in last.items():
        for key, leaf in now.items():
            message = f"{dtype} {guarded} {key}"
            np.testing.assert_allclose(leaf.mean(0), x[key].mean(0), atol=2e-5, err_msg=message)
            spread = np.abs(leaf - leaf.mean(0, keepdims=True)).max()
            limit = 2**-7 if dtype == "bfloat16" else 2 / 127
            assert spread < limit * np.abs(x[key]).max(), message


def choco(schedule, compressor, gamma):
    options = {"same_init": False, "compressor": compressor, "gamma": gamma}
    return optim.contrib.choco(optax.sgd(0.0), schedule, **options)


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


def test_choco_reaches_consensus_on_the_mean():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 40)), jnp.float32)
    ring = topology.make("bidirectional_ring", 4)
    kinds = {"top_k": 0.2, "int8": 0.5}
    txs = {compressor: choco(ring, compressor, gamma) for compressor, gamma in kinds.items()}
    history = by_choco(harness.together(txs), dict.fromkeys(txs, x), 2000)
    wanted = np.broadcast_to(x.mean(0), x.shape)
    for kind, xs in history.items():
        np.testing.assert_allclose(xs[-1], wanted, atol=1e-3, err_msg=kind)


# --- another number of replicas -------------------------------------------------------------------


@pytest.mark.slow
def test_every_method_goes_on_with_another_number_of_replicas():
    """`replicas.resize` makes all equal, parameters and state, and the methods go on."""

    def after(n, steps, x, state=None):
        tx = harness.together({name: build(name, n=n) for name in NAMES})
        step = jax.vmap(harness.step_of(tx, all_towards_zero, 0), axis_name="replica")
        state = jax.jit(jax.vmap(tx.init))(x) if state is None else state

        @jax.jit
        def run(*carry):
            return jax.lax.scan(lambda c, _: (step(*c, SPEED[:n]), None), carry, length=steps)[0]

        return run(x, state)

    x = jnp.broadcast_to(stacked()["kernel"][:1], (N, 2, 5))
    x, state = jax.jit(replicas.resize, static_argnums=1)(after(N, 3, dict.fromkeys(NAMES, x)), 4)
    far, (x, _) = {name: optax.tree.norm(x[name]) for name in NAMES}, after(4, 400, x, state)
    for name in NAMES:
        assert optax.tree.norm(x[name]) < 0.6 * far[name], name


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

    run = jax.jit(jax.vmap(both, (0, 0, None), axis_name="replica"))
    by_number, by_matrix = run(x, finite, matrix)
    for key in SHAPES:
        np.testing.assert_allclose(by_matrix[key], by_number[key], rtol=1e-6, atol=1e-6)


def test_a_matrix_is_refused_on_devices():
    simulated = gossip.Simulated(0, jnp.eye(N))
    mix = functools.partial(gossip.mix, schedule=schedule_of("choco"), round=simulated)
    with refuses("Simulated", "jax.vmap"):
        harness.on_stack(mix, "devices", N, N)(jnp.ones((N, 2)))
