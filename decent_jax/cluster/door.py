"""The side of process 0 of the start-up barrier: it admits processes and leaves strangers out.

It serves all connections side by side, in one thread: each has a deadline of its own, and nothing
is interpreted before the proof that the other side knows the secret (`rendezvous` has the
protocol).
"""

import collections
import contextlib
import dataclasses
import hmac
import json
import secrets
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any

from decent_jax.cluster import secret
from decent_jax.errors import ConfigError
from decent_jax.text import name_all, printable, shorten, shown

ANSWER_S = 10  # time for one message between two processes that both run
LARGEST_MESSAGE = 1 << 20  # bytes
NONCE = 32  # bytes of a nonce, and of a proof
_GUESTS = 200  # connections served at once; beyond, the oldest is closed
_NAMED = 3  # strangers named as soon as they come
_LONGEST_NAME = 64  # characters of a host name


@dataclasses.dataclass
class _Guest:
    """A connection whose process is not known yet."""

    address: str
    deadline: float
    nonce: bytes
    data: bytes = b""
    proved: bool = False


class Door:
    """Where process 0 admits the others and leaves strangers out.

    Attributes:
      hellos: by the number of the process, what each has sent.
      members: their connections, without process 0.
      refusal: why they cannot start together; None: so far, they can.
    """

    def __init__(self, server: socket.socket, own: dict, known: bytes):
        self.hellos, self.refusal = {0: own}, None
        self.members: dict[int, socket.socket] = {}
        self._server, self._secret = server, known
        self._guests: dict[socket.socket, _Guest] = {}
        self._strangers = collections.Counter()
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_) -> None:
        self._selector.close()
        for connection in (*self._guests, *self.members.values()):
            connection.close()

    def next_deadline(self) -> float:
        """When the time of the next guest is over."""
        return min((guest.deadline for guest in self._guests.values()), default=float("inf"))

    def serve(self, until: float) -> None:
        """Serve the connections that have sent something; returns by ``until``."""
        for key, _ in self._selector.select(max(until - time.monotonic(), 0)):
            connection = key.fileobj
            if connection is self._server:
                self._accept()
            elif isinstance(connection, socket.socket) and connection in self._guests:
                self._read(connection)  # unless it was closed meanwhile
        now = time.monotonic()
        for connection, guest in list(self._guests.items()):
            if guest.deadline <= now:
                self._leave_out(connection, f"was silent for {ANSWER_S} s")

    def all_there(self) -> bool:
        """Whether all have come and none has died since; one that has died may come once more."""
        if len(self.hellos) < self.hellos[0]["count"]:
            return False
        gone = [process for process, member in self.members.items() if _has_left(member)]
        for process in gone:
            self._drop(process)
        return not gone

    def missing(self, timeout_s: float) -> str:
        """The sentence for processes that have not come."""
        count = self.hellos[0]["count"]
        absent = [process for process in range(count) if process not in self.hellos]
        left_out = ""
        if self._strangers:
            names = ", ".join([address for address, _ in self._strangers.most_common(_NAMED)])
            left_out = (
                f"; {self._strangers.total()} connections of strangers were left out, from {names}"
            )
        return (
            f"{name_all(absent, [])} of {count} did not come within {timeout_s:g} s "
            "(cluster.timeout_s); start all of them, and see that they can reach process 0"
            f"{left_out}"
        )

    def _accept(self) -> None:
        try:
            connection, address = self._server.accept()
        except BlockingIOError:  # it left at once
            return
        except OSError:  # this process has no more file descriptors
            time.sleep(0.1)
            self._make_room(1)
            return
        connection.setblocking(False)
        self._make_room(_GUESTS)
        guest = _Guest(
            address[0].removeprefix("::ffff:"),
            time.monotonic() + ANSWER_S,
            secrets.token_bytes(NONCE),
        )
        self._guests[connection] = guest
        self._selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # reading will find that it is gone
            connection.send(guest.nonce)

    def _make_room(self, most: int) -> None:
        unproved = [connection for connection, guest in self._guests.items() if not guest.proved]
        if unproved and len(unproved) >= most:
            self._leave_out(unproved[0], "was the oldest of too many")

    def _read(self, connection: socket.socket) -> None:
        guest = self._guests[connection]
        try:
            part = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        guest.data += part
        if not part:
            self._leave_out(connection, "left without saying which process it is")
            return
        if not guest.proved and len(guest.data) >= 2 * NONCE:
            nonces, given = (guest.nonce, guest.data[:NONCE]), guest.data[NONCE : 2 * NONCE]
            if not hmac.compare_digest(given, secret.proof(self._secret, "process", *nonces)):
                self._leave_out(connection, "does not know the secret of this run")
                return
            guest.proved, guest.data = True, guest.data[2 * NONCE :]
            with contextlib.suppress(OSError):
                connection.send(secret.proof(self._secret, "process 0", *nonces))
        if guest.proved and b"\n" in guest.data:
            self._admit(connection, guest)
        elif len(guest.data) > LARGEST_MESSAGE:
            self._leave_out(connection, "sent too much")

    def _admit(self, connection: socket.socket, guest: _Guest) -> None:
        hello = _hello(guest.data)
        if hello is None:
            self._leave_out(connection, "sent what no process of this version sends")
            return
        count, process = self.hellos[0]["count"], hello["process"]
        if hello["count"] == count and not 0 < process < count:
            sentence = f"process {shown(process)} ({hello['host']}) is none of processes 1 to "
            with contextlib.suppress(OSError):
                send(connection, {"refusal": f"{sentence}{count - 1}, which process 0 waits for"})
            self._leave_out(connection, f"says that it is process {shown(process)} of {count}")
            return
        self._forget(connection)
        if process in self.members and _has_left(self.members[process]):  # it comes once more
            self._drop(process)
        self.refusal = self.refusal or _misfit(hello, self.hellos)
        if process in self.members:
            with contextlib.suppress(OSError):
                send(connection, {"refusal": self.refusal})
            connection.close()
            return
        self.members[process] = connection
        self.hellos.setdefault(process, hello)

    def _drop(self, process: int) -> None:
        """Forget a process that has died."""
        self.members.pop(process).close()
        del self.hellos[process]

    def _leave_out(self, connection: socket.socket, why: str) -> None:
        """Close the connection of a stranger, and name the first ones."""
        address = self._forget(connection).address
        connection.close()
        self._strangers[address] += 1
        if self._strangers[address] == 1 and len(self._strangers) <= _NAMED:
            print(
                f"{Path(sys.argv[0]).name}: a stranger at {address} was left out: it {why}",
                file=sys.stderr,
                flush=True,
            )

    def _forget(self, connection: socket.socket) -> _Guest:
        self._selector.unregister(connection)
        return self._guests.pop(connection)


def _hello(line: bytes) -> dict | None:
    """What a process says about itself, its texts harmless; None: it is something else."""
    hello = parse(line)
    if not isinstance(hello, dict) or not {"process", "count", "host", "facts"} <= hello.keys():
        return None
    facts = hello["facts"]
    if type(hello["process"]) is not int or type(hello["count"]) is not int:
        return None
    if not isinstance(facts, dict) or not all(isinstance(v, str) for v in facts.values()):
        return None
    return hello | {"host": printed_name(hello["host"]), "facts": printed_facts(facts)}


def printed_name(host: Any) -> str:
    """The name of a host as it may be printed."""
    return shorten(printable(str(host)), _LONGEST_NAME)


def printed_facts(facts: dict[str, str]) -> dict[str, str]:
    """A description as it may be printed."""
    return {printable(name): printable(value) for name, value in facts.items()}


def _has_left(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection, on which it has nothing more to send."""
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _misfit(hello: dict, hellos: dict[int, dict]) -> str | None:
    """Why this process cannot join the others; None: it can."""
    process, count = hello["process"], hellos[0]["count"]
    if hello["count"] != count:
        return (
            f"process {shown(process)} ({hello['host']}) was told of {shown(hello['count'])} "
            f"processes and process 0 ({hellos[0]['host']}) of {count}"
        )
    if process in hellos:
        return (
            f"two processes, on {hellos[process]['host']} and on {hello['host']}, say that they "
            f"are process {process}; each needs a cluster.process_id of its own"
        )
    return None


def listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(
            f"process 0 ({socket.gethostname()}) cannot listen on port {port} of "
            f"cluster.coordinator: {error.strerror or error}; take another port"
        ) from None


def send(connection: socket.socket, message: dict) -> None:
    """Send a message that a side takes at once."""
    connection.settimeout(ANSWER_S)
    connection.sendall(json.dumps(message).encode() + b"\n")


def parse(line: bytes) -> Any:
    """The JSON of a message, or None."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
