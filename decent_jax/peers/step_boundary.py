"""A peer's work between two steps, and its runner; nothing here waits for a message."""

import contextlib
import math
import queue
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.monitor.goodput import Clock
from decent_jax.optim import METHODS, trees
from decent_jax.peers import events
from decent_jax.peers.peer_run import CommonProgress, Place
from decent_jax.peers.protocol import Arrays, Averager, JoinState
from decent_jax.replicas import Consensus, TrainState
from decent_jax.train import algorithm
from decent_jax.train.experiment import Experiment
from decent_jax.train.saver import Saver
from decent_jax.train.stepper import Stepper
from decent_jax.train.workdir import Workdir


class StateChanges:
    """Changes to the `TrainState` of one replica, (1, ...), between two of its steps.

    A run and its replay share this code.

    Attributes:
      rate: common progress (int32) -> the learning rate, () float32.
      averaged: state -> the part that peers send and average.
    """

    def __init__(self, experiment: Experiment):
        self.placement = experiment.placement
        self._mixes_state = experiment.task.mixes_state
        self.rate = jax.jit(lambda t: jnp.asarray(experiment.rate(t), jnp.float32))
        self.averaged = partial(averaged, experiment.task.mixes_state)
        place_all = self.placement.place_all
        method = METHODS[experiment.config.algorithm]
        assert method.pairwise is not None  # `decent_jax.peers.peer_run.check`
        pairwise = jax.vmap(method.pairwise(algorithm.numbers_of(experiment.config, method)))

        def average(averaged, own, snapshot, pull):
            (params, model_state), (params_pull, model_state_pull) = averaged, pull
            params, own = pairwise(params, own, snapshot[0], params_pull)
            return place_all(((params, trees.add(model_state, model_state_pull)), own))

        self._average = jax.jit(average, donate_argnums=(0, 1))
        self.copy = jax.jit(lambda tree: place_all(jax.tree.map(jnp.copy, tree)))

    def average(self, state: TrainState, snapshot: Arrays, pull: Arrays) -> TrainState:
        """The state after a pairwise average; donates ``state``.

        Args:
          snapshot: this peer's snapshot in the average.
          pull: half of the difference between the partner's and this peer's decoded snapshots.
        """
        old, own = self.averaged(state), state.opt_state.own
        snapshot, pull = (
            jax.tree.unflatten(jax.tree.structure(old), [x[None] for x in arrays])
            for arrays in (snapshot, pull)
        )
        (params, model_state), own = self._average(old, own, snapshot, pull)
        state = state._replace(params=params, opt_state=state.opt_state._replace(own=own))
        return state._replace(model_state=model_state) if self._mixes_state else state

    def at_progress(self, state: TrainState, progress: int) -> TrainState:
        """The state whose next update uses the learning rate at this common progress, in steps."""

        def is_count(node):
            return isinstance(node, optax.ScaleByScheduleState)

        def replaced(node):
            if not is_count(node):
                return node
            count = jax.device_put(np.full((1,), progress, np.int32), self.placement.sharding((1,)))
            return node._replace(count=count)

        return state._replace(opt_state=jax.tree.map(replaced, state.opt_state, is_leaf=is_count))

    def put(self, arrays: Arrays, like: PyTree) -> PyTree:
        """Host arrays (1, ...) as a tree on the devices."""
        leaves = [jax.device_put(x, self.placement.sharding(x.shape)) for x in arrays]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def averaged(mixes_state: bool, state: TrainState) -> PyTree:
    """The part of the state that peers send and average."""
    return state.params, state.model_state if mixes_state else {}


def number(stream: int, t: int) -> np.ndarray:
    """(2,) int32 [t, stream], which selects a peer's random numbers (dropout) of step t."""
    return np.array([t, stream], np.int32)


def on_host(tree: PyTree) -> Arrays:
    """Leaves without replica dimension; read-only, as they may share memory with the device."""
    return [np.asarray(x)[0] for x in jax.tree.leaves(tree)]


class NotJoined(Exception):
    """A peer ends before it may train, or with an outdated state; it saves nothing."""


class StepBoundary:
    """A peer's work between two steps.

    Args:
      experiment: the peer's run.
      place: the identity of the peer.
      common: common progress.
      averager: the peer's averager.
      jobs: queue of functions that a thread calls one after the other.
      ask: job that asks another peer for a pairwise average.
      join: callback before the first step, after compilation; returns another peer's state with
        which to begin, or None to keep the peer's own state. If ``join`` itself is None, the peer
        also keeps its own.
      clock: a clock, in seconds.
    """

    def __init__(
        self,
        experiment: Experiment,
        place: Place,
        common: CommonProgress,
        averager: Averager,
        jobs: queue.SimpleQueue[Callable[[], object] | None],
        ask: Callable[[], object],
        join: Callable[[], JoinState | None] | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        peers = place.config.peers
        self._place, self._common = place, common
        self.averager, self._jobs, self._ask = averager, jobs, ask
        self._changes = StateChanges(experiment)
        self.join = join
        self._every, self._exchange_s = place.config.mix_every, peers.exchange_s
        self._due = 0  # the step before which to ask next
        self._ask_after = 0.0  # the time after which to ask next; infinite during a request
        self._log: events.EventLog | None = None
        self._origin: Json | None = None
        self._has_published = False
        self._end_by = math.inf  # deadline; infinite until the run ends
        self._averages_before = 0
        self._shown: tuple[int, float | None] = -1, None  # progress, rate
        self._wanted: queue.SimpleQueue[Future[JoinState]] = queue.SimpleQueue()
        self.leaving: str | None = None  # "leave": after a last average; "stop", "lag": at once
        self.losses = (0.0, 0)  # sum and number of all finite losses so far
        self._last_loss: jax.Array | None = None  # ready when the last step is
        self.stale = 0  # age of the partner's snapshot in the last average, in steps of progress
        self.final: list[np.ndarray] | None = None
        self.ready = False  # whether it trains
        self.alone = False  # whether no other peer trains

    # --- Called by the runner ---------------------------------------------------------------------

    def begin(self, start: int) -> int:
        """The first step to make, given the step ``start`` of the newest checkpoint, 0 if none."""
        if start:
            self._origin = self._checkpointed(start)
        if self._place.start is not None:
            start = self._place.start
        self._common.own = start
        self._common.update(self._place.all_steps, start)
        self._due = start + self._every
        return start

    def over(self, done: int) -> bool:
        """Whether the run ends after ``done`` steps.

        Raises:
          NotJoined: the run ends, and the peer's state is missing or outdated.
        """
        self._common.own = done
        if self.leaving == "lag":
            raise NotJoined
        if self.leaving is None and not self._common.over():
            return False
        if self.join is not None and (self.leaving or self._place.start is not None):
            raise NotJoined
        if math.isinf(self._end_by):
            # An average takes at most exchange_s, and its confirmation at most as long again.
            self._end_by = self._clock() + 2 * self._exchange_s
            self._due, self._averages_before = done, self.averager.counts["averaged"]
        late = self._clock() > self._end_by
        # A leaving peer averages once more, so its progress is not lost.
        has_averaged = self.alone or self.averager.counts["averaged"] > self._averages_before
        if late or self.leaving != "leave" or has_averaged:
            self.averager.closed = True
        # If the partner of a last average applies its pull, this peer must, too.
        return late or (self.averager.closed and self.averager.idle())

    def step(
        self, compiled: jax.stages.Compiled, state: TrainState, batch: PyTree, t: int
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Do the work before step t, then start the step; returns state and metrics."""
        if self.join is not None:
            state = self._joined(self.join, state)
        log = self._log or self._begin_log(t)
        progress = self._common.progress()
        if progress != self._shown[0]:
            self._shown = progress, self._changes.rate(np.int32(progress))
        state = self._changes.at_progress(state, progress)
        log.write(t=t, rate=progress)
        # A host that runs ahead of its device publishes late, cannot average until then, and
        # applies old pulls. Therefore, wait for the last step here, once everything else is ready.
        self._note_loss()
        taken = self.averager.take()
        for average in taken:
            log.average(t, average)
            self.stale = progress - average.theirs.progress
            state = self._changes.average(state, average.mine.arrays, average.pull)
        if taken or not self._has_published:
            self._publish(log, state, t, progress)
        self._give(state, t)
        if t >= self._due and self._clock() >= self._ask_after:
            self._due, self._ask_after = t + self._every, math.inf
            self._jobs.put(self._ask_and_rest)
        self.ready = True  # before the step: on a CPU, a step with a callback blocks until its end
        state, metrics = compiled(state, batch, number(self._place.rank, t))
        self._last_loss = metrics["loss"] + 0  # the loop may donate the loss itself
        return state, metrics | {"learning_rate": self._shown[1]}

    def end(self, done: int, state: TrainState) -> Json:
        """End the peer after its last checkpoint is saved; returns its steps, and how it ended."""
        self._note_loss()
        arrays = on_host(self._changes.averaged(state))
        self.final = arrays
        if self._log is not None:
            self._log.end(done, events.crc(arrays))
        self.averager.withdraw()
        self._refuse()
        return {"steps": done, "how": self.leaving or "end"}

    # --- Called by other threads ------------------------------------------------------------------

    def want_state(self) -> "Future[JoinState]":
        """A future of the state at the next step boundary, for a peer that joins."""
        wanted: Future[JoinState] = Future()
        self._wanted.put(wanted)
        if self.final is not None:
            self._refuse()
        return wanted

    def _ask_and_rest(self) -> None:
        """Ask, and then stay free for others' requests for about as long as asking took.

        If peers asked all the time, each would be busy whenever another one asks, and none would
        ever average. After a timeout, which took ``exchange_s``, a peer asks again at once.
        """
        began = self._clock()
        try:
            self._ask()
        finally:
            now = self._clock()
            took = now - began if now - began < self._exchange_s else 0.0
            self._ask_after = now + 2 * random.random() * took

    # --- Parts of a step --------------------------------------------------------------------------

    def _joined(self, join: Callable[[], JoinState | None], state: TrainState) -> TrainState:
        """The state with which this peer begins: of another peer, or ``state`` itself."""
        joined, self.join = join(), None
        if joined is None:
            return state
        self._origin = {"peer": joined.donor, "t": joined.t, "when": "boundary"}
        return self._changes.put([x[None] for x in joined.arrays], state)

    def _note_loss(self) -> None:
        """Wait for the last step and add its loss, so that reports need not wait for the device."""
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
        """Hand a copy to the thread of jobs, which waits for the device and publishes the copy."""
        self._has_published = True
        copied, averager = self._changes.copy(self._changes.averaged(state)), self.averager

        def publish():
            arrays = on_host(copied)
            log.write(t=t, version=averager.version, crc=events.crc(arrays))
            averager.publish(arrays, progress)

        self._jobs.put(publish)

    def _give(self, state: TrainState, t: int) -> None:
        if not self._wanted.empty():
            copied = self._changes.copy(state)
            for future in self._taken():
                future.set_result(JoinState(self.averager.me, t, copied))

    def _refuse(self) -> None:
        for future in self._taken():
            future.set_exception(RuntimeError("this peer has ended"))

    def _taken(self) -> Iterator[Future]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._wanted.get_nowait()

    def _checkpointed(self, t: int) -> Json:
        """The origin of a state from the checkpoint of step t: which generation wrote it."""
        folder = self._place.folder
        for generation in reversed(events.generations(folder)):
            if events.has_step(events.path(folder, generation), t - 1):
                break
        else:
            generation = "?"
        return {"peer": f"{self._place.rank}.{generation}", "t": t, "when": "checkpoint"}


class PeerRunner:
    """See `decent_jax.train.loop.Runner`: one replica, which does not evaluate."""

    memory = evaluate = None

    def __init__(self, experiment: Experiment, work: Workdir, boundary: StepBoundary):
        self.experiment, self._boundary = experiment, boundary
        self._stepper = stepper = Stepper(experiment, work, number(0, 0), boundary.step)
        self.checkpoints, self.messages = stepper.checkpoints, stepper.messages
        self.training, self.measured = stepper.training, stepper.measured

    @property
    def state(self) -> TrainState:
        """See `decent_jax.train.loop.Runner`."""
        return self._stepper.state

    def restore(self) -> tuple[int, Json]:
        """See `decent_jax.train.loop.Runner`."""
        start, meta = self._stepper.restore()
        return self._boundary.begin(start), meta

    def step(self, done: int, until: int) -> list[Json]:
        """See `decent_jax.train.loop.Runner`."""
        return [] if self._boundary.over(done) else self._stepper.step(done, until)

    def consensus(self) -> Consensus:
        """See `decent_jax.train.loop.Runner`: a single replica is the mean."""
        zero = jnp.float32(0)
        return Consensus(zero, zero)

    def finish(self, done: int, saver: Saver, clock: Clock) -> Json:
        """See `decent_jax.train.loop.Runner`."""
        return self._boundary.end(done, self.state)
