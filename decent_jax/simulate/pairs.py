"""Who averages with whom, in which order, and how many local steps each has taken by then.

In SwarmSGD (Nadiradze et al. 2021) one random pair of neighbours interacts at a time. Interactions
that share no replica commute, so `rounds` groups a list of them into rounds of disjoint pairs.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from decent_jax import topology


class Interaction(NamedTuple):
    """Replicas i and j take their local steps, then average.

    i, j: two different replicas; in a pull only i changes.
    steps_i, steps_j: local steps since the last interaction of each; 0 is allowed.
    time: interactions per replica so far, on average: 2 t / n after the t-th.
    """

    i: int
    j: int
    steps_i: int
    steps_j: int
    time: float


Round = list[Interaction]


def interactions(
    n: int,
    count: int,
    *,
    degree: int | None = None,
    graph: np.ndarray | None = None,
    local_steps: float = 1,
    geometric: bool = False,
    seed: int = 0,
) -> list[Interaction]:
    """``count`` interactions, each on an edge drawn uniformly from a graph of n replicas.

    Args:
      degree: draw a random regular graph of this degree first (the theory is for regular graphs).
      graph: (n, n) symmetric, non-zero where two replicas are neighbours, instead of ``degree``.
        Without either all replicas are neighbours.
      local_steps: H, the number of local steps of each partner.
      geometric: draw that number from Geometric(1/H), on 1, 2, ..., with mean H: the steps that a
        replica has taken when its random clock rings.
      seed: of NumPy's `RandomState`, which draws the same list on every machine.

    Either partner is i with probability 1/2.

    >>> interactions(8, 2, local_steps=4, geometric=True, seed=0)
    [Interaction(i=7, j=1, steps_i=4, steps_j=3, time=0.25),
     Interaction(i=2, j=5, steps_i=2, steps_j=4, time=0.5)]
    """
    _check_sizes(n, count, local_steps, geometric)
    edges = _edges(n, degree, graph, seed)
    random = np.random.RandomState(seed)
    pairs = edges[random.randint(len(edges), size=count)]
    turned = random.randint(2, size=count) == 1
    pairs[turned] = pairs[turned, ::-1]
    steps = _local_steps(random, (count, 2), local_steps, geometric)
    times = 2 * np.arange(1, count + 1) / n
    return _as_list(pairs, steps, times)


def matchings(
    n: int, num_rounds: int, *, local_steps: float = 1, geometric: bool = False, seed: int = 0
) -> list[Round]:
    """Rounds in which all replicas step and then average in random pairs: the synchronous form.

    Each round is a perfect matching of the complete graph, drawn uniformly; where n is odd, one
    replica sits each round out. See `interactions` for the other arguments.

    >>> [(one.i, one.j) for one in matchings(4, 1, seed=0)[0]]
    [(2, 3), (1, 0)]
    """
    _check_sizes(n, num_rounds, local_steps, geometric)
    random = np.random.RandomState(seed)
    drawn = []
    for r in range(num_rounds):
        pairs = random.permutation(n)[: n - n % 2].reshape(-1, 2)
        steps = _local_steps(random, pairs.shape, local_steps, geometric)
        drawn.append(_as_list(pairs, steps, np.full(len(pairs), r + 1.0)))
    return drawn


def pulls(
    n: int, num_rounds: int, *, local_steps: float = 1, geometric: bool = False, seed: int = 0
) -> list[Round]:
    """Rounds in which every replica steps and then reads one random other, all at once.

    For ``swarm(..., averaging="one_sided")``. In the authors' released code each rank pulls the
    model of a random other rank too, but whenever it is ready, without rounds.
    """
    _check_sizes(n, num_rounds, local_steps, geometric)
    random = np.random.RandomState(seed)
    drawn = []
    for r in range(num_rounds):
        i = np.arange(n)
        j = (i + random.randint(1, n, size=n)) % n
        steps = _local_steps(random, (n, 2), local_steps, geometric)
        steps[:, 1] = 0
        drawn.append(_as_list(np.stack([i, j], axis=1), steps, np.full(n, r + 1.0)))
    return drawn


def rounds(flat: Iterable[Interaction]) -> list[Round]:
    """Interactions grouped into rounds of disjoint pairs, which have the same effect in turn.

    Consecutive interactions fill a round until a replica would be in it twice, so that the models
    after a round are those after as many interactions of the list.

    >>> flat = [Interaction(i, j, 1, 1, 0.0) for i, j in ((0, 1), (1, 2), (3, 4), (0, 2), (3, 5))]
    >>> [[(one.i, one.j) for one in group] for group in rounds(flat)]
    [[(0, 1)], [(1, 2), (3, 4)], [(0, 2), (3, 5)]]
    """
    grouped: list[Round] = []
    last: dict[int, int] = {}  # the round in which a replica last took part
    for interaction in flat:
        i, j = interaction[:2]
        r = max(last.get(i, -1) + 1, last.get(j, -1) + 1, len(grouped) - 1)
        if r == len(grouped):
            grouped.append([])
        grouped[r].append(interaction)
        last[i] = last[j] = r
    return grouped


def as_rounds(given: Iterable[Interaction | Round]) -> Iterable[Round]:
    """Rounds, of which a single interaction is one by itself."""
    return ([item] if isinstance(item, Interaction) else list(item) for item in given)


def _check_sizes(n: int, count: int, local_steps: float, geometric: bool) -> None:
    if n < 2 or count < 0:
        raise ValueError(
            f"interactions need at least 2 replicas and a count of at least 0, got {n} and {count}"
        )
    if local_steps < 1 or not (geometric or local_steps == int(local_steps)):
        raise ValueError(
            "local_steps must be at least 1, and a whole number unless geometric=True, "
            f"got {local_steps}"
        )


def _edges(n: int, degree: int | None, graph: np.ndarray | None, seed: int) -> np.ndarray:
    """(number of edges, 2), i < j."""
    if degree is not None and graph is not None:
        raise ValueError("give either a degree or a graph, not both")
    if degree is not None:
        schedule = topology.make(f"random_regular(degree={degree}, seed={seed})", n)
        graph = schedule.matrix(0)
    if graph is None:
        graph = np.ones((n, n))
    neighbours = np.asarray(graph) != 0
    if neighbours.shape != (n, n) or (neighbours != neighbours.T).any():
        raise ValueError(
            f"graph must be a symmetric ({n}, {n}) matrix for {n} replicas, "
            f"got shape {neighbours.shape}"
        )
    edges = np.argwhere(np.triu(neighbours, k=1))
    alone = np.setdiff1d(np.arange(n), edges)
    if len(alone):
        raise ValueError(f"graph leaves replica {alone[0]} without a neighbour")
    return edges


def _local_steps(
    random: np.random.RandomState, shape: tuple[int, ...], local_steps: float, geometric: bool
) -> np.ndarray:
    if geometric:
        return random.geometric(1 / local_steps, size=shape)
    return np.full(shape, int(local_steps))


def _as_list(pairs: np.ndarray, steps: np.ndarray, times: np.ndarray) -> list[Interaction]:
    rows = zip(pairs.tolist(), steps.tolist(), times.tolist(), strict=True)
    return [Interaction(i, j, steps_i, steps_j, time) for (i, j), (steps_i, steps_j), time in rows]
