"""A flight: a message of a `decent_jax.optim.Delayed`, and the steps beside which it travels."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from decent_jax import gossip
from decent_jax.cpu.overlap import Parts
from decent_jax.optim import Delayed
from decent_jax.replicas import Placement
from decent_jax.topology import Schedule


class Blocks(NamedTuple):
    """Which rounds begin when, and how many steps each takes.

    schedule: of the rounds; None: every step is alike.
    mix_every: as in the config.
    delay: steps beside which a message travels; 0: a message belongs to one step.
    """

    schedule: Schedule | None
    mix_every: int
    delay: int

    @staticmethod
    def of(config: ConfigDict, schedule: Schedule, tx: Any) -> "Blocks":
        """Those of a run."""
        delay = tx.delay if isinstance(tx, Delayed) else 0
        return Blocks(
            None if config.algorithm == "all_reduce" else schedule, config.mix_every, delay
        )

    def due(self, done: int, steps: float = math.inf) -> tuple[int | None, int]:
        """The round that begins after ``done`` steps, or None, and how many steps it takes.

        A message that would arrive after the last of ``steps`` is not sent.
        """
        count = max(self.delay, 1)
        if self.schedule is None or done + count > steps:
            return None, 1
        rnd = self.schedule.round_at(done + count - 1, self.mix_every)
        return rnd, 1 if rnd is None else count

    def cycle(self, done: int = 0, steps: float = math.inf) -> Iterator[tuple[int | None, int]]:
        """What is `due` in a cycle of all rounds after ``done`` steps."""
        length = 1 if self.schedule is None else self.schedule.period * self.mix_every
        end = min(done + length, steps)
        while done < end:
            rnd, count = self.due(done, steps)
            yield rnd, count
            done += count

    def flies(self, rnd: int | None) -> bool:
        """Whether a round takes several batches, as a tuple."""
        return rnd is not None and self.delay > 0


class Departed(NamedTuple):
    """What a message is made of, as it was before the flight."""

    late: Any  # the parameters
    own: Any  # the method's own state
    count: jax.Array


class Flight(NamedTuple):
    """The parts of a flight, and all of it in one program: code for one device.

    tx: the method.
    schedule: of its rounds.
    placement: where the replicas live.
    mixes_state: whether the state of the model is averaged, too, on arrival.
    """

    tx: Delayed
    schedule: Schedule
    placement: Placement
    mixes_state: bool

    def leave(self, state: Any) -> tuple[Any, Departed]:
        """The state without what steps leave alone, and what departs."""
        old = state.opt_state
        light = old.own._replace(**dict.fromkeys(self.tx.resting))
        departed = Departed(state.params, old.own, old.count)
        return state._replace(opt_state=old._replace(own=light)), departed

    def rejoined(self, own: Any, departed: Departed) -> Any:
        """The method's own state with what `leave` took away."""
        return own._replace(**{name: getattr(departed.own, name) for name in self.tx.resting})

    def message(self, departed: Departed, rnd: int, after: Any = None) -> Any:
        """Sends and receives; see `decent_jax.optim.Delayed`."""

        def of_replica(departed, after):
            return self.tx.depart(*departed, rnd, after)

        return self.placement.per_replica(of_replica)(departed, after)

    @jax.named_scope("update")
    def land(self, state: Any, departed: Departed, message: Any, rnd: int) -> Any:
        """The state after the flight, with what the message brought."""

        def of_replica(state, departed, message):
            opt_state = state.opt_state
            own = self.rejoined(opt_state.own, departed)
            params, own = self.tx.arrive(state.params, own, departed.late, message, rnd)
            model_state = state.model_state
            if self.mixes_state:
                model_state = gossip.mix(model_state, self.schedule, rnd, self.placement.axis_name)
            return type(state)(params, model_state, opt_state._replace(own=own))

        return self.placement.per_replica(of_replica)(state, departed, message)

    def parts(self, step: Callable, finish: Callable) -> Parts:
        """Those of `decent_jax.cpu.overlap`; ``step`` as of `in_one_program`."""

        def land(departed, state, message, metrics, rnd):
            return self.land(state, departed, message, rnd), metrics

        return Parts(self.leave, step, self.message, land, finish, several=True)

    def in_one_program(
        self, state: Any, batches: Sequence[Any], t: jax.Array, rnd: int, step: Callable
    ) -> tuple[Any, list[Any]]:
        """The state after ``tx.delay`` steps, and the metrics of each.

        XLA starts the message before a loop over the steps, and waits for it after the loop. A mean
        of groups has two stages, each beside a loop of half of the steps.

        Args:
          state, rnd: see `decent_jax.train.step.make_step`.
          batches: of the steps.
          t: of the first of them.
          step: ``(state, batch, t) -> (state, metrics)``, without a round.
        """
        delay, one = self.tx.delay, self.schedule.rounds[rnd]
        two_stages = one.group_size > 1 and not one.sends
        half = delay // 2 if two_stages else delay
        state, departed = self.leave(state)
        state, metrics = _loop(step, state, batches[:half], t)
        waits = half > 0 and (two_stages or one.between_groups is not None)
        message = self.message(departed, rnd, state.params if waits else None)
        state, more = _loop(step, state, batches[half:], t + half)
        return self.land(state, departed, message, rnd), metrics + more


def _loop(
    step: Callable, state: Any, batches: Sequence[Any], t: jax.Array
) -> tuple[Any, list[Any]]:
    """The steps from t on, as a `jax.lax.scan`."""
    if not batches:
        return state, []
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    steps = t + jnp.arange(len(batches), dtype=jnp.int32)
    state, found = jax.lax.scan(lambda state, given: step(state, *given), state, (stacked, steps))
    return state, [jax.tree.map(lambda x, k=k: x[k], found) for k in range(len(batches))]
