"""The roster: who is alive, how far each peer is, and how far all are together.

It is an object of the process of `train.py`, which peers ask over a connection; without that
process there are no peers either.
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
from decent_jax.peers import talk
from decent_jax.peers.peer_run import Place
from decent_jax.peers.rule import Joined
from decent_jax.peers.step_boundary import NotJoined, Pulse, StepBoundary
from decent_jax.peers.talk import BROKEN, Asker, Members


@dataclasses.dataclass
class _Entry:
    """A rank and the peer that has it, or had it last."""

    generation: int
    steps: int  # made in this rank, by all of its peers
    alive: bool = False
    joins: bool = False  # it waits for the state of another peer
    address: Address = ("", 0)  # at which others ask it
    heard: float | None = None  # when it reported last; None: it does not train yet
    report: dict[str, Any] = dataclasses.field(default_factory=dict)


class Roster:
    """Who is alive and how far; from any thread, and none of its methods waits.

    Args:
      silent_s: seconds without a report after which nobody meets a peer.
      known: {rank: steps made in it} before this session.
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

    # --- Asked by peers ---------------------------------------------------------------------------

    def serve(self, connection: Connection) -> None:
        """Answer a peer, in a thread of its own, until it hangs up; see `RosterLink`."""
        methods = {"beat": self.beat, "members": self.members, "is_hopeful": self.is_hopeful}
        while True:
            (method, *args), _ = connections.receive(connection)
            connections.send(connection, methods[method](*args))

    def beat(
        self, rank: int, generation: int, address: Address, report: dict[str, Any]
    ) -> tuple[int, Members] | None:
        """A peer's report: the steps of all ranks, and `members`; None: it is removed."""
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
        """Whether a peer that joins may yet find one that trains: not all of them wait for it."""
        return any(entry.alive and not entry.joins for entry in self._ranks.values())

    # --- Asked by `train.py` ----------------------------------------------------------------------

    def add(self, rank: int, generation: int, joins: bool) -> None:
        """A peer takes the rank."""
        steps = self._ranks[rank].steps if rank in self._ranks else 0
        new = _Entry(generation, steps, alive=True, joins=joins)
        self._ranks = {**self._ranks, rank: new}  # a new dict: other threads iterate over the old

    def remove(self, rank: int) -> None:
        """The peer that has the rank has died, left or ended."""
        self._ranks[rank].alive = False

    def look(self) -> dict[int, dict[str, Any]]:
        """{rank: report}, with the generation and whether it is alive, trains, is not silent."""
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


class RosterLink:
    """The way from a peer to the roster; a connection that breaks is made anew by the next call.

    Args:
      address: at which the roster is served.
      secret: of the run.
      seconds: that an answer may take.
    """

    def __init__(self, address: Address, secret: bytes, seconds: float):
        self._address, self._secret, self._seconds = address, secret, seconds
        self._connection: Connection | None = None

    def call(self, method: str, *args: Any) -> Any:
        """What the method of the `Roster` returns; one of `talk.BROKEN` where no answer comes."""
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
    """Reports to the roster, and learns of all peers' progress and of who is alive.

    Args:
      place: which peer reports.
      address: at which others ask it.
      roster: the way to the roster.
      boundary: of the peer's run.
      pulse: of the peer's run; gets the common progress.
      asker: of the peer; gets the members.
      leave: called with "stop" or "lag" where this peer has to end.
      clock: seconds.

    Attributes:
      stopped: ends `run`.
    """

    def __init__(
        self,
        place: Place,
        address: Address,
        roster: RosterLink,
        boundary: StepBoundary,
        pulse: Pulse,
        asker: Asker,
        leave: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._place, self._address, self._roster = place, address, roster
        self._peers = place.config["peers"]
        self._boundary, self._pulse, self._asker = boundary, pulse, asker
        self._leave, self._clock = leave, clock
        # At the last answer: common progress, own steps, and the time.
        self._reached, self._own, self._heard = 0, 0, math.inf
        # Meetings at the last answer, or when the first report after it failed.
        self._met, self._answered = 0, True
        self.stopped = threading.Event()

    def run(self) -> None:
        """Report again and again, until there is nobody to report to."""
        while not self.stopped.wait(self._peers["beat_s"]):
            if self._boundary.ready and not self.beat():
                return

    def report(self) -> dict[str, Any]:
        """What the roster keeps of this peer."""
        boundary, meetings = self._boundary, self._boundary.meetings
        return {
            "steps": self._pulse.own,
            **meetings.counts,
            "losses": boundary.losses,
            "stale": boundary.stale,
            "distance": meetings.distance,
        }

    def beat(self) -> bool:
        """Report once; whether to go on."""
        report = self.report()
        own = self._place.rank, self._place.generation, self._address, report
        try:
            answer = self._roster.call("beat", *own)
        except BROKEN:  # a network may come back
            if self._answered:
                self._met, self._answered = report["met"], False
            return True
        if answer is None:
            say("another peer has this rank now")
            self._leave("stop")
            return False
        all_steps, members = answer
        self._asker.members = members
        self._boundary.alone = len(members) < 2
        self._pulse.heard(all_steps, report["steps"])
        return self._is_recent()

    def _is_recent(self) -> bool:
        """Whether this peer has kept up; one that has not must not draw the others back.

        `train.py` may have been silent for a while, in which this peer trained and met others; one
        that was stopped made no steps, and one that was cut off met nobody.
        """
        peers, progress, now = self._peers, self._pulse.progress(), self._clock()
        silent, lag = now - self._heard > peers["silent_s"], progress - self._reached
        own, met = self._pulse.own, self._boundary.meetings.counts["met"]
        kept_up = 2 * (own - self._own) >= lag and met > self._met
        is_recent = not silent or lag <= peers["max_lag"] or kept_up
        self._reached, self._own, self._heard = progress, own, now
        self._met, self._answered = met, True
        if is_recent:
            return True
        say(
            f"the others made {lag} steps of progress while this peer was silent "
            f"(peers.max_lag is {peers['max_lag']}): another one takes its place"
        )
        self._boundary.meetings.closed = True
        self._boundary.meetings.withdraw()
        self._leave("lag")
        return False


def state_to_join(
    place: Place,
    roster: RosterLink,
    secret: bytes,
    leaving: Callable[[], str | None] = lambda: None,
    ask: Callable[[Address, bytes, float], Joined | None] = talk.ask_state,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Joined | None:
    """The state of a random peer; waits for one that trains, unless all others wait, too.

    Args:
      place: which peer joins.
      roster: the way to the roster.
      secret: that peers of this run know.
      leaving: how this peer has to end, or None.
      ask: asks the peer at an address for its state, see `decent_jax.peers.talk.ask_state`.
      clock: seconds.
      wait: for so many seconds.

    Raises:
      NotJoined: this peer has to end before.
    """
    peers, began = place.config["peers"], clock()
    while True:
        members = [m for m in roster.call("members") if m[0].partition(".")[0] != str(place.rank)]
        random.shuffle(members)
        for name, address in members:
            asked = clock()
            try:
                joined = ask(address, secret, peers["join_s"])
            except BROKEN as error:
                say(f"peer {name} gives no copy ({type(error).__name__})")
                continue
            if joined is not None:
                words = f"joins with a copy of peer {joined.donor} at step {joined.t}"
                say(f"{words} ({clock() - asked:.1f} s)")
                return joined
        if not roster.call("is_hopeful") or clock() >= began + peers["start_s"]:
            say("nobody gives a copy: begins with its own parameters")
            return None
        if leaving() is not None:
            raise NotJoined
        wait(peers["beat_s"])
