r"""The rule by which two peers meet: who may, what is exchanged, and what each gets.

Peers i and j bring the copies S that they published last. Each gets half of the difference,
``h_i = 1/2 (Q(S_j) - Q(S_i))``, and uses it at its next step boundary, where it has become
x (``Method.meeting`` in `decent_jax.optim`). Non-blocking SwarmSGD (Nadiradze et al. 2021), both
sides, adds it. NoLoCo moves its outer parameters towards the mean of the copies and keeps what was
learned since:

.. math::
    \text{swarm:}\quad & x_i \leftarrow x_i + h_i, \qquad S_i \leftarrow x_i \\
    \text{noloco:}\quad & m_i \leftarrow \mu m_i + \eta\, (S_i + h_i - \theta_i), \qquad
        \theta_i \leftarrow \theta_i + m_i, \qquad
        x_i \leftarrow x_i + \theta_i - S_i, \qquad S_i \leftarrow x_i

A copy travels in a `Format`, every array by a codec of `decent_jax.gossip.codecs`.

`Meetings` is one peer's side of it. It knows neither threads nor Ray; the peer calls it from any
thread. A meeting of asker A and answerer B is six messages, so that no copy is coded or travels
before B has agreed, and neither side averages if one did not understand the other::

    A.ask() -> offer, message
                              -- offer -------->  B.agree(meeting)
                              <- yes, or no ----
    message()                 -- message ------>  B.answer(offer, message) -> reply
    A.hear(reply)             <- reply ---------
                              -- understood --->  B.settle(...) -> accepted   (B adds its half now)
    A.close(accepted)         <- accepted ------                              (A adds its half now)

B settles once, and only within its patience, so that A and B add opposite halves or none at all,
however long the messages take. Only where the last message is lost, since A has died or the
connection has broken between `settle` and `close`, B adds its half and A does not.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from decent_jax.gossip import codecs
from decent_jax.gossip.codecs import FIRST_DISTANCE, GROW, SHRINK, SLACK, Codec, Lattice

LATTICES = {"lattice8": Lattice(8), "lattice16": Lattice(16)}

Arrays = list[np.ndarray]


class Message(NamedTuple):
    """A copy in a format: what is sent for every array, and the side of the lattice or 0."""

    parts: list[tuple[np.ndarray, ...]]
    side: float


@dataclasses.dataclass(frozen=True)
class Format:
    """One of `decent_jax.peers.FORMATS`, and the seed of the stochastic rounding of ``int8``.

    >>> message, sent = Format("bfloat16").encode([np.float32([1.0, 2.001])], seed=(0,))
    >>> Format("bfloat16").decode(message, sent)
    ([array([1., 2.], dtype=float32)], True)
    """

    name: str
    seed: int = 0

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
          seed: of this message, beside the format's: the sender and its version.
        """
        if self.is_lattice and not np.isfinite(side):
            raise ValueError("a copy to be coded must be finite; lower the learning rate")
        random, codec = np.random.default_rng((self.seed, *seed)), self._codec(side)
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


class Copy(NamedTuple):
    """A published copy S of a peer's parameters."""

    version: int  # counts from 0 in each generation
    arrays: Arrays
    progress: int  # common progress, in steps, at which it was published


class Offer(NamedTuple):
    """What either side brings to a meeting, without the message itself."""

    meeting: str  # its name: the asker and a number
    peer: str  # who brings it, "rank.generation"
    version: int
    progress: int
    understood: bool  # whether this side decoded the other's message (True for an asker)


class Met(NamedTuple):
    """A meeting that is settled: what this side adds at its next step boundary."""

    mine: Copy
    theirs: Offer
    sides: tuple[float, float]  # of the lattices, mine and theirs
    half: Arrays  # (Q(theirs) - Q(mine)) / 2


class Joined(NamedTuple):
    """The state of another peer, for one that joins."""

    donor: str
    t: int  # its step
    arrays: Any  # a `TrainState` on the donor's devices; as it travels, its host arrays


class _Meeting:
    """One that is under way."""

    def __init__(self, name: str, copy: Copy, expires: float):
        self.name, self.copy, self.expires = name, copy, expires
        self.message: Message
        self.sent: Arrays  # what the partner decodes of my message
        self.met: Met | None = None
        self.heard_by_them = True
        self.apart = 0.0  # the largest difference of a number
        self.distance = 0.0  # ||theirs - mine|| / ||mine||


class Meetings:
    """One peer's meetings, at most one at a time, from any thread.

    Args:
      me: "rank.generation".
      form: of messages.
      patience_s: how long an answerer waits for `settle`.
      clock: seconds.

    Attributes:
      copy: published last; None until the first, and from `take` to `publish`.
      version: of the next copy.
      closed: whether it begins no further meetings; those under way come to their end.
      distance: to the partner of the last meeting, relative to the own copy.
      counts: of the meetings, by outcome.

    >>> ours, theirs = (Meetings(name, Format("float32"), 1.0) for name in ("0.0", "1.0"))
    >>> ours.publish([np.float32([1.0])], progress=0)
    >>> theirs.publish([np.float32([3.0])], progress=0)
    >>> offer, message = ours.ask()
    >>> theirs.agree(offer.meeting)
    True
    >>> reply = theirs.answer(offer, message())
    >>> understood = ours.hear(*reply)
    >>> ours.close(offer.meeting, theirs.settle(offer.meeting, understood))
    >>> ours.take()[0].half, theirs.take()[0].half
    ([array([1.], dtype=float32)], [array([-1.], dtype=float32)])
    """

    def __init__(self, me: str, form: Format, patience_s: float, clock=time.monotonic):
        self.me, self._form, self._patience, self._clock = me, form, patience_s, clock
        self._lock = threading.Lock()
        self.copy: Copy | None = None
        self._now: _Meeting | None = None
        self._doubtful: dict[str, _Meeting] = {}  # whose settlement nobody has confirmed yet
        self._settled: list[Met] = []
        self.closed = False
        self._y, self._number, self.version = FIRST_DISTANCE, 0, 0
        self.distance = 0.0
        self.counts = {"met": 0, "declined": 0, "not_understood": 0, "lost": 0}

    # --- The training thread: never waits ---------------------------------------------------------

    def take(self) -> list[Met]:
        """What to add now; if there is any, this peer is busy until it publishes again."""
        with self._lock:
            taken, self._settled = self._settled, []
            if taken:
                self.copy = None
            return taken

    def withdraw(self) -> None:
        """Meet nobody until the next `publish`."""
        with self._lock:
            self.copy = self._now = None
            self._doubtful.clear()
            self._settled = []

    def publish(self, arrays: Arrays, progress: int) -> None:
        """S <- x."""
        with self._lock:
            self.copy = Copy(self.version, arrays, progress)
            self.version += 1

    def idle(self) -> bool:
        """Whether no meeting is under way or waits for the step boundary."""
        with self._lock:
            self._expire()
            return self._now is None and not self._settled and not self._doubtful

    # --- The asker --------------------------------------------------------------------------------

    def ask(self) -> tuple[Offer, Callable[[], Message]] | None:
        """What to ask a neighbour, and what encodes the message if it agrees; None: busy."""
        begun = self._begin(None)
        if begun is None:
            return None

        def message() -> Message:
            try:
                self._encode(begun)
            except Exception:
                self.give_up(begun.name, "lost")
                raise
            return begun.message

        return self._offer(begun, True), message

    def hear(self, reply: Offer, message: Message) -> bool:
        """Whether this side understood the answerer's message, which `settle` must be told."""
        begun = self._now
        if begun is None or begun.name != reply.meeting:
            return False
        begun.heard_by_them = reply.understood
        return self._decode(begun, reply, message)

    def close(self, meeting: str, accepted: bool | None) -> None:
        """The answerer has accepted, or not; None: no answer in time, and it may come later."""
        with self._lock:
            begun = self._doubtful.pop(meeting, None) or self._now
            if begun is None or begun.name != meeting:
                return
            if accepted is not None:
                self._end(begun, accepted)
                return
            self._doubtful[meeting] = begun
            if self._now is begun:
                self._now = None

    def give_up(self, meeting: str, why: str) -> None:
        """No meeting came about: ``why`` is one of ``counts``."""
        with self._lock:
            if self._now is not None and self._now.name == meeting:
                self._now = None
                self.counts[why] += 1

    # --- The answerer -----------------------------------------------------------------------------

    def agree(self, meeting: str) -> bool:
        """Whether this peer takes part; from then on it is busy, while the message travels.

        Otherwise, peers that ask more often than a message takes would all be asking whenever a
        message arrives, and nobody would ever meet.
        """
        return self._begin(meeting) is not None

    def answer(self, offer: Offer, message: Message) -> tuple[Offer, Message] | None:
        """The reply, or None where the message came too late."""
        begun = self._now
        if begun is None or begun.name != offer.meeting:
            return None
        self._encode(begun)
        return self._offer(begun, self._decode(begun, offer, message)), begun.message

    def settle(self, meeting: str, understood: bool) -> bool:
        """Whether both add their halves: the asker understood, this side did, and it is in time.

        The second time, or too late, it is not accepted.
        """
        with self._lock:
            self._expire()
            begun = self._now
            if begun is None or begun.name != meeting:
                return False
            begun.heard_by_them = understood
            return self._end(begun, understood and begun.met is not None)

    # --- Both -------------------------------------------------------------------------------------

    def _begin(self, name: str | None) -> _Meeting | None:
        with self._lock:
            self._expire()
            if self.copy is None or self._now is not None or self._settled or self.closed:
                return None
            expires = np.inf
            if name is None:
                name = f"{self.me}-{self._number}"
                self._number += 1
            else:
                expires = self._clock() + self._patience
            self._now = _Meeting(name, self.copy, expires)
            return self._now

    def _expire(self) -> None:
        if self._now is not None and self._clock() > self._now.expires:
            self._now = None
            self.counts["lost"] += 1

    def _offer(self, begun: _Meeting, understood: bool) -> Offer:
        copy = begun.copy
        return Offer(begun.name, self.me, copy.version, copy.progress, understood)

    def _encode(self, begun: _Meeting) -> None:
        copy = begun.copy
        side = self._form.side(copy.arrays, self._y)
        seed = seed_of(self.me, copy.version)
        begun.message, begun.sent = self._form.encode(copy.arrays, side=side, seed=seed)

    def _decode(self, begun: _Meeting, offer: Offer, message: Message) -> bool:
        copy = begun.copy
        theirs, understood = self._form.decode(message, copy.arrays)
        if not understood:
            return False
        half = halves(begun.sent, theirs)
        begun.met = Met(copy, offer, (begun.message.side, message.side), half)
        begun.distance = 2 * _norm(half) / (_norm(copy.arrays) or np.inf)
        begun.apart = _apart(copy.arrays, theirs) if self._form.is_lattice else 0.0
        return True

    def _end(self, begun: _Meeting, both: bool) -> bool:
        """Settle: add the half at the next boundary where both sides do."""
        if self._now is begun:
            self._now = None
        if not begun.heard_by_them:
            # Only the sender that was not understood widens its lattice; if the receiver did, too,
            # one failure would cause others.
            self._y *= GROW
        if not both or begun.met is None:
            understood = begun.met is not None and begun.heard_by_them
            self.counts["lost" if understood else "not_understood"] += 1  # lost: it was too late
            return False
        self._y = max(SLACK * begun.apart, SHRINK * self._y)
        self.counts["met"] += 1
        self.distance = begun.distance
        self._settled.append(begun.met)
        return True


def halves(mine: Arrays, theirs: Arrays) -> Arrays:
    """(theirs - mine) / 2, exactly the negative of what the partner computes."""
    return [(b - a) * a.dtype.type(0.5) for a, b in zip(mine, theirs, strict=True)]


def seed_of(peer: str, version: int) -> tuple[int, ...]:
    """The seed of a message's rounding."""
    rank, generation = map(int, peer.split("."))
    return rank, generation, version


def sent_of(form: Format, peer: str, version: int, arrays: Arrays, side: float) -> Arrays:
    """Q(S), the arrays that partners decode of a version, from the copy itself."""
    return form.encode(arrays, side=side, seed=seed_of(peer, version))[1]


def _apart(ours: Arrays, theirs: Arrays) -> float:
    """The largest |difference| of a number."""
    return max(float(np.abs(a - b).max(initial=0)) for a, b in zip(ours, theirs, strict=True))


def _norm(arrays: Arrays) -> float:
    return math.sqrt(sum(float(np.square(x, dtype=np.float64).sum()) for x in arrays))
