"""Optax transformations of decentralized training; they know pytrees only."""

from decent_jax.optim.accum_adam import ScaleByAccumAdamState as ScaleByAccumAdamState
from decent_jax.optim.accum_adam import accum_adam as accum_adam
from decent_jax.optim.accum_adam import accum_adamw as accum_adamw
from decent_jax.optim.accum_adam import drop_window as drop_window
from decent_jax.optim.accum_adam import scale_by_accum_adam as scale_by_accum_adam
from decent_jax.optim.compressed import choco as choco
from decent_jax.optim.compressed import sparta as sparta
from decent_jax.optim.corrected import consensus_weights as consensus_weights
from decent_jax.optim.corrected import d2 as d2
from decent_jax.optim.corrected import exact_diffusion as exact_diffusion
from decent_jax.optim.corrected import gradient_tracking as gradient_tracking
from decent_jax.optim.corrected import push_sum as push_sum
from decent_jax.optim.corrected import with_equal_weights as with_equal_weights
from decent_jax.optim.declaration import METHODS as METHODS
from decent_jax.optim.declaration import Method as Method
from decent_jax.optim.declaration import Parts as Parts
from decent_jax.optim.declaration import register as register
from decent_jax.optim.guard import EarlyMixing as EarlyMixing
from decent_jax.optim.guard import GuardedState as GuardedState
from decent_jax.optim.guard import all_reduce as all_reduce
from decent_jax.optim.guard import apply_updates as apply_updates
from decent_jax.optim.guard import decentralized as decentralized
from decent_jax.optim.momentum import decentlam as decentlam
from decent_jax.optim.momentum import des_loc as des_loc
from decent_jax.optim.momentum import gossiped_momentum as gossiped_momentum
from decent_jax.optim.momentum import quasi_global_adam as quasi_global_adam
from decent_jax.optim.momentum import quasi_global_sgd as quasi_global_sgd
from decent_jax.optim.momentum import slowmo as slowmo
from decent_jax.optim.outer import diloco as diloco
from decent_jax.optim.outer import gasloc as gasloc
from decent_jax.optim.outer import noloco as noloco
from decent_jax.optim.outer import sparseloco as sparseloco
from decent_jax.optim.schedules import inverse_sqrt_schedule as inverse_sqrt_schedule
from decent_jax.optim.schedules import (
    linear_warmup_cosine_schedule as linear_warmup_cosine_schedule,
)
from decent_jax.optim.schedules import linear_warmup_step_schedule as linear_warmup_step_schedule
from decent_jax.optim.swarm import swarm as swarm
