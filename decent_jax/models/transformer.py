"""The encoder-decoder Transformer (Vaswani et al., 2017) in Flax NNX, and its functional adapter.

As in `decoders`, a model is its parameters, a plain nested dict, which pure functions take::

    config = PRESETS["base"]
    params = init(config, jax.random.key(0))
    logits = apply(config, params, source, target_in)

These functions work inside ``jit``, ``vmap`` over stacked parameters, ``shard_map`` and
``lax.scan``. Sentences are rows of token ids, padded at the end with `PAD`; padding never
influences another position. ``target_in`` is the target shifted right: it starts with `START`, and
the logits at position t predict token t of the target, whose last token is `END`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from decent_jax import cpu
from decent_jax.models import pieces
from decent_jax.models.pieces import Params, attention, dropout, fold_in, layer_norm, remat_call

PAD, UNKNOWN, START, END = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shape and numerics of a Transformer.

    Attributes:
      vocab_size: rows of the embedding shared by source, target and output layer, including the
        four special ids.
      width: size of a hidden vector; even, for the sinusoids.
      heads: attention heads; divides ``width``.
      layers: number of layers of the encoder, and of the decoder.
      ff: hidden units of a feed-forward block.
      dropout: rate for embeddings, attention probabilities, hidden units of feed-forward blocks
        and residual branches.
      norm: ``"post"``, LayerNorm after each residual sum, as published; or ``"pre"``, before
        each branch and once more after the last layer (deep models then need no warm-up).
      dtype: dtype of activations and matrix products; parameters and LayerNorm and softmax
        statistics are always float32.
      remat: whether to recompute each layer in the backward pass instead of keeping its
        activations.
      attention: ``"xla"``, ``"cudnn"`` (flash attention; NVIDIA GPUs only), or ``"auto"``:
        cuDNN where it applies. Dropout of the probabilities materializes them, so a training
        step with ``dropout > 0`` always uses XLA.
    """

    vocab_size: int = 37120
    width: int = 512
    heads: int = 8
    layers: int = 6
    ff: int = 2048
    dropout: float = 0.1
    norm: str = "post"
    dtype: str = "bfloat16"
    remat: bool = False
    attention: str = "auto"

    def __post_init__(self):
        pieces.check(self)
        if self.width % 2:
            raise ValueError(f"width must be even, for sines and cosines, got {self.width}")


PRESETS = {
    "tiny": TransformerConfig(vocab_size=512, width=64, heads=4, layers=2, ff=256),
    "small": TransformerConfig(vocab_size=8000, width=256, heads=4, layers=4, ff=1024),
    "base": TransformerConfig(),  # WMT14 English-German
    "big": TransformerConfig(vocab_size=32000, width=1024, heads=16, ff=4096),  # English-French
}


# --- The module ---------------------------------------------------------------------------------


class Transformer(nnx.Module):
    """Encoder and decoder around one embedding.

    Args:
      config: shape and numerics.
      rngs: key for the initial parameters; no random state is kept.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(config.width**-0.5)
        self.shared = nnx.Embed(config.vocab_size, config.width, embedding_init=normal, rngs=rngs)
        # String keys instead of a list, so that paths survive JSON, checkpoints and flax's dicts.
        layers = [str(i) for i in range(config.layers)]
        self.encoder = nnx.Dict({i: EncoderLayer(config, rngs=rngs) for i in layers})
        self.decoder = nnx.Dict({i: DecoderLayer(config, rngs=rngs) for i in layers})
        if config.norm == "pre":
            self.encoder_norm = layer_norm(config, rngs)
            self.decoder_norm = layer_norm(config, rngs)

    def encode(self, source: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """Encodes source sentences.

        Args:
          source: ``(B, S)`` integers in ``[0, vocab_size)``, `PAD` after the sentence. A token
            beyond the vocabulary gives NaN.
          rng: key for dropout; None, or ``config.dropout == 0``, turns dropout off.

        Returns:
          The memory, ``(B, S, width)`` in ``config.dtype``; meaningless at padding.
        """
        rng = rng if self.config.dropout else None
        lengths = key_lengths(source != PAD)
        x = self.embed(source, jnp.arange(source.shape[1]))
        x = dropout(x, self.config.dropout, fold_in(rng, self.config.layers))
        for i in range(self.config.layers):
            x = self._call(self.encoder[str(i)], x, lengths, fold_in(rng, i))
        return self.encoder_norm(x) if self.config.norm == "pre" else x

    def decode(
        self,
        target_in: jax.Array,
        memory: jax.Array,
        source_mask: jax.Array,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """Runs the decoder on given targets.

        Args:
          target_in: ``(B, T)`` integers, `START` and the target without its last token, then `PAD`.
          memory: ``(B, S, width)``, from `encode`.
          source_mask: ``(B, S)`` booleans, ``source != PAD``; True first, then False.
          rng: key for dropout, different from the one passed to `encode`.

        Returns:
          Logits of the next token, ``(B, T, vocab_size)`` in ``config.dtype``.
        """
        rng = rng if self.config.dropout else None
        lengths = key_lengths(source_mask)
        x = self.embed(target_in, jnp.arange(target_in.shape[1]))
        x = dropout(x, self.config.dropout, fold_in(rng, self.config.layers))
        for i in range(self.config.layers):
            x = self._call(self.decoder[str(i)], x, memory, lengths, fold_in(rng, i))
        return self.logits(x)

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embeddings ``(B, T, width)`` of tokens ``(B, T)`` at positions ``(T,)``, in ``dtype``.

        They are looked up, scaled to a variance of 1 and added in float32, so that the gradient of
        a frequent token is also summed over the batch in float32.
        """
        x = self.shared(tokens) * math.sqrt(self.config.width)
        return (x + sinusoids(positions, self.config.width)[None]).astype(self.config.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """The output layer: ``(..., width)`` of the last decoder layer to ``(..., vocab_size)``."""
        if self.config.norm == "pre":
            x = self.decoder_norm(x)
        return x @ self.shared.embedding[...].T.astype(x.dtype)

    def _call(self, layer, *args):
        return remat_call(layer, *args) if self.config.remat else layer(*args)


class _Layer(nnx.Module):
    """The base of encoder and decoder layers: self-attention, feed-forward block, residuals."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.ff_in = _linear(config, config.width, config.ff, rngs, bias=True)
        self.ff_out = _linear(config, config.ff, config.width, rngs, bias=True)
        self.ff_norm = layer_norm(config, rngs)
        self.self_attention = MultiHeadAttention(config, rngs=rngs)
        self.self_norm = layer_norm(config, rngs)

    def feed_forward(self, x: jax.Array, rng: jax.Array | None) -> jax.Array:
        hidden = jax.nn.relu(self.ff_in(x))
        return self.ff_out(dropout(hidden, self.config.dropout, rng))

    def residual(self, norm: nnx.LayerNorm, branch: Callable, x: jax.Array, rng) -> jax.Array:
        """``norm(x + branch(x))`` or ``x + branch(norm(x))``, with dropout of the branch."""
        post = self.config.norm == "post"
        y = branch(x if post else norm(x), fold_in(rng, 0))
        x = cpu.computed_once(x + dropout(y, self.config.dropout, fold_in(rng, 1)))
        return norm(x) if post else x


class EncoderLayer(_Layer):
    """Self-attention over the real positions of the source, then the feed-forward block."""

    def __call__(self, x, lengths, rng=None) -> jax.Array:
        def attend(h, rng):
            keys, values = self.self_attention.keys_values(h)
            return self.self_attention(h, keys, values, lengths=lengths, rng=rng)

        x = self.residual(self.self_norm, attend, x, fold_in(rng, 0))
        return self.residual(self.ff_norm, self.feed_forward, x, fold_in(rng, 1))


class DecoderLayer(_Layer):
    """Causal self-attention, attention to the encoder's memory, the feed-forward block."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.cross_attention = MultiHeadAttention(config, rngs=rngs)
        self.cross_norm = layer_norm(config, rngs)

    def __call__(self, x, memory, lengths, rng=None) -> jax.Array:
        def attend_memory(h, rng):
            keys, values = self.cross_attention.keys_values(memory)
            return self.cross_attention(h, keys, values, lengths=lengths, rng=rng)

        return self.through(x, self.attend_self, attend_memory, rng)

    def attend_self(self, h: jax.Array, rng: jax.Array | None) -> jax.Array:
        # No padding mask: padding comes after the sentence, where causality hides it.
        keys, values = self.self_attention.keys_values(h)
        return self.self_attention(h, keys, values, causal=True, rng=rng)

    def through(self, x, attend_self: Callable, attend_memory: Callable, rng=None) -> jax.Array:
        """The layer around two attentions, each ``(h (B, T, width), rng) -> (B, T, width)``. They
        may be those of `__call__`, attend to a cache, or record their weights."""
        x = self.residual(self.self_norm, attend_self, x, fold_in(rng, 0))
        x = self.residual(self.cross_norm, attend_memory, x, fold_in(rng, 1))
        return self.residual(self.ff_norm, self.feed_forward, x, fold_in(rng, 2))


class MultiHeadAttention(nnx.Module):
    """Multi-head attention to given keys and values, with four matrices and no biases."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.width
        self.query = _linear(config, width, width, rngs)
        self.key = _linear(config, width, width, rngs)
        self.value = _linear(config, width, width, rngs)
        self.out = _linear(config, width, width, rngs)

    def __call__(self, x, keys, values, *, lengths=None, causal=False, rng=None) -> jax.Array:
        """Positions of ``x`` ``(B, T, width)`` attend to values ``(B, S, heads, D)``."""
        query = self.heads(self.query(x))
        y = attention(self.config, query, keys, values, lengths, causal=causal, rng=rng)
        return self.out(y.reshape(x.shape))

    def keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``(B, S, width)`` to keys and values ``(B, S, heads, D)``."""
        return self.heads(self.key(x)), self.heads(self.value(x))

    def heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.config.heads, -1)


def _linear(config, inputs, outputs, rngs, bias=False) -> nnx.Linear:
    dtype, xavier = jnp.dtype(config.dtype), nnx.initializers.xavier_uniform()
    return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=xavier, dtype=dtype, rngs=rngs)


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Position encodings, ``(T,)`` integers to ``(T, width)`` float32.

    ``sin(p / 10000 ** (2 i / width))`` in column ``2 i`` and the cosine next to it (Vaswani et al.,
    2017, section 3.5). They are computed, not stored, so any length works.
    """
    rates = jnp.exp(jnp.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = positions[:, None] * rates[None]
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(-1, width)


def key_lengths(mask: jax.Array) -> jax.Array:
    """The number of real positions, ``(B,)`` int32, of a mask ``(B, S)`` with padding at the end.

    The number is at least 1, because attention to nothing is 0 / 0. A row of only padding, which
    fills up a batch, thus gives finite numbers, which are ignored.
    """
    return jnp.maximum(mask.sum(axis=-1, dtype=jnp.int32), 1)


# --- The functional adapter ---------------------------------------------------------------------


def init(config: TransformerConfig, key: jax.Array) -> Params:
    """Draws the initial parameters: a nested dict of float32 arrays.

    Matrices are Xavier uniform, each by its own shape. The embedding is normal with standard
    deviation ``width ** -0.5``, so that scaled inputs and first logits have a variance of about 1.
    Biases are 0, and LayerNorm scales are 1 (as in tensor2tensor and fairseq; the paper does not
    say).
    """
    return pieces.init(Transformer, config, key)


def apply(
    config: TransformerConfig,
    params: Params,
    source: jax.Array,
    target_in: jax.Array,
    rng: jax.Array | None = None,
) -> jax.Array:
    """`Transformer.encode`, then `Transformer.decode`, with their arguments and shapes."""
    model = merge(config, params)
    memory = model.encode(source, fold_in(rng, 0))
    return model.decode(target_in, memory, source != PAD, fold_in(rng, 1))


def attention_weights(
    config: TransformerConfig, params: Params, source: jax.Array, target_in: jax.Array
) -> jax.Array:
    """The cross-attention weights of each target position over the source.

    Returns:
      Probabilities without dropout, ``(B, layers, heads, T, S)`` float32; 0 at the source's
      padding.
    """
    model = merge(config, params)
    memory, lengths = model.encode(source), key_lengths(source != PAD)
    x = model.embed(target_in, jnp.arange(target_in.shape[1]))
    recorded = []

    def attend_memory(layer, h, rng):
        cross = layer.cross_attention
        keys, values = cross.keys_values(memory)
        recorded.append(pieces.attention_weights(cross.heads(cross.query(h)), keys, lengths))
        return cross.out(pieces.weighted(recorded[-1], values).reshape(h.shape))

    for i in range(config.layers):
        layer = model.decoder[str(i)]
        x = layer.through(x, layer.attend_self, functools.partial(attend_memory, layer))
    return jnp.stack(recorded, axis=1)


def merge(config: TransformerConfig, params: Params) -> Transformer:
    """The module around ``params``; to be used within one trace, as `apply` does."""
    return pieces.merge(Transformer, config, params)


# --- Arithmetic ---------------------------------------------------------------------------------


def num_params(config: TransformerConfig) -> int:
    """Number of parameters, the shared embedding counted once.

    Example:
      >>> num_params(PRESETS["base"])
      63107072
    """
    return pieces.count(pieces.shapes(Transformer, config))


def flops_per_pair(config: TransformerConfig, source_len: float, target_len: float) -> float:
    """Floating-point operations of the model for one sentence pair, forward and backward.

    As in `decoders.flops_per_token`, a position costs 6 operations per parameter that it uses, and
    a query-key pair of an attention costs ``12 * width``, not halved for causality. Source
    positions also use the decoder's matrices for keys and values of the memory; target positions
    also use the shared embedding as the output layer. Recomputation (``remat``) does not count.
    """
    shapes = pieces.shapes(Transformer, config)
    encoder, decoder = (pieces.count(shapes[name]) for name in ("encoder", "decoder"))
    at_source = 2 * config.layers * config.width**2
    parameters = (encoder + at_source) * source_len + (decoder - at_source) * target_len
    parameters += config.vocab_size * config.width * target_len
    pairs = source_len**2 + target_len**2 + source_len * target_len
    return 6 * parameters + 12 * config.layers * config.width * pairs
