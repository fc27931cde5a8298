"""The curves of one run, of several runs, or of means over seeds.

`draw_means` is for `decent-jax plot --mean`: runs that differ only in their seed become one line,
their mean, with a band of one standard deviation, against steps, training time and bytes sent.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from decent_jax.ground.errors import RunError
from decent_jax.ground.format import format_number
from decent_jax.ground.run_folder import IGNORED, SCORES, RunFolder, label_runs, load_run, smoothed
from decent_jax.plots import style
from decent_jax.plots.style import COLOURS, GREY, GRID, INK

__all__ = ["COLOURS", "GREY", "GRID", "INK", "curves_of", "draw", "draw_means", "plot_runs"]

DOTS = {"marker": "o", "ms": 4.5, "mec": "white", "mew": 0.7, "lw": 1.8, "zorder": 4}

COMPARISON = Path("comparison.png")  # in the current folder
CONSENSUS = "train/consensus_distance_relative"
# Sections and fields in which runs of one line may differ: the seed, devices, logging.
_ELSEWHERE = {*IGNORED, "seed", "mesh", "cluster"}

Label = tuple[str, np.ndarray, str]  # a text, the values of the line it belongs to, its colour


def plot_runs(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Draw the folders ``runs`` into the file ``out`` and return its path.

    Metrics that a run did not record are left out.

    Raises:
      RunError: a run has nothing to draw.
    """
    loaded = [load_run(run) for run in runs]
    label_runs(loaded)
    figure = draw(loaded)
    default = loaded[0].path / "curves.png" if len(loaded) == 1 else COMPARISON
    return style.save(figure, out or default, dpi=150)


def draw(runs: Sequence[RunFolder]) -> Figure:
    """The figure of these loaded and labelled runs."""
    for k, run in enumerate(runs):
        run.colour, run.dashes = style.look(k).values()
    panels = _panels(runs)
    if not panels:
        raise RunError(f"{runs[0].path} has no metric that this command draws.")
    columns = 3 if len(panels) == 3 else min(2, len(panels))
    labels = [run.label for run in runs]
    figure, axes = style.grid(len(panels), columns, labels if len(runs) > 1 else ())
    for own, (painter, arguments) in zip(axes, panels, strict=True):
        painter(own, runs, *arguments)
    if len(runs) == 1:
        words = style.as_it_is(labels[0])
        figure.suptitle(words, x=0.012, ha="left", size=12, weight="bold", color=INK)
    return figure


def _panels(runs: Sequence[RunFolder]) -> list[tuple[Callable[..., None], tuple[str, ...]]]:
    """The panels for which these runs have data: (function, its extra arguments)."""

    def any_has(*names: str) -> bool:
        return any(run.has(name) for run in runs for name in names)

    panels: list[tuple[Callable[..., None], tuple[str, ...]]] = []
    if any_has("train/loss", "eval/loss"):
        panels.append((_loss, ("step",)))
        if any_has("perf/wall_time_s"):
            panels.append((_loss, ("time",)))
    panels += [(_score, (name,)) for name in SCORES if any_has(name)]
    distance, relative = "train/consensus_distance", "train/consensus_distance_relative"
    if any_has(distance, relative):
        everywhere = all(run.has(relative) for run in runs if run.has(distance))
        panels.append((_consensus, (relative if everywhere else distance,)))
    for name, title, unit in (
        ("perf/tokens_per_s", "Tokens per second", ""),
        ("perf/examples_per_s", "Examples per second", ""),
        ("perf/step_time_s", "Step time", "s"),
    ):
        # The first that every run has; otherwise the last, if some run has it.
        if all(run.has(name) for run in runs) or (name == "perf/step_time_s" and any_has(name)):
            panels.append((_speed, (name, title, unit)))
            break
    if len(runs) == 1 and _ranks(runs[0]):
        panels.append((_lanes, ()))
    return panels


def _loss(axes: Axes, runs: Sequence[RunFolder], x: str) -> None:
    """Training loss (a light raw trace, a smooth line) and validation loss (dots)."""
    alone = len(runs) == 1
    longest = max(run.series("perf/wall_time_s")[1].max(initial=0.0) for run in runs)
    unit, scale = style.time_unit(longest) if x == "time" else ("", 1)
    lines: list[Label] = []
    aside = "line: train, dots: validation"
    for run in runs:
        steps, loss = run.series("train/loss", x)
        if len(steps):
            lines.append(("train", _trace(axes, run, steps / scale, loss), run.colour))
        if alone:
            low, high = run.series("train/loss_min", x), run.series("train/loss_max", x)
            banded = 1 < len(low[0]) == len(high[0])
            if banded:
                edges = smoothed(low[1]), smoothed(high[1])
                axes.fill_between(low[0] / scale, *edges, color=run.colour, alpha=0.10, lw=0)
            aside = "band: all replicas" if banded else ""
        steps, loss = run.series("eval/loss", x)
        if len(steps):
            colour = COLOURS[1] if alone else run.colour
            axes.plot(steps / scale, loss, color=colour, ls="-" if alone else "none", **DOTS)
            lines.append(("validation", loss, colour))
    words = "step" if x == "step" else f"training time ({unit})"
    style.curve_frame(axes, f"Loss by {x}", aside, words)
    _limit(axes, [values for _, values, _ in lines])
    if alone:
        _end_labels(axes, [(f"{name} {_last(v)}", v, c) for name, v, c in lines])
    elif x == "step":
        wanted = "validation" if any(name == "validation" for name, *_ in lines) else "train"
        _end_labels(axes, [(_last(v), v, c) for name, v, c in lines if name == wanted])


def _score(axes: Axes, runs: Sequence[RunFolder], name: str) -> None:
    """A score of the consensus model at each evaluation."""
    title, scale = SCORES[name]
    labels: list[Label] = []
    for run in runs:
        steps, score = run.series(name)
        if len(steps):
            axes.plot(steps, scale * score, color=run.colour, ls=run.dashes, **DOTS)
            labels.append((f"{scale * score[-1]:.1f}", scale * score, run.colour))
    style.curve_frame(axes, title)
    _end_labels(axes, labels)


def _line(run: RunFolder, x: np.ndarray) -> dict[str, Any]:
    """The style of a run's line; a single point is a dot."""
    return {"ls": run.dashes, "lw": 1.8, "marker": "o" if len(x) == 1 else "", "ms": 4.5}


def _trace(axes: Axes, run: RunFolder, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Draw a noisy series in a light colour with its moving average; return the average."""
    smooth = smoothed(values)
    axes.plot(x, values, color=run.colour, lw=0.7, alpha=0.28)
    axes.plot(x, smooth, color=run.colour, **_line(run, x))
    return smooth


def _consensus(axes: Axes, runs: Sequence[RunFolder], name: str) -> None:
    """The consensus distance, on a logarithmic scale."""
    labels: list[Label] = []
    for run in runs:
        steps, distance = run.series(name)
        if not len(steps):
            continue
        shown = np.where(distance > 0, distance, np.nan)
        if np.isfinite(shown).any():
            axes.plot(steps, shown, color=run.colour, **_line(run, steps))
            labels.append((f"{distance[-1]:.2g}", shown, run.colour))
        else:
            labels.append(("always 0", np.array([np.nan]), run.colour))
    relative = name.endswith("_relative")
    style.curve_frame(axes, "Consensus distance", "relative to the mean's norm" if relative else "")
    style.log_axis(axes, np.concatenate([values for _, values, _ in labels]))
    _end_labels(axes, labels)


def _speed(axes: Axes, runs: Sequence[RunFolder], name: str, title: str, unit: str) -> None:
    """Throughput or step time, from zero."""
    labels: list[Label] = []
    heights = []
    for run in runs:
        if not run.has(name):
            continue
        steps, speed = run.series(name)
        smooth = _trace(axes, run, steps, speed)
        median = format_number(float(np.nanmedian(speed)))
        labels.append((f"{median} {unit}".strip(), smooth, run.colour))
        heights.append(np.nanpercentile(speed, 95))
    style.curve_frame(axes, title, "median at the right")
    axes.set_ylim(0, 1.25 * max(heights) or 1.0)
    axes.yaxis.set_major_formatter(EngFormatter(unit=unit, sep=""))
    _end_labels(axes, labels)


def _ranks(run: RunFolder) -> list[int]:
    """The ranks of a run of peers (docs/peers.md)."""
    names = {name for row in run.rows for name in row}
    return sorted(int(n.split("/")[1]) for n in names if re.fullmatch(r"peers/\d+/steps", n))


def _lanes(axes: Axes, runs: Sequence[RunFolder]) -> None:
    """A lane per peer: when it trained, its steps, and the staleness of its averages."""
    (run,) = runs
    ranks = _ranks(run)
    every = [row["step"] for row in run.rows if any(f"peers/{k}/steps" in row for k in ranks)]
    shown = Normalize(0, max(1, *(run.series(f"peers/{k}/stale")[1].max() for k in ranks)))
    for lane, rank in enumerate(ranks):
        steps, made = run.series(f"peers/{rank}/steps")
        _, generation = run.series(f"peers/{rank}/generation")
        _, stale = run.series(f"peers/{rank}/stale")
        place = np.searchsorted(every, steps)
        ends = np.flatnonzero((np.diff(place) > 1) | (np.diff(generation) != 0))
        for part in np.split(np.arange(len(steps)), ends + 1):
            x = steps[part]
            axes.plot(x, np.full(len(x), lane), color=GRID, lw=7, solid_capstyle="butt", zorder=1)
            axes.scatter(
                x, np.full(len(x), lane), c=stale[part], norm=shown, cmap="viridis_r", s=9, zorder=2
            )
            if place[part[0]] > 0:
                axes.plot(x[0], lane, ">", color=COLOURS[2], ms=7, zorder=3)
            if place[part[-1]] < len(every) - 1:
                axes.plot(x[-1], lane, "X", color=COLOURS[1], ms=8, mec="white", zorder=3)
        axes.annotate(
            f"{made[-1]:.0f} steps", (1.0, lane), xycoords=("axes fraction", "data"),
            xytext=(5, 0), textcoords="offset points", va="center", color=INK, size=9,
            annotation_clip=False,
        )  # fmt: skip
    oldest = shown.vmax or 0
    style.curve_frame(
        axes, "Peers", f"triangle: joins, cross: dies; staleness up to {oldest:.0f} steps"
    )
    axes.set_yticks(range(len(ranks)), [f"peer {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)


def _limit(axes: Axes, heights: Sequence[np.ndarray]) -> None:
    """Scale the panel to the smooth lines and the dots after the first tenth of a long run.

    The steep start would otherwise flatten everything after it; the start and spikes of the raw
    trace may leave the panel at the top.
    """
    late = [values[len(values) // 10 if len(values) >= 40 else 0 :] for values in heights]
    style.hold(axes, np.concatenate([*late, []]))


def _end_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Write each text at the end of its line, right of the panel, without overlap."""

    def height(values: np.ndarray) -> float:
        finite = values[np.isfinite(values)]
        if len(finite) == 0:
            return 0.0
        point = axes.transData.transform((axes.get_xlim()[0], finite[-1]))
        return float(np.clip(axes.transAxes.inverted().transform(point)[1], 0.03, 1))

    gap, last = 0.068, -1.0
    placed = []
    for y, text, colour in sorted((height(values), text, c) for text, values, c in labels):
        last = max(y, last + gap)
        placed.append((last, text, colour))
    overflow = max(0.0, last - 1.0)
    for y, text, colour in placed:
        axes.annotate(
            text, (1.0, y - overflow), xycoords="axes fraction",
            xytext=(5, 0), textcoords="offset points",
            va="center", color=colour, size=9, annotation_clip=False,
        )  # fmt: skip


def _last(values: np.ndarray) -> str:
    """The last value as text; the line shows where it stopped being finite."""
    if not np.isfinite(values[-1]):
        return "not finite"
    return f"{values[-1]:.3f}" if 0.1 <= abs(values[-1]) < 1000 else f"{values[-1]:.3g}"


# --- means over seeds ----------------------------------------------------------------------------


class Curve(NamedTuple):
    """A metric of one group of runs, at the steps that all of them recorded; arrays (m,)."""

    label: str
    steps: np.ndarray
    seconds: np.ndarray | None  # of training, mean over the runs; None: not recorded
    sent: np.ndarray | None  # bytes per replica, mean over the runs
    mean: np.ndarray
    deviation: np.ndarray | None  # sample standard deviation over the runs; None: a single run
    runs: int


def groups_of(runs: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Groups of runs that differ only in their seed, in the order of their first runs; labelled."""
    groups: dict[tuple, list[RunFolder]] = {}
    for run in runs:
        kept = {k: v for k, v in run.config.items() if not set(k.split(".")) & _ELSEWHERE}
        groups.setdefault(tuple(sorted((k, str(v)) for k, v in kept.items())), []).append(run)
    first = [
        RunFolder(
            group[0].path, group[0].rows, {k: v for k, v in group[0].config.items() if k != "seed"}
        )
        for group in groups.values()
    ]
    label_runs(first)
    for one, group in zip(first, groups.values(), strict=True):
        for run in group:
            run.label = one.label
    return list(groups.values())


def curve(group: Sequence[RunFolder], name: str) -> Curve | None:
    """The mean of a metric over the runs of a group; None if they have no step of it in common."""
    each = [dict(zip(*run.series(name), strict=True)) for run in group]
    steps = np.array(sorted(set.intersection(*map(set, each))), float)
    if not len(steps):
        return None
    values = np.array([[found[step] for step in steps] for found in each])  # (runs, m)
    if name == "train/loss":  # of single batches
        values = np.array([smoothed(row) for row in values])
    return Curve(
        group[0].label,
        steps,
        _mean_of([run.seconds_at(steps) for run in group]),
        _mean_of([run.bytes_at(steps) for run in group]),
        values.mean(axis=0),
        values.std(axis=0, ddof=1) if len(group) > 1 else None,
        len(group),
    )


def _mean_of(rows: Sequence[np.ndarray | None]) -> np.ndarray | None:
    known = [row for row in rows if row is not None]
    return np.mean(known, axis=0) if len(known) == len(rows) else None


def loss_name(runs: Sequence[RunFolder]) -> str:
    """The validation loss if every run has a curve of it, otherwise the training loss."""
    several = all(len(run.series("eval/loss")[0]) > 1 for run in runs)
    return "eval/loss" if several else "train/loss"


def curves_of(runs: Sequence[RunFolder]) -> dict[str, list[Curve]]:
    """By metric, a curve per group of runs.

    Raises:
      RunError: no run has a loss.
    """
    groups = groups_of(runs)
    found = {
        name: [made for group in groups if (made := curve(group, name)) is not None]
        for name in (loss_name(runs), CONSENSUS)
    }
    if not any(found.values()):
        raise RunError(f"{runs[0].path} has no metric that this command draws.")
    return {name: curves for name, curves in found.items() if curves}


def draw_means(curves: dict[str, list[Curve]]) -> Figure:
    """The figure of `curves_of`."""
    panels = []
    for name, of_metric in curves.items():
        panels.append((name, "steps"))
        if name != CONSENSUS:
            for axis in ("seconds", "sent"):
                if all(getattr(made, axis) is not None for made in of_metric):
                    panels.append((name, axis))
    seeds = {made.label: made.runs for of_metric in curves.values() for made in of_metric}
    labels = list(seeds)
    words = [label + (f" ({seeds[label]} seeds)" if seeds[label] > 1 else "") for label in labels]
    figure, every = style.grid(len(panels), min(2, len(panels)), words)
    for axes, (name, axis) in zip(every, panels, strict=True):
        _mean_panel(axes, curves[name], name, axis, labels)
    return figure


def _mean_panel(
    axes: Axes, curves: Sequence[Curve], name: str, axis: str, labels: Sequence[str]
) -> None:
    """The curves of one metric against ``steps``, ``seconds`` or bytes ``sent``."""
    unit, scale = _unit(axis, max(float(getattr(made, axis)[-1]) for made in curves))
    for made in curves:
        x = getattr(made, axis) / scale
        look = style.look(labels.index(made.label))
        axes.plot(x, made.mean, lw=1.8, marker="o" if len(x) < 30 else "", ms=3.6, **look)
        if made.deviation is not None:
            band = made.mean - made.deviation, made.mean + made.deviation
            axes.fill_between(x, *band, color=look["color"], alpha=0.18, lw=0)
    kinds = {"eval/loss": "Validation loss", "train/loss": "Training loss"}
    style.curve_frame(axes, kinds.get(name, "Consensus distance"), x=unit)
    if name == CONSENSUS:
        values = np.concatenate([made.mean for made in curves])
        style.log_axis(axes, values[values > 0])
    else:  # without the steep start, which would flatten the rest
        style.hold(axes, np.concatenate([_late(made) for made in curves]))


def _late(made: Curve) -> np.ndarray:
    """The values that a panel must show: the mean and the band, except for the start."""
    start, half = len(made.mean) // 10, len(made.mean) // 2
    deviation = np.zeros_like(made.mean) if made.deviation is None else made.deviation
    band = (made.mean - deviation)[start:], (made.mean + deviation)[half:]
    return np.concatenate([made.mean[start:], *band])


def _unit(axis: str, largest: float) -> tuple[str, float]:
    """The label of an axis, and the divisor of its numbers.

    >>> _unit("steps", 1e4), _unit("seconds", 600.0), _unit("sent", 1e9), _unit("sent", 9e5)
    (('step', 1), ('training time (min)', 60),
     ('sent per replica (GB)', 1000000000.0), ('sent per replica (kB)', 1000.0))
    """
    if axis == "steps":
        return "step", 1
    if axis == "seconds":
        unit, size = style.time_unit(largest)
        return f"training time ({unit})", size
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if largest >= size:
            return f"sent per replica ({unit})", size
    return "sent per replica (kB)", 1e3
