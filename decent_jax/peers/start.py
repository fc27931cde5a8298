"""Ray: started on this machine, or found at an address, and left as it was."""

import contextlib
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import ray
from ml_collections import ConfigDict
from ray.exceptions import RayActorError, RayError, RayTaskError

from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError
from decent_jax.peers import guard

_STORE = 128 * 2**20  # bytes of a local object store at least
_ACTOR = 150e6  # bytes of a Python that has imported jax


@contextlib.contextmanager
def ray_for(config: ConfigDict, section: str, count: int, store: int = 0) -> Iterator[None]:
    """Ray at the address that a section of the config names; empty: started on this machine.

    Args:
      config: of the run.
      section: "peers" or "pipeline".
      count: actors that Ray will have.
      store: bytes of their objects.

    Raises:
      ConfigError: no Ray answers there, or it has no room for the actors.
    """
    address = config[section].address
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        machine.check_memory(count * _ACTOR + store, f"a Ray of {count} {section} actors")
        options |= {"include_dashboard": False, "object_store_memory": max(_STORE, store)}
    try:
        with warnings.catch_warnings():  # Ray forks; the child calls exec at once
            warnings.simplefilter("ignore", RuntimeWarning)
            ray.init(address=address or "local", **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        line = str(error).partition("\n")[0]
        raise ConfigError(
            f"{section}.address {address!r}: no Ray cluster answers ({line})"
        ) from None
    with _guarded() if not address else contextlib.nullcontext():
        try:
            check_resources(config, section, count)
            yield
        finally:
            ray.shutdown()


def start_actor(kind: type, section: ConfigDict, where: Any, threads: int, *args: Any) -> Any:
    """Start an actor ``kind(*args)``; its handle.

    Args:
      section: of the config, whose ``cpus`` and ``gpus`` Ray reserves for it.
      where: Ray's scheduling strategy.
      threads: in which Ray calls its methods.
    """
    remote: Any = ray.remote(kind)
    return remote.options(
        num_cpus=section.cpus,
        num_gpus=section.gpus,
        max_concurrency=threads,
        scheduling_strategy=where,
    ).remote(*args)


def fate(error: RayError) -> str:
    """What became of an actor, or of its work, by the error of a call."""
    if isinstance(error, RayActorError):
        return "was killed"
    cause = error.cause if isinstance(error, RayTaskError) else error
    line = str(cause).partition("\n")[0]
    return f"has failed ({type(cause).__name__}: {line})"


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Processes of Ray end with this one, even if it is killed; see `decent_jax.peers.guard`."""
    if sys.platform != "linux":  # elsewhere Ray does that
        yield
        return
    pids = [str(process.pid) for process in psutil.Process().children(recursive=True)]
    command = [sys.executable, "-S", guard.__file__, *pids]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield


def check_address(config: ConfigDict, section: str) -> None:
    """Refuse an address at which nobody listens; Ray itself tries for minutes."""
    address = config[section].address
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f'{section}.address must be auto or "host:port", got {address!r}')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError, ValueError) as error:  # also no port, or no name of a host
        raise ConfigError(
            f"{section}.address {address}: nobody listens there ({error}); start Ray on it with "
            f"ray start --head --port={port}, or leave {section}.address empty"
        ) from None


def check_resources(config: ConfigDict, section: str, count: int) -> None:
    """Refuse more actors than Ray has room for."""
    found = ray.cluster_resources()
    for name, resource in (("cpus", "CPU"), ("gpus", "GPU")):
        each = config[section][name]
        needed, there = count * each, found.get(resource, 0.0)
        if needed > there:
            raise ConfigError(
                f"{count} {section} actors of {section}.{name} {each:g} need {needed:g} "
                f"{resource}, and Ray has {there:g}; use fewer, or a smaller {section}.{name}"
            )
