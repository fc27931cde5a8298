"""A peer: a Ray actor that trains in one of its threads and meets others in the rest."""

import math
import queue
import random
import signal
import threading
import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from decent_jax.peers.between import Between, NotJoined, PeerRunner, Pulse
from decent_jax.peers.boundary import on_host
from decent_jax.peers.formats import Format, Message
from decent_jax.peers.partners import chances
from decent_jax.peers.rule import Joined, Meetings, Offer
from decent_jax.peers.setup import Place, enter, forget, is_weighted, open_peer
from decent_jax.train import loop


class Peer:
    """One peer. Ray calls its methods from threads of a pool; `train` takes one of them for good.

    Args:
      place: which peer it is.
      roster: the actor of `decent_jax.peers.roster.Roster`.
    """

    def __init__(self, place: Place, roster: Any):
        enter(place.folder / "log.txt", place.launched_from)
        self._place, self._roster = place, roster
        self._peers = place.config["peers"]
        form, weighted = Format(self._peers["wire"]), is_weighted(place.config)
        self._meetings = Meetings(place.name, form, self._peers["meet_s"], weighted=weighted)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._members: list[tuple[str, Any]] = []
        self._avoided: dict[str, float] = {}  # until when, after it gave no answer
        self._seconds: dict[str, float] = {}  # that a meeting with a peer takes, as far as measured
        self._doubtful: list[tuple[str, Any]] = []
        self._stopped = threading.Event()
        self._between: Any = None  # a `Between`, and
        self._pulse: Any = None  # its `Pulse`, once the run is open
        self._leaving: str | None = None
        signal.signal(signal.SIGTERM, lambda *_: self.leave("leave"))

    # --- Called by others -------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """The whole run of this peer; how it ended and after how many steps."""
        place = self._place
        join = None
        if place.start is not None:
            forget(place.folder, place.start)
            join = self._joined
        with open_peer(place) as (experiment, work):
            n = place.config["num_replicas"]
            self._pulse = Pulse(n, experiment.steps // n)
            between = Between(
                experiment, place, self._pulse, self._meetings, self._jobs, self._ask, join
            )
            self._between = between
            between.leaving = self._leaving  # `leave` sets this one first, and may be in between
            threads = [
                threading.Thread(target=target, daemon=True) for target in (self._beat, self._work)
            ]
            for thread in threads:
                thread.start()
            try:
                return loop.train(PeerRunner(experiment, work, between), work)
            except NotJoined:  # the run goes on, or resumes, without its state
                return {"steps": place.start, "how": self._leaving or "stop"}
            finally:
                self._stopped.set()
                self._jobs.put(None)

    def meet(self, offer: Offer, message: list[Any]) -> tuple[Offer, list[Any]] | None:
        """The answer to another peer's question, or None: not now."""
        if self._leaving == "stop" or not self._meetings.agree(offer.meeting):
            return None
        try:
            theirs: Message = ray.get(message[0], timeout=self._peers["meet_s"])
        except RayError:
            self._meetings.give_up(offer.meeting, "lost")
            return None
        reply = self._meetings.answer(offer, theirs)
        if reply is None:
            return None
        return reply[0], [ray.put(reply[1])]

    def settle(self, meeting: str, understood: bool) -> bool:
        """Whether this peer adds its half of a meeting that it has answered."""
        return self._meetings.settle(meeting, understood)

    def state(self) -> Joined:
        """Its state at the next step boundary, for a peer that joins."""
        if self._between is None or not self._between.ready:
            raise RuntimeError("this peer does not train yet")
        found = self._between.want_state().result(timeout=self._peers["join_s"])
        return found._replace(arrays=on_host(found.arrays))

    def published(self) -> list[Any] | None:
        """The arrays published last, or at the end the last ones."""
        if self._between is not None and self._between.final is not None:
            return self._between.final
        copy = self._meetings.copy
        return None if copy is None else copy.arrays

    def report(self) -> dict[str, Any]:
        """This peer's report to the roster."""
        between = self._between
        found = {"steps": self._pulse.own if self._pulse else 0, **self._meetings.counts}
        if between is not None:
            found |= {"losses": between.losses, "stale": between.stale}
        return found | {"distance": self._meetings.distance, "seconds": dict(self._seconds)}

    def leave(self, how: str) -> None:
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
                self._say(f"{type(error).__name__}: {error}")

    def _ask(self) -> None:
        """Ask a random neighbour to meet, and meet."""
        waiting, self._doubtful = self._doubtful, []
        for meeting, settled in waiting:  # partners that were silent may have spoken since
            self._close(meeting, settled, 0)
        partner = self._partner()
        asked = self._meetings.ask() if partner else None
        if partner is None or asked is None:
            return
        offer, message = asked
        name, handle = partner
        began = time.monotonic()
        ends = began + self._peers["meet_s"]

        def left():
            return max(ends - time.monotonic(), 0.01)

        try:
            reply = ray.get(handle.meet.remote(offer, [ray.put(message)]), timeout=left())
            if reply is None:
                self._meetings.give_up(offer.meeting, "declined")
                return
            theirs: Any = ray.get(reply[1][0], timeout=left())
            seconds = time.monotonic() - began  # one that took longer by chance counts less
            self._seconds[name] = min(seconds, (self._seconds.get(name, seconds) + seconds) / 2)
            understood = self._meetings.hear(reply[0], theirs)
            settled = handle.settle.remote(offer.meeting, understood)
        except RayError as error:
            self._meetings.give_up(offer.meeting, "lost")
            self._avoid(name, error)
            return
        except Exception:  # it would be busy for ever
            self._meetings.give_up(offer.meeting, "lost")
            raise
        error = self._close(offer.meeting, settled, left())
        if error is not None:
            self._avoid(name, error)

    def _close(self, meeting: str, settled: Any, seconds: float) -> RayError | None:
        """Add the half if the partner says that it adds its own; returns why there is no answer."""
        accepted: Any = None
        error = None
        try:
            accepted = ray.get(settled, timeout=seconds)
        except GetTimeoutError as late:
            error = late
            self._doubtful.append((meeting, settled))
        except RayError as lost:
            error, accepted = lost, False
        self._meetings.close(meeting, accepted)
        return error

    def _partner(self) -> tuple[str, Any] | None:
        members = dict(self._members)
        now = time.monotonic()
        me, neighbours = self._meetings.me, self._peers["neighbours"]
        asked = chances(me, list(members), neighbours, self._seconds)
        asked = {name: p for name, p in asked.items() if self._avoided.get(name, 0) < now}
        if not asked:
            return None
        (name,) = random.choices(list(asked), list(asked.values()))
        return name, members[name]

    def _avoid(self, name: str, error: Exception) -> None:
        self._avoided[name] = time.monotonic() + self._peers["silent_s"]
        gone = isinstance(error, RayActorError)
        self._say(f"peer {name} {'is dead' if gone else 'gives no answer'}; others are asked")

    def _beat(self) -> None:
        """Report to the roster, and learn of all peers' progress and of who is alive."""
        peers, place = self._peers, self._place
        between, version = self._between, None
        reached, heard = 0, math.inf  # progress at the last answer, and when it came
        while not self._stopped.wait(peers["beat_s"]):
            if not between.ready:
                continue
            report = self.report()
            call = self._roster.beat.remote(place.slot, place.incarnation, report)
            try:
                answer = ray.get(call, timeout=peers["silent_s"])
                if answer is None:
                    self._say("another peer has this slot now")
                    self.leave("stop")
                    return
                all_steps, now = answer
                if now != version:
                    self._members = ray.get(
                        self._roster.members.remote(), timeout=peers["silent_s"]
                    )
                    between.alone = len(self._members) < 2
                    version = now
            except (GetTimeoutError, ActorUnavailableError):  # a network may come back
                continue
            except RayError:
                live = len(self._members)
                self._say(f"the roster is lost: {live} peers go on with the list they have")
                self._pulse.lost(live)
                return
            self._pulse.heard(all_steps, report["steps"])
            progress = self._pulse.progress()
            silent, lag = time.monotonic() - heard > peers["silent_s"], progress - reached
            if silent and lag > peers["max_lag"]:
                self._say(
                    f"the others made {lag} steps of progress while this peer was silent "
                    f"(peers.max_lag is {peers['max_lag']}): another one takes its place"
                )
                self._meetings.closed = True
                self._meetings.withdraw()
                self.leave("lag")
                return
            reached, heard = progress, time.monotonic()

    def _joined(self) -> Joined | None:
        """The state of a peer; waits for one that trains, unless all others wait, too."""
        ends = time.monotonic() + self._peers["start_s"]
        while (joined := self._copied()) is None:
            hopeful = ray.get(self._roster.is_hopeful.remote(), timeout=self._peers["join_s"])
            if not hopeful or time.monotonic() >= ends:
                self._say("nobody gives a copy: begins with its own parameters")
                return None
            if self._leaving is not None:
                raise NotJoined
            time.sleep(self._peers["beat_s"])
        return joined

    def _copied(self) -> Joined | None:
        """The state of a random live peer, if one gives it."""
        members = ray.get(self._roster.members.remote(), timeout=self._peers["join_s"])
        members = [m for m in members if m[0].partition(".")[0] != str(self._place.slot)]
        random.shuffle(members)
        for name, handle in members:
            began = time.monotonic()
            try:
                joined: Any = ray.get(handle.state.remote(), timeout=self._peers["join_s"])
            except (RayError, RuntimeError) as error:
                self._say(f"peer {name} gives no copy ({type(error).__name__})")
                continue
            seconds = time.monotonic() - began
            self._say(
                f"joins with a copy of peer {joined.donor} at step {joined.t} ({seconds:.1f} s)"
            )
            return joined
        return None

    def _say(self, message: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)
