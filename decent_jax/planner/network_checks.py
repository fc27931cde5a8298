"""What a measured network must be; each refusal is one sentence that names the entry.

Every function raises ValueError.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

# Directions of a link that differ by a larger factor were measured under different load.
LARGEST_ASYMMETRY = 1.25


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
        return np.array(values, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{what} must hold numbers only, in rows of one length") from None


def _square(values: ArrayLike, what: str) -> np.ndarray:
    matrix = _numbers(values, what)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(
            f"{what} must be square, a row and a column a device, got shape {matrix.shape}"
        )
    return matrix


def nodes(node: ArrayLike | None, n: int) -> tuple[np.ndarray, int]:
    """(n,) the machine of each device, and how many machines there are."""
    if node is None:
        return np.arange(n), n
    numbers = np.asarray(node)
    if numbers.shape != (n,) or numbers.dtype.kind not in "iu":
        raise ValueError(f"node needs the machine's number for each of {n} devices, got {node}")
    count = int(numbers.max()) + 1
    if set(numbers.tolist()) != set(range(count)):
        raise ValueError(f"nodes must be numbered from 0 without gaps, got {numbers.tolist()}")
    return numbers.astype(np.int64), count


def different_names(names: Sequence[str], n: int) -> tuple[str, ...]:
    """The names, after a check that there are n different ones."""
    names = tuple(str(name) for name in names)
    if len(names) != n or len(set(names)) != n:
        raise ValueError(
            f"names must be {n} different names, got {len(names)} of which {len(set(names))} differ"
        )
    return names


def nic(nic_bytes_per_s: ArrayLike, num_nodes: int) -> np.ndarray:
    """(num_nodes,) bytes per second of each network card, infinite for None."""
    numbers = _numbers(nic_bytes_per_s, "nic_bytes_per_s")
    numbers = np.where(np.isnan(numbers), np.inf, numbers)  # None in JSON
    if numbers.shape != (num_nodes,) or (numbers <= 0).any():
        raise ValueError(
            f"nic_bytes_per_s needs a positive number for each of {num_nodes} nodes, "
            f"got {numbers.tolist()}"
        )
    return numbers


def present(matrix: np.ndarray, what: str, names: tuple[str, ...]) -> None:
    """Every entry is a number, and none is negative or (off the diagonal) infinite."""
    off_diagonal = ~np.eye(len(matrix), dtype=bool)
    wrong = np.argwhere(off_diagonal & ~np.isfinite(matrix))
    if len(wrong):
        i, j = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"the {what} from {names[i]} to {names[j]}{more} is missing or not finite; measure it"
        )
    i, j = np.unravel_index(np.where(off_diagonal, matrix, 0.0).argmin(), matrix.shape)
    if matrix[i, j] < 0:
        raise ValueError(
            f"the {what} from {names[i]} to {names[j]} is negative: {matrix[i, j]:g}; measure it "
            "again"
        )


def connected(bandwidth: np.ndarray, names: tuple[str, ...]) -> None:
    """No bandwidth is 0."""
    none = np.argwhere(bandwidth == 0)
    if len(none) == 0:
        return
    parts, label = connected_components(csr_array(bandwidth > 0), connection="strong")
    if parts > 1:
        first, second = (names[int((label == label.max() - k).argmax())] for k in (1, 0))
        raise ValueError(
            f"the network falls into {parts} parts between which no data flow: {first} and "
            f"{second} do not reach each other; connect them, or plan for one part"
        )
    i, j = none[0]
    raise ValueError(
        f"the bandwidth from {names[i]} to {names[j]} is 0; every pair of devices must reach each "
        "other: measure it again, or enter what the detour through another device gives"
    )


def units(latency: np.ndarray, bandwidth: np.ndarray, names: tuple[str, ...]) -> None:
    """No network has a latency above 1 s or (but for a neglected one, 0) below 10 ns, or carries
    less than 1 kB/s or more than 10 TB/s between two devices."""
    off_diagonal = ~np.eye(len(latency), dtype=bool)
    checks = (
        (latency, latency > 1, "latency", "s", "milliseconds or microseconds"),
        (latency, (latency < 1e-8) & (latency > 0), "latency", "s", "another unit than seconds"),
        (bandwidth, bandwidth < 1e3, "bandwidth", "bytes/s", "Gbit/s, Mbit/s or GB/s"),
        (bandwidth, bandwidth > 1e13, "bandwidth", "bytes/s", "another unit than bytes/s"),
    )
    for matrix, wrong, what, unit, guess in checks:
        entries = np.argwhere(wrong & off_diagonal)
        if len(entries):
            i, j = entries[0]
            raise ValueError(
                f"the {what} from {names[i]} to {names[j]} is {matrix[i, j]:g} {unit}, which no "
                f"network has and looks like {guess}; give seconds and bytes per second "
                "(1 Gbit/s = 1.25e8 bytes/s)"
            )


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
