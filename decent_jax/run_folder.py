"""What a run left behind in its folder, read back: its metrics, and words that tell it apart."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decent_jax.errors import RunError
from decent_jax.train.metrics import read_metrics

# Config fields that name an experiment, the most telling first.
TELLING = ("algorithm", "optimizer", "schedule", "topology", "combine", "mix_every", "accum_steps")
TELLING += ("num_replicas", "replicas", "batch_size", "learning_rate", "seed")
NOT_TELLING = ("workdir", "data_dir", "resume", "log", "checkpoint", "profile", "name")


@dataclass
class Run:
    """One run folder: its rows and its settings."""

    path: Path
    rows: list
    config: dict  # flat: "optimizer.learning_rate"
    label: str = ""

    def series(self, name, x="step"):
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

    def has(self, name):
        """Whether the metric has some finite value."""
        return bool(np.isfinite(self.series(name)[1]).any())


def load_run(path):
    """The run in the folder `path` (or that has the metrics file `path`)."""
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
            found = _flat(json.loads((folder / name).read_text()))
        except (OSError, ValueError):
            continue
        if name == "summary.json":
            found = {k: v for k, v in found.items() if k in TELLING}
        config |= found
    return Run(folder, rows, config)


def smoothed(values, window=None):
    """A moving average that skips what is not finite, over a fortieth of the values.

    The window shrinks at the start, so that the first value, often the largest, stays what it was.
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


def label_runs(runs):
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


def _flat(tree, prefix=""):
    flat = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _words(field, value):
    """ "one_peer_exp", "8 replicas", "learning rate 0.0003"."""
    if isinstance(value, str):
        return value
    if field in ("num_replicas", "replicas"):
        return f"{value} replicas"
    return f"{field.replace('_', ' ')} {value}"
