"""Delayed messages: with `decent_jax.optim.Delayed` each message overlaps several steps."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from decent_jax import gossip
from decent_jax.cpu.overlap import Parts
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import Delayed, Method
from decent_jax.replicas import Code, Placement
from decent_jax.topology import Schedule
from decent_jax.train.settings import Config


class Blocks(NamedTuple):
    """The steps at which rounds start, and the number of steps that each round takes.

    schedule: the communication schedule; None: no round ever starts.
    mix_every: steps per round.
    delay: steps that a message overlaps; 0: it is sent and applied in the same step.
    """

    schedule: Schedule | None
    mix_every: int
    delay: int

    @staticmethod
    def of(config: Config, schedule: Schedule, tx: Method) -> "Blocks":
        """The blocks of a run."""
        mixes = None if config.algorithm == "all_reduce" else schedule
        return Blocks(mixes, config.mix_every, tx.delayed.delay if tx.delayed else 0)

    def due(self, done: int, steps: float = math.inf) -> tuple[int | None, int]:
        """The round that starts after ``done`` steps, or None, and how many steps it takes.

        A message that would arrive after the last of ``steps`` steps is not sent.
        """
        count = max(self.delay, 1)
        if self.schedule is None or done + count > steps:
            return None, 1
        rnd = self.schedule.round_at(done + count - 1, self.mix_every)
        return rnd, 1 if rnd is None else count

    def cycle(self, done: int = 0, steps: float = math.inf) -> Iterator[tuple[int | None, int]]:
        """The results of `due` over a cycle of all rounds, from ``done`` steps on."""
        length = 1 if self.schedule is None else self.schedule.period * self.mix_every
        end = min(done + length, steps)
        while done < end:
            rnd, count = self.due(done, steps)
            yield rnd, count
            done += count

    def spans_steps(self, rnd: int | None) -> bool:
        """Whether a round takes a tuple of batches, one per step."""
        return rnd is not None and self.delay > 0


class Outgoing(NamedTuple):
    """The arrays from which a message is computed, as of the start of the steps it overlaps."""

    late: PyTree  # the parameters
    own: PyTree  # the method's own state
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]


class DelayedStep(NamedTuple):
    """Code for one device: steps and the message that overlaps them, in one program or in parts.

    delayed: the method's messages.
    schedule: the communication schedule.
    placement: the replicas and their devices.
    mixes_state: whether the model state is averaged too, when the message arrives.
    """

    delayed: Delayed
    schedule: Schedule
    placement: Placement
    mixes_state: bool

    def split(self, state: PyTree) -> tuple[PyTree, Outgoing]:
        """The state that the steps change, and the outgoing arrays."""
        old = state.opt_state
        outgoing = Outgoing(state.params, old.own, old.count)
        return state._replace(opt_state=old._replace(own=())), outgoing

    def message(self, outgoing: Outgoing, rnd: int, after: PyTree = None) -> PyTree:
        """Send the outgoing arrays; returns the received ones, see `decent_jax.optim.Delayed`."""

        def of_replica(outgoing: PyTree, after: PyTree):
            return self.delayed.depart(*outgoing, rnd, after)

        return self.placement.per_replica(of_replica)(outgoing, after)

    @jax.named_scope("update")
    def apply(self, state: PyTree, outgoing: Outgoing, message: PyTree, rnd: int) -> PyTree:
        """The state after the steps, with the message applied."""

        def of_replica(state: PyTree, outgoing: PyTree, message: PyTree):
            opt_state = state.opt_state
            late, own, _ = outgoing
            params, own = self.delayed.arrive(state.params, own, late, message, rnd)
            model_state = state.model_state
            if self.mixes_state:
                model_state = gossip.mix(model_state, self.schedule, rnd, self.placement.axis_name)
            return type(state)(params, model_state, opt_state._replace(own=own))

        return self.placement.per_replica(of_replica)(state, outgoing, message)

    def parts(self, step: Code, finish: Code) -> Parts:
        """See `decent_jax.cpu.overlap.Parts`; ``step`` as in `in_one_program`."""

        def apply(outgoing: PyTree, state: PyTree, message: PyTree, metrics: PyTree, rnd: int):
            return self.apply(state, outgoing, message, rnd), metrics

        return Parts(self.split, step, self.message, apply, finish, several=True)

    def in_one_program(
        self, state: PyTree, batches: Sequence[PyTree], t: jax.Array, rnd: int, step: Code
    ) -> tuple[PyTree, list[dict[str, PyTree]]]:
        """The state after ``delayed.delay`` steps, and the metrics of each step.

        XLA starts the message before a loop over the steps and waits for it after the loop. A mean
        over groups has two stages; each overlaps a loop over half of the steps.

        Args:
          state, rnd: see `decent_jax.train.step.make_step`.
          batches: one per step.
          t: the first step.
          step: ``(state, batch, t) -> (state, metrics)``, without a round.
        """
        delay, round_ = self.delayed.delay, self.schedule.rounds[rnd]
        two_stages = round_.group_size > 1 and not round_.sends
        first = delay // 2 if two_stages else delay
        state, outgoing = self.split(state)
        state, metrics = loop_of(step, state, batches[:first], t)
        waits = first > 0 and (two_stages or round_.between_groups is not None)
        message = self.message(outgoing, rnd, state.params if waits else None)
        state, more = loop_of(step, state, batches[first:], t + first)
        return self.apply(state, outgoing, message, rnd), metrics + more


def loop_of(
    step: Code, state: PyTree, batches: Sequence[PyTree], t: jax.Array
) -> tuple[PyTree, list[dict[str, PyTree]]]:
    """Make the steps from t on in one `jax.lax.scan`; returns the state and each step's metrics."""
    if not batches:
        return state, []
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    steps = t + jnp.arange(len(batches), dtype=jnp.int32)

    def body(state: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        return step(state, *xs)

    state, metrics = jax.lax.scan(body, state, (stacked, steps))
    return state, [jax.tree.map(lambda x, k=k: x[k], metrics) for k in range(len(batches))]
