"""The named schedules: rings, exponential graphs, grids, Base-(k+1), and random ones.

Every round is compiled separately, so a random schedule is also a fixed cycle: its rounds are drawn
once, from a seed, when the schedule is built. The stream of NumPy's `RandomState` never changes, so
a seed gives the same schedule in every process, on every machine and after a resume. Rounds that do
not connect all replicas over a period are drawn again.
"""

import functools
import math
from collections.abc import Callable, Collection

import numpy as np

from decent_jax.topology.rounds import (
    Round,
    connected_parts,
    grouped,
    metropolis_hastings,
    pairwise,
    round_of,
)

DRAWS = 100  # attempts to draw a random schedule that connects all replicas


def complete(n: int) -> list[Round]:
    return [grouped(n, n)]


def ring(n: int) -> list[Round]:
    if n % 2:
        raise ValueError("needs an even number; use one_peer_exp or bidirectional_ring")
    replicas = np.arange(n)
    even = replicas ^ 1
    odd = np.where(replicas % 2 == 1, replicas + 1, replicas - 1) % n
    return [pairwise(even)] if n == 2 else [pairwise(even), pairwise(odd)]


def bidirectional_ring(n: int) -> list[Round]:
    return [_equal_shifts(n, {1, n - 1})]


def static_exp(n: int) -> list[Round]:
    return [_equal_shifts(n, [2**k for k in range(math.ceil(math.log2(n)))])]


def _equal_shifts(n: int, shifts: Collection[int]) -> Round:
    """The round in which replica i averages with all replicas i - shift, with equal weights."""
    received = sum(np.roll(np.eye(n), shift, axis=0) for shift in shifts)
    return round_of((np.eye(n) + received) / (len(shifts) + 1))


def one_peer_exp(n: int) -> list[Round]:
    rounds = math.ceil(math.log2(n))
    return [pairwise((np.arange(n) - 2**r) % n) for r in range(rounds)]


def hypercube(n: int) -> list[Round]:
    if n & (n - 1):
        raise ValueError(f"needs a power of two; use one_peer_exp{'' if n % 2 else ' or ring'}")
    return [pairwise(np.arange(n) ^ 2**r) for r in range(n.bit_length() - 1)]


def alternating_exp_ring(n: int, *, replicas_per_node: int) -> list[Round]:
    """Averages inside every node, then across half of the pairs of nodes (j, j XOR 2^i).

    Each i has two rounds, one for each half of the pairs, so only half of the nodes use the network
    at a time.
    """
    nodes = n // replicas_per_node
    if replicas_per_node < 2 or n % replicas_per_node or nodes < 2 or nodes & (nodes - 1):
        raise ValueError(
            "needs replicas_per_node >= 2 and replicas_per_node x 2^k replicas (k >= 1), got "
            f"replicas_per_node {replicas_per_node}; use one_peer_exp"
            f"{'' if n & (n - 1) else ' or hypercube'}"
        )
    rounds: list[Round] = []
    for i in range(nodes.bit_length() - 1):
        pairs = [(j, j ^ 2**i) for j in range(nodes) if j < j ^ 2**i]
        for parity in (0, 1):
            partner = np.full(nodes, -1)
            for c, (low, high) in enumerate(pairs):
                if c % 2 != parity:
                    partner[low], partner[high] = high, low
            rounds.append(grouped(n, replicas_per_node, partner))
    return rounds


def star(n: int) -> list[Round]:
    neighbours = np.zeros((n, n), bool)
    neighbours[0, 1:] = neighbours[1:, 0] = True
    return [round_of(metropolis_hastings(neighbours))]


def grid(n: int, *, rows: int | None = None) -> list[Round]:
    return [_lattice(n, rows, wraps=False)]


def torus(n: int, *, rows: int | None = None) -> list[Round]:
    return [_lattice(n, rows, wraps=True)]


def _lattice(n: int, rows: int | None, wraps: bool) -> Round:
    """The round on a grid with replica i in row ``i // columns`` and column ``i % columns``."""
    if rows is None:  # as square as n allows; a prime n gives one line
        rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
    if rows < 1 or n % rows:
        raise ValueError(f"rows must divide the number of replicas, got {rows}")
    place = np.arange(n).reshape(rows, n // rows)
    neighbours = np.zeros((n, n), bool)
    for line in (*place, *place.T):  # the end of a line has no successor unless it wraps
        here, there = (line, np.roll(line, -1)) if wraps else (line[:-1], line[1:])
        neighbours[here, there] = neighbours[there, here] = True
    return round_of(metropolis_hastings(neighbours))


def base_k(n: int, *, max_degree: int = 1) -> list[Round]:
    """The Base-(k+1) graph: exact consensus in finitely many rounds, for any n and any degree k.

    Takezawa, Sato, Bao, Niwa and Yamada, "Beyond Exponential Graph: Communication-Efficient
    Topologies for Decentralized Learning via Finite-time Convergence" (NeurIPS 2023). Three
    constructions, each built from the previous one, all symmetric and doubly stochastic:

    - **hyper-hypercube**, where n has no prime factor above k+1: replicas are numbered in
      mixed radix with bases n_1, ..., n_L <= k+1, and round l averages those that differ only in
      digit l;
    - **simple Base-(k+1)**, for any n: the replicas are split by the digits of n in base k+1, n =
      sum_l a_l (k+1)^p_l. Each part averages, then each in turn passes its mean to the later parts;
    - **Base-(k+1)**, n = p q, where p has the prime factors up to k+1 and q the larger ones: p
      parallel copies of the simple graph of q, then hyper-hypercubes of p across them; or the
      simple graph of n if that takes fewer rounds.
    """
    if max_degree < 1:
        raise ValueError(f"max_degree must be at least 1, got {max_degree}")
    return [round_of(matrix) for matrix in _base(n, max_degree)]


def _base(n: int, k: int) -> list[np.ndarray]:
    p, q = _split_factors(n, k)
    side_by_side = [np.kron(np.eye(p), matrix) for matrix in _simple(q, k)]
    across = [np.kron(matrix, np.eye(q)) for matrix in _hyper_hypercube(p, k)]
    simple = _simple(n, k)
    product = side_by_side + across
    return simple if len(simple) < len(product) else product


def _hyper_hypercube(n: int, k: int) -> list[np.ndarray]:
    """Round l averages the replicas that differ only in digit l, the fastest digit first."""
    rounds: list[np.ndarray] = []
    stride = 1
    for digit in _fewest_factors(n, k):
        mean = np.full((digit, digit), 1 / digit)
        rounds.append(np.kron(np.kron(np.eye(n // (stride * digit)), mean), np.eye(stride)))
        stride *= digit
    return rounds


def _simple(n: int, k: int) -> list[np.ndarray]:
    if _split_factors(n, k)[1] == 1:
        return _hyper_hypercube(n, k)
    # One part per nonzero digit a of n, the highest first: a sets, its rows, of (k+1)^p replicas.
    parts: list[np.ndarray] = []
    first = 0
    for p in reversed(range(n.bit_length())):
        size: int = (k + 1) ** p
        count = (n - first) // size
        if count:
            parts.append(np.arange(first, first + count * size).reshape(count, size))
            first += count * size
    inside = [_hyper_hypercube(part.size, k) for part in parts]  # the whole part
    again = [_hyper_hypercube(part.shape[1], k) for part in parts]  # each of its sets
    start = len(inside[0])
    rounds: list[np.ndarray] = []
    for m in range(start + 1 + len(again[0])):
        matrix = np.eye(n)
        for index, part in enumerate(parts):
            since = m - start - index  # rounds since the part passed its mean on
            if m < len(inside[index]):
                matrix[np.ix_(part.ravel(), part.ravel())] = inside[index][m]
            elif since == 0 and index < len(parts) - 1:
                _hand_over(matrix, part, n - part[0, 0], k)
            elif 0 < since <= len(again[index]):
                for members in part:
                    matrix[np.ix_(members, members)] = again[index][since - 1]
        rounds.append(matrix)
    return rounds


def _hand_over(matrix: np.ndarray, part: np.ndarray, remaining: int, k: int) -> None:
    """Lets each replica after ``part`` average with one replica of each set, a row of ``part``.

    All replicas of the part hold its mean, and fewer replicas follow it than a set has members.
    ``remaining`` counts the replicas of the part and those after it. With the weight |part| /
    (number of sets * remaining), the mean over the replicas after the part becomes the mean over
    all ``remaining`` replicas. So does the mean over each set, which then averages internally.
    Replicas without a partner average among themselves, k+1 at a time.
    """
    count, size = part.shape
    after = np.arange(int(part[-1, -1]) + 1, int(part[0, 0]) + remaining)
    for members in part:
        for replica, met in zip(after, members[size - len(after) :], strict=True):
            weight = part.size / (count * remaining)
            matrix[replica, met] = matrix[met, replica] = weight
            matrix[replica, replica] -= weight
            matrix[met, met] -= weight
    alone = part[:, : size - len(after)].ravel()
    for i in range(0, len(alone), k + 1):
        group = alone[i : i + k + 1]
        matrix[np.ix_(group, group)] = 1 / len(group)


def _split_factors(n: int, k: int) -> tuple[int, int]:
    """(p, q) with n = p q: p has the prime factors of n up to k+1, q the others."""
    p = 1
    for factor in range(2, k + 2):
        while n % factor == 0:
            p, n = p * factor, n // factor
    return p, n


@functools.cache
def _fewest_factors(n: int, k: int) -> tuple[int, ...]:
    """n as a product of as few numbers up to k+1 as possible (it has no larger prime factor)."""
    if n == 1:
        return ()
    choices = [
        (factor, *_fewest_factors(n // factor, k))
        for factor in range(2, min(n, k + 1) + 1)
        if n % factor == 0
    ]
    return min(choices, key=len)


# --- Random schedules -----------------------------------------------------------------------------


def random_matching(
    n: int, *, rounds: int = 8, seed: int = 0, degree: int | None = None, probability: float = 1.0
) -> list[Round]:
    if not 0 < probability <= 1:
        raise ValueError(f"probability must be above 0 and at most 1, got {probability}")
    rng = _random_state(seed)
    graph = None if degree is None else _regular_graph(n, degree, rng).matrix

    def partners():
        partner = _matching(n, rng) if graph is None else _matching_of(graph, rng)
        if probability == 1:
            return partner
        drawn = rng.random_sample(n) < probability
        lower = np.minimum(partner, np.arange(n))  # the lower number of a pair decides
        return np.where((partner >= 0) & drawn[lower], partner, -1)

    def draw():
        return [pairwise(partners()) for _ in range(1 if n == 2 and probability == 1 else rounds)]

    return _connected(draw, f"with {rounds} rounds; use more rounds")


def random_out(n: int, *, degree: int | None = None, seed: int = 0) -> list[Round]:
    """The column-stochastic round in which each replica sends to ``degree`` random others."""
    if degree is None:
        # Every replica needs a sender: degree 2 up to 16 replicas, then about ln n.
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
        probability = min(1.0, 2 * math.log(n) / n)  # twice the connectivity threshold
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
            f"needs a degree from 2 to n - 1, an even one if n is odd, got {degree}; use "
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
    """Draws rounds until they connect all replicas, at most `DRAWS` times (else ValueError)."""
    for _ in range(DRAWS):
        rounds = draw()
        if connected_parts([rnd.matrix for rnd in rounds]).max() == 0:
            return rounds
    raise ValueError(f"{DRAWS} random draws did not connect them {hint}")


def _matching(n: int, rng: np.random.RandomState) -> np.ndarray:
    """(n,) partners: consecutive members of a random order; if n is odd, the last is idle."""
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

    The ends of edges are joined at random. Pairs that would be a loop or a double edge are split,
    shuffled and joined again; if no two of the remaining ends may be joined, everything restarts.
    The distribution approaches the uniform one over all such graphs as n grows (Steger and Wormald
    1999).
    """
    while True:
        neighbours = np.zeros((n, n), bool)
        ends = np.repeat(np.arange(n), degree)
        while len(ends):
            rejected: list[int] = []
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
