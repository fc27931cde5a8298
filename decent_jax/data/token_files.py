"""Prepared token folders: how they are written, and fixed windows of tokens read from them.

A prepared folder holds ``train.bin`` and ``val.bin`` (raw little-endian uint16, nanoGPT's layout,
each document followed by the tokenizer's ``end_of_text``), ``manifest.json``, the tokenizer's own
files, and ``sources.json``, which says where the documents are from. The folder appears by one
rename, so it is there whole or not at all.
"""

import contextlib
import functools
import json
import os
import platform
from pathlib import Path

import numpy as np

import decent_jax
from decent_jax.data import document_sources
from decent_jax.data.loader import eval_batches, steps_per_epoch, train_batches
from decent_jax.data.prepared_folder import Draft, sha256_file
from decent_jax.data.tokenizers import Tokenizer
from decent_jax.errors import DataError

__all__ = [
    "TokenFolderWriter",
    "TokenWindows",
    "check_vocab",
    "eval_batches",
    "read_manifest",
    "steps_per_epoch",
    "train_batches",
]

FORMAT = "decent_jax tokens 1"
KIND = "prepared folder"
SPLITS = ("train", "val")
TOKEN = np.dtype("<u2")


class TokenWindows:
    """The windows of a ``.bin`` file as a grain ``RandomAccessDataSource``.

    Item i is ``tokens[i * seq_len : (i + 1) * seq_len + 1]``, int32 of shape (seq_len + 1,):
    inputs ``[:-1]`` and targets ``[1:]``, so every token but the first is a target once. A last
    window that is not full is left out. The file is memory-mapped; pickling reopens it.

    Args:
      path: a file of raw little-endian uint16.
      seq_len: tokens a model sees at once, at least 1.

    Raises:
      DataError: the file is missing, has an odd number of bytes or is shorter than a window.
    """

    def __init__(self, path: str | Path, seq_len: int):
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        self.path = str(path)
        self.seq_len = int(seq_len)
        self._open()

    def _open(self):
        self._tokens = _memmap(self.path)
        self._length = (len(self._tokens) - 1) // self.seq_len
        if self._length < 1:
            raise DataError(
                f"{self.path}: {len(self._tokens)} tokens are too few for one window of"
                f" seq_len + 1 = {self.seq_len + 1}"
            )

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """(len,) int64: the document source of every window, an index into ``class_names``.

        A window that several sources share is the one's that its middle token is from: the one
        that holds most of it, if one holds more than half. DataError where the folder does not
        say.
        """
        starts = np.arange(self._length) * self.seq_len
        return self._sources.of_tokens(starts + self.seq_len // 2)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the document sources; DataError where the folder does not say."""
        return self._sources.names

    @functools.cached_property
    def _sources(self) -> document_sources.Sources:
        return document_sources.read(self.path, self.num_tokens)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        start = int(index) * self.seq_len
        return self._tokens[start : start + self.seq_len + 1].astype(np.int32)

    def __repr__(self) -> str:
        return f"TokenWindows({self.path!r}, seq_len={self.seq_len})"

    def __getstate__(self) -> dict:
        return {"path": self.path, "seq_len": self.seq_len}

    def __setstate__(self, state: dict):
        self.__dict__.update(state)
        self._open()


def check_vocab(path: str | Path, vocab_size: int) -> None:
    """Raises DataError where the ``.bin`` file ``path`` holds an id >= ``vocab_size``.

    The manifest beside the file answers at once; a file without one is read through.
    """
    path = Path(path)
    largest = None
    with contextlib.suppress(DataError):
        for split in read_manifest(path.parent)["splits"].values():
            if split["file"] == path.name and split["bytes"] == path.stat().st_size:
                largest = split["largest_id"]
    if largest is None:
        tokens = _memmap(path)
        step = 1 << 24
        largest = max(
            (int(tokens[i : i + step].max()) for i in range(0, len(tokens), step)), default=0
        )
    if largest >= vocab_size:
        raise DataError(f"{path}: holds token id {largest}, the model's vocabulary is {vocab_size}")


def read_manifest(folder: str | Path) -> dict:
    """The manifest of a prepared folder; DataError where there is none or it is another's."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder}: no manifest.json, so this is no prepared folder") from None
    except ValueError:
        raise DataError(f"{path}: not readable as JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: not a manifest of this version ({FORMAT!r})")
    return manifest


def is_whole(folder: str | Path) -> bool:
    """Whether ``folder`` is a prepared folder whose files have the manifest's hashes."""
    try:
        manifest = read_manifest(folder)
        files = [*manifest["splits"].values(), *filter(None, [manifest.get("sources")])]
        return all(sha256_file(Path(folder) / f["file"]) == f["sha256"] for f in files)
    except (DataError, OSError):
        return False


class TokenFolderWriter(Draft):
    """Writes a prepared folder: documents first, then ``commit``; ``with`` leaves no trace else.

    Raises:
      DataError: ``out`` exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(self, out: str | Path, tokenizer: Tokenizer, *, overwrite: bool = False):
        super().__init__(out, KIND, read_manifest, overwrite=overwrite)
        self._end = np.array([tokenizer.end_of_text], TOKEN).tobytes()
        self._tokenizer = tokenizer
        tokenizer.save_files(self.folder)
        self._largest = dict.fromkeys(SPLITS, 0)
        self._sources = document_sources.SourcesCounter(SPLITS)
        self.documents = dict.fromkeys(SPLITS, 0)
        self.tokens = dict.fromkeys(SPLITS, 0)  # separators included

    def add(self, split: str, ids: np.ndarray, source: str | None = None) -> None:
        """Appends one document, uint16 ids of shape (tokens,) without a separator.

        ``source`` names where it is from; ``sources.json`` is written if all documents have one.
        """
        self.append(f"{split}.bin", ids.astype(TOKEN, copy=False).tobytes() + self._end)
        self._sources.add(split, source, len(ids) + 1)
        self.documents[split] += 1
        self.tokens[split] += len(ids) + 1
        largest = int(ids.max(initial=self._tokenizer.end_of_text))
        self._largest[split] = max(self._largest[split], largest)

    def commit(self, **entries) -> dict:
        """Renames the finished folder into place and returns its manifest (+ ``entries``).

        Raises:
          FileExistsError: somebody else's folder appeared at ``out`` and ``overwrite`` is False.
        """
        splits = {}
        for split in SPLITS:
            splits[split] = {
                "documents": self.documents[split],
                "tokens": self.tokens[split],
                **self.close(f"{split}.bin"),
                "largest_id": self._largest[split],
            }
        manifest = {
            "format": FORMAT,
            "dtype": "uint16, little-endian",
            "tokenizer": self._tokenizer.to_json(),
            "splits": splits,
            **self._write_sources(),
            **entries,
            "versions": {
                "decent_jax": decent_jax.__version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
            },
        }
        self.publish(manifest)
        return manifest

    def _write_sources(self) -> dict:
        """The entry of the manifest."""
        content = self._sources.content()
        if content is None:
            return {}
        self.append(document_sources.FILE, f"{json.dumps(content)}\n".encode())
        entry = self.close(document_sources.FILE)
        return {"sources": {"file": entry["file"], "sha256": entry["sha256"]}}


def _memmap(path: str | Path) -> np.ndarray:
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if size % TOKEN.itemsize:
        raise DataError(f"{path}: {size} bytes is an odd number, so these are not uint16 tokens")
    if not size:
        raise DataError(f"{path}: is empty")
    try:
        return np.memmap(path, TOKEN, "r")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
