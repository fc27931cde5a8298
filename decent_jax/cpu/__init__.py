"""Workarounds that make XLA's CPU backend fast; other backends use none of them."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

# XLA's options for training steps.
COMPILER_OPTIONS: dict[str, bool | str | int] = {
    # XLA for GPUs does this by default. Without it, a step copies the whole optimizer state before
    # updating it: the quickstart takes 43.4 MB instead of 39.1. With it, the update of 4 million
    # parameters takes 6.6 ms instead of 11.2; whole steps of several sizes took 0.75 to 1.07 times
    # as long as without it.
    "xla_cpu_copy_insertion_use_region_analysis": True,
    # This pass removes barriers before fusion; `computed_once` needs them.
    "xla_disable_hlo_passes": "cse_barrier_expander",
}

# --- Fusions --------------------------------------------------------------------------------------


def computed_once(x: jax.Array) -> jax.Array:
    """``x`` behind an optimization barrier, so it and its gradient are materialized before use.

    XLA for CPUs recomputes a cheap sum in every fusion that uses it. The gradient of a residual
    stream is a sum over all later branches, and every matrix product in an earlier branch
    recomputes it. For the model of configs/multi30k_en_de.py with eight replicas on one core,
    forward and backward took 1.24 s without the barrier and 0.79 s with it. The gradient of an
    activation is recomputed as a transposed matrix, against the memory order: a barrier before GELU
    makes the step of configs/shakespeare.py:cpu 1.3 times as fast. Only programs compiled with
    `COMPILER_OPTIONS` benefit.
    """
    return lax.optimization_barrier(x) if _on_cpus() else x


def _on_cpus() -> bool:
    """Whether this code is traced for CPUs, real or only described."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.platform == "cpu" if described else jax.default_backend() == "cpu"


# --- Sums -----------------------------------------------------------------------------------------


def sum_rows(rows: jax.Array, axis: int = 0) -> jax.Array:
    """``rows.sum(axis)`` by pairwise summation; XLA's CPU reduction over rows is 100 times slower.

    Adding 64 rows one by one took ten times as long as pairwise.
    """
    count = rows.shape[axis]
    middle = count // 2
    if not middle:
        return jnp.squeeze(rows, axis)
    first = jax.lax.slice_in_dim(rows, 0, middle, axis=axis)
    second = jax.lax.slice_in_dim(rows, middle, 2 * middle, axis=axis)
    total = sum_rows(first + second, axis)
    if count % 2:
        total = total + jax.lax.index_in_dim(rows, -1, axis, keepdims=False)
    return total


# --- Convolutions ---------------------------------------------------------------------------------

_LAYOUT = ("NHWC", "HWIO", "NHWC")


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolution of images that are padded with ``K // 2`` zeros on all sides.

    On a CPU, XLA uses its fast kernels for the layouts used here and, outside of loops, for layouts
    that it can transpose to them. JAX's gradients use other layouts: inside ``lax.map`` and
    ``lax.scan`` they take 20 to 40 times as long as the forward pass. Therefore, on CPUs we compute
    the gradient in the layout of the forward pass, with the same result.

    Args:
        x: ``(B, H, W, I)``.
        kernel: ``(K, K, I, O)`` of the same dtype, ``K`` odd.
        stride: stride along both axes.

    Returns:
        ``(B, ceil(H / stride), ceil(W / stride), O)``.
    """
    if _on_cpus():
        return _with_own_gradient(x, kernel, stride)
    return _forward(x, kernel, stride)


def _forward(x, kernel, stride):
    pad = kernel.shape[0] // 2
    return _plain(x, kernel, ((pad, pad),) * 2, strides=(stride, stride))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _with_own_gradient(x, kernel, stride):
    return _forward(x, kernel, stride)


def _save(x, kernel, stride):
    return _forward(x, kernel, stride), (x, kernel)


def _gradients(stride, saved, gradient):
    x, kernel = saved
    return (
        _input_gradient(x.shape, kernel, gradient, stride),
        _kernel_gradient(x, kernel.shape, gradient, stride),
    )


_with_own_gradient.defvjp(_save, _gradients)


def _input_gradient(shape, kernel, gradient, stride):
    """The dilated gradient ``(B, H', W', O)`` convolved with the flipped kernel, of ``shape``."""
    size = kernel.shape[0]
    before = size - 1 - size // 2
    padding = [
        (before, shape[axis] + size - 1 - _spread(gradient, axis, stride) - before)
        for axis in (1, 2)
    ]
    flipped = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    return _plain(gradient, flipped, padding, lhs_dilation=(stride, stride))


def _kernel_gradient(x, shape, gradient, stride):
    """A convolution with input channels as batch, batch as channels, and gradient as kernel."""
    size = shape[0]
    before = size // 2
    padding = [
        (before, size - 1 + _spread(gradient, axis, stride) - x.shape[axis] - before)
        for axis in (1, 2)
    ]
    images, kernels = x.transpose(3, 1, 2, 0), gradient.transpose(1, 2, 0, 3)
    result = _plain(images, kernels, padding, rhs_dilation=(stride, stride))
    return result.transpose(1, 2, 0, 3)


def _spread(gradient, axis: int, stride: int) -> int:
    """Size of an axis with ``stride - 1`` zeros between its entries."""
    return (gradient.shape[axis] - 1) * stride + 1


def _plain(x, kernel, padding, strides=(1, 1), lhs_dilation=(1, 1), rhs_dilation=(1, 1)):
    if x.shape[1] < kernel.shape[0] or x.shape[2] < kernel.shape[1]:
        # With a kernel larger than the image, XLA is 100 times slower, unless the image is padded.
        within = [(*sides, step - 1) for sides, step in zip(padding, lhs_dilation, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *within, (0, 0, 0)])
        x = lax.optimization_barrier(x)  # else XLA folds the padding into the convolution
        padding, lhs_dilation = ((0, 0), (0, 0)), (1, 1)
    return lax.conv_general_dilated(
        x, kernel, strides, padding, lhs_dilation, rhs_dilation, dimension_numbers=_LAYOUT
    )
