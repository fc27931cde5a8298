"""A round of a schedule as collectives on a mesh axis; see `decent_jax.gossip.mixing`.

| file | what it does | imports |
|---|---|---|
| `axes` | finds out which replicas a device holds | |
| `permute` | a permutation of replicas as slices and ``ppermute`` | axes |
| `groups` | means of groups, and groups that send to each other | axes, permute |
| `wire` | formats of messages | |
| `mixing` | `mix`, `mean`, `receive`: what everybody calls | all |
"""

from decent_jax.gossip.axes import AxisName
from decent_jax.gossip.mixing import (
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
