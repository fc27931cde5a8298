"""What the weight files of all models share: tensors by name, checked against a config's shapes.

The module of a model gives two functions: ``name(tree_path)`` of a tensor in the file, and, where
the file holds it another way round, ``turned(tree_path, x)``.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from decent_jax.json_files import write_atomic

Name = Callable[[tuple], str]
Turn = Callable[[tuple, np.ndarray], np.ndarray]


def tensors_of(
    tree: Any, shapes: Any, name: Name, turned: Turn = lambda _, x: x
) -> dict[str, np.ndarray]:
    """The tensors of one model, float32.

    Raises:
      ValueError: one is missing or has another shape than ``shapes`` says.
    """
    given = {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        own = name(path)
        shape = np.shape(given[own]) if own in given else None
        if shape != leaf.shape:
            raise ValueError(f"parameter {own!r} has the shape {shape}, wanted {leaf.shape}")
        tensors[own] = np.ascontiguousarray(turned(path, np.asarray(given[own], np.float32)))
    return tensors


def tree_of(
    path: Any,
    names: Iterable[str],
    read: Callable[[str, tuple[int, ...]], Any],
    shapes: Any,
    name: Name,
    turned: Turn = lambda _, x: x,
    back: Turn = lambda _, x: x,
) -> tuple[Any, set[str]]:
    """The parameters of a file in float32, and the names of the tensors that are left over.

    Args:
      path: for messages.
      names: of the tensors in the file.
      read: a tensor by its name; told the shape that is wanted.
      shapes: of the tree.
      name, turned: see above.
      back: the inverse of ``turned``.

    Raises:
      ValueError: one is missing or has another shape; the first is named.
    """
    left = set(names)

    def leaf_of(tree_path, leaf):
        own = name(tree_path)
        wanted = turned(tree_path, np.broadcast_to(np.float32(0), leaf.shape)).shape
        if own not in left:
            raise ValueError(f"{path} has no tensor {own!r}")
        left.remove(own)
        value = np.asarray(read(own, wanted), np.float32)
        if value.shape != wanted:
            raise ValueError(
                f"tensor {own!r} of {path} has the shape {value.shape}, the config wants {wanted}"
            )
        return np.ascontiguousarray(back(tree_path, value))

    return jax.tree_util.tree_map_with_path(leaf_of, shapes), left


def check_rest(path: Any, left: Iterable[str], config: Any) -> None:
    """Refuse a file with tensors that a config has no place for."""
    if left:
        raise ValueError(
            f"{path} has a tensor {min(left)!r} that the config has no place for: {config}"
        )


def write(
    path: Any,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None,
    **configs: Any,
) -> None:
    """The file appears whole or not at all, and not only its owner may read it.

    Its metadata are those given, and under ``decent_jax.NAME`` each config, a dataclass.
    """
    about = {"format": "pt", **(metadata or {})}
    for name, config in configs.items():
        about[f"decent_jax.{name}"] = json.dumps(dataclasses.asdict(config))
    contents = safetensors.numpy.save(dict(tensors), about)
    write_atomic(Path(path), contents)
