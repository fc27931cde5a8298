"""The peers of a session: who is started, watched, replaced, told to leave, and ended."""

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from decent_jax.actors.handles import Actor, Actors, Call, Unanswered
from decent_jax.ground.connections import Address
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import is_whole, read_json
from decent_jax.peers import events, peer_run
from decent_jax.peers.peer import Peer
from decent_jax.peers.peer_run import FOLDER, Place
from decent_jax.peers.roster import Roster

_LOOK_S = 0.2
_THREADS = 8  # of a peer: it trains, reports, gives its copy
_NOBODY = {"incarnation": -1, "steps": 0, "alive": False, "ready": False, "member": False}


class _Live(NamedTuple):
    """A peer that was started."""

    actor: Actor
    training: Call  # of `Peer.train`


class Crew:
    """Who trains, and what becomes of them.

    Args:
      config: of the run.
      folder: of the run.
      steps: of the run; nobody is replaced after them.
      before: manifest of the sessions before this one.
      say: shows a line to the user.
      actors: starts them.

    Attributes:
      roster: what the peers report.
      secret: with which they ask each other and the roster.
      live: {slot: peer} of those that run.
      ended: peers at the end of the run, which give their last parameters.
      gone: slots whose peers died or left, and were not replaced.
      deaths: number of them in each slot.
      unsaved: peers that were killed because they did not end.
      looked: {slot: what is known of it}, see `Roster.look`.
    """

    def __init__(
        self,
        config: ConfigDict,
        folder: Path,
        steps: int,
        before: dict[str, Any],
        say: Callable[[str], None],
        actors: Actors,
    ):
        self.config, self.folder, self._steps, self._before = config, folder, steps, before
        self._say, self._actors = say, actors
        self.secret = secrets.token_bytes(32)
        self.streams = before.get("streams", config.num_replicas)
        self.live: dict[int, _Live] = {}
        self.ended: list[Actor] = []
        self.gone: set[int] = set()
        self.deaths: Counter[int] = Counter()
        self.unsaved = 0
        self._leaving: set[int] = set()  # slots whose peers `resize` has told to leave
        self._said: set[str] = set()
        self._reached = 0
        self.roster = Roster(config.peers.silent_s, peer_run.known_steps(folder, before))
        self.looked = self.roster.look()
        self.start = min(self.step(), steps)

    # --- Starts and ends --------------------------------------------------------------------------

    def begin(self, address: Address) -> None:
        """Start the peers of the session: those that go on from their checkpoints, and new ones.

        Args:
          address: at which they reach the roster.
        """
        self._address = address
        wanted = peer_run.count_of(self.config)
        of_before = peer_run.resumed(self.folder, self._before)
        slots = sorted(of_before)[:wanted]
        for slot in slots + peer_run.free_slots(slots, wanted - len(slots)):
            self._start(slot, copy=self.start > 0 and slot not in of_before)

    def _start(self, slot: int, copy: bool) -> None:
        """Start a peer in the slot; with ``copy`` it joins as a copy of a live one."""
        peers, before = self.config.peers, self.of(slot)
        made = events.incarnations(self.folder / FOLDER / str(slot))
        place = Place(
            self.config.to_dict(),
            str(self.folder),
            slot,
            max([before["incarnation"], *made]) + 1,
            before["steps"] if copy else None,
            self.streams,
            self.step() * self.config.num_replicas,
        )
        actor = self._actors.start(
            *(Peer, place, self._address, self.secret),
            log=place.folder / "log.txt",
            sigterm="leave",
            cpus=peers.cpus,
            gpus=peers.gpus,
            threads=_THREADS,
        )
        self.roster.add(slot, place.incarnation, copy)
        self.live[slot] = _Live(actor, actor.call("train"))
        self.gone.discard(slot)

    def collect(self) -> None:
        """Wait a moment for peers that end, and replace those that died."""
        calls = {slot: one.training for slot, one in self.live.items()}
        for slot in self._actors.ended(calls, _LOOK_S):
            one = self.live.pop(slot)
            self.roster.remove(slot)
            leaves = slot in self._leaving
            self._leaving.discard(slot)
            try:
                result = one.training.result()
            except Unanswered as error:
                one.actor.kill()  # it may have failed only to answer, and another comes
                self.deaths[slot] += 1
                self._say(f"peer {slot} {error}; {len(self.live)} go on")
                self._replace(slot, leaves or self.deaths[slot] > self.config.peers.restarts)
                continue
            if result["how"] == "end":
                self.ended.append(one.actor)
                continue
            one.actor.kill()
            if result["how"] == "lag":
                self._say(f"peer {slot} has lagged too far behind; {len(self.live)} go on")
                self._replace(slot, leaves)
            elif result["how"] == "leave":
                self.gone.add(slot)
                steps = result["steps"]
                self._say(f"peer {slot} has left after {steps} steps; {len(self.live)} go on")

    def _replace(self, slot: int, leaves: bool) -> None:
        """Start another peer in the place of one that is gone, unless it should leave."""
        self.gone.add(slot)
        if self.live and self.step() < self._steps and not leaves:
            self._start(slot, copy=True)
            self._say(f"peer {slot} starts again and joins with a copy of a live peer")

    def resize(self) -> None:
        """Follow ``decent-jax peers resize``."""
        path = self.folder / FOLDER / peer_run.COUNT
        if not path.exists():
            return
        wanted: Any = None
        with contextlib.suppress(OSError, DataError, LookupError, TypeError):
            wanted = read_json(path)["count"]
        if not is_whole(wanted, 1, peer_run.MOST):
            self._say_once(str(path), f"{path} holds no number of peers; it is ignored")
            return
        path.unlink()
        stay = sorted(self.live.keys() - self._leaving)
        for slot in peer_run.free_slots(list(self.live), wanted - len(stay)):
            self._say(f"peer {slot} starts and joins with a copy of a live peer")
            self._start(slot, copy=True)
        for slot in stay[wanted:]:
            self._leaving.add(slot)
            self.live[slot].actor.call("leave", "leave")

    def stop(self) -> None:
        """Let all peers save and end."""
        for one in self.live.values():
            one.actor.call("leave", "stop")

    def kill_the_rest(self, late: bool) -> None:
        """Kill the peers that still run: too ``late``, or there is nobody to join any more."""
        self.unsaved += len(self.live)
        peers = self.config.peers
        for slot, one in self.live.items():
            why = "had not begun to train when the others ended"
            if late:
                why = f"did not end within peers.stop_s ({peers.stop_s:g} s)"
            elif self.of(slot)["ready"]:
                why = f"has been silent for peers.silent_s ({peers.silent_s:g} s)"
            self._say(f"peer {slot} {why} and is killed")
            one.actor.kill()
        self.live.clear()

    # --- What is known of all ---------------------------------------------------------------------

    def look(self) -> dict[int, dict[str, Any]]:
        """What is known of all slots now, which `looked` keeps; says what has changed."""
        self.looked = self.roster.look()
        for slot, one in self.looked.items():
            self._say_changes(slot, one)
        return self.looked

    def copies(self, actors: list[Actor]) -> list[Any]:
        """The copies that these peers have published.

        No peer waits for this; a peer that gives none within ``peers.meet_s`` is left out.
        """
        seconds = self.config.peers.meet_s
        calls = {k: actor.call("published") for k, actor in enumerate(actors)}
        found = []
        for k in self._actors.ended(calls, seconds, count=len(calls)):
            with contextlib.suppress(Unanswered):
                found.append(calls[k].result(seconds))
        return [copy for copy in found if copy is not None]

    def of(self, slot: int) -> dict[str, Any]:
        """What is known of a slot, see `Roster.look`."""
        return self.looked.get(slot, {"slot": slot, **_NOBODY})

    def step(self) -> int:
        """Common progress in steps of the run."""
        steps = sum(one["steps"] for one in self.looked.values())
        self._reached = max(self._reached, steps // self.config.num_replicas)
        return self._reached

    def trains(self) -> bool:
        """Whether somebody trains, as far as anybody knows."""
        return any(self.of(slot)["member"] for slot in self.live)

    def _say_changes(self, slot: int, one: dict[str, Any]) -> None:
        if slot not in self.live:
            return
        name = f"peer {slot}.{one['incarnation']}"
        if one["ready"] and not one["member"]:
            self._say_once(
                f"{name} is silent", f"peer {slot} is silent; the others go on without it"
            )
        if one["member"] and one["incarnation"]:
            self._say_once(
                f"{name} trains", f"peer {slot} trains again, as {slot}.{one['incarnation']}"
            )
        if one["member"] and f"{name} is silent" in self._said:
            self._said.discard(f"{name} is silent")
            self._say(f"peer {slot} is back")

    def _say_once(self, what: str, words: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(words)
