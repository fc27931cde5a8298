"""A round of a schedule as collectives on a mesh axis.

`mix` is written for one replica and names the replica axis, so the same code runs

- with a replica per device:           ``jax.shard_map`` over the mesh axis ``"replica"``
- with all replicas on one device:     ``jax.vmap(..., axis_name="replica")``
- with a block of replicas per device: ``jax.vmap(..., axis_name="block")`` inside
  ``shard_map(check_vma=False)``, and ``axis_name=("replica", "block")``; replica ``i`` is row
  ``i % b`` of device ``i // b``.

`on_mesh` and `mix_on` wrap it for stacked arrays inside `jax.jit`.

Rounds are static: one executable per round. `decent_jax.gossip.permute` turns a round's
permutations into collectives; `decent_jax.gossip.groups` does so for messages between groups. To
*simulate* many graphs or lost messages in one executable, pass a `Simulated` round.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from decent_jax import cpu
from decent_jax.gossip import groups, permute
from decent_jax.gossip.codecs import Codec, Parts
from decent_jax.gossip.permute import AxisName, ReplicaAxis
from decent_jax.gossip.sparse import ChunkedTopK, TopK
from decent_jax.ground.pytree import PyTree
from decent_jax.topology import Round, Schedule, Send


class Simulated(NamedTuple):
    """A round with a traced matrix, for all replicas on one device.

    Nothing is sent: the matrix multiplies the stacked rows (`jax.vmap` without `jax.shard_map`).

    round: static Python int, the index of the replaced round; `receive` uses only the partners of
      that round, with weights from the matrix.
    matrix: (n, n) float; row i holds the weights that replica i gives.
    """

    round: int
    matrix: jax.Array


RoundId = int | Simulated | None


class Between(NamedTuple):
    """Arrays for which the second stage of a group mean waits.

    They are, for example, the parameters after half of the steps that a message overlaps. Chunks
    then travel to their owners in the first half, and means travel back in the second. XLA hides
    each stage behind a loop of steps, but cannot hide a mean that is a single collective (jaxlib
    0.12). If groups send to each other, the last phase waits instead.
    """

    arrays: PyTree


def number(round: RoundId) -> Any:
    """The number of a round as an int, or None for no round.

    Raises:
      TypeError: the number is traced, or is not an integer.
    """
    if round is None:
        return None
    plain = round.round if isinstance(round, Simulated) else round
    try:
        return operator.index(plain)
    except TypeError:  # jax raises it, too, for a traced array
        what = "a traced array" if isinstance(plain, jax.Array) else repr(plain)
        raise TypeError(
            f"round must be a Python int, got {what}; make it static in jax.jit: "
            "static_argnames='round' (docs/loop_details.md shows it inside jax.lax.scan)"
        ) from None


@jax.named_scope("mix")
def mix(
    tree: PyTree,
    schedule: Schedule,
    round: RoundId,
    axis_name: AxisName = "replica",
    *,
    finite: jax.Array | None = None,
    codec: Codec | None = None,
    key: jax.Array | None = None,
    after: PyTree | Between = None,
) -> PyTree:
    """``x_i <- sum_j W_ij x_j`` with W the matrix of ``round``; None communicates nothing.

    Args:
      tree: pytree of floating-point arrays of one replica; empty arrays are unchanged.
      schedule: a schedule whose number of replicas is the product of the axes' sizes.
      round: static Python int in [0, period); or `Simulated`; or None.
      axis_name: the replica axis, or (mesh axes ..., vmapped axis): several mesh axes are
        flattened into one, and the last varies fastest.
      finite: optional boolean scalar, whether this replica's ``tree`` is finite (it travels with
        the message). Parameters that are not finite are never mixed in: the receiver gives their
        weight to its own parameters. A replica whose own parameters are not finite takes the
        renormalized average of its finite senders, or stays NaN if there are none. If groups send
        to each other, a group counts as one replica with the mean of its finite members.
      codec: message format; None sends arrays uncompressed. With Q the rounding of the format,
        ``x_i <- x_i + sum_j W_ij Q(x_j) - Q(x_i)``. This preserves the mean over replicas, whatever
        Q loses, up to the rounding of these sums. `decent_jax.gossip.groups.coded_means` computes a
        group mean. Unsupported: top-k, and rounds that average in groups and then send.
      key: PRNG key for formats that round stochastically; the same on all replicas, different in
        every step.
      after: optional arrays, such as the gradients of this step. If groups send to each other, the
        last phase (inside the groups) waits for these arrays, so that messages can travel while
        they are computed. The result is the same. `Between` also makes a group mean wait.

    Returns:
      The mixed tree, with the same shapes and dtypes.

    Raises:
      ValueError: the axes do not hold ``schedule.num_replicas`` replicas; a round out of range; a
        schedule with group means, or a vmapped block, inside ``shard_map(check_vma=True)``;
        a ``codec`` in a round that averages in groups and then sends; top-k.
      TypeError: a traced round, or an array that is not floating-point.
    """
    if round is None:
        return tree
    leaves, put_back = mixable(tree)
    if isinstance(codec, TopK | ChunkedTopK):
        raise ValueError(
            f"{type(codec).__name__} of parameters never sends the small ones, so replicas would "
            "not agree; use decent_jax.optim.sparseloco, or choco of optim.contrib, which send "
            "differences and keep the rest"
        )
    axis = ReplicaAxis.of(schedule, axis_name)
    rnd = _round(schedule, round)
    if isinstance(round, Simulated) and codec is None:
        return put_back(_mixed_by_matrix(leaves, round.matrix, axis, finite))
    flag = None if finite is None else axis.lift(finite)
    between = None
    if isinstance(after, Between):
        after = between = after.arrays
    averages = rnd.group_size > 1 and not rnd.sends and not isinstance(round, Simulated)
    if averages and (codec is not None or between is not None):
        mixed, _ = groups.coded_means(leaves, rnd.group_size, axis, codec, key, flag, between)
        return put_back(mixed)
    if codec is not None:
        arrived, own = mix_coded(leaves, schedule, round, axis_name, codec, key, finite=finite)

        def moved(x: jax.Array, arrived: jax.Array, own: jax.Array) -> jax.Array:
            # A replica that is not finite keeps nothing: it takes the received average.
            left = x - own if finite is None else jnp.where(finite, x - own, jnp.zeros_like(x))
            return arrived + left

        return put_back(map(moved, leaves, arrived, own))
    if rnd.between_groups is not None:
        return put_back(groups.mix(leaves, rnd, axis, flag, after))
    rows = [axis.lift(leaf) for leaf in leaves]
    if rnd.group_size > 1:
        rows, flag = groups.means(rows, rnd.group_size, axis, flag)
    weights = permute.coefficients(rnd, axis, flag)
    received = [permute.receive_all(rows, send, axis) for send in rnd.sends]
    mixed = [
        axis.drop(permute.weighted_sum(blocks, weights, flag is not None))
        for blocks in zip(rows, *received, strict=True)
    ]
    return put_back(mixed)


def mixable(tree: PyTree) -> tuple[list[jax.Array], Callable[[Iterable[jax.Array]], PyTree]]:
    """The arrays of a tree that are mixed, and a function that puts the results back in place.

    Empty arrays are left out and do not change.

    Raises:
      TypeError: an array is not floating-point; the message names it.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in paths:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            name, kind = jax.tree_util.keystr(path) or "this one", jnp.result_type(leaf)
            raise TypeError(
                f"replicas mix floating-point arrays only, and {name} is of type {kind}; keep it "
                "out of the tree (nnx.Param selects the parameters of an nnx model)"
            )
    leaves = [leaf for _, leaf in paths]

    def put_back(mixed: Iterable[jax.Array]) -> PyTree:
        new = iter(mixed)
        return structure.unflatten([next(new) if jnp.size(x) else x for x in leaves])

    return [x for x in leaves if jnp.size(x)], put_back


def on_mesh(
    fn: Callable[..., PyTree], mesh: Mesh | AbstractMesh, axis_name: AxisName = "replica"
) -> Callable[..., PyTree]:
    """Turns code for one replica into a function of stacked trees (n, ...), for use in `jax.jit`.

    It is `jax.vmap` inside a `jax.shard_map`, so each device sends only the messages of its own
    replicas. Under `jax.vmap` alone, XLA would gather all replicas on every device. Arrays may also
    be sharded over other axes of the mesh, whatever the types of these axes.

    Args:
      fn: takes and returns trees of one replica; it may call `mix`, `mean` or ``tx.update``.
        Keyword arguments, such as a static ``round``, are passed through unchanged.
      mesh: its axes in ``axis_name`` shard the first dimension of all arguments and results.
      axis_name: as in `mix`, to which ``fn`` must pass the same. A name that is not a mesh axis is
        that of the vmapped axis, which counts the replicas on a device.

    Raises:
      ValueError: a device holds several replicas, and ``axis_name`` names no vmapped axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from decent_jax import gossip, topology
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> ring, axes = topology.make("ring", 8), ("data", "row")
      >>> swap = gossip.on_mesh(lambda x: gossip.mix(x, ring, 0, axes), mesh, axes)
      >>> print(jax.jit(swap)(jnp.arange(8.0)))
      [0.5 0.5 2.5 2.5 4.5 4.5 6.5 6.5]
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    devices = tuple(name for name in names if name in mesh.axis_names)
    block = next((name for name in names if name not in devices), None)

    split, manual = P(devices), set(devices)

    def mapped(*stacked: PyTree, **same_for_all: PyTree) -> PyTree:
        def body(*own: PyTree) -> PyTree:
            rows = len(jax.tree.leaves(own)[0])
            if block is None and rows > 1:
                raise ValueError(
                    f"each device of {axis_name!r} holds {rows} replicas; name an axis for these, "
                    f"here and where they are mixed: axis_name={(*devices, 'block')!r}"
                )
            return jax.vmap(functools.partial(fn, **same_for_all), axis_name=block)(*own)

        # Blocks and group means are not possible with check_vma=True, and nothing here needs it.
        return jax.shard_map(
            body, mesh=mesh, in_specs=split, out_specs=split, axis_names=manual, check_vma=False
        )(*stacked)

    return mapped


def mix_on(
    mesh: Mesh | AbstractMesh,
    tree: PyTree,
    schedule: Schedule,
    round: int | None,
    axis_name: AxisName = "replica",
    *,
    finite: jax.Array | None = None,
    codec: Codec | None = None,
    key: jax.Array | None = None,
) -> PyTree:
    """`mix` of stacked arrays (n, ...) that are sharded over a mesh axis, for use in `jax.jit`.

    Pass the result to ``tx.update(..., mixed=...)`` (`decent_jax.optim.Method`), and the rest of a
    step needs no `jax.shard_map`. Steps of methods that mix inside their update need `on_mesh`.

    Args:
      mesh, axis_name: see `on_mesh`.
      finite: (n,) bool, `decent_jax.replicas.finite` of the tree; None: all count as finite.
      tree, schedule, round, codec, key: as in `mix`.
    """

    def mix_one(tree: PyTree, finite: jax.Array | None) -> PyTree:
        return mix(tree, schedule, round, axis_name, finite=finite, codec=codec, key=key)

    return tree if round is None else on_mesh(mix_one, mesh, axis_name)(tree, finite)


def mix_coded(
    tree: PyTree,
    schedule: Schedule,
    round: int | Simulated,
    axis_name: AxisName,
    codec: Codec,
    key: jax.Array | None,
    *,
    finite: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """``(sum_j W_ij Q(x_j), Q(x_i))``: the mix of all decoded messages, and this replica's message.

    The arguments are those of `mix`.
    """
    axis = ReplicaAxis.of(schedule, axis_name)
    leaves, put_back = mixable(tree)
    sent, own = _coded(leaves, axis, codec, key)
    if isinstance(round, Simulated):
        mixed = mix(own, schedule, round, axis_name, finite=finite)
        return put_back(mixed), put_back(own)
    rnd = _round(schedule, round)
    check_coded(schedule)
    flag = None if finite is None else axis.lift(finite)
    weights = permute.coefficients(rnd, axis, flag)
    received = [_received(sent, send, axis) for send in rnd.sends]
    mixed: list[jax.Array] = []
    for x, like, *arrived in zip(own, leaves, *received, strict=True):
        blocks = [axis.lift(part) for part in (x, *(codec.decode(p, like) for p in arrived))]
        mixed.append(axis.drop(permute.weighted_sum(blocks, weights, flag is not None)))
    return put_back(mixed), put_back(own)


def receive(
    tree: PyTree, schedule: Schedule, round: int | Simulated, axis_name: AxisName = "replica"
) -> list[tuple[PyTree, jax.Array]]:
    """The messages of a round one by one: [(sender's tree, weight)], with weight 0 if none arrives.

    For methods that inspect messages before they use them; `mix` returns the weighted sum.
    """
    axis = ReplicaAxis.of(schedule, axis_name)
    rnd = _round(schedule, round)

    def arrive(send: Send) -> tuple[PyTree, jax.Array]:
        weight = axis.drop(axis.rows(send.weights))
        if isinstance(round, Simulated):  # a message that is lost has no weight in its matrix
            sender = axis.drop(axis.rows(send.sources))
            weight = jnp.where(sender >= 0, round.matrix[axis.replica(), sender], 0)
        return _received(tree, send, axis), weight

    return [arrive(send) for send in rnd.sends]


def _received(tree: PyTree, send: Send, axis: ReplicaAxis) -> PyTree:
    """The sender's ``tree``, as this replica receives it."""
    leaves, structure = jax.tree.flatten(tree)
    rows = permute.receive_all([axis.lift(x) for x in leaves], send, axis)
    return structure.unflatten(map(axis.drop, rows))


def mean(tree: PyTree, axis_name: AxisName = "replica") -> PyTree:
    """The mean over all replicas, for the all-reduce baseline, with the tree's shapes and dtypes.

    As in all sums over replicas, 16-bit numbers are added in float32 and rounded once.
    """
    axis = ReplicaAxis.over(axis_name)

    def mean_leaf(leaf: jax.Array) -> jax.Array:
        total = cpu.sum_rows(axis.lift(leaf).astype(permute.at_least_float32(leaf)))
        if axis.device_axis:
            total = jax.lax.psum(total, axis.device_axis)
        return (total / (axis.devices * axis.block)).astype(leaf.dtype)

    return jax.tree.map(mean_leaf, tree)


def mean_coded(
    tree: PyTree,
    axis_name: AxisName,
    codec: Codec,
    key: jax.Array | None = None,
    between: PyTree = None,
) -> tuple[PyTree, PyTree]:
    """``(mean over all replicas of Q(x_j), Q(x_i))``; all replicas get the same bits of the mean.

    With a sparse codec, every replica receives the messages of all others and adds them in the same
    order. Other codecs use `decent_jax.gossip.groups.coded_means`, with ``between``.
    """
    axis = ReplicaAxis.over(axis_name)
    leaves, put_back = mixable(tree)
    replicas = axis.devices * axis.block
    if not isinstance(codec, TopK | ChunkedTopK):
        mean, own = groups.coded_means(leaves, replicas, axis, codec, key, between=between)
        return put_back(mean), put_back(own)
    sent, own = _coded(leaves, axis, codec, key)

    def mean_leaf(x: jax.Array, parts: Parts) -> jax.Array:
        rows = tuple(map(axis.gathered, parts))
        wide = permute.at_least_float32(x)

        def add(total: jax.Array, part: Parts) -> tuple[jax.Array, None]:
            return total + codec.decode(part, x).astype(wide), None

        total, _ = jax.lax.scan(add, 0 * x.astype(wide), rows)
        return (total / replicas).astype(x.dtype)

    return put_back(map(mean_leaf, leaves, sent)), put_back(own)


def _coded(
    leaves: list[jax.Array], axis: ReplicaAxis, codec: Codec, key: jax.Array | None
) -> tuple[list[Parts], list[jax.Array]]:
    """The encoded parts of each array, and the array decoded from them."""
    noise = [None] * len(leaves)
    if key is not None:
        keys = jax.random.split(jax.random.fold_in(key, axis.replica()), len(leaves))
        noise = [codec.noise(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    # The barrier keeps XLA from rounding the decoded array again, differently from the message.
    sent = permute.barrier(list(map(codec.encode, leaves, noise)))
    return sent, list(map(codec.decode, sent, leaves))


def check_coded(schedule: Schedule) -> None:
    """Raises ValueError if a schedule sends sums, which cannot be encoded."""
    if schedule.sends_sums:
        raise ValueError(
            f"{schedule.name} sends sums between groups, which cannot be encoded; "
            "use codec='float32', or a schedule such as one_peer_exp or complete"
        )


def _mixed_by_matrix(
    leaves: list[jax.Array], matrix: jax.Array, axis: ReplicaAxis, finite: jax.Array | None
) -> list[jax.Array]:
    """The rows mixed by a traced matrix, with rows that are not finite handled as in `mix`."""
    if axis.device_axis:
        raise ValueError(
            "a Simulated round needs all replicas on one device: use jax.vmap without "
            "jax.shard_map, or the number of the round"
        )
    i, flag = axis.replica(), None
    weights = matrix[i]
    if finite is not None:
        flag = axis.lift(finite)
        others = jnp.where(flag, weights, 0).at[i].set(0)
        own_share = weights.sum() - others.sum()
        weights = jnp.where(finite, others.at[i].set(own_share), others / others.sum())

    def mix_leaf(leaf: jax.Array) -> jax.Array:
        wide = permute.at_least_float32(leaf)
        rows = permute.clean(axis.lift(leaf), flag).astype(wide)
        return jnp.tensordot(weights.astype(wide), rows, 1, precision="highest").astype(leaf.dtype)

    return list(map(mix_leaf, leaves))


def _round(schedule: Schedule, round: int | Simulated) -> Round:
    last, index = len(schedule.rounds) - 1, int(number(round))
    if not 0 <= index <= last:
        raise ValueError(
            f"{schedule.name} has rounds 0 to {last}, got round {index}; "
            "schedule.round_at(step) gives the round of a step"
        )
    return schedule.rounds[index]
