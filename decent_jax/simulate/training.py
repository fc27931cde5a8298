"""SwarmSGD as an exact simulation of its events, interaction by interaction or round by round."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from decent_jax.gossip.codecs import Lattice
from decent_jax.simulate.pairs import Interaction, Round, as_rounds

FULL_PRECISION_BITS = 32  # per parameter that is not quantized
HEAD_BITS = 64  # of a quantized message: checksum and side

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
        Rounding alone where both partners average, since that keeps the mean.
    local_steps: (n,); taken by each replica.
    bits_sent: in all messages.
    failed_decodes: messages that the receiver found it could not decode.
    failed: interactions that therefore did not average, or did so in full precision.
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
    averaging: str = "both",
    blocking: bool = True,
    quantizer: Lattice | None = None,
    stochastic: bool = False,
    own_exact: bool = False,
    on_failure: str = "drop",
    momentum: float = 0.0,
    seed: int = 0,
    record_every: int = 1,
    observe: Observe | None = None,
) -> Swarm:
    """Train n replicas by SwarmSGD (Nadiradze et al. 2021).

    In an interaction i and j first take their local steps, ``m <- momentum m + g;  x <- x - lr m``,
    and then average. P_i is the copy of its model that replica i publishes: x_i after its steps if
    blocking, else x_i as its last interaction left it::

        both, blocking      x_i, x_j <- (P_i + P_j) / 2
        both, non-blocking  x_i <- (P_i + P_j) / 2 + (x_i - P_i), j alike
        one-sided           x_i as above, j keeps its own

    A non-blocking replica receives the other's copy while it still computes, and adds its own steps
    to the average afterwards. The authors' released code is one-sided: the mean drifts.

    With a ``quantizer`` others receive Q(P_j), and ``x_i <- x_i + (Q(P_j) - Q(P_i)) / 2``: j does
    the opposite, so the mean stays. ``stochastic=True`` rounds up with the probability of the
    fraction instead of to the nearest: unbiased, with a variance of s^2 / 6 on average instead of
    s^2 / 12. ``own_exact=True`` is ``x_i <- x_i + (Q(P_j) - P_i) / 2``, as
    in the released code: half the noise, but the mean drifts.

    If a checksum shows that either could not decode the other, both keep their models
    (``on_failure="drop"``). Replicas that keep moving apart then never average again: a step that
    is too fine makes training diverge, so give the quantizer's reach room, or send such models
    again in full precision (``"resend"``).

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
    for name, value, known in (
        ("averaging", averaging, ("both", "one_sided")),
        ("on_failure", on_failure, ("drop", "resend")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be {known[0]!r} or {known[1]!r}, got {value!r}")
    if record_every < 1:
        raise ValueError(f"record_every must be at least 1, got {record_every}")
    both, resend = averaging == "both", on_failure == "resend"
    run = _Run(
        x0, gradient, learning_rate, momentum, blocking, seed, both, stochastic, own_exact, resend
    )
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
        both: bool,
        stochastic: bool,
        own_exact: bool,
        resend: bool,
    ) -> None:
        self.both, self.stochastic = both, stochastic
        self.own_exact, self.resend = own_exact, resend
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
            self.x[i] = at_i
            if self.both:
                self.x[j] = at_j
        if self.published is not self.x:
            taking_part = [replica for pair in group for replica in pair[:2]]
            self.published[taking_part] = self.x[taking_part]
        self.count += len(group)

    def _check(self, group: Round) -> None:
        pairs = [interaction[:2] for interaction in group]
        changed = [replica for pair in pairs for replica in (pair if self.both else pair[:1])]
        if len(set(changed)) < len(changed):
            raise ValueError(f"a round changes a replica at most once, got {pairs}")
        for i, j in pairs:
            if i == j or not (0 <= i < len(self.x) and 0 <= j < len(self.x)):
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
        self._count_full_precision()
        own_i, own_j = self.published[i], self.published[j]
        average = (own_i + own_j) / 2
        return average + (self.x[i] - own_i), average + (self.x[j] - own_j)

    def _quantized(self, i: int, j: int, quantizer: Lattice) -> tuple[np.ndarray, np.ndarray]:
        """The same by coded messages."""
        own_i, own_j = self.published[i], self.published[j]
        self.bits_sent += (1 + self.both) * (quantizer.bits * self.x.shape[1] + HEAD_BITS)
        from_i, from_j = (self._encoded(k, quantizer) for k in (i, j))
        at_i, at_j = quantizer.decode(from_j, like=own_i), quantizer.decode(from_i, like=own_j)
        failures = bool(np.isnan(at_i).any()) + bool(self.both and np.isnan(at_j).any())
        self.failed_decodes += failures
        self.failed += failures > 0
        if failures and self.resend:
            self._count_full_precision()
            difference = (own_j - own_i) / 2
            return self.x[i] + difference, self.x[j] - difference
        if failures:
            return self.x[i].copy(), self.x[j].copy()
        if not self.own_exact:
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

    def _count_full_precision(self) -> None:
        self.bits_sent += (1 + self.both) * FULL_PRECISION_BITS * self.x.shape[1]
