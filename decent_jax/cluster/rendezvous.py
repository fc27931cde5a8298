"""Processes meet before jax starts, so that what is wrong is one sentence on every one of them.

jax's own start-up ends a process that waits in vain with a stack trace, one that cannot listen with
a segmentation fault, and lets processes with different configs hang or train nonsense. So process 0
first listens at the coordinator's port itself: the others tell it what they are (their **facts**:
versions, config), it compares, answers all, and leaves the port to jax.
"""

import importlib.metadata
import json
import platform
import socket
import time
from typing import Any

from ml_collections import ConfigDict

from decent_jax.errors import ConfigError
from decent_jax.json_files import flat
from decent_jax.text import name_all

_PACKAGES = ("decent_jax", "jax", "jaxlib", "flax", "optax")
_OWN_FIELDS = ("cluster.coordinator", "cluster.process_id")  # differ from process to process
_LARGEST_MESSAGE = 1 << 20
_RESOLVE_S = 60  # a name may appear late (Kubernetes), but not this late
_ANSWER_S = 10  # for one message, between processes that are both there
_SHOWN = 3


def facts_of(config: ConfigDict) -> dict[str, str]:
    """What has to be equal on all processes: versions and the fields of the config."""
    versions = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    fields = {
        f"config.{name}": repr(value)
        for name, value in flat(config).items()
        if name not in _OWN_FIELDS
    }
    return versions | fields


def difference(facts: list[dict[str, str]], hosts: list[str]) -> str | None:
    """One sentence about facts in which processes differ, naming both sides; None: they agree.

    >>> difference([{"jax": "0.10.2"}, {"jax": "0.10.2"}, {"jax": "0.12.0"}], ["a", "b", "c"])
    'the processes differ in jax: 0.10.2 on processes 0 (a) and 1 (b), 0.12.0 on process 2 (c)'
    """
    names = list(dict.fromkeys(name for own in facts for name in own))
    differing = []
    for name in names:
        by_value = {}
        for process, own in enumerate(facts):
            by_value.setdefault(own.get(name, "missing"), []).append(process)
        if len(by_value) > 1:
            sides = (f"{value} on {name_all(by_value[value], hosts)}" for value in by_value)
            differing.append(f"{name}: {', '.join(sides)}")
    if not differing:
        return None
    more = f"; and in {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return f"the processes differ in {'; in '.join(differing[:_SHOWN])}{more}"


def meet(
    address: str, count: int, index: int, facts: dict[str, str], timeout_s: float
) -> list[str]:
    """Wait for all processes and compare facts; all of them call it.

    Args:
      address: ``host:port`` of process 0, where nothing listens yet.
      count, index: how many processes there are, and which this one is.
      facts: of this process, see `facts_of`.
      timeout_s: how long to wait for the others.

    Returns:
      The host name of every process.

    Raises:
      ConfigError: a process that did not come, or that differs; an address that cannot be used.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"cluster.coordinator must be host:port, got {address!r}")
    hello = {"process": index, "count": count, "host": socket.gethostname(), "facts": facts}
    end = time.monotonic() + timeout_s
    if index == 0:
        answer = _gather(int(port), hello, end, timeout_s)
    else:
        answer = _report(host.strip("[]"), int(port), hello, end, timeout_s)
    if "refusal" in answer:
        raise ConfigError(answer["refusal"])
    return answer["hosts"]


def _gather(port: int, own: dict, end: float, timeout_s: float) -> dict[str, Any]:
    """Process 0: the answer that all got."""
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
                    connection.close()  # not one of us: a port scanner, a health check
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
                except OSError:  # died meanwhile: jax's start-up will miss it
                    continue
            return answer
        finally:
            for connection in connections:
                connection.close()


def _misfit(hello: dict, hellos: dict[int, dict]) -> str | None:
    """Why this process cannot be one of these."""
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
    """Another process: the answer of process 0."""
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
    """A message, or None where none comes in time."""
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
