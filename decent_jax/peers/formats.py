"""Messages in which peers exchange copies: every array by a codec, encoded on the host."""

import dataclasses
from typing import NamedTuple

import numpy as np

from decent_jax.gossip import codecs
from decent_jax.gossip.codecs import Codec, Lattice

LATTICES = {"lattice8": Lattice(8), "lattice16": Lattice(16)}
FORMATS = (*codecs.NAMED, *LATTICES)

Arrays = list[np.ndarray]


class Message(NamedTuple):
    """A copy in a format: what is sent for every array, and the side of the lattice or 0."""

    parts: list[tuple[np.ndarray, ...]]
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
        return self.name in LATTICES

    def side(self, copy: Arrays, y: float) -> float:
        """The side of the lattice for copies at most ``y`` apart; 0 for the other formats."""
        if not self.is_lattice:
            return 0.0
        largest = max(float(np.abs(x).max(initial=0)) for x in copy)
        return float(LATTICES[self.name].reaching(y, largest).side)

    def encode(
        self, copy: Arrays, *, side: float = 0.0, seed: tuple[int, ...] = ()
    ) -> tuple[Message, Arrays]:
        """The message for a copy, and the arrays that a partner decodes.

        Args:
          copy: floating-point arrays.
          side: of the lattice, see `side`.
          seed: of the stochastic rounding of ``int8``: the sender and its version.
        """
        if self.is_lattice and not np.isfinite(side):
            raise ValueError("a copy to be coded must be finite; lower the learning rate")
        random, codec = np.random.default_rng(seed), self._codec(side)
        if codec is None:
            return Message([(x,) for x in copy], side), copy
        draws = self.name == "int8"
        parts = [
            codec.encode(x, random.random(x.shape, np.float32) if draws else None) for x in copy
        ]
        return Message(parts, side), list(map(codec.decode, parts, copy))

    def decode(self, message: Message, own: Arrays) -> tuple[Arrays, bool]:
        """The partner's arrays, and whether they are finite and what the partner has encoded."""
        codec = self._codec(message.side)
        if codec is None:
            theirs = [part[0] for part in message.parts]
        else:
            theirs = list(map(codec.decode, message.parts, own))
        return theirs, all(bool(np.isfinite(x).all()) for x in theirs)

    def bytes_sent(self, shapes: list[tuple[int, ...]]) -> int:
        """The bytes of a message for float32 arrays of these shapes, without its head."""
        codec = self._codec(1.0)
        return sum(codecs.bytes_sent(codec, shape) for shape in shapes)

    def _codec(self, side: float) -> Codec | None:
        if self.is_lattice:
            return dataclasses.replace(LATTICES[self.name], side=side)
        return codecs.NAMED[self.name]
