"""What tests read off matrices and rounds, written without the library."""

import numpy as np


def norm(matrix):
    """The distance of a product of rounds from the average, in the spectral norm."""
    return np.linalg.norm(matrix - 1 / len(matrix), 2)


def product(schedule, rounds):
    """Rounds applied in the given order, first one first."""
    out = np.eye(schedule.num_replicas)
    for r in rounds:
        out = schedule.matrix(r) @ out
    return out


def groups(matrix):
    """The sets of replicas that average with each other, read off a matrix of equal weights."""
    return sorted({tuple(np.flatnonzero(row > 0).tolist()) for row in matrix})


def group_list(text):
    """``"0-3 8,9"`` as [(0, 1, 2, 3), (8, 9)]."""
    out = []
    for part in text.split():
        group = []
        for piece in part.split(","):
            first, _, last = piece.partition("-")
            group += range(int(first), int(last or first) + 1)
        out.append(tuple(group))
    return sorted(out)


def rebuild(one):
    """The matrix of a round from what it says it communicates."""
    n = len(one.matrix)
    exchange = np.diag(one.self_weights).astype(float)
    for send in one.sends:
        for receiver in np.flatnonzero(send.sources >= 0):
            exchange[receiver, send.sources[receiver]] += send.weights[receiver]
    g = one.group_size
    return exchange @ np.kron(np.eye(n // g), np.full((g, g), 1 / g))


def metropolis(edges, n):
    """Metropolis-Hastings weights of an undirected graph, edge by edge."""
    degree = np.zeros(n, int)
    for i, j in edges:
        degree[[i, j]] += 1
    matrix = np.zeros((n, n))
    for i, j in edges:
        matrix[i, j] = matrix[j, i] = 1 / max(degree[i] + 1, degree[j] + 1)
    return matrix + np.diag(1 - matrix.sum(1))


def in_rounds(interactions):
    """The interactions in rounds of disjoint pairs: each is in the first after its replicas' last.

    The rounds keep the order of the list, so that both have the same effect.
    """
    rounds, last = [], {}
    for one in interactions:
        r = max([last.get(k, -1) + 1 for k in one[:2]] + [len(rounds) - 1])
        if r == len(rounds):
            rounds.append([])
        rounds[r].append(one)
        last[one.i] = last[one.j] = r
    return rounds
