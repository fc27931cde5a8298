"""Copies of this process's replicas in memory that outlives it, from which a run goes on.

Every ``recovery.every`` steps each process copies its rows of the training state, and what a
checkpoint knows besides, into a file in `MEMORY`. That needs no other process. When one is lost and
all start again, they go on from the newest step of which every process finds its own copy: bit for
bit what would have been computed without the loss, and no array is read from a shared disk.

A copy is a file ``STEP.copy`` (`decent_jax.train.copy_file`), which appears by a rename once it is
whole. When a copy begins, the two newest stay, so that processes which are up to ``recovery.every``
steps apart have one in common. With ``recovery.mirror`` a process also keeps the rows of the
process before it, in ``STEP.neighbour``: those of a host that is gone come from there.
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
from typing import Any

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
from decent_jax.train import checkpoint_arrays, copy_file
from decent_jax.train.checkpoint import run_of
from decent_jax.train.copy_file import Part, parts_of
from decent_jax.train.neighbours import Neighbours, from_first
from decent_jax.train.step import TrainState
from decent_jax.train.workdir import Workdir

MEMORY = Path("/dev/shm")
AUTOMATIC = -1  # of ``recovery.every``
_OWN, _OTHERS = ".copy", ".neighbour"  # of this process, and of the one before it
_KEPT = 2  # copies, besides the one that is being written
_COST = 0.01  # of the time of a step, for which `AUTOMATIC` aims


class Copies:
    """The copies of one process; see `open_copies`.

    Args:
      folder: where this process has them.
      every: steps from one to the next; `AUTOMATIC`: chosen by `settle`.
      run: the identity of the run.
      say: gets sentences for the user.
      neighbours: to keep a copy of the process before this one, too.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        run: int,
        say: Callable[[str], None],
        neighbours: Neighbours | None = None,
    ):
        self.folder, self.every, self._run, self._say = folder, every, run, say
        self._neighbours = neighbours
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._writing: Future | None = None
        self._copied = jax.jit(partial(jax.tree.map, _copied))
        self._seconds, self._failed = 0.0, False  # of the last one

    # --- Made -------------------------------------------------------------------------------------

    def due(self, before: int, done: int, logs: bool) -> bool:
        """Whether a copy of the state fell due in the steps after ``before``; ``logs``: a row did.

        It is the same in all processes.
        """
        if self.every == AUTOMATIC:  # one, to see what it takes
            return logs and self._writing is None
        return before // self.every < done // self.every

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
        copied = self._copied({"state": checkpoint_arrays.tree_of(state), "sums": row.pop("sums")})
        own = meta | {"step": done, "row": row}
        began, other = time.perf_counter(), None
        if self._neighbours is not None:
            other = self._neighbours.send(copied)
        sending = time.perf_counter() - began
        self._writing = self._thread.submit(self._write, done, copied, other, own, sending)

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

    def _write(
        self, done: int, copied: Any, other: Any, meta: dict[str, Any], sending: float
    ) -> None:
        jax.block_until_ready(copied)
        began, draft = time.perf_counter(), self.folder / f".{done}.draft"
        header = {"run": self._run, "every": self.every, "processes": jax.process_count()}
        header |= {"meta": meta}
        try:
            for kind, tree in ((_OWN, copied), (_OTHERS, other)):
                for step in self.steps(kind)[:-_KEPT]:
                    self._remove(step, kind)
                if tree is not None:
                    parts = {name: parts_of(x) for name, x in checkpoint_arrays.named(tree).items()}
                    copy_file.write(draft, header, parts)
                    draft.rename(self.folder / f"{done}{kind}")
            self._failed = False
        except OSError as error:  # such as a full memory; the run can do without
            draft.unlink(missing_ok=True)
            if not self._failed:
                why = error.strerror or error
                self._say(f"step {done} could not be copied to {self.folder}: {why}")
            self._failed = True
        self._seconds = sending + time.perf_counter() - began

    def steps(self, kind: str = _OWN) -> list[int]:
        """Of the copies that are there, the oldest first."""
        names = (path.stem for path in self.folder.glob(f"*{kind}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _remove(self, step: int, kind: str) -> None:
        (self.folder / f"{step}{kind}").unlink(missing_ok=True)

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
        tree = {"state": checkpoint_arrays.tree_of(like)}
        shapes = jax.eval_shape(self._copied, tree) | {"sums": sums_like(placement.num_replicas)}
        found = None
        while found is None:
            own, others = self._held(_OWN), self._held(_OTHERS)
            step = common(_of_all(own), _of_all(others), after)
            if step is None:
                self._forget(after)
                return None
            found = self._collect(
                step, step in own, step in others, checkpoint_arrays.named(shapes), placement
            )
        self._forget(step)
        arrays, header = found
        if self.every == AUTOMATIC:
            self.every = header["every"]
        leaves = [arrays[name] for name in checkpoint_arrays.named(tree)]
        tree = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        state = jax.tree.map(_as_key, checkpoint_arrays.unstored(tree["state"], like), like)
        meta = header["meta"]
        sums = {name: arrays.get(f"sums/{name}") for name in shapes["sums"]}
        meta |= {"row": meta["row"] | {"sums": None if None in sums.values() else sums}}
        if meta["num_replicas"] != placement.num_replicas:
            state = checkpoint_arrays.change_replicas(state, placement, accum_steps)
        return state, meta

    def _forget(self, step: int) -> None:
        """Remove the copies after the step from which the run goes on: their rows go, too, and a
        process that goes on alone later may not take them."""
        for kind in (_OWN, _OTHERS):
            for newer in self.steps(kind):
                if newer > step:
                    self._remove(newer, kind)

    def _collect(
        self,
        step: int,
        has_own: bool,
        has_others: bool,
        shapes: dict[str, jax.ShapeDtypeStruct],
        placement: Placement,
    ) -> tuple[dict[str, jax.Array], dict[str, Any]] | None:
        """The arrays of a step and the header, those of a process that lacks them from the next.

        None: some process could not read its own.
        """
        lacking = bool(_of_all([not has_own]).any())
        own = others = ({}, {})
        kind, failed = _OWN, False
        try:
            if has_own:
                own = self._read(step, kind, shapes, placement)
            if lacking and has_others:
                kind = _OTHERS
                others = self._read(step, kind, shapes, placement)
        except (OSError, ValueError, LookupError) as error:
            failed = True
            self._say(f"the copy of step {step} in {self.folder} cannot be used: {error}")
            self._remove(step, kind)
        if cluster.any_process(failed):
            return None
        if not lacking:
            return own
        assert self._neighbours is not None
        header = from_first(own[1], has_own)
        held = others[0] or {name: _zeros(shapes[name], placement) for name in header["arrays"]}
        return self._neighbours.give_back(held, not has_own, own[0]), header

    def _held(self, kind: str) -> list[int]:
        """The steps of the copies of this run that look whole, filled up with -1."""
        found = []
        for step in [] if kind == _OTHERS and self._neighbours is None else self.steps(kind):
            try:
                header = copy_file.read_header(self.folder / f"{step}{kind}")
                whole = header["run"] == self._run
                # Of another number of processes, nobody knows whose it is.
                whole &= kind == _OWN or header["processes"] == jax.process_count()
            except (OSError, ValueError, LookupError):
                whole = False
            if whole:
                found.append(step)
            else:
                self._say(f"the copy of step {step} in {self.folder} is damaged or of another run")
                self._remove(step, kind)
        return [*found[-_KEPT - 1 :], *[-1] * (_KEPT + 1 - len(found))]

    def _read(
        self,
        step: int,
        kind: str,
        shapes: dict[str, jax.ShapeDtypeStruct],
        placement: Placement,
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """The arrays by name, on the devices, and the header."""
        header, found = copy_file.read(self.folder / f"{step}{kind}")
        if shapes.keys() - found.keys() not in (
            set(),
            {n for n in shapes if n.startswith("sums/")},
        ):
            raise ValueError("another optimizer, or another version of it, wrote it")
        same = header["meta"]["num_replicas"] == placement.num_replicas
        arrays = {
            name: _put(parts, shapes[name].shape, placement, same) for name, parts in found.items()
        }
        return arrays, header


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
      ConfigError: the config wants copies, and those of all processes of a host do not fit into
        its memory.
    """
    every = config.recovery.every

    def say(sentence: str) -> None:  # also where this process is not the first
        work.say(sentence)
        if work.quiet:
            print(sentence, file=sys.stderr, flush=True)

    if every == 0 or (every == AUTOMATIC and PLACE not in os.environ):
        return None
    neighbours = None
    if config.recovery.mirror and jax.process_count() > 1:
        neighbours = Neighbours(placement)
    share = (1 + (neighbours is not None)) * len(placement.local_replicas) / placement.num_replicas
    size = share * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    folder, failure = folder_of(work.path), None
    needed, hosts = (_KEPT + 1) * size, cluster.hosts()
    of_host = needed * hosts.count(hosts[jax.process_index()])
    try:
        _make(folder)
        free = shutil.disk_usage(folder).free
        for path in folder.parent.glob("*/*"):  # copies of before, which will be written over
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                free += path.stat().st_size
        if min(free, machine.memory_bytes()) < of_host:
            failure = f"needs {format_bytes(of_host)} in {MEMORY}, which has {format_bytes(free)}"
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
    return Copies(folder, every, int(_of_all([run])[0, 0]), say, neighbours)


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


def common(own: np.ndarray, others: np.ndarray, after: int) -> int | None:
    """The newest step that every process holds, or the next one for it, if it is past ``after``.

    Args:
      own: (processes, k): the steps of which each holds its own rows; -1 is none.
      others: (processes, k): those of which it holds the rows of the process before it.
      after: -1: any.

    >>> common(np.array([[20, 30, -1], [20, 30, 40]]), -np.ones((2, 3)), 10)
    30
    """
    nexts = np.roll(others, -1, axis=0)
    there = [{*mine, *theirs} for mine, theirs in zip(own.tolist(), nexts.tolist(), strict=True)]
    return max((step for step in set.intersection(*there) if step > after), default=None)


def sums_like(n: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the sums of a row that has begun, see `decent_jax.train.metrics.Report`."""
    kinds = {"loss": jnp.float32, "grad_norm": jnp.float32, "steps": jnp.int32}
    return {name: jax.ShapeDtypeStruct((n,), kind) for name, kind in kinds.items()}


def _of_all(values: list[int]) -> np.ndarray:
    """(processes, k): these of each process; all call it at the same point."""
    own = np.array(values, np.int32)
    if jax.process_count() == 1:
        return own[None]
    return np.asarray(multihost_utils.process_allgather(own))


# --- Arrays ---------------------------------------------------------------------------------------


def _copied(x: jax.Array) -> jax.Array:
    """A buffer of its own: the next step donates that of the state."""
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


def _put(parts: list[Part], shape: tuple[int, ...], placement: Placement, same: bool) -> jax.Array:
    """The whole array on the devices; ``same``: they must be those of which the copy was made."""
    sharding = placement.sharding(shape)
    places = sharding.addressable_devices_indices_map(shape)
    devices = sorted(places, key=lambda device: device.id)
    spans = [copy_file.spans(places[device], shape) for device in devices]
    if len(spans) != len(parts) or (same and spans != [part.index for part in parts]):
        raise ValueError("it is of other devices")
    own = [jax.device_put(p.data, d, may_alias=False) for d, p in zip(devices, parts, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, own)
