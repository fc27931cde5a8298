"""``python -m decent_jax.planner place``."""

import argparse
import json
import math
from pathlib import Path

from decent_jax import topology
from decent_jax.errors import ConfigError
from decent_jax.planner import (
    build_schedule,
    gossip_placement,
    inputs,
    outputs,
    placement,
    predict,
    search,
)
from decent_jax.planner.build_schedule import NAME as BUILT
from decent_jax.planner.network import Network
from decent_jax.topology import NAMES

EXAMPLES = """\
examples:
  python -m decent_jax.planner place --network dtfm_case5 --parameters 124e6 \\
      --schedule one_peer_exp --time_limit_s 2
      eight regions: order the replicas so that the schedule's rounds use fast links
  python -m decent_jax.planner place --network network.json --parameters 124e6 --schedule built \\
      --compute_s 0.2 --time_limit_s 2 --plan plan.json
      a schedule made for this network; then: train.py --config.cluster.plan=plan.json
  python -m decent_jax.planner place --network dtfm_case5 --parameters 1.3e9 --stages 8 \\
      --replicas 8 --pipeline_bytes 0.471e9 --time_limit_s 2
      DT-FM: eight pipeline stages in data-parallel groups of eight

disagreement is the age of the drift between replicas that mixing leaves: less is better.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Which replica, or which pipeline stage, goes on which device."""
    inputs.add_network(parser)
    number = {"type": float, "metavar": "B"}
    parser.add_argument("--parameters", type=float, metavar="P", help="of the model")
    add = parser.add_argument_group("gossip: order the replicas of a schedule").add_argument
    names = ", ".join(NAMES)
    words = f"of {names}; or {BUILT}: one made for this network (one_peer_exp)"
    add("--schedule", default="one_peer_exp", metavar="NAME", help=words)
    add("--max_degree", type=int, default=1, help=f"of {BUILT}: messages a round (1)")
    words = "a round hides behind it (0)"
    add("--compute_s", type=float, default=0.0, metavar="S", help=words)
    add = parser.add_argument_group("pipeline stages in data-parallel groups (DT-FM)").add_argument
    add("--stages", type=int, metavar="K", help="pipeline stages")
    add("--replicas", type=int, metavar="R", help="pipelines; K x R devices")
    add("--pipeline_bytes", **number, help="between two stages")
    words = "list of bytes, one a device of the network"
    add("--device_memory", metavar="FILE.json", help=words)
    add("--stage_memory", **number, default=0.0, help="bytes needed")
    words = "draw it on a map of the network"
    parser.add_argument("--out", type=outputs.picture, metavar="FILE.png", help=words)
    inputs.add_search(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Search, print what was found, and write the picture and the plan where asked to."""
    network = inputs.one_network(options)
    if options.parameters is None:
        raise ConfigError("give the model: --parameters P")
    if not 1 <= options.parameters < math.inf:
        raise ConfigError(f"--parameters must be at least 1, got {options.parameters:g}")
    if not 0 <= options.compute_s < math.inf:
        raise ConfigError(f"--compute_s must not be negative, got {options.compute_s:g}")
    if options.stages is None:
        _gossip(options, network)
    else:
        _stages(options, network)


def _gossip(options: argparse.Namespace, network: Network) -> None:
    num_bytes = 4 * options.parameters
    compute, limits = {"compute_s": options.compute_s}, inputs.search_of(options)
    found = {}
    if options.schedule == BUILT:
        placed = build_schedule.build_schedule(
            network, num_bytes, max_degree=options.max_degree, **compute, **limits
        )
    else:
        size = predict.local_size(network)
        schedule = topology.make(options.schedule, network.num_devices, local_size=size)
        found["as the network lists them"] = gossip_placement.evaluate(
            network, schedule, num_bytes, **compute
        )
        placed = gossip_placement.place_schedule(network, schedule, num_bytes, **compute, **limits)
    rows = [
        (
            words,
            f"{placing.mean_round_s:.4g}",
            " ".join(f"{seconds:.3g}" for seconds in placing.round_s),
            f"{placing.disagreement_s:.4g}",
            f"{placing.consensus_per_s:.4g}",
        )
        for words, placing in (found | {"placed": placed}).items()
    ]
    headings = ("", "mean round s", "rounds s", "disagreement s", "consensus a second")
    print(outputs.table(headings, rows))
    print("\nreplica: device")
    for replica, device in enumerate(placed.order):
        print(f"{replica:7}: {network.names[device]}")
    if options.out:
        from decent_jax.planner import plots

        outputs.save_picture(plots.draw_gossip(network, placed), options.out)
    if options.plan:
        expected = {
            "mean_round_s": placed.mean_round_s,
            "round_s": list(placed.round_s),
            "disagreement_s": placed.disagreement_s,
        }
        inputs.write_plan(options, network, placed, 1, expected)


def _stages(options: argparse.Namespace, network: Network) -> None:
    if options.replicas is None or options.pipeline_bytes is None:
        raise ConfigError("--stages also needs --replicas R and --pipeline_bytes B")
    if options.plan:
        raise ConfigError("--plan is for gossip: train.py has no pipeline stages")
    job = placement.Job(
        options.stages,
        options.replicas,
        4 * options.parameters / max(options.stages, 1),
        options.pipeline_bytes,
        options.stage_memory,
    )
    memory = None
    if options.device_memory:
        try:
            memory = json.loads(Path(options.device_memory).read_text())
        except ValueError as error:
            raise ConfigError(f"{options.device_memory} is not JSON: {error}") from None
    found = search.place(network, job, memory_bytes=memory, **inputs.search_of(options))
    print(
        f"{found.costs.total_s:.4f} s per step: data-parallel {found.costs.data_parallel_s:.4f}, "
        f"pipeline 2 x {found.costs.pipeline_s:.4f}"
        + (" (proved optimal)" if found.is_optimal else "")
        + f"; at least {found.lower_bound.total_s:.4f}; {found.num_candidates} candidates in "
        f"{found.seconds:.1f} s"
    )
    for stage, devices in enumerate(found.stages):
        print(f"stage {stage}: {' '.join(network.names[device] for device in devices)}")
    if options.out:
        from decent_jax.planner import plots

        outputs.save_picture(plots.draw_placement(network, found), options.out)
