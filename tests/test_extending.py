"""A method and a topology of somebody else's, registered from outside the package."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from ml_collections import ConfigDict
from refusals import refuses

from decent_jax import optim, tasks, topology
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.fields import Field
from decent_jax.optim import declaration, frame, trees
from decent_jax.topology.make import _BUILDERS
from decent_jax.topology.rounds import pairwise
from decent_jax.train import algorithm
from decent_jax.train import config as config_lib


class SlowState(NamedTuple):
    z: Any  # like params


def slow_gossip(inner, schedule, axis_name="replica", codec=None, *, gamma: float = 0.7):
    """Mixes a copy that follows the parameters with weight gamma."""
    if not 0 < gamma <= 1:
        raise ValueError(f"slow_gossip.gamma must be in (0, 1], got {gamma}")
    mixing = frame.Mixing(schedule, axis_name, codec)

    def step(params, own, round, local):
        update, inner, ok = local(params)
        z = trees.add(own.z, trees.scale(gamma, optax.tree.sub(params, own.z)))
        return trees.add(mixing(z, round, local.count), update), SlowState(z), inner, ok

    return frame.method(inner, step, lambda params: SlowState(trees.copy(params)))


def every_other(n, *, step: int = 1):
    return [pairwise((np.arange(n) - step) % n)]


@pytest.fixture
def registered():
    topology.register("every_other", every_other)
    yield optim.register(optim.Method("slow_gossip", slow_gossip, copies=1))
    del _BUILDERS["every_other"], declaration._METHODS["slow_gossip"]


@pytest.fixture
def config():
    """Made before anything is registered, if a test asks for it first."""
    return config_lib.default_config()


def test_a_room_that_trains_in_another_way_may_be_deleted(monkeypatch):
    """With its fields; the others train as before."""
    there = {"pipeline.stages": "decent_jax.pipelines"}
    monkeypatch.setattr(config_lib, "TRAINERS", {"peers.use": "decent_jax.deleted"} | there)
    config = tiny.waves()
    assert "peers" not in config and "pipeline" in config
    config_lib.validate(config)
    assert config_lib.trainer_of(config).__name__ == config_lib.SYNCHRONOUS


def test_a_topology_from_outside(registered, monkeypatch):
    schedule = topology.make("every_other(step=3)", 4)
    assert schedule.name == "every_other(step=3)"
    np.testing.assert_array_equal(schedule.matrix(0)[0], [0.5, 0.5, 0, 0])
    assert topology.make("hierarchical(complete, every_other)", 8, local_size=2).period == 1
    with refuses("every_other", "rows", "step"):
        topology.make("every_other(rows=2)", 4)
    with refuses("ring"):
        topology.register("ring", every_other)
    with refuses("mine", "n"):
        topology.register("mine", lambda replicas: [])
    monkeypatch.setitem(_BUILDERS, "no_rounds", lambda n: None)
    with refuses("no_rounds", None):
        topology.make("no_rounds", 4)
    monkeypatch.setitem(_BUILDERS, "same_rounds", lambda n: topology.make("ring", n).rounds)
    assert topology.make("same_rounds", 4).period == 2  # a tuple


def test_a_cell_that_runs_again_registers_again(registered):
    """What it defines anew takes the old one's place; another function does not."""
    space = {"__name__": __name__, "topology": topology}
    exec("def every_other(n): return topology.make('ring', n).rounds", space)
    topology.register("every_other", space["every_other"])
    assert topology.make("every_other", 4).period == 2
    exec("def slow_gossip(inner, schedule): pass", space)
    again = optim.Method("slow_gossip", space["slow_gossip"])
    assert optim.register(again) is optim.METHODS["slow_gossip"] is again
    with refuses("every_other"):
        topology.register("every_other", lambda n: [])
    with refuses("slow_gossip"):
        optim.register(optim.Method("slow_gossip", lambda inner: inner))


def test_a_method_from_outside(registered):
    schedule = topology.make("every_other", 4)
    parts = optim.Parts(schedule, 0.1, optax.sgd(0.0), numbers={"gamma": 1.0})
    tx = registered.build(parts)
    x = jnp.arange(4.0)
    updates, state = jax.vmap(
        lambda x, state: tx.update(x, state, x, round=0), axis_name="replica"
    )(x, jax.vmap(tx.init)(x))
    np.testing.assert_allclose(x + updates, schedule.matrix(0) @ np.arange(4.0))
    np.testing.assert_allclose(state.own.z, x)
    assert registered.numbers == {"gamma": 0.7}


def test_its_numbers_come_from_its_section(config, registered):
    """None is ignored, and none is taken from a field of the same name elsewhere."""
    config.algorithm, config.gamma = "slow_gossip", 0.5
    schedule = topology.make("every_other", config.num_replicas)
    with refuses("slow_gossip", error=ConfigError):
        algorithm.parts(config, schedule, 0.1)
    with config.unlocked():
        config.slow_gossip = ConfigDict({"gamma": 0.123})
    assert algorithm.parts(config, schedule, 0.1).numbers == {"gamma": 0.123}
    config.slow_gossip.gamma = 2.0
    with refuses("slow_gossip.gamma", 2.0):
        algorithm.transformation(config, schedule, 0.1)


@pytest.mark.parametrize("name", declaration.METHODS)
def test_every_number_of_every_method_is_reached_from_the_config(name):
    method = declaration.METHODS[name]
    config = config_lib.default_config()
    config.algorithm = name
    schedule = topology.make("complete", config.num_replicas)
    for number, default in method.numbers.items():
        section = config[method.config_section] if method.config_section else config
        assert section[number] == default
        changed = "int8" if isinstance(default, str) else default + 1
        if isinstance(default, bool):
            changed = not default
        section[number] = changed
        assert algorithm.parts(config, schedule, 0.1).numbers[number] == changed


def test_a_task_may_be_any_object():
    """As in a notebook, where there is no module to name."""

    class Task:
        FIELDS: ClassVar = {"model.width": Field(3, "of the only layer")}
        validate = make = staticmethod(lambda *_: None)

    tasks.register("chess", Task)
    try:
        assert config_lib.default_config("chess").model.width == 3
        tasks.register("chess", object())
        with refuses("validate"):
            tasks.find("chess")
    finally:
        del tasks.TASKS["chess"]
