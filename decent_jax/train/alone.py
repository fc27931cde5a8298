"""Code that communicates nothing, as a program of its own on each device of a process of CPUs.

XLA's CPU client runs programs of several devices one after the other, whatever threads start them,
so that each has threads for all of its parts. A gradient on two devices would wait until a message
has arrived. Programs of one device wait for nothing.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from decent_jax import replicas
from decent_jax.replicas import Placement
from decent_jax.train.kept_programs import NOWHERE, KeptPrograms


class Alone:
    """A function of stacked trees and a step, on each device.

    Args:
      body: code for one device, ``(*trees, t)`` with trees of (block, ...), and t (2,) int32: the
        step, and the first replica of the device.
      trees: how many.
      placement: where the replicas live.
      options: XLA's.
      donate: the trees that are donated.
      kept: has its programs.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        trees: int,
        placement: Placement,
        options: dict[str, Any],
        donate: tuple[int, ...] = (),
        kept: KeptPrograms = NOWHERE,
    ):
        self._placement, self._kept = placement, kept
        self._parts, self._functions, self._threads = [], [], []
        self._compiled: dict[tuple, AloneProgram] = {}  # by shapes and dtypes
        for k, device in enumerate(placement.mesh.devices.flat):
            if device.process_index != jax.process_index():
                continue
            part = replicas.place(placement.block, [device])
            run = part.on_devices(body, (*[P("replica")] * trees, P()), P("replica"))
            self._parts.append((part, k * placement.block))
            self._functions.append(jax.jit(run, donate_argnums=donate, compiler_options=options))
            self._threads.append(ThreadPoolExecutor(1, thread_name_prefix="alone"))

    def compile(self, *trees: Any) -> "AloneProgram":
        """For stacked trees like these; the same one for all that are alike."""
        key = tuple((x.shape, x.dtype) for x in jax.tree.leaves(trees))
        if key not in self._compiled:
            self._compiled[key] = self._program(trees, str(key))
        return self._compiled[key]

    def _program(self, trees: Any, name: str) -> "AloneProgram":
        t = np.zeros(2, np.int32)

        def compiled(k):
            part, first = self._parts[k]

            def like(x):
                shape = (self._placement.block, *x.shape[1:])
                return jax.ShapeDtypeStruct(shape, x.dtype, sharding=part.stacked)

            def compile_it():
                return self._functions[k].lower(*jax.tree.map(like, trees), t).compile()

            devices = list(part.mesh.devices.flat)
            return self._kept.get(f"alone {first} {name}", compile_it, devices)

        coming = [thread.submit(compiled, k) for k, thread in enumerate(self._threads)]
        firsts = [first for _, first in self._parts]
        programs = [one.result() for one in coming]
        return AloneProgram(self._placement, firsts, self._threads, programs)


class AloneProgram(NamedTuple):
    """A compiled `Alone`; asked for its memory and its text, like jax's own, it is one device's."""

    placement: Placement
    firsts: list[int]  # the first replica of each device
    threads: list[ThreadPoolExecutor]
    programs: list[Any]

    def begin(self, run: Callable[..., Any], *trees: Any) -> Callable[[], Any]:
        """Start ``run(program, *own)`` on each device; a function that gives the stacked results.

        Args:
          run: ``program(*trees, t)`` is that of a device, ``own`` are its parts of the trees.
          trees: stacked; those that a program donates may not be used afterwards.
        """

        def program(k):
            def with_first(*args):
                *own, t = args
                return self.programs[k](*own, np.array([t, self.firsts[k]], np.int32))

            return with_first

        # Before any is donated: an array of which a part is gone gives no others.
        devices = range(len(self.threads))
        parts = [jax.tree.map(lambda x, k=k: x.addressable_data(k), trees) for k in devices]
        coming = [
            thread.submit(run, program(k), *parts[k]) for k, thread in enumerate(self.threads)
        ]

        def join(*parts):
            shape = (self.placement.num_replicas, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(
                shape, self.placement.stacked, list(parts)
            )

        return lambda: jax.tree.map(join, *(one.result() for one in coming))

    def as_text(self) -> str:
        """The program of a device."""
        return self.programs[0].as_text()

    def memory_analysis(self) -> Any:
        """Of a device."""
        return self.programs[0].memory_analysis()
