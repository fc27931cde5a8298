"""Exact evaluation of DT-FM's cost for data-parallel groups and pipeline stages.

N devices become ``num_stages`` data-parallel groups of ``num_replicas`` devices each; devices may
be left over. A group holds one pipeline stage and averages its gradients; activations travel along
a path through the groups. The cost of a partition (Yuan et al., NeurIPS 2022, section 3) is

    total         = data_parallel + 2 pipeline                                        (seconds)
    data_parallel = max over groups, over d in a group, of
                    sum over d' != d of 2 (latency + bytes_dp / (bandwidth num_replicas))
    pipeline      = the shortest open path through all groups, where an edge between two groups is
                    their perfect matching whose slowest pair is fastest, and a pair costs
                    latency + bytes_pp / bandwidth

The slower direction of a link counts. The path (Held and Karp 1962) and the matchings are solved
exactly, so `StageGroups` has the cost of the best pipelines for its groups, and
`StageGroups.stages` returns these pipelines; `evaluate` gives the cost of any pipelines.
"""

import copy
import dataclasses
import functools
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from decent_jax.planner.network import Network

MOST_STAGES = 16  # Held-Karp takes 2^stages x stages^2 steps: 0.2 s for 16

MOST_REMEMBERED = 200_000  # matchings, some 100 MB


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job to be placed.

    num_stages: pipeline stages, each held by one data-parallel group (at most 16).
    num_replicas: devices in a group.
    data_parallel_bytes: bytes of the gradients of one stage.
    pipeline_bytes: bytes of the activations from one stage to the next in a step, one way.
    """

    num_stages: int
    num_replicas: int
    data_parallel_bytes: float
    pipeline_bytes: float

    def __post_init__(self) -> None:
        if not 1 <= self.num_stages <= MOST_STAGES or self.num_replicas < 1:
            raise ValueError(
                f"a placement needs 1 to {MOST_STAGES} stages and at least one replica, got "
                f"{self.num_stages} and {self.num_replicas}"
            )

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_replicas


class Costs(NamedTuple):
    """Seconds per step; ``pipeline_s`` is one way."""

    data_parallel_s: float
    pipeline_s: float

    @property
    def total_s(self) -> float:
        return self.data_parallel_s + 2 * self.pipeline_s


def evaluate(network: Network, job: Job, stages: np.ndarray) -> Costs:
    """The cost of these pipelines.

    Args:
      stages: (num_stages, num_replicas) int; device [k, r] holds stage k of pipeline r.
    """
    averaging, passing = pair_costs_s(network, job)
    in_groups = averaging[stages[:, :, None], stages[:, None, :]]
    onwards = passing[stages[:-1], stages[1:]]
    return Costs(float(in_groups.sum(axis=2).max()), float(onwards.max(axis=1).sum()))


def pair_costs_s(network: Network, job: Job) -> tuple[np.ndarray, np.ndarray]:
    """(n, n) seconds each: costs of two devices in one group, and in consecutive stages."""
    share = job.data_parallel_bytes / job.num_replicas
    averaging = 2 * (network.latency_s + share / network.bandwidth_bytes_per_s)
    passing = network.latency_s + job.pipeline_bytes / network.bandwidth_bytes_per_s
    return np.maximum(averaging, averaging.T), np.maximum(passing, passing.T)


def bottleneck_matching(costs: np.ndarray) -> tuple[np.ndarray, float]:
    """The perfect matching of rows and columns whose largest cost is smallest.

    Args:
      costs: (d, d).

    Returns:
      The column of every row, (d,), and that largest cost.
    """
    # A matching costs at least the least entry of each row and column; the best, usually no more.
    lower = max(costs.min(axis=1).max(), costs.min(axis=0).max())
    columns, fits = _matching_within(costs, lower)
    if fits:
        return columns, float(lower)
    values = np.unique(costs[costs > lower])
    low, high = 0, len(values) - 1  # values[high] always fits
    while low < high:
        middle = (low + high) // 2
        if _matching_within(costs, values[middle])[1]:
            high = middle
        else:
            low = middle + 1
    return _matching_within(costs, values[high])[0], float(values[high])


def _matching_within(costs: np.ndarray, limit: float) -> tuple[np.ndarray, bool]:
    """A perfect matching with the fewest entries above ``limit``, and whether it has none."""
    above = costs > limit
    rows, columns = linear_sum_assignment(above)
    return columns, not above[rows, columns].any()


def shortest_open_path(costs: np.ndarray) -> tuple[np.ndarray, float]:
    """The order (k,) in which the path through k points is shortest, and its length.

    By dynamic programming (Held and Karp 1962).

    Args:
      costs: (k, k) symmetric.
    """
    k = len(costs)
    shortest = np.full((1 << k, k), np.inf)  # [set, last]: the path through set that ends in last
    shortest[1 << np.arange(k), np.arange(k)] = 0.0
    for sets, members, points in _extensions(k):
        onwards = (shortest[sets][:, :, None] + costs).min(axis=1)
        shortest[sets[members] | 1 << points, points] = onwards[members, points]
    remaining, last = (1 << k) - 1, int(shortest[-1].argmin())
    length, order = float(shortest[-1, last]), [last]
    while len(order) < k:
        remaining ^= 1 << last
        last = int((shortest[remaining] + costs[:, last]).argmin())
        order.append(last)
    return np.array(order), length


@functools.cache
def _extensions(k: int) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
    """For every size below k, the subsets as bit masks, and the points by which each can grow.

    A layer is (masks, index into the masks, point).
    """
    masks = np.arange(1 << k)
    outside = (masks[:, None] >> np.arange(k)) & 1 == 0
    layers = []
    for size in range(1, k):
        sets = masks[outside.sum(axis=1) == k - size]
        members, points = np.nonzero(outside[sets])
        layers.append((sets, members, points))
    return tuple(layers)


class Problem:
    """A job on a network of m devices, as matrices.

    averaging_s: (m, m) seconds that two devices in one group cost each other, 0 on the diagonal.
    passing_s: (m, m) seconds that two matched devices of consecutive groups cost.
    kind: (m,) int; exchanging two devices of one kind changes no cost.

    Raises:
      ValueError: the network has fewer devices than the job needs.
    """

    def __init__(self, network: Network, job: Job) -> None:
        if network.num_devices < job.num_devices:
            raise ValueError(
                f"{job.num_stages} stages of {job.num_replicas} replicas need {job.num_devices} "
                f"devices, but the network has {network.num_devices}; use fewer stages or "
                "replicas"
            )
        self.job = job
        self.averaging_s, self.passing_s = pair_costs_s(network, job)
        self.kind = _kinds(self.averaging_s, self.passing_s)
        self._matchings: dict[tuple, float] = {}

    def group_s(self, group: np.ndarray) -> float:
        """The data-parallel cost of one group (d,), in seconds."""
        return float(self.averaging_s[np.ix_(group, group)].sum(axis=1).max())

    def edge_s(self, group: np.ndarray, other: np.ndarray) -> float:
        """The pipeline cost between two groups, in seconds one way."""
        key = (tuple(sorted(self.kind[group].tolist())), tuple(sorted(self.kind[other].tolist())))
        key = (min(key), max(key))
        if len(self._matchings) > MOST_REMEMBERED:
            self._matchings.clear()
        if key not in self._matchings:
            self._matchings[key] = bottleneck_matching(self.passing_s[np.ix_(group, other)])[1]
        return self._matchings[key]

    def lower_bound(self) -> Costs:
        """Lower bounds on the costs of every placement.

        data_parallel: a device pays at least for its num_replicas - 1 cheapest partners, and at
        most m - num_devices of the m devices can be left out.

        pipeline: let c(t) devices have some partner at cost t or less. An edge of cost t needs two
        groups that contain only such devices. There are at most c(t) / num_replicas such groups,
        and a path has fewer edges among them than groups. The j-th cheapest edge therefore costs at
        least the cost at which (j + 1) num_replicas devices have a partner.
        """
        job, m = self.job, len(self.kind)
        partners = np.sort(self.averaging_s + np.diag(np.full(m, np.inf)), axis=1)
        least = partners[:, : job.num_replicas - 1].sum(axis=1)
        data_parallel = np.sort(least)[job.num_devices - 1]
        nearest = np.sort((self.passing_s + np.diag(np.full(m, np.inf))).min(axis=1))
        edges = nearest[2 * job.num_replicas - 1 : job.num_devices : job.num_replicas]
        return Costs(float(data_parallel), float(edges.sum()))


def _kinds(averaging: np.ndarray, passing: np.ndarray) -> np.ndarray:
    """(m,) int: the class of each device; devices of a class are interchangeable.

    Two devices are of one kind if they cost the same to every third device; for symmetric costs
    this is an equivalence.
    """
    kind = np.full(len(averaging), -1)
    for i in range(len(kind)):
        if kind[i] >= 0:
            continue
        differs = (averaging != averaging[i]) | (passing != passing[i])
        differs[:, i] = False
        np.fill_diagonal(differs, False)
        kind[(~differs.any(axis=1)) & (kind < 0)] = i
    return kind


class StageGroups:
    """A data-parallel group of devices per stage, and the exact cost of the best pipelines.

    `swap` updates it in place.

    slots: (m,) the devices: num_replicas per group, then the devices that are left out.
    group_s: (num_stages,) data-parallel cost of every group.
    edge_s: (num_stages, num_stages) pipeline cost between every two groups.
    order: (num_stages,) the groups along the shortest path.
    """

    def __init__(self, problem: Problem, slots: np.ndarray) -> None:
        self.problem, self.slots = problem, np.array(slots)
        stages = problem.job.num_stages
        self.group_s = np.array([problem.group_s(group) for group in self.groups])
        self.edge_s = np.zeros((stages, stages))
        for a in range(stages):
            self._update_edges(a)
        self._update_order()

    def copy(self) -> "StageGroups":
        other = copy.copy(self)
        other.slots, other.group_s = self.slots.copy(), self.group_s.copy()
        other.edge_s = self.edge_s.copy()
        return other

    @property
    def groups(self) -> np.ndarray:
        """(num_stages, num_replicas) the devices of every group; a view."""
        job = self.problem.job
        return self.slots[: job.num_devices].reshape(job.num_stages, job.num_replicas)

    @property
    def costs(self) -> Costs:
        return Costs(float(self.group_s.max()), self.path_s)

    def swap(self, first: int, second: int) -> None:
        """Swaps the devices in two slots, and updates only the costs of their groups."""
        self.slots[[first, second]] = self.slots[[second, first]]
        groups = self.groups
        for a in {slot // groups.shape[1] for slot in (first, second) if slot < groups.size}:
            self.group_s[a] = self.problem.group_s(groups[a])
            self._update_edges(a)
        self._update_order()

    def stages(self) -> np.ndarray:
        """(num_stages, num_replicas) int devices of the network; pipeline r is column r."""
        rows = [self.groups[self.order[0]]]
        for a in self.order[1:]:
            group = self.groups[a]
            columns, _ = bottleneck_matching(self.problem.passing_s[np.ix_(rows[-1], group)])
            rows.append(group[columns])
        return np.array(rows)

    def _update_edges(self, a: int) -> None:
        groups = self.groups
        for b in range(len(groups)):
            if b != a:
                edge = self.problem.edge_s(groups[a], groups[b])
                self.edge_s[a, b] = self.edge_s[b, a] = edge

    def _update_order(self) -> None:
        self.order, self.path_s = shortest_open_path(self.edge_s)
