"""Search for the best placement: simulated annealing, restarted every 100 exchanges.

Each restart begins with a random partition (`construct`); an exchange swaps two devices.
`placement` gives the exact cost of a partition. Most exchanges do not change this cost, a
maximum over groups and pairs, so the annealing adds a tenth of the means over groups and over
edges.
"""

import dataclasses

import numpy as np

from decent_jax.planner.gossip_placement import clock, take_near
from decent_jax.planner.network import Network
from decent_jax.planner.placement import Costs, Job, Problem, StageGroups

_EXCHANGES = 100  # per restart
_TEMPERATURE = 0.01  # at a restart, as a share of the lowest cost
_SLOPE = 0.1  # weight of the means


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedStages:
    """The best placement found.

    stages: (num_stages, num_replicas) int; device [k, r] of the network holds stage k of
        pipeline r, and row k is a data-parallel group.
    costs: exact, in seconds, as from `placement.evaluate`.
    lower_bound: no placement costs less in total.
    """

    stages: np.ndarray
    costs: Costs
    lower_bound: Costs

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
    steps: int | None = None,
    progress: bool = False,
) -> PlacedStages:
    """The cheapest placement of a job on a network that the search finds within ``time_limit_s``.

    It stops early at a placement that is proved optimal.

    Args:
      steps: the largest number of exchanges; None: no limit. With a limit, the same seed gives
          the same placement, unless the time runs out first.
      progress: whether to show a bar that counts seconds.

    Raises:
      ValueError: the network has fewer devices than the job needs.
    """
    problem, rng = Problem(network, job), np.random.default_rng(seed)
    lower_bound = problem.lower_bound()
    listed = np.arange(network.num_devices)
    used, left_out = listed[: job.num_devices], listed[job.num_devices :]
    across = used.reshape(job.num_replicas, job.num_stages).T.ravel()
    starts = [listed, np.concatenate([across, left_out])]
    current = best = min(
        (StageGroups(problem, slots) for slots in starts), key=lambda groups: groups.costs.total_s
    )
    with clock(time_limit_s, steps, "placing stages", progress) as parts:
        for step, _ in enumerate(parts):
            if best.costs.total_s <= lower_bound.total_s * (1 + 1e-12):
                break
            done = step % _EXCHANGES / _EXCHANGES
            if done == 0:
                current = StageGroups(problem, construct(problem, rng))
            else:
                proposal = current.copy()
                proposal.swap(*_pair(proposal, rng))
                temperature = _TEMPERATURE * best.costs.total_s * (1 - done)
                if _score(proposal) <= _score(current) + temperature * rng.exponential():
                    current = proposal
            best = min(best, current, key=lambda groups: groups.costs.total_s)
    return PlacedStages(best.stages(), best.costs, lower_bound)


def _pair(groups: StageGroups, rng: np.random.Generator) -> tuple[int, int]:
    """Two slots, from different groups and of different kinds if ten draws find such a pair."""
    job, kind = groups.problem.job, groups.problem.kind
    first = second = 0
    for _ in range(10):
        first, second = int(rng.integers(job.num_devices)), int(rng.integers(len(groups.slots)))
        same_group = first // job.num_replicas == second // job.num_replicas
        if not same_group and kind[groups.slots[first]] != kind[groups.slots[second]]:
            break
    return first, second


def _score(groups: StageGroups) -> float:
    edges = groups.edge_s[groups.order[:-1], groups.order[1:]]
    pipeline = edges.mean() if len(edges) else 0.0
    return groups.costs.total_s + _SLOPE * float(groups.group_s.mean() + 2 * pipeline)


def construct(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """A new partition, from random segments of the path.

    A segment of h stages consists of pipelines of h devices near each other: either the tightest
    of all free pipelines, or pipelines within a cluster of devices near each other. With a single
    segment, pipelines stay inside a region and groups span regions; with a segment per stage,
    groups stay inside a region.
    """
    job = problem.job
    free = list(rng.permutation(len(problem.kind)))
    groups, stages, tightest = [], job.num_stages, rng.random() < 0.5
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
    """The index in ``free`` of the device with the least sum of costs to its size - 1 nearest."""
    mutual = costs[np.ix_(free, free)]
    # A device's cost to itself is 0, the least of its row.
    return int(np.partition(mutual, size - 1, axis=1)[:, :size].sum(axis=1).argmin())
