"""How long a local step takes: SwarmSGD on a list of interactions, other methods by the planner.

Every replica has a clock. Its local steps take ``workload.compute_s`` (with its slowness, and a
random factor per step) and ``update_s``; a message takes latency + bytes / bandwidth of a
`Network`, both ways at the same time.

- blocking: the replica that is done first waits for the other, and both go on when the
  messages have arrived. The simulation follows the order of the list, so a replica also waits for a
  partner that has other interactions before: a list of single random edges costs more than rounds
  of matchings, where all replicas become ready together.
- non-blocking: the copy of the next partner arrives while the replica computes, which waits for it
  only where that takes longer than the local steps. The list fixes who reads from whom and how
  stale the copy is. Different clocks would give another order with the same distribution.

In each case all transfers of a machine share its network card in equal parts, as if all of its
devices sent at once.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from decent_jax.planner import simulator
from decent_jax.planner.costs import link_s
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import CONSTANT, Algorithm, Workload
from decent_jax.simulate.training import Interaction, Round, as_rounds


class Timing(NamedTuple):
    """Seconds per local step, on average over replicas and steps.

    step_s: the whole step.
    compute_s: forward, backward and update.
    transfer_s: idle while a message is under way.
    """

    step_s: float
    compute_s: float
    transfer_s: float

    @property
    def wait_s(self) -> float:
        """Idle until a partner (or, in an all-reduce, the last replica) is ready."""
        return self.step_s - self.compute_s - self.transfer_s

    @property
    def communication_share(self) -> float:
        """The part of a step that is not compute: transfers and waits."""
        return 1 - self.compute_s / self.step_s

    @property
    def overhead(self) -> float:
        """Transfers and waits, relative to the compute of a step."""
        return self.step_s / self.compute_s - 1


def swarm_timing(
    given: Iterable[Interaction | Round],
    network: Network,
    workload: Workload,
    *,
    message_bytes: float | None = None,
    blocking: bool = True,
    warm_up: int = 0,
    seed: int = 0,
) -> Timing:
    """The time of these interactions (or rounds of them), one replica on each device.

    Args:
      message_bytes: of one model as it is sent, ``quantizer.bits(d) / 8`` where it is quantized;
          left out, ``workload.model_bytes``.
      warm_up: interactions at the beginning that do not count: replicas start together and drift
          apart for a while.

    >>> from decent_jax.planner.network import Link, cluster
    >>> from decent_jax.simulate import matchings
    >>> network = cluster([1] * 8, Link(5e-6, 300e9), Link(50e-6, 3.125e9))    # 25 GbE
    >>> resnet50 = Workload(model_bytes=102.4e6, forward_s=0.033, backward_s=0.067)
    >>> rounds = matchings(8, 10, local_steps=4)
    >>> round(swarm_timing(rounds, network, resnet50).overhead, 4)
    0.082
    >>> round(swarm_timing(rounds, network, resnet50, blocking=False).overhead, 4)
    0.0
    """
    num_bytes = workload.model_bytes if message_bytes is None else message_bytes
    clocks = _Clocks(network, workload, num_bytes, blocking, seed)
    before = clocks.totals()
    count = 0
    for group in as_rounds(given):
        for interaction in group:
            clocks.interact(interaction)
        if count < warm_up <= count + len(group):
            before = clocks.totals()
        count += len(group)
    steps, *seconds = clocks.totals() - before
    if not steps:
        raise ValueError(
            f"no local steps to take the time of in {count} interactions after a warm-up of "
            f"{warm_up}"
        )
    return Timing(*(float(total / steps) for total in seconds))


class _Clocks:
    """The time at every replica, and what all of them have spent so far."""

    def __init__(
        self,
        network: Network,
        workload: Workload,
        num_bytes: float,
        blocking: bool,
        seed: int,
    ) -> None:
        n = network.num_devices
        self.workload, self.blocking = workload, blocking
        self.factors = workload.factors(n)
        self.rngs = [np.random.default_rng((seed, i)) for i in range(n)]
        seconds = link_s(network, num_bytes)
        self.message_s = np.maximum(seconds, seconds.T)  # both ways at once, as slow as the slower
        self.now = np.zeros(n)
        self.steps, self.compute_s, self.transfer_s = 0, 0.0, 0.0  # sums over all replicas

    def totals(self) -> np.ndarray:
        """Local steps, and seconds of them all, of compute and of transfers; over all replicas."""
        return np.array([self.steps, self.now.sum(), self.compute_s, self.transfer_s])

    def interact(self, interaction: Interaction) -> None:
        i, j, steps_i, steps_j, _ = interaction
        if max(i, j) >= len(self.now):
            raise ValueError(
                f"replicas {i} and {j} interact, but the network has {len(self.now)} devices"
            )
        compute_i, compute_j = self._compute(i, steps_i), self._compute(j, steps_j)
        message_s = self.message_s[j, i]
        hidden_i, hidden_j = (0.0, 0.0) if self.blocking else (compute_i, compute_j)
        self._exchange(i, compute_i, max(0.0, message_s - hidden_i))
        self._exchange(j, compute_j, max(0.0, message_s - hidden_j))
        if self.blocking:
            self.now[[i, j]] = max(self.now[i], self.now[j])

    def _exchange(self, i: int, compute_s: float, transfer_s: float) -> None:
        self.now[i] += compute_s + transfer_s
        self.compute_s += compute_s
        self.transfer_s += transfer_s

    def _compute(self, i: int, steps: int) -> float:
        self.steps += steps
        variation = self.workload.compute.sample(self.rngs[i], steps).sum()
        passes_s = self.workload.compute_s * self.factors[i] * variation
        return float(passes_s + self.workload.update_s * steps)


def planner_timing(
    network: Network, workload: Workload, algorithm: Algorithm, *, steps: int = 400
) -> Timing:
    """All-reduce or gossip in the same terms, by `decent_jax.planner.simulator`.

    All-reduce is a barrier, ``2 (n - 1) / n`` models through the slowest link and the latencies of
    a ring (or of a double tree where that is faster), behind the backward pass as far as its
    buckets go. D-PSGD (Lian et al. 2017) is ``Gossip(schedule)``, ``combine="with"``. Without any
    variation, the time of a step beyond compute counts as transfer; the rest is waiting.
    """
    even = dataclasses.replace(workload, compute=CONSTANT, slowness=1.0)
    alone_s = workload.compute_s + workload.update_s
    step_s = simulator.simulate(network, even, algorithm, steps=1).step_s
    transfer_s = max(0.0, step_s - alone_s)
    compute_s = workload.compute_s * workload.factors(network.num_devices).mean()
    if even != workload:
        step_s = simulator.simulate(network, workload, algorithm, steps=steps).step_s
    return Timing(step_s, float(compute_s) + workload.update_s, transfer_s)
