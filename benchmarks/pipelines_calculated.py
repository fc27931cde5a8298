"""Calculated seconds per step of DT-FM's job: layouts, orders, gossip against all-reduce.

    python benchmarks/pipelines_calculated.py --case dtfm_case4

Nothing is trained and nothing is measured: `decent_jax.planner.pipeline_time` follows every message
of 64 micro-batches of 8 MiB through 8 stages of 12.4 ms forward and twice as much backward, on the
links of the case.
"""

import argparse
import dataclasses
import itertools

import numpy as np

from decent_jax import topology
from decent_jax.ground.format import table
from decent_jax.plan.orders import ORDERS
from decent_jax.planner import network, placement, search
from decent_jax.planner.pipeline_time import AVERAGING, StepTime

JOB = placement.DTFM_JOB
MICRO_BATCHES, MESSAGE_BYTES, FORWARD_S = 64, 2**23, 0.0124
STAGES, REPLICAS = JOB.num_stages, JOB.num_replicas
SENT = dataclasses.replace(JOB, pipeline_bytes=MICRO_BATCHES * MESSAGE_BYTES)


def layouts(net, seed, time_limit_s):
    """{name: arrays of stages (S, D)}."""
    listed = np.arange(JOB.num_devices).reshape(STAGES, REPLICAS)
    random = np.random.default_rng(seed)
    return {
        "plan": [search.place(net, JOB, time_limit_s=time_limit_s).stages],
        "stages along the list": [listed],
        "pipelines along the list": [listed.T],
        "random, mean of 5": [
            random.permutation(JOB.num_devices).reshape(listed.shape) for _ in range(5)
        ],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="dtfm_case4", help="a network of the planner")
    parser.add_argument("--time_limit_s", type=float, default=2.0, help="of the search for a plan")
    parser.add_argument("--seed", type=int, default=0, help="of the random layouts")
    options = parser.parse_args()
    net = network.preset(options.case)
    schedule = topology.make("one_peer_exp", REPLICAS)
    step = StepTime(net, SENT, schedule, MICRO_BATCHES)
    forward, cells = np.full((STAGES, REPLICAS), FORWARD_S), {}
    for words, several in layouts(net, options.seed, options.time_limit_s).items():
        for order, averaging in itertools.product(ORDERS, AVERAGING):
            mean = np.mean([step(stages, forward, order, averaging) for stages in several])
            cells.setdefault((words, order), []).append(f"{mean:.1f}")
    headings = ("layout", "order", "pipelines alone", "all_reduce", "gossip")
    print(table(headings, [(*row, *seconds) for row, seconds in cells.items()]))


if __name__ == "__main__":
    main()
