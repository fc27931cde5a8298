"""Where the replicas are, and how a permutation moves their rows. Used by `gossip` alone.

`Layout` is what per-replica code finds out about itself from the names of its axes; `receive` turns
a permutation of replicas into slices and ``ppermute`` between devices.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.topology import Schedule, Send

AxisName = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the replicas are: ``devices`` on a mesh axis, ``block`` rows on each."""

    device_axis: str | None
    block_axis: str | None
    devices: int
    block: int

    @staticmethod
    def of(schedule: Schedule, axis_name: AxisName) -> "Layout":
        """The layout of ``axis_name``, which must hold the schedule's replicas."""
        layout = Layout.over(axis_name)
        held = layout.devices * layout.block
        if held != schedule.num_replicas:
            raise ValueError(
                f"the schedule {schedule.name!r} is for {schedule.num_replicas} replicas, but "
                f"axis {axis_name!r} holds {held}; make the schedule for {held}, or vmap the rest "
                "with an axis of its own and pass axis_name=(mesh axis, vmapped axis)"
            )
        return layout

    @staticmethod
    def over(axis_name: AxisName) -> "Layout":
        names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        device_axes = [name for name in names if name in manual]
        block_axes = [name for name in names if name not in manual]
        sizes = {name: jax.lax.axis_size(name) for name in names}
        if len(device_axes) > 1 or len(block_axes) > 1 or names != (*device_axes, *block_axes):
            raise ValueError(
                "axis_name must be one axis, or a mesh axis followed by a vmapped axis, "
                f"got {axis_name!r}"
            )
        layout = Layout(*(axes[0] if axes else None for axes in (device_axes, block_axes)), 1, 1)
        return dataclasses.replace(
            layout,
            devices=sizes.get(layout.device_axis, 1),
            block=sizes.get(layout.block_axis, 1),
        )

    def lift(self, x: jax.Array) -> jax.Array:
        """This device's rows (block, ...): under vmap the batched array itself, not a message."""
        if self.block_axis is None:
            return x[None]
        if checks_vma(x, self.device_axis):  # jax 0.10-0.12: all_gather over vmap fails there
            raise ValueError(
                f"replicas vmapped over {self.block_axis!r} inside jax.shard_map need "
                "jax.shard_map(..., check_vma=False)"
            )
        return jax.lax.all_gather(x, self.block_axis)

    def drop(self, block: jax.Array) -> jax.Array:
        """The replica's own row of (block, ...)."""
        if self.block_axis is None:
            return block[0]
        row = jax.lax.axis_index(self.block_axis)
        return jax.lax.dynamic_index_in_dim(block, row, keepdims=False)

    def ids(self) -> jax.Array:
        """() int32: which replica this is."""
        row = 0 if self.block_axis is None else jax.lax.axis_index(self.block_axis)
        if self.device_axis is None:
            return row
        return jax.lax.axis_index(self.device_axis) * self.block + row

    def rows(self, per_replica: np.ndarray) -> jax.Array:
        """This device's (block,) part of a constant given for every replica (n,)."""
        table = jnp.asarray(per_replica).reshape(self.devices, self.block)
        if self.device_axis is None:
            return table[0]
        return table[jax.lax.axis_index(self.device_axis)]


def checks_vma(x: jax.Array, axis: str | None) -> bool:
    """Whether ``x`` is seen inside ``shard_map(check_vma=True)`` over ``axis``."""
    return axis in jax.typeof(x).mat.varying


def sum_rows(rows: jax.Array) -> jax.Array:
    """``rows.sum(axis=0)`` as additions: XLA's CPU reduction over rows is 100 times slower."""
    total = rows[0]
    for k in range(1, len(rows)):
        total = total + rows[k]
    return total


def beside(rows: jax.Array, block: jax.Array) -> jax.Array:
    """(block,) against (block, ...): explicit, so that no rank is promoted."""
    return rows.reshape(rows.shape + (1,) * (block.ndim - 1))


# --- permutations -------------------------------------------------------------------------------


def receive(block: jax.Array, send: Send, layout: Layout) -> jax.Array:
    """(block, ...): row l is what replica ``device * block + l`` receives (anything if idle)."""
    pieces = route(send.sources, layout.devices, layout.block)
    if pieces is None:
        return _receive_unevenly(block, send.sources, layout)
    received, order = [], []
    for device_map, rows, source_rows in pieces:
        taken = _take(block, source_rows)
        if any(source not in (-1, device) for device, source in enumerate(device_map)):
            pairs = [(source, device) for device, source in enumerate(device_map) if source >= 0]
            taken = jax.lax.ppermute(taken, layout.device_axis, pairs)
        received.append(taken)
        order.extend(rows)
    return _take(_concatenate(received), np.argsort(order))


def route(sources: np.ndarray, d: int, b: int):
    """Rows grouped by the permutation of devices that brings them, or None where none does.

    Returns [(device_map, rows, source_rows)]: device D receives from ``device_map[D]`` (-1: from
    nobody) its rows ``rows``, which lie there in ``source_rows``.
    """
    table = np.asarray(sources).reshape(d, b)
    pieces: dict[tuple, tuple[list[int], list[int]]] = {}
    for row in range(b):
        wanted = table[:, row]
        heard = wanted[wanted >= 0]
        source_rows = set((heard % b).tolist())
        if len(np.unique(heard // b)) < len(heard) or len(source_rows) > 1:
            return None
        device_map = tuple(np.where(wanted >= 0, wanted // b, -1).tolist())
        rows, taken = pieces.setdefault(device_map, ([], []))
        rows.append(row)
        taken.append(source_rows.pop() if source_rows else row)
    return [(device_map, rows, taken) for device_map, (rows, taken) in pieces.items()]


def _receive_unevenly(block: jax.Array, sources: np.ndarray, layout: Layout) -> jax.Array:
    """The general case: one cyclic shift of devices per distance a row travels, padded tables."""
    d, b = layout.devices, layout.block
    wanted: dict[int, list[list[tuple[int, int]]]] = {}
    for replica, source in enumerate(np.asarray(sources).tolist()):
        if source >= 0:
            shift = (replica // b - source // b) % d
            edges = wanted.setdefault(shift, [[] for _ in range(d)])
            edges[replica // b].append((replica % b, source % b))
    received = jnp.zeros_like(block)
    device = 0 if layout.device_axis is None else jax.lax.axis_index(layout.device_axis)
    for shift, edges in sorted(wanted.items()):
        width = max(map(len, edges))
        to_row = np.full((d, width), b)  # b: out of range, dropped
        from_row = np.zeros((d, width), np.int64)
        for receiver, pairs in enumerate(edges):
            for k, (row, source_row) in enumerate(pairs):
                to_row[receiver, k] = row
                from_row[(receiver - shift) % d, k] = source_row
        taken = block[jnp.asarray(from_row)[device]]
        if shift:
            pairs = [((receiver - shift) % d, receiver) for receiver in range(d)]
            taken = jax.lax.ppermute(taken, layout.device_axis, pairs)
        received = received.at[jnp.asarray(to_row)[device]].set(taken, mode="drop")
    return received


def _take(block: jax.Array, rows: Sequence[int]) -> jax.Array:
    """``block[rows]`` for static rows, as slices of consecutive ones (a gather costs more)."""
    rows = np.asarray(rows)
    if len(rows) == len(block) and (rows == np.arange(len(rows))).all():
        return block
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return _concatenate([block[run[0] : run[-1] + 1] for run in runs])


def _concatenate(pieces: list[jax.Array]) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
