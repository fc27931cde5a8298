"""A peer is an actor: one thread trains, and the others serve requests of other peers."""

import functools
import queue
import threading
from collections.abc import Callable

from decent_jax.actors import handles
from decent_jax.actors.ray_cluster import say
from decent_jax.ground import connections
from decent_jax.ground.connections import Address
from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.peers.exchange import Answerer, Asker
from decent_jax.peers.membership import MembershipClient, Reporter, state_to_join
from decent_jax.peers.peer_run import CommonProgress, Place, forget, open_peer
from decent_jax.peers.protocol import Averager, Format, JoinState
from decent_jax.peers.step_boundary import NotJoined, PeerRunner, StepBoundary, on_host
from decent_jax.train import loop


class Peer:
    """The Ray actor of one peer.

    Ray calls its methods from a pool of threads, one of which runs `train`.

    Args:
      place: the identity of the peer.
      membership: the address of the `decent_jax.peers.membership.Membership`.
      secret: shared by all peers of the run.
      host: function that returns the IP address of this machine.
    """

    def __init__(
        self,
        place: Place,
        membership: Address,
        secret: bytes,
        host: Callable[[], str] = handles.own_host,
    ):
        self._place, self._secret, self._host = place, secret, host
        peers = place.config.peers
        self._membership = MembershipClient(membership, secret, peers.silent_s / 2)
        form = Format(place.config.codec, place.config.seed)
        self._averager = Averager(place.name, form, peers.exchange_s, peers.silent_s)
        self._asker = Asker(self._averager, secret, peers)
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._boundary: StepBoundary | None = None  # once the run is open
        self._leaving: str | None = None

    # --- Called through Ray -----------------------------------------------------------------------

    def train(self) -> Json:
        """Train; returns steps, and how it ended: "end", "join" (no state), or as in `leave`."""
        place, peers = self._place, self._place.config.peers
        if place.start is not None:
            forget(place.folder, place.start)
        run = place, self._membership, self._secret, lambda: self._leaving
        join = functools.partial(state_to_join, *run)
        with open_peer(place) as (experiment, work):
            n = place.config.num_replicas
            common = CommonProgress(n, experiment.steps // n)
            boundary = StepBoundary(
                experiment, place, common, self._averager, self._jobs, self._asker.ask, join
            )
            self._boundary = boundary
            boundary.leaving = self._leaving  # `leave` may have been called just before
            answerer = Answerer(
                self._averager,
                peers.exchange_s,
                lambda: self._leaving != "stop",
                lambda: self._state(boundary),
            )
            listener, address = connections.listen(self._host(), self._secret, answerer.serve)
            reporter = Reporter(place, address, self._membership, boundary, common, self.leave)
            for target in (reporter.run, self._work):
                threading.Thread(target=target, daemon=True).start()
            with listener:
                try:
                    return loop.train(PeerRunner(experiment, work, boundary), work)
                except NotJoined:  # the run continues, or resumes, without this peer's state
                    return {"steps": common.own, "how": self._leaving or "join"}
                finally:
                    reporter.stopped.set()
                    self._jobs.put(None)

    def published(self) -> list[PyTree] | None:
        """The arrays of the last snapshot or, once training has ended, the last parameters."""
        if self._boundary is not None and self._boundary.final is not None:
            return self._boundary.final
        snapshot = self._averager.snapshot
        return None if snapshot is None else snapshot.arrays

    def leave(self, how: str = "leave") -> None:
        """Ask the peer to end: "leave" after a last average, "stop" at once, "lag" unsaved."""
        if self._leaving != "stop":
            self._leaving = how
        if self._boundary is not None:
            self._boundary.leaving = self._leaving

    # --- Its own threads --------------------------------------------------------------------------

    def _work(self) -> None:
        """Run the jobs (publish, ask) one after the other."""
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # must not end the thread: other jobs would wait forever
                say(f"{type(error).__name__}: {error}")

    def _state(self, boundary: StepBoundary) -> JoinState | None:
        if not boundary.ready:
            return None
        try:
            state = boundary.want_state().result(timeout=self._place.config.peers.patience_s)
        except (RuntimeError, TimeoutError):  # it has ended, or its steps take too long
            return None
        return state._replace(arrays=on_host(state.arrays))
