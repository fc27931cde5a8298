"""The Transformer alone: against an independent NumPy version, counts, masks. See `test_models`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from networks import assert_close, drawn, shapes_of

from decent_jax.models import transformer
from decent_jax.models.pieces import cross_entropy
from decent_jax.models.transformer import PAD, START

TINY = transformer.TransformerConfig(
    vocab_size=20, width=16, heads=2, layers=2, ff=24, dropout=0.0, dtype="float32"
)
ONE = dataclasses.replace(TINY, layers=1)  # compiles faster
# Compiling is what these tests spend their time on.
pytestmark = pytest.mark.usefixtures("compile_once")

SOURCE = np.array([[5, 9, 4, 12, 3], [7, 6, 3, 0, 0], [8, 0, 0, 0, 0]], np.int32)
TARGET_IN = np.array([[2, 11, 4, 4], [2, 13, 0, 0], [2, 5, 19, 0]], np.int32)

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
    assert 37120 * 1024 + all_layers == 214_294_528


def test_one_embedding():
    leaves = jax.tree_util.tree_leaves_with_path(shapes_of(transformer, TINY))
    with_vocabulary = [path[-1].key for path, leaf in leaves if TINY.vocab_size in leaf.shape]
    assert with_vocabulary == ["embedding"]
    biases = {path[-2].key for path, _ in leaves if path[-1].key == "bias"}
    assert biases == {"ff_in", "ff_out", "ff_norm", "self_norm", "cross_norm"}


def test_init_scales():
    config = dataclasses.replace(ONE, width=64, ff=256, vocab_size=900)
    params = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(3))
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


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_forward_and_attention_against_numpy(norm):
    """Without any padding in the NumPy version: so padding has no influence either."""
    config = dataclasses.replace(TINY, norm=norm)
    params = drawn(transformer, config)

    @jax.jit
    def both(params):
        args = config, params, SOURCE, TARGET_IN
        return transformer.apply(*args), transformer.attention_weights(*args)

    logits, weights = both(params)
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


def test_memory_at_padding_is_never_read():
    mask = SOURCE != PAD
    memory = np.random.default_rng(0).normal(size=(3, 5, 16)).astype(np.float32)
    noisy = np.where(mask[:, :, None], memory, np.float32(1e3))
    params = drawn(transformer, ONE)
    decode = jax.jit(lambda memory: transformer.merge(ONE, params).decode(TARGET_IN, memory, mask))
    a, b = decode(memory), decode(noisy)
    np.testing.assert_array_equal(a, b)


def test_learns_to_copy():
    """Fresh sentences at every step: only attention to the right source position helps."""
    config = transformer.TransformerConfig(
        vocab_size=14, width=32, heads=2, layers=1, ff=64, dropout=0.0, dtype="float32"
    )
    tx = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 40, 200))

    def loss_of(params, source):
        target_in = jnp.pad(source[:, :-1], ((0, 0), (1, 0)), constant_values=START)
        logits = transformer.apply(config, params, source, target_in)
        return cross_entropy(logits, source).mean()

    def step(carry, key):
        params, state = carry
        source = jax.random.randint(key, (48, 4), 4, 14)
        loss, grads = jax.value_and_grad(loss_of)(params, source)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    def train(key):
        params = transformer.init(config, key)
        return jax.lax.scan(step, (params, tx.init(params)), jax.random.split(key, 200))[1]

    losses = jax.jit(train)(jax.random.key(0))
    assert float(losses[0]) > 2.3  # log 10 is 2.30
    assert float(losses[-10:].mean()) < 0.1
