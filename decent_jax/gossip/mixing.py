"""A round of a schedule as collectives on a mesh axis. Nothing else in the project communicates.

`mix` is written for one replica and names the axis that counts replicas, so the same code runs

- with a replica per device:           ``jax.shard_map`` over the mesh axis ``"replica"``
- with all replicas on one device:     ``jax.vmap(..., axis_name="replica")``
- with a block of replicas per device: ``jax.vmap(..., axis_name="block")`` inside
  ``shard_map(check_vma=False)``, and ``axis_name=("replica", "block")``; replica ``i`` is row
  ``i % b`` of device ``i // b``.

A permutation becomes one ``ppermute`` an array where replicas live on devices of their own, and
slices and ``ppermute`` where a device holds several. Groups that send to each other scatter their
sum over their devices, permute the parts and gather them again (`_mixed_by_groups`). Rounds are
static: one executable a round.

To *simulate* many graphs, or lost messages, in one executable a round may also be `Simulated`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.gossip import permute
from decent_jax.gossip.permute import AxisName, Layout
from decent_jax.gossip.wire import Wire
from decent_jax.topology import Round, Schedule
from decent_jax.topology.rounds import kron, round_of


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


@jax.named_scope("mix")
def mix(
    tree: Any,
    schedule: Schedule,
    round: int | Simulated | None,
    axis_name: AxisName = "replica",
    *,
    finite: jax.Array | None = None,
    wire: Wire | None = None,
    key: jax.Array | None = None,
    hold: jax.Array | None = None,
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
        of its finite senders, or stays NaN where there are none. In a round in which groups send to
        each other a group counts as one replica, whose value is the mean of its finite members.
      wire: format of the messages; None sends arrays as they are. With Q what a format makes of an
        array, ``x_i <- x_i + sum_j W_ij Q(x_j) - Q(x_i)``: the mean over replicas stays exactly
        what it was, whatever Q loses. Not for rounds with group means.
      key: for formats that need chance; the same on all replicas, another in every step.
      hold: optional boolean scalar, always False, which what the messages travel beside makes
        known when it ends. Where groups send to each other, the last stage of a round (inside the
        groups) waits for it. XLA on GPUs would otherwise begin that stage as soon as it can, and
        so wait for the messages before all else.

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
        return _mixed(tree, schedule, round, axis_name, finite, hold)
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
    layout = Layout.of(schedule, axis_name)
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

    parts, of_leaf = jax.tree.flatten(sent)
    lifted = [layout.lift(x) for x in parts]
    received = [
        of_leaf.unflatten(map(layout.drop, permute.receive_all(lifted, send, layout)))
        for send in one.sends
    ]

    def mix_leaf(own, like, key, *arrived):
        decoded = [layout.lift(wire.decode(parts, like, key)) for parts in arrived]
        blocks = [layout.lift(own), *decoded]
        return layout.drop(_weighted_sum(blocks, coefficients, flag is not None))

    mixed = [mix_leaf(*each) for each in zip(own, leaves, keys, *received, strict=True)]
    return structure.unflatten(mixed), structure.unflatten(own)


def allows_check_vma(schedule: Schedule) -> bool:
    """Whether `mix` may be inside ``jax.shard_map(check_vma=True)``, and loses nothing by it."""
    return not (schedule.partial_groups or permute.over_gloo())


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
    layout = Layout.of(schedule, axis_name)
    one = _round(schedule, number(round))

    leaves, structure = jax.tree.flatten(tree)
    lifted = [layout.lift(x) for x in leaves]

    def arrive(send):
        brought = map(layout.drop, permute.receive_all(lifted, send, layout))
        brought = structure.unflatten(brought)
        weight = layout.drop(layout.rows(send.weights))
        if isinstance(round, Simulated):  # a message that is lost has no weight in its matrix
            sender = layout.drop(layout.rows(send.sources))
            weight = jnp.where(sender >= 0, round.matrix[layout.ids(), sender], 0)
        return brought, weight

    return [arrive(send) for send in one.sends]


def _mixed(tree, schedule, round, axis_name, finite, hold=None):
    """`mix` without a format."""
    layout = Layout.of(schedule, axis_name)
    flag = None if finite is None else layout.lift(finite)
    if isinstance(round, Simulated):
        return _mixed_by_matrix(tree, round.matrix, layout, finite, flag)
    one = _round(schedule, round)
    if one.between_groups is not None:
        return _mixed_by_groups(tree, one, layout, flag, hold)
    grouped_flag = None if flag is None else _group_any(flag, one, layout)
    coefficients = _coefficients(one, layout, grouped_flag)

    leaves, structure = jax.tree.flatten(tree)
    own = [_group_mean(layout.lift(leaf), one, layout, flag) for leaf in leaves]
    received = [permute.receive_all(own, send, layout) for send in one.sends]
    mixed = [
        layout.drop(_weighted_sum(blocks, coefficients, flag is not None))
        for blocks in zip(own, *received, strict=True)
    ]
    return structure.unflatten(mixed)


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
            rows = jnp.where(permute.beside(flag, rows), rows, jnp.zeros_like(rows))
        return jnp.tensordot(weights.astype(rows.dtype), rows, 1, precision="highest")

    return jax.tree.map(mix_leaf, tree)


def mean(tree: Any, axis_name: AxisName = "replica") -> Any:
    """The mean over all replicas, for the all-reduce baseline. Shapes and dtypes unchanged."""
    layout = Layout.over(axis_name)

    def mean_leaf(leaf):
        total = permute.sum_rows(layout.lift(leaf))
        if layout.device_axis is not None:
            total = jax.lax.psum(total, layout.device_axis)
        return total / (layout.devices * layout.block)

    return jax.tree.map(mean_leaf, tree)


# --- weights ------------------------------------------------------------------------------------


def _coefficients(one: Round, layout: Layout, finite: jax.Array | None) -> list:
    """Weights of the own copy and of each send: a float where all replicas agree, or (block,)."""
    per_replica = [one.self_weights, *(send.weights for send in one.sends)]
    if finite is None:
        return [
            float(weights[0]) if np.ptp(weights) == 0 else layout.rows(weights)
            for weights in per_replica
        ]
    own, *given = (layout.rows(weights) for weights in per_replica)
    if not given:
        return [jnp.where(finite, own, jnp.nan)]
    arrived = jnp.stack([permute.receive(finite, send, layout) for send in one.sends])
    weights = jnp.stack(given)
    heard = jnp.where(arrived, weights, 0)
    lost = permute.sum_rows(jnp.where(arrived, 0, weights))
    total = permute.sum_rows(heard)
    # 0 / 0: nobody finite was heard, so the replica stays NaN and is heard by nobody.
    own = jnp.where(finite, own + lost, total / total * 0)
    return [own, *jnp.where(finite[None], heard, heard / total[None])]


def _weighted_sum(blocks: Sequence[jax.Array], coefficients: Sequence, guarded: bool) -> jax.Array:
    total = None
    for block, coefficient in zip(blocks, coefficients, strict=True):
        if not isinstance(coefficient, float):
            coefficient = permute.beside(coefficient, block)
        weight = jnp.asarray(coefficient, block.dtype)
        term = weight * block
        if guarded:  # 0 * NaN is NaN
            term = jnp.where(coefficient == 0, jnp.zeros_like(term), term)
        total = term if total is None else total + term
    return total


# --- groups that send to each other -------------------------------------------------------------


def _mixed_by_groups(
    tree: Any, one: Round, layout: Layout, finite: jax.Array | None, hold: jax.Array | None
) -> Any:
    """A round in which groups average inside, then exchange their means: once a group.

    All members of a group hold its mean, so it is enough that each of the c devices that a group
    lies on moves 1/c of it: reduce-scatter inside the group, permutes of the parts between groups,
    all-gather inside. To other devices a group sends one model a message, not group_size of them.

    A **part** is what one device holds of one group: a group's mean where it holds whole groups
    (nothing is scattered then), 1/c of it elsewhere, as a flat array. Parts mix among each other as
    replicas do, so the rest is as for permutations.

    finite: (block,) bool. A group counts as one replica: its value is the mean of its finite
        members, and it is finite where any of them is.
    hold: () bool, see `mix`.
    """
    if hold is not None:
        hold = layout.lift(hold).any()
    groups = _Groups.of(one.group_size, layout)
    parts = groups.parts()
    between = kron(one.between_groups, round_of(np.eye(groups.devices)))
    count = None if finite is None else groups.count(finite)
    coefficients = _coefficients(between, parts, None if count is None else count > 0)

    def mix_leaf(leaf):
        rows = layout.lift(leaf)
        if finite is not None:
            rows = jnp.where(permute.beside(finite, rows), rows, jnp.zeros_like(rows))
        total = groups.sums(rows)
        size = one.group_size if count is None else permute.beside(count, total)
        own = total / jnp.asarray(size, total.dtype)  # 0 / 0 where nobody is finite: of no weight
        received = [permute.receive(own, send, parts) for send in between.sends]
        mixed = _weighted_sum([own, *received], coefficients, finite is not None)
        if hold is not None:
            mixed = jnp.where(hold, jnp.zeros_like(mixed), mixed)
        return groups.given_back(mixed, leaf.shape)

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(permute.together(mix_leaf, leaves, layout))


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Groups of ``size`` consecutive replicas, each of which lies on ``devices`` devices."""

    size: int
    devices: int
    layout: Layout

    @staticmethod
    def of(size: int, layout: Layout) -> "_Groups":
        b = layout.block
        if b % size and size % b:
            raise ValueError(
                f"groups of {size} replicas neither fill nor divide the {b} replicas a device "
                f"holds; put {size} or a divisor of {size} replicas on a device"
            )
        return _Groups(size, max(1, size // b), layout)

    def parts(self) -> Layout:
        """Where the parts are: one on each device of a group, or several groups on a device."""
        return dataclasses.replace(self.layout, block=max(1, self.layout.block // self.size))

    def axis_index_groups(self, x: jax.Array) -> list[list[int]]:
        """The devices of every group."""
        if permute.checks_vma(x, self.layout.device_axis):
            raise ValueError(
                f"a mean over groups of {self.size} replicas needs jax.shard_map(..., "
                "check_vma=False); schedule.partial_groups says which schedules do"
            )
        return np.arange(self.layout.devices).reshape(-1, self.devices).tolist()

    def count(self, finite: jax.Array) -> jax.Array:
        """(parts,) float32: how many members of each part's group are finite."""
        local = self.local_sums(finite.astype(jnp.float32))
        if self.devices == 1:
            return local
        groups = self.axis_index_groups(local)
        return jax.lax.psum(local, self.layout.device_axis, axis_index_groups=groups)

    def sums(self, rows: jax.Array) -> jax.Array:
        """(block, ...) to this device's parts of the groups' sums: (parts, ...), or (1, flat).

        Zeros fill an array up to a multiple of the group's devices, at most devices - 1 of them.
        """
        local = self.local_sums(rows)
        if self.devices == 1:
            return local
        flat = jnp.pad(local.reshape(-1), (0, -local.size % self.devices))
        part = jax.lax.psum_scatter(
            flat,
            self.layout.device_axis,
            axis_index_groups=self.axis_index_groups(flat),
            tiled=True,
        )
        return part[None]

    def given_back(self, parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Each replica's own copy of its group's array, of that shape."""
        if self.devices == 1:
            row = jax.lax.axis_index(self.layout.block_axis) // self.size
            return jax.lax.dynamic_index_in_dim(parts, row, keepdims=False)
        whole = jax.lax.all_gather(
            parts[0],
            self.layout.device_axis,
            axis_index_groups=self.axis_index_groups(parts),
            tiled=True,
        )
        return whole[: math.prod(shape)].reshape(shape)

    def local_sums(self, rows: jax.Array) -> jax.Array:
        """The sum over the rows of each group on this device, (max(1, block / size), ...)."""
        width = min(self.size, len(rows))
        return permute.sum_rows(rows.reshape(-1, width, *rows.shape[1:]), axis=1)


# --- means of groups ----------------------------------------------------------------------------


def _group_mean(block: jax.Array, one: Round, layout: Layout, finite: jax.Array | None):
    g = one.group_size
    if g == 1:
        return block
    if finite is None:
        return _group_sum(block, g, layout) / g
    ok = permute.beside(finite, block)
    total = _group_sum(jnp.where(ok, block, jnp.zeros_like(block)), g, layout)
    count = permute.beside(_group_sum(finite.astype(block.dtype), g, layout), block)
    # A finite replica keeps the weight of those that are not; another takes the finite ones' mean.
    return jnp.where(ok, (total + (g - count) * block) / g, total / count)


def _group_any(finite: jax.Array, one: Round, layout: Layout) -> jax.Array:
    """Whether a replica is finite after its group's mean: whether anybody in the group was."""
    if one.group_size == 1:
        return finite
    return _group_sum(finite.astype(jnp.float32), one.group_size, layout) > 0


def _group_sum(block: jax.Array, g: int, layout: Layout) -> jax.Array:
    """Sums over consecutive groups of g replicas, given back to every member: (block, ...)."""
    groups = _Groups.of(g, layout)
    local = groups.local_sums(block)
    if groups.devices == 1:
        members = jnp.broadcast_to(local[:, None], (len(local), g, *local.shape[1:]))
        return members.reshape(block.shape)
    whole = groups.devices == layout.devices
    total = jax.lax.psum(
        local,
        layout.device_axis,
        axis_index_groups=None if whole else groups.axis_index_groups(block),
    )
    return jnp.broadcast_to(total, block.shape)
