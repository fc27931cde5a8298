"""Predictions compared with step times that were measured on the same network."""

import dataclasses
from collections.abc import Mapping, Sequence

from decent_jax.planner import fit, outputs, predict
from decent_jax.planner.compute_times import LogNormal
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Workload

# What may be fitted, where the search begins, and between which limits it stays.
START = {"compute_s": None, "sigma": 0.1, "bandwidth": 1.0}
LIMITS = {"sigma": (0.001, 1.0), "bandwidth": (0.01, 100.0)}
OF_GOSSIP = ("mix_every", "combine", "execution")


def predict_s(
    row: fit.Row,
    network: Network,
    workload: Workload,
    *,
    bucket_bytes: float | None = None,
    compute_s: float | None = None,
    sigma: float | None = None,
    bandwidth: float = 1.0,
) -> float:
    """Seconds of a step for one row of `fit.read_rows`.

    A row may also say ``compute_s`` (of its own run), ``local_size``, ``mix_every``, ``combine``,
    ``execution`` and ``comm_dtype``.

    Args:
      compute_s, sigma: in place of the workload's. bandwidth: a factor on every link and card.
    """
    network = dataclasses.replace(
        network,
        bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * bandwidth,
        nic_bytes_per_s=network.nic_bytes_per_s * bandwidth,
    )
    scale = row.get("compute_s", compute_s or workload.compute_s) / workload.compute_s
    workload = dataclasses.replace(
        workload,
        forward_s=workload.forward_s * scale,
        backward_s=workload.backward_s * scale,
        compute=workload.compute if sigma is None else LogNormal(sigma),
    )
    gossip = {}
    if row["algorithm"] not in predict.ALL_REDUCES:
        gossip = {name: row[name] for name in OF_GOSSIP if name in row}
        gossip |= {"wire": row["comm_dtype"]} if "comm_dtype" in row else {}
        gossip["replicas_per_node"] = row.get("local_size")
    algorithm = predict.algorithm_of(
        row["algorithm"], network, workload, bucket_bytes=bucket_bytes, **gossip
    )
    return predict.step_s(network, workload, algorithm)


def compare(
    rows: Sequence[fit.Row],
    networks: Mapping[int, Network],
    workload: Workload,
    *,
    fitted: Sequence[str] = (),
    fitted_to: Sequence[str] = (),
    bucket_bytes: float | None = None,
) -> tuple[dict[str, float], list[fit.Row]]:
    """The constants, and the rows with ``predicted_s``, ``error`` and ``fitted``.

    Args:
      networks: by number of replicas.
      fitted: constants of `START` that are fitted, to the rows whose algorithm is in ``fitted_to``.

    Raises:
      ValueError: a constant that does not exist; too many of them, or too few rows.
    """
    unknown = set(fitted) - set(START)
    if unknown:
        raise ValueError(
            f"what can be fitted is {', '.join(START)}, got {', '.join(sorted(unknown))}"
        )

    def seconds(row: fit.Row, **constants: float) -> float:
        network = networks[row["num_replicas"]]
        return predict_s(row, network, workload, bucket_bytes=bucket_bytes, **constants)

    constants = {}
    if fitted:
        start = START | {"compute_s": workload.compute_s}
        constants = fit.fit(
            [row for row in rows if row["algorithm"] in fitted_to],
            seconds,
            {name: start[name] for name in fitted},
            LIMITS,
        )
    compared = [
        fit.compared(row, seconds(row, **constants), bool(fitted) and row["algorithm"] in fitted_to)
        for row in rows
    ]
    return constants, compared


def format_table(rows: Sequence[fit.Row]) -> str:
    """What `compare` returned, for people."""
    headings = ("algorithm", "replicas", "measured ms", "predicted ms", "error", "")
    cells = [
        (
            row["algorithm"],
            row["num_replicas"],
            f"{1e3 * row['step_time_s']:.1f}",
            f"{1e3 * row['predicted_s']:.1f}",
            f"{100 * row['error']:+.1f}%",
            "fitted" if row["fitted"] else "held out",
        )
        for row in rows
    ]
    return outputs.table(headings, cells)
