"""What a peer does at its step boundaries, and its runner; nothing here waits for a message."""

import contextlib
import math
import queue
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax.optim import METHODS, trees
from decent_jax.peers import events
from decent_jax.peers.peer_run import Place
from decent_jax.peers.rule import Arrays, Joined, Meetings
from decent_jax.train import algorithm
from decent_jax.train.checkpoint import Saver
from decent_jax.train.experiment import Experiment
from decent_jax.train.goodput import Clock
from decent_jax.train.step import TrainState
from decent_jax.train.synchronous import Synchronous
from decent_jax.train.workdir import Workdir


class StateChanges:
    """What happens to a `TrainState` of one replica, (1, ...), between two of its steps.

    The live run and its replay share it.
    """

    def __init__(self, experiment: Experiment):
        self.placement = experiment.placement
        self._mixes_state = experiment.task.mixes_state
        self._rate = jax.jit(lambda t: jnp.asarray(experiment.rate(t), jnp.float32))
        place_all = self.placement.place_all
        method = METHODS[experiment.config.algorithm]
        assert method.meeting is not None  # `decent_jax.peers.peer_run.check`
        meet = jax.vmap(method.meeting(algorithm.numbers_of(experiment.config, method)))

        def met(averaged, own, copy, half):
            (params, model_state), (params_half, model_state_half) = averaged, half
            params, own = meet(params, own, copy[0], params_half)
            return place_all(((params, trees.add(model_state, model_state_half)), own))

        self._meet = jax.jit(met, donate_argnums=(0, 1))
        self.copy = jax.jit(lambda tree: place_all(jax.tree.map(jnp.copy, tree)))

    def averaged(self, state: TrainState) -> Any:
        """See the function `averaged`."""
        return averaged(self._mixes_state, state)

    def meet(self, state: TrainState, copy: Arrays, half: Arrays) -> TrainState:
        """The state after a meeting; donates the old one.

        Args:
          copy: what this peer brought.
          half: of the difference of the partner's copy to it, as far as their messages say.
        """
        old, own = self.averaged(state), state.opt_state.own
        copy, half = (
            jax.tree.unflatten(jax.tree.structure(old), [x[None] for x in arrays])
            for arrays in (copy, half)
        )
        (params, model_state), own = self._meet(old, own, copy, half)
        state = state._replace(params=params, opt_state=state.opt_state._replace(own=own))
        return state._replace(model_state=model_state) if self._mixes_state else state

    def at_progress(self, state: TrainState, progress: int) -> TrainState:
        """The state whose next update has the learning rate of this common progress, in steps."""

        def is_count(node):
            return isinstance(node, optax.ScaleByScheduleState)

        def replaced(node):
            if not is_count(node):
                return node
            count = jax.device_put(np.full((1,), progress, np.int32), self.placement.sharding((1,)))
            return node._replace(count=count)

        return state._replace(opt_state=jax.tree.map(replaced, state.opt_state, is_leaf=is_count))

    def rate(self, progress: int) -> jax.Array:
        """() float32: the learning rate."""
        return self._rate(np.int32(progress))

    def put(self, arrays: Arrays, like: Any) -> Any:
        """Host arrays (1, ...) as a tree on the devices."""
        leaves = [jax.device_put(x, self.placement.sharding(x.shape)) for x in arrays]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def averaged(mixes_state: bool, state: TrainState) -> Any:
    """The part of the state that peers average, and send."""
    return state.params, state.model_state if mixes_state else {}


def number(stream: int, t: int) -> np.ndarray:
    """(2,) what a peer's step draws its random numbers (dropout) from: step t of its stream."""
    return np.array([t, stream], np.int32)


def on_host(tree: Any) -> Arrays:
    """Leaves without the replica dimension; they may be shared with the device, so do not write."""
    return [np.asarray(x)[0] for x in jax.tree.leaves(tree)]


class Pulse:
    """Common progress as this peer knows it: the steps of all ranks together.

    Args:
      peers_per_step: steps of peers that are one step of the run, ``num_replicas``.
      steps: of the run.
    """

    def __init__(self, peers_per_step: int, steps: int):
        self._peers_per_step, self._steps = peers_per_step, steps
        self._others = 0  # steps made in other ranks, as far as this peer knows
        self.own = 0  # steps made in this rank

    def heard(self, all_steps: int, own_then: int) -> None:
        """Note the roster's count of all steps, and its count of this rank's at the same time."""
        self._others = all_steps - own_then

    def progress(self) -> int:
        """Common progress in steps of the run."""
        return (self._others + self.own) // self._peers_per_step

    def over(self) -> bool:
        """Whether all peers together have made the steps of the run."""
        return self.progress() >= self._steps


class NotJoined(Exception):
    """A peer ends without the state of a peer: it has none yet, or an old one; nothing is saved."""


class StepBoundary:
    """What a peer does at its step boundaries.

    Args:
      experiment: of the peer.
      place: which peer it is.
      pulse: common progress.
      meetings: of the peer.
      jobs: takes functions that a thread calls one after the other.
      ask: one of them: ask another peer to meet.
      join: copies the state of another peer, and returns None where nobody could give one; called
        before the first step, when all is compiled. None: not joining.
      clock: seconds.
    """

    def __init__(
        self,
        experiment: Experiment,
        place: Place,
        pulse: Pulse,
        meetings: Meetings,
        jobs: Any,
        ask: Any,
        join: Callable[[], Joined | None] | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        peers = place.config["peers"]
        self._place, self._pulse = place, pulse
        self.meetings, self._jobs, self._ask = meetings, jobs, ask
        self._changes = StateChanges(experiment)
        self.join = join
        self._every, self._meet_s = place.config["mix_every"], peers["meet_s"]
        self._due = 0  # the step before which to ask next
        self._ask_after = 0.0  # and the time; infinite while a question is under way
        self._log: events.EventLog | None = None
        self._origin: dict[str, Any] | None = None
        self._has_published = False
        self._end_by = math.inf  # when to end at the latest; infinite until the end has come
        self._met_before = 0
        self._shown: tuple[int, Any] = -1, None  # progress, rate
        self._wanted: queue.SimpleQueue[Future[Joined]] = queue.SimpleQueue()
        self.leaving: str | None = None  # "leave": after a last meeting; "stop", "lag": at once
        self.losses = (0.0, 0)  # sum and number of those of its steps that are finite, so far
        self._last_loss: jax.Array | None = None  # ready when the last step is made
        self.stale = 0  # steps of progress since the copy averaged last was published
        self.final: list[np.ndarray] | None = None
        self.ready = False  # whether it trains
        self.alone = False  # whether no other peer trains

    # --- Called by the runner ---------------------------------------------------------------------

    def begin(self, start: int) -> int:
        """The step to begin with, where the newest checkpoint is of step ``start``."""
        if start:
            self._origin = self._checkpointed(start)
        if self._place.start is not None:
            start = self._place.start
        self._pulse.own = start
        self._pulse.heard(self._place.all_steps, start)
        self._due = start + self._every
        return start

    def over(self, done: int) -> bool:
        """Whether the run ends after ``done`` steps.

        Raises:
          NotJoined: it ends, and the state is not that of a peer yet, or too old.
        """
        self._pulse.own = done
        if self.leaving == "lag":
            raise NotJoined
        if self.leaving is None and not self._pulse.over():
            return False
        if self.join is not None:
            raise NotJoined
        if math.isinf(self._end_by):
            # A meeting takes meet_s at most, and until it is known to be settled as long again.
            self._end_by = self._clock() + 2 * self._meet_s
            self._due, self._met_before = done, self.meetings.counts["met"]
        late = self._clock() > self._end_by
        # Who leaves meets once more, so that what it has learned stays with the others.
        has_met = self.alone or self.meetings.counts["met"] > self._met_before
        if late or self.leaving != "leave" or has_met:
            self.meetings.closed = True
        # Halves that partners add must be added here, too.
        return late or (self.meetings.closed and self.meetings.idle())

    def step(
        self, compiled: Any, state: TrainState, batch: Any, t: int
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The step t, and what comes before it."""
        if self.join is not None:
            state = self._joined(self.join, state)
        log = self._log or self._begin_log(t)
        progress = self._pulse.progress()
        if progress != self._shown[0]:
            self._shown = progress, self._changes.rate(progress)
        state = self._changes.at_progress(state, progress)
        log.write(t=t, rate=progress)
        # A host that is ahead of its device publishes late, meets nobody until then, and adds what
        # is older. All that the next step needs but the meetings is ready here.
        self._note_loss()
        taken = self.meetings.take()
        for met in taken:
            log.met(t, met)
            self.stale = progress - met.theirs.progress
            state = self._changes.meet(state, met.mine.arrays, met.half)
        if taken or not self._has_published:
            self._publish(log, state, t, progress)
        self._give(state, t)
        if t >= self._due and self._clock() >= self._ask_after:
            self._due, self._ask_after = t + self._every, math.inf
            self._jobs.put(self._ask_and_rest)
        self.ready = True  # now: on a CPU, a step with a callback returns only when it is made
        state, metrics = compiled(state, batch, number(self._place.rank, t))
        self._last_loss = metrics["loss"] + 0  # the loop may donate the loss itself
        return state, metrics | {"learning_rate": self._shown[1]}

    def end(self, done: int, state: TrainState) -> dict[str, Any]:
        """How this peer ended, once a checkpoint of its last step is saved."""
        self._note_loss()
        arrays = on_host(self._changes.averaged(state))
        self.final = arrays
        if self._log is not None:
            self._log.end(done, events.crc(arrays))
        self.meetings.withdraw()
        self._refuse()
        return {"steps": done, "how": self.leaving or "end"}

    # --- Called by other threads ------------------------------------------------------------------

    def want_state(self) -> "Future[Joined]":
        """The state at the next step boundary, for a peer that joins."""
        wanted: Future[Joined] = Future()
        self._wanted.put(wanted)
        if self.final is not None:
            self._refuse()
        return wanted

    def _ask_and_rest(self) -> None:
        """Ask, and then be free for the questions of others about as long as that took.

        Peers that asked all the time would be busy whenever they are asked: nobody would meet. A
        peer that waited for an answer in vain was busy for ``meet_s``, and asks the next one at
        once.
        """
        began = self._clock()
        try:
            self._ask()
        finally:
            now = self._clock()
            took = now - began if now - began < self._meet_s else 0.0
            self._ask_after = now + 2 * random.random() * took

    # --- Parts of a step --------------------------------------------------------------------------

    def _joined(self, join: Callable[[], Joined | None], state: TrainState) -> TrainState:
        """The state of another peer, if one gives it."""
        joined, self.join = join(), None
        if joined is None:
            return state
        self._origin = {"peer": joined.donor, "t": joined.t, "when": "boundary"}
        return self._changes.put([x[None] for x in joined.arrays], state)

    def _note_loss(self) -> None:
        """Wait for the last step; reports then need not wait for the device."""
        if self._last_loss is None:
            return
        self._last_loss.block_until_ready()
        loss, (total, count) = float(np.asarray(self._last_loss)[0]), self.losses
        if math.isfinite(loss):
            self.losses = total + loss, count + 1
        self._last_loss = None

    def _begin_log(self, t: int) -> events.EventLog:
        self._log = events.EventLog(self._place.folder, self._place.generation)
        self._log.write(start=t, origin=self._origin)
        return self._log

    def _publish(self, log: events.EventLog, state: TrainState, t: int, progress: int) -> None:
        """Hand a copy to the other thread, which waits for the device and shows it to others."""
        self._has_published = True
        copied, meetings = self._changes.copy(self._changes.averaged(state)), self.meetings

        def publish():
            arrays = on_host(copied)
            log.write(t=t, version=meetings.version, crc=events.crc(arrays))
            meetings.publish(arrays, progress)

        self._jobs.put(publish)

    def _give(self, state: TrainState, t: int) -> None:
        if not self._wanted.empty():
            copied = self._changes.copy(state)
            for one in self._taken():
                one.set_result(Joined(self.meetings.me, t, copied))

    def _refuse(self) -> None:
        for one in self._taken():
            one.set_exception(RuntimeError("this peer has ended"))

    def _taken(self) -> Iterator[Future]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._wanted.get_nowait()

    def _checkpointed(self, t: int) -> dict[str, Any]:
        """Which generation of this rank wrote the checkpoint of step t."""
        folder = self._place.folder
        for generation in reversed(events.generations(folder)):
            if events.has_step(events.path(folder, generation), t - 1):
                break
        else:
            generation = "?"
        return {"peer": f"{self._place.rank}.{generation}", "t": t, "when": "checkpoint"}


class PeerRunner(Synchronous):
    """See `decent_jax.train.loop.Runner`: one replica, whose run evaluates nothing by itself."""

    evaluates, first = False, number(0, 0)

    def __init__(self, experiment: Experiment, work: Workdir, boundary: StepBoundary):
        super().__init__(experiment, work)
        self._boundary = boundary

    def restore(self) -> tuple[int, dict[str, Any]]:
        """See `decent_jax.train.loop.Runner`."""
        start, meta = super().restore()
        return self._boundary.begin(start), meta

    def over(self, done: int) -> bool:
        """See `decent_jax.train.loop.Runner`."""
        return self._boundary.over(done)

    def _run(self, compiled: Any, batch: Any, t: int) -> dict[str, Any]:
        self.state, metrics = self._boundary.step(compiled, self.state, batch, t)
        return metrics

    def finish(self, done: int, saver: Saver, clock: Clock) -> dict[str, Any]:
        """See `decent_jax.train.loop.Runner`."""
        return self._boundary.end(done, self.state)
