"""Replicas of several devices: where their arrays are, what the mix sends, the same losses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from test_hlo import collectives, pairs_of

from decent_jax import gossip, replicas, topology, train
from decent_jax.data import loader
from decent_jax.topology.plan_file import Plan
from decent_jax.train import ConfigError, algorithm
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib

pytestmark = pytest.mark.usefixtures("compile_once")

FSDP = {"fsdp": 2, "devices": 8}
SCHEDULE = topology.make("one_peer_exp", 4)
# Round 1: replica i hears i - 2, each of its devices its counterpart.
BETWEEN = {(2 * ((i - 2) % 4) + j, 2 * i + j) for i in range(4) for j in range(2)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def trainer(data):
    """(step, state, placement, task) of the tiny GPT-2, 4 replicas of 2 devices."""
    return made(tiny.config(data, mesh=FSDP), fsdp=2)


def made(config, fsdp):
    placement = replicas.place(4, jax.devices()[: 4 * fsdp], fsdp)
    task = config_lib.task_module(config.task).make(config, None, lambda *_, **__: None)
    tx = algorithm.transformation(config, SCHEDULE, 0.01, task.decay_mask)
    step = step_lib.make_step(config, task, tx, lambda t: 0.01, SCHEDULE, placement)
    state = step_lib.init_state(config, task, tx, placement)
    return step, state, placement, task


def shard_sizes(params):
    return sorted(x.addressable_shards[0].data.size for x in jax.tree.leaves(params))


def test_arrays_are_sharded_by_their_largest_dimension():
    placement = replicas.place(4, jax.devices()[:8], fsdp=2)
    assert (placement.fsdp, placement.block, placement.axis_name) == (2, 1, "replica")
    assert placement.local_replicas == [0, 1, 2, 3]
    wanted = {
        (4,): P("replica"),
        (4, 3): P("replica"),
        (4, 6): P("replica", "fsdp"),
        (4, 6, 8): P("replica", None, "fsdp"),
        (4, 8, 8): P("replica", "fsdp"),
        (4, 9, 2): P("replica", None, "fsdp"),
        (4, 0): P("replica"),
    }
    for shape, spec in wanted.items():
        assert placement.sharding(shape).spec == spec
    assert replicas.place(8, jax.devices()[:8]).sharding((8, 4)).spec == P("replica")
    x = np.arange(48).reshape(4, 6, 2)
    batch = placement.put({"x": x, "odd": np.ones((4, 3)), "n": np.ones(4)})
    assert [batch[key].sharding.spec for key in ("x", "odd", "n")] == [
        P("replica", "fsdp"),
        P("replica"),
        P("replica"),
    ]
    np.testing.assert_array_equal(batch["x"], x)


def test_a_device_holds_its_part_of_the_state(trainer):
    _, state, _, _ = trainer
    for tree in (state.params, state.opt_state):
        large = [x for x in jax.tree.leaves(tree) if x.size > 4]
        assert large and all(x.addressable_shards[0].data.size == x.size // 8 for x in large)


@pytest.mark.parametrize("guarded", [False, True])
def test_the_mix_is_one_permute_of_the_shard_an_array(guarded, trainer):
    """Of a round of one_peer_exp, over the parameters of GPT-2; nothing is gathered."""
    _, state, placement, _ = trainer

    def mix(params):
        flags = [jnp.isfinite(x).all() for x in jax.tree.leaves(params)]
        ok = jnp.stack(flags).all() if guarded else None
        return gossip.mix(params, SCHEDULE, 1, finite=ok)

    run = placement.on_devices(placement.per_replica(mix), P("replica"), P("replica"))
    compiled = jax.jit(run).lower(state.params).compile()
    found = collectives(compiled.as_text())
    permutes = [(sum(sizes), line) for kind, sizes, line in found if kind == "collective-permute"]
    flags = [1] if guarded else []
    assert sorted(size for size, _ in permutes) == sorted(shard_sizes(state.params) + flags)
    assert all(pairs_of(line) == BETWEEN for _, line in permutes)
    # Whether all shards are finite is known inside the replica: flags again, and nothing else.
    others = [(kind, sum(sizes)) for kind, sizes, _ in found if kind != "collective-permute"]
    assert {kind for kind, _ in others} == ({"all-reduce"} if guarded else set())
    assert sum(size for _, size in others) <= len(jax.tree.leaves(state.params))
    got = compiled(state.params)
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(got), strict=True):
        mixed = np.tensordot(SCHEDULE.matrix(1), np.asarray(x, np.float64), 1)
        np.testing.assert_allclose(y, mixed, rtol=1e-6, atol=1e-7)
        assert y.sharding.is_equivalent_to(x.sharding, x.ndim)


def a_batch(task, placement, batch_size):
    where = {"num_replicas": 4, "replicas": placement.local_replicas}
    with loader.train_batches(task.train_source, seed=0, batch_size=batch_size, **where) as batches:
        return placement.put(next(batches))


def test_the_step_sends_shards_and_keeps_the_state_where_it_is(trainer):
    step, state, placement, task = trainer
    batch = a_batch(task, placement, 8)
    assert all(x.sharding.spec == P("replica", "fsdp") for x in jax.tree.leaves(batch))
    compiled = step.lower(state, batch, np.int32(0), round=1).compile()
    sent = [
        (sum(sizes), pairs_of(line))
        for kind, sizes, line in collectives(compiled.as_text())
        if kind == "collective-permute"
    ]
    # Between replicas a shard of each array and a flag; what else moves stays inside a replica.
    between = [size for size, pairs in sent if any(a // 2 != b // 2 for a, b in pairs)]
    assert sorted(between) == sorted([*shard_sizes(state.params), 1])
    assert all(pairs == BETWEEN for size, pairs in sent if size in between and size > 1)
    after, _ = compiled.output_shardings
    for sharding, x in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert sharding.is_equivalent_to(x.sharding, x.ndim)


def test_losses_are_those_of_whole_replicas(data, tmp_path):
    """10 steps, evaluation of the consensus model and of each replica."""
    changes = {"steps": 10, "eval": {"every": 5, "replicas": True, "ema_decay": 0.9}}
    whole = tiny.run(tiny.config(data, **changes), tmp_path / "whole")
    sharded = tiny.run(tiny.config(data, mesh=FSDP, **changes), tmp_path / "sharded")
    np.testing.assert_allclose(tiny.losses(sharded), tiny.losses(whole), rtol=1e-5)
    rows = [[row for row in tiny.rows(folder) if "eval/loss" in row] for folder in (sharded, whole)]
    assert len(rows[0]) == 2
    for row, other in zip(*rows, strict=True):
        assert row.keys() == other.keys()
        for name in ("eval/loss", "eval/ema_loss", "eval/replica_loss_worst"):
            assert row[name] == pytest.approx(other[name], rel=1e-5)
    summary = json.loads((sharded / "summary.json").read_text())
    assert summary["steps"] == 10


def test_each_device_starts_cudnn_for_its_examples(data, tmp_path, monkeypatch):
    """XLA cannot divide that kernel; here it is XLA's under its name."""
    attention, examples = jax.nn.dot_product_attention, set()

    def kernel(query, *others, implementation, **kwargs):
        if implementation == "cudnn":
            assert not jax.sharding.get_abstract_mesh().auto_axes
            examples.add(len(query))
        return attention(query, *others, implementation="xla", **kwargs)

    def config(attention, mesh):
        model = {"attention": attention, "dropout": 0.0, "remat": True}
        return tiny.config(data, mesh=mesh, model=model, batch_size=24, steps=4)

    whole = tiny.run(config("xla", {"devices": 4}), tmp_path / "whole")
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    sharded = tiny.run(config("cudnn", FSDP), tmp_path / "sharded")
    np.testing.assert_allclose(tiny.losses(sharded), tiny.losses(whole), rtol=1e-5)
    assert 24 // 4 // 2 in examples


def test_devices_share_the_examples_of_each_micro_batch(data, tmp_path):
    changes = {"batch_size": 32, "micro_batches": 2, "steps": 4}
    whole = tiny.run(tiny.config(data, **changes), tmp_path / "whole")
    sharded = tiny.run(tiny.config(data, mesh=FSDP, **changes), tmp_path / "sharded")
    np.testing.assert_allclose(tiny.losses(sharded), tiny.losses(whole), rtol=1e-5)


def test_devices_share_the_work_of_each_micro_batch(data):
    """With two devices a replica half the products on each, and no batch is gathered for it."""

    def program(fsdp):
        config = tiny.config(data, batch_size=32, micro_batches=2)
        step, state, placement, task = made(config, fsdp)
        batch = a_batch(task, placement, 32)
        compiled = step.lower(state, batch, np.int32(0), round=1).compile()
        return compiled, sum(x.size for x in jax.tree.leaves(batch)) // 4

    (whole, _), (halves, tokens) = program(1), program(2)
    flops = [compiled.cost_analysis()["flops"] for compiled in (whole, halves)]
    assert flops[1] == pytest.approx(flops[0] / 2, rel=0.1)
    integers = [max(sizes) for _, sizes, line in collectives(halves.as_text()) if "= s32[" in line]
    assert integers and max(integers) < tokens / 2


def test_resumes_bit_for_bit_and_on_whole_replicas(data, tmp_path):
    def config(steps, **mesh):
        return tiny.config(data, steps=steps, mesh=mesh)

    whole = tiny.run(config(6, **FSDP), tmp_path / "whole")
    halves = tiny.run(config(3, **FSDP), tmp_path / "halves")
    tiny.run(config(6, **FSDP), halves)
    tiny.assert_same_state(whole, halves, 6)
    np.testing.assert_array_equal(tiny.losses(halves), tiny.losses(whole))
    # From shards to whole replicas, and back.
    tiny.run(config(8, devices=4, fsdp=1), halves)
    tiny.run(config(9, **FSDP), halves)
    longer = tiny.run(config(9, **FSDP), whole)
    np.testing.assert_allclose(tiny.losses(halves), tiny.losses(longer), rtol=1e-5)


@pytest.mark.parametrize("name", ["all_reduce", "gradient_tracking", "diloco"])
def test_other_algorithms(name, data, tmp_path):
    changes = {"algorithm": name, "steps": 4}
    changes["schedule"] = {"diloco": "complete"}.get(name, "one_peer_exp")
    whole = tiny.run(tiny.config(data, **changes), tmp_path / "whole")
    sharded = tiny.run(tiny.config(data, mesh=FSDP, **changes), tmp_path / "sharded")
    np.testing.assert_allclose(tiny.losses(sharded), tiny.losses(whole), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {"fsdp": 0}}, "mesh.fsdp must be at least 1, got 0"),
        ({"mesh": {"fsdp": 2, "devices": 4}}, "need 8 devices, got mesh.devices 4"),
        (
            {"mesh": {"fsdp": 4, "devices": 0}, "batch_size": 16},
            "need 16 devices, got 8; a device cannot hold",
        ),
        ({"mesh": FSDP, "batch_size": 12}, "a replica's 3 examples .* over mesh.fsdp 2 devices"),
        (
            {"mesh": FSDP, "batch_size": 24, "micro_batches": 2},
            "a replica's 6 examples .* in 2 micro_batches cannot be shared out over mesh.fsdp 2",
        ),
        (
            {"mesh": FSDP, "schedule": "hierarchical", "local_size": 2},
            "hierarchical averages in nodes, whose replicas must be of one device",
        ),
    ],
)
def test_refusals(changes, message, data, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train.run(tiny.config(data, **changes), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_plan_is_for_replicas_of_one_device(data, tmp_path):
    Plan(tuple(f"host/{k}" for k in range(4)), SCHEDULE).save(tmp_path / "plan.json")
    config = tiny.config(data, mesh=FSDP, cluster={"plan": str(tmp_path / "plan.json")})
    with pytest.raises(ConfigError, match="plan is for replicas of one device: set mesh"):
        config_lib.validate(config)
