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
from decent_jax.ground.json_files import is_real, is_whole
from decent_jax.peers.rule import Met

_WHOLE = ("start", "end", "t", "rate", "mine", "theirs", "version", "crc")  # numbers of a line


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
        theirs, stale = met.theirs, progress - met.theirs.progress
        names = {"met": theirs.meeting, "with": theirs.peer, "mine": met.mine.version}
        names |= {"theirs": theirs.version}
        self.write(t=t, **names, sides=met.sides, share=met.share, stale=stale)

    def end(self, t: int, crc: int) -> None:
        """The parameters after the last step, ``t - 1``."""
        self.write(end=t, crc=crc)
        with self._lock:
            self._file.close()


def path(folder: Path, incarnation: int) -> Path:
    """The file of an incarnation."""
    return folder / f"events-{incarnation}.jsonl"


def incarnations(folder: Path) -> list[int]:
    """The incarnations of a slot, in order."""
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
            if not _is_event(event, first=number == 1):
                raise RunError(
                    f"{file} line {number} is not an event of a peer; the log is damaged"
                )
            yield event


def _is_event(event: Any, first: bool) -> bool:
    """Whether it is a line of the table above, and the first one a start."""
    if not isinstance(event, dict) or first != ("start" in event):
        return False
    names = event.keys()
    for k in names & set(_WHOLE):
        if not is_whole(event[k], most=2**32 - 1 if k == "crc" else 2**31 - 1):
            return False
    if first:
        origin = event.get("origin")
        return origin is None or (
            isinstance(origin, dict)
            and isinstance(origin.get("peer"), str)
            and is_whole(origin.get("t"))
            and origin.get("when") in ("checkpoint", "boundary")
        )
    if "met" in event:
        sides = event.get("sides")
        return (
            names >= {"t", "mine", "theirs"}
            and isinstance(event["met"], str)
            and isinstance(event.get("with"), str)
            and isinstance(sides, list)
            and len(sides) == 2
            and all(map(is_real, sides))
            and type(event.get("share")) is float
        )
    return "end" in names or names >= {"t", "rate"} or names >= {"t", "version", "crc"}


def crc(arrays: list[np.ndarray]) -> int:
    """A checksum of the bits of all arrays."""
    value = 0
    for x in arrays:
        value = zlib.crc32(np.ascontiguousarray(x).tobytes(), value)
    return value
