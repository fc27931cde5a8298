"""The network and the optimizer of airbench94 (Jordan, 2024), which learns CIFAR-10 in 8 epochs.

Source: github.com/KellerJordan/cifar10-airbench, airbench94_muon.py. A frozen first layer whitens
patches of 2x2 pixels. Three groups of two convolutions follow, whose first filters are initialized
as the identity. `resnet` has the functions that use the network. The optimizer is Muon for filters
and SGD for all other parameters.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from decent_jax.models import pieces
from decent_jax.models.pieces import Params
from decent_jax.models.resnet import BatchNorm, Conv

PATCH = 2  # pixels, side of a patch that is whitened
_PATCH_EPSILON = 5e-4  # added to the variances of patches

_BATCH = 2000  # images; the source sums their losses, whereas the loss here is their mean
# Rates and weight decay as published, for that sum; the rate of the filters is the run's.
_FILTERS, _BIASES, _HEAD, _DECAY = 0.24, 0.053, 0.67, 2e-6 * _BATCH
_WHITENED = 3 / 8  # share of the run in which the biases after the whitening are trained


@dataclasses.dataclass(frozen=True)
class AirbenchConfig:
    """Shape and numerics: ``width`` channels in the first group, four times as many in the others.

    The other attributes are those of `resnet.ResNetConfig`.
    """

    width: int = 64
    num_classes: int = 10
    momentum: float = 0.6
    epsilon: float = 1e-12
    dtype: str = "bfloat16"

    def __post_init__(self):
        pieces.check_dtype(self)

    @property
    def network(self) -> type[nnx.Module]:
        return Airbench

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of channels of each group."""
        return (self.width, 4 * self.width, 4 * self.width)

    def pixels(self, size: int, module: str, *inner: str) -> int:
        """The number of output pixels of a module for images of this size; 1 for the last layer."""
        if module == "fc":
            return 1
        size -= PATCH - 1
        if module != "whiten":
            size >>= int(module.removeprefix("group")) + (inner == ("conv2",)) - 1
        return size**2


PRESETS = {"airbench94": AirbenchConfig()}


class Airbench(nnx.Module):
    """The network: whitening, three groups, each channel's maximum, a linear layer without biases.

    The kernel of ``whiten`` is zero until the result of `whitening` replaces it; no gradient
    reaches it.
    """

    def __init__(self, config: AirbenchConfig, *, rngs: nnx.Rngs):
        self.config = config
        channels = 2 * 3 * PATCH**2
        uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.whiten = nnx.Dict(
            kernel=nnx.Param(jnp.zeros((PATCH, PATCH, 3, channels))),
            bias=nnx.Param(uniform(rngs.params(), (3 * PATCH**2, channels), jnp.float32)[0]),
        )
        for number, outputs in enumerate(config.groups, start=1):
            setattr(self, f"group{number}", Group(config, channels, outputs, rngs))
            channels = outputs
        kernel = uniform(rngs.params(), (channels, config.num_classes), jnp.float32)
        self.fc = nnx.Dict(kernel=nnx.Param(kernel / kernel.std()))

    def __call__(
        self, images: jax.Array, *, train: bool, dropout_rng: jax.Array | None = None
    ) -> jax.Array:
        """Logits ``(B, num_classes)`` float32 of normalized images ``(B, H, W, 3)``; no dropout."""
        x = images.astype(self.config.dtype)
        kernel = jax.lax.stop_gradient(self.whiten["kernel"][...]).astype(x.dtype)
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = _gelu(x + self.whiten["bias"][...].astype(x.dtype).reshape(1, 1, 1, -1))
        for number in range(1, len(self.config.groups) + 1):
            x = getattr(self, f"group{number}")(x, train)
        x = x.max(axis=(1, 2)).astype(jnp.promote_types(x.dtype, jnp.float32))
        return x @ self.fc["kernel"][...] / x.shape[-1]


class Group(nnx.Module):
    """Convolution, 2x2 max pool, norm, GELU; convolution, norm, GELU."""

    def __init__(self, config: AirbenchConfig, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.conv1, self.conv2 = (
            Conv(channels, outputs, 3, 1, rngs, _identity) for channels in (inputs, outputs)
        )
        self.norm1, self.norm2 = (BatchNorm(config, outputs, scale=None) for _ in range(2))

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = self.conv1(x)
        height, width = x.shape[1] // 2, x.shape[2] // 2
        x = x[:, : 2 * height, : 2 * width].reshape(len(x), height, 2, width, 2, -1).max((2, 4))
        x = _gelu(self.norm1(x, train))
        return _gelu(self.norm2(self.conv2(x), train))


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Filters ``(3, 3, I, O)``: the first I copy their inputs, the others are drawn uniformly."""
    random = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")(key, shape, dtype)
    same = jnp.zeros(shape, dtype).at[1, 1].set(jnp.eye(*shape[2:], dtype=dtype))
    return jnp.where(jnp.arange(shape[3]) < shape[2], same, random)


@jax.checkpoint
def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def whitening(images: np.ndarray) -> np.ndarray:
    """The kernel ``(2, 2, 3, 24)`` that whitens patches of normalized images ``(B, H, W, 3)``.

    The first half of the filters are the eigenvectors of the patches' mean outer product, divided
    by the square roots of their eigenvalues (with a small number added to each). The mean outer
    product of the outputs is then close to the identity. The second half are their negatives.
    """
    patches = np.lib.stride_tricks.sliding_window_view(images, (PATCH, PATCH), (1, 2))
    patches = patches.reshape(-1, 3 * PATCH**2).astype(np.float64)  # channels, rows, columns
    variances, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    kernel = (vectors / np.sqrt(variances + _PATCH_EPSILON)).reshape(3, PATCH, PATCH, -1)
    kernel = kernel.transpose(1, 2, 0, 3).astype(np.float32)
    return np.concatenate([kernel, -kernel], axis=-1)


def optimizer(learning_rate: optax.Schedule, beta: float = 0.6) -> optax.GradientTransformation:
    """Muon for filters, SGD with Nesterov momentum for biases and the last layer.

    The rates of SGD keep their published ratios to ``learning_rate``, the rate of the filters,
    which decays linearly from 0.24 to 0; ``beta`` is Muon's momentum. Before each update, filters
    are rescaled to a norm of 1 on average.

    Raises:
      ValueError: ``beta`` is not in [0, 1).
    """
    if not 0 <= beta < 1:
        raise ValueError(f"beta must be in [0, 1), got {beta}")

    def sgd(peak, share=1.0):
        def rate(step):  # peak at the start, 0 after this share of the run
            left = learning_rate(step) / _FILTERS
            return _BATCH * peak * jnp.maximum(0.0, 1 - (1 - left) / share)

        return optax.chain(
            optax.add_decayed_weights(_DECAY / _BATCH / peak),
            optax.sgd(rate, momentum=0.85, nesterov=True),
        )

    def axes(filters):
        return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers((0, 1, 2), (3,)), filters)

    muon = optax.contrib.scale_by_muon(
        ns_steps=3, beta=beta, eps=1e-7, weight_dimension_numbers=axes
    )

    def rescaled(update, x):
        return update + x * (math.sqrt(x.shape[-1]) / jnp.linalg.norm(x.ravel()) - 1)

    rescale = optax.stateless(lambda updates, params: jax.tree.map(rescaled, updates, params))
    by_kind: dict[str, optax.GradientTransformation] = {
        "filters": optax.chain(muon, optax.scale_by_learning_rate(learning_rate), rescale),
        "biases": sgd(_BIASES),
        "after whitening": sgd(_BIASES, _WHITENED),
        "head": sgd(_HEAD),
        "frozen": optax.set_to_zero(),
    }
    return optax.partition(by_kind, _kinds)


def _kinds(params: Params) -> Params:
    known = {"fc": {"kernel": "head"}, "whiten": {"kernel": "frozen", "bias": "after whitening"}}
    others = {name: part for name, part in params.items() if name not in known}
    return known | jax.tree.map(lambda x: "filters" if x.ndim == 4 else "biases", others)
