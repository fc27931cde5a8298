"""All methods side by side on small problems, simulated on one device.

    python benchmarks/algorithms.py PART [PART ...] [--quick] [--json FILE] [--out FIGURE.png]

PART is one of these, or "all"; the minutes are those of one idle core:

quadratic  (1)   8 replicas with different quadratics and exact gradients: how far from the optimum
                 of the average do they end? "refused": the library refuses the pair, for the reason
                 below the table.
images     (20)  16 replicas classify ten shapes in generated pictures, dealt out by label from
                 Dirichlet's distribution with alpha 1, 0.1, 0.01 (mostly one class per replica).
                 All methods see the same pictures in the same order for the same number of steps.
topologies (5)   the comparison of Ying et al. 2021: DmSGD (momentum 0.9, local, "then") over six
                 topologies and 4 to 32 replicas, pictures dealt out at random.
drops      (15)  0%, 1% and 10% of all messages get lost, on the quadratic and on images.

Prints a table per part; --json writes a line per number as it comes. Everything random is drawn
from seeds 0, 1, ...; tables show means over --seeds of them, and the scatter of single seeds.

Learning rates. quadratic: 0.1, Adam 0.01, momentum 0.9. images: the best by accuracy at alpha 0.1
and seed 0 among factors of 3, tried outwards until both neighbours are worse, separately for each
method and schedule, and used for every alpha. The rate falls along a cosine to a tenth; --warmup
lets it rise first, so that methods which diverge at the start can use a larger one. drops: that of
images at alpha 0.1. topologies: 0.00625 times the number of replicas (as in the paper), with 8
pictures per replica and step, and the same total number of pictures for any number of replicas.

Lost messages. The weight of a message goes to the receiver's own copy, and a pair does not exchange
where either direction is lost, so undirected graphs keep the mean; with push-sum the sender keeps
the weight that it could not send (`decent_jax.simulate.lose`). Averages of all replicas wait.
"""

import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import algorithms_tables as tables
import commands
import numpy as np
import small_problems as problems
from algorithms_tables import LOSSES, PART_OF_BEST, TOPOLOGIES, TUNED_AT
from small_images import ImageTask, Outcome, image_params
from small_problems import EXP, OPTIMUM, RING, VARIANTS, Pair, Variant, pair

from decent_jax import topology
from decent_jax.ground.command_line import output_file, picture_file
from decent_jax.ground.progress import Progress
from decent_jax.simulate import lose

BY_LABEL = {variant.label: variant for variant in VARIANTS}


class Scale(NamedTuple):
    """The sizes of all parts; those of --quick are small."""

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
        """The same total of pictures for any number of replicas."""
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


# --- images ---------------------------------------------------------------------------------------

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


def on_images(one: Pair, scale: Scale, alpha: float, seed: int, loss: float = 0.0) -> Outcome:
    """The run with the learning rate found before; the search is cached."""
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


# --- topologies -----------------------------------------------------------------------------------

RECORDS, RATE_PER_REPLICA = 40, 0.00625


def run_topologies(scale: Scale, emit: Emit) -> None:
    variant = BY_LABEL["DmSGD, then"]
    for n, seed in itertools.product(scale.sizes, range(scale.seeds)):
        task = scale.iid_task(n, seed)
        steps, records = task.steps, RECORDS if task.steps % RECORDS == 0 else 1
        wanted = 0.0
        for name in reversed(TOPOLOGIES):  # complete first: it is all-reduce, and what is reached
            one = pair(variant, name, n)
            outcome = task.run(one, RATE_PER_REPLICA * n, records=records)
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
    """The weight of the hub of 4 in the mean that replicas agree on; 1/4 is right.

    The left eigenvector, of eigenvalue 1, of the expected matrix.
    """
    star = np.broadcast_to(topology.make("star", 4).matrix(0), (draws, 4, 4))
    expected = lose(star, rate, np.random.default_rng(0), rule=rule).mean(axis=0)
    values, vectors = np.linalg.eig(expected.T)
    weights = np.real(vectors[:, np.argmax(np.real(values))])
    return float(weights[0] / weights.sum())


# --- the command ----------------------------------------------------------------------------------


PARTS = {
    "quadratic": (run_quadratic, tables.print_quadratic),
    "images": (run_images, tables.print_images),
    "topologies": (run_topologies, tables.print_topologies),
    "drops": (run_drops, tables.print_drops),
}


def count_rows(part: str, scale: Scale) -> int:
    """The number of rows that a part will emit, for the bar."""
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
    parser = commands.parser(__doc__)
    names = (*PARTS, "all")
    parser.add_argument("parts", nargs="+", metavar="PART", choices=names, help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="a little of it, in a minute")
    parser.add_argument("--only", metavar="METHODS", help="rows of the tables, separated by ;")
    parser.add_argument("--seeds", type=int, metavar="N", help="means of so many (3; quick: 1)")
    parser.add_argument("--warmup", type=float, default=0.0, metavar="FRACTION",
                        help="of the steps on images, with a rising learning rate (0)")  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the numbers")
    parser.add_argument("--out", type=picture_file, metavar="FIGURE.png", help="also draw them")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else Scale()
    if options.seeds is not None:
        if options.seeds < 1:
            parser.error(f"--seeds must be at least 1, got {options.seeds}")
        scale = scale._replace(seeds=options.seeds, losses_drawn=options.seeds + 2)
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
