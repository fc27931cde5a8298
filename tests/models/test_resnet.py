"""The ResNet alone: published counts, and NumPy beside it. See `test_models`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from networks import assert_close, numpy_conv, numpy_resnet, shapes_of

from decent_jax import cpu
from decent_jax.models import resnet, weights

TINY = dataclasses.replace(
    resnet.PRESETS["tiny"], blocks=(1, 1), width=4, num_classes=6, dtype="float32"
)
DEEP = dataclasses.replace(TINY, bottleneck=True, blocks=(2, 1))
pytestmark = pytest.mark.usefixtures("compile_once")
init = jax.jit(resnet.init, static_argnums=0)
logits_of = jax.jit(resnet.logits_of, static_argnums=0)
train_logits = jax.jit(resnet.train_logits, static_argnums=0)
batch_moments = jax.jit(resnet.batch_moments, static_argnums=0)


@pytest.fixture(scope="module")
def images():
    return jax.random.normal(jax.random.key(1), (4, 8, 8, 3))


# --- Counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "multiply_adds"),
    [
        ("resnet18", 11689512, 1.81),
        ("resnet34", 21797672, 3.66),
        ("resnet50", 25557032, 4.09),
        ("resnet101", 44549160, 7.80),
        ("resnet152", 60192808, 11.51),
    ],
)
def test_published_counts(name, parameters, multiply_adds):
    """Torchvision's: parameters, and billions of multiply-adds of an image of 224 pixels."""
    config = resnet.PRESETS[name]
    assert resnet.num_params(config) == parameters
    assert round(resnet.flops_per_image(config) / 6e9, 2) == multiply_adds


# --- Against NumPy ------------------------------------------------------------------------------


def random_params(config, seed=0):
    """Nothing at 0 or 1, so that every parameter matters."""
    rng = np.random.default_rng(seed)
    shapes, statistics = shapes_of(resnet, config)
    params = jax.tree.map(
        lambda x: rng.normal(len(x.shape) == 1, 0.3, x.shape).astype(np.float32), shapes
    )
    return params, resnet._each_batch_norm(
        lambda mean, var: (np.zeros(mean.shape, "f"), np.ones(var.shape, "f")), statistics
    )


@pytest.mark.parametrize("config", [TINY, DEEP], ids=["basic", "bottleneck"])
def test_training_forward_and_statistics_equal_numpy(config, images, tmp_path):
    config = dataclasses.replace(config, momentum=0.75)
    params, statistics = random_params(config)
    logits, new = train_logits(config, params, statistics, images)
    weights.save_resnet(tmp_path / "model.safetensors", params, new, config, 0, {})
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    moments = {}
    wanted = numpy_resnet(tensors, images, moments)
    assert logits.dtype == jnp.float32
    assert_close(logits, wanted)
    assert len(moments) == len(jax.tree.leaves(new)) / 2
    for norm, (mean, var) in moments.items():
        np.testing.assert_allclose(
            tensors[f"{norm}.running_mean"], 0.25 * mean, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(tensors[f"{norm}.running_var"], 0.75 + 0.25 * var, rtol=1e-5)


def test_moments_of_batches_are_those_of_their_union(images):
    """Of the first batch norm, whose inputs do not depend on the batch."""
    params, _ = random_params(TINY)
    halves = [batch_moments(TINY, params, half) for half in (images[:2], images[2:])]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    whole = resnet.from_moments(mean)["bn1"]
    inputs = numpy_conv(np.asarray(images, np.float64), params["conv1"]["kernel"], 1)
    np.testing.assert_allclose(whole["mean"], inputs.mean(axis=(0, 1, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(whole["var"], inputs.var(axis=(0, 1, 2)), rtol=1e-4)
    one = resnet.from_moments(batch_moments(TINY, params, images))
    own = dataclasses.replace(TINY, momentum=0.0)
    zeros = jax.tree.map(jnp.zeros_like, one)
    assert_close(one, train_logits(own, params, zeros, images)[1], rtol=1e-4)


def test_convolution_equals_numpy_and_its_gradient_jax():
    """Nine of 27 cases: every pair of a size, a stride and a shape occurs in one of them."""
    shapes = (8, 7), (2, 2), (1, 4)
    cases = [
        (size, j + 1, shapes[(i + j) % 3]) for i, size in enumerate((1, 3, 7)) for j in range(3)
    ]
    rng = np.random.default_rng(0)
    inputs = []
    for size, stride, shape in cases:
        out = [-(-length // stride) for length in shape]
        of = (3, *shape, 4), (size, size, 4, 5), (3, *out, 5)
        inputs.append([rng.normal(size=x).astype(np.float32) for x in of])

    @partial(jax.jit, static_argnums=0)
    def run(conv, inputs):
        results = []
        for (_, stride, _), (x, kernel, cotangent) in zip(cases, inputs, strict=True):
            y, backward = jax.vjp(partial(conv, stride=stride), x, kernel)
            results.append((y, backward(cotangent)))
        return results

    found = run(cpu.conv, inputs)
    assert_close(found, run(cpu._forward, inputs))
    for (_, stride, _), (x, kernel, _), (y, _) in zip(cases, inputs, found, strict=True):
        assert_close(y, numpy_conv(np.asarray(x, np.float64), kernel, stride))


def test_convolution_is_left_to_jax_on_gpus(monkeypatch):
    x, kernel = jnp.zeros((1, 4, 4, 2)), jnp.zeros((3, 3, 2, 2))

    def trace():
        return str(jax.make_jaxpr(lambda x, k: cpu.conv(x, k))(x, kernel))

    assert "custom_vjp" in trace()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "custom_vjp" not in trace() and "conv_general_dilated" in trace()


# --- Shapes, start, dtypes ----------------------------------------------------------------------


def test_blocks_begin_as_the_identity():
    for config, last in ((TINY, "bn2"), (DEEP, "bn3")):
        params, _ = init(dataclasses.replace(config, blocks=(1,)), jax.random.key(0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if path[-1].key == "scale":
                np.testing.assert_array_equal(leaf, float(path[-2].key != last))


def test_init_scales():
    config = dataclasses.replace(TINY, width=32)
    params, statistics = init(config, jax.random.key(0))
    kernel = params["layer2"]["0"]["conv1"]["kernel"]  # 3x3, 32 to 64
    assert float(kernel.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)
    last = params["fc"]["kernel"]
    assert float(jnp.abs(last).max()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(jnp.abs(params["fc"]["bias"]).max()) == 0
    assert type(params["layer1"]) is dict
    assert float(jnp.abs(statistics["bn1"]["mean"]).max()) == 0
    assert float(statistics["bn1"]["var"].min()) == 1


def test_bfloat16_normalizes_with_float32_statistics():
    """A mean of 1000.7 of inputs about it: rounded to bfloat16, 1000, it would be off by 0.7."""
    norm = resnet.BatchNorm(dataclasses.replace(TINY, dtype="bfloat16"), 2)
    norm.mean[...] = jnp.array([1000.7, 0.0])
    y = norm(jnp.full((1, 1, 1, 2), 1000.0, jnp.bfloat16), False)
    assert y.dtype == jnp.bfloat16
    assert float(y[0, 0, 0, 0]) == pytest.approx(-0.7, abs=0.01)
