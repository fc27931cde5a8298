"""What a compiled training step communicates, read off its HLO and its jaxpr."""

import re
from math import prod

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives, pairs_of
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_equal

from decent_jax import gossip, optim, topology
from decent_jax.cpu import gloo
from decent_jax.gossip import permute
from decent_jax.gossip.codecs import BFloat16, Int8

# Sizes that nothing else in the step has, so that a message is known by its size.
SHAPES = {"bias": (3,), "kernel": (2, 5), "scale": (7,)}
SIZES = sorted(prod(shape) for shape in SHAPES.values())
pytestmark = pytest.mark.usefixtures("users_hlo")


@pytest.fixture(autouse=True)
def arrays_apart(monkeypatch):
    """Each array is a message of its own, however small, but in the tests of packing."""
    monkeypatch.setattr(permute, "SMALL", 0)


def groups_of(line, devices):
    """The groups of an all-reduce, in any of the forms in which XLA prints them."""
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[\d+\]", line):
        shape = [int(n) for n in match[1].split(",")]
        return np.arange(devices).reshape(shape).tolist()
    if "replica_groups=mesh['replica'=8] {'replica'}" in line:
        return [list(range(devices))]
    inside = re.search(r"replica_groups=\{(.*?\})\}", line)[1]
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", inside)]


def loss(params, batch):
    gaps = jax.tree.map(lambda x: jnp.mean(jnp.square(x)) * batch.sum(), params)
    return sum(jax.tree.leaves(gaps))


def step_of(tx, round):
    """A whole training step of one replica: gradient of a quadratic, update, new parameters."""
    return harness.step_of(tx, jax.value_and_grad(loss), round, has_value=True)


def on_mesh(step, check_vma=True):
    return harness.on_stack(step, "devices", 8, 8, check_vma)


def arguments(tx, n=8):
    params = {key: jax.ShapeDtypeStruct((n, *shape), jnp.float32) for key, shape in SHAPES.items()}
    return params, jax.eval_shape(jax.vmap(tx.init), params), jnp.zeros((n, 11))


def compiled_step(tx, round, check_vma=True):
    step = on_mesh(step_of(tx, round), check_vma)
    return collectives(step.lower(*arguments(tx)).compile().as_text())


def messages(found, kind):
    """Sizes of the arrays (flags and losses apart: they are scalars) sent by a kind."""
    return sorted(size for k, sizes, _ in found if k == kind for size in sizes if size > 1)


INNER = optim.accum_adamw(1e-3, weight_decay=0.1, accum_steps=4)


# A whole step in one round of each order; all rounds of all schedules follow without a step.
@pytest.mark.parametrize(
    ("name", "round", "combine"), [("bidirectional_ring", 0, "awc"), ("one_peer_exp", 2, "atc")]
)
def test_permutation_round(name, round, combine):
    schedule = topology.make(name, 8)
    found = compiled_step(optim.decentralized(INNER, schedule, combine), round)
    degree = schedule.degree(round)
    assert {kind for kind, _, _ in found} == {"collective-permute"}
    assert messages(found, "collective-permute") == sorted(SIZES * degree)
    flags = [sizes for _, sizes, _ in found if sizes == [1]]
    assert len(flags) <= degree
    wanted = [edges(send.sources) for send in schedule.rounds[round].sends]
    for size in SIZES:
        sent = [pairs_of(line) for _, sizes, line in found if sizes == [size]]
        assert sorted(map(sorted, sent)) == sorted(map(sorted, wanted))


def declared(one, size):
    """[(kind, size of the result, its pairs or groups)] of one array of ``size`` in a round."""
    g = one.group_size
    groups = np.arange(len(one.matrix)).reshape(-1, g).tolist()
    sources = [send.sources for send in one.sends]
    if one.between_groups is None:
        mean = [("all-reduce", size, groups)] if g > 1 else []
        return mean + [("collective-permute", size, sorted(edges(s))) for s in sources]
    shard = -(-size // g)
    # Member k of a group hears member k of another.
    like = [np.where(s >= 0, s // g * g + np.arange(len(s)) % g, -1) for s in sources]
    return [
        ("reduce-scatter", shard, groups),
        *(("collective-permute", shard, sorted(edges(s))) for s in like),
        ("all-gather", shard * g, groups),
    ]


def edges(sources):
    """{(source, target)} of a permutation."""
    return {(int(source), target) for target, source in enumerate(sources) if source >= 0}


OF_NODES = "alternating_exp_ring", "hierarchical", "hierarchical(ring, one_peer_exp)"


@pytest.mark.parametrize(
    ("name", "local"),
    [(name, 4) for name in (*topology.NAMES, OF_NODES[-1], "base_k(max_degree=2)")]
    + [(name, 2) for name in OF_NODES],
)
def test_every_round_sends_what_it_declares(name, local):
    """All rounds of a schedule in one executable, each with leaves of its own, and nothing else."""
    schedule = topology.make(name, 8, replicas_per_node=local)
    rounds = range(schedule.period)

    def every_round(trees):
        return [gossip.mix(trees[r], schedule, r) for r in rounds]

    # No two alike, nor any two parts of them, so a message is known by its size.
    sizes = {r: (41 + 4 * r, 1001 + 4 * r) for r in rounds}
    trees = [[jnp.zeros((8, size)) for size in sizes[r]] for r in rounds]
    step = on_mesh(every_round, check_vma=False)
    found = collectives(step.lower(trees).compile().as_text())
    assert not [line for kind, _, line in found if kind == "conditional"]
    # XLA may put the means of several leaves into one all-reduce.
    sent = [
        (kind, size, sorted(pairs_of(line)) if "permute" in kind else groups_of(line, 8))
        for kind, sizes, line in found
        for size in sizes
    ]
    wanted = [
        message
        for r, one in enumerate(schedule.rounds)
        for size in sizes[r]
        for message in declared(one, size)
    ]
    assert sorted(sent) == sorted(wanted)


def test_a_mean_is_one_all_reduce_a_leaf():
    """Of all replicas, or of a node where a round has no messages."""
    everybody, nodes = [list(range(8))], np.arange(8).reshape(-1, 4).tolist()
    complete = optim.decentralized(INNER, topology.make("complete", 8))
    ring = topology.make("alternating_exp_ring", 8, replicas_per_node=4)
    assert not ring.rounds[0].sends
    for tx, groups, check_vma in (
        (complete, everybody, True),
        (optim.all_reduce(INNER), everybody, True),
        (optim.decentralized(INNER, ring), nodes, False),
    ):
        found = compiled_step(tx, 0, check_vma)
        assert {kind for kind, _, _ in found} == {"all-reduce"}
        assert messages(found, "all-reduce") == SIZES
        assert all(groups_of(line, 8) == groups for _, _, line in found)


def mixed_with(small, monkeypatch, schedule, round, **options):
    """(mixed arrays, {kind: sizes of messages}); arrays of up to ``small`` bytes go together."""
    monkeypatch.setattr(permute, "SMALL", small)
    rng = np.random.default_rng(0)
    tree = {key: rng.normal(size=(8, *shape)).astype(np.float32) for key, shape in SHAPES.items()}
    if not schedule.partial_groups:
        tree["half"] = rng.normal(size=(8, 4)).astype(jnp.bfloat16)
    step = on_mesh(lambda x: gossip.mix(x, schedule, round, **options), not schedule.partial_groups)
    compiled = step.lower(tree).compile()
    found = collectives(compiled.as_text())
    return compiled(tree), {kind: messages(found, kind) for kind, _, _ in found}


PLAIN = [3, 4, 7, 10], [4, 3 + 7, 10]  # the kernel has 40 bytes; bfloat16 travels apart
CODED = [3, 4, 7, 10, 2], [3 + 4 + 7 + 10, 5]  # codes of a byte, and the scales of all rows


@pytest.mark.parametrize(
    ("name", "codec", "wanted"),
    [
        ("one_peer_exp", None, PLAIN),
        ("bidirectional_ring", None, PLAIN),
        ("one_peer_exp", Int8(), CODED),
    ],
)
def test_small_arrays_of_a_dtype_are_one_message(name, codec, wanted, monkeypatch):
    """A message a neighbour for all of them, and the same numbers."""
    schedule, options = topology.make(name, 8), {"codec": codec, "key": jax.random.key(0)}
    (apart, sizes), (together, packed) = (
        mixed_with(small, monkeypatch, schedule, 0, **options) for small in (0, 40)
    )
    for sent, sizes_wanted in zip((sizes, packed), wanted, strict=True):
        assert sent == {"collective-permute": sorted(sizes_wanted * schedule.degree(0))}
    assert_equal(apart, together)


def test_small_arrays_of_nodes_are_one_message(monkeypatch):
    """Of each stage: the kernel, and bias and scale together; over gloo all three."""
    schedule = topology.make("alternating_exp_ring", 8, replicas_per_node=2)
    (apart, sizes), (together, packed) = (
        mixed_with(small, monkeypatch, schedule, 1) for small in (0, 40)
    )
    kinds = ("reduce-scatter", "collective-permute", "all-gather")
    assert [sizes[kind] for kind in kinds] == [[2, 4, 5], [2, 4, 5], [4, 8, 10]]
    assert [packed[kind] for kind in kinds] == [[5, 5], [5, 5], [10, 10]]
    monkeypatch.setattr(gloo, "used", lambda: True)
    all_together, one = mixed_with(0, monkeypatch, schedule, 1)
    assert [one[kind] for kind in kinds] == [[10], [10], [20]]
    assert_equal(apart, together)
    assert_equal(apart, all_together)


def test_a_bfloat16_travels_as_two_bytes():
    schedule = topology.make("one_peer_exp", 8)
    step = on_mesh(lambda x: gossip.mix(x, schedule, 1, codec=BFloat16()))
    text = step.lower(jnp.zeros((8, 11))).compile().as_text()
    (_, sizes, line) = next(found for found in collectives(text) if found[1] != [1])
    assert sizes == [11] and "= u16[" in line


def test_a_step_moves_parts_between_nodes():
    """Reduce-scatter in the node, permutes of the parts, all-gather in the node; but for flags."""
    schedule = topology.make("alternating_exp_ring", 8, replicas_per_node=2)
    found = compiled_step(optim.decentralized(INNER, schedule), 1, check_vma=False)
    one = schedule.rounds[1]
    wanted = sorted(message for size in SIZES for message in declared(one, size))
    sent = sorted(
        (kind, size, sorted(pairs_of(line)) if "permute" in kind else groups_of(line, 8))
        for kind, sizes, line in found
        for size in sizes
    )
    # A flag beside the mix: how many members are finite, and whether any is in the other group.
    nodes = np.arange(8).reshape(-1, 2).tolist()
    flags = [("all-reduce", 1, nodes), declared(one, 1)[1]]
    assert sent == sorted(wanted + flags)


def test_round_none_communicates_nothing():
    for combine in ("awc", "atc"):
        tx = optim.decentralized(INNER, topology.make("ring", 8), combine)
        jaxpr = jax.make_jaxpr(on_mesh(step_of(tx, None)))(*arguments(tx))
        assert not re.search(r"\b(ppermute|psum|all_gather|reduce_scatter)", str(jaxpr))


def test_replica_sharded_over_fsdp():
    """The mix moves shards: nothing is gathered where a replica is larger than a device."""
    mesh = jax.make_mesh((4, 2), ("replica", "fsdp"), (AxisType.Auto,) * 2)
    schedule = topology.make("one_peer_exp", 4)
    sharding = NamedSharding(mesh, P("replica", None, "fsdp"))

    def compiled(guarded):
        def body(x):
            ok = jnp.isfinite(x).all() if guarded else None
            return gossip.mix(x[0], schedule, 1, finite=ok)[None]

        step = jax.shard_map(
            body, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), axis_names={"replica"}
        )
        x = jax.ShapeDtypeStruct((4, 6, 4), jnp.float32, sharding=sharding)
        return jax.jit(step).lower(x).compile()

    executable = compiled(guarded=False)
    found = collectives(executable.as_text())
    assert [(kind, sizes) for kind, sizes, _ in found] == [("collective-permute", [6 * 4 // 2])]
    assert executable.output_shardings.is_equivalent_to(sharding, 3)
    # Devices 2 i and 2 i + 1 hold replica i; each shard goes to its own counterpart.
    wanted = {(2 * ((i - 2) % 4) + j, 2 * i + j) for i in range(4) for j in range(2)}
    assert pairs_of(found[0][2]) == wanted
    x = np.arange(96, dtype=np.float32).reshape(4, 6, 4)
    mixed = np.einsum("ij,j...->i...", schedule.matrix(1), x)
    np.testing.assert_array_equal(executable(jax.device_put(x, sharding)), mixed)

    # With the flag: one more permute, and an "and" inside the replica, both of scalars.
    executable = compiled(guarded=True)
    found = collectives(executable.as_text())
    assert {kind for kind, _, _ in found} == {"collective-permute", "all-reduce"}
    assert messages(found, "collective-permute") == [12] and not messages(found, "all-reduce")
    # A bad number in one shard makes both shards of replica 1 bad: it hears 3, and 3 does not.
    bad = x.copy()
    bad[1, 5, 3] = np.nan
    mixed[[1, 3]] = x[3]
    np.testing.assert_array_equal(executable(jax.device_put(bad, sharding)), mixed)


# --- what a message waits for ---------------------------------------------------------------------


MESSAGES = ("ppermute", "psum", "psum_invariant", "reduce_scatter", "all_gather")


def sends_that_depend(jaxpr, tainted):
    """Follows ``tainted`` (a bool an input) through a jaxpr.

    Returns the taint of its outputs, and for every message of more than a scalar whether what it
    sends is tainted.
    """
    taint = dict(zip(jaxpr.invars, tainted, strict=True))

    def is_tainted(atom):
        return taint.get(atom, False) if isinstance(atom, jex.Var) else False

    sends = []
    for eqn in jaxpr.eqns:
        given = [is_tainted(atom) for atom in eqn.invars]
        kinds = (jex.Jaxpr, jex.ClosedJaxpr)
        inner = [getattr(p, "jaxpr", p) for p in eqn.params.values() if isinstance(p, kinds)]
        if len(inner) == 1 and len(inner[0].invars) == len(given):
            out, more = sends_that_depend(inner[0], given)
            sends += more
        else:
            assert not inner, f"{eqn.primitive} holds a jaxpr that this test does not follow"
            out = [any(given)] * len(eqn.outvars)
            if eqn.primitive.name in MESSAGES:
                is_message = max(prod(atom.aval.shape) for atom in eqn.invars) > 1
                sends += [any(given)] if is_message else []
        taint.update(zip(eqn.outvars, out, strict=True))
    return [is_tainted(atom) for atom in jaxpr.outvars], sends


def analyse(tx, **options):
    """`sends_that_depend` of a step, on more than its parameters."""
    args = arguments(tx)
    jaxpr = jax.make_jaxpr(on_mesh(step_of(tx, 0), **options))(*args).jaxpr
    params, state, batch = (len(jax.tree.leaves(arg)) for arg in args)
    return sends_that_depend(jaxpr, [False] * params + [True] * (state + batch))


def test_the_last_stage_of_nodes_waits_for_the_gradient():
    """Parts travel between nodes while it is computed; only then they are gathered inside."""
    schedule = topology.make("hierarchical", 8, replicas_per_node=4)
    out, sends = analyse(optim.decentralized(INNER, schedule, "awc"), check_vma=False)
    # Reduce-scatter, permute, all-gather; but a quarter of the bias is a scalar.
    assert any(out) and sends == [False] + [False, False, True] * 2


@pytest.mark.parametrize("name", ["one_peer_exp", "bidirectional_ring", "complete"])
def test_with_sends_old_parameters_only(name):
    """A message of "awc" does not wait for the batch, so it may overlap the whole step."""
    schedule = topology.make(name, 8)

    out, sends = analyse(optim.decentralized(INNER, schedule, "awc"))
    assert any(out)  # the new parameters do depend on the batch
    assert sends == [False] * (len(SHAPES) * max(1, len(schedule.rounds[0].sends)))
    out, sends = analyse(optim.decentralized(INNER, schedule, "atc"))
    assert any(out) and sends == [True] * (len(SHAPES) * max(1, len(schedule.rounds[0].sends)))
    out, sends = analyse(optim.all_reduce(INNER))
    assert sends == [True] * len(SHAPES)


def test_a_step_grows_with_the_number_of_arrays_not_with_its_square():
    """Flags of all arrays are not computed again in the update of each."""
    tx = optim.decentralized(INNER, topology.make("one_peer_exp", 8))

    def instructions(leaves):
        params = {f"w{k}": jax.ShapeDtypeStruct((8, 4, 3), jnp.float32) for k in range(leaves)}
        state = jax.eval_shape(jax.vmap(tx.init), params)
        step = jax.vmap(step_of(tx, 0), axis_name="replica")
        return len(jax.jit(step).lower(params, state, jnp.zeros((8, 11))).compile().as_text())

    assert instructions(16) < 2.6 * instructions(8)


@pytest.mark.parametrize("name", ["complete", "star", "hierarchical"])
def test_a_round_on_one_device_grows_with_its_messages_not_with_the_replicas(name):
    def lines_a_message(n):
        schedule = topology.make(name, n, replicas_per_node=2)

        def mix(x, finite):
            return gossip.mix(x, schedule, 0, "replica", finite=finite)

        shapes = (jax.ShapeDtypeStruct((n, 4, 3), jnp.float32), jax.ShapeDtypeStruct((n,), bool))
        program = jax.jit(jax.vmap(mix, axis_name="replica")).lower(*shapes).compile()
        return program.as_text().count("\n") / max(1, len(schedule.rounds[0].sends))

    assert lines_a_message(32) < 1.3 * lines_a_message(8)
