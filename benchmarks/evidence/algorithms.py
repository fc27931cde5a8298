"""All methods side by side on small problems, simulated on one device.

    python benchmarks/evidence/algorithms.py quadratic|images|all [--quick] [--json FILE]

The minutes are those of one idle core:

quadratic  (1)   8 replicas with different quadratics and exact gradients: how far from the optimum
                 of the average do they end? "refused": the library refuses the pair, for the reason
                 below the table.
images     (20)  16 replicas classify ten shapes in generated pictures, dealt out by label from
                 Dirichlet's distribution with alpha 1, 0.1, 0.01 (mostly one class per replica).
                 All methods see the same pictures in the same order for the same number of steps.

Prints a table per part; --json writes a line per number as it comes. Everything random is drawn
from seeds 0, 1, ...; tables show means over --seeds of them, and the scatter of single seeds.

Learning rates. quadratic: 0.1, Adam 0.01, momentum 0.9. images: the best by accuracy at alpha 0.1
and seed 0 among factors of 3, tried outwards until both neighbours are worse, separately for each
method and schedule, and used for every alpha. The rate falls along a cosine to a tenth; --warmup
lets it rise first, so that methods which diverge at the start can use a larger one.
"""

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from benchmarks.evidence import small_problems as problems
from benchmarks.evidence.small_problems import (
    EXP,
    OPTIMUM,
    RING,
    VARIANTS,
    ImageTask,
    Outcome,
    Pair,
    Variant,
    image_params,
    pair,
)
from decent_jax.ground.command_line import output_file
from decent_jax.ground.progress import Progress

TUNED_AT = 0.1  # alpha at which learning rates are searched
BY_LABEL = {variant.label: variant for variant in VARIANTS}


class Scale(NamedTuple):
    """The sizes of all parts; those of --quick are small."""

    quadratic_steps: int = 4000
    image_steps: int = 640
    pictures: int = 20_000
    held_out: int = 4_000
    replicas: int = 16
    alphas: tuple[float, ...] = (1.0, 0.1, 0.01)
    methods: tuple[str, ...] | None = None  # None: all
    search: bool = True
    seeds: int = 3
    warmup: float = 0.0

    def task(self, alpha: float, seed: int = 0) -> ImageTask:
        own = self.pictures, self.held_out, seed, self.warmup
        return ImageTask(self.replicas, self.image_steps, alpha, *own)

    def takes(self, label: str) -> bool:
        return self.methods is None or label in self.methods


QUICK = Scale(
    quadratic_steps=1200,
    image_steps=80,
    pictures=2_000,
    held_out=500,
    replicas=8,
    alphas=(0.1,),
    methods=("all_reduce, momentum", "DmSGD, then", "gradient tracking", "push-sum"),
    search=False,
    seeds=1,
)

Emit = Callable[[dict], None]


# --- quadratic -----------------------------------------------------------------------------------

N = problems.QUADRATIC_REPLICAS
WINDOW = 400  # steps at the end


def rate_on_quadratic(variant: Variant) -> float:
    adam = variant.optimizer in ("adam", "accum_adam", "muon")
    return 0.01 if adam else 0.1


def quadratic_pairs(scale: Scale) -> Iterator[Pair]:
    """Every method on the ring and on the exponential graph, and on schedules of its own."""
    for variant in VARIANTS:
        if scale.takes(variant.label):
            for name in (RING, EXP):
                found = pair(variant, name, N)
                if found.schedule is None or not variant.own:
                    yield found
            yield from (pair(variant, name, N) for name in variant.own)


def run_quadratic(scale: Scale, emit: Emit) -> None:
    for one in quadratic_pairs(scale):
        row = _named(one)
        if one.schedule is None:
            emit(row | {"refused": one.refusal})
            continue
        rate = rate_on_quadratic(one.variant)
        history = problems.quadratic(one, rate, scale.quadratic_steps)
        late = history[-(WINDOW * len(history) // scale.quadratic_steps) :] - OPTIMUM
        row["learning_rate"] = rate
        row["largest_distance"] = float(np.abs(late).max())
        row["distance_of_mean"] = float(np.abs(late.mean(axis=1)).max())
        emit(row)


# --- images --------------------------------------------------------------------------------------

LEFT_OUT_ON_IMAGES = ("Gossip-PGA", "local SGD", "swarm, blocking", "swarm, 8 bit")


def image_pairs(scale: Scale) -> Iterator[Pair]:
    for variant in VARIANTS:
        if scale.takes(variant.label) and variant.label not in LEFT_OUT_ON_IMAGES:
            found = (pair(variant, name, scale.replicas) for name in variant.own or (RING, EXP))
            yield from (one for one in found if one.schedule is not None)


@functools.cache
def tuned(label: str, name: str, scale: Scale) -> Outcome:
    """With the best learning rate; see the module."""
    variant, task = BY_LABEL[label], scale.task(TUNED_AT)
    one = pair(variant, name, scale.replicas)
    if not scale.search:
        return task.run(one, variant.centre)
    tried: dict[int, Outcome] = {}

    def at(k: int) -> float:
        if k not in tried:
            tried[k] = task.run(one, variant.centre * 3.0**k)
        return tried[k].accuracy

    best = 0
    while (better := max((best, best - 1, best + 1), key=at)) != best:
        best = better
    return tried[best]


def run_images(scale: Scale, emit: Emit) -> None:
    for one in image_pairs(scale):
        sent = one.variant.models_sent(one.schedule, image_params())
        for alpha, seed in itertools.product(scale.alphas, range(scale.seeds)):
            row = {"alpha": alpha, "models_sent": sent}
            emit(_named(one) | row | _numbers(on_images(one, scale, alpha, seed), seed))


def on_images(one: Pair, scale: Scale, alpha: float, seed: int) -> Outcome:
    """The run with the learning rate found before; the search is cached."""
    found = tuned(one.variant.label, one.name, scale)
    if (alpha, seed) == (TUNED_AT, 0):
        return found
    return scale.task(alpha, seed).run(one, found.rate)


def _named(one: Pair) -> dict:
    return {"method": one.variant.label, "schedule": one.name}


def _numbers(outcome: Outcome, seed: int) -> dict:
    return {
        "seed": seed,
        "learning_rate": outcome.rate,
        "accuracy": outcome.accuracy,
        "accuracy_of_replicas": outcome.alone,
        "consensus_distance_relative": outcome.distance,
    }


# --- the tables, in Markdown --------------------------------------------------------------------


def print_quadratic(rows: list[dict]) -> None:
    print(
        f"\n### quadratic: largest distance of a replica (of their mean) from the optimum at the "
        f"end, {N} replicas\n\n| method | {RING} | {EXP} | another schedule |\n"
        "|---|---|---|---|"
    )
    reasons: dict[str, str] = {}  # the first of those that differ in the schedule's name only

    def cell(row: dict) -> str:
        if "refused" in row:
            reason = row["refused"].replace(row["schedule"], "", 1)
            reasons.setdefault(reason, row["refused"])
            return f"refused [{list(reasons).index(reason) + 1}]"
        return f"{_small(row['largest_distance'])} ({_small(row['distance_of_mean'])})"

    for label, own in _groups(rows, "method"):
        cells = {row["schedule"]: cell(row) for row in own}
        others = [f"{name}: {text}" for name, text in cells.items() if name not in (RING, EXP)]
        print(f"| {label} | {cells.get(RING, '')} | {cells.get(EXP, '')} | {'; '.join(others)} |")
    for k, reason in enumerate(reasons.values()):
        print(f"\n[{k + 1}] {reason}")


def _small(distance: float) -> str:
    if not distance < 1e3:
        return "diverges"
    return "0" if distance < 1e-9 else f"{distance:.3g}" if distance < 1e-3 else f"{distance:.4f}"


def print_images(rows: list[dict]) -> None:
    alphas = list(dict.fromkeys(row["alpha"] for row in rows))
    names = [f"alpha {alpha:g}" for alpha in alphas]
    print(
        "\n### images: accuracy of the consensus model (mean of single replicas) in %, and the "
        "consensus distance relative to the model in %\n\n| method | schedule | models sent per "
        f"step | rate | {' | '.join(names)} | distance: {' | '.join(names)} |\n"
        + "|---" * (4 + 2 * len(names))
        + "|"
    )
    for (label, name), own in _groups(rows, "method", "schedule"):
        of_alpha = [group for _, group in _groups(own, "alpha")]
        apart = [100 * _mean(group, "consensus_distance_relative") for group in of_alpha]
        print(
            f"| {label} | {name} | {own[0]['models_sent']:.2g} | {own[0]['learning_rate']:.2g} "
            f"| {' | '.join(map(_accuracy, of_alpha))} "
            f"| {' | '.join('0' if x < 1e-5 else f'{x:.2g}' for x in apart)} |"
        )
    print("\nMethods that average everybody every 4 or 8 steps have just done so at the end.")
    _print_scatter(rows, "method", "schedule", "alpha")


def _mean(rows: list[dict], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _accuracy(rows: list[dict]) -> str:
    alone = 100 * _mean(rows, "accuracy_of_replicas")
    return f"{100 * _mean(rows, 'accuracy'):.1f} ({alone:.1f})"


def _print_scatter(rows: list[dict], *keys: str) -> None:
    groups = [[100 * row["accuracy"] for row in own] for _, own in _groups(rows, *keys)]
    if len(groups[0]) > 1:
        deviations = [np.std(one, ddof=1) for one in groups]
        print(
            f"Means of {len(groups[0])} seeds; the standard deviation between seeds has the median "
            f"{np.median(deviations):.1f} points, the quartile {np.quantile(deviations, 0.75):.1f} "
            f"and the maximum {max(deviations):.1f}."
        )


def _groups(rows: list[dict], *keys: str) -> Iterator[tuple]:
    """(key or keys, rows with them), in order of appearance."""

    def key(row: dict):
        return row[keys[0]] if len(keys) == 1 else tuple(row[k] for k in keys)

    for value in dict.fromkeys(map(key, rows)):
        yield value, [row for row in rows if key(row) == value]


# --- the command ---------------------------------------------------------------------------------


PARTS = {"quadratic": (run_quadratic, print_quadratic), "images": (run_images, print_images)}


def count_rows(part: str, scale: Scale) -> int:
    """The number of rows that a part will emit, for the bar."""
    if part == "quadratic":
        return len(list(quadratic_pairs(scale)))
    return len(list(image_pairs(scale))) * len(scale.alphas) * scale.seeds


def run_part(part: str, scale: Scale, path: Path | None) -> list[dict]:
    """The rows; each is also appended to the file at once."""
    rows: list[dict] = []
    began, cpu = time.perf_counter(), time.process_time()
    with Progress(count_rows(part, scale)) as progress:

        def emit(row: dict) -> None:
            rows.append({"part": part, **row})
            if path:
                with path.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            shown = row.get("accuracy", row.get("largest_distance"))
            progress.update(len(rows), None if shown is None else {"last": shown})

        PARTS[part][0](scale, emit)
    seconds = time.perf_counter() - began
    print(
        f"{part}: {seconds:.0f} s, of which the processor {time.process_time() - cpu:.0f} s",
        file=sys.stderr,
    )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    names = (*PARTS, "all")
    parser.add_argument("parts", nargs="+", metavar="PART", choices=names, help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="a little of it, in a minute")
    parser.add_argument("--only", metavar="METHODS", help="rows of the tables, separated by ;")
    parser.add_argument("--seeds", type=int, metavar="N", help="means of so many (3; quick: 1)")
    parser.add_argument("--warmup", type=float, default=0.0, metavar="FRACTION",
                        help="of the steps on images, with a rising learning rate (0)")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the numbers")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else Scale()
    if options.seeds is not None:
        if options.seeds < 1:
            parser.error(f"--seeds must be at least 1, got {options.seeds}")
        scale = scale._replace(seeds=options.seeds)
    if options.only:
        wanted = tuple(options.only.split(";"))
        for label in wanted:
            if label not in BY_LABEL:
                parser.error(f"--only: no method {label!r}; there are {'; '.join(BY_LABEL)}")
        scale = scale._replace(methods=wanted)
    if not 0 <= options.warmup <= 1:
        parser.error(f"--warmup must be in [0, 1], got {options.warmup:g}")
    scale = scale._replace(warmup=options.warmup)
    if options.json:
        options.json.write_text("")
    for part in PARTS:
        if part in options.parts or "all" in options.parts:
            PARTS[part][1](run_part(part, scale, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
