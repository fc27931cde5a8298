"""Connections between the processes of a run, over ports that anybody can reach.

Both sides first prove, with the handshake of `multiprocessing`, that they know the run's secret,
and interpret no data before that. Unauthenticated connections are limited in number and time.
A message is a header (JSON) and arrays as raw buffers, so nothing is unpickled.

Ray actors also use these connections: messages passed as arguments of concurrent calls to an actor
would share its link, and all of them would arrive late, instead of one after another.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import numpy as np

from decent_jax.ground.pytree import PyTree

Address = tuple[str, int]  # IP address and port

HANDSHAKE_S = 10.0  # for both proofs together
GUESTS = 200  # unauthenticated connections; if there are more, the oldest is closed
LARGEST_HEADER = 1 << 20  # bytes
_TICK_S = 0.1


class Listener:
    """A server that accepts connections and passes those that belong to the run to ``serve``.

    Args:
      server: a socket that listens; `close` closes it.
      secret: the run's secret, which the other side must know.
      serve: callback for each connection after the handshake, called in a separate thread with the
        connection, which it must close, and its IP address.
      left_out: callback for each rejected client, called with its IP address.
      handshake_s: time limit of the handshake, in seconds.
      guests: the most connections in a handshake at a time; one more closes the oldest.
    """

    def __init__(
        self,
        server: socket.socket,
        secret: bytes,
        serve: Callable[[Connection, str], None],
        left_out: Callable[[str], None] = lambda address: None,
        *,
        handshake_s: float = HANDSHAKE_S,
        guests: int = GUESTS,
    ):
        self._server, self._secret = server, secret
        self._serve, self._left_out = serve, left_out
        self._handshake_s, self._most = handshake_s, guests
        self._guests: list[socket.socket] = []  # the oldest first
        self._lock, self._closed = threading.Lock(), False
        server.settimeout(_TICK_S)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Frees the port and closes all unauthenticated connections."""
        self._closed = True
        _hang_up(self._server)  # wakes the thread
        self._thread.join()
        self._server.close()
        with self._lock:
            for guest in self._guests:
                _hang_up(guest)

    def _accept(self) -> None:
        while not self._closed:
            try:
                guest, address = self._server.accept()
            except TimeoutError:
                continue
            except OSError:  # the client disconnected, or this process has no more descriptors
                time.sleep(0 if self._closed else _TICK_S)
                continue
            with self._lock:
                if len(self._guests) >= self._most:
                    _hang_up(self._guests.pop(0))
                self._guests.append(guest)
            arguments = (guest, address[0].removeprefix("::ffff:"))
            threading.Thread(target=self._authenticate, args=arguments, daemon=True).start()

    def _authenticate(self, guest: socket.socket, address: str) -> None:
        try:
            with guest:
                connection = _handshake(
                    guest, self._secret, self._handshake_s, deliver_challenge, answer_challenge
                )
        except (AuthenticationError, OSError):
            if not self._closed:
                self._left_out(address)
            return
        finally:
            with self._lock:
                if guest in self._guests:
                    self._guests.remove(guest)
        if self._closed:
            connection.close()
        else:
            self._serve(connection, address)


def listen(
    host: str, secret: bytes, serve: Callable[[Connection], None]
) -> tuple[Listener, Address]:
    """Starts a listener at a free port for clients that know the secret: (listener, its address).

    Args:
      host: an IP address of this machine.
      secret: the run's secret.
      serve: callback for each connection, called in a separate thread; the connection is closed
        when ``serve`` returns.
    """

    def serve_until_the_end(connection: Connection, _: str) -> None:
        with connection, contextlib.suppress(EOFError, OSError):  # other code reports who has died
            serve(connection)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family, backlog=64)
    address: Any = server.getsockname()[:2]
    return Listener(server, secret, serve_until_the_end), address


def free_port() -> int:
    """A port that is free on every address of this machine."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def connect(address: Address, secret: bytes, seconds: float = HANDSHAKE_S) -> Connection:
    """An authenticated connection to the `Listener` at an address.

    Connecting and the handshake may take ``seconds`` each.

    Raises:
      OSError: nothing listens there.
      AuthenticationError: the listener does not know the secret, or disconnected.
    """
    with socket.create_connection(address, timeout=seconds) as link:
        return prove(link, secret, seconds)


def prove(link: socket.socket, secret: bytes, handshake_s: float = HANDSHAKE_S) -> Connection:
    """Authenticates over ``link``, a socket to a `Listener`, and returns the connection.

    Raises:
      AuthenticationError: the other side does not know the secret, or disconnected.
    """
    link.settimeout(None)
    # The end of a message is sent without waiting for an acknowledgement of its start.
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _handshake(link, secret, handshake_s, answer_challenge, deliver_challenge)


def _handshake(
    link: socket.socket, secret: bytes, seconds: float, *challenges: Callable
) -> Connection:
    connection = Connection(os.dup(link.fileno()))
    try:
        with within(seconds, connection):
            for challenge in challenges:
                challenge(connection, secret)
    except (AuthenticationError, AssertionError, EOFError, OSError):
        connection.close()
        raise AuthenticationError("the other side did not prove that it knows the secret") from None
    return connection


@contextlib.contextmanager
def within(seconds: float, connection: Connection) -> Iterator[None]:
    """A context that closes the connection if it lasts longer; readers then see an end of file."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        timer = threading.Timer(seconds, _hang_up, (link,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _hang_up(link: socket.socket) -> None:
    """Ends a connection, so that the thread that reads from it sees an end of file."""
    with contextlib.suppress(OSError):  # the other side was faster
        link.shutdown(socket.SHUT_RDWR)


# --- Messages -------------------------------------------------------------------------------------


class NoMessage(OSError):
    """Data from the other side that is not a message of this program."""


def send(connection: Connection, header: object, value: PyTree = None) -> None:
    """Sends a JSON header and a value: None or arrays, in tuples, lists and dicts.

    Raises:
      OSError: the other side is gone.
    """
    arrays: list[np.ndarray] = []
    form = _form(value, arrays)
    kinds = [(array.dtype.name, array.shape) for array in arrays]
    connection.send_bytes(json.dumps([header, form, kinds]).encode())
    for array in arrays:
        connection.send_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def receive(connection: Connection) -> tuple[Any, PyTree]:
    """The header and the value of the next message; lists arrive as tuples, arrays are read-only.

    Raises:
      EOFError, OSError: the other side is gone, or has sent more than it announced.
      NoMessage: the data is not a message.
    """
    arrays = []
    try:  # a connection closed by another thread also raises TypeError
        header, form, kinds = json.loads(connection.recv_bytes(LARGEST_HEADER))
        for name, shape in kinds:
            dtype, size = np.dtype(name), int(np.prod(shape, dtype=np.int64))
            data = connection.recv_bytes(size * dtype.itemsize)
            arrays.append(np.frombuffer(data, dtype).reshape(shape))
        return header, _value(form, arrays)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise NoMessage(f"not a message of this program: {type(error).__name__}") from None


def _form(value: PyTree, arrays: list[np.ndarray]) -> PyTree:
    """The value with arrays replaced by their indices in ``arrays``, to which they are added."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: _form(item, arrays) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_form(item, arrays) for item in value]
    arrays.append(np.asarray(value))
    return len(arrays) - 1


def _value(form: PyTree, arrays: list[np.ndarray]) -> PyTree:
    """The value of a form that `_form` returned."""
    if isinstance(form, dict):
        return {key: _value(item, arrays) for key, item in form.items()}
    if isinstance(form, list):
        return tuple(_value(item, arrays) for item in form)
    return None if form is None else arrays[form]
