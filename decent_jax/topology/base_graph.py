"""The Base-(k+1) graph: exact consensus in finitely many rounds, for any n and any degree k.

Takezawa, Sato, Bao, Niwa and Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies
for Decentralized Learning via Finite-time Convergence" (NeurIPS 2023). Three constructions, each
made of the one before; all matrices are symmetric and doubly stochastic:

- **hyper-hypercube**, where n has no prime factor above k+1: replicas are numbers in a mixed radix
  with digits n_1, ..., n_L <= k+1, and round l averages those that differ in digit l only;
- **simple Base-(k+1)**, for any n: the replicas are split by the digits of n in base k+1, n = sum_l
  a_l (k+1)^p_l. Each part averages, then part after part hands its mean over to the rest;
- **Base-(k+1)**, n = p q with p free of prime factors above k+1 and q free of those up to it: p
  copies of the simple graph of q side by side, then hyper-hypercubes of p across them; or the
  simple graph of n where that takes fewer rounds.
"""

import functools

import numpy as np

from decent_jax.topology.rounds import Round, round_of


def base_k(n: int, *, max_degree: int = 1) -> list[Round]:
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
