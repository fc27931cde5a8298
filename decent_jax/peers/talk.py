"""What peers say to each other: the messages of `decent_jax.peers.rule`, over one connection.

If it breaks, or ``peers.meet_s`` have passed, the meeting ends on that side. A peer that joins asks
for a state in the same way.
"""

import math
import random
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

from decent_jax.actors.ray_cluster import say
from decent_jax.ground import connections
from decent_jax.ground.connections import Address
from decent_jax.peers.rule import Joined, Meetings, Message, Offer

Members = list[tuple[str, Address]]  # names and addresses of peers

_MEET, _STATE = "meet", "state"
BROKEN = (OSError, EOFError, AuthenticationError)


class Asker:
    """Asks other peers to meet, one at a time.

    Args:
      meetings: of this peer.
      secret: of the run.
      peers: section of the config.
      clock: seconds.

    Attributes:
      members: the peers that train, this one as well.
    """

    def __init__(
        self,
        meetings: Meetings,
        secret: bytes,
        peers: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._meetings, self._secret, self._peers = meetings, secret, peers
        self._clock = clock
        self.members: Members = []
        self._avoided: dict[str, float] = {}  # until when, after it gave no answer
        self._open: dict[str, Connection] = {}
        self._doubtful: list[tuple[str, Connection]] = []  # meetings whose end is not known yet

    def ask(self) -> None:
        """Ask a random peer to meet, and meet."""
        waiting, self._doubtful = self._doubtful, []
        for meeting, connection in waiting:  # partners that were silent may have spoken since
            self._close(meeting, connection, 0.0)
        for name in self._open.keys() - dict(self.members).keys():
            self._open.pop(name).close()
        partner = self._partner()
        asked = self._meetings.ask() if partner else None
        if partner is None or asked is None:
            return
        (name, address), (offer, message) = partner, asked
        ends = self._clock() + self._peers["meet_s"]
        try:
            connection = self._connection(name, address)
            understood = self._exchange(connection, offer, message)
            if understood is None:
                self._meetings.give_up(offer.meeting, "declined")
                return
            connections.send(connection, understood)
        except Exception as error:  # without this, the peer would be busy for ever
            self._meetings.give_up(offer.meeting, "lost")
            self._avoid(name)
            if isinstance(error, BROKEN):
                return
            raise
        del self._open[name]  # until the answer has come
        if self._close(offer.meeting, connection, ends - self._clock()):
            self._open[name] = connection
        else:
            self._avoid(name)

    def _exchange(
        self, connection: Connection, offer: Offer, make: Callable[[], Message]
    ) -> bool | None:
        """Whether this side has understood the partner's message; None: the partner declines."""
        with connections.within(self._peers["meet_s"], connection):
            connections.send(connection, [_MEET, *offer])
            agreed, _ = connections.receive(connection)
            if not agreed:
                return None
            message = make()
            connections.send(connection, message.side, message.parts)
            (side, *reply), parts = connections.receive(connection)
        return self._meetings.hear(Offer(*reply), Message(list(parts), side))

    def _close(self, meeting: str, connection: Connection, seconds: float) -> bool:
        """Add the half if the partner says that it adds its own; whether there is an answer."""
        accepted: bool | None = None
        try:
            if connection.poll(max(seconds, 0.0)):
                accepted, _ = connections.receive(connection)
            else:
                self._doubtful.append((meeting, connection))
        except BROKEN:
            connection.close()
            self._meetings.close(meeting, False)
            return False
        self._meetings.close(meeting, accepted)
        return accepted is not None

    def _connection(self, name: str, address: Address) -> Connection:
        if name not in self._open:
            self._open[name] = connections.connect(address, self._secret, self._peers["meet_s"])
        return self._open[name]

    def _partner(self) -> tuple[str, Address] | None:
        now = self._clock()
        others = [
            (name, address)
            for name, address in self.members
            if name != self._meetings.me and self._avoided.get(name, -math.inf) < now
        ]
        return random.choice(others) if others else None

    def _avoid(self, name: str) -> None:
        self._avoided[name] = self._clock() + self._peers["silent_s"]
        if name in self._open:
            self._open.pop(name).close()
        say(f"peer {name} gives no answer; others are asked")


class Answerer:
    """Answers the questions of other peers; `serve` runs in a thread for each connection.

    Args:
      meetings: of this peer.
      meet_s: seconds for a meeting.
      may_meet: whether this peer begins meetings now.
      state: its state at the next step boundary, or None where it has none to give.
    """

    def __init__(
        self,
        meetings: Meetings,
        meet_s: float,
        may_meet: Callable[[], bool],
        state: Callable[[], Joined | None],
    ):
        self._meetings, self._meet_s = meetings, meet_s
        self._may_meet, self._state = may_meet, state

    def serve(self, connection: Connection) -> None:
        """Answer one question after the other, until the other side hangs up."""
        while True:
            (kind, *offer), _ = connections.receive(connection)
            if kind == _STATE:
                self._give_state(connection)
            else:
                self._meet(connection, Offer(*offer))

    def _meet(self, connection: Connection, offer: Offer) -> None:
        agrees = self._may_meet() and self._meetings.agree(offer.meeting)
        connections.send(connection, agrees)
        if not agrees:
            return
        try:
            with connections.within(self._meet_s, connection):
                side, parts = connections.receive(connection)
                reply = self._meetings.answer(offer, Message(list(parts), side))
                if reply is None:
                    raise TimeoutError("the message came too late")
                own, message = reply
                connections.send(connection, [message.side, *own], message.parts)
                understood, _ = connections.receive(connection)
        except BaseException:
            self._meetings.give_up(offer.meeting, "lost")
            raise
        # Nothing may hang up between the decision and the answer.
        connections.send(connection, self._meetings.settle(offer.meeting, understood))

    def _give_state(self, connection: Connection) -> None:
        found = self._state()
        if found is None:
            connections.send(connection, None)
        else:
            connections.send(connection, [found.donor, found.t], found.arrays)


def ask_state(address: Address, secret: bytes, seconds: float) -> Joined | None:
    """The state of a peer at its next step boundary; None: it has none to give.

    Raises:
      OSError, EOFError, AuthenticationError: it does not answer within ``seconds``.
    """
    with (
        connections.connect(address, secret, seconds) as connection,
        connections.within(seconds, connection),
    ):
        connections.send(connection, [_STATE])
        found, arrays = connections.receive(connection)
    if found is None:
        return None
    donor, t = found
    return Joined(donor, t, list(arrays))
