"""What the weight files of all models share: tensors by name, checked against a config's shapes.

The module of a model gives a `Layout`: where the file differs from the tree of parameters.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy

from decent_jax.ground.json_files import write_atomic

_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_LEAVES |= {"mean": "running_mean", "var": "running_var"}


class Layout(NamedTuple):
    """Names and axes of a file.

    Attributes:
      modules: names there of our modules, of those that have another one.
      transposed: whether kernels begin with their outputs there: ``(I, O)`` is ``(O, I)``, and a
        convolution's ``(H, W, I, O)`` is ``(O, I, H, W)``.
    """

    modules: Mapping[str, str]
    transposed: bool = True

    def name(self, tree_path: tuple) -> str:
        """``h / 0 / attn / c_proj / kernel`` -> ``model.layers.0.self_attn.o_proj.weight``."""
        *modules, leaf = (str(entry.key) for entry in tree_path)
        return ".".join([*(self.modules.get(name, name) for name in modules), _LEAVES[leaf]])

    def turned(self, tree_path: tuple, x: np.ndarray) -> np.ndarray:
        """The parameter as the file has it; of a matrix also the way back."""
        if not self.transposed or tree_path[-1].key != "kernel":
            return x
        return x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T


def tensors_of(tree: Any, shapes: Any, layout: Layout) -> dict[str, np.ndarray]:
    """The tensors of one model, float32.

    Raises:
      ValueError: one is missing or has another shape than ``shapes`` says.
    """
    given = {layout.name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        own = layout.name(path)
        shape = np.shape(given[own]) if own in given else None
        if shape != leaf.shape:
            raise ValueError(f"parameter {own!r} has the shape {shape}, wanted {leaf.shape}")
        value = layout.turned(path, np.asarray(given[own], np.float32))
        tensors[own] = np.ascontiguousarray(value)
    return tensors


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
