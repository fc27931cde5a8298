"""What a peer asks of the roster: progress for its reports, and who can give it a state."""

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from decent_jax.actors.handles import Actor, Lost, Silent
from decent_jax.actors.messages import Address
from decent_jax.actors.process import say
from decent_jax.peers import talk
from decent_jax.peers.between import Between, NotJoined, Pulse
from decent_jax.peers.rule import Joined
from decent_jax.peers.setup import Place
from decent_jax.peers.talk import Asker


class Reporter:
    """Reports to the roster, and learns of all peers' progress and of who is alive.

    Args:
      place: which peer reports.
      address: at which others ask it.
      roster: the actor of the roster.
      between: of the peer's run.
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
        roster: Actor,
        between: Between,
        pulse: Pulse,
        asker: Asker,
        leave: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._place, self._address, self._roster = place, address, roster
        self._peers = place.config["peers"]
        self._between, self._pulse, self._asker = between, pulse, asker
        self._leave, self._clock = leave, clock
        self._version: int | None = None  # of the list of members
        self._reached, self._heard = 0, math.inf  # progress at the last answer, and when it came
        self.stopped = threading.Event()

    def run(self) -> None:
        """Report again and again, until there is nobody to report to."""
        while not self.stopped.wait(self._peers["beat_s"]):
            if self._between.ready and not self.beat():
                return

    def report(self) -> dict[str, Any]:
        """What the roster keeps of this peer."""
        between, meetings = self._between, self._between.meetings
        return {
            "steps": self._pulse.own,
            **meetings.counts,
            "losses": between.losses,
            "stale": between.stale,
            "distance": meetings.distance,
            "seconds": dict(self._asker.seconds),
        }

    def beat(self) -> bool:
        """Report once; whether to go on."""
        peers, report = self._peers, self.report()
        own = self._place.slot, self._place.incarnation, self._address, report
        try:
            answer = self._roster.call("beat", *own).result(peers["silent_s"])
            if answer is None:
                say("another peer has this slot now")
                self._leave("stop")
                return False
            all_steps, version = answer
            if version != self._version:
                found = self._roster.call("members").result(peers["silent_s"])
                self._asker.members, self._version = found, version
                self._between.alone = len(found) < 2
        except Silent:  # a network may come back
            return True
        except Lost:
            live = len(self._asker.members)
            say(f"the roster is lost: {live} peers go on with the list they have")
            self._pulse.lost(live)
            return False
        self._pulse.heard(all_steps, report["steps"])
        return self._is_recent()

    def _is_recent(self) -> bool:
        """Whether this peer has kept up; one that has not must not draw the others back."""
        peers, progress, now = self._peers, self._pulse.progress(), self._clock()
        silent, lag = now - self._heard > peers["silent_s"], progress - self._reached
        self._reached, self._heard = progress, now
        if not silent or lag <= peers["max_lag"]:
            return True
        say(
            f"the others made {lag} steps of progress while this peer was silent "
            f"(peers.max_lag is {peers['max_lag']}): another one takes its place"
        )
        self._between.meetings.closed = True
        self._between.meetings.withdraw()
        self._leave("lag")
        return False


def state_to_join(
    place: Place,
    roster: Actor,
    secret: bytes,
    leaving: Callable[[], str | None] = lambda: None,
    ask: Callable[[Address, bytes, float], Joined | None] = talk.ask_state,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Joined | None:
    """The state of a random peer; waits for one that trains, unless all others wait, too.

    Args:
      place: which peer joins.
      roster: the actor of the roster.
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
        members = roster.call("members").result(peers["join_s"])
        members = [m for m in members if m[0].partition(".")[0] != str(place.slot)]
        random.shuffle(members)
        for name, address in members:
            asked = clock()
            try:
                joined = ask(address, secret, peers["join_s"])
            except talk.BROKEN as error:
                say(f"peer {name} gives no copy ({type(error).__name__})")
                continue
            if joined is not None:
                words = f"joins with a copy of peer {joined.donor} at step {joined.t}"
                say(f"{words} ({clock() - asked:.1f} s)")
                return joined
        hopeful = roster.call("is_hopeful").result(peers["join_s"])
        if not hopeful or clock() >= began + peers["start_s"]:
            say("nobody gives a copy: begins with its own parameters")
            return None
        if leaving() is not None:
            raise NotJoined
        wait(peers["beat_s"])
