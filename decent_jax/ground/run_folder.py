"""Reads a run directory: its metrics, and a label that distinguishes it from other runs."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from decent_jax.ground.errors import DataError, RunError
from decent_jax.ground.format import printable, shorten
from decent_jax.ground.json_files import Json, read_bytes, read_entries

METRICS = "metrics.jsonl"
LOCK = ".lock"  # names the process that owns the directory
START = "run.json"  # facts about the current or last session
_LARGEST = 2**62  # more than any step or count
_MOST_BYTES = 1 << 30  # largest size of metrics.jsonl
_MOST_DRAWN = 1e100  # larger values are not drawn
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# Validation scores (higher is better): their label, and the factor to its unit.
SCORES = {
    "eval/top1": ("Top-1, % of the validation images", 100.0),
    "eval/bleu": ("BLEU, of the validation sentences", 1.0),
}

# Config fields that name an experiment, the most informative first, by the last part of the name.
NAMING = ("preset", "algorithm", "schedule", "combine", "mix_every", "accum_steps")
NAMING += ("num_replicas", "batch_size", "learning_rate", "seed")
SHOWN_SETTINGS = 4
# Sections and fields about logging and devices, not about training.
IGNORED = ("workdir", "log", "eval", "checkpoint", "profile", "prompt")


@dataclasses.dataclass
class RunFolder:
    """One run directory: its rows and its settings.

    Attributes:
      path: the directory.
      rows: the rows of metrics.jsonl.
      config: the flat config, ``{"model.layers": 12}``.
      label: the label of the run's lines in a figure.
      bytes_sent_per_step: a replica's mean, from summary.json; None: unknown.
    """

    path: Path
    rows: list[Json]
    config: Json
    label: str = ""
    bytes_sent_per_step: float | None = None

    def series(self, name: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """The steps (or, with ``x="time"``, training seconds) and values of a metric, (m,) each.

        They are empty if the run did not record the metric.
        """
        rows = [row for row in self.rows if isinstance(row.get(name), (int, float))]
        steps = np.array([row["step"] for row in rows], float)
        values = np.array([row[name] for row in rows], float)
        values[np.abs(values) > _MOST_DRAWN] = np.nan  # no axis extends so far
        values[np.abs(values) < 1 / _MOST_DRAWN] = 0
        if x == "time":
            seconds = self.seconds_at(steps)
            return (values[:0], values[:0]) if seconds is None else (seconds, values)
        return steps, values

    def seconds_at(self, steps: np.ndarray) -> np.ndarray | None:
        """Training seconds up to each of the steps; None if the run did not record them."""
        known_steps, seconds = self.series("perf/wall_time_s")
        return np.interp(steps, known_steps, seconds) if len(seconds) else None

    def bytes_at(self, steps: np.ndarray) -> np.ndarray | None:
        """Bytes that a replica has sent up to each of the steps; None if unknown."""
        sent = self.bytes_sent_per_step
        return None if sent is None else sent * steps

    def has(self, name: str) -> bool:
        """Whether the run recorded a finite value of the metric."""
        return bool(np.isfinite(self.series(name)[1]).any())


def load_run(path: str | Path) -> RunFolder:
    """The run in the folder ``path`` (or with the metrics file ``path``).

    Raises:
      RunError: ``path`` is not a run directory, or has no rows.
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
    config, summary = entries(folder / "config.json"), entries(folder / "summary.json")
    sent = summary.get("bytes_sent_per_step")
    is_number = isinstance(sent, int | float) and 0 <= sent < _LARGEST
    return RunFolder(folder, rows, config, bytes_sent_per_step=sent if is_number else None)


def entries(path: Path) -> Json:
    """`read_entries` without lists; empty if the file is missing, damaged or of another kind."""
    try:
        values = read_entries(path)
    except (OSError, DataError):
        return {}
    return {name: value for name, value in values.items() if not isinstance(value, list)}


def read_metrics(path: str | Path) -> list[Json]:
    """The rows of a metrics file (or of a run directory), as a list of dicts.

    A truncated last line, which a killed process may leave, is ignored.

    Raises:
      ValueError: another line is not a row.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS
    lines = read_bytes(path, _MOST_BYTES).splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row.get("step"), int):
                raise ValueError
            if any(isinstance(v, int) and abs(v) > _LARGEST for v in row.values()):
                raise ValueError  # NumPy cannot hold it
        except (ValueError, AttributeError, RecursionError):
            if number == len(lines):
                break
            raise ValueError(f"{path} line {number} is not a JSON object with a step.") from None
        rows.append({k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()})
    return rows


def smoothed(values: np.ndarray, window: int | None = None) -> np.ndarray:
    """The moving average, (m,), of the finite values; the default window is m / 40.

    The window shrinks at the start, so the first value, often the largest, does not change.
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


def label_runs(runs: Sequence[RunFolder]) -> None:
    """Sets the label of each run: the config fields in which it differs, its folder, or both.

    A label names at most `SHOWN_SETTINGS` fields, the ones in `NAMING` first. If runs differ in
    more fields, as with different configs, the label starts with the folder.
    """

    def order(field: str) -> tuple[int, str]:
        name = _last_part(field)
        return NAMING.index(name) if name in NAMING else len(NAMING), field

    fields = {field for run in runs for field in run.config}
    fields = {field for field in fields if not set(field.split(".")) & set(IGNORED)}
    if len(runs) == 1:
        config = runs[0].config
        differing = [f for f in fields if _last_part(f) in NAMING and config[f] != ""]
    else:
        differing = [f for f in fields if len({str(run.config.get(f)) for run in runs}) > 1]
    few = len(differing) <= SHOWN_SETTINGS
    naming = [f for f in differing if few or _last_part(f) in NAMING]
    shown = sorted(naming, key=order)[:SHOWN_SETTINGS]
    folders = _different_names([run.path.resolve() for run in runs])
    labels = [_settings(run, shown) for run in runs]
    for run, label, folder in zip(runs, labels, folders, strict=True):
        if len(runs) == 1 or not few or not label:
            run.label = folder + (f": {label}" if label else "")
        else:
            run.label = label + (f" ({folder})" if labels.count(label) > 1 else "")


def _settings(run: RunFolder, fields: Sequence[str]) -> str:
    """The values of these fields, such as "gossip, one_peer_exp, 8 replicas"."""
    ignored = ("schedule",) if run.config.get("algorithm") == "all_reduce" else ()
    settings = [(_last_part(field), run.config.get(field)) for field in fields]
    return ", ".join(
        _words(name, v) for name, v in settings if v not in (None, "") and name not in ignored
    )


def _different_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or the last two if the last parts are not unique."""
    names = [folder.name for folder in folders]
    if len(set(names)) == len(set(folders)):
        return names
    return ["/".join(folder.parts[-2:]) for folder in folders]


def _last_part(field: str) -> str:
    return field.rsplit(".", 1)[-1]


def _words(name: str, value: object) -> str:
    """ "one_peer_exp", "8 replicas", "learning rate 0.0003"."""
    if isinstance(value, str):
        return printable(shorten(value, 100))
    if name == "num_replicas":
        return f"{value} replicas"
    return f"{name.replace('_', ' ')} {value}"
