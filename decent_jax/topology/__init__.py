"""Who averages with whom: schedules of mixing matrices, in NumPy and SciPy, without jax.

A **round** is one mixing matrix W (n x n): replica i replaces its parameters by
``sum_j W[i, j] x_j``, so row i holds the weights replica i gives to what it receives. A
**schedule** cycles through its rounds. Besides its matrix a round holds how it is communicated: an
average inside groups of consecutive replicas, then a few permutations (`Send`), which is what
`decent_jax.gossip` turns into collectives.

`make` builds a schedule from its name (`NAMES`; ``docs/topologies.md`` compares them),
`Schedule.from_networkx` from a graph and `Schedule.from_matrices` from matrices of your own.

>>> schedule = make("one_peer_exp", 8)
>>> schedule.period, schedule.degree(0), schedule.rounds_to_consensus()
(3, 1, 3)
>>> schedule.matrix(1)[0]           # replica 0 averages with what replica 6 sends
array([0.5, 0. , 0. , 0. , 0. , 0. , 0.5, 0. ])
>>> make("base_k(max_degree=2)", 7).exact_after()
4
"""

from typing import TYPE_CHECKING

from decent_jax.topology.make import COLUMN_STOCHASTIC, NAMES, make, register, repeat
from decent_jax.topology.rounds import Round, Send
from decent_jax.topology.schedule import Schedule
from decent_jax.topology.weights import metropolis_hastings

__all__ = [
    "COLUMN_STOCHASTIC",
    "NAMES",
    "Round",
    "Schedule",
    "Send",
    "make",
    "metropolis_hastings",
    "plot",
    "register",
    "repeat",
]

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(schedule: Schedule) -> "Figure":
    """Every round (the first twelve) as a graph and as its matrix; a matplotlib figure.

    An arrow points from sender to receiver, a line without a head goes both ways; the thicker, the
    larger the weight.
    """
    from decent_jax.topology.drawing import draw  # matplotlib takes a while to import

    return draw(schedule)
