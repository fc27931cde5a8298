"""Beam search against exhaustive, greedy and slow beam searches that are written from scratch.

All of them work in float64 on log probabilities of the uncached model, and know hypotheses as
Python tuples.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import shapes_of

from decent_jax.models import beam_search, transformer
from decent_jax.models.transformer import END, PAD, START

# 1 (unknown), 3 (end), 4, 5 and 6 may be chosen.
TINY = transformer.TransformerConfig(
    vocab_size=7, width=8, heads=2, layers=2, ff=16, dropout=0.0, dtype="float32"
)
SOURCE = np.array([[4, 5, 3], [6, 3, 0], [5, 0, 0], [6, 6, 4]], np.int32)
EXTRA = 2  # the longest hypotheses have 5, 4, 3 and 5 tokens
LIMITS = (SOURCE != PAD).sum(1) + EXTRA
ALPHAS = (0.0, 0.6, 1.0)
# Compiling is what these tests spend their time on.
pytestmark = pytest.mark.usefixtures("compile_once")
search = functools.partial(beam_search.beam_search, TINY, max_extra=EXTRA)
apply = jax.jit(transformer.apply, static_argnums=0)


@functools.cache
def random_params(seed, scale):
    """Predictions that depend on everything seen, more peaked the larger ``scale``."""
    rng = np.random.default_rng(seed)  # NumPy compiles nothing
    sizes = {"kernel": 1.0, "embedding": 0.7, "scale": 0.3, "bias": 0.1}

    def draw(path, shape):
        noise = sizes[path[-1].key] * rng.normal(size=shape.shape)
        return np.float32(noise + (path[-1].key == "scale"))

    params = jax.tree_util.tree_map_with_path(draw, shapes_of(transformer, TINY))
    last = params["decoder"]["1"]
    last["ff_norm"] = jax.tree.map(lambda x: np.float32(scale) * x, last["ff_norm"])
    return params


# Most random models end at once or never; of these, some do, some do not.
MODELS = [(0, 0.5), (14, 0.5), (114, 0.5), (49, 1.0), (121, 1.0), (5, 2.0), (58, 2.0), (125, 2.0)]


class Uncached:
    """Log probabilities ``(V,)`` float64 of what follows a prefix, all of one model computed once.

    A sentence is any of `SOURCE`, a prefix a tuple of tokens without `START`.
    """

    def __init__(self, params):
        words = [1, 4, 5, 6]
        longest = int(LIMITS.max()) - 1
        prefixes = [p for n in range(longest + 1) for p in itertools.product(words, repeat=n)]
        self.index = {prefix: i for i, prefix in enumerate(prefixes)}
        target_in = np.array([(START, *p, *[PAD] * (longest - len(p))) for p in prefixes], np.int32)
        self.tables = []
        for source in SOURCE:
            logits = apply(TINY, params, np.tile(source, (len(prefixes), 1)), target_in)
            logits = np.asarray(logits, np.float64)
            logits = logits[np.arange(len(prefixes)), [len(p) for p in prefixes]]
            self.tables.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))

    def __call__(self, sentence, prefix):
        return self.tables[sentence][self.index[prefix]]


@functools.cache
def uncached(seed, scale):
    return Uncached(random_params(seed, scale))


def log_probability(model, sentence, tokens):
    return sum(model(sentence, tokens[:i])[token] for i, token in enumerate(tokens))


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def slow_beam_search(model, sentence, beam, alpha):
    """From the definition, to the end: no early stop, no arrays, all continuations sorted."""
    limit = LIMITS[sentence]
    alive, finished = [(0.0, ())], []
    for _ in range(limit):
        continuations = [
            (total + model(sentence, tokens)[token], (*tokens, token))
            for total, tokens in alive
            for token in range(TINY.vocab_size)
            if token not in (PAD, START)
        ]
        continuations = sorted(continuations, reverse=True)[: 2 * beam]
        finished += [
            (total / penalty(len(tokens), alpha), tokens)
            for total, tokens in continuations
            if tokens[-1] == END
        ]
        finished = sorted(finished, reverse=True)[:beam]
        alive = [c for c in continuations if c[1][-1] != END][:beam]
    return finished or [(total / penalty(limit, alpha), tokens) for total, tokens in alive]


def unpadded(hypotheses, sentence):
    """The hypotheses of a sentence as ``[(score, tokens), ...]``."""
    tokens, scores, lengths = (np.asarray(x[sentence]) for x in hypotheses)
    for row, score, length in zip(tokens, scores, lengths, strict=True):
        assert (row[length:] == PAD).all() and (row[:length] != PAD).all()
        assert (length == 0) == (score == -np.inf)
    real = scores > -np.inf
    rows = zip(scores[real], tokens[real], lengths[real], strict=True)
    return [(float(s), tuple(t[:n].tolist())) for s, t, n in rows]


def assert_same(got, wanted):
    """Tokens in the same order, and scores to float32."""
    np.testing.assert_allclose([s for s, _ in got], [s for s, _ in wanted], rtol=2e-5, atol=2e-5)
    for i, ((score, tokens), (wanted_score, wanted_tokens)) in enumerate(
        zip(got, wanted, strict=True)
    ):
        neighbours = [s for j, (s, _) in enumerate(wanted) if abs(j - i) == 1]
        if all(abs(s - wanted_score) > 1e-4 for s in neighbours):  # else either order is right
            assert tokens == wanted_tokens, (i, score, wanted_score)


@pytest.mark.slow
@pytest.mark.parametrize("beam", [2, 4])
def test_equals_a_slow_beam_search(beam):
    """Which runs to the end, so stopping early loses nothing; of the uncached model.

    In the reference all beams were equal, because they began as equal hypotheses.
    """
    several = 0
    for model, alpha in itertools.product(MODELS, ALPHAS):
        hypotheses = search(random_params(*model), SOURCE, beam=beam, alpha=alpha)
        for sentence in range(len(SOURCE)):
            got = unpadded(hypotheses, sentence)
            assert_same(got, slow_beam_search(uncached(*model), sentence, beam, alpha))
            assert len({tokens for _, tokens in got}) == len(got)
            several += len(got) == beam  # fewer have ended in a peaked model
    assert several >= 48  # of 96


def test_beam_1_is_greedy():
    for model in MODELS:
        hypotheses = search(random_params(*model), SOURCE, beam=1, alpha=0.6)
        for sentence, limit in enumerate(LIMITS):
            tokens = ()
            while len(tokens) < limit and (not tokens or tokens[-1] != END):
                log_probs = uncached(*model)(sentence, tokens).copy()
                log_probs[[PAD, START]] = -np.inf
                tokens += (int(np.argmax(log_probs)),)
            total = log_probability(uncached(*model), sentence, tokens)
            assert_same(
                unpadded(hypotheses, sentence), [(total / penalty(len(tokens), 0.6), tokens)]
            )


# --- Properties ---------------------------------------------------------------------------------


def biased_to_end(logit):
    """A model that gives `END` about this logit, whatever it reads."""
    params = dict(random_params(0, 0.5))
    # The output layer is the embedding: a constant first coordinate is a bias of each token.
    table = params["shared"]["embedding"].copy()
    table[:, 0], table[END, 0] = 0.0, logit
    params["shared"] = {"embedding": table}
    last = params["decoder"]["1"]
    norm = {name: value.copy() for name, value in last["ff_norm"].items()}
    norm["scale"][0], norm["bias"][0] = 0.0, 1.0
    params["decoder"] = {**params["decoder"], "1": {**last, "ff_norm": norm}}
    return params


def test_hypotheses_without_an_end_come_back_only_if_none_has_one():
    never, always = biased_to_end(-40.0), biased_to_end(40.0)
    for beam in (1, 2):  # at most 4 of 5 continuations are looked at: never the end
        endless = search(never, SOURCE, beam=beam)
        np.testing.assert_array_equal(endless.lengths, np.tile(LIMITS[:, None], (1, beam)))
        assert END not in np.asarray(endless.tokens)
        assert bool((endless.scores > -20).all())
    for sentence in range(len(SOURCE)):  # 8 of 5: ends are found, bad as they are
        found = unpadded(search(never, SOURCE, beam=4), sentence)
        assert found and all(tokens[-1] == END and score < -20 for score, tokens in found)
    at_once = search(always, SOURCE, beam=4)
    np.testing.assert_array_equal(at_once.tokens[:, 0, 0], END)
    np.testing.assert_array_equal(at_once.lengths[:, 0], 1)


def test_the_search_stops_early():
    """That it loses nothing `test_equals_a_slow_beam_search` shows."""
    for alpha in ALPHAS:
        _, steps = beam_search._search(TINY, biased_to_end(2.0), SOURCE, alpha, 2, 10)
        assert steps < LIMITS.max() - EXTRA + 10


def test_batch_and_padding_do_not_matter():
    params = random_params(14, 0.5)
    together = search(params, SOURCE, beam=3)
    backwards = search(params, SOURCE[::-1], beam=3)
    for a, b in zip(together, backwards, strict=True):
        np.testing.assert_allclose(a, b[::-1], rtol=1e-5)
    # Two more columns, and a row of padding alone, which fills up a batch.
    wide = search(params, np.pad(SOURCE, ((0, 1), (0, 2))), beam=3)
    for i in range(len(SOURCE)):
        assert_same(unpadded(wide, i), unpadded(together, i))
    assert int(wide.lengths[-1].sum()) == 0


def test_bfloat16_and_one_compilation(programs):
    half = dataclasses.replace(TINY, dtype="bfloat16")
    for alpha, model in ((0.6, MODELS[0]), (1.0, MODELS[3])):
        params = random_params(*model)
        found = beam_search.beam_search(half, params, SOURCE, beam=2, alpha=alpha, max_extra=EXTRA)
        assert found.scores.dtype == jnp.float32 and found.tokens.dtype == jnp.int32
        assert found.tokens.shape == (4, 2, 5)
        assert bool(jnp.isfinite(found.scores[:, 0]).all())
    assert programs.count("jit(_search)") == 1
