"""Placement of replicas on devices such that the rounds of a schedule use the fast links.

The less disagreement a schedule leaves, the better it suits a network. Assume that the parameters
of every replica drift by independent noise of variance 1 per second, as in training on different
data. A round sends the parameters that the replicas have at its beginning. At its end, after the
time that the network needs, the mix replaces them, and the drift since the beginning is added
(``combine="awc"``). The mean squared distance from the mean then becomes periodic. Its average over
time, relative to the effect of one second of drift, is the schedule's **disagreement**, in seconds:
the age of the drift that has not been averaged away.

For rounds of equal length t it is

    t (1/2 + sum over k = 0, 1, ... of ||W_k ... W_1 - J||_F^2 / (n - 1)),

averaged over all choices of W_1: 3/2 t for `complete`, t (1/2 + mean_i 1 / (1 - lambda_i^2)) for
one symmetric W. Unlike -log(consensus_rate) / t, disagreement is finite for schedules that become
exact (one_peer_exp, hypercube, alternating_exp_ring). Unlike the contraction of a single round, it
rewards them for this. It weighs a round's mixing against its time, for static and varying
schedules alike. The order of the replicas matters only through the time of rounds.
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

from decent_jax.planner import costs
from decent_jax.planner.network import Network
from decent_jax.topology import Schedule

_FEW = 6  # devices; up to this number, all orders (720) are compared, in about 1 ms each


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedSchedule:
    """A schedule on a network.

    order: (n,) int; replica i is on device ``order[i]``.
    round_s: seconds of every round, `costs.round_s` (or ``compute_s`` if that is longer).
    disagreement_s: in seconds, see the module's docstring.
    """

    schedule: Schedule
    order: np.ndarray
    round_s: tuple[float, ...]
    disagreement_s: float

    @property
    def mean_round_s(self) -> float:
        return sum(self.round_s) / len(self.round_s)


def evaluate(
    network: Network,
    schedule: Schedule,
    num_bytes: float,
    order: ArrayLike | None = None,
    *,
    compute_s: float = 0.0,
) -> PlacedSchedule:
    """The times and the disagreement of a schedule with replica i on device ``order[i]``.

    Args:
      num_bytes: bytes of one model as a message.
      order: (n,) int; None: replica i is on device i.
      compute_s: seconds of the step that hides communication; no round is shorter.
    """
    devices = np.arange(network.num_devices) if order is None else np.asarray(order, np.int64)
    round_s = _evaluate_rounds(network.take(devices), schedule, num_bytes, compute_s)
    matrices = [rnd.matrix for rnd in schedule.rounds]
    return PlacedSchedule(schedule, devices, round_s, disagreement_s(matrices, round_s))


def _evaluate_rounds(
    network: Network, schedule: Schedule, num_bytes: float, compute_s: float
) -> tuple[float, ...]:
    """Seconds of every round, none shorter than ``compute_s``; replica i is on device i."""
    return tuple(
        max(compute_s, costs.round_s(network, schedule, r, num_bytes))
        for r in range(schedule.period)
    )


def disagreement_s(matrices: Sequence[np.ndarray], round_s: ArrayLike) -> float:
    """The schedule's disagreement, in seconds, for these rounds; see the module's docstring.

    Args:
      matrices: (n, n) each. If they do not contract, the result is infinite.
    """
    n = len(matrices[0])
    if n == 1:
        return 0.0
    before, seconds = _settled_covariances(matrices, round_s), np.asarray(round_s, float)
    distance = np.array([np.trace(covariance) / (n - 1) for covariance in before])
    # The average over time: each round begins with its distance and adds 1 per second.
    return float(seconds @ (distance + seconds / 2) / seconds.sum())


def _settled_covariances(matrices: Sequence[np.ndarray], round_s: ArrayLike) -> list[np.ndarray]:
    """The steady covariance of the replicas' distances from the mean before every round.

    It solves ``S = M S M' + N`` over a period by summing ``N + M N M' + M^2 N M'^2 + ...``, with
    twice as many terms each time. All entries are infinite if the sum does not converge.
    """
    n, lengths = len(matrices[0]), np.asarray(round_s, float)
    centre = np.eye(n) - 1 / n
    period, noise = centre, np.zeros((n, n))
    for matrix, seconds in zip(matrices, lengths, strict=True):
        noise = matrix @ noise @ matrix.T + seconds * centre
        period = matrix @ period
    settled = noise
    for _ in range(40):
        more = period @ settled @ period.T
        settled = settled + more
        if np.abs(more).max() <= 1e-15 * np.abs(settled).max():
            break
        period = period @ period
    else:
        return [np.full((n, n), np.inf)] * len(matrices)
    before = [settled]
    for matrix, seconds in zip(matrices[:-1], lengths[:-1], strict=True):
        before.append(matrix @ before[-1] @ matrix.T + seconds * centre)
    return before


def place_schedule(
    network: Network,
    schedule: Schedule,
    num_bytes: float,
    *,
    compute_s: float = 0.0,
    seed: int = 0,
    time_limit_s: float = 5.0,
    steps: int | None = None,
    progress: bool = False,
) -> PlacedSchedule:
    """The schedule, with its replicas placed so that a period takes the least time found.

    For up to 6 devices, it is the best of all orders. For more, simulated annealing (Kirkpatrick et
    al. 1983) starts from the best of several regular orders and exchanges two replicas or two
    evenly spaced groups of replicas. If the network's own order leaves less disagreement, the
    result has that order.

    Args:
      steps: the largest number of exchanges; None: no limit. With a limit, the result depends only
        on the seed, unless the time runs out first.
      progress: whether to show a bar that counts seconds.

    Raises:
      ValueError: the network does not have one device per replica.
    """
    listed = evaluate(network, schedule, num_bytes, compute_s=compute_s)
    if network.num_devices == 1:
        return listed
    rng = np.random.default_rng(seed)
    starts = [np.arange(network.num_devices), *_regular_orders(network, num_bytes)]
    wanted = schedule, num_bytes, compute_s
    cost = (
        _Permutes(network, *wanted)
        if all(rnd.group_size == 1 for rnd in schedule.rounds)
        else lambda order: sum(_evaluate_rounds(network.take(order), *wanted))
    )
    with clock(time_limit_s, steps, "placing replicas", progress) as parts:
        if network.num_devices <= _FEW:
            best = min(map(np.array, itertools.permutations(starts[0])), key=cost)
        else:
            best = anneal(starts, cost, rng, parts)
    placed = evaluate(network, schedule, num_bytes, best, compute_s=compute_s)
    return min(placed, listed, key=lambda result: result.disagreement_s)


def anneal(
    starts: Sequence[np.ndarray],
    cost: Callable[[np.ndarray], float],
    rng: np.random.Generator,
    parts: Iterable[float],
) -> np.ndarray:
    """The cheapest order that simulated annealing finds, starting from the best of some orders."""
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


@contextlib.contextmanager
def clock(
    time_limit_s: float, steps: int | None, what: str, progress: bool
) -> Iterator[Iterator[float]]:
    """Yields an iterator over the completed share of a search, from 0 to 1, until it must stop."""
    start = time.perf_counter()

    def parts(bar: tqdm) -> Iterator[float]:
        for step in itertools.count():
            elapsed_s = time.perf_counter() - start
            if elapsed_s >= time_limit_s or step == steps:
                return
            bar.update(elapsed_s - bar.n)
            yield step / steps if steps else elapsed_s / time_limit_s

    form = "{desc} |{bar}| {n:.1f}/{total:.0f} s"
    with tqdm(total=time_limit_s, disable=not progress, desc=what, bar_format=form) as bar:
        yield parts(bar)


class _Permutes:
    """Seconds of a period of permutations, computed in about 30 microseconds.

    A hundredth of the mean transfer time is added per round, so that exchanges that leave the
    slowest transfer unchanged count too. A transfer gets an equal share of each of its two network
    cards, or its own link if that is slower. This is the exact rate of the slowest transfer,
    because max-min fairness only gives larger shares to others.
    """

    def __init__(
        self, network: Network, schedule: Schedule, num_bytes: float, compute_s: float
    ) -> None:
        self.network, self.num_bytes, self.compute_s = network, num_bytes, compute_s
        parts, round_of_send = [], []
        for r, rnd in enumerate(schedule.rounds):
            for send in rnd.sends:
                moved = (send.sources >= 0) & (send.sources != np.arange(len(send.sources)))
                if moved.any():
                    target = np.flatnonzero(moved)
                    this = np.full(len(target), len(round_of_send))
                    parts.append(np.stack([this, send.sources[target], target]))
                    round_of_send.append(r)
        self.send, self.source, self.target = np.concatenate(parts, axis=1)
        self.first = np.flatnonzero(np.diff(self.send, prepend=-1))
        self.first_of_round = np.flatnonzero(np.diff(round_of_send, prepend=-1))

    def __call__(self, order: np.ndarray) -> float:
        network, nodes = self.network, self.network.num_nodes
        source, target = order[self.source], order[self.target]
        rate = network.bandwidth_bytes_per_s[source, target]
        out, into = network.node[source], network.node[target]
        leaves = out != into
        for node in (out, into):
            key = self.send * nodes + node
            users = np.bincount(key[leaves], minlength=nodes * len(self.first))
            share = network.nic_bytes_per_s[node] / np.maximum(users[key], 1)
            rate = np.where(leaves, np.minimum(rate, share), rate)
        seconds = network.latency_s[source, target] + self.num_bytes / rate
        slowest = np.maximum.reduceat(seconds, self.first)
        rounds = np.maximum(np.add.reduceat(slowest, self.first_of_round), self.compute_s)
        return float(rounds.sum() + 0.01 * len(rounds) * seconds.mean())


def _exchanged(order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A copy of ``order`` with two replicas, or two evenly spaced groups of replicas, swapped."""
    n = len(order)
    order = order.copy()
    length = 2 ** int(rng.integers(0, max(1, int(math.log2(n))))) if rng.random() < 0.5 else 1
    stride = 2 ** int(rng.integers(0, max(1, int(math.log2(n / length)))))
    row = stride * np.arange(length)
    first, second = ((start + row) % n for start in rng.integers(0, n, 2))
    if len(np.intersect1d(first, second)) == 0:
        order[first], order[second] = order[second], order[first].copy()
    return order


def _regular_orders(network: Network, num_bytes: float) -> list[np.ndarray]:
    """Orders in which clusters of nearby devices, of every size, are consecutive or interleaved."""
    n = network.num_devices
    seconds = costs.link_s(network, num_bytes)
    orders = []
    for size in (size for size in range(2, n) if n % size == 0):
        clusters = np.array(near_clusters(seconds, size, first=0))
        orders += [clusters.ravel(), clusters.T.ravel()]
    return orders


def near_clusters(seconds: np.ndarray, size: int, first: int) -> list[list[int]]:
    """Clusters of ``size`` devices, the first grown from device ``first``.

    A cluster grows by the free device nearest to its members; the next cluster begins with the free
    device farthest from the previous cluster.
    """
    free = list(range(len(seconds)))
    mutual = seconds + seconds.T
    clusters = [take_near(free, first, mutual, size)]
    while free:
        to_cluster = mutual[clusters[-1]].sum(axis=0)
        clusters.append(take_near(free, int(to_cluster[free].argmax()), mutual, size))
    return clusters


def take_near(free: list, first: int, costs: np.ndarray, size: int) -> list:
    """Takes ``free[first]`` out of ``free``, then size - 1 devices, each nearest to those taken."""
    taken = [free.pop(first)]
    sums = costs[taken[0]].copy()
    while len(taken) < size:
        taken.append(free.pop(int(sums[free].argmin())))
        sums += costs[taken[-1]]
    return taken
