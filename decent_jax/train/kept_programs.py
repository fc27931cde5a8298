"""Compiled programs in memory that outlives a process, so that the next one neither traces nor
compiles them.

A process that a supervisor starts again needs the programs that the one before it had. They lie
beside the copies of its replicas (`decent_jax.train.copies`) and go with them. jax's own cache does
not do: it has what process 0 has compiled, programs for CPUs are those of one process, and to find
one in it takes tracing it, most of the time.

It is taken only while all files are the same whose code was loaded when it was compiled: of the
task and what that imports, of this package, of jax and other libraries.
"""

import contextlib
import functools
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from ml_collections import ConfigDict

from decent_jax.cluster import rendezvous
from decent_jax.cluster.supervise import PLACE
from decent_jax.ground.json_files import flat
from decent_jax.replicas import Placement


class KeptPrograms:
    """The programs of one process; see `kept_programs`.

    Args:
      folder: where they lie; None: they are not kept.
      owner: only what was kept under the same words is taken.
      devices: on which they run.
    """

    def __init__(
        self, folder: Path | None = None, owner: str = "", devices: Sequence[Any] | None = None
    ):
        self._folder, self._owner, self._devices = folder, owner, devices

    def get(
        self, name: str, compiled: Callable[[], Any], devices: Sequence[Any] | None = None
    ) -> Any:
        """The program of this name, a `jax.stages.Compiled`.

        Args:
          name: says all in which programs of one owner differ.
          compiled: makes it, where it is not kept.
          devices: on which it runs; None: all of them.
        """
        if self._folder is None:
            return compiled()
        number = sha256(f"{self._owner} {name}".encode()).hexdigest()[:32]
        path = self._folder / f"{number}.program"
        with contextlib.suppress(Exception):  # none, or one that cannot be read
            sources, program = pickle.loads(path.read_bytes())
            if all(version(file) == known for file, known in sources.items()):
                return serialize_executable.deserialize_and_load(
                    *program, execution_devices=devices or self._devices
                )
        with _from_the_cache() as hits:
            program = compiled()
        if hits:  # XLA for CPUs writes such a program without its kernels; jax's cache has it
            return program
        draft = path.with_name(f".{number}.draft")
        try:
            draft.write_bytes(pickle.dumps((loaded(), serialize_executable.serialize(program))))
            draft.rename(path)
        except Exception:
            # It calls Python, is made of others, which are kept, or the memory is full: then the
            # next process compiles it.
            draft.unlink(missing_ok=True)
        return program


NOWHERE = KeptPrograms()


@functools.cache
def version(file: str) -> tuple[int, ...] | None:
    """What changes with a file, as it was when this process first asked; None: there is none."""
    with contextlib.suppress(OSError):
        stat = os.stat(file)
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    return None


def loaded() -> dict[str, tuple[int, ...] | None]:
    """The files of all modules, and their versions."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {file: version(file) for file in files if file}


# A fork of an agent has the code that the agent has imported, whatever the files have become.
os.register_at_fork(before=loaded)


@contextlib.contextmanager
def _from_the_cache() -> Iterator[list[str]]:
    """What this thread meanwhile takes from jax's cache of compiled programs."""
    hits, thread = [], threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def kept_programs(config: ConfigDict, folder: Path | None, placement: Placement) -> KeptPrograms:
    """Those of this process, where it has copies in a folder and a supervisor may start it again.

    They are of one config, one number of processes, the same settings of jax, and one supervisor
    and the next with the same secret.
    """
    if folder is None or PLACE not in os.environ or rendezvous.SECRET not in os.environ:
        return NOWHERE
    fields = flat(config.to_dict())
    del fields["cluster.coordinator"]  # a free port of each start
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    own = [os.environ[rendezvous.SECRET], jax.process_index(), jax.process_count()]
    words = json.dumps([*own, fields, flags, dict(jax.config.values)], default=str)
    return KeptPrograms(folder, words, list(placement.mesh.devices.flat))
