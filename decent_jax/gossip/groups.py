"""Means of groups of consecutive replicas, encoded or not, and rounds of messages between groups.

Encoded numbers cannot be added in transit, so a low-precision sum has two stages, as in torchft's
quantized all-reduce: every replica sends each owner its chunk, and owners send encoded means back.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax import cpu
from decent_jax.gossip import permute
from decent_jax.gossip.codecs import Codec, Parts
from decent_jax.gossip.permute import ReplicaAxis, expand, squared_norm
from decent_jax.ground.pytree import PyTree
from decent_jax.topology import Round
from decent_jax.topology.rounds import kron, round_of

ROW = 512  # numbers that share a scale


def means(
    rows: list[jax.Array], g: int, axis: ReplicaAxis, finite: jax.Array | None
) -> tuple[list[jax.Array], jax.Array | None]:
    """The mean of (block, ...) over each replica's group of g, and which rows are then finite.

    finite: (block,) bool, or None. A finite replica adds the weight of non-finite members to its
      own; a non-finite one takes the mean of the finite members, or NaN if there are none.
    """

    def mean(x: jax.Array) -> jax.Array:
        wide = x.astype(permute.at_least_float32(x))
        total = _sum(permute.clean(wide, finite), g, axis)
        if finite is None:
            return (total / g).astype(x.dtype)
        ok = expand(finite, x)
        count = expand(_sum(finite.astype(wide.dtype), g, axis), x)
        return jnp.where(ok, (total + (g - count) * wide) / g, total / count).astype(x.dtype)

    known = None if finite is None else _sum(finite.astype(jnp.float32), g, axis) > 0
    return [mean(x) for x in rows], known


def mix(
    leaves: list[jax.Array],
    rnd: Round,
    axis: ReplicaAxis,
    finite: jax.Array | None = None,
    after: PyTree = None,
) -> list[jax.Array]:
    """Mixes by a round in which groups average inside, then mix their means: one message per group.

    All members of a group hold its mean, so each of the c devices of a group needs to move only 1/c
    of it. The steps are a reduce-scatter inside the group, permutes of the parts between groups and
    an all-gather inside. A group sends one model per message to other devices, not group_size
    models.

    A **part** is one device's share of one group: the group's mean if the device holds whole groups
    (nothing is scattered then), otherwise 1/c of it, as a flat array. Parts mix with each other
    as replicas do, so the other steps are those of a round without groups.

    Args:
      leaves: one replica's arrays.
      rnd: a round with `Round.between_groups`.
      axis: the replica axis.
      finite: (block,) bool, or None. A group counts as one replica: its value is the mean of its
        finite members, and it is finite if any of them is.
      after: arrays that the last phase waits for, or None.
    """
    assert rnd.between_groups is not None
    groups = Groups.of(rnd.group_size, axis)
    parts = groups.parts()
    between = kron(rnd.between_groups, round_of(np.eye(groups.devices)))
    count = None if finite is None else groups.totals(finite.astype(jnp.float32))
    weights = permute.coefficients(between, parts, None if count is None else count > 0)
    never = None if after is None else axis.lift(_never(after)).any()

    def mix_leaf(leaf: jax.Array) -> jax.Array:
        wide = axis.lift(leaf).astype(permute.at_least_float32(leaf))
        total = groups.sums(permute.clean(wide, finite))
        size = rnd.group_size if count is None else expand(count, total)
        own = total / jnp.asarray(size, total.dtype)  # 0 / 0 if no member is finite: weight 0
        received = [permute.receive(own, send, parts) for send in between.sends]
        mixed = permute.weighted_sum([own, *received], weights, finite is not None)
        if never is not None:
            mixed = jnp.where(never, jnp.zeros_like(mixed), mixed)
        return groups.given_back(mixed.astype(leaf.dtype), leaf.shape)

    # XLA for TPUs combines the sums inside groups by its own rules. It schedules the last of
    # several sums, and all messages that wait for it, only after the gradient, but a single sum
    # before it.
    small = math.inf if permute.on_tpus() else permute.SMALL
    return permute.together(mix_leaf, leaves, axis, small=small)


def _never(after: PyTree) -> jax.Array:
    """() bool, always False, but unknown before ``after``: whether a squared norm is negative.

    XLA must not see that it is constant; the norms of gradients are needed anyway. XLA on GPUs
    starts a collective as soon as its operands are known. Without this flag, the all-gather inside
    groups would occupy the stream and wait for the permutes before the gradient is computed.
    """
    return (jnp.stack([squared_norm(x) for x in jax.tree.leaves(after)]) < 0).any()


def _sum(rows: jax.Array, g: int, axis: ReplicaAxis) -> jax.Array:
    """The sum over each replica's group of g, (block, ...)."""
    total = Groups.of(g, axis).totals(rows)
    members = (len(total), len(rows) // len(total), *total.shape[1:])
    return jnp.broadcast_to(total[:, None], members).reshape(rows.shape)


# --- Means of encoded messages --------------------------------------------------------------------


def coded_means(
    leaves: list[jax.Array],
    g: int,
    axis: ReplicaAxis,
    codec: Codec | None,
    key: jax.Array | None,
    finite: jax.Array | None = None,
    between: PyTree = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    r"""The mean over each replica's group of g, and the replica's own decoded message.

    All arrays form one vector in rows of `ROW` numbers, cut into g chunks; member k of a group owns
    chunk k. With Q the rounding of the codec, drawn independently by each replica i that rounds:

    .. math:: m^{(k)} = Q_k\Big(\tfrac1g \textstyle\sum_i Q_i(x_i^{(k)})\Big)

    The chunks travel to their owners, which add in float32 and encode the mean; an all-gather
    distributes it. A replica sends 2 (g - 1) / g encoded vectors. All members use the owner's
    rounding, so they get the same bits. m is unbiased if Q is. If Q rounds to multiples of s, the
    first rounding adds a variance of at most ``s^2 / 4g`` and the second of ``s^2 / 4``.

    Args:
      leaves: one replica's arrays.
      g: the number of members of a group, which are consecutive replicas.
      axis: the replica axis.
      codec: message format, which encodes each row separately; None sends numbers uncompressed.
      key: PRNG key, equal on all replicas, different in every step; None rounds to nearest, with a
        bias.
      finite: (block,) bool, or None. Non-finite replicas add nothing. A finite replica gives their
        weight to its own numbers; a non-finite one takes the mean of the finite ones, or NaN if
        there are none.
      between: optional arrays for which the sums wait, so that chunks can travel while these arrays
        are computed, and means during later work.

    Returns:
      ``(m, Q_i(x_i))``, both like ``leaves``.
    """
    groups = Groups.of(g, axis)
    wide = jnp.result_type(*leaves) if codec is None else jnp.result_type(jnp.float32, *leaves)
    vector, put_back = _as_vector(leaves, wide)
    rows_of_chunk = -(-vector.size // (g * ROW))
    fill = g * rows_of_chunk * ROW - vector.size
    x = permute.clean(axis.lift(vector), finite)
    chunks = permute.pad(x, ((0, 0), (0, fill))).reshape(len(x), g, rows_of_chunk, ROW)
    replicas = axis.rows(np.arange(axis.devices * axis.block))

    def coded(x: jax.Array, nth: int) -> Parts:
        noise = None
        if codec is not None and key is not None:
            shape = (x.size // (len(replicas) * ROW), ROW)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, nth), replicas)
            noise = jax.vmap(functools.partial(codec.noise, shape=shape))(keys)
            noise = None if noise is None else noise.reshape(x.shape)
        # The barrier keeps XLA from rounding the decoded numbers again, differently from the parts.
        parts = (x,) if codec is None else codec.encode(x, noise)
        return permute.barrier(parts)

    def decoded(parts: Parts) -> jax.Array:
        if codec is None:
            return parts[0]
        shape = (*parts[0].shape[:-1], ROW)
        return codec.decode(parts, jnp.zeros(shape, vector.dtype))

    sent = coded(chunks, 0)
    shares = decoded(tuple(groups.to_owners(part, between) for part in sent))
    count = jnp.full(len(shares), g, vector.dtype)
    if finite is not None:
        count = groups.totals(finite.astype(vector.dtype))
    total = shares.sum(axis=1, dtype=permute.at_least_float32(shares))
    owned = total / permute.expand(jnp.maximum(count, 1), shares[:, 0])
    owned = owned.astype(wide)
    mean = decoded(tuple(map(groups.from_owners, coded(owned, 1))))
    mean, own = (rows.reshape(len(rows), -1)[:, : vector.size] for rows in (mean, decoded(sent)))
    count, mean = (jnp.repeat(rows, len(x) // len(shares), axis=0) for rows in (count, mean))
    if finite is not None:
        part, ok = permute.expand(count / g, mean), permute.expand(finite, mean)
        mean = jnp.where(ok, part * mean + (1 - part) * x, jnp.where(part > 0, mean, jnp.nan))
    return put_back(axis.drop(mean)), put_back(axis.drop(own))


def _as_vector(
    leaves: list[jax.Array], wide: jnp.dtype
) -> tuple[jax.Array, Callable[[jax.Array], list[jax.Array]]]:
    """All numbers as one vector of one dtype, and the function that restores the arrays."""
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def put_back(vector: jax.Array) -> list[jax.Array]:
        parts = zip(jnp.split(vector, ends), leaves, strict=True)
        return [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in parts]

    return jnp.concatenate([leaf.reshape(-1).astype(wide) for leaf in leaves]), put_back


# --- Groups on devices ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of ``size`` consecutive replicas; each group lies on ``devices`` devices."""

    size: int
    devices: int
    axis: ReplicaAxis

    @staticmethod
    def of(size: int, axis: ReplicaAxis) -> "Groups":
        b = axis.block
        if b % size and size % b:
            raise ValueError(
                f"groups of {size} replicas neither fill nor divide the {b} replicas that a device "
                f"holds; put a divisor or a multiple of {size} replicas on each device"
            )
        return Groups(size, max(1, size // b), axis)

    def parts(self) -> ReplicaAxis:
        """The axis of the parts: one per device of a group, or one per group on a device."""
        return dataclasses.replace(self.axis, block=max(1, self.axis.block // self.size))

    def members(self, x: jax.Array) -> list[list[int]]:
        """The devices of every group, as ``axis_index_groups`` for collectives of ``x``."""
        if self.axis.checks_vma(x):
            raise ValueError(
                f"a mean over groups of {self.size} replicas needs jax.shard_map(..., "
                "check_vma=False); schedule.partial_groups says which schedules do"
            )
        return np.arange(self.axis.devices).reshape(-1, self.devices).tolist()

    def totals(self, rows: jax.Array) -> jax.Array:
        """(block, ...) to (parts, ...): the sum over each part's group, on all its devices."""
        local = self.local_sums(rows)
        if self.devices == 1:
            return local
        members = None if self.devices == self.axis.devices else self.members(rows)
        return jax.lax.psum(local, self.axis.device_axis, axis_index_groups=members)

    def sums(self, rows: jax.Array) -> jax.Array:
        """(block, ...) to this device's parts of the groups' sums: (parts, ...), or (1, flat).

        Arrays are zero-padded to a multiple of the group's devices, by at most devices - 1 numbers.
        """
        local = self.local_sums(rows)
        if self.devices == 1:
            return local
        flat = permute.pad(local.reshape(-1), (0, -local.size % self.devices))
        members, scatter = self.members(flat), jax.lax.psum_scatter
        return scatter(flat, self.axis.device_axis, axis_index_groups=members, tiled=True)[None]

    def given_back(self, parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """This replica's copy of its group's array, in this shape."""
        if self.devices == 1:
            row = jax.lax.axis_index(self.axis.block_axis) // self.size
            return permute.nth(parts, row)
        members, gather = self.members(parts), jax.lax.all_gather
        whole = gather(parts[0], self.axis.device_axis, axis_index_groups=members, tiled=True)
        return whole[: math.prod(shape)].reshape(shape)

    def to_owners(self, chunks: jax.Array, between: PyTree = None) -> jax.Array:
        """Sends chunks (block, size, ...) to their owners: (parts, size, chunks owned here, ...).

        The k-th member of a group owns the k-th chunk of each member; the result's second axis
        counts the senders. The chunks travel by permutes over 1 to devices - 1 places, which jax
        supports for groups under `jax.vmap`. XLA hides permutes behind a loop, but would block on
        an all-to-all (jaxlib 0.12). With ``between``, nothing uses the chunks before these arrays
        exist; otherwise XLA could wait for the chunks before a loop.
        """
        here, c = min(self.size, self.axis.block), self.devices
        if c == 1:
            return chunks.reshape(-1, here, *chunks.shape[1:])
        me = jax.lax.axis_index(self.axis.device_axis) % c
        for_device = chunks.reshape(here, c, here, *chunks.shape[2:]).swapaxes(0, 1)
        by_shift = [for_device[me]]
        for shift in range(1, c):
            pairs = [(m[k], m[(k + shift) % c]) for m in self.members(chunks) for k in range(c)]
            sent = for_device[(me + shift) % c]
            by_shift.append(jax.lax.ppermute(sent, self.axis.device_axis, pairs))
        if between is not None:
            by_shift, _ = permute.barrier((by_shift, between))
        by_sender = jnp.stack(by_shift)[(me - jnp.arange(c)) % c]
        return by_sender.reshape(1, self.size, *by_sender.shape[2:])

    def from_owners(self, owned: jax.Array) -> jax.Array:
        """(parts, chunks owned here, ...) to (parts, size, ...): all chunks, on every member."""
        if self.devices == 1:
            return owned
        members, name = self.members(owned), self.axis.device_axis
        return jax.lax.all_gather(owned, name, axis_index_groups=members, axis=1, tiled=True)

    def local_sums(self, rows: jax.Array) -> jax.Array:
        """The sum over the rows of each group on this device, (max(1, block / size), ...)."""
        width = min(self.size, len(rows))
        return cpu.sum_rows(rows.reshape(-1, width, *rows.shape[1:]), axis=1)
