"""Arithmetic of trees that keeps dtypes; for the rest there is `optax.tree`."""

from typing import Any

import jax
import jax.numpy as jnp


def add(tree: Any, *others: Any) -> Any:
    """The sum of trees of equal structure, in the dtypes of the first."""
    return jax.tree.map(lambda x, *rest: jnp.asarray(sum(rest, x), x.dtype), tree, *others)


def scale(factor: Any, tree: Any) -> Any:
    """``factor * tree`` in the tree's dtypes."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def copy(tree: Any) -> Any:
    """Equal arrays in buffers of their own: a donated state must not hold one array twice."""
    return jax.tree.map(jnp.array, tree)
