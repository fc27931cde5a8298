"""Overlap of communication and computation on CPU hosts, where XLA does not overlap the two.

On a GPU, the messages of a round overlap the forward and backward pass, or several steps, because
XLA starts them first. On CPUs, XLA blocks on each message that it sends and runs the programs of
one thread one after the other, so a step takes its compute time plus its communication time. Here,
a step is three programs: one computes, on each device by itself; one sends and receives at the same
time; and one applies the update once the messages have arrived.
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
from decent_jax.ground.pytree import PyTree


class Parts(NamedTuple):
    """The parts of a step whose messages do not depend on the current gradient.

    split: ``state -> (local, outgoing)``: the arrays to compute with, and those to send.
    compute: code for one device, ``(local, batch, t) -> (local, result)``; communicates nothing.
    send: code for one device, ``(outgoing, rnd) -> message``.
    apply: code for one device, ``(outgoing, local, message, [result], rnd) -> (state, metrics)``.
    finish: ``((state, metrics), t) -> (state, metrics)``, for all devices.
    several: whether a message overlaps several steps; `compute` then takes a tuple of batches and
      donates ``local``.
    """

    split: Callable[[PyTree], tuple[PyTree, PyTree]]
    compute: Callable[..., tuple[PyTree, PyTree]]
    send: Callable[..., PyTree]
    apply: Callable[..., tuple[PyTree, PyTree]]
    finish: Callable[..., tuple[PyTree, PyTree]]
    several: bool = False


def overlapped(
    whole: Callable[..., PyTree],
    parts: Parts | None,
    placement: Any,
    options: dict[str, object],
    cached: Callable[..., PyTree],
) -> PyTree:
    """A step in three programs if gloo sends its messages, else ``whole``.

    Replicas that span several devices keep ``whole``: their gradients communicate too.

    Args:
      whole: the jitted step, ``(state, batch, t, round) -> (state, metrics)``.
      parts: the parts of the step; None: its messages depend on the gradient.
      placement: a `decent_jax.replicas.Placement`.
      options: XLA's compiler options.
      cached: ``cached(name, compiled, devices=None)`` gives a cached executable or ``compiled()``.

    Returns:
      An object with ``lower(...).compile()``, as from `jax.jit`; its programs also have ``timed``.
    """
    if parts is None or placement.fsdp > 1 or not gloo.used():
        return whole
    return _Step(whole, parts, placement, options, cached)


class _Step:
    def __init__(self, whole, parts, placement, options, cached):
        self._whole, self._parts, self._placement = whole, parts, placement
        self._options, self._cached = options, cached
        self._compiled = {}  # by name and round, or by shapes; shared between calls
        rows = P("replica")

        @partial(jax.jit, static_argnames="round")
        def send(outgoing, *, round):
            return placement.on_devices(partial(parts.send, rnd=round), (rows,), rows)(outgoing)

        # XLA updates the first donated array that fits in place: one of the state.
        donate = (1,) if parts.several else (0, 1, 2)

        @partial(jax.jit, static_argnames="round", donate_argnums=donate, compiler_options=options)
        def apply(outgoing, local, message, results, t, *, round):
            run = placement.on_devices(partial(parts.apply, rnd=round), (rows,) * 4, rows)
            return parts.finish(run(outgoing, local, message, results), t)

        self._send, self._apply = send, apply
        self._compute = placement.on_devices(parts.compute, (rows, rows, P()), rows)

    def lower(self, state: PyTree, batch: PyTree, t: object, *, round: int | None) -> PyTree:
        """As `jax.jit` does; compiles only the programs that no earlier call has compiled."""
        if round is None:
            return self._whole.lower(state, batch, t, round=None)
        return SimpleNamespace(compile=lambda: self._compile(state, batch, t, round))

    def _compile(self, state, batch, t, round) -> "Program":
        parts, batches = self._parts, batch if self._parts.several else (batch,)
        local, outgoing = parts.split(state)

        def like(tree):
            sharding = self._placement.stacked
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
            )

        def compiled_apply():
            after, result = jax.eval_shape(self._compute, local, batches[0], t)
            message = jax.eval_shape(partial(self._send, round=round), outgoing)
            shapes = like((outgoing, after, message, [result] * len(batches)))
            return self._apply.lower(*shapes, t, round=round).compile()

        def compiled_compute():
            donated = (0,) if parts.several else ()
            options = self._placement, self._options, self._cached
            return compile_each(parts.compute, (local, batches[0]), *options, donated)

        def once(key, compiled):
            if key not in self._compiled:
                self._compiled[key] = compiled()
            return self._compiled[key]

        def cached(name, compiled):
            return once(name, lambda: self._cached(name, compiled))

        send = cached(
            f"send {round}", lambda: self._send.lower(like(outgoing), round=round).compile()
        )
        apply = cached(f"apply {round}", compiled_apply)
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(batches[0]))
        held = sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves((state, batch))
        )
        return Program(parts, held, send, once(shapes, compiled_compute), apply)


class Program(NamedTuple):
    """A compiled step of one round, with the interface of `jax.stages.Compiled`."""

    parts: Parts
    held: int  # bytes of the state and the batches on one device
    send: Any
    compute: PerDevice
    apply: Any

    def __call__(self, state: PyTree, batch: PyTree, t: object) -> tuple[PyTree, PyTree]:
        return self._run(state, batch, t, lambda part, arrays: None)

    def timed(
        self, state: PyTree, batch: PyTree, t: object
    ) -> tuple[tuple[PyTree, PyTree], tuple[float, float]]:
        """The result of a call, and the seconds of its compute and its message; waits for both."""
        jax.block_until_ready((state, batch))
        began, ends = time.perf_counter(), {}

        def wait(part, arrays):
            jax.block_until_ready(arrays)
            ends[part] = time.perf_counter() - began  # of the last device

        result = self._run(state, batch, t, wait)
        return result, (ends["compute"], ends["message"])

    def _run(self, state, batch, t, look: Callable[[str, PyTree], None]) -> tuple[PyTree, PyTree]:
        local, outgoing = self.parts.split(state)
        if self.parts.several:  # `compute` donates its arguments
            outgoing = _unshared(outgoing, local)

        def run(program, local, batches):
            results = []
            for k, batch in enumerate(batches):
                local, result = program(local, batch, t + k)
                results.append(result)
            look("compute", (local, results))
            return local, results

        # The main thread starts all programs that communicate. XLA executes the programs of one
        # thread in order, so each is paired with its counterpart in the other processes.
        coming = self.compute.begin(run, local, batch if self.parts.several else (batch,))
        message = self.send(outgoing)
        look("message", message)
        local, results = coming()
        return self.apply(outgoing, local, message, results, t)

    def memory_analysis(self) -> SimpleNamespace:
        """Bytes on one device, as `jax.stages.Compiled.memory_analysis` names them."""
        parts = self.send, self.compute.programs[0], self.apply
        send, compute, apply = (part.memory_analysis() for part in parts)
        new = [x.output_size_in_bytes - x.alias_size_in_bytes for x in (send, compute, apply)]
        copies = send.argument_size_in_bytes if self.parts.several else 0
        first = send.temp_size_in_bytes + compute.temp_size_in_bytes
        last = new[2] + apply.temp_size_in_bytes
        return SimpleNamespace(
            argument_size_in_bytes=self.held,
            temp_size_in_bytes=copies + new[0] + new[1] + max(first, last),
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
        )


def _unshared(tree: PyTree, other: PyTree) -> PyTree:
    """The tree, with copies of the arrays that it shares with ``other``."""
    ids = {id(x) for x in jax.tree.leaves(other)}
    shared = [x for x in jax.tree.leaves(tree) if id(x) in ids]
    copies = dict(zip(map(id, shared), _copied(shared), strict=True))
    return jax.tree.map(lambda x: copies.get(id(x), x), tree)


@jax.jit
def _copied(arrays):
    return jax.tree.map(jnp.copy, arrays)
