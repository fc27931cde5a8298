"""Optax transformations of decentralized training; they know pytrees only."""

from decent_jax.optim.accum_adam import (
    ScaleByAccumAdamState,
    accum_adam,
    accum_adamw,
    drop_window,
    scale_by_accum_adam,
)
from decent_jax.optim.decentralized import (
    GuardedState,
    all_reduce,
    apply_updates,
    decentralized,
)
from decent_jax.optim.schedules import inverse_sqrt_schedule, linear_warmup_cosine_schedule

__all__ = [
    "GuardedState",
    "ScaleByAccumAdamState",
    "accum_adam",
    "accum_adamw",
    "all_reduce",
    "apply_updates",
    "decentralized",
    "drop_window",
    "inverse_sqrt_schedule",
    "linear_warmup_cosine_schedule",
    "scale_by_accum_adam",
]
