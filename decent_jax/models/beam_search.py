"""Beam search for the Transformer: batched, compiled, with a key/value cache."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from decent_jax.models import transformer
from decent_jax.models.transformer import END, PAD, START, key_lengths


class Hypotheses(NamedTuple):
    """The best translations of each sentence, best first.

    Attributes:
      tokens: ``(B, beam, L)`` int32; a hypothesis ends with `END`, followed by `PAD`.
      scores: ``(B, beam)`` float32, log probability over length penalty; -inf for missing
        hypotheses, whose tokens are all `PAD`.
      lengths: ``(B, beam)`` int32, tokens including `END`.
    """

    tokens: jax.Array
    scores: jax.Array
    lengths: jax.Array


def beam_search(
    config: transformer.TransformerConfig,
    params: transformer.Params,
    source: jax.Array,
    *,
    beam: int = 4,
    alpha: float = 0.6,
    max_extra: int = 50,
) -> Hypotheses:
    """Translates a batch of sentences.

    The score of a hypothesis is its log probability divided by ``((5 + length) / 6) ** alpha``
    (Wu et al., 2016, equation 14, without the coverage term); its length includes `END`.

    The search is tensor2tensor's. Each step takes the ``2 * beam`` best continuations of the alive
    hypotheses: those that end compete with the ``beam`` best finished hypotheses, and the ``beam``
    best of those that do not end stay alive. A finished hypothesis therefore never narrows the
    search. The search stops when, in every sentence, no alive hypothesis can become better than the
    worst finished one. `PAD` and `START` are never chosen. A result does not depend on the other
    sentences of the batch, or on its padding.

    Compiles once for each shape of ``source`` and each value of ``beam`` and ``max_extra``.

    Args:
      config: the model's shape and numerics.
      params: as `transformer.init` returns them.
      source: ``(B, S)`` int32, `PAD` after the sentence. A row of only padding, which fills up a
        batch, gets an empty hypothesis.
      beam: number of hypotheses to keep. 1 is greedy search: the likeliest token each time, until
        `END`.
      alpha: exponent of the length penalty, at least 0; 0 favours short sentences, 1 comes close
        to the mean log probability of a token.
      max_extra: a hypothesis has at most this many tokens more than its source. One that reaches
        this limit without `END` is returned only if no hypothesis of its sentence has ended.

    Returns:
      `Hypotheses`, with ``L = S + max_extra``.
    """
    return _search(config, params, source, alpha, beam, max_extra)[0]


class _State(NamedTuple):
    """The search between two tokens; ``tokens`` are ``(B, beam, 1 + L)`` int32, `START` first."""

    step: jax.Array  # () int32, tokens chosen
    alive_tokens: jax.Array
    alive_scores: jax.Array  # (B, beam) float32 log probabilities, best first
    finished_tokens: jax.Array
    finished_scores: jax.Array  # (B, beam) float32 over the penalty, best first; -inf is none


@functools.partial(jax.jit, static_argnames=("config", "beam", "max_extra"))
def _search(config, params, source, alpha, beam, max_extra):
    """`Hypotheses`, and the number of steps taken."""
    # cuDNN is no faster for queries this short.
    config = dataclasses.replace(config, attention="xla")
    model = transformer.merge(config, params)
    decode = _Decoder(model, source)
    lengths = (source != PAD).sum(axis=-1, dtype=jnp.int32)
    limits = jnp.where(lengths > 0, lengths + max_extra, 0)

    def penalty(length):
        return ((5.0 + length.astype(jnp.float32)) / 6.0) ** jnp.float32(alpha)

    def is_open(state):
        """Sentences ``(B,)`` that can still change. A log probability only falls, so the best
        possible score of an alive hypothesis is its current one over the largest penalty."""
        best_hope = state.alive_scores[:, 0] / penalty(limits)
        return (state.step < limits) & (best_hope > state.finished_scores[:, -1])

    def extend(carry):
        state, cache = carry
        log_probs, cache = decode(state.alive_tokens, state.step, cache)
        totals = state.alive_scores[:, :, None] + log_probs
        # Greedy search has no second best: once it ends, nothing is alive.
        totals, best = lax.top_k(totals.reshape(len(totals), -1), 2 * beam if beam > 1 else 1)
        parents, chosen = best // config.vocab_size, best % config.vocab_size
        tokens = _take(state.alive_tokens, parents).at[:, :, state.step + 1].set(chosen)
        ended = chosen == END

        alive_scores, alive = lax.top_k(jnp.where(ended, -jnp.inf, totals), beam)
        scores = jnp.where(ended, totals / penalty(state.step + 1), -jnp.inf)
        scores = jnp.concatenate([state.finished_scores, scores], axis=1)
        finished_scores, finished = lax.top_k(scores, beam)
        finished_tokens = jnp.concatenate([state.finished_tokens, tokens], axis=1)
        new = _State(
            state.step + 1,
            _take(tokens, alive),
            alive_scores,
            _take(finished_tokens, finished),
            finished_scores,
        )
        # A sentence at its limit no longer changes, while longer ones of the batch continue.
        growing = state.step < limits
        new = jax.tree.map(lambda n, o: _where(growing, n, o), new, state)
        parents = jnp.take_along_axis(parents, alive, axis=1)
        return new, jax.tree.map(lambda x: _take(x, parents), cache)

    batch, longest = source.shape[0], source.shape[1] + max_extra
    # Keys and values of each layer.
    empty = jnp.zeros(
        (batch, beam, longest, config.heads, config.width // config.heads), config.dtype
    )
    start = _start(batch, beam, longest), [(empty, empty) for _ in range(config.layers)]
    state, _ = lax.while_loop(lambda carry: is_open(carry[0]).any(), extend, start)
    return _best(state, penalty(limits)), state.step


def _start(batch: int, beam: int, longest: int) -> _State:
    tokens = jnp.full((batch, beam, 1 + longest), PAD, jnp.int32).at[:, :, 0].set(START)
    nothing = jnp.full((batch, beam), -jnp.inf, jnp.float32)
    return _State(
        step=jnp.int32(0),
        alive_tokens=tokens,
        # One start, not `beam` equal ones, which would have equal continuations forever.
        alive_scores=nothing.at[:, 0].set(0.0),
        finished_tokens=tokens,
        finished_scores=nothing,
    )


def _best(state: _State, penalties: jax.Array) -> Hypotheses:
    """The finished hypotheses; for a sentence without any, those alive at its limit."""
    any_finished = state.finished_scores[:, 0] > -jnp.inf
    tokens = _where(any_finished, state.finished_tokens, state.alive_tokens)
    scores = _where(any_finished, state.finished_scores, state.alive_scores / penalties[:, None])
    tokens = jnp.where(scores[:, :, None] > -jnp.inf, tokens, PAD)[:, :, 1:]
    return Hypotheses(tokens, scores, (tokens != PAD).sum(axis=-1, dtype=jnp.int32))


class _Decoder:
    """The decoder, run one token at a time, for sentences that are encoded once.

    Args:
      model: the model from `transformer.merge`, within this trace.
      source: ``(B, S)`` int32.
    """

    def __init__(self, model: transformer.Transformer, source: jax.Array):
        self.model = model
        self.layers = [model.decoder[str(i)] for i in range(model.config.layers)]
        memory = model.encode(source)
        self.lengths = key_lengths(source != PAD)
        self.memories = [layer.cross_attention.keys_values(memory) for layer in self.layers]

    def __call__(self, tokens, step, cache):
        """Log probabilities ``(B, beam, V)`` float32 of the token after position ``step`` of
        ``tokens`` ``(B, beam, 1 + L)``, and the cache with the token at ``step`` written in."""
        last = lax.dynamic_index_in_dim(tokens, step, axis=2, keepdims=False)
        # The hypotheses of a sentence take the place of the time axis in training: they are
        # queries to one memory, which therefore needs no copy per hypothesis.
        x = self.model.embed(last, jnp.full(last.shape[1], step))
        new_cache = []
        for layer, past, memory in zip(self.layers, cache, self.memories, strict=True):
            attend_self = functools.partial(_attend_cache, layer, step, past, new_cache)
            attend_memory = functools.partial(_attend_memory, layer, memory, self.lengths)
            x = layer.through(x, attend_self, attend_memory)
        log_probs = jax.nn.log_softmax(self.model.logits(x).astype(jnp.float32), axis=-1)
        return log_probs.at[:, :, jnp.array([PAD, START])].set(-jnp.inf), new_cache


def _attend_cache(layer, step, past, new_cache, h, rng):
    """Self-attention of ``h`` ``(B, beam, width)``, each row over its own past. Appends the layer's
    keys and values, with those of ``h`` at ``step``, to ``new_cache``."""
    attention = layer.self_attention
    new_cache.append(
        tuple(
            lax.dynamic_update_slice_in_dim(old, new[:, :, None], step, axis=2)
            for old, new in zip(past, attention.keys_values(h), strict=True)
        )
    )
    keys, values = new_cache[-1]
    rows = h.shape[0] * h.shape[1]
    y = jax.nn.dot_product_attention(
        attention.heads(attention.query(h)).reshape(rows, 1, *keys.shape[3:]),
        keys.reshape(rows, *keys.shape[2:]),
        values.reshape(rows, *values.shape[2:]),
        mask=(jnp.arange(keys.shape[2]) <= step)[None, None, None],
        implementation="xla",
    )
    return attention.out(y.reshape(h.shape))


def _attend_memory(layer, memory, lengths, h, rng):
    return layer.cross_attention(h, *memory, lengths=lengths)


def _take(x, indices):
    """The entries ``indices`` ``(B, K)`` along the second axis of ``x`` ``(B, N, ...)``."""
    return jax.vmap(lambda row, i: row[i])(x, indices)


def _where(condition, new, old):
    """`jnp.where` per sentence; a scalar (the step) is always ``new``."""
    if new.ndim == 0:
        return new
    return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)
