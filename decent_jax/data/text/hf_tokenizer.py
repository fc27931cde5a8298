"""Tokenizers of Hugging Face, from their one file ``tokenizer.json``."""

import base64
import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from decent_jax.data.reading import objects_within
from decent_jax.data.text.tokenizers import Tokenizer, checked_ids, valid_unicode
from decent_jax.ground import extras
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import shown

FILE = "tokenizer.json"
LARGEST = 2**24  # vocabulary, as of `model.vocab_size`
# A repetition of nothing but a repetition, such as (a+)+: its time is exponential in the text.
_REPEATED_TWICE = re.compile(
    r"\((\?:)?(\\[pP]\{[^}]*\}|\\.|\[(\\.|[^\]\\])*\]|[^\\\[\]()|*+?{}])[*+]\)[*+]"
)
# What published tokenizers call the end of a document, of which a file has one.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


@contextlib.contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """DataError for what the library raises: exceptions without a kind, and panics of its Rust."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{FILE} {what}: {str(error)[:80]}") from None
        raise


class HFTokenizer(Tokenizer):
    """Any tokenizer that the library `tokenizers` runs.

    The literal text of a special token is encoded as ordinary text.

    Args:
      content: of a ``tokenizer.json``.

    Raises:
      DataError: the file is damaged, or names no token that ends a document.
    """

    def __init__(self, content: bytes):
        extras.need("text", "tokenizers")
        import tokenizers

        self.files = {FILE: content}
        self.name = FILE
        made: Any = tokenizers.Tokenizer  # which has no types
        with _one_sentence("is damaged, or no tokenizer"):
            text = content.decode()
            _check(json.loads(text))
            self._tokenizer = made.from_str(text)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > LARGEST:
            raise DataError(
                f"{FILE} has a token of number {self.vocab_size - 1}; use below {LARGEST}"
            )
        ends = [token for token in _END_OF_TEXT if token in vocabulary]
        if not ends:
            raise DataError(f"{FILE} has none of the tokens that end a document: {_END_OF_TEXT}")
        self._end, self.end_of_text = ends[0], vocabulary[ends[0]]

    def __reduce__(self):
        return HFTokenizer, (self.files[FILE],)

    def hf_files(self) -> dict[str, bytes]:
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._end}
        return {**self.files, "tokenizer_config.json": json.dumps(about).encode()}

    def encode(self, text: str) -> np.ndarray:
        with _one_sentence("cannot encode the text"):
            ids = self._tokenizer.encode(valid_unicode(text), add_special_tokens=False).ids
        return np.array(ids, self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        ids = checked_ids(ids, self.vocab_size).tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _check(found: Any) -> None:
    """Raises ValueError for what makes the library panic, which prints lines of Rust by itself."""
    model = found["model"]
    merges, vocabulary = model.get("merges") or [], model.get("vocab")
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in merges:
        if isinstance(merge, str) and merge.startswith("#version"):
            continue
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        both = left + right.removeprefix(prefix)
        if not (right.startswith(prefix) and {left, right, both} <= vocabulary.keys()):
            raise ValueError(f"the vocabulary lacks a part of the merge {shown(merge)}")
    for part in objects_within(found.get("normalizer")):
        if part.get("type") == "Precompiled":
            table = base64.b64decode(part["precompiled_charsmap"], validate=True)
            size = int.from_bytes(table[:4], "little")  # of a trie; then the texts
            if size % 4 or not 4 <= size <= len(table) - 4:
                raise ValueError("precompiled_charsmap is cut short")
            table[4 + size :].decode()
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        for part in objects_within(found.get(name)):
            twice = _REPEATED_TWICE.search(str(part.get("Regex", "")))
            if twice:
                raise ValueError(f"a pattern repeats a repetition, {shown(twice[0])}")
