"""Labelled images by index, each with bytes, label and name, in any of three layouts.

`open_images` recognizes the layout: class folders, a prepared folder or a TFDS folder.

Classes are numbered in the order of their names (code points). Images are sorted by class, then by
name. Class folders and a folder prepared from them therefore have the same record and label at each
index. TFDS stores records shuffled.
"""

import operator
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from decent_jax.data.images import array_records, jpeg, tfds_images
from decent_jax.data.reading import counted, files_below, kind_of, one_sentence
from decent_jax.ground.errors import DataError

SPLITS = array_records.SPLITS
_FORMATS = {"AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"}
_SUFFIXES = tuple(end for end, kind in Image.registered_extensions().items() if kind in _FORMATS)
_EXPECTED = "expected CLASS/NAME.jpg"
_FOLDERS = {"train": ("train",), "val": ("val", "validation")}
_TABLE = "val_annotations.txt"  # of Tiny ImageNet: a line has a file name, a tab, a class, a tab
_ENDS = {b"\xff\xd8\xff": b"\xff\xd9", b"\x89PN": b"IEND"}  # how a whole file begins and ends
_TAIL = 4096  # bytes at the end of a file, where stray ones may follow the picture
MOST_BAD = 0.1  # share of the images that may be broken
_TOGETHER = 1000  # files that a thread checks at a time
_THREADS = 16  # many, because listing folders waits for the disk, or for a file server


class EncodedImage(NamedTuple):
    """An image as it is stored, not decoded.

    `name` is SPLIT/CLASS/FILE in every layout, such as "train/n01440764/n01440764_10026.JPEG".
    """

    data: bytes
    label: int
    name: str


class Mirrored(EncodedImage):
    """An image that is to be mirrored once it is decoded."""


class ImageFiles:
    """The images of one split by index, a grain `RandomAccessDataSource`; see `open_images`.

    Any number of threads may read. Pickling keeps the index (about 50 bytes per image), not the
    images; each process opens files when it first reads from them.

    Attributes:
      path: the folder.
      split: "train" or "val".
      class_names: (K,) strings, the classes of the training set in both splits.
      labels: (N,) int64, indices into `class_names`.
      layout: "class folders", "prepared" or "TFDS".
      left_out: the number of files of each kind that are not read.
      fingerprint: a checksum of names, sizes, and the beginning and end of each picture; 0 if
        `whole_images` has not checked them.
    """

    fingerprint: int = 0

    def __init__(self, path: str, split: str, storage):
        self.path = path
        self.split = split
        self.class_names: tuple[str, ...] = storage.class_names
        self.labels: np.ndarray = storage.labels
        self.layout: str = storage.layout
        self.left_out: dict[str, int] = dict(storage.left_out)
        self._storage = storage

    def __len__(self) -> int:
        return len(self._storage)

    def __getitem__(self, index: int) -> EncodedImage:
        """An image; DataError if its file is missing or unreadable, or its shard is damaged."""
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
    """Opens the images of one split of a folder, in the first of these layouts that matches.

    * prepared: made by `decent-jax prepare images`.
    * TFDS: the version folder of a data set with features `image` and `label`, stored as
      array_record; "val" is its split `validation`, or else `test`.
    * class folders: `train/CLASS/*.jpg` and `val/CLASS/*.jpg` (or `validation/`). Classes may have
      subfolders. Files may have any suffix that Pillow decodes, in upper or lower case. The
      validation images of Tiny ImageNet get their classes from `val/val_annotations.txt`. Links are
      followed; hidden files and folders are skipped.

    Args:
      path: the folder.
      split: "train" or "val". The labels of "val" index the training classes.

    Raises:
      DataError: the folder is missing, has none of these layouts or is incomplete.
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


def whole_images(path: str | Path, split: str) -> ImageFiles:
    """Opens images like `open_images`, but leaves out broken pictures, as `prepare` does.

    It decodes only files that do not begin and end like a JPEG or PNG. It therefore finds files
    that are empty, truncated or of another type, but not all damage within an image. Only class
    folders are checked: prepared folders have no broken pictures.

    Raises:
      DataError: as for `open_images`, or more than a tenth of the pictures are broken.
    """
    images = open_images(path, split)
    if isinstance(images._storage, _Files):
        total, bad = len(images), images._storage.leave_out_broken()
        images.fingerprint = images._storage.fingerprint
        check_bad(list(bad.values()), total)
        if bad:
            kind = f"broken {split} pictures, the first {next(iter(bad.values()))}"
            images.left_out[kind] = len(bad)
            images.labels = images._storage.labels
    return images


def check_bad(bad: Sequence[str], total: int) -> None:
    """Raises DataError if ``bad``, names with reasons, lists more than a tenth of all images."""
    if len(bad) > MOST_BAD * total:
        raise DataError(
            f"at least {len(bad)} of {total} images are broken, more than a tenth "
            f"({'; '.join(bad[:3])}); fetch them again or remove them"
        )


def _storage(path: str, split: str):
    if os.path.exists(os.path.join(path, "manifest.json")):
        return array_records.PreparedImages(path, split)
    if tfds_images.is_tfds(path):
        return tfds_images.TfdsImages(path, split)
    places = {name: _place(path, name) for name in SPLITS}
    left_out: Counter[str] = Counter()
    table = os.path.join(places[split], _TABLE)
    by_class = _index(places[split], left_out)
    if has_table := os.path.isfile(table):
        by_class = _by_table(table, by_class, left_out)
    if split == "train":  # files next to the splits count once
        beside = set(os.listdir(path)).difference(map(os.path.basename, places.values()))
        left_out.update(
            f"folder {name}" if os.path.isdir(os.path.join(path, name)) else kind_of(name)
            for name in sorted(beside)
        )
    if not by_class:
        raise DataError(f"{places[split]}: holds no class; {_EXPECTED}{_instead(left_out)}")
    class_names = sorted(by_class) if split == "train" else _subfolders(places["train"])
    if len(class_names) == 1:
        raise DataError(
            f"{places['train']}: holds only one class, {class_names[0]}; {_EXPECTED} of several"
        )
    _check_known(places[split], sorted(by_class), class_names)
    return _Files(places[split], split, class_names, by_class, left_out, has_table)


def _place(path: str, split: str) -> str:
    """The folder of a split; DataError if there is none, or more than one."""
    names = _FOLDERS[split]
    folders = [name for name in names if os.path.isdir(os.path.join(path, name))]
    if len(folders) == 1:
        return os.path.join(path, folders[0])
    what = {"train": "training", "val": "validation"}[split]
    if folders:
        raise DataError(
            f"{path}: has two folders of {what} images, {', '.join(folders)}; remove one of them"
        )
    tried = " or ".join(f"{name}/CLASS/" for name in names)
    raise DataError(f"{path}: has no {what} images; put them into {tried}")


def _index(place: str, left_out: Counter[str]) -> dict[str, list[str]]:
    """{class: its pictures, sorted}; DataError if a class has no picture."""
    folders = _subfolders(place)

    def list_class(name: str) -> tuple[list[str], Counter[str]]:
        own: Counter[str] = Counter()
        return sorted(files_below(os.path.join(place, name), _is_image, own)), own

    with os.scandir(place) as entries:
        loose = [e.name for e in entries if e.name not in folders and e.name != _TABLE]
    left_out.update("picture outside of a class" if _is_image(n) else kind_of(n) for n in loose)
    by_folder = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, (files, own) in zip(folders, pool.map(list_class, folders), strict=True):
            if not files:
                raise DataError(
                    f"{place}, class {name}: holds no picture; {_EXPECTED}{_instead(own)}"
                )
            by_folder[name] = files
            left_out.update(own)
    return by_folder


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def _instead(left_out: Counter[str]) -> str:
    return f" (there are {counted(left_out)})" if left_out else ""


def _subfolders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())


def _by_table(
    table: str, by_folder: dict[str, list[str]], left_out: Counter[str]
) -> dict[str, list[str]]:
    """{class: its pictures, as FOLDER/NAME} by a table, from {folder: its pictures}."""
    with one_sentence(table), open(table, encoding="utf-8", errors="surrogateescape") as file:
        rows = [line.rstrip("\n").split("\t") for line in file if line.strip()]
    if wrong := next((number for number, row in enumerate(rows, 1) if len(row) < 2), 0):
        raise DataError(f"{table}, line {wrong}: expected a picture's name, a tab and its class")
    classes = {row[0]: row[1] for row in rows}
    by_class: dict[str, list[str]] = {}
    for folder, names in by_folder.items():
        for name in names:
            if own := classes.pop(os.path.basename(name), ""):
                by_class.setdefault(own, []).append(f"{folder}/{name}")
            else:
                left_out[f"picture that {_TABLE} does not list"] += 1
    if classes:
        raise DataError(
            f"{table}: lists {len(classes)} pictures that are not there, such as"
            f" {min(classes)}; fetch them again"
        )
    return by_class


def _check_known(place: str, folders: list[str], class_names: list[str]) -> None:
    known = set(class_names)
    if unknown := [name for name in folders if name not in known]:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        classes = "1 class" if len(unknown) == 1 else f"{len(unknown)} classes"
        raise DataError(
            f"{place}: holds {classes} that the training images do not have:"
            f" {', '.join(unknown[:3])}{more}; remove them or add training images"
        )


class _Files:
    """A storage for `ImageFiles`: class folders, or files with the classes of a table."""

    layout = "class folders"

    def __init__(self, place: str, split: str, class_names, members_of, left_out, table: bool):
        self.class_names, self.left_out = tuple(class_names), left_out
        members = [members_of.get(name, []) for name in class_names]
        self.labels = np.repeat(np.arange(len(members)), list(map(len, members)))
        self._place, self._split, self._table = place, split, table
        # as Python strings, the names of ImageNet would take 100 MB
        self._names = np.array([os.fsencode(name) for own in members for name in own], np.bytes_)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """(data, label, name) of an image."""
        label, path, name = self._find(index)
        with one_sentence(path), open(path, "rb", buffering=0) as file:
            return file.read(), label, name

    def leave_out_broken(self) -> dict[int, str]:
        """Leaves out broken pictures from now on; returns {old index: name and reason}.

        It also computes the `ImageFiles.fingerprint`.
        """

        def among(start: int) -> tuple[dict[int, str], int]:
            bad, sums = {}, 0
            for index in range(start, min(start + _TOGETHER, len(self))):
                looks_whole, sums = self._look(index, sums)
                if looks_whole:
                    continue
                data, _, name = self.read(index)
                try:
                    jpeg.decode(data)
                except ValueError as error:
                    bad[index] = f"{name} {error}"
            return bad, sums

        with ThreadPoolExecutor(_THREADS) as pool:
            looks = list(pool.map(among, range(0, len(self), _TOGETHER)))
        self.fingerprint = zlib.crc32(repr([sums for _, sums in looks]).encode())
        bad = {index: why for some, _ in looks for index, why in some.items()}
        if bad:
            whole = np.delete(np.arange(len(self)), list(bad))
            self.labels, self._names = self.labels[whole], self._names[whole]
        return bad

    def _look(self, index: int, sums: int) -> tuple[bool, int]:
        """Whether a picture begins and ends like a whole one, and the checksum that includes it."""
        _, path, name = self._find(index)
        with one_sentence(path), open(path, "rb", buffering=0) as file:
            begin, size = file.read(3), os.fstat(file.fileno()).st_size
            file.seek(max(size - _TAIL, 0))
            tail = file.read()
        about = os.fsencode(f"{name} {size} ") + begin + tail
        return begin in _ENDS and _ENDS[begin] in tail, zlib.crc32(about, sums)

    def _find(self, index: int) -> tuple[int, str, str]:
        """(label, path, name) of an image."""
        label, name = int(self.labels[index]), os.fsdecode(self._names[index])
        class_name = self.class_names[label]
        path = os.path.join(self._place, "" if self._table else class_name, name)
        return label, path, f"{self._split}/{class_name}/{name}"
