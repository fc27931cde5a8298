"""Checkpoints on disk and in memory, and the executables that a restarted process needs."""

from dataclasses import dataclass

from decent_jax.ground.fields import changeable


@dataclass(frozen=True)
class Checkpoint:
    """When checkpoints are written to disk, and how many are kept."""

    every: int | str = changeable(1000, "steps between checkpoints; 0: never", duration=True)
    every_minutes: float = changeable(10.0, "minutes between checkpoints; 0: never", at_least=0)
    keep: int = changeable(2, "newest checkpoints to keep, besides the best model", at_least=1)


@dataclass(frozen=True)
class Recovery:
    """In-memory checkpoints, kept in case a process is lost; see docs/clusters.md."""

    every: int = changeable(
        -1,
        "steps between in-memory checkpoints; 0: none; -1: if supervised, to cost 1% of the time",
        at_least=-1,
    )
    mirror: bool = changeable(
        False, "whether each process also mirrors the in-memory checkpoint of another"
    )
