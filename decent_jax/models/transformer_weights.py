"""Transformer parameters to safetensors files that `transformers` loads.

A model with ``norm="post"`` is a ``MarianMTModel`` there, one with ``norm="pre"`` a
``PegasusForConditionalGeneration``. Both have the sines of the positions in the first half of a
hidden vector and the cosines in the second, where ours alternate, so every hidden vector is written
in that order. Their linear layers hold ``(outputs, inputs)``, and biases that ours lack are zeros.
"""

import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.models import pieces, transformer, weight_files
from decent_jax.models.transformer import END, PAD, START, TransformerConfig

POSITIONS = 2048  # tokens that a sentence or its translation may have in `transformers`

_LAYOUT = weight_files.Layout(
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


def save_safetensors(
    path: str | os.PathLike,
    params: transformer.Params,
    config: TransformerConfig,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one model's parameters as float32, with the config in the file's metadata.

    The file appears whole or not at all. ``transformers`` reads it as ``model.safetensors`` next
    to a ``config.json`` that holds `hf_config`.

    Raises:
      ValueError: a parameter is missing or has another shape than ``config`` says.
    """
    shapes = pieces.shapes(transformer.Transformer, config)
    params = jax.tree_util.tree_map_with_path(_reordered, params)
    tensors = weight_files.tensors_of(params, shapes, _LAYOUT)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name.replace("weight", "bias")] = np.zeros(config.width, np.float32)
    tensors["final_logits_bias"] = np.zeros((1, config.vocab_size), np.float32)
    sines = np.asarray(transformer.sinusoids(jnp.arange(POSITIONS), config.width))
    for side in ("encoder", "decoder"):
        positions = np.ascontiguousarray(sines[:, _order(config.width)])
        tensors[f"model.{side}.embed_positions.weight"] = positions
    weight_files.write(path, tensors, metadata, transformer_config=config)


def hf_config(config: TransformerConfig) -> dict:
    """What ``config.json`` must hold for ``transformers`` to load a saved file."""
    post = config.norm == "post"
    sides = ("encoder", "decoder")
    return {
        "model_type": "marian" if post else "pegasus",
        "architectures": ["MarianMTModel" if post else "PegasusForConditionalGeneration"],
        "vocab_size": config.vocab_size,
        "d_model": config.width,
        **{f"{side}_layers": config.layers for side in sides},
        **{f"{side}_attention_heads": config.heads for side in sides},
        **{f"{side}_ffn_dim": config.ff for side in sides},
        "activation_function": "relu",
        "dropout": config.dropout,
        "attention_dropout": config.dropout,
        "activation_dropout": config.dropout,
        "scale_embedding": True,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        **special_ids(),
        "forced_eos_token_id": None,
    }


def special_ids() -> dict[str, int]:
    """The ids that ``config.json`` and ``generation_config.json`` name."""
    return {
        "pad_token_id": PAD,
        "bos_token_id": START,
        "eos_token_id": END,
        "decoder_start_token_id": START,
    }


def _order(width: int) -> np.ndarray:
    """Our columns of a hidden vector in the order of the file: sines, then cosines."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def _reordered(tree_path, value: np.ndarray) -> np.ndarray:
    """The parameter with the hidden vectors that it reads or writes in that order."""
    *_, module, leaf = (entry.key for entry in tree_path)
    if module == "ff_in" and leaf == "bias":
        return value
    axis = 0 if leaf == "kernel" and module not in ("out", "ff_out") else -1
    return np.take(value, _order(value.shape[axis]), axis)
