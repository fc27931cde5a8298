"""The event log of a peer: everything that decides what its parameters become.

``peers/SLOT/events-INCARNATION.jsonl`` has one JSON object per line:

| line | meaning |
|---|---|
| ``{"start": t, "origin": ...}`` | first step; None: the seed; or a ``{"peer", "t", "when"}`` |
| ``{"t": t, "rate": p}`` | step t was made with the learning rate of common progress p |
| ``{"t": t, "met": ..., "mine": v, ...}`` | before step t a half of this meeting was added |
| ``{"t": t, "version": v, "crc": c}`` | before step t, after that, the parameters were published |
| ``{"end": t, "crc": c}`` | the parameters after the last step |

A copy of another peer is of its step t, either as its checkpoint has it (``"checkpoint"``) or after
the halves of that boundary were added (``"boundary"``). A line is with the operating system before
anybody else can know of what it says, so a killed process loses none that matters.
"""

import json
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.errors import RunError
from decent_jax.json_files import read_bytes
from decent_jax.peers.rule import Met

_MOST_BYTES = 1 << 30  # of a log


class EventLog:
    """Writes the log of one incarnation, from any thread."""

    def __init__(self, folder: Path, incarnation: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = path(folder, incarnation).open("w")
        self._lock = threading.Lock()

    def write(self, **event: Any) -> None:
        """Append a line and hand it to the operating system."""
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(event) + "\n")
                self._file.flush()

    def met(self, t: int, met: Met, progress: int) -> None:
        """The half of a meeting that is added before step t."""
        names = {"met": met.meeting, "with": met.partner, "mine": met.mine, "theirs": met.theirs}
        self.write(t=t, **names, sides=met.sides, share=met.share, stale=progress - met.progress)

    def end(self, t: int, **event: Any) -> None:
        """No step after ``t - 1`` belongs to this incarnation."""
        self.write(end=t, **event)
        with self._lock:
            self._file.close()


def path(folder: Path, incarnation: int) -> Path:
    """The file of an incarnation."""
    return folder / f"events-{incarnation}.jsonl"


def incarnations(folder: Path) -> list[int]:
    """Of a slot, in order."""
    found = (p.stem.partition("-")[2] for p in folder.glob("events-*.jsonl"))
    return sorted(int(number) for number in found if number.isdecimal())


def read(file: Path) -> list[dict[str, Any]]:
    """The lines; one that was cut short by a kill is left out.

    Raises:
      RunError: a line is none of those above; the message names it.
    """
    events = []
    lines = read_bytes(file, _MOST_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            event = None
        if not _is_event(event, first=number == 1):
            raise RunError(f"{file} line {number} is not an event of a peer; the log is damaged")
        events.append(event)
    return events


def _is_event(event: Any, first: bool) -> bool:
    """Whether it is a line of the table above, and the first one a start."""
    if not isinstance(event, dict) or first != ("start" in event):
        return False
    for k in ("start", "end", "t", "rate", "mine", "theirs", "version", "crc"):
        most = 2**32 if k == "crc" else 2**31
        if k in event and not (type(event[k]) is int and 0 <= event[k] < most):
            return False
    if first:
        origin = event.get("origin")
        return origin is None or (
            isinstance(origin, dict)
            and isinstance(origin.get("peer"), str)
            and type(origin.get("t")) is int
            and origin.get("when") in ("checkpoint", "boundary")
        )
    if "met" in event:
        sides = event.get("sides")
        return (
            {"t", "mine", "theirs"} <= event.keys()
            and isinstance(event["met"], str)
            and isinstance(event.get("with"), str)
            and isinstance(sides, list)
            and len(sides) == 2
            and all(type(side) in (int, float) for side in sides)
            and type(event.get("share", 0.5)) is float
        )
    return "end" in event or any(
        {"t", *names} <= event.keys() for names in (("rate",), ("version", "crc"))
    )


def crc(arrays: list[np.ndarray]) -> int:
    """A number of the bits of all arrays."""
    value = 0
    for x in arrays:
        value = zlib.crc32(np.ascontiguousarray(x).tobytes(), value)
    return value
