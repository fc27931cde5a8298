"""A permutation of replicas as slices and ``ppermute``, and the weights of what it brings.

Where replicas live on devices of their own a permutation is one ``ppermute`` per array; where a
device holds several it is slices, and one ``ppermute`` for each permutation of devices in it.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.cpu import pair_sums
from decent_jax.gossip.axes import ReplicaAxis, beside
from decent_jax.topology import Round, Send

SMALL = 64 * 1024  # bytes; arrays below it travel together


def receive(rows: jax.Array, send: Send, axis: ReplicaAxis) -> jax.Array:
    """What the replicas of this device receive, each one row; anything where a replica is idle.

    Args:
      rows: (block, ...), what the replicas of this device send.
      send: the permutation of all replicas.
      axis: where they are.

    Returns:
      (block, ...).
    """
    if axis.devices == 1:
        own = np.arange(axis.block)
        return _take(rows, np.where(send.sources < 0, own, send.sources))
    pieces = route(send.sources, axis.devices, axis.block)
    if pieces is None:
        return _receive_unevenly(rows, send.sources, axis)
    received, order = [], []
    for device_map, to_rows, from_rows in pieces:
        taken = _take(rows, from_rows)
        if any(source not in (-1, device) for device, source in enumerate(device_map)):
            pairs = [(source, device) for device, source in enumerate(device_map) if source >= 0]
            taken = _ppermute(taken, pairs, axis)
        received.append(taken)
        order.extend(to_rows)
    return _take(_concatenate(received), np.argsort(order))


def receive_all(arrays: Sequence[jax.Array], send: Send, axis: ReplicaAxis) -> list[jax.Array]:
    """`receive` of each; small arrays of a dtype travel together, as one message."""
    return together(lambda rows: receive(rows, send, axis), arrays, axis, leading=1)


def together(
    move: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    axis: ReplicaAxis,
    leading: int = 0,
) -> list[jax.Array]:
    """``move`` of each array, calling it once for all small arrays of a dtype.

    Args:
      move: keeps shapes and dtypes.
      arrays: with the same ``leading`` dimensions; small ones are flattened beyond these.
      axis: with one device nothing travels, so nothing is packed.
      leading: how many dimensions all arrays share.
    """
    packs = _packs(arrays, leading) if axis.devices > 1 else [[k] for k in range(len(arrays))]
    moved: dict[int, jax.Array] = {}
    for pack in packs:
        if len(pack) == 1:
            moved[pack[0]] = move(arrays[pack[0]])
            continue
        flat = [arrays[k].reshape(*arrays[k].shape[:leading], -1) for k in pack]
        whole = move(jnp.concatenate(flat, axis=leading))
        ends = np.cumsum([x.shape[leading] for x in flat])
        for k, part in zip(pack, jnp.split(whole, ends[:-1], axis=leading), strict=True):
            moved[k] = part.reshape(arrays[k].shape)
    return [moved[k] for k in range(len(arrays))]


def coefficients(rnd: Round, axis: ReplicaAxis, finite: jax.Array | None) -> list:
    """Weights of the own copy and of each send: a float where all replicas agree, or (block,).

    Args:
      rnd: a round without groups.
      axis: where its replicas are.
      finite: (block,) bool, or None. A sender that is not finite has weight 0, and its share goes
        to the receiver's own copy; a receiver that is not takes the others, renormalised.
    """
    per_replica = [rnd.self_weights, *(send.weights for send in rnd.sends)]
    if finite is None:
        return [
            float(weights[0]) if np.ptp(weights) == 0 else axis.rows(weights)
            for weights in per_replica
        ]
    own, *given = (axis.rows(weights) for weights in per_replica)
    if not given:
        return [jnp.where(finite, own, jnp.nan)]
    arrived = jnp.stack([receive(finite, send, axis) for send in rnd.sends])
    weights = jnp.stack(given)
    kept = jnp.where(arrived, weights, 0)
    lost = pair_sums.sum_rows(jnp.where(arrived, 0, weights))
    total = pair_sums.sum_rows(kept)
    # 0 / 0: no sender is finite, so the replica stays NaN and is ignored by its receivers.
    own = jnp.where(finite, own + lost, total / total * 0)
    return [own, *jnp.where(finite[None], kept, kept / total[None])]


def weighted_sum(blocks: Sequence[jax.Array], weights: Sequence, guarded: bool) -> jax.Array:
    """``sum_k weights[k] * blocks[k]``; where guarded, a weight of 0 takes nothing, not 0 * NaN."""
    total = None
    for rows, weight in zip(blocks, weights, strict=True):
        if not isinstance(weight, float):
            weight = beside(weight, rows)
        term = jnp.asarray(weight, rows.dtype) * rows
        if guarded:
            term = jnp.where(weight == 0, jnp.zeros_like(term), term)
        total = term if total is None else total + term
    assert total is not None
    return total


def _packs(arrays: Sequence[jax.Array], leading: int) -> list[list[int]]:
    """Which arrays travel together: those below `SMALL` bytes, by dtype; the others alone."""
    packs: dict[object, list[int]] = {}
    for k, x in enumerate(arrays):
        small = math.prod(x.shape[leading:]) * x.dtype.itemsize < SMALL and not _sharded()
        packs.setdefault(x.dtype if small else k, []).append(k)
    return list(packs.values())


def _ppermute(x: jax.Array, pairs: list[tuple[int, int]], axis: ReplicaAxis) -> jax.Array:
    assert axis.device_axis is not None
    if pair_sums.are_faster(pairs, axis.devices) and not (axis.checks_vma(x) or _sharded()):
        return pair_sums.swap(x, pairs, axis.device_axis)
    return jax.lax.ppermute(x, axis.device_axis, pairs)


def _sharded() -> bool:
    """Whether each replica is itself sharded over several devices (the mesh has an Auto axis)."""
    return bool(jax.sharding.get_abstract_mesh().auto_axes)


def route(sources: np.ndarray, d: int, b: int) -> list[tuple[tuple, list[int], list[int]]] | None:
    """Rows grouped by the permutation of devices that brings them, or None if there is none.

    Args:
      sources: (d b,) int, the sender to each replica, or -1.
      d, b: devices, and rows on each.

    Returns:
      [(device_map, to_rows, from_rows)]: device D receives from ``device_map[D]`` (-1: from none)
      its rows ``to_rows``, which lie there in ``from_rows``.
    """
    table = np.asarray(sources).reshape(d, b)
    pieces: dict[tuple, tuple[list[int], list[int]]] = {}
    for row in range(b):
        wanted = table[:, row]
        senders = wanted[wanted >= 0]
        sender_rows = set((senders % b).tolist())
        if len(np.unique(senders // b)) < len(senders) or len(sender_rows) > 1:
            return None
        device_map = tuple(np.where(wanted >= 0, wanted // b, -1).tolist())
        to_rows, from_rows = pieces.setdefault(device_map, ([], []))
        to_rows.append(row)
        from_rows.append(sender_rows.pop() if sender_rows else row)
    return [(device_map, to_rows, taken) for device_map, (to_rows, taken) in pieces.items()]


def _receive_unevenly(rows: jax.Array, sources: np.ndarray, axis: ReplicaAxis) -> jax.Array:
    """The general case: one cyclic shift of devices per distance a row travels, padded tables."""
    d, b = axis.devices, axis.block
    wanted: dict[int, list[list[tuple[int, int]]]] = {}
    for replica, source in enumerate(np.asarray(sources).tolist()):
        if source >= 0:
            shift = (replica // b - source // b) % d
            edges = wanted.setdefault(shift, [[] for _ in range(d)])
            edges[replica // b].append((replica % b, source % b))
    received = jnp.zeros_like(rows)
    assert axis.device_axis is not None
    device = jax.lax.axis_index(axis.device_axis)
    for shift, edges in sorted(wanted.items()):
        width = max(map(len, edges))
        to_row = np.full((d, width), b)  # b is out of range, so it is dropped
        from_row = np.zeros((d, width), np.int64)
        for receiver, pairs in enumerate(edges):
            for k, (row, source_row) in enumerate(pairs):
                to_row[receiver, k] = row
                from_row[(receiver - shift) % d, k] = source_row
        taken = rows[jnp.asarray(from_row)[device]]
        if shift:
            pairs = [((receiver - shift) % d, receiver) for receiver in range(d)]
            taken = _ppermute(taken, pairs, axis)
        received = received.at[jnp.asarray(to_row)[device]].set(taken, mode="drop")
    return received


def _take(rows: jax.Array, which: Sequence[int] | np.ndarray) -> jax.Array:
    """``rows[which]`` for static indices; a few slices of runs cost less than a gather."""
    which = np.asarray(which)
    if len(which) == len(rows) and (which == np.arange(len(which))).all():
        return rows
    runs = np.split(which, np.flatnonzero(np.diff(which) != 1) + 1)
    if len(runs) > 8:
        return rows[which]
    return _concatenate([rows[run[0] : run[-1] + 1] for run in runs])


def _concatenate(pieces: list[jax.Array]) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
