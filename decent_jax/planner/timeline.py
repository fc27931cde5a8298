"""Pictures of predictions: a step as a Gantt chart, predicted against measured, scaling."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from decent_jax import plot_style as style
from decent_jax.planner import predict, simulator
from decent_jax.planner.fit import Row
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Algorithm, Workload
from decent_jax.plot_style import BLUE, COLOURS, GREEN, GREY, GRID, INK, MARKS, ORANGE, PINK

KINDS = {
    "forward": BLUE,
    "backward": "#7fb8dc",
    "update": GREEN,
    "communicate": ORANGE,
    "wait": "#dddddd",
}
LOG_TICKS = (1, 1.5, 2, 3, 5, 7)


def draw_gantt(
    network: Network,
    workload: Workload,
    algorithms: Mapping[str, Algorithm],
    *,
    replicas: Sequence[int] | None = None,
    steps: int = 3,
    warm_up: int = 20,
) -> Figure:
    """A few steps of each algorithm, two lines per replica: compute above, network below.

    Args:
      replicas: to draw; default: one or two of each node, at most eight nodes.
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
    figure = style.new_figure(11, height)
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    longest = 0.0
    for axes, (label, run) in zip(panels, runs.items(), strict=True):
        first = len(run.ends_s) - steps
        begin = float(run.ends_s[first - 1, list(replicas)].min()) if first else 0.0
        end = float(run.ends_s[first + steps - 1, list(replicas)].max())
        longest = max(longest, end - begin)
        _gantt(axes, run, replicas, begin, end, range(first, first + steps))
        mean = predict.step_s(network, workload, algorithms[label])
        style.frame(axes, f"{label}: {1e3 * mean:.0f} ms per step in the long run")
        names = [network.names[replica] for replica in replicas]
        axes.set_yticks(range(len(replicas)), names, size=8)
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


def _gantt(
    axes: Axes,
    run: simulator.Run,
    replicas: Sequence[int],
    begin: float,
    end: float,
    shown_steps: Sequence[int],
) -> None:
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


def draw_against_measured(rows: Sequence[Row], title: str = "") -> Figure:
    """Predicted over measured step times, a panel each for milliseconds and for the error.

    Args:
      rows: each with ``group`` (a colour), ``series`` (a mark), ``measured_s``, ``predicted_s`` and
        ``fitted`` (hollow marks).
    """
    figure = style.new_figure(12, 5)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    groups = list(dict.fromkeys(row["group"] for row in rows))
    series = list(dict.fromkeys(row["series"] for row in rows))
    for row in rows:
        colour = COLOURS[groups.index(row["group"])]
        look = {
            "marker": MARKS[series.index(row["series"])],
            "color": colour,
            "mfc": "white" if row["fitted"] else colour,
            "ms": 7,
            "ls": "none",
        }
        measured, predicted = row["measured_s"], row["predicted_s"]
        left.plot(1e3 * measured, 1e3 * predicted, **look)
        right.plot(1e3 * measured, 100 * (predicted / measured - 1), **look)
    values = [1e3 * row[key] for row in rows for key in ("measured_s", "predicted_s")]
    ends = np.array([0.85 * min(values), 1.18 * max(values)])
    left.plot(ends, ends, color=INK, lw=0.8, zorder=0)
    left.fill_between(ends, 0.85 * ends, 1.15 * ends, color=GRID, zorder=-1)
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    left.set_ylabel("predicted, ms per step", color=GREY)
    right.axhspan(-15, 15, color=GRID, zorder=-1)
    right.axhline(0, color=INK, lw=0.8, zorder=0)
    right.set(xscale="log", xlim=ends)
    right.set_ylabel("error of the prediction, %", color=GREY)
    for axes in (left, right):
        axes.set_xlabel("measured, ms per step", color=GREY)
        style.plain_numbers(axes.xaxis, LOG_TICKS)
    style.plain_numbers(left.yaxis, LOG_TICKS)
    style.frame(left, title)
    style.frame(right, "band: 15% either way")
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

    Args:
      panels: title -> algorithm -> (replicas, seconds).
      ideal_s: title -> seconds per step without communication, drawn dashed.
    """
    lines = -(-len(panels) // columns)
    figure = style.new_figure(4.3 * columns, 3.3 * lines + 0.4)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
        for name, (replicas, seconds) in panel.items():
            k = names.index(name)
            look = {"color": COLOURS[k], "marker": MARKS[k], "ms": 4, "lw": 1.5}
            axes.plot(replicas, seconds, label=name, **look)
        if ideal_s:
            axes.axhline(ideal_s[title], color=GREY, ls="--", lw=1, label="compute alone")
        axes.set(xscale="log", yscale="log")
        style.plain_numbers(axes.xaxis)
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1,), numticks=12))
        style.plain_numbers(axes.yaxis, LOG_TICKS)
        style.frame(axes, title)
        axes.tick_params(axis="x", labelrotation=45)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes in grid[:, 0]:
        axes.set_ylabel("seconds per step", color=GREY)
    for axes in grid[-1]:
        axes.set_xlabel("replicas", color=GREY)
    style.legend_outside(figure, grid[0, 0], columns=4)
    return figure


def draw_predictions(rows: Sequence[predict.Prediction]) -> Figure:
    """Step times as stacked bars: compute, exposed communication, stragglers."""
    sizes = list(dict.fromkeys(row.num_replicas for row in rows))
    deepest = max(sum(row.num_replicas == size for row in rows) for size in sizes)
    figure = style.new_figure(min(4.2 * len(sizes) + 1.5, 17), 0.9 + 0.32 * deepest)
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    parts = (
        ("compute_s", BLUE, "compute"),
        ("exposed_s", ORANGE, "exposed communication"),
        ("waiting_s", PINK, "stragglers"),
    )
    for axes, size in zip(panels, sizes, strict=True):
        shown = [row for row in rows if row.num_replicas == size]
        left = np.zeros(len(shown))
        for part, colour, word in parts:
            width = np.array([1e3 * getattr(row, part) for row in shown])
            axes.barh(range(len(shown)), width, left=left, color=colour, label=word, height=0.7)
            left += width
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds per step", color=GREY)
        style.frame(axes, f"{size} replicas, {shown[0].num_nodes} nodes")
        axes.set_yticks(range(len(shown)), [row.label for row in shown], size=8)
    style.legend_outside(figure, panels[0], columns=3)
    return figure
