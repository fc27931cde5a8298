"""What a compiled training step communicates, read off its HLO and its jaxpr."""

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from decent_jax import gossip, optim, topology
from decent_jax.gossip import permute
from decent_jax.gossip.wire import BFloat16, Int8

# Sizes that nothing else in the step has, so that a message is known by its size.
SHAPES = {"bias": (3,), "kernel": (2, 5), "scale": (7,)}
SIZES = sorted(prod(shape) for shape in SHAPES.values())
KINDS = (
    "collective-permute",
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-broadcast",
    "conditional",
)


@pytest.fixture(autouse=True)
def arrays_apart(monkeypatch):
    """Each array is a message of its own, however small, but in the tests of packing."""
    monkeypatch.setattr(permute, "SMALL", 0)


def collectives(text):
    """[(kind, [size of each array], line)] of the collectives (and branches) of an HLO module."""
    found = []
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
        if match:
            shapes = re.findall(r"\b[a-z]+[0-9]*\[([0-9,]*)\]", match[1])
            sizes = [prod(int(n) for n in shape.split(",") if n) for shape in shapes]
            found.append((match[2], sizes, line))
    return found


def pairs_of(line):
    """{(source, target)} of a collective-permute."""
    inside = re.search(r"source_target_pairs=\{(.*?)\}\}", line)[1]
    return {tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", inside)}


def groups_of(line, devices):
    """The groups of an all-reduce, in any of the forms in which XLA prints them."""
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[\d+\]", line):
        shape = [int(n) for n in match[1].split(",")]
        return np.arange(devices).reshape(shape).tolist()
    if "replica_groups=mesh['replica'=8] {'replica'}" in line:
        return [list(range(devices))]
    inside = re.search(r"replica_groups=\{(.*?\})\}", line)[1]
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", inside)]


def step_of(tx, round):
    """A whole training step of one replica: gradient of a quadratic, update, new parameters."""

    def step(params, state, batch):
        def loss(params):
            gaps = jax.tree.map(lambda x: jnp.mean(jnp.square(x)) * batch.sum(), params)
            return sum(jax.tree.leaves(gaps))

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, round=round, value=value)
        return optim.apply_updates(params, updates), state

    return step


def on_mesh(step, mesh, check_vma=True):
    def body(*args):
        own = step(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], own)

    return jax.shard_map(
        body, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=check_vma
    )


def arguments(tx, n=8):
    params = {key: jax.ShapeDtypeStruct((n, *shape), jnp.float32) for key, shape in SHAPES.items()}
    return params, jax.eval_shape(jax.vmap(tx.init), params), jnp.zeros((n, 11))


def compiled_step(tx, round, mesh, check_vma=True):
    step = jax.jit(on_mesh(step_of(tx, round), mesh, check_vma))
    return collectives(step.lower(*arguments(tx)).compile().as_text())


def messages(found, kind):
    """Sizes of the arrays (flags and losses apart: they are scalars) sent by a kind."""
    return sorted(size for k, sizes, _ in found if k == kind for size in sizes if size > 1)


INNER = optim.accum_adamw(1e-3, weight_decay=0.1, accum_steps=4)
PERMUTATIONS = [
    (name, r)
    for name, period in (
        ("ring", 2),
        ("bidirectional_ring", 1),
        ("one_peer_exp", 3),
        ("hypercube", 3),
        ("static_exp", 1),
    )
    for r in range(period)
]


@pytest.mark.parametrize(("name", "round"), PERMUTATIONS)
def test_permutation_round(name, round, mesh8):
    schedule = topology.make(name, 8)
    found = compiled_step(optim.decentralized(INNER, schedule), round, mesh8)
    degree = schedule.degree(round)
    assert {kind for kind, _, _ in found} == {"collective-permute"}
    assert messages(found, "collective-permute") == sorted(SIZES * degree)
    flags = [sizes for _, sizes, _ in found if sizes == [1]]
    assert len(flags) <= degree
    wanted = [
        {(int(source), target) for target, source in enumerate(send.sources)}
        for send in schedule.rounds[round].sends
    ]
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


@pytest.mark.parametrize("local", [2, 4])
@pytest.mark.parametrize(
    "name", [*topology.NAMES, "hierarchical(ring, one_peer_exp)", "base_k(max_degree=2)"]
)
def test_every_round_sends_what_it_declares(name, local, mesh8):
    """All rounds of a schedule in one executable, each with leaves of its own, and nothing else."""
    if local == 2 and not name.startswith(("alternating", "hierarchical")):
        return  # has no nodes
    schedule = topology.make(name, 8, local_size=local)
    rounds = range(schedule.period)

    def every_round(trees):
        own = jax.tree.map(lambda x: x[0], trees)
        mixed = [gossip.mix(own[r], schedule, r) for r in rounds]
        return jax.tree.map(lambda x: x[None], mixed)

    split = P("replica")
    step = jax.shard_map(every_round, mesh=mesh8, in_specs=split, out_specs=split, check_vma=False)
    # No two alike, nor any two parts of them, so a message is known by its size.
    sizes = {r: (41 + 4 * r, 1001 + 4 * r) for r in rounds}
    trees = [[jnp.zeros((8, size)) for size in sizes[r]] for r in rounds]
    found = collectives(jax.jit(step).lower(trees).compile().as_text())
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


@pytest.mark.parametrize("name", ["alternating_exp_ring", "hierarchical", "one_peer_exp"])
def test_bytes_between_nodes_are_what_the_round_says(name, mesh8):
    """Of the permutes' operands: one model a node and message with groups, local_size without."""
    local, size = 4, 1000
    schedule = topology.make(name, 8, local_size=local)

    def permuted(r, crosses):
        fn = jax.jit(on_mesh(lambda x: gossip.mix(x, schedule, r), mesh8, check_vma=False))
        text = fn.lower(jnp.zeros((8, size))).compile().as_text()
        sent = np.zeros(8 // local)
        for kind, sizes, line in collectives(text):
            for source, target in pairs_of(line) if kind == "collective-permute" else ():
                if source // local != target // local or not crosses:
                    sent[source // local] += sum(sizes)
        return sent.max() / size

    for r, one in enumerate(schedule.rounds):
        assert permuted(r, crosses=True) == one.models_sent_by_nodes(local)
    last = schedule.period - 1
    wanted = local if name == "one_peer_exp" else 1
    assert permuted(last, crosses=True) == permuted(last, crosses=False) == wanted


def test_permutation_round_then(mesh8):
    schedule = topology.make("one_peer_exp", 8)
    found = compiled_step(optim.decentralized(INNER, schedule, "then"), 2, mesh8)
    assert {kind for kind, _, _ in found} == {"collective-permute"}
    assert messages(found, "collective-permute") == SIZES


def test_complete_round_is_one_all_reduce_a_leaf(mesh8):
    schedule = topology.make("complete", 8)
    found = compiled_step(optim.decentralized(INNER, schedule), 0, mesh8)
    assert {kind for kind, _, _ in found} == {"all-reduce"}
    assert messages(found, "all-reduce") == SIZES
    assert all(groups_of(line, 8) == [list(range(8))] for _, _, line in found)


def test_all_reduce_is_one_all_reduce_a_leaf(mesh8):
    found = compiled_step(optim.all_reduce(INNER), 0, mesh8)
    assert {kind for kind, _, _ in found} == {"all-reduce"}
    assert messages(found, "all-reduce") == SIZES
    assert all(groups_of(line, 8) == [list(range(8))] for _, _, line in found)


@pytest.mark.parametrize("wire", [None, Int8()], ids=["float32", "int8"])
@pytest.mark.parametrize("name", ["one_peer_exp", "bidirectional_ring"])
def test_small_arrays_of_a_dtype_are_one_message(name, wire, mesh8, monkeypatch):
    """A message a neighbour for all of them, and the same numbers."""
    schedule = topology.make(name, 8)
    rng = np.random.default_rng(0)
    tree = {key: rng.normal(size=(8, *shape)).astype(np.float32) for key, shape in SHAPES.items()}
    tree["half"] = rng.normal(size=(8, 4)).astype(jnp.bfloat16)
    key = jax.random.key(0) if wire else None
    degree = schedule.degree(0)

    def mixed(small):
        monkeypatch.setattr(permute, "SMALL", small)
        step = on_mesh(lambda x: gossip.mix(x, schedule, 0, wire=wire, key=key), mesh8)
        compiled = jax.jit(step).lower(tree).compile()
        sizes = messages(collectives(compiled.as_text()), "collective-permute")
        return compiled(tree), sizes

    apart, sizes = mixed(0)
    together, packed = mixed(40)
    if wire is None:  # the kernel has 40 bytes; bfloat16 travels apart from float32
        assert sizes == sorted([3, 4, 7, 10] * degree)
        assert packed == sorted([4, 3 + 7, 10] * degree)
    else:  # codes of a byte, and the scales of all rows
        assert sizes == sorted([3, 4, 7, 10, 2] * degree)  # scalars are scales of vectors
        assert packed == sorted([3 + 4 + 7 + 10, 5] * degree)
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(together), strict=True):
        np.testing.assert_array_equal(one, other)


def test_small_arrays_of_nodes_are_one_message(mesh8, monkeypatch):
    """Of each stage: the kernel, and bias and scale together."""
    schedule = topology.make("alternating_exp_ring", 8, local_size=2)
    rng = np.random.default_rng(0)
    tree = {key: rng.normal(size=(8, *shape)).astype(np.float32) for key, shape in SHAPES.items()}

    def mixed(small):
        monkeypatch.setattr(permute, "SMALL", small)
        step = on_mesh(lambda x: gossip.mix(x, schedule, 1), mesh8, check_vma=False)
        compiled = jax.jit(step).lower(tree).compile()
        found = collectives(compiled.as_text())
        kinds = ("reduce-scatter", "collective-permute", "all-gather")
        return compiled(tree), [messages(found, kind) for kind in kinds]

    apart, sizes = mixed(0)
    together, packed = mixed(40)
    assert sizes == [[2, 4, 5], [2, 4, 5], [4, 8, 10]]
    assert packed == [[5, 5], [5, 5], [10, 10]]
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(together), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_bfloat16_travels_as_two_bytes(mesh8):
    schedule = topology.make("one_peer_exp", 8)
    step = on_mesh(lambda x: gossip.mix(x, schedule, 1, wire=BFloat16()), mesh8)
    text = jax.jit(step).lower(jnp.zeros((8, 11))).compile().as_text()
    (_, sizes, line) = next(found for found in collectives(text) if found[1] != [1])
    assert sizes == [11] and "= u16[" in line


@pytest.mark.parametrize(("local", "round"), [(2, 1), (2, 2), (4, 1)])
def test_a_step_moves_parts_between_nodes(local, round, mesh8):
    """Reduce-scatter in the node, permutes of the parts, all-gather in the node; but for flags."""
    schedule = topology.make("alternating_exp_ring", 8, local_size=local)
    found = compiled_step(optim.decentralized(INNER, schedule), round, mesh8, check_vma=False)
    one = schedule.rounds[round]
    wanted = sorted(message for size in SIZES for message in declared(one, size))
    sent = sorted(
        (kind, size, sorted(pairs_of(line)) if "permute" in kind else groups_of(line, 8))
        for kind, sizes, line in found
        for size in sizes
    )
    # A flag beside the mix: how many members are finite, and whether any is in the other group.
    nodes = np.arange(8).reshape(-1, local).tolist()
    flags = [("all-reduce", 1, nodes), declared(one, 1)[1]]
    assert sent == sorted(wanted + flags)


def test_a_mean_of_nodes_alone_is_an_all_reduce(mesh8):
    schedule = topology.make("alternating_exp_ring", 8, local_size=4)
    assert not schedule.rounds[0].sends
    found = compiled_step(optim.decentralized(INNER, schedule), 0, mesh8, check_vma=False)
    assert {kind for kind, _, _ in found} == {"all-reduce"}
    assert messages(found, "all-reduce") == SIZES
    nodes = np.arange(8).reshape(-1, 4).tolist()
    assert all(groups_of(line, 8) == nodes for _, _, line in found)


@pytest.mark.parametrize("combine", ["with", "then"])
def test_round_none_communicates_nothing(combine, mesh8):
    tx = optim.decentralized(INNER, topology.make("ring", 8), combine, gamma=0.5)
    assert compiled_step(tx, None, mesh8) == []


def test_init_communicates_nothing(mesh8):
    tx = optim.decentralized(INNER, topology.make("complete", 8))
    init = jax.jit(on_mesh(lambda params: tx.init(params), mesh8, check_vma=False))
    assert collectives(init.lower(arguments(tx)[0]).compile().as_text()) == []


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


def sends_that_depend(jaxpr, tainted):
    """Follows ``tainted`` (a bool an input) through a jaxpr.

    Returns the taint of its outputs, and for every ppermute and psum of more than a scalar whether
    what it sends is tainted.
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
            if eqn.primitive.name in ("ppermute", "psum", "psum_invariant"):
                is_message = max(prod(atom.aval.shape) for atom in eqn.invars) > 1
                sends += [any(given)] if is_message else []
        taint.update(zip(eqn.outvars, out, strict=True))
    return [is_tainted(atom) for atom in jaxpr.outvars], sends


@pytest.mark.parametrize("name", ["one_peer_exp", "bidirectional_ring", "complete"])
def test_with_sends_old_parameters_only(name, mesh8):
    """A message of "with" does not wait for the batch, so it may overlap the whole step."""
    schedule = topology.make(name, 8)

    def analyse(tx):
        args = arguments(tx)
        jaxpr = jax.make_jaxpr(on_mesh(step_of(tx, 0), mesh8))(*args).jaxpr
        params, state, batch = (len(jax.tree.leaves(arg)) for arg in args)
        # Neither the batch nor the optimizer's state: parameters alone.
        return sends_that_depend(jaxpr, [False] * params + [True] * (state + batch))

    out, sends = analyse(optim.decentralized(INNER, schedule, "with"))
    assert any(out)  # the new parameters do depend on the batch
    assert sends == [False] * (len(SHAPES) * max(1, len(schedule.rounds[0].sends)))
    out, sends = analyse(optim.decentralized(INNER, schedule, "then"))
    assert any(out) and sends == [True] * (len(SHAPES) * max(1, len(schedule.rounds[0].sends)))
    out, sends = analyse(optim.all_reduce(INNER))
    assert sends == [True] * len(SHAPES)


def test_with_sends_the_parameters_as_they_came(mesh8):
    """In the compiled step the operand of the permute is an input of the program."""
    schedule = topology.make("one_peer_exp", 8)

    def operands(combine):
        tx = optim.decentralized(INNER, schedule, combine, gamma=0.5)
        found = compiled_step(tx, 0, mesh8)
        lines = [line for _, sizes, line in found if sizes != [1]]
        return [re.search(r"collective-permute\(.*?%([\w.-]+)\)", line)[1] for line in lines]

    assert all(name.startswith("param") for name in operands("with"))
    assert not any(name.startswith("param") for name in operands("then"))


def test_a_step_grows_with_the_number_of_arrays_not_with_its_square():
    """Flags of all arrays are not computed again in the update of each."""
    tx = optim.decentralized(INNER, topology.make("one_peer_exp", 8))

    def instructions(leaves):
        params = {f"w{k}": jax.ShapeDtypeStruct((8, 4, 3), jnp.float32) for k in range(leaves)}
        state = jax.eval_shape(jax.vmap(tx.init), params)
        step = jax.vmap(step_of(tx, 0), axis_name="replica")
        return len(jax.jit(step).lower(params, state, jnp.zeros((8, 11))).compile().as_text())

    assert instructions(48) < 2.6 * instructions(24)


@pytest.mark.parametrize("name", topology.NAMES)
def test_a_round_on_one_device_grows_with_its_messages_not_with_the_replicas(name):
    def lines_a_message(n):
        schedule = topology.make(name, n, local_size=2)

        def mix(x, finite):
            return gossip.mix(x, schedule, 0, "replica", finite=finite)

        shapes = (jax.ShapeDtypeStruct((n, 4, 3), jnp.float32), jax.ShapeDtypeStruct((n,), bool))
        program = jax.jit(jax.vmap(mix, axis_name="replica")).lower(*shapes).compile()
        return program.as_text().count("\n") / max(1, len(schedule.rounds[0].sends))

    assert lines_a_message(64) < 1.3 * lines_a_message(16)
