"""Training: the loop, and what a run needs around it.

>>> from decent_jax import train
>>> config = train.default_config()
>>> config.steps = 100
>>> summary = train.run(config, "runs/mine")      # doctest: +SKIP
"""

from decent_jax.train.config import ConfigError, default_config, validate
from decent_jax.train.errors import CheckpointError, Interrupted, PeerLost, TrainingFailed


def run(config, workdir):
    """Train as ``config`` says, in the folder ``workdir``; see `decent_jax.train.loop.run`."""
    from decent_jax.train import cluster, loop  # import jax, for which a wrong flag need not wait

    with cluster.lost_peers_told():
        return loop.run(config, workdir)


__all__ = [
    "CheckpointError",
    "ConfigError",
    "Interrupted",
    "PeerLost",
    "TrainingFailed",
    "default_config",
    "run",
    "validate",
]
