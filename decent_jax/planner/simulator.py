"""Simulation of training steps: when each replica computes, communicates and waits.

All-reduce: bucket b is reduced once every replica has its gradients and the previous bucket is
done; a replica begins its next step once its last bucket is done and applied.

Gossip follows the recursion of Decent-DP's code (F, B and U are the times of forward, backward
and update; i is a replica, b a bucket, t a step, and R the replicas with which i exchanges)::

    ready[i,b,t] = max( d[i,b-1,t] + B[i,b,t],  c[i,b,t-1] )        d[i,b,t] = ready[i,b,t] + U[b]
    d[i,0,t] = d[i,last,t-1] + F[i,t]
    c[i,b,t] = C[b,R] + max over j in R and i of max( d[j,b,t], the end of j's last communication )

With one bucket, as in this project, the mix begins at the start of a step and is needed at its
update. These maxima order all events without a queue, so all replicas advance together.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from decent_jax.planner import runtime
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Algorithm, AllReduce, Gossip, Workload


class Event(NamedTuple):
    """One activity of a replica, from ``start_s`` to ``end_s``, seconds of the simulated run.

    kind: forward, backward, update, wait (for a message, in the compute stream), or communicate.
    """

    kind: str
    replica: int
    step: int
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedSteps:
    """The result of `simulate`.

    step_s: mean seconds of a step after the warm-up.
    ends_s: (warm_up + steps, n) seconds at which each replica finished each step.
    events: the activities of all steps if ``record`` is set, else empty.
    """

    step_s: float
    ends_s: np.ndarray
    events: tuple[Event, ...]


def simulate(
    network: Network,
    workload: Workload,
    algorithm: Algorithm,
    *,
    steps: int = 400,
    warm_up: int = 100,
    seed: int = 0,
    record: bool = False,
) -> SimulatedSteps:
    """Simulates ``warm_up + steps`` steps of ``workload`` under ``algorithm``.

    Gossip needs a warm-up, because replicas begin together and drift apart for a while. Both
    numbers of steps are rounded up to multiples of the schedule's period times ``mix_every``.
    """
    cycle = 1
    if isinstance(algorithm, Gossip):
        cycle = algorithm.schedule.period * algorithm.mix_every
    warm_up, steps = (-(-count // cycle) * cycle for count in (warm_up, steps))
    rng = np.random.default_rng(seed)
    n = network.num_devices
    factors = workload.factors(n) * workload.compute.sample(rng, (warm_up + steps, n))
    simulation = _Simulation(network, workload, algorithm, record)
    ends = np.stack([simulation.step(t, factor) for t, factor in enumerate(factors)])
    begin = ends[warm_up - 1].mean() if warm_up else 0.0
    return SimulatedSteps(float(ends[-1].mean() - begin) / steps, ends, tuple(simulation.events))


def settled_step_s(
    network: Network, workload: Workload, algorithm: Gossip, most_steps: int = 2000
) -> float:
    """The steady-state step time for constant compute times.

    All times are maxima of sums (a max-plus linear system; Baccelli et al. 1992). If all times of a
    state exceed those of an earlier state by the same amount, the steps in between repeat forever.
    As in Brent's cycle search, states are saved after periods 1, 2, 4, 8, ..., and each state is
    compared with the last one saved. Replicas that wait for each other settle within a few steps.
    """
    simulation = _Simulation(network, workload, algorithm, record=False)
    factor = workload.factors(network.num_devices)
    cycle = algorithm.schedule.period * algorithm.mix_every
    before, at, apart = simulation.state(), 0, np.zeros(1)
    for t in range(max(cycle, most_steps // cycle * cycle)):
        simulation.step(t, factor)
        count, rest = divmod(t + 1, cycle)
        if rest:
            continue
        apart = (simulation.state() - before) / (t + 1 - at)
        if np.ptp(apart) <= 1e-9 * apart.max():
            break
        if count & (count - 1) == 0:
            before, at = simulation.state(), t + 1
    return float(apart.mean())


class _Simulation:
    """The state of all replicas between two steps; every time is an (n,) array of seconds."""

    def __init__(
        self, network: Network, workload: Workload, algorithm: Algorithm, record: bool
    ) -> None:
        self.workload, self.algorithm, self.record = workload, algorithm, record
        self.events: list[Event] = []
        self.parts = runtime.buckets(workload, algorithm)
        phases = {
            num_bytes: runtime.phases_of(network, workload, algorithm, num_bytes)
            for num_bytes in {part.num_bytes for part in self.parts}
        }
        self.phases = [phases[part.num_bytes] for part in self.parts]  # [bucket][round]
        self.now = np.zeros(network.num_devices)  # when the compute stream is free
        self.network_free = np.zeros(network.num_devices)  # end of the last communication
        self.arrived = [self.now] * len(self.parts)  # when the mix of each bucket has arrived
        self.step_number = 0
        if isinstance(algorithm, Gossip) and algorithm.combine == "awc":
            for bucket in range(len(self.parts)):  # the initial parameters are sent at once
                self._send_parameters(0, bucket)

    def state(self) -> np.ndarray:
        """Every time on which a later step depends."""
        return np.concatenate([self.now, self.network_free, *self.arrived])

    def step(self, t: int, factor: np.ndarray) -> np.ndarray:
        """Simulates step ``t``; returns the times at which replicas finish it, (n,) seconds."""
        self.step_number = t
        self._compute("forward", factor * self.workload.forward_s)
        if isinstance(self.algorithm, AllReduce):
            self._all_reduce_step(factor)
        else:
            {"awc": self._gossip_step, "atc": self._then_step}[self.algorithm.combine](factor)
        return self.now

    def _all_reduce_step(self, factor: np.ndarray) -> None:
        reduced = self.now
        for bucket, part in enumerate(self.parts):
            self._compute("backward", factor * self.workload.backward_s * part.backward)
            reduced = self._communicate(0, bucket)
        self._wait(reduced)
        self._compute("update", self.workload.update_s)

    def _gossip_step(self, factor: np.ndarray) -> None:
        for bucket, part in enumerate(self.parts):
            self._compute("backward", factor * self.workload.backward_s * part.backward)
            self._wait(self.arrived[bucket])
            share = part.num_bytes / self.workload.model_bytes
            self._compute("update", self.workload.update_s * share)
            self._send_parameters(self.step_number + 1, bucket)

    def _then_step(self, factor: np.ndarray) -> None:
        self._compute("backward", factor * self.workload.backward_s)
        self._compute("update", self.workload.update_s)
        for bucket in range(len(self.parts)):
            self._send_parameters(self.step_number, bucket)
        self._wait(self.arrived[-1])

    def _send_parameters(self, step: int, bucket: int) -> None:
        """Starts the round of ``step``, if it has one."""
        assert isinstance(self.algorithm, Gossip)
        r = self.algorithm.schedule.round_at(step, self.algorithm.mix_every)
        if r is not None:
            self.arrived[bucket] = self._communicate(r, bucket)

    # --- the two streams of a replica -----------------------------------------------------------

    def _compute(self, kind: str, seconds: np.ndarray | float) -> None:
        begin, self.now = self.now, self.now + seconds
        self._record(kind, begin, self.now)

    def _wait(self, until: np.ndarray) -> None:
        begin, self.now = self.now, np.maximum(self.now, until)
        self._record("wait", begin, self.now)

    def _communicate(self, r: int, bucket: int) -> np.ndarray:
        """Sends a bucket once it is computed and the previous communication is over."""
        at = np.maximum(self.now, self.network_free)
        for phase in self.phases[bucket][r]:
            at = phase.end_s(at)
            self._record("communicate", at - phase.duration_s, at)
        self.network_free = at
        return at

    def _record(self, kind: str, begin: np.ndarray, end: np.ndarray) -> None:
        for i in np.flatnonzero(end > begin).tolist() if self.record else ():
            seconds = float(begin[i]), float(end[i])
            self.events.append(Event(kind, i, self.step_number, *seconds))
