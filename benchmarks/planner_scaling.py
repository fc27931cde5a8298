"""Scale on paper: a step of 8 to 4,096 replicas on three networks, for two sizes of GPT-2.

    python benchmarks/planner_scaling.py [--out scaling.png] [--json rows.jsonl]

Nothing here is measured. Every replica is a GPU that trains on the same number of tokens whatever
their number (weak scaling): 32 sequences of 1,024 for GPT-2 124M, 8 for 1.5B, computed at 40% of
an A100's 312 TFLOP/s, with the variation that Figure 6 gives (sigma 0.1). Machines hold 8 GPUs on
NVLink with one 25 Gbit/s or 100 Gbit/s port, or lie in DT-FM's ten cloud regions (on PCIe, 2 Gbit/s
per machine at most). An algorithm stops scaling at the first size at which its replicas do less
than half of the work that they would do alone; its steps count as much as those of all-reduce.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import commands
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from tqdm import tqdm

from decent_jax import topology
from decent_jax.ground.command_line import output_file, picture_file
from decent_jax.planner import network, predict
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Gossip, LogNormal, Workload
from decent_jax.plots import style as plot_style
from decent_jax.plots.style import COLOURS, GREY, MARKS

DEVICES_PER_NODE = 8
SIZES = tuple(2**k for k in range(3, 13))
WORLD = "world-wide"  # machines dealt out to DT-FM's ten regions
REGIONS = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul")
REGIONS += ("Singapore", "Sydney", "London", "Frankfurt", "Ireland")
NETWORKS = {"25 GbE": "nvlink_25gbe", "100 Gb InfiniBand": "nvlink_100gb_ib", WORLD: ""}
FLOPS_PER_S = 0.4 * 312e12
SIGMA = 0.1
# parameters, of which the tied embedding, floating-point operations a token (6 N + 12 l d T, as
# decent_jax.models.decoders.flops_per_token), sequences of 1,024 tokens per replica
MODELS = {
    "GPT-2 124M": (124_439_808, 50257 * 768, 855.2e6, 32),
    "GPT-2 1.5B": (1_557_611_200, 50257 * 1600, 10_279e6, 8),
}
ALGORITHMS = (
    "all_reduce",
    "all_reduce_hierarchical",
    "one_peer_exp",
    "one_peer_exp, every 8 steps",
    "alternating_exp_ring",
    "alternating_exp_ring, every 8 steps",
)


def network_of(title: str, nodes: int) -> Network:
    if title == WORLD:
        counts = Counter(REGIONS[k % len(REGIONS)] for k in range(nodes))
        return network.regions(counts, DEVICES_PER_NODE)
    return network.preset(NETWORKS[title], nodes, DEVICES_PER_NODE)


def workload(model: str) -> Workload:
    parameters, embedding, flops_per_token, sequences = MODELS[model]
    compute_s = flops_per_token * 1024 * sequences / FLOPS_PER_S
    return Workload(
        4 * parameters,
        compute_s / 3,
        2 * compute_s / 3,
        compute=LogNormal(SIGMA),
        late_bytes=4 * embedding,
    )


def rounds_only(name: str, n: int, local_size: int) -> topology.Schedule:
    """`topology.make` without the mixing matrices: log2 n of n x n would be 1.6 GB at 4,096."""
    replicas, half = np.arange(n), np.full(n, 0.5)
    rounds = []
    if name == "one_peer_exp":
        for r in range((n - 1).bit_length()):
            send = topology.Send((replicas - 2**r) % n, half)
            rounds.append(topology.Round(1, half, (send,), np.empty((0, 0))))
        return topology.Schedule(name, n, tuple(rounds))
    node = replicas // local_size
    for i in range((n // local_size).bit_length() - 1):
        low = np.minimum(node, node ^ 2**i)
        pair = (low >> (i + 1)) * 2**i + low % 2**i  # pairs in the order of their lower node
        for parity in (0, 1):
            pairs_off = pair % 2 != parity
            sources = np.where(pairs_off, (node ^ 2**i) * local_size + replicas % local_size, -1)
            weights = np.where(pairs_off, 0.5, 0.0)
            sends = (topology.Send(sources, weights),) if pairs_off.any() else ()
            rounds.append(topology.Round(local_size, 1 - weights, sends, np.empty((0, 0))))
    return topology.Schedule(name, n, tuple(rounds))


def step_s(name: str, whole: Network, work: Workload) -> float | None:
    """Seconds of a step; None where the algorithm does not exist on a single machine."""
    if whole.num_nodes == 1 and ("hierarchical" in name or "alternating" in name):
        return None
    if name in predict.ALL_REDUCES:
        return predict.step_s(whole, work, predict.algorithm_of(name, whole, work))
    schedule, _, every = name.partition(", every ")
    gossip = Gossip(
        rounds_only(schedule, whole.num_devices, DEVICES_PER_NODE),
        mix_every=int(every.split()[0]) if every else 1,
    )
    return predict.step_s(whole, work, gossip, steps=100, warm_up=100)


def draw_scaling(
    panels: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[float]]]],
    *,
    columns: int = 3,
    ideal_s: Mapping[str, float] | None = None,
) -> Figure:
    """Step time over replicas, a panel for each case and a line for each algorithm.

    Args:
      panels: title -> algorithm -> (replicas, seconds).
      ideal_s: title -> seconds per step without communication, drawn dashed.
    """
    lines = -(-len(panels) // columns)
    figure = plot_style.new_figure(4.3 * columns, 3.3 * lines + 0.4)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
        for name, (replicas, seconds) in panel.items():
            k = names.index(name)
            look = {"color": COLOURS[k], "marker": MARKS[k], "ms": 4, "lw": 1.5}
            axes.plot(replicas, seconds, label=name, **look)
        if ideal_s:
            axes.axhline(ideal_s[title], color=GREY, ls="--", lw=1, label="compute alone")
        axes.set(xscale="log", yscale="log")
        plot_style.plain_numbers(axes.xaxis)
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1,), numticks=12))
        plot_style.plain_numbers(axes.yaxis, (1, 1.5, 2, 3, 5, 7))
        plot_style.frame(axes, title)
        axes.tick_params(axis="x", labelrotation=45)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes in grid[:, 0]:
        axes.set_ylabel("seconds per step", color=GREY)
    for axes in grid[-1]:
        axes.set_xlabel("replicas", color=GREY)
    plot_style.legend(figure, grid[0, 0].get_legend_handles_labels()[0], ncols=4)
    return figure


def main(arguments: list[str] | None = None) -> int:
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=picture_file, metavar="FILE.png", help="also draw it")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the numbers")
    options = parser.parse_args(arguments)
    seconds: dict[tuple, float] = {}
    cases = [(title, n) for title in NETWORKS for n in SIZES]
    for title, n in tqdm(cases, desc="networks", disable=None):
        whole = network_of(title, n // DEVICES_PER_NODE)
        for model in MODELS:
            for name in ALGORITHMS:
                found = step_s(name, whole, workload(model))
                if found is not None:
                    seconds[model, title, name, n] = found
    for model in MODELS:
        alone = workload(model).compute_s
        print(f"\n{model}: a replica alone {alone:.3f} s a step\n")
        print(f"| network | algorithm | {' | '.join(map(str, SIZES))} | stops scaling at |")
        print("|---" * (len(SIZES) + 3) + "|")
        for title in NETWORKS:
            for name in ALGORITHMS:
                row = [seconds.get((model, title, name, n)) for n in SIZES]
                stops = [n for n, one in zip(SIZES, row, strict=True) if one and alone / one < 0.5]
                cells = ["" if one is None else f"{one:.3g}" for one in row]
                print(
                    f"| {title} | {name} | {' | '.join(cells)} "
                    f"| {stops[0] if stops else 'beyond 4,096'} |"
                )
    if options.json:
        keys = ("model", "network", "algorithm", "num_replicas")
        rows = [
            dict(zip(keys, case, strict=True)) | {"step_time_s": found}
            for case, found in seconds.items()
        ]
        commands.write_rows(options.json, rows)
    if options.out:
        panels, ideal = {}, {}
        for model, title in itertools.product(MODELS, NETWORKS):
            panel = f"{model}, {title}"
            ideal[panel] = workload(model).compute_s
            panels[panel] = {}
            for name in ALGORITHMS:
                sizes = [n for n in SIZES if (model, title, name, n) in seconds]
                panels[panel][name] = sizes, [seconds[model, title, name, n] for n in sizes]
        print(plot_style.save(draw_scaling(panels, ideal_s=ideal), options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
