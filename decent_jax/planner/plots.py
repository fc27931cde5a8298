"""Pictures of a network and of a placement on it, and of how a search converges."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator
from numpy.typing import ArrayLike

from decent_jax import plot_style as style
from decent_jax.planner.gossip_placement import PlacedSchedule
from decent_jax.planner.network import BYTES_PER_GBIT, Network
from decent_jax.planner.search import Placement
from decent_jax.plot_style import BLUE, COLOURS, GREY, INK, ORANGE

TITLE = {"loc": "left", "size": 11, "color": INK}


def draw_placement(network: Network, placement: Placement) -> Figure:
    """The network's bandwidths with a placement's links on them, and where each stage is."""
    figure, left, right = _two_panels()
    _heat_map(figure, left, network)
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
    figure, left, right = _two_panels()
    _heat_map(figure, left, network)
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


def draw_convergence(
    runs: Mapping[str, Sequence[Placement]], reference: Mapping[str, float]
) -> Figure:
    """The best cost by time; a panel per problem, a line per seed.

    Args:
      reference: costs that others reached, drawn as dashed lines.
    """
    rows, columns = -(-len(runs) // 4), min(4, len(runs))
    figure = style.new_figure(3.5 * columns, 2.8 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, placements) in zip(panels, runs.items(), strict=False):
        best = min(placement.costs.total_s for placement in placements)
        for placement, colour in zip(placements, itertools.cycle(COLOURS)):
            seconds, _, cost = (list(column) for column in zip(*placement.history, strict=True))
            seconds = [max(1e-3, t) for t in seconds] + [max(placement.seconds, seconds[-1])]
            axes.step(seconds, [*cost, cost[-1]], where="post", color=colour, lw=1.5)
        low, high = best, max(placement.history[0][2] for placement in placements)
        if name in reference:
            axes.axhline(reference[name], color=GREY, lw=1, ls="--")
            axes.annotate(
                "DT-FM's search", (1, reference[name]), xycoords=("axes fraction", "data"),
                xytext=(0, 3), textcoords="offset points", ha="right", color=GREY, size=9,
            )  # fmt: skip
            low, high = min(low, reference[name]), max(high, reference[name])
        margin = 0.08 * (high - low) or 0.05 * best
        axes.set(xscale="log", ylim=(low - margin, high + margin))
        axes.xaxis.set_minor_locator(NullLocator())
        style.frame(axes, f"{name}: {best:.4g} s")
    for axes in panels[len(runs) :]:
        axes.axis("off")
    figure.supxlabel("seconds of search", size=10, color=INK)
    figure.supylabel("best cost, s", size=10, color=INK)
    return figure


def _two_panels() -> tuple[Figure, Axes, Axes]:
    figure = style.new_figure(12.5, 5.8, wspace=0.06)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    return figure, left, right


def _places(network: Network) -> list[str]:
    """The part of the devices' names before the slash: a region, or a machine."""
    return [name.rsplit("/", 1)[0] for name in network.names]


def _heat_map(figure: Figure, axes: Axes, network: Network) -> None:
    """Bandwidths between devices; white lines and labels mark the places."""
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
