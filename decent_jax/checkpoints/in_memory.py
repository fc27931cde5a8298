"""In-memory checkpoints: files in `MEMORY` that survive their process.

Every ``recovery.every`` steps each process writes its rows of the training state and the metadata
of a checkpoint to a file in `MEMORY`, without communication. After a process is lost, all restart
and resume from the newest step for which every process finds its file. The result is bit-identical
to that of a run without failures, and no arrays are read from a shared disk.

The file ``STEP.own`` (`decent_jax.checkpoints.shard_file`) is renamed into place once it is
complete. Two complete checkpoints are kept while the next one is written, so processes that are up
to ``recovery.every`` steps apart have one in common. With ``recovery.mirror`` a process also stores
the rows of the process before it, in ``STEP.mirror``, in case the host of that process is lost.
"""

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.checkpoints import Recovery, shard_file
from decent_jax.checkpoints.arrays import change_replicas, named, tree_of, unstored
from decent_jax.checkpoints.mirror import Mirror, from_first
from decent_jax.checkpoints.on_disk import run_of
from decent_jax.checkpoints.shard_file import Shard, shards_of
from decent_jax.cluster import start as cluster
from decent_jax.cluster import watch
from decent_jax.cluster.supervise import PLACE
from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError, Interrupted, TrainingFailed
from decent_jax.ground.format import format_bytes
from decent_jax.ground.json_files import Json
from decent_jax.replicas import Placement, TrainState

MEMORY = Path("/dev/shm")
AUTOMATIC = -1  # of ``recovery.every``
_OWN, _MIRROR = ".own", ".mirror"  # rows of this process, and of the process before it
_KEPT = 2  # checkpoints, besides the one that is being written
_COST = 0.01  # target of `AUTOMATIC`: this fraction of the step time


class MemoryCheckpoints:
    """The in-memory checkpoints of one process; see `open_memory_checkpoints`.

    Args:
      folder: folder of this process's checkpoints.
      every: steps between two checkpoints; `AUTOMATIC`: `settle` chooses this number after the
        first checkpoint.
      run: the identity of the run.
      say: callback for sentences to the user.
      mirror: the exchange of rows with the neighbouring processes; None: no mirror is stored.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        run: int,
        say: Callable[[str], None],
        mirror: Mirror | None = None,
    ):
        self.folder, self.every, self._run, self._say = folder, every, run, say
        self._mirror = mirror
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._writing: Future | None = None
        self._copied = jax.jit(partial(jax.tree.map, _copied))
        self._seconds, self._failed = 0.0, False  # of the last checkpoint

    # --- Write ------------------------------------------------------------------------------------

    def begin(self, done: int, state: TrainState, meta: Json) -> None:
        """Start writing a checkpoint; training continues meanwhile.

        Args:
          done: number of steps done.
          state: the state after these steps, whose arrays need not be computed yet.
          meta: metadata of the checkpoint; ``meta["row"]["sums"]`` are arrays on the devices.
        """
        if self._writing is not None:
            self._writing.result()
        row = dict(meta["row"])
        copied = self._copied({"state": tree_of(state), "sums": row.pop("sums")})
        meta = meta | {"step": done, "row": row}
        began, mirrored = time.perf_counter(), None
        if self._mirror is not None:
            mirrored = self._mirror.send(copied)
        sending = time.perf_counter() - began
        self._writing = self._thread.submit(self._write, done, copied, mirrored, meta, sending)

    def settle(self, step_s: float) -> bool:
        """If ``every`` is `AUTOMATIC`, choose it so that checkpoints cost `_COST` of the step time.

        All processes call this at the same point.

        Args:
          step_s: seconds per step.

        Returns:
          Whether this call chose ``every``; the first call cannot, as no checkpoint was timed yet.
        """
        if self.every != AUTOMATIC or self._writing is None:
            return False
        self._writing.result()
        wanted = math.ceil(self._seconds / (_COST * step_s))
        self.every = max(1, max(watch.gather(wanted)))
        self._say(
            f"in-memory checkpoints are written to {self.folder} every {self.every} steps "
            f"(recovery.every; {1e3 * self._seconds:.2g} ms each)"
        )
        return True

    def _write(
        self, done: int, copied: object, mirrored: object, meta: Json, sending: float
    ) -> None:
        jax.block_until_ready(copied)
        began, draft = time.perf_counter(), self.folder / f".{done}.draft"
        header = {"run": self._run, "every": self.every, "processes": jax.process_count()}
        header |= {"meta": meta}
        try:
            for kind, tree in ((_OWN, copied), (_MIRROR, mirrored)):
                for step in self.steps(kind)[:-_KEPT]:
                    self._remove(step, kind)
                if tree is not None:
                    arrays = named(tree)
                    shards = {name: shards_of(x) for name, x in arrays.items()}
                    shard_file.write(draft, header, shards)
                    draft.rename(self.folder / f"{done}{kind}")
            self._failed = False
        except OSError as error:  # such as full memory; the run continues
            draft.unlink(missing_ok=True)
            if not self._failed:
                why = error.strerror or error
                self._say(f"step {done}: no in-memory checkpoint in {self.folder}: {why}")
            self._failed = True
        self._seconds = sending + time.perf_counter() - began

    def steps(self, kind: str = _OWN) -> list[int]:
        """Steps with a complete file of this kind, the oldest first."""
        names = (path.stem for path in self.folder.glob(f"*{kind}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _remove(self, step: int, kind: str) -> None:
        (self.folder / f"{step}{kind}").unlink(missing_ok=True)

    def __enter__(self) -> "MemoryCheckpoints":
        return self

    def __exit__(self, exc_type: type | None, *_) -> None:
        """Remove all files if the run has ended, or will resume from a checkpoint on disk."""
        self._thread.shutdown()
        ended = exc_type is None or issubclass(exc_type, (Interrupted, TrainingFailed))
        if ended:
            # The files of all processes of this host: nothing else removes an excluded process's.
            shutil.rmtree(self.folder.parent, ignore_errors=True)

    # --- Restore ----------------------------------------------------------------------------------

    def restore(
        self, like: TrainState, placement: Placement, accum_steps: int, after: int
    ) -> tuple[TrainState, Json] | None:
        """The newest state that all processes can restore, with its meta; None if there is none.

        All processes call this at the same point.

        Args:
          like, placement, accum_steps: see `decent_jax.checkpoints.on_disk.Checkpointer`; if the
            number of replicas has changed, all continue from the mean of those that remain.
          after: the step of the newest checkpoint on disk; only newer ones are considered.
        """
        tree = {"state": tree_of(like)}
        shapes = jax.eval_shape(self._copied, tree) | {"sums": sums_like(placement.num_replicas)}
        restored, names = None, named(shapes)
        while restored is None:
            own, mirrored = self._held(_OWN), self._held(_MIRROR)
            step = common(watch.gather(own), watch.gather(mirrored), after)
            if step is None:
                self._forget(after)
                return None
            restored = self._collect(step, step in own, step in mirrored, names, placement)
        self._forget(step)
        arrays, header = restored
        if self.every == AUTOMATIC:
            self.every = header["every"]
        leaves = [arrays[name] for name in named(tree)]
        tree = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        state = jax.tree.map(_as_key, unstored(tree["state"], like), like)
        meta = header["meta"]
        sums = {name: arrays.get(f"sums/{name}") for name in shapes["sums"]}
        meta |= {"row": meta["row"] | {"sums": None if None in sums.values() else sums}}
        if meta["num_replicas"] != placement.num_replicas:
            state = change_replicas(state, placement, accum_steps)
        return state, meta

    def _forget(self, step: int) -> None:
        """Remove checkpoints newer than the step from which the run resumes: a process that later
        restarts alone must not restore them."""
        for kind in (_OWN, _MIRROR):
            for newer in self.steps(kind):
                if newer > step:
                    self._remove(newer, kind)

    def _collect(
        self,
        step: int,
        has_own: bool,
        has_mirror: bool,
        shapes: dict[str, jax.ShapeDtypeStruct],
        placement: Placement,
    ) -> tuple[dict[str, jax.Array], Json] | None:
        """The arrays of a step and the header; missing rows come from the next process's mirror.

        Returns None if any process could not read its file.
        """
        lacking = cluster.any_process(not has_own)
        own = mirrored = ({}, {})
        kind, failed = _OWN, False
        try:
            if has_own:
                own = self._read(step, kind, shapes, placement)
            if lacking and has_mirror:
                kind = _MIRROR
                mirrored = self._read(step, kind, shapes, placement)
        except (OSError, ValueError, LookupError) as error:
            failed = True
            self._say(f"{self.folder}/{step}{kind} cannot be restored: {error}")
            self._remove(step, kind)
        if cluster.any_process(failed):
            return None
        if not lacking:
            return own
        assert self._mirror is not None
        header = from_first(own[1], has_own)
        held = mirrored[0] or {name: _zeros(shapes[name], placement) for name in header["arrays"]}
        return self._mirror.give_back(held, not has_own, own[0]), header

    def _held(self, kind: str) -> list[int]:
        """Steps of this run's files whose headers are valid."""
        steps = []
        for step in [] if kind == _MIRROR and self._mirror is None else self.steps(kind):
            try:
                header = shard_file.read_header(self.folder / f"{step}{kind}")
                valid = header["run"] == self._run
                # If the number of processes has changed, the owner of a mirror is unknown.
                valid &= kind == _OWN or header["processes"] == jax.process_count()
            except (OSError, ValueError, LookupError):
                valid = False
            if valid:
                steps.append(step)
            else:
                self._say(f"{self.folder}/{step}{kind} is damaged or belongs to another run")
                self._remove(step, kind)
        return steps

    def _read(
        self, step: int, kind: str, shapes: dict[str, jax.ShapeDtypeStruct], placement: Placement
    ) -> tuple[dict[str, jax.Array], Json]:
        """The arrays by name, on the devices, and the header."""
        header, shards = shard_file.read(self.folder / f"{step}{kind}")
        sums = {name for name in shapes if name.startswith("sums/")}
        if shapes.keys() - shards.keys() not in (set(), sums):
            raise ValueError("it is from another optimizer or another version of it")
        same = header["meta"]["num_replicas"] == placement.num_replicas
        arrays = {
            name: _put(own, shapes[name].shape, placement, same) for name, own in shards.items()
        }
        return arrays, header


def open_memory_checkpoints(
    recovery: Recovery,
    workdir: Path,
    shapes: TrainState,
    placement: Placement,
    say: Callable[[str], None],
) -> MemoryCheckpoints | None:
    """Open this process's in-memory checkpoints; None if it writes none.

    Args:
      recovery: the section ``recovery`` of the config; `AUTOMATIC` needs a supervisor that can
        restart the run.
      workdir: the run directory.
      shapes: shapes and dtypes of the state.
      placement: the replicas and their devices.
      say: callback for sentences to the user, in process 0.

    Raises:
      ConfigError: the config asks for in-memory checkpoints, but a host's memory cannot hold those
        of all its processes, or their folder cannot be created.
    """
    every, is_first = recovery.every, jax.process_index() == 0

    def everywhere(sentence: str) -> None:  # in every process, not only the first
        say(sentence)
        if not is_first:
            print(sentence, file=sys.stderr, flush=True)

    if every == 0 or (every == AUTOMATIC and PLACE not in os.environ):
        return None
    mirror = Mirror(placement) if recovery.mirror and jax.process_count() > 1 else None
    share = (1 + (mirror is not None)) * len(placement.local_replicas) / placement.num_replicas
    size = share * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    folder, failure = folder_of(workdir), None
    needed, hosts = (_KEPT + 1) * size, cluster.hosts()
    of_host = needed * hosts.count(hosts[jax.process_index()])
    try:
        _make(folder)
        free = shutil.disk_usage(folder).free
        for path in folder.parent.glob("*/*"):  # old checkpoints, which will be replaced
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                free += path.stat().st_size
        if min(free, machine.memory_bytes()) < of_host:
            failure = f"needs {format_bytes(of_host)} in {MEMORY}, which has {format_bytes(free)}"
    except OSError as error:
        failure = f"needs a folder {folder}: {error.strerror or error}"
    if cluster.any_process(failure is not None):
        if every != AUTOMATIC:
            why = failure or "needs more memory than another process has"
            raise ConfigError.about(
                "recovery.every", every, f"{why}; 0 writes no in-memory checkpoints"
            )
        if failure is not None:
            everywhere(f"no in-memory checkpoints: recovery.every {failure}")
        return None
    run = int(str(run_of(workdir, make=True)), 16) % 2**31 if is_first else 0
    say(f"in-memory checkpoints take up to {format_bytes(needed)} in {folder}")
    return MemoryCheckpoints(folder, every, watch.gather(run)[0], everywhere, mirror)


def folder_of(workdir: Path) -> Path:
    """The folder of this process's in-memory checkpoints, for the run in ``workdir``."""
    place = os.environ.get(PLACE, str(jax.process_index()))
    run = sha256(str(workdir.absolute()).encode()).hexdigest()[:16]
    return MEMORY / f"decent_jax-{os.getuid()}" / run / place.replace("/", "_")


def _make(folder: Path) -> None:
    """Make the folder, accessible to this user only; raises OSError if that fails."""
    of_user = MEMORY / f"decent_jax-{os.getuid()}"
    of_user.mkdir(mode=0o700, exist_ok=True)
    if of_user.is_symlink() or of_user.stat().st_uid != os.getuid():
        raise PermissionError(1, "it belongs to another user", str(of_user))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for draft in folder.glob(".*.draft"):
        draft.unlink()


def common(own: list[list[int]], mirrored: list[list[int]], after: int) -> int | None:
    """The newest step after ``after`` whose rows all exist, in an own or a mirror file.

    Args:
      own: steps for which each process has its own rows.
      mirrored: steps for which each process has the rows of the process before it.
      after: the newest step on disk, or -1.

    >>> common([[20, 30], [20, 30, 40]], [[], []], 10)
    30
    """
    mirrors = [*mirrored[1:], mirrored[0]]  # of each process's rows
    steps = [{*rows, *mirror} for rows, mirror in zip(own, mirrors, strict=True)]
    return max((step for step in set.intersection(*steps) if step > after), default=None)


def sums_like(n: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the sums of an unfinished row, see `decent_jax.train.rows.Rows`."""
    kinds = {"loss": jnp.float32, "grad_norm": jnp.float32, "steps": jnp.int32}
    return {name: jax.ShapeDtypeStruct((n,), kind) for name, kind in kinds.items()}


# --- Arrays ---------------------------------------------------------------------------------------


def _copied(x: jax.Array) -> jax.Array:
    """A copy in a new buffer, because the next step donates the buffers of the state."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return jnp.copy(x)


def _as_key(x: jax.Array, like: jax.Array) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    return x


def _zeros(like: jax.ShapeDtypeStruct, placement: Placement) -> jax.Array:
    sharding = placement.sharding(like.shape)
    return jax.make_array_from_callback(
        like.shape, sharding, lambda index: np.zeros(like.shape, like.dtype)[index]
    )


def _put(own: list[Shard], shape: tuple[int, ...], placement: Placement, same: bool) -> jax.Array:
    """The whole array on the devices; ``same``: each shard must go where it came from."""
    sharding = placement.sharding(shape)
    places = sharding.addressable_devices_indices_map(shape)
    devices = sorted(places, key=lambda device: device.id)
    spans = [shard_file.spans(places[device], shape) for device in devices]
    if len(spans) != len(own) or (same and spans != [shard.index for shard in own]):
        raise ValueError("it was written with other devices")
    arrays = [jax.device_put(x.data, d, may_alias=False) for d, x in zip(devices, own, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
