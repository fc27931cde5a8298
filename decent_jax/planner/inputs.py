"""What the planner's flags say: a network, a model, and the compute of a step.

Only `complete`, and only where a config file is given, imports the trainer and jax.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.json_files import is_real, read_json
from decent_jax.planner import compute_times, network, predict
from decent_jax.planner.network import Network
from decent_jax.planner.runtime import Workload

FORWARD = 1 / 3  # of forward and backward: the backward pass multiplies twice as often


def complete(options: argparse.Namespace) -> None:
    """Take from ``--config`` what no flag says: the model, the replicas, and the algorithm."""
    if options.config:
        from decent_jax import tasks
        from decent_jax.train import flags

        config = flags.load(options.config)
        count = getattr(tasks.find(config.task), "count_parameters", None)
        if count is None:
            raise ConfigError(
                f"the task {config.task!r} does not count its parameters for the planner; give "
                "--parameters and the size of the network instead of --config"
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


def workload_of(options: argparse.Namespace, compute_share: float = 1.0) -> Workload:
    """The step of one replica, with this share of the compute time that the flags give."""
    distribution = compute_times.CONSTANT
    if options.trace:
        if options.compute_s is not None or options.sigma:
            raise ConfigError("--trace says compute time and variation; leave the others out")
        times_s, steps_per_time = compute_times.read_trace(options.trace)
        try:
            found = compute_times.fit(times_s, steps_per_time)
        except ValueError as error:
            raise ConfigError(f"--trace {options.trace}: {error}") from None
        compute_s, distribution = found.mean_s - options.update_s, found.distribution
        if not compute_s > 0:
            raise ConfigError(
                f"--update_s must be below the {found.mean_s:.4g} s of a step of --trace, got "
                f"{options.update_s:g}"
            )
    elif options.compute_s is not None:
        compute_s = options.compute_s
        if options.sigma:
            distribution = compute_times.LogNormal(options.sigma)
    else:
        raise ConfigError("give the compute time: --compute_s SECONDS, or --trace DIR")
    compute_s *= compute_share
    return Workload(
        4 * options.parameters,
        FORWARD * compute_s,
        (1 - FORWARD) * compute_s,
        options.update_s,
        distribution,
        late_bytes=4 * (options.late_parameters or 0.0),
    )


def networks_of(options: argparse.Namespace) -> list[Network]:
    """One for each number of ``--nodes``; without the flag, what the config's replicas need."""
    name, counts, n = options.network, options.nodes, options.num_replicas
    if name in network.PRESETS and not name.startswith("dtfm_case"):
        size = options.devices_per_node or options.local_size or 1
        counts = counts or [_nodes_for(n, size, name)]
        return [network.preset(name, count, size) for count in counts]
    if name in network.PRESETS:
        whole = network.preset(name, counts and counts[0], options.devices_per_node)
    elif Path(name).is_file():
        whole = network.load(name)
    else:
        raise ConfigError(
            f"--network {name!r} is neither a file nor a preset ({', '.join(network.PRESETS)}); "
            "network --save writes a file from a preset"
        )
    if counts:
        if max(counts) > whole.num_nodes:
            raise ConfigError(
                f"--nodes {max(counts)}: the network in {name} has {whole.num_nodes} nodes"
            )
        return [whole.take(np.flatnonzero(whole.node < count)) for count in counts]
    if n is None:
        return [whole]
    if n > whole.num_devices:
        raise ConfigError(
            f"{n} replicas do not fit on a network of {whole.num_devices} devices; the planner "
            "counts one replica per device"
        )
    return [whole.take(range(n))]


def _nodes_for(num_replicas: int | None, size: int, name: str) -> int:
    """How many nodes of this size the replicas of a config fill."""
    if num_replicas is None:
        raise ConfigError(f"{name} needs --nodes N (machines)")
    if num_replicas % size:
        raise ConfigError(
            f"{num_replicas} replicas do not fill nodes of {size} devices; give --devices_per_node"
        )
    return num_replicas // size


def device_numbers(
    path: str | None, what: str, least: float, most: float, num_devices: int
) -> np.ndarray | None:
    """(n,) the number that a JSON file has for every device; None without a file.

    Raises:
      DataError: the file is not a list of as many numbers.
    """
    if not path:
        return None
    numbers = read_json(path)
    good = isinstance(numbers, list) and all(is_real(x, least) and x <= most for x in numbers)
    if not good or len(numbers) != num_devices:
        raise DataError(
            f"{path} must be a list of {what} from {least:g} to {most:g}, one for each of "
            f"{num_devices} devices"
        )
    return np.array(numbers, float)


def search_of(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a search."""
    limits = {"time_limit_s": options.time_limit_s, "seed": options.seed}
    return limits | {"progress": sys.stderr.isatty()}


def describe(whole: Network) -> str:
    """A network in a few lines: how fast inside and between nodes."""
    same_node = whole.node[:, None] == whole.node
    off_diagonal = ~np.eye(whole.num_devices, dtype=bool)
    size = predict.local_size(whole)
    regular = f", {size} consecutive devices per node" if size > 1 else ""
    lines = [f"{whole.num_devices} devices in {whole.num_nodes} nodes{regular}"]
    for words, pairs in (
        ("inside a node", same_node & off_diagonal),
        ("between nodes", ~same_node),
    ):
        if pairs.any():
            latency = _span(1e6 * whole.latency_s[pairs])
            bandwidth = _span(whole.bandwidth_bytes_per_s[pairs] / network.BYTES_PER_GBIT)
            lines.append(f"{words}: latency {latency} us, bandwidth {bandwidth} Gbit/s")
    nic = whole.nic_bytes_per_s / network.BYTES_PER_GBIT
    if np.isfinite(nic).any():
        lines.append(f"network card of a node: {_span(nic[np.isfinite(nic)])} Gbit/s")
    return "\n".join(lines)


def _span(values: np.ndarray) -> str:
    low, high = values.min(), values.max()
    return f"{low:.4g}" if np.isclose(low, high) else f"{low:.4g} to {high:.4g}"
