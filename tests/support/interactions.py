"""SwarmSGD one interaction at a time, in NumPy (Nadiradze et al. 2021): an oracle."""

from typing import NamedTuple

import numpy as np

from decent_jax import topology


class Interaction(NamedTuple):
    """Two replicas take their local steps, then average."""

    i: int
    j: int
    steps_i: int
    steps_j: int


def interactions(n, count, *, degree=None, local_steps=1, geometric=False, seed=0):
    """``count`` of them, each on an edge of a graph drawn uniformly."""
    graph = np.ones((n, n))
    if degree is not None:
        graph = topology.make(f"random_regular(degree={degree}, seed={seed})", n).matrix(0)
    random, edges = np.random.RandomState(seed), np.argwhere(np.triu(graph, k=1))
    pairs = edges[random.randint(len(edges), size=count)]
    turned = random.randint(2, size=count) == 1
    pairs[turned] = pairs[turned, ::-1]
    steps = np.full((count, 2), local_steps)
    if geometric:
        steps = random.geometric(1 / local_steps, size=(count, 2))
    return [
        Interaction(*pair, *own) for pair, own in zip(pairs.tolist(), steps.tolist(), strict=True)
    ]


def swarm(x0, listed, gradient, rate, *, blocking=True):
    """Models at the end, and each replica's local steps; ``gradient(i, x_i, steps so far)``.

    A replica that does not block offers the copy that its last interaction left, and adds its own
    steps since then to the average.
    """
    x, done = np.array(x0, np.float64), np.zeros(len(x0), int)
    published = x if blocking else x.copy()
    for i, j, *steps in listed:
        for k, count in zip((i, j), steps, strict=True):
            for _ in range(count):
                x[k] -= rate * gradient(k, x[k], done[k])
                done[k] += 1
        half = (published[j] - published[i]) / 2
        x[i], x[j] = x[i] + half, x[j] - half
        published[[i, j]] = x[[i, j]]
    return x, done
