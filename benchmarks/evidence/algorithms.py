"""All methods side by side on small problems, simulated on one device.

    python benchmarks/evidence/algorithms.py quadratic|images|all

The minutes are those of one idle core:

quadratic  (1)   8 replicas with different quadratics and exact gradients: how far from the optimum
                 of the average do they end? "refused": the library refuses the pair, for the reason
                 below the table.
images     (20)  16 replicas classify ten shapes in generated pictures, dealt out by label from
                 Dirichlet's distribution with alpha 1, 0.1, 0.01 (mostly one class per replica).
                 All methods see the same pictures in the same order for the same number of steps.

Prints a table per part. Everything random is drawn from seeds 0, 1, ...; tables show means over
--seeds of them.

Learning rates. quadratic: 0.1, Adam 0.01, momentum 0.9. images: the best by accuracy at alpha 0.1
and seed 0 among factors of 3, tried outwards until both neighbours are worse, separately for each
method and schedule, and used for every alpha. The rate falls along a cosine to a tenth; --warmup
lets it rise first, so that methods which diverge at the start can use a larger one.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from benchmarks.evidence import small_problems as problems
from benchmarks.evidence.small_problems import (
    EXP,
    OPTIMUM,
    QUADRATIC_REPLICAS,
    RING,
    VARIANTS,
    ImageTask,
    Outcome,
    Pair,
    image_params,
    pair,
)

# --- quadratic ------------------------------------------------------------------------------------

STEPS, WINDOW = 4000, 400  # of the quadratic, and at the end


def quadratic_rows(_: argparse.Namespace) -> Iterator[dict]:
    """Every method on the ring and on the exponential graph, and on schedules of its own."""
    pairs = []
    for variant in VARIANTS:
        plain = [pair(variant, name, QUADRATIC_REPLICAS) for name in (RING, EXP)]
        pairs += [one for one in plain if one.schedule is None or not variant.own]
        pairs += [pair(variant, name, QUADRATIC_REPLICAS) for name in variant.own]
    for one in tqdm(pairs, file=sys.stderr):
        row = {"method": one.variant.label, "schedule": one.name}
        if one.schedule is None:
            yield row | {"refused": one.refusal}
            continue
        rate = 0.01 if one.variant.optimizer in ("adam", "accum_adam") else 0.1
        history = problems.quadratic(one, rate, STEPS)
        late = history[-(WINDOW * len(history) // STEPS) :] - OPTIMUM
        row |= {"learning_rate": rate, "largest_distance": float(np.abs(late).max())}
        yield row | {"distance_of_mean": float(np.abs(late.mean(axis=1)).max())}


def print_quadratic(rows: list[dict]) -> None:
    print(
        f"\n### quadratic: largest distance of a replica (of their mean) from the optimum at the "
        f"end, {QUADRATIC_REPLICAS} replicas\n\n| method | {RING} | {EXP} | another schedule |\n"
        "|---|---|---|---|"
    )
    reasons: dict[str, str] = {}  # the first of those that differ in the schedule's name only

    def cell(row: dict) -> str:
        if "refused" in row:
            reason = row["refused"].replace(row["schedule"], "", 1)
            reasons.setdefault(reason, row["refused"])
            return f"refused [{list(reasons).index(reason) + 1}]"
        return f"{distance(row['largest_distance'])} ({distance(row['distance_of_mean'])})"

    for (label,), own in groups(rows, "method"):
        cells = {row["schedule"]: cell(row) for row in own}
        others = [f"{name}: {text}" for name, text in cells.items() if name not in (RING, EXP)]
        print(f"| {label} | {cells.get(RING, '')} | {cells.get(EXP, '')} | {'; '.join(others)} |")
    for k, reason in enumerate(reasons.values()):
        print(f"\n[{k + 1}] {reason}")


def distance(x: float) -> str:
    if not x < 1e3:
        return "diverges"
    return "0" if x < 1e-9 else f"{x:.3g}" if x < 1e-3 else f"{x:.4f}"


# --- images ---------------------------------------------------------------------------------------

REPLICAS, ALPHAS, TUNED_AT = 16, (1.0, 0.1, 0.01), 0.1
LEFT_OUT_ON_IMAGES = ("Gossip-PGA", "local SGD", "swarm, blocking", "swarm, 8 bit")


def image_rows(options: argparse.Namespace) -> Iterator[dict]:
    pairs = [
        pair(variant, name, REPLICAS)
        for variant in VARIANTS
        if variant.label not in LEFT_OUT_ON_IMAGES
        for name in variant.own or (RING, EXP)
    ]
    for one in tqdm([one for one in pairs if one.schedule is not None], file=sys.stderr):
        best = tuned(one, task_of(options, TUNED_AT, 0))
        row = {"method": one.variant.label, "schedule": one.name}
        row |= {"models_sent": one.variant.models_sent(one.schedule, image_params())}
        for alpha, seed in itertools.product(ALPHAS, range(options.seeds)):
            known = (alpha, seed) == (TUNED_AT, 0)
            outcome = best if known else task_of(options, alpha, seed).run(one, best.rate)
            yield row | {"alpha": alpha, "seed": seed} | outcome._asdict()


def task_of(options: argparse.Namespace, alpha: float, seed: int) -> ImageTask:
    return ImageTask(REPLICAS, options.steps, alpha, seed=seed, warmup=options.warmup)


def tuned(one: Pair, task: ImageTask) -> Outcome:
    """With the best learning rate; see the module."""
    tried: dict[int, Outcome] = {}

    def at(k: int) -> float:
        if k not in tried:
            tried[k] = task.run(one, one.variant.centre * 3.0**k)
        return tried[k].accuracy

    best = 0
    while (better := max((best, best - 1, best + 1), key=at)) != best:
        best = better
    return tried[best]


def print_images(rows: list[dict]) -> None:
    names = " | ".join(f"alpha {alpha:g}" for alpha in ALPHAS)
    print(
        "\n### images: accuracy of the consensus model (mean of single replicas) in %, and the "
        "consensus distance relative to the model in %\n\n| method | schedule | models sent per "
        f"step | rate | {names} | distance: {names} |\n" + "|---" * (4 + 2 * len(ALPHAS)) + "|"
    )
    for (label, name), own in groups(rows, "method", "schedule"):
        of_alpha = [group for _, group in groups(own, "alpha")]
        right = (f"{percent(x, 'accuracy'):.1f} ({percent(x, 'alone'):.1f})" for x in of_alpha)
        apart = (percent(group, "distance") for group in of_alpha)
        cells = [label, name, f"{own[0]['models_sent']:.2g}", f"{own[0]['rate']:.2g}", *right]
        cells += ["0" if x < 1e-5 else f"{x:.2g}" for x in apart]
        print(f"| {' | '.join(cells)} |")
    print("\nMethods that average everybody every 4 or 8 steps have just done so at the end.")


def percent(rows: list[dict], name: str) -> float:
    return 100 * float(np.mean([row[name] for row in rows]))


# --- the command ----------------------------------------------------------------------------------

PARTS = {"quadratic": (quadratic_rows, print_quadratic), "images": (image_rows, print_images)}


def groups(rows: list[dict], *keys: str) -> Iterator[tuple[tuple, list[dict]]]:
    """(values, rows with them), in order of appearance."""

    def values_of(row: dict) -> tuple:
        return tuple(row[key] for key in keys)

    for values in dict.fromkeys(map(values_of, rows)):
        yield values, [row for row in rows if values_of(row) == values]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="means of so many (3)")
    parser.add_argument("--steps", type=int, default=640, help="on images (640)")
    parser.add_argument("--warmup", type=float, default=0.0, metavar="FRACTION",
                        help="of the steps on images, with a rising learning rate (0)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.seeds < 1 or not 0 <= options.warmup <= 1:
        parser.error("--seeds must be at least 1 and --warmup in [0, 1]")
    for part, (rows_of, print_table) in PARTS.items():
        if options.part in (part, "all"):
            print_table(list(rows_of(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
