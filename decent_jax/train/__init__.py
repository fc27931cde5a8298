"""Training: the loop, and what a run needs around it.

>>> from decent_jax import train
>>> config = train.default_config()
>>> config.steps = 100
>>> summary = train.run(config, "runs/mine")      # doctest: +SKIP
"""

from decent_jax.ground import extras

extras.need("train", "ml_collections", "flax", "grain", "matplotlib", "orbax", "tqdm")

from decent_jax.ground.config_files import chosen
from decent_jax.ground.errors import (
    CheckpointError,
    ConfigError,
    Interrupted,
    PeerLost,
    TrainingFailed,
)
from decent_jax.train.config import default_config, validate


def run(config, workdir):
    """Train as ``config`` says, in the folder ``workdir``; see `decent_jax.train.loop.run`."""
    from decent_jax.train import loop  # imports jax, for which a wrong flag need not wait

    return loop.run(config, workdir)


def check(config):
    """Say what a run of ``config`` takes, and train nothing; see `decent_jax.train.loop.check`."""
    from decent_jax.train import loop

    loop.check(config)


__all__ = [
    "CheckpointError",
    "ConfigError",
    "Interrupted",
    "PeerLost",
    "TrainingFailed",
    "check",
    "chosen",
    "default_config",
    "run",
    "validate",
]
