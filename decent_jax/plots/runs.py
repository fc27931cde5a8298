"""Draw the curves of one run, or compare several.

    decent-jax plot RUN [RUN ...] [--out FILE.png] [--mean] [--style paper] [--csv FILE]

One run is drawn into RUN/curves.png, several into comparison.png in the current folder. With --mean
runs that differ in their seed become one line with a band, against steps, time and bytes sent;
--style paper draws the same for print, with --out FILE.pdf. --csv writes these numbers.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.ground import extras

extras.need("train", "matplotlib")

from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from decent_jax.ground.command_line import Parser
from decent_jax.ground.errors import ConfigError, RunError
from decent_jax.ground.format import format_number
from decent_jax.ground.replaceable import check_replaceable
from decent_jax.ground.run_folder import Run, label_runs, load_run, smoothed
from decent_jax.plots import means, style
from decent_jax.plots.style import COLOURS, GREY, GRID, INK

__all__ = ["COLOURS", "GREY", "GRID", "INK", "draw", "plot_runs"]

DOTS = {"marker": "o", "ms": 4.5, "mec": "white", "mew": 0.7, "lw": 1.8, "zorder": 4}

COMPARISON = Path("comparison.png")  # in the current folder
SCORES = {
    "eval/top1": "Top-1, % of the validation images",
    "eval/bleu": "BLEU of the validation sentences",
}

Label = tuple[str, np.ndarray, str]  # a text, the values of the line it belongs to, its colour


def plot_runs(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Draw the folders ``runs`` into the file ``out`` and return its path.

    Metrics that a run did not record are left out.

    Raises:
      RunError: a run has nothing to draw; the message says why.
    """
    loaded = [load_run(run) for run in runs]
    label_runs(loaded)
    figure = draw(loaded)
    default = loaded[0].path / "curves.png" if len(loaded) == 1 else COMPARISON
    return style.save(figure, out or default, dpi=150)


def draw(runs: Sequence[Run]) -> Figure:
    """The figure of these loaded and labelled runs."""
    for i, run in enumerate(runs):
        run.colour = COLOURS[i % len(COLOURS)]
        run.dashes = ("-", "--", ":", "-.")[i // len(COLOURS) % 4]
    panels = _panels(runs)
    if not panels:
        raise RunError(f"{runs[0].path} has no metric that this command draws.")
    columns = 3 if len(panels) == 3 else min(2, len(panels))
    rows = -(-len(panels) // columns)
    labels = [style.as_it_is(run.label) for run in runs]
    legend_columns = style.legend_columns(labels, 5.6 * columns, 10)
    legend_rows = -(-len(runs) // legend_columns) if len(runs) > 1 else 0
    height = 3.3 * rows + 0.5 + 0.25 * legend_rows
    spacing = {"w_pad": 0.12, "h_pad": 0.12, "wspace": 0.03, "hspace": 0.04}
    figure = style.new_figure(5.6 * columns, height, **spacing)
    for i, (painter, arguments) in enumerate(panels):
        painter(figure.add_subplot(rows, columns, i + 1), runs, *arguments)
    if len(runs) == 1:
        figure.suptitle(labels[0], x=0.012, ha="left", size=12, weight="bold", color=INK)
        return figure
    figure.legend(
        [Line2D([], [], color=run.colour, ls=run.dashes, lw=2.5) for run in runs],
        labels,
        loc="outside upper left", ncols=legend_columns, frameon=False, fontsize=10, labelcolor=INK,
    )  # fmt: skip
    return figure


def _panels(runs: Sequence[Run]) -> list[tuple[Callable[..., None], tuple[str, ...]]]:
    """The panels for which these runs have data: (function, its further arguments)."""

    def any_has(*names: str) -> bool:
        return any(run.has(name) for run in runs for name in names)

    panels: list[tuple[Callable[..., None], tuple[str, ...]]] = []
    if any_has("train/loss", "eval/loss"):
        panels.append((_loss, ("step",)))
        if any_has("perf/wall_time_s"):
            panels.append((_loss, ("time",)))
    for name, title in SCORES.items():
        if any_has(name):
            panels.append((_score, (name, title)))
    distance, relative = "train/consensus_distance", "train/consensus_distance_relative"
    if any_has(distance, relative):
        everywhere = all(run.has(relative) for run in runs if run.has(distance))
        panels.append((_consensus, (relative if everywhere else distance,)))
    for name, title, unit in (
        ("perf/tokens_per_s", "Tokens per second", ""),
        ("perf/examples_per_s", "Examples per second", ""),
        ("perf/step_time_s", "Step time", "s"),
    ):
        # The first that every run has; else the last, if some run has it.
        if all(run.has(name) for run in runs) or (name == "perf/step_time_s" and any_has(name)):
            panels.append((_speed, (name, title, unit)))
            break
    if len(runs) == 1 and _slots(runs[0]):
        panels.append((_lanes, ()))
    return panels


def _loss(axes: Axes, runs: Sequence[Run], x: str) -> None:
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
    _frame(axes, "Loss by step" if x == "step" else "Loss by time", aside)
    axes.set_xlabel("step" if x == "step" else f"training time ({unit})", color=GREY, size=9)
    _limit(axes, [values for _, values, _ in lines])
    if alone:
        _end_labels(axes, [(f"{name} {_last(v)}", v, c) for name, v, c in lines])
    elif x == "step":
        wanted = "validation" if any(name == "validation" for name, *_ in lines) else "train"
        _end_labels(axes, [(_last(v), v, c) for name, v, c in lines if name == wanted])


def _score(axes: Axes, runs: Sequence[Run], name: str, title: str) -> None:
    """A score of the consensus model at each evaluation."""
    scale = 100 if name == "eval/top1" else 1  # a fraction
    labels: list[Label] = []
    for run in runs:
        steps, score = run.series(name)
        if len(steps):
            axes.plot(steps, scale * score, color=run.colour, ls=run.dashes, **DOTS)
            labels.append((f"{scale * score[-1]:.1f}", scale * score, run.colour))
    _frame(axes, title, "")
    _end_labels(axes, labels)


def _line(run: Run, x: np.ndarray) -> dict[str, Any]:
    """How the line of a run looks; a single point is a dot."""
    return {"ls": run.dashes, "lw": 1.8, "marker": "o" if len(x) == 1 else "", "ms": 4.5}


def _trace(axes: Axes, run: Run, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Draw a noisy series lightly and its moving average over it; return the average."""
    smooth = smoothed(values)
    axes.plot(x, values, color=run.colour, lw=0.7, alpha=0.28)
    axes.plot(x, smooth, color=run.colour, **_line(run, x))
    return smooth


def _consensus(axes: Axes, runs: Sequence[Run], name: str) -> None:
    """How far the replicas are from their mean, on a logarithmic scale."""
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
    _frame(axes, "Consensus distance", "relative to the mean's norm" if relative else "")
    _log_axis(axes, np.concatenate([values for _, values, _ in labels]))
    _end_labels(axes, labels)


def _speed(axes: Axes, runs: Sequence[Run], name: str, title: str, unit: str) -> None:
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
    _frame(axes, title, "median at the right")
    axes.set_ylim(0, 1.25 * max(heights) or 1.0)
    axes.yaxis.set_major_formatter(EngFormatter(unit=unit, sep=""))
    _end_labels(axes, labels)


def _slots(run: Run) -> list[int]:
    """The slots of a run of peers (docs/peers.md)."""
    names = {name for row in run.rows for name in row}
    return sorted(int(n.split("/")[1]) for n in names if re.fullmatch(r"peers/\d+/steps", n))


def _lanes(axes: Axes, runs: Sequence[Run]) -> None:
    """A lane for each peer: when it trained, its steps, and the age of the copies it averaged."""
    (run,) = runs
    slots = _slots(run)
    every = [row["step"] for row in run.rows if any(f"peers/{k}/steps" in row for k in slots)]
    shown = Normalize(0, max(1, *(run.series(f"peers/{k}/stale")[1].max() for k in slots)))
    for lane, slot in enumerate(slots):
        steps, made = run.series(f"peers/{slot}/steps")
        _, incarnation = run.series(f"peers/{slot}/incarnation")
        _, stale = run.series(f"peers/{slot}/stale")
        place = np.searchsorted(every, steps)
        ends = np.flatnonzero((np.diff(place) > 1) | (np.diff(incarnation) != 0))
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
    _frame(axes, "Peers", f"triangle: joins, cross: dies; age of copies to {oldest:.0f} steps")
    axes.set_yticks(range(len(slots)), [f"peer {slot}" for slot in slots])
    axes.set_ylim(len(slots) - 0.4, -0.6)


def _frame(axes: Axes, title: str, aside: str) -> None:
    style.frame(axes, title, pad=9)
    axes.set_title(aside, loc="right", size=8.5, color=GREY, pad=9)
    axes.set_xlabel("step", color=GREY, size=9)
    axes.spines[["left", "bottom"]].set_color("#b5b5b5")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.margins(x=0.012)


def _log_axis(axes: Axes, values: np.ndarray) -> None:
    """A logarithmic y axis of at least a decade, with plain numbers on it."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        axes.set_yticks([])
        return
    low, high = values.min(), values.max()
    # What rounding leaves of an all-reduce, 1e-7 of a distance, would take most of the axis.
    real = values[values > 1e-4 * high]
    if len(real) and low < real.min():
        low = real.min() / 3
    widen = max(1.15, (10 * low / high) ** 0.5)
    axes.set(yscale="log", ylim=(low / widen, high * widen))
    style.plain_numbers(axes.yaxis, (1, 2, 5) if high / low < 300 else (1,))


def _limit(axes: Axes, heights: Sequence[np.ndarray]) -> None:
    """Give the panel to the smooth lines and the dots after the first tenth of a long run.

    The steep start would otherwise flatten everything that follows; it and the spikes of the raw
    trace may leave the panel at the top.
    """
    late = [values[len(values) // 10 if len(values) >= 40 else 0 :] for values in heights]
    style.hold(axes, np.concatenate([*late, []]))


def _end_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Write each text to the right of the panel where its line ends, without overlap."""

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
    """The last value as text; the line itself shows where it stopped being finite."""
    if not np.isfinite(values[-1]):
        return "not finite"
    return f"{values[-1]:.3f}" if 0.1 <= abs(values[-1]) < 1000 else f"{values[-1]:.3g}"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = Parser(
        prog="decent-jax plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the --workdir of a run")
    where = "default: RUN/curves.png, or comparison.png here for several runs"
    parser.add_argument("--out", metavar="FILE", help=f"a .png, .pdf or .svg; {where}")
    parser.add_argument(
        "--mean",
        action="store_true",
        help="a line with a band for runs that differ in the seed",
    )
    parser.add_argument(
        "--style", choices=tuple(means.LOOKS), default="screen", help="paper: for print; as --mean"
    )
    parser.add_argument("--csv", metavar="FILE", help="also write the numbers of --mean")
    try:
        options = parser.parse_args(arguments)
        averages = options.mean or options.csv is not None or options.style != "screen"
        if options.out is not None or averages or len(options.runs) > 1:
            check_replaceable(COMPARISON if options.out is None else options.out, "--out")
        if options.csv is not None:
            check_replaceable(options.csv, "--csv")
            if options.csv == options.out:
                raise ConfigError(f"--out and --csv are one file, {options.out}; name two")
        if averages:
            curves = means.curves_of([load_run(run) for run in options.runs])
            figure = means.draw(curves, means.LOOKS[options.style])
            dpi = 150 if options.style == "screen" else 300
            print(style.save(figure, options.out or COMPARISON, dpi=dpi))
            if options.csv:
                print(means.write_csv(curves, options.csv))
        else:
            print(plot_runs(options.runs, options.out))
    except (RunError, OSError, ValueError) as error:
        print(f"{parser.prog}: {ConfigError(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
