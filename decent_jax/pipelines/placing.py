"""Which cell goes on which machine: Ray's choice, or that of a plan."""

from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from decent_jax.errors import ConfigError
from decent_jax.topology.plan_file import Plan


def strategies(plan: Plan | None, nodes: list[dict[str, Any]], count: int) -> list[Any]:
    """Ray's scheduling strategy of each cell, replica by replica.

    Args:
      plan: its device ``host/k`` is on the Ray node with the name (``ray start --node-name``) or
        the host name ``host``; None: spread over the nodes.
      nodes: as ``ray.nodes()`` lists them.
      count: cells.

    Raises:
      ConfigError: the plan names a machine that is not in the cluster.
    """
    if plan is None:
        return ["SPREAD"] * count
    ids: dict[str, str] = {}
    for node in nodes:
        if node["Alive"]:
            names = (node.get("NodeName", ""), node["NodeManagerHostname"])
            ids |= {name: node["NodeID"] for name in names if name}
    hosts = [device.rpartition("/")[0] or device for device in plan.devices]
    missing = sorted({host for host in hosts if host not in ids})
    if missing:
        raise ConfigError(
            f"cluster.plan is for other machines: it names {missing[0]}, and the Ray cluster has "
            f"{', '.join(sorted(ids))}; plan for these, or leave cluster.plan out"
        )
    return [NodeAffinitySchedulingStrategy(ids[host], soft=False) for host in hosts]
