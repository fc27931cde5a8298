"""Labelled images as files, in any of three layouts: the bytes, a label and a name by index.

`open_images` recognises the layout. ImageNet, and any data set like it, may be stored as class
folders, as the original archives or as a prepared folder of ours.

Classes are numbered in the order of their names (code points), and the images of a class come in
the order of theirs, one class after another. So every layout of the same data gives the same
record at the same index with the same label.
"""

import operator
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decent_jax.data.images import array_records, imagenet_archives
from decent_jax.data.images.imagenet_archives import SUFFIXES, Members, is_image
from decent_jax.data.reading import one_sentence
from decent_jax.ground.errors import DataError

SPLITS = array_records.SPLITS
_EXPECTED = "expected CLASS/NAME.jpg, or in an archive a CLASS.tar for every class"
_FOLDERS = {"train": ("train",), "val": ("val", "validation")}
_ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
_THREADS = 16  # listing folders waits for the disk, or for a file server


class EncodedImage(NamedTuple):
    """An image as it is stored: JPEG or PNG, not decoded.

    `name` is SPLIT/CLASS/FILE in every layout, such as "train/n01440764/n01440764_10026.JPEG".
    """

    data: bytes
    label: int
    name: str


class ImageFiles:
    """The images of one split by index, a grain `RandomAccessDataSource`; see `open_images`.

    Any number of threads may read. Pickling keeps the index (about 50 bytes per image), not the
    images; each process opens files when it first reads from them.

    Attributes:
      path: the folder.
      split: "train" or "val".
      class_names: (K,) strings, those of the training set in both splits.
      labels: (N,) int64, indices into `class_names`.
      layout: "class folders", "flat folder", "archive" or "prepared".
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


def _index(place: str) -> dict[str, Members]:
    """The images of a folder or an archive by class; "" stands for no class."""
    if os.path.isfile(place):
        return imagenet_archives.index_archive(place)
    folders = _subfolders(place)
    if not folders:
        return {"": Members(_images(place))}
    with ThreadPoolExecutor(_THREADS) as pool:
        names = pool.map(lambda folder: _images(os.path.join(place, folder)), folders)
        return dict(zip(folders, map(Members, names), strict=True))


def _check_classes(place: str, found: dict[str, Members]) -> None:
    """DataError where there is no class, an image outside of one, or a class without images."""
    if "" in found and found[""].names:
        raise DataError(f"{place}: holds {found[''].names[0]!r} outside of a class; {_EXPECTED}")
    empty = next((name for name in sorted(found) if not found[name].names), "")
    if empty or not any(found):
        where = f", class {empty}" if empty else ""
        raise DataError(f"{place}{where}: holds no {', '.join(SUFFIXES)} file; {_EXPECTED}")


def _class_names(place: str) -> list[str]:
    """The classes of the training set, without a look at its images."""
    list_names = imagenet_archives.class_names if os.path.isfile(place) else _subfolders
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


def _by_ground_truth(place: str, files: Members) -> dict[str, Members]:
    """Flat validation images sorted into their classes."""
    wnids = imagenet_archives.ground_truth(os.path.dirname(place))
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
        wnid: Members([files.names[i] for i in own], places[own]) for wnid, own in positions.items()
    }


def _subfolders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())


def _images(folder: str) -> list[str]:
    with os.scandir(folder) as entries:  # entries know their type, without a `stat` per file
        return sorted(entry.name for entry in entries if is_image(entry.name) and entry.is_file())


class _Files:
    """A storage of files in class folders, all in one folder, or in a tar file."""

    def __init__(self, place: str, split: str, class_names, found: dict[str, Members], flat: bool):
        self.class_names = tuple(class_names)
        members = [found.get(name, Members([])) for name in class_names]
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
