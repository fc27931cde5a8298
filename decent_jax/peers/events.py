"""The event log of a peer: everything that decides what its parameters become.

``peers/RANK/events-GENERATION.jsonl`` has one JSON object per line:

| line | meaning |
|---|---|
| ``{"start": t, "origin": ...}`` | first step; None: the seed; or a ``{"peer", "t", "when"}`` |
| ``{"t": t, "rate": p}`` | step t was made with the learning rate of common progress p |
| ``{"t": t, "met": ..., "mine": v, ...}`` | before step t a half of this meeting was added |
| ``{"t": t, "version": v, "crc": c}`` | before step t, after that, the parameters were published |
| ``{"end": t, "crc": c}`` | the parameters after the last step |

A copy of another peer is of its step t, either as its checkpoint has it (``"checkpoint"``) or after
the halves of that boundary were added (``"boundary"``). A line reaches the operating system before
any other process can learn what it says, so a killed process loses no line that matters.
"""

import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.ground.errors import RunError
from decent_jax.peers.rule import Met

_STARTS = tuple(
    {"start": int, "origin": origin} for origin in (None, {"peer": str, "t": int, "when": str})
)
_MET = {"t": int, "met": str, "with": str, "mine": int, "theirs": int, "sides": [float, float]}
_VERSION = {"t": int, "version": int, "crc": int}
_KINDS = (_MET, _VERSION, {"t": int, "rate": int}, {"end": int, "crc": int})  # of other lines


class EventLog:
    """Writes the log of one generation, from any thread."""

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

    def met(self, t: int, met: Met) -> None:
        """The half of a meeting that is added before step t."""
        theirs = met.theirs
        names = {"met": theirs.meeting, "with": theirs.peer, "mine": met.mine.version}
        self.write(t=t, **names, theirs=theirs.version, sides=met.sides)

    def end(self, t: int, crc: int) -> None:
        """The parameters after the last step, ``t - 1``."""
        self.write(end=t, crc=crc)
        with self._lock:
            self._file.close()


def path(folder: Path, generation: int) -> Path:
    """The file of an generation."""
    return folder / f"events-{generation}.jsonl"


def generations(folder: Path) -> list[int]:
    """The generations of a rank, in order."""
    found = (p.stem.partition("-")[2] for p in folder.glob("events-*.jsonl") if p.is_file())
    return sorted(int(number) for number in found if number.isdecimal())


def has_step(file: Path, t: int) -> bool:
    """Whether step t was made, by the beginnings of the lines as `EventLog` writes them."""
    words = f'{{"t": {t}, "rate": '.encode()
    with file.open("rb") as lines:
        return any(line.startswith(words) for line in lines)


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The lines, one after the other; one that was cut short by a kill is left out.

    Raises:
      RunError: a line is none of those above; the message names it.
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


def fits(found: Any, kind: Any) -> bool:
    """Whether a value of a JSON file is of a kind: a type, None, or dicts and lists of kinds.

    Numbers are at least 0 and below 2**32. A dict may have further entries.
    """
    if isinstance(kind, dict):
        return isinstance(found, dict) and all(k in found and fits(found[k], kind[k]) for k in kind)
    if isinstance(kind, list):
        return isinstance(found, list) and len(found) == len(kind) and all(map(fits, found, kind))
    if kind is None:
        return found is None
    return type(found) is kind and (kind in (bool, str) or 0 <= found < 2**32)


def crc(arrays: list[np.ndarray]) -> int:
    """A checksum of the bits of all arrays."""
    value = 0
    for x in arrays:
        value = zlib.crc32(np.ascontiguousarray(x).tobytes(), value)
    return value
