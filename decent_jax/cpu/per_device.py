"""One program per CPU device, for code that communicates nothing.

XLA's CPU client runs multi-device programs one after another, whichever threads start them, so that
each program has a thread for every device. A gradient on two devices would therefore wait until a
message has arrived. Single-device programs do not wait.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from decent_jax.ground.pytree import PyTree


def compile_each(
    body: Callable[..., PyTree],
    trees: tuple[PyTree, ...],
    placement: Any,
    options: dict[str, object],
    cached: Callable[..., PyTree],
    donate: tuple[int, ...] = (),
) -> "PerDevice":
    """One program per device of this process, compiled in threads.

    Args:
      body: code for one device, ``(*trees, t)`` with trees of (block, ...), and t (2,) int32: the
        step, and the first replica of the device.
      trees: stacked arrays with the shapes that later arguments will have.
      placement: a `decent_jax.replicas.Placement`.
      options: XLA's compiler options.
      cached: ``cached(name, compiled, devices)`` returns a cached executable or ``compiled()``.
      donate: indices of the donated trees.
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

        return cached(f"device {first} {shapes}", compile_it, [device])

    local = [
        (k * placement.block, device)
        for k, device in enumerate(placement.mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    programs = [future.result() for future in _in_threads(compiled, local)]
    return PerDevice(placement, [first for first, _ in local], programs)


class PerDevice(NamedTuple):
    """The programs of this process's devices; see `compile_each`."""

    placement: Any
    firsts: list[int]  # the first replica of each device
    programs: list[Any]

    def begin(self, run: Callable[..., PyTree], *trees: PyTree) -> Callable[[], PyTree]:
        """Start ``run(program, *shards)`` per device; returns a function that awaits the results.

        Args:
          run: function of the device's program, ``program(*trees, t)``, and its parts of the trees.
          trees: trees of stacked arrays; donated ones may not be used afterwards.
        """

        def of_device(k, shards):
            def program(*args):
                *trees, t = args
                return self.programs[k](*trees, np.array([t, self.firsts[k]], np.int32))

            return run(program, *shards)

        def join(*parts):
            shape = (self.placement.num_replicas, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(
                shape, self.placement.stacked, list(parts)
            )

        # Take all shards before any is donated; after that, the others cannot be taken.
        parts = [
            (k, jax.tree.map(lambda x, k=k: x.addressable_data(k), trees))
            for k in range(len(self.programs))
        ]
        futures = _in_threads(of_device, parts)
        return lambda: jax.tree.map(join, *(future.result() for future in futures))


def _in_threads(fn: Callable[..., PyTree], arguments: list[tuple]) -> list[Future]:
    """Call ``fn`` with each tuple of arguments, in a thread that ends with the call."""
    threads = ThreadPoolExecutor(len(arguments), thread_name_prefix="device")
    futures = [threads.submit(fn, *args) for args in arguments]
    threads.shutdown(wait=False)
    return futures
