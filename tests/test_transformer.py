"""The Transformer against an independent NumPy version, and against itself."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decent_jax.models import transformer
from decent_jax.models.losses import cross_entropy
from decent_jax.models.transformer import PAD, START

TINY = transformer.TransformerConfig(
    vocab_size=20, width=16, heads=2, layers=2, ff=24, dropout=0.0, dtype="float32"
)
PRE = dataclasses.replace(TINY, norm="pre")
ONE = dataclasses.replace(TINY, layers=1)  # compiles faster
# Compiling is what these tests spend their time on.
pytestmark = pytest.mark.usefixtures("compile_once")
apply = jax.jit(transformer.apply, static_argnums=0)
init = jax.jit(transformer.init, static_argnums=0)

SOURCE = np.array([[5, 9, 4, 12, 3], [7, 6, 3, 0, 0], [8, 0, 0, 0, 0]], np.int32)
TARGET_IN = np.array([[2, 11, 4, 4], [2, 13, 0, 0], [2, 5, 19, 0]], np.int32)


@pytest.fixture(scope="module")
def params():
    """Larger than initial ones, so that attention is not uniform; scales not 1, biases not 0."""
    return perturbed(TINY)


def perturbed(config):
    """Parameters as NumPy draws them, which compiles nothing."""
    rng = np.random.default_rng(9)

    def draw(path, shape):
        noise = rng.normal(size=shape.shape)
        if path[-1].key in ("scale", "bias"):
            return np.float32((path[-1].key == "scale") + 0.3 * noise)
        return np.float32(1.5 * noise * shape.shape[-1] ** -0.5)

    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def loss_fn(config, params, source, target_in, target, rng=None):
    logits = transformer.apply(config, params, source, target_in, rng)
    losses = cross_entropy(logits, target) * (target != PAD)
    return losses.sum() / (target != PAD).sum()


def assert_close(got, wanted, rtol=1e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.max(np.abs(g - w)) <= rtol * np.max(np.abs(w))


# --- Counts -------------------------------------------------------------------------------------


def test_parameter_count_of_base_by_hand():
    embedding = 37120 * 512
    attention = 4 * 512 * 512
    feed_forward = 512 * 2048 + 2048 + 2048 * 512 + 512
    norm = 2 * 512
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    wanted = embedding + 6 * encoder_layer + 6 * decoder_layer
    assert wanted == 63_107_072
    assert transformer.num_params(transformer.PRESETS["base"]) == wanted


def test_parameter_count_of_big_by_hand():
    """With the 37120 subwords of English-German it would be 214.3 million."""
    attention, feed_forward, norm = 4 * 1024**2, 2 * 1024 * 4096 + 4096 + 1024, 2 * 1024
    all_layers = 6 * (3 * attention + 2 * feed_forward + 5 * norm)
    big = transformer.PRESETS["big"]
    assert transformer.num_params(big) == 32000 * 1024 + all_layers == 209_051_648
    english_german = dataclasses.replace(big, vocab_size=37120)
    assert transformer.num_params(english_german) == 37120 * 1024 + all_layers == 214_294_528


@pytest.mark.parametrize("config", [TINY, PRE])
def test_the_count_is_that_of_the_initial_parameters(config):
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    assert transformer.num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes))


def test_one_embedding():
    shapes = jax.eval_shape(partial(transformer.init, TINY), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    with_vocabulary = [path[-1].key for path, leaf in leaves if TINY.vocab_size in leaf.shape]
    assert with_vocabulary == ["embedding"]
    biases = {path[-2].key for path, _ in leaves if path[-1].key == "bias"}
    assert biases == {"ff_in", "ff_out", "ff_norm", "self_norm", "cross_norm"}


def test_init_scales():
    params = init(dataclasses.replace(ONE, width=64, ff=256, vocab_size=900), jax.random.key(3))
    layer = params["decoder"]["0"]
    assert float(params["shared"]["embedding"].std()) == pytest.approx(1 / 8, rel=0.03)
    for kernel, inputs, outputs in [
        (layer["cross_attention"]["key"]["kernel"], 64, 64),
        (layer["ff_in"]["kernel"], 64, 256),
    ]:
        bound = np.sqrt(6 / (inputs + outputs))
        assert float(jnp.abs(kernel).max()) == pytest.approx(bound, rel=0.01)
        assert float(kernel.std()) == pytest.approx(bound / np.sqrt(3), rel=0.05)
    assert float(jnp.abs(layer["ff_in"]["bias"]).max()) == 0
    assert float(layer["self_norm"]["scale"].min()) == 1


def test_decay_mask_is_by_kind(params):
    mask = transformer.decay_mask(params)
    stacked = transformer.decay_mask(jax.tree.map(lambda x: np.stack([x, x]), params))
    assert mask == stacked == jax.tree.map(lambda x: x.ndim == 2, params)


def test_flops_per_pair_by_hand():
    """One layer of width 4, 3 source and 2 target positions: products of the forward pass."""
    config = transformer.TransformerConfig(
        vocab_size=10, width=4, heads=2, layers=1, ff=8, dtype="float32"
    )
    matrices = 3 * (4 * 16 + 2 * 32) + 2 * (6 * 16 + 2 * 32) + 3 * 2 * 16 + 2 * 40
    vectors = 3 * (12 + 2 * 8) + 2 * (12 + 3 * 8)  # biases and norms, as 2 operations a number
    attention = 2 * 4 * (3 * 3 + 2 * 2 + 2 * 3)  # two products of a query-key pair
    wanted = 3 * 2 * (matrices + vectors + attention)
    assert transformer.flops_per_pair(config, 3, 2) == wanted


# --- Against NumPy ------------------------------------------------------------------------------


def numpy_forward(config, params, source, target_in):
    """Logits and cross-attention weights in float64, sentence by sentence and without padding."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    table = params["shared"]["embedding"]
    width, heads = config.width, config.heads

    def embed(tokens):
        angles = np.array(
            [
                [p / 10000 ** (2 * (c // 2) / width) for c in range(width)]
                for p in range(len(tokens))
            ]
        )
        encoding = np.where(np.arange(width) % 2 == 0, np.sin(angles), np.cos(angles))
        return table[tokens] * np.sqrt(width) + encoding

    def norm(p, x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def attend(p, x, memory, causal):
        out, all_weights = [], []
        for columns in np.split(np.arange(width), heads):
            query, key, value = (
                y @ p[name]["kernel"][:, columns]
                for name, y in (("query", x), ("key", memory), ("value", memory))
            )
            scores = query @ key.T / np.sqrt(width / heads)
            if causal:
                scores[np.triu_indices(len(x), 1)] = -np.inf
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            all_weights.append(weights)
            out.append(weights @ value)
        return np.concatenate(out, -1) @ p["out"]["kernel"], np.array(all_weights)

    def ff(p, x):
        hidden = np.maximum(x @ p["ff_in"]["kernel"] + p["ff_in"]["bias"], 0)
        return hidden @ p["ff_out"]["kernel"] + p["ff_out"]["bias"]

    def add(p, name, x, branch):
        if config.norm == "post":
            return norm(p[name], x + branch(p, x))
        return x + branch(p, norm(p[name], x))

    def sentence(source, target_in):
        x, y, recorded = embed(source), embed(target_in), []

        def attend_self(p, h):
            return attend(p["self_attention"], h, h, "cross_norm" in p)[0]

        def attend_memory(p, h):
            out, weights = attend(p["cross_attention"], h, x, False)
            recorded.append(weights)
            return out

        for i in range(config.layers):
            p = params["encoder"][str(i)]
            x = add(p, "ff_norm", add(p, "self_norm", x, attend_self), ff)
        if config.norm == "pre":
            x = norm(params["encoder_norm"], x)
        for i in range(config.layers):
            p = params["decoder"][str(i)]
            y = add(p, "cross_norm", add(p, "self_norm", y, attend_self), attend_memory)
            y = add(p, "ff_norm", y, ff)
        if config.norm == "pre":
            y = norm(params["decoder_norm"], y)
        return y @ table.T, np.array(recorded)

    return [sentence(s[s != PAD], t[t != PAD]) for s, t in zip(source, target_in, strict=True)]


@pytest.mark.parametrize("config", [TINY, PRE], ids=["post", "pre"])
def test_forward_and_attention_against_numpy(config):
    """Without any padding in the NumPy version: so padding has no influence either."""
    params = perturbed(config)
    logits = apply(config, params, SOURCE, TARGET_IN)
    weights = jax.jit(transformer.attention_weights, static_argnums=0)(
        config, params, SOURCE, TARGET_IN
    )
    assert logits.shape == (3, 4, 20) and weights.shape == (3, 2, 2, 4, 5)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    for b, (wanted, wanted_weights) in enumerate(numpy_forward(config, params, SOURCE, TARGET_IN)):
        length, keys = wanted.shape[0], wanted_weights.shape[-1]
        assert_close(logits[b, :length], wanted)
        assert_close(weights[b, :, :, :length, :keys], wanted_weights)
        assert keys == 5 or float(jnp.abs(weights[b, ..., keys:]).max()) == 0
    assert float(weights[0].std()) > 0.05  # a uniform attention would prove nothing


def test_sinusoids_of_any_length():
    positions = np.array([0, 1, 77, 5000])
    got = transformer.sinusoids(positions, 6)
    rates = 10000.0 ** (-np.array([0, 2, 4]) / 6)
    np.testing.assert_allclose(got[:, ::2], np.sin(positions[:, None] * rates), atol=1e-3)
    np.testing.assert_allclose(got[:, 1::2], np.cos(positions[:, None] * rates), atol=1e-3)
    np.testing.assert_allclose(got[:3, ::2], np.sin(positions[:3, None] * rates), atol=1e-5)


# --- Masks --------------------------------------------------------------------------------------


def test_causal(params):
    changed = TARGET_IN.copy()
    changed[:, 2] = 17
    before, after = (apply(TINY, params, SOURCE, t) for t in (TARGET_IN, changed))
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert bool((jnp.abs(before[:, 2:] - after[:, 2:]).max(-1) > 0).all())


def test_more_padding_changes_nothing(params):
    source, target_in = (np.pad(x, ((0, 0), (0, 3))) for x in (SOURCE, TARGET_IN))
    narrow, wide = apply(TINY, params, SOURCE, TARGET_IN), apply(TINY, params, source, target_in)
    for b, length in enumerate((TARGET_IN != PAD).sum(-1)):
        assert_close(wide[b, :length], narrow[b, :length], rtol=1e-6)


def test_memory_at_padding_is_never_read(params):
    mask = SOURCE != PAD
    memory = np.random.default_rng(0).normal(size=(3, 5, 16)).astype(np.float32)
    noisy = np.where(mask[:, :, None], memory, np.float32(1e3))
    decode = jax.jit(transformer.decode, static_argnums=0)
    a, b = (decode(TINY, params, TARGET_IN, m, mask) for m in (memory, noisy))
    np.testing.assert_array_equal(a, b)


def test_gradient_does_not_depend_on_padding_and_a_row_of_padding_is_finite(params):
    """Rows of padding fill up a batch: no NaN, forward or backward."""
    grad = jax.jit(jax.value_and_grad(partial(loss_fn, TINY)))
    target = np.where(TARGET_IN == PAD, PAD, 7)
    plain = grad(params, SOURCE, TARGET_IN, target)
    padded = [np.pad(x, ((0, 1), (0, 2))) for x in (SOURCE, TARGET_IN, target)]
    assert_close(grad(params, *padded), plain, rtol=1e-4)


# --- Dropout, dtypes, gradients -----------------------------------------------------------------


def test_dropout(params):
    config = dataclasses.replace(TINY, dropout=0.2)
    plain = apply(TINY, params, SOURCE, TARGET_IN)
    a, a_again, b = (apply(config, params, SOURCE, TARGET_IN, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(a, a_again)
    assert float(jnp.abs(a - b).max()) > 0
    np.testing.assert_array_equal(apply(config, params, SOURCE, TARGET_IN), plain)
    np.testing.assert_array_equal(apply(TINY, params, SOURCE, TARGET_IN, jax.random.key(1)), plain)


def test_attention_with_dropout_is_the_same_attention(params):
    """At a vanishing rate nothing is dropped, and the explicit form must equal the fused one."""
    config = dataclasses.replace(TINY, dropout=1e-9)
    got = apply(config, params, SOURCE, TARGET_IN, jax.random.key(0))
    assert_close(got, apply(TINY, params, SOURCE, TARGET_IN))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_bfloat16_and_gradients_of_all_parameters(norm):
    wide = dataclasses.replace(ONE, norm=norm)
    half = dataclasses.replace(wide, dtype="bfloat16")
    params = perturbed(wide)
    grad = jax.jit(jax.value_and_grad(loss_fn, argnums=1), static_argnums=0)
    target = np.where(TARGET_IN == PAD, PAD, 7)
    (loss, grads), (half_loss, half_grads) = (
        grad(c, params, SOURCE, TARGET_IN, target) for c in (wide, half)
    )
    logits = jax.eval_shape(partial(transformer.apply, half), params, SOURCE, TARGET_IN)
    assert logits.dtype == jnp.bfloat16
    assert float(half_loss) == pytest.approx(float(loss), rel=0.02)
    for tree in (grads, half_grads):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            assert leaf.dtype == jnp.float32 and bool(jnp.isfinite(leaf).all()), path
            assert float(jnp.abs(leaf).max()) > 0, path


def test_remat_gives_the_same_gradients():
    grad = jax.jit(jax.value_and_grad(loss_fn, argnums=1), static_argnums=0)
    # The generator that compiles fastest.
    key = jax.random.key(5, impl="unsafe_rbg")
    args = SOURCE, TARGET_IN, np.where(TARGET_IN == PAD, PAD, 7), key
    one = perturbed(ONE)
    config = dataclasses.replace(ONE, dropout=0.3)
    remat = dataclasses.replace(config, remat=True)
    assert_close(grad(remat, one, *args), grad(config, one, *args))
    jaxpr = str(jax.make_jaxpr(lambda p: transformer.apply(remat, p, *args[:2]))(one))
    assert len(re.findall(r"= (remat|checkpoint)", jaxpr)) == 2


def test_stacked_replicas():
    """`vmap` over parameters, data and dropout keys, as the trainer does it, is a loop."""
    config = dataclasses.replace(ONE, dropout=0.1)
    one = perturbed(config)
    stacked = jax.tree.map(lambda x: np.stack([x, 0.5 * x, x[..., ::-1]]), one)
    rng = np.random.default_rng(0)
    source, target_in, target = rng.integers(4, 20, (3, 3, 2, 5)).astype(np.int32)
    source[1, 0, 2:] = PAD
    args = stacked, source, target_in, target, jax.random.split(jax.random.key(4), 3)
    grad = jax.jit(jax.value_and_grad(partial(loss_fn, config)))
    vmapped = jax.jit(jax.vmap(jax.value_and_grad(partial(loss_fn, config))))(*args)
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], args)
        assert_close(jax.tree.map(lambda x, i=i: x[i], vmapped), grad(*one))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_learns_to_copy(norm):
    """Fresh sentences at every step: only attention to the right source position helps."""
    config = transformer.TransformerConfig(
        vocab_size=14, width=32, heads=2, layers=1, ff=64, dropout=0.0, dtype="float32", norm=norm
    )
    tx = optax.adam(optax.linear_schedule(0.0, 1e-2, 40))

    def step(carry, key):
        params, state = carry
        source = jax.random.randint(key, (64, 6), 4, 14)
        target_in = jnp.pad(source[:, :-1], ((0, 0), (1, 0)), constant_values=START)
        loss, grads = jax.value_and_grad(partial(loss_fn, config))(
            params, source, target_in, source
        )
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    def train(key):
        params = transformer.init(config, key)
        return jax.lax.scan(step, (params, tx.init(params)), jax.random.split(key, 300))[1]

    losses = jax.jit(train)(jax.random.key(0))
    assert float(losses[0]) > 2.3  # log 10 is 2.30
    assert float(losses[-10:].mean()) < 0.1


# --- Errors -------------------------------------------------------------------------------------


def test_sentences_must_be_a_matrix(params):
    with pytest.raises(ValueError, match=r"source must have .* got \(5,\)"):
        transformer.apply(TINY, params, SOURCE[0], TARGET_IN)
    with pytest.raises(ValueError, match=r"target_in must have .* got \(4,\)"):
        transformer.apply(TINY, params, SOURCE, TARGET_IN[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 30, "heads": 4}, "width 30 is not divisible by heads 4"),
        ({"width": 15, "heads": 3}, "width must be even, for sines and cosines, got 15"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"vocab_size": 3}, "vocab_size must be at least 4, the special ids, got 3"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"norm": "middle"}, "norm must be one of post, pre, got 'middle'"),
        ({"dtype": "int8"}, "dtype must be one of .*, got 'int8'"),
        ({"attention": "flash"}, "attention must be one of auto, xla, cudnn, got 'flash'"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        transformer.TransformerConfig(**changes)
