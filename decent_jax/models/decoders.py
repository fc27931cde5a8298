"""The decoders that predict the next token, `gpt2` and `llama`, as functions.

A module holds only parameters (no random state), so a model *is* its parameters: a plain
nested dict that can be stacked, mixed and saved. A training step needs only two functions::

    config = PRESETS["small"]
    params = init(config, jax.random.key(0))
    logits = apply(config, params, tokens)

These functions work inside ``jit``, ``vmap`` over stacked parameters, ``shard_map``, ``lax.map``
and ``lax.scan``.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import traverse_util

from decent_jax.models import gpt2, llama, pieces
from decent_jax.models.pieces import Params

Config = gpt2.GPT2Config | llama.LlamaConfig
PRESETS: dict[str, Config] = {**gpt2.PRESETS, **llama.PRESETS}


def init(config: Config, key: jax.Array) -> Params:
    """Draws the initial parameters: a nested dict of float32 arrays.

    Matrices are normal with standard deviation ``init_std``; those that write into the residual
    stream are scaled by ``1 / sqrt(2 * layers)``. Biases are 0, and norm scales are 1.
    """
    return pieces.init(network(config), config, key)


def apply(
    config: Config, params: Params, tokens: jax.Array, dropout_rng: jax.Array | None = None
) -> jax.Array:
    """Applies ``GPT2.__call__``, with the same shapes, to parameters as `init` returns them."""
    return merge(config, params)(tokens, dropout_rng=dropout_rng)


def merge(config: Config, params: Params, start: int = 0, stop: int | None = None) -> gpt2.GPT2:
    """The module, or a part of it, around ``params``; to be used within one trace."""
    return pieces.merge(network(config, start, stop), config, params)


def part(config: Config, params: Params, start: int, stop: int) -> Params:
    """The parameters of the part with blocks ``start`` to ``stop - 1``, selected from all."""
    flat = traverse_util.flatten_dict(params)
    own = traverse_util.flatten_dict(shapes(config, start, stop))
    return traverse_util.unflatten_dict({path: flat[path] for path in own})


def shapes(config: Config, start: int = 0, stop: int | None = None) -> Params:
    """Shapes and dtypes of the parameters of the model or of a part of it."""
    return pieces.shapes(network(config, start, stop), config)


@functools.cache
def network(config: Config, start: int = 0, stop: int | None = None) -> Callable[..., gpt2.GPT2]:
    """The module class of a config, which `pieces.merge` wraps around parameters."""
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
    and 4 backward, and the two products of attention, not halved for causality. ``N`` excludes
    embeddings that are only looked up: those of positions, and those of tokens if the output layer
    has its own (``tied=False``). Recomputation (``remat``) does not count: this is the numerator of
    model FLOPs utilization (MFU).
    """
    positions = config.context if isinstance(config, gpt2.GPT2Config) else 0
    looked_up = positions + (0 if config.tied else config.vocab_size)
    n = num_params(config) - looked_up * config.width
    return 6 * n + 12 * config.layers * config.width * seq_len


# --- Sampling -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("config", "num_tokens", "top_k"))
def generate(
    config: Config,
    params: Params,
    prompt_tokens: jax.Array,
    num_tokens: int,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int = 0,
) -> jax.Array:
    """Continues a batch of prompts of one length.

    Each token is predicted from at most ``context`` tokens before it. While the sequence fits into
    the context, keys and values are cached, and a step computes one token. Beyond that, the window
    slides: every token changes its position, so each step runs the model over the whole window.

    Args:
      config: the model's shape and numerics (static).
      params: as `init` returns them.
      prompt_tokens: ``(B, P)`` integers, ``P >= 1``; may be longer than the context.
      num_tokens: the number of tokens to add (static: each number compiles once).
      key: PRNG key for sampling; unused at temperature 0.
      temperature: 1 samples from the model's distribution, 0 takes the likeliest token.
      top_k: number of likeliest tokens to sample from (static); 0 means all tokens.

    Returns:
      ``(B, P + num_tokens)``, the prompts with their continuations, in the prompts' dtype.
    """
    batch, prompt = prompt_tokens.shape
    model = merge(config, params)
    tokens = jnp.pad(prompt_tokens, ((0, 0), (0, num_tokens)))

    def put(tokens, position, logits):
        """Writes a sample from ``logits`` (B, V) at ``position``, from which its key is derived."""
        new = _sample(logits, jax.random.fold_in(key, position), temperature, top_k)
        return tokens.at[:, position].set(new.astype(tokens.dtype))

    def cached_step(position, carry):
        tokens, cache = carry
        last = jax.lax.dynamic_slice_in_dim(tokens, position - 1, 1, axis=1)
        logits, cache = _extend(model, last, position - 1, cache)
        return put(tokens, position, logits), cache

    def sliding_step(position, tokens):
        window = jax.lax.dynamic_slice_in_dim(tokens, position - config.context, config.context, 1)
        return put(tokens, position, model.logits(model.hidden(window)[:, -1]))

    total = prompt + num_tokens
    fitting = min(total, config.context + 1)  # positions [prompt, fitting) need no sliding
    if num_tokens and prompt < fitting:
        shape = (batch, fitting - 1, config.kv_heads, config.width // config.heads)
        empty = jnp.zeros(shape, config.dtype)
        cache = [(empty, empty) for _ in range(config.layers)]
        logits, cache = _extend(model, prompt_tokens, 0, cache)
        carry = put(tokens, prompt, logits), cache
        tokens, _ = jax.lax.fori_loop(prompt + 1, fitting, cached_step, carry)
    if max(prompt, fitting) < total:
        tokens = jax.lax.fori_loop(max(prompt, fitting), total, sliding_step, tokens)
    return tokens


def _extend(model, tokens, start, cache):
    """Logits ``(B, V)`` after ``tokens`` ``(B, T)`` at positions ``start ...``, and the updated
    cache (per layer, keys and values ``(B, S, heads, D)``)."""
    positions = start + jnp.arange(tokens.shape[1])
    seen = jnp.arange(cache[0][0].shape[1])[None] <= positions[:, None]  # (T, S)
    x = model.embed(tokens, positions)
    new_cache = []
    for i, (keys, values) in enumerate(cache):
        block = model.h[str(i)]
        query, key, value = block.attn.qkv(block.ln_1(x), positions)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, key, start, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, value, start, axis=1)
        y = jax.nn.dot_product_attention(
            query, keys, values, mask=seen[None, None], implementation="xla"
        )
        x = x + block.attn.c_proj(y.reshape(x.shape))
        x = x + block.mlp(block.ln_2(x))
        new_cache.append((keys, values))
    return model.logits(model.ln_f(x[:, -1])), new_cache


def _sample(logits, key, temperature, top_k):
    """One token per row: the Gumbel-max form of ``softmax(logits / temperature)``, which at
    temperature 0 is the argmax."""
    logits = logits.astype(jnp.float32)
    if top_k:
        worst = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < worst, -jnp.inf, logits)
    return jnp.argmax(logits + temperature * jax.random.gumbel(key, logits.shape), axis=-1)
