"""Messages between the stages of a replica: kept until they are taken, and sent one by one."""

import queue
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from decent_jax.actors import messages
from decent_jax.actors.messages import Address
from decent_jax.ground import connections
from decent_jax.ground.errors import PeerLost


class Key(NamedTuple):
    """What a message is, the same at its sender and its receiver."""

    kind: str
    t: int  # step
    k: int  # micro-batch
    sender: int  # stage


class Mailbox:
    """Messages for one stage; put and taken by different threads."""

    def __init__(self):
        self._messages: dict[Key, Any] = {}
        self._changed = threading.Condition()

    def put(self, key: Key, value: Any) -> None:
        """Keep a message until it is taken."""
        with self._changed:
            self._messages[key] = value
            self._changed.notify_all()

    def take(self, key: Key, seconds: float) -> Any:
        """Wait for a message, and forget it.

        Raises:
          PeerLost: it has not come within ``seconds``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._messages, seconds):
                raise PeerLost(
                    f"stage {key.sender} has sent no {key.kind} of step {key.t} within "
                    f"cluster.exchange_s ({seconds:g} s)"
                )
            return self._messages.pop(key)

    def fill(self, connection: Connection) -> None:
        """Put what a `Channel` sends over this connection, until it ends."""
        while True:
            key, value = messages.receive(connection)
            self.put(Key(*key), value)


class Channel:
    """Sends messages to one stage, in their order; a thread waits for the device and the network.

    Args:
      address: at which it listens; the first message connects.
      secret: of the run.
    """

    def __init__(self, address: Address, secret: bytes):
        self._address, self._secret = address, secret
        self._messages: queue.SimpleQueue[tuple[Key, Any]] = queue.SimpleQueue()
        self._broken: Exception | None = None
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, key: Key, value: Any) -> None:
        """Send None or arrays in tuples and dicts; the arrays may still be computed.

        Raises:
          PeerLost: an earlier message could not be sent.
        """
        if self._broken is not None:
            raise PeerLost(f"{key.kind} of step {key.t} could not be sent: {self._broken}")
        self._messages.put((key, value))

    def _send_all(self) -> None:
        try:
            key, value = self._messages.get()
            with connections.connect(self._address, self._secret) as connection:
                while True:
                    messages.send(connection, key, value)
                    key, value = self._messages.get()
        except Exception as error:  # told by the next message, in the thread that trains
            self._broken = error
