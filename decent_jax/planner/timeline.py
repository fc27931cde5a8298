"""Pictures of predictions: a step as a Gantt chart, predicted against measured, scaling."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from decent_jax.planner import predict, simulator
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Algorithm, Workload
from decent_jax.plot import COLOURS, GREY, GRID, INK

BLUE, ORANGE, GREEN, PINK = COLOURS[:4]
KINDS = {
    "forward": BLUE,
    "backward": "#7fb8dc",
    "update": GREEN,
    "communicate": ORANGE,
    "wait": "#dddddd",
}
MARKS = "osD^vPX*"


def draw_gantt(
    network: Network,
    workload: Workload,
    algorithms: Mapping[str, Algorithm],
    *,
    replicas: Sequence[int] | None = None,
    steps: int = 3,
    warm_up: int = 20,
) -> Figure:
    """A few steps of each algorithm, two lines a replica: compute above, network below.

    replicas: the ones drawn; left out, one or two of each node, at most eight.
    """
    if replicas is None:
        per_node = 2 if network.num_nodes <= 4 else 1
        replicas = [
            int(device)
            for node in range(min(network.num_nodes, 8))
            for device in np.flatnonzero(network.node == node)[:per_node]
        ]
    runs = {
        label: simulator.simulate(
            network, workload, algorithm, steps=steps, warm_up=warm_up, record=True
        )
        for label, algorithm in algorithms.items()
    }
    height = 0.8 + len(runs) * (0.75 + 0.34 * len(replicas))
    figure = Figure(figsize=(11, height), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    longest = 0.0
    for axes, (label, run) in zip(panels, runs.items(), strict=True):
        first = len(run.ends_s) - steps
        begin = float(run.ends_s[first - 1, list(replicas)].min()) if first else 0.0
        end = float(run.ends_s[first + steps - 1, list(replicas)].max())
        longest = max(longest, end - begin)
        _gantt(axes, run, replicas, begin, end, range(first, first + steps))
        axes.set_yticks(
            range(len(replicas)), [network.names[replica] for replica in replicas], size=8
        )
        mean = predict.step_s(network, workload, algorithms[label])
        _frame(axes, f"{label}: {1e3 * mean:.0f} ms a step in the long run")
    panels[0].set_xlim(0, 1e3 * longest * 1.01)
    panels[-1].set_xlabel("milliseconds", color=GREY)
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in KINDS.items()],
        loc="outside upper right",
        ncols=len(KINDS),
        frameon=False,
        fontsize=9,
    )
    return figure


def _gantt(axes, run, replicas, begin, end, shown_steps) -> None:
    line = {replica: y for y, replica in enumerate(replicas)}
    for event in run.events:
        if event.replica not in line or event.end_s <= begin or event.start_s >= end:
            continue
        below = event.kind == "communicate"
        left, right = max(event.start_s, begin), min(event.end_s, end)
        axes.broken_barh(
            [(1e3 * (left - begin), 1e3 * (right - left))],
            (line[event.replica] + (0.02 if below else -0.4), 0.36 if below else 0.4),
            color=KINDS[event.kind],
            ec="white",
            lw=0.3,
        )
    for step in shown_steps:
        for replica, y in line.items():
            x = 1e3 * (run.ends_s[step, replica] - begin)
            axes.plot([x, x], [y - 0.42, y + 0.4], color=INK, lw=1)
    axes.set_ylim(len(replicas) - 0.45, -0.55)


def draw_against_measured(rows: Sequence[dict], title: str = "") -> Figure:
    """Predicted over measured step times, a panel each for milliseconds and for the error.

    rows: ``group`` (a colour), ``series`` (a mark), ``measured_s``, ``predicted_s``, ``fitted``
    (drawn hollow where it was).
    """
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    groups = list(dict.fromkeys(row["group"] for row in rows))
    series = list(dict.fromkeys(row["series"] for row in rows))
    for row in rows:
        colour = COLOURS[groups.index(row["group"])]
        style = {
            "marker": MARKS[series.index(row["series"])],
            "color": colour,
            "mfc": "white" if row["fitted"] else colour,
            "ms": 7,
            "ls": "none",
        }
        left.plot(1e3 * row["measured_s"], 1e3 * row["predicted_s"], **style)
        right.plot(
            1e3 * row["measured_s"], 100 * (row["predicted_s"] / row["measured_s"] - 1), **style
        )
    values = [1e3 * row[key] for row in rows for key in ("measured_s", "predicted_s")]
    ends = np.array([0.85 * min(values), 1.18 * max(values)])
    left.plot(ends, ends, color=INK, lw=0.8, zorder=0)
    left.fill_between(ends, 0.85 * ends, 1.15 * ends, color=GRID, zorder=-1)
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    left.set_ylabel("predicted, ms a step", color=GREY)
    right.axhspan(-15, 15, color=GRID, zorder=-1)
    right.axhline(0, color=INK, lw=0.8, zorder=0)
    right.set(xscale="log", xlim=ends)
    right.set_ylabel("error of the prediction, %", color=GREY)
    for axes in (left, right):
        axes.set_xlabel("measured, ms a step", color=GREY)
        _plain_log(axes.xaxis)
    _plain_log(left.yaxis)
    _frame(left, title)
    _frame(right, "band: 15% either way")
    for name in groups:
        right.plot([], [], "s", color=COLOURS[groups.index(name)], ms=7, label=name)
    for name in series:
        right.plot([], [], MARKS[series.index(name)], color=GREY, ms=7, label=name)
    right.plot([], [], "o", color=GREY, mfc="white", ms=7, label="fitted")
    right.plot([], [], "o", color=GREY, ms=7, label="held out")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def draw_scaling(
    panels: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[float]]]],
    *,
    columns: int = 3,
    ideal_s: Mapping[str, float] | None = None,
) -> Figure:
    """Step time over replicas, a panel for each case and a line for each algorithm.

    panels: title -> algorithm -> (replicas, seconds). ideal_s: title -> the step without
    communication, drawn dashed.
    """
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.3 * columns, 3.3 * lines + 0.4), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True).ravel()
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    for axes, (title, panel) in zip(grid, panels.items(), strict=False):
        for name, (replicas, seconds) in panel.items():
            k = names.index(name)
            axes.plot(
                replicas, seconds, color=COLOURS[k], marker=MARKS[k], ms=4, lw=1.5, label=name
            )
        if ideal_s:
            axes.axhline(ideal_s[title], color=GREY, ls="--", lw=1, label="compute alone")
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1,), numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        _plain_log(axes.yaxis)
        _frame(axes, title)
        axes.tick_params(axis="x", labelrotation=45)
    for axes in grid[len(panels) :]:
        axes.axis("off")
    for axes in grid.reshape(lines, columns)[:, 0]:
        axes.set_ylabel("seconds a step", color=GREY)
    for axes in grid.reshape(lines, columns)[-1]:
        axes.set_xlabel("replicas", color=GREY)
    figure.legend(
        *grid[0].get_legend_handles_labels(),
        loc="outside upper left",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    return figure


def draw_predictions(rows: Sequence[predict.Prediction]) -> Figure:
    """Step times as stacked bars: compute, exposed communication, stragglers."""
    sizes = list(dict.fromkeys(row.num_replicas for row in rows))
    deepest = max(sum(row.num_replicas == size for row in rows) for size in sizes)
    figure = Figure(
        figsize=(min(4.2 * len(sizes) + 1.5, 17), 0.9 + 0.32 * deepest), layout="constrained"
    )
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    parts = (("compute_s", BLUE), ("exposed_s", ORANGE), ("waiting_s", PINK))
    words = ("compute", "exposed communication", "stragglers")
    for axes, size in zip(panels, sizes, strict=True):
        shown = [row for row in rows if row.num_replicas == size]
        left = np.zeros(len(shown))
        for (part, colour), word in zip(parts, words, strict=True):
            width = np.array([1e3 * getattr(row, part) for row in shown])
            axes.barh(range(len(shown)), width, left=left, color=colour, label=word, height=0.7)
            left += width
        axes.set_yticks(range(len(shown)), [row.label for row in shown], size=8)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds a step", color=GREY)
        _frame(axes, f"{size} replicas, {shown[0].num_nodes} nodes")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper left",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    return figure


def _frame(axes, title: str) -> None:
    axes.set_title(title, loc="left", size=11, color=INK)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", colors=GREY, labelsize=9, length=0)


def _plain_log(axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
