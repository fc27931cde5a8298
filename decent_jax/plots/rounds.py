"""A schedule drawn round by round: the replicas on a circle, and the mixing matrix below."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import FancyArrowPatch

from decent_jax.plots.style import BLUE, GREY, GRID, INK, new_figure
from decent_jax.topology.schedule import Schedule

MOST_ROUNDS, COLUMNS = 12, 6


def draw(schedule: Schedule) -> Figure:
    """Draws every round (at most twelve) as a graph and as its matrix, six rounds in a row.

    An arrow points from sender to receiver; a line without a head stands for both directions. The
    larger the weight, the thicker the line.
    """
    matrices = [rnd.matrix for rnd in schedule.rounds[:MOST_ROUNDS]]
    columns = min(COLUMNS, len(matrices))
    bands = -(-len(matrices) // columns)
    figure = new_figure(max(2.2 * columns, 4.8), 4.4 * bands + 0.6)
    panels = figure.subplots(2 * bands, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    largest = max(matrix.max() for matrix in matrices)
    images = []
    for r, matrix in enumerate(matrices):
        band, column = divmod(r, columns)
        _graph(panels[2 * band, column], matrix, f"round {r}")
        images.append(_matrix(panels[2 * band + 1, column], matrix, largest, column == 0))
    bar = figure.colorbar(images[0], ax=panels, shrink=0.5, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("weight", color=INK)
    shown = "" if len(matrices) == schedule.period else f", of which the first {MOST_ROUNDS}"
    rounds = "1 round" if schedule.period == 1 else f"{schedule.period} rounds{shown}"
    title = f"{schedule.name}\n{schedule.num_replicas} replicas, {rounds}"
    figure.suptitle(title, x=0.012, ha="left", size=11, color=INK)
    return figure


def _graph(axes: Axes, matrix: np.ndarray, title: str) -> None:
    n = len(matrix)
    angles = np.pi / 2 - 2 * np.pi * np.arange(n) / n  # replica 0 on top, then clockwise
    place = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    # Many replicas need thinner lines and smaller heads, or they cover each other.
    thin = min(1.0, 16 / n)
    both_ways = []
    for receiver, sender in np.argwhere(matrix > 0).tolist():
        weight, back = matrix[receiver, sender], matrix[sender, receiver]
        if receiver < sender and back == weight:
            both_ways.append((place[[sender, receiver]], 4 * weight))
        elif receiver != sender and back != weight:
            arrow = FancyArrowPatch(
                place[sender],
                place[receiver],
                arrowstyle="-|>",
                mutation_scale=max(9 * thin, 3.5),
                shrinkA=5 * thin,
                shrinkB=5 * thin,
                # Two arrows of opposite directions must not hide each other.
                connectionstyle="arc3,rad=0.12",
                color=BLUE,
                lw=(0.6 + 2 * weight) * max(thin, 0.35),
            )
            axes.add_patch(arrow)
    if both_ways:
        lines, widths = zip(*both_ways, strict=True)
        widths = (0.4 + np.array(widths)) * max(thin, 0.35)
        axes.add_collection(LineCollection(lines, linewidths=widths, colors=BLUE))
    small = n > 16
    if small:
        axes.scatter(*place.T, s=max(25 * thin, 4), color=INK, lw=0, zorder=3)
    else:
        axes.scatter(*place.T, s=130, color="white", ec=INK, lw=0.8, zorder=3)
    away = 1.13 if small else 1.0
    for i in range(0, n, -(-n // 8) if small else 1):
        x, y = away * place[i]
        axes.text(x, y, str(i), ha="center", va="center", size=7, color=INK, zorder=4)
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    axes.set_title(title, loc="left", size=10, color=INK)


def _matrix(axes: Axes, matrix: np.ndarray, largest: float, first: bool) -> AxesImage:
    image = axes.imshow(matrix, cmap="Blues", vmin=0, vmax=largest, interpolation="nearest")
    axes.set_axis_on()
    ends = [0, len(matrix) - 1] if len(matrix) > 1 else [0]
    axes.set(xticks=ends, yticks=ends if first else [])
    axes.tick_params(labelsize=7, length=0, colors=GREY)
    axes.set_xlabel("sender", size=8, color=GREY)
    if first:
        axes.set_ylabel("receiver", size=8, color=GREY)
    axes.spines[:].set_color(GRID)
    return image
