"""How much the compute time of a step varies: distributions, their maxima, fits of a trace.

A distribution is of a factor with mean 1 on the time that forward and backward take on one
replica; replicas and steps draw independently. All-reduce loses the expected maximum over all
replicas to it. ``sample(rng, shape)`` draws, ``cdf(x)`` is the probability of at most x, and
``exceeded(p)`` the value that a draw exceeds with probability p.

>>> jitter = ShiftedExponential(0.9)                  # 0.9 + 0.1 x Exp(1)
>>> round(expected_max(jitter, 4), 4)                 # 0.9 + 0.1 (1 + 1/2 + 1/3 + 1/4)
1.1083
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from decent_jax.ground.run_folder import read_metrics

# With fewer step times the parameters of a curve say more than a histogram.
ENOUGH_FOR_EMPIRICAL = 100
QUANTILES = 20_000
SHORTEST_S, LONGEST_S = 1e-9, 1e5  # of a step: a cycle of a processor, a day

Shape = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LogNormal:
    """``exp(sigma z - sigma^2 / 2)``, z standard normal: many small causes that multiply.

    sigma: above 0.
    """

    sigma: float

    def sample(self, rng: np.random.Generator, shape: Shape) -> np.ndarray:
        return np.exp(self.sigma * rng.standard_normal(shape) - self.sigma**2 / 2)

    def cdf(self, x: np.ndarray) -> np.ndarray:
        return special.ndtr((np.log(np.maximum(x, 1e-300)) + self.sigma**2 / 2) / self.sigma)

    def exceeded(self, probability: np.ndarray) -> np.ndarray:
        return np.exp(-self.sigma * special.ndtri(probability) - self.sigma**2 / 2)


@dataclasses.dataclass(frozen=True)
class ShiftedExponential:
    """``shift + (1 - shift) Exp(1)``: a floor, and rare long interruptions.

    shift: the part of the mean that never varies, in [0, 1).
    """

    shift: float

    def sample(self, rng: np.random.Generator, shape: Shape) -> np.ndarray:
        return self.shift + (1 - self.shift) * rng.standard_exponential(shape)

    def cdf(self, x: np.ndarray) -> np.ndarray:
        return -np.expm1(-np.maximum(x - self.shift, 0) / (1 - self.shift))

    def exceeded(self, probability: np.ndarray) -> np.ndarray:
        return self.shift - (1 - self.shift) * np.log(probability)


@dataclasses.dataclass(frozen=True)
class Empirical:
    """Drawn from measured step times, in units of their mean."""

    values: tuple[float, ...]

    def sample(self, rng: np.random.Generator, shape: Shape) -> np.ndarray:
        return rng.choice(np.asarray(self.values), shape)


CONSTANT = Empirical((1.0,))  # every step takes the mean
Continuous = LogNormal | ShiftedExponential
Distribution = Continuous | Empirical


def max_nodes(
    distribution: Distribution, n: int, slowness: ArrayLike | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Values and weights with ``E f(max) = sum(weights * f(values))``, the maximum over n draws.

    Args:
      slowness: (n,) factors; draw i is multiplied by ``slowness[i]``. Left out: all 1.

    Exact for `Empirical`. Else, if all factors are equal, Gauss-Legendre in the probability, whose
    error is below 1e-6 of the mean for smooth f; otherwise that of as many quantiles.
    """
    factors, counts = np.unique(
        np.ones(n) if slowness is None else np.asarray(slowness, float), return_counts=True
    )
    if isinstance(distribution, Empirical):
        return _max_of_values(np.asarray(distribution.values), factors, counts)
    if len(factors) == 1:
        probability_below, weights = _nodes()
        log_below = np.log1p(-probability_below) / n
        return factors[0] * distribution.exceeded(-np.expm1(log_below)), weights
    quantiles = distribution.exceeded((np.arange(QUANTILES) + 0.5) / QUANTILES)
    return _max_of_values(quantiles, factors, counts)


def expected_max(distribution: Distribution, n: int, slowness: ArrayLike | None = None) -> float:
    """The expected maximum of n independent draws, see `max_nodes`; the mean of a draw is 1."""
    values, weights = max_nodes(distribution, n, slowness)
    return float(values @ weights)


@functools.cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of exceeding, close together near 0, where a tail needs them."""
    node, weight = np.polynomial.legendre.leggauss(200)
    half, weight = (node + 1) / 2, weight / 2
    return half**4, weight * 4 * half**3


def _max_of_values(
    values: np.ndarray, factors: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    values = np.sort(values)
    support = np.unique(np.outer(factors, values))
    below = np.ones(len(support))
    for factor, count in zip(factors, counts, strict=True):
        rank = np.searchsorted(values * factor, support * (1 + 1e-12), side="right")
        below *= (rank / len(values)) ** count
    return support, np.diff(below, prepend=0.0)


# --- from a trace -------------------------------------------------------------------------------


class Fit(NamedTuple):
    """Step times of one replica: their mean and their variation."""

    mean_s: float
    distribution: Distribution


def fit(times_s: ArrayLike, steps_per_time: int = 1) -> Fit:
    """The distribution of a trace of step times, (m,) seconds.

    That is the lognormal or the shifted exponential of maximum likelihood, whichever is nearer (in
    Kolmogorov-Smirnov distance). If the trace has 100 times or more and clearly (5% level) comes
    from neither, the trace itself is the distribution.

    Args:
      steps_per_time: each time is the mean over this many steps, which hides their variation. The
        result is then a lognormal with ``steps_per_time`` times the variance.

    The times must be of compute alone: of a run with one replica, or without communication. In a
    synchronous run every step already takes the maximum over replicas.

    Raises:
      ValueError: fewer than two times, or one that is not positive.
    """
    times = np.asarray(times_s, float)
    if times.ndim != 1 or len(times) < 2 or not ((times > 0) & (times <= LONGEST_S)).all():
        found = f"{times.min():g} to {times.max():g}" if len(times) else "none"
        raise ValueError(
            f"a trace needs at least two positive step times, up to {LONGEST_S:g} s, got "
            f"{len(times)}: {found}"
        )
    mean = float(times.mean())
    x = np.sort(times / mean)
    if np.ptp(x) < 1e-9:
        return Fit(mean, CONSTANT)
    if steps_per_time > 1:
        sigma = math.sqrt(math.log1p(steps_per_time * x.var(ddof=1)))
        return Fit(mean, LogNormal(sigma))
    shift = max(0.0, (len(x) * x[0] - 1) / (len(x) - 1))  # the minimum is above the floor
    candidates = [LogNormal(float(np.log(x).std())), ShiftedExponential(shift)]
    distances = [_ks_distance(candidate, x) for candidate in candidates]
    best = int(np.argmin(distances))
    if len(x) >= ENOUGH_FOR_EMPIRICAL and distances[best] > 1.36 / math.sqrt(len(x)):
        return Fit(mean, Empirical(tuple(x.tolist())))
    return Fit(mean, candidates[best])


def read_trace(path: str | Path) -> tuple[np.ndarray, int]:
    """Step times in seconds from a run's metrics.jsonl, and over how many steps each is a mean.

    The first row is left out, because it holds compilation.

    Raises:
      ValueError: no such file, or fewer than three rows with ``perf/step_time_s``.
    """
    try:
        rows = [
            (row["step"], row["perf/step_time_s"])
            for row in read_metrics(path)
            if type(row.get("perf/step_time_s")) in (int, float)
        ]
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror or error}") from None
    if len(rows) < 3:
        raise ValueError(
            f"{path} has {len(rows)} rows with perf/step_time_s; a trace needs at least 3 "
            "(lower log.every)"
        )
    steps = np.array([step for step, _ in rows])
    return np.array([seconds for _, seconds in rows[1:]]), max(1, int(np.median(np.diff(steps))))


def _ks_distance(distribution: Continuous, sorted_values: np.ndarray) -> float:
    cdf = distribution.cdf(sorted_values)
    rank = np.arange(len(cdf) + 1) / len(cdf)
    return float(np.maximum(rank[1:] - cdf, cdf - rank[:-1]).max())
