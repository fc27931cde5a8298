"""A peer: an actor that trains in one of its threads and meets others in the rest."""

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

from decent_jax.actors import handles, messages
from decent_jax.actors.process import say
from decent_jax.peers.between import Between, NotJoined, PeerRunner, Pulse
from decent_jax.peers.boundary import on_host
from decent_jax.peers.formats import Format
from decent_jax.peers.reporter import Reporter, state_to_join
from decent_jax.peers.rule import Joined, Meetings
from decent_jax.peers.setup import Place, forget, is_weighted, open_peer
from decent_jax.peers.talk import Answerer, Asker
from decent_jax.train import loop


class Peer:
    """One peer. Ray calls its methods from threads of a pool; `train` takes one of them for good.

    Args:
      place: which peer it is.
      roster: the actor of `decent_jax.peers.roster.Roster`.
      secret: that peers of this run know.
      host: gives the IP address of this machine.
    """

    def __init__(
        self,
        place: Place,
        roster: handles.Actor,
        secret: bytes,
        host: Callable[[], str] = handles.own_host,
    ):
        self._place, self._roster, self._secret, self._host = place, roster, secret, host
        peers = place.config["peers"]
        form, weighted = Format(peers["wire"]), is_weighted(place.config)
        self._meetings = Meetings(place.name, form, peers["meet_s"], weighted=weighted)
        self._asker = Asker(self._meetings, secret, peers)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._between: Between | None = None  # once the run is open, and
        self._reporter: Reporter | None = None  # what reports of it
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
            between = Between(
                experiment, place, pulse, self._meetings, self._jobs, self._asker.ask, join
            )
            self._between = between
            between.leaving = self._leaving  # `leave` sets this one first, and may be in between
            answerer = Answerer(
                self._meetings,
                peers["meet_s"],
                lambda: self._leaving != "stop",
                lambda: self._state(between),
            )
            listener, address = messages.listen(self._host(), self._secret, answerer.serve)
            self._reporter = Reporter(
                place, address, self._roster, between, pulse, self._asker, self.leave
            )
            for target in (self._reporter.run, self._work):
                threading.Thread(target=target, daemon=True).start()
            with listener:
                try:
                    return loop.train(PeerRunner(experiment, work, between), work)
                except NotJoined:  # the run goes on, or resumes, without its state
                    return {"steps": place.start, "how": self._leaving or "stop"}
                finally:
                    self._reporter.stopped.set()
                    self._jobs.put(None)

    def published(self) -> list[Any] | None:
        """The arrays published last, or at the end the last ones."""
        if self._between is not None and self._between.final is not None:
            return self._between.final
        copy = self._meetings.copy
        return None if copy is None else copy.arrays

    def report(self) -> dict[str, Any]:
        """See `Reporter.report`; nothing where this peer does not train yet."""
        return self._reporter.report() if self._reporter else {}

    def leave(self, how: str = "leave") -> None:
        """End: "leave" after a last meeting, "stop" at once and for good, "lag" without saving."""
        if self._leaving != "stop":
            self._leaving = how
        if self._between is not None:
            self._between.leaving = self._leaving

    # --- Its own threads --------------------------------------------------------------------------

    def _work(self) -> None:
        """Publish and ask, one after the other."""
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # must not end the thread: others would wait for ever
                say(f"{type(error).__name__}: {error}")

    def _state(self, between: Between) -> Joined | None:
        if not between.ready:
            return None
        try:
            found = between.want_state().result(timeout=self._place.config["peers"]["join_s"])
        except (RuntimeError, TimeoutError):  # it has ended, or its steps take longer
            return None
        return found._replace(arrays=on_host(found.arrays))
