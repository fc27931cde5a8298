"""The 36 step times of Figure 6 of "From Promise to Practice", published and predicted.

    python benchmarks/planner/figure6.py

Strong scaling of the base Transformer (63.1M parameters, float32, 25k source and target tokens per
step over all GPUs) on three clusters. Three constants per cluster are fitted to the all_reduce and
the AER row: compute time x GPUs, a fixed overhead per step, and sigma, by which compute varies
(batches of different shape). The row Exp is held out. SGP gets a fourth constant, an overhead of
its implementation, fitted at its first size; its other two sizes are held out.

Bandwidths are nominal. A node of A100 or A40 needs two ports because the published Exp rows carry
more bytes out of a node than one port can. The model lets a single all-reduce use both
InfiniBand ports of an A100 node, but one Ethernet port of an A40 node.
"""

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax import topology
from decent_jax.planner import network, runtime, simulator
from decent_jax.planner.network import ETHERNET_25G, INFINIBAND_100G, NVLINK, PCIE, Link, Network
from decent_jax.planner.runtime import AllReduce, Gossip, LogNormal, Workload

PUBLISHED = Path(__file__).resolve().parents[2] / "tests" / "data" / "figure6.csv"
# d 512, h 8, 6 + 6 layers, feed-forward 2048, and one embedding of 37120 x 512 that source,
# target and output share, so that its gradient is complete only at the end of the backward pass.
EMBEDDING_BYTES = 4 * 37120 * 512
MODEL_BYTES = 4 * 63_145_984
FORWARD = 1 / 3  # of forward and backward
BUCKET_BYTES = 25e6  # of both PyTorch's DDP and Decent-DP

ALL_REDUCE, SGP, EXP, AER = "AllReduce", "SGP(Exp)", "Decent(Exp)", "Decent(AER)"
FITTED = (ALL_REDUCE, AER)

Row = dict[str, Any]


class Cluster(NamedTuple):
    name: str
    devices_per_node: int
    inside: Link
    port: Link
    ports: int  # a node has
    ports_of_one: int  # a single all-reduce uses
    sizes: tuple[int, ...]
    start: dict[str, float]

    def published_ms(self, algorithm: str) -> list[float]:
        """A step of each size, as the paper gives it."""
        with PUBLISHED.open(newline="") as file:
            rows = {(r["cluster"], int(r["devices"])): r for r in csv.DictReader(file)}
        return [float(rows[self.name, n][algorithm]) for n in self.sizes]


CLUSTERS = (
    Cluster("8xT4, 100G IB", 8, Link(PCIE.latency_s, 12.5e9), INFINIBAND_100G, 1, 1, (16, 32, 64),
            {"gpu_seconds": 4.0, "overhead_s": 0.05, "sigma": 0.1}),  # PCIe 3.0 x16
    Cluster("4xA100, 100G IB", 4, NVLINK, INFINIBAND_100G, 2, 2, (8, 16, 32),
            {"gpu_seconds": 0.2, "overhead_s": 0.03, "sigma": 0.1}),
    Cluster("4xA40, 25G Ethernet", 4, PCIE, ETHERNET_25G, 2, 1, (8, 16, 32),
            {"gpu_seconds": 0.6, "overhead_s": 0.04, "sigma": 0.1}),
)  # fmt: skip


def published(cluster: Cluster, algorithms=(ALL_REDUCE, SGP, EXP, AER)) -> list[Row]:
    """The published numbers as rows for `fit`."""
    return [
        {"algorithm": name, "num_replicas": n, "step_time_s": milliseconds / 1e3}
        for name in algorithms
        for n, milliseconds in zip(cluster.sizes, cluster.published_ms(name), strict=True)
    ]


def nodes(cluster: Cluster, n: int, ports: int) -> Network:
    """The cluster with ``ports`` ports per node in use, none faster than its nominal rate."""
    between = cluster.port.bytes_per_s * cluster.ports_of_one
    alone = network.cluster(
        [cluster.devices_per_node] * (n // cluster.devices_per_node),
        cluster.inside,
        Link(cluster.port.latency_s, between),
    )
    nic = np.full(alone.num_nodes, cluster.port.bytes_per_s * ports)
    return Network(alone.latency_s, alone.bandwidth_bytes_per_s, alone.node, nic, alone.names)


def predict_s(
    cluster: Cluster,
    row: Row,
    gpu_seconds: float,
    overhead_s: float,
    sigma: float,
    sgp_s: float = 0.0,
    *,
    ports: int | None = None,
    steps: int = 96,
    warm_up: int = 48,
) -> float:
    """Seconds of a step; the last three are not constants of the model.

    An all-reduce, and an AER round with its one group across nodes, is a single communicator;
    Exp's pairs are as many as a node has GPUs.
    """
    name, n = row["algorithm"], row["num_replicas"]
    compute_s = gpu_seconds / n + overhead_s
    workload = Workload(
        MODEL_BYTES,
        FORWARD * compute_s,
        (1 - FORWARD) * compute_s,
        sgp_s if name == SGP else 0.0,
        LogNormal(sigma),
        late_bytes=EMBEDDING_BYTES,
    )
    if name == ALL_REDUCE:
        return runtime.all_reduce_step_s(
            nodes(cluster, n, cluster.ports_of_one), workload, AllReduce("auto", BUCKET_BYTES)
        )
    one = name == AER
    used = ports or (cluster.ports_of_one if one else cluster.ports)
    schedule = topology.make(
        "alternating_exp_ring" if one else "hypercube",
        n,
        replicas_per_node=cluster.devices_per_node,
    )
    gossip = Gossip(schedule, execution="all_reduce", bucket_bytes=BUCKET_BYTES)
    run = simulator.simulate(
        nodes(cluster, n, used), workload, gossip, steps=steps, warm_up=warm_up
    )
    return run.step_s


def fit(
    rows: Sequence[Row],
    predict_s: Callable[..., float],
    start: Mapping[str, float],
    limits: Mapping[str, tuple[float, float]],
) -> dict[str, float]:
    """The positive constants under which ``predict_s(row, **constants)`` is nearest to the rows.

    Least squares of ``log(predicted / row["step_time_s"])``, so a tenth too much counts the same
    on a short and on a long step; ``limits`` bounds some of them.
    """
    names = list(start)
    measured = np.array([row["step_time_s"] for row in rows])

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(logarithms).tolist(), strict=True))
        return np.log([predict_s(row, **constants) for row in rows]) - np.log(measured)

    low, high = np.transpose([limits.get(name, (1e-300, 1e300)) for name in names])
    solution = least_squares(
        residuals,
        np.log([start[name] for name in names]),
        bounds=(np.log(low), np.log(high)),
        x_scale=0.3,
        diff_step=0.02,  # wider than the wiggles of a simulation
        max_nfev=40,
    )
    return dict(zip(names, np.exp(solution.x).tolist(), strict=True))


def is_fitted(cluster: Cluster, row: dict, largest: bool) -> bool:
    """Whether constants are fitted to a row; ``largest``: also to those of the most GPUs."""
    if row["algorithm"] == SGP:
        return row["num_replicas"] == cluster.sizes[0]
    return row["algorithm"] in FITTED and (largest or row["num_replicas"] < cluster.sizes[-1])


def constants_of(cluster: Cluster, largest: bool = True, **simulation) -> dict[str, float]:
    """Three constants from the rows of `FITTED`, and SGP's from its first size."""
    found = fit(
        [row for row in published(cluster, FITTED) if is_fitted(cluster, row, largest)],
        lambda row, **constants: predict_s(cluster, row, **constants, **simulation),
        cluster.start,
        {"overhead_s": (1e-3, 1.0), "sigma": (0.005, 0.5)},
    )
    sgp = fit(
        published(cluster, [SGP])[:1],
        lambda row, **constant: predict_s(cluster, row, **found, **constant, **simulation),
        {"sgp_s": 0.1 * cluster.published_ms(SGP)[0] / 1e3},
        {},
    )
    return found | sgp


def predicted_rows(
    cluster: Cluster, constants: dict[str, float], largest: bool = True, **simulation
) -> list[Row]:
    """All twelve rows with ``predicted_s``, ``error`` and ``fitted``."""
    rows = []
    for row in published(cluster):
        seconds = predict_s(cluster, row, **constants, **simulation)
        fitted = is_fitted(cluster, row, largest)
        error = seconds / row["step_time_s"] - 1  # 0.1 is 10% too long
        more = {"predicted_s": seconds, "error": error, "fitted": fitted}
        rows.append(row | {"cluster": cluster.name} | more)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = commands.parser(__doc__)
    words = "fit nothing to the most GPUs of a cluster"
    parser.add_argument("--without_largest", action="store_true", help=words)
    options = parser.parse_args(arguments)
    largest = not options.without_largest
    rows, notes = [], []
    print("| cluster | GPUs | algorithm | published ms | predicted ms | error | |")
    print("|---|---|---|---|---|---|---|")
    for cluster in CLUSTERS:
        constants = constants_of(cluster, largest)
        words = ", ".join(f"{name} {value:.4g}" for name, value in constants.items())
        notes.append(f"{cluster.name}: {words}")
        own = predicted_rows(cluster, constants, largest, steps=400, warm_up=200)
        for row in own:
            print(
                f"| {row['cluster']} | {row['num_replicas']} | {row['algorithm']} "
                f"| {1e3 * row['step_time_s']:.1f} | {1e3 * row['predicted_s']:.1f} "
                f"| {100 * row['error']:+.1f}% | {'fitted' if row['fitted'] else 'held out'} |"
            )
        rows += own
    held = [row for row in rows if not row["fitted"]]
    groups = {
        "Exp, held out": [row for row in held if row["algorithm"] == EXP],
        "SGP, held out": [row for row in held if row["algorithm"] == SGP],
    }
    if not largest:
        ends = {cluster.name: cluster.sizes[-1] for cluster in CLUSTERS}
        beyond = [row for row in rows if row["num_replicas"] == ends[row["cluster"]]]
        groups["the most GPUs, held out"] = beyond
    for text, group in groups.items():
        within = sum(abs(row["error"]) <= 0.15 for row in group)
        worst = max(group, key=lambda row: abs(row["error"]))
        print(
            f"\n{text}: {within} of {len(group)} within 15%; worst {100 * worst['error']:+.1f}% "
            f"({worst['cluster']}, {worst['num_replicas']} GPUs)"
        )
    print("\nconstants")
    print("\n".join(notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
