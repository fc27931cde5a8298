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
    interactions: (R,); after how many interactions the next was recorded.
    spread: (R,); Gamma = sum_i ||x_i - mu||^2, mu the mean of all models.
    local_steps: (n,); taken by each replica.
    bits_sent: in all messages.
    failed: interactions that did not average, because a receiver found that it could not decode.
    """

    models: np.ndarray
    interactions: np.ndarray
    spread: np.ndarray
    local_steps: np.ndarray
    bits_sent: int
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
    x = np.array(x0, np.float64)
    if x.ndim != 2:
        raise ValueError(f"x0 must be (replicas, parameters), got shape {x.shape}")
    n, d = x.shape
    rate = learning_rate if callable(learning_rate) else lambda k: learning_rate
    published = x if blocking else x.copy()
    velocity, steps = np.zeros_like(x), np.zeros(n, np.int64)
    # Streams of their own: what a replica draws does not depend on the order of the others.
    rngs = [np.random.default_rng((seed, 0, i)) for i in range(n)]
    message_bits = FULL_PRECISION_BITS * d if quantizer is None else quantizer.bits(d)
    count = failed = 0
    counts, spreads = [], []

    def record() -> None:
        spread = float(np.square(x - x.mean(axis=0)).sum())
        if not np.isfinite(spread):
            raise ValueError(
                f"models are no longer finite after {count} interactions; lower the learning rate"
            )
        counts.append(count)
        spreads.append(spread)
        if observe is not None:
            observe(count, x)

    def step(i: int) -> None:
        k = int(steps[i])
        velocity[i] = momentum * velocity[i] + gradient(i, x[i], k, rngs[i])
        x[i] -= rate(k) * velocity[i]
        steps[i] += 1

    record()
    for group in as_rounds(interactions):
        replicas = [replica for pair in group for replica in pair[:2]]
        if len(set(replicas) & set(range(n))) < len(replicas):
            raise ValueError(f"a round is of different replicas, of 0 to {n - 1}, got {replicas}")
        for i, j, steps_i, steps_j, _ in group:
            for replica in [i] * steps_i + [j] * steps_j:
                step(replica)
        for i, j, *_ in group:
            failed += not _average(x, published, [i, j], quantizer)
        if not blocking:
            published[replicas] = x[replicas]
        count += len(group)
        if count - counts[-1] >= record_every:
            record()
    if count > counts[-1]:
        record()
    sent = 2 * count * message_bits
    return Swarm(x, np.array(counts), np.array(spreads), steps, sent, failed)


def _average(
    x: np.ndarray, published: np.ndarray, pair: list[int], quantizer: LatticeQuantizer | None
) -> bool:
    """Average the two models of a pair in ``x``; False where a message could not be decoded."""
    own = published[pair]
    if quantizer is None:
        x[pair] = own.mean(axis=0) + (x[pair] - own)
        return True
    (from_i, sent_i), (from_j, sent_j) = map(quantizer.encode, own)
    at_i, at_j = quantizer.decode(from_j, own[0]), quantizer.decode(from_i, own[1])
    if not (at_i.ok and at_j.ok):
        return False
    x[pair] += (np.array([at_i.value, at_j.value]) - [sent_i, sent_j]) / 2
    return True
