"""Before a long run: check that all processes agree, and measure the links between them.

    srun --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 \\
        decent-jax preflight --config configs/gpt2_openwebtext.py --save network.json

Start it like train.py, on the same hosts: with `srun`, `mpirun` or Kubernetes, or with
--config.cluster.coordinator, num_processes and process_id. The command checks that all processes
have the same versions, the same config, and the same kind and number of devices. Then it measures
the latency and bandwidth from the first device of every process to the first device of every other,
and saves them for `decent-jax planner ... --network network.json`.

For peers and pipelines, start it once: it measures the links between the nodes of the Ray cluster
in --config.ray.address ("auto" or HOST:PORT).
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decent_jax.cluster import preflight, start, watch
from decent_jax.ground.command_line import Parser, check_replaceable, command
from decent_jax.ground.errors import ConfigError, PeerLost
from decent_jax.ground.fields import Field, value_of
from decent_jax.planner import network
from decent_jax.train import config as config_lib
from decent_jax.train import flags
from decent_jax.train.settings import Config

FLAGS = {
    "megabytes": Field(8.0, "size of the bandwidth message, in MB", at_least=0.01, at_most=10_000),
    "repeats": Field(7, "number of measurements per link", at_least=1, at_most=10_000),
}


@command("preflight")
def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 0, 2 if processes or flags are wrong, 75 if a process was lost."""
    try:
        options, config = _parse(arguments)
        with watch.lost_peers_told():
            _run(options, config)
    except PeerLost as error:
        print(f"decent-jax preflight: {error}", file=sys.stderr)
        return error.code
    return 0


def _parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Config]:
    parser = Parser(prog="decent-jax preflight", description=__doc__)
    parser.add_argument("--config", metavar="FILE[:ARGUMENTS]", help="config of the planned run")
    saved = "file for the measured network (default: %(default)s)"
    parser.add_argument("--save", metavar="FILE", default="network.json", help=saved)
    parser.add_fields(FLAGS)
    options, rest = parser.parse_known_args(arguments)
    check_replaceable(options.save, "--save")
    if not Path(options.save).absolute().parent.is_dir():
        raise ConfigError.about("--save", options.save, "must be in an existing folder")
    if options.config:
        config = config_lib.parse(flags.override_all(flags.load(options.config), rest))
        config_lib.check_run(config)
        return options, config
    fields = flags.override_all(config_lib.default_config(), rest)
    fields.num_replicas = max(fields.cluster.num_processes, 1)  # accept any number of processes
    config = config_lib.parse(fields)
    start.check(config)
    return options, config


def _run(options: argparse.Namespace, config: Any) -> None:
    size = int(options.megabytes * 1e6), options.repeats
    if address := value_of(config, "ray.address"):
        from decent_jax.actors import ray_cluster

        ray_cluster.prepare(address)
        from decent_jax.pipelines import links

        _report(options, *links.measure(config, *size))
        return
    started = start.start(config, Path(options.save).absolute().parent)
    if jax.process_count() == 1:
        raise ConfigError(f"{started}: there is nothing to compare or to measure")
    devices = preflight.check_devices(start.hosts())
    name_of = dict(zip(jax.devices(), start.device_names(jax.devices()), strict=True))
    names = [name_of[device] for device in devices]
    quiet = jax.process_index() != 0
    if not quiet:
        print(f"{started}\n{preflight.agreement(config.by_name, len(devices))}", flush=True)
    measured = preflight.measure(devices, start.hosts(), *size, quiet)
    if not quiet:
        _report(options, *measured, names)


def _report(
    options: argparse.Namespace,
    latency: np.ndarray,
    bandwidth: np.ndarray,
    ways: str,
    names: list[str],
) -> None:
    print(f"{preflight.report(latency, bandwidth, names)}\n{ways}")
    print(save(latency, bandwidth, names, options.save))


def save(latency_s: np.ndarray, bandwidth: np.ndarray, names: list[str], path: str) -> str:
    """Write the network for the planner; returns a line for the log.

    The planner's links are symmetric, so each gets the numbers of its slower direction.
    """
    hosts = [name.rpartition("/")[0] for name in names]
    node = [list(dict.fromkeys(hosts)).index(host) for host in hosts]
    machines = network.from_matrices(latency_s, bandwidth, node=node, names=names, symmetrize=True)
    machines.save(path)
    return f"saved {path} for decent-jax planner; both directions of a link get the slower speed"
