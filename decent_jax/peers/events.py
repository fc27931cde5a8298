"""The event log of a peer: everything that determines its parameters.

``peers/RANK/events-GENERATION.jsonl`` contains one JSON object per line:

| line | meaning |
|---|---|
| ``{"start": t, "origin": ...}`` | first step; origin: None (seed) or ``{"peer", "t", "when"}`` |
| ``{"t": t, "rate": p}`` | step t was made with the learning rate at common progress p |
| ``{"t": t, "average": ..., "mine": v, ...}`` | before step t, this average's pull was applied |
| ``{"t": t, "version": v, "crc": c}`` | then, before step t, this snapshot was published |
| ``{"end": t, "crc": c}`` | the parameters after the last step |

``origin`` is the state of another peer before its step t: as in its checkpoint (``"checkpoint"``),
or after the pulls of that boundary were applied (``"boundary"``). Each line reaches the operating
system before any other process can learn of the event, so a kill loses no line that matters.
"""

import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.ground.errors import RunError
from decent_jax.ground.json_files import Json
from decent_jax.peers.protocol import PairwiseAverage

_STARTS = tuple(
    {"start": int, "origin": origin} for origin in (None, {"peer": str, "t": int, "when": str})
)
_PULL = {"t": int, "average": str, "with": str, "mine": int, "theirs": int, "sides": [float] * 2}
_VERSION = {"t": int, "version": int, "crc": int}
_KINDS = (_PULL, _VERSION, {"t": int, "rate": int}, {"end": int, "crc": int})  # of other lines


class EventLog:
    """Writes the event log of one generation; thread-safe."""

    def __init__(self, folder: Path, generation: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = path(folder, generation).open("w")
        self._lock = threading.Lock()

    def write(self, **event: Any) -> None:
        """Append a line and hand it to the operating system."""
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(event) + "\n")
                self._file.flush()

    def average(self, t: int, average: PairwiseAverage) -> None:
        """Log an average whose pull is applied before step t."""
        theirs = average.theirs
        names = {"average": theirs.name, "with": theirs.peer, "mine": average.mine.version}
        self.write(t=t, **names, theirs=theirs.version, sides=average.sides)

    def end(self, t: int, crc: int) -> None:
        """Log the checksum of the parameters after the last step, ``t - 1``; close the log."""
        self.write(end=t, crc=crc)
        with self._lock:
            self._file.close()


def path(folder: Path, generation: int) -> Path:
    """The path of a generation's event log."""
    return folder / f"events-{generation}.jsonl"


def generations(folder: Path) -> list[int]:
    """The generations that have an event log in a rank's folder, in order."""
    numbers = (p.stem.partition("-")[2] for p in folder.glob("events-*.jsonl") if p.is_file())
    return sorted(int(number) for number in numbers if number.isdecimal())


def has_step(file: Path, t: int) -> bool:
    """Whether the log has a line for step t, recognized by the prefix that `EventLog` writes."""
    words = f'{{"t": {t}, "rate": '.encode()
    with file.open("rb") as lines:
        return any(line.startswith(words) for line in lines)


def read(file: Path) -> Iterator[Json]:
    """The events in order, without a last line that a kill cut short.

    Raises:
      RunError: a line is not an event; the message names it.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            event: Any = None
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    return
            kinds = _STARTS if number == 1 else _KINDS
            if not any(fits(event, kind) for kind in kinds):
                raise RunError(
                    f"{file} line {number} is not an event of a peer; the log is damaged"
                )
            yield event


def fits(value: Any, kind: object) -> bool:
    """Whether a JSON value matches a kind: a type, None, or dicts and lists of kinds.

    Numbers are at least 0 and below 2**32. A dict may have further entries.
    """
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(k in value and fits(value[k], kind[k]) for k in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and len(value) == len(kind) and all(map(fits, value, kind))
    if kind is None:
        return value is None
    return type(value) is kind and (kind in (bool, str) or 0 <= value < 2**32)


def crc(arrays: list[np.ndarray]) -> int:
    """A checksum of the bits of all arrays."""
    checksum = 0
    for x in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(x).tobytes(), checksum)
    return checksum
