"""Training: the loop, and what a run needs around it.

>>> from decent_jax import train
>>> config = train.default_config()
>>> config.steps = 100
>>> summary = train.run(config, "runs/mine")      # doctest: +SKIP
"""

from decent_jax.train.config import ConfigError, default_config, validate
from decent_jax.train.errors import CheckpointError, Interrupted, TrainingFailed


def run(config, workdir):
    """Train as ``config`` says, in the folder ``workdir``; see `decent_jax.train.loop.run`."""
    from decent_jax.train import loop  # imports jax, which a mistake in a flag need not wait for

    return loop.run(config, workdir)


__all__ = [
    "CheckpointError",
    "ConfigError",
    "Interrupted",
    "TrainingFailed",
    "default_config",
    "run",
    "validate",
]
