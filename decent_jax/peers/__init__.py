"""Peers: asynchronous, elastic gossip. Nobody waits for the slow, the dead or the far.

A peer is an ordinary training run on the devices of one machine. Peers meet in random pairs and
average copies, without a barrier, a leader or a common step (`decent_jax.peers.rule`); Ray starts
them, carries the copies and says who died. See docs/peers.md.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from decent_jax.peers.fields import FIELDS as FIELDS


def check(config: ConfigDict) -> None:
    """Check all that can be checked before anything starts; see `decent_jax.peers.setup.check`."""
    from decent_jax.peers import setup

    setup.check(config)


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train with peers, in the folder ``workdir``; see `decent_jax.peers.driver.run`."""
    from decent_jax.actors import ray_cluster

    check(config)
    ray_cluster.prepare(config.peers.address)
    from decent_jax.peers import driver

    return driver.run(config, workdir)


def dry_run(config: ConfigDict) -> None:
    """Compile and time the step of one peer, and say what a meeting sends."""
    from decent_jax.actors import ray_cluster

    check(config)
    ray_cluster.prepare(config.peers.address)
    from decent_jax.peers import driver

    driver.dry_run(config)
