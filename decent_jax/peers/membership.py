"""Membership: which peers are alive, and the progress of each and of all together.

The membership lives in the process of `train.py`, with which all peers end anyway; peers call it
over a connection.
"""

import dataclasses
import functools
import math
import random
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from decent_jax.actors.ray_cluster import say
from decent_jax.ground import connections
from decent_jax.ground.connections import Address
from decent_jax.ground.json_files import Json
from decent_jax.peers import Peers, exchange
from decent_jax.peers.exchange import BROKEN, Members
from decent_jax.peers.peer_run import CommonProgress, Place
from decent_jax.peers.protocol import JoinState
from decent_jax.peers.step_boundary import NotJoined, StepBoundary

_ENDS = {
    "stop": "this rank belongs to another generation now",
    "lag": "the others made more than peers.max_lag steps of progress while this peer was silent: "
    "a new peer replaces it",
}


@dataclasses.dataclass
class _Entry:
    """A rank, and its current or last peer."""

    generation: int
    steps: int  # of this rank, over all generations
    fresh: int | None = None  # see `Membership.add`
    alive: bool = False
    admitted: bool = False
    address: Address = ("", 0)  # at which it listens
    # When it was added, was admitted or last reported: the time, and the steps of all other ranks.
    seen: tuple[float, int] = (-math.inf, 0)
    report: Json = dataclasses.field(default_factory=dict)  # empty: it does not train yet


class Membership:
    """Which peers are alive, which may train, and their progress.

    Peers average only with members, so that no peer uses parameters that lack the run's progress. A
    peer becomes a member once it is admitted and reports: `admits` checks peers that begin, and
    `beat` checks peers that return. All methods are thread-safe, and none of them waits.

    Args:
      peers: the section ``peers`` of the config.
      num_replicas: peer steps per step of common progress.
      known: {rank: steps} before this session.
      clock: a clock, in seconds.
    """

    def __init__(
        self,
        peers: Peers,
        num_replicas: int,
        known: dict[int, int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._peers, self._num_replicas, self._clock = peers, num_replicas, clock
        self._lock = threading.RLock()
        self._ranks = {rank: _Entry(-1, steps) for rank, steps in known.items()}

    # --- Called by peers --------------------------------------------------------------------------

    def serve(self, connection: Connection) -> None:
        """Answer a peer, in one thread per peer, until it disconnects; see `MembershipClient`."""
        methods = {"beat": self.beat, "members": self.members, "admits": self.admits}
        while True:
            (method, *args), _ = connections.receive(connection)
            connections.send(connection, methods[method](*args))

    def admits(self, rank: int, generation: int, donor: str | None) -> bool:
        """Whether a peer may train with the state taken from ``donor``; None: with its own state.

        A peer may use its own state if it is not outdated, or if no other peer is training. A donor
        must be a member, because a silent peer may have sent an outdated state.
        """
        with self._lock:
            entry = self._present(rank, generation)
            if entry is None:
                return False
            if donor is not None:
                may = donor in dict(self.members())
            else:
                may = entry.fresh is not None and not self._is_outdated(entry, entry.fresh)
            if may:
                entry.admitted, entry.seen = True, (self._clock(), self._others(entry))
            return may

    def beat(
        self, rank: int, generation: int, address: Address, report: Json
    ) -> tuple[int, Members] | str:
        """Take a peer's report; returns the total steps and `members`, or how the peer must end.

        A peer must end with "stop" if it was removed. It must end with "lag" if it was silent while
        the others made more than ``peers.max_lag`` steps of progress, unless it has kept up. A peer
        that was merely cut off from `train.py` has kept up: it made steps and averaged with others.
        A suspended peer made no steps, and a disconnected peer averaged with no other.
        """
        with self._lock:
            entry = self._present(rank, generation)
            if entry is None or not entry.admitted:
                return "stop"
            steps, entry.steps = report["steps"] - entry.steps, report["steps"]
            kept_up = 2 * steps >= self._lag(entry) and report["averaged_unanswered"]
            outdated = self._is_outdated(entry, self._peers.max_lag)
            if self._is_silent(entry) and outdated and not kept_up:
                entry.admitted, entry.fresh = False, None
                return "lag"
            entry.seen = self._clock(), self._others(entry)
            entry.report, entry.address = report, address
            return entry.seen[1] + entry.steps, self.members()

    def members(self) -> Members:
        """(name, address) of the peers that train and are not silent."""
        return [
            (f"{rank}.{entry.generation}", entry.address)
            for rank, entry in self._ranks.items()
            if self._is_member(entry)
        ]

    # --- Called by `train.py` ---------------------------------------------------------------------

    def add(self, rank: int, generation: int, fresh: int | None) -> None:
        """Give the rank to a new peer.

        Args:
          fresh: steps of common progress that others may make before the peer's own state counts as
            outdated; None: it has no state of its own and must take another peer's.
        """
        with self._lock:
            steps = self._ranks[rank].steps if rank in self._ranks else 0
            entry = _Entry(generation, steps, fresh, alive=True)
            # A new dict: other threads may iterate over the old one.
            self._ranks = {**self._ranks, rank: entry}
            entry.seen = self._clock(), self._others(entry)

    def remove(self, rank: int) -> None:
        """Record that the peer of this rank has died, left or ended."""
        self._ranks[rank].alive = False

    def is_hopeful(self) -> bool:
        """Whether any peer trains, or has a state with which it may begin."""
        return any(e.alive and (e.admitted or e.fresh is not None) for e in self._ranks.values())

    def status(self) -> dict[int, Json]:
        """{rank: report} with generation, steps, alive, ready (trains) and member (not silent)."""
        return {
            rank: {
                **entry.report,
                "rank": rank,
                "generation": entry.generation,
                "steps": entry.steps,
                "alive": entry.alive,
                "ready": bool(entry.report),
                "member": self._is_member(entry),
            }
            for rank, entry in self._ranks.items()
        }

    def _present(self, rank: int, generation: int) -> _Entry | None:
        entry = self._ranks[rank]
        return entry if entry.alive and entry.generation == generation else None

    def _is_member(self, entry: _Entry) -> bool:
        trains = entry.alive and entry.admitted and bool(entry.report)
        return trains and not self._is_silent(entry)

    def _is_silent(self, entry: _Entry) -> bool:
        return self._clock() - entry.seen[0] > self._peers.silent_s

    def _is_outdated(self, entry: _Entry, most: int) -> bool:
        """Whether others train and have made over ``most`` steps since the peer was last seen."""
        others = (other for other in self._ranks.values() if other is not entry)
        return any(e.alive and e.admitted for e in others) and self._lag(entry) > most

    def _lag(self, entry: _Entry) -> float:
        """Steps of common progress that the others have made since the peer was last seen."""
        return (self._others(entry) - entry.seen[1]) / self._num_replicas

    def _others(self, entry: _Entry) -> int:
        return sum(other.steps for other in self._ranks.values()) - entry.steps


class MembershipClient:
    """A peer's connection to the `Membership`; the next call replaces a broken one.

    Args:
      address: the address at which the membership listens.
      secret: shared by the peers of the run.
      seconds: how long to wait for a connection or an answer.
    """

    def __init__(self, address: Address, secret: bytes, seconds: float):
        self._address, self._secret, self._seconds = address, secret, seconds
        self._connection: Connection | None = None

    def call(self, method: str, *args: object) -> Any:
        """Call a method of `Membership`; raises one of `exchange.BROKEN` if it does not answer."""
        if self._connection is None:
            self._connection = connections.connect(self._address, self._secret, self._seconds)
        try:
            with connections.within(self._seconds, self._connection):
                connections.send(self._connection, [method, *args])
                return connections.receive(self._connection)[0]
        except BROKEN:
            self._connection.close()
            self._connection = None
            raise


class Reporter:
    """Reports to the membership, and receives the common progress and the list of members.

    Args:
      place: the identity of this peer.
      address: the address at which this peer listens.
      membership: the connection to the membership.
      boundary: this peer's work between steps; each report updates the members of its averager.
      common: common progress, which each report updates, too.
      leave: callback for when this peer must end, called with "stop" or "lag".

    Attributes:
      stopped: an event that ends `run`.
    """

    def __init__(
        self,
        place: Place,
        address: Address,
        membership: MembershipClient,
        boundary: StepBoundary,
        common: CommonProgress,
        leave: Callable[[str], None],
    ):
        self._place, self._address, self._membership = place, address, membership
        self._boundary, self._common, self._leave = boundary, common, leave
        # The number of averages when reports began to fail; None: the last report has arrived.
        self._averages: int | None = None
        self.stopped = threading.Event()

    def run(self) -> None:
        """Report periodically, until this peer has to end."""
        while not self.stopped.wait(self._place.config.peers.beat_s):
            if self._boundary.ready and not self.beat():
                return

    def report(self) -> Json:
        """The report of this peer to the membership."""
        boundary, averager = self._boundary, self._boundary.averager
        averaged = averager.counts["averaged"]
        return {
            "steps": self._common.own,
            **averager.counts,
            "averaged_unanswered": 0 if self._averages is None else averaged - self._averages,
            "losses": boundary.losses,
            "stale": boundary.stale,
            "distance": averager.distance,
        }

    def beat(self) -> bool:
        """Report once; returns whether to continue."""
        report, averager = self.report(), self._boundary.averager
        identity = self._place.rank, self._place.generation, self._address
        try:
            answer = self._membership.call("beat", *identity, report)
        except BROKEN:  # the network may recover
            averager.update_members(None)
            if self._averages is None:
                self._averages = report["averaged"]
            return True
        if isinstance(answer, str):
            averager.closed = True
            averager.withdraw()
            say(_ENDS[answer])
            self._leave(answer)
            return False
        all_steps, members = answer
        averager.update_members(dict(members))
        self._boundary.alone = len(members) < 2
        self._common.update(all_steps, report["steps"])
        self._averages = None
        return True


def state_to_join(
    place: Place,
    membership: MembershipClient,
    secret: bytes,
    leaving: Callable[[], str | None] = lambda: None,
    ask: Callable[[Address, bytes, float], JoinState | None] = exchange.ask_state,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> JoinState | None:
    """A random member's state for a new peer, or None to keep its own.

    Args:
      place: the identity of the peer that begins.
      membership: the connection to the membership, which decides; see `Membership.admits`.
      secret: shared by the peers of the run.
      leaving: function that returns how this peer must end, or None.
      ask: function that requests the state of the peer at an address, as
        `decent_jax.peers.exchange.ask_state` does.
      clock: a clock, in seconds.
      wait: function that waits for a number of seconds.

    Raises:
      NotJoined: this peer has to end first, or has no state after ``peers.start_s``.
    """
    peers, began = place.config.peers, clock()
    admits = functools.partial(membership.call, "admits", place.rank, place.generation)
    while True:
        if admits(None):
            return None
        members = membership.call("members")
        random.shuffle(members)
        for name, address in members:
            asked = clock()
            try:
                joined = ask(address, secret, peers.patience_s)
            except BROKEN as error:
                late = f"within 6 times peers.exchange_s ({peers.patience_s:g} s)"
                why = late if clock() >= asked + peers.patience_s else f"({type(error).__name__})"
                say(f"peer {name} sends no state {why}")
                continue
            if joined is not None and admits(joined.donor):
                words = f"joins with the state of peer {joined.donor} at step {joined.t}"
                say(f"{words} ({clock() - asked:.1f} s)")
                return joined
        if leaving() is not None or clock() >= began + peers.start_s:
            raise NotJoined
        wait(peers.beat_s)
