"""Supervision of the peers of a session: start, watch, replace, resize and end them."""

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from decent_jax.actors.handles import Actor, Actors, Call, Unanswered
from decent_jax.actors.ray_cluster import reserved
from decent_jax.ground.connections import Address
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.json_files import Json, is_whole, read_json
from decent_jax.ground.pytree import PyTree
from decent_jax.peers import Config, events, peer_run
from decent_jax.peers.membership import Membership
from decent_jax.peers.peer import Peer
from decent_jax.peers.peer_run import FOLDER, Place

_LOOK_S = 0.2
_THREADS = 8  # of a peer, which trains, reports and sends its parameters
_WHY = {  # reasons for the end of a peer, by the ``how`` that `Peer.train` returns
    "lag": "has lagged too far behind",
    "join": "received no initial state",
    "leave": "has left after {steps} steps",
}
_NOBODY = {"generation": -1, "steps": 0, "alive": False, "ready": False, "member": False}


class _Live(NamedTuple):
    """A running peer."""

    actor: Actor
    training: Call  # of `Peer.train`


class Supervisor:
    """Starts, watches and replaces the peers of a session.

    Args:
      config: the run's config.
      folder: the run directory.
      steps: steps of the run, after which no peer is replaced.
      before: the manifest from earlier sessions.
      say: callback that prints a line for the user.
      actors: the `Actors` that start the peers.
      data: facts about the data on which all peers must agree; None: they are not compared.
      need: bytes that the arrays of one peer take.

    Attributes:
      membership: the membership to which the peers report.
      secret: the secret that authenticates peers to each other and to the membership.
      live: {rank: peer} of the running peers.
      ended: peers that have finished and still serve their last parameters.
      gone: ranks whose peers died or left and were not replaced.
      deaths: number of deaths per rank.
      unsaved: number of peers that were killed because they did not end.
      status: {rank: latest status}, see `Membership.status`.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        steps: int,
        before: Json,
        say: Callable[[str], None],
        actors: Actors,
        data: dict[str, str] | None = None,
        need: float = 0.0,
    ):
        self.config, self.folder, self._steps, self._before = config, folder, steps, before
        self._say, self._actors, self._data = say, actors, data
        self._memory = reserved(config.ray, need)
        self.secret = secrets.token_bytes(32)
        self.streams = before.get("streams", config.num_replicas)
        self.live: dict[int, _Live] = {}
        self.ended: list[Actor] = []
        self.gone: set[int] = set()
        self.deaths: Counter[int] = Counter()
        self.unsaved = 0
        self._leaving: set[int] = set()  # ranks that `resize` has asked to leave
        self._first: set[int] = set()  # ranks with which the session begins
        self._said: set[str] = set()
        self._reached = 0
        self.membership = Membership(
            config.peers, config.num_replicas, peer_run.known_steps(folder, before)
        )
        self.status = self.membership.status()
        self.start = min(self.step(), steps)

    # --- Starts and ends --------------------------------------------------------------------------

    def begin(self, address: Address) -> None:
        """Start the peers of the session: those that resume from their checkpoints, and new ones.

        Args:
          address: the address at which the membership listens.
        """
        self._address = address
        wanted = peer_run.count_of(self.config)
        saved = peer_run.resumed(self.folder, self._before)
        ranks = sorted(saved)[:wanted]
        for rank in ranks + peer_run.free_ranks(ranks, wanted - len(ranks)):
            seeded = None if saved else 0
            self._start(rank, self.config.peers.max_lag if rank in saved else seeded)
            self._first.add(rank)

    def _start(self, rank: int, fresh: int | None = None) -> None:
        """Start a peer; for ``fresh`` see `Membership.add`."""
        ray, before = self.config.ray, self.of(rank)
        earlier = events.generations(self.folder / FOLDER / str(rank))
        place = Place(
            self.config,
            str(self.folder),
            rank,
            max([before["generation"], *earlier]) + 1,
            before["steps"] if fresh is None else None,
            self.streams,
            self.step() * self.config.num_replicas,
            self._data,
        )
        actor = self._actors.start(
            *(Peer, place, self._address, self.secret),
            log=place.folder / "log.txt",
            sigterm="leave",
            cpus=ray.cpus,
            gpus=ray.gpus,
            memory=self._memory,
            threads=_THREADS,
        )
        self.membership.add(rank, place.generation, fresh)
        self.live[rank] = _Live(actor, actor.call("train"))
        self.gone.discard(rank)

    def collect(self) -> None:
        """Wait briefly for peers to end, and replace those that died.

        Raises:
          ConfigError: a peer that starts with the session cannot do what the config asks of it.
        """
        calls = {rank: peer.training for rank, peer in self.live.items()}
        for rank in self._actors.ended(calls, _LOOK_S):
            peer = self.live.pop(rank)
            self.membership.remove(rank)
            leaves, is_first = rank in self._leaving, rank in self._first
            self._leaving.discard(rank)
            self._first.discard(rank)
            try:
                result = peer.training.result()
            except Unanswered as error:
                cause = getattr(error, "cause", None)
                if is_first and isinstance(cause, ConfigError):  # its successor would fail, too
                    raise ConfigError(f"peer {rank}: {cause}") from None
                result = {"how": "die", "why": str(error)}
            how = result["how"]
            if how == "end":
                self.ended.append(peer.actor)
                continue
            peer.actor.kill()  # it may still run, and will be replaced
            if how == "stop":
                continue
            why = _WHY.get(how, "{why}").format(**result)
            self._say(f"peer {rank} {why}; {len(self.live)} continue")
            self.gone.add(rank)
            if how in ("die", "join"):
                self.deaths[rank] += 1
            if how != "leave" and not leaves and self.deaths[rank] <= self.config.peers.restarts:
                self._replace(rank)
        if not self.membership.is_hopeful():
            self.kill_the_rest(late=False)

    def _replace(self, rank: int) -> None:
        if self.membership.is_hopeful() and self.step() < self._steps:
            self._start(rank)
            self._say(f"peer {rank} restarts and joins with the state of a live peer")

    def resize(self) -> None:
        """Apply the last request of ``decent-jax peers resize``, if there is a new one."""
        path = self.folder / FOLDER / peer_run.COUNT
        if not path.exists():
            return
        wanted: object = None
        with contextlib.suppress(OSError, DataError, LookupError, TypeError):
            wanted = read_json(path)["count"]
        if not is_whole(wanted, 1, peer_run.MOST):
            self._say_once(str(path), f"{path} holds no number of peers and is ignored")
            return
        path.unlink()
        stay = sorted(self.live.keys() - self._leaving)
        for rank in peer_run.free_ranks(list(self.live), wanted - len(stay)):
            self._say(f"peer {rank} starts and joins with the state of a live peer")
            self._start(rank)
        for rank in stay[wanted:]:
            self._leaving.add(rank)
            self.live[rank].actor.call("leave", "leave")

    def stop(self) -> None:
        """Ask all peers to save and end."""
        for peer in self.live.values():
            peer.actor.call("leave", "stop")

    def kill_the_rest(self, late: bool) -> None:
        """Kill all running peers, which are ``late`` or will find no peer with a state to take."""
        self.unsaved += len(self.live)
        peers = self.config.peers
        for rank, peer in self.live.items():
            why = "had not begun to train when the others ended"
            if late:
                why = f"did not end within 6 times peers.exchange_s ({peers.patience_s:g} s)"
            elif self.of(rank)["ready"]:
                why = f"has been silent for peers.silent_s ({peers.silent_s:g} s)"
            self._say(f"peer {rank} {why} and is killed")
            peer.actor.kill()
        self.live.clear()

    # --- Status -----------------------------------------------------------------------------------

    def refresh(self) -> dict[int, Json]:
        """Update `status`, report changes, and return it."""
        self.status = self.membership.status()
        for rank, status in self.status.items():
            self._say_changes(rank, status)
        return self.status

    def snapshots(self, actors: list[Actor]) -> list[PyTree]:
        """The latest snapshots of these peers.

        No peer waits for this; peers that do not answer within ``peers.exchange_s`` are left out.
        """
        seconds = self.config.peers.exchange_s
        calls = {k: actor.call("published") for k, actor in enumerate(actors)}
        snapshots = []
        ended = self._actors.ended(calls, seconds, count=len(calls))
        for k in ended:
            with contextlib.suppress(Unanswered):
                snapshots.append(calls[k].result(seconds))
        if len(ended) < len(calls):
            self._say(
                f"{len(calls) - len(ended)} of {len(calls)} peers sent no parameters within "
                f"peers.exchange_s ({seconds:g} s), so the consensus model lacks them; raise it "
                "if links are slow"
            )
        return [snapshot for snapshot in snapshots if snapshot is not None]

    def of(self, rank: int) -> Json:
        """The status of a rank, see `Membership.status`."""
        return self.status.get(rank, {"rank": rank, **_NOBODY})

    def step(self) -> int:
        """Common progress in steps of the run; it never decreases."""
        steps = sum(status["steps"] for status in self.status.values())
        self._reached = max(self._reached, steps // self.config.num_replicas)
        return self._reached

    def trains(self) -> bool:
        """Whether any peer trains, as far as the membership knows."""
        return any(self.of(rank)["member"] for rank in self.live)

    def _say_changes(self, rank: int, status: Json) -> None:
        if rank not in self.live:
            return
        name = f"peer {rank}.{status['generation']}"
        if status["ready"] and not status["member"]:
            self._say_once(
                f"{name} is silent", f"peer {rank} is silent; the others continue without it"
            )
        if status["member"] and status["generation"]:
            self._say_once(
                f"{name} trains", f"peer {rank} trains again, as {rank}.{status['generation']}"
            )
        if status.get("lost", 0) >= 3 and not status.get("averaged"):
            seconds = self.config.peers.exchange_s
            self._say_once(
                f"{name} is late",
                f"peer {rank} has finished none of its averages within peers.exchange_s "
                f"({seconds:g} s); raise it if its links are slow",
            )
        if status["member"] and f"{name} is silent" in self._said:
            self._said.discard(f"{name} is silent")
            self._say(f"peer {rank} is back")

    def _say_once(self, event: str, words: str) -> None:
        if event not in self._said:
            self._said.add(event)
            self._say(words)
