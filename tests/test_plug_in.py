"""What a run takes from outside: an optimizer by its dotted name, matrices of a file."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from decent_jax import train
from decent_jax.ground.errors import ConfigError
from decent_jax.train import algorithm
from decent_jax.train import config as config_lib


def updates_of(tx, params, grads):
    state = tx.init(params)
    return tx.update(grads, state, params)[0]


def test_an_optimizer_of_optax_by_its_name():
    """With its arguments, the run's learning rate, decay and mask, and behind the clipping."""
    config = train.default_config()
    config.algorithm, config.optimizer.name = "decentralized_sgd", "optax.lion(b1=0.7)"
    config.optimizer.weight_decay, config.optimizer.clip_norm = 0.1, 1.0
    mask = {"kernel": True, "bias": False}
    tx = algorithm._local_optimizer(config, 0.5, mask)
    wanted = optax.chain(
        optax.clip_by_global_norm(1.0), optax.lion(0.5, b1=0.7, weight_decay=0.1, mask=mask)
    )
    params = {"kernel": jnp.ones(3), "bias": jnp.ones(2)}
    grads = {"kernel": jnp.array([1.0, -2.0, 0.0]), "bias": jnp.ones(2)}
    found, expected = updates_of(tx, params, grads), updates_of(wanted, params, grads)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_no_weight_decay_but_the_config_s():
    """Optax's Lion decays by default."""
    config = train.default_config()
    config.algorithm, config.optimizer.name = "decentralized_sgd", "optax.lion"
    tx = algorithm._local_optimizer(config, 1.0, None)
    assert updates_of(tx, jnp.array([4.0]), jnp.array([1.0])).tolist() == [-1.0]


def test_decay_that_is_not_decoupled_is_in_the_gradient():
    config = train.default_config()
    config.optimizer.update(name="optax.sgd", weight_decay=0.25, decoupled=False, clip_norm=0.5)
    config.algorithm = "decentralized_sgd"
    tx = algorithm._local_optimizer(config, 1.0, None)
    assert updates_of(tx, jnp.array([4.0]), jnp.array([1.0])).tolist() == [-1.5]


@pytest.mark.parametrize(
    ("algorithm", "name", "named"),
    [
        ("accum_adam", "optax.lion", "accum_adam"),
        ("quasi_global_sgd", "optax.lion", "quasi_global_sgd"),
        ("decentralized_sgd", "optax.lyon", "'lyon'"),
        ("decentralized_sgd", "optaxx.lion", "no module 'optaxx'"),
        ("decentralized_sgd", "optax.lion(beta=1)", "'beta'"),
        ("decentralized_sgd", "optax.lion(0.5)", "optax.lion(0.5)"),
        ("decentralized_sgd", "optax.lion(b1=jnp)", "optax.lion(b1=jnp)"),
        ("decentralized_sgd", "optax.lion(learning_rate=1)", "learning_rate"),
        ("decentralized_sgd", "optax.trace", "learning_rate"),
        ("decentralized_sgd", "optax.lion(weight_decay=1)", "optimizer.weight_decay=0"),
        ("decentralized_sgd", "optax.sgd", "optimizer.weight_decay=0"),
        ("decentralized_sgd", "optax.inject_hyperparams", "learning_rate"),
    ],
)
def test_optimizers_that_cannot_be(algorithm, name, named, tiny_data):
    config = tiny.config(tiny_data, algorithm=algorithm, optimizer={"name": name})
    config.optimizer.decoupled = algorithm != "quasi_global_sgd"
    with pytest.raises(ConfigError) as refusal:
        config_lib.validate(config)
    assert named in str(refusal.value) and name.partition(".")[0] in str(refusal.value)


@pytest.mark.slow
def test_a_run_with_muon_of_optax(tiny_data, tmp_path, compile_once):
    """It trains and resumes."""
    config = tiny.config(
        tiny_data,
        algorithm="decentralized_sgd",
        schedule="complete",
        optimizer={"name": "optax.contrib.muon(ns_steps=2)"},
        steps=3,
        log={"every": 3},
    )
    first = train.run(config, tmp_path / "run")
    config.steps = 5
    summary = train.run(config, tmp_path / "run")
    assert summary["steps"] == 5 and np.isfinite(first["final"]["eval/loss"])
