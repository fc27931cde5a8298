"""Checks that all processes agree, and measures the links between them.

`decent-jax preflight` does both before a long run.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax._src.distributed import global_state  # see `decent_jax.cluster.watch`
from tqdm import tqdm

from decent_jax.cluster import rendezvous, sockets, watch
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import format_number

_BYTES_PER_GBIT = 1e9 / 8
_ANOTHER_CARD = (
    "to use another card: NCCL_SOCKET_IFNAME for GPUs, a host's own name in /etc/hosts for CPUs"
)


def check_devices(hosts: list[str]) -> list[jax.Device]:
    """The first device of every process.

    Raises:
      ConfigError: processes differ in the kind or number of their devices.
    """
    processes = [jax.local_devices(process_index=p) for p in range(jax.process_count())]
    descriptions = [
        {"devices": str(len(local)), "device kind": local[0].device_kind} for local in processes
    ]
    refusal = rendezvous.difference(descriptions, hosts)
    if refusal:
        raise ConfigError(refusal)
    return [min(local, key=lambda device: device.id) for local in processes]


def agreement(config: Mapping[str, object], count: int) -> str:
    """A sentence that lists what all ``count`` processes have in common."""
    description = rendezvous.describe(config)
    versions = [f"{k} {v}" for k, v in description.items() if not k.startswith("config.")]
    fields = json.dumps({k: v for k, v in description.items() if k.startswith("config.")})
    return (
        f"{count} processes agree: {', '.join(versions)}, "
        f"config {hashlib.sha256(fields.encode()).hexdigest()[:12]}, "
        f"{len(jax.local_devices())} x {jax.devices()[0].device_kind} each"
    )


# --- Measuring ----------------------------------------------------------------------------------


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs (sender, receiver); together they contain all ordered pairs.

    >>> rounds_of_pairs(3)
    [[(1, 2)], [(2, 1)], [(0, 2)], [(2, 0)], [(0, 1)], [(1, 0)]]
    """
    # The circle method: facing chairs are pairs, then all but the first move on by one.
    chairs = list(range(count)) + [None] * (count % 2)
    rounds = []
    for _ in range(len(chairs) - 1):
        half = len(chairs) // 2
        facing = zip(chairs[:half], reversed(chairs[half:]), strict=True)
        pairs = [(a, b) for a, b in facing if a is not None and b is not None]
        rounds += [pairs, [(b, a) for a, b in pairs]]
        chairs = [chairs[0], chairs[-1], *chairs[1:-1]]
    return rounds


def measure(
    devices: list[jax.Device], hosts: list[str], num_bytes: int, repeats: int, quiet: bool
) -> tuple[np.ndarray, np.ndarray, str]:
    """Measure latency and bandwidth between devices; every process must call this.

    Each device sends a short and then a long message to its partner, which answers both with short
    ones; see `links`.

    Args:
      devices: n devices, one per process.
      hosts: host name of each process.
      num_bytes: size of the long message.
      repeats: number of measurements per link, of which the median is used.
      quiet: whether to print nothing.

    Returns:
      Latencies in seconds and bandwidths in bytes per second, both (n, n) float64 (row i is for
      messages from device i; the diagonals are 0 and infinite), and a text that says how the hosts
      reach each other, see `ways`.
    """
    index, n = jax.process_index(), len(devices)
    mesh = jax.make_mesh((n,), ("device",), (jax.sharding.AxisType.Auto,), devices=devices)
    rounds = rounds_of_pairs(n)
    seconds = np.zeros((n, 2))  # to every other device: of a short message, of a long one
    sizes = (1, max(num_bytes // 4, 2))
    messages = [_message(mesh, size) for size in sizes]
    if not quiet:
        print(f"measuring {n * (n - 1)} links in {len(rounds)} rounds", flush=True)
    # disable=None: show the bar only on a terminal
    for pairs in tqdm(rounds, unit="round", disable=True if quiet else None):
        exchange = _exchange(mesh, pairs)
        for k, message in enumerate(messages):
            times = [_time(exchange, message) for _ in range(repeats + 1)][1:]  # the first compiles
            for source, target in pairs:
                if source == index:
                    seconds[target, k] = np.median(times)
    short, long = np.moveaxis(np.array(watch.gather(seconds.tolist())), -1, 0)
    return *links(short, long, 4 * sizes[1]), ways(_connections(), hosts)


def links(short: np.ndarray, long: np.ndarray, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Latency and bandwidth, (n, n), from the seconds that a short and a long message take.

    The latency is half of the time for the short message; as no clocks of different hosts are
    compared, it is the same in both directions. The bandwidth is ``num_bytes``, the difference in
    size between the two messages, divided by the difference in time.
    """
    latency = np.minimum(short, short.T) / 2
    # Noise may hide these bytes, so count at least a tenth of the long message's time for them.
    bandwidth = num_bytes / np.maximum(long - short, 0.1 * np.maximum(long, 1e-9))
    np.fill_diagonal(bandwidth, np.inf)
    return latency, bandwidth


def _message(mesh: jax.sharding.Mesh, size: int) -> jax.Array:
    sharding = jax.NamedSharding(mesh, jax.P("device"))
    return jax.make_array_from_process_local_data(sharding, np.ones((1, size), np.float32))


def _exchange(mesh: jax.sharding.Mesh, pairs: list[tuple[int, int]]) -> Callable:
    """A compiled function that sends a message along the pairs, then one number back."""

    def there_and_back(message: jax.Array) -> jax.Array:
        arrived = jax.lax.ppermute(message, "device", pairs)
        return jax.lax.ppermute(arrived[:, :1], "device", [(b, a) for a, b in pairs])

    spec = jax.P("device")
    return jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=spec))


def _time(exchange: Callable, message: jax.Array) -> float:
    """Seconds until the answer has arrived."""
    began = time.perf_counter()
    exchange(message).block_until_ready()
    return time.perf_counter() - began


def _connections() -> list[list[tuple[sockets.End, sockets.End, str]]]:
    """The connections for `ways`, without those to the coordinator."""
    port = int((global_state.coordinator_address or ":0").rpartition(":")[2])
    ends = [pair for pair in sockets.connections() if port not in (pair[0][1], pair[1][1])]
    return watch.gather([(near, far, sockets.card(near[0], far[0])) for near, far in ends])


# --- Reporting ----------------------------------------------------------------------------------


def report(latency_s: np.ndarray, bandwidth: np.ndarray, names: list[str]) -> str:
    """Two lines: the link with the longest latency, and the one with the lowest bandwidth.

    >>> latency, rate = np.array([[0, 5e-5], [5e-5, 0]]), np.array([[0, 1.25e9], [2.5e9, 0]])
    >>> print(report(latency, rate, ["gpu1/0", "gpu2/0"]))
    longest latency: 50.0 us, gpu1/0 -> gpu2/0 (median of all links 50.0 us)
    slowest link: 10.0 Gbit/s, gpu1/0 -> gpu2/0 (median of all links 15.0 Gbit/s)
    """
    links = ~np.eye(len(names), dtype=bool)
    latency_us, gbits = 1e6 * latency_s, bandwidth / _BYTES_PER_GBIT

    def worst(what: str, matrix: np.ndarray, unit: str, link: np.intp) -> str:
        source, target = np.unravel_index(link, links.shape)
        value, median = float(matrix[source, target]), float(np.median(matrix[links]))
        return (
            f"{what}: {format_number(value)} {unit}, {names[source]} -> {names[target]} "
            f"(median of all links {format_number(median)} {unit})"
        )

    longest = np.where(links, latency_us, -1).argmax()
    slowest = np.where(links, gbits, np.inf).argmin()
    latency_line = worst("longest latency", latency_us, "us", longest)
    return f"{latency_line}\n{worst('slowest link', gbits, 'Gbit/s', slowest)}"


def ways(
    connections: Sequence[Sequence[tuple[sockets.End, sockets.End, str]]], hosts: Sequence[str]
) -> str:
    """Lines on the address and network card that each host uses, and how to choose others.

    Args:
      connections: per process, (own end, other end, card); other programs' connections are ignored.
      hosts: host name of each process.

    >>> a, b = ("10.0.0.1", 4000), ("10.0.0.2", 5000)
    >>> print(ways([[(a, b, "eth0")], [(b, a, "ib0")]], ["gpu1", "gpu2"]))
    gpu1 by 10.0.0.1 (eth0) to gpu2
    gpu2 by 10.0.0.2 (ib0) to gpu1
    to use another card: NCCL_SOCKET_IFNAME for GPUs, a host's own name in /etc/hosts for CPUs
    """
    ends = {
        (tuple(near), tuple(far), card == "lo" and host): (host, card)  # each host has its own lo
        for host, own in zip(hosts, connections, strict=True)
        for near, far, card in own
    }
    reached: dict[tuple[str, str | int, str], set[str]] = {}
    for (near, far, inside), (host, card) in ends.items():
        if other := ends.get((far, near, inside)):
            reached.setdefault((host, near[0], card), set()).add(other[0])
    lines = [
        f"{host} by {address} ({card}) to {', '.join(sorted(others))}"
        for (host, address, card), others in reached.items()
    ]
    return "\n".join([*lines, _ANOTHER_CARD])
