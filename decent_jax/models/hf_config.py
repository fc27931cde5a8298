"""The ``config.json`` of ``transformers``: written with an export, and checked if a run starts
from published weights."""

import os
from pathlib import Path

from decent_jax.ground.format import shown
from decent_jax.ground.json_files import Json, read_json
from decent_jax.models import decoders
from decent_jax.models.gpt2 import GPT2Config
from decent_jax.models.llama import LlamaConfig
from decent_jax.models.transformer import END, PAD, START, TransformerConfig

POSITIONS = 2048  # the most tokens of a sentence or its translation in `transformers`


def describe(config: decoders.Config | TransformerConfig) -> dict:
    """The ``config.json`` with which ``transformers`` loads a saved file."""
    if isinstance(config, TransformerConfig):
        return _transformer(config)
    return _gpt2(config) if isinstance(config, GPT2Config) else _llama(config)


def _gpt2(config: GPT2Config) -> dict:
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
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        "bos_token_id": 50256 if config.vocab_size > 50256 else None,
        "eos_token_id": 50256 if config.vocab_size > 50256 else None,
    }


def _llama(config: LlamaConfig) -> dict:
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


def _transformer(config: TransformerConfig) -> dict:
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
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), config.dropout),
        "scale_embedding": True,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        **SPECIAL_IDS,
        "forced_eos_token_id": None,
    }


SPECIAL_IDS = {  # of a Transformer, for config.json and generation_config.json
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}


# --- Published weights ----------------------------------------------------------------------------

# The defaults of `transformers` for missing keys of a config.json.
_DEFAULTS: dict[str, Json] = {
    "gpt2": {
        **{"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024},
        **{"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
        **{"scale_attn_weights": True, "tie_word_embeddings": True, "is_causal": True},
    },
    "llama": {
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
        **{"intermediate_size": 11008, "hidden_act": "silu", "rms_norm_eps": 1e-6},
        **{"rope_theta": 10000.0, "rope_type": "default", "tie_word_embeddings": False},
        "is_causal": True,
    },
}
_FIELDS = {  # fields of a run's config that correspond to keys of config.json
    **{"n_layer": "layers", "n_head": "heads", "n_embd": "width", "n_positions": "context"},
    **{"num_hidden_layers": "layers", "num_attention_heads": "heads", "hidden_size": "width"},
    **{"num_key_value_heads": "kv_heads", "intermediate_size": "hidden"},
    **{"rope_theta": "rope_theta", "rms_norm_eps": "norm_epsilon", "tie_word_embeddings": "tied"},
}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}
_ROPE = ("rope_parameters", "rope_scaling")  # the key of transformers 5, and the older key
_OF_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Keys that do not affect the logits (vocab_size: the rows themselves are checked).
_NEUTRAL = {*_ROPE} | set(
    str.split(
        "_attn_implementation_autoset _flash_attn_2_enabled _name_or_path _num_labels "
        "architectures attention_dropout attn_pdrop chunk_size_feed_forward do_sample dtype "
        "early_stopping embd_pdrop finetuning_task gradient_checkpointing id2label "
        "initializer_range is_llama_config keys_to_ignore_at_inference label2id length_penalty "
        "max_length max_new_tokens max_position_embeddings min_length model_type n_ctx n_special "
        "neftune_noise_alpha no_repeat_ngram_size num_beams num_labels num_return_sequences "
        "output_attentions output_hidden_states output_past predict_special_tokens prefix "
        "pretraining_tp problem_type reorder_and_upcast_attn repetition_penalty resid_pdrop "
        "return_dict summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj task_specific_params temperature tokenizer_class top_k top_p "
        "torch_dtype torchscript transformers.js_config transformers_version typical_p "
        "unsloth_fixed unsloth_version use_bfloat16 use_cache vocab_size "
    )
)


def check(path: Path, config: decoders.Config, own_head: bool = False) -> None:
    """Raises a one-sentence ValueError if a ``config.json`` does not describe the run's model.

    Every key that affects the logits is checked. An unsupported key is refused by name; a key that
    contradicts the run's config is refused with the settings that would match. If there is no file,
    nothing is checked.

    Args:
      path: the ``config.json``.
      config: the run's model.
      own_head: whether the weights have a separate output layer; ``tied=False`` in the run's config
        is then correct, whatever the file says.
    """
    if not os.path.lexists(path):
        return
    wanted = describe(config)
    kind: str = wanted["model_type"]
    otherwise = f"describes no {kind!r} of transformers; fetch it again, or remove it"
    said = read_json(path, otherwise)
    if not isinstance(said, dict) or said.get("model_type") != kind:
        named = said.get("model_type") if isinstance(said, dict) else None
        raise ValueError(
            f"{path} says model_type {shown(named)}, but this run's model is a {kind!r}"
        )
    wanted = _complete(kind, wanted)
    try:
        said = _complete(kind, said)
    except (TypeError, AttributeError, ArithmeticError):  # values of other types
        raise ValueError(f"{path}: {otherwise}") from None
    if own_head and not config.tied:
        said["tie_word_embeddings"] = False
    unlike = {
        key: value
        for key, value in said.items()
        if key not in _NEUTRAL
        and not key.endswith("_token_id")
        and (value != wanted[key] if key in wanted else value not in (None, False, [], {}))
    }
    for key in sorted(unlike.keys() - (_FIELDS.keys() & wanted.keys())):
        raise ValueError(
            f"{path} says {key} {shown(unlike[key])}, which this model does not support"
            + (f": it has {wanted[key]!r}" if key in wanted else "")
        )
    if unlike:
        differences = ", ".join(
            f"{key} {shown(unlike[key])} (here {wanted[key]!r})" for key in unlike
        )
        settings = " ".join(f"--config.model.{_FIELDS[key]}={shown(unlike[key])}" for key in unlike)
        raise ValueError(f"{path} says {differences}: set {settings}")


def _complete(kind: str, said: dict) -> dict:
    """``said``, completed by the defaults of ``transformers`` and normalized."""
    said = _DEFAULTS[kind] | said
    for key in ("activation_function", "hidden_act"):
        if key in said:
            said[key] = _ACTIVATIONS.get(said[key], said[key])
    if kind == "gpt2":
        if said.get("n_inner") == 4 * said["n_embd"]:
            del said["n_inner"]
        return said
    for rope in (said.get(key) or {} for key in _ROPE):
        said["rope_type"] = rope.get("rope_type", rope.get("type", said["rope_type"]))
        said["rope_theta"] = rope.get("rope_theta", said["rope_theta"])
        turned = said.get("partial_rotary_factor", 1.0)
        said["partial_rotary_factor"] = rope.get("partial_rotary_factor", turned)
        if said["rope_type"] == "default":
            said |= {key: value for key, value in rope.items() if key not in _OF_ROPE}
    said["num_key_value_heads"] = said.get("num_key_value_heads") or said["num_attention_heads"]
    if said.get("head_dim") == said["hidden_size"] // said["num_attention_heads"]:
        del said["head_dim"]
    return said
