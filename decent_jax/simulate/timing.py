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
from decent_jax.planner.compute_times import CONSTANT
from decent_jax.planner.gossip_placement import link_s
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Algorithm, Workload
from decent_jax.simulate.pairs import Interaction, Round, as_rounds


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
    >>> swarm_timing(rounds, network, resnet50, blocking=False).overhead < 1e-12
    True
    """
    n = network.num_devices
    factors, rngs = workload.factors(n), [np.random.default_rng((seed, i)) for i in range(n)]
    seconds = link_s(network, workload.model_bytes if message_bytes is None else message_bytes)
    message_s = np.maximum(seconds, seconds.T)  # both ways at once, as slow as the slower
    now = np.zeros(n)
    # Over all replicas: local steps, and seconds of them all, of compute and of transfers.
    spent, before = np.zeros(4), np.zeros(4)

    def computed_s(i: int, steps: int) -> float:
        variation = workload.compute.sample(rngs[i], steps).sum()
        return workload.compute_s * factors[i] * variation + workload.update_s * steps

    count = 0
    for group in as_rounds(given):
        for i, j, steps_i, steps_j, _ in group:
            if max(i, j) >= n:
                raise ValueError(f"replicas {i} and {j} interact, but the network has {n} devices")
            compute_s = np.array([computed_s(i, steps_i), computed_s(j, steps_j)])
            hidden_s = np.zeros(2) if blocking else compute_s
            transfer_s = np.maximum(0.0, message_s[j, i] - hidden_s)
            now[[i, j]] += compute_s + transfer_s
            if blocking:
                now[[i, j]] = now[[i, j]].max()
            spent += [steps_i + steps_j, 0.0, compute_s.sum(), transfer_s.sum()]
        spent[1] = now.sum()
        if count < warm_up <= count + len(group):
            before = spent.copy()
        count += len(group)
    steps, *seconds = spent - before
    if not steps:
        raise ValueError(
            f"no local steps to take the time of in {count} interactions after a warm-up of "
            f"{warm_up}"
        )
    return Timing(*(float(total / steps) for total in seconds))


def planner_timing(
    network: Network, workload: Workload, algorithm: Algorithm, *, steps: int = 400
) -> Timing:
    """All-reduce or gossip in the same terms, by `decent_jax.planner.simulator`.

    All-reduce is a barrier, ``2 (n - 1) / n`` models through the slowest link and the latencies of
    a ring (or of a double tree where that is faster), behind the backward pass as far as its
    buckets go. D-PSGD (Lian et al. 2017) is ``Gossip(schedule)``, ``combine="with"``. Without any
    variation, the time of a step beyond compute counts as transfer; the rest is waiting.
    """
    even = dataclasses.replace(workload, compute=CONSTANT, slowness=None)
    alone_s = workload.compute_s + workload.update_s
    step_s = simulator.simulate(network, even, algorithm, steps=1).step_s
    transfer_s = max(0.0, step_s - alone_s)
    compute_s = workload.compute_s * workload.factors(network.num_devices).mean()
    if even != workload:
        step_s = simulator.simulate(network, workload, algorithm, steps=steps).step_s
    return Timing(step_s, float(compute_s) + workload.update_s, transfer_s)
