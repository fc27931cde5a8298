"""SwarmSGD (Nadiradze et al. 2021) in NumPy: event by event, without devices.

| name | what it is |
|---|---|
| `interactions`, `matchings` | who averages with whom: one edge at a time, or rounds of pairs |
| `swarm` | trains n models by such a list, quantized or not; spread, drift, bits sent |
| `swarm_timing` | seconds per step on a network; `planner_timing`: of all-reduce and gossip |
| `lose` | mixing matrices of rounds in which messages are lost |

>>> import numpy as np
>>> noise = lambda i, x, k, rng: rng.standard_normal(x.shape)
>>> result = swarm(np.zeros((8, 1000)), interactions(8, 2000, local_steps=4), noise, 0.1)
>>> late = result.spread[1000:].mean() / 1000      # per parameter; theory: H lr^2 (n-1)(n-2)/n
>>> round(float(late), 2), round(4 * 0.1**2 * 7 * 6 / 8, 2)
(0.21, 0.21)
"""

from decent_jax.simulate.lossy import lose
from decent_jax.simulate.timing import Timing, planner_timing, swarm_timing
from decent_jax.simulate.training import Interaction, Swarm, interactions, matchings, swarm

__all__ = ["Interaction", "Swarm", "Timing", "interactions", "lose", "matchings"]
__all__ += ["planner_timing", "swarm", "swarm_timing"]
