"""Which replicas share a host, and the schedule that suits this: ``schedule=auto``.

Links between hosts are slow, those inside a host are fast. Where every host holds several replicas,
all equally many, averaging inside the hosts first (`WITHIN_HOSTS`) sends one model per host and
round; `ONE_HOST` sends up to as many models as the host has replicas. The planner, which knows the
links, chooses the same where a host can send about one model per step (tests/test_hosts.py). On
slower links it leaves out steps, on faster ones it also sends more.
"""

import contextlib
import itertools
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from decent_jax.cluster import start as cluster
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import format_bytes
from decent_jax.replicas import Placement
from decent_jax.topology import Schedule
from decent_jax.train import algorithm
from decent_jax.train.config import AUTO, ONE_HOST, changed, load_saved, make_schedule

WITHIN_HOSTS = "hierarchical(complete, one_peer_exp)"


def replicas_per_host(placement: Placement) -> int:
    """Replicas on each host, if all hosts hold equally many, one after the other; else 1.

    All processes must call it at the same point.
    """
    names = cluster.hosts()
    first_devices = placement.mesh.devices.reshape(-1, placement.fsdp)[:, 0]
    on = [names[device.process_index] for device in first_devices for _ in range(placement.block)]
    sizes = {len(list(same)) for _, same in itertools.groupby(on)}
    return sizes.pop() if len(sizes) == 1 else 1


def settle(config: ConfigDict, per_host: int, folder: str | Path) -> ConfigDict:
    """The config with the schedule that ``auto`` stands for, and its ``local_size``.

    It is the one of the run in ``folder``, if that run has as many replicas; else the choice for
    hosts of ``per_host`` replicas, or `ONE_HOST` if the method or a sharded replica refuses that.
    """
    with contextlib.suppress(ConfigError):  # without a run; a damaged one is refused later
        saved = load_saved(folder)
        if saved.num_replicas == config.num_replicas and saved.schedule != AUTO:
            return changed(config, schedule=saved.schedule, local_size=saved.local_size)
    return suggestion(config, per_host) or changed(config, schedule=ONE_HOST)


def suggestion(config: ConfigDict, per_host: int) -> ConfigDict | None:
    """With `WITHIN_HOSTS`, where several hosts hold several replicas and the method takes it."""
    n = config.num_replicas
    if not 1 < per_host < n or config.mesh.fsdp > 1 or config.algorithm == "all_reduce":
        return None
    within = changed(config, schedule=WITHIN_HOSTS, local_size=per_host)
    try:
        algorithm.transformation(within, make_schedule(within), 1.0)
    except ConfigError:
        return None
    return within


def advice(config: ConfigDict, schedule: Schedule, per_host: int, shapes: Any) -> str | None:
    """A line on what ``schedule=auto`` would save between hosts; None where it saves nothing.

    Args:
      config: of the run, with the ``schedule`` that it uses.
      schedule: that one.
      per_host: see `replicas_per_host`.
      shapes: of its `TrainState`.
    """
    within = suggestion(config, per_host)
    if within is None:
        return None
    now, then = (
        algorithm.cost(config, each, shapes, per_host).sent_by_node
        for each in (schedule, make_schedule(within))
    )
    if then >= now:
        return None
    return (
        f"over {schedule.name} a host of {per_host} replicas sends {format_bytes(now)} per step to "
        f"other hosts; over {WITHIN_HOSTS}, which --config.schedule=auto takes here, "
        f"{format_bytes(then)}"
    )
