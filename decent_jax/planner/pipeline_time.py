"""How long a step of pipelines takes: compute, bubbles, links, and averaging between pipelines.

Asynchronous: a stage begins an action when its inputs have come, a message leaves as soon as it is
computed, and a link carries one message after the other in each direction.

>>> forward = [[("forward", k) for k in range(64)]] * 8
>>> link = Link(latency_s=0.005, transfer_s=0.0335544)    # 8 MiB at 2 Gbit/s
>>> round(max(finished_s(forward, [0.0124] * 8, [0.0] * 8, [link] * 7)), 2)
2.48
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from decent_jax.plan.orders import order
from decent_jax.planner import placement
from decent_jax.planner.gossip_placement import anneal, clock
from decent_jax.planner.network import Network
from decent_jax.planner.placement import Job
from decent_jax.topology import Round, Schedule

Order = Sequence[tuple[str, int]]  # ("forward" or "backward", micro-batch)


class Link(NamedTuple):
    """Between two stages, for the message of one micro-batch."""

    latency_s: float
    transfer_s: float  # that it occupies the link


def links_of(network: Network, devices: Sequence[int], message_bytes: float) -> list[Link]:
    """Of a pipeline whose stages are on these devices; the slower direction counts."""

    def link(i: int, j: int) -> Link:
        latency = max(network.latency_s[i, j], network.latency_s[j, i])
        bandwidth = min(network.bandwidth_bytes_per_s[i, j], network.bandwidth_bytes_per_s[j, i])
        return Link(float(latency), float(message_bytes / bandwidth))

    return [link(i, j) for i, j in itertools.pairwise(devices)]


def finished_s(
    orders: Sequence[Order],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    links: Sequence[Link],
) -> list[float]:
    """Seconds until each stage has done its list.

    Args:
      orders: of each stage.
      forward_s, backward_s: of a micro-batch on each stage.
      links: between stage s and s + 1.

    Raises:
      ValueError: lists that wait for each other for ever.
    """
    stages = len(orders)
    arrived: dict[tuple[str, int, int], float] = {}  # (way, stage that gets it, micro-batch)
    free = dict.fromkeys([(way, s) for way in ("forward", "backward") for s in range(stages)], 0.0)
    clocks, places = [0.0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while places[s] < len(orders[s]):
                way, k = orders[s][places[s]]
                from_outside = s > 0 if way == "forward" else s < stages - 1
                if from_outside and (way, s, k) not in arrived:
                    break
                begins = max(clocks[s], arrived.get((way, s, k), 0.0))
                clocks[s] = begins + (forward_s if way == "forward" else backward_s)[s]
                places[s] += 1
                moved = True
                target = s + 1 if way == "forward" else s - 1
                if 0 <= target < stages:
                    link = links[min(s, target)]
                    sent = max(clocks[s], free[way, s]) + link.transfer_s
                    free[way, s] = sent
                    arrived[way, target, k] = sent + link.latency_s
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise ValueError("the stages wait for each other for ever: a list lacks a micro-batch")
    return clocks


def step_s(
    finished: Sequence[Sequence[float]], averaging_s: Sequence[float], hidden: bool
) -> float:
    """A step of several pipelines, which average stage by stage.

    Args:
      finished: for each pipeline, what `finished_s` gave.
      averaging_s: of each stage.
      hidden: whether it travels during the pipelines (gossip with ``combine="with"``); otherwise a
        stage begins to average when it has done its list in all pipelines.
    """
    slowest = [max(clocks) for clocks in zip(*finished, strict=True)]  # of each stage
    if hidden:
        return max(*slowest, *averaging_s)
    return max(clock + s for clock, s in zip(slowest, averaging_s, strict=True))


def all_reduce_s(network: Network, job: Job, group: np.ndarray) -> float:
    """Of the devices of a stage, in DT-FM's cost."""
    return placement.evaluate(network, job, group[None]).data_parallel_s


def gossip_s(network: Network, job: Job, group: np.ndarray, schedule: Schedule) -> float:
    """Of the devices of a stage the slowest message of a round, averaged over the rounds."""

    def round_s(rnd: Round) -> float:
        seconds = [
            network.transfer_s(int(group[source]), int(group[i]), job.data_parallel_bytes)
            for send in rnd.sends
            for i, source in enumerate(send.sources)
            if source >= 0
        ]
        return max(seconds, default=0.0)

    return float(np.mean([round_s(rnd) for rnd in schedule.rounds]))


class Steps(NamedTuple):
    """Seconds per step, by what pipelines do to average."""

    nothing_s: float
    all_reduce_s: float
    gossip_s: float


class StepTime:
    """Predicts the step of one job on one network, for many layouts.

    Pipelines and groups that layouts have in common are calculated once.

    Args:
      schedule: of gossip between the pipelines.
      name: order of the micro-batches, of `decent_jax.plan.orders.ORDERS`.
    """

    def __init__(
        self, network: Network, job: Job, schedule: Schedule, name: str, micro_batches: int
    ) -> None:
        self._network, self._job, self._schedule = network, job, schedule
        self._lists = [order(name, job.num_stages, micro_batches, s) for s in range(job.num_stages)]
        self._message_bytes = job.pipeline_bytes / micro_batches
        self._cached_finished_s = functools.cache(self._finished_s)
        self._cached_averaging_s = functools.cache(self._averaging_s)

    def __call__(self, stages: np.ndarray, forward_s: np.ndarray) -> Steps:
        """What a step takes in which backward takes twice as long as forward.

        Args:
          stages: (S, D) devices.
          forward_s: (S, D) of a micro-batch.
        """
        columns = zip(stages.T.tolist(), forward_s.T.tolist(), strict=True)
        finished = [self._cached_finished_s(*map(tuple, column)) for column in columns]
        averaging = [self._cached_averaging_s(tuple(group)) for group in stages.tolist()]
        reduced, gossiped = zip(*averaging, strict=True)
        return Steps(
            max(map(max, finished)),
            step_s(finished, reduced, hidden=False),
            step_s(finished, gossiped, hidden=True),
        )

    def _finished_s(self, devices: tuple[int, ...], forward_s: tuple[float, ...]) -> list[float]:
        links = links_of(self._network, devices, self._message_bytes)
        return finished_s(self._lists, forward_s, [2 * s for s in forward_s], links)

    def _averaging_s(self, group: tuple[int, ...]) -> tuple[float, float]:
        network, job, row = self._network, self._job, np.array(group)
        gossiped = gossip_s(network, job, row, self._schedule)
        return all_reduce_s(network, job, row), gossiped


def exchanged(
    stages: np.ndarray,
    devices: Sequence[int],
    seconds_of: Callable[[np.ndarray], float],
    time_limit_s: float,
    steps: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """A layout at least as fast as ``stages``, by exchanges of devices.

    DT-FM's cost adds up all messages as if nothing overlapped, so the layout that it likes best is
    not always the fastest. The search begins at the fastest of this one, of pipelines along the
    list of devices, and of stages along it.

    Args:
      stages: (S, D) devices.
      devices: that may be used, at least S x D.
      seconds_of: of a layout (S, D).
      time_limit_s, steps: of the search, whichever ends first.
      progress: show a bar.
    """
    spare = [device for device in devices if device not in stages]
    listed = np.array(devices)
    pipelines = listed[: stages.size].reshape(stages.T.shape).T.ravel()
    starts = [
        np.concatenate([stages.ravel(), spare]).astype(int),
        np.concatenate([pipelines, listed[stages.size :]]),
        listed,
    ]

    def cut(slots: np.ndarray) -> np.ndarray:
        """Slots are the stages, row by row, and then the devices without one."""
        return slots[: stages.size].reshape(stages.shape)

    rng = np.random.default_rng(0)
    with clock(time_limit_s, steps, "exchanging machines", progress) as parts:
        return cut(anneal(starts, lambda slots: seconds_of(cut(slots)), rng, parts))
