"""Writing a prepared folder so that it appears by one rename: whole, or not at all."""

import contextlib
import glob
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from decent_jax.errors import DataError

_LOCK = "owner.lock"
_YOUNG_S = 60.0  # a draft this young may not have its lock yet


class Draft:
    """A hidden sibling ``.NAME.tmp-...`` of ``out`` that becomes ``out`` by ``publish``.

    A file lock says that its process lives; drafts of killed runs, whose locks are free, are
    removed on the way in. Leaving the ``with`` removes a draft that was not published.

    Args:
      out: the folder to be.
      kind: what it is to be: "prepared folder".
      read_manifest: raises DataError where a folder is not of this kind.
      overwrite: replace a folder of this kind at ``out``.

    Attributes:
      folder: where the files are written.

    Raises:
      DataError: ``out`` exists and may not be replaced, or its parent cannot be written.
    """

    def __init__(
        self,
        out: str | Path,
        kind: str,
        read_manifest: Callable[[Path], object],
        *,
        overwrite: bool,
    ):
        self.out = Path(os.path.abspath(out))
        self.overwrite = overwrite
        check_out(self.out, kind, read_manifest, overwrite=overwrite)
        self._files: dict[str, _HashedFile] = {}
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.out)
            self.folder = _temporary_sibling(self.out)
        except OSError as error:
            raise DataError(f"{self.out.parent}: cannot be written ({error.strerror})") from None
        try:
            self._lock = _make_locked(self.folder / _LOCK)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def append(self, name: str, data: bytes) -> None:
        """Appends to a file."""
        if name not in self._files:
            self._files[name] = _HashedFile(self.folder / name)
        self._files[name].append(data)

    def close(self, name: str) -> dict:
        """Puts a file on the disk; its ``file`` (name), ``bytes`` and ``sha256``."""
        if name not in self._files:
            self.append(name, b"")
        return self._files[name].close()

    def publish(self, manifest: dict) -> None:
        """Adds ``manifest.json`` and renames the folder into place.

        Raises:
          FileExistsError: somebody else's folder appeared at ``out`` and ``overwrite`` is False.
        """
        content = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        self.append("manifest.json", content.encode())
        for file in self._files.values():
            file.close()
        (self.folder / _LOCK).unlink()
        self._rename()
        self._lock.close()

    def _rename(self):
        while True:
            try:
                os.rename(self.folder, self.out)  # only onto nothing or an empty folder
                return
            except OSError:
                if not self.out.exists():
                    raise
                if not self.overwrite:
                    raise FileExistsError(f"{self.out} already exists") from None
            old = _temporary_sibling(self.out)
            with contextlib.suppress(FileNotFoundError):  # another process replaces it right now
                os.rename(self.out, old)
            shutil.rmtree(old, ignore_errors=True)

    def __enter__(self) -> "Draft":
        return self

    def __exit__(self, *exc_info) -> None:
        for file in (*self._files.values(), self._lock):
            with contextlib.suppress(OSError):  # a full disk: what is buffered does not matter
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def check_out(
    out: Path, kind: str, read_manifest: Callable[[Path], object], *, overwrite: bool
) -> None:
    """DataError unless ``out`` is free, an empty folder, or of this kind and to overwrite."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise DataError(f"{out}: exists and is not a folder; choose another --out")
    if not any(out.iterdir()):
        return
    try:
        read_manifest(out)
    except DataError:
        raise DataError(
            f"{out}: exists, is not empty and is no {kind}; choose another --out"
        ) from None
    if not overwrite:
        raise DataError(f"{out}: already prepared; pass --overwrite to replace it")


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _HashedFile:
    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115
        self._hash = hashlib.sha256()
        self._bytes = 0

    def append(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def close(self) -> dict:
        if not self._file.closed:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
        return {"file": self._path.name, "bytes": self._bytes, "sha256": self._hash.hexdigest()}


def _remove_leftovers(out: Path) -> None:
    """Removes the drafts of ``out`` whose runs are dead."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.tmp-*"):
        dead = False
        try:
            with open(folder / _LOCK, "r+b") as lock:
                dead = _flock(lock)
        except OSError:  # no lock: just being made, just being renamed, or half removed
            with contextlib.suppress(OSError):
                dead = time.time() - folder.stat().st_mtime > _YOUNG_S
        if dead:
            shutil.rmtree(folder, ignore_errors=True)


def _make_locked(path: Path):
    """A new file that is locked before it appears at ``path``, so that none finds it free."""
    hidden = path.with_name(f"{path.name}.new")
    file = open(hidden, "wb")  # noqa: SIM115
    _flock(file)
    os.rename(hidden, path)
    return file


def _flock(file) -> bool:
    """Takes the lock of an open file; False where another process holds it."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks: then nothing is ever called dead
        return False
    return True


def _temporary_sibling(out: Path) -> Path:
    folder = out.with_name(f".{out.name}.tmp-{secrets.token_hex(6)}")
    folder.mkdir()
    return folder
