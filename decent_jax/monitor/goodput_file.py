"""``goodput.json``, a run's seconds per category, and ``incidents.jsonl``, its failures.

`decent_jax.monitor.goodput.Clock` counts the seconds. The process that notices a failure appends an
incident.

>>> describe(dict.fromkeys(CAUSES, 0.0) | {"steps": 40.0, "compiling": 30.0, "start": 30.0})
'goodput 40% of 1 min 40 s: 30% start, 30% compiling'
>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     add_incident(folder, "process 2 died of SIGKILL", date=1e9)
...     incidents(folder)
[(1000000000.0, 'process 2 died of SIGKILL')]
"""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

from decent_jax.ground.errors import DataError
from decent_jax.ground.format import format_duration
from decent_jax.ground.json_files import Json, check_regular, is_real, read_bytes, read_json

FILE, INCIDENTS = "goodput.json", "incidents.jsonl"  # of a run directory
# Categories of wall-clock time besides "steps".
CAUSES = ("start", "compiling", "data", "evaluation", "checkpoints", "lost", "recovery")

Record = Json  # see `decent_jax.monitor.goodput.Clock.record`


def read(path: Path) -> Record | None:
    """The record in a file; None if the file is missing or damaged."""
    try:
        record = read_json(path)
        seconds, date, ended = record["seconds"], record["date"], record["ended"]
        whole = set(seconds) == {"steps", *CAUSES} and is_real(date, 0) and type(ended) is bool
        return record if whole and all(is_real(x, -1) for x in seconds.values()) else None
    except (OSError, DataError, KeyError, TypeError, AttributeError):
        return None


def shares(spent: Mapping[str, float]) -> dict[str, float]:
    """Fractions of wall-clock time: ``goodput`` for "steps", ``goodput/CAUSE`` for each cause."""
    total = max(sum(spent.values()), 1e-9)
    others = {f"goodput/{cause}": round(spent[cause] / total, 6) for cause in CAUSES}
    return {"goodput": round(spent["steps"] / total, 6)} | others


def describe(spent: Mapping[str, float], mfu: float | None = None) -> str:
    """A log line: goodput, and the categories with at least 0.5% of the time, longest first."""
    total = max(sum(spent.values()), 1e-9)
    causes = sorted(CAUSES, key=lambda cause: -spent[cause])
    words = [f"{spent[x] / total:.0%} {x}" for x in causes if spent[x] >= 0.005 * total]
    line = f"goodput {spent['steps'] / total:.0%} of {format_duration(total)}"
    line += f": {', '.join(words)}" if words else ""
    return line if mfu is None else f"{line}; {mfu:.1%} of the devices' peak (mfu)"


# --- What failed ----------------------------------------------------------------------------------


def add_incident(folder: str | Path, sentence: str, date: float | None = None) -> None:
    """Append an incident in one system call; it is lost if the folder is not writable.

    Args:
      folder: the run directory.
      sentence: what failed.
      date: seconds since the epoch; None: now.
    """
    line = json.dumps({"date": time.time() if date is None else date, "what": sentence}) + "\n"
    with contextlib.suppress(OSError):
        check_regular(Path(folder) / INCIDENTS)
        with open(Path(folder) / INCIDENTS, "ab", buffering=0) as file:
            file.write(line.encode())


def incidents(folder: str | Path) -> list[tuple[float, str]]:
    """(seconds since the epoch, sentence) of each valid line, the oldest first."""
    try:
        lines = read_bytes(Path(folder) / INCIDENTS).splitlines()
    except OSError:
        return []
    told = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            entry = json.loads(line)
            if is_real(entry["date"], 0) and isinstance(entry["what"], str):
                told.append((float(entry["date"]), entry["what"]))
    return told
