"""Checkpoints whose parts the cells write, a stage each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from decent_jax.ground.errors import CheckpointError, ConfigError, TrainingFailed
from decent_jax.pipelines.cells import Cells
from decent_jax.train import checkpoint as folders
from decent_jax.train.checkpoint import BEST, FOLDER, STAGE, STATE


class CellCheckpoints:
    """As `decent_jax.train.checkpoint.Checkpointer`, for the process of `train.py`.

    Args:
      workdir: of the run.
      cells: they write.
      keep: checkpoints.

    Raises:
      ConfigError: the checkpoints in ``workdir`` are of a run without stages.
    """

    def __init__(self, workdir: Path, cells: Cells, keep: int):
        self.workdir, self._cells, self._keep = workdir, cells, keep
        self._writing: tuple[list[Any], Path, dict[str, Any], int] | None = None
        self._saved = -1
        if any((workdir / FOLDER).glob(f"*/{STATE}")):
            raise ConfigError(
                f"{workdir} holds a run without stages; take another --workdir, or set "
                "pipeline.stages to 0",
                field="pipeline.stages",
            )
        folders.clear(workdir)

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, the oldest first."""
        return folders.steps(self.workdir / FOLDER)

    def newest(self, say: Callable[[str], object]) -> dict[str, Any]:
        """The meta of the newest checkpoint that all cells can read, and now have; or {}."""

        def restore(checkpoint: Path, meta: dict[str, Any]) -> None:
            for why in self._cells.all("restore", checkpoint, meta):
                if why:
                    raise CheckpointError(why)

        found = folders.first_whole(self.workdir / FOLDER, restore, say)
        self._saved = found[1]["step"] if found else -1
        return found[1] if found else {}

    def drop_best_after(self, step: int) -> bool:
        """Forget best models of steps yet to be reached by a resumed run; whether one is left."""
        return folders.drop_best_after(self.workdir, step)

    def save(self, step: int, state: None, meta: dict[str, Any]) -> None:
        """Copy the state of all cells, and let them write it while training goes on."""
        if step != self._saved:
            self._saved = step
            self._save("save", FOLDER, step, meta, self._keep)

    def save_best(self, step: int, params: None, model_state: None, meta: dict[str, Any]) -> None:
        """Keep their consensus model as the best so far, likewise."""
        self._save("save_model", BEST, step, meta, keep=1)

    def check(self) -> None:
        """A checkpoint counts, or fails, as soon as it is written."""
        if self._writing is not None and self._cells.over(self._writing[0]):
            self.wait()

    def wait(self) -> None:
        """Wait until everything saved so far is on disk; CheckpointError where it is not."""
        if self._writing is None:
            return
        (calls, draft, meta, keep), self._writing = self._writing, None
        try:
            self._cells.wait(calls)
        except TrainingFailed as error:
            raise CheckpointError(f"a checkpoint could not be written: {error}") from None
        folders.finish(draft, meta, keep)

    def close(self) -> None:
        """As `wait`."""
        self.wait()

    def _save(self, how: str, name: str, step: int, meta: dict[str, Any], keep: int) -> None:
        self.wait()
        draft = folders.draft_of(self.workdir / name, step)
        sums = self._cells.all(how, draft)
        of_cells = zip(self._cells.cells, sums, strict=True)
        parts = {f"{STAGE}{cell.stage}": own for cell, own in of_cells if cell.replica == 0}
        meta = meta | {"step": step, "checksums": parts}
        self._writing = self._cells.begin("saved"), draft, meta, keep
