"""The decoders that predict the next token, `gpt2` and `llama`, as functions.

A module holds parameters alone (no random state), so that a model *is* its parameters: a plain
nested dict that can be stacked, mixed and saved. Three functions are all a training step needs::

    config = PRESETS["small"]
    params = init(config, jax.random.key(0))
    logits = apply(config, params, tokens)

They work inside ``jit``, ``vmap`` over stacked parameters, ``shard_map``, ``lax.map`` and
``lax.scan``.
"""

import functools
from collections.abc import Callable

import jax
from flax import traverse_util

from decent_jax.models import gpt2, llama, pieces
from decent_jax.models.pieces import Params

Config = gpt2.GPT2Config | llama.LlamaConfig
PRESETS: dict[str, Config] = {**gpt2.PRESETS, **llama.PRESETS}


def init(config: Config, key: jax.Array) -> Params:
    """Initial parameters: a nested dict of float32 arrays.

    Normal with standard deviation ``init_std``, the matrices that write into the residual stream
    scaled by ``1 / sqrt(2 * layers)``; biases 0, scales of norms 1.
    """
    return pieces.init(network(config), config, key)


def apply(
    config: Config, params: Params, tokens: jax.Array, dropout_rng: jax.Array | None = None
) -> jax.Array:
    """``GPT2.__call__`` on parameters as `init` returns them; same shapes."""
    return merge(config, params)(tokens, dropout_rng=dropout_rng)


def merge(config: Config, params: Params, start: int = 0, stop: int | None = None) -> gpt2.GPT2:
    """The module, or a part of it, around ``params``; to be used within one trace."""
    return pieces.merge(network(config, start, stop), config, params)


def part(config: Config, params: Params, start: int, stop: int) -> Params:
    """The parameters of the part of blocks ``start`` to ``stop - 1``, out of those of all."""
    flat = traverse_util.flatten_dict(params)
    own = traverse_util.flatten_dict(shapes(config, start, stop))
    return traverse_util.unflatten_dict({path: flat[path] for path in own})


def shapes(config: Config, start: int = 0, stop: int | None = None) -> Params:
    """Shapes and dtypes of the parameters of the model or of a part of it."""
    return pieces.shapes(network(config, start, stop), config)


@functools.cache
def network(config: Config, start: int = 0, stop: int | None = None) -> Callable[..., gpt2.GPT2]:
    """The class of a config's module, of which `pieces.merge` makes one around parameters."""
    kind = gpt2.GPT2 if isinstance(config, gpt2.GPT2Config) else llama.Llama
    return functools.partial(kind, start=start, stop=stop)


def num_params(config: Config) -> int:
    """Number of parameters, a tied embedding counted once.

    Example:
      >>> num_params(PRESETS["small"]), num_params(PRESETS["llama_8b"])
      (124439808, 8030261248)
    """
    return pieces.count(shapes(config))


def flops_per_token(config: Config, seq_len: int) -> int:
    """Floating-point operations of the model for one token, forward and backward.

    ``6 N + 12 * layers * width * seq_len`` (PaLM, appendix B): 2 operations per parameter forward
    and 4 backward, and the two products of attention, not halved for causality. ``N`` leaves out
    embeddings that are only looked up and multiply nothing: that of positions, and that of tokens
    where the output layer has its own (``tied=False``). Recomputation (``remat``) does not count:
    this is the numerator of model FLOPs utilisation (MFU).
    """
    positions = config.context if isinstance(config, gpt2.GPT2Config) else 0
    looked_up = positions + (0 if config.tied else config.vocab_size)
    n = num_params(config) - looked_up * config.width
    return 6 * n + 12 * config.layers * config.width * seq_len
