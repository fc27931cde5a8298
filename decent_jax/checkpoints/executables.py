"""Executables in memory that outlives a process: a restarted process neither traces nor compiles.

A process that a supervisor restarts needs the executables of its predecessor. They are stored with
its in-memory checkpoints (`decent_jax.checkpoints.in_memory`) and removed with them. jax's own
cache is not enough: it holds only the executables of process 0, executables for CPUs belong to one
process, and a lookup needs the traced program, which takes most of the time.

An executable is used only while every source file that was loaded when it was compiled is
unchanged: the task and its imports, this package, jax and the other libraries.
"""

import contextlib
import functools
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

from decent_jax.cluster import rendezvous
from decent_jax.cluster.supervise import PLACE
from decent_jax.replicas import Placement

Devices = Sequence[jax.Device] | None


class ExecutableCache:
    """The executables of one process; see `open_cache`.

    Args:
      folder: folder in which executables are stored; None: every call of `get` compiles.
      owner: part of the key of every executable.
      devices: the devices on which executables run; None: jax decides.
    """

    def __init__(self, folder: Path | None = None, owner: str = "", devices: Devices = None):
        self._folder, self._owner, self._devices = folder, owner, devices

    def get(self, name: str, compiled: Callable[[], Compiled], devices: Devices = None) -> Compiled:
        """The executable with this name, a `jax.stages.Compiled`.

        Args:
          name: unique name of the executable among those of one owner.
          compiled: function that compiles the executable if it is not in the cache.
          devices: the devices on which the executable runs; None: all devices of the cache.
        """
        if self._folder is None:
            return compiled()
        key = sha256(f"{self._owner} {name}".encode()).hexdigest()[:32]
        path = self._folder / f"{key}.executable"
        with contextlib.suppress(Exception):  # it is missing or unreadable
            sources, program = pickle.loads(path.read_bytes())
            if all(version(file) == known for file, known in sources.items()):
                return serialize_executable.deserialize_and_load(
                    *program, execution_devices=devices or self._devices
                )
        with _from_the_cache() as hits:
            program = compiled()
        if hits:  # XLA for CPUs would serialize it without its kernels; jax's cache has it
            return program
        draft = path.with_name(f".{key}.draft")
        try:
            draft.write_bytes(pickle.dumps((loaded(), serialize_executable.serialize(program))))
            draft.rename(path)
        except Exception:
            # The program calls Python or consists of separately cached executables, or the memory
            # is full: the next process compiles it.
            draft.unlink(missing_ok=True)
        return program


NO_CACHE = ExecutableCache()


@functools.cache
def version(file: str) -> tuple[int, ...] | None:
    """Size and times of a file at the first call in this process; None: there is no such file."""
    with contextlib.suppress(OSError):
        stat = os.stat(file)
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    return None


def loaded() -> dict[str, tuple[int, ...] | None]:
    """The file of every loaded module, and its `version`."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {file: version(file) for file in files if file}


# A fork runs the code that its agent imported, even if the files have changed since.
os.register_at_fork(before=loaded)


@contextlib.contextmanager
def _from_the_cache() -> Iterator[list[str]]:
    """Hits of this thread in jax's compilation cache, inside the context."""
    hits, thread = [], threading.get_ident()

    def listen(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def open_cache(
    config: Mapping[str, object], folder: Path | None, placement: Placement
) -> ExecutableCache:
    """This process's cache; it stores nothing without in-memory checkpoints and a supervisor.

    The key of an executable includes the config (flat), the number of processes, jax's settings and
    the supervisor's secret.
    """
    if folder is None or PLACE not in os.environ or rendezvous.SECRET not in os.environ:
        return NO_CACHE
    coordinator = "cluster.coordinator"  # its port differs at each start
    fields = {name: value for name, value in config.items() if name != coordinator}
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    process = [os.environ[rendezvous.SECRET], jax.process_index(), jax.process_count()]
    owner = json.dumps([*process, fields, flags, dict(jax.config.values)], default=str)
    return ExecutableCache(folder, owner, list(placement.mesh.devices.flat))
