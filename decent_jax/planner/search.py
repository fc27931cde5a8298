"""Searches for an order of devices: simulated annealing, and DT-FM's placement by it.

`anneal` (Kirkpatrick et al. 1983) exchanges devices, or rows of them, in the best of some orders to
begin with, and keeps the best that it meets. A `clock` says how much of the search is over.

`place` orders devices into the slots of a `placement.Partition`, which has the exact cost. For a
quarter of the search it begins anew (`construct`): pipelines of devices that are near each other.
On networks of regions or machines these are hard to beat; the rest of the search exchanges devices
in the best of them.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike
from tqdm import tqdm

from decent_jax.planner.network import Network
from decent_jax.planner.placement import Costs, Job, Partition, Problem

CONSTRUCTING = 0.25  # of a search


@contextlib.contextmanager
def clock(
    time_limit_s: float, steps: int | None, what: str, progress: bool
) -> Iterator[Iterator[float]]:
    """Yields an iterator that counts from 0 to 1: the part of a search that is over."""
    start = time.perf_counter()

    def parts(bar: tqdm) -> Iterator[float]:
        for step in itertools.count():
            elapsed_s = time.perf_counter() - start
            if elapsed_s >= time_limit_s or step == steps:
                return
            if progress and step % 64 == 0:
                bar.n = elapsed_s
                bar.refresh()
            yield step / steps if steps else elapsed_s / time_limit_s

    form = "{desc} |{bar}| {n:.1f}/{total:.0f} s"
    with tqdm(total=time_limit_s, disable=not progress, desc=what, bar_format=form) as bar:
        yield parts(bar)


def anneal(
    starts: Sequence[np.ndarray],
    cost: Callable[[np.ndarray], float],
    rng: np.random.Generator,
    parts: Iterable[float],
) -> np.ndarray:
    """The order of least cost that the search meets, beginning at the best of some orders."""
    best = current = min(starts, key=cost)
    best_cost = current_cost = cost(best)
    for part in parts if len(best) > 1 else ():
        proposal = _exchanged(current, rng)
        proposal_cost = cost(proposal)
        temperature = 0.02 * best_cost * (1 - part) ** 2
        if proposal_cost <= current_cost + temperature * rng.exponential():
            current, current_cost = proposal, proposal_cost
            if proposal_cost < best_cost:
                best, best_cost = proposal, proposal_cost
    return best


def _exchanged(order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Two replicas, or two rows of them with equal spacing, change places."""
    n = len(order)
    order = order.copy()
    length = 2 ** int(rng.integers(0, max(1, int(math.log2(n))))) if rng.random() < 0.5 else 1
    stride = 2 ** int(rng.integers(0, max(1, int(math.log2(n / length)))))
    row = stride * np.arange(length)
    first, second = ((start + row) % n for start in rng.integers(0, n, 2))
    if len(np.intersect1d(first, second)) == 0:
        order[first], order[second] = order[second], order[first].copy()
    return order


# --- pipeline stages in data-parallel groups ----------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """The best placement found.

    stages: (num_stages, num_replicas) int; device [k, r] of the network holds stage k of
        pipeline r, and row k is a data-parallel group.
    costs: seconds, exact; `placement.evaluate` gives the same.
    lower_bound: no placement costs less in total.
    history: (seconds since the start, candidates evaluated, total cost) at every improvement.
    """

    stages: np.ndarray
    costs: Costs
    lower_bound: Costs
    num_candidates: int
    seconds: float
    history: tuple[tuple[float, int, float], ...]

    @property
    def is_optimal(self) -> bool:
        """Whether the lower bound proves that no placement is cheaper."""
        return _proves(self.lower_bound, self.costs)


def place(
    network: Network,
    job: Job,
    *,
    memory_bytes: ArrayLike | None = None,
    seed: int = 0,
    time_limit_s: float = 5.0,
    steps: int | None = None,
    progress: bool = False,
) -> Placement:
    """The cheapest placement of a job on a network that can be found in the time.

    Args:
      memory_bytes: of every device; those with less than ``job.memory_bytes`` are not used.
      steps: candidates to try at most; then, unless the time is up first, the same seed gives the
          same placement.
      progress: show a bar that counts seconds.

    Stops early at a placement that is proved optimal.

    Raises:
      ValueError: too few usable devices.
    """
    start = time.perf_counter()
    problem, rng = Problem(network, job, memory_bytes), np.random.default_rng(seed)
    lower_bound = problem.lower_bound()
    listed = np.arange(len(problem.devices))
    best = Partition(problem, listed)
    count, history = 1, [(time.perf_counter() - start, 1, best.costs.total_s)]

    def cost(slots: np.ndarray) -> float:
        nonlocal best, count
        count += 1
        partition = Partition(problem, slots)
        if partition.costs.total_s < best.costs.total_s - 1e-12:
            best = partition
            history.append((time.perf_counter() - start, count, best.costs.total_s))
        return partition.costs.total_s

    def starts(parts: Iterator[float]) -> Iterator[np.ndarray]:
        yield listed
        pipelines = listed[: job.num_devices].reshape(job.num_replicas, job.num_stages).T
        yield np.concatenate([pipelines.ravel(), listed[job.num_devices :]])
        for part in parts:
            if part >= CONSTRUCTING:
                return
            yield construct(problem, rng)

    with clock(time_limit_s, steps, "placing", progress) as parts:
        unproved = itertools.takewhile(lambda _: not _proves(lower_bound, best.costs), parts)
        anneal([min(starts(unproved), key=cost)], cost, rng, unproved)
    seconds = time.perf_counter() - start
    return Placement(best.stages(), best.costs, lower_bound, count, seconds, tuple(history))


def _proves(lower_bound: Costs, costs: Costs) -> bool:
    return costs.total_s <= lower_bound.total_s * (1 + 1e-12)


def construct(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """A new partition, from random segments of the path.

    A segment of h stages is made of pipelines of h devices near each other: either the tightest
    pipelines of all, or pipelines out of a cluster of devices that are near each other. With one
    segment pipelines stay inside a region and groups span regions; with a segment per stage groups
    stay inside a region.
    """
    job = problem.job
    free = list(rng.permutation(len(problem.devices)))
    groups = []
    stages = job.num_stages
    tightest = rng.random() < 0.5
    while stages:
        length = int(rng.integers(1, stages + 1))
        stages -= length
        source = free
        if not tightest:
            source = _take_near(free, 0, problem.averaging_s, length * job.num_replicas)
        pipelines = []
        for _ in range(job.num_replicas):
            first = _tightest(source, problem.passing_s, length) if tightest else 0
            pipelines.append(_take_near(source, first, problem.passing_s, length))
        groups += np.array(pipelines).T.tolist()
    return np.concatenate([*groups, free]).astype(np.int64)


def _tightest(free: list, costs: np.ndarray, size: int) -> int:
    """Where in ``free`` is the device whose size - 1 nearest others in it are nearest."""
    mutual = costs[np.ix_(free, free)]
    # A device's cost to itself is 0, the least of its row.
    return int(np.partition(mutual, size - 1, axis=1)[:, :size].sum(axis=1).argmin())


def _take_near(free: list, first: int, costs: np.ndarray, size: int) -> list:
    """Move a free device and size - 1 others, each the nearest to those so far, out of ``free``."""
    taken = [free.pop(first)]
    sums = costs[taken[0]].copy()
    while len(taken) < size:
        nearest = min(range(len(free)), key=lambda k: sums[free[k]])
        taken.append(free.pop(nearest))
        sums += costs[taken[-1]]
    return taken
