"""Labelled images in ArrayRecord shards: folders that prepare_images made, and those of TFDS.

A prepared folder holds ``train-00000-of-00012.array_record``, ..., the same for ``val``,
``manifest.json`` and ``bad_files.jsonl``. A record is the label (int32), the length of the name
(uint16), both little-endian, the name in UTF-8 and then the image file, byte for byte. Records lie
in the order of `image_files`, so that the manifest's count of each class gives all labels.
"""

import collections
import contextlib
import functools
import json
import os
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from decent_jax.data.prepared_folder import check_out
from decent_jax.errors import DataError
from decent_jax.json_files import write_json_atomic

FORMAT = "decent_jax images 1"
KIND = "prepared image folder"
SPLITS = ("train", "val")

_LOCK = "owner.lock"
_HEADER = struct.Struct("<iH")
# Read by the calling thread, nothing ahead: random access.
_READER = {"options": "readahead_buffer_size:0,max_parallelism:0", "file_reader_buffer_size": 32768}
_OPEN_FILES = 512  # at most, of a split; a process may often have 1024
_THREADS = 16


def pack_record(data: bytes, label: int, name: str) -> bytes:
    """The record of one image."""
    encoded = name.encode("utf-8", "surrogateescape")
    return _HEADER.pack(label, len(encoded)) + encoded + data


def unpack_record(record: bytes) -> tuple[bytes, int, str]:
    """(data, label, name) of a record; ValueError where it is none."""
    if len(record) < _HEADER.size:
        raise ValueError(f"{len(record)} bytes are no record")
    label, length = _HEADER.unpack_from(record)
    start = _HEADER.size + length
    return record[start:], label, record[_HEADER.size : start].decode("utf-8", "surrogateescape")


def read_manifest(folder: str | Path) -> dict:
    """The manifest of a prepared folder; DataError where there is none or it is another's."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder}: no manifest.json, so this is no prepared folder") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise DataError(f"{path}: not readable as JSON; prepare the images again") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise DataError(
            f"{path}: the format is {found!r}, expected {FORMAT!r}; give a folder that"
            " `python -m decent_jax.data.prepare_images` of this version made"
        )
    return manifest


@contextlib.contextmanager
def unfinished_folder(out: Path):
    """The hidden sibling ``.NAME.unfinished`` of ``out``, locked, with an earlier run's shards.

    Raises:
      DataError: it cannot be made, or a living run holds it.
    """
    import fcntl

    folder = out.with_name(f".{out.name}.unfinished")
    busy = DataError(f"{out}: another run is preparing it now; wait for that one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / _LOCK, "wb")  # noqa: SIM115
    except OSError as error:
        raise DataError(f"{out.parent}: cannot be written ({error.strerror})") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError:  # a file system without locks
            pass
        if not _is_at(lock, folder / _LOCK):  # the run that held it put the folder in place
            raise busy
        yield folder


def sidecar_of(shard: Path) -> Path:
    """Where an unfinished folder says that a shard is finished, and what of."""
    return shard.with_name(f"{shard.name}.json")


def keep_only(folder: Path, shards: list[str]) -> None:
    """Removes from an unfinished folder what another input or another count of shards left."""
    known = {_LOCK, *shards, *(f"{shard}.json" for shard in shards)}
    for path in folder.iterdir():
        if path.name not in known:
            path.unlink()


def put_in_place(out: Path, folder: Path, manifest: dict, overwrite: bool) -> None:
    """Makes an unfinished folder that has all its shards the prepared folder ``out``."""
    for shard in folder.glob("*.array_record"):
        sidecar_of(shard).unlink(missing_ok=True)
    write_json_atomic(folder / "manifest.json", manifest)
    check_out(out, KIND, read_manifest, overwrite=overwrite)
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # of a run killed just here
    with contextlib.suppress(FileNotFoundError):
        os.rename(out, old)
    os.rename(folder, out)
    (out / _LOCK).unlink()  # last, so that no other run takes the folder for its own
    shutil.rmtree(old, ignore_errors=True)


def _is_at(file, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class PreparedImages:
    """A split of a prepared folder, the storage behind `image_files.ImageFiles`.

    Raises:
      DataError: the manifest or a shard is missing, or a shard has another size than it should.
    """

    layout = "prepared"

    def __init__(self, folder: str | Path, split: str):
        manifest = read_manifest(folder)
        try:
            self.class_names = tuple(manifest["class_names"])
            entry = manifest["splits"][split]
            counts = np.array(entry["class_counts"], np.int64)
            shards = [(shard["file"], shard["bytes"]) for shard in entry["shards"]]
            lengths = [shard["records"] for shard in entry["shards"]]
        except (KeyError, TypeError, ValueError):
            raise DataError(
                f"{folder}/manifest.json: is damaged; prepare the images again"
            ) from None
        self.labels = np.repeat(np.arange(len(counts)), counts)
        if len(self.labels) != sum(lengths) or len(counts) != len(self.class_names):
            raise DataError(
                f"{folder}/manifest.json: its counts disagree; prepare the images again"
            )
        for file, size in shards:
            _check_size(Path(folder) / file, size)
        paths = [os.path.join(folder, file) for file, _ in shards]
        self._shards = _Shards(paths, lengths, advice="prepare the images again")

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """(data, label, name) of an image; DataError where its shard is damaged."""
        record = self._shards.read(index)
        try:
            return unpack_record(record)
        except ValueError as error:
            raise self._shards.error(index, error) from None


def _check_size(path: Path, wanted: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path}: the shard is missing; prepare the images again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if size != wanted:
        what = "is cut short" if size < wanted else "has another size"
        raise DataError(
            f"{path}: the shard {what}, {size} bytes where the manifest says {wanted};"
            " prepare the images again"
        )


class TfdsImages:
    """A split of a data set that TFDS prepared as array_record, read without TensorFlow.

    Any data set with the features ``image`` and ``label`` will do; ``file_name`` is used where it
    is there. "val" is the split ``validation``, or where there is none ``test``. The records come
    in the order stored, which TFDS shuffled. Of ImageNet, TFDS stores some 20 images that are CMYK
    or PNG in the original as RGB JPEG, so that their bytes differ.

    Raises:
      DataError: it is no such folder, or a shard is missing or cut short.
    """

    layout = "TFDS"

    def __init__(self, folder: str | Path, split: str):
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
        """(N,) int64. TFDS keeps labels nowhere but in the records: this reads all of them."""
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
def _example():
    from tensorflow_datasets.proto import tf_example_pb2  # takes half a second

    return tf_example_pb2.Example


def _tfds_split(folder, split):
    """The features of a TFDS folder, and what it says of one split."""
    import tensorflow_datasets as tfds

    try:
        info = tfds.builder_from_directory(folder).info
        features, splits = info.features, info.splits
    except Exception as error:
        raise DataError(f"{folder}: not a readable TFDS folder ({_short(error)})") from None
    if info.file_format is None or info.file_format.value != "array_record":
        found = info.file_format.value if info.file_format else "an unknown format"
        raise DataError(
            f"{folder}: stored as {found}; only array_record is read without TensorFlow:"
            " prepare it again with file_format='array_record'"
        )
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

    Pickling hands on the paths; readers are opened when first needed.
    """

    def __init__(self, paths: list[str], lengths: list[int], advice: str):
        self._paths = paths
        self._lengths = lengths
        self._ends = np.fromiter(accumulate(lengths), np.int64, len(lengths))
        self._advice = advice
        self._forget()

    def _forget(self):
        self._readers = collections.OrderedDict()  # the least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def check(self) -> None:
        """DataError where a shard is missing or does not hold as many records as it should."""
        for path, length in zip(self._paths, self._lengths, strict=True):
            if not os.path.exists(path):
                raise DataError(f"{path}: the shard is missing; {self._advice}")
            found = ArrayRecordReader(path, **_READER).num_records()  # 0 where it is damaged
            if found != length:
                raise DataError(
                    f"{path}: the shard is cut short, {found} readable records of {length};"
                    f" {self._advice}"
                )

    def read(self, index: int) -> bytes:
        shard, position = self._locate(index)
        try:
            return self._reader(shard).read([position])[0]
        except (RuntimeError, IndexError) as error:
            raise self.error(index, error) from None

    def error(self, index: int, error: Exception) -> DataError:
        """What to raise where a record cannot be had."""
        shard, position = self._locate(index)
        return DataError(
            f"{self._paths[shard]}: the shard is damaged, record {position} cannot be read"
            f" ({_short(error)}); {self._advice}"
        )

    def _locate(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    def _reader(self, shard: int) -> ArrayRecordReader:
        with self._lock:
            reader = self._readers.get(shard)
            if reader is None:
                reader = self._readers[shard] = ArrayRecordReader(self._paths[shard], **_READER)
                if len(self._readers) > _OPEN_FILES:
                    self._readers.popitem(last=False)  # closed once no thread reads from it
            self._readers.move_to_end(shard)
            return reader

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k not in ("_readers", "_lock")}

    def __setstate__(self, state: dict):
        self.__dict__.update(state)
        self._forget()


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
