r"""Pairwise averaging between two peers: the protocol, and the result on each side.

Peers i and j exchange their latest snapshots S, encoded as Q(S). Each computes the pull

    ``p_i = 1/2 (Q(S_j) - Q(S_i))``

and applies it at its next step boundary to its current parameters x (``Method.pairwise`` in
`decent_jax.optim`). Non-blocking SwarmSGD (Nadiradze et al. 2021) adds the pull, here on both
sides. NoLoCo moves its outer parameters towards the mean of the snapshots and keeps the local
progress made since:

.. math::
    \text{swarm:}\quad & x_i \leftarrow x_i + p_i, \qquad S_i \leftarrow x_i \\
    \text{noloco:}\quad & m_i \leftarrow \mu m_i + \eta\, (S_i + p_i - \theta_i), \qquad
        \theta_i \leftarrow \theta_i + m_i, \qquad
        x_i \leftarrow x_i + \theta_i - S_i, \qquad S_i \leftarrow x_i

A snapshot is sent in a `Format`, each array by a codec of `decent_jax.gossip.codecs`.

`Averager` is one peer's side of the protocol. It starts no threads and does not use Ray; the peer
may call it from any thread. An average of asker A and answerer B takes six messages, so that no
snapshot is encoded or sent before B agrees, and neither averages unless both have decoded::

    A.ask() -> offer, message
                              -- offer -------->  B.agree(name)
                              <- yes, or no ----
    message()                 -- message ------>  B.answer(offer, message) -> reply
    A.receive(reply)          <- reply ---------
                              -- decoded ------>  B.settle(...) -> accepted   (B adds its pull now)
    A.close(accepted)         <- accepted ------                              (A adds its pull now)

B settles once, and only within its patience, so A and B add opposite pulls or none, however long
the messages take. The one exception: if the last message is lost because A dies or the connection
breaks between `settle` and `close`, B adds its pull and A does not.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from decent_jax.gossip import codecs
from decent_jax.gossip.codecs import FIRST_DISTANCE, GROW, LATTICES, SHRINK, SLACK, Codec
from decent_jax.ground.connections import Address

Arrays = list[np.ndarray]


class Message(NamedTuple):
    """An encoded snapshot: the encoded parts of each array, and the lattice's side, or 0."""

    parts: list[tuple[np.ndarray, ...]]
    side: float


@dataclasses.dataclass(frozen=True)
class Format:
    """One of `decent_jax.peers.FORMATS`, and the seed for the stochastic rounding of ``int8``.

    >>> message, sent = Format("bfloat16").encode([np.float32([1.0, 2.001])], seed=(0,))
    >>> Format("bfloat16").decode(message, sent)
    ([array([1., 2.], dtype=float32)], True)
    """

    name: str
    seed: int = 0

    @property
    def is_lattice(self) -> bool:
        """Whether the receiver decodes relative to its own snapshot."""
        return self.name in LATTICES

    def side(self, snapshot: Arrays, y: float) -> float:
        """The side of the lattice for snapshots at most ``y`` apart; 0 for the other formats."""
        if not self.is_lattice:
            return 0.0
        largest = max(float(np.abs(x).max(initial=0)) for x in snapshot)
        return float(LATTICES[self.name].reaching(y, largest).side)

    def encode(
        self, snapshot: Arrays, *, side: float = 0.0, seed: tuple[int, ...] = ()
    ) -> tuple[Message, Arrays]:
        """The message for a snapshot, and the arrays that a partner decodes.

        Args:
          snapshot: floating-point arrays.
          side: side of the lattice, see the method `side`.
          seed: seed of this message, in addition to the format's, from `seed_of`.
        """
        if self.is_lattice and not np.isfinite(side):
            raise ValueError("only finite parameters can be encoded; lower the learning rate")
        random, codec = np.random.default_rng((self.seed, *seed)), self._codec(side)
        if codec is None:
            return Message([(x,) for x in snapshot], side), snapshot
        draws = self.name == "int8"
        parts = [
            codec.encode(x, random.random(x.shape, np.float32) if draws else None) for x in snapshot
        ]
        return Message(parts, side), list(map(codec.decode, parts, snapshot))

    def decode(self, message: Message, snapshot: Arrays) -> tuple[Arrays, bool]:
        """The partner's arrays, and whether all are finite; undecodable numbers become NaN."""
        codec = self._codec(message.side)
        if codec is None:
            theirs = [part[0] for part in message.parts]
        else:
            theirs = list(map(codec.decode, message.parts, snapshot))
        return theirs, all(bool(np.isfinite(x).all()) for x in theirs)

    def bytes_sent(self, shapes: list[tuple[int, ...]]) -> int:
        """The bytes of a message for float32 arrays of these shapes, without its header."""
        codec = self._codec(1.0)
        return sum(codecs.bytes_sent(codec, shape) for shape in shapes)

    def _codec(self, side: float) -> Codec | None:
        if self.is_lattice:
            return dataclasses.replace(LATTICES[self.name], side=side)
        return codecs.NAMED[self.name]


class Snapshot(NamedTuple):
    """Published parameters S of a peer."""

    version: int  # counts from 0 in each generation
    arrays: Arrays
    progress: int  # common progress, in steps, when it was published


class Offer(NamedTuple):
    """The announcement of either side about its message."""

    name: str  # name of the average: the asker and a number
    peer: str  # "rank.generation"
    version: int
    progress: int
    decoded: bool  # whether this side could decode the other's message (True for an asker)


class PairwiseAverage(NamedTuple):
    """A settled average, which this side applies at its next step boundary."""

    mine: Snapshot
    theirs: Offer
    sides: tuple[float, float]  # of the lattices, mine and theirs
    pull: Arrays  # (Q(theirs) - Q(mine)) / 2


class JoinState(NamedTuple):
    """The state of another peer, for a peer that joins."""

    donor: str
    t: int  # its step
    arrays: Any  # a `TrainState` on the donor's devices; in a message, its host arrays


class _Exchange:
    """An average in progress."""

    def __init__(self, name: str, snapshot: Snapshot, expires: float):
        self.name, self.snapshot, self.expires = name, snapshot, expires
        self.message: Message
        self.sent: Arrays  # what the partner decodes from my message
        self.average: PairwiseAverage | None = None
        self.decoded_by_them = True
        self.apart = 0.0  # max |theirs - mine|
        self.distance = 0.0  # ||theirs - mine|| / ||mine||


class Averager:
    """One peer's pairwise averages, at most one at a time, from any thread.

    Args:
      me: the name of this peer, "rank.generation".
      form: the message format.
      patience_s: seconds that an answerer waits for `settle`.
      silent_s: seconds without `update_members` after which this peer must have been suspended.
      clock: a clock, in seconds.

    Attributes:
      snapshot: the last published snapshot; None before the first, and from `take` to `publish`.
      version: version of the next snapshot.
      closed: whether the peer starts no further averages; those in progress still finish.
      distance: ``||theirs - mine|| / ||mine||`` for the snapshots in the last average.
      counts: number of attempts by outcome.

    >>> ours, theirs = (Averager(name, Format("float32"), 1.0, 5.0) for name in ("0.0", "1.0"))
    >>> members = {"0.0": ("10.0.0.1", 1234), "1.0": ("10.0.0.2", 1234)}
    >>> ours.update_members(members)
    >>> theirs.update_members(members)
    >>> ours.publish([np.float32([1.0])], progress=0)
    >>> theirs.publish([np.float32([3.0])], progress=0)
    >>> offer, message = ours.ask()
    >>> theirs.agree(offer.name)
    True
    >>> reply = theirs.answer(offer, message())
    >>> decoded = ours.receive(*reply)
    >>> ours.close(offer.name, theirs.settle(offer.name, decoded))
    >>> ours.take()[0].pull, theirs.take()[0].pull
    ([array([1.], dtype=float32)], [array([-1.], dtype=float32)])
    """

    def __init__(
        self,
        me: str,
        form: Format,
        patience_s: float,
        silent_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.me, self._form, self._patience, self._clock = me, form, patience_s, clock
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self.snapshot: Snapshot | None = None
        self._now: _Exchange | None = None
        self._doubtful: dict[str, _Exchange] = {}  # answered, but not yet confirmed as settled
        self._settled: list[PairwiseAverage] = []
        self._members: Mapping[str, Address] = {}
        self._members_until = -math.inf
        self.closed = False
        self._y, self._number, self.version = FIRST_DISTANCE, 0, 0
        self.distance = 0.0
        self.counts = {"averaged": 0, "declined": 0, "undecoded": 0, "lost": 0}

    @property
    def members(self) -> Mapping[str, Address]:
        """{name: address} of the peers that train, this one included; empty after a suspension.

        A peer averages only with members: the parameters of a peer that has not joined, or was
        silent for long, are of no use.
        """
        return self._members if self._clock() <= self._members_until else {}

    def update_members(self, members: Mapping[str, Address] | None) -> None:
        """Replace the list of members; None keeps the old list, as `train.py` does not answer."""
        self._members = self.members if members is None else members
        self._members_until = self._clock() + self._silent_s

    # --- The training thread: none of these waits -------------------------------------------------

    def take(self) -> list[PairwiseAverage]:
        """The averages to apply now; if there are any, this peer is busy until it publishes."""
        with self._lock:
            taken, self._settled = self._settled, []
            if taken:
                self.snapshot = None
            return taken

    def withdraw(self) -> None:
        """Take part in no average until the next `publish`."""
        with self._lock:
            self.snapshot = self._now = None
            self._doubtful.clear()
            self._settled = []

    def publish(self, arrays: Arrays, progress: int) -> None:
        """Publish a snapshot, S <- x, taken at ``progress`` steps of common progress."""
        with self._lock:
            self.snapshot = Snapshot(self.version, arrays, progress)
            self.version += 1

    def idle(self) -> bool:
        """Whether no average is in progress or waiting for the step boundary."""
        with self._lock:
            self._expire()
            return self._now is None and not self._settled and not self._doubtful

    # --- The asker --------------------------------------------------------------------------------

    def ask(self) -> tuple[Offer, Callable[[], Message]] | None:
        """An offer, and a function that encodes the message if the partner agrees; None if busy."""
        exchange = self._begin(None)
        if exchange is None:
            return None

        def message() -> Message:
            try:
                self._encode(exchange)
            except Exception:
                self.give_up(exchange.name, "lost")
                raise
            return exchange.message

        return self._offer(exchange, True), message

    def receive(self, reply: Offer, message: Message) -> bool:
        """Decode the answerer's message; returns whether that succeeded, for `settle`."""
        exchange = self._now
        if exchange is None or exchange.name != reply.name:
            return False
        exchange.decoded_by_them = reply.decoded
        return self._decode(exchange, reply, message)

    def close(self, name: str, accepted: bool | None) -> None:
        """End an average as the answerer has decided; None: the decision may still arrive."""
        with self._lock:
            exchange = self._doubtful.pop(name, None) or self._now
            if exchange is None or exchange.name != name:
                return
            if accepted is not None:
                self._end(exchange, accepted)
                return
            self._doubtful[name] = exchange
            if self._now is exchange:
                self._now = None

    def give_up(self, name: str, why: str) -> None:
        """Abandon an average; ``why`` is the key in ``counts``."""
        with self._lock:
            if self._now is not None and self._now.name == name:
                self._now = None
                self.counts[why] += 1

    # --- The answerer -----------------------------------------------------------------------------

    def agree(self, name: str) -> bool:
        """Whether this peer takes part; if so, it is reserved until the message arrives.

        Without the reservation, peers that ask at shorter intervals than a message takes would all
        be busy asking when messages arrive, and no average would ever complete.
        """
        return self._begin(name) is not None

    def answer(self, offer: Offer, message: Message) -> tuple[Offer, Message] | None:
        """The reply to the asker's message, or None if the message came too late."""
        exchange = self._now
        if exchange is None or exchange.name != offer.name:
            return None
        self._encode(exchange)
        return self._offer(exchange, self._decode(exchange, offer, message)), exchange.message

    def settle(self, name: str, decoded: bool) -> bool:
        """Whether both peers add their pulls.

        They do if both have decoded, and the asker is a member and in time. A second call for the
        same average returns False.
        """
        with self._lock:
            self._expire()
            exchange = self._now
            if exchange is None or exchange.name != name:
                return False
            exchange.decoded_by_them = decoded
            is_member = name.rpartition("-")[0] in self.members
            return self._end(exchange, is_member and decoded and exchange.average is not None)

    # --- Both sides -------------------------------------------------------------------------------

    def _begin(self, name: str | None) -> _Exchange | None:
        with self._lock:
            self._expire()
            if self.snapshot is None or self._now is not None or self._settled or self.closed:
                return None
            expires = np.inf
            if name is None:
                name = f"{self.me}-{self._number}"
                self._number += 1
            else:
                expires = self._clock() + self._patience
            self._now = _Exchange(name, self.snapshot, expires)
            return self._now

    def _expire(self) -> None:
        if self._now is not None and self._clock() > self._now.expires:
            self._now = None
            self.counts["lost"] += 1

    def _offer(self, exchange: _Exchange, decoded: bool) -> Offer:
        snapshot = exchange.snapshot
        return Offer(exchange.name, self.me, snapshot.version, snapshot.progress, decoded)

    def _encode(self, exchange: _Exchange) -> None:
        snapshot = exchange.snapshot
        side = self._form.side(snapshot.arrays, self._y)
        seed = seed_of(self.me, snapshot.version)
        exchange.message, exchange.sent = self._form.encode(snapshot.arrays, side=side, seed=seed)

    def _decode(self, exchange: _Exchange, offer: Offer, message: Message) -> bool:
        snapshot = exchange.snapshot
        theirs, decoded = self._form.decode(message, snapshot.arrays)
        if not decoded:
            return False
        pull, sides = pull_of(exchange.sent, theirs), (exchange.message.side, message.side)
        exchange.average = PairwiseAverage(snapshot, offer, sides, pull)
        exchange.distance = 2 * _norm(pull) / (_norm(snapshot.arrays) or np.inf)
        exchange.apart = _apart(snapshot.arrays, theirs) if self._form.is_lattice else 0.0
        return True

    def _end(self, exchange: _Exchange, accepted: bool) -> bool:
        """Settle: this side applies its pull at the next step boundary if the partner does, too."""
        if self._now is exchange:
            self._now = None
        if not exchange.decoded_by_them:
            # Only the sender whose message was not decoded widens its lattice; if the receiver did,
            # too, one failure would cause others.
            self._y *= GROW
        if not accepted or exchange.average is None:
            decoded = exchange.average is not None and exchange.decoded_by_them
            self.counts["lost" if decoded else "undecoded"] += 1  # lost: too late
            return False
        self._y = max(SLACK * exchange.apart, SHRINK * self._y)
        self.counts["averaged"] += 1
        self.distance = exchange.distance
        self._settled.append(exchange.average)
        return True


def pull_of(mine: Arrays, theirs: Arrays) -> Arrays:
    """(theirs - mine) / 2, exactly the negative of the partner's pull."""
    return [(b - a) * a.dtype.type(0.5) for a, b in zip(mine, theirs, strict=True)]


def seed_of(peer: str, version: int) -> tuple[int, ...]:
    """The seed of a message's stochastic rounding."""
    rank, generation = map(int, peer.split("."))
    return rank, generation, version


def sent_of(form: Format, peer: str, version: int, arrays: Arrays, side: float) -> Arrays:
    """Q(S): the arrays that partners decode from a version of a snapshot."""
    return form.encode(arrays, side=side, seed=seed_of(peer, version))[1]


def _apart(ours: Arrays, theirs: Arrays) -> float:
    """max |ours - theirs|."""
    return max(float(np.abs(a - b).max(initial=0)) for a, b in zip(ours, theirs, strict=True))


def _norm(arrays: Arrays) -> float:
    return math.sqrt(sum(float(np.square(x, dtype=np.float64).sum()) for x in arrays))
