"""Formats of messages that are cheaper than float32, and lossy compressors.

A format sees one array of one replica at a time. `decent_jax.gossip.mix` sends the parts that
`encode` makes and applies `decode` where they arrive. It keeps the mean of all replicas by mixing
*differences* of decoded arrays: what rounding takes from one replica it gives to another.

| format | sent for N numbers | error |
|---|---|---|
| `BFloat16` | 2 N bytes | relative 2^-9, nearest |
| `Int8` | N bytes + 4 per row of the last axis | unbiased, below 1/126 of the row's largest |
| `TopK(f)` | 8 f N bytes: values and places | all but the largest f N dropped |
| `ChunkedTopK(f, c)` | (2 + log2 c) f N / 8 + 4 N / c bytes | the same in chunks of c, in 2 bits |
| `RandomK(f)` | 4 f N bytes: the places are the same everywhere | all but f N at random dropped |

Top-k is for differences whose rest is kept and sent later (`decent_jax.optim.choco`, `sparseloco`);
`decent_jax.gossip.mix` refuses it for parameters, of which it would never send the small ones. Of
parameters `RandomK` mixes those at its places only, exactly; every place has its turn
(`decent_jax.optim.sparta`).
"""

import dataclasses
import functools
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


@functools.cache
def bytes_sent(wire: Wire, shape: tuple[int, ...]) -> int:
    """The bytes of `Wire.encode`'s parts for a float32 array of this shape."""

    def parts():
        return wire.encode(jnp.zeros(shape, jnp.float32), jax.random.key(0), jnp.int32(0))

    return sum(part.size * part.dtype.itemsize for part in jax.eval_shape(parts))


@dataclasses.dataclass(frozen=True)
class BFloat16:
    """The nearest bfloat16, as its bits: XLA's CPU would send a float32 for each bfloat16."""

    def encode(self, x, key, replica):
        return (jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),)

    def decode(self, parts, like, key):
        return jax.lax.bitcast_convert_type(parts[0], jnp.bfloat16).astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class Int8:
    r"""8-bit integers with a float32 scale per row of the last axis, rounded stochastically.

    ``c = floor(x / s + u)`` with u uniform in [0, 1): ``E[c s] = x``.
    Without a key it rounds to nearest, which is biased. The scale s is ``max |x| / 127`` over
    the row, rounded up to 8 significant bits, so that c s and sums of a few are exact in float32:
    a product that one side rounds, and the other does not, would move the mean in each round.
    """

    def encode(self, x, key, replica):
        largest = jnp.abs(x).max(axis=-1, keepdims=True) if x.ndim else jnp.abs(x)
        scale = jax.lax.reduce_precision((1 + 2**-8) / 127 * largest.astype(jnp.float32), 8, 7)
        # In bfloat16 sums of 100 and a noise below 1 would be multiples of 1/2, and rounded up.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scaled = x.astype(wide) / jnp.where(scale > 0, scale, jnp.ones_like(scale)).astype(wide)
        if key is None:
            codes = jnp.round(scaled)
        else:
            noise = jax.random.uniform(jax.random.fold_in(key, replica), x.shape, jnp.float32)
            codes = jnp.floor(scaled + noise.astype(wide))
        return jnp.clip(codes, -127, 127).astype(jnp.int8), scale

    def decode(self, parts, like, key):
        codes, scale = parts
        return codes.astype(like.dtype) * scale.astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class TopK:
    """The ``fraction`` of largest magnitude, at least one number, as values and places."""

    fraction: float

    def encode(self, x, key, replica):
        flat = x.reshape(-1)
        _, places = jax.lax.top_k(jnp.abs(flat), _kept(self.fraction, flat.size))
        return flat[places], places.astype(jnp.int32)

    def decode(self, parts, like, key):
        values, places = parts
        return jnp.zeros_like(like).reshape(-1).at[places].set(values).reshape(like.shape)


@dataclasses.dataclass(frozen=True)
class ChunkedTopK:
    """The ``density`` of largest magnitude of every chunk, at least one number, in ``bits`` each.

    An array is cut into chunks of ``chunk`` numbers (one of its size if it is smaller; zeros fill
    the last). With 2 bits a number becomes its sign, and whether its magnitude is at least the mean
    of those sent from its chunk; it is decoded as the mean of its half, a bfloat16 per half and
    chunk. This never enlarges an error: what is decoded is nearer to x than zero is.

    The defaults are those of SparseLoCo (Sarfi et al. 2025), 64 of 4096: 116 bytes for 16,384.
    """

    density: float = 1 / 64
    chunk: int = 4096
    bits: int = 2

    def __post_init__(self):
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density}")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")
        if self.bits not in (2, 32):
            raise ValueError(f"bits must be 2 or 32 (not quantised), got {self.bits}")

    def encode(self, x, key, replica):
        count, width, kept = self._sizes(x.size)
        chunks = jnp.pad(x.reshape(-1), (0, count * width - x.size)).reshape(count, width)
        _, places = jax.lax.top_k(jnp.abs(chunks), kept)
        values = jnp.take_along_axis(chunks, places, axis=1)
        packed = _pack(places, _bits_for(width))
        if self.bits == 32:
            return values, packed
        size = jnp.abs(values)
        large = size >= size.mean(axis=1, keepdims=True)
        means = [_mean_where(size, half) for half in (large, ~large)]
        scales = jnp.stack(means, axis=1).astype(jnp.bfloat16)
        codes = 2 * (values < 0).astype(jnp.int32) + large
        return _pack(codes, 2), packed, jax.lax.bitcast_convert_type(scales, jnp.uint16)

    def decode(self, parts, like, key):
        count, width, kept = self._sizes(like.size)
        places = _unpack(parts[1], _bits_for(width), kept)
        values = parts[0]
        if self.bits == 2:
            codes = _unpack(parts[0], 2, kept)
            scales = jax.lax.bitcast_convert_type(parts[2], jnp.bfloat16).astype(like.dtype)
            size = jnp.where(codes % 2 == 1, scales[:, :1], scales[:, 1:])
            values = jnp.where(codes >= 2, -size, size)
        rows = jnp.arange(count)[:, None]
        chunks = jnp.zeros((count, width), like.dtype).at[rows, places].set(values)
        return chunks.reshape(-1)[: like.size].reshape(like.shape)

    def _sizes(self, size):
        """(chunks, numbers per chunk, of them sent)."""
        width = min(self.chunk, size)
        return -(-size // width), width, _kept(self.density, width)


@dataclasses.dataclass(frozen=True)
class RandomK:
    """A random ``fraction``, at least one number; receivers draw the same places from the key.

    An array is cut into as many ranges as numbers are sent, and one is drawn from each: that needs
    no sorting of the whole array, as a random permutation does. The array is turned by a random
    offset first, so that every number is sent equally often though the ranges differ by one.
    """

    fraction: float

    def encode(self, x, key, replica):
        return (x.reshape(-1)[self._places(x, key)],)

    def decode(self, parts, like, key):
        return self.replaced(jnp.zeros_like(like), parts[0], key)

    def replaced(self, x: jax.Array, values: jax.Array, key: jax.Array) -> jax.Array:
        """``x`` with these values at the places of this key."""
        return x.reshape(-1).at[self._places(x, key)].set(values).reshape(x.shape)

    def _places(self, x, key):
        sent = min(_kept(self.fraction, x.size), x.size)
        if sent == 0:
            return jnp.zeros(0, jnp.int32)
        j, (width, longer) = jnp.arange(sent), divmod(x.size, sent)
        begin, widths = j * width + jnp.minimum(j, longer), width + (j < longer)
        turn, within = jax.random.split(key)
        places = begin + jax.random.randint(within, (sent,), 0, widths)
        offset = jax.random.randint(turn, (), 0, x.size)
        rest = x.size - offset  # the sum of place and offset may be more than 32 bits hold
        return jnp.where(places < rest, places + offset, places - rest)


COMM_DTYPES = ("float32", "bfloat16", "int8")


def of_dtype(comm_dtype: str) -> Wire | None:
    """The format of ``config.comm_dtype``; None for float32, which is sent as it is."""
    return {"float32": None, "bfloat16": BFloat16(), "int8": Int8()}[comm_dtype]


def _kept(fraction: float, size: int) -> int:
    return max(1, round(fraction * size))


def _bits_for(width: int) -> int:
    """Bits of a place in a chunk."""
    return max(1, (width - 1).bit_length())


def _pack(numbers: jax.Array, bits: int) -> jax.Array:
    """(rows, k) whole numbers below 2^bits to (rows, ceil(bits k / 8)) uint8."""
    digits = (numbers[..., None] >> jnp.arange(bits)[None, None]) & 1
    return jnp.packbits(digits.reshape(len(numbers), -1).astype(jnp.uint8), axis=1)


def _unpack(packed: jax.Array, bits: int, k: int) -> jax.Array:
    """The (rows, k) int32 of `_pack`."""
    digits = jnp.unpackbits(packed, axis=1, count=bits * k).reshape(len(packed), k, bits)
    return (digits.astype(jnp.int32) << jnp.arange(bits)[None, None]).sum(axis=2)


def _mean_where(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """Means of the chosen numbers of every row, 0 where there are none."""
    return jnp.where(chosen, x, 0).sum(axis=1) / jnp.maximum(chosen.sum(axis=1), 1)
