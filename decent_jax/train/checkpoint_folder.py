"""The folders of checkpoints: how one gets its name, loses it, and is found again.

``checkpoints/STEP`` and ``best/STEP`` appear by a rename once all that is in them is on the disk.
They hold one folder of arrays (``state/``, or ``stage-S/`` for each stage of a pipeline, see
`decent_jax.train.stored`) and ``meta.json``: step, replicas, config, position, the identity of the
run, and a checksum of every array. A name that begins with a dot belongs to no checkpoint: it is
being written, or removed, and the next start of the run clears it away.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from decent_jax.ground.errors import CheckpointError, DataError
from decent_jax.ground.json_files import read_json, write_atomic, write_json_atomic

FOLDER, BEST = "checkpoints", "best"
META, STATE, STAGE = "meta.json", "state", "stage-"
_RUN = "run.json"  # in FOLDER: the identity of the run
_UNFINISHED = re.compile(r"\.\d+\.(draft|old)")


# --- Written --------------------------------------------------------------------------------------


def draft_of(folder: Path, step: int) -> Path:
    """The folder in which a checkpoint is written, until `finish` gives it its name."""
    return folder / f".{step}.draft"


def finish(draft: Path, meta: dict[str, Any], keep: int) -> None:
    """Make a checkpoint of a draft whose parts are on the disk; keep the newest ``keep``.

    Args:
      draft: see `draft_of`.
      meta: its entries, with the step and, under "checksums", those of each part.
      keep: how many of its folder.
    """
    meta = meta | {"run": run_of(draft.parent.parent, make=True)}
    text = json.dumps(meta | {"checksum": _checksum_of_meta(meta)}, indent=1)
    write_atomic(draft / META, text.encode())
    final = draft.with_name(str(meta["step"]))
    remove(final)
    os.replace(draft, final)
    there = steps(draft.parent)  # those of later steps are of a session that was killed
    kept = [step for step in there if step <= meta["step"]][-keep:]
    for step in [step for step in there if step not in kept]:
        remove(draft.with_name(str(step)))


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, of which nobody reads a half."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        checkpoint.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def clear(workdir: Path) -> None:
    """Remove what a session that was killed had not finished."""
    for path in [path for name in (FOLDER, BEST) for path in (workdir / name).glob(".*")]:
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def drop_best_after(workdir: Path, step: int) -> bool:
    """See `Checkpointer.drop_best_after`."""
    found = steps(workdir / BEST)
    for later in [s for s in found if s > step]:
        if jax.process_index() == 0:
            remove(workdir / BEST / str(later))
    return any(s <= step for s in found)


# --- Read -----------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """Steps of the finished checkpoints in ``checkpoints`` or ``best``, the oldest first."""
    names = (path.name for path in folder.glob("*"))
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def what_next(workdir: Path) -> str:
    """Words about what the same command would do, after a failure."""
    there = steps(workdir / FOLDER)
    if there:
        return f"the same command goes on from the checkpoint of step {there[-1]}"
    return "no checkpoint has been written, the same command begins anew"


def run_of(workdir: Path, make: bool = False) -> str | None:
    """The identity of the run in a folder; None where nobody has made one."""
    path = workdir / FOLDER / _RUN
    try:
        return str(read_json(path)["id"])
    except (OSError, DataError, KeyError, TypeError):
        if not make:
            return None
    identity = secrets.token_hex(8)
    path.parent.mkdir(exist_ok=True)
    write_json_atomic(path, {"format": "decent_jax.run/1", "id": identity})
    return identity


def read_meta(checkpoint: Path, run: str | None = None) -> dict[str, Any]:
    """The meta of one checkpoint.

    Raises:
      OSError, DataError, ValueError: it cannot be read; it is damaged, or of another step or
        another ``run``.
    """
    meta = read_json(checkpoint / META)
    if not isinstance(meta, dict) or _checksum_of_meta(meta) != meta.get("checksum"):
        raise ValueError("its meta does not match the checksum taken when it was saved")
    if meta["step"] != int(checkpoint.name):
        raise ValueError("its meta is of another step")
    if run is not None and meta["run"] != run:
        raise ValueError("it is a checkpoint of another run")
    return meta


def first_whole(
    folder: Path,
    read: Callable[[Path, dict], Any],
    say: Callable[[str], object],
    only: int | None = None,
) -> tuple[Any, dict] | None:
    """What ``read`` makes of the newest checkpoint that it can read, and its meta; None: none.

    Args:
      folder: ``checkpoints`` or ``best`` of a run.
      read: of the folder of a checkpoint and its meta.
      say: called with a sentence about each that is damaged.
      only: the one step that will do; None: any.

    Raises:
      CheckpointError: it can read none of those that are there.
    """
    failures, run = [], run_of(folder.parent)
    for step in [s for s in reversed(steps(folder)) if only in (None, s)]:
        try:
            meta = read_meta(folder / str(step), run)
            return read(folder / str(step), meta), meta
        except Exception as error:  # orbax and tensorstore raise many kinds
            failures.append(f"step {step} ({reason_of(error)})")
            say(f"the checkpoint of step {step} is damaged: {reason_of(error)}")
    if failures:
        raise CheckpointError(f"no checkpoint in {folder} can be read: {'; '.join(failures)}")
    return None


def _checksum_of_meta(meta: dict) -> int:
    own = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(own, sort_keys=True).encode())


def reason_of(error: BaseException) -> str:
    """The cause of an error of orbax, in short."""
    while error.__cause__ is not None:  # orbax and tensorstore say it in several layers
        error = error.__cause__
    text = (str(error).splitlines() or [""])[0]
    text = text.partition(" [tensorstore_spec=")[0]  # a page of JSON behind the cause
    text = f"{text[:90]} ... {text[-90:]}" if len(text) > 185 else text  # the cause is at the end
    ours = isinstance(error, (CheckpointError, DataError))
    return text if ours or type(error) is ValueError else f"{type(error).__name__}: {text}"
