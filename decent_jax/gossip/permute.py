"""Placement of replicas, permutations as slices and ``ppermute``, and weights of rows.

With one replica per device, a permutation of replicas is one ``ppermute`` per array. With several
per device, it is slices and one ``ppermute`` for each permutation of devices that it contains.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.cpu import gloo
from decent_jax.topology import Round, Schedule, Send

AxisName = str | Sequence[str]
Tree = TypeVar("Tree")
Weight = float | jax.Array  # equal on all replicas, or (block,)
SMALL = 64 * 1024  # bytes; smaller arrays travel together


@dataclasses.dataclass(frozen=True)
class ReplicaAxis:
    """The replica axis: ``devices`` on mesh axes, ``block`` rows on each.

    Replica i is row ``i % block`` of device ``i // block``.
    """

    device_axis: tuple[str, ...]
    block_axis: str | None
    devices: int
    block: int

    @staticmethod
    def of(schedule: Schedule, axis_name: AxisName) -> "ReplicaAxis":
        """The axis ``axis_name``, which must hold the schedule's replicas."""
        axis = ReplicaAxis.over(axis_name)
        held = axis.devices * axis.block
        if held != schedule.num_replicas:
            raise ValueError(
                f"the schedule {schedule.name!r} is for {schedule.num_replicas} replicas, but "
                f"axis {axis_name!r} holds {held}; make the schedule for {held}, or vmap the rest "
                "with a separate axis and pass axis_name=(mesh axis, vmapped axis)"
            )
        return axis

    @staticmethod
    def over(axis_name: AxisName) -> "ReplicaAxis":
        """The axis with this name or names: mesh axes, a vmapped axis, or both in this order.

        Several mesh axes are flattened into one; the last varies fastest.
        """
        names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        on_mesh = tuple(name for name in names if name in manual)
        vmapped = tuple(name for name in names if name not in manual)
        if not names or names != on_mesh + vmapped or len(vmapped) > 1:
            raise ValueError(
                "axis_name must be one axis, or mesh axes followed by a vmapped axis, "
                f"got {axis_name!r}"
            )
        block = vmapped[0] if vmapped else None
        try:
            devices, rows = (jax.lax.axis_size(name) if name else 1 for name in (on_mesh, block))
        except NameError:
            raise ValueError(
                f"no axis is named {block!r} here; run the step in jax.vmap(step, "
                f"axis_name={block!r}), or in jax.shard_map over a mesh axis of this name"
            ) from None
        return ReplicaAxis(on_mesh, block, devices, rows)

    def lift(self, x: jax.Array) -> jax.Array:
        """This device's rows (block, ...), without sending; under vmap, the batched array."""
        if self.block_axis is None:
            return x[None]
        if self.checks_vma(x):  # jax 0.10-0.12: all_gather over vmap fails there
            raise ValueError(
                f"replicas vmapped over {self.block_axis!r} inside jax.shard_map need "
                "jax.shard_map(..., check_vma=False)"
            )
        rows = jax.lax.all_gather(x, self.block_axis)
        if not self.device_axis:
            _check_one_device(rows, self.block_axis)
        return rows

    def gathered(self, x: jax.Array) -> jax.Array:
        """The rows of all replicas, (devices block, ...), on every device."""
        rows = self.lift(x)
        if not self.device_axis:
            return rows
        return jax.lax.all_gather(rows, self.device_axis, tiled=True)

    def drop(self, rows: jax.Array) -> jax.Array:
        """The replica's own row of (block, ...)."""
        if self.block_axis is None:
            return rows[0]
        row = jax.lax.axis_index(self.block_axis)
        return nth(rows, row)

    def replica(self) -> jax.Array:
        """() int32: the number of this replica."""
        row = 0 if self.block_axis is None else jax.lax.axis_index(self.block_axis)
        if not self.device_axis:
            return jnp.asarray(row)
        return jax.lax.axis_index(self.device_axis) * self.block + row

    def rows(self, per_replica: np.ndarray) -> jax.Array:
        """This device's (block,) part of a constant given for every replica (n,)."""
        table = jnp.asarray(per_replica).reshape(self.devices, self.block)
        return table[jax.lax.axis_index(self.device_axis) if self.device_axis else 0]

    def checks_vma(self, x: jax.Array) -> bool:
        """Whether ``x`` is traced inside ``shard_map(check_vma=True)`` over the mesh axis."""
        # `mat` is not documented (jax 0.10 to 0.12). Once a public function of jax shows over which
        # axes a traced array varies, or `all_gather` over a vmapped axis works there, use that.
        return not jax.typeof(x).mat.varying.isdisjoint(self.device_axis)


def _check_one_device(rows: jax.Array, name: str) -> None:
    """Warns if vmapped replicas seem to lie on several devices; raises ValueError if they do.

    The type of a traced array shows how Explicit axes of a mesh shard it, but does not show Auto
    axes. For those, the hint is an axis of the current mesh with the name of the vmapped axis.
    """
    told = (
        f"the replicas vmapped over {name!r} lie on several devices, and each device would gather "
        "all; mix with gossip.mix_on(mesh, ...), or in jax.shard_map (docs/loop_details.md)"
    )
    spec, mesh = jax.typeof(rows).sharding.spec, jax.sharding.get_abstract_mesh()
    if spec and spec[0] is not None:
        raise ValueError(told)
    if name in mesh.auto_axes and mesh.shape[name] > 1:
        warnings.warn(told, stacklevel=2)


def expand(flags: jax.Array, rows: jax.Array) -> jax.Array:
    """(block,) reshaped to broadcast with (block, ...) without rank promotion."""
    return flags.reshape(flags.shape + (1,) * (rows.ndim - 1))


def clean(rows: jax.Array, finite: jax.Array | None) -> jax.Array:
    """The rows (block, ...) with zeros for replicas that are not finite; ``finite=None``: as is."""
    if finite is None:
        return rows
    return jnp.where(expand(finite, rows), rows, jnp.zeros_like(rows))


def at_least_float32(x: jax.Array) -> jnp.dtype:
    """The dtype in which to compute with ``x``: its own, or float32 if that is wider."""
    small = x.dtype.itemsize == 1  # 8-bit floats, which jax does not promote
    return jnp.dtype("float32") if small else jnp.promote_types(x.dtype, jnp.float32)


def barrier(tree: Tree) -> Tree:
    """The same arrays; XLA moves no computation across them, and does not compute them twice."""
    return jax.lax.optimization_barrier(tree)  # pyright: ignore[reportUnknownMemberType]


def nth(rows: jax.Array, row: jax.Array) -> jax.Array:
    """``rows[row]``."""
    return jax.lax.dynamic_index_in_dim(rows, row, keepdims=False)  # pyright: ignore


def pad(x: jax.Array, widths: tuple[int, int] | Sequence[tuple[int, int]]) -> jax.Array:
    """``jnp.pad``, with zeros."""
    return jnp.pad(x, widths)  # pyright: ignore[reportUnknownMemberType]


def squared_norm(x: jax.Array) -> jax.Array:
    """() float32 or wider: the sum of squared magnitudes."""
    magnitude = jnp.abs(x) if jnp.iscomplexobj(x) else x
    return jnp.square(magnitude.astype(at_least_float32(magnitude))).sum()


def receive(rows: jax.Array, send: Send, axis: ReplicaAxis) -> jax.Array:
    """The rows that the replicas of this device receive; arbitrary ones for idle replicas.

    Args:
      rows: (block, ...), sent by the replicas of this device.
      send: the permutation of all replicas.
      axis: the replica axis.

    Returns:
      (block, ...).
    """
    d, b = axis.devices, axis.block
    if d == 1:
        return _take(rows, np.where(send.sources < 0, np.arange(b), send.sources)[None], axis)
    received: list[jax.Array] = []
    place = np.zeros((d, b + 1), int)  # index of each row among the received rows
    for device_map, to_rows, from_rows in route(send.sources, d, b):
        taken = _take(rows, from_rows, axis)
        if any(source not in (-1, device) for device, source in enumerate(device_map)):
            taken = _ppermute(taken, pairs_of(device_map), axis)
        begin = sum(map(len, received))
        np.put_along_axis(place, to_rows, begin + np.arange(len(taken))[None], axis=1)
        received.append(taken)
    return _take(_concatenate(received), place[:, :b], axis)


def receive_all(arrays: Sequence[jax.Array], send: Send, axis: ReplicaAxis) -> list[jax.Array]:
    """`receive` of each array; `together` packs small ones into fewer messages."""
    return together(lambda rows: receive(rows, send, axis), arrays, axis, leading=1)


def together(
    move: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    axis: ReplicaAxis,
    leading: int = 0,
    small: float | None = None,
) -> list[jax.Array]:
    """``move`` applied to each array, with one call for all small arrays of a dtype.

    Over gloo, one call moves all arrays of a dtype if a process has several devices. Before each
    collective they wait for each other, on cores that are busy with the gradient, and nothing is
    sent until then. If processes have one device each, separate messages for large arrays are 5%
    faster.

    Args:
      move: a function that keeps shapes and dtypes.
      arrays: arrays with equal ``leading`` dimensions; small ones are flattened after these.
      axis: the replica axis. With one device nothing is sent, so nothing is packed.
      leading: number of dimensions that all arrays share.
      small: arrays of fewer bytes are small; None: `SMALL`.
    """
    in_step = gloo.used() and axis.devices > jax.process_count()
    packs: dict[object, list[int]] = {}  # packed arrays by dtype, the others separately
    for k, x in enumerate(arrays):
        size = math.prod(x.shape[leading:]) * x.dtype.itemsize
        joins = axis.devices > 1 and (size < (small or SMALL) or in_step) and not _sharded()
        packs.setdefault(x.dtype if joins else k, []).append(k)
    moved: dict[int, jax.Array] = {}
    for pack in packs.values():
        if len(pack) == 1:
            moved[pack[0]] = move(arrays[pack[0]])
            continue
        flat = [arrays[k].reshape(*arrays[k].shape[:leading], -1) for k in pack]
        whole = move(jnp.concatenate(flat, axis=leading))
        ends = np.cumsum([x.shape[leading] for x in flat])
        for k, part in zip(pack, jnp.split(whole, ends[:-1], axis=leading), strict=True):
            moved[k] = part.reshape(arrays[k].shape)
    return [moved[k] for k in range(len(arrays))]


def coefficients(rnd: Round, axis: ReplicaAxis, finite: jax.Array | None) -> list[Weight]:
    """Weights of a replica's own row and of each send: floats where all are equal, else (block,).

    Args:
      rnd: a round without groups.
      axis: the replica axis.
      finite: (block,) bool, or None. A sender that is not finite has weight 0, and the receiver
        adds that weight to its own; a non-finite receiver renormalizes the weights of the others.
    """
    per_replica = [rnd.self_weights, *(send.weights for send in rnd.sends)]
    if finite is None:
        return [
            float(weights[0]) if np.ptp(weights) == 0 else axis.rows(weights)
            for weights in per_replica
        ]
    own, *others = (axis.rows(weights) for weights in per_replica)
    if not others:
        return [jnp.where(finite, own, jnp.nan)]
    arrived = jnp.stack([receive(finite, send, axis) for send in rnd.sends])
    weights = jnp.stack(others)
    sound = jnp.where(arrived, weights, 0)
    lost = jnp.where(arrived, 0, weights).sum(axis=0)
    total = sound.sum(axis=0)
    # 0 / 0: no sender is finite, so the replica stays NaN and is ignored by its receivers.
    own = jnp.where(finite, own + lost, total / total * 0)
    return [own, *jnp.where(finite[None], sound, sound / total[None])]


def weighted_sum(blocks: Sequence[jax.Array], weights: list[Weight], guarded: bool) -> jax.Array:
    """``sum_k weights[k] * blocks[k]``; if guarded, a weight of 0 adds 0, not 0 * NaN.

    It sums in at least float32, because in bfloat16 three weights of 1/3 sum to 1.002.
    """
    total, wide = None, at_least_float32(blocks[0])
    for rows, weight in zip(blocks, weights, strict=True):
        if not isinstance(weight, float | int):
            weight = expand(weight, rows)
        term = jnp.asarray(weight, wide) * rows.astype(wide)
        if guarded:
            term = jnp.where(weight == 0, jnp.zeros_like(term), term)
        total = term if total is None else total + term
    assert total is not None
    return total.astype(blocks[0].dtype)


def _ppermute(x: jax.Array, pairs: list[tuple[int, int]], axis: ReplicaAxis) -> jax.Array:
    may_sum = gloo.used() and not (axis.checks_vma(x) or _sharded())
    if may_sum and gloo.swap_is_faster(pairs, axis.devices):
        return gloo.swap(x, pairs, axis.device_axis)
    return jax.lax.ppermute(x, axis.device_axis, pairs)


def pairs_of(device_map: Sequence[int]) -> list[tuple[int, int]]:
    """(source, target) of each message of a (partial) permutation: D receives from device_map[D].

    On TPUs the permutation is closed: each device that only sends gets a message from one that only
    receives, and idle ones send to themselves; these messages are ignored. On two slices of v6e
    (jax 0.11), collectives after a permute that was not closed reportedly took 5.4 times as long.
    """
    pairs = [(source, device) for device, source in enumerate(device_map) if source >= 0]
    if not on_tpus():
        return pairs
    sources, targets = map(set, zip(*pairs, strict=True))
    every = range(len(device_map))
    idle = [device for device in every if device not in sources | targets]
    from_ends = (device for device in every if device in targets - sources)
    to_beginnings = (device for device in every if device in sources - targets)
    return [*pairs, *zip(from_ends, to_beginnings, strict=True), *zip(idle, idle, strict=True)]


def on_tpus() -> bool:
    """Whether this code is traced for TPUs; the mesh may describe devices that are not here."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described is not None and described.device_kind.startswith("TPU")


def _sharded() -> bool:
    """Whether each replica is itself sharded over several devices (the mesh has an Auto axis)."""
    return bool(jax.sharding.get_abstract_mesh().auto_axes)


def route(
    sources: np.ndarray, d: int, b: int
) -> list[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
    """Rows grouped by the permutation of devices that moves them.

    If no such permutation exists, because the rows of a device go to different rows of others or to
    several devices at once, they are grouped by cyclic shifts of the devices, with padding rows.

    Args:
      sources: (d b,) int, the sender to each replica, or -1.
      d, b: devices, and rows on each.

    Returns:
      [(device_map, to_rows, from_rows)]: device D receives from device S = ``device_map[D]`` (-1:
      from none). Rows ``from_rows[S]`` of S become rows ``to_rows[D]`` of D (b: no row). Both
      arrays are int (d, rows that travel).
    """
    table = np.asarray(sources).reshape(d, b)
    pieces: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row, wanted in enumerate(table.T):
        senders = wanted[wanted >= 0]
        from_rows = set((senders % b).tolist())
        if len(np.unique(senders // b)) < len(senders) or len(from_rows) > 1:
            return _by_shifts(table)
        device_map = tuple(np.where(wanted >= 0, wanted // b, -1).tolist())
        pieces.setdefault(device_map, []).append((row, min(from_rows, default=row)))
    return [
        (device_map, *np.broadcast_to(np.array(rows).T[:, None], (2, d, len(rows))))
        for device_map, rows in pieces.items()
    ]


def _by_shifts(table: np.ndarray) -> list[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
    """`route` in the general case; table: (d, b) senders."""
    d, b = map(int, table.shape)
    shifts = np.where(table >= 0, (np.arange(d)[:, None] - table // b) % d, -1)
    pieces: list[tuple[tuple[int, ...], np.ndarray, np.ndarray]] = []
    for shift in np.unique(shifts[shifts >= 0]).tolist():
        comes = shifts == shift
        to_rows = np.full((d, comes.sum(axis=1).max()), b)
        from_rows = np.zeros_like(to_rows)
        device_map = tuple((device - shift) % d for device in range(d))
        for receiver, sender in enumerate(device_map):
            (rows,) = np.nonzero(comes[receiver])
            to_rows[receiver, : len(rows)] = rows
            from_rows[sender, : len(rows)] = table[receiver, rows] % b
        pieces.append((device_map, to_rows, from_rows))
    return pieces


def _take(rows: jax.Array, which: np.ndarray, axis: ReplicaAxis) -> jax.Array:
    """Each device's ``rows[which[device]]``, as slices if few, because a gather costs more."""
    if (which != which[0]).any():
        return rows[jnp.asarray(which)[jax.lax.axis_index(axis.device_axis)]]
    order = which[0]
    if len(order) == len(rows) and (order == np.arange(len(order))).all():
        return rows
    runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
    if len(runs) > 8:
        return rows[order]
    return _concatenate([rows[run[0] : run[-1] + 1] for run in runs])


def _concatenate(pieces: list[jax.Array]) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
