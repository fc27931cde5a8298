"""Predictions compared with step times that were measured, and constants fitted to them.

A few constants per cluster, such as the compute time, a fixed overhead, how much compute
varies, and a bandwidth. Rows that are not fitted are held out: their errors test the model.

>>> rows = [{"num_replicas": n, "step_time_s": 0.5 / n + 0.02} for n in (1, 2, 4)]
>>> model = lambda row, compute_s, overhead_s: compute_s / row["num_replicas"] + overhead_s
>>> found = fit(rows, model, {"compute_s": 1.0, "overhead_s": 0.1})
>>> round(found["compute_s"], 4), round(found["overhead_s"], 4)
(0.5, 0.02)
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from scipy.optimize import least_squares

from decent_jax.ground.format import shown
from decent_jax.ground.json_files import is_real, is_whole, read_text
from decent_jax.planner import outputs, predict
from decent_jax.planner.compute_times import LONGEST_S, SHORTEST_S, LogNormal
from decent_jax.planner.costs import Execution
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import WIRES, Workload

# What may be fitted, where the search begins, and between which limits it stays.
START = {"compute_s": None, "sigma": 0.1, "bandwidth": 1.0}
LIMITS = {"sigma": (0.001, 1.0), "bandwidth": (0.01, 100.0)}
NEEDED = {"algorithm", "num_replicas", "step_time_s"}
OF_GOSSIP = ("mix_every", "combine", "execution")
EXECUTIONS = get_args(Execution)

Row = dict[str, Any]


def _is_count(value: object) -> bool:
    return is_whole(value, 1, 2**20)


def _is_seconds(value: object) -> bool:
    return is_real(value, SHORTEST_S, LONGEST_S)


# Entries of a row that are read: in words, and as a test.
ENTRIES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "algorithm": ("a name", lambda value: isinstance(value, str)),
    "num_replicas": ("a whole number, at least 1", _is_count),
    "step_time_s": ("seconds above 0", _is_seconds),
    "compute_s": ("seconds above 0", _is_seconds),
    "local_size": ("a whole number, at least 1", _is_count),
    "mix_every": ("from 1 to 1000", lambda value: is_whole(value, 1, 1000)),
    "combine": ("with or then", lambda value: value in ("with", "then")),
    "execution": ("hierarchical, plain or all_reduce", lambda value: value in EXECUTIONS),
    "comm_dtype": (", ".join(WIRES), lambda value: value in WIRES),
}


def fit(
    rows: Sequence[Row],
    predict_s: Callable[..., float],
    start: Mapping[str, float],
    limits: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, float]:
    """The constants under which ``predict_s(row, **constants)`` is nearest to the rows.

    Least squares of ``log(predicted / row["step_time_s"])``, so a tenth too much counts the same
    on a short and on a long step. Constants are positive; ``limits`` bounds some of them.

    Raises:
      ValueError: fewer rows than constants.
    """
    names = list(start)
    if len(rows) < len(names):
        raise ValueError(
            f"{len(names)} constants ({', '.join(names)}) cannot be fitted to {len(rows)} rows; "
            "fix some of them or measure more"
        )
    measured = np.array([row["step_time_s"] for row in rows])

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(logarithms).tolist(), strict=True))
        return np.log([predict_s(row, **constants) for row in rows]) - np.log(measured)

    low, high = np.transpose([(limits or {}).get(name, (1e-300, 1e300)) for name in names])
    solution = least_squares(
        residuals,
        np.log([start[name] for name in names]),
        bounds=(np.log(low), np.log(high)),
        x_scale=0.3,
        diff_step=0.02,  # wider than the wiggles of a simulation
        max_nfev=40,
    )
    return dict(zip(names, np.exp(solution.x).tolist(), strict=True))


def compared(row: Row, predicted_s: float, fitted: bool) -> Row:
    """The row with ``predicted_s``, ``fitted``, and the ``error``: 0.1 is 10% too long."""
    error = predicted_s / row["step_time_s"] - 1
    return row | {"predicted_s": predicted_s, "error": error, "fitted": fitted}


def read_rows(path: str | Path) -> list[Row]:
    """Measured step times from JSON lines.

    Each has at least ``algorithm`` (all_reduce, none, or the name of a schedule), ``num_replicas``
    and ``step_time_s``.

    Raises:
      ValueError: a bad row; the message names the file, the line and the mistake.
    """
    path = Path(path)
    try:
        lines = read_text(path).splitlines()
    except OSError as reason:
        raise ValueError(f"cannot read {path}: {reason.strerror or reason}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{place} is not JSON: {line[:60]!r}") from None
        if not (isinstance(row, dict) and row.keys() >= NEEDED):
            raise ValueError(f"{place} needs algorithm, num_replicas and step_time_s")
        for name, (words, test) in ENTRIES.items():
            if name in row and not test(row[name]):
                raise ValueError(f"{place}: {name} must be {words}, got {shown(row[name])}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def predict_s(
    row: Row,
    network: Network,
    workload: Workload,
    *,
    bucket_bytes: float | None = None,
    compute_s: float | None = None,
    sigma: float | None = None,
    bandwidth: float = 1.0,
) -> float:
    """Seconds of a step for one row of `read_rows`.

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
    rows: Sequence[Row],
    networks: Mapping[int, Network],
    workload: Workload,
    *,
    fitted: Sequence[str] = (),
    fitted_to: Sequence[str] = (),
    bucket_bytes: float | None = None,
) -> tuple[dict[str, float], list[Row]]:
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

    def seconds(row: Row, **constants: float) -> float:
        network = networks[row["num_replicas"]]
        return predict_s(row, network, workload, bucket_bytes=bucket_bytes, **constants)

    constants = {}
    basis = [row for row in rows if fitted and row["algorithm"] in fitted_to]
    if fitted:
        start = START | {"compute_s": workload.compute_s}
        constants = fit(basis, seconds, {name: start[name] for name in fitted}, LIMITS)
    return constants, [compared(row, seconds(row, **constants), row in basis) for row in rows]


def format_table(rows: Sequence[Row]) -> str:
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
