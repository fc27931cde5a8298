"""The step time of every algorithm, and the parts of this time.

>>> from decent_jax.planner.network import preset
>>> workload = Workload(model_bytes=500e6, forward_s=0.05, backward_s=0.1)
>>> network = preset("nvlink_25gbe", num_nodes=2, devices_per_node=4)
>>> for row in compare(network, workload, ("all_reduce", "alternating_exp_ring")):
...     print(row.label, round(row.step_s, 3), row.dominant)
all_reduce 0.217 compute
alternating_exp_ring 0.156 compute
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from decent_jax import topology
from decent_jax.ground.format import table
from decent_jax.planner import runtime, simulator
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import CONSTANT, Algorithm, AllReduce, Gossip, Workload

TIMELINES = ("all_reduce", "one_peer_exp", "alternating_exp_ring")  # compared in a picture
ALL_REDUCES = ("all_reduce", "all_reduce_hierarchical")
BUCKET_BYTES = (25e6, 100e6, math.inf)  # small ones overlap more, large ones save latency


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One step and its parts, in seconds.

    step_s: the whole step.
    compute_s: forward, backward and update of the replica that is slowest on average.
    exposed_s: communication not hidden by compute, in a step in which compute does not vary.
    waiting_s: the remainder, lost to stragglers because compute varies.
    """

    label: str
    num_replicas: int
    step_s: float
    compute_s: float
    exposed_s: float
    waiting_s: float

    @property
    def dominant(self) -> str:
        """The largest part of the step: compute, communication or stragglers."""
        parts = {
            "compute": self.compute_s,
            "communication": self.exposed_s,
            "stragglers": self.waiting_s,
        }
        return max(parts, key=parts.__getitem__)


def step_s(
    network: Network,
    workload: Workload,
    algorithm: Algorithm,
    *,
    steps: int = 300,
    warm_up: int = 100,
) -> float:
    """Expected seconds of a step: in closed form for all-reduce, simulated for gossip."""
    if isinstance(algorithm, AllReduce):
        return runtime.all_reduce_step_s(network, workload, algorithm)
    if workload.compute == CONSTANT:
        return simulator.settled_step_s(network, workload, algorithm)
    return simulator.simulate(network, workload, algorithm, steps=steps, warm_up=warm_up).step_s


def predict(
    network: Network,
    workload: Workload,
    algorithm: Algorithm,
    label: str | None = None,
) -> Prediction:
    """The predicted step under ``algorithm``, and its parts."""
    slowest = float(np.max(workload.factors(network.num_devices)))
    compute = slowest * workload.compute_s + workload.update_s
    total = step_s(network, workload, algorithm)
    if workload.compute == CONSTANT:
        steady = total = max(total, compute)  # equal, except for rounding
    else:
        constant = dataclasses.replace(workload, compute=CONSTANT)
        steady = min(total, step_s(network, constant, algorithm))
    return Prediction(
        label or algorithm.name,
        network.num_devices,
        total,
        compute,
        max(0.0, steady - compute),
        total - max(steady, compute),
    )


def algorithm_of(name: str, network: Network, workload: Workload) -> Algorithm:
    """The algorithm called ``name``: one of `ALL_REDUCES`, or gossip on that schedule.

    All-reduce uses the fastest of `BUCKET_BYTES`, so that gossip is compared with a tuned
    all-reduce. The schedule's ``replicas_per_node`` is the number of devices per node.

    Raises:
      ValueError: the schedule does not exist, at least not for this network.
    """
    if name in ALL_REDUCES:
        collective = "auto" if name == "all_reduce" else "hierarchical"
        return min(
            (AllReduce(collective, size) for size in BUCKET_BYTES),
            key=lambda algorithm: runtime.all_reduce_step_s(network, workload, algorithm),
        )
    return Gossip(
        topology.make(name, network.num_devices, replicas_per_node=replicas_per_node(network))
    )


def replicas_per_node(network: Network) -> int:
    """The number of devices per node; 1 if it varies or a node's are not consecutive."""
    sizes = np.bincount(network.node)
    if np.ptp(sizes) == 0 and (np.diff(network.node) >= 0).all():
        return int(sizes[0])
    return 1


def compare(
    network: Network, workload: Workload, names: Sequence[str] | None = None
) -> list[Prediction]:
    """A prediction for each algorithm of ``names``; default: all that exist for this network.

    See `algorithm_of`.
    """
    return [
        predict(network, workload, algorithm_of(name, network, workload), name)
        for name in names or available(network)
    ]


def available(network: Network) -> list[str]:
    """The algorithms that exist for this network."""
    n, size = network.num_devices, replicas_per_node(network)
    names = ["all_reduce"]
    if size > 1 and network.num_nodes > 1:
        names.append("all_reduce_hierarchical")
    for name in topology.NAMES:
        with contextlib.suppress(ValueError):
            names.append(topology.make(name, n, replicas_per_node=size).name)
    return names


def timelines(
    network: Network, workload: Workload, names: Sequence[str], steps: int = 3
) -> dict[str, tuple[tuple[simulator.Event, ...], np.ndarray]]:
    """The events of some steps of each algorithm, by title, for `decent_jax.plots.gantt.draw`.

    See `algorithm_of`.
    """
    runs = {}
    for name in names:
        algorithm = algorithm_of(name, network, workload)
        run = simulator.simulate(network, workload, algorithm, steps=steps, warm_up=20, record=True)
        mean_ms = 1e3 * step_s(network, workload, algorithm)
        runs[f"{name}: {mean_ms:.0f} ms per step in the long run"] = run.events, run.ends_s
    return runs


def format_table(rows: Sequence[Prediction]) -> str:
    """A Markdown table in milliseconds, with the speed-up over all-reduce."""
    base = next((row.step_s for row in rows if row.label == "all_reduce"), None)
    headings = ("algorithm", "step ms", "compute", "exposed communication", "stragglers")
    cells = []
    for row in rows:
        speed_up = f"{base / row.step_s:.2f}x" if base else ""
        parts = (row.step_s, row.compute_s, row.exposed_s, row.waiting_s)
        milliseconds = [f"{1e3 * seconds:.1f}" for seconds in parts]
        cells.append((row.label, *milliseconds, row.dominant, speed_up))
    return table((*headings, "dominant", "speed-up"), cells)
