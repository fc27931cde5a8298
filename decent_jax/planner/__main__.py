"""Plan a training run before renting the cluster.

    python -m decent_jax.planner network     what a network looks like; check or convert a file
    python -m decent_jax.planner predict     step time of every algorithm, and what dominates it
    python -m decent_jax.planner recommend   which schedule, how often, in which format
    python -m decent_jax.planner place       which replica or pipeline stage on which device

Each says more with --help. None of them needs a GPU or the cluster.
"""

import argparse
import dataclasses
import sys

from decent_jax.errors import ConfigError
from decent_jax.planner import (
    fit,
    gossip_placement,
    measured,
    outputs,
    place_command,
    predict,
    recommend,
)
from decent_jax.planner.inputs import (
    add_network,
    add_search,
    add_workload,
    model_of,
    names_of,
    networks_of,
    one_network,
    search_of,
    workload_of,
    write_plan,
)
from decent_jax.planner.network import PRESETS
from decent_jax.planner.runtime import WIRE_BYTES, AllReduce
from decent_jax.topology import NAMES

EXAMPLES = {
    "network": """\
examples:
  python -m decent_jax.planner network --network nvlink_25gbe --nodes 4 --devices_per_node 8
      an imagined cluster: four machines of eight GPUs on NVLink, 25 Gbit/s between them
  python -m decent_jax.planner network --network network.json
      a file: checked (units, missing entries, asymmetry), then summarised
  python -m decent_jax.planner network --network two_racks_25gbe --nodes 4 --devices_per_node 2 \\
      --save two_racks.json
      write it as JSON, to edit by hand or to use as a plan's network

For a plan that train.py follows, the names in the file must be those of the cluster: HOST/k, the
name of a host and the number of the device in it (node0/0 becomes gpu17/0).

presets: {presets}
""",
    "predict": """\
examples:
  python -m decent_jax.planner predict --network nvlink_25gbe --nodes 2,4,8 --devices_per_node 4 \\
      --parameters 124e6 --compute_s 0.2 --sigma 0.1
      GPT-2 small on two to eight nodes, 200 ms forward and backward a replica, 10% variation
  python -m decent_jax.planner predict --network nvlink_25gbe --devices_per_node 4 \\
      --config configs/gpt2_openwebtext.py:decentralized --compute_s 0.178 --out predicted.png
      model and number of replicas from a config; the bars as a picture
  python -m decent_jax.planner predict --network network.json --parameters 124e6 \\
      --trace runs/alone --timeline step.png
      compute time and its variation from a run of one replica; a Gantt chart of a few steps
  python -m decent_jax.planner predict --network network.json --parameters 4.2e6 \\
      --measured rows.jsonl --fit compute_s,sigma --fit_on all_reduce
      against measured step times, two constants fitted to the all_reduce rows

reading the table: compute is what one replica would take alone; exposed communication is what
nothing hides; stragglers is what is lost to compute times that vary. They add up to the step.
""",
    "recommend": """\
examples:
  python -m decent_jax.planner recommend --network nvlink_25gbe --nodes 4 --devices_per_node 8 \\
      --parameters 124e6 --compute_s 0.2 --sigma 0.1
  python -m decent_jax.planner recommend --network dtfm_case5 --parameters 1.3e9 --compute_s 2 \\
      --wires float32,bfloat16,int8 --largest_slow_down 2
      64 machines around the world, compressed messages allowed
  python -m decent_jax.planner recommend --network network.json \\
      --config configs/gpt2_openwebtext.py:decentralized --compute_s 0.178 --plan plan.json
      then: train.py --config ... --config.cluster.plan=plan.json

Least (seconds a step) x (steps, relative to all-reduce). The second factor is a model calibrated on
published runs of 4 and 8 replicas; pydoc decent_jax.planner.recommend says how, and what it does
not know. --largest_slow_down is the quality you ask for.
""",
    "place": place_command.EXAMPLES,
}


class _Parser(argparse.ArgumentParser):
    """Mistakes in flags are one sentence too."""

    def error(self, message):
        raise ConfigError(f"{message} ({self.prog} --help shows how)")


def main(arguments: list[str] | None = None) -> int:
    """The command; 0, or 2 with one sentence on stderr."""
    parser = _Parser(
        prog="python -m decent_jax.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, add in (
        ("network", _add_network),
        ("predict", _add_predict),
        ("recommend", _add_recommend),
        ("place", place_command.add),
    ):
        command = commands.add_parser(
            name,
            help=add.__doc__,
            description=add.__doc__,
            epilog=EXAMPLES[name].format(presets=", ".join(PRESETS)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add(command)
    try:
        options = parser.parse_args(arguments)
        options.run(options)
    except (ConfigError, ValueError, OSError) as error:
        print(f"planner: {error}", file=sys.stderr)
        return 2
    return 0


# --- network ------------------------------------------------------------------------------------


def _add_network(parser) -> None:
    """Check and summarise a network."""
    add_network(parser)
    parser.add_argument(
        "--save", type=outputs.json_file, metavar="FILE.json", help="write it as JSON"
    )
    parser.set_defaults(run=_network)


def _network(options) -> None:
    from decent_jax.planner.inputs import describe

    network = one_network(options)
    print(describe(network))
    if options.save:
        network.save(options.save)
        print(options.save)


# --- predict ------------------------------------------------------------------------------------


def _add_predict(parser) -> None:
    """Step time of every algorithm, its parts, and the speed-up over all-reduce."""
    add_network(parser, many=True)
    add_workload(parser)
    parser.add_argument(
        "--algorithms",
        metavar="A,B",
        help=f"of {', '.join((*predict.ALL_REDUCES, *NAMES))}, with parameters if need be (all)",
    )
    parser.add_argument(
        "--scaling",
        choices=("weak", "strong"),
        default="weak",
        help="with several --nodes: a replica's share of the batch stays as it is at the first, "
        "or shrinks because the batch is one for all (weak)",
    )
    parser.add_argument("--mix_every", type=int, default=1, metavar="H", help="steps a round (1)")
    parser.add_argument("--wire", choices=tuple(WIRE_BYTES), default="float32", help="of gossip")
    parser.add_argument(
        "--out", type=outputs.picture, metavar="FILE.png", help="draw the table as bars"
    )
    parser.add_argument(
        "--timeline",
        type=outputs.picture,
        metavar="FILE.png",
        help="draw a few steps as a Gantt chart",
    )
    parser.add_argument("--measured", metavar="FILE", help="JSON lines of measured step times")
    parser.add_argument("--fit", metavar="A,B", help="of compute_s, sigma, bandwidth: to measured")
    parser.add_argument("--fit_on", metavar="A,B", default="all_reduce", help="rows to fit")
    parser.set_defaults(run=_predict)


def _predict(options) -> None:
    if options.measured:
        _against_measured(options)
        return
    if options.fit:
        raise ConfigError("--fit needs --measured FILE, the step times to fit to")
    model = model_of(options)
    names = names_of(options.algorithms) if options.algorithms else None
    gossip = {"mix_every": options.mix_every, "wire": options.wire}
    rows, first = [], None
    for network in networks_of(options, model):
        first = first or network.num_devices
        shrink = first / network.num_devices if options.scaling == "strong" else 1.0
        workload = workload_of(options, model, shrink)
        rows += predict.compare(
            network, workload, names, bucket_bytes=options.bucket_bytes, **gossip
        )
    print(predict.format_table(rows))
    if options.out or options.timeline:
        from decent_jax.planner import plots, timeline

        if options.out:
            print(plots.save(timeline.draw_predictions(rows), options.out))
        if options.timeline:
            shown = names or [
                name
                for name in ("all_reduce", "one_peer_exp", "alternating_exp_ring")
                if any(row.label == name and row.num_nodes == network.num_nodes for row in rows)
            ]
            algorithms = {
                name: predict.algorithm_of(
                    name, network, workload, bucket_bytes=options.bucket_bytes
                )
                for name in shown
            }
            figure = timeline.draw_gantt(network, workload, algorithms)
            print(plots.save(figure, options.timeline))


def _against_measured(options) -> None:
    """Predict measured rows; fit a few constants to some of them where asked to."""
    rows = fit.read_rows(options.measured)
    alone = [row["step_time_s"] for row in rows if row["algorithm"] == "none"]
    rows = [row for row in rows if row["algorithm"] != "none"]
    if not rows:
        raise ConfigError(f"{options.measured} has no row of an algorithm, only of none")
    fitted = options.fit.split(",") if options.fit else []
    if options.compute_s is None and options.trace is None:
        if alone:
            options.compute_s = sum(alone) / len(alone)
        elif "compute_s" in fitted:
            options.compute_s = min(row["step_time_s"] for row in rows)  # to begin with
        else:
            raise ConfigError(
                "give --compute_s, --trace, --fit compute_s, or a measured row of algorithm none"
            )
    model = model_of(options)
    networks = {
        size: networks_of(options, dataclasses.replace(model, num_replicas=size), alone=True)[0]
        for size in {row["num_replicas"] for row in rows}
    }
    constants, compared = measured.compare(
        rows,
        networks,
        workload_of(options, model),
        fitted=fitted,
        fitted_to=names_of(options.fit_on),
        bucket_bytes=options.bucket_bytes,
    )
    if constants:
        print(", ".join(f"{name} = {value:.4g}" for name, value in constants.items()) + "\n")
    print(measured.format_table(compared))
    if options.out:
        from decent_jax.planner import plots, timeline

        picture = [
            {
                "group": row["algorithm"],
                "series": f"{row['num_replicas']} replicas",
                "measured_s": row["step_time_s"],
                "predicted_s": row["predicted_s"],
                "fitted": row["fitted"],
            }
            for row in compared
        ]
        figure = timeline.draw_against_measured(picture, "Predicted against measured")
        print(plots.save(figure, options.out))


# --- recommend ----------------------------------------------------------------------------------


def _add_recommend(parser) -> None:
    """The schedule and its settings that reach the same quality soonest, and why."""
    add_network(parser)
    add_workload(parser)
    parser.add_argument("--schedules", metavar="A,B", help=f"of {', '.join(NAMES)} (all)")
    parser.add_argument(
        "--mix_every", default="1,2,4,8", metavar="H,H", help="steps a round to try (1,2,4,8)"
    )
    parser.add_argument(
        "--wires", default="float32", metavar="W,W", help=f"of {', '.join(WIRE_BYTES)} (float32)"
    )
    parser.add_argument(
        "--tokens_per_parameter",
        type=float,
        default=recommend.TOKENS_PER_PARAMETER,
        metavar="D",
        help="how long the run is; the longer, the less gossip loses "
        f"({recommend.TOKENS_PER_PARAMETER:g})",
    )
    parser.add_argument(
        "--largest_slow_down",
        type=float,
        default=1.5,
        metavar="S",
        help="consider what needs at most S times the steps of all-reduce (1.5)",
    )
    add_search(parser)
    parser.set_defaults(run=_recommend)


def _recommend(options) -> None:
    model = model_of(options)
    network = networks_of(options, model)[0]
    workload = workload_of(options, model)
    wires = options.wires.split(",")
    if set(wires) - set(WIRE_BYTES):
        raise ConfigError(f"--wires takes {', '.join(WIRE_BYTES)}, got {options.wires!r}")
    try:
        mix_every = [int(text) for text in options.mix_every.split(",")]
    except ValueError:
        raise ConfigError(
            f"--mix_every takes numbers of steps such as 1,2,4, got {options.mix_every!r}"
        ) from None
    if not options.tokens_per_parameter > 0:
        raise ConfigError(
            f"--tokens_per_parameter must be above 0, got {options.tokens_per_parameter:g}"
        )
    if not options.largest_slow_down >= 1:
        raise ConfigError(
            f"--largest_slow_down must be at least 1, got {options.largest_slow_down:g}"
        )
    schedules = names_of(options.schedules) if options.schedules else None
    found = recommend.choices(
        network,
        workload,
        schedules=schedules,
        mix_every=mix_every,
        wires=wires,
        executions=("hierarchical", "plain"),
        bucket_bytes=options.bucket_bytes,
        tokens_per_parameter=options.tokens_per_parameter,
        largest_slow_down=options.largest_slow_down,
    )
    print(recommend.explain(found), end="\n\n")
    print(recommend.format_table(found), end="\n\n")
    print("In the config:")
    lines = recommend.config_lines(found[0], model.algorithm)
    for line in lines:
        print(f"    {line}")
    if "comm_dtype" in lines[-1] and not _knows_wires():
        print("This version of train.py has no comm_dtype: it sends float32.")
    if options.plan:
        best = found[0].algorithm
        if isinstance(best, AllReduce):
            raise ConfigError(
                f"{options.plan} is not written: all_reduce, which is recommended, follows no plan"
            )
        num_bytes = workload.model_bytes * WIRE_BYTES[best.wire] / 4
        placed = gossip_placement.place_schedule(
            network, best.schedule, num_bytes, compute_s=workload.compute_s, **search_of(options)
        )
        reordered = network.take(placed.order)
        expected = {
            "label": found[0].prediction.label,
            "step_s": predict.step_s(reordered, workload, best),
            "step_s_in_the_order_of_the_network": found[0].prediction.step_s,
            "steps_relative_to_all_reduce": found[0].slow_down,
        }
        write_plan(options, network, placed, best.mix_every, expected)


def _knows_wires() -> bool:
    from decent_jax.train.config import default_config

    return "comm_dtype" in default_config()


if __name__ == "__main__":
    sys.exit(main())
