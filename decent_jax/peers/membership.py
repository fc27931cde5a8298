"""Membership: which peers are alive, and the progress of each and of all together.

It lives in the process of `train.py`; peers call it over a connection. Without that process there
are no peers either.
"""

import dataclasses
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
from decent_jax.peers import exchange
from decent_jax.peers.exchange import BROKEN, Asker, Members
from decent_jax.peers.peer_run import CommonProgress, Place
from decent_jax.peers.protocol import JoinState
from decent_jax.peers.step_boundary import NotJoined, StepBoundary


@dataclasses.dataclass
class _Entry:
    """A rank, and the peer that has it or had it last."""

    generation: int
    steps: int  # of this rank, over all generations
    alive: bool = False
    joins: bool = False  # waits for the state of another peer
    address: Address = ("", 0)  # where it listens
    heard: float | None = None  # time of its last report; None: it does not train yet
    report: dict[str, Any] = dataclasses.field(default_factory=dict)


class Membership:
    """Which peers are alive, and their progress; thread-safe, and none of its methods waits.

    Args:
      silent_s: seconds without a report after which a peer counts as silent.
      known: {rank: steps} before this session.
      clock: seconds.
    """

    def __init__(
        self,
        silent_s: float,
        known: dict[int, int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._silent_s, self._clock = silent_s, clock
        self._ranks = {rank: _Entry(-1, steps) for rank, steps in known.items()}

    # --- Called by peers --------------------------------------------------------------------------

    def serve(self, connection: Connection) -> None:
        """Answer a peer, in one thread per peer, until it disconnects; see `MembershipClient`."""
        methods = {"beat": self.beat, "members": self.members, "is_hopeful": self.is_hopeful}
        while True:
            (method, *args), _ = connections.receive(connection)
            connections.send(connection, methods[method](*args))

    def beat(
        self, rank: int, generation: int, address: Address, report: dict[str, Any]
    ) -> tuple[int, Members] | None:
        """Take a peer's report; the steps of all ranks and `members`, or None: it was removed."""
        entry = self._ranks[rank]
        if not entry.alive or entry.generation != generation:
            return None
        entry.heard, entry.steps, entry.report = self._clock(), report["steps"], report
        entry.joins, entry.address = False, address
        all_steps = sum(entry.steps for entry in self._ranks.values())
        return all_steps, self.members()

    def members(self) -> Members:
        """(name, address) of the peers that train and are not silent."""
        return [
            (f"{rank}.{entry.generation}", entry.address)
            for rank, entry in self._ranks.items()
            if self._is_member(entry)
        ]

    def is_hopeful(self) -> bool:
        """Whether a peer that joins may still find one that trains: not all peers are joining."""
        return any(entry.alive and not entry.joins for entry in self._ranks.values())

    # --- Called by `train.py` ---------------------------------------------------------------------

    def add(self, rank: int, generation: int, joins: bool) -> None:
        """A peer takes the rank."""
        steps = self._ranks[rank].steps if rank in self._ranks else 0
        new = _Entry(generation, steps, alive=True, joins=joins)
        # A new dict: other threads may iterate over the old one.
        self._ranks = {**self._ranks, rank: new}

    def remove(self, rank: int) -> None:
        """The peer that has the rank has died, left or ended."""
        self._ranks[rank].alive = False

    def status(self) -> dict[int, dict[str, Any]]:
        """{rank: report} with generation, steps, alive, ready (trains) and member (not silent)."""
        return {
            rank: {
                **entry.report,
                "rank": rank,
                "generation": entry.generation,
                "steps": entry.steps,
                "alive": entry.alive,
                "ready": entry.heard is not None,
                "member": self._is_member(entry),
            }
            for rank, entry in self._ranks.items()
        }

    def _is_member(self, entry: _Entry) -> bool:
        heard = -math.inf if entry.heard is None else entry.heard
        return entry.alive and self._clock() - heard <= self._silent_s


class MembershipClient:
    """A peer's connection to the `Membership`; the next call replaces a broken one.

    Args:
      address: where the membership listens.
      secret: of the run.
      seconds: that an answer may take.
    """

    def __init__(self, address: Address, secret: bytes, seconds: float):
        self._address, self._secret, self._seconds = address, secret, seconds
        self._connection: Connection | None = None

    def call(self, method: str, *args: Any) -> Any:
        """The result of a method of `Membership`; without an answer, one of `exchange.BROKEN`."""
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
      place: which peer reports.
      address: where this peer listens.
      membership: connection to it.
      boundary: of the peer's run.
      common: progress of the run; updated here.
      asker: of the peer; its members are updated here.
      leave: called with "stop" or "lag" if this peer has to end.
      clock: seconds.

    Attributes:
      stopped: ends `run`.
    """

    def __init__(
        self,
        place: Place,
        address: Address,
        membership: MembershipClient,
        boundary: StepBoundary,
        common: CommonProgress,
        asker: Asker,
        leave: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._place, self._address, self._membership = place, address, membership
        self._peers = place.config["peers"]
        self._boundary, self._common, self._asker = boundary, common, asker
        self._leave, self._clock = leave, clock
        # At the last answer: common progress, steps of this peer, and the time.
        self._reached, self._steps, self._heard = 0, 0, math.inf
        # Averages at the last answer, or when the first report after it failed.
        self._averages, self._answered = 0, True
        self.stopped = threading.Event()

    def run(self) -> None:
        """Report periodically, until this peer has to end."""
        while not self.stopped.wait(self._peers["beat_s"]):
            if self._boundary.ready and not self.beat():
                return

    def report(self) -> dict[str, Any]:
        """This peer's entry in the membership."""
        boundary, averager = self._boundary, self._boundary.averager
        return {
            "steps": self._common.own,
            **averager.counts,
            "losses": boundary.losses,
            "stale": boundary.stale,
            "distance": averager.distance,
        }

    def beat(self) -> bool:
        """Report once; whether to continue."""
        report = self.report()
        identity = self._place.rank, self._place.generation, self._address
        try:
            answer = self._membership.call("beat", *identity, report)
        except BROKEN:  # the network may recover
            if self._answered:
                self._averages, self._answered = report["averaged"], False
            return True
        if answer is None:
            say("this rank belongs to another generation now")
            self._leave("stop")
            return False
        all_steps, self._asker.members = answer
        self._boundary.alone = len(self._asker.members) < 2
        self._common.update(all_steps, report["steps"])
        return self._is_recent()

    def _is_recent(self) -> bool:
        """Whether this peer has kept up; an outdated one must not pull the others back.

        If only `train.py` was silent, this peer made steps and averaged with others meanwhile. A
        suspended peer made no steps, and a disconnected one averaged with nobody.
        """
        peers, progress, now = self._peers, self._common.progress(), self._clock()
        silent, lag = now - self._heard > peers["silent_s"], progress - self._reached
        steps, averages = self._common.own, self._boundary.averager.counts["averaged"]
        kept_up = 2 * (steps - self._steps) >= lag and averages > self._averages
        is_recent = not silent or lag <= peers["max_lag"] or kept_up
        self._reached, self._steps, self._heard = progress, steps, now
        self._averages, self._answered = averages, True
        if is_recent:
            return True
        say(
            f"the other peers made {lag} steps of progress while this one was silent "
            f"(peers.max_lag is {peers['max_lag']}): a new peer replaces it"
        )
        self._boundary.averager.closed = True
        self._boundary.averager.withdraw()
        self._leave("lag")
        return False


def state_to_join(
    place: Place,
    membership: MembershipClient,
    secret: bytes,
    leaving: Callable[[], str | None] = lambda: None,
    ask: Callable[[Address, bytes, float], JoinState | None] = exchange.ask_state,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> JoinState | None:
    """The state of a random peer; waits for one that trains, unless all others are joining, too.

    Args:
      place: which peer joins.
      membership: connection to it.
      secret: that peers of this run know.
      leaving: how this peer has to end, or None.
      ask: requests the state of the peer at an address, see `decent_jax.peers.exchange.ask_state`.
      clock: seconds.
      wait: for so many seconds.

    Raises:
      NotJoined: this peer has to end first.
    """
    peers, began = place.config["peers"], clock()
    while True:
        members = [
            m for m in membership.call("members") if m[0].partition(".")[0] != str(place.rank)
        ]
        random.shuffle(members)
        for name, address in members:
            asked = clock()
            try:
                joined = ask(address, secret, peers["join_s"])
            except BROKEN as error:
                say(f"peer {name} sends no state ({type(error).__name__})")
                continue
            if joined is not None:
                words = f"joins with the state of peer {joined.donor} at step {joined.t}"
                say(f"{words} ({clock() - asked:.1f} s)")
                return joined
        if not membership.call("is_hopeful") or clock() >= began + peers["start_s"]:
            say("no peer sends its state: starts with its own parameters")
            return None
        if leaving() is not None:
            raise NotJoined
        wait(peers["beat_s"])
