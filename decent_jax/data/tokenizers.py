"""Text to token ids and back: GPT-2's byte pair encoding and plain bytes; no network when local.

A prepared folder says in its ``manifest.json`` which tokenizer made it and holds the files that
tokenizer needs, so :func:`from_manifest` rebuilds it on any machine.

>>> tokenizer = load("bytes")
>>> tokenizer.encode("naïve")
array([110,  97, 195, 175, 118, 101], dtype=uint16)
>>> tokenizer.decode([110, 97, 195, 175, 118, 101])
'naïve'
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from decent_jax.errors import DataError

NAMES = ("gpt2", "bytes")
GPT2_FILES = ("encoder.json", "vocab.bpe")

_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_GPT2_SHA256 = {  # of the published files
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# tiktoken's form of the pattern of the original release: equivalent, and faster
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# tiktoken overflows its stack (and takes the process down) on some hundred thousand white
# characters in a row, so a text is cut after this many.
_LONG_WHITE = re.compile(r"\s{8192}")


class Tokenizer:
    """What every tokenizer offers.

    Attributes:
      name: ``"gpt2"`` or ``"bytes"``.
      vocab_size: ids lie in ``[0, vocab_size)``; at most 65536, so that an id fits in uint16.
      end_of_text: the id written after each document; no text encodes to it.
      files: what must lie beside the tokens so that they can be decoded, file name -> bytes.
    """

    name: str
    vocab_size: int
    end_of_text: int
    files: dict[str, bytes]

    def encode(self, text: str) -> np.ndarray:
        """The ids of ``text``, uint16 of shape (tokens,), without a separator.

        Lone surrogates, which a JSON string can hold, become U+FFFD.
        """
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; a torn character shows as U+FFFD. ValueError for an unknown id."""
        raise NotImplementedError

    def to_json(self) -> dict:
        """The ``tokenizer`` entry of a manifest."""
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()},
        }

    def save_files(self, folder: str | Path) -> None:
        """Writes the files that :func:`load` needs into ``folder``; "bytes" needs none."""
        for name, data in self.files.items():
            (Path(folder) / name).write_bytes(data)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes; 0 separates documents, so NULs are dropped from the text."""

    def __init__(self):
        self.name = "bytes"
        self.vocab_size = 256
        self.end_of_text = 0
        self.files = {}

    def encode(self, text: str) -> np.ndarray:
        data = valid_unicode(text).encode().replace(b"\0", b"")
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        ids = _checked(ids, self.vocab_size)
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte pair encoding, run by tiktoken.

    The literal text ``<|endoftext|>`` is encoded as ordinary text, never as the separator.

    Args:
      files: the contents of ``encoder.json`` and ``vocab.bpe``, as OpenAI published them.
    """

    def __init__(self, files: dict[str, bytes]):
        import tiktoken

        self.name = "gpt2"
        self.vocab_size = 50257
        self.end_of_text = 50256
        self.files = files
        self._encoding = tiktoken.Encoding(
            "gpt2",
            explicit_n_vocab=self.vocab_size,
            pat_str=_GPT2_PATTERN,
            mergeable_ranks=_mergeable_ranks(files),
            special_tokens={"<|endoftext|>": self.end_of_text},
        )

    def encode(self, text: str) -> np.ndarray:
        encode_ordinary = self._encoding.encode_ordinary
        pieces = [encode_ordinary(piece) for piece in _pieces(valid_unicode(text))]
        return np.concatenate([np.array(piece, np.uint16) for piece in pieces])

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(_checked(ids, self.vocab_size).tolist(), errors="replace")


def load(name: str, path: str | Path | None = None) -> Tokenizer:
    """The tokenizer called ``name``.

    Args:
      name: ``"bytes"``, or ``"gpt2"``.
      path: for ``"gpt2"`` a folder with ``encoder.json`` and ``vocab.bpe``; None downloads them
        from OpenAI (once: tiktoken keeps them, in ``TIKTOKEN_CACHE_DIR`` where that is set).

    Raises:
      DataError: an unknown name, a folder without the two files or with damaged ones, or a
        download that fails.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(_download() if path is None else _read(Path(path)))
    raise DataError(f"unknown tokenizer {name!r}; choose one of {', '.join(NAMES)}")


def from_manifest(folder: str | Path) -> Tokenizer:
    """The tokenizer that made the prepared folder ``folder``, from that folder alone.

    Raises:
      DataError: no manifest there, or tokenizer files that are not those of the manifest.
    """
    path = Path(folder) / "manifest.json"
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))["tokenizer"]
        name, wanted = entry["name"], entry["files"]
    except FileNotFoundError:
        raise DataError(f"{folder}: no manifest.json, so this is no prepared folder") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path}: not a manifest that says which tokenizer made it") from None
    tokenizer = load(name, folder if wanted else None)
    if tokenizer.to_json()["files"] != wanted:
        raise DataError(
            f"{folder}: encoder.json and vocab.bpe are not the ones these tokens were made with"
        )
    return tokenizer


def valid_unicode(text: str) -> str:
    """``text`` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _pieces(text: str) -> Iterator[str]:
    start = 0
    for match in _LONG_WHITE.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def _checked(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise ValueError(f"token id {bad[0]} is outside the vocabulary of {vocab_size}")
    return ids


def _read(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should hold encoder.json and vocab.bpe")
    files = {}
    for name in GPT2_FILES:
        try:
            files[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            raise DataError(
                f"{folder}: holds no {name}; the gpt2 tokenizer needs encoder.json and vocab.bpe"
            ) from None
        except OSError as error:
            raise DataError(f"{folder / name}: cannot be read ({error.strerror})") from None
    return files


def _download() -> dict[str, bytes]:
    from tiktoken.load import read_file_cached

    try:
        return {name: read_file_cached(_GPT2_URL + name, _GPT2_SHA256[name]) for name in GPT2_FILES}
    except Exception as error:  # requests', the proxy's, the disk's or tiktoken's own
        raise DataError(
            f"the gpt2 tokenizer cannot be downloaded ({type(error).__name__}); pass"
            " --tokenizer_path DIR with a folder that holds encoder.json and vocab.bpe"
        ) from None


def _mergeable_ranks(files: dict[str, bytes]) -> dict[bytes, int]:
    """Token bytes -> rank. tiktoken's own reader would keep stale copies of local files."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    rest = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(256 + i): b for i, b in enumerate(rest)}
    try:
        encoder = json.loads(files["encoder.json"])
        encoder.pop("<|endoftext|>", None)
        ranks = {bytes(byte_of[c] for c in token): rank for token, rank in encoder.items()}
        lines = files["vocab.bpe"].decode().split("\n")[1:-1]
        merges = [bytes(byte_of[c] for c in line if c != " ") for line in lines]
    except (ValueError, KeyError, AttributeError):
        raise DataError("encoder.json or vocab.bpe is damaged, or not GPT-2's") from None
    singles = [bytes([b]) for b in printable + rest]
    if ranks != {token: rank for rank, token in enumerate(singles + merges)}:
        raise DataError("encoder.json and vocab.bpe do not belong together, or are not GPT-2's")
    if len(ranks) != 50256:
        raise DataError(f"encoder.json has {len(ranks) + 1} tokens; GPT-2's has 50257")
    return ranks
