"""Scaled-down copies of DT-FM's networks, layouts on them, and what the planner predicts.

Eight machines in place of 64, two pipelines of four stages in place of eight of eight. A message of
a micro-batch has 0.75 MiB in place of 8 MiB; rates are lower such that everything takes `SLOWER`
times as long: 12.4 ms of computing forward, 8 MiB at 2 Gbit/s, and latencies.
"""

import dataclasses
from typing import Any

import numpy as np

from decent_jax import topology
from decent_jax.plan.orders import order
from decent_jax.planner import network, placement, search
from decent_jax.planner.network import Network
from decent_jax.planner.pipeline_time import StepTime, exchanged, in_order, links_of, pipelines_s

STAGES, REPLICAS, MICRO_BATCHES, LAYERS = 4, 2, 8, 12
WIDTH, CONTEXT, EXAMPLES = 256, 128, 12  # of a micro-batch, in bfloat16
MESSAGE_BYTES = 2 * WIDTH * CONTEXT * EXAMPLES
SLOWER = 2.0
FORWARD_S = 0.0124 * SLOWER  # of a stage with a micro-batch
LAYER_S = FORWARD_S * STAGES / LAYERS
RATES = MESSAGE_BYTES / 2**23 / SLOWER  # of DT-FM's

MACHINES = {  # of the planner's networks of 64
    "case 3": ("dtfm_case3", [0, 1, 2, 3, 32, 33, 34, 35]),
    "case 4": ("dtfm_case4", [0, 1, 16, 17, 32, 33, 48, 49]),
    "uneven": ("dtfm_case4", [0, 1, 2, 16, 17, 18, 32, 33]),
    "case 5": ("dtfm_case5", [0, 1, 2, 3, 56, 57, 58, 59]),  # the first and the last region
}
JOB = placement.Job(
    STAGES,
    REPLICAS,
    data_parallel_bytes=4 * 12 * WIDTH**2 * LAYERS / STAGES,
    pipeline_bytes=MICRO_BATCHES * MESSAGE_BYTES,
)
SHARES = {"float32": 1.0, "int8": 0.25}  # of the bytes of float32


def network_of(case: str) -> Network:
    """The scaled network of eight machines."""
    if case == "no limits":
        return network.cluster([1] * 8, network.NVLINK, network.Link(1e-5, 1e10))
    name, machines = MACHINES[case]
    whole = network.preset(name).take(machines)
    return network.from_matrices(
        whole.latency_s * SLOWER, whole.bandwidth_bytes_per_s * RATES, names=whole.names
    )


def layouts(case: str, wire: str) -> dict[str, np.ndarray]:
    """{name: machine of each stage and pipeline (S, D)}.

    As `planner place` makes it: the cheapest layout by DT-FM's cost, and the plan, which exchanges
    machines from there until the predicted step is shortest.
    """
    draw = np.random.default_rng(0)
    listed = np.arange(STAGES * REPLICAS)
    net = network_of(case)
    job = dataclasses.replace(JOB, data_parallel_bytes=JOB.data_parallel_bytes * SHARES[wire])
    step = StepTime(net, job, topology.make("one_peer_exp", REPLICAS), MICRO_BATCHES)
    forward = np.full((STAGES, REPLICAS), FORWARD_S)

    def seconds_of(stages: np.ndarray) -> float:
        return step(stages, forward, "gpipe", "gossip" if wire == "int8" else "all_reduce")

    cheapest = search.place(net, job, time_limit_s=60, generations=100).stages
    plan = exchanged(cheapest, listed.tolist(), seconds_of, time_limit_s=60, steps=5000)
    return (
        {"plan": plan}
        | ({"DT-FM's cost": cheapest} if (plan != cheapest).any() else {})
        | {
            "pipelines along the list": listed.reshape(REPLICAS, STAGES).T,
            "stages along the list": listed.reshape(STAGES, REPLICAS),
        }
        | {
            f"random {k}": draw.permutation(STAGES * REPLICAS).reshape(STAGES, REPLICAS)
            for k in range(1, 6)
        }
    )


def predicted_s(job: dict[str, Any], parameter_bytes: list[int]) -> float:
    """Seconds of a step, by the planner's model; nothing in it is fitted.

    Args:
      job: see `pipelines.jobs`.
      parameter_bytes: of each stage.
    """
    net, stages = network_of(job["case"]), np.array(job["stages"])
    lists = [order(job["order"], STAGES, MICRO_BATCHES, s) for s in range(STAGES)]
    slowness = np.transpose(job["slowness"])  # of each pipeline and stage
    forward = job["layer_s"] * np.array(job["layers"])[:, None] * slowness
    links = links_of(net, stages, MESSAGE_BYTES)
    compute_s = {"forward": forward, "backward": 2 * forward}
    done = pipelines_s(in_order(lists), compute_s, links).max(axis=1)
    # Of two: each sends the other all parameters, or half of the gradient twice. Latencies of these
    # messages are not part of the shaped network.
    rate = net.bandwidth_bytes_per_s[stages[:, 0], stages[:, 1]]
    averaging = SHARES[job["wire"]] * np.array(parameter_bytes) / rate
    if job["algorithm"] == "all_reduce":
        return float((done + averaging).max())
    return float(max(done.max(), averaging.max()))
