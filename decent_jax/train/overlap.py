r"""Gossip during the gradient on CPU hosts, where XLA does not overlap the two.

On a GPU the messages of a round travel during the forward and backward pass, because XLA starts
them at the top of the step (`decent_jax.train.xla`). On CPUs XLA waits for each message where
it sends it, and runs the programs of one thread one after the other, so a step takes the time of
the gradient plus that of the messages. Here a step is three programs instead:

- ``begin`` computes the gradient, on each device by itself (`decent_jax.train.alone`);
- ``mix`` sends and receives the messages meanwhile;
- ``finish`` makes the update where the messages have come to.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from decent_jax.gossip import permute
from decent_jax.optim import Delayed, EarlyMixing
from decent_jax.replicas import Placement
from decent_jax.train.alone import Alone, AloneProgram
from decent_jax.train.kept_programs import NOWHERE, KeptPrograms
from decent_jax.train.traffic import Times


def needed(tx: Any, placement: Placement) -> bool:
    """Whether messages need a program of their own: sent by gloo, and known before the gradient.

    Not for replicas of several devices, whose gradients communicate too.
    """
    return permute.over_gloo() and isinstance(tx, EarlyMixing | Delayed) and placement.fsdp == 1


class Functions(NamedTuple):
    """What `decent_jax.train.step.make_step` makes a step of."""

    tx: EarlyMixing
    gradients: Callable  # (params, model_state, batch, t) of a device -> loss, model_state, grads
    finish: Callable  # one replica's (state, gradients, mixed, rnd) -> state, metrics
    with_rate: Callable  # ((state, metrics), t) -> the same with the learning rate


class Step:
    """A step in three programs; ``lower(...).compile()`` is used as that of `jax.jit`.

    Args:
      whole: the jitted step, for steps without communication.
      functions: those that ``whole`` is made of.
      placement: where the replicas live.
      options: XLA's, for all three programs.
      kept: has them.
    """

    def __init__(
        self,
        whole: Any,
        functions: Functions,
        placement: Placement,
        options: dict,
        kept: KeptPrograms = NOWHERE,
    ):
        self._whole, self._placement, self._kept = whole, placement, kept
        self._compiled = {}  # by name and round; shapes of a batch share these
        rows = P("replica")

        def on_devices(body, *in_specs):
            return placement.on_devices(body, in_specs, rows)

        @partial(jax.jit, static_argnames="round")
        def mix(params, opt_state, *, round):
            run = placement.per_replica(lambda x, state: functions.tx.mix(x, state, round))
            return on_devices(run, rows, rows)(params, opt_state)

        @partial(
            jax.jit, static_argnames="round", donate_argnums=(0, 1, 2), compiler_options=options
        )
        def finish(state, found, mixed, t, *, round):
            run = placement.per_replica(partial(functions.finish, rnd=round))
            return functions.with_rate(on_devices(run, rows, rows, rows)(state, found, mixed), t)

        self._begin = Alone(functions.gradients, 3, placement, options, kept=kept)
        self._programs = {"mix": mix, "finish": finish}
        self._gradients = on_devices(functions.gradients, rows, rows, rows, P())

    def lower(self, state: Any, batch: Any, t: Any, *, round: int | None) -> Any:
        """As of `jax.jit`; compiled are only the programs that another call has not compiled."""
        if round is None:
            return self._whole.lower(state, batch, t, round=None)
        return SimpleNamespace(compile=lambda: self._compile(state, batch, t, round))

    def _compile(self, state, batch, t, round) -> "Program":
        programs, compiled = self._programs, self._compiled

        def lowered(name):
            both = state.params, state.opt_state
            if name == "mix":
                return programs[name].lower(*both, round=round)
            found, mixed = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._placement.stacked),
                (
                    jax.eval_shape(self._gradients, state.params, state.model_state, batch, t),
                    jax.eval_shape(partial(programs["mix"], round=round), *both),
                ),
            )
            old = state._replace(model_state=None)
            return programs[name].lower(old, found, mixed, t, round=round)

        for name in programs:
            if (name, round) not in compiled:
                compiled[name, round] = self._kept.get(
                    f"{name} {round}", lambda name=name: lowered(name).compile()
                )
        begin = self._begin.compile(state.params, state.model_state, batch)
        held = sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves((state, batch))
        )
        return Program(held, compiled["mix", round], begin, compiled["finish", round])


class Program(NamedTuple):
    """A compiled step of one round; called, and asked for its memory, like jax's own."""

    held: int  # bytes of the state and a batch on one device
    mix: Any
    begin: AloneProgram
    finish: Any

    def __call__(self, state: Any, batch: Any, t: Any) -> tuple[Any, Any]:
        # The main thread starts all programs that communicate: XLA executes what one thread starts
        # in that order, so each finds its counterpart in the other processes.
        given = state.params, state.model_state, batch
        found = self.begin.begin(lambda program, *own: program(*own, t), *given)
        mixed = self.mix(state.params, state.opt_state)
        return self.finish(state._replace(model_state=None), found(), mixed, t)

    def timed(self, state: Any, batch: Any, t: Any) -> tuple[tuple[Any, Any], Times]:
        """The same, and how long its halves took; it waits for both."""
        jax.block_until_ready((state, batch))
        began, ends = time.perf_counter(), []

        def gradient(program, *own):
            found = jax.block_until_ready(program(*own, t))
            ends.append(time.perf_counter() - began)
            return found

        coming = self.begin.begin(gradient, state.params, state.model_state, batch)
        mixed = jax.block_until_ready(self.mix(state.params, state.opt_state))
        message_s = time.perf_counter() - began
        found = coming()
        made = self.finish(state._replace(model_state=None), found, mixed, t)
        return made, Times(max(ends), message_s)

    def memory_analysis(self) -> SimpleNamespace:
        """Bytes on one device, under the names that jax's own analysis has for them."""
        mix, begin, finish = (part.memory_analysis() for part in self[1:])
        new = [x.output_size_in_bytes - x.alias_size_in_bytes for x in (mix, begin, finish)]
        first = mix.temp_size_in_bytes + begin.temp_size_in_bytes
        last = new[2] + finish.temp_size_in_bytes
        return SimpleNamespace(
            argument_size_in_bytes=self.held,
            temp_size_in_bytes=new[0] + new[1] + max(first, last),
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
        )
