"""Prepared folders of tokens: how they are written, and windows of tokens read from them.

A prepared folder holds `train.bin` and `val.bin`, `manifest.json` and the tokenizer's own files.
The .bin files are raw little-endian uint16 ids, as in nanoGPT, or uint32 for a vocabulary beyond
65,536, with the tokenizer's `end_of_text` after each document.
"""

import contextlib
import functools
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from decent_jax.data import prepared_folder
from decent_jax.data.prepared_folder import Draft, Kind
from decent_jax.data.reading import entries_of, one_sentence
from decent_jax.data.text.tokenizers import LARGEST_VOCABULARY, Tokenizer
from decent_jax.ground.errors import DataError

KIND = Kind("text", "decent_jax tokens 1")
SPLITS = ("train", "val")
_TYPES = {"uint16, little-endian": np.dtype("<u2"), "uint32, little-endian": np.dtype("<u4")}

read_manifest = functools.partial(prepared_folder.read_manifest, kind=KIND)
is_whole = functools.partial(prepared_folder.is_whole, kind=KIND)


class TokenWindows:
    """The windows of a `.bin` file as a grain `RandomAccessDataSource`.

    Item i is `tokens[i * seq_len : (i + 1) * seq_len + 1]`, int32 of shape (seq_len + 1,): inputs
    `[:-1]` and targets `[1:]`, so every token but the first is a target once. An incomplete last
    window is dropped. The file is memory-mapped; an unpickled copy opens it again.

    Args:
      path: a file of raw little-endian ids.
      seq_len: tokens that a model reads at once, at least 1.
      dtype: the dtype of the ids, see `token_type`; None means that of the manifest next to the
        file.

    Raises:
      DataError: the file is missing, ends within a token or is shorter than a window.
    """

    def __init__(self, path: str | Path, seq_len: int, dtype: DTypeLike | None = None):
        self.path = str(path)
        self.seq_len = int(seq_len)
        self._tokens = _memmap(self.path, np.dtype(dtype) if dtype else _manifest_type(path))
        self._length = (len(self._tokens) - 1) // self.seq_len
        if self._length < 1:
            raise DataError(
                f"{self.path}: {len(self._tokens)} tokens are too few for one window of"
                f" seq_len + 1 = {self.seq_len + 1}"
            )

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the file."""
        return len(self._tokens)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> np.ndarray:
        return self._from(index, self.seq_len + 1)

    def _from(self, index: int, count: int) -> np.ndarray:
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        start = int(index) * self.seq_len
        return self._tokens[start : start + count].astype(np.int32)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, seq_len={self.seq_len})"

    def __reduce__(self):
        return type(self), (self.path, self.seq_len, self._tokens.dtype)


class ShiftedWindows(TokenWindows):
    """Windows that start at a new random token at every visit, similar to nanoGPT's.

    Item i is the range of at most ``2 * seq_len`` tokens from which `augment` draws window i.
    """

    def __getitem__(self, index: int) -> np.ndarray:
        return self._from(index, 2 * self.seq_len)

    def augment(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """A random window of the range ``tokens``, int32 of shape (seq_len + 1,)."""
        start = random.integers(len(tokens) - self.seq_len)
        return tokens[start : start + self.seq_len + 1]


def vocabulary_of(folder: str | Path) -> int | None:
    """The vocabulary size in nanoGPT's `meta.pkl`, or None if there is no such file.

    Raises:
      DataError: the file is damaged or holds anything but plain values; nothing is executed.
    """
    path = Path(folder) / "meta.pkl"
    if not path.exists():
        return None
    otherwise = f"names no vocab_size, a whole number from 1 to {LARGEST_VOCABULARY}"
    with one_sentence(path), entries_of(path, otherwise), open(path, "rb") as file:
        try:
            size = _PlainUnpickler(file).load()["vocab_size"]
            if type(size) is not int or not 0 < size <= LARGEST_VOCABULARY:
                raise ValueError
            return size
        except (pickle.UnpicklingError, EOFError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module_name}.{global_name}, expected plain values")


def token_type(path: str | Path, vocab_size: int) -> np.dtype:
    """The dtype of a file's ids: its manifest's, or the widest that reads ids below `vocab_size`.

    With too narrow a dtype, half of the ids would read as 0; with too wide a dtype, two ids would
    become one large number.

    Raises:
      DataError: no dtype fits the vocabulary, or the file holds anything but ids.
    """
    if (Path(path).parent / "manifest.json").exists():
        return _manifest_type(path)
    with one_sentence(path), open(path, "rb") as file:
        size, begins = os.path.getsize(path), file.read(32)
    for beginning, what in _OTHER_FILES.items():
        if begins.startswith(beginning):
            raise DataError(f"{path}: is {what}, expected nothing but ids; write them as uint16")
    for name in ("<u8", "<u4", "<u2", "u1"):
        token = np.dtype(name)
        if np.iinfo(token).max < vocab_size - 1 or size < token.itemsize:
            continue
        ids = np.memmap(path, token, "r", shape=(size // token.itemsize,))
        if int(ids[: 1 << 16].max()) < vocab_size > int(ids.max()):
            _check_order(path, ids[: 1 << 16])
            return token
    raise DataError(
        f"{path}: its {size} bytes are not ids below {vocab_size} of any type; set"
        " model.vocab_size, or prepare the text again"
    )


# How other files with the same name begin.
_OTHER_FILES = {
    b"\x93NUMPY": "a NumPy array",
    b"version https://git-lfs": "a Git LFS pointer",
    b"MMIDIDX": "a Megatron index",
    np.array([20240520, 1], "<i4").tobytes(): "a file with an llm.c header",
}


def _check_order(path: str | Path, ids: np.ndarray) -> None:
    """Raises DataError if zeros recur at fixed places: ids are wider, or bytes are swapped."""
    if len(ids) < 128:
        return
    zero = [(ids[k::8] == 0).mean() for k in range(8)]
    swapped = ids.itemsize > 1 and ids.any() and not (ids % 256).any()
    if swapped or (max(zero) > 0.9 and min(zero) < 0.5):
        raise DataError(
            f"{path}: is big-endian, or has ids beyond the vocabulary; write it again as"
            " little-endian uint16"
        )


def check_vocab(path: str | Path, vocab_size: int) -> None:
    """Raises DataError if the `.bin` file `path` holds an id >= `vocab_size`.

    The largest id is read from the manifest in the file's folder; without a manifest, the whole
    file is read.
    """
    path = Path(path)
    largest = None
    with contextlib.suppress(DataError), entries_of(path, "not in a manifest"):
        for split in read_manifest(path.parent)["splits"].values():
            if split["file"] == path.name and split["bytes"] == path.stat().st_size:
                largest = int(split["largest_id"])
    if largest is None:
        largest = int(_memmap(path, token_type(path, vocab_size)).max())
    if largest >= vocab_size:
        raise DataError(f"{path}: holds id {largest}, but the model's vocabulary is {vocab_size}")


class TokenFolderWriter(Draft):
    """A writer of a prepared folder: `add` the documents, then `commit`.

    Leaving the `with` without `commit` removes the draft.

    Raises:
      DataError: `out` exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(self, out: str | Path, tokenizer: Tokenizer, *, overwrite: bool = False):
        super().__init__(out, KIND, overwrite=overwrite)
        self._end = np.array([tokenizer.end_of_text], tokenizer.dtype).tobytes()
        self._tokenizer = tokenizer
        tokenizer.save_files(self.folder)
        self._largest: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.documents: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.tokens: dict[str, int] = dict.fromkeys(SPLITS, 0)  # separators included
        self._unknown: dict[str, int] = dict.fromkeys(SPLITS, 0)

    def add(self, split: str, ids: np.ndarray) -> None:
        """Appends one document: integer ids of shape (tokens,) without a separator."""
        self.append(
            f"{split}.bin", ids.astype(self._tokenizer.dtype, copy=False).tobytes() + self._end
        )
        self.documents[split] += 1
        self.tokens[split] += len(ids) + 1
        self._unknown[split] += int((ids == self._tokenizer.unknown).sum())
        largest = int(ids.max(initial=self._tokenizer.end_of_text))
        self._largest[split] = max(self._largest[split], largest)

    def commit(self, **entries) -> dict:
        """Renames the finished folder into place and returns its manifest, including `entries`.

        Raises:
          DataError: another process's folder has appeared at `out`, and `overwrite` is False.
        """
        about = {
            "dtype": f"{self._tokenizer.dtype.name}, little-endian",
            "tokenizer": self._tokenizer.to_json(),
            "splits": {
                split: {
                    "documents": self.documents[split],
                    "tokens": self.tokens[split],
                    "unknown": self._unknown[split],
                    **self.close(f"{split}.bin"),
                    "largest_id": self._largest[split],
                }
                for split in SPLITS
            },
        }
        return self.publish(about | entries, "numpy")


def _memmap(path: str | Path, token: np.dtype) -> np.ndarray:
    with one_sentence(path):
        size = os.path.getsize(path)
        if size % token.itemsize:
            raise DataError(f"{path}: {size} bytes are not a whole number of {token.name} tokens")
        if not size:
            raise DataError(f"{path}: is empty")
        return np.memmap(path, token, "r")


def _manifest_type(path: str | Path) -> np.dtype:
    folder = Path(path).parent
    name = read_manifest(folder).get("dtype")
    if name not in _TYPES:
        raise DataError(f"{folder}/manifest.json: has no dtype of the tokens; prepare them again")
    return _TYPES[name]
