"""Losses on logits, written for large vocabularies in half precision."""

from functools import partial

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Softmax cross-entropy of every position, in nats.

    ``loss = (1 - eps) * (-logp[target]) + eps * mean_v(-logp[v])`` with ``logp`` the log-softmax
    of ``logits`` and ``eps`` the label smoothing; the target's own total weight is therefore
    ``1 - eps + eps / V``.

    Logits are the largest array of a language model: ``B * T * V``, 6.6 GB in float32 for a
    batch of 32 GPT-2 sequences. The plain formula on bfloat16 logits keeps a float32 copy (or the
    float32 probabilities) from the forward to the backward pass and makes a second one for the
    gradient. Here the forward pass reduces in float32 as it reads, the only residuals are the
    logits in their own dtype and one float32 log-sum-exp per position, and the gradient is written
    in the logits' dtype by one elementwise expression. (XLA's CPU kernels do convert the logits
    once, for the forward reductions; the backward pass does not read that copy.)

    Args:
      logits: ``(..., V)``, bfloat16, float16, float32 or float64.
      targets: ``(...)`` integers in ``[0, V)``. Beyond it the loss is NaN; to leave a position
        out give it any valid target and multiply its loss by 0.
      label_smoothing: ``eps`` in ``[0, 1)``, a Python float.

    Returns:
      ``(...)`` float32 (float64 for float64 logits).

    Raises:
      ValueError: ``targets`` is not shaped like ``logits`` without its last axis, or
        ``label_smoothing`` is outside ``[0, 1)``.

    Example:
      >>> import jax.numpy as jnp
      >>> print(cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])))
      [1.3862944 1.3862944]
    """
    return _cross_entropy(logits, targets, label_smoothing)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits, targets, label_smoothing) -> jax.Array:
    return _forward(logits, targets, label_smoothing)[0]


def _forward(logits, targets, label_smoothing):
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets of shape {targets.shape} do not fit logits of shape {logits.shape}: "
            f"expected {logits.shape[:-1]}"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    # Each `astype` is fused into the reduction or gather that reads it.
    log_normalizer = jax.nn.logsumexp(logits.astype(wide), axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill")[..., 0]
    loss = log_normalizer - (1.0 - label_smoothing) * picked.astype(wide)
    if label_smoothing:
        loss -= label_smoothing * jnp.mean(logits, axis=-1, dtype=wide)
    return loss, (logits, log_normalizer, targets)


def _backward(label_smoothing, residuals, cotangent):
    logits, log_normalizer, targets = residuals
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits.astype(log_normalizer.dtype) - log_normalizer[..., None])
    wanted = (1.0 - label_smoothing) * (classes == targets[..., None])
    wanted += label_smoothing / logits.shape[-1]
    gradient = (probabilities - wanted) * cotangent[..., None]
    return gradient.astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)
