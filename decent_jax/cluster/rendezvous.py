"""A start-up barrier before jax's own: what is wrong becomes one sentence on every process.

jax's start-up ends a process that waits in vain with a stack trace and one that cannot listen with
a segmentation fault, and lets processes with different configs hang or train nonsense. So process 0
first listens at the coordinator's port itself. The others send it a **description** of themselves
(versions and config); it compares them, answers every process, and frees the port for jax.
"""

import importlib.metadata
import json
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

from decent_jax.errors import ConfigError
from decent_jax.text import name_all

_PACKAGES = ("decent_jax", "jax", "jaxlib", "flax", "optax")
_OWN_FIELDS = ("cluster.coordinator", "cluster.process_id")  # every process has its own
_LARGEST_MESSAGE = 1 << 20
_RESOLVE_S = 60  # a host name may appear late (Kubernetes), but not later than this
_ANSWER_S = 10  # time for one message between two processes that both run
_SHOWN = 3  # differences in one sentence


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
            sides = (f"{value} on {name_all(by_value[value], hosts)}" for value in by_value)
            differing.append(f"{name}: {', '.join(sides)}")
    if not differing:
        return None
    more = f"; and in {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return f"the processes differ in {'; in '.join(differing[:_SHOWN])}{more}"


def barrier(
    address: str, count: int, index: int, description: dict[str, str], timeout_s: float
) -> list[str]:
    """Wait for all processes and compare their descriptions; each of them calls this.

    Args:
      address: ``host:port`` of process 0, where nothing listens yet.
      count: number of processes.
      index: number of this process.
      description: what must be equal on all processes, see `describe`.
      timeout_s: seconds to wait for the others.

    Returns:
      The host name of every process.

    Raises:
      ConfigError: a process did not come, or differs; the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"cluster.coordinator must be host:port, got {address!r}")
    # These keys stay, so that processes with different versions can still say so.
    hello = {"process": index, "count": count, "host": socket.gethostname(), "facts": description}
    end = time.monotonic() + timeout_s
    if index == 0:
        answer = _gather(int(port), hello, end, timeout_s)
    else:
        answer = _report(host.strip("[]"), int(port), hello, end, timeout_s)
    if "refusal" in answer:
        raise ConfigError(answer["refusal"])
    return answer["hosts"]


def _gather(port: int, own: dict, end: float, timeout_s: float) -> dict[str, Any]:
    """Listen as process 0; returns the answer that every process received."""
    hellos, connections = {0: own}, []
    refusal = None
    with _listen(port) as server:
        try:
            while len(hellos) < own["count"] and refusal is None:
                server.settimeout(max(end - time.monotonic(), 0.001))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    refusal = _missing(hellos, own["count"], timeout_s)
                    break
                hello = _receive(connection, _ANSWER_S)
                if not isinstance(hello, dict) or not own.keys() <= hello.keys():
                    connection.close()  # a stranger: a port scanner, a health check
                    continue
                connections.append(connection)
                refusal = _misfit(hello, hellos)
                hellos.setdefault(hello["process"], hello)
            if refusal is None:
                ordered = [hellos[process] for process in range(own["count"])]
                hosts = [hello["host"] for hello in ordered]
                refusal = difference([hello["facts"] for hello in ordered], hosts)
            answer = {"hosts": hosts} if refusal is None else {"refusal": refusal}
            for connection in connections:
                try:
                    _send(connection, answer)
                except OSError:  # it died meanwhile; jax's start-up will miss it
                    continue
            return answer
        finally:
            for connection in connections:
                connection.close()


def _misfit(hello: dict, hellos: dict[int, dict]) -> str | None:
    """Why this process cannot join the others; None: it can."""
    process, count = hello["process"], hellos[0]["count"]
    if hello["count"] != count:
        return (
            f"process {process} ({hello['host']}) was told of {hello['count']} processes and "
            f"process 0 ({hellos[0]['host']}) of {count}"
        )
    if process in hellos:
        return (
            f"two processes, on {hellos[process]['host']} and on {hello['host']}, say that they "
            f"are process {process}; each needs a cluster.process_id of its own"
        )
    return None


def _missing(hellos: dict[int, dict], count: int, timeout_s: float) -> str:
    absent = [process for process in range(count) if process not in hellos]
    return (
        f"{name_all(absent, [])} of {count} did not come within {timeout_s:g} s "
        "(cluster.timeout_s); start all of them, and see that they can reach process 0"
    )


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


def _report(host: str, port: int, hello: dict, end: float, timeout_s: float) -> dict[str, Any]:
    """Send the description as another process; returns the answer of process 0."""
    with _connect(host, port, end, timeout_s) as connection:
        try:
            _send(connection, hello)
            answer = _receive(connection, max(end - time.monotonic(), 0) + _ANSWER_S)
        except OSError:
            answer = None
    if not isinstance(answer, dict) or not answer.keys() & {"hosts", "refusal"}:
        raise ConfigError(
            f"process 0 at {host}:{port} went away, or waits for other processes longer than "
            f"{timeout_s:g} s (cluster.timeout_s); see what it says itself"
        )
    return answer


def _connect(host: str, port: int, end: float, timeout_s: float) -> socket.socket:
    began = time.monotonic()
    while True:
        try:
            return socket.create_connection((host, port), timeout=_ANSWER_S)
        except socket.gaierror as error:
            if time.monotonic() > min(end, began + _RESOLVE_S):
                raise ConfigError(
                    f"the host {host!r} of cluster.coordinator cannot be found: {error.strerror}"
                ) from None
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"process 0 does not answer at {host}:{port} (cluster.coordinator) within "
                    f"{timeout_s:g} s: {error.strerror or error}"
                ) from None
        time.sleep(0.2)


def _send(connection: socket.socket, message: dict) -> None:
    connection.settimeout(_ANSWER_S)
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> Any:
    """The next message, or None if none comes in time."""
    end = time.monotonic() + timeout_s
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < _LARGEST_MESSAGE:
            connection.settimeout(max(end - time.monotonic(), 0.001))
            part = connection.recv(1 << 16)
            if not part:
                return None
            data += part
        return json.loads(data)
    except (OSError, ValueError):
        return None
