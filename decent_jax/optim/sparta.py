"""SPARTA: in every step another small part of the parameters is averaged."""

import optax

from decent_jax.gossip import AxisName
from decent_jax.gossip.wire import RandomK
from decent_jax.optim import guard
from decent_jax.optim.declaration import ADAM_FIRST, BOTH, Method, coded_bytes, register
from decent_jax.topology import Schedule


def sparta(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "with",
    axis_name: AxisName = "replica",
    *,
    fraction: float = 0.005,
) -> optax.GradientTransformationExtraArgs:
    r"""`decentralized` that averages a random part of the parameters, another in every step.

    With S the numbers of each array that all replicas draw from the same key in this step:

    .. math:: x_{i,S} \leftarrow \sum_j W_{ij} x_{j,S}

    in the order of ``combine``; the others stay. What is sent is averaged exactly, and on average
    every parameter has its turn every 1 / ``fraction`` steps, so replicas reach consensus without
    error feedback. One message of this fraction per step, no memory.

    Args:
      inner, combine, axis_name: as in `decentralized`.
      schedule: ``complete`` in the source; any whose rows sum to 1.
      fraction: part of each array that is averaged, in (0, 1]; 0.0005 to 0.005 in the source.

    References:
      EXO, SPARTA, 2025; here from its abstract.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"sparta.fraction must be above 0 and at most 1, got {fraction}")
    return guard.decentralized(inner, schedule, combine, axis_name, RandomK(fraction))


register(
    Method(
        "sparta",
        sparta,
        ADAM_FIRST,
        BOTH,
        sent=lambda params, _, own: coded_bytes(params, RandomK(own["fraction"])),
    )
)
