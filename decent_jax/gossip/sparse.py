"""Codecs that send only some of the numbers of an array.

| codec | sent for N numbers | error |
|---|---|---|
| `TopK(f)` | 8 f N bytes: values and indices | all but the largest f N dropped |
| `ChunkedTopK(f, c)` | (2 + log2 c) f N / 8 + 4 N / c bytes | the same in chunks of c, in 2 bits |

Top-k is for differences whose residual is kept and sent later (`decent_jax.optim.sparseloco`,
`decent_jax.optim.contrib.choco`). `decent_jax.gossip.mix` refuses it for parameters, because small
parameters would never be sent.
"""

import dataclasses

import jax
import jax.numpy as jnp

from decent_jax.gossip.codecs import Array, Codec, Parts
from decent_jax.gossip.permute import pad


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """The largest numbers, a share ``fraction`` (at least one), sent as values and indices."""

    fraction: float

    def encode(self, x: Array, noise: Array = None) -> Parts:
        flat = x.reshape(-1)
        _, places = jax.lax.top_k(jnp.abs(flat), _kept(self.fraction, flat.size))
        return flat[places], places.astype(jnp.int32)

    def decode(self, parts: Parts, like: Array) -> Array:
        values, places = parts
        return jnp.zeros_like(like).reshape(-1).at[places].set(values).reshape(like.shape)


@dataclasses.dataclass(frozen=True)
class ChunkedTopK(Codec):
    """The largest numbers of each chunk, a share ``density`` (at least one), sent in 2 bits each.

    An array is cut into chunks of ``chunk`` numbers (a single chunk if it is smaller; the last one
    is zero-padded). The 2 bits are a number's sign, and whether its magnitude is at least the mean
    of those sent from its chunk. Receivers decode a magnitude as the mean over those on the same
    side; each chunk also sends indices, and both means as bfloat16. The decoded array is always
    closer to x than zero is.

    The defaults are SparseLoCo's (Sarfi et al. 2025), 64 of 4096: 116 bytes instead of 16,384.
    """

    density: float = 1 / 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density}")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")

    def encode(self, x: Array, noise: Array = None) -> Parts:
        count, width, count_sent = self._sizes(x.size)
        chunks = pad(x.reshape(-1), (0, count * width - x.size)).reshape(count, width)
        _, places = jax.lax.top_k(jnp.abs(chunks), count_sent)
        values = jnp.take_along_axis(chunks, places, axis=1)
        packed = _pack(places, _bits_for(width))
        size = jnp.abs(values)
        large = size >= size.mean(axis=1, keepdims=True)
        means = [_mean_where(size, half) for half in (large, ~large)]
        scales = jnp.stack(means, axis=1).astype(jnp.bfloat16)
        codes = 2 * (values < 0).astype(jnp.int32) + large
        return _pack(codes, 2), packed, jax.lax.bitcast_convert_type(scales, jnp.uint16)

    def decode(self, parts: Parts, like: Array) -> Array:
        count, width, count_sent = self._sizes(like.size)
        places = _unpack(parts[1], _bits_for(width), count_sent)
        codes = _unpack(parts[0], 2, count_sent)
        scales = jax.lax.bitcast_convert_type(parts[2], jnp.bfloat16).astype(like.dtype)
        size = jnp.where(codes % 2 == 1, scales[:, :1], scales[:, 1:])
        values = jnp.where(codes >= 2, -size, size)
        rows = jnp.arange(count)[:, None]
        chunks = jnp.zeros((count, width), like.dtype).at[rows, places].set(values)
        return chunks.reshape(-1)[: like.size].reshape(like.shape)

    def _sizes(self, size: int) -> tuple[int, int, int]:
        """(chunks, numbers per chunk, numbers sent per chunk)."""
        width = min(self.chunk, size)
        return -(-size // width), width, _kept(self.density, width)


def _kept(fraction: float, size: int) -> int:
    return max(1, round(fraction * size))


def _bits_for(width: int) -> int:
    """Bits of an index into a chunk."""
    return max(1, (width - 1).bit_length())


def _pack(numbers: jax.Array, bits: int) -> jax.Array:
    """(rows, k) integers below 2^bits to (rows, ceil(bits k / 8)) uint8."""
    digits = (numbers[..., None] >> jnp.arange(bits)[None, None]) & 1
    return jnp.packbits(digits.reshape(len(numbers), -1).astype(jnp.uint8), axis=1)


def _unpack(packed: jax.Array, bits: int, k: int) -> jax.Array:
    """The inverse of `_pack`: (rows, k) int32."""
    digits = jnp.unpackbits(packed, axis=1, count=bits * k).reshape(len(packed), k, bits)
    return (digits.astype(jnp.int32) << jnp.arange(bits)[None, None]).sum(axis=2)


def _mean_where(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """The mean of the chosen numbers in every row, or 0 if none are chosen."""
    return jnp.where(chosen, x, 0).sum(axis=1) / jnp.maximum(chosen.sum(axis=1), 1)
