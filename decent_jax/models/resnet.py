"""ResNets (He et al., 2016; version 1.5) in Flax NNX, and their functional adapter.

Besides its parameters, a ResNet has statistics: the running mean and variance of each batch norm,
which training updates without a gradient and evaluation uses to normalize. Parameters and
statistics are plain nested dicts, and a training step needs only functions of them::

    config = PRESETS["resnet50"]
    params, statistics = init(config, jax.random.key(0))
    logits, statistics = train_logits(config, params, statistics, images)
    logits = logits_of(config, params, statistics, images)

These functions work inside ``jit``, ``vmap`` over stacked parameters, ``shard_map``, ``lax.map``
and ``lax.scan``. Version 1.5 has the stride of a bottleneck in its 3x3 convolution. Convolutions
are padded equally on all sides and named as in torchvision, so torchvision's weights fit.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from decent_jax import cpu
from decent_jax.models import pieces
from decent_jax.models.pieces import Config, Params

Statistics = Params  # nested dicts of the same form

EPSILON = 1e-5  # batch norm's, as in torchvision
MEAN = (0.485, 0.456, 0.406)  # mean and standard deviation of ImageNet's training images in [0, 1],
STD = (0.229, 0.224, 0.225)  # by which inputs are normalized
_NORMAL = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Shape and numerics of a ResNet.

    Attributes:
      blocks: number of residual blocks of each stage; every stage after the first halves the
        height and width and doubles the channels.
      bottleneck: whether blocks have 1x1, 3x3 and 1x1 convolutions, with four times the channels
        outside, instead of two 3x3 convolutions.
      width: number of channels inside the blocks of the first stage.
      num_classes: number of outputs.
      small_images: whether to start with a 3x3 convolution of stride 1, for images of about 32
        pixels, instead of a 7x7 convolution and a max pool, both of stride 2.
      momentum: decay of the running statistics per step.
      epsilon: number that batch norm adds to the variances.
      dtype: dtype of activations and convolutions; parameters, statistics, normalization and the
        last layer are float32 (float64 in a float64 model).
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    num_classes: int = 1000
    small_images: bool = False
    momentum: float = 0.9
    epsilon: float = EPSILON
    dtype: str = "bfloat16"

    def __post_init__(self):
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"blocks must be at least 1 for each stage, got {self.blocks}")
        pieces.check_dtype(self)

    @property
    def network(self) -> type[nnx.Module]:
        """The module's class."""
        return ResNet

    def pixels(self, size: int, *modules: str) -> int:
        """The number of output pixels of a module for images of this size; 1 for the last layer."""
        if modules == ("fc",):  # works on the mean of all pixels
            return 1
        return (-(-size // _shrunk(self, *modules))) ** 2  # padded so that halving rounds up


PRESETS = {
    "tiny": ResNetConfig((1, 1, 1), bottleneck=False, width=16, small_images=True),
    "resnet18": ResNetConfig((2, 2, 2, 2), bottleneck=False),
    "resnet34": ResNetConfig((3, 4, 6, 3), bottleneck=False),
    "resnet50": ResNetConfig((3, 4, 6, 3)),
    "resnet101": ResNetConfig((3, 4, 23, 3)),
    "resnet152": ResNetConfig((3, 8, 36, 3)),
}


# --- The module ---------------------------------------------------------------------------------


class ResNet(nnx.Module):
    """The network: stem, stages of residual blocks, mean over positions, linear layer.

    Args:
      config: shape and numerics.
      rngs: key for the initial parameters; no random state is kept.
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        size, stride = (3, 1) if config.small_images else (7, 2)
        self.conv1 = Conv(3, config.width, size, stride, rngs)
        self.bn1 = BatchNorm(config, config.width)
        # String keys instead of lists, so that paths survive JSON, checkpoints and flax's dicts.
        channels = config.width
        for stage, count in enumerate(config.blocks):
            blocks = {}
            for block in range(count):
                stride = 2 if stage and not block else 1
                blocks[str(block)] = ResidualBlock(config, channels, stage, stride, rngs)
                channels = _outputs(config, stage)
            setattr(self, f"layer{stage + 1}", nnx.Dict(blocks))
        self.fc = nnx.Linear(
            channels,
            config.num_classes,
            kernel_init=nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
            dtype=_wide(config.dtype),
            rngs=rngs,
        )

    def __call__(
        self, images: jax.Array, *, train: bool, dropout_rng: jax.Array | None = None
    ) -> jax.Array:
        """Logits of images.

        Args:
          images: ``(B, H, W, 3)`` floats, normalized.
          train: True normalizes with the statistics of this batch and updates the running ones;
            False normalizes with the running ones.
          dropout_rng: unused; this network has no dropout.

        Returns:
          ``(B, num_classes)`` float32.
        """
        x = jax.nn.relu(self.bn1(self.conv1(images.astype(self.config.dtype)), train))
        if not self.config.small_images:
            x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        for stage, blocks in enumerate(self.config.blocks):
            for block in range(blocks):
                x = getattr(self, f"layer{stage + 1}")[str(block)](x, train)
        return self.fc(x.mean(axis=(1, 2), dtype=_wide(x.dtype)))


class ResidualBlock(nnx.Module):
    """``relu(shortcut(x) + branch(x))``; the branch is two or, as a bottleneck, three convolutions.

    The shortcut is the identity or, if the shape changes, a 1x1 convolution with a batch norm.
    """

    def __init__(self, config: ResNetConfig, inputs: int, stage: int, stride: int, rngs: nnx.Rngs):
        self.last = len(_branch(config, stage, stride))
        channels = inputs
        for i, (outputs, size, step) in enumerate(_branch(config, stage, stride), start=1):
            setattr(self, f"conv{i}", Conv(channels, outputs, size, step, rngs))
            # The last scale starts at 0, so the branch starts as 0 (Goyal et al., 2017).
            setattr(self, f"bn{i}", BatchNorm(config, outputs, float(i != self.last)))
            channels = outputs
        self.downsample: Any = nnx.data(None)
        if stride != 1 or inputs != channels:
            self.downsample = nnx.Dict(
                conv=Conv(inputs, channels, 1, stride, rngs),
                bn=BatchNorm(config, channels),
            )

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        shortcut = x
        if self.downsample is not None:
            shortcut = self.downsample["bn"](self.downsample["conv"](x), train)
        for i in range(1, self.last + 1):
            x = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x), train)
            if i < self.last:
                x = jax.nn.relu(x)
        return cpu.computed_once(jax.nn.relu(shortcut + x))


class Conv(nnx.Module):
    """A convolution, ``(B, H, W, inputs)`` to ``(B, H', W', outputs)``, without bias by default."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        stride: int,
        rngs: nnx.Rngs,
        draw: Any = _NORMAL,
        bias: bool = False,
    ):
        self.stride = stride
        self.bias: Any = nnx.data(nnx.Param(jnp.zeros(outputs, jnp.float32)) if bias else None)
        self.kernel = nnx.Param(draw(rngs.params(), (size, size, inputs, outputs), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = cpu.conv(x, self.kernel[...].astype(x.dtype), self.stride)
        if self.bias is None:
            return x
        return x + self.bias[...].astype(x.dtype).reshape(1, 1, 1, -1)


class BatchNorm(nnx.Module):
    """Batch norm (Ioffe and Szegedy, 2015) over all axes but the last, in float32.

    Flax's layer would round the running statistics to the activations' dtype in evaluation.

    All variances, including the running ones, are ``mean((x - mean)**2)`` over the batch; PyTorch's
    running variances are larger by a factor of ``m / (m - 1)`` for ``m`` values per channel.
    """

    def __init__(self, config: Config, channels: int, scale: float | None = 1.0):
        dtype = _wide(config.dtype)
        self.momentum, self.epsilon = config.momentum, config.epsilon
        self.scale: Any = nnx.data(None)  # no parameter: the scale is 1
        if scale is not None:
            self.scale = nnx.Param(jnp.full(channels, scale, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros(channels, dtype))
        self.var = nnx.BatchStat(jnp.ones(channels, dtype))

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        mean, var = self.mean[...], self.var[...]
        if train:
            mean, var = _moments(x)
            for running, new in ((self.mean, mean), (self.var, var)):
                old = self.momentum * running[...]
                running[...] = old + (1 - self.momentum) * jax.lax.stop_gradient(new)
        factor = jax.lax.rsqrt(var + self.epsilon)
        if self.scale is not None:
            factor = self.scale[...] * factor
        offset = self.bias[...] - mean * factor
        spread = (1,) * (x.ndim - 1) + (-1,)
        y = x.astype(mean.dtype) * factor.reshape(spread) + offset.reshape(spread)
        return y.astype(x.dtype)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of each channel, read in one pass: ``mean(x**2) - mean(x)**2``."""
    axes, wide = tuple(range(x.ndim - 1)), x.astype(_wide(x.dtype))
    mean = wide.mean(axes)
    return mean, jnp.maximum(jnp.square(wide).mean(axes) - jnp.square(mean), 0)


def _branch(config: ResNetConfig, stage: int, stride: int) -> list[tuple[int, int, int]]:
    """(outputs, kernel size, stride) of a block's convolutions."""
    width, outputs = config.width * 2**stage, _outputs(config, stage)
    if config.bottleneck:
        return [(width, 1, 1), (width, 3, stride), (outputs, 1, 1)]
    return [(width, 3, stride), (outputs, 3, 1)]


def _outputs(config: ResNetConfig, stage: int) -> int:
    return config.width * 2**stage * (4 if config.bottleneck else 1)


def _wide(dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


# --- The functional adapter ---------------------------------------------------------------------
# A config is a ResNetConfig, AirbenchConfig or VGGConfig; its ``network`` is the module's class.


def init(config: Config, key: jax.Array) -> tuple[Params, Statistics]:
    """Draws the initial parameters and statistics: nested dicts of float32 arrays.

    In a ResNet, convolutions are normal with variance ``2 / (outputs * size**2)`` (He et al.,
    2015), and the last layer is uniform within ``features ** -0.5``. Scales (except the last of a
    block, which is 0) and variances are 1; biases and means are 0.
    """
    module = config.network(config, rngs=nnx.Rngs(key))
    _, params, statistics = nnx.split(module, nnx.Param, nnx.BatchStat)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(statistics)


def logits_of(
    config: Config, params: Params, statistics: Statistics, images: jax.Array
) -> jax.Array:
    """Logits in evaluation: ``ResNet.__call__`` with the running statistics and the same shapes."""
    return merge(config, params, statistics)(images, train=False)


def train_logits(
    config: Config,
    params: Params,
    statistics: Statistics,
    images: jax.Array,
    dropout_rng: jax.Array | None = None,
) -> tuple[jax.Array, Statistics]:
    """Logits in training, with the statistics of the batch, and the new running statistics.

    Without ``dropout_rng`` there is no dropout.
    """
    model = merge(config, params, statistics)
    logits = model(images, train=True, dropout_rng=dropout_rng)
    return logits, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))


def batch_moments(config: Config, params: Params, images: jax.Array) -> Statistics:
    """Moments of the inputs of each batch norm in this batch, to be averaged over batches.

    Returns:
      Moments in the form of the statistics, with the mean square instead of the variance as
      ``var``. Averages over batches (of equal sizes) remain moments; `from_moments` converts them
      to statistics.
    """
    own = dataclasses.replace(config, momentum=0.0)  # the running statistics become the batch's
    shapes = pieces.shapes(config.network, config, nnx.BatchStat)
    statistics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    _, statistics = train_logits(own, params, statistics, images)
    return _each_batch_norm(lambda mean, var: (mean, var + jnp.square(mean)), statistics)


def from_moments(moments: Statistics) -> Statistics:
    """Statistics from averages of `batch_moments`."""
    return _each_batch_norm(
        lambda mean, square: (mean, jnp.maximum(square - jnp.square(mean), 0)), moments
    )


def merge(config: Config, params: Params, statistics: Statistics) -> Any:
    """The module around parameters and statistics; to be used within one trace."""
    return pieces.merge(config.network, config, params, statistics)


def _each_batch_norm(fn, statistics: Statistics) -> Statistics:
    """The statistics with each ``mean, var`` pair, at any depth, replaced by ``fn(mean, var)``."""
    if "mean" in statistics:
        return dict(zip(("mean", "var"), fn(statistics["mean"], statistics["var"]), strict=True))
    return {name: _each_batch_norm(fn, part) for name, part in statistics.items()}


# --- Arithmetic ---------------------------------------------------------------------------------


def num_params(config: Config) -> int:
    """Number of parameters, without the statistics.

    Example:
      >>> num_params(PRESETS["resnet50"])
      25557032
    """
    return pieces.count(pieces.shapes(config.network, config))


def flops_per_image(config: Config, size: int = 224) -> int:
    """Floating-point operations of convolutions and the last layer, forward and backward.

    A multiply-add counts as two operations forward and four backward.

    Args:
      config: the network.
      size: height and width of the images.
    """
    multiply_adds = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(pieces.shapes(config.network, config)):
        *modules, kind = (entry.key for entry in path)
        if kind == "kernel":
            multiply_adds += config.pixels(size, *modules) * math.prod(leaf.shape)
    return 6 * multiply_adds


def _shrunk(config: ResNetConfig, module: str, block: str = "", conv: str = "", *_: str) -> int:
    """The factor by which the output of a convolution is smaller than the image."""
    if module == "conv1":
        return 1 if config.small_images else 2
    stage = int(module.removeprefix("layer")) - 1
    # The stride of a bottleneck comes after its first convolution.
    before = stage > 0 and config.bottleneck and (block, conv) == ("0", "conv1")
    return (1 if config.small_images else 4) * 2 ** (stage - before)
