"""Machines and work for tests of the planner."""

from decent_jax.planner import network
from decent_jax.planner.network import Link
from decent_jax.planner.runtime import CONSTANT, Workload

INSIDE, BETWEEN = Link(1e-6, 100e9), Link(1e-4, 1e9)


def cluster(nodes, size):
    return network.cluster([size] * nodes, INSIDE, BETWEEN)


def workload(model_bytes=50e6, compute=CONSTANT, **others):
    fields = {"forward_s": 0.04, "backward_s": 0.08, "update_s": 0.003} | others
    return Workload(model_bytes, compute=compute, **fields)
