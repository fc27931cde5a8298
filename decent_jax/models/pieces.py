"""What GPT-2 and the Transformer share."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P


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


def attention(
    config: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None = None,
    *,
    causal: bool,
) -> jax.Array:
    """`jax.nn.dot_product_attention` by the kernel that the config names, (B, T, heads, D).

    ``lengths`` (B,) int32, of the keys to see.
    """
    kernel = implementation(config)
    # Where XLA divides a replica over devices (mesh.fsdp) it cannot divide cuDNN's kernel, so each
    # device starts one for its examples.
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh.auto_axes if kernel == "cudnn" else ()
    if len(query) % math.prod(mesh.shape[axis] for axis in axes):
        kernel, axes = "xla", ()

    def attend(query, key, value, lengths):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=causal,
            key_value_seq_lengths=lengths,
            implementation=kernel,
        )

    if axes:
        specs = {"in_specs": P(axes), "out_specs": P(axes), "axis_names": set(axes)}
        attend = jax.shard_map(attend, **specs, check_vma=False)
    return attend(query, key, value, lengths)


def dropout(x, rate, rng):
    """A share ``rate`` of ``x`` becomes 0, the rest is scaled up; without a key nothing does."""
    if rng is None:
        return x
    keep = jax.random.bernoulli(rng, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def fold_in(rng, data):
    """A key of its own for each use; None stays None."""
    return None if rng is None else jax.random.fold_in(rng, data)
