"""Means over groups in two stages, coded or not: few bits for DiLoCo and all-reduce, too.

A codec's numbers cannot be added on their way, so a sum in few bits has two stages, as in torchft's
quantised all-reduce: everybody sends each owner its chunk, and owners send back coded means.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.gossip import permute
from decent_jax.gossip.codecs import Codec
from decent_jax.gossip.groups import Groups
from decent_jax.gossip.permute import ReplicaAxis

ROW = 512  # numbers that share a scale


def coded_means(
    leaves: list[jax.Array],
    g: int,
    axis: ReplicaAxis,
    codec: Codec | None,
    key: jax.Array | None,
    finite: jax.Array | None = None,
    between: Any = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    r"""The mean over each replica's group of g, and what the replica itself has sent for it.

    All arrays are one vector in rows of `ROW` numbers, cut into g chunks; member k of a group owns
    the k-th. With Q the rounding of the codec, everywhere by the chance of the replica i that
    rounds:

    .. math:: m^{(k)} = Q_k\Big(\tfrac1g \textstyle\sum_i Q_i(x_i^{(k)})\Big)

    An all-to-all brings the chunks to their owners, who add in float32 and code the mean; an
    all-gather brings these to all: 2 (g - 1) / g coded vectors per replica. The owner's rounding
    holds for all members, so they get the same bits. m is unbiased where Q is; with a step of s its
    variance is at most ``s^2 / 4g`` from the first rounding and ``s^2 / 4`` from the second.

    Args:
      leaves: one replica's arrays.
      g: members of a group, consecutive replicas.
      axis: where the replicas are.
      codec: one that codes each row by itself; None: numbers travel as they are.
      key: the same on all replicas, another in every step; None rounds to the nearest, with a bias.
      finite: (block,) bool, or None. Of replicas that are not finite nothing is added; a finite one
        keeps their weight, the others take the mean of the finite ones, NaN if there are none.
      between: optional arrays. The sums are made after them, so that chunks may travel while they
        are computed, and means while others are.

    Returns:
      ``(m, Q_i(x_i))``, both like ``leaves``.
    """
    groups = Groups.of(g, axis)
    wide = jnp.result_type(*leaves) if codec is None else jnp.result_type(jnp.float32, *leaves)
    vector, put_back = _as_vector(leaves, wide)
    rows_of_chunk = -(-vector.size // (g * ROW))
    fill = g * rows_of_chunk * ROW - vector.size
    x = permute.clean(axis.lift(vector), finite)
    chunks = jnp.pad(x, ((0, 0), (0, fill))).reshape(len(x), g, rows_of_chunk, ROW)
    replicas = axis.rows(np.arange(axis.devices * axis.block))

    def coded(x, nth):
        noise = None
        if codec is not None and key is not None:
            own, shape = jax.random.fold_in(key, nth), (x.size // (len(replicas) * ROW), ROW)
            noise = jax.vmap(lambda i, codec=codec: codec.noise(own, i, shape))(replicas)
            noise = None if noise is None else noise.reshape(x.shape)
        # The barrier keeps XLA from rounding again, and differently, what is decoded here.
        parts = (x,) if codec is None else codec.encode(x, noise)
        return jax.lax.optimization_barrier(parts)

    def decoded(parts):
        if codec is None:
            return parts[0]
        shape = (*parts[0].shape[:-1], ROW)
        return codec.decode(parts, jnp.zeros(shape, vector.dtype))

    sent = coded(chunks, 0)
    shares = decoded(jax.tree.map(lambda x: groups.to_owners(x, between), sent))
    count = jnp.full(len(shares), g, vector.dtype)
    if finite is not None:
        count = groups.totals(finite.astype(vector.dtype))
    total = shares.sum(axis=1, dtype=permute.at_least_float32(shares))
    owned = total / permute.expand(jnp.maximum(count, 1), shares[:, 0])
    owned = owned.astype(wide)
    mean = decoded(jax.tree.map(groups.from_owners, coded(owned, 1)))
    mean, own = (rows.reshape(len(rows), -1)[:, : vector.size] for rows in (mean, decoded(sent)))
    count, mean = (jnp.repeat(rows, len(x) // len(shares), axis=0) for rows in (count, mean))
    if finite is not None:
        part, ok = permute.expand(count / g, mean), permute.expand(finite, mean)
        mean = jnp.where(ok, part * mean + (1 - part) * x, jnp.where(part > 0, mean, jnp.nan))
    return put_back(axis.drop(mean)), put_back(axis.drop(own))


def _as_vector(
    leaves: list[jax.Array], wide: jnp.dtype
) -> tuple[jax.Array, Callable[[jax.Array], list[jax.Array]]]:
    """All numbers in one dtype, and a function from such a vector back to arrays."""
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def put_back(vector):
        parts = zip(jnp.split(vector, ends), leaves, strict=True)
        return [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in parts]

    return jnp.concatenate([leaf.reshape(-1).astype(wide) for leaf in leaves]), put_back
