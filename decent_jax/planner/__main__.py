"""Plan a training run before you rent the cluster.

    decent-jax planner predict     step time of every algorithm, and what dominates it
    decent-jax planner recommend   which schedule, how often, in which format
    decent-jax planner place       which replica or pipeline stage on which device

`decent-jax planner COMMAND --help` has more details. No command needs a GPU or the cluster.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax import topology
from decent_jax.ground.command_line import Parser, check_replaceable, command
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import table
from decent_jax.plan import plan_file
from decent_jax.planner import gossip_placement, options, placement, predict, recommend, search
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import AllReduce

Options = argparse.Namespace


@command("planner")
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 with one sentence on stderr."""
    parser = Parser(prog="decent-jax planner", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, run in COMMANDS.items():
        words = inspect.cleandoc(run.__doc__ or "")
        command = commands.add_parser(name, help=words.partition("\n")[0], description=words)
        options.add(command, options.FLAGS[name])
        if run is _place:
            options.add(command.add_argument_group(options.STAGES), options.FLAGS[options.STAGES])
    args = parser.parse_args(arguments)
    for name, value in vars(args).items():
        if isinstance(value, Path):
            check_replaceable(value, f"--{name}")
    COMMANDS[args.command](args)
    return 0


# --- predict ------------------------------------------------------------------------------------


def _predict(args: Options) -> None:
    """Predict the step time of every algorithm, its parts, and the speed-up over all-reduce.

    decent-jax planner predict --network nvlink_25gbe --nodes 4 --devices_per_node 4 \\
        --parameters 124e6 --compute_s 0.2 --sigma 0.1
        GPT-2 small on four nodes, 200 ms forward and backward per replica, 10% variation
    decent-jax planner predict --network nvlink_25gbe --devices_per_node 4 \\
        --config configs/gpt2_openwebtext.py:decentralized --compute_s 0.178
        model and number of replicas from a config
    decent-jax planner predict --network network.json --parameters 124e6 \\
        --trace runs/alone --out step.png
        compute time and its variation from a run of one replica; a Gantt chart of a few steps

    In the table, compute is the time of one replica alone, exposed communication is the part that
    compute does not hide, and stragglers is the time lost because compute times vary. The three add
    up to the step.
    """
    options.complete(args)
    machines, workload = options.network_of(args), options.workload_of(args)
    rows = predict.compare(machines, workload)
    print(predict.format_table(rows))
    if args.out:
        from decent_jax.plots import gantt, style  # here, since importing matplotlib takes a while

        known = [row.label for row in rows]
        names = [name for name in predict.TIMELINES if name in known]
        runs = predict.timelines(machines, workload, names)
        shown = [int(np.argmax(machines.node == k)) for k in range(min(machines.num_nodes, 8))]
        print(style.save(gantt.draw(runs, machines.names, shown), args.out))


# --- recommend ----------------------------------------------------------------------------------


def _recommend(args: Options) -> None:
    """Recommend the schedule and the settings with the shortest step.

    decent-jax planner recommend --network nvlink_25gbe --nodes 4 --devices_per_node 8 \\
        --parameters 124e6 --compute_s 0.2 --sigma 0.1
    decent-jax planner recommend --network dtfm_case5 --parameters 1.3e9 --compute_s 2 \\
        --codecs float32,bfloat16,int8 --mix_every 1,8
        64 machines around the world, compressed and infrequent messages allowed
    decent-jax planner recommend --network network.json \\
        --config configs/gpt2_openwebtext.py:decentralized --compute_s 0.178 --plan plan.json
        then: train.py --config ... --config.cluster.plan=plan.json

    The choice with the shortest step comes first; among those within 1% of it, the one that reaches
    consensus fastest. docs/results.md lists how formats and longer intervals change the loss; name
    only those that you accept.
    """
    options.complete(args)
    options.choose_method(args)
    machines, workload = options.network_of(args), options.workload_of(args)
    tried = {name: getattr(args, name) for name in ("schedules", "mix_every", "codecs", "combine")}
    choices = recommend.choices(machines, workload, **tried)
    if args.base:
        choices = [choice for choice in choices if options.accepted(args, choice)]
    print(recommend.format_table(choices), end="\n\n")
    print(f"For {choices[0].prediction.label}, in the config:")
    for name, value in options.fields_of(args, choices[0]).items():
        print(f"    config.{name} = {json.dumps(value)}")
    if not args.plan:
        return
    best, gossip = choices[0], choices[0].algorithm
    if isinstance(gossip, AllReduce):
        why = "is not written: the recommended all_reduce follows no plan"
        raise ConfigError.about("--plan", args.plan, why)
    num_bytes = workload.model_bytes * workload.share(gossip.codec)
    limits = {"compute_s": workload.compute_s, **options.search_of(args)}
    placed = gossip_placement.place_schedule(machines, gossip.schedule, num_bytes, **limits)
    expected = {
        "label": best.prediction.label,
        "step_s": predict.step_s(machines.take(placed.order), workload, gossip),
        "step_s_in_the_order_of_the_network": best.prediction.step_s,
    }
    _write_plan(args.plan, machines, placed.order, gossip.schedule, gossip.mix_every, expected)


def _write_plan(
    path: Path, machines: Network, order: np.ndarray, schedule: topology.Schedule, *rest: Any
) -> None:
    """Writes a plan in which replica i is on ``order[i]``; ``rest`` as in `plan_file.Plan`."""
    devices = tuple(machines.names[device] for device in order)
    plan = plan_file.Plan(devices, schedule, *rest)
    plan.save(path)
    fields = {"cluster.plan": path, "num_replicas": schedule.num_replicas}
    if plan.stages > 1:
        fields |= {"trainer": "pipelines", "pipeline.stages": plan.stages}
    flags = " ".join(f"--config.{name}={value}" for name, value in fields.items())
    print(f"\n{path}: train.py {flags} follows it")


# --- place --------------------------------------------------------------------------------------


def _place(args: Options) -> None:
    """Assign replicas or pipeline stages to devices.

    decent-jax planner place --network dtfm_case5 --parameters 124e6 \\
        --schedule one_peer_exp --time_limit_s 2
        eight regions: order the replicas so that the schedule's rounds use fast links
    decent-jax planner place --network dtfm_case5 --parameters 1.3e9 --stages 8 \\
        --replicas 8 --pipeline_bytes 0.471e9 --time_limit_s 2 --plan plan.json
        DT-FM: eight pipeline stages in data-parallel groups of eight; then: train.py with
        --config.trainer=pipelines --config.pipeline.stages=8 --config.num_replicas=8
        --config.cluster.plan=plan.json

    In the output, disagreement is the age of the drift between replicas that is not averaged away
    yet; lower is better.
    """
    machines = options.network_of(args)
    (_place_replicas if args.stages is None else _place_stages)(args, machines)


def _place_replicas(args: Options, machines: Network) -> None:
    size = predict.replicas_per_node(machines)
    schedule = topology.make(args.schedule, machines.num_devices, replicas_per_node=size)
    wanted = machines, schedule, 4 * args.parameters
    listed = gossip_placement.evaluate(*wanted, compute_s=args.compute_s)
    placed = gossip_placement.place_schedule(
        *wanted, compute_s=args.compute_s, **options.search_of(args)
    )
    rows = []
    for words, result in (("as the network lists them", listed), ("placed", placed)):
        rounds = " ".join(f"{seconds:.3g}" for seconds in result.round_s)
        rows.append((words, f"{result.mean_round_s:.4g}", rounds, f"{result.disagreement_s:.4g}"))
    print(table(("", "mean round s", "rounds s", "disagreement s"), rows))
    print("\nreplica: device")
    for replica, device in enumerate(placed.order):
        print(f"{replica:7}: {machines.names[device]}")
    expected = {
        "mean_round_s": placed.mean_round_s,
        "round_s": list(placed.round_s),
        "disagreement_s": placed.disagreement_s,
    }
    if args.plan:
        _write_plan(args.plan, machines, placed.order, schedule, 1, expected)


def _place_stages(args: Options, machines: Network) -> None:
    for name in ("replicas", "pipeline_bytes"):
        if getattr(args, name) is None:
            raise ConfigError(f"--stages also needs --{name}", field=f"--{name}")
    schedule = topology.make(args.schedule, args.replicas)
    parameter_bytes = 4 * args.parameters / args.stages
    job = placement.Job(args.stages, args.replicas, parameter_bytes, args.pipeline_bytes)
    placed = search.place(machines, job, **options.search_of(args))
    print(
        f"{placed.costs.total_s:.4f} s per step: data-parallel {placed.costs.data_parallel_s:.4f}, "
        f"pipeline 2 x {placed.costs.pipeline_s:.4f}"
        + (" (proved optimal)" if placed.is_optimal else "")
        + f"; at least {placed.lower_bound.total_s:.4f}"
    )
    for stage, devices in enumerate(placed.stages):
        print(f"stage {stage}: {' '.join(machines.names[device] for device in devices)}")
    if args.plan:
        expected = placed.costs._asdict() | {"total_s": placed.costs.total_s}
        order = placed.stages.T.reshape(-1)
        _write_plan(args.plan, machines, order, schedule, 1, expected, args.stages)


COMMANDS = {"predict": _predict, "recommend": _recommend, "place": _place}


if __name__ == "__main__":
    sys.exit(main())
