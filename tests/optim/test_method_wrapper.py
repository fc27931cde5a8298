"""A method is a transformation of optax: it works in optax's wrappers, which lose the overlap."""

import copy
import dataclasses
from types import SimpleNamespace

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from decent_jax import optim, topology
from decent_jax.train import xla
from decent_jax.train.delayed_step import Blocks

N, STEPS = 4, 6
RING, STATIC, COMPLETE = (
    topology.make(name, N) for name in ("one_peer_exp", "static_exp", "complete")
)

METHODS = {
    "early": lambda inner: optim.decentralized(inner, RING),
    "delayed": lambda inner: optim.diloco(inner, COMPLETE, delay=1, carry=True),
    "neither": lambda inner: optim.push_sum(inner, STATIC),
    "without rounds": optim.all_reduce,
}
SCHEDULES = {"delayed": COMPLETE, "neither": STATIC}
EVERY = {"delayed": 2}
SGD = optax.sgd(0.1, momentum=0.9)
ALL = {"a": True, "b": True}
WRAPPERS = {
    "chain": lambda make: optax.chain(optax.scale(1.0), make(SGD)),
    "masked": lambda make: optax.masked(make(SGD), ALL),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(
        lambda rate: make(optax.sgd(rate, momentum=0.9))
    )(rate=0.1),
    "MultiSteps": lambda make: optax.MultiSteps(make(SGD), 1).gradient_transformation(),
    "partition": lambda make: optax.partition({"it": make(SGD)}, "it"),
    "another update": lambda make: make(SGD)._replace(update=make(SGD).update),
}


def moved(txs, schedule, mix_every=1):
    """For every transformation its parameters after every step, each a dict of (n, ...)."""
    rng = np.random.default_rng(0)
    x = {"a": np.tile(rng.normal(size=(1, 3)), (N, 1)), "b": np.tile(rng.normal(size=1), N)}
    data = [{"a": rng.normal(size=(N, 3)), "b": rng.normal(size=N)} for _ in range(STEPS)]
    x, data = jax.tree.map(jnp.float32, (x, data))

    def gradient(xs, target):
        return {name: jax.tree.map(lambda a, b: 0.5 * (a - b), x, target) for name, x in xs.items()}

    tx, x = harness.together(txs), dict.fromkeys(txs, x)
    history = harness.trajectory(tx, gradient, schedule, x, data, mix_every)
    return {name: [x[name] for x, _ in history] for name in txs}


@pytest.mark.parametrize("method", METHODS)
def test_a_wrapper_of_optax_changes_no_result(method):
    """And nothing overlaps its messages then, so that a trainer must not expect it."""
    make, every = METHODS[method], EVERY.get(method, 1)
    wrapped = {name: wrap(make) for name, wrap in WRAPPERS.items()}
    for name, tx in wrapped.items():
        got = optim.as_method(tx)
        assert got.early is None and got.delayed is None, name
    schedule = SCHEDULES.get(method, RING)
    got = moved(wrapped | {"alone": make(SGD)}, schedule, every)
    alone = got.pop("alone")
    assert all(np.abs(alone[-1][leaf] - alone[0][leaf]).max() > 0.01 for leaf in ALL)
    for name, steps in got.items():
        for x, wanted in zip(steps, alone, strict=True):
            for leaf in ALL:
                np.testing.assert_allclose(x[leaf], wanted[leaf], 1e-5, 1e-6, err_msg=name)


def test_a_mask_shares_some_arrays_and_freezes_the_others():
    alone = optim.decentralized(SGD, RING)
    frozen = optax.masked(optax.set_to_zero(), {"a": False, "b": True})
    masked = optax.chain(optax.masked(alone, {"a": True, "b": False}), frozen)
    got = moved({"masked": masked, "alone": alone}, RING)
    for x, wanted in zip(got["masked"], got["alone"], strict=True):
        np.testing.assert_allclose(x["a"], wanted["a"], 1e-5, 1e-6)
        np.testing.assert_array_equal(x["b"], got["masked"][0]["b"])


def test_only_the_method_itself_is_overlapped():
    """The trainer asks it, and takes nothing for granted of a wrapper's."""
    graph = topology.make("alternating_exp_ring", 8, replicas_per_node=2)
    early, run = optim.decentralized(SGD, graph), ConfigDict({"algorithm": "x", "mix_every": 2})
    mesh = SimpleNamespace(devices=np.array(jax.devices()))
    gpus = SimpleNamespace(platform="gpu", fsdp=1, mesh=mesh)
    assert xla.options_of_step(gpus, graph, early) == xla.FOR_GPUS
    assert xla.options_of_step(gpus, graph, optim.as_method(optax.chain(early))) == {}
    delayed = METHODS["delayed"](SGD)
    assert Blocks.of(run, COMPLETE, delayed).delay == delayed.delayed.delay == 1
    assert Blocks.of(run, COMPLETE, optim.as_method(optax.chain(delayed))).delay == 0


def test_a_method_is_complete_when_it_is_made():
    for tx in (METHODS["early"](SGD), METHODS["delayed"](SGD)):
        init, update = tx
        assert (init, update) == (tx.init, tx.update) and optim.as_method(tx) is tx
        for name in ("early", "delayed", "mix"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(tx, name, None)
        again = copy.copy(tx)
        assert again.early is tx.early and again.delayed is tx.delayed
    with pytest.raises(dataclasses.FrozenInstanceError):
        tx.delayed.delay = 3
