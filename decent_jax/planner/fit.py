"""A cluster's few unknown numbers from step times that were measured on it.

At most four constants per cluster, such as the compute time, a fixed overhead, how much compute
varies, and a bandwidth. Rows that are not fitted are held out: their errors test the model.

>>> rows = [{"num_replicas": n, "step_time_s": 0.5 / n + 0.02} for n in (1, 2, 4)]
>>> model = lambda row, compute_s, overhead_s: compute_s / row["num_replicas"] + overhead_s
>>> found = fit(rows, model, {"compute_s": 1.0, "overhead_s": 0.1})
>>> round(found["compute_s"], 4), round(found["overhead_s"], 4)
(0.5, 0.02)
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

MOST_CONSTANTS = 4
NEEDED = {"algorithm", "num_replicas", "step_time_s"}

Row = dict[str, Any]


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
      ValueError: more than four constants, or fewer rows than constants.
    """
    names = list(start)
    if not 1 <= len(names) <= MOST_CONSTANTS:
        raise ValueError(
            f"between 1 and {MOST_CONSTANTS} constants are fitted, got {len(names)}: "
            f"{', '.join(names)}"
        )
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
        lines = path.read_text().splitlines()
    except OSError as reason:
        raise ValueError(f"cannot read {path}: {reason.strerror or reason}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}, line {number} is not JSON: {line[:60]!r}") from None
        if not (isinstance(row, dict) and row.keys() >= NEEDED):
            raise ValueError(f"{path}, line {number} needs algorithm, num_replicas and step_time_s")
        seconds, replicas = row["step_time_s"], row["num_replicas"]
        if not isinstance(seconds, int | float) or not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(
                f"{path}, line {number}: step_time_s must be seconds above 0, got {seconds!r}"
            )
        if not isinstance(replicas, int) or replicas < 1:
            raise ValueError(
                f"{path}, line {number}: num_replicas must be at least 1, got {replicas!r}"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows
