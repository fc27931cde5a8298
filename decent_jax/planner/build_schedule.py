"""A schedule made for one network: who mixes with whom, in which order, to agree fastest.

A round is W = (I + P_1 + ... + P_d) / (d + 1) with permutations P of the replicas, or of groups of
g neighbouring replicas that take their mean first (reduce-scatter, exchange of shards, all-gather).
The covariance S of the replicas' distances from their mean decides who mixes with whom: a round
leaves

    trace(W S W') = (trace S + trace(P S)) / 2        for d = 1,

so the best permutation that uses no link slower than a limit is an assignment problem with costs S,
which is solved exactly. For a further permutation the costs are those of (I + P_1 + ...) S. A
greedy run takes at every step the limit at which disagreement falls fastest per second. A local
search then replaces, adds, drops and exchanges rounds of the cycle as long as its
`gossip_placement.disagreement_s` falls.
"""

import dataclasses
import itertools

import numpy as np
from scipy.optimize import linear_sum_assignment

from decent_jax.planner.gossip_placement import (
    PlacedSchedule,
    clock,
    evaluate,
    group_link_s,
    grouped_order,
    settled_covariances,
    time_average,
)
from decent_jax.planner.network import Network
from decent_jax.topology import Schedule
from decent_jax.topology.rounds import grouped, kron

MOST_LIMITS = 16  # limits of how slow a link may be that a greedy step tries
MOST_GROUPS = 64  # judging a change takes some 16 MOST_GROUPS^3 operations
MOST_ROUNDS = 16  # training compiles one executable per round
NAME = "built"


def build_schedule(
    network: Network,
    num_bytes: float,
    *,
    max_degree: int = 1,
    compute_s: float = 0.0,
    seed: int = 0,
    time_limit_s: float = 5.0,
    steps: int | None = None,
    progress: bool = False,
) -> PlacedSchedule:
    """The schedule of at most 16 rounds that leaves the least disagreement, as far as found.

    The search tries all group sizes that divide the number of devices into at most 64 groups, and
    chooses the order of the replicas so that groups are of near devices.

    Args:
      num_bytes: of one model on the wire.
      max_degree: permutations per round at most: messages that a replica sends out of its group.
      compute_s: the step that hides communication; no round is shorter.
      steps: changes to try at most, for every group size; then, unless the time is up first, a seed
          has one result.
      progress: show a bar that counts seconds.
    """
    n = network.num_devices
    if n == 1:
        return evaluate(network, Schedule.from_matrices([np.ones((1, 1))], NAME), num_bytes)
    rng = np.random.default_rng(seed)
    with clock(time_limit_s, steps, "building a schedule", progress) as parts:
        sizes = [size for size in range(1, n // 2 + 1) if n % size == 0]
        sizes = [size for size in sizes if n // size <= MOST_GROUPS] or sizes[-1:]
        cycles = [_Cycle(network, size, num_bytes, max_degree, compute_s) for size in sizes]
        for _ in parts:
            for cycle in cycles:
                cycle.change(rng)
            # A size far behind is given up, so that the others have the time.
            best = min(cycle.disagreement_s for cycle in cycles)
            cycles = [cycle for cycle in cycles if cycle.disagreement_s <= 1.5 * best]
    built = [
        evaluate(network, cycle.schedule(), num_bytes, cycle.order, compute_s=compute_s)
        for cycle in cycles
    ]
    return min(built, key=lambda placed: placed.disagreement_s)


@dataclasses.dataclass(frozen=True, eq=False)
class _Mix:
    """A round over m groups: its (m, m) matrix, and its length."""

    matrix: np.ndarray
    seconds: float


class _Cycle:
    """Rounds over groups of one size, and the disagreement that they leave."""

    def __init__(
        self,
        network: Network,
        group_size: int,
        num_bytes: float,
        max_degree: int,
        compute_s: float,
    ) -> None:
        self.group_size, self.max_degree, self.compute_s = group_size, max_degree, compute_s
        self.order, self.group_s = grouped_order(network, group_size, num_bytes)
        self.m = network.num_devices // group_size
        self.link_s = group_link_s(network.take(self.order), group_size, num_bytes)
        values = np.unique(self.link_s[~np.eye(self.m, dtype=bool)])
        if len(values) > MOST_LIMITS:
            values = np.quantile(values, np.linspace(0, 1, MOST_LIMITS), method="lower")
        self.limits = np.unique(values)
        self.mixes: list[_Mix] = []
        self.disagreement_s = np.inf
        self._start()

    def _start(self) -> None:
        """Take the best stretch of three greedy runs.

        The first sees disagreement alone; the second may use all links in every round, which
        surely mixes all replicas; the third sees drift too.
        """
        centre = np.eye(self.m) - 1 / self.m
        most = min(MOST_ROUNDS, 3 * int(np.ceil(np.log2(self.m))) + 4)
        for limits, drift in ((self.limits, False), (self.limits[-1:], False), (self.limits, True)):
            run, covariance = [], centre
            while len(run) < most and np.trace(covariance) > 1e-9:
                mix = self._greedy_mix(covariance, limits, drift)
                covariance = mix.matrix @ covariance @ mix.matrix.T
                if drift:
                    covariance = covariance + mix.seconds * centre
                run.append(mix)
                for begin in range(len(run)) if drift else (0,):
                    self._keep_if_better(run[begin:])

    def change(self, rng: np.random.Generator) -> None:
        """Try one change of the cycle."""
        mixes, k = list(self.mixes), int(rng.integers(len(self.mixes)))
        kind = rng.choice(4, p=(0.5, 0.2, 0.15, 0.15))
        if kind <= 1:  # another round in place of this one, or before it
            before = settled_covariances(
                [mix.matrix for mix in mixes], [mix.seconds for mix in mixes]
            )[k]
            noise = rng.normal(size=before.shape) * rng.choice((0.0, 0.05, 0.3)) * before.std()
            degree = int(rng.integers(1, self.max_degree + 1))
            mix = self._mix(before + noise + noise.T, rng.choice(self.limits), degree)
            mixes[k : k + 1 - kind] = [mix]
        elif kind == 2 and len(mixes) > 1:
            del mixes[k]
        else:
            j = int(rng.integers(len(mixes)))
            mixes[j], mixes[k] = mixes[k], mixes[j]
        self._keep_if_better(mixes)

    def schedule(self) -> Schedule:
        """As rounds of replicas: groups take their mean, then member k receives from members k."""
        between = Schedule.from_matrices([mix.matrix for mix in self.mixes], NAME)
        if self.group_size == 1:
            return between
        inside = grouped(self.group_size, self.group_size)
        rounds = tuple(kron(rnd, inside) for rnd in between.rounds)
        return Schedule(NAME, self.m * self.group_size, rounds)

    def _keep_if_better(self, mixes: list[_Mix]) -> None:
        if len(mixes) > MOST_ROUNDS:
            return
        value = self._disagreement_s(mixes)
        if value < self.disagreement_s * (1 - 1e-9):
            self.mixes, self.disagreement_s = mixes, value

    def _disagreement_s(self, mixes: list[_Mix]) -> float:
        """As `gossip_placement.disagreement_s`; inside a group only a round's own drift is left."""
        seconds = np.array([mix.seconds for mix in mixes])
        if seconds.min() == 0:  # nobody sends
            return np.inf
        before = settled_covariances([mix.matrix for mix in mixes], seconds)
        between = np.array([np.trace(covariance) for covariance in before])
        n = self.m * self.group_size
        inside = np.roll(seconds, 1) * (n - self.m)
        return time_average((between + inside) / (n - 1), seconds)

    def _greedy_mix(self, covariance: np.ndarray, limits: np.ndarray, drift: bool) -> _Mix:
        """The round after which disagreement has fallen most per second.

        Under drift, where disagreement cannot vanish, its value counts; else its logarithm.
        """

        def fall_per_s(mix: _Mix) -> float:
            if mix.seconds == 0:  # nobody sends
                return -np.inf
            now, then = np.trace(covariance), np.trace(mix.matrix @ covariance @ mix.matrix.T)
            fall = now - then if drift else -np.log(max(then / now, 1e-12))
            return fall / mix.seconds

        degrees = range(1, self.max_degree + 1)
        choices = itertools.product(limits, degrees)
        return max((self._mix(covariance, *choice) for choice in choices), key=fall_per_s)

    def _mix(self, covariance: np.ndarray, limit: float, degree: int) -> _Mix:
        """The best round of ``degree`` permutations that uses no link slower than the limit."""
        eye = np.eye(self.m)
        forbidden = self.link_s > limit
        total, sources = eye, []
        for _ in range(degree):
            assignment = total @ covariance
            assignment[forbidden] = np.abs(assignment).max() * self.m + 1
            sources.append(linear_sum_assignment(assignment)[1])
            total = total + eye[sources[-1]]
        return _Mix(total / (degree + 1), self._seconds(sources))

    def _seconds(self, sources: list[np.ndarray]) -> float:
        receiver = np.arange(self.m)
        exchange = sum(self.link_s[source, receiver].max() for source in sources)
        return max(self.compute_s, self.group_s + exchange)
