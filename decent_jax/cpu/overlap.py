"""Messages beside computation on CPU hosts, where XLA does not overlap the two.

On a GPU the messages of a round travel during the forward and backward pass, or beside several
steps, because XLA starts them first. On CPUs XLA waits for each message where it sends it, and runs
the programs of one thread one after the other, so a step takes the time of computing plus that of
the messages. Here it is three programs instead: one that computes, on each device by itself; one
that sends and receives meanwhile; and one that makes the update where the messages have come to.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from decent_jax.cpu import gloo
from decent_jax.cpu.per_device import PerDevice, compile_each


class Parts(NamedTuple):
    """What a step is made of whose messages are known when it begins.

    leave: ``state -> (local, departed)``: which arrays are computed with, and which are sent.
    compute: code for one device, ``(local, batch, t) -> (local, found)``; communicates nothing.
    send: code for one device, ``(departed, rnd) -> message``.
    land: code for one device, ``(departed, local, message, [found], rnd) -> (state, metrics)``.
    finish: ``((state, metrics), t) -> (state, metrics)``, for all devices.
    several: whether a message travels beside several steps, with a tuple of batches; `compute`
      then writes over ``local``.
    """

    leave: Callable[[Any], tuple[Any, Any]]
    compute: Callable[..., tuple[Any, Any]]
    send: Callable[..., Any]
    land: Callable[..., tuple[Any, Any]]
    finish: Callable[..., tuple[Any, Any]]
    several: bool = False


def overlapped(
    whole: Any,
    parts: Parts | None,
    placement: Any,
    options: dict[str, Any],
    keep: Callable[..., Any],
) -> Any:
    """A step in three programs where gloo sends its messages, else ``whole``.

    Not for replicas of several devices, whose gradients communicate too.

    Args:
      whole: the jitted step, ``(state, batch, t, round) -> (state, metrics)``.
      parts: those that it is made of; None: its messages depend on the gradient.
      placement: a `decent_jax.replicas.Placement`.
      options: XLA's.
      keep: ``keep(name, compiled, devices=None)`` is a kept program, or what ``compiled()`` makes.

    Returns:
      What has ``lower(...).compile()`` as `jax.jit`; the programs have ``timed``, too.
    """
    if parts is None or placement.fsdp > 1 or not gloo.used():
        return whole
    return _Step(whole, parts, placement, options, keep)


class _Step:
    def __init__(self, whole, parts, placement, options, keep):
        self._whole, self._parts, self._placement = whole, parts, placement
        self._options, self._keep = options, keep
        self._compiled = {}  # by name and round, or shapes; others share these
        rows = P("replica")

        @partial(jax.jit, static_argnames="round")
        def send(departed, *, round):
            return placement.on_devices(partial(parts.send, rnd=round), (rows,), rows)(departed)

        # XLA updates in place the first donated array that fits: that of the state.
        donate = (1,) if parts.several else (0, 1, 2)

        @partial(jax.jit, static_argnames="round", donate_argnums=donate, compiler_options=options)
        def land(departed, local, message, found, t, *, round):
            run = placement.on_devices(partial(parts.land, rnd=round), (rows,) * 4, rows)
            return parts.finish(run(departed, local, message, found), t)

        self._send, self._land = send, land
        self._compute = placement.on_devices(parts.compute, (rows, rows, P()), rows)

    def lower(self, state: Any, batch: Any, t: Any, *, round: int | None) -> Any:
        """As of `jax.jit`; compiled are only the programs that another call has not compiled."""
        if round is None:
            return self._whole.lower(state, batch, t, round=None)
        return SimpleNamespace(compile=lambda: self._compile(state, batch, t, round))

    def _compile(self, state, batch, t, round) -> "Program":
        parts, batches = self._parts, batch if self._parts.several else (batch,)
        local, departed = parts.leave(state)

        def like(tree):
            sharding = self._placement.stacked
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
            )

        def compiled_land():
            after, found = jax.eval_shape(self._compute, local, batches[0], t)
            message = jax.eval_shape(partial(self._send, round=round), departed)
            given = like((departed, after, message, [found] * len(batches)))
            return self._land.lower(*given, t, round=round).compile()

        def compiled_compute():
            donated = (0,) if parts.several else ()
            given = self._placement, self._options, self._keep
            return compile_each(parts.compute, (local, batches[0]), *given, donated)

        def once(key, compiled):
            if key not in self._compiled:
                self._compiled[key] = compiled()
            return self._compiled[key]

        def kept(name, compiled):
            return once(name, lambda: self._keep(name, compiled))

        send = kept(
            f"send {round}", lambda: self._send.lower(like(departed), round=round).compile()
        )
        land = kept(f"land {round}", compiled_land)
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(batches[0]))
        held = sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves((state, batch))
        )
        return Program(parts, held, send, once(shapes, compiled_compute), land)


class Program(NamedTuple):
    """A compiled step of one round; called, and asked for its memory, like jax's own."""

    parts: Parts
    held: int  # bytes of the state and the batches on one device
    send: Any
    compute: PerDevice
    land: Any

    def __call__(self, state: Any, batch: Any, t: Any) -> tuple[Any, Any]:
        return self._run(state, batch, t, lambda what, made: None)

    def timed(self, state: Any, batch: Any, t: Any) -> tuple[tuple[Any, Any], tuple[float, float]]:
        """The same, and the seconds of computing and of the message; it waits for both."""
        jax.block_until_ready((state, batch))
        began, ends = time.perf_counter(), {}

        def wait(what, made):
            jax.block_until_ready(made)
            ends[what] = time.perf_counter() - began  # of the last device

        made = self._run(state, batch, t, wait)
        return made, (ends["compute"], ends["message"])

    def _run(self, state, batch, t, look: Callable[[str, Any], None]) -> tuple[Any, Any]:
        local, departed = self.parts.leave(state)
        if self.parts.several:  # computing writes over what it gets
            departed = _apart(departed, local)

        def run(program, local, batches):
            found = []
            for k, batch in enumerate(batches):
                local, one = program(local, batch, t + k)
                found.append(one)
            look("compute", (local, found))
            return local, found

        # The main thread starts all programs that communicate: XLA executes what one thread starts
        # in that order, so each finds its counterpart in the other processes.
        coming = self.compute.begin(run, local, batch if self.parts.several else (batch,))
        message = self.send(departed)
        look("message", message)
        local, found = coming()
        return self.land(departed, local, message, found, t)

    def memory_analysis(self) -> SimpleNamespace:
        """Bytes on one device, under the names that jax's own analysis has for them."""
        parts = self.send, self.compute.programs[0], self.land
        send, compute, land = (part.memory_analysis() for part in parts)
        new = [x.output_size_in_bytes - x.alias_size_in_bytes for x in (send, compute, land)]
        copies = send.argument_size_in_bytes if self.parts.several else 0
        first = send.temp_size_in_bytes + compute.temp_size_in_bytes
        last = new[2] + land.temp_size_in_bytes
        return SimpleNamespace(
            argument_size_in_bytes=self.held,
            temp_size_in_bytes=copies + new[0] + new[1] + max(first, last),
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
        )


def _apart(tree: Any, other: Any) -> Any:
    """The tree, with copies of the arrays that it shares with the other."""
    shared = {id(x) for x in jax.tree.leaves(other)}
    both = [x for x in jax.tree.leaves(tree) if id(x) in shared]
    copies = dict(zip(map(id, both), _copied(both), strict=True))
    return jax.tree.map(lambda x: copies.get(id(x), x), tree)


@jax.jit
def _copied(arrays):
    return jax.tree.map(jnp.copy, arrays)
