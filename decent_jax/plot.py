"""Draw the curves of one run, or compare several.

    python -m decent_jax.plot RUN [RUN ...] [--out FILE.png]

One run is drawn into RUN/curves.png, several into comparison.png in the current folder.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from decent_jax.run_folder import RunError, label_runs, load_run, smoothed
from decent_jax.text import format_number

# Okabe and Ito's colours, told apart by colour-blind readers too (their yellow is too pale).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
DOTS = {"marker": "o", "ms": 4.5, "mec": "white", "mew": 0.7, "lw": 1.8, "zorder": 4}
INK, GREY, GRID = "#222222", "#6b6b6b", "#e6e6e6"


def plot_runs(runs, out=None):
    """Draw the folders `runs` into the file `out` and return its path.

    What a run did not record is left out. `RunError` says what is wrong with a run that has
    nothing to draw.
    """
    runs = [load_run(run) for run in runs]
    label_runs(runs)
    figure = draw(runs)
    alone = len(runs) == 1
    out = Path(out or (runs[0].path / "curves.png" if alone else "comparison.png"))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150, facecolor="white")
    return out


def draw(runs):
    """The figure of these loaded and labelled runs."""
    for i, run in enumerate(runs):
        run.colour = COLOURS[i % len(COLOURS)]
        run.dashes = ("-", "--", ":", "-.")[i // len(COLOURS) % 4]
    panels = _panels(runs)
    if not panels:
        raise RunError(f"{runs[0].path} has no metric that this command draws.")
    columns = 3 if len(panels) == 3 else min(2, len(panels))
    lines = -(-len(panels) // columns)
    legend_columns = 2 if len(runs) in (2, 4) else 3
    legend_rows = -(-len(runs) // legend_columns) if len(runs) > 1 else 0
    height = 3.3 * lines + 0.5 + 0.25 * legend_rows
    figure = Figure(figsize=(5.6 * columns, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
    for i, (painter, arguments) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        painter(axes, runs, *arguments)
    if len(runs) == 1:
        figure.suptitle(_text(runs[0].label), x=0.012, ha="left", size=12, weight="bold", color=INK)
    else:
        handles = [Line2D([], [], color=run.colour, ls=run.dashes, lw=2.5) for run in runs]
        figure.legend(
            handles,
            [_text(run.label) for run in runs],
            loc="outside upper left",
            ncols=legend_columns,
            frameon=False,
            fontsize=10,
            labelcolor=INK,
        )
    return figure


def _panels(runs):
    """The panels that these runs have something for: (function, its further arguments)."""

    def any_has(*names):
        return any(run.has(name) for run in runs for name in names)

    panels = []
    if any_has("train/loss", "eval/loss"):
        panels.append((_loss, ("step",)))
        if any_has("perf/wall_time_s"):
            panels.append((_loss, ("time",)))
    distance, relative = "train/consensus_distance", "train/consensus_distance_relative"
    if any_has(distance, relative):
        everywhere = all(run.has(relative) for run in runs if run.has(distance))
        panels.append((_consensus, (relative if everywhere else distance,)))
    for name, title, unit in (
        ("perf/tokens_per_s", "Tokens a second", ""),
        ("perf/examples_per_s", "Examples a second", ""),
        ("perf/step_time_s", "Time of a step", "s"),
    ):
        # The first that every run has; the last if some run has it.
        if all(run.has(name) for run in runs) or (name == "perf/step_time_s" and any_has(name)):
            panels.append((_speed, (name, title, unit)))
            break
    return panels


def _loss(axes, runs, x):
    """Training loss (a light raw trace, a smooth line) and validation loss (dots)."""
    alone = len(runs) == 1
    unit, scale = _time_unit(runs) if x == "time" else ("", 1)
    lines = []  # (name, values, colour) of what is drawn
    for run in runs:
        steps, loss = run.series("train/loss", x)
        if len(steps):
            lines.append(("train", _trace(axes, run, steps / scale, loss), run.colour))
        low, high = run.series("train/loss_min", x), run.series("train/loss_max", x)
        banded = alone and 1 < len(low[0]) == len(high[0])
        if banded:
            edges = smoothed(low[1]), smoothed(high[1])
            axes.fill_between(low[0] / scale, *edges, color=run.colour, alpha=0.10, lw=0)
        steps, loss = run.series("eval/loss", x)
        if len(steps):
            colour = COLOURS[1] if alone else run.colour
            axes.plot(steps / scale, loss, color=colour, ls="-" if alone else "none", **DOTS)
            lines.append(("validation", loss, colour))
    _frame(axes, "Loss by step" if x == "step" else "Loss by time")
    axes.set_xlabel("step" if x == "step" else f"training time ({unit})", color=GREY, size=9)
    _limit(axes, [values for _, values, _ in lines])
    if alone:
        _aside(axes, "band: all replicas" if banded else "")
        _end_labels(axes, [(f"{name} {_last(v)}", v, c) for name, v, c in lines])
        return
    _aside(axes, "line: train, dots: validation")
    if x == "step":
        wanted = "validation" if any(name == "validation" for name, *_ in lines) else "train"
        _end_labels(axes, [(_last(v), v, c) for name, v, c in lines if name == wanted])


def _time_unit(runs):
    """A unit of time that suits the longest run, and its seconds."""
    longest = max(run.series("perf/wall_time_s")[1].max(initial=0.0) for run in runs)
    return ("h", 3600) if longest > 7200 else ("min", 60) if longest > 120 else ("s", 1)


def _line(run, x):
    """How the line of a run looks; a single point is a dot."""
    return {"ls": run.dashes, "lw": 1.8, "marker": "o" if len(x) == 1 else "", "ms": 4.5}


def _trace(axes, run, x, values):
    """Draw a noisy series lightly and its moving average over it; return the average."""
    smooth = smoothed(values)
    axes.plot(x, values, color=run.colour, lw=0.7, alpha=0.28)
    axes.plot(x, smooth, color=run.colour, **_line(run, x))
    return smooth


def _consensus(axes, runs, name):
    """How far the replicas are from their mean, on a logarithmic scale."""
    labels = []
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
    _frame(axes, "Consensus distance")
    _log_axis(axes, np.concatenate([values for _, values, _ in labels]))
    _aside(axes, "relative to the mean's norm" if name.endswith("_relative") else "")
    axes.set_xlabel("step", color=GREY, size=9)
    _end_labels(axes, labels)


def _speed(axes, runs, name, title, unit):
    """Throughput or step time, from zero."""
    labels, heights = [], []
    for run in runs:
        if not run.has(name):
            continue
        steps, speed = run.series(name)
        smooth = _trace(axes, run, steps, speed)
        median = format_number(float(np.nanmedian(speed)))
        labels.append((f"{median} {unit}".strip(), smooth, run.colour))
        heights.append(np.nanpercentile(speed, 95))
    _frame(axes, title)
    _aside(axes, "median at the right")
    axes.set_xlabel("step", color=GREY, size=9)
    axes.set_ylim(0, 1.25 * max(heights) or 1.0)
    axes.yaxis.set_major_formatter(EngFormatter(unit=unit, sep=""))
    _end_labels(axes, labels)


def _frame(axes, title):
    axes.set_title(title, loc="left", size=11, color=INK, pad=9)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b5b5b5")
    axes.tick_params(which="both", colors=GREY, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.margins(x=0.012)


def _log_axis(axes, values):
    """A logarithmic y axis of at least a decade, with plain numbers on it."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        axes.set_yticks([])
        return
    low, high = values.min(), values.max()
    widen = max(1.15, (10 * low / high) ** 0.5)
    axes.set_yscale("log")
    axes.set_ylim(low / widen, high * widen)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _aside(axes, text):
    axes.set_title(text, loc="right", size=8.5, color=GREY, pad=9)


def _limit(axes, heights):
    """Give the panel to the smooth lines and the dots after the first tenth of a long run.

    The steep start would otherwise flatten everything that follows; it and the spikes of the raw
    trace may leave the panel at the top.
    """
    late = [values[len(values) // 10 if len(values) >= 40 else 0 :] for values in heights]
    values = np.concatenate([*late, []])
    values = values[np.isfinite(values)]
    if len(values):
        low, high = values.min(), values.max()
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)


def _end_labels(axes, labels):
    """Write each text right of the panel, where its line ends, and none over another."""

    def height(values):
        finite = values[np.isfinite(values)]
        if len(finite) == 0:
            return 0.0
        point = axes.transData.transform((axes.get_xlim()[0], finite[-1]))
        return float(np.clip(axes.transAxes.inverted().transform(point)[1], 0.03, 1))

    gap, last = 0.068, -1.0
    placed = []
    for y, text, colour in sorted((height(values), text, c) for text, values, c in labels):
        last = max(y, last + gap)
        placed.append([last, text, colour])
    overflow = max(0.0, last - 1.0)
    for y, text, colour in placed:
        axes.annotate(
            text,
            (1.0, y - overflow),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            size=9,
            annotation_clip=False,
        )


def _last(values):
    """The last value as text; the line itself shows where it stopped being finite."""
    if not np.isfinite(values[-1]):
        return "not finite"
    return f"{values[-1]:.3f}" if 0.1 <= abs(values[-1]) < 1000 else f"{values[-1]:.3g}"


def _text(label):
    """A label that matplotlib takes as it is: no formula, and none that it hides."""
    label = label.replace("$", r"\$")
    return " " + label if label.startswith("_") else label


def main(arguments=None):
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        "python -m decent_jax.plot", description=__doc__.split("\n")[0]
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the --workdir of a run")
    where = "default: RUN/curves.png, or comparison.png here for several runs"
    parser.add_argument("--out", metavar="FILE.png", help=where)
    options = parser.parse_args(arguments)
    try:
        print(plot_runs(options.runs, options.out))
    except (RunError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
