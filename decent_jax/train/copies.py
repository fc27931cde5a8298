"""Copies of this process's replicas in memory that outlives it, from which a run goes on.

Every ``recovery.every`` steps each process copies its rows of the training state, and what a
checkpoint knows besides, into a file in `MEMORY`. That needs no other process. When one is lost and
all start again, they go on from the newest step of which every process finds its own copy: bit for
bit what would have been computed without the loss, and no array is read from a shared disk.

A copy is a file ``STEP.copy``, which appears by a rename once it is whole: the length of a header,
the header (JSON), the bytes of the arrays (one device's part after the other), and a checksum. When
a copy begins, the two newest stay, so that processes which are up to ``recovery.every`` steps apart
have one in common.
"""

import json
import math
import os
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from decent_jax.cluster import start as cluster
from decent_jax.cluster.supervise import PLACE
from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError, Interrupted, TrainingFailed
from decent_jax.ground.format import format_bytes
from decent_jax.replicas import Placement
from decent_jax.train import stored
from decent_jax.train.checkpoint import run_of
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import Workdir

MEMORY = Path("/dev/shm")
AUTOMATIC = -1  # of ``recovery.every``
_KEPT = 2  # copies, besides the one that is being written
_COST = 0.01  # of the time of a step, for which `AUTOMATIC` aims
_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_FORMAT = "decent_jax.copy/1"


class Part(NamedTuple):
    """What one device holds of an array.

    Attributes:
      index: [[start, stop], ...] in the whole array, for each of its dimensions.
      data: on the host.
    """

    index: list[list[int]]
    data: np.ndarray


class Copies:
    """The copies of one process; see `open_copies`.

    Args:
      folder: where this process has them.
      every: steps from one to the next; `AUTOMATIC`: chosen by `settle`.
      run: the identity of the run.
      say: gets sentences for the user.
    """

    def __init__(self, folder: Path, every: int, run: int, say: Callable[[str], None]):
        self.folder, self.every, self._run, self._say = folder, every, run, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._writing: Future | None = None
        self._copied = jax.jit(partial(jax.tree.map, _copied))
        self._seconds, self._failed = 0.0, False  # of the last one

    # --- Made -------------------------------------------------------------------------------------

    def due(self, done: int, logs: bool) -> bool:
        """Whether to copy the state after ``done`` steps, with which a row ends if it ``logs``.

        It is the same in all processes.
        """
        if self.every == AUTOMATIC:  # one, to see what it takes
            return logs and self._writing is None
        return done % self.every == 0

    def begin(self, done: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Copy the state after ``done`` steps while the next ones are made.

        Args:
          done: steps.
          state: still under way, perhaps.
          meta: of a checkpoint of it; in its row, ``sums`` are still on the devices.
        """
        if self._writing is not None:
            self._writing.result()
        row = dict(meta["row"])
        copied = self._copied({"state": stored.tree_of(state), "sums": row.pop("sums")})
        own = meta | {"step": done, "row": row}
        self._writing = self._thread.submit(self._write, done, copied, own)

    def settle(self, step_s: float) -> None:
        """Choose ``every``, where it is `AUTOMATIC`, so that copies cost `_COST` of the steps.

        All processes call it at the same point.

        Args:
          step_s: seconds of a step.
        """
        if self.every != AUTOMATIC or self._writing is None:
            return
        self._writing.result()
        wanted = math.ceil(self._seconds / (_COST * step_s))
        self.every = max(1, int(_of_all([wanted]).max()))
        self._say(
            f"every {self.every} steps the state is copied to {self.folder} "
            f"(recovery.every; {1e3 * self._seconds:.2g} ms each)"
        )

    def _write(self, done: int, copied: Any, meta: dict[str, Any]) -> None:
        jax.block_until_ready(copied)
        began, draft = time.perf_counter(), self.folder / f".{done}.draft"
        header = {"run": self._run, "every": self.every, "meta": meta}
        try:
            for step in self.steps()[:-_KEPT]:
                self._remove(step)
            write(draft, header, {name: parts_of(x) for name, x in stored.named(copied).items()})
            draft.rename(self.folder / f"{done}.copy")
            self._failed = False
        except OSError as error:  # such as a full memory; the run can do without
            draft.unlink(missing_ok=True)
            if not self._failed:
                why = error.strerror or error
                self._say(f"step {done} could not be copied to {self.folder}: {why}")
            self._failed = True
        self._seconds = time.perf_counter() - began

    def steps(self) -> list[int]:
        """Of the copies that are there, the oldest first."""
        names = (path.stem for path in self.folder.glob("*.copy"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _remove(self, step: int) -> None:
        (self.folder / f"{step}.copy").unlink(missing_ok=True)

    def __enter__(self) -> "Copies":
        return self

    def __exit__(self, exc_type: type | None, *_) -> None:
        """Remove the copies where the run has ended, or goes on from a checkpoint."""
        self._thread.shutdown()
        ended = exc_type is None or issubclass(exc_type, (Interrupted, TrainingFailed))
        if ended:
            # Those of other processes of this machine, too: of one that was left out, nobody would.
            shutil.rmtree(self.folder.parent, ignore_errors=True)

    # --- Found ------------------------------------------------------------------------------------

    def restore(
        self, like: TrainState, placement: Placement, accum_steps: int, after: int
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest state of which every process has a copy, with its meta; None: there is none.

        All processes call it at the same point.

        Args:
          like, placement, accum_steps: see `decent_jax.train.checkpoint.Checkpointer`; with another
            number of replicas, all continue from the mean of those that are still there.
          after: the step of the newest checkpoint; older copies are left alone.
        """
        while (step := common(_of_all(self._held()), after)) is not None:
            found, failure = None, None
            try:
                found = self._read(step, like, placement)
            except (OSError, ValueError, LookupError) as error:
                failure = error
                self._say(f"the copy of step {step} in {self.folder} cannot be used: {error}")
                self._remove(step)
            if not cluster.any_process(failure is not None):
                assert found is not None
                state, meta = found
                if meta["num_replicas"] != placement.num_replicas:
                    state = stored.change_replicas(state, placement, accum_steps)
                return state, meta
        return None

    def _held(self) -> list[int]:
        """The steps of the copies of this run that look whole, filled up with -1."""
        found = []
        for step in self.steps():
            try:
                whole = read_header(self.folder / f"{step}.copy")["run"] == self._run
            except (OSError, ValueError, LookupError):
                whole = False
            if whole:
                found.append(step)
            else:
                self._say(f"the copy of step {step} in {self.folder} is damaged or of another run")
                self._remove(step)
        return [*found[-_KEPT - 1 :], *[-1] * (_KEPT + 1 - len(found))]

    def _read(
        self, step: int, like: TrainState, placement: Placement
    ) -> tuple[TrainState, dict[str, Any]]:
        header, found = read(self.folder / f"{step}.copy")
        meta = header["meta"]
        sums = {name[len("sums/") :]: x for name, x in found.items() if name.startswith("sums/")}
        tree = {"state": stored.tree_of(like)}
        shapes = stored.named(jax.eval_shape(self._copied, tree))
        if shapes.keys() != found.keys() - {f"sums/{name}" for name in sums}:
            raise ValueError("another optimizer, or another version of it, wrote it")
        same = meta["num_replicas"] == placement.num_replicas
        put = partial(_put, placement=placement, same=same)
        leaves = [put(found[name], x.shape) for name, x in shapes.items()]
        tree = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        state = jax.tree.map(_as_key, stored.unstored(tree["state"], like), like)
        on_devices = {name: put(x, (placement.num_replicas,)) for name, x in sums.items()}
        self.every = header["every"]
        return state, meta | {"row": meta["row"] | {"sums": on_devices or None}}


def open_copies(
    config: ConfigDict, work: Workdir, shapes: TrainState, placement: Placement
) -> Copies | None:
    """The copies of this process, if the config or a supervisor wants any.

    Args:
      config: of the run; `AUTOMATIC` makes copies where a supervisor can start the run again.
      work: of the run.
      shapes: of the state.
      placement: of the replicas.

    Raises:
      ConfigError: the config wants copies, and they do not fit into this machine's memory.
    """
    every = config.recovery.every

    def say(sentence: str) -> None:  # also where this process is not the first
        work.say(sentence)
        if work.quiet:
            print(sentence, file=sys.stderr, flush=True)

    if every == 0 or (every == AUTOMATIC and PLACE not in os.environ):
        return None
    share = len(placement.local_replicas) / placement.num_replicas
    size = share * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    folder, failure = folder_of(work.path), None
    try:
        _make(folder)
        free = shutil.disk_usage(folder).free + sum(x.stat().st_size for x in folder.iterdir())
        needed = (_KEPT + 1) * size
        if min(free, machine.memory_bytes()) < needed:
            failure = f"needs {format_bytes(needed)} in {MEMORY}, which has {format_bytes(free)}"
    except OSError as error:
        failure = f"needs a folder {folder}: {error.strerror or error}"
    if cluster.any_process(failure is not None):
        if every != AUTOMATIC:
            why = failure or "needs more memory than another process has"
            raise ConfigError.about("recovery.every", every, f"{why}; 0 makes no copies")
        if failure is not None:
            say(f"no copies are made for a recovery: recovery.every {failure}")
        return None
    run = 0 if work.quiet else int(str(run_of(work.path, make=True)), 16) % 2**31
    work.say(f"copies of the state for a recovery take {format_bytes(needed)} of {folder}")
    return Copies(folder, every, int(_of_all([run])[0, 0]), say)


def folder_of(workdir: Path) -> Path:
    """Where this process of the run in ``workdir`` has its copies."""
    place = os.environ.get(PLACE, str(jax.process_index()))
    run = sha256(str(workdir.absolute()).encode()).hexdigest()[:16]
    return MEMORY / f"decent_jax-{os.getuid()}" / run / place.replace("/", "_")


def _make(folder: Path) -> None:
    """Make the folder, which belongs to this user alone; OSError where it cannot be one."""
    own = MEMORY / f"decent_jax-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.is_symlink() or own.stat().st_uid != os.getuid():
        raise PermissionError(1, "it belongs to another user", str(own))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for draft in folder.glob(".*.draft"):
        draft.unlink()


def common(held: np.ndarray, after: int) -> int | None:
    """The newest step that every process holds, if it is past ``after``.

    Args:
      held: (processes, k): the steps that each holds; -1 is none.
      after: -1: any.

    >>> common(np.array([[20, 30, -1], [20, 30, 40]]), 10)
    30
    """
    steps = set.intersection(*(set(row) for row in held.tolist()))
    return max((step for step in steps if step > after), default=None)


def _of_all(values: list[int]) -> np.ndarray:
    """(processes, k): these of each process; all call it at the same point."""
    own = np.array(values, np.int32)
    if jax.process_count() == 1:
        return own[None]
    return np.asarray(multihost_utils.process_allgather(own))


# --- Arrays and files -----------------------------------------------------------------------------


def _copied(x: jax.Array) -> jax.Array:
    """A buffer of its own: the next step donates that of the state."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return jnp.copy(x)


def _as_key(x: jax.Array, like: jax.Array) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    return x


def parts_of(x: jax.Array) -> list[Part]:
    """Those of the devices of this process, in the order of their numbers."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
    return [Part(_spans(shard.index, x.shape), np.asarray(shard.data)) for shard in shards]


def _spans(index: Any, shape: tuple[int, ...]) -> list[list[int]]:
    return [list(one.indices(size)[:2]) for one, size in zip(index, shape, strict=True)]


def _put(parts: list[Part], shape: tuple[int, ...], placement: Placement, same: bool) -> jax.Array:
    """The whole array on the devices; ``same``: they must be those of which the copy was made."""
    sharding = placement.sharding(shape)
    places = sharding.addressable_devices_indices_map(shape)
    devices = sorted(places, key=lambda device: device.id)
    spans = [_spans(places[device], shape) for device in devices]
    if len(spans) != len(parts) or (same and spans != [part.index for part in parts]):
        raise ValueError("it is of other devices")
    own = [jax.device_put(p.data, d, may_alias=False) for d, p in zip(devices, parts, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, own)


def write(path: Path, header: dict[str, Any], arrays: dict[str, list[Part]]) -> None:
    """Write a file that `read` reads; OSError where it cannot be written."""
    about = {
        name: [[part.index, part.data.dtype.name, part.data.shape] for part in parts]
        for name, parts in arrays.items()
    }
    text = json.dumps(header | {"format": _FORMAT, "arrays": about}).encode()
    checksum = zlib.crc32(text)
    with path.open("wb", buffering=0) as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for part in (part for parts in arrays.values() for part in parts):
            data = np.ascontiguousarray(part.data).reshape(-1).view(np.uint8)
            checksum = zlib.crc32(data.data, checksum)
            written = 0
            while written < data.nbytes:  # the kernel takes 2 GB at once
                written += file.write(data[written:].data)
        file.write(_CHECKSUM.pack(checksum))


def read_header(path: Path) -> dict[str, Any]:
    """The header alone, without a look at the arrays.

    Raises:
      OSError, ValueError, LookupError: it cannot be read.
    """
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size))
        header = json.loads(file.read(min(length, 1 << 30)))
    if not isinstance(header, dict) or header["format"] != _FORMAT:
        raise ValueError("it has another format")
    return header


def read(path: Path) -> tuple[dict[str, Any], dict[str, list[Part]]]:
    """The header and the arrays.

    Raises:
      OSError, ValueError, LookupError: it cannot be read, or it is damaged.
    """
    header, raw = read_header(path), np.fromfile(path, np.uint8)
    (length,) = _LENGTH.unpack(raw[: _LENGTH.size].data)
    start, end = _LENGTH.size + length, len(raw) - _CHECKSUM.size
    if zlib.crc32(raw[_LENGTH.size : end].data) != _CHECKSUM.unpack(raw[end:].data)[0]:
        raise ValueError("it does not match its checksum")
    arrays: dict[str, list[Part]] = {}
    for name, parts in header["arrays"].items():
        arrays[name] = []
        for index, dtype, shape in parts:
            kind = jnp.dtype(dtype)
            size = math.prod(shape) * kind.itemsize
            arrays[name].append(Part(index, raw[start : start + size].view(kind).reshape(shape)))
            start += size
    return header, arrays
