"""Checkpoints of pipelines: a file for each stage and replica, and a manifest that is written last.

``checkpoints/STEP/stage-S.replica-I.npz`` holds the arrays of one stage of one replica by their
paths in the state, which do not depend on how the model is cut: a run with other stages takes each
array from the file that has it. NumPy checks the checksum of each array when it reads it. A folder
without a ``manifest.json`` is no checkpoint. ``best/STEP`` holds the parameters of the consensus
model in the same way.
"""

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decent_jax.errors import CheckpointError
from decent_jax.json_files import write_json_atomic
from decent_jax.pipelines.stage import Stage
from decent_jax.train.checkpoint import BEST, FOLDER, change_replicas

MANIFEST = "manifest.json"
_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


def write_part(folder: Path, stage: int, replica: int, arrays: dict[str, Any]) -> None:
    """Write the arrays of a stage of a replica, by path."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"stage-{stage}.replica-{replica}.npz", **arrays)


def finish(folder: Path, meta: dict[str, Any], keep: int) -> None:
    """Make a checkpoint of the files in ``folder``; remove all but the newest ``keep``."""
    write_json_atomic(folder / MANIFEST, meta)
    for step in steps(folder.parent)[:-keep]:
        shutil.rmtree(folder.parent / str(step))


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``checkpoints`` or ``best``, the oldest first."""
    return sorted(
        int(path.parent.name)
        for path in folder.glob(f"*/{MANIFEST}")
        if path.parent.name.isdecimal()
    )


def read_meta(folder: Path) -> dict[str, Any]:
    """The manifest of one checkpoint.

    Raises:
      CheckpointError: it cannot be read.
    """
    try:
        meta = json.loads((folder / MANIFEST).read_text())
        if not (isinstance(meta, dict) and {"step", "stages", "num_replicas"} <= meta.keys()):
            raise ValueError("it lacks an entry")
        return meta
    except _DAMAGED as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error})") from None


def check(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and have their ends.

    What is in them is compared with its checksums by the cells that read them.

    Raises:
      CheckpointError: it is not whole.
    """
    meta = read_meta(folder)
    for replica in range(meta["num_replicas"]):
        for path in _files(folder, meta, replica):
            try:
                with np.load(path, allow_pickle=False) as stored:
                    stored.files  # noqa: B018 (reads the directory at the end of the file)
            except _DAMAGED as error:
                raise CheckpointError(f"{path} is damaged ({error})") from None
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
    wanted, found = by_path(like), {}
    for path in _files(folder, meta, replica):
        try:
            with np.load(path, allow_pickle=False) as stored:
                for name in wanted.keys() & set(stored.files) - found.keys():
                    found[name] = stored[name]
        except _DAMAGED as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); remove {folder} to go on from the one before"
            ) from None
    for name, leaf in wanted.items():
        if name not in found or found[name].shape != leaf.shape:
            raise CheckpointError(f"{folder} has no array {name} of the shape {leaf.shape}")
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
    parent = Path(workdir) / (BEST if which == "best" else FOLDER)
    failures = []
    for step in reversed(steps(parent)):
        folder = parent / str(step)
        try:
            meta = read_meta(folder)
            return _mean_of_parameters(folder, meta), meta
        except CheckpointError as error:
            failures.append(str(error))
    if failures:
        raise CheckpointError(f"no checkpoint in {parent} can be read: {'; '.join(failures)}")
    return None


def _mean_of_parameters(folder: Path, meta: dict[str, Any]) -> Any:
    """Parameters, averaged over the replicas, as a nested dict."""
    params: dict[str, Any] = {}
    n = meta["num_replicas"]
    for replica in range(n):
        for path in _files(folder, meta, replica):
            try:
                with np.load(path, allow_pickle=False) as stored:
                    for name in stored.files:
                        if name.startswith(".params"):
                            _add(params, name, stored[name].astype(np.float64) / n)
            except _DAMAGED as error:
                raise CheckpointError(f"{path} is damaged ({error})") from None
    return jax.tree.map(lambda x: x.astype(np.float32), params)


def _add(tree: dict[str, Any], name: str, value: np.ndarray) -> None:
    """Add to the leaf ``.params['h']['0']...`` of a nested dict."""
    *above, last = name.removeprefix(".params['").removesuffix("']").split("']['")
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = tree[last] + value if last in tree else value


def _files(folder: Path, meta: dict[str, Any], replica: int) -> Iterator[Path]:
    return (folder / f"stage-{stage}.replica-{replica}.npz" for stage in range(meta["stages"]))
