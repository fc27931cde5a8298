"""A start-up barrier before jax's own: what is wrong becomes one sentence on every process.

In jax's own start-up a process that waits in vain ends with a stack trace, one that cannot listen
ends with a segmentation fault, and processes with different configs hang or train nonsense. So
process 0 first listens at the coordinator's port itself. The others send it a **description** of
themselves (versions and config); it compares them, answers every process, and frees the port for
jax.

Anybody may reach that port. So both sides first prove that they know the run's secret (`secret`),
each by an HMAC over two nonces, one of either side, and process 0 interprets nothing that comes
before the proof. It serves all connections side by side, each until a deadline of its own:

    process 0 -> other   nonce (32 bytes)
    other -> process 0   nonce, HMAC("process", both nonces)
    process 0 -> other   HMAC("process 0", both nonces)
    other -> process 0   a line of JSON: its number, the count, its host and its description
    process 0 -> other   when all have come, a line of JSON: all hosts, or why they cannot start
"""

import contextlib
import hmac
import importlib.metadata
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from decent_jax.cluster import secret
from decent_jax.cluster.door import (
    ANSWER_S,
    LARGEST_MESSAGE,
    NONCE,
    Door,
    listen,
    parse,
    printed_facts,
    printed_name,
    send,
)
from decent_jax.errors import ConfigError
from decent_jax.text import name_all, shorten, shown

_PACKAGES = ("decent_jax", "jax", "jaxlib", "flax", "optax")
_OWN_FIELDS = ("cluster.coordinator", "cluster.process_id")  # every process has its own
_RESOLVE_S = 60  # a host name may appear late (Kubernetes), but not later than this
_SHOWN = 3  # differences in one sentence
_LONGEST_VALUE = 40  # characters of a value in which processes differ


def describe(config: Mapping[str, object]) -> dict[str, str]:
    """What must be equal on all processes: versions, and the fields of the (flat) config."""
    versions = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
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
    # These keys stay, so that processes with different versions can still say so.
    host_name = printed_name(socket.gethostname())
    facts = printed_facts(description)
    hello = {"process": index, "count": count, "host": host_name, "facts": facts}
    end = time.monotonic() + timeout_s
    if index == 0:
        with secret.offered(folder, int(port)) as own:
            answer = _gather(int(port), hello, own, end, timeout_s)
    else:
        answer = _report(host.strip("[]"), int(port), hello, folder, end, timeout_s)
    if "refusal" in answer:
        raise ConfigError(answer["refusal"])
    return [printed_name(host) for host in answer["hosts"]]


def _gather(port: int, own: dict, known: bytes, end: float, timeout_s: float) -> dict[str, Any]:
    """Listen as process 0 until all have come; returns the answer that every process received."""
    with listen(port) as server, Door(server, own, known) as door:
        while door.refusal is None and not door.all_there():
            if time.monotonic() > end:
                door.refusal = door.missing(timeout_s)
                break
            door.serve(min(end, door.next_deadline()))
        ordered = [door.hellos[process] for process in sorted(door.hellos)]
        hosts = [hello["host"] for hello in ordered]
        refusal = door.refusal or difference([hello["facts"] for hello in ordered], hosts)
        answer = {"hosts": hosts} if refusal is None else {"refusal": refusal}
        for connection in door.members.values():
            with contextlib.suppress(OSError):  # it died meanwhile; jax's start-up will miss it
                send(connection, answer)
        return answer


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
        nonce = _receive(connection, ANSWER_S, lambda data: len(data) >= NONCE)
        connection.sendall(own + secret.proof(known, "process", nonce, own))
        given = _receive(connection, ANSWER_S, lambda data: len(data) >= NONCE)
    except OSError:
        return False
    return hmac.compare_digest(given, secret.proof(known, "process 0", nonce, own))


def _exchange(
    connection: socket.socket, hello: dict, end: float, address: str, timeout_s: float
) -> dict[str, Any]:
    """Send the description; returns the answer of process 0 once all have come."""
    answer = None
    with contextlib.suppress(OSError):
        send(connection, hello)
        patience = max(end - time.monotonic(), 0) + ANSWER_S
        answer = parse(_receive(connection, patience, lambda data: data.endswith(b"\n")))
    if not isinstance(answer, dict) or not answer.keys() & {"hosts", "refusal"}:
        raise ConfigError(
            f"process 0 at {address} went away, or waits for other processes longer than "
            f"{timeout_s:g} s (cluster.timeout_s); see what it says itself"
        )
    return answer


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


def _receive(connection: socket.socket, timeout_s: float, whole: Callable[[bytes], bool]) -> bytes:
    """The next message; raises OSError where none comes in time."""
    end, data = time.monotonic() + timeout_s, b""
    while not whole(data):
        connection.settimeout(max(end - time.monotonic(), 0.001))
        part = connection.recv(1 << 16)
        data += part
        if not part or len(data) > LARGEST_MESSAGE:
            raise ConnectionError("the connection was closed, or carried too much")
    return data
