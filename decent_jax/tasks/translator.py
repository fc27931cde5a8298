"""Sentences in, translations out: batches for beam search and scores against references."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from decent_jax.data.translation.subwords import Subwords
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import shown
from decent_jax.ground.progress import progress_bar
from decent_jax.models import beam_search, transformer

BEAM = 4
ALPHA = 0.6  # exponent of the length penalty
LONGEST = 1024  # subwords of a source; memory grows with the square
MAX_EXTRA = 50  # tokens a translation may be longer than its source
_WIDTHS = (16, 32, 64, 128)  # tokens sources are padded to, and multiples of the last
_BATCH = 32
_SNOWBALL = {  # the languages of WMT whose stems nltk knows
    "de": "german",
    "es": "spanish",
    "fi": "finnish",
    "fr": "french",
    "ro": "romanian",
    "ru": "russian",
}


class Translator:
    """Translates with a beam search, compiled once per width of sources.

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

    def __call__(
        self, params: transformer.Params, sentences: Sequence[str], *, progress: bool = False
    ) -> list[str]:
        """The best translation of each sentence, "" of an empty one.

        Raises:
          ConfigError: a sentence has more than `LONGEST` subwords.
        """
        ids = [self.vocabulary.encode(sentence) for sentence in sentences]
        for sentence, own in zip(sentences, ids, strict=True):
            if len(own) > LONGEST:
                raise ConfigError(
                    f"a sentence of {len(own)} subwords, {shown(sentence)}, is longer than "
                    f"{LONGEST}; split it"
                )
        lengths, result = list(map(len, ids)), [""] * len(ids)
        # The longest first, so that the remaining time the bar shows falls and does not rise.
        order = sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__)[::-1]
        with progress_bar(len(order), progress, desc="translating", unit=" sentences") as bar:
            for start in range(0, len(order), _BATCH):
                rows = order[start : start + _BATCH]
                source = np.zeros((_BATCH, _width(len(ids[rows[0]]))), np.int32)
                for row, i in enumerate(rows):
                    source[row, : len(ids[i])] = ids[i]
                found = np.asarray(self._search(params, source))
                for i, tokens in zip(rows, found, strict=False):
                    result[i] = self.vocabulary.decode(tokens)
                bar.update(len(rows))
        return result


def _width(tokens: int) -> int:
    longest = _WIDTHS[-1]
    return next((w for w in _WIDTHS if tokens <= w), -(-tokens // longest) * longest)


def bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU of detokenised text by sacreBLEU, 0 to 100, and its signature.

    Comparable with published numbers of the same signature (Post, 2018, arXiv:1804.08771).
    """
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(translations), [list(references)]).score
    return score, str(metric.get_signature())


def meteor(
    translations: Sequence[str], references: Sequence[str], language: str
) -> tuple[float, str] | None:
    """Mean METEOR by nltk, 0 to 1, and what counted as a match; nothing is downloaded.

    Of English (``language`` "en"): the same words, Porter's stems and WordNet's synonyms (Banerjee
    and Lavie, 2005); None where nltk's WordNet is not on this machine, `python -m nltk.downloader
    wordnet` puts it there. Of another language: the same words and, where Snowball has them, stems.
    """
    from nltk import stem
    from nltk.corpus import wordnet
    from nltk.translate.meteor_score import meteor_score
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    stemmer: Any = SimpleNamespace(stem=str)  # the word itself
    synonyms: Any = SimpleNamespace(synsets=lambda _: [])
    matches = "words"
    if language == "en":
        try:
            wordnet.ensure_loaded()
        except LookupError:
            return None
        stemmer, synonyms, matches = stem.PorterStemmer(), wordnet, "words, stems, WordNet"
    elif language in _SNOWBALL:
        stemmer = stem.SnowballStemmer(_SNOWBALL[language])
        matches = f"words, {_SNOWBALL[language]} stems"
    tokens = Tokenizer13a()
    scores = [
        meteor_score([tokens(r).split()], tokens(t).split(), stemmer=stemmer, wordnet=synonyms)
        for t, r in zip(translations, references, strict=True)
    ]
    return float(np.mean(scores)), matches
