"""Which schedule, how often, in which message format: least time to the same quality.

Time to quality is the time of a step, times how many more steps than all-reduce it needs.

**The slow-down and where it comes from.** For replicas whose data have the same distribution the
theory of decentralized SGD (Koloskova et al., ICML 2020, their rate for non-convex functions) asks
for a number of steps of the order of

    s^2 / (n e^2)  +  s sqrt(m) / e^(3/2)  +  m / e

with e the target, s the noise of a replica's gradient and m the steps that bring the replicas one
averaging nearer (`steps_per_averaging`). All-reduce has the first term alone. So the loss of gossip
relative to it, for a batch that n replicas share, grows as sqrt(n m). The constants of such bounds
say nothing about a real run; this one is measured. The authors of Decent-DP published losses of a
20.4M-parameter language model (AdamW with its betas and learning rate tuned, one_peer_exp, three
seeds) after 20, 40 and 80 tokens per parameter:

    | replicas | loss | steps, relative to all-reduce |
    |---|---|---|
    | all-reduce | 3.5498, 3.4299, 3.3474 | 1 |
    | 4 | 3.5703, 3.4413, 3.3512 | 1.10, 1.08, 1.04 |
    | 8 | 3.5856, 3.4475, 3.3554 | 1.18, 1.13, 1.08 |

The last column reads all-reduce's curve, ``E + A D^-b`` through its three points, at the same
loss. Least squares of the logarithm of the excess over 1 gives

    slow-down = 1 + 0.0247 sqrt(n m) (tokens per parameter / 40)^-0.62

which is within 16% of each of the six excesses (sqrt(n m) fits better than m, sqrt(m) or n).

**What the formula does not know.** Other models, optimizers and data. More than 8 replicas,
schedules other than one_peer_exp, and runs much longer than 80 tokens per parameter are
extrapolated along sqrt(n m). Published runs of 16 and 32 replicas on translation and images, with
accumulated Adam, ended as good as all-reduce after as many steps, so the model leans towards
all-reduce. Replicas whose data differ in kind lose more than it predicts. A compressed message
is assumed to cost no steps, which needs unbiased rounding and difference coding or error feedback;
training on parameters quantised as they are would stall. Encoding takes no time here.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from decent_jax import topology
from decent_jax.ground.format import table
from decent_jax.planner import predict
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Algorithm, AllReduce, Gossip, Workload, codes
from decent_jax.topology import Schedule

TOKENS_PER_PARAMETER = 20.0  # of the run that makes the best use of its compute (Chinchilla)
_AT_40 = 0.0247
_EXPONENT = -0.62


@dataclasses.dataclass(frozen=True)
class Choice:
    """An algorithm with its predicted step and the steps it needs, relative to all-reduce."""

    algorithm: Algorithm
    prediction: predict.Prediction
    slow_down: float
    local_size: int = 1  # replicas per node

    @property
    def cost_s(self) -> float:
        """Seconds for the progress that all-reduce makes in a step."""
        return self.prediction.step_s * self.slow_down


def steps_per_averaging(schedule: Schedule) -> float:
    """Steps m after which the replicas are one averaging nearer to each other.

    The least ``w / (1 - q)`` over windows of w rounds, q the largest factor by which w consecutive
    rounds leave the squared consensus distance. 1 for complete, log2 n for one_peer_exp,
    ``1 / (1 - rho^2)`` for a static matrix.
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


def slow_down(
    num_replicas: int,
    steps_per_averaging: float,
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
) -> float:
    """Steps that gossip needs, relative to all-reduce; see the module."""
    length = (tokens_per_parameter / 40) ** _EXPONENT
    return 1 + _AT_40 * math.sqrt(num_replicas * steps_per_averaging) * length


def choices(
    network: Network,
    workload: Workload,
    *,
    schedules: Sequence[str] | None = None,
    mix_every: Iterable[int] = (1, 2, 4, 8),
    wires: Sequence[str] = ("float32",),
    combine: Literal["with", "then"] = "with",
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
    largest_slow_down: float = 1.5,
) -> list[Choice]:
    """All-reduce and every combination, least time to quality first.

    Args:
      schedules: names for `topology.make`; left out, all that exist for this network.
      mix_every, wires, combine: of `Gossip`; a wire that a schedule cannot have is left out.
      largest_slow_down: leave out combinations that need more steps than this times all-reduce's.
    """
    n = network.num_devices
    found = []
    all_reduce = predict.algorithm_of("all_reduce", network, workload)
    found.append(Choice(all_reduce, predict.predict(network, workload, all_reduce), 1.0))
    local_size = predict.local_size(network)
    for name in schedules or predict.available(network):
        if name in predict.ALL_REDUCES:
            continue
        schedule = topology.make(name, n, local_size=local_size)
        once = steps_per_averaging(schedule)
        for every in mix_every:
            slower = slow_down(n, every * once, tokens_per_parameter)
            if slower > largest_slow_down:
                continue
            for wire in (wire for wire in wires if codes(schedule, wire)):
                algorithm = Gossip(schedule, every, combine, wire)
                prediction = predict.predict(network, workload, algorithm, _label(algorithm))
                found.append(Choice(algorithm, prediction, slower, local_size))
    return sorted(found, key=_order)


def _order(choice: Choice) -> tuple[float, float, int]:
    """Equally good ones by their cliques: it is assumed, not measured, that small ones are faster.

    XLA's authors report permutes on GPUs that are 10 to 20 times as fast in a clique of few devices
    as in one of many (openxla #40505).
    """
    largest = choice.prediction.num_replicas
    if isinstance(choice.algorithm, Gossip):
        largest = max(rnd.largest_clique for rnd in choice.algorithm.schedule.rounds)
    return float(f"{choice.cost_s:.9g}"), float(f"{choice.slow_down:.9g}"), largest


def _label(algorithm: Gossip) -> str:
    parts = [algorithm.name]
    if algorithm.mix_every > 1:
        parts.append(f"every {algorithm.mix_every} steps")
    if algorithm.wire != "float32":
        parts.append(algorithm.wire)
    return ", ".join(parts)


def explain(found: Sequence[Choice]) -> str:
    """The first choice in words, with the numbers behind it and when it would be another."""
    best, reduced = found[0], next(filter(_is_all_reduce, found))
    others = [choice for choice in found[1:] if not _is_all_reduce(choice)]
    sentences = [f"Take {best.prediction.label}: {_step(best)}"]
    if best is not reduced:
        more = reduced.prediction.step_s / best.prediction.step_s
        sentences.append(
            f"all_reduce is {reduced.cost_s / best.cost_s:.2f} times as slow: {_step(reduced)} It "
            f"would win only if gossip needed more than {more:.2f} times its steps."
        )
    sentences += [
        f"The next best is {choice.prediction.label}: {_step(choice)}" for choice in others[:1]
    ]
    if best.prediction.num_replicas > 8:
        sentences.append("How many more steps gossip needs is extrapolated from 4 and 8 replicas.")
    return "\n".join(sentences)


def _step(choice: Choice) -> str:
    row = choice.prediction
    parts = [f"{_ms(row.compute_s)} compute"]
    if row.exposed_s > 0.005 * row.step_s:
        parts.append(f"{_ms(row.exposed_s)} communication that nothing hides")
    if row.waiting_s > 0.005 * row.step_s:
        parts.append(f"{_ms(row.waiting_s)} waiting for others")
    words = f"{_ms(row.step_s)} per step, of which {', '.join(parts)}."
    if choice.slow_down == 1:
        return words
    more = f"At {choice.slow_down:.2f} times the steps of all-reduce"
    return f"{words} {more} that is as good as {_ms(choice.cost_s)}."


def _is_all_reduce(choice: Choice) -> bool:
    return isinstance(choice.algorithm, AllReduce)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def format_table(found: Sequence[Choice], most: int = 12) -> str:
    """The first ``most`` choices, and all-reduce wherever it comes."""
    headings = ("", "step ms", "dominant", "steps, relative", "ms for the same progress")
    rows = [
        (
            choice.prediction.label,
            f"{1e3 * choice.prediction.step_s:.1f}",
            choice.prediction.dominant,
            f"{choice.slow_down:.2f}x",
            f"{1e3 * choice.cost_s:.1f}",
        )
        for k, choice in enumerate(found)
        if k < most or _is_all_reduce(choice)
    ]
    return table(headings, rows)


def config_fields(
    choice: Choice, algorithm: str = "accum_adam", optimizer: str = ""
) -> dict[str, Any]:
    """The fields of a config, by their dotted names, that make ``train.py`` do this.

    Args:
      algorithm: of `decent_jax.optim.METHODS`, for choices other than all_reduce.
      optimizer: the local one of that algorithm, for all_reduce; "": the config's own.
    """
    gossip = choice.algorithm
    fields: dict[str, Any] = {"num_replicas": choice.prediction.num_replicas}
    if isinstance(gossip, AllReduce):
        fields |= {"algorithm": "all_reduce", "combine": "", "mix_every": 1}
        fields |= {"comm_dtype": "float32", "gamma": 1.0, "gamma_power": 0.0}
        return fields | ({"optimizer.name": optimizer} if optimizer else {})
    return fields | {
        "algorithm": algorithm,
        "schedule": gossip.name,
        "combine": gossip.combine,
        "mix_every": gossip.mix_every,
        "local_size": choice.local_size,
        "comm_dtype": gossip.wire,
    }
