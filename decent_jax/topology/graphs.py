"""The named schedules that are not random: rings, exponential graphs, grids, Base-(k+1)."""

import functools
import math
from collections.abc import Collection

import numpy as np

from decent_jax.topology.rounds import Round, grouped, metropolis_hastings, pairwise, round_of


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
    """Replica i averages with equal weights with all replicas i - shift."""
    received = sum(np.roll(np.eye(n), shift, axis=0) for shift in shifts)
    return round_of((np.eye(n) + received) / (len(shifts) + 1))


def one_peer_exp(n: int) -> list[Round]:
    rounds = math.ceil(math.log2(n))
    return [pairwise((np.arange(n) - 2**r) % n) for r in range(rounds)]


def hypercube(n: int) -> list[Round]:
    if n & (n - 1):
        raise ValueError(f"needs a power of two; use one_peer_exp{'' if n % 2 else ' or ring'}")
    return [pairwise(np.arange(n) ^ 2**r) for r in range(n.bit_length() - 1)]


def alternating_exp_ring(n: int, *, local_size: int) -> list[Round]:
    """Pairs of nodes (j, j XOR 2^i), counted by c: even c average inside their nodes first and
    across the pair next, odd c the other way round, so half the nodes use the network at a time.
    """
    nodes = n // local_size
    if local_size < 2 or n % local_size or nodes < 2 or nodes & (nodes - 1):
        raise ValueError(
            "needs local_size >= 2 and local_size x 2^k replicas (k >= 1), got local_size "
            f"{local_size}; use one_peer_exp{'' if n & (n - 1) else ' or hypercube'}"
        )
    rounds = []
    for i in range(nodes.bit_length() - 1):
        pairs = [(j, j ^ 2**i) for j in range(nodes) if j < j ^ 2**i]
        for parity in (0, 1):
            partner = np.full(nodes, -1)
            for c, (low, high) in enumerate(pairs):
                if c % 2 != parity:
                    partner[low], partner[high] = high, low
            rounds.append(grouped(n, local_size, partner))
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
    """Replica i in row ``i // columns`` and column ``i % columns`` receives from its neighbours."""
    if rows is None:  # as square as n allows; a prime n makes one line
        rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
    if rows < 1 or n % rows:
        raise ValueError(f"rows must divide them, got {rows}")
    place = np.arange(n).reshape(rows, n // rows)
    neighbours = np.zeros((n, n), bool)
    for line in (*place, *place.T):  # the last of a line has no successor unless it wraps
        here, there = (line, np.roll(line, -1)) if wraps else (line[:-1], line[1:])
        neighbours[here, there] = neighbours[there, here] = True
    return round_of(metropolis_hastings(neighbours))


def base_k(n: int, *, max_degree: int = 1) -> list[Round]:
    """The Base-(k+1) graph: exact consensus in finitely many rounds, for any n and any degree k.

    Takezawa, Sato, Bao, Niwa and Yamada, "Beyond Exponential Graph: Communication-Efficient
    Topologies for Decentralized Learning via Finite-time Convergence" (NeurIPS 2023). Three
    constructions, each made of the one before; all matrices are symmetric and doubly stochastic:

    - **hyper-hypercube**, where n has no prime factor above k+1: replicas are numbers in a mixed
      radix with digits n_1, ..., n_L <= k+1, and round l averages those that differ in digit l;
    - **simple Base-(k+1)**, for any n: the replicas are split by the digits of n in base k+1, n =
      sum_l a_l (k+1)^p_l. Each part averages, then part after part hands its mean to the rest;
    - **Base-(k+1)**, n = p q with p free of prime factors above k+1 and q free of those up to it: p
      copies of the simple graph of q side by side, then hyper-hypercubes of p across them; or the
      simple graph of n where that takes fewer rounds.
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
    """Round l averages the replicas that differ in digit l, the fastest digit first."""
    rounds, stride = [], 1
    for digit in _fewest_factors(n, k):
        mean = np.full((digit, digit), 1 / digit)
        rounds.append(np.kron(np.kron(np.eye(n // (stride * digit)), mean), np.eye(stride)))
        stride *= digit
    return rounds


def _simple(n: int, k: int) -> list[np.ndarray]:
    if _split_factors(n, k)[1] == 1:
        return _hyper_hypercube(n, k)
    # One part a digit a of n, the highest first: (a, (k+1)^p), a sets of (k+1)^p replicas.
    parts, first = [], 0
    for size in reversed([(k + 1) ** p for p in range(n.bit_length())]):
        count = (n - first) // size
        if count:
            parts.append(np.arange(first, first + count * size).reshape(count, size))
            first += count * size
    inside = [_hyper_hypercube(part.size, k) for part in parts]  # the whole part
    again = [_hyper_hypercube(part.shape[1], k) for part in parts]  # each of its sets
    start = len(inside[0])
    rounds = []
    for m in range(start + 1 + len(again[0])):
        matrix = np.eye(n)
        for index, part in enumerate(parts):
            since = m - start - index  # the part's turn to hand over comes at 0
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
    """Every replica after ``part`` averages with one replica of each of its sets, in ``matrix``.

    All of the part hold its mean, and those after it are fewer than a set has members. With the
    weight |part| / (a remaining), ``remaining`` the replicas of the part and after it, those after
    it get the mean of both on average, and so does each set, which then averages inside. The
    replicas without a partner average among themselves, k+1 at a time.
    """
    count, size = part.shape
    after = np.arange(part[-1, -1] + 1, part[0, 0] + remaining)
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
    """(p, q) with n = p q; prime factors up to k+1 in p, the others in q."""
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
