"""A peer: an actor that trains in one of its threads and meets others in the rest."""

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

from decent_jax.actors import handles
from decent_jax.actors.ray_cluster import say
from decent_jax.ground import connections
from decent_jax.ground.connections import Address
from decent_jax.peers.peer_run import Place, forget, open_peer
from decent_jax.peers.roster import Reporter, RosterLink, state_to_join
from decent_jax.peers.rule import Format, Joined, Meetings
from decent_jax.peers.step_boundary import NotJoined, PeerRunner, Pulse, StepBoundary, on_host
from decent_jax.peers.talk import Answerer, Asker
from decent_jax.train import loop


class Peer:
    """One peer. Ray calls its methods from threads of a pool; `train` takes one of them for good.

    Args:
      place: which peer it is.
      roster: the address of the `decent_jax.peers.roster.Roster`.
      secret: that peers of this run know.
      host: gives the IP address of this machine.
    """

    def __init__(
        self,
        place: Place,
        roster: Address,
        secret: bytes,
        host: Callable[[], str] = handles.own_host,
    ):
        self._place, self._secret, self._host = place, secret, host
        peers = place.config["peers"]
        self._roster = RosterLink(roster, secret, peers["silent_s"])
        form = Format(peers["codec"], place.config["seed"])
        self._meetings = Meetings(place.name, form, peers["meet_s"])
        self._asker = Asker(self._meetings, secret, peers)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._boundary: StepBoundary | None = None  # once the run is open
        self._leaving: str | None = None

    # --- Called by others -------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """The whole run of this peer; how it ended and after how many steps."""
        place, peers = self._place, self._place.config["peers"]
        join = None
        if place.start is not None:
            forget(place.folder, place.start)
            given = place, self._roster, self._secret, lambda: self._leaving
            join = functools.partial(state_to_join, *given)
        with open_peer(place) as (experiment, work):
            n = place.config["num_replicas"]
            pulse = Pulse(n, experiment.steps // n)
            boundary = StepBoundary(
                experiment, place, pulse, self._meetings, self._jobs, self._asker.ask, join
            )
            self._boundary = boundary
            boundary.leaving = self._leaving  # `leave` sets this one first, and may be in between
            answerer = Answerer(
                self._meetings,
                peers["meet_s"],
                lambda: self._leaving != "stop",
                lambda: self._state(boundary),
            )
            listener, address = connections.listen(self._host(), self._secret, answerer.serve)
            reporter = Reporter(
                place, address, self._roster, boundary, pulse, self._asker, self.leave
            )
            for target in (reporter.run, self._work):
                threading.Thread(target=target, daemon=True).start()
            with listener:
                try:
                    return loop.train(PeerRunner(experiment, work, boundary), work)
                except NotJoined:  # the run goes on, or resumes, without its state
                    return {"steps": place.start, "how": self._leaving or "stop"}
                finally:
                    reporter.stopped.set()
                    self._jobs.put(None)

    def published(self) -> list[Any] | None:
        """The arrays published last, or at the end the last ones."""
        if self._boundary is not None and self._boundary.final is not None:
            return self._boundary.final
        copy = self._meetings.copy
        return None if copy is None else copy.arrays

    def leave(self, how: str = "leave") -> None:
        """End: "leave" after a last meeting, "stop" at once and for good, "lag" without saving."""
        if self._leaving != "stop":
            self._leaving = how
        if self._boundary is not None:
            self._boundary.leaving = self._leaving

    # --- Its own threads --------------------------------------------------------------------------

    def _work(self) -> None:
        """Publish and ask, one after the other."""
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # must not end the thread: others would wait for ever
                say(f"{type(error).__name__}: {error}")

    def _state(self, boundary: StepBoundary) -> Joined | None:
        if not boundary.ready:
            return None
        try:
            found = boundary.want_state().result(timeout=self._place.config["peers"]["join_s"])
        except (RuntimeError, TimeoutError):  # it has ended, or its steps take longer
            return None
        return found._replace(arrays=on_host(found.arrays))
