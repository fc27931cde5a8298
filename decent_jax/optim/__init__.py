"""Decentralized training as optax transformations over pytrees.

Rarer methods are in `decent_jax.optim.contrib`.
"""

from decent_jax.optim.accum_adam import ScaleByAccumAdamState as ScaleByAccumAdamState
from decent_jax.optim.accum_adam import accum_adam as accum_adam
from decent_jax.optim.accum_adam import accum_adamw as accum_adamw
from decent_jax.optim.accum_adam import drop_window as drop_window
from decent_jax.optim.accum_adam import scale_by_accum_adam as scale_by_accum_adam
from decent_jax.optim.averaging import all_reduce as all_reduce
from decent_jax.optim.averaging import decentralized as decentralized
from decent_jax.optim.averaging import gossiped_momentum as gossiped_momentum
from decent_jax.optim.method_wrapper import Delayed as Delayed
from decent_jax.optim.method_wrapper import GuardedState as GuardedState
from decent_jax.optim.method_wrapper import Method as Method
from decent_jax.optim.method_wrapper import Mixing as Mixing
from decent_jax.optim.method_wrapper import as_method as as_method
from decent_jax.optim.method_wrapper import method as method
from decent_jax.optim.outer import OuterSGD as OuterSGD
from decent_jax.optim.outer import diloco as diloco
from decent_jax.optim.outer import noloco as noloco
from decent_jax.optim.push_sum import consensus_weights as consensus_weights
from decent_jax.optim.push_sum import push_sum as push_sum
from decent_jax.optim.push_sum import with_equal_weights as with_equal_weights
from decent_jax.optim.registry import METHODS as METHODS
from decent_jax.optim.registry import MethodSpec as MethodSpec
from decent_jax.optim.registry import Parts as Parts
from decent_jax.optim.registry import register as register
from decent_jax.optim.schedules import inverse_sqrt_schedule as inverse_sqrt_schedule
from decent_jax.optim.schedules import (
    linear_warmup_cosine_schedule as linear_warmup_cosine_schedule,
)
from decent_jax.optim.schedules import (
    linear_warmup_linear_schedule as linear_warmup_linear_schedule,
)
from decent_jax.optim.schedules import linear_warmup_step_schedule as linear_warmup_step_schedule
from decent_jax.optim.sparseloco import sparseloco as sparseloco
from decent_jax.optim.swarm import swarm as swarm
from decent_jax.optim.trees import apply_updates as apply_updates

# isort: split
from decent_jax.optim import contrib as contrib  # last, so that its methods are listed last
