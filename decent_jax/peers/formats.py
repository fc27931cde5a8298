"""Formats of the messages in which peers exchange copies, encoded and decoded on the host.

| format | bytes for N numbers | error |
|---|---|---|
| ``float32`` | 4 N | none |
| ``bfloat16`` | 2 N | relative 2^-9, nearest |
| ``int8`` | N + 4 per row of the last axis | unbiased, below 1/126 of the row's largest |
| ``lattice8``, ``lattice16`` | N, 2 N | at most side / 2; a failure to decode is detected |

The first three are those of `decent_jax.gossip.wire`, the others that of
`decent_jax.simulate.LatticeQuantizer`. A sender knows exactly which arrays its partner decodes, so
that what a message adds on one side is subtracted on the other.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from decent_jax.simulate import LatticeQuantizer

FORMATS = ("float32", "bfloat16", "int8", "lattice8", "lattice16")

Arrays = list[np.ndarray]


class Message(NamedTuple):
    """A copy in a format: what is sent for every array, and the side of the lattice or 0."""

    parts: list[Any]
    side: float


@dataclasses.dataclass(frozen=True)
class Format:
    """One of `FORMATS`.

    >>> message, sent = Format("bfloat16").encode([np.float32([1.0, 2.001])], seed=(0,))
    >>> Format("bfloat16").decode(message, sent)
    ([array([1., 2.], dtype=float32)], True)
    """

    name: str

    @property
    def is_lattice(self) -> bool:
        """Whether the receiver decodes relative to its own copy."""
        return self.name.startswith("lattice")

    def side(self, copy: Arrays, y: float) -> float:
        """The side of the lattice for copies at most ``y`` apart; 0 for the other formats."""
        if not self.is_lattice:
            return 0.0
        largest = max(float(np.abs(x).max(initial=0)) for x in copy)
        least = max(largest * 2.0**-24, float(np.finfo(np.float32).tiny))
        return max(2 * y / (self._colours - 1), least)

    def encode(
        self, copy: Arrays, *, side: float = 0.0, seed: tuple[int, ...] = ()
    ) -> tuple[Message, Arrays]:
        """The message for a copy, and the arrays that a partner decodes.

        Args:
          copy: floating-point arrays.
          side: of the lattice, see `side`.
          seed: of the stochastic rounding of ``int8``: the sender and its version.
        """
        random, quantizer = np.random.default_rng(seed), self._quantizer(side)
        both = [self._encoded(x, random, quantizer) for x in copy]
        return Message([part for part, _ in both], side), [sent for _, sent in both]

    def decode(self, message: Message, own: Arrays) -> tuple[Arrays, bool]:
        """The partner's arrays, and whether they are finite and what the partner has encoded."""
        quantizer = self._quantizer(message.side)
        pairs = zip(message.parts, own, strict=True)
        both = [self._decoded(part, x, quantizer) for part, x in pairs]
        return [x for x, _ in both], all(understood for _, understood in both)

    def bytes_sent(self, shapes: list[tuple[int, ...]]) -> int:
        """The bytes of a message for float32 arrays of these shapes, without its head."""
        per_number = {"float32": 4, "bfloat16": 2, "lattice16": 2}.get(self.name, 1)
        rows = sum(math.prod(shape[:-1]) for shape in shapes) if self.name == "int8" else 0
        return per_number * sum(map(math.prod, shapes)) + 4 * rows

    @property
    def _colours(self) -> int:
        return 2 ** int(self.name.removeprefix("lattice"))

    def _quantizer(self, side: float) -> Any:
        return LatticeQuantizer(side, self._colours) if self.is_lattice else None

    def _encoded(self, x: np.ndarray, random: Any, quantizer: Any) -> tuple[Any, np.ndarray]:
        """What is sent for an array, and what the partner decodes."""
        if self.is_lattice:
            part, sent = quantizer.encode(x.reshape(-1))
            return part, sent.reshape(x.shape).astype(x.dtype)
        part = x
        if self.name == "bfloat16":
            part = x.astype(ml_dtypes.bfloat16).view(np.uint16)
        elif self.name == "int8":
            largest = np.abs(x).max(axis=-1, keepdims=True, initial=0) if x.ndim else np.abs(x)
            scale = ((1 + 2**-8) / 127 * largest).astype(ml_dtypes.bfloat16).astype(np.float32)
            scaled = x / np.where(scale > 0, scale, 1)
            codes = np.floor(scaled + random.random(x.shape, np.float32))
            part = np.clip(codes, -127, 127).astype(np.int8), scale
        return part, self._decoded(part, x, quantizer)[0]

    def _decoded(self, part: Any, own: np.ndarray, quantizer: Any) -> tuple[np.ndarray, bool]:
        if self.is_lattice:
            value, understood = quantizer.decode(part, own.reshape(-1))
            return value.reshape(own.shape).astype(own.dtype), understood
        if self.name == "bfloat16":
            part = part.view(ml_dtypes.bfloat16)
        elif self.name == "int8":
            codes, scale = part
            part = codes * scale
        x = part.astype(own.dtype, copy=False)
        return x, bool(np.isfinite(x).all())
