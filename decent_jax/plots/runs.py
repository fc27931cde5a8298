"""The curves of one run or of several runs, with a line per run or per mean over seeds."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from decent_jax.ground.errors import RunError
from decent_jax.ground.run_folder import (
    IGNORED,
    SCORES,
    RunFolder,
    label_runs,
    load_run,
    smoothed,
)
from decent_jax.plots import style
from decent_jax.plots.style import COLOURS, GREY, GRID, INK

__all__ = ["COLOURS", "GREY", "GRID", "INK", "curve", "draw", "groups_of", "plot_runs"]

COMPARISON = Path("comparison.png")  # in the current folder
CONSENSUS = "train/consensus_distance_relative"
LOSSES = ("train/loss", "eval/loss")
# Of each panel: title, metrics, and the quantity on the x axis. Panels without data are left out.
PANELS = (
    *(("Loss: line training, dots validation", LOSSES, x) for x in ("steps", "seconds", "sent")),
    *((title, (name,), "steps") for name, (title, _) in SCORES.items()),
    ("Consensus distance, relative to the mean's norm", (CONSENSUS,), "steps"),
    ("Seconds per step", ("perf/step_time_s",), "steps"),
)
# Sections and fields in which runs of one line may differ: the seed, devices, logging.
_ELSEWHERE = {*IGNORED, "seed", "mesh", "cluster"}


def plot_runs(
    runs: Sequence[str | Path], out: str | Path | None = None, *, mean: bool = False
) -> Path:
    """Draws the runs in the folders ``runs`` into the file ``out``, and returns its path.

    Metrics that a run did not record are left out.

    Args:
      out: the file to write; None means curves.png in the folder of a single run, or else
        comparison.png in the current folder.
      mean: whether runs that differ only in their seed become one line, their mean, with a band of
        one standard deviation.

    Raises:
      RunError: a run has nothing to draw.
    """
    loaded = [load_run(run) for run in runs]
    if mean:
        groups = groups_of(loaded)
    else:
        label_runs(loaded)
        groups = [[run] for run in loaded]
    default = loaded[0].path / "curves.png" if len(loaded) == 1 else COMPARISON
    return style.save(draw(groups), out or default, dpi=150)


def draw(groups: Sequence[Sequence[RunFolder]]) -> Figure:
    """The figure of groups of loaded and labelled runs; see `groups_of`."""
    panels = [(panel, curves) for panel in PANELS if (curves := list(_curves(groups, *panel[1:])))]
    ranks = _ranks(groups[0][0]) if len(groups) == 1 else []
    if not panels:
        raise RunError(f"{groups[0][0].path} has no metric that this command draws.")
    count = len(panels) + bool(ranks)
    words = [
        group[0].label + (f" ({len(group)} seeds)" if len(group) > 1 else "") for group in groups
    ]
    columns = 3 if count == 3 else min(2, count)
    figure, axes = style.grid(count, columns, words if len(groups) > 1 else ())
    for panel_axes, ((title, names, x), curves) in zip(axes, panels, strict=False):
        _panel(panel_axes, title, names, x, curves)
    if ranks:
        _lanes(axes[-1], groups[0][0])
    if len(groups) == 1:
        label = style.as_it_is(words[0])
        figure.suptitle(label, x=0.012, ha="left", size=12, weight="bold", color=INK)
    return figure


class Curve(NamedTuple):
    """A metric of a group of runs at the m steps that all of them recorded; arrays (m,)."""

    steps: np.ndarray
    seconds: np.ndarray | None  # training seconds, mean over the runs; None: not recorded
    sent: np.ndarray | None  # bytes per replica, mean over the runs
    mean: np.ndarray
    deviation: np.ndarray | None  # sample standard deviation over the runs; None: a single run


def groups_of(runs: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Labelled groups of runs that differ only in their seed, in the order of their first runs."""
    groups: dict[tuple, list[RunFolder]] = {}
    for run in runs:
        settings = {k: v for k, v in run.config.items() if not set(k.split(".")) & _ELSEWHERE}
        groups.setdefault(tuple(sorted((k, str(v)) for k, v in settings.items())), []).append(run)
    first = [
        RunFolder(
            group[0].path, group[0].rows, {k: v for k, v in group[0].config.items() if k != "seed"}
        )
        for group in groups.values()
    ]
    label_runs(first)
    for labelled, group in zip(first, groups.values(), strict=True):
        for run in group:
            run.label = labelled.label
    return list(groups.values())


def curve(group: Sequence[RunFolder], name: str) -> Curve | None:
    """The mean of a metric over the runs of a group; None if no step of it is common to all."""
    each = [dict(zip(*run.series(name), strict=True)) for run in group]
    steps = np.array(sorted(set.intersection(*map(set, each))), float)
    if not len(steps):
        return None
    values = np.array([[recorded[step] for step in steps] for recorded in each])  # (runs, m)
    if name == "train/loss":  # the noisy losses of single batches
        values = np.array([smoothed(row) for row in values])
    return Curve(
        steps,
        _mean_of([run.seconds_at(steps) for run in group]),
        _mean_of([run.bytes_at(steps) for run in group]),
        SCORES[name][1] * values.mean(axis=0) if name in SCORES else values.mean(axis=0),
        values.std(axis=0, ddof=1) if len(group) > 1 else None,
    )


def _mean_of(rows: Sequence[np.ndarray | None]) -> np.ndarray | None:
    known = [row for row in rows if row is not None]
    return np.mean(known, axis=0) if len(known) == len(rows) else None


def _curves(
    groups: Sequence[Sequence[RunFolder]], names: Sequence[str], x: str
) -> Iterator[tuple[int, str, Curve]]:
    """(number of the group, metric, curve) of every curve that can be drawn against ``x``."""
    for k, group in enumerate(groups):
        for name in names:
            drawn = curve(group, name)
            if drawn is None or getattr(drawn, x) is None:
                continue
            if np.isfinite(drawn.mean).any():
                yield k, name, drawn


def _panel(
    axes: Axes,
    title: str,
    names: Sequence[str],
    x: str,
    curves: Sequence[tuple[int, str, Curve]],
) -> None:
    """Draws the curves of some metrics against ``steps``, ``seconds`` or bytes ``sent``."""
    unit, scale = _unit(x, max(float(getattr(curve, x)[-1]) for *_, curve in curves))
    for k, name, curve in curves:
        look, at = style.look(k), getattr(curve, x) / scale
        if name == "eval/loss":
            look["ls"] = "none"
        few = len(at) == 1 or name.startswith("eval/")
        axes.plot(at, curve.mean, lw=1.8, marker="o" if few else "", ms=3.6, **look)
        if curve.deviation is not None:
            band = curve.mean - curve.deviation, curve.mean + curve.deviation
            axes.fill_between(at, *band, color=look["color"], alpha=0.18, lw=0)
    style.curve_frame(axes, title, x=unit)
    if CONSENSUS in names:
        values = np.concatenate([curve.mean for *_, curve in curves])
        style.log_axis(axes, values[values > 0])
    else:  # without the steep start, which would flatten all that follows
        style.hold(axes, np.concatenate([_late(curve) for *_, curve in curves]))


def _late(curve: Curve) -> np.ndarray:
    """The values that a panel must show: all but the first tenth of a long curve."""
    return curve.mean[len(curve.mean) // 10 if len(curve.mean) >= 40 else 0 :]


def _ranks(run: RunFolder) -> list[int]:
    """The ranks of a run of peers (docs/peers.md)."""
    names = {name for row in run.rows for name in row}
    return sorted(int(n.split("/")[1]) for n in names if re.fullmatch(r"peers/\d+/steps", n))


def _lanes(axes: Axes, run: RunFolder) -> None:
    """Draws a lane per peer: when it trained, its steps, and the staleness of its averages."""
    ranks = _ranks(run)
    every = [row["step"] for row in run.rows if any(f"peers/{k}/steps" in row for k in ranks)]
    shown = Normalize(0, max(1, *(run.series(f"peers/{k}/stale")[1].max() for k in ranks)))
    for lane, rank in enumerate(ranks):
        steps, made_steps = run.series(f"peers/{rank}/steps")
        _, generation = run.series(f"peers/{rank}/generation")
        _, stale = run.series(f"peers/{rank}/stale")
        place = np.searchsorted(every, steps)
        ends = np.flatnonzero((np.diff(place) > 1) | (np.diff(generation) != 0))
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
            f"{made_steps[-1]:.0f} steps", (1.0, lane), xycoords=("axes fraction", "data"),
            xytext=(5, 0), textcoords="offset points", va="center", color=INK, size=9,
            annotation_clip=False,
        )  # fmt: skip
    oldest = shown.vmax or 0
    style.curve_frame(
        axes, "Peers", f"triangle: joins, cross: dies; staleness up to {oldest:.0f} steps"
    )
    axes.set_yticks(range(len(ranks)), [f"peer {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)


def _unit(axis: str, largest: float) -> tuple[str, float]:
    """The label of an axis, and the divisor of its numbers.

    >>> _unit("steps", 1e4), _unit("seconds", 600.0), _unit("sent", 1e9), _unit("sent", 9e5)
    (('step', 1), ('training time (min)', 60),
     ('sent per replica (GB)', 1000000000.0), ('sent per replica (kB)', 1000.0))
    """
    if axis == "steps":
        return "step", 1
    if axis == "seconds":
        unit, size = style.time_unit(largest)
        return f"training time ({unit})", size
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if largest >= size:
            return f"sent per replica ({unit})", size
    return "sent per replica (kB)", 1e3
