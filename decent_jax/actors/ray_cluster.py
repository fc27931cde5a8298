"""Starts Ray on this machine or connects to it at an address; sets up the processes of actors.

Import nothing that imports Ray before `prepare` has been called.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from decent_jax.actors import Ray
from decent_jax.cluster import launchers
from decent_jax.ground import extras, machine
from decent_jax.ground.errors import ConfigError, Interrupted

_STORE = 128 * 2**20  # bytes of the smallest local object store
_ACTOR = 250e6  # bytes of a Python process that has imported jax and this package
_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
# The first bytes from a gRPC client, and the type of the server's first frame (RFC 9113, 3.4).
_PREFACE, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"\4"


def prepare(address: str) -> None:
    """Set the environment variables that Ray reads when it is first imported.

    A cluster that we start accepts only clients that know its token, which is drawn here and
    written to no file. For a cluster at an address, Ray finds the token that the user has set.

    Args:
      address: address of the Ray cluster; empty: Ray will be started on this machine.

    Raises:
      Unavailable: Ray is not installed.
    """
    extras.need("peers", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the default is 15
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # the default is 30 s
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # `train.py` itself reports which actor has died.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
    if address:
        with contextlib.suppress(OSError):  # Ray makes it readable to all users of this machine
            (Path.home() / ".ray" / "auth_token").chmod(0o600)
        return
    if "ray" not in sys.modules:  # else Ray has already read the mode, see `running`
        os.environ[_MODE] = "token"
    os.environ.setdefault(_TOKEN, secrets.token_hex(32))


@contextlib.contextmanager
def running(settings: Ray, needs: Sequence[float] = (), store: int = 0) -> Iterator[None]:
    """A context with a connection to Ray, at ``settings.address`` or else on this machine.

    Args:
      settings: the section ``ray`` of the config.
      needs: see `check_memory`.
      store: bytes of the objects that the actors pass through Ray.

    Raises:
      ConfigError: no Ray cluster answers at the address, or it has no room for the actors; or this
        process imported Ray, without authentication, before it called `prepare`.
      Interrupted: SIGTERM arrived while Ray started.
    """
    import ray  # after `prepare`
    from ray.exceptions import RayError

    address = settings.address
    if not address and os.environ.get(_MODE) != "token":
        raise ConfigError(
            f"this process has imported Ray without authentication; set {_MODE}=token in its "
            "environment, or import Ray after decent_jax has started it"
        )
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        check_memory(needs)
        options |= {"include_dashboard": False, "object_store_memory": max(_STORE, store)}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():  # Ray forks; the child calls exec at once
            warnings.simplefilter("ignore", RuntimeWarning)
            ray.init(address=address or "local", **options)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        why = f"must be one where a Ray cluster answers ({str(error).partition(chr(10))[0]})"
        raise ConfigError.about("ray.address", address, why) from None
    except SystemExit:  # of Ray's handler, which has ended its processes
        raise Interrupted("interrupted; the same command resumes", signal.SIGTERM) from None
    finally:
        if signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)
    try:
        check_resources(settings, needs, ray.cluster_resources())
        yield
    finally:
        ray.shutdown()


def check_memory(needs: Sequence[float], there: float | None = None) -> None:
    """Refuse actors that together need more memory than there is.

    Args:
      needs: bytes of the arrays of each actor.
      there: bytes that Ray has on all machines; None: the memory of this machine.
    """
    count, needed = len(needs), sum(needs) + len(needs) * _ACTOR
    what = f"{count} Ray actors, {_ACTOR / 1e6:g} MB each and more,"
    machine.check_memory(needed, what, there)


def reserved(settings: Ray, need: float) -> float:
    """Bytes to reserve for an actor that needs ``need``; 0 on a Ray cluster that we start."""
    return need + _ACTOR if settings.address else 0.0


def check_address(settings: Ray) -> None:
    """Refuse an address at which no Ray listens; Ray itself would try for minutes."""
    name, address = "ray.address", settings.address
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError.about(name, address, 'must be auto or "host:port"')
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as there:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                there.sendall(_PREFACE)
                if there.makefile("rb").read(4)[3:] != _SETTINGS:
                    raise OSError("what listens does not speak gRPC")
    except (OSError, OverflowError, ValueError) as error:  # also no port, or no name of a host
        start = f"start it there with ray start --head --port={port}, or leave this empty"
        raise ConfigError.about(name, address, f"must reach Ray ({error}); {start}") from None


def check_resources(settings: Ray, needs: Sequence[float], there: Mapping[str, float]) -> None:
    """Refuse more actors than Ray has room for.

    Args:
      needs: see `check_memory`; on a cluster, Ray reserves this memory.
      there: the resources that Ray has, by Ray's names.
    """
    count = len(needs)
    if settings.address:
        check_memory(needs, there.get("memory", 0.0))
    for field, each, resource in (
        ("ray.cpus", settings.cpus, "CPU"),
        ("ray.gpus", settings.gpus, "GPU"),
    ):
        if count * each > there.get(resource, 0.0):
            has = f"must leave enough for {count} actors: Ray has {there.get(resource, 0.0):g}"
            raise ConfigError.about(field, each, f"{has} {resource}")


# --- In the process of an actor -------------------------------------------------------------------


def enter(log: Path, launched_from: str) -> None:
    """Prepare an actor's process for this run, and redirect all its output to the file ``log``.

    Relative paths in the config then name the same files as in `train.py`, unless this machine
    lacks ``launched_from``, the folder in which `train.py` was started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if os.path.isdir(launched_from):
        os.chdir(launched_from)
    leave_launcher()


def leave_launcher() -> None:
    """Forget that a launcher such as SLURM started this process with others: Ray connects them."""
    for variable in launchers.VARIABLES:
        os.environ.pop(variable, None)


def say(message: str) -> None:
    """Print a line to the log of this process."""
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)
