"""What a measured network must be; each refusal is one sentence that names the entry.

Every function raises ValueError.
"""

import numpy as np
from numpy.typing import ArrayLike

from decent_jax.ground.format import shown

# Directions of a link that differ by a larger factor were measured under different load.
LARGEST_ASYMMETRY = 1.25
SLOWEST = 1e3  # bytes per second that a network has
_LONGEST_NAME = 300  # characters; of a host at most 253


def square_pair(latency_s: ArrayLike, bandwidth: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both matrices, (n, n) float64, as new arrays."""
    names = ("latency_s", "bandwidth_bytes_per_s")
    first, second = map(_numbers, (latency_s, bandwidth), names)
    if first.ndim != 2 or first.shape != (len(first),) * 2 or first.shape != second.shape:
        raise ValueError(
            f"{' and '.join(names)} must be square, a row and a column for each of the same "
            f"devices, got shapes {first.shape} and {second.shape}"
        )
    return first, second


def _numbers(values: object, what: str) -> np.ndarray:
    """A new float64 array, not empty; None becomes NaN."""
    try:
        given = values if isinstance(values, np.ndarray) else np.asarray(values, object)
        if given.dtype.kind not in "iufO" or not given.size:  # such as complex numbers, texts
            raise TypeError
        if given.dtype.kind == "O" and any(isinstance(entry, bool) for entry in given.ravel()):
            raise TypeError
        return given.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{what} must hold numbers only, neither true nor false, in rows of one length, got "
            f"{shown(values)}"
        ) from None


def nodes(node: ArrayLike | None, n: int) -> tuple[np.ndarray, int]:
    """(n,) the machine of each device, and how many machines there are."""
    if node is None:
        return np.arange(n), n
    numbers = _numbers(node, "node")
    if numbers.shape != (n,) or set(numbers.tolist()) != set(range(len(set(numbers.tolist())))):
        raise ValueError(
            f"node needs the machine's number for each of {n} devices, from 0 without gaps, got "
            f"{shown(node)}"
        )
    return numbers.astype(np.int64), int(numbers.max()) + 1


def different_names(names: object, n: int) -> tuple[str, ...]:
    """The names, after a check that there are n different ones."""
    given = names.tolist() if isinstance(names, np.ndarray) else names
    listed = given if isinstance(given, list | tuple) else ()
    listed = tuple(str(name) if type(name) is int else name for name in listed)
    if not len(listed) == len(set(filter(_is_name, listed))) == n:
        raise ValueError(
            f"names must be a list of {n} different printable texts of up to {_LONGEST_NAME} "
            f"characters, got {shown(given)}"
        )
    return listed


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


def entries(latency: np.ndarray, bandwidth: np.ndarray, names: tuple[str, ...]) -> None:
    """Every entry off the diagonal is a number, and in its unit one that a network has."""
    checks = (
        ("latency", latency, "s", 1e-8, 1.0, "or 0, if it is neglected"),
        ("bandwidth", bandwidth, "bytes/s", SLOWEST, 1e13, "and 1 Gbit/s is 1.25e8 bytes/s"),
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
                "again: a pair without a link needs what the detour through another device gives"
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
