"""SwarmSGD as an exact simulation of its events, interaction by interaction or round by round."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from decent_jax.simulate.pairs import Interaction, Round, as_rounds
from decent_jax.simulate.quantizer import LatticeQuantizer

FULL_PRECISION_BITS = 32  # per parameter that is not quantized

# gradient(i, x_i, k, rng): at x_i, (d,), of replica i, which has taken k local steps before.
Gradient = Callable[[int, np.ndarray, int, np.random.Generator], np.ndarray]
Observe = Callable[[int, np.ndarray], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Swarm:
    """What `swarm` returns.

    models: (n, d) float64; at the end.
    interactions: (R,); after how many interactions each of the next two was recorded.
    spread: (R,); Gamma = sum_i ||x_i - mu||^2, mu the mean of all models.
    mean_drift: (R,); how far averaging has moved mu: ||mu_t - mu_0 - all local updates / n||, which
        is rounding alone.
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
    quantizer: LatticeQuantizer | None = None,
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
    to the average afterwards.

    With a ``quantizer`` others receive Q(P_j), and ``x_i <- x_i + (Q(P_j) - Q(P_i)) / 2``: j does
    the opposite, so the mean stays. (The authors' released code averages one-sidedly, with its own
    copy exact: the mean drifts.) If a checksum shows that either could not decode the other, both
    keep their models. Replicas that keep moving apart then never average again: a step that is too
    fine makes training diverge, so give the quantizer's reach room.

    Args:
      x0: (n, d); a row for each replica.
      interactions: a list of `Interaction`, or of rounds (lists) of them. All of a round step
          before any averages, and average what was there before the round; rounds of disjoint
          pairs give exactly what the same interactions give one by one, in any order.
      gradient: ``(i, x_i, k, rng) -> (d,)``; ``rng`` is replica i's own, k counts its local steps.
      learning_rate: a number, or a function of k.
      momentum: local, like its buffer, which is never averaged.
      seed: of the replicas' random streams.
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
    run = _Run(x0, gradient, learning_rate, momentum, blocking, seed)
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
    ) -> None:
        self.x = np.array(x0, np.float64)
        if self.x.ndim != 2:
            raise ValueError(f"x0 must be (replicas, parameters), got shape {self.x.shape}")
        n, d = self.x.shape
        self.gradient, self.momentum = gradient, momentum
        self.rate = learning_rate if callable(learning_rate) else lambda k: learning_rate
        self.published = self.x if blocking else self.x.copy()
        self.velocity = np.zeros_like(self.x)
        # Streams of their own: what a replica draws does not depend on the order of the others.
        self.rngs = [np.random.default_rng((seed, 0, i)) for i in range(n)]
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

    def round(self, group: Round, quantizer: LatticeQuantizer | None) -> None:
        """All replicas of a round step, then its pairs average what was there before the round."""
        replicas = [replica for pair in group for replica in pair[:2]]
        known = set(replicas) & set(range(len(self.x)))
        if len(known) < len(replicas):
            raise ValueError(
                f"a round is of different replicas, of 0 to {len(self.x) - 1}, got {replicas}"
            )
        for i, j, steps_i, steps_j, _ in group:
            self._local_steps(i, steps_i)
            self._local_steps(j, steps_j)
        for i, j, *_ in group:
            self._average([i, j], quantizer)
        if self.published is not self.x:
            self.published[replicas] = self.x[replicas]
        self.count += len(group)

    def _local_steps(self, i: int, count: int) -> None:
        for _ in range(count):
            k = int(self.steps[i])
            gradient = self.gradient(i, self.x[i], k, self.rngs[i])
            self.velocity[i] = self.momentum * self.velocity[i] + gradient
            update = self.rate(k) * self.velocity[i]
            self.x[i] -= update
            self.updates -= update
            self.steps[i] += 1

    def _average(self, pair: list[int], quantizer: LatticeQuantizer | None) -> None:
        own, d = self.published[pair], self.x.shape[1]
        if quantizer is None:
            self.bits_sent += 2 * FULL_PRECISION_BITS * d
            self.x[pair] = own.mean(axis=0) + (self.x[pair] - own)
            return
        self.bits_sent += 2 * quantizer.bits(d)
        (from_i, sent_i), (from_j, sent_j) = map(quantizer.encode, own)
        at_i, at_j = quantizer.decode(from_j, own[0]), quantizer.decode(from_i, own[1])
        failures = (not at_i.ok) + (not at_j.ok)
        self.failed_decodes += failures
        self.failed += failures > 0
        if not failures:
            self.x[pair] += (np.array([at_i.value, at_j.value]) - [sent_i, sent_j]) / 2
