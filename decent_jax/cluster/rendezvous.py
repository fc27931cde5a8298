"""A start-up barrier before jax's own: what is wrong becomes one sentence on every process.

In jax's own start-up a process that waits in vain ends with a stack trace, one that cannot listen
ends with a segmentation fault, and processes with different configs hang or train nonsense. So
process 0 first listens at the coordinator's port itself. The others send it a **description** of
themselves (versions and config); it compares them, answers every process, and frees the port for
jax.

Anybody may reach that port. So both sides first prove that they know the run's secret (`secret`),
each by an HMAC over two nonces, one of either side, and process 0 interprets nothing that comes
before the proof. A thread serves each connection, until a deadline of its own:

    process 0 -> other   nonce (32 bytes)
    other -> process 0   nonce, HMAC("process", both nonces)
    process 0 -> other   HMAC("process 0", both nonces)
    other -> process 0   a line of JSON: its number, the count, its host and its description
    process 0 -> other   when all have come, a line of JSON: all hosts, or why they cannot start
"""

import collections
import contextlib
import hmac
import json
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

from decent_jax.cluster import secret
from decent_jax.ground import extras
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import name_all, printable, shorten, shown

ANSWER_S = 10  # time for one message between two processes that both run
LARGEST_MESSAGE = 1 << 20  # bytes
NONCE = 32  # bytes of a nonce, and of a proof

_PACKAGES = ("decent_jax", "jax", "jaxlib", "flax", "optax")
_OWN_FIELDS = ("cluster.coordinator", "cluster.process_id")  # every process has its own
_RESOLVE_S = 60  # a host name may appear late (Kubernetes), but not later than this
_SHOWN = 3  # differences in one sentence
_LONGEST_VALUE = 40  # characters of a value in which processes differ
_LONGEST_NAME = 64  # characters of a host name
_GUESTS = 200  # connections served at once; beyond, the oldest is closed
_NAMED = 3  # strangers named as soon as they come
_TICK_S = 0.1  # between two looks at who is there


def describe(config: Mapping[str, object]) -> dict[str, str]:
    """What must be equal on all processes: versions, and the fields of the (flat) config."""
    versions = {"Python": platform.python_version()}
    versions |= {package: extras.version(package) for package in _PACKAGES}
    fields = {f"config.{k}": repr(value) for k, value in config.items() if k not in _OWN_FIELDS}
    return versions | fields


def difference(descriptions: list[dict[str, str]], hosts: list[str]) -> str | None:
    """A sentence that names what differs and on which processes, or None where all agree.

    >>> difference([{"jax": "0.10.2"}, {"jax": "0.10.2"}, {"jax": "0.12.0"}], ["a", "b", "c"])
    'the processes differ in jax: 0.10.2 on processes 0 (a) and 1 (b), 0.12.0 on process 2 (c)'
    """
    names = list(dict.fromkeys(name for own in descriptions for name in own))
    differing = []
    for name in names:
        by_value = {}
        for process, own in enumerate(descriptions):
            by_value.setdefault(own.get(name, "missing"), []).append(process)
        if len(by_value) > 1:
            sides = (
                f"{shorten(value, _LONGEST_VALUE)} on {name_all(by_value[value], hosts)}"
                for value in by_value
            )
            differing.append(f"{name}: {', '.join(sides)}")
    if not differing:
        return None
    more = f"; and in {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return f"the processes differ in {'; in '.join(differing[:_SHOWN])}{more}"


def barrier(
    address: str,
    count: int,
    index: int,
    description: dict[str, str],
    timeout_s: float,
    folder: str | Path,
) -> list[str]:
    """Wait for all processes and compare their descriptions; each of them calls this.

    Args:
      address: ``host:port`` of process 0, where nothing listens yet.
      count: number of processes.
      index: number of this process.
      description: what must be equal on all processes, see `describe`.
      timeout_s: seconds to wait for the others.
      folder: where the processes find their secret if no variable has it, see `secret`.

    Returns:
      The host name of every process.

    Raises:
      ConfigError: a process did not come, or differs; the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise ConfigError(f"cluster.coordinator must be host:port, got {shown(address)}")
    folder = Path(folder).absolute()
    own_host = shorten(printable(socket.gethostname()), _LONGEST_NAME)
    # These keys stay, so that processes with different versions can still say so.
    hello = {"process": index, "count": count, "host": own_host, "facts": description}
    end = time.monotonic() + timeout_s
    if index == 0:
        with secret.offered(folder, int(port)) as own:
            answer = _gather(int(port), hello, own, end, timeout_s)
    else:
        answer = _report(host.strip("[]"), int(port), hello, folder, end, timeout_s)
    if "refusal" in answer:
        raise ConfigError(answer["refusal"])
    return answer["hosts"]


# --- Process 0 ------------------------------------------------------------------------------------


def _gather(port: int, own: dict, known: bytes, end: float, timeout_s: float) -> dict[str, Any]:
    """Listen as process 0 until all have come; returns the answer that every process received."""
    with _listen(port) as server, _Door(own, known) as door:
        server.settimeout(_TICK_S)
        while door.refusal is None and not door.all_there():
            if time.monotonic() > end:
                door.refusal = door.missing(timeout_s)
            try:
                door.open(*server.accept())
            except TimeoutError:
                pass
            except OSError:  # this process has no more file descriptors
                time.sleep(_TICK_S)
        ordered = [door.hellos[process] for process in sorted(door.hellos)]
        hosts = [hello["host"] for hello in ordered]
        refusal = door.refusal or difference([hello["facts"] for hello in ordered], hosts)
        answer = {"hosts": hosts} if refusal is None else {"refusal": refusal}
        for connection in door.members.values():
            _send(connection, answer)
        return answer


class _Door:
    """Where process 0 admits the others and leaves strangers out.

    Attributes:
      hellos: by the number of the process, what each has sent.
      members: their connections, without process 0.
      refusal: why they cannot start together; None: so far, they can.
    """

    def __init__(self, own: dict, known: bytes):
        self.hellos, self.refusal = {0: own}, None
        self.members: dict[int, socket.socket] = {}
        self._secret, self._lock, self._closed = known, threading.Lock(), False
        self._guests: list[socket.socket] = []  # without a proof so far, the oldest first
        self._strangers = collections.Counter()

    def __enter__(self) -> "_Door":
        return self

    def __exit__(self, *_) -> None:
        with self._lock:
            self._closed = True
            for connection in self._guests:
                _hang_up(connection)
            for connection in self.members.values():
                connection.close()

    def open(self, connection: socket.socket, address: tuple) -> None:
        """Serve a connection in a thread, for at most `ANSWER_S`."""
        with self._lock:
            if len(self._guests) >= _GUESTS:
                _hang_up(self._guests.pop(0))
            self._guests.append(connection)
        threading.Thread(target=self._serve, args=(connection, address[0]), daemon=True).start()

    def all_there(self) -> bool:
        """Whether all have come and none has died since; one that has died may come once more."""
        with self._lock:
            for process in [k for k, member in self.members.items() if _has_left(member)]:
                self.members.pop(process).close()
                del self.hellos[process]
            return len(self.hellos) == self.hellos[0]["count"]

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

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            hello = self._hello(connection)
        except TimeoutError:
            why = f"was silent for {ANSWER_S} s"
        except OSError:
            why = "left, sent too much, or was the oldest of too many"
        except AuthenticationError as error:
            why = str(error)
        else:
            self._admit(connection, hello)
            return
        connection.close()
        self._leave_out(address.removeprefix("::ffff:"), why)

    def _hello(self, connection: socket.socket) -> dict:
        """What a process says about itself, after the proof that it belongs to the run."""
        end, nonce = time.monotonic() + ANSWER_S, secrets.token_bytes(NONCE)
        connection.settimeout(ANSWER_S)
        try:
            connection.sendall(nonce)
            other = _receive(connection, end, NONCE)
            given = _receive(connection, end, NONCE)
        finally:
            with self._lock:
                if connection in self._guests:
                    self._guests.remove(connection)
        if not hmac.compare_digest(given, secret.proof(self._secret, "process", nonce, other)):
            raise AuthenticationError("does not know the secret of this run")
        connection.sendall(secret.proof(self._secret, "process 0", nonce, other))
        return json.loads(_receive(connection, end))

    def _admit(self, connection: socket.socket, hello: dict) -> None:
        with self._lock:
            refusal = self.refusal or _misfit(hello, self.hellos)
            if refusal is None:
                connection.setblocking(False)
                self.members[hello["process"]] = connection
                self.hellos[hello["process"]] = hello
                return
        _send(connection, {"refusal": refusal})
        connection.close()
        self.refusal = refusal

    def _leave_out(self, address: str, why: str) -> None:
        """Count a stranger, and name the first ones."""
        with self._lock:
            self._strangers[address] += 1
            is_told = self._strangers[address] == 1 and len(self._strangers) <= _NAMED
        if is_told and not self._closed:
            program = Path(sys.argv[0]).name
            sentence = f"{program}: a stranger at {address} was left out: it {why}"
            print(sentence, file=sys.stderr, flush=True)


def _hang_up(connection: socket.socket) -> None:
    """Let the thread that reads from a connection find its end."""
    with contextlib.suppress(OSError):  # the other side was faster
        connection.shutdown(socket.SHUT_RDWR)


def _has_left(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection, on which it has nothing more to send."""
    try:
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


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(
            f"process 0 ({socket.gethostname()}) cannot listen on port {port} of "
            f"cluster.coordinator: {error.strerror or error}; take another port"
        ) from None


# --- The others -----------------------------------------------------------------------------------


def _report(
    host: str, port: int, hello: dict, folder: Path, end: float, timeout_s: float
) -> dict[str, Any]:
    """Send the description as another process; returns the answer of process 0."""
    trouble = None  # with what listened there; it may be another program, or an earlier start
    while True:
        try:
            connection = _connect(host, port, end, timeout_s)
        except ConfigError:
            if trouble is None:
                raise
            break
        with connection:
            known = secret.find(folder, port)  # a new one if process 0 has started once more
            if known is not None and _prove(connection, known):
                return _exchange(connection, hello, end, f"{host}:{port}", timeout_s)
        trouble = "does not know the secret of this run"
        if known is None:
            trouble = f"answers, but {secret.file_in(folder, port)}, its secret, is not there"
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    raise ConfigError(
        f"process 0 at {host}:{port} {trouble}; start all processes with the same "
        f"{secret.VARIABLE}, or in a folder that all of them see"
    )


def _prove(connection: socket.socket, known: bytes) -> bool:
    """Prove to process 0 that this process knows the secret; returns whether process 0 does."""
    own = secrets.token_bytes(NONCE)
    try:
        nonce = _receive(connection, time.monotonic() + ANSWER_S, NONCE)
        connection.sendall(own + secret.proof(known, "process", nonce, own))
        given = _receive(connection, time.monotonic() + ANSWER_S, NONCE)
    except OSError:
        return False
    return hmac.compare_digest(given, secret.proof(known, "process 0", nonce, own))


def _exchange(
    connection: socket.socket, hello: dict, end: float, address: str, timeout_s: float
) -> dict[str, Any]:
    """Send the description; returns the answer of process 0 once all have come."""
    _send(connection, hello)
    try:
        return json.loads(_receive(connection, max(end, time.monotonic()) + ANSWER_S))
    except OSError:
        raise ConfigError(
            f"process 0 at {address} went away, or waits for other processes longer than "
            f"{timeout_s:g} s (cluster.timeout_s); see what it says itself"
        ) from None


def _connect(host: str, port: int, end: float, timeout_s: float) -> socket.socket:
    began = time.monotonic()
    while True:
        try:
            return socket.create_connection((host, port), timeout=ANSWER_S)
        except socket.gaierror as error:
            if time.monotonic() > min(end, began + _RESOLVE_S):
                raise ConfigError(
                    f"the host {shown(host)} of cluster.coordinator cannot be found: "
                    f"{error.strerror}"
                ) from None
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"process 0 does not answer at {host}:{port} (cluster.coordinator) within "
                    f"{timeout_s:g} s: {error.strerror or error}"
                ) from None
        time.sleep(0.2)


# --- Messages -------------------------------------------------------------------------------------


def _send(connection: socket.socket, message: dict) -> None:
    """Send a message to a side that takes it at once, if it is there."""
    with contextlib.suppress(OSError):  # who waits for it, or for an answer, finds out
        connection.settimeout(ANSWER_S)
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, end: float, size: int = 0) -> bytes:
    """The next ``size`` bytes, or a line; raises OSError where they do not come until ``end``."""
    data = b""
    while len(data) < size or not (size or data.endswith(b"\n")):
        connection.settimeout(max(end - time.monotonic(), 0.001))
        part = connection.recv(size - len(data) if size else 1 << 16)
        data += part
        if not part or len(data) > LARGEST_MESSAGE:
            raise ConnectionError("the connection was closed, or carried too much")
    return data
