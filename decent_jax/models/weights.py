"""Models as safetensors files, with the tensor names of Hugging Face and torchvision.

* Decoders: ``GPT2LMHeadModel``, whose linear weights are ``(inputs, outputs)`` as here, and
  ``LlamaForCausalLM``, whose linear weights are ``(outputs, inputs)``.
* Transformers: ``MarianMTModel`` for ``norm="post"``, ``PegasusForConditionalGeneration`` for
  ``norm="pre"``. Both have the sines of the positions in the first half of a hidden vector and the
  cosines in the second. Ours alternate, so the axes of hidden vectors are permuted to that order.
  Their linear weights are ``(outputs, inputs)``, and biases that our layers lack are zeros.
* ResNets: the ``state_dict()`` of torchvision's ``resnet18`` to ``resnet152`` (version 1.5, the
  stride in the 3x3 convolution). Convolutions are ``(outputs, inputs, height, width)`` there and
  ``(height, width, inputs, outputs)`` here. Networks that torchvision lacks (other blocks, another
  width, the stem for small images) have tensor names by the same rule.

A file is float32 and written atomically. ``transformers`` reads it as ``model.safetensors`` next to
a ``config.json`` with the result of `decent_jax.models.hf_config.describe`.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from decent_jax.ground.json_files import check_regular, read_json, write_atomic
from decent_jax.models import decoders, hf_config, pieces, resnet, transformer
from decent_jax.models.gpt2 import GPT2Config
from decent_jax.models.pieces import Params
from decent_jax.models.resnet import ResNetConfig
from decent_jax.models.transformer import TransformerConfig

_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_LEAVES |= {"mean": "running_mean", "var": "running_var"}


class _Layout(NamedTuple):
    """The names and axes of parameters in a file.

    Attributes:
      modules: the file's names of our modules, where they differ.
      transposed: whether kernels in the file have outputs first.
    """

    modules: Mapping[str, str]
    transposed: bool = True

    def name(self, tree_path: tuple) -> str:
        """``h / 0 / attn / c_proj / kernel`` -> ``model.layers.0.self_attn.o_proj.weight``."""
        *modules, leaf = (str(entry.key) for entry in tree_path)
        return ".".join([*(self.modules.get(name, name) for name in modules), _LEAVES[leaf]])

    def turned(self, tree_path: tuple, x: np.ndarray) -> np.ndarray:
        """The parameter as stored in the file; for a matrix the transform is its own inverse."""
        if not self.transposed or tree_path[-1].key != "kernel":
            return x
        return x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T


_GPT2 = _Layout({}, transposed=False)
_LLAMA = _Layout(
    {
        "wte": "model.embed_tokens",
        "h": "model.layers",
        "ln_1": "input_layernorm",
        "attn": "self_attn",
        "c_proj": "o_proj",
        "ln_2": "post_attention_layernorm",
        "ln_f": "model.norm",
    }
)
_TRANSFORMER = _Layout(
    {
        "shared": "model.shared",
        "encoder": "model.encoder.layers",
        "decoder": "model.decoder.layers",
        "self_attention": "self_attn",
        "cross_attention": "encoder_attn",
        "self_norm": "self_attn_layer_norm",
        "cross_norm": "encoder_attn_layer_norm",
        "ff_norm": "final_layer_norm",
        "ff_in": "fc1",
        "ff_out": "fc2",
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "out": "out_proj",
        "encoder_norm": "model.encoder.layer_norm",
        "decoder_norm": "model.decoder.layer_norm",
    }
)
_RESNET = _Layout({"conv": "0", "bn": "1"})  # the two modules of a downsample


def _tensors(tree: Params, shapes: Params, layout: _Layout) -> dict[str, np.ndarray]:
    """The tensors of one model by name; ValueError if one is missing or has another shape."""
    leaves = {layout.name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        own = layout.name(path)
        shape = np.shape(leaves[own]) if own in leaves else None
        if shape != leaf.shape:
            raise ValueError(f"parameter {own!r} has the shape {shape}, wanted {leaf.shape}")
        value = layout.turned(path, np.asarray(leaves[own], np.float32))
        tensors[own] = np.ascontiguousarray(value)
    return tensors


def _write(path: Path, tensors: dict[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    write_atomic(path, safetensors.numpy.save(tensors, {"format": "pt", **metadata}))


# --- Decoders -----------------------------------------------------------------------------------

_PREFIXES = "_orig_mod.", "transformer."  # of torch.compile and of GPT2LMHeadModel
_HEAD = "lm_head.weight"
_OF_VOCABULARY = ("wte.weight", "model.embed_tokens.weight", _HEAD)
_IGNORED = (".attn.bias", ".attn.masked_bias")
_FREQUENCIES = "rotary_emb.inv_freq"
_FLOATS = ("F64", "F32", "F16", "BF16")  # names of dtypes in a file


def load_decoder(path: str | Path, config: decoders.Config) -> Params:
    """Reads published weights or those written by `save_decoder`.

    A ``config.json`` next to the file must describe this model (`decent_jax.models.hf_config`).
    Names may have the prefixes ``_orig_mod.`` and ``transformer.``. Causal masks in a file are
    ignored. A tied model's ``lm_head.weight`` is ignored if it repeats the token embedding; if only
    ``lm_head.weight`` is stored, it is the embedding. If two shards hold the same tensor, the index
    decides which one counts.

    If ``config.vocab_size`` is larger than the file's (50304 against 50257), the embedding is
    padded with copies of its mean row. The logit of a padding token is then the mean logit, which
    is at most the logarithm of the mean of ``exp``: the loss rises by no more than
    ``log(50304 / 50257) = 0.0009`` nats. (Zero rows, whose logit is 0, would take all the
    probability, because the published models' logits lie far below 0.)

    Args:
      path: a ``.safetensors`` file, or the ``model.safetensors.index.json`` of a sharded one.
      config: the expected shapes.

    Returns:
      A nested dict of float32 NumPy arrays, in the form of `decoders.init`.

    Raises:
      ValueError: ``config.json`` describes another model; a tensor is missing, stored twice, not
        finite, of another shape, or not part of this config (more layers, a separate output layer,
        nonzero biases where it has none, other rotary frequencies); or a file is missing or not a
        safetensors file. The message names the tensor or the file.
    """
    path = Path(path)
    layout, left = _decoder_layout(config), _stored(path, config)
    hf_config.check(path.with_name("config.json"), config, own_head=_HEAD in left)
    tied_head = left.pop(_HEAD, None) if config.tied else None

    def leaf_of(tree_path, leaf):
        own = layout.name(tree_path)
        wanted = layout.turned(tree_path, np.broadcast_to(np.float32(0), leaf.shape)).shape
        if own in _OF_VOCABULARY and tied_head:
            left.setdefault(own, tied_head)
        if own not in left:
            others = ", ".join(sorted(left)[:3]) or "no others"
            raise ValueError(f"{path} has no tensor {own!r}; it has {others}")
        value = _read(*left.pop(own))
        if own in _OF_VOCABULARY and tied_head and not np.array_equal(value, _read(*tied_head)):
            raise ValueError(
                f"{path} has an output layer {_HEAD!r} that differs from the token embedding; set "
                "model.tied=False"
            )
        if own in _OF_VOCABULARY and value.ndim == 2:
            missing = max(0, wanted[0] - value.shape[0])
            padding = np.tile(value.mean(0, dtype=np.float64).astype(np.float32), (missing, 1))
            value = np.concatenate([value, padding])
        if value.shape != wanted:
            rows = own in _OF_VOCABULARY and value.shape[1:] == wanted[1:]
            raise ValueError(
                f"tensor {own!r} of {path} has the shape {value.shape}, the config wants {wanted}"
                + (f"; set model.vocab_size={len(value)}" if rows else "")
            )
        return np.ascontiguousarray(layout.turned(tree_path, value))

    params = jax.tree_util.tree_map_with_path(leaf_of, decoders.shapes(config))
    if left:
        raise ValueError(
            f"{path} has a tensor {min(left)!r} that does not fit the config: {config}"
        )
    return params


def _read(file: Path, key: str) -> np.ndarray:
    """One tensor in float32; published tensors are often bfloat16."""
    with safetensors.safe_open(file, framework="numpy") as opened:
        value = np.asarray(_tensor(opened, file, key), np.float32)
    if not np.isfinite(value).all():
        raise ValueError(f"tensor {key!r} of {file} has a value that is not finite")
    return value


def _tensor(opened: Any, file: Path, key: str) -> np.ndarray:
    """One tensor of an open file; ValueError if it is not of a floating-point type of `_FLOATS`."""
    kind = opened.get_slice(key).get_dtype()
    if kind not in _FLOATS:
        raise ValueError(
            f"tensor {key!r} of {file} is {kind}; quantized weights must be dequantized first"
        )
    return opened.get_tensor(key)


def _stored(path: Path, config: decoders.Config) -> dict[str, tuple[Path, str]]:
    """{name of a tensor without prefixes: (its file, its name in that file)}."""
    files, place = [path], {}
    if path.suffix == ".json":
        otherwise = "is no index of .safetensors files; give such an index, or a .safetensors file"
        place = read_json(path, otherwise)
        place = place.get("weight_map") if isinstance(place, dict) else None
        if not place or not isinstance(place, dict) or {*map(type, place.values())} != {str}:
            raise ValueError(f"{path}: {otherwise}")
        if outside := [name for name in place.values() if Path(name).name != name or not name]:
            raise ValueError(f"{path} names {outside[0]!r}; its files must be in its own folder")
        files = [path.with_name(name) for name in sorted(set(place.values()))]
    stored = {}
    for file in files:
        with _opened(file) as opened:
            for key in opened.keys():  # noqa: SIM118
                name = functools.reduce(str.removeprefix, _PREFIXES, key)
                if name.endswith(_FREQUENCIES):
                    frequencies = _tensor(opened, file, key)
                    _check_frequencies(frequencies, f"{key!r} of {file}", config)
                if name.endswith((*_IGNORED, _FREQUENCIES)):
                    continue
                if name in stored and key in place:  # the index decides which one is stale
                    if place[key] != file.name:
                        continue
                elif name in stored:
                    raise ValueError(f"{path} has the tensor {name!r} twice")
                # Zero biases count as none, because `save_decoder` writes them.
                if config.bias or not name.endswith("bias") or np.any(_tensor(opened, file, key)):
                    stored[name] = file, key
    return stored


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a safetensors file; ValueError, in one sentence, if it is not one."""
    try:
        check_regular(file)
        with safetensors.safe_open(file, framework="numpy") as opened:
            yield opened
    except OSError as error:
        why = error.strerror or "no such file"
        raise ValueError(f"{file} cannot be read ({why}); fetch all files again") from None
    except safetensors.SafetensorError as error:
        with open(file, "rb") as other:
            begins = other.read(16)
        raise ValueError(
            f"{file} is not a complete .safetensors file ({error}); it starts with {begins!r}"
        ) from None


def _check_frequencies(stored: np.ndarray, name: str, config: decoders.Config) -> None:
    """Raises ValueError if the stored rotary frequencies are not those of ``config.rope_theta``."""
    theta, places = getattr(config, "rope_theta", math.nan), np.arange(stored.size) / stored.size
    if not np.allclose(stored, theta**-places, rtol=0.02):  # bfloat16 rounds
        raise ValueError(f"{name} has other frequencies than those of model.rope_theta {theta:g}")


def save_decoder(
    path: Path, params: Params, config: decoders.Config, metadata: Mapping[str, str]
) -> None:
    """Writes one model's parameters (no replica dimension), with ``metadata`` in the file's header.

    ``transformers`` has no GPT-2 without biases, so zero biases are written for ``bias=False``.

    Raises:
      ValueError: a parameter is missing or does not have the shape in ``config``.
    """
    tensors = _tensors(params, decoders.shapes(config), _decoder_layout(config))
    if isinstance(config, GPT2Config):
        with_biases = decoders.shapes(dataclasses.replace(config, bias=True))
        for tree_path, leaf in jax.tree_util.tree_leaves_with_path(with_biases):
            tensors.setdefault(_GPT2.name(tree_path), np.zeros(leaf.shape, np.float32))
        if not config.tied:  # next to a separate output layer, all other tensors have full names
            tensors = {n if n == _HEAD else f"transformer.{n}": x for n, x in tensors.items()}
    _write(path, tensors, metadata)


def _decoder_layout(config: decoders.Config) -> _Layout:
    return _GPT2 if isinstance(config, GPT2Config) else _LLAMA


# --- Transformers -------------------------------------------------------------------------------


def save_transformer(
    path: Path, params: Params, config: TransformerConfig, metadata: Mapping[str, str]
) -> None:
    """Writes one model's parameters; ValueError as in `save_decoder`."""
    shapes = pieces.shapes(transformer.Transformer, config)
    params = jax.tree_util.tree_map_with_path(_reordered, params)
    tensors = _tensors(params, shapes, _TRANSFORMER)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name.replace("weight", "bias")] = np.zeros(config.width, np.float32)
    tensors["final_logits_bias"] = np.zeros((1, config.vocab_size), np.float32)
    sines = np.asarray(transformer.sinusoids(jnp.arange(hf_config.POSITIONS), config.width))
    for side in ("encoder", "decoder"):
        positions = np.ascontiguousarray(sines[:, _order(config.width)])
        tensors[f"model.{side}.embed_positions.weight"] = positions
    _write(path, tensors, metadata)


def _order(width: int) -> np.ndarray:
    """Our columns of a hidden vector in the order of the file: sines, then cosines."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def _reordered(tree_path, value: np.ndarray) -> np.ndarray:
    """The parameter, with the hidden vectors that it reads or writes in the order of `_order`."""
    *_, module, leaf = (entry.key for entry in tree_path)
    if module == "ff_in" and leaf == "bias":
        return value
    axis = 0 if leaf == "kernel" and module not in ("out", "ff_out") else -1
    return np.take(value, _order(value.shape[axis]), axis)


# --- ResNets ------------------------------------------------------------------------------------


def save_resnet(
    path: Path,
    params: Params,
    statistics: resnet.Statistics,
    config: ResNetConfig,
    step: int,
    metadata: Mapping[str, str],
) -> None:
    """Writes one model and its evaluation statistics; ValueError as in `save_decoder`.

    ``step`` is torchvision's ``num_batches_tracked``.
    """
    tensors = {}
    for kind, tree in ((nnx.Param, params), (nnx.BatchStat, statistics)):
        tensors |= _tensors(tree, pieces.shapes(resnet.ResNet, config, kind), _RESNET)
    for name in [name for name in tensors if name.endswith("running_var")]:
        tensors[name.replace("running_var", "num_batches_tracked")] = np.array(step, np.int64)
    _write(path, tensors, metadata)


def architecture(config: ResNetConfig) -> str | None:
    """The name of torchvision's function for this network; None if torchvision lacks it."""
    shape = operator.attrgetter("blocks", "bottleneck", "width", "small_images")
    names = {shape(preset): name for name, preset in resnet.PRESETS.items()}
    return None if config.small_images else names.get(shape(config))


def describe_resnet(
    config: ResNetConfig, class_names: Sequence[str] | None, image_size: int, resize: int | None
) -> dict:
    """The contents of a ``config.json`` for users of the tensors.

    Args:
      config: the network's shape and numerics.
      class_names: (num_classes,) names in the order of the outputs; None if they are unknown.
      image_size: side of an image in evaluation, in pixels.
      resize: shorter side of a photograph before the centre crop, in pixels; None means no crop.
    """
    return {
        "architecture": architecture(config),  # null: torchvision has no such network
        "blocks": list(config.blocks),
        "bottleneck": config.bottleneck,
        "width": config.width,
        "small_images": config.small_images,
        "num_classes": config.num_classes,
        "class_names": class_names and list(class_names),
        "image_size": image_size,
        "resize": resize,
        "mean": list(resnet.MEAN),
        "std": list(resnet.STD),
        "batch_norm_eps": resnet.EPSILON,
    }
