"""What GPT-2, the Transformer and the ResNet must all do, and the pieces they share."""

import dataclasses
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from networks import assert_close, drawn, shapes_of
from refusals import refuses

from decent_jax import cpu
from decent_jax.models import decoders, gpt2, pieces, resnet, transformer
from decent_jax.models.pieces import cross_entropy

# Compiling is what these tests spend their time on: one layer each, and few programs.
pytestmark = pytest.mark.usefixtures("compile_once")
GPT2 = gpt2.GPT2Config(vocab_size=40, context=16, layers=1, heads=2, width=16, dtype="float32")
POST = transformer.TransformerConfig(
    vocab_size=20, width=16, heads=2, layers=1, ff=24, dropout=0.0, dtype="float32"
)
BOTTLENECK = resnet.ResNetConfig((1, 1), width=4, num_classes=6, small_images=True, dtype="float32")
SOURCE = np.array([[5, 9, 4, 12, 3], [7, 6, 3, 0, 0], [8, 0, 0, 0, 0]], np.int32)
TARGET = np.array([[2, 11, 4, 4, 7], [2, 13, 3, 0, 0], [2, 5, 19, 3, 0]], np.int32)


class Network(NamedTuple):
    """A module of `decent_jax.models`, a config of it, and sentences to try it with."""

    module: Any
    config: Any
    sentences: tuple  # of arrays (B, T)


TOKENS = np.random.default_rng(1).integers(0, 40, (2, 12)).astype(np.int32)
NETWORKS = {
    "gpt2": Network(decoders, GPT2, (TOKENS,)),
    "post": Network(transformer, POST, (SOURCE, TARGET)),
}
each = pytest.mark.parametrize("network", NETWORKS.values(), ids=["gpt2", "transformer"])


@partial(jax.jit, static_argnums=(0, 1))
def logits_of(module, config, params, sentences, key=None):
    *source, target = sentences
    return module.apply(config, params, *source, target[:, :-1], key)


def loss_of(module, config, params, sentences, key=None):
    """The mean over real tokens of the last sentences' tokens, each predicted from those before."""
    target = sentences[-1][:, 1:]
    real = target != transformer.PAD
    losses = cross_entropy(logits_of(module, config, params, sentences, key), target)
    return (losses * real).sum() / real.sum()


grad = jax.jit(jax.value_and_grad(loss_of, argnums=2), static_argnums=(0, 1))

# --- Parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module, config",
    [
        (decoders, GPT2),
        (transformer, POST),
        (transformer, dataclasses.replace(POST, norm="pre")),
        (resnet, BOTTLENECK),
    ],
)
def test_counts_dtypes_and_what_decays(module, config):
    shapes = shapes_of(module, config)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes))
    params = shapes[0] if module is resnet else shapes
    assert module.num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
    mask = pieces.decay_mask(params)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), params)
    assert mask == pieces.decay_mask(stacked) == jax.tree.map(lambda x: len(x.shape) > 1, params)


# --- Behaviour ----------------------------------------------------------------------------------


@each
def test_causal(network):
    module, config, (*source, target) = network
    changed = target.copy()
    changed[:, 2] = 17
    params = drawn(module, config)
    before, after = (logits_of(module, config, params, (*source, t)) for t in (target, changed))
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert bool((jnp.abs(before[:, 2:] - after[:, 2:]).max(-1) > 0).all())


@each
def test_dropout(network):
    module, config, sentences = network
    params = drawn(module, config)
    some = dataclasses.replace(config, dropout=0.2)
    a, again, b = (logits_of(module, some, params, sentences, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(a, again)
    assert float(jnp.abs(a - b).max()) > 0
    remat = dataclasses.replace(some, remat=True)
    assert_close(logits_of(module, remat, params, sentences, jax.random.key(1)), a)

    def draws(config, key):
        traced = jax.make_jaxpr(partial(logits_of, module, config))(params, sentences, key)
        return "random_bits" in str(traced)

    assert draws(some, jax.random.key(1))
    assert not draws(some, None) and not draws(config, jax.random.key(1))  # evaluation


@each
def test_dropout_attention_is_the_same_attention(network):
    """At a vanishing rate nothing is dropped, and the explicit form must equal the fused one."""
    module, config, sentences = network
    params = drawn(module, config)
    some = dataclasses.replace(config, dropout=1e-9)
    got = logits_of(module, some, params, sentences, jax.random.key(0))
    assert_close(got, logits_of(module, config, params, sentences))


def test_on_cpus_no_fusion_reads_more_in_a_deeper_model():
    """None computes the gradient of the residual stream again, a sum over all later branches."""
    module, config, sentences = NETWORKS["gpt2"]

    def reads(layers):
        """The arrays that the fusion with most of them reads."""
        deep = dataclasses.replace(config, layers=layers, dropout=0.1)
        step = jax.jit(
            jax.grad(partial(loss_of, module, deep)), compiler_options=cpu.COMPILER_OPTIONS
        )
        program = step.lower(shapes_of(module, deep), sentences, jax.random.key(0)).compile()
        fusions = re.findall(r" fusion\((.*?)\), kind", program.as_text())
        return max(fusion.count("%") for fusion in fusions)

    assert reads(3) < 1.5 * reads(1)


@each
def test_bfloat16_and_gradients_of_all_parameters(network):
    module, config, sentences = network
    half, params = dataclasses.replace(config, dtype="bfloat16"), drawn(module, config)
    wide = jax.jit(loss_of, static_argnums=(0, 1))(module, config, params, sentences)
    loss, grads = grad(module, half, params, sentences)
    shapes = jax.eval_shape(partial(logits_of, module, half), params, sentences)
    assert shapes.dtype == jnp.bfloat16
    assert float(loss) == pytest.approx(float(wide), rel=0.02)
    assert_all_learn(grads)


def assert_all_learn(grads):
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert leaf.dtype == jnp.float32 and bool(jnp.isfinite(leaf).all()), path
        assert float(jnp.abs(leaf).max()) > 0, path


@pytest.mark.slow
def test_gradient_does_not_depend_on_padding_and_a_row_of_padding_is_finite():
    """Rows of padding fill up a batch: no NaN, forward or backward."""
    params = drawn(transformer, POST)
    padded = tuple(np.pad(x, ((0, 1), (0, 2))) for x in (SOURCE, TARGET))
    wanted = grad(transformer, POST, params, (SOURCE, TARGET))
    assert_all_learn(wanted[1])
    assert_close(grad(transformer, POST, params, padded), wanted, rtol=1e-4)


# --- Transforms ---------------------------------------------------------------------------------


def nested(fn, mesh, count):
    """``fn`` of ``count`` replicas under shard_map, in it `lax.map`, in it vmap over pairs."""
    devices = mesh.size
    pairs = count // devices // 2

    def own(*args):
        split = jax.tree.map(lambda x: x.reshape(pairs, 2, *x.shape[1:]), args)
        found = jax.lax.map(lambda two: jax.vmap(fn)(*two), split)
        return jax.tree.map(lambda x: x.reshape(pairs * 2, *x.shape[2:]), found)

    specs = {"in_specs": P("replica"), "out_specs": P("replica")}
    return jax.jit(jax.shard_map(own, mesh=mesh, **specs))


def assert_transforms_agree(one, plain, args, rtol=1e-5):
    """``one`` nested in every transform on two devices is a loop over ``plain``."""
    mesh = jax.make_mesh(
        (2,), ("replica",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    together = jax.device_get(nested(one, mesh, 8)(*args))
    for i in range(8):
        alone = plain(*jax.tree.map(lambda x, i=i: x[i], args))
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), alone, rtol)


@pytest.mark.parametrize("name, rate", [("gpt2", 0.2), ("post", 0.0)])
def test_transforms_agree(name, rate):
    """Loss and gradients; the transformed program recomputes (``remat``) as well."""
    module, config, sentences = NETWORKS[name]
    config = dataclasses.replace(config, dropout=rate)
    remat = dataclasses.replace(config, remat=True)
    keys = jax.random.split(jax.random.key(4), 8)
    params = jax.tree.map(lambda *x: np.stack(x), *[drawn(module, config, i) for i in range(8)])
    args = params, tuple(np.stack([np.roll(x, i, 0) for i in range(8)]) for x in sentences), keys
    one = jax.value_and_grad(partial(loss_of, module, remat))
    assert_transforms_agree(one, partial(grad, module, config), args)
    two = dataclasses.replace(remat, layers=2)
    jaxpr = jax.make_jaxpr(partial(logits_of, module, two))(drawn(module, two), sentences)
    (call,) = jaxpr.eqns  # of the jitted function
    equations = call.params["jaxpr"].eqns
    recomputed = [
        one for one in equations if one.primitive.name.startswith(("remat", "checkpoint"))
    ]
    whole = [one for one in recomputed if "dot_general" in str(one)]  # a block, not a GELU alone
    assert len(whole) == len(recomputed) == {"gpt2": 2, "post": 4}[name]


# --- Pieces -------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean():
    x = pieces.dropout(jnp.ones((200, 200)), 0.25, jax.random.key(0))
    np.testing.assert_allclose(np.unique(x), [0.0, 1 / 0.75], rtol=1e-6)
    assert float(x.mean()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    "model", [gpt2.PRESETS["small"], transformer.PRESETS["base"]], ids=["gpt2", "transformer"]
)
def test_attention_choice(model, monkeypatch):
    assert pieces.implementation(model) == "xla"  # on CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert pieces.implementation(model) == "cudnn"
    assert pieces.implementation(dataclasses.replace(model, dtype="float32")) == "xla"
    four_wide = dataclasses.replace(model, heads=model.width // 4)
    assert pieces.implementation(four_wide) == "xla"
    assert pieces.implementation(dataclasses.replace(model, attention="xla")) == "xla"


# --- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (GPT2, {"width": 30, "heads": 4}),
        (POST, {"width": 30, "heads": 4}),
        (POST, {"width": 15}),  # no multiple of 2 heads
        (BOTTLENECK, {"blocks": ()}),
        (BOTTLENECK, {"blocks": (2, 0)}),
        (BOTTLENECK, {"dtype": "float64"}),
    ],
)
def test_config_errors(config, changes):
    with refuses(*changes, *changes.values()):
        dataclasses.replace(config, **changes)


def test_more_tokens_than_the_context():
    tokens = jnp.zeros((1, 17), jnp.int32)
    with refuses(17, 16):
        jax.eval_shape(partial(decoders.apply, GPT2), shapes_of(decoders, GPT2), tokens)


# --- Cross-entropy against optax, in value, gradient and memory -----------------------------------


def random_case(dtype, shape=(3, 5, 17)):
    logits = 4 * jax.random.normal(jax.random.key(0), shape, dtype)
    return logits, jax.random.randint(jax.random.key(1), shape[:-1], 0, shape[-1])


def reference(logits, targets, eps):
    labels = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype), eps)
    return optax.softmax_cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("dtype", "rtol", "eps"), [("float32", 1e-6, 0.0), ("float64", 1e-14, 0.1)]
)
def test_equals_optax(dtype, rtol, eps):
    with jax.enable_x64(dtype == "float64"):
        logits, targets = random_case(dtype)
        weights = jax.random.normal(jax.random.key(2), targets.shape, dtype)

        @partial(jax.jit, static_argnums=1)
        def values(logits, loss):
            each, backward = jax.vjp(lambda x: loss(x, targets, eps), logits)
            return each, (weights * each).sum(), backward(weights)[0]

        results = (values(logits, loss) for loss in (cross_entropy, reference))
        for got, wanted in zip(*results, strict=True):
            assert got.dtype == dtype
            assert np.abs(got - wanted).max() / np.abs(wanted).max() < 3 * rtol


def value_and_grad(loss, *args, **options):
    """Of the loss ``loss(logits, *args)``, summed, at ``logits``; one program."""
    total = jax.value_and_grad(lambda x, *rest: loss(x, *rest, **options).sum())
    return jax.jit(total)(*args)


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_bfloat16_logits(eps):
    """The loss is that of the same numbers in float32; the gradient is it, rounded once."""
    logits, targets = random_case("bfloat16")
    got, grad = value_and_grad(cross_entropy, logits, targets, label_smoothing=eps)
    wide = logits.astype(jnp.float32)
    wanted, wide_grad = value_and_grad(reference, wide, targets, eps=eps)
    assert got.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    assert float(got) == pytest.approx(float(wanted), rel=1e-6)
    np.testing.assert_allclose(grad.astype(jnp.float32), wide_grad, rtol=2**-8, atol=1e-6)


def test_large_logits_stay_finite():
    logits = jnp.array([[1e4, 0.0, -1e4]], jnp.bfloat16)
    loss, grad = value_and_grad(cross_entropy, logits, jnp.array([1]))
    assert float(loss) == float(logits[0, 0])
    np.testing.assert_array_equal(grad.astype(jnp.float32), [[1.0, -1.0, 0.0]])


def test_residuals_are_narrow():
    """Between forward and backward: the logits as they came, and float32 only per position."""
    logits, targets = random_case("bfloat16")
    _, backward = jax.vjp(lambda x: cross_entropy(x, targets, 0.1), logits)
    kept = [leaf for leaf in jax.tree.leaves(backward) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {(leaf.dtype.name, leaf.shape) for leaf in kept} == {
        ("bfloat16", logits.shape),
        ("float32", targets.shape),
    }


def test_compiled_gradient_writes_float32_logits_at_most_once(users_hlo):
    """Outside fusions, whose insides live in registers. The CPU's reductions want a float32 copy
    in the forward pass; the gradient must come from the narrow logits straight."""
    logits, targets = random_case("bfloat16", (256, 512))
    grad = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, targets, 0.1).mean()))
    hlo = grad.lower(logits).compile().as_text()
    entry = hlo[hlo.index("\nENTRY ") :]
    wide = re.findall(r"(%\S+) = f32\[256,512\]", entry)
    gradient = re.findall(r"= bf16\[256,512\]\S* fusion\((.*?)\)", entry)
    assert len(wide) <= 1 and len(gradient) == 1
    assert not set(wide) & set(gradient[0].split(", "))


def test_targets_that_do_not_fit():
    assert np.isnan(cross_entropy(jnp.zeros((1, 4)), jnp.array([4]))[0])  # beyond the classes
    with refuses((2,), (3,)):
        cross_entropy(jnp.zeros((3, 4)), jnp.zeros(2, jnp.int32))
