"""Trees with the paths of their leaves, whose keys jax types as unbound variables."""

from collections.abc import Callable
from typing import Any

from jaxlib._jax.pytree import PyTreeDef as PyTreeDef

KeyPath = tuple[Any, ...]
IsLeaf = Callable[[Any], bool] | None

def keystr(keys: KeyPath, *, simple: bool = False, separator: str = "") -> str: ...
def tree_flatten_with_path(
    tree: Any, is_leaf: IsLeaf = None
) -> tuple[list[tuple[KeyPath, Any]], PyTreeDef]: ...
def tree_leaves_with_path(tree: Any, is_leaf: IsLeaf = None) -> list[tuple[KeyPath, Any]]: ...
def tree_map_with_path(
    f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None
) -> Any: ...
def __getattr__(name: str) -> Any: ...
