"""Messages and sums that XLA's CPU backend, and gloo below it, would make slow.

`decent_jax.gossip` asks here and takes the usual way elsewhere.
"""

import jax
import jax.numpy as jnp


def are_faster(pairs: list[tuple[int, int]], devices: int) -> bool:
    """Whether `swap` is faster over gloo than this ``ppermute``: with all devices in pairs.

    Args:
      pairs: (source, destination), as of ``jax.lax.ppermute``.
      devices: how many the axis has.
    """
    partner = dict(pairs)
    return len(partner) == devices and all(a != b == partner.get(a) for b, a in pairs)


def swap(x: jax.Array, pairs: list[tuple[int, int]], axis: tuple[str, ...]) -> jax.Array:
    """The result of ``ppermute`` for devices in pairs, bit for bit, as a sum over each pair.

    In gloo a device cannot ask its partner for a message while it sends one: the request waits
    behind the message, on the same connection. So the two messages of a permute travel one after
    the other, and a pair has half the bandwidth of its links (1330 ms for 16 MB at 200 Mbit/s).
    The sum over two is sent in parts, both ways at once (675 ms). Since it is a sum of unsigned
    integers of 32 bits, subtracting the own bits is exact.
    """
    bits = _words(x)
    groups = sorted({tuple(sorted(pair)) for pair in pairs})
    return _unworded(jax.lax.psum(bits, axis, axis_index_groups=groups) - bits, x)


def sum_rows(rows: jax.Array, axis: int = 0) -> jax.Array:
    """``rows.sum(axis)`` by additions of halves: XLA's CPU reduction over rows is 100 times slower.

    Adding row by row, a mean of 64 rows took ten times as long as by halves.
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


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array in 32-bit words; XLA would widen narrower integers for a sum."""
    flat = (x.astype(jnp.uint8) if x.dtype == bool else x).reshape(-1)
    return jnp.pad(flat, (0, -x.size % max(1, 4 // x.dtype.itemsize))).view(jnp.uint32)


def _unworded(bits: jax.Array, like: jax.Array) -> jax.Array:
    """The array of `_words`, in the shape and dtype of ``like``."""
    x = bits.view(jnp.uint8 if like.dtype == bool else like.dtype)
    return x[: like.size].reshape(like.shape).astype(like.dtype)
