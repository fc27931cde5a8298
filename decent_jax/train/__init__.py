"""Training: the loop and everything around it.

>>> import decent_jax
>>> config = decent_jax.train.default_config()
>>> config.steps = 100
>>> summary = decent_jax.run(config, "runs/mine")      # doctest: +SKIP
"""

from pathlib import Path

from decent_jax.ground import extras
from decent_jax.ground.json_files import Json

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
from decent_jax.monitor import goodput
from decent_jax.train.config import default_config, parse, trainer_of, validate


def run(config: ConfigDict, workdir: str | Path) -> Json:
    """Train a config in the run directory ``workdir``, or resume the run that is already there.

    ``config.trainer`` chooses between synchronous replicas, peers and pipelines.

    Returns:
      The contents of ``summary.json``: final and best evaluation, steps, wall-clock time, versions.

    Raises:
      ConfigError: the config, the data or the run directory cannot be used; nothing has been
        compiled or written.
      TrainingFailed: no update was finite in 20 consecutive steps, or a record, peer or worker
        failed.
      CheckpointError: no checkpoint can be read, or one could not be written.
      PeerLost: another process of the run was lost.
      Interrupted: a signal stopped the run, after a checkpoint was saved.
    """
    check_settings()
    with goodput.session():
        parsed = parse(config)
        return trainer_of(parsed).run(parsed, workdir)


def dry_run(config: ConfigDict) -> None:
    """Compile and time a few steps, and print the cost of a run: `decent-jax train --check`.

    No run directory is left behind.

    Raises:
      ConfigError: the run would be refused.
    """
    check_settings()
    parsed = parse(config)
    trainer_of(parsed).dry_run(parsed)


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
