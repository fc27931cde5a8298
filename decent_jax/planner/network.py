"""A cluster's network: how long a message from one device to another takes.

Latencies and bandwidths are measured (`load`, `from_matrices`), nominal (`preset`, `cluster`) or
DT-FM's table of cloud regions (`regions`). Seconds, bytes, bytes per second throughout.

>>> network = preset("nvlink_25gbe", num_nodes=2, devices_per_node=4)
>>> network
Network(8 devices in 2 nodes)
>>> network.names[4], network.transfer_s(0, 4, num_bytes=1e9)   # 25 Gbit/s is 3.125e9 bytes/s
('node1/0', 0.32003)
"""

import dataclasses
import functools
import importlib.resources
import json
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.json_files import check_regular, read_json, write_json_atomic
from decent_jax.planner import network_checks as checks

FORMAT = "decent_jax.network/1"
BYTES_PER_GBIT = 1e9 / 8

_COPIES = 20  # of a matrix of all pairs, in memory at a time
LATENCY_NOISE_S = 50e-6  # by which two directions may differ: the clock's, not the network's


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Network:
    """n devices in machines ("nodes"), and the link between every two of them.

    latency_s: (n, n) float64; [i, j] from device i to device j, 0 on the diagonal.
    bandwidth_bytes_per_s: (n, n) float64; of one transfer i -> j that is alone on the network,
        infinite on the diagonal.
    node: (n,) int64; the machine device i sits in, numbered from 0 without gaps.
    nic_bytes_per_s: (num_nodes,) float64; what all transfers that leave a machine share, and
        separately all that enter it (full duplex). Infinite: no shared limit is known.
    names: n different names.
    """

    latency_s: np.ndarray
    bandwidth_bytes_per_s: np.ndarray
    node: np.ndarray
    nic_bytes_per_s: np.ndarray
    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Network({self.num_devices} devices in {self.num_nodes} nodes)"

    @property
    def num_devices(self) -> int:
        return len(self.node)

    @property
    def num_nodes(self) -> int:
        return len(self.nic_bytes_per_s)

    @property
    def gbit_per_s(self) -> np.ndarray:
        """(n, n) the bandwidths for people."""
        return self.bandwidth_bytes_per_s / BYTES_PER_GBIT

    def transfer_s(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds of a transfer between two devices, alone on the network."""
        return float(
            self.latency_s[source, target] + num_bytes / self.bandwidth_bytes_per_s[source, target]
        )

    def take(self, devices: ArrayLike) -> "Network":
        """The network of these devices (each at most once), in this order.

        Nodes are renumbered in the order in which they first appear.
        """
        devices = np.asarray(devices, np.int64)
        known = set(devices.tolist()) & set(range(self.num_devices))
        if not 0 < len(known) == devices.size:
            raise ValueError(
                f"take needs different devices, of 0 to {self.num_devices - 1}, got "
                f"{devices.tolist()}"
            )
        old_nodes = list(dict.fromkeys(self.node[devices].tolist()))
        new_number = {old: new for new, old in enumerate(old_nodes)}
        pairs = np.ix_(devices, devices)
        return Network(
            self.latency_s[pairs],
            self.bandwidth_bytes_per_s[pairs],
            np.array([new_number[old] for old in self.node[devices].tolist()], np.int64),
            self.nic_bytes_per_s[old_nodes],
            tuple(self.names[device] for device in devices.tolist()),
        )

    def save(self, path: str | Path) -> None:
        """Write JSON that `load` reads; None on the diagonal and where nothing limits."""
        fields = {
            "format": FORMAT,
            "names": list(self.names),
            "node": self.node.tolist(),
            "nic_bytes_per_s": _none_for_infinite(self.nic_bytes_per_s),
            "latency_s": self.latency_s.tolist(),
            "bandwidth_bytes_per_s": [
                _none_for_infinite(row) for row in self.bandwidth_bytes_per_s
            ],
        }
        write_json_atomic(path, fields)


def load(path: str | Path) -> Network:
    """A network from a JSON or .npz file, with every check of `from_matrices`.

    Keys: ``latency_s`` and ``bandwidth_bytes_per_s`` (n x n, row i is sent by device i; the
    diagonal is not read), and if known ``node``, ``nic_bytes_per_s`` and ``names``. JSON also
    says ``"format": "decent_jax.network/1"``.

    Raises:
      ValueError: a file that is no network; the message names the file and the mistake.
    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            fields = _arrays(path)
        else:
            fields = read_json(path)
            if not isinstance(fields, dict) or fields.get("format") != FORMAT:
                raise ValueError(f'it does not say "format": "{FORMAT}"')
        missing = {"latency_s", "bandwidth_bytes_per_s"} - set(fields)
        if missing:
            raise ValueError(f"it lacks {' and '.join(sorted(missing))}")
        optional = ("node", "nic_bytes_per_s", "names")
        return from_matrices(
            fields["latency_s"],
            fields["bandwidth_bytes_per_s"],
            **{key: fields[key] for key in optional if fields.get(key) is not None},
        )
    except OSError as error:
        raise ValueError(f"cannot read the network {path}: {error.strerror or error}") from None
    except DataError:  # which names the file
        raise
    except ValueError as error:
        raise ValueError(f"{path} is not a network: {error}") from None


def _arrays(path: Path) -> dict[str, Any]:
    """The arrays of a .npz file."""
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            needed = _COPIES * sum(part.file_size for part in archive.infolist())
            machine.check_memory(needed, str(path))
        with np.load(path) as arrays:
            return {key: np.asarray(arrays[key]) for key in arrays.files}
    except (OSError, ConfigError):
        raise
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds
        raise ValueError(f"it cannot be read ({type(error).__name__})") from None


def from_matrices(
    latency_s: ArrayLike,
    bandwidth_bytes_per_s: ArrayLike,
    *,
    node: ArrayLike | None = None,
    nic_bytes_per_s: ArrayLike | None = None,
    names: Sequence[str] | None = None,
    symmetrise: bool = False,
) -> Network:
    """A network of measured matrices, (n, n), whose row i is what device i sends.

    The two directions may differ by 25% (latencies also by 50 us); more is refused, because it
    mostly means that one of the two was measured while something else used the network. A
    latency of exactly 0 means that latency is neglected. The diagonals are ignored.

    Args:
      node: the machine of each device; default: every device is a machine of its own.
      nic_bytes_per_s: of each machine, None or infinite where nothing is shared; default: the
        fastest link that leaves the machine (links are measured one at a time, so no measurement
        shows that two transfers together are faster than one).
      symmetrise: let the slower direction of every pair count for both.

    Raises:
      ValueError: one sentence that names the entry: not square, missing, zero bandwidth,
        asymmetric, or so far from any real network that the units must be wrong.
    """
    latency, bandwidth = checks.square_pair(latency_s, bandwidth_bytes_per_s)
    n = len(latency)
    node, num_nodes = checks.nodes(node, n)
    if names is None:
        names = _numbered([f"node{k}" for k in node.tolist()])
    names = checks.different_names(names, n)
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    checks.entries(latency, bandwidth, names)
    if symmetrise:
        latency = np.maximum(latency, latency.T)
        bandwidth = np.minimum(bandwidth, bandwidth.T)
    checks.symmetric(latency, "latency", "s", LATENCY_NOISE_S, names)
    checks.symmetric(bandwidth, "bandwidth", "bytes/s", 0.0, names)
    if nic_bytes_per_s is None:
        nic = _fastest_link_out(bandwidth, node, num_nodes)
    else:
        nic = checks.nic(nic_bytes_per_s, num_nodes)
    return Network(latency, bandwidth, node, nic, names)


def _fastest_link_out(bandwidth: np.ndarray, node: np.ndarray, num_nodes: int) -> np.ndarray:
    outside = np.where(node[:, None] != node, bandwidth, 0.0)
    fastest = np.zeros(num_nodes)
    np.maximum.at(fastest, node, outside.max(axis=1))
    return np.where(fastest > 0, fastest, np.inf)


class Link(NamedTuple):
    """What one transfer gets: it takes ``latency_s + num_bytes / bytes_per_s``."""

    latency_s: float
    bytes_per_s: float


# Line rates by specification (A100 HGX; PCIe 4.0 x16; Ethernet; HDR100), latencies of a small
# message as usually seen; nothing here was measured.
NVLINK = Link(5e-6, 300e9)
PCIE = Link(10e-6, 25e9)
ETHERNET_25G = Link(30e-6, 25 * BYTES_PER_GBIT)
INFINIBAND_100G = Link(5e-6, 100 * BYTES_PER_GBIT)

_CLUSTERS = {
    "nvlink_25gbe": (NVLINK, ETHERNET_25G, 1),
    "nvlink_100gb_ib": (NVLINK, INFINIBAND_100G, 1),
    "pcie_25gbe": (PCIE, ETHERNET_25G, 1),
    "pcie_100gb_ib": (PCIE, INFINIBAND_100G, 1),
    "two_racks_25gbe": (NVLINK, ETHERNET_25G, 2),
}
_DTFM_CASES = tuple(f"dtfm_case{number}" for number in range(1, 6))
PRESETS = (*_CLUSTERS, "dtfm_world", *_DTFM_CASES)


def preset(name: str, num_nodes: int | None = None, devices_per_node: int | None = None) -> Network:
    """A network by name; ``num_nodes`` machines of ``devices_per_node`` devices each.

    | name | inside a machine | between machines |
    |---|---|---|
    | ``nvlink_25gbe``, ``nvlink_100gb_ib`` | 300 GB/s, 5 us | 25 GbE, 30 us; 100 Gbit/s, 5 us |
    | ``pcie_25gbe``, ``pcie_100gb_ib`` | 25 GB/s, 10 us | the same two |
    | ``two_racks_25gbe`` | 300 GB/s, 5 us | 25 GbE; to the other rack see `cluster`, 60 us |
    | ``dtfm_world`` | 25 GB/s, 10 us | machines spread evenly over DT-FM's ten regions |
    | ``dtfm_case1`` ... ``dtfm_case5`` | DT-FM's five scenarios | 64 devices, fixed |

    All devices of a machine share its network card. The line rates are nominal.

    Raises:
      ValueError: an unknown name, or sizes that it cannot have.
    """
    if name in _DTFM_CASES:
        if num_nodes is not None or devices_per_node is not None:
            raise ValueError(f"{name} has 64 devices in fixed places; leave the sizes out")
        return _dtfm_case(int(name[-1]))
    if name not in PRESETS:
        raise ValueError(f"unknown network {name!r}; choose one of {', '.join(PRESETS)}")
    if not (num_nodes and devices_per_node and min(num_nodes, devices_per_node) >= 1):
        raise ValueError(
            f"{name} needs num_nodes and devices_per_node of at least 1, "
            f"got {num_nodes} and {devices_per_node}"
        )
    if name in _CLUSTERS:
        inside, between, racks = _CLUSTERS[name]
        return cluster([devices_per_node] * num_nodes, inside, between, racks=racks)
    order = _region_table()["regions"]
    return regions(Counter(order[k % 10] for k in range(num_nodes)), devices_per_node)


def cluster(
    devices_per_node: Sequence[int], inside: Link, between: Link, *, racks: int = 1
) -> Network:
    """Machines of possibly different sizes on one network, ``between.bytes_per_s`` per machine.

    Args:
      racks: the machines fill that many racks in equal parts, whose uplinks carry a quarter of what
        their machines can (the usual 4:1 oversubscription) at twice the latency. A transfer to
        another rack gets a device's equal share of that, as when all devices send there at once;
        this underrates a single transfer, and with it a ring or tree that crosses only once.
    """
    _check_size(sum(devices_per_node))
    sizes = np.asarray(devices_per_node, np.int64)
    if sizes.ndim != 1 or len(sizes) == 0 or sizes.min() < 1 or not 1 <= racks <= len(sizes):
        raise ValueError(
            "a cluster needs machines of at least one device and no more racks than machines, "
            f"got sizes {sizes.tolist()} and {racks} racks"
        )
    node = np.repeat(np.arange(len(sizes)), sizes)
    rack = np.concatenate(
        [np.full(len(part), k) for k, part in enumerate(np.array_split(sizes, racks))]
    )[node]
    same_node = node[:, None] == node
    same_rack = rack[:, None] == rack
    latency = np.where(same_rack, between.latency_s, 2 * between.latency_s)
    crowd = np.maximum(sizes[:, None], sizes)[np.ix_(node, node)]
    bandwidth = np.where(same_rack, between.bytes_per_s, between.bytes_per_s / 4 / crowd)
    return from_matrices(
        np.where(same_node, inside.latency_s, latency),
        np.where(same_node, inside.bytes_per_s, bandwidth),
        node=node,
        nic_bytes_per_s=np.full(len(sizes), between.bytes_per_s),
    )


def regions(counts: Mapping[str, int], devices_per_node: int = 1) -> Network:
    """Machines in the cloud regions of DT-FM, as many as ``counts`` says for each.

    Between two regions the measured latency and bandwidth of one stream; between two machines of
    a region 5 ms and 2 Gbit/s, which is also a machine's network card. Devices of a machine are
    on PCIe.

    >>> regions({"Tokyo": 1, "Oregon": 2}).transfer_s(0, 1, num_bytes=0)
    0.096
    """
    table = _region_table()
    unknown = set(counts) - set(table["regions"])
    if unknown or not counts or min(counts.values()) < 1 or devices_per_node < 1:
        raise ValueError(
            f"regions are {', '.join(table['regions'])}, each with at least one machine of at "
            f"least one device, got {dict(counts)} and {devices_per_node}"
        )
    return _region_network(table["world"], counts, table["inside"], devices_per_node)


def _region_network(
    pairs: Mapping[str, Sequence[float]],
    counts: Mapping[str, int],
    inside: Sequence[float],
    devices_per_node: int = 1,
) -> Network:
    """Machines in regions, from milliseconds and Gbit/s between two regions and inside of one."""
    links = {frozenset(pair.split("-")): tuple(link) for pair, link in pairs.items()}
    links |= {frozenset([region]): tuple(inside) for region in counts}
    _check_size(sum(counts.values()) * devices_per_node)
    machines = [region for region, count in counts.items() for _ in range(count)]
    table = np.array([[links[frozenset((a, b))] for b in machines] for a in machines])
    node = np.repeat(np.arange(len(machines)), devices_per_node)
    same_node = node[:, None] == node
    latency, bandwidth = table[np.ix_(node, node)].transpose(2, 0, 1)
    return from_matrices(
        np.where(same_node, PCIE.latency_s, latency / 1e3),
        np.where(same_node, PCIE.bytes_per_s, bandwidth * BYTES_PER_GBIT),
        node=node,
        nic_bytes_per_s=np.full(len(machines), inside[1] * BYTES_PER_GBIT),
        names=_numbered([machines[k] for k in node]),
    )


def _dtfm_case(number: int) -> Network:
    """DT-FM's scenarios (Yuan et al., NeurIPS 2022, section 4.1, as its code has them)."""
    table = _region_table()
    if number == 5:
        order = "Oregon Virginia Ohio Tokyo Seoul London Frankfurt Ireland"
        return regions(dict.fromkeys(order.split(), 8))
    if number == 4:
        counts = {"Virginia": 16, "Oregon": 16, "California": 16, "Ohio": 16}
        return _region_network(table["case4"], counts, table["inside"])
    if number == 3:
        return _region_network({"Ohio-Virginia": (11, 1.12)}, {"Ohio": 32, "Virginia": 32}, (1, 5))
    # Instances of 8; or eight of 4 and 32 of 1. A device has its share of the network card.
    sizes, gbps = ([8] * 8, 3.125) if number == 1 else ([4] * 8 + [1] * 32, 1.25)
    rate = gbps * BYTES_PER_GBIT
    made = cluster(sizes, Link(0, 100 * BYTES_PER_GBIT), Link(0, rate))
    names = tuple(name.replace("node", "instance") for name in made.names)
    return dataclasses.replace(made, nic_bytes_per_s=rate * np.array(sizes), names=names)


def _check_size(num_devices: int) -> None:
    machine.check_memory(8 * _COPIES * num_devices**2, f"a network of {num_devices} devices")


@functools.cache
def _region_table() -> dict:
    file = importlib.resources.files("decent_jax.planner") / "data" / "dtfm_regions.json"
    return json.loads(file.read_text())


def _none_for_infinite(row: np.ndarray) -> list:
    return [value if np.isfinite(value) else None for value in row.tolist()]


def _numbered(places: Sequence[str]) -> list[str]:
    """["a", "b", "a"] becomes ["a/0", "b/0", "a/1"]."""
    seen: dict[str, int] = {}
    numbered = []
    for place in places:
        seen[place] = seen.get(place, -1) + 1
        numbered.append(f"{place}/{seen[place]}")
    return numbered
