"""Translation of sentences by beam search, in batches, and BLEU against references."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from decent_jax.data.reading import short
from decent_jax.data.translation.subwords import LONGEST, Subwords, normalize
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.format import shown
from decent_jax.ground.progress import progress_bar
from decent_jax.models import beam_search, transformer

BEAM = 4
ALPHA = 0.6  # exponent of the length penalty
MAX_EXTRA = 50  # tokens by which a translation may be longer than its source
_WIDTHS = (16, 32, 64, 128)  # tokens to which sources are padded, or a multiple of the last
_BATCH = 32
# Thai, Lao, Tibetan, Burmese, Khmer, kana and Chinese characters: no spaces between words.
_WITHOUT_SPACES = re.compile(
    "[\u0e01-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u9fff\uaa60-\uaa7f\U00020000-\U0003ffff]"
)
_OF_SACREBLEU = {  # languages for which sacreBLEU has a tokenizer, by any of their codes
    "zh": "zh", "zho": "zh", "chi": "zh", "cmn": "zh", "yue": "zh",
    "ja": "ja", "jpn": "ja", "ko": "ko", "kor": "ko",
}  # fmt: skip


class Translator:
    """A translator by beam search, which is compiled once per source width.

    Args:
      config: the model's config.
      vocabulary: the joint vocabulary of source and target.
      beam: number of hypotheses to keep; 1 is greedy search.
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
        self,
        params: transformer.Params,
        sentences: Sequence[str],
        *,
        progress: bool = False,
        pause: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """The best translation of each sentence ("" if empty); calls ``pause()`` after each batch.

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
        # The longest first, so that the remaining time on display falls steadily.
        order = sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__)[::-1]
        with progress_bar(len(order), progress, desc="translating", unit=" sentences") as bar:
            for start in range(0, len(order), _BATCH):
                rows = order[start : start + _BATCH]
                source = np.zeros((_BATCH, _width(len(ids[rows[0]]))), np.int32)
                for row, i in enumerate(rows):
                    source[row, : len(ids[i])] = ids[i]
                translated = np.asarray(self._search(params, source))
                for i, tokens in zip(rows, translated, strict=False):
                    result[i] = self.vocabulary.decode(tokens)
                bar.update(len(rows))
                pause()
        return result


def _width(tokens: int) -> int:
    longest = _WIDTHS[-1]
    return next((w for w in _WIDTHS if tokens <= w), -(-tokens // longest) * longest)


@functools.cache
def bleu_of(language: str, characters: bool = False) -> Any:
    """sacreBLEU's metric, with its tokenizer for a target language, such as "zh_Hant".

    Args:
      language: the code in the file names.
      characters: whether the text has no spaces between words. If so, and if sacreBLEU has no
        tokenizer for the language, each character counts as a word, because sacreBLEU's default,
        `13a`, would treat a sentence as one word.

    Raises:
      DataError: the tokenizer of this language needs a package that is not installed.
    """
    from sacrebleu.metrics.bleu import BLEU

    code = _OF_SACREBLEU.get(re.split("[-_]", language.lower())[0])
    try:
        return BLEU(trg_lang=code or "", tokenize="char" if characters and not code else None)
    except (ImportError, RuntimeError) as error:  # MeCab for Japanese and Korean
        why = f"{short(error)} pip install 'sacrebleu[{code}]'"
        raise DataError(f"BLEU of {language!r} cannot be computed: {why}") from None


def bleu(
    translations: Sequence[str], references: Sequence[str], language: str
) -> tuple[float, str]:
    """sacreBLEU's corpus BLEU of detokenized text, 0 to 100, and its signature.

    References are normalized by `normalize`, as the training targets were. The score is comparable
    with published scores with the same signature (Post, 2018, arXiv:1804.08771), except for quotes
    and dashes.
    """
    references = list(map(normalize, references))
    text = "".join("".join(references).split())
    metric = bleu_of(language, 2 * len(_WITHOUT_SPACES.findall(text)) > len(text))
    score = metric.corpus_score(list(translations), [references]).score
    return score, str(metric.get_signature())
