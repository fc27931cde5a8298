"""Measurement of the links between the nodes of a Ray cluster, by one actor per node."""

import os

import jax
import numpy as np

from decent_jax.actors.handles import Actors, Silent, Unanswered, own_host
from decent_jax.actors.ray_cluster import check_address, leave_launcher, running
from decent_jax.cluster import preflight
from decent_jax.ground.connections import free_port
from decent_jax.ground.errors import ConfigError, PeerLost
from decent_jax.pipelines import Config
from decent_jax.pipelines.worker import join


class Probe:
    """A jax process on one node, like a worker of a run."""

    def address(self) -> str:
        """A free "host:port" for a coordinator on this node."""
        return f"{own_host()}:{free_port()}"

    def measure(
        self, place: tuple[str, int, int], exchange_s: int, hosts: list[str], *size: int
    ) -> tuple[np.ndarray, np.ndarray, str]:
        """See `decent_jax.cluster.preflight.measure`; ``place``: coordinator, count, index."""
        os.environ.setdefault("PJRT_NPROC", "4")
        leave_launcher()
        join(*place, exchange_s)
        devices = [jax.local_devices(process_index=p)[0] for p in range(jax.process_count())]
        return preflight.measure(devices, hosts, *size, quiet=True)


def measure(
    config: Config, num_bytes: int, repeats: int
) -> tuple[np.ndarray, np.ndarray, str, list[str]]:
    """Like `decent_jax.cluster.preflight.measure`, between Ray's nodes; also returns their names.

    Args:
      config: a config whose ``ray.address`` names the cluster.
      num_bytes, repeats: bytes of the long message, and measurements of each link.

    Raises:
      ConfigError: no cluster answers, or it has only one node.
      PeerLost: a node failed meanwhile.
    """
    check_address(config.ray)
    with running(config.ray):
        return measured(config, Actors(), num_bytes, repeats)


def measured(
    config: Config, actors: Actors, num_bytes: int, repeats: int
) -> tuple[np.ndarray, np.ndarray, str, list[str]]:
    """See `measure`; ``actors`` run on the cluster."""
    ray, nodes = config.ray, actors.nodes()
    if len(nodes) < 2:
        why = "must be a Ray cluster of several nodes: one has no link to measure"
        raise ConfigError.about("ray.address", ray.address, why)
    probes = [actors.start(Probe, on=node, cpus=ray.cpus, gpus=ray.gpus) for node in nodes]
    try:
        started = [probe.call("address") for probe in probes]
        coordinator, *_ = [call.result(config.cluster.timeout_s) for call in started]
        hosts = [node.names[0] for node in nodes]
        asked = config.cluster.exchange_s, hosts, num_bytes, repeats
        calls = [
            p.call("measure", (coordinator, len(probes), k), *asked) for k, p in enumerate(probes)
        ]
        links, *_ = [call.result() for call in calls]
    except Silent:  # such as a node with fewer cores than ray.cpus
        raise PeerLost(
            "the links could not be measured: a node did not start a process within "
            f"cluster.timeout_s ({config.cluster.timeout_s} s)"
        ) from None
    except Unanswered as error:
        raise PeerLost(f"the links could not be measured: a node {error}") from None
    finally:
        for probe in probes:
            probe.kill()
    return *links, [f"{host}/0" for host in hosts]
