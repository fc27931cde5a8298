"""Gossip beside the gradient on CPU hosts, where XLA does not see to it.

On a GPU the messages of a round travel during the forward and backward pass, since XLA starts them
at the top of the step (`decent_jax.train.compiler_options`). On CPUs it waits for each message
where it sends it, and for each program before the next that the same thread started, so a step took
the gradient's time and the messages'. There a step is three programs: a thread of its own starts
the gradient, and all of the update that needs no message (`decent_jax.train.split`), while the
messages of the round travel; the last adds what both came to.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from decent_jax.cpu import pair_sums
from decent_jax.optim import EarlyMixing
from decent_jax.replicas import Placement


def needed(tx: Any, placement: Placement) -> bool:
    """Whether the round should be a program of its own.

    Not for replicas of several devices, whose gradients communicate too.
    """
    return pair_sums.over_gloo() and isinstance(tx, EarlyMixing) and placement.fsdp == 1


class Step:
    """A step in three parts; ``lower(...).compile()`` and its result are used like `jax.jit`'s.

    In the second and third ``state`` is without ``inner``, the local optimizer's, which the second
    donates, and without ``ema``.

    Args:
      whole: ``(state, batch, t, round=)``, for steps without communication.
      mix: ``(params, count, round=)`` to the mixed parameters.
      begin: ``(inner, state, batch, t)`` to what ``finish`` needs of it: the gradient and all of
        the update that can be computed before the messages have arrived.
      finish: ``(state, results, ema, mixed, t, round=)`` to what ``whole`` gives.
      stacked: the sharding of all results.
    """

    def __init__(self, whole: Callable, mix: Callable, begin: Callable, finish: Callable, stacked):
        self._whole, self._mix, self._begin, self._finish = whole, mix, begin, finish
        self._stacked = stacked
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradient")
        self._compiled = {}  # parts: rounds share the gradient, shapes of a batch the others

    def lower(self, state: Any, batch: Any, t: Any, *, round: int | None):
        if round is None:
            return self._whole.lower(state, batch, t, round=None)
        inner, ema, rest = _apart(state)

        def result_of(fn, *args):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._stacked),
                jax.eval_shape(fn, *args),
            )

        results = result_of(self._begin, inner, rest, batch, t)
        mixed = result_of(lambda x: x, state.params)
        count = state.opt_state.count
        shapes = tuple(x.shape for x in jax.tree.leaves(batch))
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state, batch)))
        lowered = {
            ("mix", round): lambda: self._mix.lower(state.params, count, round=round),
            ("begin", shapes): lambda: self._begin.lower(inner, rest, batch, t),
            ("finish", round): lambda: self._finish.lower(
                rest, results, ema, mixed, t, round=round
            ),
        }
        return _Lowered(self._thread, held, lowered, self._compiled)


def _apart(state: Any) -> tuple[Any, Any, Any]:
    """The local optimizer's state, the moving average, and the rest."""
    opt_state = state.opt_state._replace(inner=None)
    return state.opt_state.inner, state.ema, state._replace(opt_state=opt_state, ema=None)


class _Lowered(NamedTuple):
    thread: ThreadPoolExecutor
    held: int  # bytes of the state and a batch on one device
    lowered: dict[tuple, Callable]  # the parts: by what tells them from others, how to lower them
    compiled: dict[tuple, Any]  # of the step

    def compile(self) -> "_Program":
        for part, lower in self.lowered.items():
            if part not in self.compiled:
                self.compiled[part] = lower().compile()
        return _Program(self.thread, self.held, *map(self.compiled.get, self.lowered))


class _Program(NamedTuple):
    thread: ThreadPoolExecutor
    held: int  # bytes of the state and a batch on one device
    mix: Any
    begin: Any
    finish: Any

    def __call__(self, state, batch, t):
        # Programs that communicate are all started by the main thread: XLA executes what one thread
        # starts in that order, so each finds its counterpart in the other processes.
        inner, ema, rest = _apart(state)
        results = self.thread.submit(self.begin, inner, rest, batch, t)
        mixed = self.mix(state.params, state.opt_state.count)
        return self.finish(rest, results.result(), ema, mixed, t)

    def memory_analysis(self) -> "_Memory":
        mix, begin, finish = (part.memory_analysis() for part in self[2:])
        new = [x.output_size_in_bytes - x.alias_size_in_bytes for x in (mix, begin, finish)]
        first = mix.temp_size_in_bytes + begin.temp_size_in_bytes
        last = new[2] + finish.temp_size_in_bytes
        return _Memory(self.held, new[0] + new[1] + max(first, last))


class _Memory(NamedTuple):
    """As much of jax's as `decent_jax.train.executables` looks at."""

    argument_size_in_bytes: int
    temp_size_in_bytes: int
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
