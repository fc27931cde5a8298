"""Run folders, read back: the metrics of a run, and words that distinguish it from others."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decent_jax.errors import RunError
from decent_jax.json_files import flat

METRICS = "metrics.jsonl"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# Config fields that name an experiment, the most telling first, and sections that never do.
TELLING = ("algorithm", "optimizer", "schedule", "combine", "mix_every", "accum_steps")
TELLING += ("num_replicas", "batch_size", "learning_rate", "seed")
NOT_TELLING = ("log", "checkpoint", "profile")


@dataclass
class Run:
    """One run folder: its rows and its settings."""

    path: Path
    rows: list[dict]
    config: dict  # flat: "optimizer.learning_rate"
    label: str = ""

    def series(self, name: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """The steps (or training seconds) and values of a metric; both empty where it is absent."""
        rows = [row for row in self.rows if isinstance(row.get(name), (int, float))]
        steps = np.array([row["step"] for row in rows], float)
        values = np.array([row[name] for row in rows], float)
        if x == "time":
            known_steps, seconds = self.series("perf/wall_time_s")
            if len(seconds) == 0:
                return seconds, seconds
            steps = np.interp(steps, known_steps, seconds)
        return steps, values

    def has(self, name: str) -> bool:
        """Whether some value of the metric is finite."""
        return bool(np.isfinite(self.series(name)[1]).any())


def load_run(path: str | Path) -> Run:
    """The run in the folder `path` (or that has the metrics file `path`).

    Raises:
      RunError: there is none, or it has no row yet.
    """
    path = Path(path)
    try:
        rows = read_metrics(path)
    except FileNotFoundError:
        what = "has no metrics.jsonl" if path.is_dir() else "is not a folder"
        raise RunError(f"{path} {what}; give the --workdir of a run.") from None
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from None
    if not rows:
        raise RunError(f"{path}: metrics.jsonl has no complete row yet.")
    folder = path if path.is_dir() else path.parent
    config = {}
    for name in ("summary.json", "config.json"):  # the config has the last word
        try:
            found = flat(json.loads((folder / name).read_text()))
        except (OSError, ValueError, AttributeError):
            continue
        if name == "summary.json":
            found = {k: v for k, v in found.items() if k in TELLING}
        config |= found
    return Run(folder, rows, config)


def read_metrics(path: str | Path) -> list[dict]:
    """The rows of a metrics file (or of the run folder that has one), as a list of dicts.

    A torn last line, left by a process killed while writing it, is ignored.

    Raises:
      ValueError: another line is not a row.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row.get("step"), int):
                raise ValueError
        except (ValueError, AttributeError):
            if number == len(lines):
                break
            raise ValueError(f"{path} line {number} is not a JSON object with a step.") from None
        rows.append({k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()})
    return rows


def smoothed(values: np.ndarray, window: int | None = None) -> np.ndarray:
    """A moving average over a fortieth of the values that skips numbers which are not finite.

    The window shrinks at the start, so that the first value, often the largest, stays.
    """
    half = (len(values) // 40 if window is None else window) // 2
    finite = np.isfinite(values)
    index = np.arange(len(values))
    before = np.minimum(half, index)
    stop = np.minimum(index + before + 1, len(values))
    start = index - before
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (sums[stop] - sums[start]) / (counts[stop] - counts[start])
    return np.where(finite, mean, np.nan)


def label_runs(runs: list[Run]) -> None:
    """Name each run by the config fields in which it differs, or by its folder."""

    def order(field):
        short = field.rsplit(".", 1)[-1]
        return TELLING.index(short) if short in TELLING else len(TELLING), field

    fields = {field for run in runs for field in run.config}
    fields = [f for f in fields if not any(part in NOT_TELLING for part in f.split("."))]
    if len(runs) == 1:
        shown = [f for f in fields if f.rsplit(".", 1)[-1] in TELLING]
    else:
        shown = [f for f in fields if len({str(run.config.get(f)) for run in runs}) > 1]
    shown = sorted(shown, key=order)[:4]
    for run in runs:
        values = [(f.rsplit(".", 1)[-1], run.config.get(f)) for f in shown]
        run.label = ", ".join(_words(field, value) for field, value in values if value is not None)
    for run in runs:
        folder = run.path.resolve().name
        same = [other for other in runs if other.label == run.label and other is not run]
        if len(runs) == 1 or not run.label:
            run.label = folder + (f": {run.label}" if run.label else "")
        elif same:
            run.label += f" ({folder})"


def _words(field, value):
    """ "one_peer_exp", "8 replicas", "learning rate 0.0003"."""
    if isinstance(value, str):
        return value
    if field == "num_replicas":
        return f"{value} replicas"
    return f"{field.replace('_', ' ')} {value}"
