"""Flags of the planner's commands: a network, a model and what a step computes.

Only `model_of`, and only where a config file is given, imports jax: it counts parameters.
"""

import dataclasses
import importlib
import sys
from pathlib import Path

import numpy as np

from decent_jax.errors import ConfigError
from decent_jax.planner import compute_times, network, outputs, predict
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Workload
from decent_jax.topology import plan_file

FORWARD = 1 / 3  # of forward and backward: the backward pass multiplies twice as often


@dataclasses.dataclass(frozen=True)
class Model:
    """What the planner reads from a config or from flags.

    late_parameters: those whose gradient is complete only at the end (a tied embedding).
    num_replicas, local_size: None where only the network says.
    algorithm: of the config.
    """

    parameters: float
    late_parameters: float = 0.0
    num_replicas: int | None = None
    local_size: int | None = None
    algorithm: str = "accum_adam"


def add_network(parser, many: bool = False) -> None:
    """``--network``, ``--nodes``, ``--devices_per_node``; ``many``: several numbers of nodes."""
    parser.add_argument(
        "--network",
        required=True,
        metavar="NAME|FILE",
        help="a preset, or the JSON or .npz of a measured network",
    )
    parser.add_argument(
        "--nodes",
        metavar="N,N" if many else "N",
        help="machines of a preset; of a file the first so many are taken (all)",
    )
    parser.add_argument(
        "--devices_per_node", type=int, metavar="L", help="of a preset; default: config.local_size"
    )


def add_workload(parser) -> None:
    """The model, and the time that a replica computes."""
    parser.add_argument("--config", metavar="FILE[:ARGUMENTS]", help="config file of train.py")
    parser.add_argument("--parameters", type=float, metavar="P", help="of the model")
    parser.add_argument(
        "--late_parameters",
        type=float,
        metavar="P",
        help="of them, those whose gradient is complete only at the end of the backward pass: a "
        "tied embedding, which all-reduce cannot hide (0, or from --config)",
    )
    parser.add_argument(
        "--compute_s", type=float, metavar="S", help="forward and backward of one replica, seconds"
    )
    parser.add_argument(
        "--update_s", type=float, default=0.0, metavar="S", help="optimizer, seconds (0)"
    )
    parser.add_argument(
        "--trace",
        metavar="DIR|FILE",
        help="--workdir of a run without communication: its step times instead of --compute_s "
        "and --sigma",
    )
    parser.add_argument(
        "--sigma",
        type=float,
        default=0.0,
        metavar="S",
        help="compute times are lognormal with this spread: 0.1 is about 10%% (0)",
    )
    parser.add_argument(
        "--bucket_bytes",
        type=float,
        metavar="B",
        help="of all-reduce's gradients; inf: all after the backward pass (whichever is fastest)",
    )


def model_of(options) -> Model:
    """From ``--config``, ``--parameters`` and ``--late_parameters``; flags have the last word."""
    model = _model_of_config(options.config) if options.config else None
    if options.parameters is not None:
        if not options.parameters >= 1:
            raise ConfigError(f"--parameters must be at least 1, got {options.parameters:g}")
        late = 0.0
        model = dataclasses.replace(
            model or Model(0), parameters=options.parameters, late_parameters=late
        )
    if model is None:
        raise ConfigError("give the model: --parameters P, or --config FILE")
    if options.late_parameters is not None:
        if not 0 <= options.late_parameters <= model.parameters:
            raise ConfigError(
                f"--late_parameters must be between 0 and the model's {model.parameters:g}, got "
                f"{options.late_parameters:g}"
            )
        model = dataclasses.replace(model, late_parameters=options.late_parameters)
    return model


def _model_of_config(path: str) -> Model:
    from decent_jax.train import flags

    config = flags.load(path)
    if config.task != "language_modeling":
        raise ConfigError(
            f"the planner counts the parameters of language models; for the task {config.task!r} "
            "give --parameters and the size of the network instead of --config"
        )
    task = importlib.import_module("decent_jax.tasks.language_modeling")
    gpt2 = importlib.import_module("decent_jax.models.gpt2")
    vocab_size = config.model.vocab_size
    if not vocab_size and config.data.path == task.STDLIB:
        vocab_size = 256
    if not vocab_size:
        raise ConfigError(
            "model.vocab_size of the config comes from the data; give --parameters instead"
        )
    shape = task.model_config(config, vocab_size)
    return Model(
        gpt2.num_params(shape),
        shape.vocab_size * shape.width,
        config.num_replicas,
        config.local_size,
        config.algorithm,
    )


def workload_of(options, model: Model, compute_share: float = 1.0) -> Workload:
    """The step of one replica; ``compute_share`` of the compute time that was given."""
    distribution = compute_times.CONSTANT
    if options.trace:
        if options.compute_s is not None or options.sigma:
            raise ConfigError("--trace says compute time and variation; leave the others out")
        found = compute_times.fit(*compute_times.read_trace(options.trace))
        compute_s, distribution = found.mean_s - options.update_s, found.distribution
        if not compute_s > 0:
            raise ConfigError(
                f"--update_s must be below the {found.mean_s:.4g} s of a step of --trace, got "
                f"{options.update_s:g}"
            )
    elif options.compute_s is not None:
        compute_s = options.compute_s
        if not compute_s > 0:
            raise ConfigError(
                f"--compute_s, forward and backward, must be above 0, got {compute_s:g}"
            )
        if not 0 <= options.sigma < 5:
            raise ConfigError(f"--sigma must be in [0, 5), got {options.sigma}")
        if options.sigma:
            distribution = compute_times.LogNormal(options.sigma)
    else:
        raise ConfigError("give the compute time: --compute_s SECONDS, or --trace DIR")
    if options.update_s < 0:
        raise ConfigError(f"--update_s must not be negative, got {options.update_s:g}")
    if options.bucket_bytes is not None and not options.bucket_bytes > 0:
        raise ConfigError(f"--bucket_bytes must be above 0, got {options.bucket_bytes:g}")
    compute_s *= compute_share
    return Workload(
        4 * model.parameters,
        FORWARD * compute_s,
        (1 - FORWARD) * compute_s,
        options.update_s,
        distribution,
        late_bytes=4 * model.late_parameters,
    )


def one_network(options) -> Network:
    """The network of flags alone."""
    return networks_of(options, Model(0))[0]


def networks_of(options, model: Model, alone: bool = False) -> list[Network]:
    """One for each number of ``--nodes``; left out, what the config's replicas need.

    alone: for exactly ``model.num_replicas`` replicas, whatever ``--nodes`` says.
    """
    counts = None if alone or not options.nodes else _counts(options.nodes)
    if options.network in network.PRESETS:
        return _preset(options, model, counts)
    if not Path(options.network).is_file():
        raise ConfigError(
            f"--network {options.network!r} is neither a file nor a preset "
            f"({', '.join(network.PRESETS)}); network --save writes a file from a preset"
        )
    whole = network.load(options.network)
    if counts:
        if max(counts) > whole.num_nodes:
            raise ConfigError(
                f"--nodes {options.nodes}: the network in {options.network} has "
                f"{whole.num_nodes} nodes"
            )
        return [whole.take(np.flatnonzero(whole.node < count)) for count in counts]
    return [_of_size(whole, model.num_replicas)]


def _preset(options, model: Model, counts) -> list[Network]:
    if options.network.startswith("dtfm_case"):
        if counts or options.devices_per_node:
            raise ConfigError(f"{options.network} has 64 devices; leave the sizes out")
        return [_of_size(network.preset(options.network), model.num_replicas)]
    size = options.devices_per_node
    if size is None:
        size = model.local_size or 1
    if size < 1:
        raise ConfigError(f"--devices_per_node must be at least 1, got {size}")
    if counts is None:
        if model.num_replicas is None:
            raise ConfigError(f"{options.network} needs --nodes N (machines)")
        if model.num_replicas % size:
            raise ConfigError(
                f"{model.num_replicas} replicas do not fill nodes of {size} devices; give "
                "--devices_per_node"
            )
        counts = [model.num_replicas // size]
    return [network.preset(options.network, count, size) for count in counts]


def _of_size(whole: Network, num_replicas: int | None) -> Network:
    """The first devices of a network, a replica each."""
    if num_replicas is None or num_replicas == whole.num_devices:
        return whole
    if num_replicas > whole.num_devices:
        raise ConfigError(
            f"{num_replicas} replicas do not fit on a network of {whole.num_devices} devices; "
            "the planner counts one replica a device"
        )
    return whole.take(range(num_replicas))


def names_of(text: str) -> list[str]:
    """Names between commas, which may have parameters of their own.

    >>> names_of("ring,hierarchical(complete, one_peer_exp), star")
    ['ring', 'hierarchical(complete, one_peer_exp)', 'star']
    """
    names, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [name.strip() for name in names]


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ConfigError(f"--nodes takes numbers of machines such as 2 or 2,4,8, got {text!r}")
    return counts


def add_search(parser) -> None:
    """``--plan``, and the limits of the search that makes it."""
    parser.add_argument(
        "--plan", type=outputs.file, metavar="FILE.json", help="write the plan for train.py"
    )
    parser.add_argument(
        "--time_limit_s", type=float, default=5.0, metavar="S", help="of the search (5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the search (0)")


def search_of(options) -> dict:
    """Arguments of a search."""
    if not options.time_limit_s > 0:
        raise ConfigError(f"--time_limit_s must be above 0, got {options.time_limit_s:g}")
    if options.seed < 0:
        raise ConfigError(f"--seed must not be negative, got {options.seed}")
    return {
        "time_limit_s": options.time_limit_s,
        "seed": options.seed,
        "progress": sys.stderr.isatty(),
    }


def write_plan(options, network, placed, mix_every: int, expected: dict) -> None:
    """The file of ``--plan``: replica i on device ``placed.order[i]``."""
    devices = tuple(network.names[device] for device in placed.order)
    plan_file.Plan(devices, placed.schedule, mix_every, expected).save(options.plan)
    print(f"\n{options.plan}: train.py --config.cluster.plan={options.plan} follows it")


def describe(whole: Network) -> str:
    """A network in a few lines: how fast inside and between nodes."""
    same_node = whole.node[:, None] == whole.node
    off_diagonal = ~np.eye(whole.num_devices, dtype=bool)
    lines = [
        f"{whole.num_devices} devices in {whole.num_nodes} nodes, "
        f"{predict.local_size(whole)} consecutive devices a node"
        if predict.local_size(whole) > 1
        else f"{whole.num_devices} devices in {whole.num_nodes} nodes"
    ]
    for words, pairs in (
        ("inside a node", same_node & off_diagonal),
        ("between nodes", ~same_node),
    ):
        if pairs.any():
            latency = 1e6 * whole.latency_s[pairs]
            bandwidth = whole.bandwidth_bytes_per_s[pairs] / network.BYTES_PER_GBIT
            lines.append(
                f"{words}: latency {_span(latency)} us, bandwidth {_span(bandwidth)} Gbit/s"
            )
    nic = whole.nic_bytes_per_s / network.BYTES_PER_GBIT
    if np.isfinite(nic).any():
        lines.append(f"network card of a node: {_span(nic[np.isfinite(nic)])} Gbit/s")
    return "\n".join(lines)


def _span(values: np.ndarray) -> str:
    low, high = values.min(), values.max()
    return f"{low:.4g}" if np.isclose(low, high) else f"{low:.4g} to {high:.4g}"
