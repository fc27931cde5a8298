"""Checkpoints of pipelines: a file for each stage and replica, and a manifest that is written last.

``checkpoints/STEP/stage-S.replica-I.npz`` holds the arrays of one stage of one replica by their
paths in the state, which do not depend on how the model is cut: a run with other stages takes each
array from the file that has it. NumPy checks the checksum of each array when it reads it. A folder
without a ``manifest.json`` is no checkpoint. ``best/STEP`` holds the parameters of the consensus
model in the same way.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from decent_jax.ground.errors import CheckpointError, DataError
from decent_jax.ground.format import shorten
from decent_jax.ground.json_files import is_real, is_whole, read_json, write_json_atomic
from decent_jax.pipelines.stage import Stage
from decent_jax.train.checkpoint_folder import BEST, FOLDER
from decent_jax.train.stored import change_replicas

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_MOST = 2**16  # stages or replicas


def write_part(folder: Path, stage: int, replica: int, arrays: dict[str, Any]) -> None:
    """Write the arrays of a stage of a replica, by path, and wait until they are on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"stage-{stage}.replica-{replica}.npz").open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())


def finish(folder: Path, meta: dict[str, Any], keep: int) -> None:
    """Make a checkpoint of the files in ``folder``; remove all but the newest ``keep``.

    Those before it that were never finished are removed, too.
    """
    write_json_atomic(folder / MANIFEST, meta)
    kept = steps(folder.parent)[-keep:]
    for path in folder.parent.iterdir():
        if path.name.isdecimal() and int(path.name) < kept[-1] and int(path.name) not in kept:
            shutil.rmtree(path)


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``checkpoints`` or ``best``, the oldest first."""
    names = (path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def newest(parent: Path, read: Callable[[Path], Any], say: Callable[[str], object]) -> Any:
    """What ``read`` returns of the newest checkpoint in ``parent`` that it can read; None: none is.

    Raises:
      CheckpointError: it can read none of those that are there.
    """
    failures = {}
    for step in reversed(steps(parent)):
        try:
            found = read(parent / str(step))
        except CheckpointError as error:
            failures[step] = str(error)
            continue
        for damaged, why in failures.items():
            say(f"the checkpoint of step {damaged} is damaged: {why}")
        return found
    if failures:
        why = "; ".join(failures.values())
        raise CheckpointError(f"no checkpoint in {parent} can be read: {why}")
    return None


def read_meta(folder: Path) -> dict[str, Any]:
    """The manifest of one checkpoint.

    Raises:
      CheckpointError: it cannot be read.
    """
    try:
        meta = read_json(folder / MANIFEST)
    except (OSError, DataError) as error:
        raise CheckpointError(str(error)) from None
    if not _is_manifest(meta, int(folder.name)):
        raise CheckpointError(f"{folder / MANIFEST} is no manifest of a checkpoint of this step")
    return meta


def _is_manifest(meta: Any, step: int) -> bool:
    """Whether it has the entries that are read, with values that a run has."""
    return (
        isinstance(meta, dict)
        and is_whole(meta.get("step"), step, step)
        and all(is_whole(meta.get(k), 1, _MOST) for k in ("stages", "num_replicas"))
        and is_whole(meta.get("examples"), most=2**62 - 1)
        and (meta.get("best") is None or is_real(meta["best"]))
        and is_real(meta.get("seconds"), 0, 2**31)
    )


def check(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and not cut short.

    The cells that read the files compare their contents with the checksums.

    Raises:
      CheckpointError: it is not whole.
    """
    meta = read_meta(folder)
    for replica in range(meta["num_replicas"]):
        for path in _files(folder, meta, replica):
            with _arrays_of(path):  # reads the directory at the end of the file
                pass
    return meta


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def read_like(folder: Path, like: Any, meta: dict[str, Any], replica: int) -> Any:
    """The arrays of one replica in the shape of ``like``, from whichever stages have them.

    Args:
      folder: of the checkpoint.
      like: shapes and dtypes, without a replica dimension.
      meta: its manifest.
      replica: of the checkpoint.

    Raises:
      CheckpointError: a file is damaged, or an array is not there.
    """
    wanted = by_path(like)
    advice = f"; remove {folder} to go on from the one before"
    found = _read(folder, meta, replica, wanted.__contains__, advice)
    for name, leaf in wanted.items():
        x = found.get(name)
        if x is None or (x.shape, x.dtype) != (leaf.shape, leaf.dtype):
            raise CheckpointError(f"{folder} has no array {name} of {leaf.dtype}{leaf.shape}")
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])


def snapshot(stage: Stage) -> list[dict[str, np.ndarray]]:
    """Copies of the arrays of each replica of this process, by path."""
    rows = by_path(stage.rows(stage.state))
    host = {name: np.array(x) for name, x in rows.items()}
    count = len(stage.grid.placement.local_replicas)
    return [{name: x[i] for name, x in host.items()} for i in range(count)]


def restore(stage: Stage, folder: Path, meta: dict[str, Any]) -> None:
    """Give a stage its part of a checkpoint, of any number of stages and replicas.

    Raises:
      CheckpointError: see `read_like`.
    """
    placement = stage.grid.placement
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stage.state)
    equal = meta["num_replicas"] == placement.num_replicas
    wanted = placement.local_replicas if equal else range(meta["num_replicas"])
    rows = [read_like(folder, like, meta, replica) for replica in wanted]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    if equal:
        stage.state = stage.put(stacked)
    else:
        stage.state = change_replicas(stacked, placement, stage.grid.config.optimizer.window)


def restore_model(workdir: Path, which: str) -> tuple[Any, dict[str, Any]] | None:
    """The whole consensus model of a run, as `decent_jax.train.checkpoint.restore_model`.

    None where the newest checkpoint is none of a pipeline.
    """

    def read(folder):
        meta = read_meta(folder)
        return _mean_of_parameters(folder, meta), meta

    return newest(Path(workdir) / (BEST if which == "best" else FOLDER), read, log.warning)


def _mean_of_parameters(folder: Path, meta: dict[str, Any]) -> Any:
    """Parameters, averaged over the replicas, as a nested dict."""
    n = meta["num_replicas"]
    sums: dict[str, np.ndarray] = {}
    for replica in range(n):
        found = _read(folder, meta, replica, lambda name: name.startswith(".params['"))
        if replica and found.keys() != sums.keys():
            raise CheckpointError(f"{folder} has other arrays of replica {replica} than of 0")
        shares = {name: x.astype(np.float64) / n for name, x in found.items()}
        sums = {name: sums[name] + x if replica else x for name, x in shares.items()}
    keys = {name: name.removeprefix(".params['").removesuffix("']").split("']['") for name in sums}
    return unflatten_dict({tuple(keys[name]): x.astype(np.float32) for name, x in sums.items()})


def _read(
    folder: Path,
    meta: dict[str, Any],
    replica: int,
    wanted: Callable[[str], bool],
    advice: str = "",
) -> dict[str, np.ndarray]:
    """The arrays of one replica whose names are ``wanted``, each from the first file that has it.

    Raises:
      CheckpointError: with ``advice``; a file is damaged.
    """
    found: dict[str, np.ndarray] = {}
    for path in _files(folder, meta, replica):
        with _arrays_of(path, advice) as stored:
            found = {name: stored[name] for name in stored.files if wanted(name)} | found
    return found


@contextlib.contextmanager
def _arrays_of(path: Path, advice: str = "") -> Iterator[Any]:
    """A file of arrays, open; CheckpointError with ``advice`` where it is damaged."""
    try:
        with open(path, "rb") as file:
            stored = np.load(file, allow_pickle=False)
            if isinstance(stored, np.ndarray):  # a .npy file of that name
                raise ValueError("it is no archive of arrays")
            with stored:
                yield stored
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds
        why = shorten(str(error), 100) or type(error).__name__
        raise CheckpointError(f"{path} is damaged ({why}){advice}") from None


def _files(folder: Path, meta: dict[str, Any], replica: int) -> Iterator[Path]:
    return (folder / f"stage-{stage}.replica-{replica}.npz" for stage in range(meta["stages"]))
