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
_NOBODY = {"generation": -1, "steps": 0, "alive": False, "ready": False, "member": False}


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
      live: {rank: peer} of those that run.
      ended: peers at the end of the run, which give their last parameters.
      gone: ranks whose peers died or left, and were not replaced.
      deaths: number of them in each rank.
      unsaved: peers that were killed because they did not end.
      looked: {rank: what is known of it}, see `Roster.look`.
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
        self._leaving: set[int] = set()  # ranks whose peers `resize` has told to leave
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
        ranks = sorted(of_before)[:wanted]
        for rank in ranks + peer_run.free_ranks(ranks, wanted - len(ranks)):
            self._start(rank, copy=self.start > 0 and rank not in of_before)

    def _start(self, rank: int, copy: bool) -> None:
        """Start a peer in the rank; with ``copy`` it joins as a copy of a live one."""
        peers, before = self.config.peers, self.of(rank)
        made = events.generations(self.folder / FOLDER / str(rank))
        place = Place(
            self.config.to_dict(),
            str(self.folder),
            rank,
            max([before["generation"], *made]) + 1,
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
        self.roster.add(rank, place.generation, copy)
        self.live[rank] = _Live(actor, actor.call("train"))
        self.gone.discard(rank)

    def collect(self) -> None:
        """Wait a moment for peers that end, and replace those that died."""
        calls = {rank: one.training for rank, one in self.live.items()}
        for rank in self._actors.ended(calls, _LOOK_S):
            one = self.live.pop(rank)
            self.roster.remove(rank)
            leaves = rank in self._leaving
            self._leaving.discard(rank)
            try:
                result = one.training.result()
            except Unanswered as error:
                one.actor.kill()  # it may have failed only to answer, and another comes
                self.deaths[rank] += 1
                self._say(f"peer {rank} {error}; {len(self.live)} go on")
                self._replace(rank, leaves or self.deaths[rank] > self.config.peers.restarts)
                continue
            if result["how"] == "end":
                self.ended.append(one.actor)
                continue
            one.actor.kill()
            if result["how"] == "lag":
                self._say(f"peer {rank} has lagged too far behind; {len(self.live)} go on")
                self._replace(rank, leaves)
            elif result["how"] == "leave":
                self.gone.add(rank)
                steps = result["steps"]
                self._say(f"peer {rank} has left after {steps} steps; {len(self.live)} go on")

    def _replace(self, rank: int, leaves: bool) -> None:
        """Start another peer in the place of one that is gone, unless it should leave."""
        self.gone.add(rank)
        if self.live and self.step() < self._steps and not leaves:
            self._start(rank, copy=True)
            self._say(f"peer {rank} starts again and joins with a copy of a live peer")

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
        for rank in peer_run.free_ranks(list(self.live), wanted - len(stay)):
            self._say(f"peer {rank} starts and joins with a copy of a live peer")
            self._start(rank, copy=True)
        for rank in stay[wanted:]:
            self._leaving.add(rank)
            self.live[rank].actor.call("leave", "leave")

    def stop(self) -> None:
        """Let all peers save and end."""
        for one in self.live.values():
            one.actor.call("leave", "stop")

    def kill_the_rest(self, late: bool) -> None:
        """Kill the peers that still run: too ``late``, or there is nobody to join any more."""
        self.unsaved += len(self.live)
        peers = self.config.peers
        for rank, one in self.live.items():
            why = "had not begun to train when the others ended"
            if late:
                why = f"did not end within peers.stop_s ({peers.stop_s:g} s)"
            elif self.of(rank)["ready"]:
                why = f"has been silent for peers.silent_s ({peers.silent_s:g} s)"
            self._say(f"peer {rank} {why} and is killed")
            one.actor.kill()
        self.live.clear()

    # --- What is known of all ---------------------------------------------------------------------

    def look(self) -> dict[int, dict[str, Any]]:
        """What is known of all ranks now, which `looked` keeps; says what has changed."""
        self.looked = self.roster.look()
        for rank, one in self.looked.items():
            self._say_changes(rank, one)
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

    def of(self, rank: int) -> dict[str, Any]:
        """What is known of a rank, see `Roster.look`."""
        return self.looked.get(rank, {"rank": rank, **_NOBODY})

    def step(self) -> int:
        """Common progress in steps of the run."""
        steps = sum(one["steps"] for one in self.looked.values())
        self._reached = max(self._reached, steps // self.config.num_replicas)
        return self._reached

    def trains(self) -> bool:
        """Whether somebody trains, as far as anybody knows."""
        return any(self.of(rank)["member"] for rank in self.live)

    def _say_changes(self, rank: int, one: dict[str, Any]) -> None:
        if rank not in self.live:
            return
        name = f"peer {rank}.{one['generation']}"
        if one["ready"] and not one["member"]:
            self._say_once(
                f"{name} is silent", f"peer {rank} is silent; the others go on without it"
            )
        if one["member"] and one["generation"]:
            self._say_once(
                f"{name} trains", f"peer {rank} trains again, as {rank}.{one['generation']}"
            )
        if one["member"] and f"{name} is silent" in self._said:
            self._said.discard(f"{name} is silent")
            self._say(f"peer {rank} is back")

    def _say_once(self, what: str, words: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(words)
