"""VGG-11 (Simonyan and Zisserman, 2015) for small images, without batch norm.

The form in which the field trains it on CIFAR-10: eight convolutions with biases, each followed by
a ReLU and five of them by a 2x2 max pool, then three linear layers with dropout before the first
and the second. `resnet` has the functions that use the network. It has no statistics.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from decent_jax.models import pieces
from decent_jax.models.resnet import Conv

_CHANNELS = (1, 2, 4, 4, 8, 8, 8, 8)  # of each convolution, in multiples of the width
_POOLED = (1, 2, 4, 6, 8)  # the convolutions before a max pool


@dataclasses.dataclass(frozen=True)
class VGGConfig:
    """Shape and numerics.

    Attributes:
      width: number of channels of the first convolution; eight times as many enter the linear
        layers.
      num_classes: number of outputs.
      dropout: rate before the first two linear layers, in training.
      dtype: dtype of activations and convolutions; parameters and linear layers are float32
        (float64 in a float64 model).
    """

    width: int = 64
    num_classes: int = 10
    dropout: float = 0.5
    dtype: str = "bfloat16"

    def __post_init__(self):
        pieces.check_dtype(self)

    @property
    def network(self) -> type[nnx.Module]:
        return VGG

    def pixels(self, size: int, module: str) -> int:
        """The number of output pixels of a module for images of this size; 1 for linear layers."""
        if module.startswith("fc"):
            return 1
        halvings = sum(pooled < int(module.removeprefix("conv")) for pooled in _POOLED)
        return (-(-size // 2**halvings)) ** 2


PRESETS = {"vgg11": VGGConfig()}


class VGG(nnx.Module):
    """The network; images larger than 32 pixels leave several positions, which are averaged."""

    def __init__(self, config: VGGConfig, *, rngs: nnx.Rngs):
        self.config = config
        inputs = 3
        for number, multiple in enumerate(_CHANNELS, start=1):
            outputs = multiple * config.width
            setattr(self, f"conv{number}", Conv(inputs, outputs, 3, 1, rngs, bias=True))
            inputs = outputs
        wide = jnp.promote_types(config.dtype, jnp.float32)
        draw = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.fc1, self.fc2, self.fc = (
            nnx.Linear(inputs, outputs, kernel_init=draw, dtype=wide, rngs=rngs)
            for outputs in (inputs, inputs, config.num_classes)
        )

    def __call__(
        self, images: jax.Array, *, train: bool, dropout_rng: jax.Array | None = None
    ) -> jax.Array:
        """Logits ``(B, num_classes)`` float32 of normalized images ``(B, H, W, 3)``.

        Without ``dropout_rng`` there is no dropout; ``train`` changes nothing.
        """
        x = images.astype(self.config.dtype)
        for number in range(1, len(_CHANNELS) + 1):
            x = jax.nn.relu(getattr(self, f"conv{number}")(x))
            if number in _POOLED:
                x = nnx.max_pool(x, (2, 2), (2, 2), "SAME")
        x = x.mean(axis=(1, 2), dtype=jnp.promote_types(x.dtype, jnp.float32))
        for number, layer in enumerate((self.fc1, self.fc2)):
            x = pieces.dropout(x, self.config.dropout, pieces.fold_in(dropout_rng, number))
            x = jax.nn.relu(layer(x))
        return self.fc(x)
