"""Tables and a figure of the records that trainings.py leaves.

    python benchmarks/evidence/figure.py [--records benchmarks/records] [--out FIGURE.png]

Prints, for docs/results.md, Markdown tables of every arm: mean and standard deviation over its
seeds, of the consensus model at the end. The gap of an arm is its mean difference to all-reduce
with the same optimizer, length, data and seeds, with the standard deviation over the seeds. Steps
to 80% or to 30 BLEU are on a straight line between two evaluations. The figure has a panel for
whatever there are records of: accuracy on CIFAR-10 against epochs and BLEU on Multi30k against
steps, and both against the time of these steps on slow links, which DIR/step_times.jsonl has, made
by step_time.py; the gap on CIFAR-10 against the length of the training; how far the language
model's loss is above all-reduce's.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax.plots.style import COLOURS, curve_frame, new_figure, save

RECORDS = Path(__file__).resolve().parents[1] / "records"
TASKS = {  # what the tables show, and the factor and unit of it
    "shakespeare": (("final", "eval/loss"), 1, "loss, nats per character"),
    "cifar10": (("final", "eval/top1"), 100, "top-1 %"),
    "cifar10_fast": (("final", "eval/top1"), 100, "top-1 %"),
    "cifar10_relaysgd": (("final", "eval/top1_worst"), 100, "top-1 % of the worst replica"),
    "multi30k_en_de": (("test", "bleu"), 1, "BLEU"),
    "us_gov_web_text": (("final", "eval/loss"), 1, "loss, nats per token"),
}
BEST_RATE = (("learning_rate", 4e-3),)  # on Shakespeare, of those tried with three seeds
BATCH, SEQUENCE = 16, 128  # of the language model: sequences per step, tokens of each


class Shown(NamedTuple):
    """What the figure shows of a task while it trains, and its rows of step_times.jsonl."""

    metric: str
    factor: float
    goal: float
    title: str
    algorithms: Mapping[str, str]  # {arm: whose step times are its own}
    network: str


KNOWS_HOSTS = {"alternating_exp_ring": "alternating_exp_ring"}
SHOWN = {
    "cifar10": Shown(
        "eval/top1",
        100,
        80,
        "CIFAR-10: top-1 of the consensus model, %",
        {"momentum_sgd": "one_peer_exp", "all_reduce": "all_reduce"} | KNOWS_HOSTS,
        "26mbit",
    ),
    "multi30k_en_de": Shown(
        "eval/bleu",
        1,
        30,
        "Multi30k: BLEU on the validation set",
        {"accum_adam": "one_peer_exp", "all_reduce": "all_reduce"} | KNOWS_HOSTS,
        "50mbit",
    ),
}
KNOWN = {  # a panel's title, unit and settings, and the published result with its source
    "shakespeare": ("Shakespeare: loss, nats per character", 1, ((), BEST_RATE), 1.88, "nanoGPT"),
    "cifar10_fast": ("CIFAR-10 in 8 epochs: top-1, %", 100, ((),), 94.01, "airbench94"),
}


class Record(NamedTuple):
    """A finished run; see `trainings.kept`."""

    summary: dict[str, Any]

    @property
    def task(self) -> str:
        return self.summary["config"].partition(":")[0]

    @property
    def arm(self) -> str:
        return self.summary["config"].partition(":")[2]

    @property
    def seed(self) -> int:
        return self.summary["changes"]["seed"]

    @property
    def setting(self) -> tuple[tuple[str, Any], ...]:
        """What distinguishes it from other runs of its arm, but for the seed and a slow peer."""
        return tuple(
            (k, v) for k, v in sorted(self.summary["changes"].items()) if k not in ("seed", "task")
        )

    @property
    def value(self) -> float:
        """What the table of its task shows."""
        (section, name), factor, _ = TASKS[self.task]
        return factor * self.summary[section][name]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of an evaluation's metric."""
        columns = self.summary["evaluations"]
        steps, values = np.array(columns["step"]), np.array(columns.get(name, ()), float)
        known = np.isfinite(values)
        return steps[: len(values)][known], values[known]

    def steps_to_goal(self) -> float | None:
        """The first step, between two evaluations, at which its task's goal is reached."""
        if self.task not in SHOWN:
            return None
        shown = SHOWN[self.task]
        steps, values = self.series(shown.metric)
        reached = np.flatnonzero(shown.factor * values >= shown.goal)
        if not len(reached):
            return None
        around = slice(max(0, reached[0] - 1), reached[0] + 1)
        return float(np.interp(shown.goal, shown.factor * values[around], steps[around]))


def load(folder: Path) -> list[Record]:
    """The records of a folder, in the order of their names."""
    return [Record(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def step_times(folder: Path) -> dict[tuple[str, str], float]:
    """{(network, algorithm): seconds} of a step; empty where nobody measured them."""
    rows = commands.read_rows(folder / "step_times.jsonl")
    return {(row["network"], row["algorithm"]): row["step_time_s"] for row in rows}


def arms(records: Sequence[Record], task: str) -> dict[tuple, list[Record]]:
    """``{(setting, arm): its seeds}`` of a task, all-reduce first within a setting."""
    found: dict[tuple, list[Record]] = {}
    for record in records:
        if record.task == task:
            found.setdefault((record.setting, record.arm), []).append(record)
    order = sorted(
        found, key=lambda key: (str(key[0]), not key[1].startswith("all_reduce"), key[1])
    )
    return {key: sorted(found[key], key=lambda record: record.seed) for key in order}


def baseline(task: str, arm: str) -> str:
    """The arm that all-reduces with the same optimizer."""
    return "all_reduce_adam" if task == "cifar10" and arm == "accum_adam" else "all_reduce"


def gaps(runs: dict[tuple, list[Record]], setting: tuple, arm: str) -> list[float]:
    """The differences of an arm to its all-reduce, of the seeds that both have."""
    task = runs[setting, arm][0].task
    others = {r.seed: r.value for r in runs.get((setting, baseline(task, arm)), ())}
    return [r.value - others[r.seed] for r in runs[setting, arm] if r.seed in others]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Mean and standard deviation, the latter of two values or more."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{deviation}"


def table(records: Sequence[Record], task: str) -> str:
    """Markdown; a row per arm and setting."""
    runs, unit = arms(records, task), TASKS[task][2]
    form = ".3f" if unit.startswith("loss") else ".2f"
    lines = [
        f"| arm | setting | seeds | {unit} | gap | consensus distance | steps to 80% or 30 BLEU "
        "| minutes, on |",
        "|---" * 8 + "|",
    ]
    for (setting, arm), own in runs.items():
        is_baseline = arm.startswith("all_reduce")
        cells = [
            f"`{arm}`",
            ", ".join(f"{name}={value}" for name, value in setting),
            ", ".join(str(record.seed) for record in own),
            spread([record.value for record in own], form),
            "" if is_baseline else spread(gaps(runs, setting, arm), "+" + form),
            spread([record.summary["final"]["eval/consensus_distance"] for record in own], ".2g"),
            steps_to_goal(own),
            minutes(own),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_to_goal(own: Sequence[Record]) -> str:
    """Their mean, and those of the seeds; empty if one of them did not reach it."""
    steps = [reached for record in own if (reached := record.steps_to_goal()) is not None]
    if len(steps) < len(own):
        return ""
    each = f" ({', '.join(f'{x:.0f}' for x in steps)})" if len(steps) > 1 else ""
    return f"{statistics.mean(steps):.0f}{each}"


def minutes(own: Sequence[Record]) -> str:
    """How long the seeds trained, of each device."""
    found: dict[str, list[float]] = {}
    for record in own:
        seconds = record.summary["training_seconds"]
        found.setdefault(record.summary["devices"], []).append(seconds / 60)
    return "; ".join(f"{spread(each, '.1f')}, {device}" for device, each in found.items())


# --- The figure ----------------------------------------------------------------------------------


class Curve(NamedTuple):
    """A line of a panel, or dots."""

    x: Any
    y: Any
    label: str | None
    colour: str
    look: str = "o-"


class Panel(NamedTuple):
    """One panel; without curves it is left out."""

    title: str
    x: str
    curves: list[Curve]


def draw(records: Sequence[Record], path: Path, times: Mapping[tuple[str, str], float]) -> Path:
    """Writes the figure."""
    panels = []
    for task in SHOWN:
        panels += [learning_panel(records, task), time_panel(records, task, times)]
    panels += [budget_panel(records), language_panel(records)]
    panels += [known_panel(records, task) for task in KNOWN]
    panels = [panel for panel in panels if panel.curves]
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(5.6 * columns, 3.6 * rows, w_pad=0.12, h_pad=0.12)
    for k, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, k + 1)
        for curve in panel.curves:
            axes.plot(curve.x, curve.y, curve.look, ms=4, color=curve.colour, label=curve.label)
        curve_frame(axes, panel.title, x=panel.x)
        axes.legend(frameon=False, fontsize=9)
    return save(figure, path, dpi=108)


def learning_panel(records: Sequence[Record], task: str) -> Panel:
    """Against epochs, or against steps, the mean over seeds, of the longest trainings."""
    epochs, found = longest(records, task)
    curves = list(found.values())
    if epochs:
        curves = [curve._replace(x=epochs * curve.x / curve.x[-1]) for curve in curves]
    return Panel(SHOWN[task].title, "epochs" if epochs else "steps", curves)


def time_panel(
    records: Sequence[Record], task: str, times: Mapping[tuple[str, str], float]
) -> Panel:
    """The same against minutes: steps times the seconds of one on slow links."""
    shown, curves = SHOWN[task], []
    for arm, curve in longest(records, task)[1].items():
        seconds = times.get((shown.network, shown.algorithms[arm]))
        if seconds:
            curves.append(curve._replace(x=curve.x * seconds / 60))
    network = shown.network.replace("mbit", " Mbit/s")
    return Panel(f"The same on four hosts, {network}", "minutes", curves)


def longest(records: Sequence[Record], task: str) -> tuple[float | None, dict[str, Curve]]:
    """The longest trainings of a task's arms that are shown, against steps; their epochs if set."""
    runs, shown, curves = arms(records, task), SHOWN[task], {}
    lengths = (length for arm in shown.algorithms for length in _lengths(runs, arm))
    epochs = max(lengths, default=None)
    setting = (("epochs", epochs),) if epochs else ()
    for arm, colour in zip(shown.algorithms, COLOURS, strict=False):
        series = [record.series(shown.metric) for record in runs.get((setting, arm), ())]
        if series and len(series[0][0]):
            values = [shown.factor * values for _, values in series]
            label = f"{arm}, mean of {len(series)}" if len(series) > 1 else f"{arm}, one seed"
            curves[arm] = Curve(series[0][0], np.mean(values, axis=0), label, colour)
    return epochs, curves


def budget_panel(records: Sequence[Record]) -> Panel:
    """The gap of D-SGD to all-reduce against the length of the training: seeds, and their mean."""
    runs = arms(records, "cifar10")
    arm = "momentum_sgd"
    found = {length: gaps(runs, (("epochs", length),), arm) for length in _lengths(runs, arm)}
    found = {length: values for length, values in found.items() if values}
    if not found:
        return Panel("", "", [])
    lengths = [length for length, values in found.items() for _ in values]
    seeds = [value for values in found.values() for value in values]
    means = [statistics.mean(values) for values in found.values()]
    curves = [
        Curve(lengths, seeds, "a seed", COLOURS[0], "o"),
        Curve(list(found), means, "mean", COLOURS[0], "-"),
        Curve(list(found), [0.0] * len(found), "all_reduce", COLOURS[1], "-"),
    ]
    return Panel("CIFAR-10: points above all-reduce", "epochs of the training", curves)


def language_panel(records: Sequence[Record]) -> Panel:
    """Percent of the loss above all-reduce with Adam, against tokens; a line per seed."""
    runs, curves = arms(records, "us_gov_web_text"), []
    base = {
        record.seed: dict(zip(*record.series("eval/loss"), strict=True))
        for record in runs.get(((), "all_reduce"), [])
    }
    others = [key for key in runs if key[1] != "all_reduce"]
    for (setting, arm), colour in zip(others, COLOURS, strict=False):
        name = ", ".join([arm, *(f"{field} {value}" for field, value in setting)])
        for record in (record for record in runs[setting, arm] if record.seed in base):
            steps, loss = record.series("eval/loss")
            above = [100 * (x / base[record.seed][s] - 1) for s, x in zip(steps, loss, strict=True)]
            label = name if all(curve.label != name for curve in curves) else None
            curves.append(Curve(steps * BATCH * SEQUENCE / 1e6, above, label, colour))
    return Panel("Language: % of the loss above all-reduce", "million tokens", curves)


def known_panel(records: Sequence[Record], task: str) -> Panel:
    """A task's arms against steps, means of their seeds, and the published result."""
    title, factor, settings, published, source = KNOWN[task]
    runs, metric, curves = arms(records, task), TASKS[task][0][1], []
    shown = [key for key in runs if key[0] in settings]
    for (setting, arm), colour in zip(shown, COLOURS, strict=False):
        series = [record.series(metric) for record in runs[setting, arm]]
        values = factor * np.mean([values for _, values in series], axis=0)
        label = ", ".join([arm, *(f"rate {rate:g}" for _, rate in setting)])
        curves.append(Curve(series[0][0], values, label, colour, "-"))
    if curves:
        x = curves[0].x
        curves.append(Curve(x, [published] * len(x), f"published by {source}", "0.5", "--"))
    return Panel(title, "steps", curves)


def _lengths(runs: dict[tuple, list[Record]], arm: str) -> list[float]:
    """The epochs of an arm's settings that differ in nothing else, ascending."""
    plain = (dict(setting) for setting, name in runs if name == arm)
    return sorted(setting["epochs"] for setting in plain if setting.keys() == {"epochs"})


def main(arguments: list[str] | None = None) -> int:
    """0 once the tables are printed."""
    parser = commands.parser(__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FIGURE.png")
    parsed = parser.parse_args(arguments)
    records = load(parsed.records)
    if not records:
        parser.error(f"--records {parsed.records} has no record; trainings.py makes them")
    for task in dict.fromkeys(record.task for record in records):
        print(f"{task}\n\n{table(records, task)}\n")
    if parsed.out:
        print(draw(records, parsed.out, step_times(parsed.records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
