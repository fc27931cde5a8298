"""Code that communicates nothing, as a program of its own on each device of a process of CPUs.

XLA's CPU client runs programs of several devices one after the other, whatever threads start them,
so that each has threads for all of its parts. A gradient on two devices would wait until a message
has arrived. Programs of one device wait for nothing.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P


def compile_each(
    body: Callable[..., Any],
    trees: tuple[Any, ...],
    placement: Any,
    options: dict[str, Any],
    keep: Callable[..., Any],
    donate: tuple[int, ...] = (),
) -> "PerDevice":
    """A program of each device of this process, compiled in threads.

    Args:
      body: code for one device, ``(*trees, t)`` with trees of (block, ...), and t (2,) int32: the
        step, and the first replica of the device.
      trees: stacked arrays like those that it is called with.
      placement: a `decent_jax.replicas.Placement`.
      options: XLA's.
      keep: ``keep(name, compiled, devices)`` is a kept program, or what ``compiled()`` makes.
      donate: the trees that are donated.
    """
    t, shapes = np.zeros(2, np.int32), [(x.shape, str(x.dtype)) for x in jax.tree.leaves(trees)]

    def compiled(first, device):
        part = placement.on(device)
        run = part.on_devices(body, (*[P("replica")] * len(trees), P()), P("replica"))

        def like(x):
            shape = (placement.block, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=part.stacked)

        def compile_it():
            jitted = jax.jit(run, donate_argnums=donate, compiler_options=options)
            return jitted.lower(*jax.tree.map(like, trees), t).compile()

        return keep(f"device {first} {shapes}", compile_it, [device])

    local = [
        (k * placement.block, device)
        for k, device in enumerate(placement.mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    programs = [one.result() for one in _in_threads(compiled, local)]
    return PerDevice(placement, [first for first, _ in local], programs)


class PerDevice(NamedTuple):
    """The programs of this process's devices; see `compile_each`."""

    placement: Any
    firsts: list[int]  # the first replica of each device
    programs: list[Any]

    def begin(self, run: Callable[..., Any], *trees: Any) -> Callable[[], Any]:
        """Start ``run(program, *own)`` on each device; a function that gives the stacked results.

        Args:
          run: ``program(*trees, t)`` is that of a device, ``own`` are its parts of the trees.
          trees: stacked; those that a program donates may not be used afterwards.
        """

        def of_device(k, own):
            def program(*args):
                *given, t = args
                return self.programs[k](*given, np.array([t, self.firsts[k]], np.int32))

            return run(program, *own)

        def join(*parts):
            shape = (self.placement.num_replicas, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(
                shape, self.placement.stacked, list(parts)
            )

        # Before any is donated: an array of which a part is gone gives no others.
        parts = [
            (k, jax.tree.map(lambda x, k=k: x.addressable_data(k), trees))
            for k in range(len(self.programs))
        ]
        coming = _in_threads(of_device, parts)
        return lambda: jax.tree.map(join, *(one.result() for one in coming))


def _in_threads(fn: Callable[..., Any], arguments: list[tuple]) -> list[Future]:
    """Calls of ``fn``, each in a thread that ends with it."""
    threads = ThreadPoolExecutor(len(arguments), thread_name_prefix="device")
    coming = [threads.submit(fn, *own) for own in arguments]
    threads.shutdown(wait=False)
    return coming
