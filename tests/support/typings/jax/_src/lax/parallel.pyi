"""Collectives, which jax does not annotate."""

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from jax import Array

Tree = TypeVar("Tree")  # of arrays
Name = Hashable | Sequence[Hashable]
Groups = Sequence[Sequence[int]]

def psum(x: Tree, axis_name: Name, *, axis_index_groups: Groups | None = None) -> Tree: ...
def ppermute(x: Tree, axis_name: Name, perm: Sequence[tuple[int, int]]) -> Tree: ...
def all_gather(
    x: Tree,
    axis_name: Name,
    *,
    axis_index_groups: Groups | None = None,
    axis: int = 0,
    tiled: bool = False,
) -> Tree: ...
def psum_scatter(
    x: Tree,
    axis_name: Name,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups | None = None,
    tiled: bool = False,
) -> Tree: ...
def axis_index(axis_name: Name) -> Array: ...
def axis_size(axis_name: Name) -> int: ...
def __getattr__(name: str) -> Any: ...
