"""Who averages with whom: schedules of mixing matrices. Pure NumPy, no jax.

A **round** is one mixing matrix W (n x n): replica i replaces its parameters by
``sum_j W[i, j] x_j``, so row i holds the weights replica i gives to what it receives. A
**schedule** cycles through its rounds. Besides its matrix a round says how it is communicated: an
average inside groups of consecutive replicas, then a few permutations (`Send`), which is what
`decent_jax.gossip` turns into collectives.

>>> schedule = make("one_peer_exp", 8)
>>> schedule.period, schedule.degree(0), schedule.rounds_to_consensus()
(3, 1, 3)
>>> schedule.matrix(1)[0]           # replica 0 averages with what replica 6 sends
array([0.5, 0. , 0. , 0. , 0. , 0. , 0.5, 0. ])
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching

SUM_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True, eq=False)
class Send:
    """One message a replica: a (partial) permutation of the replicas.

    sources: (n,) int; replica i receives from ``sources[i]``, or from nobody where it is -1. No
        replica appears twice.
    weights: (n,) float64; what replica i multiplies the received parameters by (0 where idle).
    """

    sources: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """One mixing step: average in groups of consecutive replicas, then exchange permutations.

    group_size: g; replicas [0, g), [g, 2g), ... first take the mean of their group (1: no groups).
    self_weights: (n,) float64; the weight of a replica's own (group-averaged) parameters.
    sends: the permutations that follow, whose weights and `self_weights` sum to 1 in every row.
    matrix: (n, n) float64, the product of the two.
    """

    group_size: int
    self_weights: np.ndarray
    sends: tuple[Send, ...]
    matrix: np.ndarray

    @property
    def degree(self) -> int:
        """The largest number of other replicas whose parameters reach one replica."""
        off_diagonal = self.matrix - np.diag(np.diag(self.matrix))
        return int((off_diagonal > 0).sum(axis=1).max())

    def models_sent(self) -> float:
        """Parameters the busiest replica sends in this round, in units of one model.

        A group of g counts as a reduce-scatter and an all-gather, 2 (g - 1) / g.
        """
        sent = np.zeros(len(self.matrix))
        for send in self.sends:
            receivers = np.flatnonzero((send.sources >= 0) & (send.sources != np.arange(len(sent))))
            sent[send.sources[receivers]] += 1
        return float(sent.max()) + 2 * (self.group_size - 1) / self.group_size


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A cycle of rounds over ``num_replicas`` replicas; made by `make` or `from_matrices`."""

    name: str
    num_replicas: int
    rounds: tuple[Round, ...]

    @property
    def period(self) -> int:
        """Number of rounds before the schedule repeats."""
        return len(self.rounds)

    def matrix(self, r: int) -> np.ndarray:
        """The (n, n) float64 mixing matrix of round ``r``, ``0 <= r < period``."""
        return self.rounds[r].matrix

    def degree(self, r: int) -> int:
        """The largest number of senders to one replica in round ``r``."""
        return self.rounds[r].degree

    def round_at(self, step: int, mix_every: int = 1) -> int | None:
        """The round of training step ``step`` (0-based), or None where the step does not mix.

        With ``mix_every = H`` step t mixes when ``(t + 1) % H == 0``, in round
        ``(t // H) % period``.
        """
        if mix_every < 1:
            raise ValueError(f"mix_every must be at least 1, got {mix_every}")
        if (step + 1) % mix_every:
            return None
        return (step // mix_every) % self.period

    def bytes_sent(self, model_bytes: int, r: int | None = None) -> float:
        """Bytes the busiest replica sends in round ``r``; the mean over a period when r is None."""
        rounds = self.rounds if r is None else (self.rounds[r],)
        return model_bytes * sum(one.models_sent() for one in rounds) / len(rounds)

    def period_matrix(self) -> np.ndarray:
        """``W_{T-1} ... W_1 W_0``: what one period does, round 0 first."""
        return functools.reduce(
            lambda product, one: one.matrix @ product, self.rounds, np.eye(self.num_replicas)
        )

    def spectral_gap(self) -> float:
        """``1 - ||W_{T-1} ... W_0 - J||_2 ** (1/T)``, J the average; 1 when a period is exact.

        For a static schedule (T = 1) this is the usual ``1 - ||W - J||_2`` (Ying et al. 2021).
        """
        return 1.0 - _snap(_norm(self.period_matrix())) ** (1 / self.period)

    def consensus_rate(self) -> float:
        """The factor per round by which disagreement shrinks in the long run.

        The spectral radius of ``W_{T-1} ... W_0 - J``, to the power 1/T; 0 when exact.
        """
        centred = self.period_matrix() - 1 / self.num_replicas
        if _norm(self.period_matrix()) < 1e-12:
            return 0.0
        return float(np.abs(np.linalg.eigvals(centred)).max()) ** (1 / self.period)

    def mean_square_rate(self) -> float:
        """Largest eigenvalue of the average over rounds of ``W' W - J``.

        The factor by which the squared consensus distance shrinks in a round taken at random.
        """
        gram = sum(one.matrix.T @ one.matrix for one in self.rounds) / self.period
        return max(0.0, float(np.linalg.eigvalsh(gram - 1 / self.num_replicas).max()))

    def rounds_to_consensus(self, tol: float = 1e-6, limit: int = 1_000_000) -> int:
        """The number of rounds, from round 0, after which ``||W ... W_0 - J||_2 <= tol``.

        Raises ValueError when `limit` rounds are not enough.
        """
        columns = self.period_matrix().sum(axis=0)
        if np.abs(columns - 1).max() > 1e-6:
            raise ValueError(f"{self.name} converges to a weighted mean, not to the mean")
        product = np.eye(self.num_replicas)
        for k in range(limit + 1):
            if _norm(product) <= tol:
                return k
            product = self.matrix(k % self.period) @ product
        raise ValueError(f"{self.name} does not come within {tol:g} of consensus in {limit} rounds")

    @property
    def partial_groups(self) -> bool:
        """Whether a round averages in groups smaller than the whole.

        Such a mean exists in `jax.shard_map` only with ``check_vma=False``.
        """
        return any(1 < one.group_size < self.num_replicas for one in self.rounds)

    @staticmethod
    def from_matrices(
        matrices: Sequence[np.ndarray], name: str = "custom", *, row_stochastic_only: bool = False
    ) -> "Schedule":
        """A schedule of your own mixing matrices (row i: the weights replica i gives).

        Every matrix must be square and non-negative with rows and columns that sum to 1 within
        1e-9, and the schedule must reach consensus. ``row_stochastic_only=True`` drops the demand
        on columns; such a schedule converges to a weighted mean, not to the mean.

        Each matrix is sent as d permutations, d its largest in- or out-degree (König's theorem).

        Raises:
          ValueError: naming the round and what is wrong with it.
        """
        arrays = [np.asarray(matrix, np.float64) for matrix in matrices]
        if not arrays:
            raise ValueError("a schedule needs at least one mixing matrix, got none")
        n = arrays[0].shape[0] if arrays[0].ndim else 0
        for r, matrix in enumerate(arrays):
            _check_matrix(matrix, n, r, row_stochastic_only)
        schedule = Schedule(name, n, tuple(_round_of(matrix) for matrix in arrays))
        _check_connected(schedule)
        if schedule.consensus_rate() > 1 - 1e-12:
            raise ValueError(
                f"schedule {name!r} never reaches consensus: one period leaves some disagreement "
                "as large as it was; give replicas a positive weight to themselves"
            )
        return schedule


def make(name: str, num_replicas: int, *, local_size: int = 1) -> Schedule:
    """The named schedule over ``num_replicas`` replicas.

    | name | a round | replicas |
    |---|---|---|
    | ``complete`` | everybody averages with everybody | any |
    | ``ring`` | disjoint neighbouring pairs, alternating sides (Decent-DP's ring) | even |
    | ``bidirectional_ring`` | both neighbours and oneself, 1/3 each | any |
    | ``one_peer_exp`` | i receives from i - 2^r, weight 1/2 (Ying et al. 2021) | any |
    | ``hypercube`` | i pairs with i XOR 2^r (Decent-DP's one-peer-exp) | 2^k |
    | ``alternating_exp_ring`` | a node averages inside, or with node XOR 2^i | local_size x 2^k |

    ``local_size`` (replicas a node; a node's replicas are consecutive) matters to
    ``alternating_exp_ring`` only. One replica is the identity under every name.

    Raises:
      ValueError: unknown name, or a number of replicas the schedule does not exist for.
    """
    if name not in _BUILDERS:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(_BUILDERS)}")
    if num_replicas < 1:
        raise ValueError(f"a schedule needs at least one replica, got {num_replicas}")
    if local_size < 1:
        raise ValueError(f"local_size must be at least 1, got {local_size}")
    if num_replicas == 1:
        return Schedule(name, 1, (_round_of(np.ones((1, 1))),))
    schedule = Schedule(name, num_replicas, tuple(_BUILDERS[name](num_replicas, local_size)))
    for r, one in enumerate(schedule.rounds):
        _check_matrix(one.matrix, num_replicas, r, row_stochastic_only=False)
    _check_connected(schedule)
    return schedule


def _complete(n: int, local_size: int) -> list[Round]:
    return [_grouped(n, n)]


def _ring(n: int, local_size: int) -> list[Round]:
    if n % 2:
        raise ValueError(
            f"ring needs an even number of replicas, got {n}; use one_peer_exp or "
            "bidirectional_ring"
        )
    replicas = np.arange(n)
    even = replicas ^ 1
    odd = np.where(replicas % 2 == 1, replicas + 1, replicas - 1) % n
    return [_pairwise(even)] if n == 2 else [_pairwise(even), _pairwise(odd)]


def _bidirectional_ring(n: int, local_size: int) -> list[Round]:
    if n == 2:
        return [_pairwise(np.array([1, 0]))]
    eye = np.eye(n)
    return [_round_of((eye + np.roll(eye, 1, axis=0) + np.roll(eye, -1, axis=0)) / 3)]


def _one_peer_exp(n: int, local_size: int) -> list[Round]:
    rounds = math.ceil(math.log2(n))
    return [_pairwise((np.arange(n) - 2**r) % n) for r in range(rounds)]


def _hypercube(n: int, local_size: int) -> list[Round]:
    if n & (n - 1):
        raise ValueError(
            f"hypercube needs a power of two replicas, got {n}; use one_peer_exp or ring"
        )
    return [_pairwise(np.arange(n) ^ 2**r) for r in range(n.bit_length() - 1)]


def _alternating_exp_ring(n: int, local_size: int) -> list[Round]:
    """Pairs of nodes (j, j XOR 2^i), counted by c: even c average inside their nodes first and
    across the pair next, odd c the other way round, so half the nodes use the network at a time.
    """
    nodes = n // local_size
    if local_size < 2 or n % local_size or nodes < 2 or nodes & (nodes - 1):
        raise ValueError(
            "alternating_exp_ring needs local_size >= 2 and local_size x 2^k replicas (k >= 1), "
            f"got {n} replicas with local_size {local_size}; use one_peer_exp or hypercube"
        )
    rounds = []
    for i in range(nodes.bit_length() - 1):
        pairs = [(j, j ^ 2**i) for j in range(nodes) if j < j ^ 2**i]
        for parity in (0, 1):
            partner = np.full(nodes, -1)
            for c, (low, high) in enumerate(pairs):
                if c % 2 != parity:
                    partner[low], partner[high] = high, low
            rounds.append(_grouped(n, local_size, partner))
    return rounds


_BUILDERS: dict[str, Callable[[int, int], list[Round]]] = {
    "complete": _complete,
    "ring": _ring,
    "bidirectional_ring": _bidirectional_ring,
    "one_peer_exp": _one_peer_exp,
    "hypercube": _hypercube,
    "alternating_exp_ring": _alternating_exp_ring,
}

NAMES = tuple(_BUILDERS)


def _pairwise(sources: np.ndarray) -> Round:
    """Everybody averages, 1/2 each, with what ``sources[i]`` sends."""
    n = len(sources)
    matrix = np.eye(n) / 2
    matrix[np.arange(n), sources] += 0.5
    half = np.full(n, 0.5)
    return Round(1, half, (Send(np.asarray(sources), half),), matrix)


def _grouped(n: int, group_size: int, partner: np.ndarray | None = None) -> Round:
    """Average inside consecutive groups; groups with a partner (>= 0) then average with it."""
    groups = n // group_size
    partner = np.full(groups, -1) if partner is None else partner
    paired = np.repeat(partner >= 0, group_size)
    sources = np.where(
        paired, np.repeat(partner, group_size) * group_size + np.arange(n) % group_size, -1
    )
    weights = np.where(paired, 0.5, 0.0)
    exchange = np.diag(1 - weights)
    exchange[np.flatnonzero(paired), sources[paired]] += 0.5
    inside = np.kron(np.eye(groups), np.full((group_size, group_size), 1 / group_size))
    sends = (Send(sources, weights),) if paired.any() else ()
    return Round(group_size, 1 - weights, sends, exchange @ inside)


def _round_of(matrix: np.ndarray) -> Round:
    """A general matrix as permutations: cyclic shifts if they suffice, else König's matchings."""
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


def _matchings(support: np.ndarray, degree: int) -> list[np.ndarray]:
    """Split a directed graph of largest degree d into d partial permutations (König 1916).

    Dummy edges make the bipartite graph receivers x senders d-regular; a regular bipartite graph
    has a perfect matching, and taking one away leaves it (d-1)-regular.
    """
    real = support.astype(np.int64)
    padded = real.copy()
    lacking_rows = np.repeat(np.arange(len(real)), degree - real.sum(axis=1))
    lacking_columns = np.repeat(np.arange(len(real)), degree - real.sum(axis=0))
    np.add.at(padded, (lacking_rows, lacking_columns), 1)
    matchings = []
    for _ in range(degree):
        sender = maximum_bipartite_matching(csr_array(padded > 0), perm_type="column")
        receiver = np.arange(len(real))
        is_real = real[receiver, sender] > 0
        matchings.append(np.where(is_real, sender, -1))
        real[receiver[is_real], sender[is_real]] -= 1
        padded[receiver, sender] -= 1
    return matchings


def _check_matrix(matrix: np.ndarray, n: int, r: int, row_stochastic_only: bool) -> None:
    if matrix.ndim != 2 or matrix.shape != (n, n) or n == 0:
        raise ValueError(
            f"round {r}: a mixing matrix must be square and alike in every round, "
            f"got shape {matrix.shape} where round 0 has {n} rows"
        )
    if not np.isfinite(matrix).all() or matrix.min() < 0:
        raise ValueError(f"round {r}: weights must be non-negative, got {matrix.min():g}")
    for axis, line in ((1, "row"), (0, "column")):
        if axis == 0 and row_stochastic_only:
            continue
        sums = matrix.sum(axis=axis)
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > SUM_TOLERANCE:
            hint = (
                "; replicas would converge to a weighted mean: use Metropolis-Hastings weights, "
                "or pass row_stochastic_only=True if that is meant"
            )
            raise ValueError(
                f"round {r}: {line} {worst} must sum to 1, got {sums[worst]:.9g}"
                + (hint if axis == 0 else "")
            )


def _check_connected(schedule: Schedule) -> None:
    union = sum(one.matrix for one in schedule.rounds) > 0
    count, label = connected_components(csr_array(union), directed=True, connection="strong")
    if count > 1:
        parts = [np.flatnonzero(label == k).tolist() for k in range(count)]
        raise ValueError(
            f"schedule {schedule.name!r} never reaches consensus: over one period information does "
            f"not flow both ways between replicas {parts[0]} and {parts[1]}"
        )


def _norm(product: np.ndarray) -> float:
    return float(np.linalg.norm(product - 1 / len(product), 2))


def _snap(value: float) -> float:
    """Rounding error of an exact average counts as zero."""
    return 0.0 if value < 1e-12 else value
