"""The parts of a training step, and its time with all-reduce in closed form.

Gossip is faster than all-reduce for three reasons (Wang et al., ICLR 2025): it hides behind the
whole step and not only behind the backward pass; it can keep to fast links; and a replica waits for
its neighbours, not for the slowest of all replicas. The paper's equations were not available; ours
follow from the schedule that its code implements. F, B and U are the times of forward, backward
and update, X is the factor by which compute varies, and C is the time to communicate the whole
model:

- all-reduce: a replica sends a bucket as soon as it has its gradients, and all replicas begin the
  next step together. Let C' be the part of C for gradients that are complete only after the
  backward pass (such as those of a tied embedding). With k equal buckets and one factor X per
  replica per step, the time is exactly::

      T = E max( X (F + B/k) + C,  X (F + B) + (C - C') / k + C' ) + U,    X the largest of n

- gossip, ``combine="awc"``: replicas send parameters after an update and need the mix at their next
  update. `decent_jax.planner.simulator` finds the time of a step. If compute is constant and all
  replicas communicate for the same time C in a round, this is the mean of max( F + B, C ) + U over
  rounds; with a barrier in every step, it would be E max( X (F + B), max C ) + U.

>>> from decent_jax.planner.network import preset
>>> network = preset("nvlink_25gbe", num_nodes=2, devices_per_node=4)
>>> workload = Workload(model_bytes=250e6, forward_s=0.04, backward_s=0.08, update_s=0.002)
>>> round(all_reduce_step_s(network, workload, AllReduce("ring")), 4)
0.1903
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from decent_jax.planner import costs
from decent_jax.planner.network import Network
from decent_jax.topology import Schedule

CODECS = ("float32", "bfloat16", "int8", "int4")  # formats of a message
QUANTILES = 20_000

# --- compute times that vary --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LogNormal:
    """A random factor with mean 1 on the times of forward and backward, per replica per step.

    It is ``exp(sigma z - sigma^2 / 2)`` with z standard normal, as if many small causes multiply.
    """

    sigma: float

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
        return np.exp(self.sigma * rng.standard_normal(shape) - self.sigma**2 / 2)

    def exceeded(self, probability: np.ndarray) -> np.ndarray:
        """The values that a sample exceeds with these probabilities."""
        return np.exp(-self.sigma * special.ndtri(probability) - self.sigma**2 / 2)


CONSTANT = LogNormal(0.0)  # every step takes the mean time


def max_nodes(distribution: LogNormal, slowness: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Values and weights with ``E f(m) = sum(weights * f(values))``, m the maximum of n draws.

    If all factors are equal, they are a Gauss-Legendre quadrature in the probability (error below
    1e-6 of the mean for smooth f); otherwise they are exact for `QUANTILES` equally likely values.

    Args:
      slowness: (n,) factors; draw i is multiplied by ``slowness[i]``.
    """
    factors, counts = np.unique(slowness, return_counts=True)
    if len(factors) == 1:
        probability, weights = _nodes()
        log_below = np.log1p(-probability) / counts[0]
        return factors[0] * distribution.exceeded(-np.expm1(log_below)), weights
    values = np.sort(distribution.exceeded((np.arange(QUANTILES) + 0.5) / QUANTILES))
    support = np.unique(np.outer(factors, values))
    below = np.ones(len(support))
    for factor, count in zip(factors, counts, strict=True):
        rank = np.searchsorted(values * factor, support * (1 + 1e-12), side="right")
        below *= (rank / QUANTILES) ** count
    return support, np.diff(below, prepend=0.0)


def expected_max(distribution: LogNormal, n: int) -> float:
    """The expected maximum of n independent draws; the mean of a draw is 1."""
    values, weights = max_nodes(distribution, np.ones(n))
    return float(values @ weights)


@functools.cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of being exceeded, dense near 0 to resolve the tail, and their weights."""
    node, weight = np.polynomial.legendre.leggauss(200)
    half = (node + 1) / 2
    return half**4, 2 * weight * half**3


def fit(times_s: np.ndarray, steps_per_time: int = 1) -> tuple[float, LogNormal]:
    """Mean, in seconds, and variation of one replica's step times, (m,) seconds, m at least 2.

    They must be times of compute alone, from a run with one replica or without communication. In a
    synchronous run, every step already takes the maximum over replicas.

    Args:
      steps_per_time: each time is the mean over this many steps, which hides their variation.
    """
    mean = float(np.mean(times_s))
    variance = steps_per_time * float(np.var(times_s / mean, ddof=1))
    return mean, LogNormal(math.sqrt(math.log1p(variance)))


# --- the parts of a step ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Workload:
    """One replica's step, without communication.

    model_bytes: bytes of the parameters (or gradients) in float32.
    forward_s, backward_s, update_s: mean seconds.
    compute: the factor on forward and backward, drawn for each replica and step.
    slowness: (n,) factors, above 1 for replicas that are always slower, or one factor for all.
    late_bytes: part of ``model_bytes`` whose gradient is complete only at the very end of the
        backward pass, such as an embedding, especially if it is also the output layer.
    row_length: mean number of parameters per row of the last axis; formats of 8 and 4 bits send a
        float32 scale per row.
    """

    model_bytes: float
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    compute: LogNormal = CONSTANT
    slowness: float | tuple[float, ...] = 1.0
    late_bytes: float = 0.0
    row_length: float = 768.0

    @property
    def compute_s(self) -> float:
        """Mean seconds of forward and backward."""
        return self.forward_s + self.backward_s

    def share(self, codec: str) -> float:
        """The bytes of a message in one of `CODECS`, as a fraction of those in float32."""
        bits = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}[codec]
        return bits / 32 + (1 / self.row_length if bits <= 8 else 0)

    def factors(self, n: int) -> np.ndarray:
        """``slowness`` of each of n replicas, (n,)."""
        return np.broadcast_to(np.asarray(self.slowness, float), n)


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Synchronous mean of gradients in buckets, each sent as soon as it is computed.

    collective: see `costs.all_reduce_phases`.
    bucket_bytes: bytes of float32 gradients (PyTorch's default is 25 MB; XLA combines up to 30 MB);
        infinite: one message after the backward pass.
    """

    collective: costs.AllReduce = "auto"
    bucket_bytes: float = 25e6

    @property
    def name(self) -> str:
        return "all_reduce"


def codes(schedule: Schedule, codec: str) -> bool:
    """Whether replicas can send the messages of a schedule in one of `CODECS`."""
    return codec == "float32" or not schedule.sends_sums


@dataclasses.dataclass(frozen=True)
class Gossip:
    """Gossip of parameters by a schedule.

    mix_every: H; every H-th step has a round.
    combine: "awc" hides the round behind the step; "atc" exposes it.
    codec: the format of messages, one of `CODECS`; only float32 if the schedule sends sums.
    execution: see `costs.round_phases`.
    bucket_bytes: infinite in this project, which sends all parameters at once; finite in
        Decent-DP, which sends a bucket after its update and needs the mix at its next update.
    """

    schedule: Schedule
    mix_every: int = 1
    combine: Literal["awc", "atc"] = "awc"
    codec: str = "float32"
    execution: costs.Execution = "hierarchical"
    bucket_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not codes(self.schedule, self.codec):
            raise ValueError(
                f"{self.schedule.name} sends sums of groups, which are sent only in float32, got "
                f"codec {self.codec}; use a schedule such as one_peer_exp or complete"
            )

    @property
    def name(self) -> str:
        return self.schedule.name


Algorithm = AllReduce | Gossip


class Bucket(NamedTuple):
    """A part of the model that is sent in one message."""

    num_bytes: float  # its bytes in float32
    backward: float  # fraction of the backward pass between the previous bucket and this one


def buckets(workload: Workload, algorithm: Algorithm) -> list[Bucket]:
    """Equal buckets of at most ``bucket_bytes``; then, if need be, one of ``late_bytes``.

    An infinite ``bucket_bytes`` makes a single bucket of everything.
    """
    if math.isinf(algorithm.bucket_bytes):
        return [Bucket(workload.model_bytes, 1.0)]
    early = workload.model_bytes - workload.late_bytes
    count = max(1, math.ceil(early / algorithm.bucket_bytes - 1e-9))
    late = [Bucket(workload.late_bytes, 0.0)] if workload.late_bytes else []
    return [Bucket(early / count, 1 / count)] * count + late


def phases_of(
    network: Network, workload: Workload, algorithm: Algorithm, num_bytes: float
) -> list[list[costs.Phase]]:
    """The phases of each round (all-reduce has one "round") for ``num_bytes`` of float32."""
    if isinstance(algorithm, AllReduce):
        return [costs.all_reduce_phases(network, num_bytes, algorithm.collective)]
    compression = workload.share(algorithm.codec)
    return [
        costs.round_phases(network, rnd, num_bytes, algorithm.execution, compression=compression)
        for rnd in algorithm.schedule.rounds
    ]


def all_reduce_step_s(network: Network, workload: Workload, algorithm: AllReduce) -> float:
    """Expected seconds of a step of synchronous all-reduce.

    Exact if all replicas are done with a bucket at the same time, as with a ring or a tree.
    """
    parts = buckets(workload, algorithm)
    seconds = {
        num_bytes: costs.total_s(phases_of(network, workload, algorithm, num_bytes)[0])
        for num_bytes in {part.num_bytes for part in parts}
    }
    x, weights = max_nodes(workload.compute, workload.factors(network.num_devices))
    end, remaining, backward = 0.0, sum(seconds[part.num_bytes] for part in parts), 0.0
    for part in parts:
        backward += part.backward
        ready = x * (workload.forward_s + workload.backward_s * backward)
        end = np.maximum(end, ready + remaining)
        remaining -= seconds[part.num_bytes]
    return float(end @ weights) + workload.update_s
