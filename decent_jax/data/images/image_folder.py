"""Labelled images as files, in any of four layouts: the bytes, a label and a name by index.

`open_images` recognises the layout. ImageNet, and any data set like it, may be stored as class
folders, as the original archives, as a prepared folder of ours or as one of TFDS.

Classes are numbered in the order of their names (code points), and the images of a class come in
the order of theirs, one class after another. So every layout of the same data gives the same
record at the same index with the same label, but for TFDS, which stores records shuffled.
"""

import contextlib
import functools
import io
import operator
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decent_jax.data import tfds_folder
from decent_jax.data.images import array_records
from decent_jax.data.reading import one_sentence, read_at_most, short
from decent_jax.ground.errors import DataError

SPLITS = array_records.SPLITS
_SUFFIXES = (".jpg", ".jpeg", ".png")
_EXPECTED = "expected CLASS/NAME.jpg, or in an archive a CLASS.tar for every class"
_FOLDERS = {"train": ("train",), "val": ("val", "validation")}
_ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
_DEVKIT = "ILSVRC2012_devkit_t12"
_LONGEST_NAME = 1 << 16  # bytes, in an archive
_LARGEST_TABLE = 1 << 26  # bytes, of a file of the devkit; they have 2 MB
_THREADS = 16  # listing folders and reading headers waits for the disk, or for a file server


class EncodedImage(NamedTuple):
    """An image as it is stored: JPEG or PNG, not decoded.

    `name` is SPLIT/CLASS/FILE in every layout, such as "train/n01440764/n01440764_10026.JPEG".
    """

    data: bytes
    label: int
    name: str


class _Members(NamedTuple):
    """The files of one class, sorted by name, and in an archive where they are."""

    names: list[str]
    places: np.ndarray = np.zeros((0, 2), np.int64)  # (files, 2): offset in the archive, bytes


def _is_image(name: str) -> bool:
    """Whether a file of this name is an image, and not a hidden one."""
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


class ImageFiles:
    """The images of one split by index, a grain `RandomAccessDataSource`; see `open_images`.

    Any number of threads may read. Pickling keeps the index (about 50 bytes per image), not the
    images; each process opens files when it first reads from them.

    Attributes:
      path: the folder.
      split: "train" or "val".
      class_names: (K,) strings, those of the training set in both splits.
      labels: (N,) int64, indices into `class_names`.
      layout: "class folders", "flat folder", "archive", "prepared" or "TFDS".
    """

    def __init__(self, path: str, split: str, storage):
        self.path = path
        self.split = split
        self.class_names: tuple[str, ...] = storage.class_names
        self.labels: np.ndarray = storage.labels
        self.layout: str = storage.layout
        self._storage = storage

    def __len__(self) -> int:
        return len(self._storage)

    def __getitem__(self, index: int) -> EncodedImage:
        """DataError where the file is gone, unreadable or, in an archive or shard, damaged."""
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        return EncodedImage(*self._storage.read(index))

    def __repr__(self) -> str:
        return (
            f"ImageFiles({self.path!r}, {self.split!r}, {self.layout}: {len(self):,} images of"
            f" {len(self.class_names):,} classes)"
        )


def open_images(path: str | Path, split: str) -> ImageFiles:
    """The images of one split of a folder in any of these layouts, tried in this order.

    * prepared: made by `decent-jax prepare images`.
    * class folders: `train/CLASS/*.jpg` and `val/CLASS/*.jpg` (or `validation/`); also .jpeg and
      .png, in capitals or not. Hidden files and folders are ignored.
    * archives: `ILSVRC2012_img_train.tar` and `ILSVRC2012_img_val.tar` as ImageNet distributes
      them.
    * TFDS: the version folder of a data set with `image` and `label`, stored as array_record; "val"
      is its split `validation`, or else `test`.

    The splits may have different layouts. ImageNet's validation images without class folders, in
    an archive or as `val/*.JPEG`, get their classes from `ILSVRC2012_devkit_t12.tar.gz` (or the
    folder unpacked from it) in the same folder.

    Args:
      path: the folder.
      split: "train" or "val". The labels of "val" are those of the training classes.

    Raises:
      DataError: the path is missing, holds none of the layouts, or what it holds is not whole.
    """
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        what = "is a file, expected a folder" if os.path.exists(path) else "no such folder"
        raise DataError(f"{path}: {what}; give the folder that holds the images")
    with one_sentence(path):
        storage = _storage(path, split)
    if not len(storage):
        raise DataError(f"{path}: the split {split!r} holds no image; prepare the images again")
    return ImageFiles(path, split, storage)


def _storage(path: str, split: str):
    if os.path.exists(os.path.join(path, "manifest.json")):
        return array_records.PreparedImages(path, split)
    if tfds_folder.is_tfds(path):
        return _TfdsImages(path, split)
    places = {name: _place(path, name) for name in SPLITS}
    for name in ("train", split):
        if not places[name]:
            tried = [f"{folder}/" for folder in _FOLDERS[name]] + [_ARCHIVES[name]]
            raise DataError(
                f"{path}: has no {'training' if name == 'train' else 'validation'} images; looked"
                f" for {', '.join(tried[:-1])} and {tried[-1]}, put one of them there"
            )
    place = places[split]
    found = _index(place)
    flat = set(found) == {""} and bool(found[""].names)
    if split == "train":
        class_names = sorted(found)
    else:
        class_names = _class_names(places["train"])
        if flat:
            found = _by_ground_truth(place, found[""])
    _check_classes(place, found)
    _check_known(place, sorted(found), class_names)
    return _Files(place, split, class_names, found, flat)


def _place(path: str, split: str) -> str:
    """The folder or archive of a split, "" if there is none."""
    folders = (os.path.join(path, name) for name in _FOLDERS[split])
    archive = os.path.join(path, _ARCHIVES[split])
    found = [*filter(os.path.isdir, folders), *filter(os.path.isfile, [archive])]
    return found[0] if found else ""


def _index(place: str) -> dict[str, _Members]:
    """The images of a folder or an archive by class; "" stands for no class."""
    if os.path.isfile(place):
        return _index_archive(place)
    folders = _subfolders(place)
    if not folders:
        return {"": _Members(_images(place))}
    with ThreadPoolExecutor(_THREADS) as pool:
        names = pool.map(lambda folder: _images(os.path.join(place, folder)), folders)
        return dict(zip(folders, map(_Members, names), strict=True))


def _check_classes(place: str, found: dict[str, _Members]) -> None:
    """DataError where there is no class, an image outside of one, or a class without images."""
    if "" in found and found[""].names:
        raise DataError(f"{place}: holds {found[''].names[0]!r} outside of a class; {_EXPECTED}")
    empty = next((name for name in sorted(found) if not found[name].names), "")
    if empty or not any(found):
        where = f", class {empty}" if empty else ""
        raise DataError(f"{place}{where}: holds no {', '.join(_SUFFIXES)} file; {_EXPECTED}")


def _class_names(place: str) -> list[str]:
    """The classes of the training set, without a look at its images."""
    list_names = _archive_classes if os.path.isfile(place) else _subfolders
    names = list_names(place)
    if not names:
        raise DataError(f"{place}: holds no class; {_EXPECTED}")
    return names


def _check_known(place: str, found: list[str], class_names: list[str]) -> None:
    known = set(class_names)
    if unknown := [name for name in found if name not in known]:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        classes = "1 class" if len(unknown) == 1 else f"{len(unknown)} classes"
        raise DataError(
            f"{place}: holds {classes} that the training images do not have:"
            f" {', '.join(unknown[:3])}{more}; remove them or add training images"
        )


def _by_ground_truth(place: str, files: _Members) -> dict[str, _Members]:
    """Flat validation images sorted into their classes."""
    wnids = _ground_truth(os.path.dirname(place))
    if len(wnids) != len(files.names):
        raise DataError(
            f"{place}: holds {len(files.names)} validation images where the development kit's"
            f" ground truth has {len(wnids)}; fetch the images again"
        )
    positions = {}
    for position, wnid in enumerate(wnids):
        positions.setdefault(wnid, []).append(position)
    places = files.places if len(files.places) else np.zeros((len(wnids), 2), np.int64)
    return {
        wnid: _Members([files.names[i] for i in own], places[own])
        for wnid, own in positions.items()
    }


def _subfolders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())


def _images(folder: str) -> list[str]:
    with os.scandir(folder) as entries:  # entries know their type, without a `stat` per file
        return sorted(entry.name for entry in entries if _is_image(entry.name) and entry.is_file())


class _TfdsImages:
    """A storage of what TFDS prepared, in its order."""

    layout = "TFDS"

    def __init__(self, path: str, split: str):
        names = {"train": ("train",), "val": ("validation", "test")}[split]
        kinds = {"image": "Image", "label": "ClassLabel"}
        found = tfds_folder.open_split(path, names, kinds)
        if found is None:
            raise DataError(
                f"{path}: has no split {' or '.join(names)}; prepare it with TFDS again"
            )
        self._split, self._records = split, found
        self.class_names = tuple(found.features["label"].names)

    def __len__(self) -> int:
        return len(self._records.records)

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """(N,) int64. TFDS keeps labels in the records alone, so this reads all records."""
        blocks = self._records.blocks(256)
        return np.array([x["label"] for _, block in blocks for x in block], np.int64)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """(data, label, name) of an image."""
        (record,) = self._records.read(range(index, index + 1))
        label, file = int(record["label"]), record.get("file_name", f"record-{index:07}")
        name = file.decode() if isinstance(file, bytes) else file
        return record["image"], label, f"{self._split}/{self.class_names[label]}/{name}"


class _Files:
    """A storage of files in class folders, all in one folder, or in a tar file."""

    def __init__(self, place: str, split: str, class_names, found: dict[str, _Members], flat: bool):
        self.class_names = tuple(class_names)
        members = [found.get(name, _Members([])) for name in class_names]
        names = [name for own in members for name in own.names]
        self.labels = np.repeat(np.arange(len(members)), [len(own.names) for own in members])
        is_archive = os.path.isfile(place)
        self.layout = "archive" if is_archive else "flat folder" if flat else "class folders"
        self._place, self._split = place, split
        # as Python strings, ImageNet's would take 100 MB
        self._names = np.array([os.fsencode(name) for name in names], np.bytes_)
        self._places = np.concatenate([own.places for own in members])

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """(data, label, name) of an image."""
        label, name = int(self.labels[index]), os.fsdecode(self._names[index])
        class_name = self.class_names[label]
        record = label, f"{self._split}/{class_name}/{name}"
        if self.layout != "archive":
            folder = "" if self.layout == "flat folder" else class_name
            path = os.path.join(self._place, folder, name)
            with one_sentence(path), open(path, "rb", buffering=0) as file:
                return file.read(), *record
        offset, size = self._places[index].tolist()
        with one_sentence(self._place), open(self._place, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), size, offset)
        if len(data) < size:
            raise DataError(
                f"{self._place}: is cut short, {record[1]} cannot be read; fetch it again"
            )
        return data, *record


# --- ImageNet's archives: the headers of a tar file, and of tar files within it, give the index;
# an image is then some bytes at an offset. On a shared file system a few archives are better than
# 1.3 million files.


def _index_archive(path: str | Path) -> dict[str, _Members]:
    """The images in one of ImageNet's archives, by class.

    That of the training images holds a tar file for each class. The validation images have no
    classes, and come under `""`.

    Raises:
      DataError: the archive, or one within, is cut short or damaged.
    """
    nested = _nested(path)
    if not nested:
        return {"": _images_in(path, 0, os.path.getsize(path), str(path))}

    def index(name: str) -> _Members:
        return _images_in(path, *nested[name], f"{path}, {name}.tar")

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(nested, pool.map(index, nested), strict=True))


def _archive_classes(path: str | Path) -> list[str]:
    """The sorted names of the classes in the archive of the training images."""
    return sorted(_nested(path))


def _ground_truth(folder: str | Path) -> list[str]:
    """The wnid of every validation image of ImageNet, in the order of their file names.

    Args:
      folder: holds the devkit, packed or unpacked.

    Raises:
      DataError: it is missing, damaged, or names an id that it does not explain.
    """
    import scipy.io

    truth = _devkit_file(folder, "ILSVRC2012_validation_ground_truth.txt")
    meta = io.BytesIO(_devkit_file(folder, "meta.mat"))
    try:
        synsets = np.atleast_1d(scipy.io.loadmat(meta, squeeze_me=True)["synsets"])
        # Ids are not in the order of wnids; those above 1000 are groups.
        wnids = {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in synsets}
        return [wnids[int(line)] for line in truth.split()]
    except Exception as error:  # of many kinds, for damaged files
        raise DataError(
            f"{folder}: {_DEVKIT} does not say the class of each validation image"
            f" ({type(error).__name__}: {short(error)}); fetch it again"
        ) from None


def _nested(path: str | Path) -> dict[str, tuple[int, int]]:
    """{class: (start, stop)} of the tar files in an archive."""
    found = {}
    for info in _files(path, 0, os.path.getsize(path), str(path)):
        name = info.name.rpartition("/")[2]
        if name.endswith(".tar") and not name.startswith("."):
            end = info.offset_data + info.size
            found[name.removesuffix(".tar")] = info.offset_data, end
    return found


def _images_in(path: str | Path, start: int, stop: int, where: str) -> _Members:
    """The images of a tar file; the last of a name counts."""
    found = {}
    for info in _files(path, start, stop, where):
        name = info.name.rpartition("/")[2]
        if _is_image(name):
            found[name] = info.offset_data, info.size
    names = sorted(found)
    return _Members(names, np.array([found[name] for name in names], np.int64).reshape(-1, 2))


class _Headers(io.FileIO):
    """A tar file of which only headers are read."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LONGEST_NAME:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size) or b""


def _files(path: str | Path, start: int, stop: int, where: str) -> Iterator[tarfile.TarInfo]:
    """The files of the tar file in bytes `start` to `stop`; places count from the file's beginning.

    Python's tarfile takes a damaged header, or the end of the file, for the end of the archive;
    this refuses an archive that does not end by a block of zeros.
    """
    with one_sentence(where), _Headers(path) as file:
        file.seek(start)
        with tarfile.open(fileobj=file, mode="r:", errors="surrogateescape") as archive:
            while info := archive.next():
                archive.members.clear()  # type: ignore (there may be a million)
                if not 0 <= info.size <= stop - info.offset_data:
                    raise DataError(f"{where}: the tar file is cut short; fetch it again")
                if info.isfile():
                    yield info
            if any(os.pread(file.fileno(), tarfile.BLOCKSIZE, archive.offset) or b"\1"):
                raise DataError(
                    f"{where}: the tar file is cut short or damaged at byte"
                    f" {archive.offset - start}; fetch it again"
                )


def _devkit_file(folder: str | Path, name: str) -> bytes:
    unpacked = Path(folder) / _DEVKIT / "data" / name
    packed = Path(folder) / f"{_DEVKIT}.tar.gz"
    if unpacked.exists():
        with one_sentence(unpacked):
            return unpacked.read_bytes()
    if not packed.exists():
        raise DataError(
            f"{folder}: its validation images are not in class folders, so their classes are read"
            f" from ImageNet's development kit; put {_DEVKIT}.tar.gz, or what it holds as"
            f" {_DEVKIT}/, into {folder}"
        )
    with one_sentence(packed), tarfile.open(packed) as archive, contextlib.suppress(KeyError):
        if member := archive.extractfile(f"{_DEVKIT}/data/{name}"):
            return read_at_most(member, _LARGEST_TABLE, f"{packed}, {name}")
    raise DataError(f"{packed}: holds no file {_DEVKIT}/data/{name}; fetch it again")
