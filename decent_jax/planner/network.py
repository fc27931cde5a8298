"""A cluster's network: the time of a message between any two devices.

Latencies and bandwidths are measured (`load`, `from_matrices`), nominal (`preset`, `cluster`) or
from DT-FM's table of cloud regions (`regions`). All units are seconds, bytes and bytes per second.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from decent_jax.ground import machine
from decent_jax.ground.format import shown
from decent_jax.ground.json_files import read_format, write_json_atomic

FORMAT = "decent_jax.network/1"
BYTES_PER_GBIT = 1e9 / 8

_COPIES = 20  # copies of a matrix of all pairs in memory at a time
_LATENCY_NOISE_S = 50e-6  # clock noise, by which two directions may differ
_LARGEST_ASYMMETRY = 1.25  # directions that differ more were measured under different load
_SLOWEST = 1e3  # bytes per second of a plausible network
_LONGEST_NAME = 300  # characters; a host name has at most 253


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Network:
    """n devices in machines ("nodes"), and the link between each pair.

    latency_s: (n, n) float64; [i, j] from device i to device j, 0 on the diagonal.
    bandwidth_bytes_per_s: (n, n) float64; of one transfer from i to j that is alone on the network,
        infinite on the diagonal.
    node: (n,) int64; the machine of device i, numbered from 0 without gaps.
    nic_bytes_per_s: (num_nodes,) float64; shared by all transfers that leave a machine and,
        separately, by all that enter it (full duplex). Infinite: no shared limit is known.
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

    def transfer_s(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds of a transfer between two devices that is alone on the network."""
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
                f"take needs different devices from 0 to {self.num_devices - 1}, got "
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
        """Writes JSON for `load`, with null on the diagonal and for unlimited bandwidth."""
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
    """A network from a JSON file, with every check of `from_matrices`.

    Keys: ``"format": "decent_jax.network/1"``, ``latency_s`` and ``bandwidth_bytes_per_s`` (n x n,
    entry [i, j] for messages from device i to j; the diagonal is not read) and, if known, ``node``,
    ``nic_bytes_per_s`` and ``names``.

    Raises:
      ValueError: the file does not hold a network; the message names the file and the mistake.
    """
    fields = read_format(path, "network", FORMAT)
    try:
        missing = {"latency_s", "bandwidth_bytes_per_s"} - set(fields)
        if missing:
            raise ValueError(f"it lacks {' and '.join(sorted(missing))}")
        optional = ("node", "nic_bytes_per_s", "names")
        return from_matrices(
            fields["latency_s"],
            fields["bandwidth_bytes_per_s"],
            **{key: fields[key] for key in optional if fields.get(key) is not None},
        )
    except ValueError as error:
        raise ValueError(f"{path} is not a network: {error}") from None


def from_matrices(
    latency_s: ArrayLike,
    bandwidth_bytes_per_s: ArrayLike,
    *,
    node: ArrayLike | None = None,
    nic_bytes_per_s: ArrayLike | None = None,
    names: Sequence[str] | None = None,
    symmetrize: bool = False,
) -> Network:
    """A network from measured (n, n) matrices; entry [i, j] is for messages from device i to j.

    The two directions of a link may differ by 25% (latencies also by 50 us). More is refused,
    because it usually means that one direction was measured while something else used the network.
    A latency of exactly 0 means that latency is neglected. The diagonals are ignored.

    Args:
      node: (n,) the machine of each device; default: each device is a separate machine.
      nic_bytes_per_s: (num_nodes,) the rate of each machine's network card, None or infinite where
        nothing is shared; default: the fastest link that leaves the machine (links are measured one
        at a time, so no measurement shows that two transfers together are faster than one).
      names: the devices' names; default: node0/0, node0/1, ...
      symmetrize: whether the slower direction of every pair counts for both.

    Raises:
      ValueError: a matrix is not square, or an entry is missing, zero, asymmetric, or so far from
        any real network that the unit must be wrong; the message names it.
    """
    latency = _numbers(latency_s, "latency_s")
    bandwidth = _numbers(bandwidth_bytes_per_s, "bandwidth_bytes_per_s")
    n = len(latency)
    if not latency.shape == bandwidth.shape == (n, n):
        raise ValueError(
            "latency_s and bandwidth_bytes_per_s must be square, a row and a column for each of "
            f"the same devices, got shapes {latency.shape} and {bandwidth.shape}"
        )
    node = np.arange(n) if node is None else _nodes(node, n)
    num_nodes = int(node.max()) + 1
    if names is None:
        names = _numbered([f"node{k}" for k in node.tolist()])
    names = _different_names(names, n)
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    _check_entries(latency, bandwidth, names)
    if symmetrize:
        latency = np.maximum(latency, latency.T)
        bandwidth = np.minimum(bandwidth, bandwidth.T)
    _check_symmetric(latency, "latency", "s", _LATENCY_NOISE_S, names)
    _check_symmetric(bandwidth, "bandwidth", "bytes/s", 0.0, names)
    if nic_bytes_per_s is None:
        nic_bytes_per_s = _fastest_link_out(bandwidth, node, num_nodes)
    return Network(latency, bandwidth, node, _nics(nic_bytes_per_s, num_nodes), names)


def _fastest_link_out(bandwidth: np.ndarray, node: np.ndarray, num_nodes: int) -> np.ndarray:
    outside = np.where(node[:, None] != node, bandwidth, 0.0)
    fastest = np.zeros(num_nodes)
    np.maximum.at(fastest, node, outside.max(axis=1))
    return np.where(fastest > 0, fastest, np.inf)


# --- checks of a network; each error is one sentence that names the entry -------------------------


def _numbers(values: object, what: str) -> np.ndarray:
    """A new float64 array, not empty; None becomes NaN."""
    array = values if isinstance(values, np.ndarray) else np.asarray(values, object)
    try:
        if array.dtype.kind not in "iufO" or not array.size:  # such as complex numbers, texts
            raise TypeError
        if array.dtype.kind == "O" and any(isinstance(entry, bool) for entry in array.ravel()):
            raise TypeError
        return np.atleast_1d(array.astype(np.float64))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{what} must hold numbers only, neither true nor false, in rows of one length, got "
            f"{shown(values)}"
        ) from None


def _nodes(node: ArrayLike, n: int) -> np.ndarray:
    """(n,) the machine of each device."""
    numbers = _numbers(node, "node")
    if numbers.shape != (n,) or set(numbers.tolist()) != set(range(len(set(numbers.tolist())))):
        wanted = f"the machine's number for each of {n} devices, from 0 without gaps"
        raise ValueError(f"node needs {wanted}, got {shown(node)}")
    return numbers.astype(np.int64)


def _different_names(names: object, n: int) -> tuple[str, ...]:
    names = names.tolist() if isinstance(names, np.ndarray) else names
    listed = names if isinstance(names, list | tuple) else ()
    good = {name for name in listed if isinstance(name, str) and name.isprintable()}
    if not len(listed) == len(good) == n or max(map(len, good)) > _LONGEST_NAME:
        wanted = f"{n} different printable texts of up to {_LONGEST_NAME} characters"
        raise ValueError(f"names must be a list of {wanted}, got {shown(names)}")
    return tuple(listed)


def _nics(nic_bytes_per_s: ArrayLike, num_nodes: int) -> np.ndarray:
    """(num_nodes,) bytes per second of each network card, infinite for None."""
    numbers = _numbers(nic_bytes_per_s, "nic_bytes_per_s")
    numbers = np.where(np.isnan(numbers), np.inf, numbers)  # None in JSON
    if numbers.shape != (num_nodes,) or (numbers < _SLOWEST).any():
        wanted = f"at least {_SLOWEST:g} bytes per second for each of {num_nodes} nodes"
        raise ValueError(f"nic_bytes_per_s needs {wanted}, got {shown(numbers.tolist())}")
    return numbers


def _check_entries(latency: np.ndarray, bandwidth: np.ndarray, names: tuple[str, ...]) -> None:
    """Raises ValueError if an off-diagonal entry is not a number that is plausible in its unit."""
    checks = (
        ("latency", latency, "s", 1e-8, 1.0, "or 0, if it is neglected"),
        ("bandwidth", bandwidth, "bytes/s", _SLOWEST, 1e13, "and 1 Gbit/s is 1.25e8 bytes/s"),
    )
    for what, matrix, unit, least, most, note in checks:
        good = (least <= matrix) & (matrix <= most) | np.eye(len(matrix), dtype=bool)
        if what == "latency":
            good |= matrix == 0
        wrong = np.argwhere(~good)
        if len(wrong):
            i, j = wrong[0]
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise ValueError(
                f"the {what} from {names[i]} to {names[j]}{more} is {matrix[i, j]:g} {unit}, but "
                f"networks have {least:g} to {most:g} {unit}, {note}; mind the unit, or measure "
                "again: a pair without a link needs the value of a detour through another device"
            )


def _check_symmetric(
    matrix: np.ndarray, what: str, unit: str, noise: float, names: tuple[str, ...]
) -> None:
    """Raises ValueError if two directions differ by more than 25% and by more than ``noise``."""
    larger, smaller = np.maximum(matrix, matrix.T), np.minimum(matrix, matrix.T)
    wrong = larger > np.maximum(_LARGEST_ASYMMETRY * smaller, smaller + noise)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        raise ValueError(
            f"the {what} between {names[i]} and {names[j]} is {matrix[i, j]:g} {unit} one way and "
            f"{matrix[j, i]:g} {unit} the other; measure again, or let the slower direction count "
            "for both (symmetrize)"
        )


# --- networks by name ---------------------------------------------------------------------------


class Link(NamedTuple):
    """The link of one transfer, which takes ``latency_s + num_bytes / bytes_per_s``."""

    latency_s: float
    bytes_per_s: float


# Line rates by specification (A100 HGX; PCIe 4.0 x16; Ethernet; HDR100), and typical latencies of
# a small message; nothing here was measured.
NVLINK = Link(5e-6, 300e9)
PCIE = Link(10e-6, 25e9)
ETHERNET_25G = Link(30e-6, 25 * BYTES_PER_GBIT)
INFINIBAND_100G = Link(5e-6, 100 * BYTES_PER_GBIT)

_CLUSTERS = {
    "nvlink_25gbe": (NVLINK, ETHERNET_25G),
    "nvlink_100gb_ib": (NVLINK, INFINIBAND_100G),
    "pcie_25gbe": (PCIE, ETHERNET_25G),
    "pcie_100gb_ib": (PCIE, INFINIBAND_100G),
}
DTFM_CASES = tuple(f"dtfm_case{number}" for number in range(1, 6))
PRESETS = (*_CLUSTERS, *DTFM_CASES)


def preset(name: str, num_nodes: int | None = None, devices_per_node: int | None = None) -> Network:
    """A network by name; ``num_nodes`` machines of ``devices_per_node`` devices each.

    | name | inside a machine | between machines |
    |---|---|---|
    | ``nvlink_25gbe``, ``nvlink_100gb_ib`` | 300 GB/s, 5 us | 25 GbE, 30 us; 100 Gbit/s, 5 us |
    | ``pcie_25gbe``, ``pcie_100gb_ib`` | 25 GB/s, 10 us | the same two |
    | ``dtfm_case1`` ... ``dtfm_case5`` | DT-FM's five scenarios | 64 devices, fixed |

    All devices of a machine share its network card. The line rates are nominal.

    Raises:
      ValueError: an unknown name, or sizes that the network cannot have.
    """
    if name in DTFM_CASES:
        if num_nodes is not None or devices_per_node is not None:
            raise ValueError(f"{name} has 64 devices in fixed places; leave the sizes out")
        return _dtfm_case(int(name[-1]))
    if name not in _CLUSTERS:
        raise ValueError(f"unknown network {name!r}; choose one of {', '.join(PRESETS)}")
    if not (num_nodes and devices_per_node and min(num_nodes, devices_per_node) >= 1):
        raise ValueError(
            f"{name} needs num_nodes and devices_per_node of at least 1, "
            f"got {num_nodes} and {devices_per_node}"
        )
    return cluster([devices_per_node] * num_nodes, *_CLUSTERS[name])


def cluster(devices_per_node: Sequence[int], inside: Link, between: Link) -> Network:
    """A network of machines with these numbers of devices; ``between`` limits each network card."""
    sizes = np.asarray(devices_per_node, np.int64)
    if sizes.ndim != 1 or len(sizes) == 0 or sizes.min() < 1:
        raise ValueError(f"a cluster needs machines of at least one device, got {sizes.tolist()}")
    _check_size(int(sizes.sum()))
    node = np.repeat(np.arange(len(sizes)), sizes)
    same_node = node[:, None] == node
    return from_matrices(
        np.where(same_node, inside.latency_s, between.latency_s),
        np.where(same_node, inside.bytes_per_s, between.bytes_per_s),
        node=node,
        nic_bytes_per_s=np.full(len(sizes), between.bytes_per_s),
    )


def regions(counts: Mapping[str, int]) -> Network:
    """A network of one-device machines in DT-FM's cloud regions, ``counts`` per region.

    A link between two regions has the measured latency and bandwidth of one stream. A link inside
    a region has 5 ms and 2 Gbit/s, which is also the rate of a machine's network card.

    >>> regions({"Tokyo": 1, "Oregon": 2}).transfer_s(0, 1, num_bytes=0)
    0.096
    """
    table = _region_table()
    unknown = set(counts) - set(table["regions"])
    if unknown or not counts or min(counts.values()) < 1:
        known = ", ".join(table["regions"])
        raise ValueError(f"regions are {known}, with at least one machine, got {dict(counts)}")
    return _region_network(table["world"], counts, table["inside"])


def _region_network(
    pairs: Mapping[str, Sequence[float]], counts: Mapping[str, int], inside: Sequence[float]
) -> Network:
    """The network of `regions`, from milliseconds and Gbit/s between and inside regions."""
    links = {frozenset(pair.split("-")): tuple(link) for pair, link in pairs.items()}
    links |= {frozenset([region]): tuple(inside) for region in counts}
    _check_size(sum(counts.values()))
    machines = [region for region, count in counts.items() for _ in range(count)]
    table = np.array([[links[frozenset((a, b))] for b in machines] for a in machines])
    return from_matrices(
        table[..., 0] / 1e3,
        table[..., 1] * BYTES_PER_GBIT,
        nic_bytes_per_s=np.full(len(machines), inside[1] * BYTES_PER_GBIT),
        names=_numbered(machines),
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
    # Eight instances of 8 devices, or eight of 4 and 32 of 1; a link has a device's share of a NIC.
    sizes, gbps = ([8] * 8, 3.125) if number == 1 else ([4] * 8 + [1] * 32, 1.25)
    rate = gbps * BYTES_PER_GBIT
    nodes = cluster(sizes, Link(0, 100 * BYTES_PER_GBIT), Link(0, rate))
    names = tuple(name.replace("node", "instance") for name in nodes.names)
    return dataclasses.replace(nodes, nic_bytes_per_s=rate * np.array(sizes), names=names)


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
