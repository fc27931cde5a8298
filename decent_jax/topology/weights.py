"""Doubly stochastic weights for a given graph."""

import numpy as np

SCALINGS = 10_000


def metropolis_hastings(neighbours: np.ndarray) -> np.ndarray:
    """Metropolis-Hastings weights of an undirected graph, doubly stochastic on any.

    ``W[i, j] = 1 / (1 + max(d_i, d_j))`` for neighbours i and j of degrees d_i and d_j; the
    rest of a row is the replica's weight to itself (Xiao, Boyd and Lall 2005).

    Args:
      neighbours: (n, n) bool, symmetric; its diagonal is ignored.

    Returns:
      (n, n) float64.

    Raises:
      ValueError: where ``neighbours`` is not symmetric.

    >>> star = np.zeros((4, 4), bool)
    >>> star[0, 1:] = star[1:, 0] = True
    >>> metropolis_hastings(star)[1]
    array([0.25, 0.75, 0.  , 0.  ])
    """
    neighbours = np.array(neighbours, bool)
    if (neighbours != neighbours.T).any():
        i, j = np.argwhere(neighbours & ~neighbours.T)[0].tolist()
        raise ValueError(
            f"metropolis_hastings needs a symmetric graph, but replica {i} receives from {j} and "
            f"{j} not from {i}"
        )
    np.fill_diagonal(neighbours, False)
    degree = neighbours.sum(axis=1)
    matrix = np.where(neighbours, 1 / (1 + np.maximum.outer(degree, degree)), 0.0)
    np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    return matrix


def balanced(neighbours: np.ndarray) -> np.ndarray:
    """Doubly stochastic weights of a strongly connected directed graph, and of no other.

    Rows and columns of (graph + identity) are scaled in turn until all sum to 1 (Sinkhorn and
    Knopp 1967). With the identity every arrow lies on a permutation inside the graph, so the
    scaling converges and loses no arrow. The weights are 1 / (1 + d) if all degrees are d.

    Args:
      neighbours: (n, n) bool; row i is True at the senders to replica i.

    Returns:
      (n, n) float64.

    Raises:
      ValueError: if the scaling does not converge.
    """
    pattern = np.array(neighbours, float)
    np.fill_diagonal(pattern, 1.0)
    columns = sums = np.ones(len(pattern))
    for _ in range(SCALINGS):
        rows = 1 / (pattern @ columns)
        sums = rows @ pattern
        if np.abs(columns * sums - 1).max() < 1e-12:
            return rows[:, None] * pattern * columns
        columns = 1 / sums
    raise ValueError(
        f"{SCALINGS} scalings left a column of the directed graph's weights at "
        f"{(columns * sums).max():.9g} instead of 1; use a graph with shorter ways, or an "
        "undirected one"
    )
