"""Before a long run: do all processes agree, and how fast are the links between them?

    srun --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 \\
        python -m decent_jax.preflight --config configs/gpt2_openwebtext.py --save network.json

Start it as train.py will be started, on the same hosts: with `srun`, `mpirun` or Kubernetes, or
with --config.cluster.coordinator, num_processes and process_id. Versions, the config, and kind and
number of devices have to be the same on all processes. Then it measures latency and bandwidth from
every process to every other, between the first device of each, and saves them for
`python -m decent_jax.planner ... --network network.json`.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from decent_jax.cluster import rendezvous, watch
from decent_jax.errors import PEER_LOST, ConfigError, PeerLost
from decent_jax.planner import network
from decent_jax.text import format_number
from decent_jax.train import config as config_lib
from decent_jax.train import flags

_WIDEST = 16  # devices in a matrix that is printed


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(f"{message} ({self.prog} --help shows how)")


def main(arguments: list[str] | None = None) -> int:
    """0; 2 where processes do not agree or a flag is wrong; 75 where another process was lost."""
    try:
        options, config = _parse(arguments)
        _run(options, config)
    except (ConfigError, OSError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    except PeerLost as error:
        print(f"preflight: {error}", file=sys.stderr)
        return PEER_LOST
    return 0


def _parse(arguments: list[str] | None) -> tuple[argparse.Namespace, ConfigDict]:
    parser = _Parser(
        prog="python -m decent_jax.preflight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE[:ARGUMENTS]", help="of the run that is to come")
    parser.add_argument("--save", metavar="FILE", default="network.json", help="%(default)s")
    parser.add_argument(
        "--megabytes", type=float, default=8.0, help="of a large message (default %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="measurements of each link (default %(default)s)"
    )
    options, rest = parser.parse_known_args(arguments)
    if not 0.01 <= options.megabytes <= 10_000:
        raise ConfigError(f"--megabytes must be from 0.01 to 10000, got {options.megabytes:g}")
    if options.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {options.repeats}")
    if not Path(options.save).absolute().parent.is_dir():
        raise ConfigError(f"--save {options.save}: there is no such folder")
    if options.config:
        config = flags.override_all(flags.load(options.config), rest)
        config_lib.validate(config)
        return options, config
    config = flags.override_all(config_lib.default_config(), rest)
    config.num_replicas = max(config.cluster.num_processes, 1)  # any number of processes will do
    config_lib.check_cluster(config)
    return options, config


def _run(options: argparse.Namespace, config: ConfigDict) -> None:
    import jax

    from decent_jax.cluster import start as cluster

    with cluster.lost_peers_told():
        started = cluster.start(config)
        if jax.process_count() == 1:
            raise ConfigError(f"{started}: there is nothing to compare or to measure")
        devices = _check_devices(cluster.hosts())
        names = cluster.device_names(jax.devices())
        by_device = dict(zip(jax.devices(), names, strict=True))
        names = [by_device[device] for device in devices]
        quiet = jax.process_index() != 0
        if not quiet:
            print(f"{started}\n{_agreement(config, len(devices))}", flush=True)
        latency, bandwidth = measure(devices, int(options.megabytes * 1e6), options.repeats, quiet)
    if not quiet:
        print(report(latency, bandwidth, names))
        print(save(latency, bandwidth, names, options.save))


def _check_devices(hosts: list[str]) -> list:
    """The first device of every process, where all processes have the same devices."""
    import jax

    own = [jax.local_devices(process_index=p) for p in range(jax.process_count())]
    facts = [
        {"devices": str(len(devices)), "device kind": devices[0].device_kind} for devices in own
    ]
    refusal = rendezvous.difference(facts, hosts)
    if refusal:
        raise ConfigError(refusal)
    return [min(devices, key=lambda device: device.id) for devices in own]


def _agreement(config: ConfigDict, count: int) -> str:
    """What was compared, and is the same everywhere."""
    import jax

    facts = rendezvous.facts_of(config)
    versions = [f"{k} {v}" for k, v in facts.items() if not k.startswith("config.")]
    fields = json.dumps({k: v for k, v in facts.items() if k.startswith("config.")})
    return (
        f"{count} processes agree: {', '.join(versions)}, "
        f"config {hashlib.sha256(fields.encode()).hexdigest()[:12]}, "
        f"{len(jax.local_devices())} x {jax.devices()[0].device_kind} each"
    )


# --- Measuring ----------------------------------------------------------------------------------


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Rounds in which nobody takes part twice, and in all of which everybody sends to everybody.

    >>> rounds_of_pairs(3)
    [[(1, 2)], [(2, 1)], [(0, 2)], [(2, 0)], [(0, 1)], [(1, 0)]]
    """
    # Sit around a table, meet who sits opposite, and let all but the first move on by a chair.
    chairs = list(range(count)) + [None] * (count % 2)
    rounds = []
    for _ in range(len(chairs) - 1):
        half = len(chairs) // 2
        met = zip(chairs[:half], reversed(chairs[half:]), strict=True)
        pairs = [(a, b) for a, b in met if a is not None and b is not None]
        rounds += [pairs, [(b, a) for a, b in pairs]]
        chairs = [chairs[0], chairs[-1], *chairs[1:-1]]
    return rounds


def measure(devices: list, num_bytes: int, repeats: int, quiet: bool):
    """Latency and bandwidth between the devices, one of each process; all processes call it.

    A message goes to the partner, and a short one comes back once it has arrived. The latency is
    half the time that takes when the first is short as well; no two clocks are compared, so it is
    the same both ways. The bandwidth is that of the additional bytes of a long message.

    Returns:
      latency_s, bandwidth_bytes_per_s: (n, n) float64, row i sent by device i; the diagonals are 0
      and infinite. Medians.
    """
    import jax
    from tqdm import tqdm

    index, n = jax.process_index(), len(devices)
    mesh = jax.make_mesh((n,), ("device",), (jax.sharding.AxisType.Auto,), devices=devices)
    rounds = rounds_of_pairs(n)
    seconds = np.zeros((n, 2))  # to every other: of a short message, of a long one
    sizes = (1, max(num_bytes // 4, 2))
    messages = [_message(mesh, size) for size in sizes]
    if not quiet:
        print(f"measuring {n * (n - 1)} links in {len(rounds)} rounds", flush=True)
    # disable=None: a bar on a terminal only
    for pairs in tqdm(rounds, unit="round", disable=True if quiet else None):
        exchange = _exchange(mesh, pairs)
        for k, message in enumerate(messages):
            times = [_time(exchange, message) for _ in range(repeats + 1)][1:]  # first: compiled
            for source, target in pairs:
                if source == index:
                    seconds[target, k] = np.median(times)
    seconds = _all_rows(mesh, seconds)
    short, long = seconds[..., 0], seconds[..., 1]
    latency = np.minimum(short, short.T) / 2
    # Where the noise of a short message hides a long one, the rate is no better than ten times.
    bandwidth = 4 * sizes[1] / np.maximum(long - short, 0.1 * np.maximum(long, 1e-9))
    np.fill_diagonal(bandwidth, np.inf)
    return latency, bandwidth


def _message(mesh, size: int):
    import jax

    sharding = jax.NamedSharding(mesh, jax.P("device"))
    return jax.make_array_from_process_local_data(sharding, np.ones((1, size), np.float32))


def _exchange(mesh, pairs: list[tuple[int, int]]):
    """Compiled: a message along the pairs, then one number back."""
    import jax

    def there_and_back(message):
        arrived = jax.lax.ppermute(message, "device", pairs)
        return jax.lax.ppermute(arrived[:, :1], "device", [(b, a) for a, b in pairs])

    spec = jax.P("device")
    return jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=spec))


def _time(exchange, message) -> float:
    """Seconds until the answer is there."""
    began = time.perf_counter()
    exchange(message).block_until_ready()
    return time.perf_counter() - began


def _all_rows(mesh, row: np.ndarray) -> np.ndarray:
    """(n, ...) float64, what every process calls this with, on all of them."""
    import jax

    bits = np.frombuffer(row[None].astype(np.float64).tobytes(), np.uint32).reshape(1, -1)
    sharding = jax.NamedSharding(mesh, jax.P("device"))
    rows = jax.make_array_from_process_local_data(sharding, bits)
    gather = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(mesh, jax.P()))
    rows = np.asarray(gather(rows).addressable_data(0))
    return np.frombuffer(rows.tobytes(), np.float64).reshape(len(rows), *row.shape)


# --- Reporting ----------------------------------------------------------------------------------


def report(latency_s: np.ndarray, bandwidth: np.ndarray, names: list[str]) -> str:
    """Both matrices as tables, and the worst link of each, for people.

    >>> latency, rate = np.array([[0, 5e-5], [5e-5, 0]]), np.array([[0, 1.25e9], [2.5e9, 0]])
    >>> print(report(latency, rate, ["gpu1/0", "gpu2/0"]))
    latency, us (half a round trip)
                  0     1
    0  gpu1/0     -  50.0
    1  gpu2/0  50.0     -
    bandwidth, Gbit/s (a row sends to the columns)
                  0     1
    0  gpu1/0     -  10.0
    1  gpu2/0  20.0     -
    longest latency: 50.0 us, gpu1/0 -> gpu2/0 (median of all links 50.0 us)
    slowest link: 10.0 Gbit/s, gpu1/0 -> gpu2/0 (median of all links 15.0 Gbit/s)
    """
    microseconds, gbits = latency_s * 1e6, bandwidth / network.BYTES_PER_GBIT
    links = ~np.eye(len(names), dtype=bool)
    lines = []
    if len(names) <= _WIDEST:
        lines += ["latency, us (half a round trip)", *_table(microseconds, names)]
        lines += ["bandwidth, Gbit/s (a row sends to the columns)", *_table(gbits, names)]
    worst = np.unravel_index(np.where(links, microseconds, -1).argmax(), links.shape)
    slowest = np.unravel_index(np.where(links, gbits, np.inf).argmin(), links.shape)
    lines += [
        _worst("longest latency", microseconds, "us", worst, links, names),
        _worst("slowest link", gbits, "Gbit/s", slowest, links, names),
    ]
    return "\n".join(lines)


def _table(matrix: np.ndarray, names: list[str]) -> list[str]:
    cells = [
        ["-" if i == j else format_number(float(value)) for j, value in enumerate(row)]
        for i, row in enumerate(matrix)
    ]
    heads = [f"{i}  {name}" for i, name in enumerate(names)]
    width = max(len(cell) for row in cells for cell in row)
    left = max(map(len, heads))
    lines = [" " * left + "".join(f"  {j:>{width}}" for j in range(len(names)))]
    for head, row in zip(heads, cells, strict=True):
        lines.append(f"{head:<{left}}" + "".join(f"  {cell:>{width}}" for cell in row))
    return lines


def _worst(what, matrix, unit, link, links, names) -> str:
    source, target = link
    return (
        f"{what}: {format_number(float(matrix[link]))} {unit}, {names[source]} -> {names[target]} "
        f"(median of all links {format_number(float(np.median(matrix[links])))} {unit})"
    )


def save(latency_s: np.ndarray, bandwidth: np.ndarray, names: list[str], path: str) -> str:
    """Write the network for the planner; a sentence that says what was written.

    The planner takes links that are as fast both ways. Where they are not, the slower way counts.
    """
    hosts = [name.rpartition("/")[0] for name in names]
    node = [list(dict.fromkeys(hosts)).index(host) for host in hosts]
    note = ""
    try:
        found = network.from_matrices(latency_s, bandwidth, node=node, names=names)
    except ValueError:
        found = network.from_matrices(latency_s, bandwidth, node=node, names=names, symmetrise=True)
        note = "; where the two ways of a link differ, the slower counts for both"
    found.save(path)
    return f"saved {path} for python -m decent_jax.planner{note}"


if __name__ == "__main__":
    code = main()
    if code:
        watch.leave(code)
    sys.exit(code)
