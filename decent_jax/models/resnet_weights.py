"""ResNet parameters and statistics to safetensors files, named as torchvision's are.

A file holds what ``state_dict()`` of torchvision's ``resnet18`` to ``resnet152`` (version 1.5, the
stride in the 3x3 convolution) holds: ``conv1.weight``, ``bn1.running_mean``,
``layer1.0.downsample.0.weight``, ``fc.weight`` and so on, all float32. Convolutions are
``(outputs, inputs, height, width)`` there and ``(height, width, inputs, outputs)`` here, the last
layer is ``(outputs, inputs)`` there. Networks that torchvision lacks (other blocks, another width,
the stem for small images) are named by the same rule.
"""

import operator
import os
from collections.abc import Mapping, Sequence

import numpy as np
from flax import nnx

from decent_jax.models import pieces, resnet, weight_files
from decent_jax.models.resnet import Params, ResNetConfig, Statistics

_LAYOUT = weight_files.Layout({"conv": "0", "bn": "1"})  # the two modules of a downsample


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
    tensors = {}
    for kind, tree in ((nnx.Param, params), (nnx.BatchStat, statistics)):
        shapes = pieces.shapes(resnet.ResNet, config, kind)
        tensors |= weight_files.tensors_of(tree, shapes, _LAYOUT)
    for name in [name for name in tensors if name.endswith("running_var")]:
        tensors[name.replace("running_var", "num_batches_tracked")] = np.array(step, np.int64)
    weight_files.write(path, tensors, metadata)


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
