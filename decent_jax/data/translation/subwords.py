"""A joint vocabulary of subwords for two languages: byte pair encoding by sentencepiece.

We use sentencepiece because its training depends only on the counted words (sorted, one thread),
unknown characters fall back to bytes, and its single file can be read in many programming
languages. (Training with Hugging Face's tokenizers may break ties by hash order, see its issue
1794.)

>>> vocabulary = train({"new": 9, "newer": 5, "lower": 4, "low": 3}, size=280)
>>> ids = vocabulary.encode("newer  “lower” ☃")
>>> vocabulary.decode(ids)
'newer "lower" ☃'
"""

import hashlib
import io
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from decent_jax.data.reading import one_sentence
from decent_jax.data.text.tokenizers import checked_ids, valid_unicode
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import read_bytes

FILE = "vocabulary.model"
PAD, UNKNOWN, START, END = SPECIAL = range(4)
LARGEST = 1 << 16  # ids are stored in 16 bits
LONGEST = 1024  # subwords of a sentence to translate; memory grows with their square

_BYTES = 256
_COVERAGE = 0.9999  # share of the characters with a subword; the rarest are spelled in bytes

# Variants of characters, as word processors insert them. Guillemets and the dash "–" are kept,
# because they are correct French and German.
SAME = {
    "'": "`\u00b4\u2018\u2019\u201a\u201b\u2032",
    '"': "\u201c\u201d\u201e\u201f\u2033",
    "-": "\u2010\u2011\u2212",  # hyphens and the minus sign
    "\u2013": "\u2014\u2015",  # dashes
    " ": "\u2581",  # sentencepiece's own sign for a space
}
_REPLACEMENT = {character: plain for plain, others in SAME.items() for character in others}
# control characters except white space, soft hyphens, zero-width characters, direction marks, BOMs
REMOVED = "\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff"
_CHANGED, _REMOVED = re.compile(f"[{''.join(_REPLACEMENT)}]"), re.compile(f"[{REMOVED}]")


def normalize(text: str) -> str:
    """The text in a canonical spelling.

    The result is in NFC, with one sign each for apostrophes (`'`), double quotes (`"`), hyphens
    (`-`) and dashes (`–`). It has no control characters, soft hyphens or zero-width spaces, and
    no space except a single one between words. Normalizing it again changes nothing.
    """
    if text.isascii() and text.isprintable():
        text = text.replace("`", "'")
    else:  # removed characters may separate a letter from its accent
        text = valid_unicode(text)
        text = _CHANGED.sub(_replace, unicodedata.normalize("NFC", _REMOVED.sub("", text)))
    return " ".join(text.replace("''", '"').split())


def _replace(match: re.Match) -> str:
    return _REPLACEMENT[match[0]]


class Subwords:
    """A vocabulary that turns text into ids and back.

    Attributes:
      model: the content of sentencepiece's model file.
      size: the number of ids: 0 is padding, 1 unknown (no text needs it), 2 start, 3 end, and 4 to
        259 are single bytes.
      sha256: the hash of `model`; runs with the same hash can exchange ids.
    """

    def __init__(self, model: bytes):
        import sentencepiece

        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = self._processor.get_piece_size()
        self.sha256 = hashlib.sha256(model).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """The ids of the normalized `text`: uint16 (tokens,), without start and end."""
        return np.array(self._processor.encode(normalize(text)), np.uint16)

    def encode_normalized(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text; all texts are already normalized."""
        return self._processor.encode(texts, num_threads=1)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special ids and with U+FFFD for an incomplete character."""
        ids = checked_ids(ids, self.size)
        return self._processor.decode(ids[ids >= len(SPECIAL)].tolist())

    def pieces(self) -> list[str]:
        """The text of each id, with "\u2581" for a space; a single byte is "<0x41>"."""
        return [self._processor.id_to_piece(i) for i in range(self.size)]

    def save(self, folder: str | Path) -> None:
        """Writes `vocabulary.model`."""
        (Path(folder) / FILE).write_bytes(self.model)

    def __reduce__(self):
        return Subwords, (self.model,)


def load(folder: str | Path) -> Subwords:
    """The vocabulary saved in `folder`; DataError if it is missing or damaged."""
    path = Path(folder) / FILE
    try:
        with one_sentence(path):
            model = read_bytes(path)
        if not model:  # sentencepiece does not report an empty file
            raise RuntimeError
        return Subwords(model)
    except RuntimeError:  # the only type that sentencepiece raises
        raise DataError(f"{path}: is damaged, or not a sentencepiece model") from None


def check_size(size: int) -> None:
    """Raises DataError if no vocabulary can have this number of ids."""
    if not len(SPECIAL) + _BYTES < size <= LARGEST:
        raise DataError(
            f"a vocabulary has between {len(SPECIAL) + _BYTES + 1} and {LARGEST} ids, got"
            f" --vocab_size {size}"
        )


def train(words: Mapping[str, int], size: int) -> Subwords:
    """Trains a vocabulary of `size` ids on words (runs without a space) and their counts.

    The order of `words` does not matter.

    Raises:
      DataError: `size` is too small or too large for the words.
    """
    import sentencepiece

    if not words:
        raise DataError("the training text has no words for a vocabulary")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{count}" for word, count in sorted(words.items())),
            input_format="tsv",
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=_COVERAGE,
            byte_fallback=True,
            normalization_rule_name="identity",  # the words are already normalized
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=START,
            eos_id=END,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(_explained(str(error), size)) from None
    return Subwords(model.getvalue())


def _explained(error: str, size: int) -> str:
    if match := re.search(r"too high \(\d+\).*<= (\d+)", error):
        return (
            f"the text is too small for a vocabulary of {size}, at most one of {match[1]}; pass a"
            " smaller --vocab_size"
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return (
            f"a vocabulary of {size} is too small for the characters of the text; pass --vocab_size"
            f" {match[1]} or more"
        )
    if "!sentences_.empty()" in error:
        return "the training text has no word of up to 4192 bytes; are its lines sentences?"
    return f"the vocabulary cannot be trained ({error.strip().splitlines()[-1][:200]})"


# --- As a Hugging Face tokenizer.json -------------------------------------------------------------

_SPACE = "\u2581"  # sentencepiece's sign for a space


def hf_files(vocabulary: Subwords, longest: int) -> dict[str, bytes]:
    """The vocabulary as Hugging Face files: {file name: content}.

    With these, the library `tokenizers`, and thus `transformers.AutoTokenizer`, produces the ids of
    `Subwords.encode`, by the same normalization and the same merges, which sentencepiece stores as
    the order of its pieces. Sources end without a special token, as in training.

    Args:
      vocabulary: the joint vocabulary.
      longest: the maximum number of tokens in a sentence.
    """
    pieces = vocabulary.pieces()
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), pieces, strict=False))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": longest,
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": True,  # "</s>" in a text is text
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(_tokenizer(pieces), ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(about, indent=2).encode(),
    }


def _tokenizer(pieces: list[str]) -> dict:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": pieces[i], **plain, "special": True} for i in SPECIAL
        ],
        "normalizer": {"type": "Sequence", "normalizers": _spelling()},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                _replacing({"String": _SPACE}, " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": pieces[SPECIAL[1]],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": _merges(pieces),
        },
    }


def _spelling() -> list[dict]:
    """The steps of `normalize`, and sentencepiece's signs for spaces."""
    same = [_replacing({"Regex": _one_of(others)}, plain) for plain, others in SAME.items()]
    white = "".join(filter(str.isspace, map(chr, range(sys.maxunicode + 1))))
    return [
        _replacing({"Regex": _one_of(REMOVED)}, ""),
        {"type": "NFC"},
        *same,
        _replacing({"String": "''"}, '"'),
        _replacing({"Regex": _one_of(white) + "+"}, " "),
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Prepend", "prepend": _SPACE},
        _replacing({"String": " "}, _SPACE),
    ]


def _replacing(pattern: dict[str, str], content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _one_of(characters: str) -> str:
    """A character class of a regular expression, in which ``-`` between characters is a range."""
    escaped = (c if c == "-" else f"\\x{{{ord(c):x}}}" for c in characters)
    return f"[{''.join(escaped)}]"


def _merges(pieces: list[str]) -> list[tuple[str, str]]:
    """The pairs of pieces whose concatenation is also a piece, in the order of the latter."""
    known = set(pieces[len(SPECIAL) :])
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces[len(SPECIAL) :]
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
