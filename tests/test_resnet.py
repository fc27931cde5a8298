"""The ResNet alone: published counts, and NumPy beside it. See `test_models`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import assert_close, shapes_of

from decent_jax.cpu import convolution
from decent_jax.models import resnet

TINY = dataclasses.replace(
    resnet.PRESETS["tiny"], blocks=(1, 1), width=4, num_classes=6, dtype="float32"
)
DEEP = dataclasses.replace(TINY, bottleneck=True, blocks=(2, 1), zero_init=False)
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


@pytest.mark.parametrize("size", [32, 33])
@pytest.mark.parametrize("small_images", [True, False])
def test_flops_are_those_of_the_real_convolutions(small_images, size):
    config = dataclasses.replace(DEEP, small_images=small_images)
    jaxpr = jax.make_jaxpr(lambda key, x: resnet.logits_of(config, *resnet.init(config, key), x))(
        jax.random.key(0), jnp.zeros((1, size, size, 3))
    )
    total = 32 * 6  # the last layer: 4 * 2 * 4 features, 6 classes
    for equation in _equations(jaxpr.jaxpr):
        if equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            total += np.prod(equation.outvars[0].aval.shape) * np.prod(kernel[:3])
    assert total == resnet.flops_per_image(config, size) / 6


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


# --- Against NumPy ------------------------------------------------------------------------------


def numpy_conv(x, kernel, stride):
    """By the definition: a sum over the kernel's positions."""
    half = kernel.shape[0] // 2
    padded = np.pad(x, ((0, 0), (half, half), (half, half), (0, 0)))
    height, width = (-(-size // stride) for size in x.shape[1:3])
    out = np.zeros((len(x), height, width, kernel.shape[3]))
    for i in range(kernel.shape[0]):
        for j in range(kernel.shape[1]):
            rows = slice(i, i + stride * (height - 1) + 1, stride)
            columns = slice(j, j + stride * (width - 1) + 1, stride)
            out += padded[:, rows, columns] @ kernel[i, j]
    return out


def numpy_norm(x, norm, mean=None, var=None):
    if mean is None:
        mean, var = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
    return (x - mean) / np.sqrt(var + 1e-5) * norm["scale"] + norm["bias"]


def numpy_model(params, x, moments, strides):
    """A ResNet of basic blocks; appends the (mean, var) of every batch norm's input."""

    def conv_norm(x, conv, norm, stride=1):
        x = numpy_conv(x, conv["kernel"], stride)
        moments.append((x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))))
        return numpy_norm(x, norm)

    x = np.maximum(conv_norm(x, params["conv1"], params["bn1"]), 0)
    for stage, stride in enumerate(strides, start=1):
        block = params[f"layer{stage}"]["0"]
        shortcut = x
        y = np.maximum(conv_norm(x, block["conv1"], block["bn1"], stride), 0)
        y = conv_norm(y, block["conv2"], block["bn2"])
        if "downsample" in block:
            shortcut = conv_norm(x, block["downsample"]["conv"], block["downsample"]["bn"], stride)
        x = np.maximum(shortcut + y, 0)
    return x.mean(axis=(1, 2)) @ params["fc"]["kernel"] + params["fc"]["bias"]


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


def test_training_forward_and_statistics_equal_numpy(images):
    config = dataclasses.replace(TINY, momentum=0.75)
    params, statistics = random_params(config)
    logits, new = train_logits(config, params, statistics, images)
    moments = []
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, images))
    wanted = numpy_model(*wide, moments, strides=(1, 2))
    assert logits.dtype == jnp.float32
    assert_close(logits, wanted)
    block_1, block_2 = new["layer1"]["0"], new["layer2"]["0"]
    norms = [new["bn1"], block_1["bn1"], block_1["bn2"], block_2["bn1"], block_2["bn2"]]
    norms.append(block_2["downsample"]["bn"])
    assert len(moments) == 6 == len(jax.tree.leaves(new)) / 2
    for norm, (mean, var) in zip(norms, moments, strict=True):
        np.testing.assert_allclose(norm["mean"], 0.25 * mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(norm["var"], 0.75 + 0.25 * var, rtol=1e-5)


def test_evaluation_uses_the_running_statistics(images):
    """Statistics that are those of a batch give the same logits as training on it does."""
    params, statistics = random_params(TINY)
    own = dataclasses.replace(TINY, momentum=0.0)
    logits, statistics = train_logits(own, params, statistics, images)
    assert_close(logits_of(TINY, params, statistics, images), logits)
    alone = logits_of(TINY, params, statistics, images[:1])  # whatever else is in the batch
    assert_close(alone, logits[:1])


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

    found = run(convolution.conv, inputs)
    assert_close(found, run(convolution._forward, inputs))
    for (_, stride, _), (x, kernel, _), (y, _) in zip(cases, inputs, found, strict=True):
        assert_close(y, numpy_conv(np.asarray(x, np.float64), kernel, stride))


def test_convolution_is_left_to_jax_on_gpus(monkeypatch):
    x, kernel = jnp.zeros((1, 4, 4, 2)), jnp.zeros((3, 3, 2, 2))

    def trace():
        return str(jax.make_jaxpr(lambda x, k: convolution.conv(x, k))(x, kernel))

    assert "custom_vjp" in trace()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "custom_vjp" not in trace() and "conv_general_dilated" in trace()


# --- Shapes, start, dtypes ----------------------------------------------------------------------


def test_strides_of_version_1_5():
    """The 3x3 convolution of a bottleneck has the stride; the stem and stages halve as they do."""
    config = dataclasses.replace(DEEP, blocks=(1, 1), small_images=False)
    strides = [stride for _, _, stride in resnet._branch(config, 1, 2)]
    assert strides == [1, 2, 1]
    model = resnet.merge(config, *random_params(config))
    assert model.conv1.stride == 2 and model.conv1.kernel.shape == (7, 7, 3, 4)
    assert model.layer2["0"].downsample["conv"].stride == 2
    assert model.layer1["0"].downsample["conv"].stride == 1  # 4 channels become 16
    small = shapes_of(resnet, dataclasses.replace(config, small_images=True))[0]
    assert small["conv1"]["kernel"].shape == (3, 3, 3, 4)


def test_max_pool_of_the_large_stem(images):
    """Windows of 3, every other pixel, padded by one: as pooling does in NumPy."""
    config = dataclasses.replace(TINY, blocks=(1,), small_images=False)
    params, statistics = random_params(config)
    params["layer1"]["0"]["bn2"] = {"scale": np.zeros(4, "f"), "bias": np.zeros(4, "f")}
    x = np.random.default_rng(0).normal(size=(2, 14, 14, 3)).astype(np.float32)
    stem = numpy_conv(x.astype(np.float64), params["conv1"]["kernel"], 2)
    stem = np.maximum(numpy_norm(stem, params["bn1"], mean=0, var=1), 0)
    padded = np.pad(stem, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    pooled = np.max(
        [padded[:, i : i + 7 : 2, j : j + 7 : 2] for i in range(3) for j in range(3)], axis=0
    )
    # The block is the identity, so the rest is a mean and a matrix.
    wanted = pooled.mean(axis=(1, 2)) @ params["fc"]["kernel"] + params["fc"]["bias"]
    assert_close(logits_of(config, params, statistics, x), wanted)


def test_zero_init():
    basic, deep = (dataclasses.replace(config, blocks=(1,)) for config in (TINY, DEEP))
    zeroed = dataclasses.replace(deep, zero_init=True)
    for config, last in ((basic, "bn2"), (zeroed, "bn3"), (deep, None)):
        params, _ = init(config, jax.random.key(0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if path[-1].key == "scale":
                zero = path[-2].key == last
                np.testing.assert_array_equal(leaf, 0.0 if zero else 1.0)


def test_init_scales():
    config = dataclasses.replace(TINY, width=32)
    params, statistics = init(config, jax.random.key(0))
    kernel = params["layer2"]["0"]["conv2"]["kernel"]  # 3x3, 64 to 64
    assert float(kernel.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)
    last = params["fc"]["kernel"]
    assert float(jnp.abs(last).max()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(jnp.abs(params["fc"]["bias"]).max()) == 0
    assert type(params["layer1"]) is dict
    assert float(jnp.abs(statistics["bn1"]["mean"]).max()) == 0
    assert float(statistics["bn1"]["var"].min()) == 1


def test_bfloat16_is_close_to_float32_and_keeps_float32_statistics(images):
    half = dataclasses.replace(TINY, dtype="bfloat16")
    params, statistics = random_params(TINY)
    (wide_logits, wide), (half_logits, narrow) = (
        train_logits(config, params, statistics, images) for config in (TINY, half)
    )
    assert half_logits.dtype == jnp.float32
    assert_close(half_logits, wide_logits, rtol=0.05)
    assert_close(narrow, wide, rtol=0.05)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(narrow))


def test_bfloat16_normalises_with_float32_statistics():
    """A mean of 1000.7 of inputs about it: rounded to bfloat16, 1000, it would be off by 0.7."""
    norm = resnet.BatchNorm(dataclasses.replace(TINY, dtype="bfloat16"), 2)
    norm.mean[...] = jnp.array([1000.7, 0.0])
    y = norm(jnp.full((1, 1, 1, 2), 1000.0, jnp.bfloat16), False)
    assert y.dtype == jnp.bfloat16
    assert float(y[0, 0, 0, 0]) == pytest.approx(-0.7, abs=0.01)


def test_images_must_have_three_channels():
    with pytest.raises(ValueError, match=r"\(batch, height, width, 3\), got \(2, 8, 8, 1\)"):
        jax.eval_shape(
            partial(resnet.logits_of, TINY), *shapes_of(resnet, TINY), jnp.zeros((2, 8, 8, 1))
        )
