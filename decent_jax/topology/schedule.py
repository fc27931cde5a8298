"""Schedules: cycles of rounds, their consensus rate and cost, and checks of their matrices."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from decent_jax.ground.format import shorten
from decent_jax.topology.rounds import Round, connected_parts, metropolis_hastings, round_of

SUM_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A cycle of rounds over ``num_replicas`` replicas.

    Build one with `decent_jax.topology.make`, `from_networkx` or `from_matrices`.
    """

    name: str
    num_replicas: int
    rounds: tuple[Round, ...]

    def __repr__(self) -> str:
        return f"<Schedule {self.name!r}: {self.num_replicas} replicas, period {self.period}>"

    @property
    def period(self) -> int:
        """Number of rounds before the schedule repeats."""
        return len(self.rounds)

    def matrix(self, r: int) -> np.ndarray:
        """The (n, n) float64 mixing matrix of round ``r``, ``0 <= r < period``."""
        return self.rounds[r].matrix

    @property
    def sends_sums(self) -> bool:
        """Whether some round averages in groups and then sends the sums, which no codec can encode.

        `decent_jax.gossip` refuses a codec for such a schedule, and the planner skips the pair.
        """
        return any(rnd.group_size > 1 and rnd.sends for rnd in self.rounds)

    def degree(self, r: int) -> int:
        """The largest number of other replicas whose parameters reach a replica in round ``r``."""
        return self.rounds[r].degree

    def round_at(self, step: int, mix_every: int = 1) -> int | None:
        """The round of training step ``step`` (0-based), or None where the step does not mix.

        With ``mix_every = H`` (at least 1) step t mixes if ``(t + 1) % H == 0``, in round
        ``(t // H) % period``. If the schedule repeats this round within its period, the result is
        the index of its first occurrence, so each round is compiled once.
        """
        if mix_every < 1:
            raise ValueError(f"mix_every must be at least 1, got {mix_every}")
        if (step + 1) % mix_every:
            return None
        return self._first[(step // mix_every) % self.period]

    @functools.cached_property
    def _first(self) -> list[int]:
        """For each round, the number of the first round that is the same object."""
        where: dict[int, int] = {}
        return [where.setdefault(id(rnd), r) for r, rnd in enumerate(self.rounds)]

    def bytes_sent(self, model_bytes: float, *, replicas_per_node: int = 1) -> float:
        """Bytes that the busiest node sends to other nodes in a round, averaged over the rounds.

        A node is ``replicas_per_node`` consecutive replicas; a message has ``model_bytes`` bytes.
        """
        models = [rnd.models_sent_by_nodes(replicas_per_node) for rnd in self.rounds]
        return model_bytes * sum(models) / len(models)

    def period_matrix(self) -> np.ndarray:
        """``W_{T-1} ... W_1 W_0``: the product over one period, round 0 first."""
        return next(itertools.islice(self._products(), self.period, None))

    def _products(self) -> Iterator[np.ndarray]:
        """``I``, ``W_0``, ``W_1 W_0``, ... indefinitely."""
        product = np.eye(self.num_replicas)
        for rnd in itertools.cycle(self.rounds):
            yield product
            product = rnd.matrix @ product

    def spectral_gap(self) -> float:
        """``1 - ||W_{T-1} ... W_0 - J||_2 ** (1/T)``, with T the period and all entries of J 1/n.

        It is 1 if a period averages exactly. For a static schedule (T = 1) this is the usual
        ``1 - ||W - J||_2`` (Ying et al. 2021).
        """
        left = _norm(self.period_matrix())
        # Rounding error of an exact average counts as zero.
        return 1.0 if left < 1e-12 else 1.0 - left ** (1 / self.period)

    def consensus_rate(self) -> float:
        """The asymptotic factor per round by which disagreement shrinks.

        It is the spectral radius of ``W_{T-1} ... W_0 - J`` (as in `spectral_gap`) to the power
        1/T, or 0 if consensus becomes exact.
        """
        if self.exact_after() is not None:
            return 0.0
        centred = self.period_matrix() - 1 / self.num_replicas
        return float(np.abs(np.linalg.eigvals(centred)).max()) ** (1 / self.period)

    def rounds_to_consensus(self, tol: float = 1e-6, limit: int = 1_000_000) -> int:
        """The number of rounds, from round 0, after which ``||W ... W_0 - J||_2 <= tol``.

        Raises ValueError when `limit` rounds are not enough.
        """
        for k, product in enumerate(itertools.islice(self._products(), limit + 1)):
            # No entry is larger than the norm, which takes a hundred times as long to compute.
            if np.abs(product - 1 / len(product)).max() < 1.01 * tol and _norm(product) <= tol:
                return k
        raise ValueError(f"{self.name} does not come within {tol:g} of consensus in {limit} rounds")

    def exact_after(self) -> int | None:
        """The number of rounds, from round 0, after which all replicas hold exactly the mean.

        None if they only approach the mean. Exactness is up to rounding: in one round, the
        product's entries move from more than 1e-6 to within 1e-12 of 1/n.
        """
        n = self.num_replicas
        # If some T consecutive rounds (T: the period) average exactly, so do any 2 T rounds. If
        # none do, a power of the period's matrix may: with a de Bruijn graph, the log2 n-th.
        most = self.period * max(2, n.bit_length())
        for k, product in enumerate(itertools.islice(self._products(), most + 1)):
            left = np.abs(product - 1 / n).max()
            if left < 1e-12:
                return k
            if left < 1e-6:  # a contraction, which never becomes exact
                return None
        return None

    def summary(self, model_bytes: float | None = None) -> dict[str, str | int | float | None]:
        """The schedule's properties by name, for example for a table row.

        ``period``, ``degree`` (the largest of its rounds), ``spectral_gap``, ``consensus_rate``,
        ``exact_after`` (rounds; None: never) and ``models_sent``, the number of models that the
        busiest replica sends per round on average; with ``model_bytes`` also ``bytes_sent``.

        >>> from decent_jax import topology
        >>> topology.make("one_peer_exp", 8).summary(model_bytes=1000)
        {'name': 'one_peer_exp', 'num_replicas': 8, 'period': 3, 'degree': 1, 'spectral_gap': 1.0,
         'consensus_rate': 0.0, 'exact_after': 3, 'models_sent': 1.0, 'bytes_sent': 1000.0}
        """
        sent = {} if model_bytes is None else {"bytes_sent": self.bytes_sent(model_bytes)}
        return {
            "name": self.name,
            "num_replicas": self.num_replicas,
            "period": self.period,
            "degree": max(rnd.degree for rnd in self.rounds),
            "spectral_gap": self.spectral_gap(),
            "consensus_rate": self.consensus_rate(),
            "exact_after": self.exact_after(),
            "models_sent": self.bytes_sent(1),
            **sent,
        }

    @property
    def partial_groups(self) -> bool:
        """Whether some round averages in groups that hold fewer than all replicas.

        `jax.shard_map` supports the mean of such a group only with ``check_vma=False``.
        """
        return any(1 < rnd.group_size < self.num_replicas for rnd in self.rounds)

    @staticmethod
    def from_matrices(matrices: Sequence[np.ndarray], name: str = "custom") -> "Schedule":
        """A schedule from your own mixing matrices (row i: the weights that replica i gives).

        Every matrix must be square and non-negative with rows and columns that sum to 1, and the
        schedule must reach consensus. To allow for rounding, sums may be off by 1e-9, and weights
        from -1e-9 to 0 count as 0. (For `decent_jax.optim.push_sum`, whose rows need not sum to 1,
        pass a builder of rounds to `decent_jax.topology.register`.)

        A round is sent as d permutations, where d is its largest in- or out-degree (König).

        Raises:
          ValueError: a matrix is not a mixing matrix, or consensus is never reached.
        """
        arrays = [_real(matrix, r) for r, matrix in enumerate(matrices)]
        if not arrays:
            raise ValueError("a schedule needs at least one mixing matrix, got none")
        n = arrays[0].shape[0] if arrays[0].ndim else 0
        for r, matrix in enumerate(arrays):
            check_matrix(matrix, n, r)
        schedule = Schedule(name, n, tuple(round_of(matrix) for matrix in arrays))
        check_connected(name, arrays)
        if schedule.consensus_rate() > 1 - 1e-12:  # connected, but a period swaps or rotates
            raise ValueError(
                f"schedule {name!r} never reaches consensus: one period leaves some disagreement "
                "as large as it was; give replicas a positive weight to themselves"
            )
        return schedule

    @staticmethod
    def from_networkx(graph: Any, name: str = "") -> "Schedule":
        """A static schedule of one round over an undirected networkx graph.

        Replica i is the graph's i-th node.

        The weights are Metropolis-Hastings. Edge attributes, parallel edges and self-loops are
        ignored; for your own weights, or for a directed graph, use `from_matrices`.

        Raises:
          ValueError: the graph is directed, has no nodes, or is not connected.

        >>> import networkx                                                     # doctest: +SKIP
        >>> Schedule.from_networkx(networkx.petersen_graph()).spectral_gap()    # doctest: +SKIP
        0.5
        """
        name = name or getattr(graph, "name", "") or "networkx"
        if graph.is_directed():
            raise ValueError(
                f"schedule {name!r} needs an undirected graph; give the weights of a directed one "
                "to Schedule.from_matrices"
            )
        index = {node: i for i, node in enumerate(graph.nodes)}
        if not index:
            raise ValueError(f"schedule {name!r} needs a graph with at least one node, got none")
        linked = np.zeros((len(index), len(index)), bool)
        for node, other in graph.edges():
            linked[index[node], index[other]] = linked[index[other], index[node]] = True
        check_connected(name, [linked])
        return Schedule.from_matrices([metropolis_hastings(linked)], name)


def check_matrix(matrix: np.ndarray, n: int, r: int, column_stochastic_only: bool = False) -> None:
    """Raises ValueError if ``matrix``, of round ``r``, is not a mixing matrix of n replicas."""
    if matrix.ndim != 2 or matrix.shape != (n, n) or n == 0:
        raise ValueError(
            f"round {r}: mixing matrices must be square and of the same size, "
            f"got shape {matrix.shape} where round 0 has {n} rows"
        )
    if not np.isfinite(matrix).all() or matrix.min() < 0:
        raise ValueError(f"round {r}: weights must be non-negative, got {matrix.min():g}")
    hint = "; replicas would converge to a weighted mean: use Metropolis-Hastings weights"
    lines = [(0, "column", hint)]
    for axis, line, hint in lines if column_stochastic_only else [(1, "row", ""), *lines]:
        sums = matrix.sum(axis=axis)
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > SUM_TOLERANCE:
            raise ValueError(
                f"round {r}: {line} {worst} must sum to 1, got {sums[worst]:.9g}{hint}"
            )


def _real(matrix: ArrayLike, r: int) -> np.ndarray:
    """A float64 copy of a round's matrix, because the caller may change the original."""
    try:
        array = np.asarray(matrix)
        if not np.can_cast(array.dtype, np.float64, "same_kind"):
            raise TypeError(f"type {array.dtype}")
        copy = array.astype(np.float64)
    except (TypeError, ValueError) as error:  # such as complex numbers, or rows of two lengths
        raise ValueError(
            f"round {r}: weights must be real numbers ({shorten(str(error), 80)})"
        ) from None
    copy[(copy >= -SUM_TOLERANCE) & (copy < 0)] = 0
    return copy


def check_connected(name: str, matrices: Sequence[np.ndarray]) -> None:
    """Raises ValueError if some replica's parameters never reach some other replica."""
    label = connected_parts(matrices)
    if label.max() > 0:
        first, second = (np.flatnonzero(label == k).tolist() for k in (0, 1))
        raise ValueError(
            f"schedule {name!r} never reaches consensus: over one period information does "
            f"not flow both ways between replicas {first} and {second}"
        )


def _norm(product: np.ndarray) -> float:
    return float(np.linalg.norm(product - 1 / len(product), 2))
