"""XLA's options for a training step, all in this place, each with what it changed.

What the user says in ``XLA_FLAGS`` goes before them.
"""

import functools
import os
import warnings
from typing import Any

import jax

from decent_jax.optim import EarlyMixing
from decent_jax.replicas import Placement
from decent_jax.topology import Schedule

# Measured in the programs that XLA makes for H100s (`benchmarks/gpu_program.py`): without them it
# has one message under way at a time and starts it as late as an estimate of a fast network allows,
# so most of a step is over before the first. With both, all are started at the top of the step
# and waited for where the update needs them. It takes what a round always needs, one more copy of
# the parameters, during the whole gradient.
FOR_GPUS = {
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 1000,
}

# As on GPUs by itself. Without it a step copies all of the optimizer's state before it updates it:
# the quickstart takes 39.1 MB in place of 31.9. The update of 4 million parameters takes 6.6 ms in
# place of 11.2; whole steps of several sizes took 0.75 to 1.07 of the time.
FOR_CPUS = {"xla_cpu_copy_insertion_use_region_analysis": True}


def of_step(placement: Placement, schedule: Schedule, tx: Any) -> dict[str, Any]:
    """What ``jax.jit(step, compiler_options=...)`` gets for a method ``tx`` on these devices."""
    platform = placement.mesh.devices.flat[0].platform
    options = {}
    if platform == "cpu":
        options = FOR_CPUS
    elif platform in ("gpu", "cuda") and _starts_early(placement, schedule, tx):
        options = FOR_GPUS
    said = os.environ.get("XLA_FLAGS", "")
    return {
        name: value for name, value in options.items() if name not in said and known(name, value)
    }


def _starts_early(placement, schedule, tx) -> bool:
    """Whether messages that start at the top of the step do good.

    Not where a replica has several devices: XLA gathers its arrays as the gradient needs them, on
    the stream that messages to other replicas would then occupy. Nor where groups send to each
    other and the method does not hold back the last stage (`after` of `gossip.mix`), before which
    XLA would wait for the messages at the top of the step.
    """
    in_stages = any(one.between_groups is not None for one in schedule.rounds)
    return placement.fsdp == 1 and (isinstance(tx, EarlyMixing) or not in_stages)


@functools.cache
def known(name: str, value: Any) -> bool:
    """Whether this version of XLA has the option; they come and go."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        warnings.warn(
            f"this jaxlib ({jax.lib.__version__}) does not know {name}: steps may take longer, "
            "or more memory, than they could",
            stacklevel=2,
        )
        return False
    return True
