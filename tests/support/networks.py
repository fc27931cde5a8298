"""What tests of networks share: parameters that compile nothing, NumPy, how close is equal."""

import dataclasses
from functools import partial

import jax
import numpy as np

SPREADS = {"kernel": 1.5, "embedding": 1.5, "scale": 0.3, "bias": 0.3}


def shapes_of(module, config):
    """What ``module.init`` returns, as shapes."""
    return jax.eval_shape(partial(module.init, config), jax.random.key(0))


def count_of(module, config):
    """Parameters: those of one layer and of two tell those of any number."""
    one, two = (module.num_params(dataclasses.replace(config, layers=n)) for n in (1, 2))
    return one + (config.layers - 1) * (two - one)


def drawn(module, config, seed=9, spreads=SPREADS):
    """Parameters that NumPy draws: all of them matter, and attention is far from uniform.

    Matrices spread by ``spread * columns ** -0.5``, biases around 0 and scales around 1.
    """
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        kind = path[-1].key
        columns = shape.shape[-1] if kind in ("kernel", "embedding") else 1
        noise = spreads[kind] * columns**-0.5 * rng.normal(size=shape.shape)
        return np.float32(noise + (kind == "scale"))

    return jax.tree_util.tree_map_with_path(draw, shapes_of(module, config))


def assert_close(got, wanted, rtol=1e-5):
    """Each array of a tree differs by at most ``rtol`` of the largest number in it."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.max(np.abs(g - w)) <= rtol * np.max(np.abs(w))


def numpy_conv(x, kernel, stride=1):
    """``(B, H, W, I)`` with ``(K, K, I, O)``, padded with ``K // 2`` zeros."""
    half = kernel.shape[0] // 2
    x = np.pad(x, ((0, 0), (half, half), (half, half), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], axis=(1, 2))
    windows = windows[:, ::stride, ::stride]
    return np.einsum("bhwiyx,yxio->bhwo", windows, kernel, optimize=True)


def numpy_resnet(tensors, images, moments=None):
    """Logits of torchvision's ResNet in float64, from the tensors of a file alone.

    In evaluation; or, where ``moments`` is a dict, in training: it then receives the mean and the
    variance of each batch norm's inputs, by its name.
    """
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}

    def conv_norm(x, conv, norm, stride=1):
        x = numpy_conv(x, tensors[f"{conv}.weight"].transpose(2, 3, 1, 0), stride)
        mean, var = tensors[f"{norm}.running_mean"], tensors[f"{norm}.running_var"]
        if moments is not None:
            mean, var = moments[norm] = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
        normalized = (x - mean) / np.sqrt(var + 1e-5)
        return normalized * tensors[f"{norm}.weight"] + tensors[f"{norm}.bias"]

    large_stem = tensors["conv1.weight"].shape[-1] == 7
    x = conv_norm(np.asarray(images, np.float64), "conv1", "bn1", 2 if large_stem else 1)
    x = np.maximum(x, 0)
    if large_stem:
        x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
        x = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2)).max(axis=(4, 5))
        x = x[:, ::2, ::2]
    blocks = {name.rsplit(".conv1")[0] for name in tensors if ".conv1." in name}
    for block in sorted(blocks):
        halves = not block.startswith("layer1") and block.endswith(".0")
        bottleneck = f"{block}.conv3.weight" in tensors
        shortcut, convolutions = x, (1, 2, 3) if bottleneck else (1, 2)
        for i in convolutions:
            stride = 2 if halves and i == (2 if bottleneck else 1) else 1
            x = conv_norm(x, f"{block}.conv{i}", f"{block}.bn{i}", stride)
            if i != convolutions[-1]:
                x = np.maximum(x, 0)
        if f"{block}.downsample.0.weight" in tensors:
            names = f"{block}.downsample.0", f"{block}.downsample.1"
            shortcut = conv_norm(shortcut, *names, 2 if halves else 1)
        x = np.maximum(x + shortcut, 0)
    return x.mean(axis=(1, 2)) @ tensors["fc.weight"].T + tensors["fc.bias"]
