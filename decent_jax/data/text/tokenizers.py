"""Text to token ids and back: bytes, characters, or any tokenizer.json, such as GPT-2's.

A prepared folder names its tokenizer in `manifest.json` and contains the tokenizer's files, so
`from_manifest` can rebuild it on any machine.

>>> tokenizer = load("bytes")
>>> tokenizer.encode("naïve")
array([110,  97, 195, 175, 118, 101], dtype=uint16)
>>> tokenizer.decode([110, 97, 195, 175, 118, 101])
'naïve'
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.data.reading import entries_of
from decent_jax.data.text.tokenizer_json import (
    DROPPED,
    HF_CONFIG,
    HF_FILE,
    end_token,
    for_documents,
    showing_what_is_dropped,
)
from decent_jax.ground import extras
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import shown
from decent_jax.ground.json_files import read_bytes, read_json

NAMES = ("gpt2", "bytes", "chars")
CHARS_FILE = "chars.json"
GPT2 = "openai-community/gpt2"  # on the Hugging Face hub
LARGEST_VOCABULARY = 2**24  # vocabulary, as of `model.vocab_size`


class Tokenizer:
    """The interface of all tokenizers.

    Attributes:
      name: `"bytes"`, `"chars"` or `"tokenizer.json"`.
      vocab_size: the upper bound of the ids, which lie in `[0, vocab_size)`.
      end_of_text: the id written after each document; no text encodes to it.
      unknown: the id for text outside the vocabulary, or -1 without such an id.
      files: the files that decoding needs, as {name: content}; the prepared folder keeps them.
    """

    name: str
    vocab_size: int
    end_of_text: int
    unknown: int = -1
    files: dict[str, bytes]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ids and token files: uint16 if every id fits, otherwise uint32."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` without a separator, of shape (tokens,) and type `dtype`.

        Lone surrogates, which a JSON string can hold, become U+FFFD.
        """
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, U+FFFD for an incomplete character; ValueError for an unknown id."""
        raise NotImplementedError

    def to_json(self) -> dict:
        """The `tokenizer` entry of a manifest."""
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()},
        }

    def hf_files(self) -> dict[str, bytes]:
        """{name: content} of files for `transformers.AutoTokenizer`; {} if it has no equivalent."""
        return {}

    def save_files(self, folder: str | Path) -> None:
        """Writes the files that `load` needs into `folder`; "bytes" needs none."""
        for name, data in self.files.items():
            (Path(folder) / name).write_bytes(data)


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids are UTF-8 bytes; 0 separates documents, so texts lose their NULs."""

    name, vocab_size, end_of_text = "bytes", 256, 0

    def __init__(self):
        self.files = {}

    def encode(self, text: str) -> np.ndarray:
        data = valid_unicode(text).encode().replace(b"\0", b"")
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        ids = checked_ids(ids, self.vocab_size)
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


class CharTokenizer(Tokenizer):
    """A tokenizer whose ids number the characters of an alphabet, in the order of code points.

    The id after the last character separates documents. For tiny Shakespeare, the characters have
    nanoGPT's 65 ids. NULs are dropped.

    Args:
      alphabet: text with every character; order and repetitions do not matter.

    >>> tokenizer = CharTokenizer("hello")
    >>> tokenizer.encode("hole"), tokenizer.end_of_text, tokenizer.vocab_size
    (array([1, 3, 2, 0], dtype=uint16), 4, 5)
    """

    name = "chars"

    def __init__(self, alphabet: str):
        chars = "".join(sorted(set(valid_unicode(alphabet)) - {"\0"}))
        self._codes = _code_points(chars)
        self._text_of = np.array([*chars, "\0"], object)
        self.end_of_text, self.vocab_size = len(chars), len(chars) + 1
        self.files = {CHARS_FILE: json.dumps(chars).encode()}

    def encode(self, text: str) -> np.ndarray:
        codes = _code_points(valid_unicode(text).replace("\0", ""))
        unknown = codes[~np.isin(codes, self._codes)]
        if unknown.size:
            raise DataError(
                f"the character {shown(chr(unknown[0]))} (U+{unknown[0]:04X}) is not among the"
                f" {len(self._codes)} of the vocabulary of chars; take it out of the text, or"
                " prepare the training text with it"
            )
        return np.searchsorted(self._codes, codes).astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._text_of[checked_ids(ids, self.vocab_size)])


class HFTokenizer(Tokenizer):
    """Any tokenizer of the library `tokenizers`, modified so that no text encodes to its end token.

    Args:
      content: the content of a ``tokenizer.json``.
      end: the token that ends a document, or its id; None means the file's only candidate.
      eos: the ``eos_token`` of the tokenizer_config.json next to it, if there is one.

    Raises:
      DataError: the file is damaged, or the end-of-document token is ambiguous.
    """

    def __init__(self, content: bytes, end: str | int | None = None, eos: str | None = None):
        extras.need("text", "tokenizers")
        import tokenizers

        self.name = HF_FILE
        library: Any = tokenizers.Tokenizer  # which has no types
        with _library_errors("is damaged, or not a tokenizer"):
            vocabulary = library.from_str(content.decode()).get_vocab(with_added_tokens=True)
            saved = json.loads(content)
            self._end = end_token(saved, vocabulary, end, eos)
            self.end_of_text = vocabulary[self._end]
            self.files = {HF_FILE: for_documents(saved, self._end, self.end_of_text)}
            self._tokenizer = library.from_str(self.files[HF_FILE].decode())
            model = saved["model"]
            named = vocabulary.get(model.get("unk_token"), -1)
            self.unknown = model["unk_id"] if model.get("unk_id") is not None else named
            self._showing = None
            if (shows := showing_what_is_dropped(json.loads(self.files[HF_FILE]))) is not None:
                self._showing = library.from_str(json.dumps(shows))
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > LARGEST_VOCABULARY:
            raise DataError(
                f"{HF_FILE} has token number {self.vocab_size - 1}; use numbers below"
                f" {LARGEST_VOCABULARY}"
            )

    def __reduce__(self):
        return HFTokenizer, (self.files[HF_FILE], self.end_of_text)

    def hf_files(self) -> dict[str, bytes]:
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self._end,
            "split_special_tokens": True,  # the spelling of a special token is ordinary text
            "clean_up_tokenization_spaces": False,
        }
        return {**self.files, HF_CONFIG: json.dumps(about).encode()}

    def encode(self, text: str) -> np.ndarray:
        with _library_errors("cannot encode the text"):
            ids = self._tokenizer.encode(text := valid_unicode(text)).ids
            if (
                self._showing is not None
                and DROPPED in (shown := self._showing.encode(text)).tokens
            ):
                start, stop = shown.offsets[shown.tokens.index(DROPPED)]
                raise DataError(
                    f"a text has {text[start:stop]!r}, which {HF_FILE} drops: its vocabulary lacks"
                    " it or one of its bytes, and its model has no unk_token"
                )
        if self.end_of_text in ids:
            raise DataError(
                f"a text encodes to {self._end!r}, which ends a document; take it out of the text,"
                " or name another end by --end_of_text"
            )
        return np.array(ids, self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        ids = checked_ids(ids, self.vocab_size).tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def load(name: str, end_of_text: str | int | None = None) -> Tokenizer:
    """The tokenizer named `name`.

    Args:
      name: `"bytes"`, `"gpt2"`, which is downloaded once, the path of a Hugging Face
        tokenizer.json, or a prepared folder, whose tokenizer is used.
      end_of_text: the token that ends a document in a tokenizer.json, or its id.

    Raises:
      DataError: the name is unknown, a file is missing or damaged, or the download fails.
    """
    if name.endswith(".json"):
        return _load_json(Path(name), end_of_text)
    if end_of_text is not None:
        raise DataError(f"--end_of_text is for a tokenizer.json; {name} has its own end token")
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return HFTokenizer(_download())
    if name == "chars":
        raise DataError(f"chars belong to a text; pass a prepared folder with {CHARS_FILE}")
    if Path(name).is_dir():
        return from_manifest(name)
    raise DataError(
        f"unknown tokenizer {name!r}; choose one of {', '.join(NAMES)}, the path of a"
        " tokenizer.json, or a prepared folder"
    )


def _load_json(file: Path, end_of_text: str | int | None) -> HFTokenizer:
    try:
        return HFTokenizer(read_bytes(file), end_of_text, _eos_token(file.with_name(HF_CONFIG)))
    except DataError as error:
        raise DataError(f"{file}: {error}") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None


def _load_chars(file: Path) -> CharTokenizer:
    otherwise = "not a text of all characters"
    try:
        alphabet = read_json(file, otherwise)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
    with entries_of(file, otherwise):
        if not isinstance(alphabet, str):
            raise TypeError
        return CharTokenizer(alphabet)


def _eos_token(path: Path) -> str | None:
    """The end-of-text token in a tokenizer_config.json, if there is one."""
    otherwise = "not a complete tokenizer_config.json; fetch it again, or remove it"
    try:
        about = read_json(path, otherwise)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with entries_of(path, otherwise):
        token = about.get("eos_token")
        return token["content"] if isinstance(token, dict) else token


def from_manifest(folder: str | Path) -> Tokenizer:
    """The tokenizer of the prepared folder `folder`, from that folder alone.

    Raises:
      DataError: there is no manifest, or the tokenizer's files do not match it.
    """
    path = Path(folder) / "manifest.json"
    otherwise = "not a manifest that says which tokenizer made it"
    try:
        manifest = read_json(path, otherwise)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder}: no manifest.json, so this is not a prepared folder") from None
    with entries_of(path, otherwise):
        entry = manifest["tokenizer"]
        name, wanted, end = entry["name"], entry["files"], int(entry["end_of_text"])
        if not (isinstance(name, str) and isinstance(wanted, dict)):
            raise TypeError
    if name not in ("bytes", "chars", HF_FILE):
        raise DataError(f"{path}: unknown tokenizer {name!r}; prepare the text again")
    if name == "bytes":
        tokenizer = ByteTokenizer()
    elif name == "chars":
        tokenizer = _load_chars(Path(folder) / CHARS_FILE)
    else:
        tokenizer = _load_json(Path(folder) / HF_FILE, end)
    if tokenizer.to_json()["files"] != wanted:
        raise DataError(
            f"{folder}: {' and '.join(wanted)} are not the ones these tokens were made with"
        )
    return tokenizer


def valid_unicode(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def checked_ids(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """``ids`` as int64; ValueError if an id is outside the vocabulary."""
    ids = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise ValueError(f"token id {bad[0]} is outside the vocabulary of {vocab_size}")
    return ids


def _download() -> bytes:
    """GPT-2's tokenizer.json, which the library keeps in its cache."""
    extras.need("text", "tokenizers")
    import tokenizers

    library: Any = tokenizers.Tokenizer  # which has no types
    try:
        return library.from_pretrained(GPT2).to_str().encode()
    except Exception as error:  # from the hub, a proxy or the disk
        raise DataError(
            f"the gpt2 tokenizer cannot be downloaded ({type(error).__name__}); fetch the"
            f" tokenizer.json of {GPT2}, and pass --tokenizer FILE.json"
        ) from None


@contextlib.contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """A context that turns the library's untyped exceptions and Rust panics into DataError."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{HF_FILE} {what}: {str(error)[:80]}") from None
        raise
