"""Figures of the planner: a step as a Gantt chart, and a placement on its network.

They take arrays, names and numbers from `decent_jax.planner`.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import ArrayLike

from decent_jax.plots import style
from decent_jax.plots.style import BLUE, COLOURS, GREEN, GREY, INK, ORANGE

KINDS = {
    "forward": BLUE,
    "backward": "#7fb8dc",
    "update": GREEN,
    "communicate": ORANGE,
    "wait": "#dddddd",
}
# An event: kind, replica, step, start and end in seconds.
Event = tuple[str, int, int, float, float]


# --- steps ---------------------------------------------------------------------------------------


def draw_gantt(
    runs: Mapping[str, tuple[Sequence[Event], np.ndarray]],
    names: Sequence[str],
    replicas: Sequence[int],
    steps: int = 3,
) -> Figure:
    """The last steps of each run, two lines per replica: compute above, network below.

    Args:
      runs: by title, the events and when each replica ended each step, (steps, n) seconds.
      names: of all n replicas.
      replicas: to draw.
    """
    figure = style.new_figure(11, 0.8 + len(runs) * (0.75 + 0.34 * len(replicas)))
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    longest, shown = 0.0, list(replicas)
    for axes, (title, (events, ends_s)) in zip(panels, runs.items(), strict=True):
        ends = ends_s[-steps - 1 :, shown]
        begin, end = float(ends[0].min()), float(ends[-1].max())
        longest = max(longest, end - begin)
        for kind, replica, _, start_s, end_s in events:
            if replica in shown and end_s > begin and start_s < end:
                left, right = max(start_s, begin), min(end_s, end)
                line = shown.index(replica)
                place = (line + 0.02, 0.36) if kind == "communicate" else (line - 0.4, 0.4)
                span = [(1e3 * (left - begin), 1e3 * (right - left))]
                axes.broken_barh(span, place, color=KINDS[kind], ec="white", lw=0.3)
        for line, own in enumerate(ends[1:].T):
            axes.vlines(1e3 * (own - begin), line - 0.42, line + 0.4, color=INK, lw=1)
        axes.set_ylim(len(shown) - 0.45, -0.55)
        style.frame(axes, title)
        axes.set_yticks(range(len(shown)), [names[replica] for replica in shown], size=8)
    panels[0].set_xlim(0, 1e3 * longest * 1.01)
    words = f"milliseconds ({len(shown)} of {len(names)} replicas)"
    panels[-1].set_xlabel(words, color=GREY)
    handles = [Patch(color=colour, label=kind) for kind, colour in KINDS.items()]
    style.legend(figure, handles, loc="outside upper right", ncols=len(KINDS))
    return figure


# --- placements --------------------------------------------------------------------------------


def draw_placement(
    gbit: np.ndarray, names: Sequence[str], stages: np.ndarray, title: str
) -> Figure:
    """The network's bandwidths with the links that stages use, and the placement of the stages.

    Args:
      gbit: (n, n) Gbit/s between devices.
      names: of the n devices, ``PLACE/k``.
      stages: (S, D) devices; a row averages, a column is a pipeline.
      title: of the right panel.
    """
    figure, left, right = _two_panels(gbit, names)
    together = [pair for group in stages for pair in itertools.combinations(group, 2)]
    onwards = np.stack([stages[:-1], stages[1:]], axis=-1)
    _mark(left, together, ORANGE, above=True)
    _mark(left, onwards, BLUE, above=False)
    words = {ORANGE: "averages with (above the diagonal)", BLUE: "passes on to (below)"}
    handles = [Patch(color=colour, label=word) for colour, word in words.items()]
    style.legend(figure, handles, ncols=2)
    style.title(left, "Links that the placement uses")
    _grid(right, names, stages)
    right.set(xlabel="pipeline", ylabel="stage (a data-parallel group)")
    style.title(right, title)
    return figure


def draw_gossip(
    gbit: np.ndarray,
    names: Sequence[str],
    transfers: Sequence[np.ndarray],
    round_s: Sequence[float],
    titles: tuple[str, str],
) -> Figure:
    """The network's bandwidths with the transfers of a schedule, and the times of its rounds.

    Args:
      gbit: (n, n) Gbit/s between devices.
      names: of the n devices, ``PLACE/k``.
      transfers: of each round, (k, 2) devices: receiver, sender.
      round_s: seconds of each round.
      titles: of the two panels.
    """
    figure, left, right = _two_panels(gbit, names)
    slowest_first = np.argsort(round_s)[::-1].tolist()
    colours = {r: COLOURS[k % len(COLOURS)] for k, r in enumerate(slowest_first)}
    for r in reversed(slowest_first):
        _mark(left, transfers[r], colours[r])
    style.title(left, titles[0])
    left.set(xlabel="from", ylabel="to")
    right.margins(y=0.1)
    rounds = range(len(round_s))
    right.bar(rounds, round_s, width=0.7, color=[colours[r] for r in rounds])
    right.axhline(float(np.mean(round_s)), color=GREY, lw=1, ls="--")
    right.set_xticks(rounds)
    right.set(xlabel="round", ylabel="seconds")
    style.frame(right, titles[1])
    return figure


def _places(names: Sequence[str]) -> list[str]:
    """The part of the devices' names before the slash: a region, or a machine."""
    return [name.rsplit("/", 1)[0] for name in names]


def _two_panels(gbit: np.ndarray, names: Sequence[str]) -> tuple[Figure, Axes, Axes]:
    """Left panel: the bandwidths between devices; white lines and labels mark the places."""
    figure = style.new_figure(12.5, 5.8, wspace=0.06)
    axes, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    off_diagonal = np.where(np.eye(len(gbit), dtype=bool), np.nan, gbit)
    image = axes.imshow(off_diagonal, cmap="Greys_r", norm=LogNorm(), interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("Gbit/s between two devices", color=INK)
    style.plain_numbers(bar.ax.yaxis)
    runs = [list(run) for _, run in itertools.groupby(enumerate(_places(names)), lambda x: x[1])]
    if len(runs) <= 24:
        for run in runs[1:]:
            for line in (axes.axhline, axes.axvline):
                line(run[0][0] - 0.5, color="white", lw=0.8)
        middles = [(run[0][0] + run[-1][0]) / 2 for run in runs]
        axes.set_yticks(middles, [run[0][1] for run in runs], size=8)
        axes.set_xticks(middles, [run[0][1] for run in runs], size=8, rotation=90)
    axes.tick_params(length=0, colors=INK)
    return figure, axes, right


def _mark(axes: Axes, pairs: ArrayLike, colour: str, above: bool | None = None) -> None:
    """A dot per pair (receiver, sender) of devices; all above or all below the diagonal, if set."""
    points = np.array(pairs, int).reshape(-1, 2)
    points = points[points[:, 0] != points[:, 1]]
    if above is not None:
        points.sort(axis=1)
    rows, columns = points.T[::-1] if above is False else points.T
    axes.plot(columns, rows, "s", ms=3.2, color=colour, mec="white", mew=0.3)


def _grid(axes: Axes, names: Sequence[str], stages: np.ndarray) -> None:
    """Stages by pipelines, one colour per place; pipelines are sorted by their first stage."""
    places = np.array(_places(names))
    kinds = list(dict.fromkeys(places))
    stems = {kind.rstrip("0123456789") for kind in kinds}
    shared = len(stems.pop()) if len(stems) == 1 and len(kinds) > 1 else 0
    number = np.array([kinds.index(place) for place in places])[stages]
    order = np.lexsort(number[::-1])
    for (k, r), place in np.ndenumerate(number[:, order]):
        colour = COLOURS[place % len(COLOURS)]
        label = kinds[place][shared:][:9]
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
