"""Placement of pipelines on DT-FM's five networks, beside its authors' search.

    python benchmarks/planner/placement.py [--seconds 5] [--seeds 5] [--json FILE]

Pipeline stages in data-parallel groups, by DT-FM's cost model (8 stages, 8 replicas, 0.65 GB of
gradients per stage), in seconds. "random" draws pipelines at random, "plain" is the better of the
two layouts that list devices in order. "DT-FM" is the result of its authors' search after 5,000
candidates (best and mean of 10 seeds). "proved": the cost equals the lower bound of
`decent_jax.planner.placement.Problem.lower_bound`.

Prints a table; --json also writes a line per search. Seconds of search depend on the machine; on a
busy one compare the CPU seconds.
"""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax.ground.command_line import output_file
from decent_jax.planner.network import Network, preset
from decent_jax.planner.placement import DTFM_JOB, Job, Problem, StageGroups, evaluate
from decent_jax.planner.search import place

# Best and mean of ten seeds of DT-FM's own search.
DTFM_SEARCH = {
    "dtfm_case1": (3.4398, 3.4398),
    "dtfm_case2": (43.547, 46.526),
    "dtfm_case3": (16.0868, 16.0868),
    "dtfm_case4": (34.8020, 34.8020),
    "dtfm_case5": (49.2184, 49.2184),
}


def searched(name: str, network: Network, job: Job, seconds: float, seeds: int) -> list[dict]:
    """A row per seed."""
    rows = []
    for seed in range(seeds):
        cpu = time.process_time()
        found = place(network, job, seed=seed, time_limit_s=seconds, progress=True)
        rows.append(
            {
                "network": name,
                "seed": seed,
                "total_s": found.costs.total_s,
                "total_of_emitted_pipelines_s": evaluate(network, job, found.stages).total_s,
                "lower_bound_s": found.lower_bound.total_s,
                "proved": found.is_optimal,
                "cpu_s": time.process_time() - cpu,
                "stages": found.stages.tolist(),
            }
        )
    return rows


def line_of(name: str, network: Network, job: Job, rows: list[dict]) -> str:
    """The row of the table."""
    totals = [row["total_s"] for row in rows]
    numbers = [rows[0]["lower_bound_s"], random_mean_s(network, job), plain_s(network, job)]
    cpu_s = np.median([row["cpu_s"] for row in rows])
    cells = [name, *(f"{x:.4f}" for x in numbers), "{:.6g}, mean {:.6g}".format(*DTFM_SEARCH[name])]
    cells += [f"{min(totals):.4f}", f"{np.mean(totals):.4f}", f"{cpu_s:.2f}"]
    cells += ["proved" if all(row["proved"] for row in rows) else ""]
    return f"| {' | '.join(cells)} |"


def random_mean_s(network: Network, job: Job, draws: int = 200) -> float:
    rng = np.random.default_rng(0)
    shape = (job.num_stages, job.num_replicas)
    totals = [
        evaluate(
            network, job, rng.permutation(network.num_devices)[: job.num_devices].reshape(shape)
        ).total_s
        for _ in range(draws)
    ]
    return float(np.mean(totals))


def plain_s(network: Network, job: Job) -> float:
    """Pipelines of consecutive devices, or groups of consecutive devices."""
    problem, devices = Problem(network, job), np.arange(network.num_devices)
    used, left_out = devices[: job.num_devices], devices[job.num_devices :]
    across = used.reshape(job.num_replicas, job.num_stages).T.ravel()
    return min(
        StageGroups(problem, np.concatenate([slots, left_out])).costs.total_s
        for slots in (used, across)
    )


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each search (5)")
    parser.add_argument("--seeds", type=int, default=5, help="searches of each network (5)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the rows")
    options = parser.parse_args(arguments)
    if not options.seconds > 0 or options.seeds < 1:
        parser.error(
            "--seconds must be above 0 and --seeds at least 1, got "
            f"{options.seconds:g} and {options.seeds}"
        )
    print(
        "| network | at least | random, mean | plain | DT-FM | found, best | mean | CPU s | |\n"
        + "|---" * 9
        + "|"
    )
    rows = []
    for name in DTFM_SEARCH:
        network = preset(name)
        own = searched(name, network, DTFM_JOB, options.seconds, options.seeds)
        print(line_of(name, network, DTFM_JOB, own), flush=True)
        rows += own
    if options.json:
        commands.write_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
