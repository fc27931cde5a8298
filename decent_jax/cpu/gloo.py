"""gloo, the library that jax uses to send arrays between CPU processes."""

import jax
import jax.numpy as jnp


def used() -> bool:
    """Whether processes exchange arrays through gloo."""
    implementation = jax.config.jax_cpu_collectives_implementation  # pyright: ignore (untyped)
    return jax.process_count() > 1 and jax.default_backend() == "cpu" and implementation == "gloo"


def swap_is_faster(pairs: list[tuple[int, int]], devices: int) -> bool:
    """Whether `swap` replaces this ``ppermute``: it is faster if all devices exchange in pairs.

    Args:
      pairs: (source, destination), as in ``jax.lax.ppermute``.
      devices: size of the axis.
    """
    partner = dict(pairs)
    return len(partner) == devices and all(a != b == partner.get(a) for b, a in pairs)


def swap(x: jax.Array, pairs: list[tuple[int, int]], axis: tuple[str, ...]) -> jax.Array:
    """The result of ``ppermute`` for devices in pairs, bit for bit, computed as sums over pairs.

    In gloo, a device cannot request a message from its partner while it sends one: the request
    waits behind the message on the same connection. The two messages of a permute therefore travel
    one after the other, at half the bandwidth of the link (1330 ms for 16 MB at 200 Mbit/s). A sum
    over two devices is sent in chunks, both ways at once (675 ms). It is a sum of unsigned 32-bit
    integers, so subtracting the device's own bits is exact.
    """
    bits = _words(x)
    groups = sorted({tuple(sorted(pair)) for pair in pairs})
    return _unworded(jax.lax.psum(bits, axis, axis_index_groups=groups) - bits, x)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array in 32-bit words; XLA would widen narrower integers in a sum."""
    flat = x.reshape(-1)
    # Cast to integers before padding: XLA would flush the subnormal numbers of bfloat16 to zero.
    flat = flat.astype(jnp.uint8) if x.dtype == bool else flat.view(_narrow(x))
    return jnp.pad(flat, (0, -flat.size % (4 // flat.dtype.itemsize))).view(jnp.uint32)


def _unworded(bits: jax.Array, like: jax.Array) -> jax.Array:
    """The array of `_words`, in the shape and dtype of ``like``."""
    flat = bits.view(_narrow(like))
    flat = flat[: like.size * like.dtype.itemsize // flat.dtype.itemsize]
    x = flat.astype(bool) if like.dtype == bool else flat.view(like.dtype)
    return x.reshape(like.shape)


def _narrow(x: jax.Array) -> jnp.dtype:
    """The unsigned integer type as wide as the elements of x, but at most 32 bits wide."""
    return jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")
