"""GPT-2 alone: published counts, initial parameters, precision, sampling. See `test_models`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import assert_close, count_of, drawn

from decent_jax.models import decoders, gpt2, llama
from decent_jax.models.decoders import generate

TINY = gpt2.GPT2Config(vocab_size=40, context=16, layers=1, heads=2, width=16, dtype="float32")
pytestmark = pytest.mark.usefixtures("compile_once")
init = jax.jit(decoders.init, static_argnums=0)


@pytest.mark.parametrize(
    ("name", "changes", "count"),
    [
        ("small", {}, 124439808),
        ("medium", {}, 354823168),
        ("large", {}, 774030080),
        ("xl", {}, 1557611200),
        ("small", {"vocab_size": 50304, "bias": False}, 124373760),
    ],
)
def test_published_parameter_counts(name, changes, count):
    preset = dataclasses.replace(gpt2.PRESETS[name], **changes)
    assert count_of(decoders, preset) == count


def test_initial_parameters_and_those_of_replicas():
    keys = jax.random.split(jax.random.key(3), 4)
    params = init(TINY, keys[2])
    block = params["h"]["0"]
    assert type(params["h"]) is dict
    for kernel, std in [
        (params["wte"]["embedding"], 0.02),
        (params["wpe"]["embedding"], 0.02),
        (block["attn"]["c_attn"]["kernel"], 0.02),
        (block["mlp"]["c_fc"]["kernel"], 0.02),
        (block["attn"]["c_proj"]["kernel"], 0.02 / 2**0.5),
        (block["mlp"]["c_proj"]["kernel"], 0.02 / 2**0.5),
    ]:
        assert float(kernel.std()) == pytest.approx(std, rel=0.1)
    assert float(jnp.abs(block["mlp"]["c_fc"]["bias"]).max()) == 0
    assert float(block["ln_1"]["scale"].min()) == 1
    stacked = jax.jit(jax.vmap(partial(decoders.init, TINY)))(keys)
    assert_close(jax.tree.map(lambda x: x[2], stacked), params, rtol=1e-6)


def test_flops_per_token():
    config = dataclasses.replace(gpt2.PRESETS["small"], layers=3)
    wanted = 6 * (decoders.num_params(config) - 1024 * 768) + 12 * 3 * 768 * 1024
    assert decoders.flops_per_token(config, 1024) == wanted


def test_the_backward_pass_of_the_mlp_keeps_two_wide_arrays():
    """What goes into GELU, and what comes out, which the next matrix's gradient needs."""
    graph, params = nnx.split(gpt2.GeluMLP(TINY, nnx.Rngs(0)))
    _, backward = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, jnp.ones((3, 16)))
    wide = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape == (3, 4 * TINY.width)]
    assert len(wide) == 2


def test_gradient_of_a_frequent_token_is_summed_in_float32():
    """2048 times one token: a bfloat16 sum of equal terms would stop growing at 256 of them."""
    half = dataclasses.replace(TINY, dtype="bfloat16")
    tokens = jnp.full((128, 16), 7)

    def embedded(params):
        model = decoders.merge(half, params)
        return model.embed(tokens, jnp.arange(16)).astype(jnp.float32).sum()

    grads = jax.jit(jax.grad(embedded))(drawn(decoders, TINY))
    np.testing.assert_array_equal(grads["wte"]["embedding"][7], 2048.0)
    np.testing.assert_array_equal(grads["wpe"]["embedding"], 128.0)


# --- sampling: the cache and the sliding window against the plain models --------------------------


SHAPE = {"vocab_size": 20, "context": 8, "layers": 2, "heads": 2, "width": 16, "dtype": "float32"}
SMALL = gpt2.GPT2Config(**SHAPE)
LLAMA = llama.LlamaConfig(**SHAPE, kv_heads=1, hidden=24, rope_theta=100.0)
apply = jax.jit(decoders.apply, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    """Predictions that depend on every token seen."""
    return drawn(decoders, SMALL)


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


@pytest.mark.parametrize(
    ("config", "prompt", "num_tokens"),
    [(SMALL, 3, 0), (SMALL, 3, 12), (SMALL, 11, 2), (LLAMA, 3, 12)],
)
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
    sample = generate(SMALL, params, start, 1, jax.random.key(7), temperature=2.0)[:, -1]
    wanted = jax.nn.softmax(apply(SMALL, params, start[:1])[0, -1] / 2.0)
    got = np.bincount(sample, minlength=20) / len(sample)
    assert np.abs(got - wanted).max() < 0.02  # 3.5 standard deviations of p = 1/2


def test_top_k_and_key(params):
    start = jnp.tile(jnp.array([[1, 2, 3]]), (200, 1))
    a, b = (
        generate(SMALL, params, start, 1, jax.random.key(k), temperature=9.0, top_k=3)[:, -1]
        for k in (0, 1)
    )
    likeliest = jax.lax.top_k(apply(SMALL, params, start[:1])[0, -1], 3)[1]
    assert set(a.tolist()) == set(likeliest.tolist())
    assert (a != b).any()
