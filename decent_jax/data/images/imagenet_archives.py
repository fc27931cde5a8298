"""ImageNet's original archives, read without unpacking: images in tar files, and the devkit.

The headers of a tar file, and of tar files within it, give the index; an image is then some bytes
at an offset. On a shared file system a few archives are better than 1.3 million files.
"""

import contextlib
import io
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decent_jax.data.reading import one_sentence, read_at_most, short
from decent_jax.ground.errors import DataError

DEVKIT = "ILSVRC2012_devkit_t12"
SUFFIXES = (".jpg", ".jpeg", ".png")

_LONGEST_NAME = 1 << 16  # bytes
_LARGEST_TABLE = 1 << 26  # bytes, of a file of the devkit; they have 2 MB
_THREADS = 16  # indexing waits for the disk most of the time


class Members(NamedTuple):
    """The files of one class, sorted by name, and in an archive where they are."""

    names: list[str]
    places: np.ndarray = np.zeros((0, 2), np.int64)  # (files, 2): offset in the archive, bytes


def is_image(name: str) -> bool:
    """Whether a file of this name is an image, and not a hidden one."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def index_archive(path: str | Path) -> dict[str, Members]:
    """The images in one of ImageNet's archives, by class.

    That of the training images holds a tar file for each class. The validation images have no
    classes, and come under `""`.

    Raises:
      DataError: the archive, or one within, is cut short or damaged.
    """
    nested = _nested(path)
    if not nested:
        return {"": _images_in(path, 0, os.path.getsize(path), str(path))}

    def index(name: str) -> Members:
        return _images_in(path, *nested[name], f"{path}, {name}.tar")

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(nested, pool.map(index, nested), strict=True))


def class_names(path: str | Path) -> list[str]:
    """The sorted names of the classes in the archive of the training images."""
    return sorted(_nested(path))


def ground_truth(folder: str | Path) -> list[str]:
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
            f"{folder}: {DEVKIT} does not say the class of each validation image"
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


def _images_in(path: str | Path, start: int, stop: int, where: str) -> Members:
    """The images of a tar file; the last of a name counts."""
    found = {}
    for info in _files(path, start, stop, where):
        name = info.name.rpartition("/")[2]
        if is_image(name):
            found[name] = info.offset_data, info.size
    names = sorted(found)
    return Members(names, np.array([found[name] for name in names], np.int64).reshape(-1, 2))


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
    unpacked = Path(folder) / DEVKIT / "data" / name
    packed = Path(folder) / f"{DEVKIT}.tar.gz"
    if unpacked.exists():
        with one_sentence(unpacked):
            return unpacked.read_bytes()
    if not packed.exists():
        raise DataError(
            f"{folder}: its validation images are not in class folders, so their classes are read"
            f" from ImageNet's development kit; put {DEVKIT}.tar.gz, or what it holds as"
            f" {DEVKIT}/, into {folder}"
        )
    with one_sentence(packed), tarfile.open(packed) as archive, contextlib.suppress(KeyError):
        if member := archive.extractfile(f"{DEVKIT}/data/{name}"):
            return read_at_most(member, _LARGEST_TABLE, f"{packed}, {name}")
    raise DataError(f"{packed}: holds no file {DEVKIT}/data/{name}; fetch it again")
