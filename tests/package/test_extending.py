"""Methods, topologies, optimizers and tasks from outside the package."""

import dataclasses
import json
import sys
import types
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_runs
import tiny
from ml_collections import ConfigDict
from refusals import refused, refuses
from trees import assert_equal

from decent_jax import optim, tasks, topology, train
from decent_jax.commands import export, sample, translate
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.fields import setting
from decent_jax.optim import registry, trees
from decent_jax.topology.make import _BUILDERS
from decent_jax.topology.rounds import pairwise
from decent_jax.train import algorithm, saved_model
from decent_jax.train import config as config_lib


class SlowState(NamedTuple):
    z: Any  # like params


def slow_gossip(inner, schedule, axis_name="replica", codec=None, *, gamma: float = 0.7):
    """Mixes a copy that follows the parameters with weight gamma."""
    if not 0 < gamma <= 1:
        raise ValueError(f"slow_gossip.gamma must be in (0, 1], got {gamma}")
    mixing = optim.Mixing(schedule, axis_name, codec)

    def step(params, own, round, local):
        update, inner, ok = local(params)
        z = trees.add(own.z, trees.scale(gamma, optax.tree.sub(params, own.z)))
        return trees.add(mixing(z, round, local.count), update), SlowState(z), inner, ok

    return optim.method(inner, step, lambda params: SlowState(trees.copy(params)))


def every_other(n, *, step: int = 1):
    return [pairwise((np.arange(n) - step) % n)]


@pytest.fixture
def registered():
    topology.register("every_other", every_other)
    yield optim.register("slow_gossip", slow_gossip, copies=1)
    del _BUILDERS["every_other"], registry._METHODS["slow_gossip"]


@pytest.fixture
def config():
    """Made before anything is registered, if a test asks for it first."""
    return config_lib.default_config()


def test_a_package_registers_a_trainer_by_an_entry_point(monkeypatch):
    """With fields of its own; the others train as before."""
    mine = dataclasses.make_dataclass("Mine", [("speed", int, setting(3, "of it"))], frozen=True)
    module = types.SimpleNamespace(SECTIONS={"mine": mine}, check=lambda config: 7)
    monkeypatch.setitem(sys.modules, "my_trainer", module)
    point = EntryPoint("mine", "my_trainer", "decent_jax.trainers")
    monkeypatch.setitem(config_lib.TRAINERS, "mine", point)
    config = tiny.waves(trainer="mine", mine={"speed": 4})
    parsed = config_lib.parse(config)
    assert config_lib.trainer_of(parsed).check(parsed) == 7 and parsed.mine.speed == 4
    config.trainer = "synchronous"
    config_lib.validate(config)
    with refused("trainer", "thine"):
        config_lib.validate(tiny.waves(trainer="thine"))


def test_a_topology_from_outside(registered, monkeypatch):
    schedule = topology.make("every_other(step=3)", 4)
    assert schedule.name == "every_other(step=3)"
    np.testing.assert_array_equal(schedule.matrix(0)[0], [0.5, 0.5, 0, 0])
    assert topology.make("hierarchical(complete, every_other)", 8, replicas_per_node=2).period == 1
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
    again = optim.register("slow_gossip", space["slow_gossip"])
    assert optim.METHODS["slow_gossip"] is again and again.make is space["slow_gossip"]
    with refuses("every_other"):
        topology.register("every_other", lambda n: [])
    with refuses("slow_gossip"):
        optim.register("slow_gossip", lambda inner: inner)


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
        config_lib.parse(config)
    with config.unlocked():
        config.slow_gossip = ConfigDict({"gamma": 0.123})
    parts = algorithm.parts(config_lib.parse(config), schedule, 0.1)
    assert parts.numbers == {"gamma": 0.123}
    config.slow_gossip.gamma = 2.0
    with refuses("slow_gossip.gamma", 2.0):
        algorithm.transformation(config_lib.parse(config), schedule, 0.1)


@pytest.mark.parametrize("name", registry.METHODS)
def test_every_number_of_every_method_is_reached_from_the_config(name):
    method = registry.METHODS[name]
    config = config_lib.default_config()
    config.algorithm = name
    schedule = topology.make("complete", config.num_replicas)
    for number, default in method.numbers.items():
        section = config[method.config_section] if method.config_section else config
        default = 1 if default is None else default  # of mix_rounds
        assert section[number] == default
        changed = "int8" if isinstance(default, str) else default + 1
        if isinstance(default, bool):
            changed = not default
        section[number] = changed
        parts = algorithm.parts(config_lib.parse(config), schedule, 0.1)
        assert parts.numbers[number] == changed


def test_a_task_may_be_any_object():
    """As in a notebook, where there is no module to name."""

    class Task:
        Model = dataclasses.make_dataclass(
            "Model", [("width", int, setting(3, "of the only layer"))], frozen=True
        )
        validate = make = staticmethod(lambda *_: None)

    tasks.register("chess", Task)
    try:
        assert config_lib.default_config("chess").model.width == 3
        tasks.register("chess", object())
        with refuses("validate"):
            tasks.find("chess")
    finally:
        del tasks.TASKS["chess"]


# --- an optimizer by its dotted name --------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "name", "named"),
    [
        ("accum_adam", "optax.lion", "accum_adam"),
        ("quasi_global_sgd", "optax.lion", "quasi_global_sgd"),
        ("decentralized_sgd", "optax.lyon", "'lyon'"),
        ("decentralized_sgd", "optaxx.lion", "module that exists, got 'optaxx'"),
        ("decentralized_sgd", "optax.lion(beta=1)", "'beta'"),
        ("decentralized_sgd", "optax.lion(0.5)", "optax.lion(0.5)"),
        ("decentralized_sgd", "optax.lion(b1=jnp)", "optax.lion(b1=jnp)"),
        ("decentralized_sgd", "optax.lion(learning_rate=1)", "learning_rate"),
        ("decentralized_sgd", "optax.lion(weight_decay=1)", "optimizer.weight_decay=0"),
        ("decentralized_sgd", "optax.inject_hyperparams", "learning_rate"),
    ],
)
def test_optimizers_that_cannot_be(algorithm, name, named, tiny_data):
    config = tiny.config(tiny_data, algorithm=algorithm, optimizer={"name": name})
    config.optimizer.decoupled = algorithm != "quasi_global_sgd"
    with refuses(named, name.partition(".")[0], error=ConfigError):
        config_lib.validate(config)


MASK = {"kernel": True, "bias": False}
PARAMS = {"kernel": jnp.ones(3), "bias": jnp.full(2, 4.0)}
GRADS = {"kernel": jnp.array([1.0, -2.0, 0.0]), "bias": jnp.ones(2)}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (
            {"name": "optax.lion(b1=0.7)", "weight_decay": 0.1, "clip_norm": 1.0},
            (optax.clip_by_global_norm(1.0), optax.lion(0.5, b1=0.7, weight_decay=0.1, mask=MASK)),
        ),
        ({"name": "optax.lion"}, (optax.lion(0.5, weight_decay=0.0),)),  # whose own is not 0
        (
            {"name": "optax.sgd", "weight_decay": 0.25, "decoupled": False, "clip_norm": 0.5},
            (
                optax.clip_by_global_norm(0.5),
                optax.add_decayed_weights(0.25, MASK),
                optax.sgd(0.5),
            ),
        ),
    ],
)
def test_an_optimizer_of_optax_by_its_name(fields, wanted):
    """With its arguments, the run's learning rate, decay and mask, and behind the clipping."""
    config = train.default_config()
    config.algorithm = "decentralized_sgd"
    config.optimizer.update(**fields)
    found = algorithm._local_optimizer(config, 0.5, MASK), optax.chain(*wanted)
    assert_equal(*(tx.update(GRADS, tx.init(PARAMS), PARAMS)[0] for tx in found))


# --- tasks of other packages ----------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """`line_task` as ``lines.task``, a module of a package that decent_jax does not know."""
    package = tmp_path / "lines"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "task.py").write_text("from line_task import *  # noqa\n")
    (package / "empty.py").write_text("validate = print\n")
    (package / "list.py").write_text("Model = ['x']\nvalidate = make = print\n")
    (package / "number.py").write_text("validate, make = 5, print\n")
    (package / "broken.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    return "lines.task"


def test_a_task_of_another_package(outside, tmp_path, capsys):
    """Two steps, from 0 towards 3; then its functions answer the commands."""
    changes = {"steps": 2, "learning_rate": 0.1, "lr_schedule__warmup": 0}
    run = tiny.run(small_runs.config(outside, **changes), tmp_path / "run")
    losses = [row["eval/loss"] for row in tiny.rows(run) if "eval/loss" in row]
    slope = saved_model.load(run)
    assert 0 < slope < 3
    assert losses[-1] < 9 * sum(i * i for i in range(64)) / 64**3  # that of slope 0
    assert json.loads((run / "summary.json").read_text())["points"] == 64
    assert f"y = {slope:.2f} x" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    path = export.export(run, tmp_path / "out" / "line.safetensors")
    assert float(path.read_text()) == slope
    assert json.loads(path.with_name("config.json").read_text()) == {"step": 2}
    for command, refusal in ((sample, "continue a prompt"), (translate, "translate")):
        assert command.main(["--workdir", str(run)]) == 2
        assert f"of the task 'lines.task', which cannot {refusal}" in capsys.readouterr().err


def test_a_task_says_what_may_change(outside):
    old = config_lib.values_of(small_runs.config(outside))
    assert config_lib.refused_changes(old, old | {"data.shown": 2, "data.prefetch": 0}) == []
    assert config_lib.refused_changes(old, old | {"data.points": 8}) == ["data.points: 64 -> 8"]


WRONG = ("chess", "lines.chess", "no_package.chess", "lines.empty", "lines.list", "lines.number")


@pytest.mark.parametrize("name", [*WRONG, "lines.broken"])
def test_what_is_no_task(outside, name):
    with refused("task", name):
        tasks.find(name)
