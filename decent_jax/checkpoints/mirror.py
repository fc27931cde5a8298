"""Mirroring of each process's rows in the next process, so that a lost host loses no state.

Each device sends its rows to the device at the same position in the next process, as a gossip
message. The last process sends to the first.
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec as P

from decent_jax.cluster import watch
from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.replicas import Placement


class Mirror:
    """Programs that at least two processes run, all of them at the same point."""

    def __init__(self, placement: Placement):
        self._placement = placement
        devices = placement.mesh.devices.reshape(-1, placement.fsdp)[:, 0]
        there = pairs([device.process_index for device in devices])
        self._there = self._sender(there)
        self._back = self._sender([(target, source) for source, target in there])

    def send(self, tree: PyTree) -> PyTree:
        """The arrays (n, ...) in which this process holds the rows of the process before it."""
        return jax.block_until_ready(self._there(tree))

    def give_back(self, held: PyTree, lacks: bool, own: PyTree) -> PyTree:
        """Return the mirrored rows: the arrays (n, ...) with every process's own rows again.

        Args:
          held: the result of `send`; ignored if the process before this one still has its rows.
          lacks: whether this process has lost its rows.
          own: the arrays with this process's rows; any value if it ``lacks`` them.
        """
        returned = jax.block_until_ready(self._back(held))
        return returned if lacks else own

    def _sender(self, pairs: list[tuple[int, int]]) -> Callable[[PyTree], PyTree]:
        def body(tree):
            return jax.tree.map(lambda x: jax.lax.ppermute(x, "replica", pairs), tree)

        send = self._placement.on_devices(body, P("replica"), P("replica"))
        return jax.jit(lambda tree: self._placement.place_all(send(tree)))


def pairs(processes: Sequence[int]) -> list[tuple[int, int]]:
    """(from, to) for every position on the mesh; ``processes`` lists the owner of each device.

    >>> pairs([0, 0, 1, 1, 2, 2])
    [(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)]
    """
    places: dict[int, list[int]] = {}
    for place, process in enumerate(processes):
        places.setdefault(process, []).append(place)
    sources = [places[process] for process in sorted(places)]
    return [
        pair
        for source, target in zip(sources, [*sources[1:], sources[0]], strict=True)
        for pair in zip(source, target, strict=True)
    ]


def from_first(value: Json, has_it: bool) -> Json:
    """A JSON value, broadcast from the first process that has it; all processes must call this."""
    first = watch.gather(has_it).index(True)
    return watch.gather(value if first == jax.process_index() else {})[first]
