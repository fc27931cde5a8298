"""A model cut into fragments that are averaged in turn: the leaves of a tree, by their numbers."""

from typing import Any

import jax
import numpy as np


def cut(params: Any, count: int) -> list[list[int]]:
    """The numbers of the leaves in each fragment: consecutive, of about equal size."""
    sizes = np.array([leaf.size for leaf in jax.tree.leaves(params)])
    if count > len(sizes):
        raise ValueError(
            f"{count} fragments are more than the {len(sizes)} arrays of the parameters"
        )
    middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    of = np.minimum((middle * count).astype(int), count - 1)
    for k in range(count):  # a large array may fill several fragments; leave none empty
        of[k] = min(of[k], k)
        of[-1 - k] = max(of[-1 - k], count - 1 - k)
    of = np.maximum.accumulate(of)
    for k in range(1, len(of)):
        of[k] = min(of[k], of[k - 1] + 1)
    return [np.flatnonzero(of == k).tolist() for k in range(count)]


def taken(tree: Any, which: list[int]) -> list[jax.Array]:
    """The leaves of these numbers."""
    leaves = jax.tree.leaves(tree)
    return [leaves[k] for k in which]


def replaced(tree: Any, which: list[int], new: list[jax.Array]) -> Any:
    """The tree with new leaves at these numbers."""
    leaves, structure = jax.tree.flatten(tree)
    for k, leaf in zip(which, new, strict=True):
        leaves[k] = leaf
    return structure.unflatten(leaves)
