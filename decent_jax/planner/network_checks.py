"""What a measured network must be; each refusal is one sentence that names the entry.

Every function raises ValueError.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from decent_jax.text import shown

# Directions of a link that differ by a larger factor were measured under different load.
LARGEST_ASYMMETRY = 1.25
SLOWEST = 1e3  # bytes per second that a network has
_LONGEST_NAME = 300  # characters; of a host at most 253


def square_pair(latency_s: ArrayLike, bandwidth: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both matrices, (n, n) float64, as new arrays."""
    latency = _square(latency_s, "latency_s")
    bandwidth = _square(bandwidth, "bandwidth_bytes_per_s")
    if latency.shape != bandwidth.shape:
        raise ValueError(
            f"latency_s is for {len(latency)} devices and bandwidth_bytes_per_s for "
            f"{len(bandwidth)}; give both for the same devices"
        )
    return latency, bandwidth


def _numbers(values: object, what: str) -> np.ndarray:
    """A new float64 array; None becomes NaN."""
    try:
        given = np.asarray(values)
        if given.dtype.kind not in "biufO":  # such as complex numbers, dates, texts
            raise TypeError
        return given.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{what} must hold numbers only, in rows of one length") from None


def _square(values: ArrayLike, what: str) -> np.ndarray:
    matrix = _numbers(values, what)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(
            f"{what} must be square, a row and a column per device, got shape {matrix.shape}"
        )
    return matrix


def nodes(node: ArrayLike | None, n: int) -> tuple[np.ndarray, int]:
    """(n,) the machine of each device, and how many machines there are."""
    if node is None:
        return np.arange(n), n
    try:
        numbers = np.asarray(node)
    except ValueError:  # rows of different lengths
        numbers = np.zeros(0)
    if numbers.shape != (n,) or numbers.dtype.kind not in "iu":
        raise ValueError(f"node needs the machine's number for each of {n} devices, got {node}")
    count = int(numbers.max()) + 1
    if count > n or set(numbers.tolist()) != set(range(count)):
        raise ValueError(f"nodes must be numbered from 0 without gaps, got {numbers.tolist()}")
    return numbers.astype(np.int64), count


def different_names(names: Sequence[str], n: int) -> tuple[str, ...]:
    """The names, after a check that there are n different ones."""
    if not isinstance(names, Sequence | np.ndarray) or isinstance(names, str):
        raise ValueError(f"names must be a list of {n} different names")
    given = names.tolist() if isinstance(names, np.ndarray) else names
    names = tuple(str(name) if type(name) is int else name for name in given)
    wrong = next((name for name in names if not _is_name(name)), None)
    if wrong is not None:
        raise ValueError(
            f"names must be printable texts of up to {_LONGEST_NAME} characters, got {shown(wrong)}"
        )
    if len(names) != n or len(set(names)) != n:
        raise ValueError(
            f"names must be {n} different names, got {len(names)} of which {len(set(names))} differ"
        )
    return names


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and len(name) <= _LONGEST_NAME


def nic(nic_bytes_per_s: ArrayLike, num_nodes: int) -> np.ndarray:
    """(num_nodes,) bytes per second of each network card, infinite for None."""
    numbers = _numbers(nic_bytes_per_s, "nic_bytes_per_s")
    numbers = np.where(np.isnan(numbers), np.inf, numbers)  # None in JSON
    if numbers.shape != (num_nodes,) or (numbers < SLOWEST).any():
        raise ValueError(
            f"nic_bytes_per_s needs a number of at least {SLOWEST:g} bytes per second for each of "
            f"{num_nodes} nodes, got {shown(numbers.tolist())}"
        )
    return numbers


def connected(bandwidth: np.ndarray, names: tuple[str, ...]) -> None:
    """Data flow from every device to every other, if through others; only 0 is no link."""
    parts, label = connected_components(csr_array(bandwidth != 0), connection="strong")
    if parts > 1:
        first, second = (names[int((label == label.max() - k).argmax())] for k in (1, 0))
        raise ValueError(
            f"the network falls into {parts} parts between which no data flow: {first} and "
            f"{second} do not reach each other; connect them, or plan for one part"
        )


def entries(latency: np.ndarray, bandwidth: np.ndarray, names: tuple[str, ...]) -> None:
    """Every entry off the diagonal is a number, and in its unit one that a network has.

    That is a latency of at most 1 s and (but for a neglected one, 0) at least 10 ns, and between
    two devices a bandwidth of at least 1 kB/s and at most 10 TB/s.
    """
    missing = "{more} is missing or not finite; measure it"
    negative = " is negative: {value:g}; measure it again"
    none = (
        " is 0; every pair of devices must reach each other: measure it again, or enter what the "
        "detour through another device gives"
    )
    unit = (
        " is {value:g} {unit}, which no network has and looks like %s; give seconds and bytes per "
        "second (1 Gbit/s = 1.25e8 bytes/s)"
    )
    checks = (
        ("latency", ~np.isfinite(latency), missing),
        ("latency", latency < 0, negative),
        ("bandwidth", ~np.isfinite(bandwidth), missing),
        ("bandwidth", bandwidth < 0, negative),
        ("bandwidth", bandwidth == 0, none),
        ("latency", latency > 1, unit % "milliseconds or microseconds"),
        ("latency", (latency < 1e-8) & (latency > 0), unit % "another unit than seconds"),
        ("bandwidth", bandwidth < SLOWEST, unit % "Gbit/s, Mbit/s or GB/s"),
        ("bandwidth", bandwidth > 1e13, unit % "another unit than bytes/s"),
    )
    for what, wrong, words in checks:
        found = np.argwhere(wrong & ~np.eye(len(latency), dtype=bool))
        if len(found):
            i, j = found[0]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            matrix, name = (latency, "s") if what == "latency" else (bandwidth, "bytes/s")
            words = words.format(more=more, value=matrix[i, j], unit=name)
            raise ValueError(f"the {what} from {names[i]} to {names[j]}{words}")


def symmetric(
    matrix: np.ndarray, what: str, unit: str, noise: float, names: tuple[str, ...]
) -> None:
    """Two directions differ by at most 25%, or by ``noise`` in their unit."""
    larger, smaller = np.maximum(matrix, matrix.T), np.minimum(matrix, matrix.T)
    wrong = larger > np.maximum(LARGEST_ASYMMETRY * smaller, smaller + noise)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        raise ValueError(
            f"the {what} between {names[i]} and {names[j]} is {matrix[i, j]:g} {unit} one way and "
            f"{matrix[j, i]:g} {unit} the other; measure again, or let the slower direction count "
            "for both (symmetrise)"
        )
