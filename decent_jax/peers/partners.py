"""Which peers a peer asks to meet, and how fast that brings all peers together."""

import itertools
import re
from collections.abc import Mapping

import numpy as np

from decent_jax import topology
from decent_jax.ground.errors import ConfigError

FAR = 0.2  # part of the questions of "weighted" that goes to all alike, however far they are


def chances(
    me: str, members: list[str], neighbours: str, seconds: Mapping[str, float]
) -> dict[str, float]:
    """The probability with which peer ``me`` asks each of its neighbours.

    ``all`` and ``regular(d)`` ask all neighbours equally often. ``weighted`` asks in proportion to
    1 / seconds, and for a fifth of the questions anybody, so that the graph stays complete.

    Args:
      members: names of the peers that train; everybody computes the same overlay from the same
        names.
      seconds: that a meeting with a peer takes, where it has been measured; others count as the
        median of those.

    >>> chances("1.0", ["0.0", "1.0", "2.0"], "weighted", {"0.0": 0.1, "2.0": 0.3})
    {'0.0': 0.7, '2.0': 0.3}
    """
    names = sorted(members)
    others = [name for name in names if name != me]
    if me in names:
        linked = overlay(names, degree(neighbours))[names.index(me)]
        others = [name for name, is_linked in zip(names, linked, strict=True) if is_linked]
    if not others:
        return {}
    near = np.ones(len(others))
    if neighbours == "weighted":
        typical = float(np.median([seconds[name] for name in others if name in seconds] or [1.0]))
        near = np.array([1 / seconds.get(name, typical) for name in others])
    found = FAR / len(others) + (1 - FAR) * near / near.sum()
    return {name: round(float(p), 12) for name, p in zip(others, found, strict=True)}


def overlay(names: list[str], degree: int) -> np.ndarray:
    """(n, n) bool: a random regular graph where one of this degree exists, else all."""
    n = len(names)
    if not degree or n <= degree + 1 or n * degree % 2:
        return ~np.eye(n, dtype=bool)
    seed = sum(ord(c) * (k + 1) for k, c in enumerate(",".join(names))) % 10_000
    matrix = topology.make(f"random_regular(degree={degree}, seed={seed})", n).matrix(0)
    return (matrix > 0) & ~np.eye(n, dtype=bool)


def reduction(
    names: list[str], neighbours: str, seconds: Mapping[str, Mapping[str, float]]
) -> float:
    r"""The least part by which a meeting reduces the expected spread, if all peers ask equally
    often.

    Peers i and j are the next to meet with probability ``q_ij = (p_ij + p_ji) / n``. A
    meeting of i and j takes ``(x_i - x_j)^2 / 2`` from the spread, on average
    ``x^T L x / 2`` with the Laplacian L of q, which is at least ``lambda_2 / 2`` of it. On
    a complete graph with equal chances that is exactly 1 / (n - 1).

    Args:
      names: of all peers.
      seconds: of each peer, see `chances`.

    >>> reduction(["0.0", "1.0", "2.0", "3.0", "4.0"], "all", {})
    0.25
    """
    n = len(names)
    if n < 2:
        return 0.0
    asks = np.zeros((n, n))
    for i, me in enumerate(names):
        for name, p in chances(me, names, neighbours, seconds.get(me, {})).items():
            asks[i, names.index(name)] = p
    meets = (asks + asks.T) / n
    eigenvalues = np.linalg.eigvalsh(np.diag(meets.sum(axis=0)) - meets)
    return round(float(eigenvalues[1] / 2), 9)


def links(seconds: Mapping[str, Mapping[str, float]], algorithm: str) -> str:
    """A sentence on measured links, once every two peers have met; else "".

    >>> links({"0.0": {"1.0": 0.02}, "1.0": {"2.0": 0.3}, "2.0": {"0.0": 0.3}}, "swarm")[:52]
    'a meeting takes 20 ms between peers 0.0 and 1.0, 300'
    """
    took = {
        (i, j): min(seconds[i].get(j, np.inf), seconds[j].get(i, np.inf))
        for i, j in itertools.combinations(seconds, 2)
    }
    if not took or np.inf in took.values():
        return ""
    near, far = min(took, key=took.__getitem__), max(took, key=took.__getitem__)
    words = (
        f"a meeting takes {1e3 * took[near]:.0f} ms between peers {' and '.join(near)}, "
        f"{1e3 * took[far]:.0f} ms between {' and '.join(far)}; near ones meet more often"
    )
    if algorithm != "swarm":  # its momentum may enlarge the spread for a while
        return words
    rate, even = (reduction(list(seconds), how, seconds) for how in ("weighted", "all"))
    return (
        f"{words}, and it reduces the spread by at least {rate:.1%} ({even:.1%} if all met equally "
        "often)"
    )


def degree(neighbours: str) -> int:
    """The degree of the overlay; 0: all are neighbours.

    Raises:
      ConfigError: ``neighbours`` is none of those known.
    """
    if neighbours in ("all", "weighted"):
        return 0
    found = re.fullmatch(r"regular\((\d+)\)", neighbours)
    if found is None or int(found[1]) < 2:
        raise ConfigError(
            'peers.neighbours must be all, weighted, or "regular(d)" with d at least 2, '
            f"got {neighbours!r}",
            field="peers.neighbours",
            value=neighbours,
        )
    return int(found[1])
