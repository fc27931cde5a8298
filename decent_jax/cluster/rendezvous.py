"""A start-up barrier before jax's own, at which every process reports any problem in one sentence.

In jax's start-up, a process that waits too long ends with a stack trace, one that cannot listen
ends with a segmentation fault, and processes with different configs hang or train nonsense.
Therefore process 0 first listens at the coordinator's port itself. The others connect, authenticate
with the run's secret (`ground.connections`), and send a **hello**: their index, the process count,
their host and a **description** of themselves (versions and config). Once all have connected,
process 0 sends them the list of hosts, or the reason why they cannot start, and frees the port for
jax.

A launcher may pass the run's **secret** in the variable `SECRET`. Otherwise, process 0 writes a new
secret to a shared folder, readable by its owner only, and removes it once all have connected.
"""

import contextlib
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from decent_jax.ground import connections, extras
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import name_all, printable, shorten, shown
from decent_jax.ground.json_files import Json

SECRET = "DECENT_JAX_SECRET"
_SECRET_FILE = ".start_secret-{port}"  # runs that share a folder have ports of their own
_SET_FOR_ALL = f"start all processes as one user, or set {SECRET} for all of them"
_SHORTEST_SECRET = 16  # characters
_PACKAGES = ("decent_jax", "jax", "jaxlib", "flax", "optax")
# These may differ between processes; the data themselves must agree in `train.same_data.facts_of`.
_OWN_FIELDS = ("cluster.coordinator", "cluster.process_id", "data.path")
_ANSWER_S = 10  # for one message between two running processes
_RESOLVE_S = 60  # a host name may appear late (Kubernetes), but not later than this
_SHOWN = 3  # differences in one sentence
_LONGEST_VALUE = 40  # characters of a value in which processes differ
_LONGEST_NAME = 64  # characters of a host name
_TICK_S = 0.1  # between two checks of which processes have connected


def describe(config: Mapping[str, object]) -> dict[str, str]:
    """Everything that must be equal on all processes: versions, and fields of the config."""
    versions = {"Python": platform.python_version()}
    versions |= {package: extras.version(package) for package in _PACKAGES}
    fields = {f"config.{k}": repr(value) for k, value in config.items() if k not in _OWN_FIELDS}
    return versions | fields


def difference(descriptions: list[dict[str, str]], hosts: list[str]) -> str | None:
    """A clause that names the differences and the processes, or None if all agree.

    >>> difference([{"jax": "0.10.2"}, {"jax": "0.10.2"}, {"jax": "0.12.0"}], ["a", "b", "c"])
    'the processes differ in jax: 0.10.2 on processes 0 (a) and 1 (b), 0.12.0 on process 2 (c)'
    """
    names = list(dict.fromkeys(name for description in descriptions for name in description))
    differing = []
    for name in names:
        by_value = {}
        for process, description in enumerate(descriptions):
            by_value.setdefault(description.get(name, "missing"), []).append(process)
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
    """Wait for all processes and compare their descriptions; every process calls this.

    Args:
      address: ``host:port`` of process 0, where nothing listens yet.
      count: number of processes.
      index: index of this process, from 0.
      description: values that must be equal on all processes, see `describe`.
      timeout_s: seconds to wait for the others.
      folder: folder in which processes find their secret if the variable `SECRET` is not set.

    Returns:
      The host name of every process.

    Raises:
      ConfigError: a process did not connect or differs, or the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise ConfigError.about("cluster.coordinator", address, "must be host:port")
    own_host = shorten(printable(socket.gethostname()), _LONGEST_NAME)
    # Never change these keys: processes of different versions need them to report the difference.
    hello = {"process": index, "count": count, "host": own_host, "facts": description}
    where = int(port), hello, Path(folder).absolute(), timeout_s
    answer = _gather(*where) if index == 0 else _report(host.strip("[]"), *where)
    if "refusal" in answer:
        raise ConfigError(answer["refusal"])
    return answer["hosts"]


# --- Process 0 ------------------------------------------------------------------------------------


def _gather(port: int, own: dict, folder: Path, timeout_s: float) -> Json:
    """Listen as process 0 until all have connected; returns the answer that all received."""
    end, group = time.monotonic() + timeout_s, _Group(own)
    with (
        offered_secret(folder, port) as known,
        connections.Listener(_listen(port), known, group.admit, group.leave_out),
        group.changed,
    ):
        while group.refusal is None and not group.is_complete():
            if time.monotonic() > end:
                group.refusal = group.missing(timeout_s)
            group.changed.wait(_TICK_S)
        return group.answer()


class _Group:
    """The processes that have connected to process 0.

    Attributes:
      hellos: the hello of each process, by its index.
      refusal: the reason why they cannot start together; None if there is none so far.
      changed: condition notified when a process connects; its lock guards all attributes.
    """

    def __init__(self, own: dict):
        self.hellos, self.refusal = {0: own}, None
        self.changed = threading.Condition()
        self._members: dict[int, Connection] = {}
        self._strangers = 0

    def admit(self, connection: Connection, address: str) -> None:
        """Admit a process that knows the secret; if it does not fit, refuse to start."""
        try:
            hello: Any = connections.receive(connection)[0]
        except connections.NoMessage:
            hello = None
        except (EOFError, OSError):  # it died, and may connect again
            connection.close()
            return
        with self.changed:
            self._forget_the_dead()
            self.refusal = self.refusal or _misfit(hello, address, self.hellos)
            if self.refusal is None:
                self.hellos[hello["process"]] = hello
                self._members[hello["process"]] = connection
            else:
                _tell(connection, {"refusal": self.refusal})
            self.changed.notify()

    def leave_out(self, address: str) -> None:
        """Count a connection from a stranger, who does not know the secret."""
        with self.changed:
            self._strangers += 1

    def is_complete(self) -> bool:
        """Whether all processes have connected, and none of them has died since."""
        self._forget_the_dead()
        return len(self.hellos) == self.hellos[0]["count"]

    def _forget_the_dead(self) -> None:
        """Remove processes that have disconnected; they may start and connect again."""
        for process in [k for k, member in self._members.items() if _has_left(member)]:
            self._members.pop(process).close()
            del self.hellos[process]

    def missing(self, timeout_s: float) -> str:
        """A sentence about the processes that have not connected."""
        count = self.hellos[0]["count"]
        absent = [process for process in range(count) if process not in self.hellos]
        strangers = self._strangers
        left_out = f"; connections of strangers were rejected: {strangers}" if strangers else ""
        return (
            f"{name_all(absent, [])} of {count} did not connect within {timeout_s:g} s "
            "(cluster.timeout_s); start all of them, and check that they can reach process 0"
            f"{left_out}"
        )

    def answer(self) -> Json:
        """Send the answer, which is the list of hosts or the refusal, to all; returns it."""
        ordered = [self.hellos[process] for process in sorted(self.hellos)]
        hosts = [hello["host"] for hello in ordered]
        refusal = self.refusal or difference([hello["facts"] for hello in ordered], hosts)
        answer = {"hosts": hosts} if refusal is None else {"refusal": refusal}
        for member in self._members.values():
            _tell(member, answer)
        return answer


def _tell(connection: Connection, answer: Json) -> None:
    """Send the answer and close; it is short enough to be sent at once."""
    with connection, contextlib.suppress(OSError):  # the receiver, if it lives, reports the failure
        connections.send(connection, answer)


def _has_left(connection: Connection) -> bool:
    """Whether the other side, which has nothing more to send, has closed the connection."""
    try:
        return connection.poll(0)
    except OSError:
        return True


def _misfit(hello: Any, address: str, hellos: dict[int, dict]) -> str | None:
    """Why this process cannot join the others; None: it can."""
    count, here = hellos[0]["count"], hellos[0]["host"]
    try:
        process, told, host = hello["process"], hello["count"], hello["host"]
        readable = type(process) is int and {str} == {
            type(host),
            *map(type, hello["facts"].values()),
        }
    except (TypeError, LookupError, AttributeError):
        readable = False
    if not readable:
        return (
            f"a process at {address} knows the secret of this run, but process 0 ({here}) cannot "
            "read its message; install the same decent_jax on all hosts"
        )
    if told != count:
        return (
            f"process {process} ({host}) expects {shown(told)} processes and process 0 ({here}) "
            f"{count}; start all of them with the same number"
        )
    if not 0 <= process < count:
        return (
            f"process {process} ({host}) is none of the {count} processes of process 0 ({here}): "
            f"its cluster.process_id must be at most {count - 1}"
        )
    if process in hellos:
        return (
            f"two processes, on {hellos[process]['host']} and on {host}, claim to be process "
            f"{process}; each needs a cluster.process_id of its own"
        )
    return None


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        here, why = socket.gethostname(), error.strerror or error
        wanted = f"must have a port on which process 0 ({here}) can listen: {why}"
        raise ConfigError.about("cluster.coordinator", port, wanted) from None


# --- The others -----------------------------------------------------------------------------------


def _report(host: str, port: int, hello: dict, folder: Path, timeout_s: float) -> Json:
    """Send the hello as another process; returns the answer of process 0."""
    began, trouble = time.monotonic(), ""
    together = f"start all processes with the same {SECRET}, or in a folder that all see"
    while True:
        patience = timeout_s
        try:
            with socket.create_connection((host, port), timeout=_ANSWER_S) as link:
                known = find_secret(folder, port)  # a new one if process 0 was restarted
                if known is not None:
                    with connections.prove(link, known) as connection:
                        return _exchange(connection, hello, began + timeout_s)
            trouble = f"answers, but {secret_file(folder, port)} is not there; {together}"
        except AuthenticationError:  # another program, or an earlier start
            trouble = f"does not know the secret of this run; {together}"
        except socket.gaierror as error:
            patience = min(timeout_s, _RESOLVE_S)
            trouble = f"cannot be found: {error.strerror}"
        except OSError as error:
            trouble = trouble or f"does not answer: {error.strerror or error}"
        if time.monotonic() - began > patience:
            why = (
                f"after {patience:g} s, process 0 at {host}:{port} (cluster.coordinator) {trouble}"
            )
            raise ConfigError(why, field="cluster.coordinator", value=f"{host}:{port}")
        time.sleep(0.2)


def _exchange(connection: Connection, hello: dict, end: float) -> Json:
    """Send the hello; returns the answer of process 0 once all have connected."""
    try:
        connections.send(connection, hello)
        if connection.poll(max(end - time.monotonic(), 0) + _ANSWER_S):
            return connections.receive(connection)[0]
    except (EOFError, OSError):
        pass
    raise ConfigError(
        "process 0 went away, or waits for other processes longer than cluster.timeout_s; see its "
        "own message"
    )


# --- The secret -----------------------------------------------------------------------------------


@contextlib.contextmanager
def offered_secret(folder: Path, port: int) -> Iterator[bytes]:
    """The secret of process 0; within this context, the other processes find it in ``folder``.

    Raises:
      ConfigError: the secret in the variable `SECRET` is too short, or ``folder`` is not writable.
    """
    secret = _secret_of_launcher()
    if secret:
        yield secret
        return
    path, new = secret_file(folder, port), secrets.token_hex(32).encode()
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(new)
        os.replace(temporary, path)
    except OSError as error:
        why = f"cannot be written ({error.strerror}), so the processes have no secret in common"
        raise ConfigError(f"{folder} {why}; {_SET_FOR_ALL}", field=SECRET) from None
    try:
        yield new
    finally:
        with contextlib.suppress(OSError):
            if path.read_bytes() == new:  # else the same run was started again
                path.unlink()
            for parent in created:
                parent.rmdir()


def find_secret(folder: Path, port: int) -> bytes | None:
    """The secret, for processes other than 0; None if process 0 has not written it yet.

    Raises:
      ConfigError: the secret in the variable `SECRET` is too short, or the file may not be read.
    """
    secret = _secret_of_launcher()
    if secret:
        return secret
    try:
        return secret_file(folder, port).read_bytes() or None
    except PermissionError:
        why = f"{secret_file(folder, port)} belongs to another user"
        raise ConfigError(f"{why}; {_SET_FOR_ALL}", field=SECRET) from None
    except OSError:
        return None


def secret_file(folder: Path, port: int) -> Path:
    """The file with the secret of the run whose process 0 listens at ``port``."""
    return folder / _SECRET_FILE.format(port=port)


def _secret_of_launcher() -> bytes | None:
    text = os.environ.get(SECRET, "")
    if 0 < len(text) < _SHORTEST_SECRET:
        why = f"has {len(text)} characters; it needs at least {_SHORTEST_SECRET}"
        raise ConfigError(f"{SECRET} {why}", field=SECRET)
    return text.encode(errors="surrogateescape") or None
