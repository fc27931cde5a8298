"""Sentences in, translations out: batches for beam search, and scores against references."""

from collections.abc import Sequence

import jax
import numpy as np

from decent_jax.data.subwords import Subwords
from decent_jax.models import beam_search, transformer

BEAM = 4
ALPHA = 0.6  # exponent of the length penalty
MAX_EXTRA = 50  # tokens a translation may be longer than its source
_WIDTHS = (16, 32, 64, 128)  # tokens sources are padded to, and multiples of the last
_BATCH = 32


class Translator:
    """Translates with a beam search, compiled once for each width of sources.

    Args:
        config: of the model.
        vocabulary: of source and target.
        beam: hypotheses kept; 1 is greedy.
    """

    def __init__(
        self, config: transformer.TransformerConfig, vocabulary: Subwords, beam: int = BEAM
    ):
        self.config, self.vocabulary, self.beam = config, vocabulary, beam
        self._search = jax.jit(
            lambda params, source: beam_search.beam_search(
                config, params, source, beam=beam, alpha=ALPHA, max_extra=MAX_EXTRA
            ).tokens[:, 0]
        )

    def __call__(self, params: transformer.Params, sentences: Sequence[str]) -> list[str]:
        """The best translation of each sentence, "" of an empty one."""
        ids = [self.vocabulary.encode(sentence) for sentence in sentences]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        order = [i for i in order if len(ids[i])]
        result = [""] * len(ids)
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            source = np.zeros((_BATCH, _width(len(ids[rows[-1]]))), np.int32)
            for row, i in enumerate(rows):
                source[row, : len(ids[i])] = ids[i]
            for i, tokens in zip(rows, np.asarray(self._search(params, source)), strict=False):
                result[i] = self.vocabulary.decode(tokens)
        return result


def _width(tokens: int) -> int:
    longest = _WIDTHS[-1]
    return next((w for w in _WIDTHS if tokens <= w), -(-tokens // longest) * longest)


def bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU of detokenised text by sacreBLEU, 0 to 100, and its signature.

    Comparable with published numbers of the same signature (Post, 2018, arXiv:1804.08771).
    """
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(translations), [list(references)]).score
    return score, str(metric.get_signature())


def meteor(translations: Sequence[str], references: Sequence[str]) -> float | None:
    """Mean METEOR by nltk, 0 to 1; None where nltk's WordNet is not on this machine.

    Of English: stems and synonyms are (Banerjee and Lavie, 2005). Nothing is downloaded; `python -m
    nltk.downloader wordnet` does so beforehand.
    """
    from nltk.corpus import wordnet
    from nltk.translate.meteor_score import meteor_score

    try:
        wordnet.ensure_loaded()
    except LookupError:
        return None
    pairs = zip(translations, references, strict=True)
    scores = [meteor_score([r.split()], t.split(), wordnet=wordnet) for t, r in pairs]
    return float(np.mean(scores))
