"""Optax transformations of decentralized training; they know pytrees only."""

from decent_jax.optim.accum_adam import (
    ScaleByAccumAdamState,
    accum_adam,
    accum_adamw,
    drop_window,
    scale_by_accum_adam,
)
from decent_jax.optim.choco import choco
from decent_jax.optim.corrected import d2, exact_diffusion, gradient_tracking, push_sum
from decent_jax.optim.decentralized import all_reduce, decentralized
from decent_jax.optim.guard import EarlyMixing, GuardedState, apply_updates
from decent_jax.optim.methods import METHODS, Method, Parts, register
from decent_jax.optim.momentum import (
    decentlam,
    gossiped_momentum,
    quasi_global_adam,
    quasi_global_sgd,
)
from decent_jax.optim.outer import diloco, slowmo
from decent_jax.optim.schedules import (
    inverse_sqrt_schedule,
    linear_warmup_cosine_schedule,
    linear_warmup_step_schedule,
)
from decent_jax.optim.swarm import Lattice, swarm

__all__ = [
    "METHODS",
    "EarlyMixing",
    "GuardedState",
    "Lattice",
    "Method",
    "Parts",
    "ScaleByAccumAdamState",
    "accum_adam",
    "accum_adamw",
    "all_reduce",
    "apply_updates",
    "choco",
    "d2",
    "decentlam",
    "decentralized",
    "diloco",
    "drop_window",
    "exact_diffusion",
    "gossiped_momentum",
    "gradient_tracking",
    "inverse_sqrt_schedule",
    "linear_warmup_cosine_schedule",
    "linear_warmup_step_schedule",
    "push_sum",
    "quasi_global_adam",
    "quasi_global_sgd",
    "register",
    "scale_by_accum_adam",
    "slowmo",
    "swarm",
]
