"""Where the replicas are, and how a permutation moves their rows. Used by `gossip` alone.

`Layout` is what per-replica code finds out about itself from the names of its axes; `receive` turns
a permutation of replicas into slices and ``ppermute`` between devices.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.topology import Schedule, Send

AxisName = str | tuple[str, ...]

SMALL = 64 * 1024  # bytes


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


def sum_rows(rows: jax.Array, axis: int = 0) -> jax.Array:
    """``rows.sum(axis)`` by additions of halves: XLA's CPU reduction over rows is 100 times slower.

    Row by row, a mean of 64 took ten times as long as by halves.
    """
    count = rows.shape[axis]
    half = count // 2
    if not half:
        return jnp.squeeze(rows, axis)
    first = jax.lax.slice_in_dim(rows, 0, half, axis=axis)
    second = jax.lax.slice_in_dim(rows, half, 2 * half, axis=axis)
    total = sum_rows(first + second, axis)
    if count % 2:
        total = total + jax.lax.index_in_dim(rows, -1, axis, keepdims=False)
    return total


def beside(rows: jax.Array, block: jax.Array) -> jax.Array:
    """(block,) against (block, ...): explicit, so that no rank is promoted."""
    return rows.reshape(rows.shape + (1,) * (block.ndim - 1))


# --- permutations -------------------------------------------------------------------------------


def receive(block: jax.Array, send: Send, layout: Layout) -> jax.Array:
    """(block, ...): row l is what replica ``device * block + l`` receives (anything if idle)."""
    if layout.devices == 1:
        own = np.arange(layout.block)
        return _take(block, np.where(send.sources < 0, own, send.sources))
    pieces = route(send.sources, layout.devices, layout.block)
    if pieces is None:
        return _receive_unevenly(block, send.sources, layout)
    received, order = [], []
    for device_map, rows, source_rows in pieces:
        taken = _take(block, source_rows)
        if any(source not in (-1, device) for device, source in enumerate(device_map)):
            pairs = [(source, device) for device, source in enumerate(device_map) if source >= 0]
            taken = _permute(taken, pairs, layout)
        received.append(taken)
        order.extend(rows)
    return _take(_concatenate(received), np.argsort(order))


def receive_all(blocks: Sequence[jax.Array], send: Send, layout: Layout) -> list[jax.Array]:
    """`receive` for each; small arrays of a dtype travel together, as one message."""
    return together(lambda block: receive(block, send, layout), blocks, layout, leading=1)


def together(
    move: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    layout: Layout,
    leading: int = 0,
) -> list[jax.Array]:
    """``move`` of each, which keeps shapes; of small arrays of a dtype at once where they travel.

    ``leading`` dimensions of all arrays are the same; small arrays are flat beyond these.
    """
    packs = _packs(arrays, leading) if layout.devices > 1 else [[k] for k in range(len(arrays))]
    moved: list[jax.Array | None] = [None] * len(arrays)
    for pack in packs:
        if len(pack) == 1:
            moved[pack[0]] = move(arrays[pack[0]])
            continue
        flat = [arrays[k].reshape(*arrays[k].shape[:leading], -1) for k in pack]
        whole = move(jnp.concatenate(flat, axis=leading))
        ends = np.cumsum([x.shape[leading] for x in flat])
        for k, part in zip(pack, jnp.split(whole, ends[:-1], axis=leading), strict=True):
            moved[k] = part.reshape(arrays[k].shape)
    return moved


def _packs(arrays: Sequence[jax.Array], leading: int) -> list[list[int]]:
    """Which arrays travel together: those below `SMALL` bytes, by dtype; the others alone."""
    packs: dict[Any, list[int]] = {}
    for k, x in enumerate(arrays):
        small = math.prod(x.shape[leading:]) * x.dtype.itemsize < SMALL and not _sharded()
        packs.setdefault(x.dtype if small else k, []).append(k)
    return list(packs.values())


def over_gloo() -> bool:
    """Whether arrays travel between processes through gloo, jax's library for CPUs."""
    implementation = jax.config.jax_cpu_collectives_implementation
    return jax.process_count() > 1 and jax.default_backend() == "cpu" and implementation == "gloo"


def _permute(x: jax.Array, pairs: list[tuple[int, int]], layout: Layout) -> jax.Array:
    """``ppermute``, and `swap` where gloo would send the two halves of a pair in turn."""
    axis = layout.device_axis
    swapped = _are_swapped(pairs, layout.devices) and not checks_vma(x, axis)
    if swapped and over_gloo() and not _sharded():
        return swap(x, pairs, axis)
    return jax.lax.ppermute(x, axis, pairs)


def _sharded() -> bool:
    """Whether XLA shards a replica over devices of its own: its arrays are only whole together."""
    return bool(jax.sharding.get_abstract_mesh().auto_axes)


def _are_swapped(pairs: list[tuple[int, int]], devices: int) -> bool:
    """Whether every device has a partner that it sends to and hears from."""
    partner = dict(pairs)
    return len(partner) == devices and all(a != b == partner.get(a) for b, a in pairs)


def swap(x: jax.Array, pairs: list[tuple[int, int]], axis: str) -> jax.Array:
    """What ``ppermute`` gives for devices in pairs, bit for bit, as a sum over each pair.

    In gloo a device that sends to its partner cannot tell it meanwhile that it wants to hear: that
    word waits behind the message, on the same connection. So the two messages of a permute travel
    one after the other, and a pair has half the bandwidth of its links (1330 ms for 16 MB at
    200 Mbit/s). Its sum over two is sent in parts, both ways at once (675 ms). Added as unsigned
    integers of 32 bits, own bits are taken off again exactly.
    """
    bits = _words(x)
    groups = sorted({tuple(sorted(pair)) for pair in pairs})
    return _unworded(jax.lax.psum(bits, axis, axis_index_groups=groups) - bits, x)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array in 32-bit words; XLA would make those of fewer bits wider for a sum."""
    size = x.dtype.itemsize
    if size >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    narrow = x.astype(jnp.uint8) if x.dtype == bool else x
    flat = jnp.pad(narrow.reshape(-1), (0, -x.size % (4 // size)))
    return jax.lax.bitcast_convert_type(flat.reshape(-1, 4 // size), jnp.uint32)


def _unworded(bits: jax.Array, like: jax.Array) -> jax.Array:
    """The array of `_words`, in the shape and dtype of ``like``."""
    dtype = jnp.uint8 if like.dtype == bool else like.dtype
    x = jax.lax.bitcast_convert_type(bits, dtype)
    if like.dtype.itemsize < 4:
        x = x.reshape(-1)[: like.size].reshape(like.shape)
    return x.astype(like.dtype)


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
    device = jax.lax.axis_index(layout.device_axis)
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
            taken = _permute(taken, pairs, layout)
        received = received.at[jnp.asarray(to_row)[device]].set(taken, mode="drop")
    return received


def _take(block: jax.Array, rows: Sequence[int]) -> jax.Array:
    """``block[rows]`` for static rows; a few slices of consecutive ones cost less than a gather."""
    rows = np.asarray(rows)
    if len(rows) == len(block) and (rows == np.arange(len(rows))).all():
        return block
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    if len(runs) > 8:
        return block[rows]
    return _concatenate([block[run[0] : run[-1] + 1] for run in runs])


def _concatenate(pieces: list[jax.Array]) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
