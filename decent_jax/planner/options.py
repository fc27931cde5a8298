"""The flags of the planner's commands, and what they say: a network, a model, a step's compute.

Only `complete`, and only where a config file is given, imports the trainer and jax.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decent_jax.ground import command_line
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.format import shown, split_outside_brackets
from decent_jax.ground.json_files import is_real, read_json
from decent_jax.plan.orders import ORDERS
from decent_jax.planner import compute_times, network
from decent_jax.planner.compute_times import LONGEST_S, SHORTEST_S
from decent_jax.planner.network import Network
from decent_jax.planner.pipeline_time import AVERAGING
from decent_jax.planner.recommend import TOKENS_PER_PARAMETER as TOKENS
from decent_jax.planner.runtime import WIRES, Workload
from decent_jax.topology import NAMES

FORWARD = 1 / 3  # of forward and backward: the backward pass multiplies twice as often
ROW_LENGTH = 768.0  # parameters per row of a matrix, where no config says: GPT-2 small's width


# --- flags --------------------------------------------------------------------------------------


def number(low: float, high: float, kind: type = float) -> Callable[[str], Any]:
    """The ``type`` of a flag: a number from ``low`` to ``high``."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"must be {what} from {low:g} to {high:.7g}, got {shown(text)}"
            )
        return value

    return read


def counts(most: int) -> Callable[[str], list[int]]:
    """The ``type`` of a flag: whole numbers from 1 to ``most`` between commas."""
    count = number(1, most, int)
    return lambda text: [count(part) for part in text.split(",")]


def one_of(*names: str) -> Callable[[str], str]:
    """The ``type`` of a flag: one of these names."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(names)}, got {shown(text)}")
        return text

    return read


SECONDS = number(SHORTEST_S, LONGEST_S)
COUNT = number(1, 2**20, int)
PARAMETERS = number(1, 1e13)
PICTURE = command_line.picture_file
MUST = "required"


class Flag(NamedTuple):
    """A flag; a default other than None is added to its help."""

    name: str
    metavar: str
    type: Callable[[str], Any]
    default: Any
    help: str


NETWORK = (
    Flag("network", "NAME|FILE", str, MUST, "a preset, or a measured network (JSON or .npz)"),
    Flag("nodes", "N,N", counts(2**20), None, "machines of a preset; of a file the first N"),
    Flag("devices_per_node", "L", COUNT, None, "of a preset (default: config.local_size)"),
)
WORKLOAD = (
    Flag("parameters", "P", PARAMETERS, None, "number of parameters of the model"),
    Flag("config", "FILE[:ARGUMENTS]", str, None, "config file of train.py"),
    Flag("late_parameters", "P", number(0, 1e13), None, "how many of them are in a tied embedding"),
    Flag("compute_s", "S", SECONDS, None, "seconds of forward and backward of one replica"),
    Flag("sigma", "S", number(0, 5), 0.0, "compute varies: lognormal, 0.1 is about 10%%"),
    Flag("trace", "DIR|FILE", str, None, "--workdir of a run whose step times say both instead"),
)
SEARCH = (
    Flag("plan", "FILE.json", command_line.output_file, None, "write the plan for train.py"),
    Flag("time_limit_s", "S", SECONDS, 5.0, "seconds that the search may take"),
)
SCHEDULES = ", ".join(NAMES)
STAGES = "pipeline stages in data-parallel groups (DT-FM)"  # a group of flags of place
FLAGS = {
    "network": (
        *NETWORK,
        Flag("save", "FILE.json", command_line.json_file, None, "write the network as JSON"),
    ),
    "predict": (
        *NETWORK,
        *WORKLOAD,
        Flag("algorithms", "A,B", split_outside_brackets, None, f"all_reduce, {SCHEDULES}"),
        Flag("mix_every", "H", number(1, 1000, int), 1, "steps per round"),
        Flag("wire", "W", one_of(*WIRES), "float32", f"messages of gossip: {', '.join(WIRES)}"),
        Flag("out", "FILE.png", PICTURE, None, "draw a few steps of some as a Gantt chart"),
    ),
    "recommend": (
        *NETWORK,
        *WORKLOAD,
        Flag("schedules", "A,B", split_outside_brackets, None, f"some of {SCHEDULES}"),
        Flag("mix_every", "H,H", counts(1000), "1,2,4,8", "steps per round to try"),
        Flag("wires", "W,W", str, "float32", f"messages to try, of {', '.join(WIRES)}"),
        Flag("tokens_per_parameter", "D", number(1e-6, 1e9), TOKENS, "length of the run"),
        Flag("largest_slow_down", "S", number(1, 1e6), 1.5, "times the steps of all-reduce"),
        *SEARCH,
    ),
    "place": (
        *NETWORK,
        *SEARCH,
        Flag("parameters", "P", PARAMETERS, MUST, "number of parameters of the model"),
        Flag("schedule", "NAME", str, "one_peer_exp", f"one of {SCHEDULES}"),
        Flag("compute_s", "S", number(0, LONGEST_S), 0.0, "of a replica's, or pipeline's, batch"),
        Flag("out", "FILE.png", PICTURE, None, "draw the placement on the network"),
    ),
    STAGES: (
        Flag("stages", "K", COUNT, None, "pipeline stages"),
        Flag("replicas", "R", COUNT, None, "pipelines; they take K x R devices"),
        Flag("pipeline_bytes", "B", number(0, 1e15), None, "bytes per step to the next stage"),
        Flag("micro_batches", "M", COUNT, None, "of a pipeline: also predict and shorten the step"),
        Flag("averaging", "A", one_of(*AVERAGING[1:]), "gossip", f"{' or '.join(AVERAGING[1:])}"),
        Flag("order", "O", one_of(*ORDERS), "1f1b", f"of micro-batches: {' or '.join(ORDERS)}"),
        Flag("layers", "L", COUNT, None, "of the model: also say how many each stage gets"),
        Flag("output_layers", "X", number(0, 1e4), 0.0, "cost of the output layer, in layers"),
        Flag("speeds", "FILE.json", str, None, "list of relative speeds, one per device"),
    ),
}


def add(parser: Any, flags: Iterable[Flag]) -> None:
    """Add flags to a parser, or to a group of its flags."""
    for name, metavar, kind, default, words in flags:
        how: dict[str, Any] = {"required": True} if default is MUST else {"default": default}
        if default not in (None, MUST):
            words += " (default: %(default)s)"
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, help=words, **how)


# --- what they say ------------------------------------------------------------------------------


def complete(options: argparse.Namespace) -> None:
    """Take from ``--config`` what no flag says: the model, the replicas, and the algorithm."""
    options.num_replicas = options.local_size = None
    options.algorithm, options.row_length = "accum_adam", ROW_LENGTH
    if options.config:
        from decent_jax import tasks
        from decent_jax.train import flags

        config = flags.load(options.config)
        count = getattr(tasks.find(config.task), "count_parameters", None)
        if count is None:
            raise ConfigError(
                f"the task {config.task!r} does not count its parameters for the planner; give "
                "--parameters and the size of the network instead of --config",
                field="task",
                value=config.task,
            )
        if options.parameters is None:
            options.parameters, late_parameters, num_rows = count(config)
            options.row_length = options.parameters / num_rows
            if options.late_parameters is None:
                options.late_parameters = late_parameters
        options.num_replicas, options.local_size = config.num_replicas, config.local_size
        options.algorithm = config.algorithm
    if options.parameters is None:
        raise ConfigError("give the model: --parameters P, or --config FILE", field="--parameters")
    late = options.late_parameters or 0.0
    if late > options.parameters:
        raise ConfigError(
            f"--late_parameters {late:g} are some of the {options.parameters:g} of --parameters; "
            "give at most as many",
            field="--late_parameters",
            value=late,
        )


def workload_of(options: argparse.Namespace) -> Workload:
    """The step of one replica."""
    compute_s, distribution = options.compute_s, compute_times.CONSTANT
    if options.trace:
        if compute_s is not None or options.sigma:
            raise ConfigError(
                "--trace says compute time and variation; leave the others out", field="--trace"
            )
        times_s, steps_per_time = compute_times.read_trace(options.trace)
        try:
            compute_s, distribution = compute_times.fit(times_s, steps_per_time)
        except ValueError as error:
            raise ConfigError(
                f"--trace {options.trace}: {error}", field="--trace", value=options.trace
            ) from None
    elif compute_s is None:
        raise ConfigError("give the compute time: --compute_s S, or --trace", field="--compute_s")
    elif options.sigma:
        distribution = compute_times.LogNormal(options.sigma)
    return Workload(
        4 * options.parameters,
        FORWARD * compute_s,
        (1 - FORWARD) * compute_s,
        compute=distribution,
        late_bytes=4 * (options.late_parameters or 0.0),
        row_length=options.row_length,
    )


def networks_of(options: argparse.Namespace) -> list[Network]:
    """One for each number of ``--nodes``; without the flag, what the config's replicas need."""
    name, counts = options.network, options.nodes
    n, local_size = getattr(options, "num_replicas", None), getattr(options, "local_size", None)
    if name in network.PRESETS and not name.startswith("dtfm_case"):
        size = options.devices_per_node or local_size or 1
        counts = counts or [_nodes_for(n, size, name)]
        return [network.preset(name, count, size) for count in counts]
    if name in network.PRESETS:
        whole = network.preset(name, counts and counts[0], options.devices_per_node)
    elif Path(name).is_file():
        whole = network.load(name)
    else:
        raise ConfigError(
            f"--network {name!r} is neither a file nor a preset ({', '.join(network.PRESETS)}); "
            "network --save writes a file from a preset",
            field="--network",
            value=name,
        )
    if counts:
        if max(counts) > whole.num_nodes:
            raise ConfigError(
                f"--nodes {max(counts)}: the network in {name} has {whole.num_nodes} nodes",
                field="--nodes",
                value=max(counts),
            )
        return [whole.take(np.flatnonzero(whole.node < count)) for count in counts]
    if n is None:
        return [whole]
    if n > whole.num_devices:
        raise ConfigError(
            f"num_replicas {n} do not fit on a network of {whole.num_devices} devices; the planner "
            "counts one replica per device",
            field="num_replicas",
            value=n,
        )
    return [whole.take(range(n))]


def _nodes_for(num_replicas: int | None, size: int, name: str) -> int:
    """How many nodes of this size the replicas of a config fill."""
    if num_replicas is None:
        raise ConfigError(f"{name} needs --nodes N (machines)", field="--nodes")
    if num_replicas % size:
        raise ConfigError(
            f"{num_replicas} replicas do not fill nodes of {size} devices; give --devices_per_node",
            field="--devices_per_node",
            value=size,
        )
    return num_replicas // size


def speeds_of(path: str | None, num_devices: int) -> np.ndarray:
    """(n,) the relative speed that a JSON file has for every device; ones without a file.

    Raises:
      DataError: the file is not a list of as many numbers.
    """
    if not path:
        return np.ones(num_devices)
    numbers = read_json(path)
    good = isinstance(numbers, list) and all(is_real(x, 1e-3) and x <= 1e3 for x in numbers)
    if not good or len(numbers) != num_devices:
        raise DataError(
            f"{path} must be a list of speeds from 0.001 to 1000, one for each of {num_devices} "
            "devices"
        )
    return np.array(numbers, float)


def search_of(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a search."""
    return {"time_limit_s": options.time_limit_s, "progress": sys.stderr.isatty()}
