"""Parameters of a GPT-2 or a Llama to and from safetensors files with the published names.

The names are those of Hugging Face's ``GPT2LMHeadModel``, in whose linear layers the weight is
``(inputs, outputs)`` as here, and of ``LlamaForCausalLM``, which holds the transpose.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import safetensors

from decent_jax.ground.json_files import check_regular, read_text
from decent_jax.models import decoders, weight_files
from decent_jax.models.gpt2 import GPT2Config
from decent_jax.models.llama import LlamaConfig
from decent_jax.models.pieces import Params

_PREFIX, _HEAD = "transformer.", "lm_head.weight"
_OF_VOCABULARY = ("wte.weight", "model.embed_tokens.weight", _HEAD)
_IGNORED = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
_GPT2 = weight_files.Layout({}, transposed=False)
_LLAMA = weight_files.Layout(
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


def load_safetensors(path: str | os.PathLike, config: decoders.Config) -> Params:
    """Reads weights, published ones or those `save_safetensors` wrote.

    Names may carry the prefix ``transformer.``. The constants some files hold (causal masks,
    rotary frequencies) are ignored, and so is a tied model's ``lm_head.weight``, which is the token
    embedding again.

    Where ``config.vocab_size`` is larger than the file's (50304 against 50257), the embedding is
    padded with copies of its mean row. The logit of a padding token is then the mean logit, which
    is at most the logarithm of the mean of ``exp``: the loss rises by no more than
    ``log(50304 / 50257) = 0.0009`` nats. (Zero rows, whose logit is 0, would take all the
    probability: the published models' logits lie far below 0.)

    Args:
      path: a ``.safetensors`` file, or the ``model.safetensors.index.json`` beside several.
      config: shapes to expect.

    Returns:
      A nested dict of float32 NumPy arrays, as `decoders.init` shapes it.

    Raises:
      ValueError: a tensor is missing, has another shape, or is not part of this config (more
        layers, biases other than zeros where it has none); it is named.
    """
    layout, left = _layout(config), _stored(Path(path), config)

    def leaf_of(tree_path, leaf):
        own = layout.name(tree_path)
        wanted = layout.turned(tree_path, np.broadcast_to(np.float32(0), leaf.shape)).shape
        if own not in left:
            raise ValueError(f"{path} has no tensor {own!r}")
        file, key = left.pop(own)
        with safetensors.safe_open(file, framework="numpy") as opened:
            value = np.asarray(opened.get_tensor(key), np.float32)  # published ones are bfloat16
        if own in _OF_VOCABULARY and value.ndim == 2:
            missing = max(0, wanted[0] - value.shape[0])
            padding = np.tile(value.mean(0, dtype=np.float64).astype(np.float32), (missing, 1))
            value = np.concatenate([value, padding])
        if value.shape != wanted:
            raise ValueError(
                f"tensor {own!r} of {path} has the shape {value.shape}, the config wants {wanted}"
            )
        return np.ascontiguousarray(layout.turned(tree_path, value))

    params = jax.tree_util.tree_map_with_path(leaf_of, decoders.shapes(config))
    if left:
        raise ValueError(
            f"{path} has a tensor {min(left)!r} that the config has no place for: {config}"
        )
    return params


def _stored(path: Path, config: decoders.Config) -> dict[str, tuple[Path, str]]:
    """Names of tensors without prefix: the file of each, and its name there."""
    files = [path]
    if path.suffix == ".json":
        names = {*json.loads(read_text(path))["weight_map"].values()}
        files = [path.with_name(name) for name in sorted(names)]
    ignored = (*_IGNORED, _HEAD) if config.tied else _IGNORED
    stored = {}
    for file in files:
        check_regular(file)
        with safetensors.safe_open(file, framework="numpy") as opened:
            for key in opened.keys():  # noqa: SIM118
                name = key.removeprefix(_PREFIX)
                if name.endswith(ignored):
                    continue
                # Biases of zeros are none; `save_safetensors` writes them.
                if config.bias or not name.endswith("bias") or np.any(opened.get_tensor(key)):
                    stored[name] = file, key
    return stored


def save_safetensors(
    path: str | os.PathLike,
    params: Params,
    config: decoders.Config,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one model's parameters, with the config in the file's metadata.

    The file appears whole or not at all (it is written under another name and renamed).
    ``transformers`` reads it as ``model.safetensors`` next to a ``config.json`` that holds
    `hf_config`; it knows no GPT-2 without biases, so with ``bias=False`` they are written as zeros.

    Args:
      path: of the file; its folder exists.
      params: of one model (no replica dimension); written as float32.
      config: of ``params``.
      metadata: more strings for the file's metadata.

    Raises:
      ValueError: a parameter is missing or has another shape than ``config`` says.
    """
    tensors = weight_files.tensors_of(params, decoders.shapes(config), _layout(config))
    if isinstance(config, LlamaConfig):
        weight_files.write(path, tensors, metadata, llama_config=config)
        return
    with_biases = decoders.shapes(dataclasses.replace(config, bias=True))
    for tree_path, leaf in jax.tree_util.tree_leaves_with_path(with_biases):
        tensors.setdefault(_GPT2.name(tree_path), np.zeros(leaf.shape, np.float32))
    if not config.tied:  # beside an output layer of its own, the rest has its full name
        tensors = {n if n == _HEAD else _PREFIX + n: x for n, x in tensors.items()}
    weight_files.write(path, tensors, metadata, gpt2_config=config)


def hf_config(config: decoders.Config) -> dict:
    """What ``config.json`` must hold for ``transformers`` to load a saved file."""
    return _hf_gpt2(config) if isinstance(config, GPT2Config) else _hf_llama(config)


def _hf_gpt2(config: GPT2Config) -> dict:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": config.tied,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "bos_token_id": 50256 if config.vocab_size > 50256 else None,
        "eos_token_id": 50256 if config.vocab_size > 50256 else None,
    }


def _hf_llama(config: LlamaConfig) -> dict:
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


def _layout(config: decoders.Config) -> weight_files.Layout:
    return _GPT2 if isinstance(config, GPT2Config) else _LLAMA
