"""Muon as a local optimizer: against the exact orthogonal factor, and `optax.contrib.muon`."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import oracles_seldom
import pytest
from jax.sharding import PartitionSpec as P
from trees import assert_close

from decent_jax import optim, replicas, topology, train
from decent_jax.models import decoders, gpt2, llama, resnet, transformer
from decent_jax.train import algorithm
from decent_jax.train.config import parse

pytestmark = pytest.mark.usefixtures("x64")
N, LR = 4, 0.1

SHAPE = (3, 2)


def exact_muon(rate, beta=0.9, nesterov=False):
    """Muon whose Newton-Schulz iteration converges: x (3 - x' x) / 2, often enough."""
    scale = optax.contrib.scale_by_muon(
        (1.5, -0.5, 0.0),
        24,
        beta,
        eps=1e-30,
        nesterov=nesterov,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(),
    )
    return optax.chain(scale, optax.scale_by_learning_rate(rate))


def matrices_to(targets, tx, steps, x=None):
    """Where replicas end whose gradients lead to matrices of their own, (n, 3, 2)."""
    x = jnp.zeros_like(targets) if x is None else x

    def one(carry, _):
        step = harness.step_of(tx, lambda x, b: x - b, 0)
        return jax.vmap(step, axis_name="replica")(*carry, targets), carry[0]

    run = jax.jit(lambda c: jax.lax.scan(one, c, length=steps))
    (x, _), history = run((x, jax.vmap(tx.init)(x)))
    return np.concatenate([history[1:], x[None]])


def test_tracking_before_muon_is_demuon_on_a_static_graph():
    ring = topology.make("bidirectional_ring", 5)
    targets = jnp.asarray(np.random.default_rng(3).normal(size=(5, *SHAPE)))
    got = matrices_to(targets, optim.contrib.gradient_tracking(exact_muon(LR), ring, "atc"), 12)
    right = oracles.run(
        oracles_seldom.demuon,
        lambda t: ring.matrix(0),
        lambda x, t: x - np.asarray(targets).reshape(5, -1),
        np.zeros((5, 6)),
        12,
        LR,
        shape=SHAPE,
    )
    # To single precision; tracking after orthogonalizing differs in the second digit.
    np.testing.assert_allclose(got.reshape(12, 5, 6), right, rtol=0, atol=5e-6)


def test_muon_of_a_config_on_one_replica_is_optax_s():
    config = train.default_config()
    config.num_replicas, config.algorithm, config.schedule = 1, "decentralized_sgd", "complete"
    config.optimizer.update(name="muon", momentum=0.8, weight_decay=0.1)
    mask = {"kernel": True, "bias": False, "embedding": True}
    schedule = topology.make("complete", 1)
    tx = algorithm.transformation(parse(config), schedule, 0.05, mask)
    alone = {
        "kernel": optax.contrib.muon(0.05, beta=0.8, weight_decay=0.1, consistent_rms=0.2),
        "bias": optax.nadam(0.05),
        "embedding": optax.nadamw(0.05, weight_decay=0.1),
    }
    own = optax.partition(alone, {name: name for name in alone})
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 3), "bias": (3,), "embedding": (5, 3)}
    x = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    stacked = jax.tree.map(lambda x: x[None], x)
    state, state_own = jax.vmap(tx.init)(stacked), own.init(x)
    step = jax.jit(jax.vmap(harness.step_of(tx, lambda x: x, 0), axis_name="replica"))
    update = jax.jit(own.update)
    for _ in range(4):
        stacked, state = step(stacked, state)
        updates, state_own = update(x, state_own, x)
        x = optax.apply_updates(x, updates)
    assert_close(replicas.take(stacked, 0), x, rtol=1e-12, atol=0)


def test_muon_of_sharded_and_of_stacked_replicas_is_the_same():
    """mesh.fsdp: each replica's matrices lie on two devices; and all replicas on one."""
    ring = topology.make("hypercube", 2)
    tx = optim.decentralized(optax.contrib.muon(LR, consistent_rms=0.2), ring, "atc")
    step = harness.step_of(tx, lambda x, b: jax.tree.map(jnp.subtract, x, b), 0)
    rng = np.random.default_rng(5)
    shapes = {"kernel": (2, 8, 6), "bias": (2, 6)}
    x, targets = ({k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()} for _ in "ab")

    def run(stacked, x, targets):
        state = jax.vmap(tx.init)(x)
        for _ in range(3):
            x, state = jax.jit(stacked)(x, state, targets)
        return x

    placement = replicas.place(2, jax.devices()[:4], fsdp=2)
    spread = [
        jax.tree.map(lambda a: jax.device_put(a, placement.sharding(a.shape)), tree)
        for tree in (x, targets)
    ]
    body = placement.per_replica(step)
    sharded = run(placement.on_devices(body, P("replica"), P("replica")), *spread)
    assert not sharded["kernel"].sharding.is_fully_replicated
    alone = run(jax.vmap(step, axis_name="replica"), x, targets)
    assert_close(sharded, alone, rtol=1e-10, atol=0)


def test_muon_inside_diloco():
    """MuLoCo: H local steps of Muon, then the outer step on their mean."""
    schedule = topology.make("complete", N)
    targets = jnp.asarray(np.random.default_rng(4).normal(size=(N, *SHAPE)))
    tx = optim.diloco(exact_muon(LR), schedule, outer=optax.sgd(0.5))
    got = matrices_to(targets, tx, 3)
    momentum, x = np.zeros((N, *SHAPE)), np.zeros((N, *SHAPE))
    for after in got:
        momentum = 0.9 * momentum + 0.1 * (x - np.asarray(targets))
        moved = x - LR * oracles_seldom.msgn(momentum)
        x = np.broadcast_to((0.5 * x + 0.5 * moved.mean(0)), x.shape)
        np.testing.assert_allclose(after, x, rtol=0, atol=5e-6)


def names_of(model, config):
    """{name: whether Muon orthogonalizes it} of a model's arrays."""
    params = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    params = params[0] if model is resnet else params
    chosen = algorithm.hidden_matrices(params)
    arrays, structure = jax.tree_util.tree_flatten_with_path(params)
    axes = structure.flatten_up_to(chosen)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): found is not None
        for (path, _), found in zip(arrays, axes, strict=True)
    }


SMALL = {"vocab_size": 32, "layers": 1, "heads": 2, "width": 8}


@pytest.mark.parametrize(
    "model, config, outside",
    [
        (decoders, gpt2.GPT2Config(**SMALL, context=4), {"wte.embedding", "wpe.embedding"}),
        (
            decoders,
            llama.LlamaConfig(**SMALL, context=4, kv_heads=1, hidden=8, tied=False),
            {"wte.embedding", "lm_head.kernel"},
        ),
        (transformer, transformer.TransformerConfig(**SMALL, ff=8), {"shared.embedding"}),
        (resnet, resnet.PRESETS["tiny"], {"fc.kernel"}),
    ],
    ids=lambda x: x.__name__.rpartition(".")[2] if hasattr(x, "__name__") else None,
)
def test_muon_is_for_matrices_of_hidden_layers(model, config, outside):
    found = names_of(model, config)
    kernels = {name for name in found if name.endswith(("kernel", "embedding"))}
    assert {name for name in kernels if not found[name]} == outside
    assert {name for name in found if found[name]} == kernels - outside != set()


def test_a_convolution_is_a_matrix_to_muon():
    kernel = np.random.default_rng(6).normal(size=(3, 3, 2, 5))
    config = train.default_config()
    config.num_replicas, config.algorithm, config.schedule = 1, "decentralized_sgd", "complete"
    config.optimizer.update(name="muon", clip_norm=0.0)
    tx = algorithm.transformation(parse(config), topology.make("complete", 1), 0.05)

    @jax.jit
    def step(x):
        return tx.update(x, tx.init(x), jax.tree.map(jnp.zeros_like, x), round=None)[0]

    flat, whole = (step({"kernel": jnp.asarray(x)}) for x in (kernel.reshape(18, 5), kernel))
    np.testing.assert_allclose(whole["kernel"].reshape(18, 5), flat["kernel"], rtol=1e-10)
    factor = flat["kernel"] / np.abs(np.linalg.svd(flat["kernel"])[1]).max()
    assert np.linalg.svd(factor)[1].min() > 0.5  # all directions move about equally far
