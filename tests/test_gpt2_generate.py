"""Sampling: the cache and the sliding window against the plain models, and the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import drawn

from decent_jax.models import decoders, gpt2, llama
from decent_jax.models.generate import generate

SHAPE = {"vocab_size": 20, "context": 8, "layers": 2, "heads": 2, "width": 16, "dtype": "float32"}
TINY = gpt2.GPT2Config(**SHAPE)
LLAMA = llama.LlamaConfig(**SHAPE, kv_heads=1, hidden=24, rope_theta=100.0)
pytestmark = pytest.mark.usefixtures("compile_once")
apply = jax.jit(decoders.apply, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    """Predictions that depend on every token seen."""
    return drawn(decoders, TINY)


def recompute(config, params, prompt, num_tokens):
    """Greedy continuation, the whole model for every token; padded behind, which compiles once."""
    tokens = np.asarray(prompt)
    for _ in range(num_tokens):
        window = tokens[:, -config.context :]
        length = window.shape[1]
        logits = apply(config, params, np.pad(window, ((0, 0), (0, config.context - length))))
        new = np.argmax(logits[:, length - 1 : length], -1).astype(np.int32)
        tokens = np.concatenate([tokens, new], 1)
    return tokens


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(("prompt", "num_tokens"), [(3, 0), (3, 4), (3, 12), (8, 3), (11, 2)])
def test_greedy_equals_recomputation(config, prompt, num_tokens):
    """Within the context (cache), past it (sliding window), and from one to the other."""
    params = drawn(decoders, config)
    start = jax.random.randint(jax.random.key(prompt), (3, prompt), 0, 20)
    got = generate(config, params, start, num_tokens, jax.random.key(0), temperature=0.0)
    assert got.dtype == start.dtype
    np.testing.assert_array_equal(got, recompute(config, params, start, num_tokens))


def test_sampling_follows_the_model(params):
    """Frequencies of 8000 samples of one prompt against the softmax, at temperature 2."""
    start = jnp.tile(jnp.array([[1, 2, 3]]), (8000, 1))
    sample = generate(TINY, params, start, 1, jax.random.key(7), temperature=2.0)[:, -1]
    wanted = jax.nn.softmax(apply(TINY, params, start[:1])[0, -1] / 2.0)
    got = np.bincount(sample, minlength=20) / len(sample)
    assert np.abs(got - wanted).max() < 0.02  # 3.5 standard deviations of p = 1/2


def test_top_k_and_key(params):
    start = jnp.tile(jnp.array([[1, 2, 3]]), (200, 1))
    a, b = (
        generate(TINY, params, start, 1, jax.random.key(k), temperature=9.0, top_k=3)[:, -1]
        for k in (0, 1)
    )
    likeliest = jax.lax.top_k(apply(TINY, params, start[:1])[0, -1], 3)[1]
    assert set(a.tolist()) == set(likeliest.tolist())
    assert (a != b).any()
