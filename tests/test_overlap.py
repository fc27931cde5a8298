"""Gossip over gloo: pairs as sums, and the step in three parts; here in one process of 8 devices.

That the same runs in processes of their own is in test_multiprocess.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_hlo import collectives

from decent_jax import gossip, optim, replicas, topology
from decent_jax.cpu import overlap, pair_sums
from decent_jax.data import loader
from decent_jax.train import algorithm, executables
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib

pytestmark = pytest.mark.usefixtures("compile_once")

DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8, jnp.int32, bool)
INVOLUTIONS = ([1, 0, 3, 2, 5, 4, 7, 6], [4, 5, 6, 7, 0, 1, 2, 3], [7, 6, 5, 4, 3, 2, 1, 0])


@pytest.fixture
def as_if_over_gloo(monkeypatch):
    monkeypatch.setattr(pair_sums, "over_gloo", lambda: True)


def drawn(dtype, shape, rng):
    """Every bit pattern may come, but no NaN of bfloat16, whose bits even ppermute changes."""
    if dtype is bool:
        return jnp.asarray(rng.random(shape) < 0.5)
    bits = rng.bytes(int(np.prod(shape)) * jnp.dtype(dtype).itemsize)
    if dtype is jnp.bfloat16:
        words = np.frombuffer(bits, np.uint16)
        bits = np.where(words & 0x7F80 == 0x7F80, words & 0xFF80, words).tobytes()
    return jnp.asarray(np.frombuffer(bits, jnp.dtype(dtype)).reshape(shape))


def bits_of(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("partners", INVOLUTIONS)
def test_a_swap_is_a_permutation_bit_for_bit(partners, mesh8):
    rng = np.random.default_rng(sum(partners[:2]))
    shapes = [(8,), (8, 1), (8, 3), (8, 2, 5)]
    x = {f"{np.dtype(d)}{s}": drawn(d, s, rng) for d in DTYPES for s in shapes}
    pairs = [(source, device) for device, source in enumerate(partners)]

    def both(x):
        swapped = jax.tree.map(lambda x: pair_sums.swap(x, pairs, "replica"), x)
        return swapped, jax.tree.map(lambda x: jax.lax.ppermute(x, "replica", pairs), x)

    run = jax.shard_map(
        both, mesh=mesh8, in_specs=P("replica"), out_specs=P("replica"), check_vma=False
    )
    swapped, permuted = jax.jit(run)(x)
    for name, wanted in permuted.items():
        got = swapped[name]
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(bits_of(got), bits_of(wanted), err_msg=name)
        np.testing.assert_array_equal(bits_of(got), bits_of(np.asarray(x[name])[partners]), name)


@pytest.mark.parametrize(
    ("name", "local_size", "sums"),
    [("hypercube", 1, 3), ("one_peer_exp", 1, 1), ("ring", 1, 2), ("bidirectional_ring", 1, 0)],
)
def test_only_rounds_of_pairs_are_sums(name, local_size, sums, mesh8, as_if_over_gloo):
    schedule = topology.make(name, 8, local_size=local_size)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 5, 3)), jnp.float32)
    kinds = []
    for round in range(schedule.period):
        run = jax.shard_map(
            lambda x, round=round: gossip.mix(x[0], schedule, round)[None],
            mesh=mesh8,
            in_specs=P("replica"),
            out_specs=P("replica"),
            check_vma=gossip.allows_check_vma(schedule),
        )
        compiled = jax.jit(run).lower(x).compile()
        kinds += {kind for kind, _, _ in collectives(compiled.as_text())}
        mixed = np.einsum("ij,j...->i...", schedule.matrix(round), np.asarray(x, np.float64))
        np.testing.assert_allclose(compiled(x), mixed, rtol=1e-6, atol=1e-6)
    assert kinds.count("all-reduce") == sums
    assert kinds.count("collective-permute") == schedule.period - sums


def test_shards_of_a_replica_are_permuted_as_they_are(as_if_over_gloo):
    """Nothing is packed or swapped where an array is only whole on several devices."""
    mesh = jax.make_mesh((4, 2), ("replica", "fsdp"), (AxisType.Auto,) * 2)
    schedule = topology.make("hypercube", 4)
    sharding = NamedSharding(mesh, P("replica", None, "fsdp"))
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 4)).astype(np.float32)
    run = jax.shard_map(
        lambda tree: jax.tree.map(lambda x: x[None], gossip.mix([x[0] for x in tree], schedule, 1)),
        mesh=mesh,
        in_specs=P("replica"),
        out_specs=P("replica"),
        axis_names={"replica"},
        check_vma=gossip.allows_check_vma(schedule),
    )
    tree = [jax.device_put(part, sharding) for part in x]
    compiled = jax.jit(run).lower(tree).compile()
    found = [(kind, sizes) for kind, sizes, _ in collectives(compiled.as_text())]
    assert found == [("collective-permute", [12])] * 2
    for part, mixed in zip(x, compiled(tree), strict=True):
        wanted = np.einsum("ij,j...->i...", schedule.matrix(1), part)
        np.testing.assert_allclose(mixed, wanted, rtol=1e-6)


# --- the step in three parts ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data") / "text")


def trainer(data, schedule="one_peer_exp", replicas_a_device=1, **changes):
    """(step, state, batches, period of the schedule): of 4 replicas."""
    config = tiny.config(data, schedule=schedule, **changes)
    placement = replicas.place(4, jax.devices()[: 4 // replicas_a_device])
    task = config_lib.task_module(config.task).make(config, None, lambda *_, **__: None)
    made = config_lib.make_schedule(config)
    tx = algorithm.transformation(config, made, 0.01, task.decay_mask, placement.axis_name)
    step = step_lib.make_step(config, task, tx, lambda t: 0.01, made, placement)
    state = step_lib.init_state(config, task, tx, placement)
    with loader.train_batches(
        task.train_source, seed=0, num_replicas=4, batch_size=8, replicas=placement.local_replicas
    ) as batches:
        return step, state, [placement.put(next(batches)) for _ in range(6)], made.period


def six_steps(step, state, batches, period):
    """The state after, and all metrics; steps 2 and 5 do not communicate."""
    metrics = []
    for t, batch in enumerate(batches):
        round = None if t % 3 == 2 else t % period
        program = step.lower(state, batch, np.int32(t), round=round).compile()
        state, found = program(state, batch, np.int32(t))
        metrics.append(found)
    return jax.device_get((state, metrics))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"replicas_a_device": 2},
        {"schedule": "hierarchical", "local_size": 2},
        {"comm_dtype": "int8"},
        {"algorithm": "decentralized_sgd", "eval": {"ema_decay": 0.9}},
    ],
    ids=str,
)
def test_three_parts_make_the_step_of_one(changes, data, monkeypatch):
    """Bit for bit but for the order of an addition; metrics, moments and moving average too."""
    whole = six_steps(*trainer(data, **changes))
    monkeypatch.setattr(pair_sums, "over_gloo", lambda: True)
    step, *rest = trainer(data, **changes)
    assert isinstance(step, overlap.Step)
    parts = six_steps(step, *rest)
    assert jax.tree.structure(whole) == jax.tree.structure(parts)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


def test_parts_are_compiled_once(data, as_if_over_gloo):
    """The gradient for each shape of a batch, the other parts for each round."""
    step, state, batches, _ = trainer(data)
    half = jax.tree.map(lambda x: x[:, :1], batches[0])

    def program(batch, round):
        return step.lower(state, batch, np.int32(0), round=round).compile()

    one, other, short = program(batches[0], 0), program(batches[0], 1), program(half, 0)
    assert one.begin is other.begin and one.begin is not short.begin
    assert one.mix is short.mix and one.mix is not other.mix
    assert one.finish is short.finish and one.finish is not other.finish
    short(state, half, np.int32(0))


def test_a_replica_that_is_not_finite_is_brought_back(data, as_if_over_gloo):
    step, state, batches, _ = trainer(data)
    bad = jax.tree.map(lambda x: x.at[1].set(jnp.nan), state.params)
    program = step.lower(state, batches[0], np.int32(0), round=0).compile()
    new, metrics = program(state._replace(params=bad), batches[0], np.int32(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(new.params))
    assert metrics["skipped"].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_what_each_part_waits_for(ema, data, as_if_over_gloo):
    """The gradient communicates nothing, the mix computes nothing of the model; moments are made
    with the gradient, and what is done last is to add what has come and the step, in place."""
    step, state, batches, _ = trainer(data, eval={"ema_decay": ema})
    program = step.lower(state, batches[0], np.int32(0), round=1).compile()
    mix, gradient, finish = (
        part.as_text() for part in (program.mix, program.begin, program.finish)
    )
    assert not collectives(gradient) and not collectives(finish)
    sizes = [size for _, found, _ in collectives(mix) for size in found]
    model = sum(x.size for x in jax.tree.leaves(state.params)) // 4
    assert model <= sum(sizes) <= model + 1  # and the flag
    assert " dot(" in gradient and " dot(" not in mix and " dot(" not in finish
    assert " sqrt(" in gradient and " sqrt(" not in finish
    last = program.finish.memory_analysis()
    assert last.temp_size_in_bytes < 0.01 * 4 * model
    assert last.output_size_in_bytes == pytest.approx(last.alias_size_in_bytes, rel=0.01)


def test_an_update_that_is_all_late_is_in_place_too(data, as_if_over_gloo):
    """Decay in the gradient (L2) makes all of an update wait for the mixed parameters; all that
    is new is the gradient with the decay."""
    step, state, batches, _ = trainer(data, optimizer={"decoupled": False})
    finish = step.lower(state, batches[0], np.int32(0), round=1).compile().finish
    assert " sqrt(" in finish.as_text()
    params = sum(x.nbytes for x in jax.tree.leaves(state.params)) // 4
    assert finish.memory_analysis().temp_size_in_bytes < 1.1 * params


def test_memory_of_three_parts(data, as_if_over_gloo):
    step, state, batches, _ = trainer(data)
    program = step.lower(state, batches[0], np.int32(0), round=0).compile()
    memory = executables.memory_of(program)
    held = sum(x.nbytes for x in jax.tree.leaves((state, batches[0]))) // 4
    params = sum(x.nbytes for x in jax.tree.leaves(state.params)) // 4
    assert memory.state == pytest.approx(held, rel=0.01)  # and t, without counts that are new
    assert memory.temporary >= 2 * params  # the gradient, and what arrives


@pytest.mark.parametrize(
    "changes",
    [{"combine": "then"}, {"algorithm": "all_reduce"}, {"algorithm": "push_sum"}],
    ids=str,
)
def test_what_is_not_known_at_the_beginning_is_one_program(changes, data, as_if_over_gloo):
    step, *_ = trainer(data, **changes)
    assert not isinstance(step, overlap.Step)


def test_one_process_has_one_program(data):
    assert not pair_sums.over_gloo()
    step, *_ = trainer(data)
    assert not isinstance(step, overlap.Step)


def test_early_mixing_is_the_update_of_one(mesh8):
    """`EarlyMixing` by itself: mix, then update with what it gave."""
    schedule = topology.make("one_peer_exp", 8)
    tx = optim.decentralized(optim.accum_adamw(0.1, weight_decay=0.1), schedule, gamma=0.5)
    assert isinstance(tx, optim.EarlyMixing)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    state = jax.vmap(tx.init)(x)

    def at_once(x, state):
        return tx.update(2 * x, state, x, round=1)

    def early(x, state):
        return tx.update(2 * x, state, x, round=1, mixed=tx.mix(x, state.count, 1))

    one, other = (jax.vmap(fn, axis_name="replica")(x, state) for fn in (at_once, early))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
