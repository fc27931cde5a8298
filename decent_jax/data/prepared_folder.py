"""Prepared folders: their manifests, and writers whose folders appear by a single rename."""

import contextlib
import glob
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, NamedTuple

import decent_jax
from decent_jax.data.reading import entries_of, objects_within, one_sentence
from decent_jax.ground.command_line import check_removable
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import Json, read_json, write_atomic

_LOCK = "owner.lock"
_PART_BYTES, _PARTS = 1 << 16, 1024  # the parts that `checksum` reads of large files
LISTED_FILES = 1000  # a manifest names at most this many inputs


class Kind(NamedTuple):
    """A kind of prepared folder."""

    command: str  # COMMAND of `decent-jax prepare COMMAND`, which writes such folders
    format: str  # the entry `format` of their manifests, with a version


def read_manifest(folder: str | Path, kind: Kind) -> Json:
    """The manifest of a prepared folder; DataError if it is missing or of another kind."""
    path = Path(folder) / "manifest.json"
    make = f"`decent-jax prepare {kind.command}`"
    try:
        manifest = read_json(path, "not readable as JSON; prepare the folder again")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder}: has no manifest.json, so it is not a prepared folder; make one with {make}"
        ) from None
    stored = manifest.get("format") if isinstance(manifest, dict) else None
    if stored != kind.format:
        raise DataError(
            f"{path}: the format is {stored!r}, expected {kind.format!r}; give a folder made by"
            f" {make} of this version"
        )
    return manifest


def is_whole(folder: str | Path, kind: Kind) -> bool:
    """Whether the folder is of this kind and its files have the hashes in its manifest."""
    try:
        entries = objects_within(read_manifest(folder, kind))
        files = [(x["file"], x["sha256"]) for x in entries if "file" in x and "sha256" in x]
        return all(sha256_file(Path(folder) / name) == sha256 for name, sha256 in files)
    except (DataError, OSError, TypeError):  # a damaged manifest may hold values of any type
        return False


def find_or_make(out: Path, find: Callable[[], Json | None], make: Callable[[bool], Json]) -> Json:
    """The manifest returned by `find` or, if that is None, by `make`.

    Several processes may call this at the same time: one folder wins, and all return its manifest.
    The argument of `make` is whether it may replace `out`. It may not if `out` did not exist
    before `find`, because another process is about to read a folder that has appeared since.
    """
    replaceable = out.exists()
    if (manifest := find()) is not None:
        return manifest
    try:
        return make(replaceable)
    except (DataError, OSError):  # possibly because another process was faster
        if (manifest := find()) is not None:
            return manifest
        raise


def check_out(out: Path, kind: Kind, *, overwrite: bool) -> None:
    """Raises DataError unless `out` is missing, empty, or a folder of this kind to be replaced."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise DataError(f"{out}: exists and is not a folder; choose another --out")
    if not any(out.iterdir()):
        return
    try:
        manifest = read_manifest(out, kind)
    except DataError:
        raise DataError(
            f"{out}: exists, is not empty and is not a prepared {kind.command} folder; choose"
            " another --out"
        ) from None
    if not overwrite:
        raise DataError(f"{out}: already prepared; pass --overwrite to replace it")
    with entries_of(out / "manifest.json", "is damaged; remove the folder"):
        ours = [re.escape(name) for name in ("manifest.json", _LOCK, *manifest["files"])]
    check_removable(out, re.compile("|".join(ours)), DataError)


class Draft:
    """A hidden sibling of `out`, `.NAME.tmp-...`, that `publish` renames to `out`.

    A file lock shows other processes that this one is alive. Creating a draft removes the drafts of
    killed runs, whose locks are free; leaving the `with` removes the draft itself, unless it was
    published.

    Args:
      out: the folder to create.
      kind: the folder's kind.
      overwrite: whether to replace a folder of this kind at `out`.

    Attributes:
      folder: the folder into which the files are written.

    Raises:
      DataError: `out` exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(self, out: str | Path, kind: Kind, *, overwrite: bool):
        self.out = Path(os.path.abspath(out))
        self.kind = kind
        self.overwrite = overwrite
        check_out(self.out, kind, overwrite=overwrite)
        self._files: dict[str, IO[bytes]] = {}
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.out)
            self.folder, self._lock = _make_locked(self.out)
        except OSError as error:
            raise DataError(f"{self.out.parent}: cannot be written ({error.strerror})") from None

    def append(self, name: str, data: bytes) -> None:
        """Appends bytes to the file of this name."""
        if name not in self._files:
            self._files[name] = open(self.folder / name, "wb")  # noqa: SIM115
        self._files[name].write(data)

    def close(self, name: str) -> Json:
        """Syncs a file to disk; returns its `file` (name), `bytes` and `sha256`."""
        self.append(name, b"")
        self._files[name].close()
        return recorded(self.folder / name)

    def publish(self, entries: Json, *packages: str) -> Json:
        """Adds `manifest.json` and renames the folder into place; returns the manifest.

        Args:
          entries: entries of the manifest besides its format, files and versions.
          packages: the packages whose versions the manifest records.

        Raises:
          DataError: a folder that may not be replaced has appeared at `out`.
        """
        for name, file in self._files.items():
            if not file.closed:
                self.close(name)
        files = sorted(path.name for path in self.folder.iterdir() if path.name != _LOCK)
        manifest = {
            "format": self.kind.format,
            **entries,
            "files": files,
            "versions": _versions(*packages),
        }
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        # a file name that is not UTF-8 is written with JSON's escapes
        write_atomic(self.folder / "manifest.json", text.encode(errors="backslashreplace"))
        self._move_into_place()
        # last, so that no other run mistakes the folder for a dead run's draft
        (self.out / _LOCK).unlink(missing_ok=True)
        self._lock.close()
        return manifest

    def _move_into_place(self) -> None:
        while True:
            check_out(self.out, self.kind, overwrite=self.overwrite)
            try:
                os.rename(self.folder, self.out)  # fails unless `out` is missing or an empty folder
                return
            except OSError:
                if not self.out.exists():
                    raise
            if not self.overwrite:  # another process was faster; the check reports it
                continue
            old = _sibling(self.out, "tmp")
            with contextlib.suppress(FileNotFoundError):  # another process is replacing it
                os.rename(self.out, old)
            shutil.rmtree(old, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        for file in (*self._files.values(), self._lock):
            with contextlib.suppress(OSError):  # a full disk: buffered data does not matter
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def sha256_file(path: str | Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recorded(path: Path) -> Json:
    """Syncs a file to disk; returns its `file` (name), `bytes` and `sha256`."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256}


def checksum(paths: Sequence[Path]) -> int:
    """A checksum of files: of all bytes up to 64 MiB in total, else of about 1,024 spread parts."""
    step = max(_PART_BYTES, sum(os.path.getsize(path) for path in paths) // _PARTS)
    sums = 0
    for path in paths:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for start in (*range(0, size, step), max(size - _PART_BYTES, 0)):
                file.seek(start)
                sums = zlib.crc32(file.read(_PART_BYTES), sums)
    return sums


def check_size(path: Path, wanted: int) -> None:
    """Raises DataError if a file of a prepared folder does not have the size in its manifest."""
    with one_sentence(path):
        size = path.stat().st_size
    if size != wanted:
        raise DataError(
            f"{path}: has {size} bytes, but {wanted} in its manifest; prepare the data again"
        )


def chosen(digest: bytes, share: float) -> bool:
    """Whether a record with this hash is in a pseudo-random `share` (0 to 1) of all records."""
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def _versions(*packages: str) -> dict[str, str]:
    own = {"decent_jax": decent_jax.__version__, "python": platform.python_version()}
    return own | {name: metadata.version(name) for name in packages}


def _remove_leftovers(out: Path) -> None:
    """Removes the drafts of `out` that dead runs left behind, including partly removed ones."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.tmp-{'[0-9a-f]' * 12}"):
        with contextlib.suppress(FileNotFoundError), open(folder / _LOCK, "r+b") as lock:
            if not _flock(lock):
                continue
        shutil.rmtree(folder, ignore_errors=True)


def _make_locked(out: Path) -> tuple[Path, IO[bytes]]:
    """A new draft and its lock, acquired before the draft gets its final hidden name."""
    hidden = _sibling(out, "new")
    hidden.mkdir()
    lock = open(hidden / _LOCK, "wb")  # noqa: SIM115
    _flock(lock)
    folder = _sibling(out, "tmp")
    os.rename(hidden, folder)
    return folder, lock


def _flock(file: IO[bytes]) -> bool:
    """Locks an open file; False if another process holds the lock, or locking is impossible."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sibling(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{kind}-{secrets.token_hex(6)}")
