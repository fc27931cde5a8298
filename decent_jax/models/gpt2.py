"""GPT-2 (Radford et al., 2019) in Flax NNX, and its functional adapter.

The module holds parameters alone (no random state), so that a model *is* its parameters: a plain
nested dict that can be stacked, mixed and saved. Three functions are all a training step needs::

    config = PRESETS["small"]
    params = init(config, jax.random.key(0))
    logits = apply(config, params, tokens)

They work inside ``jit``, ``vmap`` over stacked parameters, ``shard_map``, ``lax.map`` and
``lax.scan``.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from decent_jax.models import pieces
from decent_jax.models.pieces import Params, attention, dropout, fold_in, layer_norm, remat_call


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Shape and numerics of a GPT-2.

    Attributes:
      vocab_size: rows of the token embedding, which is also the output layer. 50304, the next
        multiple of 128, is faster on GPUs.
      context: longest sequence, rows of the position embedding.
      layers: number of blocks.
      heads: attention heads of a block; divides ``width``.
      width: size of a hidden vector.
      bias: biases in linear layers and LayerNorms; False removes all of them.
      dropout: rate for embeddings, attention probabilities and residual branches.
      dtype: of activations and matrix products; parameters are float32 always, and so are the
        statistics of LayerNorms and softmaxes.
      remat: recompute each block in the backward pass instead of keeping its activations.
      attention: ``"xla"``, ``"cudnn"`` (flash attention; NVIDIA GPUs only), or ``"auto"``:
        cuDNN where it applies.
      init_std: of the initial matrices and embeddings; a narrow model learns faster from larger
        ones, about ``width ** -0.5``.
      tied: the token embedding is also the output layer, as published.
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
        pieces.at_least_one(self, "vocab_size", "context", "layers", "heads", "width")
        pieces.check_attention(self)
        pieces.check_dtype(self)
        if not self.init_std > 0:
            raise ValueError(f"init_std must be above 0, got {self.init_std}")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; a query has its own."""
        return self.heads


PRESETS = {
    "small": GPT2Config(layers=12, heads=12, width=768),
    "medium": GPT2Config(layers=24, heads=16, width=1024),
    "large": GPT2Config(layers=36, heads=20, width=1280),
    "xl": GPT2Config(layers=48, heads=25, width=1600),
}


# --- The module ---------------------------------------------------------------------------------


class GPT2(nnx.Module):
    """Pre-LayerNorm decoder with learned positions, or a part of one.

    A part has the parameters of its blocks; the first also has the embeddings, and the last the
    final LayerNorm and the output layer (where it is tied, the token embedding).

    Args:
      config: shape and numerics.
      rngs: key for the initial parameters; used here only, nothing random is kept.
      start, stop: the blocks of a part, ``start <= i < stop``; ``stop=None`` is all of them.
    """

    def __init__(
        self, config: GPT2Config, *, rngs: nnx.Rngs, start: int = 0, stop: int | None = None
    ):
        self.config = config
        self.start, self.stop = start, config.layers if stop is None else stop
        is_last = self.stop == config.layers
        normal = nnx.initializers.normal(config.init_std)

        def table(rows):
            return nnx.Embed(rows, config.width, embedding_init=normal, rngs=rngs)

        if start == 0 or (is_last and config.tied):
            self.wte = table(config.vocab_size)
        if start == 0:
            self.wpe = table(config.context)
        # String keys, not a list: paths then survive JSON, checkpoints and flax's own dicts.
        blocks = range(self.start, self.stop)
        self.h = nnx.Dict({str(i): Block(config, rngs=rngs) for i in blocks})
        if is_last:
            self.ln_f = layer_norm(config, rngs, bias=config.bias)
            if not config.tied:
                self.lm_head = table(config.vocab_size)

    def __call__(self, tokens: jax.Array, *, dropout_rng: jax.Array | None = None) -> jax.Array:
        """Next-token logits of every position.

        Args:
          tokens: ``(B, T)`` integers in ``[0, vocab_size)``, ``T <= context``. A token beyond
            the vocabulary gives NaN.
          dropout_rng: key for dropout; None, or ``config.dropout == 0``, is evaluation.

        Returns:
          ``(B, T, vocab_size)`` in ``config.dtype``.

        Raises:
          ValueError: ``tokens`` is not a matrix or is longer than the context.
        """
        return self.logits(self.hidden(tokens, dropout_rng=dropout_rng))

    def hidden(self, tokens: jax.Array, *, dropout_rng: jax.Array | None = None) -> jax.Array:
        """The last hidden vectors, ``(B, T, width)``, before the output layer."""
        return self.ln_f(self.blocks(self.begin(tokens, dropout_rng), dropout_rng))

    def begin(self, tokens: jax.Array, dropout_rng: jax.Array | None = None) -> jax.Array:
        """What goes into the first block, ``(B, T, width)``."""
        pieces.check_tokens(self.config, tokens)
        x = self.embed(tokens, jnp.arange(tokens.shape[1]))
        rng = fold_in(self._rng(dropout_rng), self.config.layers)
        return dropout(x, self.config.dropout, rng)

    def blocks(self, x: jax.Array, dropout_rng: jax.Array | None = None) -> jax.Array:
        """The blocks of this part, one after the other: ``(B, T, width)`` to the same."""
        for i in range(self.start, self.stop):
            rng = fold_in(self._rng(dropout_rng), i)
            block = self.h[str(i)]
            x = remat_call(block, x, rng) if self.config.remat else block(x, rng)
        return x

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embeddings of tokens ``(B, T)`` at positions ``(T,)``: ``(B, T, width)`` in dtype.

        Looked up and added in float32, so that the gradient of a frequent token or of a position
        is summed over the batch in float32 too.
        """
        x = self.wte(tokens) + self.wpe(positions)[None]
        return x.astype(self.config.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """The output layer: ``(..., width)`` to ``(..., vocab_size)``."""
        table = self.wte if self.config.tied else self.lm_head
        return x @ table.embedding[...].T.astype(x.dtype)

    def _rng(self, dropout_rng: jax.Array | None) -> jax.Array | None:
        return None if self.config.dropout == 0.0 else dropout_rng


class Block(nnx.Module):
    """``x + attention(ln_1(x))``, then ``x + mlp(ln_2(x))``."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.ln_1 = layer_norm(config, rngs, bias=config.bias)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = layer_norm(config, rngs, bias=config.bias)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, dropout_rng: jax.Array | None = None) -> jax.Array:
        a = self.attn(self.ln_1(x), fold_in(dropout_rng, 0))
        x = x + dropout(a, self.dropout, fold_in(dropout_rng, 1))
        m = self.mlp(self.ln_2(x))
        return x + dropout(m, self.dropout, fold_in(dropout_rng, 2))


class Attention(nnx.Module):
    """Causal self-attention, queries, keys and values from one matrix."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.config = config
        self.c_attn = _linear(config, config.width, 3 * config.width, rngs)
        self.c_proj = _linear(config, config.width, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array, dropout_rng: jax.Array | None = None) -> jax.Array:
        y = attention(self.config, *self.qkv(x), causal=True, rng=dropout_rng)
        return self.c_proj(y.reshape(x.shape))

    def qkv(self, x: jax.Array, positions: jax.Array | None = None) -> list[jax.Array]:
        """``(B, T, width)`` to three arrays ``(B, T, heads, width / heads)``.

        ``positions`` is what a Llama needs here; the embedding has added them already.
        """
        del positions
        parts = jnp.split(self.c_attn(x), 3, axis=-1)
        return [part.reshape(*x.shape[:2], self.config.heads, -1) for part in parts]


class MLP(nnx.Module):
    """Four times as wide inside, GELU in the tanh approximation."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.c_fc = _linear(config, config.width, 4 * config.width, rngs)
        self.c_proj = _linear(config, 4 * config.width, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))


def _linear(config, inputs, outputs, rngs, residual=False) -> nnx.Linear:
    std = config.init_std / math.sqrt(2 * config.layers) if residual else config.init_std
    normal = nnx.initializers.normal(std)
    return pieces.linear(config, inputs, outputs, rngs, init=normal, bias=config.bias)


# --- The functional adapter ---------------------------------------------------------------------


def init(config: GPT2Config, key: jax.Array) -> Params:
    """Initial parameters: a nested dict of float32 arrays.

    Normal with standard deviation ``init_std``, the matrices that write into the residual stream
    scaled by ``1 / sqrt(2 * layers)``; biases 0, LayerNorm scales 1.
    """
    return pieces.init(GPT2, config, key)


def apply(
    config: GPT2Config, params: Params, tokens: jax.Array, dropout_rng: jax.Array | None = None
) -> jax.Array:
    """``GPT2.__call__`` on parameters as `init` returns them; same shapes and errors."""
    return merge(config, params)(tokens, dropout_rng=dropout_rng)


def merge(config: GPT2Config, params: Params, start: int = 0, stop: int | None = None) -> GPT2:
    """The module, or a part of it, around ``params``; to be used within one trace."""
    return pieces.merge(_part(start, stop), config, params)


def part(config: GPT2Config, params: Params, start: int, stop: int) -> Params:
    """The parameters of the part of blocks ``start`` to ``stop - 1``, out of those of all."""

    def taken(shape, params):
        if not isinstance(shape, dict):
            return params
        return {name: taken(below, params[name]) for name, below in shape.items()}

    return taken(pieces.shapes(_part(start, stop), config), params)


@functools.cache
def _part(start: int, stop: int | None) -> Callable[..., GPT2]:
    return functools.partial(GPT2, start=start, stop=stop)


decay_mask = pieces.decay_mask


# --- Arithmetic ---------------------------------------------------------------------------------


def num_params(config: GPT2Config) -> int:
    """Number of parameters, a tied embedding counted once.

    Example:
      >>> num_params(PRESETS["small"])
      124439808
    """
    return pieces.count(pieces.shapes(GPT2, config))


def flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Floating-point operations of the model for one token, forward and backward.

    ``6 N + 12 * layers * width * seq_len`` (PaLM, appendix B): 2 operations per parameter forward
    and 4 backward, and the two products of attention, not halved for causality. ``N`` leaves out
    embeddings that are only looked up and multiply nothing: that of positions, and that of tokens
    where the output layer has its own (``tied=False``). Recomputation (``remat``) does not count:
    this is the numerator of model FLOPs utilisation (MFU).
    """
    looked_up = config.context + (0 if config.tied else config.vocab_size)
    n = num_params(config) - looked_up * config.width
    return 6 * n + 12 * config.layers * config.width * seq_len
