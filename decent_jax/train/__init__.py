"""Training: the loop, and what a run needs around it.

>>> import decent_jax
>>> config = decent_jax.train.default_config()
>>> config.steps = 100
>>> summary = decent_jax.run(config, "runs/mine")      # doctest: +SKIP
"""

from pathlib import Path
from typing import Any

from decent_jax.ground import extras

extras.need_system("decent_jax.train", "Linux", "Darwin")
extras.need("train", "ml_collections", "flax", "grain", "matplotlib", "orbax", "tqdm")

from ml_collections import ConfigDict

from decent_jax.cluster.start import check_settings
from decent_jax.ground.command_line import chosen
from decent_jax.ground.errors import (
    CheckpointError,
    ConfigError,
    Interrupted,
    PeerLost,
    TrainingFailed,
)
from decent_jax.train import goodput
from decent_jax.train.config import default_config, trainer_of, validate


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train as ``config`` says, in the directory ``workdir``; resume the run that is there.

    Replicas in step, peers or pipelines: the config decides.

    Returns:
      What ``summary.json`` holds: final and best evaluation, steps, wall time, versions.

    Raises:
      ConfigError: the config, the data or the working directory cannot be used; nothing has been
        compiled or written.
      TrainingFailed: every replica has failed for ``config.max_failing_steps`` steps.
      CheckpointError: no checkpoint can be read, or one could not be written.
      Interrupted: after a checkpoint was saved.
    """
    check_settings()
    with goodput.session():
        return trainer_of(config).run(config, workdir)


def dry_run(config: ConfigDict) -> None:
    """Do what a run does before its second step, and no more: `decent-jax train --check`.

    Prints what the run takes, and times its steps. No working directory is written.

    Raises:
      ConfigError: the run would be refused.
    """
    check_settings()
    trainer_of(config).dry_run(config)


__all__ = [
    "CheckpointError",
    "ConfigError",
    "Interrupted",
    "PeerLost",
    "TrainingFailed",
    "chosen",
    "default_config",
    "dry_run",
    "run",
    "validate",
]
