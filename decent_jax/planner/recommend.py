"""Choice of schedule, interval and codec by the predicted step time.

Choices within 1% of the fastest step count as equally fast; among these, the first is the one whose
replicas agree soonest (`steps_per_averaging`). The loss is not predicted, because it depends on
model, optimizer and data; only the requested choices are therefore compared. docs/results.md has
measured losses for schedules, formats and longer intervals, and docs/algorithms.md has them for
methods. Encoding a message is assumed to take no time.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from decent_jax import topology
from decent_jax.ground.format import format_bytes, table
from decent_jax.ground.json_files import Json
from decent_jax.planner import predict
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Algorithm, AllReduce, Gossip, Workload, codes
from decent_jax.topology import Schedule

_EQUALLY_FAST = 1.01  # times the fastest step


@dataclasses.dataclass(frozen=True)
class Choice:
    """An algorithm and its predicted step time.

    sent_bytes: bytes that the busiest replica sends per step, on average.
    averaging_steps: `steps_per_averaging` times ``mix_every``; 0 for all-reduce.
    replicas_per_node: as in `topology.make`.
    """

    algorithm: Algorithm
    prediction: predict.Prediction
    sent_bytes: float
    averaging_steps: float
    replicas_per_node: int = 1


def steps_per_averaging(schedule: Schedule) -> float:
    """The number of rounds that do as much for consensus as one exact average.

    It is the least ``w / (1 - q)`` over windows of w rounds, where w consecutive rounds leave at
    most the fraction q of the squared consensus distance: 1 for complete, log2 n for one_peer_exp,
    and ``1 / (1 - rho^2)`` for a static matrix.
    """
    if schedule.num_replicas == 1:
        return 1.0
    period = schedule.period
    best = math.inf
    for window in sorted({1, period, period + 1, 2 * period}):
        left = max(_left_after(schedule, first, window) for first in range(period))
        if left < 1 - 1e-12:
            best = min(best, window / (1 - left))
    return best


def _left_after(schedule: Schedule, first: int, window: int) -> float:
    product = np.eye(schedule.num_replicas)
    for r in range(first, first + window):
        product = schedule.matrix(r % schedule.period) @ product
    centred = product - 1 / schedule.num_replicas
    return float(np.linalg.eigvalsh(centred.T @ centred)[-1])  # the squared spectral norm


def choices(
    network: Network,
    workload: Workload,
    *,
    schedules: Sequence[str] | None = None,
    mix_every: Iterable[int] = (1,),
    codecs: Sequence[str] = ("float32",),
    combine: Literal["awc", "atc"] = "awc",
) -> list[Choice]:
    """All-reduce and every combination of the arguments, the best first.

    Args:
      schedules: names for `topology.make`; by default, all that exist for this network.
      mix_every, codecs, combine: as in `Gossip`; codecs that a schedule does not support are left
        out.
    """
    n, model_bytes = network.num_devices, workload.model_bytes
    all_reduce = predict.algorithm_of("all_reduce", network, workload)
    sent = topology.make("complete", n).bytes_sent(model_bytes)
    choices = [Choice(all_reduce, predict.predict(network, workload, all_reduce), sent, 0.0)]
    replicas_per_node = predict.replicas_per_node(network)
    for name in schedules or predict.available(network):
        if name in predict.ALL_REDUCES:
            continue
        schedule = topology.make(name, n, replicas_per_node=replicas_per_node)
        once = steps_per_averaging(schedule)
        for every, codec in itertools.product(mix_every, codecs):
            if codes(schedule, codec):
                algorithm = Gossip(schedule, every, combine, codec)
                prediction = predict.predict(network, workload, algorithm, _label(algorithm))
                sent = schedule.bytes_sent(model_bytes * workload.share(codec)) / every
                choices.append(Choice(algorithm, prediction, sent, every * once, replicas_per_node))
    least_s = _EQUALLY_FAST * min(choice.prediction.step_s for choice in choices)
    return sorted(choices, key=functools.partial(_order, least_s))


def _order(least_s: float, choice: Choice) -> tuple[float, float, int]:
    """Sort key; ties go to small cliques, which are assumed (not measured) to be faster.

    XLA's authors report that permutes on GPUs are 10 to 20 times as fast in a clique of few devices
    as in one of many (openxla #40505).
    """
    largest = choice.prediction.num_replicas
    if isinstance(choice.algorithm, Gossip):
        largest = max(rnd.largest_clique for rnd in choice.algorithm.schedule.rounds)
    step_s = max(choice.prediction.step_s, least_s)
    return float(f"{step_s:.9g}"), float(f"{choice.averaging_steps:.9g}"), largest


def _label(algorithm: Gossip) -> str:
    parts = [algorithm.name]
    if algorithm.mix_every > 1:
        parts.append(f"every {algorithm.mix_every} steps")
    if algorithm.codec != "float32":
        parts.append(algorithm.codec)
    return ", ".join(parts)


def format_table(choices: Sequence[Choice], most: int = 12) -> str:
    """A Markdown table of the first ``most`` choices, and of all-reduce in any case."""
    headings = ("", "step ms", "dominant", "sent per step", "steps per averaging")
    rows = [
        (
            choice.prediction.label,
            f"{1e3 * choice.prediction.step_s:.1f}",
            choice.prediction.dominant,
            format_bytes(choice.sent_bytes),
            f"{choice.averaging_steps:.3g}" if choice.averaging_steps else "exact",
        )
        for k, choice in enumerate(choices)
        if k < most or isinstance(choice.algorithm, AllReduce)
    ]
    return table(headings, rows)


def config_fields(choice: Choice, algorithm: str = "accum_adam", optimizer: str = "") -> Json:
    """The config fields, by dotted name, that select this choice.

    Args:
      algorithm: a name in `decent_jax.optim.METHODS`, for choices other than all_reduce.
      optimizer: the local optimizer to set if the choice is all_reduce; "": keep the config's.
    """
    gossip = choice.algorithm
    fields: Json = {"num_replicas": choice.prediction.num_replicas}
    if isinstance(gossip, AllReduce):
        fields |= {"algorithm": "all_reduce", "combine": "", "mix_every": 1}
        fields |= {"codec": "float32", "gamma": 1.0, "gamma_lr_exponent": 0.0}
        return fields | ({"optimizer.name": optimizer} if optimizer else {})
    return fields | {
        "algorithm": algorithm,
        "schedule": gossip.name,
        "combine": gossip.combine,
        "mix_every": gossip.mix_every,
        "replicas_per_node": choice.replicas_per_node,
        "codec": gossip.codec,
    }
