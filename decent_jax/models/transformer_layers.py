"""Layers of the Transformer: residual branches, attention, feed-forward blocks, positions."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from decent_jax.models.pieces import attention, dropout, fold_in

if TYPE_CHECKING:
    from decent_jax.models.transformer import TransformerConfig

_LAYER_NORM_EPSILON = 1e-5


class _Layer(nnx.Module):
    """What both kinds of layers share: residual branches and a feed-forward block."""

    def __init__(self, config: "TransformerConfig", *, rngs: nnx.Rngs):
        self.config = config
        self.ff_in = _linear(config, config.width, config.ff, rngs, bias=True)
        self.ff_out = _linear(config, config.ff, config.width, rngs, bias=True)
        self.ff_norm = layer_norm(config, rngs)

    def feed_forward(self, x: jax.Array, rng: jax.Array | None) -> jax.Array:
        hidden = jax.nn.relu(self.ff_in(x))
        return self.ff_out(dropout(hidden, self.config.dropout, rng))

    def residual(self, norm: nnx.LayerNorm, branch: Callable, x: jax.Array, rng) -> jax.Array:
        """``norm(x + branch(x))`` or ``x + branch(norm(x))``, with dropout of the branch."""
        post = self.config.norm == "post"
        y = branch(x if post else norm(x), fold_in(rng, 0))
        x = x + dropout(y, self.config.dropout, fold_in(rng, 1))
        return norm(x) if post else x


class EncoderLayer(_Layer):
    """Self-attention over the real positions of the source, then the feed-forward block."""

    def __init__(self, config: "TransformerConfig", *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.self_attention = Attention(config, rngs=rngs)
        self.self_norm = layer_norm(config, rngs)

    def __call__(self, x, lengths, rng=None) -> jax.Array:
        def attend(h, rng):
            keys, values = self.self_attention.keys_values(h)
            return self.self_attention(h, keys, values, lengths=lengths, rng=rng)

        x = self.residual(self.self_norm, attend, x, fold_in(rng, 0))
        return self.residual(self.ff_norm, self.feed_forward, x, fold_in(rng, 1))


class DecoderLayer(_Layer):
    """Causal self-attention, attention to the encoder's memory, the feed-forward block."""

    def __init__(self, config: "TransformerConfig", *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.self_attention = Attention(config, rngs=rngs)
        self.self_norm = layer_norm(config, rngs)
        self.cross_attention = Attention(config, rngs=rngs)
        self.cross_norm = layer_norm(config, rngs)

    def __call__(self, x, memory, lengths, rng=None) -> jax.Array:
        def attend_memory(h, rng):
            keys, values = self.cross_attention.keys_values(memory)
            return self.cross_attention(h, keys, values, lengths=lengths, rng=rng)

        return self.through(x, self.attend_self, attend_memory, rng)

    def attend_self(self, h: jax.Array, rng: jax.Array | None) -> jax.Array:
        # No mask for padding: it is behind the sentence, where causality hides it.
        keys, values = self.self_attention.keys_values(h)
        return self.self_attention(h, keys, values, causal=True, rng=rng)

    def through(self, x, attend_self: Callable, attend_memory: Callable, rng=None) -> jax.Array:
        """The layer around two attentions, each ``(h (B, T, width), rng) -> (B, T, width)``:
        those of `__call__`, those of a decoder with a cache, or one that records its weights."""
        x = self.residual(self.self_norm, attend_self, x, fold_in(rng, 0))
        x = self.residual(self.cross_norm, attend_memory, x, fold_in(rng, 1))
        return self.residual(self.ff_norm, self.feed_forward, x, fold_in(rng, 2))


class Attention(nnx.Module):
    """Multi-head attention of given keys and values; four matrices without biases."""

    def __init__(self, config: "TransformerConfig", *, rngs: nnx.Rngs):
        self.config = config
        for name in ("query", "key", "value", "out"):
            setattr(self, name, _linear(config, config.width, config.width, rngs))

    def __call__(self, x, keys, values, *, lengths=None, causal=False, rng=None) -> jax.Array:
        """Positions of ``x`` ``(B, T, width)`` read values ``(B, S, heads, D)``.

        ``lengths`` ``(B,)`` int32, at least 1, of the keys to see. Lengths, not a mask: cuDNN
        turns a mask into a ``(B, heads, T, S)`` bias, and refuses it for odd T or S.
        """
        if rng is not None:
            weights = self.weights(x, keys, lengths=lengths, causal=causal)
            return self.combine(dropout(weights, self.config.dropout, rng), values)
        query = self.heads(self.query(x))
        y = attention(self.config, query, keys, values, lengths, causal=causal)
        return self.out(y.reshape(x.shape))

    def weights(self, x, keys, *, lengths=None, causal=False) -> jax.Array:
        """The probabilities ``(B, heads, T, S)``, float32, which `__call__` never writes out."""
        query = self.heads(self.query(x))
        scores = jnp.einsum("bthd,bshd->bhts", query, keys, preferred_element_type=jnp.float32)
        scores /= math.sqrt(query.shape[-1])
        key_positions = jnp.arange(keys.shape[1])
        if lengths is not None:
            seen = key_positions[None] < lengths[:, None]
            scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        if causal:
            seen = key_positions[None] <= jnp.arange(x.shape[1])[:, None]
            scores = jnp.where(seen[None, None], scores, -jnp.inf)
        return jax.nn.softmax(scores, axis=-1)

    def combine(self, weights, values) -> jax.Array:
        """``(B, heads, T, S)`` and ``(B, S, heads, D)`` to ``(B, T, width)``."""
        y = jnp.einsum("bhts,bshd->bthd", weights.astype(values.dtype), values)
        return self.out(y.reshape(*y.shape[:2], -1))

    def keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``(B, S, width)`` to keys and values ``(B, S, heads, D)``."""
        return self.heads(self.key(x)), self.heads(self.value(x))

    def heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.config.heads, -1)


def _linear(config, inputs, outputs, rngs, bias=False) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        kernel_init=nnx.initializers.xavier_uniform(),
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def layer_norm(config, rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.width,
        epsilon=_LAYER_NORM_EPSILON,
        use_fast_variance=False,  # E[x^2] - E[x]^2 cancels
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Position encodings, ``(T,)`` integers to ``(T, width)`` float32.

    ``sin(p / 10000 ** (2 i / width))`` at column ``2 i`` and the cosine beside it (Vaswani et al.,
    2017, section 3.5). Computed, so that any length will do.
    """
    rates = jnp.exp(jnp.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = positions[:, None] * rates[None]
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(-1, width)


def key_lengths(mask: jax.Array) -> jax.Array:
    """Real positions ``(B,)`` int32 of a mask ``(B, S)``, whose padding is behind them.

    At least 1, since attention to nothing is 0 / 0: a row of padding alone, which fills up a
    batch, then gives finite numbers that nobody reads.
    """
    return jnp.maximum(mask.sum(axis=-1, dtype=jnp.int32), 1)
