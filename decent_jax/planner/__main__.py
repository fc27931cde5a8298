"""Plan a training run before renting the cluster.

    decent-jax planner network     what a network looks like; check or convert a file
    decent-jax planner predict     step time of every algorithm, and what dominates it
    decent-jax planner recommend   which schedule, how often, in which format
    decent-jax planner place       which replica or pipeline stage on which device

Each says more with --help. None of them needs a GPU or the cluster.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax import topology
from decent_jax.ground.command_line import Parser
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.replaceable import check_replaceable
from decent_jax.plan import orders, plan_file
from decent_jax.planner import (
    build_schedule,
    flags,
    gossip_placement,
    inputs,
    measured,
    outputs,
    pipeline_time,
    placement,
    predict,
    recommend,
    search,
)
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import WIRES, AllReduce


def main(arguments: list[str] | None = None) -> int:
    """The command; 0, or 2 with one sentence on stderr."""
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="decent-jax planner", description=__doc__, **layout)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    runs = {"network": _network, "predict": _predict, "recommend": _recommend, "place": _place}
    for name, run in runs.items():
        words = {"help": run.__doc__, "description": run.__doc__, "epilog": flags.EXAMPLES[name]}
        flags.add(commands.add_parser(name, **words, **layout), name)
    try:
        options = parser.parse_args(arguments)
        for name, value in vars(options).items():
            if isinstance(value, Path):
                check_replaceable(value, f"--{name}")
        runs[options.command](options)
    except (ValueError, OSError) as error:
        print(f"planner: {ConfigError(error)}", file=sys.stderr)
        return 2
    return 0


def _network(options: argparse.Namespace) -> None:
    """Check and summarise a network."""
    network = inputs.networks_of(options)[0]
    print(inputs.describe(network))
    if options.save:
        network.save(options.save)
        print(options.save)


# --- predict ------------------------------------------------------------------------------------


def _predict(options: argparse.Namespace) -> None:
    """Step time of every algorithm, its parts, and the speed-up over all-reduce."""
    if options.measured:
        _against_measured(options)
        return
    if options.timeline and options.timeline == options.out:
        raise ConfigError(f"--out and --timeline are one file, {options.out}; name two")
    if options.fit:
        raise ConfigError("--fit needs --measured FILE, the step times to fit to")
    inputs.complete(options)
    names, tuning = options.algorithms, {"bucket_bytes": options.bucket_bytes}
    gossip = {"mix_every": options.mix_every, "wire": options.wire}
    networks = inputs.networks_of(options)
    network, workload = networks[0], inputs.workload_of(options)
    rows = []
    for network in networks:
        if options.scaling == "strong":
            shrink = networks[0].num_devices / network.num_devices
            workload = inputs.workload_of(options, shrink)
        rows += predict.compare(network, workload, names, **tuning, **gossip)
    print(predict.format_table(rows))
    _draw(options.out, lambda plots: plots.draw_predictions(rows))
    if options.timeline:
        known = [row.label for row in rows if row.num_nodes == network.num_nodes]
        shown = ("all_reduce", "one_peer_exp", "alternating_exp_ring")
        algorithms = {
            name: predict.algorithm_of(name, network, workload, **tuning)
            for name in names or [name for name in shown if name in known]
        }
        _draw(options.timeline, lambda plots: plots.draw_gantt(network, workload, algorithms))


def _draw(path: Path | None, draw: Callable[[Any], Any]) -> None:
    """Save what a function of `decent_jax.plots.network` draws, where it is asked for."""
    if path:
        from decent_jax.plots import network as plots
        from decent_jax.plots import (
            style as plot_style,  # here, as matplotlib takes a while to import
        )

        print(plot_style.save(draw(plots), path))


def _against_measured(options: argparse.Namespace) -> None:
    """Predict measured rows; fit a few constants to some of them where asked to."""
    rows = measured.read_rows(options.measured)
    alone = [row["step_time_s"] for row in rows if row["algorithm"] == "none"]
    rows = [row for row in rows if row["algorithm"] != "none"]
    if not rows:
        raise ConfigError(f"{options.measured} has no row of an algorithm, only of none")
    fitted = options.fit or []
    if options.compute_s is None and options.trace is None:
        if alone:
            options.compute_s = sum(alone) / len(alone)
        elif "compute_s" in fitted:
            options.compute_s = min(row["step_time_s"] for row in rows)  # to begin with
        else:
            raise ConfigError(
                "give --compute_s, --trace, --fit compute_s, or a measured row of algorithm none"
            )
    inputs.complete(options)
    options.nodes, networks = None, {}
    try:
        for options.num_replicas in {row["num_replicas"] for row in rows}:
            networks[options.num_replicas] = inputs.networks_of(options)[0]
        constants, compared = measured.compare(
            rows,
            networks,
            inputs.workload_of(options),
            fitted=fitted,
            fitted_to=options.fit_on,
            bucket_bytes=options.bucket_bytes,
        )
    except ValueError as error:  # a schedule that does not exist, or not for so many replicas
        raise ConfigError(f"{options.measured}: {error}") from None
    if constants:
        print(", ".join(f"{name} = {value:.4g}" for name, value in constants.items()) + "\n")
    print(measured.format_table(compared))
    rows = [
        row | {"group": row["algorithm"], "series": f"{row['num_replicas']} replicas"}
        for row in compared
    ]
    title = "Predicted against measured"
    _draw(options.out, lambda plots: plots.draw_against_measured(rows, title))


# --- recommend ----------------------------------------------------------------------------------


def _recommend(options: argparse.Namespace) -> None:
    """The schedule and its settings that reach the same quality soonest, and why."""
    inputs.complete(options)
    network, workload = inputs.networks_of(options)[0], inputs.workload_of(options)
    wires = options.wires.split(",")
    if set(wires) - set(WIRES):
        raise ConfigError(
            f"--wires takes {', '.join(WIRES)}, got {options.wires!r}",
            field="--wires",
            value=options.wires,
        )
    found = recommend.choices(
        network,
        workload,
        schedules=options.schedules,
        mix_every=options.mix_every,
        wires=wires,
        bucket_bytes=options.bucket_bytes,
        tokens_per_parameter=options.tokens_per_parameter,
        largest_slow_down=options.largest_slow_down,
    )
    print(recommend.explain(found), end="\n\n")
    print(recommend.format_table(found), end="\n\n")
    print("In the config:")
    for line in recommend.config_lines(found[0], options.algorithm):
        print(f"    {line}")
    if not options.plan:
        return
    best, gossip = found[0], found[0].algorithm
    if isinstance(gossip, AllReduce):
        raise ConfigError(
            f"{options.plan} is not written: all_reduce, which is recommended, follows no plan"
        )
    num_bytes = workload.model_bytes * workload.share(gossip.wire)
    limits = {"compute_s": workload.compute_s, **inputs.search_of(options)}
    placed = gossip_placement.place_schedule(network, gossip.schedule, num_bytes, **limits)
    expected = {
        "label": best.prediction.label,
        "step_s": predict.step_s(network.take(placed.order), workload, gossip),
        "step_s_in_the_order_of_the_network": best.prediction.step_s,
        "steps_relative_to_all_reduce": best.slow_down,
    }
    _write_plan(options.plan, network, placed.order, placed.schedule, gossip.mix_every, expected)


def _write_plan(
    path: Path, network: Network, order: np.ndarray, schedule: topology.Schedule, *rest: Any
) -> None:
    """Replica i, or its stage s, goes on device ``order[i]``; the rest as of `plan_file.Plan`."""
    devices = tuple(network.names[device] for device in order)
    plan_file.Plan(devices, schedule, *rest).save(path)
    print(f"\n{path}: train.py --config.cluster.plan={path} follows it")


# --- place --------------------------------------------------------------------------------------


def _place(options: argparse.Namespace) -> None:
    """Which replica, or which pipeline stage, goes on which device."""
    network = inputs.networks_of(options)[0]
    if options.parameters is None:
        raise ConfigError("give the model: --parameters P")
    (_place_replicas if options.stages is None else _place_stages)(options, network)


def _place_replicas(options: argparse.Namespace, network: Network) -> None:
    num_bytes = 4 * options.parameters
    compute, limits = {"compute_s": options.compute_s}, inputs.search_of(options)
    found = {}
    if options.schedule == build_schedule.NAME:
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
    headings = ("", "mean round s", "rounds s", "disagreement s", "consensus per second")
    print(outputs.table(headings, rows))
    print("\nreplica: device")
    for replica, device in enumerate(placed.order):
        print(f"{replica:7}: {network.names[device]}")
    _draw(options.out, lambda plots: plots.draw_gossip(network, placed))
    if options.plan:
        expected = {
            "mean_round_s": placed.mean_round_s,
            "round_s": list(placed.round_s),
            "disagreement_s": placed.disagreement_s,
        }
        _write_plan(options.plan, network, placed.order, placed.schedule, 1, expected)


def _place_stages(options: argparse.Namespace, network: Network) -> None:
    if options.replicas is None or options.pipeline_bytes is None:
        raise ConfigError("--stages also needs --replicas R and --pipeline_bytes B")
    if options.micro_batches and not options.compute_s:
        raise ConfigError("--micro_batches also needs --compute_s S")
    if options.schedule == build_schedule.NAME:
        raise ConfigError(f"--schedule {build_schedule.NAME} is for replicas of one device each")
    schedule, n = topology.make(options.schedule, options.replicas), network.num_devices
    parameter_bytes = 4 * options.parameters / options.stages
    sizes = parameter_bytes, options.pipeline_bytes, options.stage_memory
    job = placement.Job(options.stages, options.replicas, *sizes)
    memory = inputs.device_numbers(options.device_memory, "bytes", 0, 1e15, n)
    speeds = inputs.device_numbers(options.speeds, "speeds", 1e-3, 1e3, n)
    speeds = np.ones(n) if speeds is None else speeds
    if options.layers:
        orders.divide(options.layers, options.stages)  # refuses too few before the search
    found = search.place(network, job, memory_bytes=memory, **inputs.search_of(options))
    print(
        f"{found.costs.total_s:.4f} s per step: data-parallel {found.costs.data_parallel_s:.4f}, "
        f"pipeline 2 x {found.costs.pipeline_s:.4f}"
        + (" (proved optimal)" if found.is_optimal else "")
        + f"; at least {found.lower_bound.total_s:.4f}; {found.num_candidates} candidates in "
        f"{found.seconds:.1f} s"
    )
    times = {
        name: pipeline_time.StepTime(network, job, schedule, name, options.micro_batches)
        for name in (orders.ORDERS if options.micro_batches else ())
    }
    if times:
        devices = placement.usable_devices(network, job, memory).tolist()
        stages = _exchanged(options, found.stages, devices, speeds, times[options.order])
        costs = placement.evaluate(network, job, stages)
        found = dataclasses.replace(found, stages=stages, costs=costs)
    for stage, devices in enumerate(found.stages):
        print(f"stage {stage}: {' '.join(network.names[device] for device in devices)}")
    _draw(options.out, lambda plots: plots.draw_placement(network, found))
    layers = _layers(options, speeds[found.stages])
    if layers:
        print(f"layers of the stages: {','.join(map(str, layers))}")
    if times:
        forward_s, rows = _forward_s(options, speeds[found.stages]), []
        for name, steps_of in times.items():
            rows.append((name, *(f"{s:.4g}" for s in steps_of(found.stages, forward_s))))
        headings = ("s per step", "pipelines alone", "all_reduce", f"gossip over {schedule.name}")
        print("\n" + outputs.table(headings, rows))
    if options.plan:
        expected = found.costs._asdict() | {"total_s": found.costs.total_s}
        order, rest = found.stages.T.reshape(-1), (options.stages, tuple(layers))
        _write_plan(options.plan, network, order, schedule, 1, expected, *rest)


def _exchanged(
    options: argparse.Namespace,
    cheapest: np.ndarray,
    devices: list[int],
    speeds: np.ndarray,
    steps_of: pipeline_time.StepTime,
) -> np.ndarray:
    """The stages with exchanges that make the predicted step shorter."""

    def seconds_of(stages: np.ndarray) -> float:
        predicted = steps_of(stages, _forward_s(options, speeds[stages]))
        return predicted.gossip_s if options.averaging == "gossip" else predicted.all_reduce_s

    limits = {"time_limit_s": options.time_limit_s, "progress": sys.stderr.isatty()}
    stages = pipeline_time.exchanged(cheapest, devices, seconds_of, **limits)
    before_s, after_s = seconds_of(cheapest), seconds_of(stages)
    what = f"a step with {options.averaging} in the order {options.order}"
    if after_s < before_s:
        print(f"exchanged until {what} takes {after_s:.4g} s instead of {before_s:.4g}")
    return stages


def _layers(options: argparse.Namespace, speeds: np.ndarray) -> list[int]:
    """Layers of each stage, as fast as the slowest of its devices; empty if not asked for."""
    if not options.layers:
        return []
    slowest = speeds.min(axis=1).tolist()
    return orders.divide(options.layers, options.stages, options.output_layers, slowest)


def _forward_s(options: argparse.Namespace, speeds: np.ndarray) -> np.ndarray:
    """(S, D) of a micro-batch, on stages of these speeds."""
    layers = _layers(options, speeds)
    costs = np.array(layers or [1.0] * options.stages, float)
    costs[-1] += options.output_layers if layers else 0.0
    shares = inputs.FORWARD * options.compute_s / options.micro_batches * costs / costs.sum()
    return shares[:, None] / speeds


if __name__ == "__main__":
    sys.exit(main())
