"""One round: its mixing matrix, and the group means and permutations that implement it."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching


@dataclasses.dataclass(frozen=True, eq=False)
class Send:
    """At most one message to each replica: a (partial) permutation of the replicas.

    sources: (n,) int; replica i receives from ``sources[i]``, or is idle if that is -1. No
        replica appears twice.
    weights: (n,) float64; replica i's weight for the parameters it receives (0 where idle).
    """

    sources: np.ndarray
    weights: np.ndarray

    def __post_init__(self) -> None:
        _freeze(self.sources, self.weights)


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """One mixing step: average in groups of consecutive replicas, then send by permutations.

    group_size: g; replicas [0, g), [g, 2g), ... first take the mean of their group (1: no groups).
    self_weights: (n,) float64; the weight of a replica's own (group-averaged) parameters.
    sends: the permutations that follow; their weights and `self_weights` sum to 1 in every row.
    matrix: (n, n) float64; the permutations' matrix times the group means' matrix.
    """

    group_size: int
    self_weights: np.ndarray
    sends: tuple[Send, ...]
    matrix: np.ndarray

    def __post_init__(self) -> None:
        _freeze(self.self_weights, self.matrix)

    def __repr__(self) -> str:
        return f"<Round: {len(self.matrix)} replicas, degree {self.degree}>"

    @property
    def degree(self) -> int:
        """The largest number of other replicas whose parameters reach a replica in this round."""
        off_diagonal = self.matrix - np.diag(np.diag(self.matrix))
        return int((off_diagonal > 0).sum(axis=1).max())

    @functools.cached_property
    def largest_clique(self) -> int:
        """The largest number of replicas that one collective connects, directly or through others.

        XLA on GPUs creates a communicator for each such set. Pairs connect 2 replicas, and a shift
        of n replicas by k connects n / gcd(n, k).
        """
        largest, n = self.group_size, len(self.self_weights)
        for send in self.sends:
            receivers = np.flatnonzero(send.sources >= 0)
            edges = np.ones(len(receivers)), (receivers, send.sources[receivers])
            _, label = connected_components(csr_array(edges, shape=(n, n)), directed=False)
            largest = max(largest, int(np.bincount(label).max()))
        return largest

    @functools.cached_property
    def between_groups(self) -> "Round | None":
        """The round between the groups' means, over n / group_size replicas, one per group.

        ``matrix = between_groups.matrix (x) mean of a group``. A group then needs to send each
        message once, in parts of 1 / group_size, not once per member. None if there are no groups,
        if they send nothing, or if members of a group receive from different groups.
        """
        g = self.group_size
        if g == 1 or not self.sends:
            return None
        weights = [self.self_weights, *(send.weights for send in self.sends)]
        sources = [_sender_groups(send.sources, g) for send in self.sends]
        tables = [table.reshape(-1, g) for table in (*weights, *sources)]
        if any((table != table[:, :1]).any() for table in tables):
            return None
        own, *others = (weight[::g] for weight in weights)
        return assembled(1, own, [Send(s[::g], w) for s, w in zip(sources, others, strict=True)])

    def models_sent_by_nodes(self, replicas_per_node: int = 1) -> float:
        """The data that the busiest node sends to other nodes in this round, in units of one model.

        Node i holds ``replicas_per_node`` replicas, from number ``i * replicas_per_node`` on. A
        group mean counts as a reduce-scatter and an all-gather in a ring over its g replicas in
        order, in which each replica sends 2 (g - 1) / g models. A message between groups
        (`between_groups`) is 1 / g models.
        """
        if replicas_per_node < 1:
            raise ValueError(f"replicas_per_node must be at least 1, got {replicas_per_node}")
        n, g = len(self.self_weights), self.group_size
        replicas = np.arange(n)
        node = replicas // replicas_per_node
        sent = np.zeros(node[-1] + 1)

        def count(sources: np.ndarray, models: float) -> None:
            receivers = np.flatnonzero(sources >= 0)
            leaves = node[sources[receivers]] != node[receivers]
            np.add.at(sent, node[sources[receivers[leaves]]], models)

        count(replicas // g * g + (replicas - 1) % g, 2 * (g - 1) / g)
        for send in self.sends:
            if self.between_groups is None:
                count(send.sources, 1)
            else:  # member k of a group sends its part to member k of another
                count(_sender_groups(send.sources, g) * g + replicas % g, 1 / g)
        return float(sent.max())


def _freeze(*arrays: np.ndarray) -> None:
    for x in arrays:
        x.setflags(write=False)


def _sender_groups(sources: np.ndarray, g: int) -> np.ndarray:
    """(n,) int: the group that each replica receives from, or -1 where it is idle."""
    return np.where(sources >= 0, sources // g, -1)


def assembled(group_size: int, self_weights: np.ndarray, sends: Sequence[Send]) -> Round:
    """The round with this communication and the matrix that results from it."""
    matrix = np.diag(self_weights)
    for send in sends:
        receivers = np.flatnonzero(send.sources >= 0)
        matrix[receivers, send.sources[receivers]] += send.weights[receivers]
    if group_size > 1:
        group = np.full((group_size, group_size), 1 / group_size)
        matrix = matrix @ np.kron(np.eye(len(matrix) // group_size), group)
    return Round(group_size, self_weights, tuple(sends), matrix)


def pairwise(sources: np.ndarray, group_size: int = 1) -> Round:
    """The round in which replica i averages with ``sources[i]``, 1/2 each (-1: it is idle)."""
    sources = np.asarray(sources)
    weights = np.where(sources >= 0, 0.5, 0.0)
    return assembled(group_size, 1 - weights, [Send(sources, weights)])


def grouped(n: int, group_size: int, partner: np.ndarray | None = None) -> Round:
    """The round that averages inside consecutive groups, then pairs of groups (-1: no partner)."""
    sender = np.full(n, -1) if partner is None else np.repeat(partner, group_size)
    sources = np.where(sender >= 0, sender * group_size + np.arange(n) % group_size, -1)
    if (sources < 0).all():
        return assembled(group_size, np.ones(n), [])
    return pairwise(sources, group_size)


def round_of(matrix: np.ndarray) -> Round:
    """The round of any mixing matrix: cyclic shifts if they suffice, else König's matchings."""
    n = len(matrix)
    support = matrix > 0
    np.fill_diagonal(support, False)
    degree = int(max(support.sum(axis=0).max(), support.sum(axis=1).max()))
    receivers, senders = np.nonzero(support)
    shifts = np.unique((receivers - senders) % n)
    if len(shifts) == degree:
        replicas = np.arange(n)
        sources = [
            np.where(support[replicas, (replicas - s) % n], (replicas - s) % n, -1) for s in shifts
        ]
    else:
        sources = _matchings(support, degree)
    sends = tuple(
        Send(source, np.where(source >= 0, matrix[np.arange(n), source], 0.0)) for source in sources
    )
    return Round(1, np.diag(matrix).copy(), sends, matrix)


def metropolis_hastings(neighbours: np.ndarray) -> np.ndarray:
    """Metropolis-Hastings weights, doubly stochastic on any undirected graph.

    ``W[i, j] = 1 / (1 + max(d_i, d_j))`` for neighbours i and j of degrees d_i and d_j; the
    rest of a row is the replica's weight to itself (Xiao, Boyd and Lall 2005).

    Args:
      neighbours: (n, n) bool, symmetric; its diagonal is ignored.

    Returns:
      (n, n) float64.

    Raises:
      ValueError: ``neighbours`` is not symmetric.

    >>> star = np.zeros((4, 4), bool)
    >>> star[0, 1:] = star[1:, 0] = True
    >>> metropolis_hastings(star)[1]
    array([0.25, 0.75, 0.  , 0.  ])
    """
    neighbours = np.array(neighbours, bool)
    if (neighbours != neighbours.T).any():
        i, j = np.argwhere(neighbours & ~neighbours.T)[0].tolist()
        raise ValueError(
            f"metropolis_hastings needs a symmetric graph, but replica {i} receives from {j}, and "
            f"{j} does not receive from {i}"
        )
    np.fill_diagonal(neighbours, False)
    degree = neighbours.sum(axis=1)
    matrix = np.where(neighbours, 1 / (1 + np.maximum.outer(degree, degree)), 0.0)
    np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    return matrix


def kron(outer: Round, inner: Round) -> Round:
    """The round in which nodes mix with ``outer`` and replicas inside a node with ``inner``.

    Its matrix is ``outer (x) inner``; replica l of the g replicas of node a is replica
    ``a * g + l``. Group means of ``inner`` remain group means. Each pair of an outer and an inner
    term (a send, or the self-weights) is one permutation, except the pair of self-weights; this
    makes ``(d_outer + 1)(d_inner + 1) - 1`` permutations.
    """
    matrix = np.kron(outer.matrix, inner.matrix)
    local = len(inner.matrix)
    group_size = inner.group_size
    if outer.group_size > 1 and inner.group_size == local:
        group_size = outer.group_size * local
    elif outer.group_size > 1:  # replicas l of several nodes are not consecutive: no group mean
        outer = round_of(outer.matrix)
    # A replica's own term counts as a message to itself.
    own, *sends = (
        _both(nodes, replicas, local)
        for nodes in (Send(np.arange(len(outer.matrix)), outer.self_weights), *outer.sends)
        for replicas in (Send(np.arange(local), inner.self_weights), *inner.sends)
    )
    used = tuple(send for send in sends if send.weights.any())
    return Round(group_size, own.weights, used, matrix)


def connected_parts(matrices: Sequence[np.ndarray]) -> np.ndarray:
    """(n,) int labels, equal for replicas that reach each other in both directions."""
    arrows = csr_array(np.sum(matrices, axis=0) > 0)
    return connected_components(arrows, directed=True, connection="strong")[1]


def _both(nodes: Send, replicas: Send, local: int) -> Send:
    """The send from replica ``replicas.sources[l]`` of node ``nodes.sources[a]`` (-1: none)."""
    weights = np.multiply.outer(nodes.weights, replicas.weights)
    sources = np.add.outer(nodes.sources * local, replicas.sources)
    return Send(np.where(weights > 0, sources, -1).ravel(), weights.ravel())


def _matchings(support: np.ndarray, degree: int) -> list[np.ndarray]:
    """Splits a directed graph of largest degree d into d partial permutations (König 1916).

    Dummy edges make the bipartite graph receivers x senders d-regular; a regular bipartite graph
    has a perfect matching, and removing one leaves it (d-1)-regular.
    """
    real = support.astype(np.int64)
    padded = real.copy()
    lacking_rows = np.repeat(np.arange(len(real)), degree - real.sum(axis=1))
    lacking_columns = np.repeat(np.arange(len(real)), degree - real.sum(axis=0))
    np.add.at(padded, (lacking_rows, lacking_columns), 1)
    matchings: list[np.ndarray] = []
    for _ in range(degree):
        sender = maximum_bipartite_matching(csr_array(padded > 0), perm_type="column")
        receiver = np.arange(len(real))
        is_real = real[receiver, sender] > 0
        matchings.append(np.where(is_real, sender, -1))
        real[receiver[is_real], sender[is_real]] -= 1
        padded[receiver, sender] -= 1
    return matchings
