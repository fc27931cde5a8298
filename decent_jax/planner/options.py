"""The flags of the planner's commands: a network, a model, the compute time of a step.

Only `complete` imports the trainer and jax, and only if a config file is given.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.ground import command_line
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import shown, split_outside_brackets
from decent_jax.ground.json_files import Json, is_real
from decent_jax.ground.run_folder import read_metrics
from decent_jax.planner import network
from decent_jax.planner.network import Network
from decent_jax.planner.recommend import Choice, config_fields
from decent_jax.planner.runtime import CODECS, CONSTANT, AllReduce, LogNormal, Workload, fit
from decent_jax.topology import NAMES

FORWARD = 1 / 3  # share of the forward pass: the backward pass multiplies twice as often
ROW_LENGTH = 768.0  # parameters per row of a matrix without a config: GPT-2 small's width
SHORTEST_S, LONGEST_S = 1e-9, 1e5  # bounds of a step: a processor's cycle, a day


# --- flags --------------------------------------------------------------------------------------


def number(low: float, high: float, kind: type = float) -> Callable[[str], object]:
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


def several(parse: Callable[[str], object]) -> Callable[[str], list]:
    """The ``type`` of a flag: a comma-separated list of values."""
    return lambda text: [parse(part) for part in text.split(",")]


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
MUST = "required"


# Name, metavar, type, default (one other than None is added to the help), help.
Flag = tuple[str, str, Callable[[str], object], object, str]
NETWORK = (
    ("network", "NAME|FILE", str, MUST, "a preset, or a file of a measured network (JSON)"),
    ("nodes", "N", COUNT, None, "number of nodes of a preset; of a file, the first N"),
    ("devices_per_node", "L", COUNT, None, "of a preset (default: config.replicas_per_node)"),
)
WORKLOAD = (
    ("parameters", "P", PARAMETERS, None, "number of parameters of the model"),
    ("config", "FILE[:ARGUMENTS]", str, None, "config file of train.py"),
    ("compute_s", "S", SECONDS, None, "forward and backward pass of one replica, in seconds"),
    ("sigma", "S", number(0, 5), 0.0, "lognormal variation of compute; 0.1 is about 10%%"),
    ("trace", "DIR|FILE", str, None, "--workdir of a run that gives compute_s and sigma"),
)
SEARCH = (
    ("plan", "FILE.json", command_line.output_file, None, "file to write the plan to"),
    ("time_limit_s", "S", SECONDS, 5.0, "time limit of the search, in seconds"),
)
SCHEDULES = ", ".join(NAMES)
STAGES = "pipeline stages in data-parallel groups (DT-FM)"  # a group of flags of `place`
FLAGS: dict[str, tuple[Flag, ...]] = {
    "predict": (
        *NETWORK,
        *WORKLOAD,
        (
            "out",
            "FILE.png",
            command_line.picture_file,
            None,
            "Gantt chart to draw: a few steps of some algorithms",
        ),
    ),
    "recommend": (
        *NETWORK,
        *WORKLOAD,
        ("schedules", "A,B", split_outside_brackets, None, f"some of {SCHEDULES} (default: all)"),
        ("mix_every", "H,H", several(number(1, 1000, int)), "1", "steps per round to try"),
        ("codecs", "W,W", several(one_of(*CODECS)), "float32", f"some of {', '.join(CODECS)}"),
        *SEARCH,
    ),
    "place": (
        *NETWORK,
        *SEARCH,
        ("parameters", "P", PARAMETERS, MUST, "number of parameters of the model"),
        ("schedule", "NAME", str, "one_peer_exp", f"one of {SCHEDULES}"),
        ("compute_s", "S", number(0, LONGEST_S), 0.0, "compute per replica and step, in seconds"),
    ),
    STAGES: (
        ("stages", "K", COUNT, None, "number of pipeline stages"),
        ("replicas", "R", COUNT, None, "number of pipelines, which take K x R devices"),
        ("pipeline_bytes", "B", number(0, 1e15), None, "bytes per step from a stage to the next"),
    ),
}


def add(parser: Any, flags: Iterable[Flag]) -> None:
    """Adds flags to a parser or to an argument group."""
    for name, metavar, kind, default, words in flags:
        how: Json = {"required": True} if default is MUST else {"default": default}
        if default not in (None, MUST):
            words += " (default: %(default)s)"
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, help=words, **how)


# --- values from the flags ----------------------------------------------------------------------


def complete(options: argparse.Namespace) -> None:
    """Fills in missing flags of the model and of the replicas from ``--config``."""
    options.base = options.num_replicas = options.replicas_per_node = None
    options.late_parameters, options.row_length = 0, ROW_LENGTH
    if options.config:
        from decent_jax import tasks
        from decent_jax.train import config as config_lib
        from decent_jax.train import flags

        options.base = config = config_lib.parse(flags.load(options.config))
        count = getattr(tasks.find(config.task), "count_parameters", None)
        if count is None:
            why = "must be one that counts its parameters; give --parameters and --nodes instead"
            raise ConfigError.about("task", config.task, why)
        if options.parameters is None:
            options.parameters, options.late_parameters, num_rows = count(config)
            options.row_length = options.parameters / num_rows
        options.num_replicas, options.replicas_per_node = (
            config.num_replicas,
            config.replicas_per_node,
        )
    if options.parameters is None:
        raise ConfigError("give the model: --parameters P, or --config FILE", field="--parameters")


def choose_method(options: argparse.Namespace) -> None:
    """Sets ``algorithm``, ``combine`` and ``optimizer`` of the choices, from ``--config`` if given.

    For a config of all_reduce, it chooses the method that gossips with the same optimizer.
    """
    options.algorithm, options.combine, options.optimizer = "accum_adam", "awc", ""
    if options.base is None:
        return
    from decent_jax.optim import METHODS
    from decent_jax.train import algorithm, config

    name = options.base.algorithm
    if options.base.trainer != config.SYNCHRONOUS:
        why = "must have the synchronous trainer; peers and pipelines follow no recommendation"
        raise ConfigError.about("--config", options.config, why)
    if name not in METHODS:
        raise ConfigError.about("algorithm", name, f"must be one of {', '.join(METHODS)}")
    optimizer = options.optimizer = algorithm.optimizer_name(options.base)
    if name == "all_reduce":
        gossips = {"adam": "decentralized_adam", "accum_adam": "accum_adam"}
        name = gossips.get(optimizer, "decentralized_sgd")
    options.algorithm = name
    options.combine = "awc" if "awc" in METHODS[name].orders else "atc"


def fields_of(options: argparse.Namespace, choice: Choice) -> Json:
    """The config fields that select this choice, without those that ``--config`` already has."""
    fields = config_fields(choice, options.algorithm, options.optimizer)
    has = {} if options.base is None else options.base.by_name
    return {name: value for name, value in fields.items() if value != has.get(name)}


def accepted(options: argparse.Namespace, choice: Choice) -> bool:
    """Whether ``train.py`` accepts ``--config`` with this choice, whether or not its data exist.

    Raises:
      ConfigError: `train.py` refuses ``--config`` even if the choice is all_reduce.
    """
    from decent_jax.train import config as config_lib

    config = config_lib.changed(options.base, **fields_of(options, choice))
    try:
        config_lib.check_run(config)
    except ConfigError as error:
        if error.field.startswith("data."):  # the data need not exist yet
            return True
        if isinstance(choice.algorithm, AllReduce):
            raise ConfigError(f"--config {options.config}: {error}", field=error.field) from None
        return False
    return True


def workload_of(options: argparse.Namespace) -> Workload:
    """The workload of one replica's step, from the flags."""
    compute_s, variation = options.compute_s, LogNormal(options.sigma)
    if options.trace:
        if compute_s is not None or variation != CONSTANT:
            raise ConfigError(
                "--trace replaces --compute_s and --sigma; leave them out", field="--trace"
            )
        compute_s, variation = measured(options.trace)
    elif compute_s is None:
        raise ConfigError("give the compute time: --compute_s S, or --trace", field="--compute_s")
    return Workload(
        4 * options.parameters,
        FORWARD * compute_s,
        (1 - FORWARD) * compute_s,
        compute=variation,
        late_bytes=4 * options.late_parameters,
        row_length=options.row_length,
    )


def measured(path: str) -> tuple[float, LogNormal]:
    """Mean, in seconds, and variation of the step times in a run's metrics.jsonl.

    The first row is left out, because it includes compilation.

    Raises:
      ConfigError: no such file, or fewer than three rows with a positive ``perf/step_time_s``.
    """
    try:
        rows = [(row["step"], row.get("perf/step_time_s")) for row in read_metrics(path)]
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror or error}", field="--trace") from None
    rows = [(step, seconds) for step, seconds in rows if is_real(seconds, SHORTEST_S, LONGEST_S)]
    if len(rows) < 3:
        why = f"has {len(rows)} rows with perf/step_time_s, but needs at least 3 (lower log.every)"
        raise ConfigError(f"--trace {path} {why}", field="--trace", value=path)
    steps, seconds = np.array(rows).T
    return fit(seconds[1:], max(1, int(np.median(np.diff(steps)))))


def network_of(options: argparse.Namespace) -> Network:
    """The network of the flags; without ``--nodes``, a preset is as large as the config needs."""
    name, nodes = options.network, options.nodes
    n, replicas_per_node = (
        getattr(options, "num_replicas", None),
        getattr(options, "replicas_per_node", None),
    )
    if name in network.DTFM_CASES:
        whole = network.preset(name, nodes, options.devices_per_node)
    elif name in network.PRESETS:
        size = options.devices_per_node or replicas_per_node or 1
        return network.preset(name, nodes or _nodes_for(n, size, name), size)
    elif Path(name).is_file():
        whole = network.load(name)
    else:
        known = ", ".join(network.PRESETS)
        raise ConfigError.about("--network", name, f"must be a file or a preset ({known})")
    if nodes:
        if nodes > whole.num_nodes:
            raise ConfigError.about("--nodes", nodes, f"must be at most {whole.num_nodes} here")
        return whole.take(np.flatnonzero(whole.node < nodes))
    if n is not None and n > whole.num_devices:
        why = f"must be at most the network's {whole.num_devices} devices, one per replica"
        raise ConfigError.about("num_replicas", n, why)
    return whole if n is None else whole.take(range(n))


def _nodes_for(num_replicas: int | None, size: int, name: str) -> int:
    """The number of nodes of this size for the replicas of a config."""
    if num_replicas is None:
        raise ConfigError(f"{name} needs --nodes N (machines)", field="--nodes")
    if num_replicas % size:
        why = f"must divide the config's {num_replicas} replicas"
        raise ConfigError.about("--devices_per_node", size, why)
    return num_replicas // size


def search_of(options: argparse.Namespace) -> Json:
    """The keyword arguments of a search, from the flags."""
    return {"time_limit_s": options.time_limit_s, "progress": sys.stderr.isatty()}
