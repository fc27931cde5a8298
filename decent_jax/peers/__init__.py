"""Peers: asynchronous, elastic gossip. Nobody waits for the slow, the dead or the far.

A peer is an ordinary training run on the devices of one machine. Peers meet in random pairs and
average copies, without a barrier, a leader or a common step (`decent_jax.peers.rule`); Ray starts
them, carries the copies and says who died. See docs/peers.md.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train with peers, in the folder ``workdir``; see `decent_jax.peers.driver.run`."""
    from decent_jax.peers import setup

    setup.check(config)
    setup.prepare_ray()
    from decent_jax.peers import driver

    return driver.run(config, workdir)
