"""The tables of `algorithms.py`, printed as Markdown."""

from collections.abc import Iterator

import numpy as np
from small_problems import EXP, QUADRATIC_REPLICAS, RING, VARIANTS

TOPOLOGIES = (RING, "grid", "random_matching(rounds=64)", "static_exp", EXP, "complete")
LOSSES = (0.0, 0.01, 0.1)  # of messages
TUNED_AT = 0.1  # alpha at which learning rates are searched
PART_OF_BEST = 0.9


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


def _groups(rows: list[dict], *keys: str) -> Iterator[tuple]:
    """(key or keys, rows with them), in order of appearance."""

    def key(row: dict):
        return row[keys[0]] if len(keys) == 1 else tuple(row[k] for k in keys)

    for value in dict.fromkeys(map(key, rows)):
        yield value, [row for row in rows if key(row) == value]
