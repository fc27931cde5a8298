"""Llama (Touvron et al., 2023; Llama 3, 2024) in Flax NNX, and its functional adapter.

A decoder with rotary positions (RoPE), RMSNorm, SwiGLU and grouped queries, and without biases. As
in `decent_jax.models.gpt2` a model is its parameters, and the same functions are all a training
step needs::

    config = PRESETS["llama_1b"]
    params = init(config, jax.random.key(0))
    logits = apply(config, params, tokens)
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from decent_jax.models import pieces
from decent_jax.models.pieces import Params, attention, remat_call


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and numerics of a Llama.

    Attributes:
      vocab_size: rows of the token embedding.
      context: longest sequence in training; the model has no parameters for positions.
      layers: number of blocks.
      heads: query heads of a block; divides ``width``.
      kv_heads: heads of keys and values, each read by ``heads / kv_heads`` queries.
      width: size of a hidden vector.
      hidden: size inside the MLP.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: added to the mean square in RMSNorm.
      tied: the token embedding is also the output layer.
      dtype, remat, attention, init_std: as in `decent_jax.models.gpt2.GPT2Config`.
    """

    vocab_size: int = 128256
    context: int = 8192
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    width: int = 2048
    hidden: int = 8192
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5
    tied: bool = True
    dtype: str = "bfloat16"
    remat: bool = False
    attention: str = "auto"
    init_std: float = 0.02

    def __post_init__(self):
        sizes = ("vocab_size", "context", "layers", "heads", "kv_heads", "width", "hidden")
        pieces.at_least_one(self, *sizes)
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"width {self.width} must be an even multiple of heads {self.heads}: rotary "
                "positions turn pairs of numbers"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        pieces.one_of(self, "attention", "auto", "xla", "cudnn")
        pieces.check_dtype(self)
        if not (self.init_std > 0 and self.rope_theta > 0 and self.norm_epsilon > 0):
            raise ValueError(
                "init_std, rope_theta and norm_epsilon must be above 0, got "
                f"{self.init_std}, {self.rope_theta} and {self.norm_epsilon}"
            )


PRESETS = {
    "llama_125m": LlamaConfig(layers=12, heads=12, kv_heads=4, width=768, hidden=2048),
    "llama_1b": LlamaConfig(layers=16, heads=32, kv_heads=8, width=2048, hidden=8192),
    "llama_3b": LlamaConfig(layers=28, heads=24, kv_heads=8, width=3072, hidden=8192),
    "llama_8b": LlamaConfig(layers=32, heads=32, kv_heads=8, width=4096, hidden=14336, tied=False),
}


# --- The module ---------------------------------------------------------------------------------


class Llama(nnx.Module):
    """Pre-RMSNorm decoder.

    Args:
      config: shape and numerics.
      rngs: key for the initial parameters; used here only, nothing random is kept.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(config.init_std)
        self.wte = nnx.Embed(config.vocab_size, config.width, embedding_init=normal, rngs=rngs)
        self.h = nnx.Dict({str(i): Block(config, rngs=rngs) for i in range(config.layers)})
        self.ln_f = _rms_norm(config, rngs)
        if not config.tied:
            self.lm_head = _linear(config, config.width, config.vocab_size, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Next-token logits ``(B, T, vocab_size)``, in ``config.dtype``, of tokens ``(B, T)``.

        Raises:
          ValueError: ``tokens`` is not a matrix or is longer than the context.
        """
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """The last hidden vectors, ``(B, T, width)``, before the output layer."""
        pieces.check_tokens(self.config, tokens)
        positions = jnp.arange(tokens.shape[1])
        x = self.embed(tokens, positions)
        for i in range(self.config.layers):
            block = self.h[str(i)]
            x = remat_call(block, x, positions) if self.config.remat else block(x, positions)
        return self.ln_f(x)

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embeddings of tokens ``(B, T)``: ``(B, T, width)`` in dtype; positions come later."""
        del positions
        return self.wte(tokens).astype(self.config.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """The output layer: ``(..., width)`` to ``(..., vocab_size)``."""
        if self.config.tied:
            return x @ self.wte.embedding[...].T.astype(x.dtype)
        return self.lm_head(x)


class Block(nnx.Module):
    """``x + attention(ln_1(x))``, then ``x + mlp(ln_2(x))``."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.ln_1 = _rms_norm(config, rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = _rms_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x), positions)
        return x + self.mlp(self.ln_2(x))


class Attention(nnx.Module):
    """Causal self-attention whose queries share keys and values in groups."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        of_keys = config.width // config.heads * config.kv_heads
        self.q_proj = _linear(config, config.width, config.width, rngs)
        self.k_proj = _linear(config, config.width, of_keys, rngs)
        self.v_proj = _linear(config, config.width, of_keys, rngs)
        self.c_proj = _linear(config, config.width, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        y = attention(self.config, *self.qkv(x, positions), causal=True)
        return self.c_proj(y.reshape(x.shape))

    def qkv(self, x: jax.Array, positions: jax.Array) -> list[jax.Array]:
        """``(B, T, width)`` to ``(B, T, heads, D)`` and twice ``(B, T, kv_heads, D)``."""
        shape = (*x.shape[:2], -1, self.config.width // self.config.heads)
        query, key, value = (f(x).reshape(shape) for f in (self.q_proj, self.k_proj, self.v_proj))
        theta = self.config.rope_theta
        return [rotate(query, positions, theta), rotate(key, positions, theta), value]


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.gate_proj = _linear(config, config.width, config.hidden, rngs)
        self.up_proj = _linear(config, config.width, config.hidden, rngs)
        self.down_proj = _linear(config, config.hidden, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (Su et al., 2021) of ``(B, T, heads, D)``, in float32.

    The pair ``(x[i], x[i + D/2])`` turns by ``position * theta ** (-2 i / D)``.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[None, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _linear(config, inputs, outputs, rngs, residual=False) -> nnx.Linear:
    std = config.init_std / math.sqrt(2 * config.layers) if residual else config.init_std
    normal = nnx.initializers.normal(std)
    return pieces.linear(config, inputs, outputs, rngs, init=normal, bias=False)


def _rms_norm(config, rngs) -> nnx.RMSNorm:
    dtype = jnp.dtype(config.dtype)
    return nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)


# --- The functional adapter ---------------------------------------------------------------------


def init(config: LlamaConfig, key: jax.Array) -> Params:
    """Initial parameters, a nested dict of float32 arrays, drawn as in `gpt2.init`."""
    return pieces.init(Llama, config, key)


def apply(
    config: LlamaConfig, params: Params, tokens: jax.Array, dropout_rng: jax.Array | None = None
) -> jax.Array:
    """``Llama.__call__`` on parameters as `init` returns them; there is no dropout."""
    del dropout_rng
    return merge(config, params)(tokens)


def merge(config: LlamaConfig, params: Params) -> Llama:
    """The module around ``params``; to be used within one trace, as `apply` does."""
    return pieces.merge(Llama, config, params)


decay_mask = pieces.decay_mask


# --- Arithmetic ---------------------------------------------------------------------------------


def num_params(config: LlamaConfig) -> int:
    """Number of parameters, a tied embedding counted once.

    >>> num_params(PRESETS["llama_1b"]), num_params(PRESETS["llama_8b"])
    (1235814400, 8030261248)
    """
    return pieces.count(pieces.shapes(Llama, config))


def flops_per_token(config: LlamaConfig, seq_len: int) -> int:
    """As `gpt2.flops_per_token`; an embedding that is only looked up multiplies nothing."""
    n = num_params(config) - (0 if config.tied else config.vocab_size * config.width)
    return 6 * n + 12 * config.layers * config.width * seq_len
