"""GPT-2 alone: published counts, initial parameters and precision. See `test_models`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import assert_close, drawn

from decent_jax.models import decoders, gpt2

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
    """Of one block and of two, which tells those of any number."""
    preset = dataclasses.replace(gpt2.PRESETS[name], **changes)
    one, two = (decoders.num_params(dataclasses.replace(preset, layers=n)) for n in (1, 2))
    assert one + (preset.layers - 1) * (two - one) == count


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
