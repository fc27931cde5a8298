"""Replicas of several devices: where their arrays are, what a step sends, the same losses."""

import jax
import numpy as np
import pytest
import small_runs
import tiny
from hlo import collectives, pairs_of
from jax.sharding import PartitionSpec as P
from refusals import refused

from decent_jax import replicas, tasks, topology
from decent_jax.data import loader
from decent_jax.plan.plan_file import Plan
from decent_jax.train import algorithm
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.config import parse

pytestmark = pytest.mark.usefixtures("compile_once")

FSDP = {"fsdp": 2, "devices": 8}
SCHEDULE = topology.make("one_peer_exp", 4)
# Round 1: replica i hears i - 2, each of its devices its counterpart.
BETWEEN = {(2 * ((i - 2) % 4) + j, 2 * i + j) for i in range(4) for j in range(2)}


def made(config, fsdp):
    """(step, state, placement, task) of the tiny GPT-2, 4 replicas of this many devices."""
    placement = replicas.place(4, jax.devices()[: 4 * fsdp], fsdp)
    task = tasks.find(config.task).make(config, None, lambda *_, **__: None)
    tx = algorithm.transformation(parse(config), SCHEDULE, 0.01, task.decay_mask)
    step = step_lib.make_step(config, task, tx, lambda t: 0.01, SCHEDULE, placement)
    state = step_lib.init_state(config, task, tx, placement)
    return step, state, placement, task


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


def a_batch(task, placement, batch_size):
    where = {"num_replicas": 4, "replicas": placement.local_replicas}
    with loader.train_batches(task.train_source, seed=0, batch_size=batch_size, **where) as batches:
        return placement.put(next(batches))


def assert_sharded(compiled, state, batch):
    """A device holds its part, a step sends shards, and its state stays where it is."""
    for tree in (state.params, state.opt_state):
        large = [x for x in jax.tree.leaves(tree) if x.size > 4]
        assert large and all(x.addressable_shards[0].data.size == x.size // 8 for x in large)
    assert all(x.sharding.spec == P("replica", "fsdp") for x in jax.tree.leaves(batch))
    sent = [
        (sum(sizes), pairs_of(line))
        for kind, sizes, line in collectives(compiled.as_text())
        if kind == "collective-permute"
    ]
    # Between replicas a shard of each array and a flag; what else moves stays inside a replica.
    between = [size for size, pairs in sent if any(a // 2 != b // 2 for a, b in pairs)]
    sizes = [x.addressable_shards[0].data.size for x in jax.tree.leaves(state.params)]
    assert sorted(between) == sorted([*sizes, 1])
    assert all(pairs == BETWEEN for size, pairs in sent if size in between and size > 1)
    after, _ = compiled.output_shardings
    for sharding, x in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.slow
def test_devices_share_the_examples_of_each_micro_batch_and_send_shards(tiny_data, monkeypatch):
    """With two devices per replica half the products on each, and no batch is gathered for it.

    XLA cannot divide cuDNN's attention, so each device starts it for its own examples; here it is
    XLA's own attention under that name.
    """
    attention, examples = jax.nn.dot_product_attention, set()

    def kernel(query, *others, implementation, **kwargs):
        if implementation == "cudnn":
            assert not jax.sharding.get_abstract_mesh().auto_axes
            examples.add(len(query))
        return attention(query, *others, implementation="xla", **kwargs)

    def train(fsdp, attention):
        """The program of a step with 8 examples per replica, its batch, and losses of two steps."""
        model = {"attention": attention, "dropout": 0.0, "remat": True}
        config = tiny.config(tiny_data, model=model, batch_size=32, micro_batches=2)
        step, state, placement, task = made(config, fsdp)
        batch = a_batch(task, placement, 32)
        compiled = step.lower(state, batch, np.int32(0), round=1).compile()
        if fsdp > 1:
            assert_sharded(compiled, state, batch)
        losses = []
        for t in range(2):
            state, metrics = compiled(state, batch, np.int32(t))
            losses.append(np.asarray(metrics["loss"]))
        return compiled, batch, losses

    whole, _, wanted = train(1, "xla")
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    halves, batch, losses = train(2, "cudnn")
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert examples == {32 // 4 // 2 // 2}
    flops = [compiled.cost_analysis()["flops"] for compiled in (whole, halves)]
    assert flops[1] == pytest.approx(flops[0] / 2, rel=0.1)
    tokens = sum(x.size for x in jax.tree.leaves(batch)) // 4
    integers = [max(sizes) for _, sizes, line in collectives(halves.as_text()) if "= s32[" in line]
    assert integers and max(integers) < tokens / 2


@pytest.mark.slow
def test_a_run_is_that_of_whole_replicas_and_resumes_bit_for_bit(tmp_path):
    def run(folder, steps, **mesh):
        changes = {"eval": {"every": 3}}
        changes |= {"checkpoint": {"every": 3}, "mesh": mesh}
        return tiny.run(tiny.waves(steps=steps, **changes), tmp_path / folder)

    whole, sharded = run("whole", 9), run("sharded", 6, **FSDP)
    np.testing.assert_allclose(tiny.losses(sharded), tiny.losses(whole)[:6], rtol=1e-5)
    rows = [[row for row in tiny.rows(folder) if "eval/loss" in row] for folder in (sharded, whole)]
    assert len(rows[0]) == 2
    for row, other in zip(rows[0], rows[1][:2], strict=True):
        assert row.keys() == other.keys()
        assert row["eval/loss"] == pytest.approx(other["eval/loss"], rel=1e-5)
    small_runs.killed_after(3, sharded, tmp_path / "halves")
    halves = run("halves", 6, **FSDP)
    tiny.assert_same_state(sharded, halves, 6)
    np.testing.assert_array_equal(tiny.losses(halves), tiny.losses(sharded))
    # From shards to whole replicas, and back.
    run("halves", 8, devices=4, fsdp=1)
    run("halves", 9, **FSDP)
    np.testing.assert_allclose(tiny.losses(halves), tiny.losses(whole), rtol=1e-5)


def test_a_method_that_sends_parts_of_the_largest_numbers(tmp_path):
    """Of each shard, as of each array; test_hlo has what other methods send."""
    changes = {"algorithm": "sparseloco", "steps": 4, "schedule": "complete", "batch_size": 16}
    whole = tiny.run(tiny.waves(**changes), tmp_path / "whole")
    sharded = tiny.run(tiny.waves(mesh=FSDP, **changes), tmp_path / "sharded")
    np.testing.assert_allclose(tiny.losses(sharded), tiny.losses(whole), rtol=1e-5)


def test_a_plan_is_for_replicas_of_one_device(tmp_path):
    Plan(tuple(f"host/{k}" for k in range(4)), SCHEDULE).save(tmp_path / "plan.json")
    config = tiny.waves(mesh=FSDP, cluster={"plan": str(tmp_path / "plan.json")})
    with refused("mesh.fsdp", 2):
        config_lib.validate(config)
