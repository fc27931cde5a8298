"""The roster: who is alive, how far each peer is, and how far all are together."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

from decent_jax.actors.messages import Address


@dataclasses.dataclass
class _Entry:
    """A slot and the peer that has it, or had it last."""

    incarnation: int
    steps: int  # made in this slot, by all of its peers
    alive: bool = False
    joins: bool = False  # it waits for the state of another peer
    address: Address = ("", 0)  # at which others ask it
    heard: float | None = None  # when it reported last; None: it does not train yet
    report: dict[str, Any] = dataclasses.field(default_factory=dict)


class Roster:
    """An actor; single-threaded, and none of its methods waits.

    Args:
      silent_s: seconds without a report after which nobody meets a peer.
      known: {slot: steps made in it} before this session.
      clock: seconds.
    """

    def __init__(
        self,
        silent_s: float,
        known: dict[int, int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._silent_s, self._clock = silent_s, clock
        self._slots = {slot: _Entry(-1, steps) for slot, steps in known.items()}

    def add(self, slot: int, incarnation: int, joins: bool) -> None:
        """A peer takes the slot."""
        steps = self._slots[slot].steps if slot in self._slots else 0
        self._slots[slot] = _Entry(incarnation, steps, alive=True, joins=joins)

    def remove(self, slot: int) -> None:
        """The peer that has the slot has died, left or ended."""
        self._slots[slot].alive = False

    def beat(
        self, slot: int, incarnation: int, address: Address, report: dict[str, Any]
    ) -> tuple[int, int] | None:
        """A peer's report. (steps of all slots, hash of the members); None: it is removed."""
        entry = self._slots[slot]
        if not entry.alive or entry.incarnation != incarnation:
            return None
        entry.heard, entry.steps, entry.report = self._clock(), report["steps"], report
        entry.joins, entry.address = False, address
        names = tuple(name for name, _ in self.members())
        return sum(entry.steps for entry in self._slots.values()), hash(names)

    def members(self) -> list[tuple[str, Address]]:
        """(name, address) of the peers that train and are not silent."""
        return [
            (f"{slot}.{entry.incarnation}", entry.address)
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
        return entry.alive and self._clock() - heard <= self._silent_s
