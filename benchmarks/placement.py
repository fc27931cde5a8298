"""Placement: DT-FM's five networks and three uneven ones; gossip on slow networks.

    python benchmarks/placement.py [--seconds 5] [--seeds 5] [--only stages|gossip] [--out FOLDER]

Prints two tables and writes into FOLDER (placement_out) `placement.jsonl`, a line per run, and
pictures: how the searches converge, and a placement and a schedule drawn on their networks.

1. Pipeline stages in data-parallel groups, by DT-FM's cost model (8 stages, 8 replicas, 0.65 GB of
   gradients per stage). "random" draws pipelines at random, "plain" is the better of the two
   layouts that list devices in order. "DT-FM" is the result of its authors' search after 5,000
   candidates (best and mean of 10 seeds; tests/data/README.md). "proved": the cost equals
   the lower bound of `decent_jax.planner.placement.Problem.lower_bound`.
2. Gossip of a GPT-2 124M in float32, 64 replicas, nothing hidden behind compute: seconds per round,
   disagreement (the age of the drift between replicas; `decent_jax.planner.gossip_placement`), its
   inverse, and the seconds until replicas that start apart agree to a thousandth. "own": replica i
   on device i; "placed": the order that the search finds.

Seconds of search depend on the machine; on a busy one compare the CPU seconds.
"""

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import commands
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from decent_jax import topology
from decent_jax.planner import network as networks
from decent_jax.planner.gossip_placement import PlacedSchedule, evaluate, place_schedule
from decent_jax.planner.network import ETHERNET_25G, NVLINK, Network
from decent_jax.planner.placement import DTFM_JOB, Job, Problem, StageGroups
from decent_jax.planner.placement import evaluate as cost_of
from decent_jax.planner.search import PlacedStages, place
from decent_jax.plots import network as plots
from decent_jax.plots import style as plot_style
from decent_jax.plots.style import COLOURS, GREY, INK

MODEL_BYTES = 4 * 124_439_808
# Best and mean of ten seeds of DT-FM's own search.
DTFM_SEARCH = {
    "case 1": (3.4398, 3.4398),
    "case 2": (43.547, 46.526),
    "case 3": (16.0868, 16.0868),
    "case 4": (34.8020, 34.8020),
    "case 5": (49.2184, 49.2184),
}
TEN_REGIONS = {
    "Oregon": 9, "Virginia": 13, "Ohio": 7, "Tokyo": 3, "Seoul": 5, "Singapore": 2, "Sydney": 4,
    "London": 6, "Frankfurt": 11, "Ireland": 4,
}  # fmt: skip


def stage_problems() -> dict[str, tuple[Network, Job]]:
    def job(stages: int, replicas: int) -> Job:
        return Job(stages, replicas, DTFM_JOB.data_parallel_bytes, DTFM_JOB.pipeline_bytes)

    published = {f"case {k}": (networks.preset(f"dtfm_case{k}"), DTFM_JOB) for k in range(1, 6)}
    three = networks.regions({"Oregon": 5, "Virginia": 11, "Frankfurt": 16})
    mixed = networks.cluster([8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1], NVLINK, ETHERNET_25G)
    return published | {
        "5 + 11 + 16 in 3 regions": (three, job(5, 6)),
        "64 in 10 regions": (networks.regions(TEN_REGIONS), job(8, 8)),
        "44 in NVLink nodes": (mixed, job(5, 8)),
    }


def compare_stages(seconds: float, seeds: int, out: Path) -> list[dict]:
    """Table 1, its pictures and its rows."""
    print(
        "| network | stages x replicas of devices | at least | random, mean | plain | DT-FM | "
        "found, best | mean | seconds to best | CPU s | candidates | |\n" + "|---" * 12 + "|"
    )
    rows, runs = [], {}
    for name, (network, job) in stage_problems().items():
        runs[name] = []
        for seed in range(seeds):
            cpu = time.process_time()
            found = place(network, job, seed=seed, time_limit_s=seconds, progress=True)
            runs[name].append(found)
            again = cost_of(network, job, found.stages)
            rows.append(
                {
                    "table": "stages",
                    "network": name,
                    "seed": seed,
                    "total_s": found.costs.total_s,
                    "total_of_emitted_pipelines_s": again.total_s,
                    "data_parallel_s": found.costs.data_parallel_s,
                    "two_pipeline_s": 2 * found.costs.pipeline_s,
                    "lower_bound_s": found.lower_bound.total_s,
                    "proved": found.is_optimal,
                    "seconds": found.seconds,
                    "seconds_to_best": found.history[-1][0],
                    "candidates_to_best": found.history[-1][1],
                    "cpu_s": time.process_time() - cpu,
                    "candidates": found.num_candidates,
                    "stages": found.stages.tolist(),
                }
            )
        mine = rows[-seeds:]
        random, plain = _random_mean_s(network, job), _plain_s(network, job)
        published = "{:.6g}, mean {:.6g}".format(*DTFM_SEARCH[name]) if name in DTFM_SEARCH else ""
        totals = [row["total_s"] for row in mine]
        print(
            f"| {name} | {job.num_stages} x {job.num_replicas} of {network.num_devices} "
            f"| {mine[0]['lower_bound_s']:.4f} | {random:.4f} | {plain:.4f} | {published} "
            f"| {min(totals):.4f} | {np.mean(totals):.4f} "
            f"| {np.median([row['seconds_to_best'] for row in mine]):.2f} "
            f"| {np.median([row['cpu_s'] for row in mine]):.2f} "
            f"| {int(np.median([row['candidates'] for row in mine]))} "
            f"| {'proved' if all(row['proved'] for row in mine) else ''} |",
            flush=True,
        )
    reference = {name: best for name, (best, _) in DTFM_SEARCH.items()}
    plot_style.save(draw_convergence(runs, reference), out / "convergence.png")
    for name in ("case 2", "64 in 10 regions"):
        best = min(runs[name], key=lambda found: found.costs.total_s)
        network = stage_problems()[name][0]
        figure = plots.draw_placement(
            network.gbit_per_s, network.names, best.stages, best.costs.title
        )
        plot_style.save(figure, out / f"placement_{name.replace(' ', '_')}.png")
    return rows


def draw_convergence(
    runs: Mapping[str, Sequence[PlacedStages]], reference: Mapping[str, float]
) -> Figure:
    """The best cost by time; a panel per problem, a line per seed.

    Args:
      reference: costs that others reached, drawn as dashed lines.
    """
    rows, columns = -(-len(runs) // 4), min(4, len(runs))
    figure = plot_style.new_figure(3.5 * columns, 2.8 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, placements) in zip(panels, runs.items(), strict=False):
        best = min(placement.costs.total_s for placement in placements)
        for placement, colour in zip(placements, itertools.cycle(COLOURS)):
            seconds, _, cost = (list(column) for column in zip(*placement.history, strict=True))
            seconds = [max(1e-3, t) for t in seconds] + [max(placement.seconds, seconds[-1])]
            axes.step(seconds, [*cost, cost[-1]], where="post", color=colour, lw=1.5)
        low, high = best, max(placement.history[0][2] for placement in placements)
        if name in reference:
            axes.axhline(reference[name], color=GREY, lw=1, ls="--")
            axes.annotate(
                "DT-FM's search", (1, reference[name]), xycoords=("axes fraction", "data"),
                xytext=(0, 3), textcoords="offset points", ha="right", color=GREY, size=9,
            )  # fmt: skip
            low, high = min(low, reference[name]), max(high, reference[name])
        margin = 0.08 * (high - low) or 0.05 * best
        axes.set(xscale="log", ylim=(low - margin, high + margin))
        axes.xaxis.set_minor_locator(NullLocator())
        plot_style.frame(axes, f"{name}: {best:.4g} s")
    for axes in panels[len(runs) :]:
        axes.axis("off")
    figure.supxlabel("seconds of search", size=10, color=INK)
    figure.supylabel("best cost, s", size=10, color=INK)
    return figure


def _random_mean_s(network: Network, job: Job, draws: int = 200) -> float:
    rng = np.random.default_rng(0)
    shape = (job.num_stages, job.num_replicas)
    totals = [
        cost_of(
            network, job, rng.permutation(network.num_devices)[: job.num_devices].reshape(shape)
        ).total_s
        for _ in range(draws)
    ]
    return float(np.mean(totals))


def _plain_s(network: Network, job: Job) -> float:
    """Pipelines of consecutive devices, or groups of consecutive devices."""
    problem, devices = Problem(network, job), np.arange(network.num_devices)
    used, left_out = devices[: job.num_devices], devices[job.num_devices :]
    across = used.reshape(job.num_replicas, job.num_stages).T.ravel()
    return min(
        StageGroups(problem, np.concatenate([slots, left_out])).costs.total_s
        for slots in (used, across)
    )


def gossip_problems() -> dict[str, tuple[Network, int]]:
    """Networks, and how many of their devices lie together."""
    return {
        "DT-FM case 3, 2 sites": (networks.preset("dtfm_case3"), 32),
        "DT-FM case 4, 4 regions": (networks.preset("dtfm_case4"), 16),
        "DT-FM case 5, 8 regions": (networks.preset("dtfm_case5"), 8),
        "64 in 10 uneven regions": (networks.regions(TEN_REGIONS), 8),
    }


def compare_gossip(seconds: float, out: Path) -> list[dict]:
    """Table 2, its picture and its rows."""
    print(
        "| network | schedule | order | s per round | disagreement s | consensus per second | "
        "s to 1/1000 |\n" + "|---" * 7 + "|"
    )
    rows = []
    for name, (network, local_size) in gossip_problems().items():
        placed: list[tuple[str, PlacedSchedule]] = []
        for kind in (
            "one_peer_exp",
            "alternating_exp_ring",
            "hierarchical(complete, one_peer_exp)",
            "complete",
        ):
            schedule = topology.make(kind, network.num_devices, local_size=local_size)
            placed.append(("own", evaluate(network, schedule, MODEL_BYTES)))
            searched = place_schedule(
                network, schedule, MODEL_BYTES, time_limit_s=seconds, progress=True
            )
            placed.append(("placed", searched))
        for order, one in placed:
            label = "all_reduce" if one.schedule.name == "complete" else one.schedule.name
            agree_s = _seconds_to_agree(one)
            print(
                f"| {name} | {label} | {order} | {one.mean_round_s:.4g} "
                f"| {one.disagreement_s:.4g} | {one.consensus_per_s:.4g} | {agree_s:.4g} |",
                flush=True,
            )
            rows.append(
                {
                    "table": "gossip",
                    "network": name,
                    "schedule": label,
                    "order": order,
                    "round_s": one.round_s,
                    "disagreement_s": one.disagreement_s,
                    "consensus_per_s": one.consensus_per_s,
                    "seconds_to_a_thousandth": agree_s,
                    "device_of_replica": one.order.tolist(),
                }
            )
        drawn = placed[1][1]  # one_peer_exp, placed
        picture = plots.draw_gossip(
            network.gbit_per_s, network.names, drawn.transfers, drawn.round_s, drawn.titles
        )
        plot_style.save(picture, out / f"gossip_{name.split(',')[0].replace(' ', '_')}.png")
    return rows


def _seconds_to_agree(placed: PlacedSchedule, to: float = 1e-3) -> float:
    """Until ``||W ... W_0 - J||_2`` is that small, from round 0."""
    schedule, seconds = placed.schedule, 0.0
    product = np.eye(schedule.num_replicas) - 1 / schedule.num_replicas
    for k in range(10_000):
        if np.linalg.norm(product, 2) <= to:
            return seconds
        product = schedule.matrix(k % schedule.period) @ product
        seconds += placed.round_s[k % schedule.period]
    return np.inf


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each search (5)")
    parser.add_argument("--seeds", type=int, default=5, help="searches of each network (5)")
    parser.add_argument("--only", choices=("stages", "gossip"), help="one of the two tables")
    parser.add_argument("--out", type=Path, default="placement_out", metavar="FOLDER")
    options = parser.parse_args(arguments)
    if not options.seconds > 0 or options.seeds < 1:
        parser.error(
            "--seconds must be above 0 and --seeds at least 1, got "
            f"{options.seconds:g} and {options.seeds}"
        )
    options.out.mkdir(exist_ok=True)
    rows = []
    if options.only != "gossip":
        rows += compare_stages(options.seconds, options.seeds, options.out)
        print()
    if options.only != "stages":
        rows += compare_gossip(options.seconds, options.out)
    path = options.out / "placement.jsonl"
    commands.write_rows(path, rows)
    print(f"\n{path}, {len(rows)} rows, and pictures beside it", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
