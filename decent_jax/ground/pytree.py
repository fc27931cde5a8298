"""The type of trees of arrays, which Python cannot express."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Nested containers of arrays, as `jax.tree` maps them."""
