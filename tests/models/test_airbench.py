"""The network of airbench94: published counts, whitening in closed form, NumPy beside it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import assert_close, numpy_conv

from decent_jax.models import airbench, resnet

TINY = airbench.AirbenchConfig(width=12, num_classes=6, dtype="float32")
pytestmark = pytest.mark.usefixtures("compile_once")
erf = np.vectorize(math.erf)
init = jax.jit(resnet.init, static_argnums=0)


@pytest.fixture(scope="module")
def images():
    """Neighbouring pixels and colours are alike, as in photographs."""
    rough = np.random.default_rng(1).normal(size=(40, 19, 19, 5))
    smooth = sum(rough[:, i : i + 17, j : j + 17] for i in range(3) for j in range(3))
    return np.stack([smooth[..., k : k + 3].mean(-1) for k in range(3)], -1).astype(np.float32)


def test_published_counts():
    """1.97 million parameters, and 0.29 PFLOP for 8 epochs of 50,000 images."""
    config = airbench.PRESETS["airbench94"]
    assert round(resnet.num_params(config) / 1e6, 2) == 1.97
    assert resnet.flops_per_image(config, 32) * 8 * 50_000 == pytest.approx(0.29e15, rel=0.03)


def test_whitened_patches_have_the_identity_as_their_covariance(images):
    kernel = airbench.whitening(images)
    assert kernel.shape == (2, 2, 3, 24) and kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel[..., 12:], -kernel[..., :12])
    patches = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(1, 2))
    outputs = np.einsum("bhwiyx,yxio->bhwo", patches, kernel.astype(float)).reshape(-1, 24)
    second = outputs.T @ outputs / len(outputs)
    inputs = patches.reshape(-1, 12).astype(float)
    variances = np.linalg.eigvalsh(inputs.T @ inputs / len(inputs))
    wanted = np.diag(variances / (variances + 5e-4))  # the identity, but for the small number
    assert variances.max() / variances.min() > 100 and wanted.min() < 1 < 1.05 * wanted.max()
    np.testing.assert_allclose(second[:12, :12], wanted, atol=1e-4)
    np.testing.assert_allclose(second[12:, :12], -wanted, atol=1e-4)


def drawn(config, images):
    """Parameters and statistics, none at its initial value but the whitening."""
    params, statistics = jax.device_get(init(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), params)
    params["whiten"]["kernel"] = airbench.whitening(images)
    numbers = jax.tree.map(lambda x: np.float32(np.abs(np.sin(1 + np.arange(len(x))))), statistics)
    return jax.tree.map(jnp.asarray, (params, jax.tree.map(np.add, statistics, numbers)))


def numpy_airbench(params, statistics, images, train):
    """(logits, new statistics) in float64."""
    params, old = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), x) for x in (params, statistics)
    )
    new = {}

    def gelu(x):
        return x * (1 + erf(x / math.sqrt(2))) / 2

    def norm(x, group, name):
        mean, var = old[group][name]["mean"], old[group][name]["var"]
        if train:
            m, v = x.mean((0, 1, 2)), x.var((0, 1, 2))
            own = {"mean": 0.6 * mean + 0.4 * m, "var": 0.6 * var + 0.4 * v}
            new.setdefault(group, {})[name] = own
            mean, var = m, v
        return (x - mean) / np.sqrt(var + 1e-12) + params[group][name]["bias"]

    patches = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(1, 2))
    x = np.einsum("bhwiyx,yxio->bhwo", patches, params["whiten"]["kernel"])
    x = gelu(x + params["whiten"]["bias"])
    for group in ("group1", "group2", "group3"):
        x = numpy_conv(x, params[group]["conv1"]["kernel"])
        half = [n // 2 for n in x.shape[1:3]]
        x = np.max([x[:, i::2, j::2][:, : half[0], : half[1]] for i in (0, 1) for j in (0, 1)], 0)
        x = gelu(norm(x, group, "norm1"))
        x = gelu(norm(numpy_conv(x, params[group]["conv2"]["kernel"]), group, "norm2"))
    return x.max((1, 2)) @ params["fc"]["kernel"] / x.shape[-1], new


@pytest.mark.parametrize("train", [False, True])
def test_logits_and_statistics_equal_numpys(train, images):
    params, statistics = drawn(TINY, images)
    images = images[:4]
    wanted, new = numpy_airbench(params, statistics, images, train)
    if train:
        logits, got = jax.jit(resnet.train_logits, static_argnums=0)(
            TINY, params, statistics, images
        )
        assert_close(got, new)
    else:
        logits = jax.jit(resnet.logits_of, static_argnums=0)(TINY, params, statistics, images)
    assert logits.dtype == jnp.float32
    assert_close(logits, wanted, rtol=2e-5)


def test_the_whitening_gets_no_gradient(images):
    params, statistics = drawn(TINY, images)

    def loss(params):
        return resnet.train_logits(TINY, params, statistics, images[:4])[0].var()

    gradient = jax.jit(jax.grad(loss))(params)
    moved = jax.tree_util.tree_map_with_path(lambda path, x: bool((x != 0).any()), gradient)
    assert moved["whiten"] == {"kernel": False, "bias": True}
    moved["whiten"]["kernel"] = True
    assert all(jax.tree.leaves(moved))


def test_convolutions_begin_as_the_identity_where_they_can():
    params, _ = init(dataclasses.replace(TINY, width=32), jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(1, 5, 5, 24))
    kernel = np.asarray(params["group1"]["conv1"]["kernel"], float)  # 24 to 32 channels
    y = numpy_conv(x, kernel)
    np.testing.assert_array_equal(y[..., :24], x)
    bound = 1 / math.sqrt(9 * 24)  # PyTorch's, of fan-in
    assert 0.9 * bound < np.abs(kernel[..., 24:]).max() <= bound
    same = np.asarray(params["group3"]["conv2"]["kernel"])
    np.testing.assert_array_equal(same.sum((0, 1)), np.eye(128))
    assert float(params["fc"]["kernel"].std()) == pytest.approx(1, abs=1e-5)
