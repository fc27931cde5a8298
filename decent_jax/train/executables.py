"""The compiled programs of a step: one for each round and each shape of batches."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import numpy as np

from decent_jax.text import format_number
from decent_jax.topology import Schedule


class Memory(NamedTuple):
    """Bytes on one device while a program runs, as XLA plans them."""

    state: int  # its arguments: the state, which is updated in place, and a batch
    temporary: int  # gradients, activations, messages, and results that are not in place

    def __str__(self) -> str:
        state, temporary, total = (
            format_number(x / 1e6) for x in (self.state, self.temporary, sum(self))
        )
        return f"{total} MB of memory a device ({state} of state, {temporary} while it runs)"


class Executables:
    """Compiles the step when a round or a shape of batches comes for the first time.

    Args:
        step: of `decent_jax.train.step.make_step`.
        schedule: of the rounds.
        mix_every: steps from one round to the next.
        synchronous: all-reduce, whose steps are all alike.
        waiting: a context that tells the user what is waited for.
    """

    def __init__(
        self,
        step,
        schedule: Schedule,
        mix_every: int,
        synchronous: bool,
        waiting: Callable[[str], AbstractContextManager],
    ):
        self._step, self._schedule, self._mix_every = step, schedule, mix_every
        self._synchronous, self._waiting = synchronous, waiting
        self._compiled = {}
        self.memory: Memory | None = None  # of the program that takes most, so far

    def __call__(self, t: int, state, batch):
        """The program for step ``t``, to be called with (state, batch, int32 t)."""
        round = None if self._synchronous else self._schedule.round_at(t, self._mix_every)
        shapes = tuple(x.shape[1:] for x in jax.tree.leaves(batch))
        if (round, shapes) not in self._compiled:
            with self._waiting(f"compiling the step ({self._name(round, shapes)})"):
                lowered = self._step.lower(state, batch, np.int32(t), round=round)
                compiled = self._compiled[round, shapes] = lowered.compile()
            both = filter(None, [self.memory, memory_of(compiled)])
            self.memory = max(both, key=sum, default=None)
        return self._compiled[round, shapes]

    def _name(self, round: int | None, shapes: tuple) -> str:
        name = "without communication" if round is None else f"round {round}"
        if self._synchronous:
            name = "all-reduce"
        if any(shapes != other for _, other in self._compiled):  # the task has several
            arrays = ("x".join(map(str, shape)) for shape in shapes if len(shape) > 1)
            name += f", batches of {' and '.join(arrays)}"
        return name


def memory_of(compiled) -> Memory | None:
    """What a compiled program takes; None where the backend does not say."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return Memory(found.argument_size_in_bytes, found.temp_size_in_bytes + new)
