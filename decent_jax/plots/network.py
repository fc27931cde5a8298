"""Pictures: a step as a Gantt chart, predictions, and a placement on its network."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from numpy.typing import ArrayLike

from decent_jax.planner import predict, simulator
from decent_jax.planner.gossip_placement import PlacedSchedule
from decent_jax.planner.measured import Row
from decent_jax.planner.network import BYTES_PER_GBIT, Network
from decent_jax.planner.runtime import Algorithm, Workload
from decent_jax.planner.search import Placement
from decent_jax.plots import style
from decent_jax.plots.style import BLUE, COLOURS, GREEN, GREY, GRID, INK, MARKS, ORANGE, PINK

TITLE = {"loc": "left", "size": 11, "color": INK}
KINDS = {
    "forward": BLUE,
    "backward": "#7fb8dc",
    "update": GREEN,
    "communicate": ORANGE,
    "wait": "#dddddd",
}
STEPS = 3  # of a Gantt chart
LOG_TICKS = (1, 1.5, 2, 3, 5, 7)


# --- predictions --------------------------------------------------------------------------------


def draw_gantt(
    network: Network,
    workload: Workload,
    algorithms: Mapping[str, Algorithm],
    *,
    replicas: Sequence[int] | None = None,
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
            network, workload, algorithm, steps=STEPS, warm_up=20, record=True
        )
        for label, algorithm in algorithms.items()
    }
    height = 0.8 + len(runs) * (0.75 + 0.34 * len(replicas))
    figure = style.new_figure(11, height)
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    longest = 0.0
    for axes, (label, run) in zip(panels, runs.items(), strict=True):
        first = len(run.ends_s) - STEPS
        begin = float(run.ends_s[first - 1, list(replicas)].min())
        end = float(run.ends_s[-1, list(replicas)].max())
        longest = max(longest, end - begin)
        _gantt(axes, run, replicas, begin, end, range(first, len(run.ends_s)))
        mean = predict.step_s(network, workload, algorithms[label])
        style.frame(axes, f"{label}: {1e3 * mean:.0f} ms per step in the long run")
        names = [network.names[replica] for replica in replicas]
        axes.set_yticks(range(len(replicas)), names, size=8)
    panels[0].set_xlim(0, 1e3 * longest * 1.01)
    some = f"{len(replicas)} of {network.num_devices} replicas"
    panels[-1].set_xlabel(f"milliseconds ({some})", color=GREY)
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
      rows: of `measured.compare`, each with ``group`` (a colour) and ``series`` (a mark); fitted
        ones are hollow.
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
        measured, predicted = row["step_time_s"], row["predicted_s"]
        left.plot(1e3 * measured, 1e3 * predicted, **look)
        right.plot(1e3 * measured, 100 * (predicted / measured - 1), **look)
    values = [1e3 * row[key] for row in rows for key in ("step_time_s", "predicted_s")]
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


def draw_predictions(rows: Sequence[predict.Prediction]) -> Figure:
    """Step times as stacked bars: compute, exposed communication, stragglers."""
    sizes = list(dict.fromkeys(row.num_replicas for row in rows))
    deepest = max(sum(row.num_replicas == size for row in rows) for size in sizes)
    figure = style.new_figure(min(4.2 * len(sizes) + 1.5, 17), 0.9 + 0.32 * deepest)
    panels = figure.subplots(1, len(sizes), squeeze=False, sharex=True)[0]
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


# --- placements --------------------------------------------------------------------------------


def draw_placement(network: Network, placement: Placement) -> Figure:
    """The network's bandwidths with a placement's links on them, and where each stage is."""
    figure, left, right = _two_panels(network)
    stages = placement.stages
    together = [pair for group in stages for pair in itertools.combinations(group, 2)]
    onwards = [
        pair for one, two in itertools.pairwise(stages) for pair in zip(one, two, strict=True)
    ]
    _mark(left, together, ORANGE, above=True)
    _mark(left, onwards, BLUE, above=False)
    handles = [Line2D([], [], marker="s", ls="", color=colour) for colour in (ORANGE, BLUE)]
    left.legend(
        handles,
        ["averages with (above the diagonal)", "passes on to (below the diagonal)"],
        loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2,
        frameon=False, fontsize=9, handletextpad=0.3,
    )  # fmt: skip
    costs = placement.costs
    left.set_title("Links that the placement uses", **TITLE)
    _grid(right, network, stages)
    right.set(xlabel="pipeline", ylabel="stage (a data-parallel group)")
    right.set_title(
        f"{costs.total_s:.2f} s per step: {costs.data_parallel_s:.2f} s averaging, "
        f"2 x {costs.pipeline_s:.2f} s passing on",
        **TITLE,
    )
    return figure


def draw_gossip(network: Network, placed: PlacedSchedule) -> Figure:
    """The network's bandwidths with the transfers of a schedule on them, and what rounds take."""
    figure, left, right = _two_panels(network)
    order, schedule = placed.order, placed.schedule
    slowest_first = np.argsort(placed.round_s)[::-1].tolist()
    colours = {r: COLOURS[k % len(COLOURS)] for k, r in enumerate(slowest_first)}
    for r in reversed(slowest_first):
        pairs = [
            order[[i, send.sources[i]]]
            for send in schedule.rounds[r].sends
            for i in np.flatnonzero(send.sources >= 0)
        ]
        _mark(left, pairs, colours[r])
    group_size = schedule.rounds[0].group_size
    groups = f" (groups of {group_size} average first)" if group_size > 1 else ""
    left.set_title(f"Who receives from whom: {schedule.name}{groups}", **TITLE)
    left.set(xlabel="from", ylabel="to")
    right.margins(y=0.1)
    rounds = np.arange(schedule.period)
    right.bar(rounds, placed.round_s, width=0.7, color=[colours[r] for r in rounds.tolist()])
    right.axhline(placed.mean_round_s, color=GREY, lw=1, ls="--")
    right.set_xticks(rounds)
    right.set(xlabel="round", ylabel="seconds")
    disagreement = f"disagreement {placed.disagreement_s:.3g} s"
    style.frame(right, f"{placed.mean_round_s:.3g} s per round, {disagreement}")
    return figure


def _places(network: Network) -> list[str]:
    """The part of the devices' names before the slash: a region, or a machine."""
    return [name.rsplit("/", 1)[0] for name in network.names]


def _two_panels(network: Network) -> tuple[Figure, Axes, Axes]:
    """Left the bandwidths between devices; white lines and labels mark the places."""
    figure = style.new_figure(12.5, 5.8, wspace=0.06)
    axes, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    gbit = network.bandwidth_bytes_per_s / BYTES_PER_GBIT
    off_diagonal = np.where(np.eye(network.num_devices, dtype=bool), np.nan, gbit)
    image = axes.imshow(off_diagonal, cmap="Greys_r", norm=LogNorm(), interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("Gbit/s between two devices", color=INK)
    style.plain_numbers(bar.ax.yaxis)
    runs = [list(run) for _, run in itertools.groupby(enumerate(_places(network)), lambda x: x[1])]
    if len(runs) <= 24:
        for run in runs[1:]:
            for line in (axes.axhline, axes.axvline):
                line(run[0][0] - 0.5, color="white", lw=0.8)
        middles = [(run[0][0] + run[-1][0]) / 2 for run in runs]
        axes.set_yticks(middles, [run[0][1] for run in runs], size=8)
        axes.set_xticks(middles, [run[0][1] for run in runs], size=8, rotation=90)
    axes.tick_params(length=0, colors=INK)
    return figure, axes, right


def _mark(axes: Axes, pairs: Sequence[ArrayLike], colour: str, above: bool | None = None) -> None:
    """A dot per pair (receiver, sender) of devices; all above or all below the diagonal, if set."""
    points = np.array(pairs, int).reshape(-1, 2)
    points = points[points[:, 0] != points[:, 1]]
    if above is not None:
        points.sort(axis=1)
    rows, columns = points.T[::-1] if above is False else points.T
    axes.plot(columns, rows, "s", ms=3.2, color=colour, mec="white", mew=0.3)


def _grid(axes: Axes, network: Network, stages: np.ndarray) -> None:
    """Stages by pipelines, a colour per place; pipelines are sorted by where they begin."""
    places = np.array(_places(network))
    names = list(dict.fromkeys(places))
    stems = {name.rstrip("0123456789") for name in names}
    shared = len(stems.pop()) if len(stems) == 1 and len(names) > 1 else 0
    number = np.array([names.index(place) for place in places])[stages]
    order = np.lexsort(number[::-1])
    for (k, r), place in np.ndenumerate(number[:, order]):
        colour = COLOURS[place % len(COLOURS)]
        label = names[place][shared:][:9]
        alpha = 0.35 if place >= len(COLOURS) else 0.75
        axes.add_patch(Rectangle((r - 0.47, k - 0.44), 0.94, 0.88, fc=colour, alpha=alpha, lw=0))
        axes.annotate(
            label, (r, k), ha="center", va="center", size=7.5, color=INK, annotation_clip=False
        )
    replicas = stages.shape[1]
    axes.set(xlim=(-0.5, replicas - 0.5), ylim=(len(stages) - 0.5, -0.5))
    axes.set_xticks(range(replicas))
    axes.set_yticks(range(len(stages)))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=GREY)
