"""Search for the best placement: hybrid genetic, with Kernighan-Lin style local search.

A candidate is a balanced partition; `placement` gives its cost exactly. A generation makes one,
constructed anew (`construct`), out of the groups of two parents (`combine`) or by a few random
exchanges (`perturb`), improves it by a local search, and lets it replace the worst of the
population. As in Kernighan and Lin (1970) a pass of the local search makes the best exchange of two
devices even if it is a loss, locks both, and at the end keeps the best state it has seen.

All exchanges are judged at once (`_Exchanges`): exactly in their data-parallel cost; in their
pipeline cost with the path's order as it is, and by the bound that a matching costs at least as
much as any device's nearest partner. The exchange that is made is then evaluated exactly.

The objective is a maximum over groups and over pairs, so most exchanges change nothing. The local
search therefore adds a little of the means of what the maxima are taken of (``slope``), a different
amount in every generation.
"""

import dataclasses
import itertools
import time

import numpy as np

from decent_jax.planner.gossip_placement import clock, take_near
from decent_jax.planner.network import Network
from decent_jax.planner.placement import Costs, Job, Problem, StageGroups

POPULATION = 12
PATIENCE = 4  # exchanges in a row that a pass makes without reaching a new best
MOST_ENTRIES = 2**25  # of a table of exchanges: 256 MiB
SLOPES = (0.3, 0.1, 0.03, 0.01)


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedStages:
    """The best placement found.

    stages: (num_stages, num_replicas) int; device [k, r] of the network holds stage k of
        pipeline r, and row k is a data-parallel group.
    costs: seconds, exact; `placement.evaluate` gives the same.
    lower_bound: no placement costs less in total.
    """

    stages: np.ndarray
    costs: Costs
    lower_bound: Costs
    num_candidates: int
    seconds: float

    @property
    def is_optimal(self) -> bool:
        """Whether the lower bound proves that no placement is cheaper."""
        return self.costs.total_s <= self.lower_bound.total_s * (1 + 1e-12)


def place(
    network: Network,
    job: Job,
    *,
    seed: int = 0,
    time_limit_s: float = 5.0,
    generations: int | None = None,
    progress: bool = False,
) -> PlacedStages:
    """The cheapest placement of a job on a network that the search finds in the given time.

    Args:
      generations: the most to try; then, unless the time is up first, the same seed
          gives the same placement.
      progress: show a bar that counts seconds.

    Stops early at a placement that is proved optimal.

    Raises:
      ValueError: too few devices, or too many for the tables of the search.
    """
    entries = job.num_devices * job.num_replicas * network.num_devices
    if entries > MOST_ENTRIES:
        raise ValueError(
            f"{job.num_stages} x {job.num_replicas} of {network.num_devices} devices are too many "
            f"to search: stages x replicas^2 x devices may be {MOST_ENTRIES}, got {entries}; place "
            "machines instead of devices"
        )
    search = _Search(Problem(network, job), np.random.default_rng(seed))
    with clock(time_limit_s, generations, "placing stages", progress) as parts:
        for _ in itertools.takewhile(lambda _: not search.proved, parts):
            search.generation(search.start + time_limit_s)
    return PlacedStages(
        search.best.stages(),
        search.best.costs,
        search.lower_bound,
        search.num_candidates,
        search.elapsed_s,
    )


class _Search:
    """The population, and the best partition seen so far."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self.start = time.perf_counter()
        self.problem, self.rng = problem, rng
        self.lower_bound = problem.lower_bound()
        self.num_candidates = 0
        self.population: list[StageGroups] = []
        devices = np.arange(len(problem.kind))
        job = problem.job
        used = devices[: job.num_devices]
        pipelines = used.reshape(job.num_replicas, job.num_stages).T.ravel()
        left_out = devices[job.num_devices :]
        self.best = StageGroups(problem, devices)
        self._seen(self.best)
        self._seen(StageGroups(problem, np.concatenate([pipelines, left_out])))

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    @property
    def proved(self) -> bool:
        return self.best.costs.total_s <= self.lower_bound.total_s * (1 + 1e-12)

    def generation(self, deadline: float) -> None:
        """Create a candidate, improve it, and keep it if it is good and new."""
        operator = self.rng.choice(3, p=(0.2, 0.3, 0.5))
        if operator == 0 or len(self.population) < POPULATION:
            slots = construct(self.problem, self.rng)
        else:
            parents = self.rng.choice(len(self.population), 2, replace=False)
            first, second = (self.population[k] for k in parents)
            slots = combine(first, second, self.rng) if operator == 1 else perturb(first, self.rng)
        child = self._improve(StageGroups(self.problem, slots), deadline)
        signature = _signature(child)
        if any(_signature(other) == signature for other in self.population):
            return
        self.population.append(child)
        if len(self.population) > POPULATION:
            self.population.remove(max(self.population, key=lambda one: one.costs.total_s))

    def _seen(self, partition: StageGroups) -> None:
        self.num_candidates += 1
        if partition.costs.total_s < self.best.costs.total_s - 1e-12:
            self.best = partition.copy()

    def _improve(self, partition: StageGroups, deadline: float) -> StageGroups:
        """Passes of swaps until one brings no improvement or the deadline has passed."""
        slope = self.rng.choice(SLOPES)
        self._seen(partition)
        exchanges = _Exchanges(partition, slope)
        kept, kept_score = partition.copy(), exchanges.score
        improved = True
        while improved:
            improved = False
            locked = np.zeros(len(partition.slots), bool)
            losses = 0
            while losses < PATIENCE and not self.proved and time.perf_counter() < deadline:
                exchange = exchanges.best(locked)
                if exchange is None:
                    break
                partition.swap(*exchange)
                locked[list(exchange)] = True
                self._seen(partition)
                exchanges = _Exchanges(partition, slope)
                losses += 1
                if exchanges.score < kept_score - 1e-12:
                    kept, kept_score = partition.copy(), exchanges.score
                    improved, losses = True, 0
            partition = kept.copy()
            exchanges = _Exchanges(partition, slope)
        return kept


def _signature(partition: StageGroups) -> tuple:
    """Equal for partitions that differ only by the names of groups and devices of one kind."""
    kinds = np.sort(partition.problem.kind[partition.groups], axis=1)
    return tuple(sorted(map(tuple, kinds.tolist())))


class _Exchanges:
    """The score of every swap of two devices.

    score: of the partition as it is: total cost + slope x the means.
    """

    def __init__(self, partition: StageGroups, slope: float) -> None:
        self.partition, self.slope = partition, slope
        groups = partition.groups
        stages, replicas = groups.shape
        averaging, passing = partition.problem.averaging_s, partition.problem.passing_s
        self.group_s, self.group_mean = _group_replaced(averaging, groups)
        mean = averaging[groups[:, :, None], groups[:, None, :]].sum(axis=(1, 2)) / replicas
        self.group_mean -= mean[:, None, None]
        # Every edge of the path twice: with a replaced device on its one end and on its other.
        path = partition.order
        ends = np.concatenate([path[:-1], path[1:]])
        others = np.concatenate([path[1:], path[:-1]])
        costs = passing[groups[ends][:, :, None], groups[others][:, None, :]]
        self.edge = _bound(costs.min(axis=2), costs.min(axis=1), slope)
        self.edge_replaced = _edge_replaced(costs, passing[:, groups[others]], slope)
        self.path_change = np.zeros((stages, replicas, len(partition.slots)))
        change, edges = self.edge_replaced - self.edge[:, None, None], len(path) - 1
        self.path_change[ends[:edges]] += change[:edges]
        self.path_change[ends[edges:]] += change[edges:]
        bound = _bound(costs.min(axis=2), costs.min(axis=1), 0.0)
        self.score = (
            partition.costs.total_s + slope * mean.mean() + 2 * (self.edge - bound)[:edges].sum()
        )

    def best(self, locked: np.ndarray) -> tuple[int, int] | None:
        """The slots of the best swap of unlocked devices, or None."""
        partition = self.partition
        slots, kind = partition.slots, partition.problem.kind
        stages, replicas = partition.groups.shape
        used = stages * replicas
        group = np.minimum(np.arange(len(slots)) // replicas, stages)  # stages: left out
        in_slot = (slice(None), slice(None), slots)

        def both(change: np.ndarray, combine: np.ufunc) -> np.ndarray:
            """(used, m): what either device does to the other's group; left out ones: nothing."""
            one_way = change[in_slot].reshape(used, len(slots))
            result = one_way.copy()
            result[:, :used] = combine(one_way[:, :used], one_way[:, :used].T)
            return result

        path = both(self.path_change, np.add)
        self._mend_neighbours(path)
        total = np.maximum(both(self.group_s, np.maximum), self._others()[group[:used]][:, group])
        total += 2 * path + self.slope / stages * both(self.group_mean, np.add)
        devices = slots[:used, None], slots
        useless = (group[:used, None] == group) | (kind[devices[0]] == kind[devices[1]])
        total[useless | locked[:used, None] | locked] = np.inf
        first, second = np.unravel_index(total.argmin(), total.shape)
        return (int(first), int(second)) if np.isfinite(total[first, second]) else None

    def _others(self) -> np.ndarray:
        """(stages + 1, stages + 1): the largest data-parallel cost outside two groups."""
        group_s = np.append(self.partition.group_s, 0.0)
        outside = np.tile(group_s, (len(group_s), len(group_s), 1))
        every = np.arange(len(group_s))
        outside[every, :, every] = outside[:, every, every] = 0.0
        return outside.max(axis=2)

    def _mend_neighbours(self, path: np.ndarray) -> None:
        """A swap between neighbours on the path changes both ends of their edge at once."""
        partition = self.partition
        replicas = partition.groups.shape[1]
        order = partition.order
        edges = len(order) - 1
        if edges == 0:
            return
        left, right = partition.groups[order[:-1]], partition.groups[order[1:]]
        exact = _edge_exchanged(partition.problem.passing_s, left, right, self.slope)
        for e in range(edges):
            i, j = order[e], order[e + 1]
            rows = slice(i * replicas, (i + 1) * replicas)
            columns = slice(j * replicas, (j + 1) * replicas)
            counted = (
                self.edge_replaced[e][:, right[e]] + self.edge_replaced[edges + e][:, left[e]].T
            )
            change = exact[e] - counted + self.edge[e]
            path[rows, columns] += change
            path[columns, rows] += change.T


def _group_replaced(averaging: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest and the mean cost of averaging in group a with member i replaced by device v.

    Both (stages, d, m), [a, i, v].
    """
    replicas = groups.shape[1]
    inside = averaging[groups[:, :, None], groups[:, None, :]]  # a, k, i
    to_all = averaging[groups]  # a, k, v
    sums = inside.sum(axis=2)
    stay = (sums[:, :, None] - inside)[:, :, :, None] + to_all[:, :, None, :]  # a, k, i, v
    member = np.arange(replicas)
    stay[:, member, member] = 0.0
    comes = to_all.sum(axis=1)[:, None, :] - to_all  # a, i, v
    largest = np.maximum(stay.max(axis=1), comes)
    mean = (sums.sum(axis=1)[:, None, None] + 2 * (comes - sums[:, :, None])) / replicas
    return largest, mean


def _bound(rows: np.ndarray, columns: np.ndarray, slope: float) -> np.ndarray:
    """Of the cheapest partner of every row and column (axis 1): the largest + slope x the mean."""
    return _combined(
        np.maximum(rows.max(axis=1), columns.max(axis=1)),
        (rows.sum(axis=1) + columns.sum(axis=1)) / (2 * rows.shape[1]),
        slope,
    )


def _combined(largest: np.ndarray, mean: np.ndarray, slope: float) -> np.ndarray:
    """Concave in the mean, so that cheap pairs concentrate in few edges."""
    return largest + slope * np.sqrt(largest * mean)


def _edge_replaced(costs: np.ndarray, to_other: np.ndarray, slope: float) -> np.ndarray:
    """(e, d, m): `_bound` of edge e with the i-th row of its costs replaced by those of device v.

    Args:
      costs: (e, d, d), rows are replaced; to_other: (m, e, d) costs of any device to the columns.
    """
    replicas = costs.shape[1]
    member = np.arange(replicas)
    rows = np.repeat(costs.min(axis=2)[:, :, None], replicas, axis=2)  # e, k, i
    rows[:, member, member] = 0.0
    comes = to_other.min(axis=2).T[:, None, :]  # e, 1, v
    without = _least_without(costs.transpose(0, 2, 1))  # e, column, i
    columns = np.minimum(without[:, :, :, None], to_other.transpose(1, 2, 0)[:, :, None, :])
    largest = np.maximum(np.maximum(rows.max(axis=1)[:, :, None], comes), columns.max(axis=1))
    mean = (rows.sum(axis=1)[:, :, None] + comes + columns.sum(axis=1)) / (2 * replicas)
    return _combined(largest, mean, slope)


def _edge_exchanged(
    passing: np.ndarray, left: np.ndarray, right: np.ndarray, slope: float
) -> np.ndarray:
    """(e, d, d): `_bound` of edge e when left's i-th and right's j-th device change sides."""

    def nearest(near: np.ndarray, far: np.ndarray) -> np.ndarray:
        """e, k, i, j: of near's k-th device (the newcomer j where k = i) to the far side."""
        costs = passing[near[:, :, None], far[:, None, :]]
        inside = passing[near[:, :, None], near[:, None, :]]
        result = np.minimum(_least_without(costs)[:, :, None, :], inside[:, :, :, None])
        far_inside = passing[far[:, :, None], far[:, None, :]]
        member = np.arange(near.shape[1])
        newcomer = _least_without(far_inside)[:, member, member]  # e, j
        result[:, member, member] = np.minimum(newcomer[:, None, :], costs)
        return result

    return _bound(nearest(left, right), nearest(right, left).transpose(0, 1, 3, 2), slope)


def _least_without(costs: np.ndarray) -> np.ndarray:
    """Same shape: [..., j] is the least along the last axis when entry j is left out."""
    if costs.shape[-1] == 1:
        return np.full_like(costs, np.inf)
    two = np.partition(costs, 1, axis=-1)
    least = np.repeat(two[..., :1], costs.shape[-1], axis=-1)
    np.put_along_axis(least, costs.argmin(axis=-1)[..., None], two[..., 1:2], axis=-1)
    return least


def construct(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """A new partition, from random segments of the path.

    A segment of h stages is made of pipelines of h devices near each other: either the tightest
    pipelines of all, or pipelines out of a cluster of devices that are near each other. With one
    segment pipelines stay inside a region and groups span regions; with a segment per stage groups
    stay inside a region.
    """
    job = problem.job
    free = list(rng.permutation(len(problem.kind)))
    groups = []
    stages = job.num_stages
    tightest = rng.random() < 0.5
    while stages:
        length = int(rng.integers(1, stages + 1))
        stages -= length
        source = free
        if not tightest:
            source = take_near(free, 0, problem.averaging_s, length * job.num_replicas)
        pipelines = []
        for _ in range(job.num_replicas):
            first = _tightest(source, problem.passing_s, length) if tightest else 0
            pipelines.append(take_near(source, first, problem.passing_s, length))
        groups += np.array(pipelines).T.tolist()
    return np.concatenate([*groups, free]).astype(np.int64)


def _tightest(free: list, costs: np.ndarray, size: int) -> int:
    """Where in ``free`` is the device whose size - 1 nearest others in it are nearest."""
    mutual = costs[np.ix_(free, free)]
    # A device's cost to itself is 0, the least of its row.
    return int(np.partition(mutual, size - 1, axis=1)[:, :size].sum(axis=1).argmin())


def combine(first: StageGroups, second: StageGroups, rng: np.random.Generator) -> np.ndarray:
    """A stretch of the first parent's path whole; the rest in the second's groups, filled up."""
    job = first.problem.job
    stages = job.num_stages
    count = int(rng.integers(1, max(2, stages)))
    start = int(rng.integers(0, stages - count + 1))
    groups = [first.groups[a].tolist() for a in first.order[start : start + count]]
    taken = {device for group in groups for device in group}
    remains = [[d for d in group if d not in taken] for group in second.groups.tolist()]
    remains.sort(key=len, reverse=True)
    groups += remains[: stages - count]
    taken = {device for group in groups for device in group}
    free = [d for d in rng.permutation(len(first.slots)).tolist() if d not in taken]
    for group in groups:
        while len(group) < job.num_replicas:
            group.append(free.pop())
    return np.concatenate([*groups, free]).astype(np.int64)


def perturb(parent: StageGroups, rng: np.random.Generator) -> np.ndarray:
    """The parent with two to four random swaps."""
    slots = parent.slots.copy()
    for _ in range(rng.integers(2, 5)):
        pair = [rng.integers(parent.problem.job.num_devices), rng.integers(len(slots))]
        slots[pair] = slots[pair[::-1]]
    return slots
