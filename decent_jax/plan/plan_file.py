"""The plan of `train.py --config.cluster.plan=FILE`: placement and communication graph.

A plan belongs to one cluster. It lists the devices in the order of the replicas; a run with other
devices or another number of replicas refuses it.

>>> plan = Plan(("b/0", "a/0"), topology.make("one_peer_exp", 2))
>>> plan.device_order(["a/0", "b/0"])       # replica 0 uses the second device, b/0
[1, 0]
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from decent_jax import topology
from decent_jax.ground.format import shown
from decent_jax.ground.json_files import is_whole, read_format, write_json_atomic

FORMAT = "decent_jax.plan/1"


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Placement and schedule of a run on a given cluster.

    devices: names of the network's devices; replica i is on ``devices[i]``, or its stage s on
      ``devices[i * stages + s]``.
    schedule: the communication schedule, which `topology.make` can make from its name.
    mix_every: steps from one round to the next.
    expected: predictions by name, for readers; no run uses them.
    stages: number of stages per replica, each on its own device.
    """

    devices: tuple[str, ...]
    schedule: topology.Schedule
    mix_every: int = 1
    expected: dict = dataclasses.field(default_factory=dict)
    stages: int = 1

    def __post_init__(self):
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("a device occurs twice in the plan; every replica needs its own")
        for name, value in (("stages", self.stages), ("mix_every", self.mix_every)):
            if not is_whole(value, 1):
                raise ValueError(
                    f"{name} must be a whole number from 1 to 2^31 - 1, got {shown(value)}"
                )
        if len(self.devices) != self.schedule.num_replicas * self.stages:
            raise ValueError(
                f"the plan's schedule is for {self.schedule.num_replicas} replicas of "
                f"{self.stages} stages, but it names {len(self.devices)} devices"
            )

    def device_order(self, devices: Sequence[str]) -> list[int]:
        """The device of each replica, as indices into ``devices``, the names in this cluster.

        Raises:
          ValueError: ``devices`` are not the plan's devices.
        """
        where = {name: index for index, name in enumerate(devices)}
        if len(devices) != len(self.devices):
            raise ValueError(
                f"the plan is for {len(self.devices)} replicas on as many devices, but this run "
                f"has {len(devices)}; plan for this cluster, or leave cluster.plan out"
            )
        missing = [name for name in self.devices if name not in where]
        if missing:
            others = sorted(set(devices) - set(self.devices))
            raise ValueError(
                f"the plan is for another cluster: it names {missing[0]}, and this run has "
                f"{others[0]} instead ({len(missing)} of {len(devices)} devices differ); plan "
                "for this cluster, or leave cluster.plan out"
            )
        return [where[name] for name in self.devices]

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, atomically.

        Raises:
          ValueError: `topology.make` does not make this schedule from its name.
        """
        write_json_atomic(
            path,
            {
                "format": FORMAT,
                "devices": self.devices,
                "schedule": _named(self.schedule),
                "mix_every": self.mix_every,
                "expected": self.expected,
                "stages": self.stages,
            },
        )


def load(path: str | Path) -> Plan:
    """The plan in a file that `Plan.save` wrote.

    Raises:
      ValueError: the file is missing or is not a plan; the message names the file and the reason.
    """
    fields = read_format(path, "plan", FORMAT)
    try:
        stages, schedule = fields["stages"], fields["schedule"]
        if not isinstance(schedule["name"], str):
            raise TypeError(f"its schedule has the name {shown(schedule['name'])}, not a string")
        n = len(fields["devices"]) // stages
        return Plan(
            tuple(str(name) for name in fields["devices"]),
            topology.make(schedule["name"], n, replicas_per_node=schedule["replicas_per_node"]),
            fields["mix_every"],
            fields["expected"],
            stages,
        )
    except KeyError as error:
        raise ValueError(f"{path} is not a plan: it lacks {error}") from None
    except (ValueError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} is not a plan: {error}") from None


def _named(schedule: topology.Schedule) -> dict:
    """The arguments of `topology.make` that produce this schedule."""
    n = schedule.num_replicas
    for size in (size for size in range(1, n + 1) if n % size == 0):
        with contextlib.suppress(ValueError):  # no such name, or not for groups of this size
            named = topology.make(schedule.name, n, replicas_per_node=size)
            if named.period == schedule.period and all(
                ours.group_size == theirs.group_size and np.array_equal(ours.matrix, theirs.matrix)
                for ours, theirs in zip(named.rounds, schedule.rounds, strict=True)
            ):
                return {"name": schedule.name, "replicas_per_node": size}
    raise ValueError(
        f"a plan names its schedule, but topology.make({schedule.name!r}, {n}) does not make this "
        "one; register it under a name of its own (decent_jax.topology.register)"
    )
