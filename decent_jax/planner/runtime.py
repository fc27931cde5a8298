"""What a training step is made of, and how long it takes with all-reduce, in closed form.

Three things make gossip faster than all-reduce (Wang et al., ICLR 2025): it hides behind the whole
step and not only behind the backward pass; it can keep to fast links; and a replica waits for its
neighbours, not for the slowest of all. The paper's own equations were not available; these follow
from the schedule that its code implements. F, B, U are the times of forward, backward and update, X
the factor by which compute varies, C the time to communicate the whole model:

- all-reduce: a replica sends a bucket as soon as it has its gradients, and all replicas begin the
  next step together. With k equal buckets, one factor X per replica and step, and C' for gradients
  that are complete only at the end of the backward pass (a tied embedding), exactly::

      T = E max( X (F + B/k) + C,  X (F + B) + (C - C') / k + C' ) + U,    X the largest of n

- gossip, ``combine="with"``: replicas send parameters after an update and need the mixture at their
  next update. `decent_jax.planner.simulator` finds the step. Where compute is constant and all
  replicas communicate for the same time C in a round, it is the mean of max( F + B, C ) + U over
  rounds; waiting for a barrier in every step would take E max( X (F + B), max C ) + U.

>>> from decent_jax.planner.network import preset
>>> network = preset("nvlink_25gbe", num_nodes=2, devices_per_node=4)
>>> workload = Workload(model_bytes=250e6, forward_s=0.04, backward_s=0.08, update_s=0.002)
>>> round(all_reduce_step_s(network, workload, AllReduce("ring")), 4)
0.1903
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import numpy as np

from decent_jax.planner import costs
from decent_jax.planner.compute_times import CONSTANT, Distribution, max_nodes
from decent_jax.planner.network import Network
from decent_jax.topology import Schedule

WIRES = ("float32", "bfloat16", "int8")  # formats of a message


@dataclasses.dataclass(frozen=True)
class Workload:
    """One replica's step, without communication.

    model_bytes: parameters (and gradients) in float32.
    forward_s, backward_s, update_s: means.
    compute: the factor on forward and backward, drawn for each replica and step.
    slowness: (n,) factors of replicas that are always slower (or faster) than 1; None: all alike.
    late_bytes: part of ``model_bytes`` whose gradient is complete only at the very end of the
        backward pass: an embedding, the more so if it is also the output layer.
    row_length: parameters per row of the last axis on average; int8 sends a float32 scale per row.
    """

    model_bytes: float
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    compute: Distribution = CONSTANT
    slowness: tuple[float, ...] | None = None
    late_bytes: float = 0.0
    row_length: float = 768.0

    def __post_init__(self) -> None:
        for name in ("model_bytes", "forward_s", "backward_s", "update_s", "late_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number that is not negative, got {value}")
        if self.compute_s <= 0 or self.model_bytes <= 0:
            raise ValueError(
                "model_bytes and forward_s + backward_s must be above 0, "
                f"got {self.model_bytes} and {self.compute_s}"
            )
        if self.late_bytes > self.model_bytes:
            raise ValueError(
                f"late_bytes {self.late_bytes:g} is a part of model_bytes {self.model_bytes:g}"
            )

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    def share(self, wire: str) -> float:
        """The bytes of a message in one of `WIRES`, as a part of those in float32."""
        return {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25 + 1 / self.row_length}[wire]

    def factors(self, n: int) -> np.ndarray:
        """(n,) ``slowness``, ones where there is none."""
        if self.slowness is None:
            return np.ones(n)
        if len(self.slowness) != n:
            raise ValueError(f"slowness has {len(self.slowness)} factors for {n} replicas")
        return np.asarray(self.slowness, float)


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Synchronous mean of gradients in buckets, each sent as soon as the backward pass has it.

    collective: see `costs.all_reduce_phases`.
    bucket_bytes: of float32 gradients (PyTorch's default 25 MB; XLA combines up to 30 MB);
        infinite: one message after the backward pass.
    """

    collective: costs.AllReduce = "auto"
    bucket_bytes: float = 25e6

    @property
    def name(self) -> str:
        return "all_reduce"


@dataclasses.dataclass(frozen=True)
class Gossip:
    """Parameters mixed by a schedule.

    mix_every: H; every H-th step has a round.
    combine: "with" hides it behind the step, "then" exposes it.
    wire: float32, bfloat16 or int8, of permuted messages; means of groups are formed in float32.
    execution: see `costs.round_phases`.
    bucket_bytes: infinite in this project, which sends the whole last update at once; finite in
        Decent-DP, which sends bucket b after its update and needs it at its own next update.
    """

    schedule: Schedule
    mix_every: int = 1
    combine: Literal["with", "then"] = "with"
    wire: str = "float32"
    execution: costs.Execution = "hierarchical"
    bucket_bytes: float = math.inf

    @property
    def name(self) -> str:
        return self.schedule.name


Algorithm = AllReduce | Gossip


MOST_BUCKETS = 2_000_000  # a step of so many takes some ten seconds to predict


class Bucket(NamedTuple):
    """A part of the model that is communicated in one go."""

    num_bytes: float  # in float32
    backward: float  # fraction of the backward pass between the bucket before and this one


def buckets(workload: Workload, algorithm: Algorithm) -> list[Bucket]:
    """Equal buckets of at most ``bucket_bytes``; then, if need be, one of ``late_bytes``.

    An infinite ``bucket_bytes`` makes a single bucket of everything.
    """
    if math.isinf(algorithm.bucket_bytes):
        return [Bucket(workload.model_bytes, 1.0)]
    early = workload.model_bytes - workload.late_bytes
    count = max(1, math.ceil(early / algorithm.bucket_bytes - 1e-9))
    if count > MOST_BUCKETS:
        raise ValueError(
            f"bucket_bytes {algorithm.bucket_bytes:g} cuts {workload.model_bytes:g} bytes of "
            f"gradients into {count} buckets; choose it so that they are at most {MOST_BUCKETS}"
        )
    late = [Bucket(workload.late_bytes, 0.0)] if workload.late_bytes else []
    return [Bucket(early / count, 1 / count)] * count + late


def phases_of(
    network: Network, workload: Workload, algorithm: Algorithm, num_bytes: float
) -> list[list[costs.Phase]]:
    """The phases for ``num_bytes`` of float32, for each round (all-reduce has one "round")."""
    if isinstance(algorithm, AllReduce):
        return [costs.all_reduce_phases(network, num_bytes, algorithm.collective)]
    wire = workload.share(algorithm.wire)
    return [
        costs.round_phases(network, rnd, num_bytes, algorithm.execution, wire=wire)
        for rnd in algorithm.schedule.rounds
    ]


def all_reduce_step_s(network: Network, workload: Workload, algorithm: AllReduce) -> float:
    """Expected seconds of a step of synchronous all-reduce.

    Exact where all replicas are done with a bucket at the same time, as with a ring or a tree.
    """
    parts = buckets(workload, algorithm)
    seconds = {
        num_bytes: costs.total_s(phases_of(network, workload, algorithm, num_bytes)[0])
        for num_bytes in {part.num_bytes for part in parts}
    }
    x, weights = max_nodes(workload.compute, network.num_devices, workload.slowness)
    end, remaining, backward = 0.0, sum(seconds[part.num_bytes] for part in parts), 0.0
    for part in parts:
        backward += part.backward
        ready = x * (workload.forward_s + workload.backward_s * backward)
        end = np.maximum(end, ready + remaining)
        remaining -= seconds[part.num_bytes]
    return float(end @ weights) + workload.update_s
