"""A round of a schedule as collectives on a mesh axis. Nothing else in the project communicates.

`mix` is written for one replica and names the axis that counts replicas, so the same code runs

- with a replica per device:           ``jax.shard_map`` over the mesh axis ``"replica"``
- with all replicas on one device:     ``jax.vmap(..., axis_name="replica")``
- with a block of replicas per device: ``jax.vmap(..., axis_name="block")`` inside
  ``shard_map(check_vma=False)``, and ``axis_name=("replica", "block")``; replica ``i`` is row
  ``i % b`` of device ``i // b``.

A permutation becomes one ``ppermute`` an array where replicas live on devices of their own, and
slices and ``ppermute`` where a device holds several. Rounds are static: one executable a round.

To *simulate* many graphs, or lost messages, in one executable a round may also be `Simulated`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.topology import Round, Schedule, Send
from decent_jax.wire import Wire

AxisName = str | tuple[str, ...]


class Simulated(NamedTuple):
    """A round whose matrix is replaced by a traced one, where one device holds all replicas.

    Nothing is sent then: rows are weighed by the matrix (`jax.vmap` without `jax.shard_map`).

    round: static Python int, the round that it stands for; `receive` knows the partners of this
      round only, and what of them the matrix says.
    matrix: (n, n) float; row i is what replica i takes.
    """

    round: int
    matrix: jax.Array


def number(round: int | Simulated | None) -> int | None:
    """The static number of a round."""
    return round.round if isinstance(round, Simulated) else round


def mix(
    tree: Any,
    schedule: Schedule,
    round: int | Simulated | None,
    axis_name: AxisName = "replica",
    *,
    finite: jax.Array | None = None,
    wire: Wire | None = None,
    key: jax.Array | None = None,
) -> Any:
    """``x_i <- sum_j W_ij x_j`` with W the matrix of ``round``; None communicates nothing.

    Args:
      tree: pytree of floating-point arrays, one replica's own.
      schedule: its number of replicas must be the product of the axes' sizes.
      round: static Python int in [0, period); or `Simulated`.
      axis_name: the axis, or (mesh axis, vmapped axis), that counts replicas.
      finite: optional boolean scalar, whether this replica's ``tree`` is finite (it travels beside
        the message). Parameters that are not are never mixed in: their weight goes to the
        receiver's own copy. A replica whose own copy is not finite takes the renormalised average
        of its finite senders, or stays NaN where there are none.
      wire: format of the messages; None sends arrays as they are. With Q what a format makes of an
        array, ``x_i <- x_i + sum_j W_ij Q(x_j) - Q(x_i)``: the mean over replicas stays exactly
        what it was, whatever Q loses. Not for rounds with group means.
      key: for formats that need chance; the same on all replicas, another in every step.

    Returns:
      The mixed tree, same shapes and dtypes.

    Raises:
      ValueError: axes that do not hold ``schedule.num_replicas`` replicas; a round out of range; a
        schedule with grouped means, or a vmapped block, inside ``shard_map(check_vma=True)``;
        a ``wire`` for a group mean.
    """
    if round is None:
        return tree
    if wire is None:
        return _mixed(tree, schedule, round, axis_name, finite)
    arrived, own = mix_coded(tree, schedule, round, axis_name, wire, key, finite=finite)

    def moved(x, arrived, own):
        # A replica that is not finite has nothing to keep: it takes what arrived.
        kept = x - own if finite is None else jnp.where(finite, x - own, jnp.zeros_like(x))
        return arrived + kept

    return jax.tree.map(moved, tree, arrived, own)


def mix_coded(
    tree: Any,
    schedule: Schedule,
    round: int | Simulated,
    axis_name: AxisName,
    wire: Wire,
    key: jax.Array | None,
    *,
    finite: jax.Array | None = None,
) -> tuple[Any, Any]:
    """``(sum_j W_ij Q(x_j), Q(x_i))``: what arrives of coded messages, and what the own one says.

    Arguments as in `mix`.
    """
    layout = _Layout.of(schedule, axis_name)
    replica = layout.ids()
    leaves, structure = jax.tree.flatten(tree)
    keys = [None if key is None else jax.random.fold_in(key, k) for k in range(len(leaves))]
    # The barrier: XLA must not round again, otherwise, for the own copy than for what is sent.
    sent = jax.lax.optimization_barrier(
        [wire.encode(x, k, replica) for x, k in zip(leaves, keys, strict=True)]
    )
    own = [wire.decode(p, x, k) for p, x, k in zip(sent, leaves, keys, strict=True)]
    if isinstance(round, Simulated):
        mixed = _mixed(own, schedule, round, axis_name, finite)
        return structure.unflatten(mixed), structure.unflatten(own)
    one = _round(schedule, round)
    check_coded(schedule)
    flag = None if finite is None else layout.lift(finite)
    coefficients = _coefficients(one, layout, flag)

    def mix_leaf(parts, own, like, key):
        blocks = [layout.lift(own)]
        for send in one.sends:
            received = tuple(layout.drop(_receive(layout.lift(x), send, layout)) for x in parts)
            blocks.append(layout.lift(wire.decode(received, like, key)))
        return layout.drop(_weighted_sum(blocks, coefficients, flag is not None))

    mixed = [mix_leaf(*each) for each in zip(sent, own, leaves, keys, strict=True)]
    return structure.unflatten(mixed), structure.unflatten(own)


def check_coded(schedule: Schedule) -> None:
    """Raises ValueError where a schedule's messages cannot be coded, since some are sums."""
    if any(one.group_size > 1 for one in schedule.rounds):
        raise ValueError(
            f"{schedule.name} averages in groups, which adds arrays on their way: they travel as "
            "they are; use comm_dtype='float32', or a schedule of permutations such as one_peer_exp"
        )


def receive(
    tree: Any, schedule: Schedule, round: int | Simulated, axis_name: AxisName = "replica"
) -> list[tuple[Any, jax.Array]]:
    """What each message of a round brings: [(the sender's tree, its weight)], weight 0: nothing.

    For methods that look at what arrives before they use it; `mix` is the sum of it all.
    """
    layout = _Layout.of(schedule, axis_name)
    one = _round(schedule, number(round))

    def arrive(send):
        brought = jax.tree.map(lambda x: layout.drop(_receive(layout.lift(x), send, layout)), tree)
        weight = layout.drop(layout.rows(send.weights))
        if isinstance(round, Simulated):  # a message that is lost has no weight in its matrix
            sender = layout.drop(layout.rows(send.sources))
            weight = jnp.where(sender >= 0, round.matrix[layout.ids(), sender], 0)
        return brought, weight

    return [arrive(send) for send in one.sends]


def _mixed(tree, schedule, round, axis_name, finite):
    """`mix` without a format."""
    layout = _Layout.of(schedule, axis_name)
    flag = None if finite is None else layout.lift(finite)
    if isinstance(round, Simulated):
        return _mixed_by_matrix(tree, round.matrix, layout, finite, flag)
    one = _round(schedule, round)
    grouped_flag = None if flag is None else _group_any(flag, one, layout)
    coefficients = _coefficients(one, layout, grouped_flag)

    def mix_leaf(leaf):
        block = _group_mean(layout.lift(leaf), one, layout, flag)
        received = [_receive(block, send, layout) for send in one.sends]
        return layout.drop(_weighted_sum([block, *received], coefficients, flag is not None))

    return jax.tree.map(mix_leaf, tree)


def _round(schedule: Schedule, round: int) -> Round:
    if not 0 <= round < schedule.period:
        raise ValueError(
            f"{schedule.name} has rounds 0 to {schedule.period - 1}, got round {round}; "
            "schedule.round_at(step) gives the round of a step"
        )
    return schedule.rounds[round]


def _mixed_by_matrix(tree, matrix, layout, finite, flag):
    """Rows weighed by a traced matrix; weights of copies that are not finite as in `mix`."""
    if layout.device_axis is not None:
        raise ValueError(
            "a Simulated round needs all replicas on one device: use jax.vmap without "
            "jax.shard_map, or the number of the round"
        )
    own = layout.ids()
    weights = matrix[own]
    if flag is not None:
        heard = jnp.where(flag, weights, 0).at[own].set(0)
        kept = weights.sum() - heard.sum()
        weights = jnp.where(finite, heard.at[own].set(kept), heard / heard.sum())

    def mix_leaf(leaf):
        rows = layout.lift(leaf)
        if flag is not None:
            rows = jnp.where(_beside(flag, rows), rows, jnp.zeros_like(rows))
        return jnp.tensordot(weights.astype(rows.dtype), rows, 1, precision="highest")

    return jax.tree.map(mix_leaf, tree)


def mean(tree: Any, axis_name: AxisName = "replica") -> Any:
    """The mean over all replicas, for the all-reduce baseline. Shapes and dtypes unchanged."""
    layout = _Layout.over(axis_name)

    def mean_leaf(leaf):
        total = _sum_rows(layout.lift(leaf))
        if layout.device_axis is not None:
            total = jax.lax.psum(total, layout.device_axis)
        return total / (layout.devices * layout.block)

    return jax.tree.map(mean_leaf, tree)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the replicas are: ``devices`` on a mesh axis, ``block`` rows on each."""

    device_axis: str | None
    block_axis: str | None
    devices: int
    block: int

    @staticmethod
    def of(schedule: Schedule, axis_name: AxisName) -> "_Layout":
        """The layout of ``axis_name``, which must hold the schedule's replicas."""
        layout = _Layout.over(axis_name)
        held = layout.devices * layout.block
        if held != schedule.num_replicas:
            raise ValueError(
                f"the schedule {schedule.name!r} is for {schedule.num_replicas} replicas, but "
                f"axis {axis_name!r} holds {held}; make the schedule for {held}, or vmap the rest "
                "with an axis of its own and pass axis_name=(mesh axis, vmapped axis)"
            )
        return layout

    @staticmethod
    def over(axis_name: AxisName) -> "_Layout":
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
        layout = _Layout(*(axes[0] if axes else None for axes in (device_axes, block_axes)), 1, 1)
        return dataclasses.replace(
            layout,
            devices=sizes.get(layout.device_axis, 1),
            block=sizes.get(layout.block_axis, 1),
        )

    def lift(self, x: jax.Array) -> jax.Array:
        """This device's rows (block, ...): under vmap the batched array itself, not a message."""
        if self.block_axis is None:
            return x[None]
        if _checks_vma(x, self.device_axis):  # jax 0.10-0.12: all_gather over vmap fails there
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


def _checks_vma(x: jax.Array, axis: str | None) -> bool:
    """Whether ``x`` is seen inside ``shard_map(check_vma=True)`` over ``axis``."""
    return axis in jax.typeof(x).mat.varying


# --- weights ------------------------------------------------------------------------------------


def _coefficients(one: Round, layout: _Layout, finite: jax.Array | None) -> list:
    """Weights of the own copy and of each send: a float where all replicas agree, or (block,)."""
    per_replica = [one.self_weights, *(send.weights for send in one.sends)]
    if finite is None:
        return [
            float(weights[0]) if np.ptp(weights) == 0 else layout.rows(weights)
            for weights in per_replica
        ]
    own, *given = (layout.rows(weights) for weights in per_replica)
    arrived = [_receive(finite, send, layout) for send in one.sends]
    heard = [jnp.where(ok, weight, 0) for ok, weight in zip(arrived, given, strict=True)]
    total = sum(heard, jnp.zeros_like(own))
    lost = sum((jnp.where(ok, 0, w) for ok, w in zip(arrived, given, strict=True)), 0 * own)
    # 0 / 0: nobody finite was heard, so the replica stays NaN and is heard by nobody.
    return [
        jnp.where(finite, own + lost, total / total * 0),
        *(jnp.where(finite, weight, weight / total) for weight in heard),
    ]


def _weighted_sum(blocks: Sequence[jax.Array], coefficients: Sequence, guarded: bool) -> jax.Array:
    total = None
    for block, coefficient in zip(blocks, coefficients, strict=True):
        if not isinstance(coefficient, float):
            coefficient = _beside(coefficient, block)
        weight = jnp.asarray(coefficient, block.dtype)
        term = weight * block
        if guarded:  # 0 * NaN is NaN
            term = jnp.where(coefficient == 0, jnp.zeros_like(term), term)
        total = term if total is None else total + term
    return total


def _beside(rows: jax.Array, block: jax.Array) -> jax.Array:
    """(block,) against (block, ...): explicit, so that no rank is promoted."""
    return rows.reshape(rows.shape + (1,) * (block.ndim - 1))


# --- means of groups ----------------------------------------------------------------------------


def _group_mean(block: jax.Array, one: Round, layout: _Layout, finite: jax.Array | None):
    g = one.group_size
    if g == 1:
        return block
    if finite is None:
        return _group_sum(block, g, layout) / g
    ok = _beside(finite, block)
    total = _group_sum(jnp.where(ok, block, jnp.zeros_like(block)), g, layout)
    count = _beside(_group_sum(finite.astype(block.dtype), g, layout), block)
    # A finite replica keeps the weight of those that are not; another takes the finite ones' mean.
    return jnp.where(ok, (total + (g - count) * jnp.where(ok, block, 0)) / g, total / count)


def _group_any(finite: jax.Array, one: Round, layout: _Layout) -> jax.Array:
    """Whether a replica is finite after its group's mean: whether anybody in the group was."""
    if one.group_size == 1:
        return finite
    return _group_sum(finite.astype(jnp.float32), one.group_size, layout) > 0


def _group_sum(block: jax.Array, g: int, layout: _Layout) -> jax.Array:
    """Sums over consecutive groups of g replicas, given back to every member: (block, ...)."""
    d, b, axis = layout.devices, layout.block, layout.device_axis
    if b % g == 0:
        # Row by row: a reshape to groups, fused into the update, took XLA's CPU 7 times as long.
        totals = [_sum_rows(block[start : start + g]) for start in range(0, b, g)]
        return jnp.stack([totals[row // g] for row in range(b)])
    if g % b:
        raise ValueError(
            f"groups of {g} replicas neither fill nor divide the {b} replicas a device holds; "
            f"put {g} or a divisor of {g} replicas on a device"
        )
    local = _sum_rows(block)
    if g == d * b:
        total = jax.lax.psum(local, axis)
    else:
        if _checks_vma(block, axis):
            raise ValueError(
                f"a mean over groups of {g} replicas needs jax.shard_map(..., check_vma=False); "
                "schedule.partial_groups says which schedules do"
            )
        span = g // b
        groups = [list(range(start, start + span)) for start in range(0, d, span)]
        total = jax.lax.psum(local, axis, axis_index_groups=groups)
    return jnp.broadcast_to(total[None], block.shape)


def _sum_rows(rows: jax.Array) -> jax.Array:
    """``rows.sum(axis=0)`` as additions: XLA's CPU reduction over rows is 100 times slower."""
    total = rows[0]
    for k in range(1, len(rows)):
        total = total + rows[k]
    return total


# --- permutations -------------------------------------------------------------------------------


def _receive(block: jax.Array, send: Send, layout: _Layout) -> jax.Array:
    """(block, ...): row l is what replica ``device * block + l`` receives (anything if idle)."""
    pieces = _route(send.sources, layout.devices, layout.block)
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


def _route(sources: np.ndarray, d: int, b: int):
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


def _receive_unevenly(block: jax.Array, sources: np.ndarray, layout: _Layout) -> jax.Array:
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
