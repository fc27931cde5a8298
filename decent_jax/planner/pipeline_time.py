"""How long a step of pipelines takes: compute, bubbles, links, and averaging between pipelines.

Asynchronous: a stage begins an action when its inputs have come, a message leaves as soon as it is
computed, and a link carries one message after the other in each direction.

>>> forward = [[("forward", k) for k in range(64)]] * 8
>>> link = Link(latency_s=0.005, transfer_s=0.0335544)    # 8 MiB at 2 Gbit/s
>>> round(pipeline_s(forward, [0.0124] * 8, [0.0] * 8, [link] * 7), 2)
2.48
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from decent_jax.planner.network import Network

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


def pipeline_s(
    orders: Sequence[Order],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    links: Sequence[Link],
) -> float:
    """Seconds until every stage has done its list.

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
    return max(clocks)


def step_s(pipelines_s: Sequence[float], averaging_s: float, hidden: bool) -> float:
    """A step of several pipelines, which average stage by stage.

    Args:
      pipelines_s: of each pipeline.
      averaging_s: of the slowest stage.
      hidden: whether it travels during the pipelines (gossip with ``combine="with"``).
    """
    slowest = max(pipelines_s)
    return max(slowest, averaging_s) if hidden else slowest + averaging_s
