"""Llama (Touvron et al., 2023; Llama 3, 2024) in Flax NNX.

A decoder like GPT-2, but with rotary positions (RoPE), RMSNorm, SwiGLU and grouped queries, and
without biases or dropout. `decoders` has the functions that use it.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from decent_jax import cpu
from decent_jax.models import gpt2, pieces
from decent_jax.models.gpt2 import linear


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and numerics of a Llama.

    Attributes:
      vocab_size: rows of the token embedding.
      context: maximum sequence length; the model has no parameters for positions.
      layers: number of blocks.
      heads: query heads per block; divides ``width``.
      kv_heads: key-value heads, each read by ``heads / kv_heads`` query heads.
      width: size of a hidden vector.
      hidden: width of the MLP.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: added to the mean square in RMSNorm.
      tied: whether the token embedding is also the output layer.
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
    bias: ClassVar = False
    dropout: ClassVar = 0.0

    def __post_init__(self):
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"width {self.width} must be an even multiple of heads {self.heads}: rotary "
                "positions rotate pairs of numbers"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        pieces.check_dtype(self)


PRESETS = {
    "llama_125m": LlamaConfig(layers=12, heads=12, kv_heads=4, width=768, hidden=2048),
    "llama_1b": LlamaConfig(layers=16, heads=32, kv_heads=8, width=2048, hidden=8192),
    "llama_3b": LlamaConfig(layers=28, heads=24, kv_heads=8, width=3072, hidden=8192),
    "llama_8b": LlamaConfig(layers=32, heads=32, kv_heads=8, width=4096, hidden=14336, tied=False),
}


class Llama(gpt2.GPT2):
    """Pre-RMSNorm decoder, or a part of one; arguments as for GPT-2."""

    def add_positions(self, rngs: nnx.Rngs) -> None:
        """Adds no parameters: attention rotates queries and keys instead."""

    def block(self, rngs: nnx.Rngs) -> gpt2.DecoderBlock:
        return gpt2.DecoderBlock(self.config, rngs, _rms_norm, GroupedAttention, SwiGLU)

    def add_head(self, rngs: nnx.Rngs) -> None:
        self.ln_f = _rms_norm(self.config, rngs)
        if not self.config.tied:
            self.lm_head = linear(self.config, self.config.width, self.config.vocab_size, rngs)

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embeddings of tokens ``(B, T)``: ``(B, T, width)`` in ``config.dtype``."""
        del positions
        return self.wte(tokens).astype(self.config.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """The output layer: ``(..., width)`` to ``(..., vocab_size)``."""
        return super().logits(x) if self.config.tied else self.lm_head(x)


class GroupedAttention(gpt2.CausalAttention):
    """Causal self-attention whose queries share keys and values in groups."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        of_keys = config.width // config.heads * config.kv_heads
        self.q_proj = linear(config, config.width, config.width, rngs)
        self.k_proj = linear(config, config.width, of_keys, rngs)
        self.v_proj = linear(config, config.width, of_keys, rngs)
        self.c_proj = linear(config, config.width, config.width, rngs, residual=True)

    def qkv(self, x: jax.Array, positions: jax.Array) -> list[jax.Array]:
        """``(B, T, width)`` to ``(B, T, heads, D)`` and twice ``(B, T, kv_heads, D)``."""
        shape = (*x.shape[:2], -1, self.config.width // self.config.heads)
        query, key, value = (f(x).reshape(shape) for f in (self.q_proj, self.k_proj, self.v_proj))
        theta = self.config.rope_theta
        return [rotate(query, positions, theta), rotate(key, positions, theta), value]


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.gate_proj = linear(config, config.width, config.hidden, rngs)
        self.up_proj = linear(config, config.width, config.hidden, rngs)
        self.down_proj = linear(config, config.hidden, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = (cpu.computed_once(f(x)) for f in (self.gate_proj, self.up_proj))
        return self.down_proj(jax.nn.silu(gate) * up)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Applies rotary positions ``(T,)`` (Su et al., 2021) to ``(B, T, heads, D)``, in float32.

    The pair ``(x[i], x[i + D/2])`` is rotated by ``position * theta ** (-2 i / D)``.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[None, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _rms_norm(config, rngs) -> nnx.RMSNorm:
    dtype = jnp.dtype(config.dtype)
    return nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
