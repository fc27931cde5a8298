"""The named schedules that are not random: complete graphs, rings, exponential graphs, grids."""

import math
from collections.abc import Collection

import numpy as np

from decent_jax.topology.rounds import Round, grouped, pairwise, round_of
from decent_jax.topology.weights import metropolis_hastings


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
