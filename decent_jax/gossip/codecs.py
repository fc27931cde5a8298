"""Message formats cheaper than float32, for JAX and NumPy arrays.

A codec sees one array of one replica at a time. The sender turns it into parts with
`Codec.encode`; the receiver calls `Codec.decode` on them. The sender also decodes its own parts and
therefore knows exactly what the receivers hold. `decent_jax.gossip.mix` and `decent_jax.peers` mix
*differences* of decoded arrays, so the mean is preserved whatever a format loses.

| codec | sent for N numbers | error |
|---|---|---|
| `BFloat16` | 2 N bytes | relative 2^-9, nearest |
| `Int8` | N bytes + 4 per row of the last axis | unbiased, below 1/126 of the row's largest |
| `Int4` | N / 2 bytes + 4 per row | unbiased, below 1/6.9 of the row's largest |
| `Lattice` | N or 2 N bytes + 8 | at most ``side / 2``; NaN if the receiver is too far away |

`decent_jax.gossip.sparse` has codecs that send only some of the numbers.

To add a codec, write a frozen dataclass with ``encode`` and ``decode`` (and ``noise``, if it rounds
stochastically). Add it to the table, to `NAMED` if configs may choose it, and to the cases of
``tests/gossip/test_codecs.py``, which compare JAX with NumPy, errors with bounds and bytes with the
table.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # an array of JAX or of NumPy
Parts = tuple[Array, ...]  # the arrays of a message


class Codec:
    """A message format. Noise is passed in, so JAX and NumPy arrays share one implementation.

    seed: only in formats with noise; methods derive each step's key for the noise from it.
    """

    seed: int = 0

    def noise(self, key: jax.Array, shape: tuple[int, ...]) -> Array:
        """The random numbers that `encode` needs for an array of this shape, or None.

        Args:
          key: a PRNG key, different for every step, array and sender, because replicas must
            round independently.
          shape: the shape of the array.
        """
        return None

    def encode(self, x: Array, noise: Array = None) -> Parts:
        """The parts of a message: the arrays that are sent for ``x``."""
        raise NotImplementedError

    def decode(self, parts: Parts, like: Array) -> Array:
        """The array, decoded in the shape and dtype of ``like``, the receiver's own array."""
        raise NotImplementedError


@functools.cache
def bytes_sent(codec: Codec | None, shape: tuple[int, ...]) -> int:
    """Bytes sent for a float32 array of this shape; codec None: uncompressed."""
    if codec is None:
        return 4 * math.prod(shape)

    def parts() -> Parts:
        noise = codec.noise(jax.random.key(0), shape)
        return codec.encode(jnp.zeros(shape, jnp.float32), noise)

    shapes: Parts = jax.eval_shape(parts)  # pyright: ignore[reportUnknownMemberType]
    return sum(part.size * part.dtype.itemsize for part in shapes)


@dataclasses.dataclass(frozen=True)
class BFloat16(Codec):
    """bfloat16, sent as its bits in uint16, because XLA on CPUs sends bfloat16 as float32."""

    def encode(self, x: Array, noise: Array = None) -> Parts:
        return (x.astype(jnp.bfloat16).view(np.uint16),)

    def decode(self, parts: Parts, like: Array) -> Array:
        return parts[0].view(jnp.bfloat16).astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class Int8(Codec):
    """8-bit integers with a float32 scale per row of the last axis, rounded stochastically.

    ``c = floor(x / s + u)`` with noise u uniform in [0, 1): ``E[c s] = x``, and the variance is at
    most ``s^2 / 4``. Without noise it rounds to nearest, which is biased. The scale s is
    ``max |x| / 127`` over the row, rounded up to 8 significant bits, so that c s and sums of a few
    such products are exact in float32. Otherwise each round would move the mean, because only one
    side would round.
    """

    seed: int = 0
    largest: ClassVar[int] = 127  # the largest code

    def noise(self, key: jax.Array, shape: tuple[int, ...]) -> Array:
        return _uniform(key, shape)

    def encode(self, x: Array, noise: Array = None) -> Parts:
        scaled, scale = _by_rows(x, self.largest)
        codes = _rounded(scaled, noise)
        return codes.clip(-self.largest, self.largest).astype(np.int8), scale

    def decode(self, parts: Parts, like: Array) -> Array:
        codes, scale = parts
        return codes.astype(like.dtype) * scale.astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class Int4(Int8):
    """4-bit integers from -7 to 7, two per byte, with the scales and rounding of `Int8`."""

    largest: ClassVar[int] = 7

    def encode(self, x: Array, noise: Array = None) -> Parts:
        codes, scale = super().encode(x, noise)
        xp, codes = _namespace(x), codes.reshape(codes.shape or (1,))
        codes = xp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
        return (codes[..., ::2] & 15 | codes[..., 1::2] << 4).view(np.uint8), scale

    def decode(self, parts: Parts, like: Array) -> Array:
        packed, scale = parts
        pairs = _namespace(like).stack([packed & 15, packed >> 4], axis=-1).astype(np.int8)
        codes = ((pairs ^ 8) - 8).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
        codes = codes[..., : math.prod(like.shape[-1:])]
        return super().decode((codes.reshape(like.shape), scale), like)


# The reach y of a lattice adapts. An average sets it to the larger of 0.97 y and twice the largest
# difference; a message that the partner could not decode sets it to 4 y. It grows much faster than
# it shrinks, because one of many partners may be far away.
FIRST_DISTANCE, GROW, SHRINK, SLACK = 1e-3, 4.0, 0.97, 2.0


@dataclasses.dataclass(frozen=True)
class Lattice(Codec):
    """Numbers decoded relative to the receiver's own, with errors up to ``side / 2``.

    The sender rounds x to points ``s k`` with integers k, and sends only their colours, ``k mod q``
    with ``q = 2^bits``. The receiver takes the points of these colours nearest to its own z, which
    is correct if ``|x - z| <= s (q - 1) / 2`` in every coordinate (Davies et al. 2021, cubic
    lattice). Otherwise a checksum of the quotients ``k // q``, which are not sent, reveals the
    error, and the receiver decodes NaN. A single wrong quotient is always detected; several escape
    detection with probability 2^-31.

    Args:
      bits: bits per number, 1 to 16; a number takes one byte, or two if it has more than 8 bits.
      side: the sender's s, which travels with the message. Computations use its dtype: float64 (a
        Python float in NumPy) or float32.

    >>> lattice = Lattice(bits=4, side=0.5)
    >>> x = np.array([10.1, -7.3])
    >>> message = lattice.encode(x)
    >>> message[0], lattice.decode(message, like=x + 3.7), lattice.decode(message, like=x + 4.7)
    (array([4, 1], dtype=uint8), array([10. , -7.5]), array([nan, nan]))
    """

    bits: int = 8
    side: Array = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"bits of a lattice must be from 1 to 16, got {self.bits}")

    @property
    def reach(self) -> Array:
        """The largest difference that `decode` always recovers."""
        return self.side * (2**self.bits - 1) / 2

    def reaching(self, y: Array, largest: Array) -> "Lattice":
        """The finest lattice that decodes differences up to y of numbers up to ``largest``.

        Its side is at least 2^-21 of the largest number, so that ``x / s`` is exact in float32.
        """
        xp = _namespace(largest)
        least = xp.maximum(largest * 2.0**-21, np.finfo(np.float32).tiny)
        side = xp.maximum(2 * y / (2**self.bits - 1), least)
        return dataclasses.replace(self, side=side)

    def encode(self, x: Array, noise: Array = None) -> Parts:
        xp = _namespace(x)
        side = xp.asarray(self.side)
        scaled = x.astype(side.dtype) / side
        points = xp.round(scaled) if noise is None else xp.floor(scaled + noise)
        points = points.astype(f"int{8 * side.dtype.itemsize}")
        colours = points & (2**self.bits - 1)
        sent = colours.astype(np.uint8 if self.bits <= 8 else np.uint16)
        return sent, _checksum(points >> self.bits), side

    def decode(self, parts: Parts, like: Array) -> Array:
        _, checksum, side = parts
        quotients, points = self.nearest(parts, like)
        understood = _checksum(quotients) == checksum
        return _namespace(like).where(understood, points * side, np.nan).astype(like.dtype)

    def nearest(self, parts: Parts, like: Array) -> tuple[Array, Array]:
        """(quotients, points): the points of the sender's colours that are nearest to ``like``."""
        colours, _, side = parts
        colours = colours.astype(f"int{8 * side.dtype.itemsize}")
        # ``like`` is not rounded first: that would reduce the reach by half a side.
        scaled = like.astype(side.dtype) / side
        quotients = _namespace(like).round((scaled - colours) / 2**self.bits).astype(colours.dtype)
        return quotients, (quotients << self.bits) + colours


# The values of ``config.codec``; float32 is sent uncompressed, and lattices are for pairs only.
NAMED: Mapping[str, Codec | None] = {
    "float32": None,
    "bfloat16": BFloat16(),
    "int8": Int8(),
    "int4": Int4(),
}
LATTICES = {"lattice8": Lattice(8), "lattice16": Lattice(16)}


def named(name: str, seed: int = 0) -> Codec | None:
    """The format of this name in `NAMED` or `LATTICES`, with noise from ``seed``."""
    codec = LATTICES.get(name) or NAMED[name]
    return dataclasses.replace(codec, seed=seed) if isinstance(codec, Int8) else codec


def _namespace(x: Array) -> ModuleType:
    """The array module (NumPy or jax.numpy) for this array."""
    return jnp if isinstance(x, jax.Array) else np


def _by_rows(x: Array, largest: int) -> tuple[Array, Array]:
    """``(x / scale, scale)`` in float32 or wider; no magnitude of the first exceeds ``largest``."""
    xp = _namespace(x)
    most = xp.abs(x).max(axis=-1, keepdims=True, initial=0) if x.ndim else xp.abs(x)
    scale = _eight_bits((1 + 2**-8) / largest * most.astype(np.float32))
    # In bfloat16, 100 plus noise below 1 would be rounded to a multiple of 1/2, often up.
    wide = xp.promote_types(x.dtype, np.float32)
    return x.astype(wide) / xp.where(scale > 0, scale, xp.ones_like(scale)).astype(wide), scale


def _rounded(x: Array, noise: Array) -> Array:
    """The array rounded to integers: stochastically with noise, to nearest without."""
    xp = _namespace(x)
    return xp.round(x) if noise is None else xp.floor(x + noise.astype(x.dtype))


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 numbers in [0, 1): a hash of their positions, mixed with the key.

    Stochastic rounding needs no more than that. `jax.random.uniform` took 50 ms for 4M numbers on
    one CPU core, 20 times as long as the rest of the encoding; this hash takes 1 ms. The words of
    the key are used directly as the seed, because XLA for CPUs would take longer to compile one
    draw per array than to compile everything else. The hash is murmur3's finalizer of multiples of
    the golden ratio, as in SplitMix (Steele et al. 2014).
    """
    words = jax.random.key_data(key)
    a = jax.lax.iota(jnp.uint32, math.prod(shape)) * np.uint32(0x9E3779B9) + words[0]
    a = (a ^ (a >> 16)) * np.uint32(0x85EBCA6B) ^ words[-1]
    a = (a ^ (a >> 13)) * np.uint32(0xC2B2AE35)
    a = (a ^ (a >> 16)) >> 8  # 24 bits, which float32 holds
    return (a.astype(jnp.float32) * 2.0**-24).reshape(shape)


def _eight_bits(x: Array) -> Array:
    """float32 numbers rounded to 8 significant bits, those of bfloat16."""
    if _namespace(x) is np:
        return x.astype(jnp.bfloat16).astype(np.float32)
    return jax.lax.reduce_precision(x, 8, 7)  # XLA removes a cast to bfloat16 and back


def _checksum(quotients: Array) -> Array:
    """() uint32: the sum modulo 2^32 of the integers times odd hashes (murmur3) of their places."""
    xp = _namespace(quotients)
    a = xp.arange(quotients.size, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        a = (a ^ (a >> shift)) * np.uint32(factor)
    a = (a ^ (a >> 16)) | np.uint32(1)
    return (quotients.reshape(-1).astype(np.uint32) * a).sum(dtype=np.uint32)
