"""The account of a run's time: the file that a session keeps of it, shares, and words.

`decent_jax.train.goodput.Clock` counts the seconds.

>>> describe(dict.fromkeys(CAUSES, 0.0) | {"steps": 40.0, "compiling": 30.0, "start": 30.0})
'goodput 40% of 1 min 40 s: 30% start, 30% compiling'
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decent_jax.ground.errors import DataError
from decent_jax.ground.format import format_duration
from decent_jax.ground.json_files import is_real, read_json

FILE = "goodput.json"  # of a run directory
# What the time that is not in "steps" is spent on.
CAUSES = ("start", "compiling", "data", "evaluation", "checkpoints", "lost", "recovery")

Record = Mapping[str, Any]  # see `decent_jax.train.goodput.Clock.record`


def read(path: Path) -> Record | None:
    """The record in a file; None where there is none, or it is damaged."""
    try:
        found = read_json(path)
        seconds, date, ended = found["seconds"], found["date"], found["ended"]
        whole = set(seconds) == {"steps", *CAUSES} and is_real(date, 0) and type(ended) is bool
        return found if whole and all(is_real(x, -1) for x in seconds.values()) else None
    except (OSError, DataError, KeyError, TypeError, AttributeError):
        return None


def shares(spent: Mapping[str, float]) -> dict[str, float]:
    """Shares of the time: ``goodput`` for "steps", ``goodput/CAUSE`` for the others."""
    total = max(sum(spent.values()), 1e-9)
    found = {f"goodput/{cause}": round(spent[cause] / total, 6) for cause in CAUSES}
    return {"goodput": round(spent["steps"] / total, 6)} | found


def describe(spent: Mapping[str, float], mfu: float | None = None) -> str:
    """A line of the log: what took half a percent of the time or more, the longest first."""
    total = max(sum(spent.values()), 1e-9)
    causes = sorted(CAUSES, key=lambda cause: -spent[cause])
    words = [f"{spent[x] / total:.0%} {x}" for x in causes if spent[x] >= 0.005 * total]
    line = f"goodput {spent['steps'] / total:.0%} of {format_duration(total)}"
    line += f": {', '.join(words)}" if words else ""
    return line if mfu is None else f"{line}; {mfu:.1%} of the devices' peak (mfu)"
