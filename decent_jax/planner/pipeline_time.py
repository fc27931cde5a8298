"""The step time of pipelines: compute, bubbles, links, and averaging between pipelines.

Messages cost what `costs` says: those of all pipelines that go the same way share network cards,
and so do those of all stages while they average. Pipelines are asynchronous: a stage begins an
action when its input has come, a message leaves as soon as it is computed, and a link carries one
message after the other.

>>> from decent_jax.planner.network import preset
>>> job = Job(2, 2, data_parallel_bytes=4e8, pipeline_bytes=8 * 2**23)
>>> step = StepTime(preset("pcie_25gbe", 4, 1), job, topology.make("one_peer_exp", 2), 8)
>>> stages = np.array([[0, 1], [2, 3]])            # pipeline 0 is on machines 0 and 2
>>> forward_s = np.full((2, 2), 0.01)
>>> [round(step(stages, forward_s, "gpipe", averaging), 3) for averaging in AVERAGING]
[0.275, 0.403, 0.275]
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from decent_jax import topology
from decent_jax.plan import orders
from decent_jax.planner import costs
from decent_jax.planner.gossip_placement import anneal, clock
from decent_jax.planner.network import Network
from decent_jax.planner.placement import Job
from decent_jax.topology.rounds import Round, Send, assembled

AVERAGING = ("nothing", "all_reduce", "gossip")


# --- the clock of pipelines --------------------------------------------------------------------


class Links(NamedTuple):
    """The links of the messages that each stage of D pipelines sends in one direction.

    latency_s, busy_s: (S, D); a message arrives ``latency_s`` after it has kept its link busy. The
        row of a stage that sends nothing that way is not read.
    """

    latency_s: np.ndarray
    busy_s: np.ndarray


Action = tuple[int, str, int]  # stage, "forward" or "backward", micro-batch


def in_order(lists: Sequence[Sequence[tuple[str, int]]]) -> list[Action]:
    """The actions of all stages, in an order in which each follows the action that it depends on.

    Args:
      lists: what each stage does, one after the other; see `decent_jax.plan.orders.order`.

    Raises:
      ValueError: lists that wait for each other for ever.
    """
    actions: list[Action] = []
    sent, places, last = set(), [0] * len(lists), len(lists) - 1
    before = -1
    while len(actions) > before:
        before = len(actions)
        for s, todo in enumerate(lists):
            for way, k in todo[places[s] :]:
                source = s - 1 if way == "forward" else s + 1
                if 0 <= source <= last and (source, way, k) not in sent:
                    break
                sent.add((s, way, k))
                actions.append((s, way, k))
                places[s] += 1
    if len(actions) < sum(map(len, lists)):
        raise ValueError("the stages wait for each other for ever: a list lacks a micro-batch")
    return actions


def pipelines_s(
    actions: Sequence[Action], compute_s: Mapping[str, np.ndarray], links: Mapping[str, Links]
) -> np.ndarray:
    """Seconds until each stage of D pipelines has finished its actions, (S, D).

    Args:
      actions: of `in_order`, of every pipeline.
      compute_s: of a micro-batch, "forward" and "backward", (S, D) each.
      links: "forward" to the next stage, "backward" to the one before.
    """
    now = np.zeros_like(compute_s["forward"])
    free = {way: np.zeros_like(now) for way in links}
    arrives: dict[Action, np.ndarray] = {}
    for s, way, k in actions:
        begin = np.maximum(now[s], arrives.pop((s, way, k), 0.0))
        now[s] = begin + compute_s[way][s]
        target = s + 1 if way == "forward" else s - 1
        if 0 <= target < len(now):
            free[way][s] = np.maximum(now[s], free[way][s]) + links[way].busy_s[s]
            arrives[target, way, k] = free[way][s] + links[way].latency_s[s]
    return now


# --- a step ------------------------------------------------------------------------------------


def links_of(network: Network, stages: np.ndarray, message_bytes: float) -> dict[str, Links]:
    """The links of pipelines on these devices (S, D), "forward" and "backward"."""

    def links(sources: np.ndarray, targets: np.ndarray, rows: slice) -> Links:
        way = Links(np.zeros(stages.shape), np.zeros(stages.shape))
        rate = costs.rates(network, sources.ravel(), targets.ravel()).reshape(sources.shape)
        way.latency_s[rows] = network.latency_s[sources, targets]
        way.busy_s[rows] = message_bytes / rate
        return way

    upper, lower = stages[:-1], stages[1:]
    return {
        "forward": links(upper, lower, slice(None, -1)),
        "backward": links(lower, upper, slice(1, None)),
    }


def averaging_s(
    network: Network, stages: np.ndarray, num_bytes: float, schedule: topology.Schedule | None
) -> np.ndarray:
    """(S,) seconds of the averaging of each stage, all concurrently.

    Args:
      stages: (S, D) devices.
      num_bytes: of a stage's parameters or gradients.
      schedule: of gossip between the D pipelines, the mean of its rounds; None: an all-reduce.
    """
    taken = network.take(stages.ravel())
    if schedule is None:
        groups = list(np.arange(stages.size).reshape(stages.shape))
        rounds = [costs.all_reduce_phases(taken, num_bytes, "auto", groups)]
    else:
        side_by_side = (_side_by_side(rnd, len(stages)) for rnd in schedule.rounds)
        rounds = [costs.round_phases(taken, rnd, num_bytes) for rnd in side_by_side]
    slowest = [
        sum(phase.duration_s.reshape(stages.shape).max(axis=1) for phase in phases)
        for phases in rounds
    ]
    return np.mean(slowest, axis=0)


@functools.cache
def _side_by_side(rnd: Round, copies: int) -> Round:
    """The round in several groups of n replicas at once, one group after the other."""
    n = len(rnd.self_weights)
    first = n * np.repeat(np.arange(copies), n)
    sends = [
        Send(
            np.where((sources := np.tile(send.sources, copies)) >= 0, first + sources, -1),
            np.tile(send.weights, copies),
        )
        for send in rnd.sends
    ]
    return assembled(rnd.group_size, np.tile(rnd.self_weights, copies), sends)


class StepTime:
    """Predicts the step time of one job on one network, for many layouts.

    Args:
      schedule: of gossip between the pipelines.
      micro_batches: of each pipeline in a step.
    """

    def __init__(
        self, network: Network, job: Job, schedule: topology.Schedule, micro_batches: int
    ) -> None:
        self.network, self.job, self.schedule = network, job, schedule
        self.message_bytes = job.pipeline_bytes / micro_batches
        self.actions = {}
        for order in orders.ORDERS:
            stages = range(job.num_stages)
            lists = [orders.order(order, len(stages), micro_batches, s) for s in stages]
            self.actions[order] = in_order(lists)

    def __call__(
        self, stages: np.ndarray, forward_s: np.ndarray, order: str, averaging: str
    ) -> float:
        """Seconds of a step in which backward takes twice as long as forward.

        Gossip, ``combine="awc"``, travels during the pipelines; in an all-reduce a stage begins to
        average when it has done its list in all pipelines.

        Args:
          stages: (S, D) devices.
          forward_s: (S, D) of a micro-batch.
          order: of the micro-batches, of `decent_jax.plan.orders.ORDERS`.
          averaging: of `AVERAGING`.
        """
        links = links_of(self.network, stages, self.message_bytes)
        compute_s = {"forward": forward_s, "backward": 2 * forward_s}
        done = pipelines_s(self.actions[order], compute_s, links).max(axis=1)
        if averaging == "nothing":
            return float(done.max())
        reduces = averaging == "all_reduce"
        num_bytes = self.job.data_parallel_bytes
        seconds = averaging_s(self.network, stages, num_bytes, None if reduces else self.schedule)
        return float((done + seconds).max() if reduces else max(done.max(), seconds.max()))


def exchanged(
    stages: np.ndarray,
    devices: Sequence[int],
    seconds_of: Callable[[np.ndarray], float],
    time_limit_s: float,
    steps: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """A layout at least as fast as ``stages``, by swaps of devices.

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
