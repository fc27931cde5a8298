"""The decoders of the language task; what belongs to one is found by the type of its config."""

from types import ModuleType

from decent_jax.models import gpt2, gpt2_weights, llama, llama_weights

Config = gpt2.GPT2Config | llama.LlamaConfig
PRESETS: dict[str, Config] = {**gpt2.PRESETS, **llama.PRESETS}

_OF = {gpt2.GPT2Config: (gpt2, gpt2_weights), llama.LlamaConfig: (llama, llama_weights)}


def model(config: Config) -> ModuleType:
    """`gpt2` or `llama`, which have the same functions: ``init``, ``apply``, ``num_params``, ..."""
    return _OF[type(config)][0]


def weights(config: Config) -> ModuleType:
    """`gpt2_weights` or `llama_weights`, which have the same functions."""
    return _OF[type(config)][1]
