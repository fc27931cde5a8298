"""The random schedules, drawn once, from a seed.

Every round is compiled, so a random schedule is a cycle like any other: its rounds are drawn when
it is made. NumPy's `RandomState` never changes what it draws, so a seed means the same schedule in
every process, on every machine and after a resume. A draw that does not connect all replicas
over a period is drawn again.
"""

import math
from collections.abc import Callable

import numpy as np

from decent_jax.topology.rounds import (
    Round,
    connected_parts,
    metropolis_hastings,
    pairwise,
    round_of,
)

DRAWS = 100


def random_matching(
    n: int, *, rounds: int = 8, seed: int = 0, degree: int | None = None, meet: float = 1.0
) -> list[Round]:
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not 0 < meet <= 1:
        raise ValueError(f"meet must be above 0 and at most 1, got {meet}")
    rng = _random_state(seed)
    graph = None if degree is None else _regular_graph(n, degree, rng).matrix

    def partners():
        partner = _matching(n, rng) if graph is None else _matching_of(graph, rng)
        if meet == 1:
            return partner
        kept = rng.random_sample(n) < meet
        lower = np.minimum(partner, np.arange(n))  # the lower number of a pair decides
        return np.where((partner >= 0) & kept[lower], partner, -1)

    def draw():
        return [pairwise(partners()) for _ in range(1 if n == 2 and meet == 1 else rounds)]

    return _connected(draw, f"with {rounds} rounds; use more rounds")


def random_out(n: int, *, degree: int | None = None, seed: int = 0) -> list[Round]:
    """Column stochastic only: each replica sends to ``degree`` others."""
    if degree is None:
        # Nobody may be left without a sender: 2 up to 16 replicas, then about ln n.
        degree = min(max(2, math.ceil(math.log(n / 2.2))), n - 1)
    if not 1 <= degree < n:
        raise ValueError(f"degree must be from 1 to n - 1 = {n - 1}, got {degree}")
    rng = _random_state(seed)

    def draw():
        receives = np.eye(n)
        for sender in range(n):
            others = np.delete(np.arange(n), sender)
            receives[rng.permutation(others)[:degree], sender] = 1
        return [round_of(receives / (degree + 1))]

    return _connected(draw, f"with degree {degree}; use a larger degree")


def equi_dynamic(n: int, *, rounds: int = 8, seed: int = 0) -> list[Round]:
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    rng = _random_state(seed)

    def draw():
        shifts = 1 + rng.permutation(n - 1)[:rounds]
        return [pairwise((np.arange(n) - shift) % n) for shift in shifts]

    return _connected(draw, f"with {rounds} rounds; use more rounds")


def random_regular(n: int, *, degree: int | None = None, seed: int = 0) -> list[Round]:
    if degree is None:
        degree = min(4, n - 1)
    return [_regular_graph(n, degree, _random_state(seed))]


def erdos_renyi(n: int, *, probability: float | None = None, seed: int = 0) -> list[Round]:
    if probability is None:
        probability = min(1.0, 2 * math.log(n) / n)  # twice where such graphs become connected
    if not 0 < probability <= 1:
        raise ValueError(f"probability must be above 0 and at most 1, got {probability}")
    rng = _random_state(seed)

    def draw():
        above = np.triu(rng.random_sample((n, n)) < probability, k=1)
        return [round_of(metropolis_hastings(above | above.T))]

    return _connected(draw, f"with probability {probability:g}; use a larger probability")


def _regular_graph(n: int, degree: int, rng: np.random.RandomState) -> Round:
    """The round of a random connected graph in which every replica has ``degree`` neighbours."""
    if not min(2, n - 1) <= degree < n or n * degree % 2:
        raise ValueError(
            f"needs a degree from 2 to n - 1, even where n is odd, got degree {degree}; use "
            "complete or random_matching"
        )

    few = min(degree, n - 1 - degree)  # a dense graph is drawn as its complement

    def draw():
        graph = _regular(n, few, rng)
        return [round_of(metropolis_hastings(graph if few == degree else ~graph))]

    (rnd,) = _connected(draw, f"with degree {degree}; use a larger degree")
    return rnd


def _random_state(seed: int) -> np.random.RandomState:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2^32 - 1, got {seed}")
    return np.random.RandomState(seed)


def _connected(draw: Callable[[], list[Round]], hint: str) -> list[Round]:
    """The first drawn rounds that connect all replicas."""
    for _ in range(DRAWS):
        rounds = draw()
        if connected_parts([rnd.matrix for rnd in rounds]).max() == 0:
            return rounds
    raise ValueError(f"{DRAWS} draws left them unconnected {hint}")


def _matching(n: int, rng: np.random.RandomState) -> np.ndarray:
    """(n,) partners: consecutive members of a random order; the last of an odd number idles."""
    order = rng.permutation(n)
    first, second = order[: n - n % 2].reshape(-1, 2).T
    partner = np.full(n, -1)
    partner[first], partner[second] = second, first
    return partner


def _matching_of(graph: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    """(n,) partners: edges of the graph in random order, each taken if both ends are free."""
    partner = np.full(len(graph), -1)
    for i, j in rng.permutation(np.argwhere(np.triu(graph, k=1))):
        if partner[i] < 0 and partner[j] < 0:
            partner[i], partner[j] = j, i
    return partner


def _regular(n: int, degree: int, rng: np.random.RandomState) -> np.ndarray:
    """(n, n) bool: a random simple graph in which every replica has ``degree`` neighbours.

    Free ends of edges are joined at random; ends that may not be joined (oneself, or a neighbour
    already) are mixed and joined again, and all starts over if no two of them may be. This is
    uniform over all such graphs up to an error that vanishes with n (Steger and Wormald 1999).
    """
    while True:
        neighbours = np.zeros((n, n), bool)
        ends = np.repeat(np.arange(n), degree)
        while len(ends):
            rejected = []
            for i, j in rng.permutation(ends).reshape(-1, 2):
                if i == j or neighbours[i, j]:
                    rejected += [i, j]
                else:
                    neighbours[i, j] = neighbours[j, i] = True
            ends = np.array(rejected, int)
            left = np.unique(ends)
            if len(ends) and (neighbours[np.ix_(left, left)] | np.eye(len(left), dtype=bool)).all():
                break
        else:
            return neighbours
