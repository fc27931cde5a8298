"""Prepared folders of tokens: how they are written, and windows of tokens read from them.

A prepared folder holds `train.bin` and `val.bin` (raw little-endian uint16, nanoGPT's layout, or
uint32 for a vocabulary beyond 65,536, the tokenizer's `end_of_text` after each document),
`manifest.json` and the tokenizer's own files.
"""

import contextlib
import functools
import os
from pathlib import Path

import numpy as np

from decent_jax.data import prepared_folder
from decent_jax.data.prepared_folder import Draft, Kind
from decent_jax.data.reading import entries_of, one_sentence
from decent_jax.data.text.tokenizers import Tokenizer
from decent_jax.ground.errors import DataError

KIND = Kind("text", "decent_jax tokens 1")
SPLITS = ("train", "val")
_TYPES = {"uint16, little-endian": np.dtype("<u2"), "uint32, little-endian": np.dtype("<u4")}

read_manifest = functools.partial(prepared_folder.read_manifest, kind=KIND)
is_whole = functools.partial(prepared_folder.is_whole, kind=KIND)


class TokenWindows:
    """The windows of a `.bin` file as a grain `RandomAccessDataSource`.

    Item i is `tokens[i * seq_len : (i + 1) * seq_len + 1]`, int32 of shape (seq_len + 1,): inputs
    `[:-1]` and targets `[1:]`, so every token but the first is a target once. A last window that
    is not full is left out. The file is memory-mapped; pickling reopens it.

    Args:
      path: a file of raw little-endian uint16, or of the type that the manifest beside it names.
      seq_len: tokens that a model reads at once, at least 1.

    Raises:
      DataError: the file is missing, ends within a token or is shorter than a window.
    """

    def __init__(self, path: str | Path, seq_len: int):
        self.path = str(path)
        self.seq_len = int(seq_len)
        self._tokens = _memmap(self.path)
        self._length = (len(self._tokens) - 1) // self.seq_len
        if self._length < 1:
            raise DataError(
                f"{self.path}: {len(self._tokens)} tokens are too few for one window of"
                f" seq_len + 1 = {self.seq_len + 1}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in the file."""
        return len(self._tokens)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        start = int(index) * self.seq_len
        return self._tokens[start : start + self.seq_len + 1].astype(np.int32)

    def __repr__(self) -> str:
        return f"TokenWindows({self.path!r}, seq_len={self.seq_len})"

    def __reduce__(self):
        return TokenWindows, (self.path, self.seq_len)


def check_vocab(path: str | Path, vocab_size: int) -> None:
    """Raises DataError where the `.bin` file `path` holds an id >= `vocab_size`.

    The manifest in the file's folder knows the largest id; without one, the whole file is read.
    """
    path = Path(path)
    largest = None
    with contextlib.suppress(DataError), entries_of(path, "not in a manifest"):
        for split in read_manifest(path.parent)["splits"].values():
            if split["file"] == path.name and split["bytes"] == path.stat().st_size:
                largest = int(split["largest_id"])
    if largest is None:
        largest = int(_memmap(path).max())
    if largest >= vocab_size:
        raise DataError(f"{path}: holds token id {largest}, the model's vocabulary is {vocab_size}")


class TokenFolderWriter(Draft):
    """Writes a prepared folder: documents first, then `commit`.

    Leaving the `with` without `commit` leaves no trace.

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

    def add(self, split: str, ids: np.ndarray) -> None:
        """Appends one document, integer ids of shape (tokens,) without a separator."""
        self.append(
            f"{split}.bin", ids.astype(self._tokenizer.dtype, copy=False).tobytes() + self._end
        )
        self.documents[split] += 1
        self.tokens[split] += len(ids) + 1
        largest = int(ids.max(initial=self._tokenizer.end_of_text))
        self._largest[split] = max(self._largest[split], largest)

    def commit(self, **entries) -> dict:
        """Renames the finished folder into place and returns its manifest, with `entries`.

        Raises:
          DataError: another process's folder appeared at `out` and `overwrite` is False.
        """
        about = {
            "dtype": f"{self._tokenizer.dtype.name}, little-endian",
            "tokenizer": self._tokenizer.to_json(),
            "splits": {
                split: {
                    "documents": self.documents[split],
                    "tokens": self.tokens[split],
                    **self.close(f"{split}.bin"),
                    "largest_id": self._largest[split],
                }
                for split in SPLITS
            },
        }
        return self.publish(about | entries, "numpy")


def _memmap(path: str | Path) -> np.ndarray:
    with one_sentence(path):
        size = os.path.getsize(path)
        token = _type_of(path)
        if size % token.itemsize:
            raise DataError(f"{path}: {size} bytes are no whole number of {token.name} tokens")
        if not size:
            raise DataError(f"{path}: is empty")
        return np.memmap(path, token, "r")


def _type_of(path: str | Path) -> np.dtype:
    """Of the tokens in a file; uint16, as nanoGPT's, where no manifest says otherwise."""
    with contextlib.suppress(DataError):
        name = read_manifest(Path(path).parent).get("dtype")
        return _TYPES.get(str(name), np.dtype("<u2"))
    return np.dtype("<u2")
