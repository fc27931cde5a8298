"""GPT-2 parameters to and from safetensors files with the names of the published weights.

The names are those of Hugging Face's ``GPT2LMHeadModel``, in whose linear layers the weight is
``(inputs, outputs)`` as here, so no tensor is transposed.
"""

import dataclasses
import os
from collections.abc import Mapping

import jax
import numpy as np
import safetensors

from decent_jax.models import gpt2, pieces, weight_files

_PREFIX, _HEAD = "transformer.", "lm_head.weight"
_LAYOUT = weight_files.Layout({}, transposed=False)


def load_safetensors(path: str | os.PathLike, config: gpt2.GPT2Config) -> pieces.Params:
    """Reads GPT-2 weights, published ones or those `save_safetensors` wrote.

    Names may carry the prefix ``transformer.``. The causal masks some files hold
    (``h.*.attn.bias``, ``h.*.attn.masked_bias``) are ignored, and so is a tied model's
    ``lm_head.weight``, which is the token embedding again.

    Where ``config.vocab_size`` is larger than the file's (50304 against 50257), the embedding is
    padded with copies of its mean row. The logit of a padding token is then the mean logit, which
    is at most the logarithm of the mean of ``exp``: the loss rises by no more than
    ``log(50304 / 50257) = 0.0009`` nats. (Zero rows, whose logit is 0, would take all the
    probability: the published models' logits lie far below 0.)

    Args:
      path: a ``.safetensors`` file.
      config: shapes to expect.

    Returns:
      A nested dict of float32 NumPy arrays, as `decoders.init` shapes it.

    Raises:
      ValueError: a tensor is missing, has another shape, or is not part of this config (more
        layers, biases other than zeros where it has none); the first one is named.
    """
    with safetensors.safe_open(path, framework="numpy") as file:
        stored = {key.removeprefix(_PREFIX): key for key in file.keys()}  # noqa: SIM118
        ignored = (".attn.bias", ".attn.masked_bias", *[_HEAD] * config.tied)
        stored = {name: key for name, key in stored.items() if not name.endswith(ignored)}
        if not config.bias:  # biases of zeros are none; `save_safetensors` writes them
            for name in [name for name in stored if name.endswith("bias")]:
                if not np.any(file.get_tensor(stored[name])):
                    del stored[name]

        def read(name, shape):
            value = np.asarray(file.get_tensor(stored[name]), np.float32)
            if name in ("wte.weight", _HEAD) and value.ndim == 2:
                missing = max(0, shape[0] - value.shape[0])
                padding = np.tile(value.mean(0, dtype=np.float64).astype(np.float32), (missing, 1))
                value = np.concatenate([value, padding])
            return value

        return weight_files.tree_of(path, stored, read, config, _shapes(config), _LAYOUT)


def save_safetensors(
    path: str | os.PathLike,
    params: pieces.Params,
    config: gpt2.GPT2Config,
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
    tensors = weight_files.tensors_of(params, _shapes(config), _LAYOUT)
    with_biases = _shapes(dataclasses.replace(config, bias=True))
    for tree_path, leaf in jax.tree_util.tree_leaves_with_path(with_biases):
        tensors.setdefault(_LAYOUT.name(tree_path), np.zeros(leaf.shape, np.float32))
    if not config.tied:  # beside an output layer of its own, the rest has its full name
        tensors = {n if n == _HEAD else _PREFIX + n: x for n, x in tensors.items()}
    weight_files.write(path, tensors, metadata, gpt2_config=config)


def hf_config(config: gpt2.GPT2Config) -> dict:
    """What ``config.json`` must hold for ``transformers`` to load a saved file."""
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


def _shapes(config):
    return pieces.shapes(gpt2.GPT2, config)
