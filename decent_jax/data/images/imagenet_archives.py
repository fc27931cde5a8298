"""ImageNet's original archives, read without unpacking: images in tar files, and the devkit.

The headers of a tar file, and of tar files within it, give the index; an image is then some bytes
at an offset. On a shared file system a few archives are better than 1.3 million files.
"""

import contextlib
import io
import os
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decent_jax.data.reading import one_sentence, read_at_most
from decent_jax.ground.errors import DataError

DEVKIT = "ILSVRC2012_devkit_t12"
SUFFIXES = (".jpg", ".jpeg", ".png")

_BLOCK = 512
_LONGEST_NAME = 1 << 16  # bytes
_LARGEST_TABLE = 1 << 26  # bytes, of a file of the devkit; they have 2 MB
_THREADS = 16  # indexing waits for the disk most of the time
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_LONG_NAME = tarfile.GNUTYPE_LONGNAME
_EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)


class Members(NamedTuple):
    """The files of one class, sorted by name, and in an archive where they are."""

    names: list[str]
    places: np.ndarray = np.zeros((0, 2), np.int64)  # (files, 2): offset in the archive, bytes


def is_image(name: str) -> bool:
    """Whether a file of this name is an image, and not a hidden one."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def index_archive(path: str | Path, folders: tuple[str, ...]) -> dict[str, Members]:
    """The images in an archive, by class.

    Args:
      path: an uncompressed tar file with members `CLASS/NAME`, or `FOLDER/CLASS/NAME` with one of
        `folders`, or `CLASS.tar` which holds members `NAME`, or `NAME` alone, which then have the
        class `""`.
      folders: names of folders above the classes.

    Raises:
      DataError: the archive, or one within, is cut short or damaged.
    """
    found: dict[str, dict[str, tuple[int, int]]] = {}
    nested = []
    with one_sentence(path), open(path, "rb") as file:
        fd = file.fileno()
        for class_name, name, offset, size in _top_level(fd, path, folders):
            if name is None:
                nested.append((class_name, offset, size))
            else:
                found.setdefault(class_name, {})[name] = offset, size  # the last of a name counts

        def index_nested(archive):
            class_name, offset, size = archive
            walk = _walk(fd, offset, offset + size, f"{path}, {class_name}.tar")
            files = ((_parts(name)[-1], *place) for name, *place in walk)
            return class_name, _members({name: place for name, *place in files if is_image(name)})

        with ThreadPoolExecutor(_THREADS) as pool:
            return {name: _members(files) for name, files in found.items()} | dict(
                pool.map(index_nested, nested)
            )


def class_names(path: str | Path, folders: tuple[str, ...]) -> list[str]:
    """The sorted names of the classes in an archive; quick for a tar with one tar per class."""
    with one_sentence(path), open(path, "rb") as file:
        return sorted({member[0] for member in _top_level(file.fileno(), path, folders)})


def ground_truth(folder: str | Path) -> list[str]:
    """The wnid of every validation image of ImageNet, in the order of their file names.

    Args:
      folder: holds the devkit, packed or unpacked.

    Raises:
      DataError: it is missing, damaged, or names an id that it does not explain.
    """
    truth, truth_path = _devkit_file(folder, "ILSVRC2012_validation_ground_truth.txt")
    meta, meta_path = _devkit_file(folder, "meta.mat")
    wnids = _wnids(meta, meta_path)
    try:
        ids = [int(line) for line in truth.split()]
        return [wnids[number] for number in ids]
    except ValueError:
        raise DataError(
            f"{truth_path}: is not one number per line; fetch the devkit again"
        ) from None
    except KeyError as error:
        raise DataError(
            f"{truth_path}: names the class id {error}, which {meta_path} does not explain;"
            " fetch the devkit again"
        ) from None


def _top_level(fd: int, path, folders) -> Iterator[tuple[str, str | None, int, int]]:
    """(class, name, offset, size) of the members; of a nested archive the name is None."""
    for member, offset, size in _walk(fd, 0, os.fstat(fd).st_size, str(path)):
        *above, name = _parts(member)
        if len(above) == 2 and above[0] in folders:
            above = above[1:]
        if not above and name.endswith(".tar") and not name.startswith("."):
            yield name.removesuffix(".tar"), None, offset, size
        elif is_image(name):
            if len(above) > 1:
                raise DataError(
                    f"{path}: {member!r} lies too deep, expected CLASS/NAME; pack the archive anew"
                )
            yield (above[0] if above else ""), name, offset, size


def _parts(member: str) -> list[str]:
    return [part for part in member.split("/") if part not in ("", ".")] or [""]


def _members(files: dict) -> Members:
    names = sorted(files)
    places = np.array([files[name] for name in names], np.int64).reshape(-1, 2)
    return Members(names, places)


def _walk(fd: int, start: int, stop: int, where: str) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of the files of the tar file in bytes `start` to `stop` of `fd`.

    Python's tarfile accepts an archive that ends between two members; this refuses it.
    """
    offset, name = start, None
    while True:
        try:
            header = os.pread(fd, _BLOCK, offset) if offset + _BLOCK <= stop else b""
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.EOFHeaderError:  # type: ignore
            return
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError):  # type: ignore
            raise _cut_short(where, stop - start) from None
        except tarfile.HeaderError as error:
            raise DataError(
                f"{where}: no readable tar file at byte {offset - start} ({error}); fetch it again,"
                " and unpack it first if it is compressed"
            ) from None
        data = offset + _BLOCK
        offset = data + -(-info.size // _BLOCK) * _BLOCK
        if info.size < 0 or data + info.size > stop:
            raise _cut_short(where, stop - start)
        if info.type in (_LONG_NAME, *_EXTENDED) and info.size > _LONGEST_NAME:
            raise DataError(f"{where}: holds a name of {info.size} bytes; fetch it again")
        if info.type == _LONG_NAME:
            name = os.pread(fd, info.size, data).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif info.type in _EXTENDED:
            name = _pax_name(os.pread(fd, info.size, data), where) or name
        elif info.type in _FILES:
            yield name or info.name, data, info.size
            name = None
        elif info.type != tarfile.XGLTYPE:  # a folder, for instance, which had the long name
            name = None


def _cut_short(where: str, size: int) -> DataError:
    return DataError(f"{where}: the tar file is cut short at {size} bytes; fetch it again")


def _pax_name(records: bytes, where: str) -> str | None:
    """The path in a pax header, which is lines "LENGTH KEY=VALUE" (POSIX.1-2001).

    DataError where a line does not end where its length says, or gives the file another size.
    """
    path = None
    while records:
        digits = records[:20].partition(b" ")[0]
        length = int(digits) if re.fullmatch(rb"[0-9]{1,9}", digits) else 0
        record = records[:length]
        key, equals, value = record[len(digits) + 1 :].partition(b"=")
        whole = 0 < length == len(record) and equals and record.endswith(b"\n")
        if not whole or key == b"size":
            raise DataError(f"{where}: holds a damaged pax header; fetch it again")
        if key == b"path":
            path = value.removesuffix(b"\n").decode("utf-8", "surrogateescape")
        records = records[len(record) :]
    return path


def _devkit_file(folder, name: str) -> tuple[bytes, str]:
    """The content of a file of the devkit, and its name for messages."""
    unpacked = Path(folder) / DEVKIT / "data" / name
    packed = Path(folder) / f"{DEVKIT}.tar.gz"
    if unpacked.exists():
        with one_sentence(unpacked):
            return unpacked.read_bytes(), str(unpacked)
    if not packed.exists():
        raise DataError(
            f"{folder}: its validation images are not in class folders, so their classes are read"
            f" from ImageNet's development kit; put {DEVKIT}.tar.gz, or what it holds as"
            f" {DEVKIT}/, into {folder}"
        )
    with one_sentence(packed), tarfile.open(packed) as archive, contextlib.suppress(KeyError):
        if member := archive.extractfile(f"{DEVKIT}/data/{name}"):
            place = f"{packed}, {name}"
            return read_at_most(member, _LARGEST_TABLE, place), place
    raise DataError(f"{packed}: holds no file {DEVKIT}/data/{name}; fetch it again")


def _wnids(meta: bytes, where: str) -> dict[int, str]:
    """The wnid of each class id. Ids are not in the order of wnids; those above 1000 are groups."""
    import scipy.io

    try:
        synsets = np.atleast_1d(scipy.io.loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"])
        pairs = zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)
        return {int(number): str(wnid) for number, wnid in pairs}
    except Exception as error:  # of many kinds, for a damaged file
        raise DataError(
            f"{where}: holds no readable table of the classes ({error}); fetch the devkit again"
        ) from None
