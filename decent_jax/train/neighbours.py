"""What a process holds, sent to the process after it, and back: the loss of a host loses nothing.

Each device of a process sends its rows to the device with the same place in the next process, as a
gossip message travels. The last process sends to the first.
"""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from decent_jax.replicas import Placement


class Neighbours:
    """Programs that all processes run at the same point; for two processes at least."""

    def __init__(self, placement: Placement):
        self._placement = placement
        by_process: dict[int, list[int]] = {}
        for place, device in enumerate(placement.mesh.devices.reshape(-1, placement.fsdp)[:, 0]):
            by_process.setdefault(device.process_index, []).append(place)
        own = [by_process[process] for process in sorted(by_process)]
        there = [
            (source, target)
            for mine, others in zip(own, [*own[1:], own[0]], strict=True)
            for source, target in zip(mine, others, strict=True)
        ]
        self._there = self._sender(there)
        self._back = self._sender([(target, source) for source, target in there])

    def send(self, tree: Any) -> Any:
        """What the process before this one holds of the arrays (n, ...), in this one's rows."""
        return jax.block_until_ready(self._there(tree))

    def give_back(self, held: Any, lacks: bool, own: Any) -> Any:
        """The tree of arrays as their owners had them.

        Args:
          held: what `send` returned; anything where the next process lacks nothing.
          lacks: whether this process has lost its rows.
          own: the arrays with its rows; anything where it ``lacks`` them.
        """
        given = jax.block_until_ready(self._back(held))
        return given if lacks else own

    def _sender(self, pairs: list[tuple[int, int]]) -> Any:
        def body(tree):
            return jax.tree.map(lambda x: jax.lax.ppermute(x, "replica", pairs), tree)

        send = self._placement.on_devices(body, P("replica"), P("replica"))
        return jax.jit(lambda tree: self._placement.place_all(send(tree)))


def from_first(value: Any, has_it: bool) -> Any:
    """A value that JSON can hold, from the first process that has it; all call it together."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8) if has_it else np.zeros(0, np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([len(text)], np.int32)))[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(text)] = text
    source = int(np.flatnonzero(sizes)[0]) == jax.process_index()
    found = np.asarray(multihost_utils.broadcast_one_to_all(padded, is_source=source))
    return json.loads(found.astype(np.uint8).tobytes().rstrip(b"\0"))
