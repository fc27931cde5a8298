"""A round of a schedule as collectives on a mesh axis; see `decent_jax.gossip.mixing`."""

from decent_jax.gossip.mixing import (
    AxisName,
    Simulated,
    allows_check_vma,
    check_coded,
    mean,
    mix,
    mix_coded,
    number,
    receive,
)

__all__ = [
    "AxisName",
    "Simulated",
    "allows_check_vma",
    "check_coded",
    "mean",
    "mix",
    "mix_coded",
    "number",
    "receive",
]
