"""Prepared folders of sentence pairs: how they are written, and blocks of pairs read from them.

A prepared folder holds these files for each split (`train`, `val`, and possibly `test`):

* `SPLIT.ids`: token ids, uint16 little-endian, for each pair the source's, then the target's;
* `SPLIT.lengths`: (pairs, 2) uint16 little-endian, the number of ids of each side;
* `SPLIT.offsets`: (pairs,) int64 little-endian, the position in the ids at which each pair begins.

The original sentences of `val` and `test` are in `val.en` and so on, one per line. The folder also
holds the joint vocabulary, `vocabulary.model`, and `manifest.json`. Ids do not include padding (0),
start (2) or end (3).
"""

import functools
from pathlib import Path

import numpy as np

from decent_jax.data import prepared_folder
from decent_jax.data.prepared_folder import Draft, Kind
from decent_jax.data.reading import entries_of, one_sentence
from decent_jax.data.translation import subwords
from decent_jax.data.translation.pair_batches import TokenBatches
from decent_jax.data.translation.subwords import END, START, Subwords
from decent_jax.ground.errors import DataError

KIND = Kind("translation", "decent_jax translation 1")
SPLITS = ("train", "val", "test")
ID = LENGTH = np.dtype("<u2")
OFFSET = np.dtype("<i8")

_ENDLESS = 1 << 40  # blocks of training

read_manifest = functools.partial(prepared_folder.read_manifest, kind=KIND)


def is_whole(folder: str | Path) -> bool:
    """Whether `folder` is a prepared folder whose files have the hashes in its manifest."""
    if not prepared_folder.is_whole(folder, KIND):
        return False
    try:
        return subwords.load(folder).sha256 == read_manifest(folder)["vocab_sha256"]
    except DataError:
        return False


class TranslationPairs:
    """The pairs of one split of a prepared folder.

    The files are memory-mapped; an unpickled copy opens them again.

    Attributes:
      manifest: the folder's manifest.
      languages: the codes of the source and the target language.
      lengths: (N, 2) uint16, the numbers of ids of source and target, without special ids.

    Raises:
      DataError: there is no such folder or split, or a file's length differs from the manifest.
    """

    def __init__(self, folder: str | Path, split: str):
        self.folder = Path(folder)
        self.split = split
        self.manifest = read_manifest(folder)
        with entries_of(f"{folder}/manifest.json", "is damaged; prepare the data again"):
            self.languages = tuple(self.manifest["languages"])
            if split not in self.manifest["splits"]:
                names = ", ".join(self.manifest["splits"])
                raise DataError(f"{folder}: has no split {split!r}, only {names}")
            entry = self.manifest["splits"][split]
            self._ids = self._open(entry["ids"], ID)
            self._offsets = self._open(entry["offsets"], OFFSET)
            self.lengths = self._open(entry["lengths"], LENGTH).reshape(-1, 2)
            if not entry["pairs"] == len(self.lengths) == len(self._offsets):
                raise ValueError("counts disagree")

    def _open(self, entry: dict, dtype: np.dtype) -> np.ndarray:
        path = self.folder / entry["file"]
        prepared_folder.check_size(path, entry["bytes"])
        with one_sentence(path):
            return np.memmap(path, dtype, "r")

    def check(self) -> None:
        """Raises DataError if lengths and offsets do not match the ids, or an id is too large.

        In `val` and `test`, a sentence that was changed or is too long to translate is also an
        error. The check reads all files once, in about a second per gigabyte.
        """
        lengths = self.lengths.sum(1, dtype=np.int64)
        ends = lengths.cumsum()
        if not len(self) or ends[-1] != len(self._ids) or (self._offsets != ends - lengths).any():
            raise DataError(
                f"{self.folder}: the lengths and offsets of its split {self.split!r} do not match "
                "its ids; prepare the data again"
            )
        largest = int(self._ids.max())
        if largest >= self.vocabulary.size:
            raise DataError(
                f"{self.folder}: its split {self.split!r} holds id {largest}, but its vocabulary "
                f"has {self.vocabulary.size}; prepare the data again"
            )
        if self.split != "train":
            self._check_sentences()

    def _check_sentences(self) -> None:
        if (longest := int(self.lengths.max())) > subwords.LONGEST:
            raise DataError(
                f"{self.folder}: its split {self.split!r} has a sentence of {longest} subwords,"
                f" more than {subwords.LONGEST}; prepare the data again without it"
            )
        for entry in self.manifest["splits"][self.split]["text"]:
            path = self.folder / entry["file"]
            with one_sentence(path):
                if prepared_folder.sha256_file(path) != entry["sha256"]:
                    raise DataError(f"{path}: was changed; prepare the data again")

    @functools.cached_property
    def vocabulary(self) -> Subwords:
        """The joint vocabulary of the ids; DataError if the folder holds another vocabulary."""
        loaded = subwords.load(self.folder)
        if loaded.sha256 != self.manifest["vocab_sha256"]:
            raise DataError(
                f"{self.folder}: {subwords.FILE} is not the vocabulary of these ids; prepare the"
                " data again"
            )
        return loaded

    def sentences(self, side: int) -> list[str]:
        """The original sources (side 0) or targets (side 1), kept only for val and test."""
        entry = self.manifest["splits"][self.split]
        if "text" not in entry:
            raise DataError(f"{self.folder}: keeps no text of its split {self.split!r}")
        path = self.folder / entry["text"][side]["file"]
        with one_sentence(path), entries_of(path, "is not UTF-8; prepare the data again"):
            lines = path.read_bytes().decode().split("\n")[:-1]
        if len(lines) != len(self):
            raise DataError(f"{path}: has {len(lines)} lines for {len(self)} pairs")
        return lines

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of source and target: uint16 (length,) each."""
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        source, target = self.lengths[index].tolist()
        start = int(self._offsets[index])
        middle = start + source
        return np.array(self._ids[start:middle]), np.array(self._ids[middle : middle + target])

    def __repr__(self) -> str:
        return f"TranslationPairs({str(self.folder)!r}, {self.split!r})"

    def __reduce__(self):
        return TranslationPairs, (self.folder, self.split)


class PairBlocks:
    """Blocks of pairs; item `step * num_replicas + replica` is the block of that replica and step.

    A block is a dictionary of `source`, int32 (R, S); `target`, int32 (R, T), from the start id to
    the end id; and `weight`, float32 (R,), 1 for a pair and 0 for an empty row. Padding is 0, and
    an empty row is all padding. A decoder reads `target[:, :-1]` and predicts `target[:, 1:]`. All
    blocks of a step have one shape, `batches.shape(step)`, whose `target` is T - 1, the number of
    positions that the decoder computes.

    Args:
      pairs: the pairs of a split.
      tokens, num_replicas, seed, shapes: as for `TokenBatches`.
      evaluation: whether to visit every pair once, by length, instead of endless shuffled epochs.
    """

    def __init__(
        self,
        pairs: TranslationPairs,
        *,
        tokens: int,
        num_replicas: int,
        seed: int = 0,
        shapes: int = 16,
        evaluation: bool = False,
    ):
        self.pairs = pairs
        self.evaluation = evaluation
        self.batches = TokenBatches(
            pairs.lengths + np.array([0, 1], LENGTH),
            tokens=tokens,
            num_replicas=num_replicas,
            seed=seed,
            shapes=shapes,
            shuffle=not evaluation,
        )

    @property
    def steps(self) -> int:
        """The steps of an epoch, or of the whole evaluation."""
        return self.batches.steps_per_epoch

    def indices(self, step: int, replica: int) -> np.ndarray:
        """The pairs of a block: (R,) int64, -1 for an empty row."""
        return self.batches.block(step, replica)

    def block(self, step: int, replica: int) -> dict[str, np.ndarray]:
        """The block of a replica at a step."""
        indices = self.indices(step, replica)
        shape = self.batches.shape(step)
        return pad_block(self.pairs, indices, shape.source, shape.target + 1)

    def __len__(self) -> int:
        return self.steps * self.batches.num_replicas if self.evaluation else _ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        return self.block(*divmod(index, self.batches.num_replicas))


def pad_block(pairs, indices: np.ndarray, source: int, target: int) -> dict[str, np.ndarray]:
    """The pairs at `indices` (-1: an empty row) as a padded block, see `PairBlocks`.

    Args:
      pairs: (source ids, target ids) by index.
      indices: (R,) integers.
      source, target: S and T, large enough for each pair with start and end.
    """
    block = {
        "source": np.zeros((len(indices), source), np.int32),
        "target": np.zeros((len(indices), target), np.int32),
        "weight": (np.asarray(indices) >= 0).astype(np.float32),
    }
    for row, index in enumerate(indices):
        if index >= 0:
            ids = pairs[index]
            block["source"][row, : len(ids[0])] = ids[0]
            block["target"][row, 0] = START
            block["target"][row, 1 : len(ids[1]) + 1] = ids[1]
            block["target"][row, len(ids[1]) + 1] = END
    return block


class TranslationFolderWriter(Draft):
    """A writer of a prepared folder: `add` the pairs, then `commit`.

    Leaving the `with` without `commit` removes the draft.

    Raises:
      DataError: `out` exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(self, out: str | Path, languages: tuple[str, str], *, overwrite: bool = False):
        super().__init__(out, KIND, overwrite=overwrite)
        self.languages = languages
        self.pairs: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.tokens: dict[str, np.ndarray] = {split: np.zeros(2, np.int64) for split in SPLITS}
        self._with_text: set[str] = set()  # the splits with original sentences

    def add(self, split: str, ids: np.ndarray, lengths: np.ndarray, text=None) -> None:
        """Appends n pairs.

        Args:
          split: "train", "val" or "test".
          ids: uint16, the ids of source and target of each pair, one after another.
          lengths: (n, 2) integers, the numbers of ids.
          text: for val and test, the n sources and the n targets, without line ends.
        """
        if lengths.max() > np.iinfo(LENGTH).max:
            raise DataError(f"a sentence of {lengths.max()} subwords cannot be stored")
        starts = lengths.sum(1, dtype=np.int64).cumsum() - lengths.sum(1, dtype=np.int64)
        starts += int(self.tokens[split].sum())
        self.append(f"{split}.ids", ids.astype(ID, copy=False).tobytes())
        self.append(f"{split}.lengths", lengths.astype(LENGTH).tobytes())
        self.append(f"{split}.offsets", starts.astype(OFFSET).tobytes())
        if text is not None:
            self._with_text.add(split)
            for language, lines in zip(self.languages, text, strict=True):
                data = "".join(f"{line}\n" for line in lines).encode()
                self.append(f"{split}.{language}", data)
        self.pairs[split] += len(lengths)
        self.tokens[split] += lengths.sum(0, dtype=np.int64)

    def commit(self, vocabulary: Subwords, **entries) -> dict:
        """Renames the finished folder into place and returns its manifest, including `entries`.

        Raises:
          DataError: another process's folder has appeared at `out`, and `overwrite` is False.
        """
        self.append(subwords.FILE, vocabulary.model)
        splits = {split: self._entry(split) for split in SPLITS if self.pairs[split]}
        own = {"vocab_size": vocabulary.size, "vocab_sha256": vocabulary.sha256}
        about = {"languages": list(self.languages), **own, "splits": splits}
        return self.publish(about | entries, "numpy", "sentencepiece")

    def _entry(self, split: str) -> dict:
        entry = {
            "pairs": self.pairs[split],
            "tokens": dict(zip(self.languages, self.tokens[split].tolist(), strict=True)),
            **{kind: self.close(f"{split}.{kind}") for kind in ("ids", "lengths", "offsets")},
        }
        if split in self._with_text:
            entry["text"] = [self.close(f"{split}.{language}") for language in self.languages]
        return entry
