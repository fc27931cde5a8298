"""A round of a schedule as collectives on a mesh axis. Nothing else in the project communicates.

`mix` is written for one replica and names the axis that counts replicas, so the same code runs

- with a replica per device:           ``jax.shard_map`` over the mesh axis ``"replica"``
- with all replicas on one device:     ``jax.vmap(..., axis_name="replica")``
- with a block of replicas per device: ``jax.vmap(..., axis_name="block")`` inside
  ``shard_map(check_vma=False)``, and ``axis_name=("replica", "block")``; replica ``i`` is row
  ``i % b`` of device ``i // b``.

Rounds are static: one executable per round. `decent_jax.gossip.permute` turns its permutations into
collectives, `decent_jax.gossip.groups` its groups that send to each other. To *simulate* many
graphs, or lost messages, in one executable a round may also be `Simulated`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decent_jax.cpu import pair_sums
from decent_jax.gossip import groups, permute
from decent_jax.gossip.axes import AxisName, ReplicaAxis, beside
from decent_jax.gossip.wire import Wire
from decent_jax.topology import Round, Schedule


class Simulated(NamedTuple):
    """A round whose matrix is replaced by a traced one, where one device holds all replicas.

    Nothing is sent: rows are weighted by the matrix (`jax.vmap` without `jax.shard_map`).

    round: static Python int, the round that it stands for; `receive` knows the partners of this
      round only, and takes their weights from the matrix.
    matrix: (n, n) float; row i holds the weights that replica i gives.
    """

    round: int
    matrix: jax.Array


def number(round: Any) -> Any:
    """The static number of a round, an int; None for None."""
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
    after: Any = None,
) -> Any:
    """``x_i <- sum_j W_ij x_j`` with W the matrix of ``round``; None communicates nothing.

    Args:
      tree: pytree of floating-point arrays, one replica's own.
      schedule: its number of replicas must be the product of the axes' sizes.
      round: static Python int in [0, period); or `Simulated`.
      axis_name: the axis, or (mesh axis, vmapped axis), that counts replicas.
      finite: optional boolean scalar, whether this replica's ``tree`` is finite (it travels with
        the message). Parameters that are not are never mixed in: their weight goes to the
        receiver's own copy. A replica whose own copy is not finite takes the renormalised average
        of its finite senders, or stays NaN where there are none. In a round in which groups send to
        each other a group counts as one replica, whose value is the mean of its finite members.
      wire: format of the messages; None sends arrays as they are. With Q the rounding of the
        format, ``x_i <- x_i + sum_j W_ij Q(x_j) - Q(x_i)``: the mean over replicas stays exactly
        what it was, whatever Q loses. Not for rounds with group means.
      key: for formats that need chance; the same on all replicas, another in every step.
      after: optional arrays, such as the gradients of this step. In a round in which groups send to
        each other, the last stage (inside the groups) waits for them, so that the messages may
        travel while they are computed. It changes no number.

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
        return _mixed(tree, schedule, round, axis_name, finite, after)
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
    """``(sum_j W_ij Q(x_j), Q(x_i))``: the mix of coded messages, and the replica's own, decoded.

    Arguments as in `mix`.
    """
    axis = ReplicaAxis.of(schedule, axis_name)
    replica = axis.replica()
    leaves, structure = jax.tree.flatten(tree)
    keys = [None if key is None else jax.random.fold_in(key, k) for k in range(len(leaves))]
    # The barrier keeps XLA from rounding the own copy again, and differently from what is sent.
    sent = jax.lax.optimization_barrier(
        [wire.encode(x, k, replica) for x, k in zip(leaves, keys, strict=True)]
    )
    own = [wire.decode(p, x, k) for p, x, k in zip(sent, leaves, keys, strict=True)]
    if isinstance(round, Simulated):
        mixed = _mixed(own, schedule, round, axis_name, finite)
        return structure.unflatten(mixed), structure.unflatten(own)
    rnd = _round(schedule, round)
    check_coded(schedule)
    flag = None if finite is None else axis.lift(finite)
    weights = permute.coefficients(rnd, axis, flag)

    parts, of_leaf = jax.tree.flatten(sent)
    lifted = [axis.lift(x) for x in parts]
    received = [
        of_leaf.unflatten(map(axis.drop, permute.receive_all(lifted, send, axis)))
        for send in rnd.sends
    ]

    def mix_leaf(own, like, key, *arrived):
        decoded = [axis.lift(wire.decode(parts, like, key)) for parts in arrived]
        blocks = [axis.lift(own), *decoded]
        return axis.drop(permute.weighted_sum(blocks, weights, flag is not None))

    mixed = [mix_leaf(*each) for each in zip(own, leaves, keys, *received, strict=True)]
    return structure.unflatten(mixed), structure.unflatten(own)


def receive(
    tree: Any, schedule: Schedule, round: int | Simulated, axis_name: AxisName = "replica"
) -> list[tuple[Any, jax.Array]]:
    """The messages of a round one by one: [(the sender's tree, its weight)], weight 0 where none.

    For methods that look at what arrives before they use it; `mix` is their weighted sum.
    """
    axis = ReplicaAxis.of(schedule, axis_name)
    rnd = _round(schedule, round.round if isinstance(round, Simulated) else round)
    leaves, structure = jax.tree.flatten(tree)
    lifted = [axis.lift(x) for x in leaves]

    def arrive(send):
        brought = structure.unflatten(map(axis.drop, permute.receive_all(lifted, send, axis)))
        weight = axis.drop(axis.rows(send.weights))
        if isinstance(round, Simulated):  # a message that is lost has no weight in its matrix
            sender = axis.drop(axis.rows(send.sources))
            weight = jnp.where(sender >= 0, round.matrix[axis.replica(), sender], 0)
        return brought, weight

    return [arrive(send) for send in rnd.sends]


def mean(tree: Any, axis_name: AxisName = "replica") -> Any:
    """The mean over all replicas, for the all-reduce baseline. Shapes and dtypes unchanged."""
    axis = ReplicaAxis.over(axis_name)

    def mean_leaf(leaf):
        total = pair_sums.sum_rows(axis.lift(leaf))
        if axis.device_axis is not None:
            total = jax.lax.psum(total, axis.device_axis)
        return total / (axis.devices * axis.block)

    return jax.tree.map(mean_leaf, tree)


def allows_check_vma(schedule: Schedule) -> bool:
    """Whether `mix` may be inside ``jax.shard_map(check_vma=True)``, and is no slower there."""
    return not (schedule.partial_groups or pair_sums.over_gloo())


def check_coded(schedule: Schedule) -> None:
    """Raises ValueError where a schedule's messages cannot be coded, since some are sums."""
    if any(rnd.group_size > 1 for rnd in schedule.rounds):
        raise ValueError(
            f"{schedule.name} averages in groups, which adds arrays on their way: they travel as "
            "they are; use comm_dtype='float32', or a schedule of permutations such as one_peer_exp"
        )


def _mixed(tree, schedule, round, axis_name, finite, after=None):
    """`mix` without a format."""
    axis = ReplicaAxis.of(schedule, axis_name)
    flag = None if finite is None else axis.lift(finite)
    if isinstance(round, Simulated):
        return _mixed_by_matrix(tree, round.matrix, axis, finite, flag)
    rnd = _round(schedule, round)
    if rnd.between_groups is not None:
        return groups.mix(tree, rnd, axis, flag, after)
    grouped_flag = None if flag is None else groups.any_finite(flag, rnd, axis)
    weights = permute.coefficients(rnd, axis, grouped_flag)

    leaves, structure = jax.tree.flatten(tree)
    own = [groups.mean(axis.lift(leaf), rnd, axis, flag) for leaf in leaves]
    received = [permute.receive_all(own, send, axis) for send in rnd.sends]
    mixed = [
        axis.drop(permute.weighted_sum(blocks, weights, flag is not None))
        for blocks in zip(own, *received, strict=True)
    ]
    return structure.unflatten(mixed)


def _mixed_by_matrix(tree, matrix, axis, finite, flag):
    """Rows weighted by a traced matrix; weights of copies that are not finite as in `mix`."""
    if axis.device_axis is not None:
        raise ValueError(
            "a Simulated round needs all replicas on one device: use jax.vmap without "
            "jax.shard_map, or the number of the round"
        )
    i = axis.replica()
    weights = matrix[i]
    if flag is not None:
        others = jnp.where(flag, weights, 0).at[i].set(0)
        kept = weights.sum() - others.sum()
        weights = jnp.where(finite, others.at[i].set(kept), others / others.sum())

    def mix_leaf(leaf):
        rows = axis.lift(leaf)
        if flag is not None:
            rows = jnp.where(beside(flag, rows), rows, jnp.zeros_like(rows))
        return jnp.tensordot(weights.astype(rows.dtype), rows, 1, precision="highest")

    return jax.tree.map(mix_leaf, tree)


def _round(schedule: Schedule, round: int) -> Round:
    if not 0 <= round < schedule.period:
        raise ValueError(
            f"{schedule.name} has rounds 0 to {schedule.period - 1}, got round {round}; "
            "schedule.round_at(step) gives the round of a step"
        )
    return schedule.rounds[round]
