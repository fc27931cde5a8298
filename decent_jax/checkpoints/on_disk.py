"""The checkpoints of a run on disk: writing, retention, validation and restoring.

``checkpoints/STEP`` and ``best/STEP`` are renamed into place once their contents are on disk. Each
holds a folder of arrays (``state/``, or ``stage-S/`` for each stage of a pipeline, see
`decent_jax.checkpoints.arrays`) and ``meta.json``: step, replicas, config, data position, the
identity of the run, and a checksum of every array. A folder whose name starts with a dot is not a
checkpoint: it is being written or removed, and the next start of the run deletes it.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import jax
import orbax.checkpoint as ocp

from decent_jax.checkpoints import arrays
from decent_jax.checkpoints.arrays import STATE
from decent_jax.cluster import start as cluster
from decent_jax.cluster import watch
from decent_jax.ground.errors import CheckpointError, DataError
from decent_jax.ground.json_files import Json, read_json, write_atomic, write_json_atomic
from decent_jax.ground.run_folder import LOCK
from decent_jax.replicas import Placement, TrainState

Restored = TypeVar("Restored")

log = logging.getLogger(__name__)

FOLDER, BEST = "checkpoints", "best"
META = "meta.json"
_RUN = "run.json"  # in FOLDER: the identity of the run
_UNFINISHED = re.compile(r"\.\d+\.(draft|old)")


# --- Save and restore -----------------------------------------------------------------------------


def check_there(path: Path) -> None:
    """Raise CheckpointError if nothing can be written to a run's directory.

    If the directory has been moved, orbax would create a new one. Without permission, orbax's
    threads would keep the process alive for minutes after it has failed.
    """
    if not (path / LOCK).exists():
        raise CheckpointError(
            f"a checkpoint could not be written to {path}: the folder is gone; put it back, and "
            "the same command continues"
        )
    for folder in (path, path / FOLDER, path / BEST):
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(
                f"a checkpoint could not be written to {folder}: it is not a folder; remove it, "
                "and the same command continues"
            )
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise CheckpointError(
                f"a checkpoint could not be written to {folder}: permission denied; grant it, "
                "and the same command continues"
            )


class Checkpointer:
    """Saves and restores the state of a run in ``workdir``; all processes make the same calls."""

    def __init__(self, workdir: str | Path, keep: int):
        self.workdir, self._keep = Path(workdir).absolute(), keep
        if jax.process_index() == 0:
            clear(self.workdir)
        self._writer = ocp.StandardCheckpointer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None
        self._saved = -1  # step of the last checkpoint; on disk, processes may see different ones

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint visible to all processes, the oldest first."""
        return sorted(set.intersection(*map(set, watch.gather(steps(self.workdir / FOLDER)))))

    def save(self, step: int, state: TrainState, meta: Json) -> None:
        """Copy the state to the host, and write it in the background."""
        if step != self._saved:
            self._saved = step
            self._save(self.workdir / FOLDER, step, arrays.tree_of(state), meta, self._keep)

    def save_best(self, step: int, params: object, model_state: object, meta: Json) -> None:
        """Save the consensus model (no replica dimension) as the best so far, in the background."""
        model = {"params": params, "model_state": model_state}
        self._save(self.workdir / BEST, step, model, meta, keep=1)

    def restore_newest(
        self,
        like: TrainState,
        placement: Placement,
        accum_steps: int,
        say: Callable[[str], object] = log.warning,
    ) -> tuple[TrainState, Json] | None:
        """The state and the meta of the newest intact checkpoint; None if there is no checkpoint.

        Args:
          like: shapes and dtypes of the state (n, ...), from `jax.eval_shape`.
          placement: the replicas and their devices. If the checkpoint has another number of
            replicas, all start from the mean of its replicas (parameters, moments and moving
            average), and a partial window of accumulated gradients is dropped.
          accum_steps: the window of accumulated Adam, in steps.
          say: callback for messages to the user.

        Raises:
          CheckpointError: there are checkpoints, but none can be read.
        """
        restored = first_whole(
            self.workdir / FOLDER,
            lambda folder, meta: arrays.restore(folder, meta, like, placement, accum_steps),
            say,
            self.steps(),
        )
        if restored is not None:
            self._saved = restored[1]["step"]
            if restored[1]["num_replicas"] != placement.num_replicas:
                say(change_of(restored[1]["num_replicas"], placement.num_replicas))
        return restored

    def check(self) -> None:
        """Raise CheckpointError if the last checkpoint could not be written."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until everything saved so far is on disk; raises CheckpointError if that fails."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with _writing(self.workdir):
                writing.result()

    def close(self) -> None:
        """Wait as `wait` does, then stop the threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._writer.close()

    def _save(self, folder: Path, step: int, tree: object, meta: Json, keep: int) -> None:
        self.wait()
        draft = draft_of(folder, step)
        with _writing(self.workdir):
            sums = arrays.begin(self._writer, draft, STATE, tree)
        meta = meta | {"step": step, "checksums": {STATE: sums}}
        self._writing = self._thread.submit(self._finish, draft, meta, keep)

    def _finish(self, draft: Path, meta: Json, keep: int) -> None:
        self._writer.wait_until_finished()  # for all processes
        if jax.process_index() == 0:
            finish(draft, meta, keep)


def change_of(before: int, now: int) -> str:
    """The log line for a checkpoint of ``before`` replicas that a run of ``now`` restores."""
    return (
        f"the checkpoint has {before} replicas and this run {now}: every replica continues from "
        "the mean of the old ones (parameters and moments); an unfinished window of gradients is "
        "dropped"
    )


@contextlib.contextmanager
def _writing(workdir: Path):
    """Turn a writer's error, such as a full disk, into a CheckpointError of one sentence."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds
        why = f"a checkpoint could not be written to {workdir}: {reason_of(error)}"
        raise CheckpointError(why) from error


# --- Folders --------------------------------------------------------------------------------------


def draft_of(folder: Path, step: int) -> Path:
    """The folder in which a checkpoint is written, until `finish` gives it its name."""
    return folder / f".{step}.draft"


def finish(draft: Path, meta: Json, keep: int) -> None:
    """Turn a draft whose parts are on disk into a checkpoint; keep the newest ``keep``.

    Args:
      draft: see `draft_of`.
      meta: its metadata, with the step, and the checksums of each part under "checksums".
      keep: number of checkpoints to keep in the folder of the draft.
    """
    meta = meta | {"run": run_of(draft.parent.parent, make=True)}
    text = json.dumps(meta | {"checksum": _checksum_of_meta(meta)}, indent=1)
    write_atomic(draft / META, text.encode())
    final = draft.with_name(str(meta["step"]))
    remove(final)
    os.replace(draft, final)
    there = steps(draft.parent)  # those of later steps are from a session that was killed
    stay = [step for step in there if step <= meta["step"]][-keep:]
    for step in [step for step in there if step not in stay]:
        remove(draft.with_name(str(step)))


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint atomically (rename, then delete)."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        checkpoint.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def clear(workdir: Path) -> None:
    """Remove the unfinished files of a killed session."""
    for path in [path for name in (FOLDER, BEST) for path in (workdir / name).glob(".*")]:
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def drop_best_after(workdir: Path, step: int) -> bool:
    """Remove best models of steps after ``step``; returns whether any model is left."""
    saved = steps(workdir / BEST)
    for later in [s for s in saved if s > step]:
        if jax.process_index() == 0:
            remove(workdir / BEST / str(later))
    return any(s <= step for s in saved)


# --- Read -----------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """Steps of the finished checkpoints in ``checkpoints`` or ``best``, the oldest first."""
    names = (path.name for path in folder.glob("*"))
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def what_next(workdir: Path) -> str:
    """A clause on what the same command would do after a failure."""
    there = steps(workdir / FOLDER)
    if there:
        return f"the same command resumes from the checkpoint of step {there[-1]}"
    return "no checkpoint has been written, so the same command starts over"


def run_of(workdir: Path, make: bool = False) -> str | None:
    """The identity of the run in a folder; None if it has none and ``make`` is False."""
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


def read_meta(checkpoint: Path, run: str | None = None) -> Json:
    """The metadata of one checkpoint.

    Raises:
      OSError, DataError, ValueError: it cannot be read, is damaged, or belongs to another step or
        another ``run``.
    """
    meta = read_json(checkpoint / META)
    if not isinstance(meta, dict) or _checksum_of_meta(meta) != meta.get("checksum"):
        raise ValueError("its meta does not match the checksum taken when it was saved")
    if meta["step"] != int(checkpoint.name):
        raise ValueError("its meta belongs to another step")
    if run is not None and meta["run"] != run:
        raise ValueError("it is a checkpoint of another run")
    return meta


def first_whole(
    folder: Path,
    read: Callable[[Path, Json], Restored],
    say: Callable[[str], object],
    among: Collection[int] | None = None,
) -> tuple[Restored, Json] | None:
    """The result of ``read`` for the newest readable checkpoint, and its meta; None if none exists.

    All processes of a run call this together and choose the same checkpoint.

    Args:
      folder: ``checkpoints`` or ``best`` of a run.
      read: function that reads a checkpoint, given its folder and its meta.
      say: callback for a message about each damaged checkpoint.
      among: steps to consider; None: all.

    Raises:
      CheckpointError: there are checkpoints, but none can be read.
    """
    failures, run = [], run_of(folder.parent)
    for step in [s for s in reversed(steps(folder)) if among is None or s in among]:
        try:
            meta, failure = {}, None
            try:
                meta = read_meta(folder / str(step), run)
            except (OSError, DataError, ValueError, LookupError) as error:
                failure = error
            if cluster.any_process(failure is not None):  # the others would restore a different one
                raise failure or ValueError("another process could not read it")
            return read(folder / str(step), meta), meta
        except Exception as error:  # orbax and tensorstore raise many kinds
            failures.append(f"step {step} ({reason_of(error)})")
            say(f"the checkpoint of step {step} is damaged: {reason_of(error)}")
    if failures:
        raise CheckpointError(f"no checkpoint in {folder} can be read: {'; '.join(failures)}")
    return None


def _checksum_of_meta(meta: Json) -> int:
    own = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(own, sort_keys=True).encode())


def reason_of(error: BaseException) -> str:
    """The cause of an orbax error, in one short line."""
    while error.__cause__ is not None:  # orbax and tensorstore nest it in several layers
        error = error.__cause__
    text = (str(error).splitlines() or [""])[0]
    text = text.partition(" [tensorstore_spec=")[0]  # a page of JSON follows the cause
    text = f"{text[:90]} ... {text[-90:]}" if len(text) > 185 else text  # the cause is at the end
    ours = isinstance(error, (CheckpointError, DataError))
    return text if ours or type(error) is ValueError else f"{type(error).__name__}: {text}"
