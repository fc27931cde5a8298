"""The checkpoints of a run: saved in the background, the newest good one restored, models read.

`decent_jax.train.checkpoint_folder` says what is on the disk.
"""

import contextlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from decent_jax import replicas
from decent_jax.ground.errors import CheckpointError, ConfigError
from decent_jax.replicas import Placement
from decent_jax.train import checkpoint_folder as folders
from decent_jax.train import stored
from decent_jax.train.checkpoint_folder import BEST, FOLDER, STAGE, STATE
from decent_jax.train.step import TrainState

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores the state of a run in ``workdir``; all processes call it alike."""

    def __init__(self, workdir: str | Path, keep: int):
        self.workdir, self._keep = Path(workdir).absolute(), keep
        if jax.process_index() == 0:
            folders.clear(self.workdir)
        self._writer = ocp.StandardCheckpointer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None
        self._saved = -1  # the last step; not asked of the disk, where processes see it change

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, the oldest first."""
        return folders.steps(self.workdir / FOLDER)

    def save(self, step: int, state: TrainState, meta: dict) -> None:
        """Copy the state to the host, and write it in the background."""
        if step != self._saved:
            self._saved = step
            self._save(self.workdir / FOLDER, step, stored.tree_of(state), meta, self._keep)

    def save_best(self, step: int, params: Any, model_state: Any, meta: dict) -> None:
        """Keep the consensus model (no replica dimension) as the best so far, likewise."""
        model = {"params": params, "model_state": model_state}
        self._save(self.workdir / BEST, step, model, meta, keep=1)

    def drop_best_after(self, step: int) -> bool:
        """Forget best models of steps yet to be reached by a resumed run; whether one is left."""
        return folders.drop_best_after(self.workdir, step)

    def restore_newest(
        self, like: TrainState, placement: Placement, accum_steps: int, say=log.warning
    ) -> tuple[TrainState, dict] | None:
        """The newest checkpoint that is whole, with its meta; None where there is none.

        Args:
          like: shapes and dtypes of the state (n, ...), as `jax.eval_shape` gives them.
          placement: where it goes. A checkpoint of another number of replicas becomes the mean of
            its replicas: parameters, moments and moving average; a window of accumulated
            gradients that had begun is dropped.
          accum_steps: the window of accumulated Adam.
          say: called with a sentence for everything the user should know.

        Raises:
          CheckpointError: there are checkpoints, and none can be read.
          ConfigError: they are those of a pipeline.
        """
        if any((self.workdir / FOLDER).glob(f"*/{STAGE}0")):
            raise ConfigError(
                f"{self.workdir} holds a run of several stages; take another --workdir, or set "
                "pipeline.stages",
                field="pipeline.stages",
                value=0,
            )
        found = folders.first_whole(
            self.workdir / FOLDER,
            lambda folder, meta: stored.restore(folder, meta, like, placement, accum_steps),
            say,
        )
        if found is not None:
            self._saved = found[1]["step"]
            if found[1]["num_replicas"] != placement.num_replicas:
                say(change_of(found[1]["num_replicas"], placement.num_replicas))
        return found

    def check(self) -> None:
        """Raises CheckpointError where the last checkpoint could not be written."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until everything saved so far is on disk; CheckpointError where it is not."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with _writing(self.workdir):
                writing.result()

    def close(self) -> None:
        """As `wait`; and end the threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._writer.close()

    def _save(self, folder: Path, step: int, tree: Any, meta: dict, keep: int) -> None:
        self.wait()
        draft = folders.draft_of(folder, step)
        with _writing(self.workdir):
            sums = stored.begin(self._writer, draft, STATE, tree)
        meta = meta | {"step": step, "checksums": {STATE: sums}}
        self._writing = self._thread.submit(self._finish, draft, meta, keep)

    def _finish(self, draft: Path, meta: dict, keep: int) -> None:
        self._writer.wait_until_finished()  # for all processes
        if jax.process_index() == 0:
            folders.finish(draft, meta, keep)


def change_of(before: int, now: int) -> str:
    """What `change_replicas` does, for the log."""
    return (
        f"the checkpoint has {before} replicas and this run {now}: every replica continues from "
        "the mean of the old ones (parameters and moments); an unfinished window of gradients is "
        "dropped"
    )


@contextlib.contextmanager
def _writing(workdir: Path):
    """One sentence about an error of a writer, such as a full disk."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # orbax and tensorstore raise many kinds
        why = f"a checkpoint could not be written to {workdir}: {folders.reason_of(error)}"
        raise CheckpointError(why) from error


def restore_model(workdir: str | Path, which: str) -> tuple[Any, Any, dict]:
    """One model of a run, for export and sampling: host arrays without the replica dimension.

    Args:
      workdir: of the run.
      which: ``"best"``, the consensus model with the lowest validation loss, or ``"last"``, the
        consensus of the newest checkpoint that is whole.

    Returns:
      (params, model_state, meta); ``meta["step"]`` says of which step.

    Raises:
      CheckpointError: there is none, or none that can be read.
    """

    def consensus(folder, meta):
        *stacked, weights = stored.read(folder, meta, "params", "model_state", "weights")
        return jax.device_get(jax.jit(replicas.consensus_mean)(stacked, weights))

    if which == "best":
        return _read(workdir, BEST, lambda *of: stored.read(*of, "params", "model_state"))
    return _read(workdir, FOLDER, consensus)


def restore_replicas(workdir: str | Path, step: int | None) -> tuple[Any, Any, dict]:
    """As `restore_model`, of every replica (n, ...): of ``step``, or None, the newest whole one."""
    return _read(workdir, FOLDER, lambda *of: stored.read(*of, "params", "model_state"), step)


def _read(workdir, name, read, step=None) -> tuple[Any, Any, dict]:
    folder = Path(workdir).absolute() / name
    found = folders.first_whole(folder, read, log.warning, step)
    if found is None:
        of = "" if step is None else f" of step {step}"
        raise CheckpointError(
            f"{folder} holds no checkpoint{of}; train first, or name another --workdir"
        )
    (params, model_state), meta = found
    return params, model_state, meta
