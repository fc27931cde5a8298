"""Peers: asynchronous, elastic gossip that waits neither for stragglers nor for dead peers.

A peer is an ordinary training run on the devices of one machine. Random pairs of peers average
their parameters asynchronously, without a barrier or a leader (`decent_jax.peers.protocol`). Ray
starts the peers and detects dead ones. See docs/peers.md.
"""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from decent_jax.actors import Ray
from decent_jax.ground.fields import changeable
from decent_jax.ground.json_files import Json
from decent_jax.train import settings

FORMATS = ("float32", "bfloat16", "int8", "lattice8", "lattice16")


@dataclass(frozen=True)
class Peers:
    """Settings of a run of peers."""

    count: int = changeable(
        0,
        "peers that train; 0: num_replicas; a peer's batch is batch_size / num_replicas",
        at_least=0,
        at_most=2**16,
    )
    max_lag: int = changeable(
        100,
        "steps of common progress after which a silent peer that returns must join as a new one",
        at_least=1,
    )
    restarts: int = changeable(3, "how often a dead peer is replaced", at_least=0)
    exchange_s: float = changeable(
        10.0, "seconds after which a pairwise average times out", above=0
    )
    silent_s: float = changeable(
        5.0, "seconds without a report after which a peer is no longer asked", at_least=0.5
    )
    start_s: float = changeable(300.0, "seconds until the first peer must train", above=0)

    @property
    def beat_s(self) -> float:
        """Seconds between two reports of a peer, which counts as silent only after missing many."""
        return self.silent_s / 25

    @property
    def patience_s(self) -> float:
        """Seconds that a joining peer waits for a state, and within which all peers save and end.

        Joining takes longer than an average, and a leaving peer averages once more.
        """
        return 6 * self.exchange_s


SECTIONS = {"peers": Peers, "ray": Ray}


class Config(settings.Config):
    """The config of a run of peers."""

    peers: Peers
    ray: Ray


def check(config: Config) -> None:
    """Make all checks that are possible before anything starts; see `peer_run.check`."""
    from decent_jax.peers import peer_run

    peer_run.check(config)


def run(config: Config, workdir: str | Path) -> Json:
    """Train with peers in the run directory ``workdir``; see `decent_jax.peers.driver.run`."""
    return _driver(config).run(config, workdir)


def dry_run(config: Config) -> None:
    """Compile and time the step of one peer, and print the size of a message."""
    _driver(config).dry_run(config)


def _driver(config: Config) -> ModuleType:
    """The module that trains, imported once the config is checked and Ray's environment is set."""
    from decent_jax.actors import ray_cluster

    check(config)
    ray_cluster.prepare(config.ray.address)
    from decent_jax.peers import driver

    return driver
