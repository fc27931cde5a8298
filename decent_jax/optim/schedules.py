"""Learning rates as functions of the 0-based step, exactly as in the reference implementation."""

from collections.abc import Sequence

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike


def linear_warmup_cosine_schedule(
    peak: float, warmup_steps: int, steps: int, *, start_factor: float = 0.0, end: float = 0.0
) -> optax.Schedule:
    """A linear rise from ``start_factor * peak`` to ``peak``, then a cosine to ``end``.

    The peak is reached at step ``warmup_steps`` and ``end`` at step ``steps``; the rate then stays
    there.
    """
    if not 0 <= warmup_steps <= steps:
        raise ValueError(f"warm-up of {warmup_steps} steps does not fit into {steps} steps")
    return optax.warmup_cosine_decay_schedule(
        start_factor * peak, peak, warmup_steps, max(steps, warmup_steps + 1), end
    )


def linear_warmup_linear_schedule(
    peak: float, warmup_steps: int, steps: int, *, end: float = 0.0
) -> optax.Schedule:
    """A linear rise from ``peak / warmup_steps`` to ``peak``, then a linear fall to ``end``.

    The 0-based step ``warmup_steps - 1`` has ``peak``; without a warm-up, step 0 has it.

    Example:
      >>> rate = linear_warmup_linear_schedule(1.0, 2, 6)
      >>> [float(rate(t)) for t in range(7)]
      [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def schedule(step: ArrayLike) -> Array:
        t = jnp.asarray(step, jnp.float32)
        share = jnp.clip((t - warmup_steps) / max(steps - warmup_steps, 1), 0.0, 1.0)
        warming = jnp.minimum(1.0, (t + 1) / max(warmup_steps, 1))
        return warming * (peak + share * (end - peak))

    return schedule


def linear_warmup_step_schedule(
    peak: float, warmup_steps: int, drops: Sequence[int], factor: float
) -> optax.Schedule:
    """A linear rise to ``peak``, which is multiplied by ``factor`` at each of ``drops``.

    For 0-based step t: ``peak * min(1, (t + 1) / warmup_steps)``, times ``factor`` once for each
    drop <= t (Goyal et al., 2017, arXiv:1706.02677, with drops after 30, 60 and 80 of 90 epochs).

    Example:
      >>> rate = linear_warmup_step_schedule(1.0, 2, [4, 5], 0.1)
      >>> [round(float(rate(t)), 3) for t in range(7)]
      [0.5, 1.0, 1.0, 1.0, 0.1, 0.01, 0.01]
    """

    def schedule(step: ArrayLike) -> Array:
        t = jnp.asarray(step, jnp.float32)
        rate = peak * jnp.minimum(1.0, (t + 1) / max(warmup_steps, 1))
        for drop in drops:
            rate = rate * jnp.where(t >= drop, factor, 1.0)
        return rate

    return schedule


def inverse_sqrt_schedule(peak: float, warmup_steps: int) -> optax.Schedule:
    """Linear warm-up, then ``peak * sqrt(warmup_steps / (step + 1))`` (the WMT14 runs).

    For 0-based step t: ``peak (0.99 (t + 1) / warmup_steps + 0.01)`` while t < warmup_steps.
    """
    if warmup_steps < 1:
        raise ValueError(f"inverse_sqrt needs at least one warm-up step, got {warmup_steps}")

    def schedule(step: ArrayLike) -> Array:
        t = jnp.asarray(step, jnp.float32) + 1
        warming = 0.99 * t / warmup_steps + 0.01
        return peak * jnp.where(t <= warmup_steps, warming, jnp.sqrt(warmup_steps / t))

    return schedule
