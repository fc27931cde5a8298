"""Labelled images in ArrayRecord shards: our prepared folders, and those of TFDS.

A prepared folder holds `train-00000.array_record`, ..., the same for `val`, `manifest.json` and
`bad_files.jsonl`. A record is the label (int32), the length of the name
(uint16), both little-endian, the name in UTF-8 and then the image file, byte for byte. Records have
the order of `image_folder`, so the manifest's count of each class gives all labels.
"""

import contextlib
import functools
import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from decent_jax.data import prepared_folder, tfds_folder
from decent_jax.data.prepared_folder import Draft, Kind, recorded
from decent_jax.data.reading import entries_of, one_sentence, short
from decent_jax.ground.errors import DataError

KIND = Kind("images", "decent_jax images 1")
SPLITS = ("train", "val")
BAD_FILES = "bad_files.jsonl"
SHARD_BYTES = 256 << 20

read_manifest = functools.partial(prepared_folder.read_manifest, kind=KIND)

_HEADER = struct.Struct("<iH")
_WRITER = "group_size:1,uncompressed"  # random access; JPEG does not compress any further
# Read by the calling thread, nothing ahead: random access.
_READER = {"options": "readahead_buffer_size:0,max_parallelism:0", "file_reader_buffer_size": 32768}
_OPEN_FILES = 512  # at most, of a split; a process may often have 1024
_THREADS = 16


def pack_record(data: bytes, label: int, name: str) -> bytes:
    """The record of one image."""
    encoded = name.encode("utf-8", "surrogateescape")
    return _HEADER.pack(label, len(encoded)) + encoded + data


def unpack_record(record: bytes) -> tuple[bytes, int, str]:
    """(data, label, name) of a record; ValueError where `record` is none."""
    if len(record) < _HEADER.size:
        raise ValueError(f"{len(record)} bytes are no record")
    label, length = _HEADER.unpack_from(record)
    start = _HEADER.size + length
    return record[start:], label, record[_HEADER.size : start].decode("utf-8", "surrogateescape")


class PreparedImages:
    """A split of a prepared folder, a storage of `image_folder.ImageFiles`.

    Raises:
      DataError: the manifest or a shard is missing, or a shard has another size than it should.
    """

    layout = "prepared"

    def __init__(self, folder: str | Path, split: str):
        manifest = read_manifest(folder)
        path = f"{folder}/manifest.json"
        with entries_of(path, "is damaged; prepare the images again"):
            self.class_names = tuple(manifest["class_names"])
            entry = manifest["splits"][split]
            counts = np.array(entry["class_counts"], np.int64)
            shards = [(shard["file"], shard["bytes"]) for shard in entry["shards"]]
            lengths = [shard["records"] for shard in entry["shards"]]
            agree = counts.sum() == sum(lengths) and len(counts) == len(self.class_names)
            fits = [n * _HEADER.size <= size for n, (_, size) in zip(lengths, shards, strict=True)]
            if not agree or not all(fits):
                raise DataError(f"{path}: its counts disagree; prepare the images again")
            for file, size in shards:
                _check_size(Path(folder) / file, size)
            self.labels = np.repeat(np.arange(len(counts)), counts)
        paths = [os.path.join(folder, file) for file, _ in shards]
        self._shards = _Shards(paths, lengths, advice="prepare the images again")

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """(data, label, name) of an image; DataError where the shard is damaged."""
        record = self._shards.read(index)
        try:
            return unpack_record(record)
        except ValueError as error:
            raise self._shards.error(index, error) from None


class ImageFolderWriter(Draft):
    """Writes a prepared folder: images first, those of a class one after another, then `commit`.

    Leaving the `with` without `commit` leaves no trace.

    Attributes:
      bad: for each image that is left out, its name and the reason; the caller's to fill.

    Raises:
      DataError: `out` exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(self, out: str | Path, class_names: Sequence[str], *, overwrite: bool = False):
        super().__init__(out, KIND, overwrite=overwrite)
        self.class_names = class_names
        self.bad: list[dict[str, str]] = []
        self._counts = {split: np.zeros(len(class_names), np.int64) for split in SPLITS}
        self._shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        self._writer: Any = None  # of the last shard of `_split`
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

    def commit(self) -> dict[str, Any]:
        """Renames the finished folder into place and returns its manifest.

        Raises:
          DataError: a split has no image, or another process's folder appeared at `out`.
        """
        self._finish_shard()
        splits = {}
        for split, shards in self._shards.items():
            bad = sum(entry["name"].startswith(f"{split}/") for entry in self.bad)
            if not shards:
                raise DataError(f"none of the {bad} images of {split!r} is whole")
            splits[split] = {
                "records": sum(shard["records"] for shard in shards),
                "bytes": sum(shard["bytes"] for shard in shards),
                "bad": bad,
                "class_counts": self._counts[split].tolist(),
                "shards": shards,
            }
        self.append(BAD_FILES, "".join(json.dumps(entry) + "\n" for entry in self.bad).encode())
        about = {"class_names": list(self.class_names), "splits": splits}
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
    """Context that turns what array_record raises while it writes into an OSError."""
    try:
        yield
    except RuntimeError as error:  # array_record's only kind
        reason = str(error).partition(";")[0]
        raise OSError(f"{file}: cannot be written ({reason})") from None


def _check_size(path: Path, wanted: int) -> None:
    if not path.exists():
        raise DataError(f"{path}: the shard is missing; prepare the images again")
    with one_sentence(path):
        size = path.stat().st_size
    if size != wanted:
        what = "is cut short" if size < wanted else "has another size"
        raise DataError(
            f"{path}: the shard {what}, {size} bytes where the manifest says {wanted};"
            " prepare the images again"
        )


class TfdsImages:
    """A split of a data set that TFDS prepared as array_record, read without TensorFlow.

    Any data set with the features `image` and `label` will do; `file_name` is optional. "val" is
    the split `validation` or, where there is none, `test`. Records keep the order stored, which
    TFDS shuffled. Some 20 of ImageNet's images, CMYK or PNG in the original, differ in bytes: TFDS
    stores them as RGB JPEG.

    Raises:
      DataError: the folder is no such data set, or a shard is missing or cut short.
    """

    layout = "TFDS"

    def __init__(self, folder: Path, split: str):
        features, info = _tfds_split(folder, split)
        self._split = split
        self.class_names = tuple(features["label"].names)
        paths, lengths = [str(path) for path in info.filepaths], list(info.shard_lengths)
        self._shards = _Shards(paths, lengths, advice="prepare it with TFDS again")
        self._shards.check()

    def __len__(self) -> int:
        return len(self._shards)

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """(N,) int64. TFDS keeps labels in the records alone, so this reads all records."""
        with ThreadPoolExecutor(_THREADS) as pool:
            labels = pool.map(lambda i: self.read(i)[1], range(len(self)))
            return np.fromiter(labels, np.int64, len(self))

    def read(self, index: int) -> tuple[bytes, int, str]:
        """(data, label, name) of an image; DataError where its shard is damaged."""
        record = self._shards.read(index)
        try:
            features = _example().FromString(record).features.feature
            data = features["image"].bytes_list.value[0]
            label = features["label"].int64_list.value[0]
            file = features["file_name"].bytes_list.value
            class_name = self.class_names[label]
        except Exception as error:  # protobuf's own, or an example of another kind
            raise self._shards.error(index, error) from None
        name = file[0].decode("utf-8", "surrogateescape") if file else f"record-{index:07}"
        return data, label, f"{self._split}/{class_name}/{name}"


@functools.cache
def _example() -> Any:
    from tensorflow_datasets.proto import tf_example_pb2  # takes half a second

    return tf_example_pb2.Example  # type: ignore


def _tfds_split(folder: Path, split: str):
    """The features of a TFDS folder, and TFDS's description of one split."""
    import tensorflow_datasets as tfds

    info = tfds_folder.open_builder(folder).info
    features, splits = info.features, info.splits
    kinds = {"image": tfds.features.Image, "label": tfds.features.ClassLabel}
    for name, kind in kinds.items():
        if name not in features or not isinstance(features[name], kind):
            names = ", ".join(map(repr, features))
            raise DataError(
                f"{folder}: has no {kind.__name__} feature {name!r} among its features {names};"
                " give an image classification data set"
            )
    wanted = {"train": ("train",), "val": ("validation", "test")}[split]
    found = next((name for name in wanted if name in splits), None)
    if found is None:
        names = ", ".join(splits) or "none"
        raise DataError(f"{folder}: has no split {' or '.join(wanted)}, only {names}")
    return features, splits[found]


class _Shards:
    """The records of several ArrayRecord files, by one index; for any number of threads.

    Pickling keeps the paths; each process opens readers when it first needs them.
    """

    def __init__(self, paths: list[str], lengths: list[int], advice: str):
        self._paths, self._lengths, self._advice = paths, lengths, advice
        self._ends = np.cumsum(lengths, dtype=np.int64)
        # A reader is closed once it is out of the cache and no thread reads from it.
        self._reader = functools.lru_cache(_OPEN_FILES)(_reader)

    def __reduce__(self):
        return _Shards, (self._paths, self._lengths, self._advice)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def check(self) -> None:
        """DataError where a shard is missing or does not hold as many records as it should."""
        for path, length in zip(self._paths, self._lengths, strict=True):
            if not os.path.exists(path):
                raise DataError(f"{path}: the shard is missing; {self._advice}")
            found = _reader(path).num_records()  # 0 where it is damaged
            if found != length:
                raise DataError(
                    f"{path}: the shard is cut short, {found} readable records of {length};"
                    f" {self._advice}"
                )

    def read(self, index: int) -> bytes:
        """A record; DataError where its shard is damaged."""
        shard, position = self._locate(index)
        try:
            return self._reader(self._paths[shard]).read([position])[0]
        except (RuntimeError, IndexError) as error:
            raise self.error(index, error) from None

    def error(self, index: int, error: Exception) -> DataError:
        """The error to raise for a record that cannot be read."""
        shard, position = self._locate(index)
        return DataError(
            f"{self._paths[shard]}: the shard is damaged, record {position} cannot be read"
            f" ({short(error)}); {self._advice}"
        )

    def _locate(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)


def _reader(path: str) -> ArrayRecordReader:
    return ArrayRecordReader(path, **_READER)
