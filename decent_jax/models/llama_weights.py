"""Llama parameters to and from safetensors files with the names of the published weights.

The names are those of Hugging Face's ``LlamaForCausalLM``, whose linear layers hold
``(outputs, inputs)``: the transpose of ours.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import safetensors
import safetensors.numpy

from decent_jax.json_files import write_atomic
from decent_jax.models import llama, pieces

_MODULES = {
    "wte": "model.embed_tokens",
    "h": "model.layers",
    "ln_1": "input_layernorm",
    "attn": "self_attn",
    "c_proj": "o_proj",
    "ln_2": "post_attention_layernorm",
    "ln_f": "model.norm",
}
_CONFIG_KEY = "decent_jax.llama_config"


def load_safetensors(path: str | os.PathLike, config: llama.LlamaConfig) -> llama.Params:
    """Reads Llama weights, published ones or those `save_safetensors` wrote.

    Args:
      path: a ``.safetensors`` file, or the ``model.safetensors.index.json`` beside several.
      config: shapes to expect.

    Returns:
      A nested dict of float32 NumPy arrays, as `llama.init` shapes it.

    Raises:
      ValueError: a tensor is missing, has another shape, or is not part of this config.
    """
    files = {name: file for file in _files(Path(path)) for name in _names_in(file)}
    if config.tied:  # some files hold the embedding twice
        files.pop("lm_head.weight", None)

    def read(tree_path, leaf):
        name = _name(tree_path)
        if name not in files:
            raise ValueError(f"{path} has no tensor {name!r}")
        with safetensors.safe_open(files.pop(name), framework="numpy") as file:
            value = np.asarray(file.get_tensor(name), np.float32)  # published ones are bfloat16
        value = value.T if tree_path[-1].key == "kernel" else value
        if value.shape != leaf.shape:
            raise ValueError(
                f"tensor {name!r} of {path} has the shape {value.shape} (a matrix transposed), "
                f"the config wants {leaf.shape}"
            )
        return np.ascontiguousarray(value)

    params = jax.tree_util.tree_map_with_path(read, pieces.shapes(llama.Llama, config))
    rest = [name for name in files if not name.endswith("rotary_emb.inv_freq")]
    if rest:
        raise ValueError(
            f"{path} has a tensor {min(rest)!r} that the config has no place for: {config}"
        )
    return params


def save_safetensors(
    path: str | os.PathLike,
    params: llama.Params,
    config: llama.LlamaConfig,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one model's parameters as float32, with the config in the file's metadata.

    The file appears whole or not at all. ``transformers`` reads it as ``model.safetensors`` next
    to a ``config.json`` that holds `hf_config`.

    Raises:
      ValueError: a parameter is missing or has another shape than ``config`` says.
    """
    tensors = {}
    given = {_name(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(params)}
    shapes = pieces.shapes(llama.Llama, config)
    for tree_path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = _name(tree_path)
        if name not in given or np.shape(given[name]) != leaf.shape:
            shape = np.shape(given[name]) if name in given else None
            raise ValueError(f"parameter {name!r} has the shape {shape}, wanted {leaf.shape}")
        value = np.asarray(given[name], np.float32)
        value = value.T if tree_path[-1].key == "kernel" else value
        tensors[name] = np.ascontiguousarray(value)
    stored_config = json.dumps(dataclasses.asdict(config))
    metadata = {"format": "pt", **(metadata or {}), _CONFIG_KEY: stored_config}
    write_atomic(Path(path), safetensors.numpy.save(tensors, metadata))


def hf_config(config: llama.LlamaConfig) -> dict:
    """What ``config.json`` must hold for ``transformers`` to load a saved file."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.width // config.heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _files(path: Path) -> list[Path]:
    if path.suffix != ".json":
        return [path]
    return [
        path.with_name(name)
        for name in sorted({*json.loads(path.read_text())["weight_map"].values()})
    ]


def _names_in(path: Path) -> Iterator[str]:
    with safetensors.safe_open(path, framework="numpy") as file:
        yield from file.keys()


def _name(tree_path) -> str:
    """``h / 0 / attn / c_proj / kernel`` -> ``model.layers.0.self_attn.o_proj.weight``."""
    *modules, _ = (str(entry.key) for entry in tree_path)
    return ".".join([*(_MODULES.get(module, module) for module in modules), "weight"])
