"""The tables of benchmarks/peers.py, from its rows, with what the planner predicts."""

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax import simulate, topology
from decent_jax.peers.rule import Format
from decent_jax.planner import network, runtime
from decent_jax.plots.style import BLUE, GREY, ORANGE, frame, new_figure, save

COMPUTE_S, SIZE = 0.2, 500_000
FIRST, LAST = math.log(256), 1.449  # validation losses of the quickstart: of guessing, at its end
NEVER = 10**6  # steps between questions


def predicted(row: dict[str, Any], alone_s: float) -> float:
    """Seconds of a step of a fast host, by the planner; ``alone_s``: without messages."""
    n = row["hosts"]
    slow = dict(pair.split(":") for pair in row.get("data.slow", "").split(",") if pair)
    factors = [float(slow.get(str(k), 1.0)) for k in range(n)]
    # The rest of a step, which is no sleep, is as fast everywhere.
    sleeps = [(alone_s + COMPUTE_S * (factor - 1)) / alone_s for factor in factors]
    link = network.Link(100e-6, row["mbit"] * 1e6 / 8)
    hosts = network.cluster([1] * n, network.Link(5e-6, 300e9), link)
    work = runtime.Workload(4.0 * SIZE, alone_s / 3, 2 * alone_s / 3, slowness=tuple(sleeps))
    if row["program"] != "peers":
        algorithm: Any = runtime.AllReduce(bucket_bytes=float("inf"))
        if row["program"] != "all_reduce":
            schedule = topology.make(row["program"], n)
            algorithm = runtime.Gossip(schedule, execution="plain")
        return simulate.planner_timing(hosts, work, algorithm).step_s
    even = runtime.Workload(4.0 * SIZE, alone_s / 3, 2 * alone_s / 3)
    if row["mix_every"] == NEVER:
        return alone_s
    # Each of two asks after H steps, so a peer meets somebody after H / 2.
    drawn = simulate.interactions(n, 2000, local_steps=max(1, row["mix_every"] // 2))
    size = Format(row.get("peers.wire", "float32")).bytes_sent([(SIZE,)])
    return simulate.swarm_timing(drawn, hosts, even, message_bytes=size, blocking=False).step_s


# --- The tables -----------------------------------------------------------------------------------


def table(name: str, rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    tables = {"slow": _waiting, "links": _waiting, "loss": _losses}
    heads, lines = (tables | {"costs": _costs})[name](rows)
    lines = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def _waiting(rows):
    alone = {where(row): row for row in rows if row.get("mix_every") == NEVER}
    lines = []
    for row in rows:
        base = statistics.median(alone[where(row)]["step_s"].values())
        n = row["hosts"]
        steps = sorted(row["step_s"].values())
        slowness = float(row.get("data.slow", "").rpartition(":")[2] or 1)
        ideal = (n - 1) / base + 1 / (base + (slowness - 1) * COMPUTE_S)
        rate = sum(1 / s for s in steps) if row["program"] == "peers" else n / steps[0]
        fast = statistics.median(steps[: n - 1])
        every = "never" if row.get("mix_every") == NEVER else row.get("mix_every", "")
        cells = [n, f"{row['mbit']:g}", row["program"], f"{slowness:g}", every]
        cells += [row.get("peers.wire", "")]
        cells += [f"{fast / base:.3f}", f"{predicted(row, base) / base:.3f}", f"{rate / ideal:.3f}"]
        lines.append([*cells, f"{row['met']:.2f}" if "met" in row else ""])
    heads = [
        "hosts",
        "Mbit/s",
        "program",
        "host 1 slower",
        "H",
        "format",
        "a fast host's step, of alone",
        "planner",
    ]
    return [*heads, "examples of all, of each alone", "meetings per step"], lines


def where(row: dict[str, Any]) -> tuple[int, float]:
    """On which hosts a run was."""
    return row["hosts"], row["mbit"]


def _losses(rows):
    targets = [FIRST - part * (FIRST - LAST) for part in (0.6, 0.8)]
    lines = []
    for row in rows:
        _, seconds, losses = np.array(row["rows"]).T
        since = seconds - seconds[0]  # what comes before is compiling, of each peer for itself
        best = np.minimum.accumulate(losses)
        reached = np.interp(targets, best[::-1], since[::-1], left=np.nan)
        lines.append(
            [
                row["program"],
                *(f"{s:.0f}" for s in reached),
                f"{since[-1]:.0f}",
                f"{losses[-1]:.3f}",
            ]
        )
    names = [f"seconds to {target:.2f}" for target in targets]
    return ["program", *names, "seconds", "last validation loss"], lines


def _costs(rows):
    (row,) = rows
    seconds, sums = row["costs"]["time"]["s"], {}
    for one in (one for one in row["costs"].values() if "name" in one):
        sums.setdefault(one["name"], []).append((one["mb"], one["cpu_s"] / seconds))
    lines = [
        [name, len(found), *(f"{statistics.mean(x):.3g}" for x in zip(*found, strict=True))]
        for name, found in sorted(sums.items())
    ]
    sent = sum(one.get("sent_mb", 0.0) for one in row["costs"].values()) / row["hosts"] / seconds
    lines.append(["sent by a host, MB/s", row["hosts"], f"{sent:.3g}", ""])
    return ["process", "number", "MB of memory, each", "cores, each"], lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Validation loss by wall time."""
    figure = new_figure(7.5, 3.6)
    axes = figure.subplots()
    for row, colour in zip(rows, (BLUE, ORANGE, GREY), strict=True):
        _, seconds, losses = np.array(row["rows"]).T
        since = seconds - seconds[0]
        axes.plot(since, losses, "o-", color=colour, ms=3.5, lw=1.8, label=row["program"])
    axes.set_xlabel("seconds since the first evaluation", color=GREY)
    axes.set_ylabel("validation loss", color=GREY)
    frame(axes, "Four hosts, links of 75 Mbit/s, one host at half speed")
    axes.legend(frameon=False)
    save(figure, path)
