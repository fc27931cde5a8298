"""GPT-2 (Radford et al., 2019) in Flax NNX. `decoders` has the functions that use it."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from decent_jax import cpu
from decent_jax.models import pieces
from decent_jax.models.pieces import Config, attention, dropout, fold_in, layer_norm, remat_call


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Shape and numerics of a GPT-2.

    Attributes:
      vocab_size: rows of the token embedding and the output layer. 50304, the next multiple of 128,
        is faster on GPUs.
      context: maximum sequence length; rows of the position embedding.
      layers: number of blocks.
      heads: attention heads per block; divides ``width``.
      width: size of a hidden vector.
      bias: whether linear layers and LayerNorms have biases.
      dropout: rate for embeddings, attention probabilities and residual branches.
      dtype: dtype of activations and matrix products; parameters and LayerNorm and softmax
        statistics are always float32.
      remat: whether to recompute each block in the backward pass instead of keeping its
        activations.
      attention: ``"xla"``, ``"cudnn"`` (flash attention; NVIDIA GPUs only), or ``"auto"``:
        cuDNN where it applies.
      init_std: standard deviation of the initial matrices and embeddings; a narrow model learns
        faster with a larger one, about ``width ** -0.5``.
      tied: whether the token embedding is also the output layer, as published.
    """

    vocab_size: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    bias: bool = True
    dropout: float = 0.0
    dtype: str = "bfloat16"
    remat: bool = False
    attention: str = "auto"
    init_std: float = 0.02
    tied: bool = True

    def __post_init__(self):
        pieces.check(self)

    @property
    def kv_heads(self) -> int:
        """Key-value heads: one per query head."""
        return self.heads


PRESETS = {
    "small": GPT2Config(layers=12, heads=12, width=768),
    "medium": GPT2Config(layers=24, heads=16, width=1024),
    "large": GPT2Config(layers=36, heads=20, width=1280),
    "xl": GPT2Config(layers=48, heads=25, width=1600),
}


class GPT2(nnx.Module):
    """Pre-LayerNorm decoder with learned positions, or a part of one.

    A part has the parameters of its blocks; the first part also has the embeddings, and the last
    part has the final norm and the output layer (if tied, the token embedding).

    Args:
      config: shape and numerics.
      rngs: key for the initial parameters; no random state is kept.
      start, stop: the blocks of a part, ``start <= i < stop``; ``stop=None`` means no upper limit.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, start: int = 0, stop: int | None = None):
        self.config = config
        self.start, self.stop = start, config.layers if stop is None else stop
        is_last = self.stop == config.layers
        if start == 0 or (is_last and config.tied):
            self.wte = table(config, config.vocab_size, rngs)
        if start == 0:
            self.add_positions(rngs)
        # String keys instead of a list, so that paths survive JSON, checkpoints and flax's dicts.
        self.h = nnx.Dict({str(i): self.block(rngs) for i in range(self.start, self.stop)})
        if is_last:
            self.add_head(rngs)

    def add_positions(self, rngs: nnx.Rngs) -> None:
        self.wpe = table(self.config, self.config.context, rngs)

    def block(self, rngs: nnx.Rngs) -> "DecoderBlock":
        return DecoderBlock(self.config, rngs, _norm, CausalAttention, GeluMLP)

    def add_head(self, rngs: nnx.Rngs) -> None:
        self.ln_f = _norm(self.config, rngs)
        if not self.config.tied:
            self.lm_head = table(self.config, self.config.vocab_size, rngs)

    def __call__(self, tokens: jax.Array, *, dropout_rng: jax.Array | None = None) -> jax.Array:
        """Next-token logits of every position.

        Args:
          tokens: ``(B, T)`` integers in ``[0, vocab_size)``, ``T <= context``. A token beyond
            the vocabulary gives NaN.
          dropout_rng: key for dropout; None, or ``config.dropout == 0``, turns dropout off.

        Returns:
          ``(B, T, vocab_size)`` in ``config.dtype``.

        Raises:
          ValueError: ``tokens`` is longer than the context.
        """
        return self.logits(self.hidden(tokens, dropout_rng=dropout_rng))

    def hidden(self, tokens: jax.Array, *, dropout_rng: jax.Array | None = None) -> jax.Array:
        """The last hidden vectors, ``(B, T, width)``, before the output layer."""
        return self.ln_f(self.blocks(self.begin(tokens, dropout_rng), dropout_rng))

    def begin(self, tokens: jax.Array, dropout_rng: jax.Array | None = None) -> jax.Array:
        """The input of the first block, ``(B, T, width)``."""
        length, context = tokens.shape[1], self.config.context
        if length > context:
            raise ValueError(f"{length} tokens do not fit the context of {context}")
        x = self.embed(tokens, jnp.arange(length))
        rng = fold_in(self._rng(dropout_rng), self.config.layers)
        return dropout(x, self.config.dropout, rng)

    def blocks(self, x: jax.Array, dropout_rng: jax.Array | None = None) -> jax.Array:
        """Applies the blocks of this part in order; ``(B, T, width)`` to the same shape."""
        for i in range(self.start, self.stop):
            rng = fold_in(self._rng(dropout_rng), i)
            block = self.h[str(i)]
            x = remat_call(block, x, rng) if self.config.remat else block(x, rng)
        return x

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embeddings ``(B, T, width)`` of tokens ``(B, T)`` at positions ``(T,)``, in ``dtype``.

        They are looked up and added in float32, so that the gradient of a frequent token or of a
        position is also summed over the batch in float32.
        """
        x = self.wte(tokens) + self.wpe(positions)[None]
        return x.astype(self.config.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """The output layer: ``(..., width)`` to ``(..., vocab_size)``."""
        table = self.wte if self.config.tied else self.lm_head
        return x @ table.embedding[...].T.astype(x.dtype)

    def _rng(self, dropout_rng: jax.Array | None) -> jax.Array | None:
        return None if self.config.dropout == 0.0 else dropout_rng


class DecoderBlock(nnx.Module):
    """``x + attn(ln_1(x))``, then ``x + mlp(ln_2(x))``."""

    def __init__(
        self, config: Config, rngs: nnx.Rngs, norm: Callable, attention: Callable, mlp: Callable
    ):
        self.dropout = config.dropout
        self.ln_1 = norm(config, rngs)
        self.attn = attention(config, rngs)
        self.ln_2 = norm(config, rngs)
        self.mlp = mlp(config, rngs)

    def __call__(self, x: jax.Array, dropout_rng: jax.Array | None = None) -> jax.Array:
        a = self.attn(self.ln_1(x), fold_in(dropout_rng, 0))
        x = cpu.computed_once(x + dropout(a, self.dropout, fold_in(dropout_rng, 1)))
        m = self.mlp(self.ln_2(x))
        return cpu.computed_once(x + dropout(m, self.dropout, fold_in(dropout_rng, 2)))


class CausalAttention(nnx.Module):
    """Causal self-attention with queries, keys and values from one matrix."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.c_attn = linear(config, config.width, 3 * config.width, rngs)
        self.c_proj = linear(config, config.width, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array, dropout_rng: jax.Array | None = None) -> jax.Array:
        query, key, value = self.qkv(x, jnp.arange(x.shape[1]))
        y = attention(self.config, query, key, value, causal=True, rng=dropout_rng)
        return self.c_proj(y.reshape(x.shape))

    def qkv(self, x: jax.Array, positions: jax.Array) -> list[jax.Array]:
        """``(B, T, width)`` to three arrays ``(B, T, heads, width / heads)``.

        Only a Llama uses ``positions`` ``(T,)``; here the embedding has already added them.
        """
        del positions
        parts = jnp.split(self.c_attn(x), 3, axis=-1)
        return [part.reshape(*x.shape[:2], self.config.heads, -1) for part in parts]


class GeluMLP(nnx.Module):
    """An MLP with four times the width inside and the tanh approximation of GELU."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        self.c_fc = linear(config, config.width, 4 * config.width, rngs)
        self.c_proj = linear(config, 4 * config.width, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(_gelu(cpu.computed_once(self.c_fc(x))))


@jax.checkpoint
def _gelu(x: jax.Array) -> jax.Array:
    """GELU that keeps only ``x`` for the backward pass, not a second array of its size."""
    return jax.nn.gelu(x, approximate=True)


def linear(
    config: Config, inputs: int, outputs: int, rngs: nnx.Rngs, residual: bool = False
) -> nnx.Linear:
    """A linear layer; one that writes into the residual stream has smaller initial weights."""
    std = config.init_std / math.sqrt(2 * config.layers) if residual else config.init_std
    options = {"kernel_init": nnx.initializers.normal(std), "dtype": jnp.dtype(config.dtype)}
    return nnx.Linear(inputs, outputs, use_bias=config.bias, rngs=rngs, **options)


def table(config: Config, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
    """An embedding: ``rows`` hidden vectors."""
    normal = nnx.initializers.normal(config.init_std)
    return nnx.Embed(rows, config.width, embedding_init=normal, rngs=rngs)


def _norm(config: GPT2Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return layer_norm(config, rngs, bias=config.bias)
