"""Exchanges the messages of `decent_jax.peers.protocol` over a connection.

Each side ends the average if its connection breaks or after ``peers.exchange_s``. A peer that joins
also requests a state over such a connection.
"""

import math
import random
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from decent_jax.actors.ray_cluster import say
from decent_jax.ground import connections
from decent_jax.ground.connections import Address
from decent_jax.peers import Peers
from decent_jax.peers.protocol import Averager, JoinState, Message, Offer

Members = list[tuple[str, Address]]  # names and addresses of peers

_AVERAGE, _STATE = "average", "state"
BROKEN = (OSError, EOFError, AuthenticationError)


class Asker:
    """Asks other peers for pairwise averages, one at a time.

    Args:
      averager: this peer's averager.
      secret: shared by the peers of the run.
      peers: the section ``peers`` of the config.
      clock: a clock, in seconds.
    """

    def __init__(
        self,
        averager: Averager,
        secret: bytes,
        peers: Peers,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._averager, self._secret, self._peers = averager, secret, peers
        self._clock = clock
        self._avoided: dict[str, float] = {}  # {unresponsive peer: time until which to avoid it}
        self._open: dict[str, Connection] = {}
        self._doubtful: list[tuple[str, Connection]] = []  # averages that may yet be accepted

    def ask(self) -> None:
        """Average with a random peer, if it agrees."""
        waiting, self._doubtful = self._doubtful, []
        for name, connection in waiting:  # partners that were silent may have answered since
            self._close(name, connection, 0.0)
        for name in self._open.keys() - self._averager.members.keys():
            self._open.pop(name).close()
        partner = self._partner()
        asked = self._averager.ask() if partner else None
        if partner is None or asked is None:
            return
        (name, address), (offer, message) = partner, asked
        ends = self._clock() + self._peers.exchange_s
        try:
            connection = self._connection(name, address)
            decoded = self._exchange(connection, offer, message)
            if decoded is None:
                self._averager.give_up(offer.name, "declined")
                return
            connections.send(connection, decoded)
        except Exception as error:  # otherwise the peer would be busy forever
            self._averager.give_up(offer.name, "lost")
            self._avoid(name, late=self._clock() >= ends)
            if isinstance(error, BROKEN):
                return
            raise
        del self._open[name]  # until the answer arrives
        if self._close(offer.name, connection, ends - self._clock()):
            self._open[name] = connection
        else:
            self._avoid(name, late=self._clock() >= ends)

    def _exchange(
        self, connection: Connection, offer: Offer, encode: Callable[[], Message]
    ) -> bool | None:
        """Whether this side decoded the partner's message; None: the partner declines."""
        with connections.within(self._peers.exchange_s, connection):
            connections.send(connection, [_AVERAGE, *offer])
            agreed, _ = connections.receive(connection)
            if not agreed:
                return None
            message = encode()
            connections.send(connection, message.side, message.parts)
            (side, *reply), parts = connections.receive(connection)
        return self._averager.receive(Offer(*reply), Message(list(parts), side))

    def _close(self, name: str, connection: Connection, seconds: float) -> bool:
        """Apply the pull if the partner does; returns whether the partner has answered."""
        accepted: bool | None = None
        try:
            if connection.poll(max(seconds, 0.0)):
                accepted, _ = connections.receive(connection)
            else:
                self._doubtful.append((name, connection))
        except BROKEN:
            connection.close()
            self._averager.close(name, False)
            return False
        self._averager.close(name, accepted)
        return accepted is not None

    def _connection(self, name: str, address: Address) -> Connection:
        if name not in self._open:
            self._open[name] = connections.connect(address, self._secret, self._peers.exchange_s)
        return self._open[name]

    def _partner(self) -> tuple[str, Address] | None:
        now = self._clock()
        others = [
            (name, address)
            for name, address in self._averager.members.items()
            if name != self._averager.me and self._avoided.get(name, -math.inf) < now
        ]
        return random.choice(others) if others else None

    def _avoid(self, name: str, late: bool) -> None:
        seconds = self._peers.exchange_s
        self._avoided[name] = self._clock() + self._peers.silent_s
        if name in self._open:
            self._open.pop(name).close()
        why = f"took longer than peers.exchange_s ({seconds:g} s)" if late else "does not answer"
        say(f"peer {name} {why}; asking other peers")


class Answerer:
    """Answers the requests of other peers; `serve` runs in one thread per connection.

    Args:
      averager: this peer's averager.
      exchange_s: seconds that an average may take.
      may_average: function that returns whether this peer takes part in averages now.
      state: function that returns this peer's state at the next step boundary, or None if it has
        none yet.
    """

    def __init__(
        self,
        averager: Averager,
        exchange_s: float,
        may_average: Callable[[], bool],
        state: Callable[[], JoinState | None],
    ):
        self._averager, self._exchange_s = averager, exchange_s
        self._may_average, self._state = may_average, state

    def serve(self, connection: Connection) -> None:
        """Answer requests one after the other, until the other peer disconnects."""
        while True:
            (kind, *offer), _ = connections.receive(connection)
            if kind == _STATE:
                self._give_state(connection)
            else:
                self._average(connection, Offer(*offer))

    def _average(self, connection: Connection, offer: Offer) -> None:
        agrees = self._may_average() and self._averager.agree(offer.name)
        connections.send(connection, agrees)
        if not agrees:
            return
        try:
            with connections.within(self._exchange_s, connection):
                side, parts = connections.receive(connection)
                reply = self._averager.answer(offer, Message(list(parts), side))
                if reply is None:
                    raise TimeoutError("the message came too late")
                answer, message = reply
                connections.send(connection, [message.side, *answer], message.parts)
                decoded, _ = connections.receive(connection)
        except BaseException:
            self._averager.give_up(offer.name, "lost")
            raise
        # Nothing may disconnect between the decision and the answer.
        connections.send(connection, self._averager.settle(offer.name, decoded))

    def _give_state(self, connection: Connection) -> None:
        state = self._state()
        if state is None:
            connections.send(connection, None)
        else:
            connections.send(connection, [state.donor, state.t], state.arrays)


def ask_state(address: Address, secret: bytes, seconds: float) -> JoinState | None:
    """The state of another peer at its next step boundary; None if it has none yet.

    Raises:
      OSError, EOFError, AuthenticationError: the peer does not answer within ``seconds``.
    """
    with (
        connections.connect(address, secret, seconds) as connection,
        connections.within(seconds, connection),
    ):
        connections.send(connection, [_STATE])
        header, arrays = connections.receive(connection)
    if header is None:
        return None
    donor, t = header
    return JoinState(donor, t, list(arrays))
