"""Pictures of a network and of what is placed on it, and of how a search converges."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from decent_jax.planner.gossip_placement import PlacedSchedule
from decent_jax.planner.network import BYTES_PER_GBIT, Network
from decent_jax.planner.search import Placement
from decent_jax.plot import COLOURS, GREY, GRID, INK

BLUE, ORANGE = COLOURS[:2]


def draw_placement(network: Network, placement: Placement) -> Figure:
    """The network's bandwidths with a placement's links on them, and where each stage is."""
    figure, left, right = _two_panels()
    _heat_map(figure, left, network)
    stages = placement.stages
    together = [pair for group in stages for pair in itertools.combinations(group, 2)]
    onwards = [
        pair for one, two in itertools.pairwise(stages) for pair in zip(one, two, strict=True)
    ]
    _mark(left, [together], above=True, colours=[ORANGE])
    _mark(left, [onwards], above=False, colours=[BLUE])
    _legend_below(
        left,
        [
            (ORANGE, "averages with (above the diagonal)"),
            (BLUE, "passes on to (below the diagonal)"),
        ],
    )
    costs = placement.costs
    left.set_title("Links that the placement uses", **TITLE)
    _grid(right, network, stages)
    right.set(xlabel="pipeline", ylabel="stage (a data-parallel group)")
    right.set_title(
        f"{costs.total_s:.2f} s a step: {costs.data_parallel_s:.2f} s averaging, "
        f"2 x {costs.pipeline_s:.2f} s passing on",
        **TITLE,
    )
    return figure


def draw_gossip(network: Network, placed: PlacedSchedule) -> Figure:
    """The network's bandwidths with the transfers of a schedule on them, and what rounds take."""
    figure, left, right = _two_panels()
    _heat_map(figure, left, network)
    order, schedule = placed.order, placed.schedule
    pairs = []
    for one in schedule.rounds:
        sources = [send.sources for send in one.sends]
        pairs.append(
            [
                (order[i], order[source[i]])
                for source in sources
                for i in np.flatnonzero(source >= 0)
            ]
        )
    slow = np.argsort(placed.round_s)[::-1]
    colours = {int(r): COLOURS[k % len(COLOURS)] for k, r in enumerate(slow)}
    quick_first = slow[::-1]
    _mark(
        left,
        [pairs[r] for r in quick_first],
        above=None,
        colours=[colours[int(r)] for r in quick_first],
    )
    group_size = schedule.rounds[0].group_size
    groups = f" (groups of {group_size} average first)" if group_size > 1 else ""
    left.set_title(f"Who hears from whom: {schedule.name}{groups}", **TITLE)
    left.set(xlabel="from", ylabel="to")
    right.margins(y=0.1)
    rounds = np.arange(schedule.period)
    right.bar(rounds, placed.round_s, width=0.7, color=[colours[int(r)] for r in rounds])
    right.axhline(placed.mean_round_s, color=GREY, lw=1, ls="--")
    right.set_xticks(rounds)
    right.set(xlabel="round", ylabel="seconds")
    right.set_title(
        f"{placed.mean_round_s:.3g} s a round, disagreement {placed.disagreement_s:.3g} s", **TITLE
    )
    _frame(right)
    return figure


def draw_convergence(
    runs: Mapping[str, Sequence[Placement]], reference: Mapping[str, float]
) -> Figure:
    """The best cost by time, relative to the best of all runs of that problem; a line a seed.

    reference: costs that others reached, drawn as dashed lines.
    """
    figure = Figure(figsize=(3.5 * min(4, len(runs)), 2.8 * -(-len(runs) // 4)))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(-(-len(runs) // 4), min(4, len(runs)), squeeze=False).ravel()
    for axes, (name, placements) in zip(panels, runs.items(), strict=False):
        best = min(one.costs.total_s for one in placements)
        for placement, colour in zip(placements, itertools.cycle(COLOURS)):
            seconds, _, cost = (list(column) for column in zip(*placement.history, strict=True))
            seconds = [max(1e-3, t) for t in seconds] + [max(placement.seconds, seconds[-1])]
            axes.step(seconds, [*cost, cost[-1]], where="post", color=colour, lw=1.5)
        low, high = best, max(one.history[0][2] for one in placements)
        if name in reference:
            axes.axhline(reference[name], color=GREY, lw=1, ls="--")
            axes.annotate(
                "DT-FM's search", (1, reference[name]), xycoords=("axes fraction", "data"),
                xytext=(0, 3), textcoords="offset points", ha="right", color=GREY, size=9,
            )  # fmt: skip
            low, high = min(low, reference[name]), max(high, reference[name])
        margin = 0.08 * (high - low) or 0.05 * best
        axes.set(xscale="log", ylim=(low - margin, high + margin))
        axes.set_title(f"{name}: {best:.4g} s", **TITLE)
        _frame(axes)
    for axes in panels[len(runs) :]:
        axes.axis("off")
    figure.supxlabel("seconds of search", size=10, color=INK)
    figure.supylabel("best cost, s", size=10, color=INK)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write the picture and return where it is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white")
    return path


TITLE = {"loc": "left", "size": 11, "color": INK}


def _two_panels():
    figure = Figure(figsize=(12.5, 5.8), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    return figure, left, right


def _places(network: Network) -> list[str]:
    """The part of the devices' names before the slash: a region, or a machine."""
    return [name.rsplit("/", 1)[0] for name in network.names]


def _heat_map(figure: Figure, axes, network: Network) -> None:
    gbit = network.bandwidth_bytes_per_s / BYTES_PER_GBIT
    off_diagonal = np.where(np.eye(network.num_devices, dtype=bool), np.nan, gbit)
    image = axes.imshow(off_diagonal, cmap="Greys_r", norm=LogNorm(), interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("Gbit/s between two devices", color=INK)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    runs = [list(run) for _, run in itertools.groupby(enumerate(_places(network)), lambda x: x[1])]
    if len(runs) <= 24:
        for run in runs[1:]:
            for line in (axes.axhline, axes.axvline):
                line(run[0][0] - 0.5, color="white", lw=0.8)
        middles = [(run[0][0] + run[-1][0]) / 2 for run in runs]
        axes.set_yticks(middles, [run[0][1] for run in runs], size=8)
        axes.set_xticks(middles, [run[0][1] for run in runs], size=8, rotation=90)
    axes.tick_params(length=0, colors=INK)


def _mark(axes, rounds, *, above: bool | None, colours) -> None:
    """A dot for every pair (receiver, sender) of devices; above, below or on both sides."""
    for pairs, colour in zip(rounds, colours, strict=True):
        points = np.array([pair for pair in pairs if pair[0] != pair[1]])
        if len(points) == 0:
            continue
        rows, columns = points.T
        if above is not None:
            rows, columns = np.minimum(rows, columns), np.maximum(rows, columns)
            rows, columns = (rows, columns) if above else (columns, rows)
        axes.plot(columns, rows, "s", ms=3.2, color=colour, mec="white", mew=0.3)


def _legend_below(axes, entries) -> None:
    handles = [Line2D([], [], marker="s", ls="", color=colour) for colour, _ in entries]
    axes.legend(
        handles, [label for _, label in entries], loc="upper center", frameon=False,
        bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=9, handletextpad=0.3,
    )  # fmt: skip


def _grid(axes, network: Network, stages: np.ndarray) -> None:
    """Stages by pipelines, a colour a place; pipelines are sorted by where they begin."""
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


def _frame(axes) -> None:
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(colors=GREY, labelsize=9, length=0)
