"""All methods side by side on small problems, simulated on one device.

    python benchmarks/algorithms.py PART [PART ...] [--quick] [--json FILE] [--out FIGURE.png]

PART is one of these, or "all"; the minutes are those of one idle core:

quadratic  (1)   8 replicas with different quadratics and exact gradients: how far from the optimum
                 of the average do they stay for ever? "refused": the library says so itself, with
                 the reason below the table.
images     (20)  16 replicas name ten shapes in generated pictures, whose labels are dealt out by
                 Dirichlet's distribution with alpha 1, 0.1, 0.01 (mostly one class a replica).
                 The same pictures in the same order, and as many steps, for all methods.
topologies (5)   the comparison of Ying et al. 2021: DmSGD (momentum 0.9, local, "then") over six
                 topologies and 4 to 32 replicas, pictures dealt out at random.
drops      (15)  0%, 1% and 10% of all messages get lost, on the quadratic and on images.

Prints a table a part; --json writes a line a number as it comes. Nothing is left to chance:
everything is drawn from seeds 0, 1, ...; tables show means over --seeds of them, and how far single
seeds scatter.

Learning rates. quadratic: 0.1, Adam 0.01, momentum 0.9. images: the best by accuracy at alpha 0.1
and seed 0 among factors of 3, tried outwards until both neighbours are worse, for each method and
schedule of its own, and used for every alpha. It falls along a cosine to a tenth; --warmup lets it
rise first, which methods that diverge at the start need for larger ones. drops: that of images at
alpha 0.1. topologies: 0.00625 times the number of replicas (the paper scales it so), with 8
pictures a replica and step, and as many pictures in all for any number of replicas.

Lost messages. A message's weight goes to the receiver's own copy, and a pair that exchanges does
not where either direction is lost, so undirected graphs keep the mean; with push-sum the sender
keeps what it could not send (`decent_jax.simulate.lose`). Averages of all replicas wait instead.
"""

import argparse
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import small_problems as problems
from small_problems import EXP, OPTIMUM, RING, VARIANTS, ImageTask, Outcome, Pair, Variant, pair

from decent_jax import topology
from decent_jax.planner import outputs
from decent_jax.progress import Progress
from decent_jax.simulate import lose

BY_LABEL = {variant.label: variant for variant in VARIANTS}
LOSSES = (0.0, 0.01, 0.1)


class Scale(NamedTuple):
    """How much is done; --quick does little of everything."""

    quadratic_steps: int = 4000
    image_steps: int = 640
    pictures: int = 20_000
    held_out: int = 4_000
    replicas: int = 16
    alphas: tuple[float, ...] = (1.0, 0.1, 0.01)
    sizes: tuple[int, ...] = (4, 8, 16, 32)
    methods: tuple[str, ...] | None = None  # None: all
    search: bool = True
    seeds: int = 3
    losses_drawn: int = 5  # on the quadratic
    warmup: float = 0.0

    def task(self, alpha: float, seed: int = 0) -> ImageTask:
        return self._task(self.replicas, self.image_steps, alpha, seed)

    def iid_task(self, n: int, seed: int) -> ImageTask:
        """As many pictures in all for any number of replicas."""
        return self._task(n, self.image_steps * self.replicas // n, math.inf, seed)

    def _task(self, n: int, steps: int, alpha: float, seed: int) -> ImageTask:
        return ImageTask(n, steps, alpha, self.pictures, self.held_out, seed, self.warmup)

    def takes(self, label: str) -> bool:
        return self.methods is None or label in self.methods


QUICK = Scale(
    quadratic_steps=1200,
    image_steps=80,
    pictures=2_000,
    held_out=500,
    replicas=8,
    alphas=(0.1,),
    sizes=(4, 8),
    methods=("all_reduce, momentum", "DmSGD, then", "gradient tracking", "push-sum"),
    search=False,
    seeds=1,
    losses_drawn=1,
)

Emit = Callable[[dict], None]


# --- quadratic ------------------------------------------------------------------------------------

N = problems.QUADRATIC_REPLICAS
WINDOW = 400  # steps at the end


def rate_on_quadratic(variant: Variant) -> float:
    adam = "adam" in variant.optimizer or variant.method == "quasi_global_adam"
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


def print_quadratic(rows: list[dict]) -> None:
    print(
        f"\n### quadratic: largest distance of a replica (of their mean) from the optimum at the "
        f"end, {N} replicas\n\n| method | {RING} | {EXP} | another schedule |\n|---|---|---|---|"
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


# --- images ---------------------------------------------------------------------------------------

LEFT_OUT_ON_IMAGES = ("Gossip-PGA", "local SGD", "swarm, blocking", "swarm, 8 bit")
TUNED_AT = 0.1


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
        sent = one.variant.models_sent(one.schedule, problems.image_params())
        for alpha, seed in itertools.product(scale.alphas, range(scale.seeds)):
            row = {"alpha": alpha, "models_sent": sent}
            emit(_named(one) | row | _numbers(on_images(one, scale, alpha, seed), seed))


def on_images(one: Pair, scale: Scale, alpha: float, seed: int, loss: float = 0.0) -> Outcome:
    """With the learning rate found before; what that took is not done again."""
    found = tuned(one.variant.label, one.name, scale)
    if (alpha, seed, loss) == (TUNED_AT, 0, 0.0):
        return found
    return scale.task(alpha, seed).run(one, found.rate, loss=loss)


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


def print_images(rows: list[dict]) -> None:
    alphas = list(dict.fromkeys(row["alpha"] for row in rows))
    names = [f"alpha {alpha:g}" for alpha in alphas]
    print(
        "\n### images: accuracy of the consensus model (mean of single replicas) in %, and the "
        "consensus distance relative to the model in %\n\n| method | schedule | models sent a step "
        f"| rate | {' | '.join(names)} | distance: {' | '.join(names)} |\n"
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


# --- topologies -----------------------------------------------------------------------------------

TOPOLOGIES = (RING, "grid", "random_matching(rounds=64)", "static_exp", EXP, "complete")
RECORDS, RATE_A_REPLICA, PART_OF_BEST = 40, 0.00625, 0.9


def run_topologies(scale: Scale, emit: Emit) -> None:
    variant = BY_LABEL["DmSGD, then"]
    for n, seed in itertools.product(scale.sizes, range(scale.seeds)):
        task = scale.iid_task(n, seed)
        steps, records = task.steps, RECORDS if task.steps % RECORDS == 0 else 1
        wanted = 0.0
        for name in reversed(TOPOLOGIES):  # complete first: it is all-reduce, and what is reached
            one = pair(variant, name, n)
            outcome = task.run(one, RATE_A_REPLICA * n, records=records)
            wanted = wanted or PART_OF_BEST * outcome.accuracy
            reached = np.flatnonzero(np.array(outcome.accuracies) >= wanted)
            row = {
                "num_replicas": n,
                "steps": steps,
                "spectral_gap": one.schedule.spectral_gap(),
                "wanted": wanted,
                "steps_to_wanted": int(reached[0] + 1) * steps // records if len(reached) else None,
            }
            emit(_named(one) | row | _numbers(outcome, seed))


def print_topologies(rows: list[dict]) -> None:
    sizes = list(dict.fromkeys(row["num_replicas"] for row in rows))
    steps = {row["num_replicas"]: row["steps"] for row in rows}
    header = " | ".join(f"n = {n}, {steps[n]} steps" for n in sizes)
    print(
        "\n### topologies: accuracy of the consensus model (mean of single replicas) in %, and "
        f"steps to {PART_OF_BEST:.0%} of what complete (all-reduce) reaches, DmSGD\n\n"
        f"| topology | {header} | {' | '.join(f'steps, n = {n}' for n in sizes)} |\n"
        + "|---" * (1 + 2 * len(sizes))
        + "|"
    )
    for name in TOPOLOGIES:
        own = [row for row in rows if row["schedule"] == name]
        groups = [group for _, group in _groups(own, "num_replicas")]
        cells = [*map(_accuracy, groups), *map(_steps, groups)]
        print(f"| {name} | {' | '.join(cells)} |")
    _print_scatter(rows, "schedule", "num_replicas")


def _steps(rows: list[dict]) -> str:
    missing = sum(row["steps_to_wanted"] is None for row in rows)
    return f"{missing} of {len(rows)} never" if missing else f"{_mean(rows, 'steps_to_wanted'):.0f}"


# --- drops ----------------------------------------------------------------------------------------

DROPPED_ON_IMAGES = (
    "D-PSGD, then", "DmSGD, then", "gossiped momentum", "quasi-global SGD", "exact diffusion",
    "gradient tracking", "push-sum", "push-sum, directed", "CHOCO, top 10%", "swarm, momentum",
    "decentralized Adam",
)  # fmt: skip


def run_drops(scale: Scale, emit: Emit) -> None:
    emit({"problem": "star", "hub": hub_of_a_star("renormalise"), "rule": "renormalise"})
    emit({"problem": "star", "hub": hub_of_a_star("receiver"), "rule": "receiver"})
    for one in quadratic_pairs(scale):
        if one.schedule is not None and not one.variant.waits:
            for loss in LOSSES:
                for seed in range(scale.losses_drawn if loss else 1):
                    emit(_drops_on_quadratic(one, loss, scale, seed))
    for one in image_pairs(scale):
        if one.variant.label in DROPPED_ON_IMAGES:
            for loss, seed in itertools.product(LOSSES, range(scale.seeds)):
                outcome = on_images(one, scale, TUNED_AT, seed, loss)
                emit({"problem": "images", "loss": loss} | _named(one) | _numbers(outcome, seed))


def _drops_on_quadratic(one: Pair, loss: float, scale: Scale, seed: int) -> dict:
    """Root mean squares over the second half of the steps."""
    rate = rate_on_quadratic(one.variant)
    history = problems.quadratic(one, rate, scale.quadratic_steps, loss, seed)
    late = history[len(history) // 2 :]
    mean = late.mean(axis=1, keepdims=True)
    return {
        "problem": "quadratic",
        "loss": loss,
        **_named(one),
        "seed": seed,
        "learning_rate": rate,
        "error_of_mean": float(np.sqrt(np.square(mean - OPTIMUM).mean())),
        "spread": float(np.sqrt(np.square(late - mean).mean())),
    }


def hub_of_a_star(rule: str, rate: float = 0.1, draws: int = 400_000) -> float:
    """What the hub of 4 counts in the mean that replicas agree on; 1/4 is right.

    The left eigenvector, of eigenvalue 1, of the expected matrix.
    """
    star = np.broadcast_to(topology.make("star", 4).matrix(0), (draws, 4, 4))
    expected = lose(star, rate, np.random.default_rng(0), rule=rule).mean(axis=0)
    values, vectors = np.linalg.eig(expected.T)
    weights = np.real(vectors[:, np.argmax(np.real(values))])
    return float(weights[0] / weights.sum())


def print_drops(rows: list[dict]) -> None:
    hub = {row["rule"]: row["hub"] for row in rows if row["problem"] == "star"}
    print(
        "\n### drops\n\nstar(4), 10% of messages lost, in the mean that replicas agree on the hub "
        f"counts {hub['renormalise']:.4f} where the rest is renormalised "
        f"({100 * (4 * hub['renormalise'] - 1):+.1f}%), {hub['receiver']:.4f} where its weight "
        f"goes to the receiver's own copy ({100 * (4 * hub['receiver'] - 1):+.1f}%)"
    )
    for problem, title, cell in (
        ("quadratic", "error of the mean of replicas / spread of replicas around it, rms", _rms),
        ("images", f"accuracy of the consensus model (single replicas) in %, alpha {TUNED_AT:g}",
         _accuracy),
    ):  # fmt: skip
        header = " | ".join(f"{loss:.0%} lost" for loss in LOSSES)
        print(f"\n{problem}: {title}\n\n| method | schedule | {header} |\n|---|---|---|---|---|")
        mine = [row for row in rows if row["problem"] == problem]
        for (label, name), own in _groups(mine, "method", "schedule"):
            print(f"| {label} | {name} | {' | '.join(cell(x) for _, x in _groups(own, 'loss'))} |")
        if problem == "images" and mine:
            _print_scatter(mine, "method", "schedule", "loss")
    waiting = ", ".join(v.label for v in VARIANTS if v.waits)
    print(f"\nnot applicable, they wait for all messages: {waiting}")


def _rms(rows: list[dict]) -> str:
    error, spread = (
        float(np.sqrt(np.mean([row[name] ** 2 for row in rows])))
        for name in ("error_of_mean", "spread")
    )
    return f"{_small(error)} / {_small(spread)}" if error + spread < 1e3 else "diverges"


# --- the command ----------------------------------------------------------------------------------


def _groups(rows: list[dict], *keys: str) -> Iterator[tuple]:
    """(key or keys, rows with them), in order of appearance."""

    def key(row: dict):
        return row[keys[0]] if len(keys) == 1 else tuple(row[k] for k in keys)

    for value in dict.fromkeys(map(key, rows)):
        yield value, [row for row in rows if key(row) == value]


PARTS = {
    "quadratic": (run_quadratic, print_quadratic),
    "images": (run_images, print_images),
    "topologies": (run_topologies, print_topologies),
    "drops": (run_drops, print_drops),
}


def count_rows(part: str, scale: Scale) -> int:
    """How many rows a part will emit, for the bar."""
    quadratic, images = list(quadratic_pairs(scale)), list(image_pairs(scale))
    if part == "quadratic":
        return len(quadratic)
    if part == "images":
        return len(images) * len(scale.alphas) * scale.seeds
    if part == "topologies":
        return len(TOPOLOGIES) * len(scale.sizes) * scale.seeds
    lossy = sum(one.schedule is not None and not one.variant.waits for one in quadratic)
    kept = sum(one.variant.label in DROPPED_ON_IMAGES for one in images)
    draws = 1 + (len(LOSSES) - 1) * scale.losses_drawn
    return 2 + lossy * draws + kept * len(LOSSES) * scale.seeds


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
            shown = row.get("accuracy", row.get("largest_distance", row.get("spread")))
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
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # the docstring has it
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*PARTS, "all")
    parser.add_argument("parts", nargs="+", metavar="PART", choices=names, help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="a little of it, in a minute")
    parser.add_argument("--seeds", type=int, metavar="N", help="means of so many (3; quick: 1)")
    parser.add_argument("--warmup", type=float, default=0.0, metavar="FRACTION",
                        help="of the steps on images, with a rising learning rate (0)")  # fmt: skip
    parser.add_argument("--json", type=outputs.file, metavar="FILE", help="also write the numbers")
    parser.add_argument("--out", type=outputs.picture, metavar="FIGURE.png", help="also draw them")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else Scale()
    if options.seeds is not None:
        if options.seeds < 1:
            parser.error(f"--seeds must be at least 1, got {options.seeds}")
        scale = scale._replace(seeds=options.seeds, losses_drawn=options.seeds + 2)
    if not 0 <= options.warmup <= 1:
        parser.error(f"--warmup must be in [0, 1], got {options.warmup:g}")
    scale = scale._replace(warmup=options.warmup)
    if options.json:
        options.json.write_text("")
    rows = []
    for part in PARTS:
        if part in options.parts or "all" in options.parts:
            found = run_part(part, scale, options.json)
            PARTS[part][1](found)
            rows += found
    if options.out:
        from algorithms_figure import draw

        draw(rows).savefig(options.out, dpi=110, facecolor="white")
        print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
