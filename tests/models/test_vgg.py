"""VGG-11: published counts, NumPy beside it, the rate of its dropout."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import assert_close, numpy_conv

from decent_jax.models import resnet, vgg

TINY = vgg.VGGConfig(width=4, num_classes=6, dtype="float32")
pytestmark = pytest.mark.usefixtures("compile_once")


def drawn():
    """Parameters, none at its initial value."""
    params, statistics = jax.device_get(
        jax.jit(resnet.init, static_argnums=0)(TINY, jax.random.key(0))
    )
    assert statistics == {}
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), params)


def numpy_vgg(params, images):
    """Logits in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = np.asarray(images, np.float64)
    for number in range(1, 9):
        layer = params[f"conv{number}"]
        x = np.maximum(numpy_conv(x, layer["kernel"]) + layer["bias"], 0)
        if number in (1, 2, 4, 6, 8):
            edges = [(0, -n % 2) for n in x.shape]  # odd sizes keep their last row and column
            edges[0] = edges[3] = (0, 0)
            x = np.pad(x, edges, constant_values=-np.inf)
            x = np.max([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], 0)
    x = x.mean((1, 2))
    for name in ("fc1", "fc2"):
        x = np.maximum(x @ params[name]["kernel"] + params[name]["bias"], 0)
    return x @ params["fc"]["kernel"] + params["fc"]["bias"]


def test_published_counts():
    """Nine million weights in eight convolutions; 153 million multiply-adds per image of 32."""
    config = vgg.PRESETS["vgg11"]
    channels = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    convs = [9 * a * b for a, b in itertools.pairwise(channels)]
    linear = 2 * 512 * 512 + 5120
    biases = sum(channels[1:]) + 2 * 512 + 10
    assert resnet.num_params(config) == sum(convs) + linear + biases == 9_750_922
    pixels = [1024, 256, 64, 64, 16, 16, 4, 4]
    products = sum(np.multiply(convs, pixels)) + linear
    assert resnet.flops_per_image(config, 32) == 6 * products


@pytest.mark.parametrize("size", [32, 34, 16])
def test_logits_equal_numpys(size):
    params = drawn()
    images = np.random.default_rng(1).normal(size=(3, size, size, 3)).astype(np.float32)
    logits = jax.jit(resnet.logits_of, static_argnums=0)(TINY, params, {}, images)
    assert logits.dtype == jnp.float32
    assert_close(logits, numpy_vgg(params, images), rtol=2e-5)


def test_dropout_drops_the_configured_share_of_each_layers_inputs():
    """The kernel's gradient is zero in the rows of the inputs that were dropped."""
    config = dataclasses.replace(TINY, width=16, dropout=0.25)
    params, _ = jax.jit(resnet.init, static_argnums=0)(config, jax.random.key(0))
    images = np.random.default_rng(1).normal(size=(1, 32, 32, 3)).astype(np.float32)

    @jax.jit
    def arrived(key=None):
        def total(params):
            return resnet.train_logits(config, params, {}, images, key)[0].sum()

        gradient = jax.grad(total)(params)
        return jnp.stack([(gradient[name]["kernel"] != 0).any(1) for name in ("fc1", "fc2")])

    used = np.asarray(arrived()).all(axis=0)  # by both layers
    keys = jax.random.split(jax.random.key(1), 60)
    first, second = np.stack([np.asarray(arrived(key))[:, used] for key in keys], axis=1)
    assert used.sum() > 15 and first.mean() == pytest.approx(0.75, abs=0.05)
    both = first & second  # a second layer's input may also be zero for want of its own inputs
    assert both.mean() < 0.95 * min(first.mean(), second.mean())
