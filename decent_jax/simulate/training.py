"""SwarmSGD as an exact simulation of its events, interaction by interaction or round by round.

In SwarmSGD (Nadiradze et al. 2021) one random pair of neighbours interacts at a time.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from decent_jax import topology
from decent_jax.gossip.codecs import Lattice

FULL_PRECISION_BITS = 32  # per parameter that is not quantized
HEAD_BITS = 64  # of a quantized message: checksum and side

# --- who averages with whom, and after how many local steps --------------------------------------


class Interaction(NamedTuple):
    """Replicas i and j take their local steps, then average.

    i, j: two different replicas.
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
    local_steps: float = 1,
    geometric: bool = False,
    seed: int = 0,
) -> list[Interaction]:
    """``count`` interactions, each on an edge drawn uniformly from a graph of n replicas.

    Args:
      degree: draw a random regular graph of this degree first; None: all replicas are neighbours.
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
    graph = np.ones((n, n))
    if degree is not None:
        graph = topology.make(f"random_regular(degree={degree}, seed={seed})", n).matrix(0)
    edges = np.argwhere(np.triu(graph, k=1))
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


def _local_steps(
    random: np.random.RandomState, shape: tuple[int, ...], local_steps: float, geometric: bool
) -> np.ndarray:
    if geometric:
        return random.geometric(1 / local_steps, size=shape)
    return np.full(shape, int(local_steps))


def _as_list(pairs: np.ndarray, steps: np.ndarray, times: np.ndarray) -> list[Interaction]:
    rows = zip(pairs.tolist(), steps.tolist(), times.tolist(), strict=True)
    return [Interaction(i, j, steps_i, steps_j, time) for (i, j), (steps_i, steps_j), time in rows]


# --- training ------------------------------------------------------------------------------------

# gradient(i, x_i, k, rng): at x_i, (d,), of replica i, which has taken k local steps before.
Gradient = Callable[[int, np.ndarray, int, np.random.Generator], np.ndarray]
Observe = Callable[[int, np.ndarray], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Swarm:
    """What `swarm` returns.

    models: (n, d) float64; at the end.
    interactions: (R,); after how many interactions each of the next two was recorded.
    spread: (R,); Gamma = sum_i ||x_i - mu||^2, mu the mean of all models.
    mean_drift: (R,); how far averaging has moved mu: ||mu_t - mu_0 - all local updates / n||.
        Rounding alone: averaging keeps the mean.
    local_steps: (n,); taken by each replica.
    bits_sent: in all messages.
    failed_decodes: messages that the receiver found it could not decode.
    failed: interactions that therefore did not average.
    """

    models: np.ndarray
    interactions: np.ndarray
    spread: np.ndarray
    mean_drift: np.ndarray
    local_steps: np.ndarray
    bits_sent: int
    failed_decodes: int
    failed: int


def swarm(
    x0: np.ndarray,
    interactions: Iterable[Interaction | Round],
    gradient: Gradient,
    learning_rate: float | Callable[[int], float],
    *,
    blocking: bool = True,
    quantizer: Lattice | None = None,
    stochastic: bool = False,
    momentum: float = 0.0,
    seed: int = 0,
    record_every: int = 1,
    observe: Observe | None = None,
) -> Swarm:
    """Train n replicas by SwarmSGD (Nadiradze et al. 2021).

    In an interaction i and j first take their local steps, ``m <- momentum m + g;  x <- x - lr m``,
    and then average. P_i is the copy of its model that replica i publishes: x_i after its steps if
    blocking, else x_i as its last interaction left it::

        blocking      x_i, x_j <- (P_i + P_j) / 2
        non-blocking  x_i <- (P_i + P_j) / 2 + (x_i - P_i), j alike

    A non-blocking replica receives the other's copy while it still computes, and adds its own steps
    to the average afterwards. (The authors' released code changes one side only: the mean drifts.)

    With a ``quantizer`` others receive Q(P_j), and ``x_i <- x_i + (Q(P_j) - Q(P_i)) / 2``: j does
    the opposite, so the mean stays. ``stochastic=True`` rounds up with the probability of the
    fraction instead of to the nearest: unbiased, with a variance of s^2 / 6 on average instead of
    s^2 / 12.

    If a checksum shows that either could not decode the other, both keep their models. Replicas
    that keep moving apart then never average again: a step that is too fine makes training
    diverge, so give the quantizer's reach room.

    Args:
      x0: (n, d); a row for each replica.
      interactions: a list of `Interaction`, or of rounds (lists) of them. All of a round step
          before any averages, and average what was there before the round; rounds of disjoint
          pairs give exactly what the same interactions give one by one, in any order.
      gradient: ``(i, x_i, k, rng) -> (d,)``; ``rng`` is replica i's own, k counts its local steps.
      learning_rate: a number, or a function of k.
      momentum: local, like its buffer, which is never averaged.
      seed: of the replicas' random streams, for gradients and for stochastic rounding.
      record_every: interactions between two records of the spread; the first and last are kept.
      observe: called with the count of interactions and the models (not to be changed) at each.

    >>> from decent_jax.simulate import interactions
    >>> pull_to_own_corner = lambda i, x, k, rng: x - np.eye(4)[i]
    >>> result = swarm(np.zeros((4, 4)), interactions(4, 400), pull_to_own_corner, 0.01)
    >>> result.models.mean(axis=0).round(2)
    array([0.2 , 0.23, 0.23, 0.21])
    """
    if record_every < 1:
        raise ValueError(f"record_every must be at least 1, got {record_every}")
    run = _Run(x0, gradient, learning_rate, momentum, blocking, seed, stochastic)
    records = [run.record(observe)]
    for group in as_rounds(interactions):
        run.round(group, quantizer)
        if run.count - records[-1][0] >= record_every:
            records.append(run.record(observe))
    if run.count > records[-1][0]:
        records.append(run.record(observe))
    counts, spread, drift = (np.array(column) for column in zip(*records, strict=True))
    return Swarm(
        run.x, counts, spread, drift, run.steps, run.bits_sent, run.failed_decodes, run.failed
    )


class _Run:
    """The state of all replicas between two rounds."""

    def __init__(
        self,
        x0: np.ndarray,
        gradient: Gradient,
        learning_rate: float | Callable[[int], float],
        momentum: float,
        blocking: bool,
        seed: int,
        stochastic: bool,
    ) -> None:
        self.stochastic = stochastic
        self.x = np.array(x0, np.float64)
        if self.x.ndim != 2:
            raise ValueError(f"x0 must be (replicas, parameters), got shape {self.x.shape}")
        n, d = self.x.shape
        self.gradient, self.momentum = gradient, momentum
        self.rate = learning_rate if callable(learning_rate) else lambda k: learning_rate
        self.published = self.x if blocking else self.x.copy()
        self.velocity = np.zeros_like(self.x) if momentum else None
        # Streams of their own: what a replica draws does not depend on the order of the others.
        self.rngs, self.rounding_rngs = (
            [np.random.default_rng((seed, kind, i)) for i in range(n)] for kind in (0, 1)
        )
        self.steps = np.zeros(n, np.int64)
        self.count = self.bits_sent = self.failed_decodes = self.failed = 0
        self.start = self.x.mean(axis=0)
        self.updates = np.zeros(d)  # the sum of all local updates

    def record(self, observe: Observe | None) -> tuple[int, float, float]:
        mean = self.x.mean(axis=0)
        drift = np.linalg.norm(mean - self.start - self.updates / len(self.x))
        spread = float(np.square(self.x - mean).sum())
        if not np.isfinite(spread):
            raise ValueError(
                f"models are no longer finite after {self.count} interactions; "
                "lower the learning rate"
            )
        if observe is not None:
            observe(self.count, self.x)
        return self.count, spread, float(drift)

    def round(self, group: Round, quantizer: Lattice | None) -> None:
        """All replicas of a round step, then its pairs average what was there before the round."""
        self._check(group)
        for i, j, steps_i, steps_j, _ in group:
            self._local_steps(i, steps_i)
            self._local_steps(j, steps_j)
        averages = [
            self._averages(i, j) if quantizer is None else self._quantized(i, j, quantizer)
            for i, j, *_ in group
        ]
        for (i, j, *_), (at_i, at_j) in zip(group, averages, strict=True):
            self.x[i], self.x[j] = at_i, at_j
        if self.published is not self.x:
            taking_part = [replica for pair in group for replica in pair[:2]]
            self.published[taking_part] = self.x[taking_part]
        self.count += len(group)

    def _check(self, group: Round) -> None:
        pairs = [interaction[:2] for interaction in group]
        changed = [replica for pair in pairs for replica in pair]
        if len(set(changed)) < len(changed):
            raise ValueError(f"a round changes a replica at most once, got {pairs}")
        for i, j in pairs:
            if not (0 <= i < len(self.x) and 0 <= j < len(self.x)):
                raise ValueError(
                    f"an interaction is between two of {len(self.x)} replicas, got {i} and {j}"
                )

    def _local_steps(self, i: int, count: int) -> None:
        for _ in range(count):
            k = int(self.steps[i])
            update = self.gradient(i, self.x[i], k, self.rngs[i])
            if self.velocity is not None:
                self.velocity[i] = self.momentum * self.velocity[i] + update
                update = self.velocity[i]
            update = self.rate(k) * update
            self.x[i] -= update
            self.updates -= update
            self.steps[i] += 1

    def _averages(self, i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
        """The models of i and j after they have averaged; nothing is written yet."""
        self.bits_sent += 2 * FULL_PRECISION_BITS * self.x.shape[1]
        own_i, own_j = self.published[i], self.published[j]
        average = (own_i + own_j) / 2
        return average + (self.x[i] - own_i), average + (self.x[j] - own_j)

    def _quantized(self, i: int, j: int, quantizer: Lattice) -> tuple[np.ndarray, np.ndarray]:
        """The same by coded messages."""
        own_i, own_j = self.published[i], self.published[j]
        self.bits_sent += 2 * (quantizer.bits * self.x.shape[1] + HEAD_BITS)
        from_i, from_j = (self._encoded(k, quantizer) for k in (i, j))
        at_i, at_j = quantizer.decode(from_j, like=own_i), quantizer.decode(from_i, like=own_j)
        failures = bool(np.isnan(at_i).any()) + bool(np.isnan(at_j).any())
        self.failed_decodes += failures
        self.failed += failures > 0
        if failures:
            return self.x[i], self.x[j]
        own_i, own_j = quantizer.decode(from_i, own_i), quantizer.decode(from_j, own_j)
        return self.x[i] + (at_i - own_i) / 2, self.x[j] + (at_j - own_j) / 2

    def _encoded(self, i: int, quantizer: Lattice) -> tuple:
        own = self.published[i]
        if not (np.abs(own) < 2.0**62 * quantizer.side).all():
            raise ValueError(
                "a model to be encoded must be finite and below 2^62 sides, got "
                f"{np.abs(own).max():g}; lower the learning rate"
            )
        random = self.rounding_rngs[i].random
        return quantizer.encode(own, random(own.shape) if self.stochastic else None)
