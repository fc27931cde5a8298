"""ResNet parameters and statistics to and from safetensors files, named as torchvision's are.

A file holds what ``state_dict()`` of torchvision's ``resnet18`` to ``resnet152`` (version 1.5, the
stride in the 3x3 convolution) holds: ``conv1.weight``, ``bn1.running_mean``,
``layer1.0.downsample.0.weight``, ``fc.weight`` and so on, all float32. Convolutions are
``(outputs, inputs, height, width)`` there and ``(height, width, inputs, outputs)`` here, the last
layer is ``(outputs, inputs)`` there. Networks that torchvision lacks (other blocks, another width,
the stem for small images) are named by the same rule.
"""

import json
import operator
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import safetensors

from decent_jax.models import resnet, weight_files
from decent_jax.models.resnet import Params, ResNetConfig, Statistics

_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_LEAVES |= {"mean": "running_mean", "var": "running_var"}
_DOWNSAMPLE = {"conv": "0", "bn": "1"}
_COUNT = "num_batches_tracked"  # of each batch norm; no arithmetic of the network reads it


def save(
    path: str | os.PathLike,
    params: Params,
    statistics: Statistics,
    config: ResNetConfig,
    *,
    step: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one model; the file appears whole or not at all.

    Args:
      path: of the file; its folder exists.
      params: of one model (no replica dimension); written as float32.
      statistics: that it is evaluated with.
      config: of both.
      step: training steps, for torchvision's ``num_batches_tracked``.
      metadata: strings for the file's metadata.

    Raises:
      ValueError: a tensor is missing or has another shape than ``config`` says.
    """
    tensors = weight_files.tensors_of((params, statistics), _shapes(config), _name, _turned)
    for name in [name for name in tensors if name.endswith("running_var")]:
        tensors[name.replace("running_var", _COUNT)] = np.array(step, np.int64)
    weight_files.write(path, tensors, metadata)


def load(path: str | os.PathLike, config: ResNetConfig) -> tuple[Params, Statistics]:
    """Reads what `save` wrote, or torchvision's weights once they are a ``.safetensors`` file.

    Args:
      path: of the file.
      config: shapes to expect.

    Returns:
      (params, statistics): nested dicts of float32 NumPy arrays, as `resnet.init` shapes them.

    Raises:
      ValueError: a tensor is missing, has another shape, or is not part of this config; the
        first one is named.
    """
    with safetensors.safe_open(path, framework="numpy") as file:
        stored = [name for name in file.keys() if not name.endswith(_COUNT)]  # noqa: SIM118
        model, left = weight_files.tree_of(
            *(path, stored, lambda name, _: file.get_tensor(name), _shapes(config), _name),
            turned=_turned,
            back=_turned_back,
        )
    weight_files.check_rest(path, left, config)
    return model


def architecture(config: ResNetConfig) -> str | None:
    """Name of torchvision's function that makes this network; None where it has none.

    Example:
      >>> architecture(resnet.PRESETS["resnet50"])
      'resnet50'
    """
    shape = operator.attrgetter("blocks", "bottleneck", "width", "small_images")
    names = {shape(preset): name for name, preset in resnet.PRESETS.items()}
    return None if config.small_images else names.get(shape(config))


def description(
    config: ResNetConfig,
    *,
    class_names: Sequence[str] | None,
    image_size: int,
    resize: int | None,
) -> dict:
    """Returns what a user of the tensors needs to know, for a ``config.json``.

    Args:
      config: of the network.
      class_names: (num_classes,) in the order of the outputs; None: not known.
      image_size: pixels, of an image in evaluation.
      resize: what the shorter side of a photograph is made before that centre crop; None: no
        crop.
    """
    return {
        "architecture": architecture(config),  # null: torchvision has no such network
        "blocks": list(config.blocks),
        "bottleneck": config.bottleneck,
        "width": config.width,
        "small_images": config.small_images,
        "num_classes": config.num_classes,
        "class_names": None if class_names is None else list(class_names),
        "image_size": image_size,
        "resize": resize,
        "mean": list(resnet.MEAN),
        "std": list(resnet.STD),
        "batch_norm_eps": resnet.EPSILON,
    }


def dumps(described: Mapping) -> str:
    """JSON with one line per field, for people to read too."""
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in described.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _shapes(config: ResNetConfig):
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lambda key: resnet.init(config, key), key)


def _name(tree_path) -> str:
    """``layer1 / 0 / downsample / bn / mean`` -> ``layer1.0.downsample.1.running_mean``."""
    *modules, leaf = (str(entry.key) for entry in tree_path[1:])  # 0: which of the two trees
    if "downsample" in modules:
        modules[-1] = _DOWNSAMPLE[modules[-1]]
    return ".".join([*modules, _LEAVES[leaf]])


def _turned(_, x: np.ndarray) -> np.ndarray:
    """A convolution's HWIO to OIHW, the last layer's (I, O) to (O, I); vectors as they are."""
    return x.transpose({4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[x.ndim])


def _turned_back(_, x: np.ndarray) -> np.ndarray:
    return x.transpose({4: (2, 3, 1, 0), 2: (1, 0)}.get(x.ndim, tuple(range(x.ndim))))
