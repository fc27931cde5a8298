"""The tables of benchmarks/pipelines.py, from its rows, beside what the planner predicts."""

import itertools
import statistics
from typing import Any

from benchmarks.pipeline_cases import MACHINES, MESSAGE_BYTES, MICRO_BATCHES, STAGES, predicted_s

Row = dict[str, Any]
WORDS = {"decentralized_adam": "gossip", "all_reduce": "all_reduce"}


def _markdown(heads: list[str], lines: list[list[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def update_s(rows: list[Row]) -> float:
    """Seconds of norms and update, after the pipelines, of eight cells on this machine's cores.

    Measured without limits of the network, and added to all predictions.
    """
    (row,) = [row for row in rows if row["table"] == "bubble" and row["order"] == "gpipe"]
    return row["step_s"] - predicted_s(row, row["parameter_bytes"])


def _predicted(row: Row, rows: list[Row]) -> float:
    return predicted_s(row, row["parameter_bytes"]) + update_s(rows)


def _both(row: Row, rows: list[Row]) -> list[str]:
    """Predicted, measured, error."""
    predicted = _predicted(row, rows)
    error = predicted / row["step_s"] - 1
    return [f"{predicted:.2f}", f"{row['step_s']:.2f}", f"{error:+.0%}"]


def _is_plan(row: Row) -> bool:
    return row["table"] == "layouts" and row["layout"] == "plan"


def layouts(rows: list[Row]) -> str:
    """Predicted / measured; DT-FM's cost is given where its layout is not the plan."""
    names = ("plan", "DT-FM's cost", "pipelines along the list", "stages along the list", "random")
    lines = []
    for (algorithm, words), case in itertools.product(WORDS.items(), MACHINES):
        found = [row for row in rows if row["table"] == "layouts"]
        found = [row for row in found if (row["case"], row["algorithm"]) == (case, algorithm)]
        if found:
            some = [[row for row in found if row["layout"].startswith(name)] for name in names]
            errors = [_predicted(row, rows) / row["step_s"] - 1 for row in found]
            means = [statistics.mean(row["step_s"] for row in one) if one else 0.0 for one in some]
            cells = [
                f"{statistics.mean(_predicted(row, rows) for row in one):.2f} / {mean:.2f}"
                if one
                else ""
                for one, mean in zip(some, means, strict=True)
            ]
            ratio = f"{means[-1] / means[0]:.2f}" if means[-1] else ""
            lines.append([words, case, *cells, ratio, f"{max(errors, key=abs):+.0%}"])
    heads = ["between pipelines", "network", *names[:-1], "mean of random"]
    return _markdown([*heads, "random / plan", "largest error"], lines)


def averaging(rows: list[Row]) -> str:
    """At the plan."""
    lines = []
    for case in MACHINES:
        for row in rows:
            at_plan = row["layout"] == "plan" and row["table"] in ("layouts", "averaging")
            if at_plan and row["case"] == case:
                lines.append([case, f"{WORDS[row['algorithm']]}, {row['wire']}", *_both(row, rows)])
    heads = ["network", "between pipelines", "predicted s", "measured s", "error"]
    return _markdown(heads, lines)


def orders(rows: list[Row]) -> str:
    """At the plan, with gossip; blocking sends are not predicted."""
    lines = []
    for case in MACHINES:
        for row in rows:
            at_plan = _is_plan(row) and row["algorithm"] != "all_reduce"
            if row["case"] != case or not (at_plan or row["table"] == "orders"):
                continue
            sends = "wait for the arrival" if row["blocking"] else "go on"
            shown = ["", f"{row['step_s']:.2f}", ""] if row["blocking"] else _both(row, rows)
            kept = row["kept"]
            size = f"{kept[0] * MESSAGE_BYTES / 2**20:.1f}"
            lines.append([case, row["order"], sends, *shown, " ".join(map(str, kept)), size])
    heads = ["network", "order", "sends", "predicted s", "measured s", "error"]
    return _markdown([*heads, "inputs kept by stages 0 to 3", "of stage 0, MiB"], lines)


def slow(rows: list[Row]) -> str:
    """One machine at half speed, no limits of the network."""
    found = [row for row in rows if row["table"] == "slow"]
    lines = [[" + ".join(map(str, row["layers"])), *_both(row, rows)] for row in found]
    return _markdown(["layers of the stages", "predicted s", "measured s", "error"], lines)


def bubble(rows: list[Row]) -> str:
    """Equal stages, no limits of the network."""
    exact = (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
    lines = [
        [row["order"], f"{exact:.4f}", f"{row['bubble']:.4f}", f"{row['bubble'] / exact - 1:+.1%}"]
        for row in rows
        if row["table"] == "bubble"
    ]
    return _markdown(["order", "(S - 1) / (M + S - 1)", "measured", "more"], lines)


TABLES = {
    "layouts": layouts,
    "averaging": averaging,
    "orders": orders,
    "slow": slow,
    "bubble": bubble,
}
