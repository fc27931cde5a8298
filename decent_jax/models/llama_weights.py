"""Llama parameters to and from safetensors files with the names of the published weights.

The names are those of Hugging Face's ``LlamaForCausalLM``, whose linear layers hold
``(outputs, inputs)``: the transpose of ours.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors

from decent_jax.json_files import read_text
from decent_jax.models import llama, pieces, weight_files

_LAYOUT = weight_files.Layout(
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


def load_safetensors(path: str | os.PathLike, config: llama.LlamaConfig) -> pieces.Params:
    """Reads Llama weights, published ones or those `save_safetensors` wrote.

    Args:
      path: a ``.safetensors`` file, or the ``model.safetensors.index.json`` beside several.
      config: shapes to expect.

    Returns:
      A nested dict of float32 NumPy arrays, as `decoders.init` shapes it.

    Raises:
      ValueError: a tensor is missing, has another shape, or is not part of this config.
    """
    ignored = ("rotary_emb.inv_freq", *["lm_head.weight"] * config.tied)  # the embedding again
    files = {
        name: file
        for file in _files(Path(path))
        for name in _names_in(file)
        if not name.endswith(ignored)
    }

    def read(name, _):
        with safetensors.safe_open(files[name], framework="numpy") as file:
            return file.get_tensor(name)  # published ones are bfloat16

    shapes = pieces.shapes(llama.Llama, config)
    return weight_files.tree_of(path, files, read, config, shapes, _LAYOUT)


def save_safetensors(
    path: str | os.PathLike,
    params: pieces.Params,
    config: llama.LlamaConfig,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one model's parameters as float32, with the config in the file's metadata.

    The file appears whole or not at all. ``transformers`` reads it as ``model.safetensors`` next
    to a ``config.json`` that holds `hf_config`.

    Raises:
      ValueError: a parameter is missing or has another shape than ``config`` says.
    """
    tensors = weight_files.tensors_of(params, pieces.shapes(llama.Llama, config), _LAYOUT)
    weight_files.write(path, tensors, metadata, llama_config=config)


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
        for name in sorted({*json.loads(read_text(path))["weight_map"].values()})
    ]


def _names_in(path: Path) -> Iterator[str]:
    with safetensors.safe_open(path, framework="numpy") as file:
        yield from file.keys()
