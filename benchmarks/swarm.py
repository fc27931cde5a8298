"""SwarmSGD on paper and on a small problem: the cost of a step, and the accuracy over time.

    python benchmarks/swarm.py [--out swarm.png] [--json rows.jsonl] [--part time|accuracy]

Nothing here runs on devices; `decent_jax.simulate` does all of it in NumPy, in a few minutes.

Part "time": seconds per step of a ResNet-50 (25.6M parameters, 102 MB in float32; forward and
backward 100 ms per local step unless --compute-ms is given, as 32 images take at 320 images per
second) on machines of one GPU each on 25 GbE (3.125e9 bytes/s, 50 us). "overhead" is the rest of
the step, relative to compute. Each local step varies by a lognormal factor of --sigma.

  all_reduce           ring or tree, buckets of 25 MB hidden behind the backward pass
  all_reduce, after    the same in one piece after the backward pass
  D-PSGD               one neighbour per step, hidden behind the whole step (Lian et al. 2017)
  swarm pairs          rounds of random pairs that wait for each other and for both messages, after
                       H local steps; 8 bit: a byte per parameter (Davies et al. 2021)
  swarm edges, waits   the same on single random edges, one interaction after the other as drawn
  swarm edges          the same without waiting: the partner's copy arrives during the local steps

The paper (Nadiradze et al. 2021) claims an overhead below 10% of the compute of a batch, whatever
the number of replicas.

Part "accuracy": a network of two layers learns 10 classes, each a mixture of 6 Gaussians in 16
dimensions, 16,384 examples, batches of 32 per replica, momentum 0.9, cosine schedule over --epochs
passes by all replicas together. The test is of the consensus model. The learning rate is the best
of a few on other examples; 8 bit uses that of full precision. The quantizer reaches --reach times
as far as replicas were apart in full precision. With 0.3 training diverges, because a pair that
cannot decode does not average and so moves farther apart ("failed"). "s" is when the accuracy first
reaches --target, in seconds of the ResNet-50 steps of part "time", as if the model were that large.
Rates are chosen for the accuracy at the end, which a slow start can serve.
"""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import commands
import numpy as np
from matplotlib.figure import Figure
from mixture import TRAIN, Examples, accuracy, draw_examples, gradient, initial_weights
from tqdm import tqdm

from decent_jax import simulate, topology
from decent_jax.gossip.codecs import Lattice
from decent_jax.planner.network import Link, Network, cluster
from decent_jax.planner.runtime import CONSTANT, AllReduce, Gossip, LogNormal, Workload
from decent_jax.plots.style import COLOURS, GREY, frame, legend, new_figure, save

REPLICAS = (8, 16, 32, 64)
LOCAL_STEPS = (1, 2, 4, 8)
PARAMETERS = 25_600_000
INSIDE, ETHERNET = Link(5e-6, 300e9), Link(50e-6, 3.125e9)

PAIRS, IN_TURN, EDGES = "swarm pairs", "swarm edges, waits", "swarm edges"


class Case(NamedTuple):
    """A line of the tables; H is 0 for methods without local steps."""

    algorithm: str
    local_steps: int = 0
    bits: int = 32

    def __str__(self):
        extra = f", H = {self.local_steps}" if self.local_steps else ""
        return self.algorithm + extra + (", 8 bit" if self.bits == 8 else "")


def swarm_cases(*kinds: str, bits: tuple[int, ...] = (32, 8)) -> list[Case]:
    return [Case(*one) for one in itertools.product(kinds, LOCAL_STEPS, bits)]


# --- part "time" ----------------------------------------------------------------------------------

OTHERS = {
    "all_reduce": lambda n: AllReduce(),
    "all_reduce, after": lambda n: AllReduce(bucket_bytes=np.inf),
    "D-PSGD one_peer_exp": lambda n: Gossip(topology.make("one_peer_exp", n)),
    "D-PSGD ring": lambda n: Gossip(topology.make("ring", n)),
}
TIME_CASES = [
    *(Case(name) for name in OTHERS),
    *swarm_cases(PAIRS, EDGES),
    *swarm_cases(IN_TURN, bits=(32,)),
]


def ethernet(n: int) -> Network:
    return cluster([1] * n, INSIDE, ETHERNET)


def resnet50(compute_s: float, sigma: float) -> Workload:
    compute = LogNormal(sigma) if sigma else CONSTANT
    return Workload(4.0 * PARAMETERS, compute_s / 3, 2 * compute_s / 3, compute=compute)


def message_bytes(case: Case) -> float:
    return 1.0 * PARAMETERS + 8 if case.bits == 8 else 4.0 * PARAMETERS


def time_of(case: Case, n: int, work: Workload, rounds: int = 120) -> simulate.Timing:
    if case.algorithm in OTHERS:
        return simulate.planner_timing(ethernet(n), work, OTHERS[case.algorithm](n))
    if case.algorithm == PAIRS:
        drawn = simulate.matchings(n, rounds, local_steps=case.local_steps)
    else:
        drawn = simulate.interactions(n, rounds * n // 2, local_steps=case.local_steps)
    return simulate.swarm_timing(
        drawn,
        ethernet(n),
        work,
        message_bytes=message_bytes(case),
        blocking=case.algorithm != EDGES,
        warm_up=rounds * n // 8,
    )


def compare_times(compute_s: float, sigma: float) -> list[dict]:
    rows = []
    cases = list(itertools.product((0.0, sigma) if sigma else (0.0,), TIME_CASES, REPLICAS))
    for variation, case, n in tqdm(cases, desc="step times", disable=None):
        timing = time_of(case, n, resnet50(compute_s, variation))
        rows.append(
            {
                "part": "time",
                **case._asdict(),
                "num_replicas": n,
                "sigma": variation,
                "step_s": timing.step_s,
                "transfer_s": timing.transfer_s,
                "wait_s": timing.wait_s,
                "overhead": timing.overhead,
                "communication_share": timing.communication_share,
            }
        )
    return rows


def print_times(rows: list[dict], compute_s: float) -> None:
    for sigma in dict.fromkeys(row["sigma"] for row in rows):
        print(f"\nOverhead of a step of {1e3 * compute_s:g} ms, sigma {sigma:g}:\n")
        print(
            "| algorithm | " + " | ".join(f"n = {n}" for n in REPLICAS) + " | of the last waiting |"
        )
        print("|---" * (len(REPLICAS) + 2) + "|")
        for case in TIME_CASES:
            mine = [row for row in rows if _case(row) == case and row["sigma"] == sigma]
            cells = [_percent(row["overhead"]) for row in mine]
            print(f"| {case} | {' | '.join(cells)} | {_percent(mine[-1]['wait_s'] / compute_s)} |")


def _percent(part: float) -> str:
    return f"{max(0.0, 100 * part):.1f}%"  # rounding may leave -1e-14


def _case(row: dict) -> Case:
    return Case(row["algorithm"], row["local_steps"], row["bits"])


# --- part "accuracy": the algorithms --------------------------------------------------------------

RECORDS = 40  # evaluations of a run
BATCH, MOMENTUM = 32, 0.9
RATES = {"all_reduce": (0.2, 0.4, 0.8, 1.6)}
OTHER_RATES = (0.2, 0.4, 0.8)
ACCURACY_CASES = [
    Case("all_reduce"),
    Case("D-PSGD one_peer_exp"),
    Case("D-PSGD ring"),
    *swarm_cases(PAIRS, EDGES),
]


class Outcome(NamedTuple):
    models: list[np.ndarray]  # consensus models on the way
    progress: list[float]  # the part of all steps at which each was
    apart: float = 0.0  # the largest difference of two replicas in a coordinate, of those looked at
    failed: float = 0.0  # part of the interactions


class Trainer:
    """Trains every algorithm on the same examples, and on equally many."""

    def __init__(self, train: Examples, n: int, rate: float, epochs: int, seed: int):
        self.train, self.n, self.seed = train, n, seed
        self.steps = epochs * TRAIN // (BATCH * n)  # of each replica, on average
        self.shard = TRAIN // n
        self.peak = rate

    def rate(self, k: int) -> float:
        return self.peak * (1 + np.cos(np.pi * min(k / self.steps, 1))) / 2

    def gradient(self, i: int, x: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
        """Of 32 random examples of replica i's own part of the data."""
        chosen = i * self.shard + rng.integers(self.shard, size=BATCH)
        return gradient(x, Examples(self.train.inputs[chosen], self.train.labels[chosen]))

    def run(self, case: Case, reach: float | None = None) -> Outcome:
        """reach: of the quantizer; None: full precision."""
        if case.algorithm == "all_reduce":
            return self._synchronous(topology.make("complete", 1), every_gradient=True)
        if case.algorithm.startswith("D-PSGD "):
            return self._synchronous(topology.make(case.algorithm.split()[1], self.n))
        return self._swarm(case, reach)

    def _synchronous(self, schedule, every_gradient: bool = False) -> Outcome:
        """``x <- W x - rate m``; all-reduce is one model with everybody's gradients."""
        rngs = [np.random.default_rng((self.seed, i)) for i in range(self.n)]
        x = np.tile(initial_weights(), (schedule.num_replicas, 1))
        velocity = np.zeros_like(x)
        models, progress = [], []
        for k in range(self.steps):
            if every_gradient:
                gradients = [self.gradient(i, x[0], k, rng) for i, rng in enumerate(rngs)]
                gradients = np.mean(gradients, axis=0, keepdims=True)
            else:
                gradients = [self.gradient(i, x[i], k, rng) for i, rng in enumerate(rngs)]
            velocity = MOMENTUM * velocity + gradients
            mixed = _mix(schedule.rounds[k % schedule.period], x)
            x = mixed - self.rate(k) * velocity
            if (k + 1) * RECORDS // self.steps > k * RECORDS // self.steps:
                models.append(x.mean(axis=0))
                progress.append((k + 1) / self.steps)
        return Outcome(models, progress)

    def _swarm(self, case: Case, reach: float | None) -> Outcome:
        total = self.steps * self.n // (2 * case.local_steps)
        if case.algorithm == PAIRS:
            rounds = self.steps // case.local_steps
            drawn = simulate.matchings(self.n, rounds, local_steps=case.local_steps, seed=self.seed)
        else:
            drawn = simulate.interactions(
                self.n, total, local_steps=case.local_steps, seed=self.seed
            )
        quantizer = None
        if reach is not None:
            quantizer = Lattice(8, 2 * reach / 255)
        models, progress, apart = [], [], []

        def keep(count, x):
            models.append(x.mean(axis=0))
            progress.append(count / total)
            apart.append(np.ptp(x, axis=0).max())

        result = simulate.swarm(
            np.tile(initial_weights(), (self.n, 1)),
            drawn,
            self.gradient,
            self.rate,
            blocking=case.algorithm == PAIRS,
            quantizer=quantizer,
            momentum=MOMENTUM,
            seed=self.seed,
            record_every=max(1, total // RECORDS),
            observe=keep,
        )
        return Outcome(models, progress, float(max(apart)), result.failed / total)


def _mix(one: topology.Round, x: np.ndarray) -> np.ndarray:
    """``W x`` by what is sent, which is less work than the matrix."""
    mixed = one.self_weights[:, None] * x
    for send in one.sends:
        mixed += send.weights[:, None] * x[send.sources]
    return mixed


def compare_accuracies(
    epochs: int, seeds: int, target: float, reach: float, step_s: dict
) -> list[dict]:
    """step_s: seconds of a step, by case and number of replicas."""
    train, choose, test = draw_examples()
    chosen: dict[tuple, tuple[float, float]] = {}  # learning rate and reach
    rows = []
    cases = list(itertools.product(REPLICAS, ACCURACY_CASES))
    for n, case in tqdm(cases, desc="accuracies", disable=None):
        key = n, case.algorithm, case.local_steps
        runs = []
        if case.bits == 32:
            rate, run = _best_of_rates(train, choose, n, case, epochs)
            chosen[key] = rate, reach * run.apart
            runs.append(run)
        rate, wanted_reach = chosen[key]
        for seed in range(len(runs), seeds):
            trainer = Trainer(train, n, rate, epochs, seed)
            runs.append(trainer.run(case, wanted_reach if case.bits == 8 else None))
        curves = [[accuracy(model, test) for model in run.models] for run in runs]
        reached = [_first(curve, run, target) for curve, run in zip(curves, runs, strict=True)]
        total_s = Trainer(train, n, rate, epochs, 0).steps * step_s[case, n]
        rows.append(
            {
                "part": "accuracy",
                **case._asdict(),
                "num_replicas": n,
                "learning_rate": rate,
                "reach": wanted_reach if case.bits == 8 else None,
                "accuracy": float(np.mean([curve[-1] for curve in curves])),
                "accuracy_of_seeds": [curve[-1] for curve in curves],
                "time_to_target_s": None if None in reached else np.mean(reached) * total_s,
                "total_s": total_s,
                "failed": float(np.mean([run.failed for run in runs])),
            }
        )
    return rows


def _best_of_rates(train, choose, n: int, case: Case, epochs: int) -> tuple[float, Outcome]:
    outcomes = {
        rate: Trainer(train, n, rate, epochs, seed=0).run(case)
        for rate in RATES.get(case.algorithm, OTHER_RATES)
    }
    return max(outcomes.items(), key=lambda one: accuracy(one[1].models[-1], choose))


def _first(curve: list[float], run: Outcome, target: float) -> float | None:
    """The part of the training after which an evaluation first finds that accuracy."""
    for k, value in enumerate(curve):
        if value >= target:
            return run.progress[k]
    return None


def print_accuracies(rows: list[dict], target: float, alone: float) -> None:
    header = " | ".join(f"n = {n}" for n in REPLICAS)
    print(
        f"\nAccuracy after all epochs (one replica alone: {100 * alone:.1f}%); s to {target:g}:\n"
    )
    print(f"| algorithm | {header} | s: {header} | learning rates | failed |")
    print("|---" * (2 * len(REPLICAS) + 3) + "|")
    for case in ACCURACY_CASES:
        mine = [row for row in rows if _case(row) == case]
        cells = [_percent(row["accuracy"]) for row in mine]
        seconds = [row["time_to_target_s"] for row in mine]
        cells += ["never" if one is None else f"{one:.0f}" for one in seconds]
        rates = " ".join(f"{row['learning_rate']:g}" for row in mine)
        failed = _percent(max(row["failed"] for row in mine))
        print(f"| {case} | {' | '.join(cells)} | {rates} | {failed} |")


# --- the picture ----------------------------------------------------------------------------------

SHADES = dict(zip(LOCAL_STEPS, COLOURS[2:6], strict=True))


def draw(rows: list[dict], sigma: float, target: float) -> Figure:
    times = [row for row in rows if row["part"] == "time" and row["sigma"] == sigma]
    accuracies = [row for row in rows if row["part"] == "accuracy"]
    figure = new_figure(*((13, 8.6) if accuracies else (7.5, 5)))
    panels = list(figure.subplots(2, 2).ravel() if accuracies else [figure.subplots()])
    first = panels[0]
    _lines(first, times, PAIRS, lambda row: 100 * row["overhead"])
    stale = [row for row in times if _case(row) == Case(EDGES, 1)]
    first.plot(REPLICAS, [100 * row["overhead"] for row in stale], color=GREY, lw=1.5,
               label="swarm edges, H = 1")  # fmt: skip
    first.axhline(10, color=GREY, ls=":", lw=1.2)
    first.set_ylim(bottom=-2)
    _frame(first, "All that is not compute, swarm pairs", "% of compute")
    if accuracies:
        _lines(panels[1], accuracies, PAIRS, lambda row: row["time_to_target_s"] or np.nan)
        _frame(panels[1], f"Time to an accuracy of {100 * target:g}%, swarm pairs", "s")
        panels[1].set_ylim(bottom=0)
        for axes, kind in zip(panels[2:], (PAIRS, EDGES), strict=True):
            _lines(axes, accuracies, kind, lambda row: 100 * row["accuracy"])
            _frame(axes, f"Accuracy after all epochs, {kind}", "%")
        panels[3].sharey(panels[2])
        lowest = min(row["accuracy"] for row in accuracies)
        panels[3].set_ylim(bottom=100 * max(lowest - 0.01, target - 0.15))
    legend(figure, first.get_legend_handles_labels()[0], ncols=6 if accuracies else 3)
    return figure


def _lines(axes, rows, kind: str, value) -> None:
    for name, colour in (("all_reduce", COLOURS[6]), ("D-PSGD one_peer_exp", COLOURS[1])):
        mine = [row for row in rows if row["algorithm"] == name]
        axes.plot(REPLICAS, [value(row) for row in mine], "s-", color=colour, ms=4, label=name)
    for steps, bits in itertools.product(LOCAL_STEPS, (32, 8)):
        mine = [row for row in rows if _case(row) == Case(kind, steps, bits)]
        axes.plot(
            REPLICAS,
            [value(row) for row in mine],
            "o" + ("-" if bits == 32 else "--"),
            mfc=SHADES[steps] if bits == 32 else "white",
            color=SHADES[steps],
            ms=4,
            lw=1.5,
            label=f"swarm, H = {steps}" + (", 8 bit" if bits == 8 else ""),
        )


def _frame(axes, title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(REPLICAS, [str(n) for n in REPLICAS])
    axes.set_xlabel("replicas", color=GREY)
    axes.set_ylabel(unit, color=GREY)
    frame(axes, title)


def main(arguments: list[str] | None = None) -> int:
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="also draw it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers")
    parser.add_argument("--part", choices=("time", "accuracy", "both"), default="both",
                        help="accuracy alone prints no step times, but uses them")  # fmt: skip
    parser.add_argument("--compute-ms", type=float, default=100.0, help="default 100")
    parser.add_argument("--sigma", type=float, default=0.1, help="of a step's time; default 0.1")
    parser.add_argument("--epochs", type=int, default=20, help="default 20")
    parser.add_argument("--seeds", type=int, default=2, help="runs averaged; default 2")
    parser.add_argument("--reach", type=float, default=2.0, help="default 2")
    parser.add_argument("--target", type=float, default=0.8, help="accuracy; default 0.8")
    options = parser.parse_args(arguments)
    compute_s = options.compute_ms / 1e3
    rows = compare_times(compute_s, options.sigma)
    if options.part != "accuracy":
        print_times(rows, compute_s)
    if options.part != "time":
        step_s = {
            (_case(row), row["num_replicas"]): row["step_s"]
            for row in rows
            if row["sigma"] == options.sigma
        }
        found = compare_accuracies(
            options.epochs, options.seeds, options.target, options.reach, step_s
        )
        print_accuracies(found, options.target, accuracy_alone(options.epochs))
        rows += found
    if options.json:
        commands.write_rows(options.json, rows)
    if options.out:
        print(save(draw(rows, options.sigma, options.target), options.out))
    return 0


def accuracy_alone(epochs: int) -> float:
    """Of one replica that sees all examples, by the best of the learning rates."""
    train, choose, test = draw_examples()
    models = [
        Trainer(train, 1, rate, epochs, seed=0).run(Case("all_reduce")).models[-1]
        for rate in (0.05, 0.1, *OTHER_RATES)
    ]
    return accuracy(max(models, key=lambda model: accuracy(model, choose)), test)


if __name__ == "__main__":
    sys.exit(main())
