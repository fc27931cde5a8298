"""The links between the nodes of a Ray cluster, measured by an actor on each."""

import os
from typing import Any

import jax
import numpy as np
import ray
from ml_collections import ConfigDict
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from decent_jax.cluster import preflight
from decent_jax.ground.errors import ConfigError, PeerLost
from decent_jax.peers.setup import leave_launcher
from decent_jax.peers.start import check_address, ray_for, start_actor
from decent_jax.pipelines.setup import free_address, join


class _Probe:
    """A process of jax on one node, as the cells of a run are."""

    def address(self) -> str:
        """See `free_address`."""
        return free_address(ray.util.get_node_ip_address())

    def measure(
        self, place: tuple[str, int, int], exchange_s: int, num_bytes: int, repeats: int
    ) -> Any:
        """See `decent_jax.cluster.preflight.measure`; ``place``: coordinator, count, index."""
        os.environ.setdefault("PJRT_NPROC", "4")
        leave_launcher()
        join(*place, exchange_s)
        devices = [jax.local_devices(process_index=p)[0] for p in range(jax.process_count())]
        return preflight.measure(devices, num_bytes, repeats, quiet=True)


def measure(
    config: ConfigDict, num_bytes: int, repeats: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Latency and bandwidth between the nodes, and their names, for a plan of pipelines.

    Args:
      config: its ``pipeline.address`` is that of the cluster.
      num_bytes, repeats: see `decent_jax.cluster.preflight.measure`.

    Raises:
      ConfigError: no cluster answers there, or it has one node.
      PeerLost: a node failed meanwhile.
    """
    pipeline = config.pipeline
    check_address(config, "pipeline")
    with ray_for(config, "pipeline", 0):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) < 2:
            raise ConfigError(
                f"pipeline.address {pipeline.address}: the Ray cluster has one node, so there is "
                "no link to measure"
            )
        nodes.sort(key=_name)
        on = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        probes = [start_actor(_Probe, pipeline, where, 1) for where in on]
        try:
            started = [one.address.remote() for one in probes]
            coordinator, *_ = ray.get(started, timeout=config.cluster.timeout_s)
            own = config.cluster.exchange_s, num_bytes, repeats
            calls = [
                one.measure.remote((coordinator, len(probes), k), *own)
                for k, one in enumerate(probes)
            ]
            latency, bandwidth = ray.get(calls)[0]
        except GetTimeoutError:  # such as of a node that has not got pipeline.cpus
            raise PeerLost(
                "the links could not be measured: a node has started no process within "
                f"cluster.timeout_s ({config.cluster.timeout_s} s)"
            ) from None
        except RayError as error:
            line = (str(error).splitlines() or [""])[-1]
            raise PeerLost(f"the links could not be measured: {line}") from None
        finally:
            for one in probes:
                ray.kill(one)
    return latency, bandwidth, [f"{_name(node)}/0" for node in nodes]


def _name(node: dict[str, Any]) -> str:
    return node.get("NodeName") or node["NodeManagerHostname"]
