"""ResNet: published counts, NumPy beside it, and every transform a training step uses."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from decent_jax.cpu import convolution
from decent_jax.models import resnet
from decent_jax.models.losses import cross_entropy

TINY = dataclasses.replace(
    resnet.PRESETS["tiny"], blocks=(1, 1), width=4, num_classes=6, dtype="float32"
)
DEEP = dataclasses.replace(TINY, bottleneck=True, blocks=(2, 1), zero_init=False)
N = 8
init = jax.jit(resnet.init, static_argnums=0)
logits_of = jax.jit(resnet.logits_of, static_argnums=0)
train_logits = jax.jit(resnet.train_logits, static_argnums=0)
batch_moments = jax.jit(resnet.batch_moments, static_argnums=0)


@pytest.fixture(scope="module")
def images():
    return jax.random.normal(jax.random.key(1), (4, 8, 8, 3))


def assert_close(got, wanted, rtol=1e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.max(np.abs(g - w)) <= rtol * np.max(np.abs(w))


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
    shapes, statistics = jax.eval_shape(partial(resnet.init, config), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
    assert resnet.num_params(config) == parameters
    assert round(resnet.flops_per_image(config) / 6e9, 2) == multiply_adds
    leaves = jax.tree.leaves((shapes, statistics))
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)


@pytest.mark.parametrize("config", [TINY, DEEP, resnet.PRESETS["tiny"]])
def test_num_params_is_the_real_count(config):
    params, _ = jax.eval_shape(partial(resnet.init, config), jax.random.key(0))
    assert resnet.num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))


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
    params, statistics = init(config, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: np.asarray(x) + rng.normal(0, 0.2, x.shape).astype(np.float32), params
    )
    return params, statistics


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


@pytest.mark.parametrize("shape", [(8, 7), (2, 2), (1, 4)])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_convolution_equals_numpy_and_its_gradient_jax(size, stride, shape):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (3, *shape, 4))
    kernel = jax.random.normal(keys[1], (size, size, 4, 5))
    cotangent = jax.random.normal(keys[2], (3, *(-(-length // stride) for length in shape), 5))

    @partial(jax.jit, static_argnums=0)
    def run(conv):
        y, backward = jax.vjp(lambda x, kernel: conv(x, kernel, stride), x, kernel)
        return y, backward(cotangent)

    y, gradients = run(convolution.conv)
    assert_close(y, numpy_conv(np.asarray(x, np.float64), np.asarray(kernel), stride))
    assert_close((y, gradients), run(convolution._forward))


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
    params, statistics = init(config, jax.random.key(0))
    model = resnet.merge(config, params, statistics)
    assert model.conv1.stride == 2 and model.conv1.kernel.shape == (7, 7, 3, 4)
    assert model.layer2["0"].downsample["conv"].stride == 2
    assert model.layer1["0"].downsample["conv"].stride == 1  # 4 channels become 16
    small = init(dataclasses.replace(config, small_images=True), jax.random.key(0))[0]
    assert small["conv1"]["kernel"].shape == (3, 3, 3, 4)


def test_max_pool_of_the_large_stem(images):
    """Windows of 3, every other pixel, padded by one: as pooling does in NumPy."""
    config = dataclasses.replace(TINY, blocks=(1,), small_images=False, zero_init=True)
    params, statistics = init(config, jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(2, 14, 14, 3)).astype(np.float32)
    stem = numpy_conv(x.astype(np.float64), np.asarray(params["conv1"]["kernel"]), 2)
    stem = np.maximum(stem / np.sqrt(1 + 1e-5), 0)  # initial statistics: mean 0, variance 1
    padded = np.pad(stem, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    pooled = np.max(
        [padded[:, i : i + 7 : 2, j : j + 7 : 2] for i in range(3) for j in range(3)], axis=0
    )
    # The block is the identity at the start (zero_init), so the rest is a mean and a matrix.
    wanted = pooled.mean(axis=(1, 2)) @ np.asarray(params["fc"]["kernel"])
    assert_close(logits_of(config, params, statistics, x), wanted)


def test_zero_init():
    for config, last in ((TINY, "bn2"), (dataclasses.replace(DEEP, zero_init=True), "bn3")):
        params, _ = init(config, jax.random.key(0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if path[-1].key == "scale":
                zero = path[-2].key == last
                np.testing.assert_array_equal(leaf, 0.0 if zero else 1.0)
    params, _ = init(DEEP, jax.random.key(0))
    assert float(params["layer1"]["0"]["bn3"]["scale"].min()) == 1


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


def test_decay_mask_is_by_kind():
    params, _ = jax.eval_shape(partial(resnet.init, DEEP), jax.random.key(0))
    mask = resnet.decay_mask(params)
    assert mask == jax.tree.map(lambda x: x.ndim > 1, params)
    assert not mask["layer1"]["0"]["downsample"]["bn"]["scale"]
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), params)
    assert resnet.decay_mask(stacked) == mask


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


# --- Transforms ---------------------------------------------------------------------------------


def step(config, params, statistics, images, labels):
    """Loss, new statistics and gradient of one replica."""

    def loss(params):
        logits, new = resnet.train_logits(config, params, statistics, images)
        return cross_entropy(logits, labels).mean(), new

    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize("config", [TINY, pytest.param(DEEP, marks=pytest.mark.slow)])
def test_transforms_agree(mesh8, config):
    """A loop over replicas == vmap == lax.map == shard_map over 8 devices."""
    keys = jax.random.split(jax.random.key(2), N)
    params, statistics = jax.jit(jax.vmap(partial(resnet.init, config)))(keys)
    images = jax.random.normal(jax.random.key(3), (N, 3, 8, 8, 3))
    labels = jax.random.randint(jax.random.key(4), (N, 3), 0, config.num_classes)
    replicated = params, statistics, images, labels
    one = partial(step, config)
    pick = jax.jit(lambda i: one(*jax.tree.map(lambda x: x[i], replicated)))
    loop = jax.tree.map(lambda *x: jnp.stack(x), *[pick(i) for i in range(N)])
    vmapped = jax.jit(jax.vmap(one))(*replicated)
    mapped = jax.jit(lambda args: lax.map(lambda a: one(*a), args))(replicated)

    def per_device(*args):
        local = jax.tree.map(lambda x: x[0], args)
        return jax.tree.map(lambda x: x[None], one(*local))

    sharded = jax.jit(
        jax.shard_map(per_device, mesh=mesh8, in_specs=P("replica"), out_specs=P("replica"))
    )(*replicated)
    for other in (vmapped, mapped, jax.device_get(sharded)):
        assert_close(other, loop, rtol=2e-4)  # batch norms amplify the rounding of small batches


# --- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": ()}, r"blocks must be at least 1 for each stage, got \(\)"),
        ({"blocks": (2, 0)}, r"blocks must be at least 1 for each stage, got \(2, 0\)"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"dtype": "int8"}, "dtype must be one of .*, got 'int8'"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_images_must_have_three_channels():
    params, statistics = init(TINY, jax.random.key(0))
    with pytest.raises(ValueError, match=r"\(batch, height, width, 3\), got \(2, 8, 8, 1\)"):
        logits_of(TINY, params, statistics, jnp.zeros((2, 8, 8, 1)))
