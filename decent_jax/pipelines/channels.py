"""Messages between the stages of a replica, and the connections that carry them one by one.

If messages travelled as arguments of calls of Ray, those to one stage would share its link: all
would arrive late, instead of the first one early.
"""

import contextlib
import os
import pickle
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, NamedTuple

from decent_jax.ground.errors import PeerLost

Address = tuple[str, int]  # IP address and port
_ANSWER_S = 10  # for the answer to "do you know the secret?"


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


class Door:
    """Where the messages of other stages arrive.

    Attributes:
      address: for their `Channel`.

    Args:
      host: IP address of this machine.
      secret: that they must know.
      deliver: gets each message, in a thread for each of them.
    """

    def __init__(self, host: str, secret: bytes, deliver: Callable[[Key, Any], None]):
        self._secret, self._deliver = secret, deliver
        self._listener = Listener((host, 0), backlog=16)  # asked for an authkey, it waits for one
        self.address: Address = self._listener.address  # pyright: ignore (its type is wider)
        threading.Thread(target=self._open, daemon=True).start()

    def _open(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # it left at once, or this process has no more file descriptors
                time.sleep(0.1)
                continue
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: Connection) -> None:
        # Strangers; `Watched` says who has died.
        with connection, contextlib.suppress(AuthenticationError, EOFError, OSError):
            _wait_at_most(connection, _ANSWER_S)
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            _wait_at_most(connection, 0)
            while True:
                self._deliver(*pickle.loads(connection.recv_bytes()))


class Channel:
    """Sends messages to one stage, in their order; a thread waits for the device and the network.

    Args:
      address: of its `Door`; the first message connects.
      secret: that it asks for.
    """

    def __init__(self, address: Address, secret: bytes):
        self._address, self._secret = address, secret
        self._messages: queue.SimpleQueue[tuple[Key, Any]] = queue.SimpleQueue()
        self._broken: Exception | None = None
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, key: Key, value: Any) -> None:
        """Send arrays, which may still be computed.

        Raises:
          PeerLost: an earlier message could not be sent.
        """
        if self._broken is not None:
            raise PeerLost(f"{key.kind} of step {key.t} could not be sent: {self._broken}")
        self._messages.put((key, value))

    def _send_all(self) -> None:
        import jax
        import numpy as np

        try:
            key, value = self._messages.get()
            with Client(self._address, authkey=self._secret) as connection:
                # Send the end of a message without waiting for the receipt of its beginning.
                _set(connection, socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    on_host = jax.tree.map(np.asarray, value)
                    connection.send_bytes(pickle.dumps((key, on_host), protocol=5))
                    key, value = self._messages.get()
        except Exception as error:  # told by the next message, in the thread that trains
            self._broken = error


def _wait_at_most(connection: Connection, seconds: int) -> None:
    """Let reading fail after this many seconds without a byte; 0: never."""
    _set(connection, socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _set(connection: Connection, *option: Any) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.setsockopt(*option)
