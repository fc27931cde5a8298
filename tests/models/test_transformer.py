"""The Transformer alone: counts, scales, positions, masks.

See `test_models`, and `test_transformer_weights` for the NumPy version.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import count_of, drawn

from decent_jax.models import transformer

TINY = transformer.TransformerConfig(
    vocab_size=20, width=16, heads=2, layers=2, ff=24, dropout=0.0, dtype="float32"
)
ONE = dataclasses.replace(TINY, layers=1)  # compiles faster
# Compiling is what these tests spend their time on.
pytestmark = pytest.mark.usefixtures("compile_once")

SOURCE = np.array([[5, 9, 4, 12, 3], [7, 6, 3, 0, 0], [8, 0, 0, 0, 0]], np.int32)
TARGET_IN = np.array([[2, 11, 4, 4], [2, 13, 0, 0], [2, 5, 19, 0]], np.int32)

# --- Counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("base", 63_107_072), ("big", 209_051_648)])
def test_parameter_counts_by_hand(name, count):
    config = transformer.PRESETS[name]
    width, ff = config.width, config.ff
    attention, feed_forward, norm = 4 * width**2, 2 * width * ff + ff + width, 2 * width
    layers = config.layers * (3 * attention + 2 * feed_forward + 5 * norm)
    assert count_of(transformer, config) == config.vocab_size * width + layers == count


def test_every_dropout_of_a_pass_has_a_key_of_its_own(monkeypatch):
    """Those of the encoder and of the decoder, too."""
    keys, config = [], dataclasses.replace(ONE, dropout=0.1)

    def noted(x, rate, rng):
        keys.append(jax.random.key_data(rng))
        return x

    def keys_of(params):
        transformer.apply(config, params, SOURCE, TARGET_IN, jax.random.key(0))
        return keys

    monkeypatch.setattr(transformer, "dropout", noted)
    found = jax.jit(keys_of)(drawn(transformer, config))
    assert len({tuple(key.tolist()) for key in found}) == len(found) > 5


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


def test_sinusoids_of_any_length():
    positions = np.array([0, 1, 77, 5000])
    got = transformer.sinusoids(positions, 6)
    rates = 10000.0 ** (-np.array([0, 2, 4]) / 6)
    np.testing.assert_allclose(got[:, ::2], np.sin(positions[:, None] * rates), atol=1e-3)
    np.testing.assert_allclose(got[:, 1::2], np.cos(positions[:, None] * rates), atol=1e-3)
    np.testing.assert_allclose(got[:3, ::2], np.sin(positions[:3, None] * rates), atol=1e-5)
