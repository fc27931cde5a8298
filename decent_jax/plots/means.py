"""Runs that differ in their seed as one line: the mean, with a band of one standard deviation.

What `decent-jax plot --mean` draws: loss against steps, training time and bytes sent, and the
consensus distance; `--csv` writes the same numbers.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decent_jax.ground.errors import RunError
from decent_jax.ground.run_folder import IGNORED, RunFolder, label_runs, smoothed
from decent_jax.plots import style

CONSENSUS = "train/consensus_distance_relative"
ROUNDING = 1e-6  # the relative distance of replicas that are equal but for float32
# Sections and fields in which runs of one line may differ: the seed, and where and how they ran.
_ELSEWHERE = {*IGNORED, "seed", "mesh", "cluster"}


class Curve(NamedTuple):
    """A metric of one group of runs, at the steps that all of them recorded; arrays (m,)."""

    label: str
    steps: np.ndarray
    seconds: np.ndarray | None  # of training, mean over the runs; None: not recorded
    sent: np.ndarray | None  # bytes per replica, likewise
    mean: np.ndarray
    deviation: np.ndarray | None  # sample standard deviation over the runs; None: a single run
    runs: int


def groups_of(runs: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Groups of runs that differ only in their seed, in the order of their first runs; labelled."""
    groups: dict[tuple, list[RunFolder]] = {}
    for run in runs:
        kept = {k: v for k, v in run.config.items() if not set(k.split(".")) & _ELSEWHERE}
        groups.setdefault(tuple(sorted((k, str(v)) for k, v in kept.items())), []).append(run)
    first = [
        RunFolder(
            group[0].path, group[0].rows, {k: v for k, v in group[0].config.items() if k != "seed"}
        )
        for group in groups.values()
    ]
    label_runs(first)
    for one, group in zip(first, groups.values(), strict=True):
        for run in group:
            run.label = one.label
    return list(groups.values())


def curve(group: Sequence[RunFolder], name: str) -> Curve | None:
    """The mean of a metric over the runs of a group; None if they have no step of it in common."""
    each = [dict(zip(*run.series(name), strict=True)) for run in group]
    steps = np.array(sorted(set.intersection(*map(set, each))), float)
    if not len(steps):
        return None
    values = np.array([[found[step] for step in steps] for found in each])  # (runs, m)
    if name == "train/loss":  # of single batches
        values = np.array([smoothed(row) for row in values])
    return Curve(
        group[0].label,
        steps,
        _mean_of([run.seconds_at(steps) for run in group]),
        _mean_of([run.bytes_at(steps) for run in group]),
        values.mean(axis=0),
        values.std(axis=0, ddof=1) if len(group) > 1 else None,
        len(group),
    )


def _mean_of(rows: Sequence[np.ndarray | None]) -> np.ndarray | None:
    known = [row for row in rows if row is not None]
    return np.mean(known, axis=0) if len(known) == len(rows) else None


def loss_name(runs: Sequence[RunFolder]) -> str:
    """The validation loss where every run has a curve of it, else the training loss."""
    several = all(len(run.series("eval/loss")[0]) > 1 for run in runs)
    return "eval/loss" if several else "train/loss"


def curves_of(runs: Sequence[RunFolder]) -> dict[str, list[Curve]]:
    """By metric, a curve per group of runs.

    Raises:
      RunError: no run has a loss.
    """
    groups = groups_of(runs)
    found = {
        name: [made for group in groups if (made := curve(group, name)) is not None]
        for name in (loss_name(runs), CONSENSUS)
    }
    if not any(found.values()):
        raise RunError(f"{runs[0].path} has no metric that this command draws.")
    return {name: curves for name, curves in found.items() if curves}


def draw(curves: dict[str, list[Curve]]) -> Figure:
    """The figure of `curves_of`."""
    panels = []
    for name, of_metric in curves.items():
        panels.append((name, "steps"))
        if name != CONSENSUS:
            for axis in ("seconds", "sent"):
                if all(getattr(made, axis) is not None for made in of_metric):
                    panels.append((name, axis))
    seeds = {made.label: made.runs for of_metric in curves.values() for made in of_metric}
    labels = list(seeds)
    words = [label + (f" ({seeds[label]} seeds)" if seeds[label] > 1 else "") for label in labels]
    figure, every = style.grid(len(panels), min(2, len(panels)), words)
    for axes, (name, axis) in zip(every, panels, strict=True):
        _panel(axes, curves[name], name, axis, labels)
    return figure


def _panel(
    axes: Axes, curves: Sequence[Curve], name: str, axis: str, labels: Sequence[str]
) -> None:
    """The curves of one metric against ``steps``, ``seconds`` or bytes ``sent``."""
    unit, scale = _unit(axis, max(float(getattr(made, axis)[-1]) for made in curves))
    apart = [made for made in curves if name != CONSENSUS or made.mean.max() > ROUNDING]
    hidden, curves = len(apart) < len(curves) and len(apart) > 0, apart or curves
    for made in curves:
        x = getattr(made, axis) / scale
        look = style.look(labels.index(made.label))
        axes.plot(x, made.mean, lw=1.8, marker="o" if len(x) < 30 else "", ms=3.6, **look)
        if made.deviation is not None:
            band = made.mean - made.deviation, made.mean + made.deviation
            axes.fill_between(x, *band, color=look["color"], alpha=0.18, lw=0)
    kinds = {"eval/loss": "Validation loss", "train/loss": "Training loss"}
    aside = "without those at 0" if hidden else ""
    style.curve_frame(axes, kinds.get(name, "Consensus distance"), aside, unit)
    if name == CONSENSUS:
        values = np.concatenate([made.mean for made in curves])
        style.log_axis(axes, values[values > 0])
    else:  # without the steep start, which would flatten what follows
        style.hold(axes, np.concatenate([_late(made) for made in curves]))


def _late(made: Curve) -> np.ndarray:
    """The heights that a panel must hold: the mean and the band, but for the first of them."""
    start, half = len(made.mean) // 10, len(made.mean) // 2
    deviation = np.zeros_like(made.mean) if made.deviation is None else made.deviation
    band = (made.mean - deviation)[start:], (made.mean + deviation)[half:]
    return np.concatenate([made.mean[start:], *band])


def _unit(axis: str, largest: float) -> tuple[str, float]:
    """The words of an axis, and what its numbers are divided by."""
    if axis == "steps":
        return "step", 1
    if axis == "seconds":
        unit, size = style.time_unit(largest)
        return f"training time ({unit})", size
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if largest >= size:
            return f"sent per replica ({unit})", size
    return "sent per replica (kB)", 1e3


def write_csv(curves: dict[str, list[Curve]], path: str | Path) -> Path:
    """A row per curve and step: label, runs, metric, step, seconds, bytes, mean, deviation."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    heads = ("runs_of", "runs", "metric", "step", "training_seconds", "bytes_sent_per_replica")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*heads, "mean", "standard_deviation"))
        for name, of_metric in curves.items():
            for made in of_metric:
                columns = (made.seconds, made.sent, made.mean, made.deviation)
                for k, step in enumerate(made.steps):
                    row = ["" if column is None else float(column[k]) for column in columns]
                    writer.writerow([made.label, made.runs, name, int(step), *row])
    return path
