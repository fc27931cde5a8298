"""Formats of messages that are cheaper than float32, and lossy compressors.

A format sees one array of one replica at a time. `decent_jax.gossip.mix` sends the parts that
`encode` makes and applies `decode` where they arrive. It keeps the mean of all replicas by mixing
*differences* of decoded arrays: what rounding takes from one replica it gives to another.

| format | sent for N numbers | error |
|---|---|---|
| `BFloat16` | 2 N bytes | relative 2^-9, nearest |
| `Int8` | N bytes + 4 per row of the last axis | unbiased, below 1/127 of the row's largest |
| `TopK(f)` | 8 f N bytes: values and places | all but the largest f N dropped |
| `RandomK(f)` | 4 f N bytes: the places are the same everywhere | all but f N at random dropped |

The last two are compressors for `decent_jax.optim.choco`; parameters mixed with them directly would
lose what they drop.
"""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp


class Wire(Protocol):
    """A format of messages; frozen and hashable."""

    def encode(self, x: jax.Array, key: jax.Array | None, replica: jax.Array) -> tuple:
        """The arrays that are sent for ``x``. ``key`` is the same on all replicas."""
        ...

    def decode(self, parts: tuple, like: jax.Array, key: jax.Array | None) -> jax.Array:
        """The array a receiver makes of them, with the shape and dtype of ``like``."""
        ...

    def bytes_sent(self, shape: tuple[int, ...]) -> int:
        """The bytes of `encode`'s parts for a float32 array of this shape."""
        ...


@dataclasses.dataclass(frozen=True)
class BFloat16:
    """The nearest bfloat16, as its bits: XLA's CPU would send a float32 for each bfloat16."""

    def encode(self, x, key, replica):
        del key, replica
        return (jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),)

    def decode(self, parts, like, key):
        del key
        return jax.lax.bitcast_convert_type(parts[0], jnp.bfloat16).astype(like.dtype)

    def bytes_sent(self, shape):
        return 2 * math.prod(shape)


@dataclasses.dataclass(frozen=True)
class Int8:
    r"""8-bit integers with a float32 scale per row of the last axis, rounded stochastically.

    :math:`c = \lfloor 127\,x / s + u \rfloor`, :math:`s = \max |x|` over the row and u uniform in
    [0, 1): :math:`\mathbb E[c\,s/127] = x`. Without a key it rounds to nearest, which is biased.
    """

    def encode(self, x, key, replica):
        scale = jnp.abs(x).max(axis=-1, keepdims=True) if x.ndim else jnp.abs(x)
        scaled = 127 * x / jnp.where(scale > 0, scale, jnp.ones_like(scale))
        if key is None:
            codes = jnp.round(scaled)
        else:
            noise = jax.random.uniform(jax.random.fold_in(key, replica), x.shape, jnp.float32)
            codes = jnp.floor(scaled + noise.astype(x.dtype))
        return jnp.clip(codes, -127, 127).astype(jnp.int8), scale.astype(jnp.float32)

    def decode(self, parts, like, key):
        del key
        codes, scale = parts
        return codes.astype(like.dtype) * (scale.astype(like.dtype) / 127)

    def bytes_sent(self, shape):
        return math.prod(shape) + 4 * math.prod(shape[:-1])


@dataclasses.dataclass(frozen=True)
class TopK:
    """The ``fraction`` of largest magnitude, at least one number, as values and places."""

    fraction: float

    def encode(self, x, key, replica):
        del key, replica
        flat = x.reshape(-1)
        _, places = jax.lax.top_k(jnp.abs(flat), _kept(self.fraction, flat.size))
        return flat[places], places.astype(jnp.int32)

    def decode(self, parts, like, key):
        del key
        values, places = parts
        return jnp.zeros_like(like).reshape(-1).at[places].set(values).reshape(like.shape)

    def bytes_sent(self, shape):
        return 8 * _kept(self.fraction, math.prod(shape))


@dataclasses.dataclass(frozen=True)
class RandomK:
    """A random ``fraction``, at least one number; receivers draw the same places from the key."""

    fraction: float

    def encode(self, x, key, replica):
        del replica
        return (x.reshape(-1)[self._places(x, key)],)

    def decode(self, parts, like, key):
        places = self._places(like, key)
        return jnp.zeros_like(like).reshape(-1).at[places].set(parts[0]).reshape(like.shape)

    def bytes_sent(self, shape):
        return 4 * _kept(self.fraction, math.prod(shape))

    def _places(self, x, key):
        return jax.random.permutation(key, x.size)[: _kept(self.fraction, x.size)]


COMM_DTYPES = ("float32", "bfloat16", "int8")


def of_dtype(comm_dtype: str) -> Wire | None:
    """The format of ``config.comm_dtype``; None for float32, which is sent as it is."""
    return {"float32": None, "bfloat16": BFloat16(), "int8": Int8()}[comm_dtype]


def _kept(fraction: float, size: int) -> int:
    return max(1, round(fraction * size))
