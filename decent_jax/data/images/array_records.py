"""Prepared folders of labelled images, stored in ArrayRecord shards.

A prepared folder holds shards (`train-00000.array_record`, ..., `val-00000.array_record`, ...),
`manifest.json` and `bad_files.jsonl`. A record consists of the label (int32) and the length of the
name (uint16), both little-endian, the name in UTF-8, and the image file byte for byte. Records are
in the order of `image_folder`, so the manifest's class counts determine all labels.
"""

import contextlib
import functools
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from decent_jax.data import prepared_folder
from decent_jax.data.prepared_folder import Draft, Kind, recorded
from decent_jax.data.reading import entries_of, short
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import Json

KIND = Kind("images", "decent_jax images 1")
SPLITS = ("train", "val")
BAD_FILES = "bad_files.jsonl"
SHARD_BYTES = 256 << 20

read_manifest = functools.partial(prepared_folder.read_manifest, kind=KIND)

_HEADER = struct.Struct("<iH")
_WRITER = "group_size:1,uncompressed"  # random access; JPEG does not compress any further
# For random access, the calling thread reads, and nothing is read ahead.
_READER = {"options": "readahead_buffer_size:0,max_parallelism:0", "file_reader_buffer_size": 32768}
_OPEN_FILES = 512  # the most open shards of a split; a process's usual limit is 1024 files


def pack_record(data: bytes, label: int, name: str) -> bytes:
    """The record of one image."""
    encoded = name.encode("utf-8", "surrogateescape")
    return _HEADER.pack(label, len(encoded)) + encoded + data


def unpack_record(record: bytes) -> tuple[bytes, int, str]:
    """(data, label, name) of a record."""
    label, length = _HEADER.unpack_from(record)
    start = _HEADER.size + length
    return record[start:], label, record[_HEADER.size : start].decode("utf-8", "surrogateescape")


class PreparedImages:
    """A split of a prepared folder, as storage for `image_folder.ImageFiles`.

    Pickling keeps only the path, and each process opens shards when it first reads from them.

    Raises:
      DataError: the manifest or a shard is missing, or a shard has the wrong size.
    """

    layout = "prepared"

    def __init__(self, folder: str | Path, split: str):
        self.folder, self.split = Path(folder), split
        manifest = read_manifest(folder)
        path = f"{folder}/manifest.json"
        with entries_of(path, "is damaged; prepare the images again"):
            self.class_names = tuple(manifest["class_names"])
            self.left_out = dict(manifest["left_out"])
            entry = manifest["splits"][split]
            counts = np.array(entry["class_counts"], np.int64)
            self._shards = [self.folder / shard["file"] for shard in entry["shards"]]
            lengths = [shard["records"] for shard in entry["shards"]]
            sizes = [shard["bytes"] for shard in entry["shards"]]
            agree = counts.sum() == sum(lengths) and len(counts) == len(self.class_names)
            fits = [n * _HEADER.size <= size for n, size in zip(lengths, sizes, strict=True)]
            if not agree or not all(fits):
                raise DataError(f"{path}: its counts disagree; prepare the images again")
            for file, size in zip(self._shards, sizes, strict=True):
                prepared_folder.check_size(file, size)
            self.labels = np.repeat(np.arange(len(counts)), counts)
        self._ends = np.cumsum(lengths, dtype=np.int64)
        # A reader is closed once it is out of the cache and no thread reads from it.
        self._reader = functools.lru_cache(_OPEN_FILES)(_reader)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """(data, label, name) of an image; DataError if the shard is damaged."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        position = index - (int(self._ends[shard - 1]) if shard else 0)
        try:
            return unpack_record(self._reader(self._shards[shard]).read([position])[0])
        except (RuntimeError, IndexError, ValueError, struct.error) as error:
            raise DataError(
                f"{self._shards[shard]}: the shard is damaged, record {position} cannot be read"
                f" ({short(error)}); prepare the images again"
            ) from None

    def __reduce__(self):
        return PreparedImages, (self.folder, self.split)


def _reader(path: Path) -> ArrayRecordReader:
    return ArrayRecordReader(str(path), **_READER)


class ImageFolderWriter(Draft):
    """A writer of a prepared folder: `add` the images, class by class, then `commit`.

    Leaving the `with` without `commit` removes the draft.

    Attributes:
      bad: the name and the reason of each image that is left out; the caller fills this list.

    Raises:
      DataError: `out` exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(self, out: str | Path, class_names: Sequence[str], *, overwrite: bool = False):
        super().__init__(out, KIND, overwrite=overwrite)
        self.class_names = class_names
        self.bad: list[dict[str, str]] = []
        self._counts = {split: np.zeros(len(class_names), np.int64) for split in SPLITS}
        self._shards: dict[str, list[Json]] = {split: [] for split in SPLITS}
        self._writer: Any = None  # the writer of the last shard of `_split`
        self._split, self._bytes = "", 0

    def add(self, split: str, image: tuple[bytes, int, str]) -> None:
        """Appends an image: its data, label and name."""
        if split != self._split or self._bytes >= SHARD_BYTES:
            self._begin_shard(split)
        record = pack_record(*image)
        shard = self._shards[split][-1]
        with _named(shard["file"]):
            self._writer.write(record)
        self._counts[split][image[1]] += 1
        shard["records"] += 1
        self._bytes += len(record)

    def commit(self, left_out: dict[str, int]) -> Json:
        """Renames the finished folder into place and returns its manifest.

        Args:
          left_out: the number of files of each kind that were not read.

        Raises:
          DataError: a split has no image, or another process's folder has appeared at `out`.
        """
        self._finish_shard()
        splits = {}
        for split, shards in self._shards.items():
            bad = [x["name"] for x in self.bad if x["name"].startswith(f"{split}/")]
            if not shards:
                raise DataError(f"none of the {len(bad)} images of {split!r} is whole")
            counts = self._counts[split].tolist()
            splits[split] = {
                "records": sum(shard["records"] for shard in shards),
                "bytes": sum(shard["bytes"] for shard in shards),
                "bad": len(bad),
                "class_counts": counts,
                "classes_all_broken": [
                    name
                    for name, count in zip(self.class_names, counts, strict=True)
                    if not count and any(x.startswith(f"{split}/{name}/") for x in bad)
                ],
                "shards": shards,
            }
        self.append(BAD_FILES, "".join(json.dumps(entry) + "\n" for entry in self.bad).encode())
        about = {"class_names": list(self.class_names), "splits": splits, "left_out": left_out}
        return self.publish(about | {"bad_files": BAD_FILES}, "array_record")

    def _begin_shard(self, split: str) -> None:
        self._finish_shard()
        name = f"{split}-{len(self._shards[split]):05}.array_record"
        with _named(name):
            self._writer = ArrayRecordWriter(str(self.folder / name), _WRITER)
        self._shards[split].append({"file": name, "records": 0})
        self._split, self._bytes = split, 0

    def _finish_shard(self) -> None:
        if self._writer is None:
            return
        shard = self._shards[self._split][-1]
        with _named(shard["file"]):
            self._writer.close()
        self._writer = None
        shard |= recorded(self.folder / shard["file"])

    def __exit__(self, *exc_info) -> None:
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # a full disk
                self._writer.close()
        super().__exit__(*exc_info)


@contextlib.contextmanager
def _named(file: str) -> Iterator[None]:
    """A context that turns the errors of array_record while it writes into an OSError."""
    try:
        yield
    except RuntimeError as error:  # the only type that array_record raises
        reason = str(error).partition(";")[0]
        raise OSError(f"{file}: cannot be written ({reason})") from None
