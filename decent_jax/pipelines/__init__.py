"""Pipelines: replicas of several machines, each of which holds a stage of the model.

A run is a grid of D replicas and S stages. Each cell is a Ray actor with its own jax. Activations
travel along a pipeline, from stage to stage; between pipelines, equal stages gossip or all-reduce
as the replicas of any other run do (`decent_jax.optim`). See docs/pipelines.md.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from decent_jax.pipelines.fields import FIELDS as FIELDS


def check(config: ConfigDict) -> None:
    """Check all that can be checked before anything starts; see `decent_jax.pipelines.part`."""
    from decent_jax.pipelines import part

    part.check(config)


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train pipelines, in the folder ``workdir``; see `decent_jax.pipelines.runner.run`."""
    from decent_jax.actors import ray_cluster

    check(config)
    ray_cluster.prepare(config.pipeline.address)
    from decent_jax.pipelines import runner

    return runner.run(config, workdir)


def dry_run(config: ConfigDict) -> None:
    """Start the cells of all stages, and time their steps."""
    from decent_jax.actors import ray_cluster

    check(config)
    ray_cluster.prepare(config.pipeline.address)
    from decent_jax.pipelines import runner

    runner.dry_run(config)
