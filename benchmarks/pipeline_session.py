"""Runs on existing hosts, with the same cells; benchmarks/pipelines.py starts it on one of them.

    ip netns exec djhost0 python -m benchmarks.pipeline_session JOBS.json ROWS.jsonl

All jobs have the same algorithm and layers. Between two of them the links change, but not the
cells: the cell of stage s and replica i stays on its host, which gets the links of the machine that
the layout of the job has there.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from benchmarks.pipeline_cases import (
    CONTEXT,
    EXAMPLES,
    LAYERS,
    MICRO_BATCHES,
    REPLICAS,
    STAGES,
    WIDTH,
    network_of,
)
from benchmarks.pipeline_cells import Conditions, Report, Sleeping
from decent_jax import topology, train
from decent_jax.actors.handles import Actors
from decent_jax.actors.ray_cluster import running
from decent_jax.pipelines.cell import open_run
from decent_jax.pipelines.cells import Cells, nodes_of
from decent_jax.plan.plan_file import Plan

ADDRESS = "10.77.0.1:6391"
SCRIPT = Path(__file__).with_name("hosts.sh")
STEPS = 2  # measured of each job


def config_of(job: dict[str, Any], plan: Path) -> ConfigDict:
    """The config of all jobs of a session."""
    config = train.default_config("language_modeling")
    config.data.path, config.model.tied = "stdlib", False
    config.model.update(layers=LAYERS, heads=4, width=WIDTH, context=CONTEXT)
    config.algorithm, config.comm_dtype = job["algorithm"], job["wire"]
    config.num_replicas = REPLICAS
    config.batch_size = REPLICAS * MICRO_BATCHES * EXAMPLES
    config.steps, config.eval.every, config.lr_schedule.name = 10**6, 0, "constant"
    config.lr_schedule.warmup = 0
    config.pipeline.update(stages=STAGES, micro_batches=MICRO_BATCHES, address=ADDRESS)
    config.pipeline.layers = ",".join(map(str, job["layers"]))
    config.cluster.plan = str(plan)
    return config


def shape_links(job: dict[str, Any], folder: Path) -> None:
    """Give each host the links of the machine that the layout has there."""
    net, pairs = network_of(job["case"]), folder / "pairs"
    machines = [machine for column in zip(*job["stages"], strict=True) for machine in column]
    rates = net.bandwidth_bytes_per_s
    lines = [
        f"{a} {b} {8e-3 * rates[machines[a], machines[b]]:.0f}kbit"
        for a in range(len(machines))
        for b in range(len(machines))
        if a != b
    ]
    pairs.write_text("\n".join(lines) + "\n")
    subprocess.run([str(SCRIPT), "pairs", "1000mbit", str(pairs)], check=True)


def conditions_of(job: dict[str, Any]) -> Conditions:
    """What the cells need to know."""
    latency = network_of(job["case"]).latency_s
    columns = list(zip(*job["stages"], strict=True))
    between = [[[float(latency[a, b]) for b in column] for a in column] for column in columns]
    return Conditions(job["order"], job["layer_s"], job["slowness"], between, job["blocking"])


def measured(cells: Cells, job: dict[str, Any], t: int) -> dict[str, Any]:
    """The row of a job, which begins with step ``t``."""
    cells.all("prepare", conditions_of(job))
    seconds = []
    for k in range(STEPS):
        began = time.monotonic()
        cells.all("train", t + k, t + k + 1, False)
        seconds.append(time.monotonic() - began)
    reports: list[Report] = cells.all("report")
    return job | {
        "step_s": statistics.mean(seconds),
        "steps_s": seconds,
        "parameter_bytes": [report.parameter_bytes for report in reports[:STAGES]],
        "kept": [report.kept for report in reports[:STAGES]],
        "bubble": bubble([report.actions for report in reports[:STAGES]]),
        "reports": [report._asdict() for report in reports],
    }


def bubble(actions: list[list[Any]]) -> float:
    """The share of a step's pipeline, its last one, in which a stage computes nothing."""
    last = [one[-len(one) // STEPS :] for one in actions]
    began = min(one[0][2] for one in last)
    ended = max(one[-1][3] for one in last)
    busy = [sum(action[3] - action[2] for action in one) for one in last]
    return 1 - statistics.mean(busy) / (ended - began)


def main(jobs_path: str, rows_path: str) -> None:
    jobs = json.loads(Path(jobs_path).read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hosts = tuple(f"djhost{k}/0" for k in range(STAGES * REPLICAS))
        schedule = topology.make("one_peer_exp", REPLICAS)
        Plan(hosts, schedule, stages=STAGES).save(folder / "plan.json")
        config = config_of(jobs[0], folder / "plan.json")
        with (
            open_run(config, folder / "run") as (experiment, work, plan, counts),
            running(config, "pipeline", 0),
        ):
            actors = Actors()
            nodes, secret = nodes_of(plan, actors.nodes(), STAGES * REPLICAS), os.urandom(32)
            given = experiment.config, work.path, counts, nodes, secret, actors
            with Cells(*given, kind=Sleeping) as cells:
                cells.open(None, 0)
                first = jobs[0] | {"case": "no limits"}
                shape_links(first, folder)
                cells.all("prepare", conditions_of(first))
                cells.all("train", 0, 1, False)  # compiles
                for n, job in enumerate(jobs):
                    shape_links(job, folder)
                    row = measured(cells, job, 1 + n * STEPS)
                    with Path(rows_path).open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(job["case"], job["layout"], job["order"], row["step_s"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
