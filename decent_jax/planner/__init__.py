"""Predictions and plans before you rent a cluster: algorithm, schedule and placement.

    decent-jax planner --help

| module | question |
|---|---|
| `network` | how long does a message between two devices take? |
| `costs` | how long does a permute, a mean of groups, an all-reduce or a round take? |
| `runtime`, `simulator` | how long does a training step take? |
| `predict`, `recommend` | which algorithm and schedule are fastest, and how fast? |
| `gossip_placement` | which device for each replica? |
| `placement`, `search` | which device for each pipeline stage and replica (DT-FM)? |

`decent_jax.plots.gantt` draws steps. Besides NumPy and SciPy, the planner needs only
`decent_jax.topology` and `decent_jax.plan`, which defines the file that ``train.py
--config.cluster.plan=FILE`` follows. Only the command imports the trainer, and only if ``--config``
is given. The planner is an extension: of the other packages, only `decent_jax.commands` imports it.

>>> from decent_jax.planner import gossip_placement, network
>>> from decent_jax import topology
>>> regions = network.preset("dtfm_case5").take([0, 9, 18, 27, 36, 45, 54, 63])    # one in each
>>> schedule = topology.make("one_peer_exp", 8)
>>> gpt2_bytes = 4 * 124e6
>>> round(gossip_placement.evaluate(regions, schedule, gpt2_bytes).mean_round_s, 1)
10.6
>>> placed = gossip_placement.place_schedule(regions, schedule, gpt2_bytes, steps=2000)
>>> round(placed.mean_round_s, 1)
7.9
"""

from decent_jax.ground import extras

extras.need("train", "tqdm")
