"""Copies of the rows of metrics.jsonl for TensorBoard and Weights & Biases.

`decent_jax.train.config` has checked that their packages are there.
"""

import json
import os
import uuid
from pathlib import Path
from typing import Any

from decent_jax.json_files import write_atomic


class TensorBoard:
    """The same scalars as event files in `workdir/tensorboard`."""

    def __init__(self, workdir: Path, start_step: int):
        from tensorboardX import SummaryWriter

        # purge_step hides what an earlier session wrote past the step it is resumed from.
        self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """The same scalars in a Weights & Biases run; a resumed run continues it."""

    def __init__(self, workdir: Path):
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = workdir / "wandb_run_id.txt"
        if not id_file.exists():
            write_atomic(id_file, uuid.uuid4().hex.encode())
        config = workdir / "config.json"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "decent_jax"),
            name=workdir.resolve().name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(workdir),
            config=json.loads(config.read_text()) if config.exists() else None,
        )

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()
