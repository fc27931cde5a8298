"""Prepared folders of sentence pairs: how they are written, and blocks of pairs read from them.

A prepared folder holds for each split (``train``, ``val``, and ``test`` where there is one)

* ``SPLIT.ids``: token ids, uint16 little-endian, of each pair the source's and then the target's;
* ``SPLIT.lengths``: (pairs, 2) uint16 little-endian, how many ids each side has;
* ``SPLIT.offsets``: (pairs,) int64 little-endian, where in the ids each pair begins;

for ``val`` and ``test`` the sentences as they were, ``val.en`` and so on, a line each; the joint
vocabulary ``vocabulary.model``; and ``manifest.json``. Ids are without padding (0), start (2) and
end (3). The folder appears by one rename, so it is there whole or not at all.
"""

import functools
import json
import platform
from importlib import metadata
from pathlib import Path

import numpy as np

import decent_jax
from decent_jax.data import subwords
from decent_jax.data.prepared_folder import Draft, sha256_file
from decent_jax.data.subwords import END, START, Subwords
from decent_jax.data.token_batches import TokenBatches
from decent_jax.errors import DataError

FORMAT = "decent_jax translation 1"
KIND = "prepared translation folder"
SPLITS = ("train", "val", "test")
ID = LENGTH = np.dtype("<u2")
OFFSET = np.dtype("<i8")

_ENDLESS = 1 << 40  # blocks of training


class TranslationPairs:
    """The pairs of a split of a prepared folder, memory-mapped; pickling reopens them.

    Attributes:
      manifest: of the folder.
      languages: of the source and the target.
      lengths: (N, 2) uint16, the ids of source and target, without special ones.

    Raises:
      DataError: no such folder or split, or a file that is not as long as the manifest says.
    """

    def __init__(self, folder: str | Path, split: str):
        self.folder = Path(folder)
        self.split = split
        self.manifest = read_manifest(folder)
        self.languages = tuple(self.manifest["languages"])
        if split not in self.manifest["splits"]:
            names = ", ".join(self.manifest["splits"])
            raise DataError(f"{folder}: has no split {split!r}, only {names}")
        entry = self.manifest["splits"][split]
        self._ids = self._open(entry["ids"], ID)
        self._offsets = self._open(entry["offsets"], OFFSET)
        self.lengths = self._open(entry["lengths"], LENGTH).reshape(-1, 2)

    def _open(self, entry: dict, dtype: np.dtype) -> np.ndarray:
        path = self.folder / entry["file"]
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise DataError(
                    f"{path}: has {size} bytes, its manifest says {entry['bytes']}; prepare the"
                    " data again"
                )
            return np.memmap(path, dtype, "r")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None

    @functools.cached_property
    def vocabulary(self) -> Subwords:
        """The joint vocabulary of the ids; DataError where the folder's is another."""
        found = subwords.load(self.folder)
        if found.sha256 != self.manifest["vocab_sha256"]:
            raise DataError(
                f"{self.folder}: {subwords.FILE} is not the vocabulary these ids were made with;"
                " prepare the data again"
            )
        return found

    def sentences(self, side: int) -> list[str]:
        """The sources (0) or targets (1) as they were before anything: of val and test only."""
        entry = self.manifest["splits"][self.split]
        if "text" not in entry:
            raise DataError(f"{self.folder}: keeps no text of its split {self.split!r}")
        path = self.folder / entry["text"][side]["file"]
        try:
            lines = path.read_bytes().decode().split("\n")[:-1]
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
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

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "split": self.split}

    def __setstate__(self, state: dict):
        self.__init__(**state)


class PairBlocks:
    """What the replicas get at every step; item ``step * num_replicas + replica`` is a block.

    A block is a dictionary of ``source``, int32 (R, S); ``target``, int32 (R, T), which begins with
    the start and ends with the end; and ``weight``, float32 (R,), 1 for a pair and 0 for an empty
    row. Padding is 0, an empty row nothing else. A decoder reads ``target[:, :-1]`` and is to say
    ``target[:, 1:]``. All blocks of a step have one shape, ``batches.shape(step)``, whose
    ``target`` is T - 1: the places that the decoder computes.

    Args:
      pairs: what is read.
      evaluation: every pair once, in the order of length, instead of shuffled epochs for ever.
      others: as for :class:`TokenBatches`.
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
        """Of an epoch; an evaluation has no more."""
        return self.batches.steps_per_epoch

    def indices(self, step: int, replica: int) -> np.ndarray:
        """Which pairs a block holds: (R,) int64, -1 for an empty row."""
        if self.evaluation and step >= self.steps:
            raise IndexError(f"step {step} of an evaluation of {self.steps}")
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
    """The pairs at ``indices`` (-1: an empty row) as arrays, see :class:`PairBlocks`.

    ``source`` and ``target`` are S and T; ValueError where a pair does not fit.
    """
    block = {
        "source": np.zeros((len(indices), source), np.int32),
        "target": np.zeros((len(indices), target), np.int32),
        "weight": (np.asarray(indices) >= 0).astype(np.float32),
    }
    for row, index in enumerate(indices):
        if index >= 0:
            ids = pairs[index]
            if len(ids[0]) > source or len(ids[1]) + 2 > target:
                raise ValueError(
                    f"pair {index} of {len(ids[0])} and {len(ids[1])} + 2 tokens does not fit in"
                    f" {source} and {target}"
                )
            block["source"][row, : len(ids[0])] = ids[0]
            block["target"][row, 0] = START
            block["target"][row, 1 : len(ids[1]) + 1] = ids[1]
            block["target"][row, len(ids[1]) + 1] = END
    return block


def read_manifest(folder: str | Path) -> dict:
    """The manifest of a prepared folder; DataError where there is none or it is another's."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder}: no manifest.json, so this is no prepared folder; make one with python -m"
            " decent_jax.data.prepare_translation"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise DataError(f"{path}: not readable as JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: not a manifest of this version ({FORMAT!r})")
    return manifest


class TranslationFolderWriter(Draft):
    """Writes a prepared folder: pairs first, then ``commit``; ``with`` leaves no trace without it.

    Raises:
      DataError: ``out`` exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(self, out: str | Path, languages: tuple[str, str], *, overwrite: bool = False):
        super().__init__(out, KIND, read_manifest, overwrite=overwrite)
        self.languages = languages
        self.pairs = dict.fromkeys(SPLITS, 0)
        self.tokens = {split: np.zeros(2, np.int64) for split in SPLITS}
        self._with_text = set()  # splits

    def add(self, split: str, ids: np.ndarray, lengths: np.ndarray, text=None) -> None:
        """Appends pairs: ids end to end (uint16), their (n, 2) lengths, and for val and test text.

        ``text`` is the n sources and the n targets, without line ends.
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
        """Renames the finished folder into place and returns its manifest (+ ``entries``).

        Raises:
          FileExistsError: somebody else's folder appeared at ``out`` and ``overwrite`` is False.
        """
        manifest = {
            "format": FORMAT,
            "languages": list(self.languages),
            "vocab_size": vocabulary.size,
            "vocab_sha256": vocabulary.sha256,
            "splits": {split: self._entry(split) for split in SPLITS if self.pairs[split]},
            **entries,
            "versions": {
                "decent_jax": decent_jax.__version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "sentencepiece": metadata.version("sentencepiece"),
            },
        }
        self.append(subwords.FILE, vocabulary.model)
        self.publish(manifest)
        return manifest

    def _entry(self, split: str) -> dict:
        entry = {
            "pairs": self.pairs[split],
            "tokens": dict(zip(self.languages, self.tokens[split].tolist(), strict=True)),
            **{kind: self.close(f"{split}.{kind}") for kind in ("ids", "lengths", "offsets")},
        }
        if split in self._with_text:
            entry["text"] = [self.close(f"{split}.{language}") for language in self.languages]
        return entry


def is_whole(folder: str | Path) -> bool:
    """Whether ``folder`` is a prepared folder whose files have the manifest's hashes."""
    try:
        manifest = read_manifest(folder)
        files = {subwords.FILE: manifest["vocab_sha256"]}
        for entry in manifest["splits"].values():
            kinds = (entry["ids"], entry["lengths"], entry["offsets"], *entry.get("text", ()))
            files |= {file["file"]: file["sha256"] for file in kinds}
        return all(sha256_file(Path(folder) / name) == sha for name, sha in files.items())
    except (DataError, OSError):
        return False
