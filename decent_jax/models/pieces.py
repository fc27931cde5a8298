"""What GPT-2 and the Transformer share."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def remat_call(layer, *args):
    """``layer(*args)``, keeping only ``args``. Pure functions inside, so any transform may be
    outside."""
    graphdef, state = nnx.split(layer)

    @jax.checkpoint
    def call(state, *args):
        return nnx.merge(graphdef, state, copy=True)(*args)

    return call(state, *args)


def implementation(config: Any) -> str:
    """The kernel of `jax.nn.dot_product_attention`: "xla" or "cudnn"."""
    if config.attention != "auto":
        return config.attention
    head_dim = config.width // config.heads
    fits = config.dtype in ("bfloat16", "float16") and head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if fits and jax.default_backend() == "gpu" else "xla"


def dropout(x, rate, rng):
    """A share ``rate`` of ``x`` becomes 0, the rest is scaled up; without a key nothing does."""
    if rng is None:
        return x
    keep = jax.random.bernoulli(rng, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def fold_in(rng, data):
    """A key of its own for each use; None stays None."""
    return None if rng is None else jax.random.fold_in(rng, data)
