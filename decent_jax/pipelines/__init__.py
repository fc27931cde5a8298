"""Pipelines: each replica spans several machines, each of which holds a stage of the model.

A run is a grid of D replicas and S stages, with a worker in each cell: a Ray actor with its own
jax. Activations pass from stage to stage of a replica. Each stage gossips or all-reduces with the
same stage of other replicas, as in any other run (`decent_jax.optim`). See docs/pipelines.md.
"""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from decent_jax.actors import Ray
from decent_jax.gossip import codecs
from decent_jax.ground.fields import changeable, setting
from decent_jax.ground.json_files import Json
from decent_jax.train import settings


@dataclass(frozen=True)
class Pipeline:
    """The stages of a run of pipelines."""

    stages: int = changeable(
        2, "stages that each replica is cut into, one Ray actor each", at_least=1
    )
    micro_batches: int = setting(
        1, "micro-batches that a replica's batch is split into", at_least=1
    )
    layers: str = changeable(
        "", 'layers per stage, such as "4,4,3"; empty: balanced by compute time'
    )
    order: str = changeable(
        "1f1b", "order of micro-batches; gpipe: all forward first", choices=("1f1b", "gpipe")
    )
    codec: str = setting(
        "bfloat16", "format of activations and their gradients", choices=tuple(codecs.NAMED)
    )


SECTIONS = {"pipeline": Pipeline, "ray": Ray}


class Config(settings.Config):
    """The config of a run of pipelines."""

    pipeline: Pipeline
    ray: Ray


def check(config: Config) -> None:
    """Check the config before anything starts; see `decent_jax.pipelines.part`."""
    from decent_jax.pipelines import part

    part.check(config)


def run(config: Config, workdir: str | Path) -> Json:
    """Train pipelines in the run directory; see `decent_jax.pipelines.runner.run`."""
    return _runner(config).run(config, workdir)


def dry_run(config: Config) -> None:
    """Start all workers, and time their steps."""
    _runner(config).dry_run(config)


def _runner(config: Config) -> ModuleType:
    """The module that trains, imported once the config is checked and Ray's environment is set."""
    from decent_jax.actors import ray_cluster

    check(config)
    ray_cluster.prepare(config.ray.address)
    from decent_jax.pipelines import runner

    return runner
