"""The roster: who is alive, how far each peer is, and how far all are together."""

import dataclasses
import math
import time
from typing import Any


@dataclasses.dataclass
class _Entry:
    """A slot and the peer that has it, or had it last."""

    incarnation: int
    steps: int  # made in this slot, by all of its peers
    handle: Any = None
    alive: bool = False
    joins: bool = False  # it waits for the state of another peer
    heard: float | None = None  # when it reported last; None: it does not train yet
    report: dict[str, Any] = dataclasses.field(default_factory=dict)


class Roster:
    """A Ray actor; single-threaded, and none of its methods waits.

    Args:
      silent_s: seconds without a report after which nobody meets a peer.
      known: {slot: steps made in it} before this session.
    """

    def __init__(self, silent_s: float, known: dict[int, int]):
        self._silent_s = silent_s
        self._slots = {slot: _Entry(-1, steps) for slot, steps in known.items()}

    def add(self, slot: int, incarnation: int, handle: Any, joins: bool) -> None:
        """A peer takes the slot."""
        steps = self._slots[slot].steps if slot in self._slots else 0
        self._slots[slot] = _Entry(incarnation, steps, handle, alive=True, joins=joins)

    def remove(self, slot: int) -> None:
        """The peer that has the slot has died, left or ended."""
        entry = self._slots[slot]
        entry.alive, entry.handle = False, None  # Ray ends an actor of which nobody has a handle

    def beat(self, slot: int, incarnation: int, report: dict[str, Any]) -> tuple[int, int] | None:
        """A peer's report. (steps of all slots, hash of the members); None: it is removed."""
        entry = self._slots[slot]
        if not entry.alive or entry.incarnation != incarnation:
            return None
        entry.heard, entry.steps, entry.report = time.monotonic(), report["steps"], report
        entry.joins = False
        names = tuple(name for name, _ in self.members())
        return sum(entry.steps for entry in self._slots.values()), hash(names)

    def members(self) -> list[tuple[str, Any]]:
        """(name, handle) of the peers that train and are not silent."""
        return [
            (f"{slot}.{entry.incarnation}", entry.handle)
            for slot, entry in self._slots.items()
            if self._is_member(entry)
        ]

    def is_hopeful(self) -> bool:
        """Whether a peer that joins may yet find one that trains: not all of them wait for it."""
        return any(entry.alive and not entry.joins for entry in self._slots.values())

    def look(self) -> dict[int, dict[str, Any]]:
        """{slot: report}, with the incarnation and whether it is alive, trains, is not silent."""
        return {
            slot: {
                **entry.report,
                "slot": slot,
                "incarnation": entry.incarnation,
                "steps": entry.steps,
                "alive": entry.alive,
                "ready": entry.heard is not None,
                "member": self._is_member(entry),
            }
            for slot, entry in self._slots.items()
        }

    def _is_member(self, entry: _Entry) -> bool:
        heard = -math.inf if entry.heard is None else entry.heard
        return entry.alive and time.monotonic() - heard <= self._silent_s
