"""A flight on CPU hosts, where XLA does not let a message travel beside a loop.

The message is a program of its own, which the main thread starts; the steps are made meanwhile by
each device alone (`decent_jax.train.alone`), and a last program merges what the message brought.
"""

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from decent_jax.train.alone import Alone, AloneProgram
from decent_jax.train.flight import Flight
from decent_jax.train.kept_programs import NOWHERE, KeptPrograms
from decent_jax.train.traffic import Times


class FlightStep:
    """Steps in these programs; ``lower(...).compile()`` is used as that of `jax.jit`.

    Args:
      flight: of the method.
      step: code for one device, ``(state, batch, t) -> (state, metrics)``, without a round.
      rate: the learning rate of a step.
      options: XLA's.
      kept: has the programs.
    """

    def __init__(
        self,
        flight: Flight,
        step: Callable[..., Any],
        rate: Callable[[jax.Array], Any],
        options: dict[str, Any],
        kept: KeptPrograms = NOWHERE,
    ):
        self._flight, placement = flight, flight.placement
        self._steps = Alone(step, 2, placement, options, donate=(0,), kept=kept)
        rows = P("replica")

        @partial(jax.jit, out_shardings=placement.replicated)
        def rates(t):
            return jnp.asarray(rate(t), jnp.float32)

        @jax.jit
        def copied(tree):
            return jax.tree.map(jnp.copy, tree)

        @partial(jax.jit, static_argnames="round")
        def message(departed, *, round):
            body = partial(flight.message, rnd=round)
            return placement.on_devices(body, (rows,), rows)(departed)

        @partial(jax.jit, static_argnames="round", donate_argnums=0, compiler_options=options)
        def land(state, departed, message, *, round):
            body = partial(flight.land, rnd=round)
            new = placement.on_devices(body, (rows,) * 3, rows)(state, departed, message)
            return placement.place_all(new)

        self._rates, self._copied, self._message, self._land = rates, copied, message, land
        self._kept = kept

    def lower(self, state: Any, batch: Any, t: Any, *, round: int | None) -> Any:
        """As of `jax.jit`; with a round ``batch`` is a tuple of them."""
        one = batch if round is None else batch[0]
        return SimpleNamespace(compile=lambda: self._compile(state, one, round))

    def _compile(self, state, batch, round) -> "FlightProgram":
        light, departed = self._flight.leave(state)
        steps = self._steps.compile(light, batch)
        message = land = None
        if round is not None:
            stacked = self._flight.placement.stacked

            def like(x):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=stacked)

            light, departed = jax.tree.map(like, (light, departed))

            def compiled_message():
                return self._message.lower(departed, round=round).compile()

            def compiled_land():
                sent = partial(self._message, round=round)
                found = jax.tree.map(like, jax.eval_shape(sent, departed))
                return self._land.lower(light, departed, found, round=round).compile()

            message = self._kept.get(f"message {round}", compiled_message)
            land = self._kept.get(f"land {round}", compiled_land)
        return FlightProgram(self._flight, self._copied, self._rates, steps, message, land)


class FlightProgram(NamedTuple):
    """The compiled steps of a flight, or a step without a round where there is no message."""

    flight: Flight
    copied: Callable[[Any], Any]
    rates: Callable[[Any], jax.Array]
    steps: AloneProgram
    message: Any
    land: Any

    def __call__(self, state: Any, batch: Any, t: Any) -> tuple[Any, Any]:
        return self._fly(state, batch, t, lambda what, made: None)

    def timed(self, state: Any, batch: Any, t: Any) -> tuple[tuple[Any, Any], Times]:
        """The same, and how long the steps and the message took; it waits for both."""
        jax.block_until_ready((state, batch))
        began, ends = time.perf_counter(), {}

        def wait(what, made):
            jax.block_until_ready(made)
            ends[what] = time.perf_counter() - began  # of the last device

        made = self._fly(state, batch, t, wait)
        return made, Times(ends["steps"], ends["message"])

    def _fly(
        self, state: Any, batch: Any, t: Any, look: Callable[[str, Any], None]
    ) -> tuple[Any, Any]:
        """State and metrics; ``look`` gets what "steps" make, by device, and the "message"."""
        light, departed = self.flight.leave(state)
        batches = (batch,) if self.message is None else batch
        arrives = None
        if self.message is not None:  # of copies, since the steps write over what they get
            moving = light.opt_state.own
            late, count, moving = self.copied((departed.late, departed.count, moving))
            departed = departed._replace(
                late=late, count=count, own=self.flight.rejoined(moving, departed)
            )
            arrives = self.message(departed)

        def run(program, state, batches):
            found = []
            for k, batch in enumerate(batches):
                state, metrics = program(state, batch, t + k)
                found.append(metrics)
            look("steps", (state, found))
            return state, found

        coming = self.steps.begin(run, light, batches)
        look("message", arrives)
        light, found = coming()
        found = [one | {"learning_rate": self.rates(t + k)} for k, one in enumerate(found)]
        if self.message is None:
            own = self.flight.rejoined(light.opt_state.own, departed)
            return light._replace(opt_state=light.opt_state._replace(own=own)), found[0]
        return self.land(light, departed, arrives), found

    def memory_analysis(self) -> Any:
        """Bytes on one device, under the names that jax's own analysis has for them."""
        parts = [one.memory_analysis() for one in (self.steps, self.message) if one is not None]
        names = ("argument", "temp", "output", "alias")
        return SimpleNamespace(
            **{
                f"{name}_size_in_bytes": sum(getattr(x, f"{name}_size_in_bytes") for x in parts)
                for name in names
            }
        )
