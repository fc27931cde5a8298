"""Communication graphs: schedules of mixing matrices, in NumPy and SciPy, without jax.

A **round** is one mixing matrix W (n x n): replica i replaces its parameters with
``sum_j W[i, j] x_j``, so row i holds the weights that replica i gives to the parameters it
receives. A **schedule** cycles through its rounds. A round also defines its communication: an
average inside groups of consecutive replicas, then a few permutations (`Send`), which
`decent_jax.gossip` turns into collectives.

`make` builds a schedule from its name (`NAMES`; ``docs/topologies.md`` compares them),
`Schedule.from_networkx` from a graph and `Schedule.from_matrices` from your own matrices.

>>> schedule = make("one_peer_exp", 8)
>>> schedule.period, schedule.degree(0), schedule.rounds_to_consensus()
(3, 1, 3)
>>> schedule.matrix(1)[0]           # replica 0 averages with replica 6
array([0.5, 0. , 0. , 0. , 0. , 0. , 0.5, 0. ])
>>> make("base_k(max_degree=2)", 7).exact_after()
4
"""

from decent_jax.topology.make import COLUMN_STOCHASTIC as COLUMN_STOCHASTIC
from decent_jax.topology.make import NAMES as NAMES
from decent_jax.topology.make import make as make
from decent_jax.topology.make import register as register
from decent_jax.topology.make import repeat as repeat
from decent_jax.topology.rounds import Round as Round
from decent_jax.topology.rounds import Send as Send
from decent_jax.topology.rounds import metropolis_hastings as metropolis_hastings
from decent_jax.topology.schedule import Schedule as Schedule
