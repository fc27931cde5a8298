"""Gossip beside the gradient on CPU hosts, where XLA does not see to it.

On a GPU the messages of a round travel during the forward and backward pass, since XLA starts them
at the top of the step (`decent_jax.train.compiler_options`). On CPUs it waits for each message
where it sends it, and for each program before the next that the same thread started, so a step took
the gradient's time and the messages'. There a step is three programs: a thread of its own starts
the gradient while the messages of the round travel, and the update takes the results of both.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from decent_jax import gossip
from decent_jax.optim import EarlyMixing
from decent_jax.replicas import Placement


def needed(tx: Any, placement: Placement) -> bool:
    """Whether the round should be a program of its own.

    Not for replicas of several devices, whose gradients communicate too.
    """
    return gossip.over_gloo() and isinstance(tx, EarlyMixing) and placement.fsdp == 1


class Step:
    """A step in three parts; ``lower(...).compile()`` and its result are used like `jax.jit`'s.

    Args:
      whole: ``(state, batch, t, round=)``, for steps without communication.
      mix: ``(params, opt_state, round=)`` to the mixed parameters.
      gradient: ``(params, model_state, batch, t)`` to what the update needs of it.
      finish: ``(state, results, mixed, t, round=)`` to what ``whole`` gives.
      stacked: the sharding of all results.
    """

    def __init__(
        self, whole: Callable, mix: Callable, gradient: Callable, finish: Callable, stacked
    ):
        self._whole, self._mix, self._gradient, self._finish = whole, mix, gradient, finish
        self._stacked = stacked
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradient")
        self._compiled = {}  # parts: rounds share the gradient, shapes of a batch the others

    def lower(self, state: Any, batch: Any, t: Any, *, round: int | None):
        if round is None:
            return self._whole.lower(state, batch, t, round=None)
        params, model_state = state.params, state.model_state

        def result_of(fn, *args):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._stacked),
                jax.eval_shape(fn, *args),
            )

        results = result_of(self._gradient, params, model_state, batch, t)
        mixed = result_of(lambda x: x, params)
        shapes = tuple(x.shape for x in jax.tree.leaves(batch))
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(batch))
        lowered = {
            ("mix", round): lambda: self._mix.lower(params, state.opt_state, round=round),
            ("gradient", shapes): lambda: self._gradient.lower(params, model_state, batch, t),
            ("finish", round): lambda: self._finish.lower(state, results, mixed, t, round=round),
        }
        return _Lowered(self._thread, held, lowered, self._compiled)


class _Lowered(NamedTuple):
    thread: ThreadPoolExecutor
    batch_bytes: int  # on one device
    lowered: dict[tuple, Callable]  # the parts: by what tells them from others, how to lower them
    compiled: dict[tuple, Any]  # of the step

    def compile(self) -> "_Program":
        for part, lower in self.lowered.items():
            if part not in self.compiled:
                self.compiled[part] = lower().compile()
        return _Program(self.thread, self.batch_bytes, *map(self.compiled.get, self.lowered))


class _Program(NamedTuple):
    thread: ThreadPoolExecutor
    batch_bytes: int  # on one device
    mix: Any
    gradient: Any
    finish: Any

    def __call__(self, state, batch, t):
        # Programs that communicate are all started by the main thread: XLA executes what one thread
        # starts in that order, so each finds its counterpart in the other processes.
        results = self.thread.submit(self.gradient, state.params, state.model_state, batch, t)
        mixed = self.mix(state.params, state.opt_state)
        return self.finish(state, results.result(), mixed, t)

    def memory_analysis(self) -> "_Memory":
        mix, gradient, finish = (part.memory_analysis() for part in self[2:])
        between = mix.output_size_in_bytes + gradient.output_size_in_bytes
        first = mix.temp_size_in_bytes + gradient.temp_size_in_bytes
        return _Memory(
            finish.argument_size_in_bytes - between + self.batch_bytes,
            between + max(first, finish.temp_size_in_bytes),
        )


class _Memory(NamedTuple):
    """As much of jax's as `decent_jax.train.executables` looks at."""

    argument_size_in_bytes: int
    temp_size_in_bytes: int
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
