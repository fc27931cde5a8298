"""The encoder-decoder Transformer (Vaswani et al., 2017) in Flax NNX, and its functional adapter.

As in `gpt2`, a model is its parameters, a plain nested dict, and pure functions of them::

    config = PRESETS["base"]
    params = init(config, jax.random.key(0))
    logits = apply(config, params, source, target_in)

They work inside ``jit``, ``vmap`` over stacked parameters, ``shard_map`` and ``lax.scan``.
Sentences are rows of token ids, padded behind their end with `PAD`; padding never influences
another position. ``target_in`` is the target shifted right: it begins with `START`, and the logits
at its position t predict token t of the target, of which the last is `END`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from decent_jax.models.pieces import dropout, fold_in, remat_call
from decent_jax.models.transformer_layers import (
    DecoderLayer,
    EncoderLayer,
    key_lengths,
    layer_norm,
    sinusoids,
)

Params = dict[str, Any]

PAD, UNKNOWN, START, END = 0, 1, 2, 3

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_ATTENTION = ("auto", "xla", "cudnn")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shape and numerics of a Transformer.

    Attributes:
        vocab_size: rows of the one embedding of source, target and output layer, the four special
            ids included.
        width: size of a hidden vector; even, for the sinusoids.
        heads: attention heads; divides ``width``.
        layers: of the encoder, and as many of the decoder.
        ff: hidden units of a feed-forward block.
        dropout: rate for embeddings, attention probabilities, hidden units of feed-forward blocks
            and residual branches.
        norm: ``"post"``, LayerNorm after each residual sum, as published; or ``"pre"``, before
            each branch and once more after the last layer (needs no warm-up to train deep).
        dtype: of activations and matrix products; parameters are float32 always, and so are the
            statistics of LayerNorms and softmaxes.
        remat: recompute each layer in the backward pass instead of keeping its activations.
        attention: ``"xla"``, ``"cudnn"`` (flash attention; NVIDIA GPUs only), or ``"auto"``:
            cuDNN where it applies. Dropout of probabilities needs them written out: a training
            step with ``dropout > 0`` uses XLA whatever is set here.
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
        for name in ("width", "heads", "layers", "ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.vocab_size <= END:
            raise ValueError(
                f"vocab_size must be at least {END + 1}, the special ids, got {self.vocab_size}"
            )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        if self.width % 2:
            raise ValueError(f"width must be even, for sines and cosines, got {self.width}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        for name, known in (
            ("norm", ("post", "pre")),
            ("dtype", _DTYPES),
            ("attention", _ATTENTION),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )


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
        rngs: key for the initial parameters; used here only, nothing random is kept.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(config.width**-0.5)
        self.shared = nnx.Embed(config.vocab_size, config.width, embedding_init=normal, rngs=rngs)
        # String keys, not a list: paths then survive JSON, checkpoints and flax's own dicts.
        layers = [str(i) for i in range(config.layers)]
        self.encoder = nnx.Dict({i: EncoderLayer(config, rngs=rngs) for i in layers})
        self.decoder = nnx.Dict({i: DecoderLayer(config, rngs=rngs) for i in layers})
        if config.norm == "pre":
            self.encoder_norm = layer_norm(config, rngs)
            self.decoder_norm = layer_norm(config, rngs)

    def encode(self, source: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        """See the function `encode`."""
        if source.ndim != 2:
            raise ValueError(f"source must have the shape (batch, time), got {source.shape}")
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
        """See the function `decode`."""
        if target_in.ndim != 2:
            raise ValueError(f"target_in must have the shape (batch, time), got {target_in.shape}")
        rng = rng if self.config.dropout else None
        lengths = key_lengths(source_mask)
        x = self.embed(target_in, jnp.arange(target_in.shape[1]))
        x = dropout(x, self.config.dropout, fold_in(rng, self.config.layers))
        for i in range(self.config.layers):
            x = self._call(self.decoder[str(i)], x, memory, lengths, fold_in(rng, i))
        return self.logits(x)

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embeddings of tokens ``(B, T)`` at positions ``(T,)``: ``(B, T, width)`` in dtype.

        Looked up, scaled to a variance of 1 and added in float32, so that the gradient of a
        frequent token is summed over the batch in float32 too.
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


# --- The functional adapter ---------------------------------------------------------------------


def init(config: TransformerConfig, key: jax.Array) -> Params:
    """Initial parameters: a nested dict of float32 arrays.

    Matrices Xavier uniform, each by its own shape; the embedding normal with standard deviation
    ``width ** -0.5``, so that scaled inputs and first logits have a variance of about 1; biases 0,
    LayerNorm scales 1 (as in tensor2tensor and fairseq; the paper does not say).
    """
    return nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(key))))


def encode(
    config: TransformerConfig, params: Params, source: jax.Array, rng: jax.Array | None = None
) -> jax.Array:
    """The encoder.

    Args:
        config: of the model.
        params: as `init` returns them.
        source: ``(B, S)`` integers in ``[0, vocab_size)``, `PAD` behind the sentence. A token
            beyond the vocabulary gives NaN.
        rng: key for dropout; None, or ``config.dropout == 0``, is evaluation.

    Returns:
        The memory, ``(B, S, width)`` in ``config.dtype``; of no meaning at padding.

    Raises:
        ValueError: ``source`` is not a matrix.
    """
    return merge(config, params).encode(source, rng)


def decode(
    config: TransformerConfig,
    params: Params,
    target_in: jax.Array,
    memory: jax.Array,
    source_mask: jax.Array,
    rng: jax.Array | None = None,
) -> jax.Array:
    """The decoder on given targets.

    Args:
        config: of the model.
        params: as `init` returns them.
        target_in: ``(B, T)`` integers, `START` and the target without its last token, then `PAD`.
        memory: ``(B, S, width)``, of `encode`.
        source_mask: ``(B, S)`` booleans, ``source != PAD``; True first, then False.
        rng: key for dropout; not the one given to `encode`.

    Returns:
        Logits of the next token, ``(B, T, vocab_size)`` in ``config.dtype``.

    Raises:
        ValueError: ``target_in`` is not a matrix.
    """
    return merge(config, params).decode(target_in, memory, source_mask, rng)


def apply(
    config: TransformerConfig,
    params: Params,
    source: jax.Array,
    target_in: jax.Array,
    rng: jax.Array | None = None,
) -> jax.Array:
    """`encode`, then `decode`: logits ``(B, T, vocab_size)`` in ``config.dtype``."""
    model = merge(config, params)
    memory = model.encode(source, fold_in(rng, 0))
    return model.decode(target_in, memory, source != PAD, fold_in(rng, 1))


def attention_weights(
    config: TransformerConfig, params: Params, source: jax.Array, target_in: jax.Array
) -> jax.Array:
    """Where each target position looks in the source.

    Returns:
        Probabilities of the cross attention, ``(B, layers, heads, T, S)`` float32, in evaluation;
        0 at padding of the source.
    """
    model = merge(config, params)
    memory, lengths = model.encode(source), key_lengths(source != PAD)
    x = model.embed(target_in, jnp.arange(target_in.shape[1]))
    recorded = []

    def attend_memory(layer, h, rng):
        keys, values = layer.cross_attention.keys_values(memory)
        recorded.append(layer.cross_attention.weights(h, keys, lengths=lengths))
        return layer.cross_attention.combine(recorded[-1], values)

    for i in range(config.layers):
        layer = model.decoder[str(i)]
        x = layer.through(x, layer.attend_self, functools.partial(attend_memory, layer))
    return jnp.stack(recorded, axis=1)


def merge(config: TransformerConfig, params: Params) -> Transformer:
    """The module around ``params``; to be used within one trace, as `apply` does."""
    return nnx.merge(_graphdef(config), nnx.State(params), copy=True)


@functools.cache
def _graphdef(config: TransformerConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


def decay_mask(params: Params) -> Params:
    """Which parameters decay: True for matrices (embedding and kernels), False for biases and
    LayerNorm scales. Decided by name, so stacked parameters give the same answer."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )


# --- Arithmetic ---------------------------------------------------------------------------------


def num_params(config: TransformerConfig) -> int:
    """Number of parameters, the shared embedding counted once.

    Example:
        >>> num_params(PRESETS["base"])
        63107072
    """
    encoder, decoder = _layer_params(config)
    last_norms = 4 * config.width if config.norm == "pre" else 0
    return config.vocab_size * config.width + config.layers * (encoder + decoder) + last_norms


def _layer_params(config) -> tuple[int, int]:
    """Parameters of a layer of the encoder and of the decoder."""
    width, ff = config.width, config.ff
    attention, norm, feed_forward = 4 * width * width, 2 * width, 2 * width * ff + ff + width
    return attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm


def flops_per_pair(config: TransformerConfig, source_len: int, target_len: int) -> int:
    """Floating-point operations of the model for one sentence pair, forward and backward.

    As `gpt2.flops_per_token` counts: 6 a parameter and position it is used at, and 12 ``width``
    for each query-key pair of an attention, not halved for causality. The decoder's matrices for
    keys and values of the memory are used at source positions, the shared embedding as the output
    layer at target positions. Recomputation (``remat``) does not count.
    """
    encoder, decoder = _layer_params(config)
    at_source = 2 * config.width**2
    parameters = config.layers * (
        (encoder + at_source) * source_len + (decoder - at_source) * target_len
    )
    parameters += config.vocab_size * config.width * target_len
    pairs = source_len**2 + target_len**2 + source_len * target_len
    return 6 * parameters + 12 * config.layers * config.width * pairs
