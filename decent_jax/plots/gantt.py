"""The planner's figure: a Gantt chart of steps."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from decent_jax.plots import style
from decent_jax.plots.style import BLUE, GREEN, GREY, INK, ORANGE

KINDS = {
    "forward": BLUE,
    "backward": "#7fb8dc",
    "update": GREEN,
    "communicate": ORANGE,
    "wait": "#dddddd",
}
# An event: kind, replica, step, start and end in seconds.
Event = tuple[str, int, int, float, float]


def draw(
    runs: Mapping[str, tuple[Sequence[Event], np.ndarray]],
    names: Sequence[str],
    replicas: Sequence[int],
    steps: int = 3,
) -> Figure:
    """Draws the last ``steps`` steps of each run, compute above communication for every replica.

    Args:
      runs: by title, the events, and the times at which each replica ended each step, (steps, n)
        in seconds.
      names: the names of all n replicas.
      replicas: the indices of the replicas to draw.
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
