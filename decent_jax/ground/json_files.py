"""Reads whole files, mostly JSON, with one sentence for each error, and writes them atomically."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from decent_jax.ground.errors import DataError

Json: TypeAlias = dict[str, Any]
"""A JSON object: its values are numbers, strings, booleans, lists and objects."""

MOST_BYTES = 1 << 28  # largest size of a file that is read whole, unless its reader sets another
_RECORD_BYTES = 512  # size of a file that `overwrite_json` writes


def check_regular(path: str | Path) -> None:
    """Raises OSError if the path is a pipe, a socket or a device, which may be endless.

    Missing paths and folders pass, because opening them fails anyway.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device", str(path))


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of a file; OSError if it is longer than ``most``, or as in `check_regular`."""
    if not str(path).startswith("/dev/"):  # where shells put the pipe of <(command)
        check_regular(path)
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def read_text(path: str | Path) -> str:
    """The text of a file; OSError as in `read_bytes`, ValueError if it is not UTF-8."""
    return read_bytes(path).decode()


def read_json(path: str | Path, otherwise: str = "not readable as JSON") -> Any:
    """The contents of a JSON file.

    Raises:
      FileNotFoundError, NotADirectoryError: there is no file; the caller decides what that means.
      DataError: the file cannot be read, or is not JSON; ``otherwise`` then ends the message.
    """
    try:
        return json.loads(read_bytes(path))  # UTF-8, with or without a byte order mark, or UTF-16
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # not text, not JSON, nested too deep
        raise DataError(f"{path}: {otherwise}") from None


def read_entries(path: str | Path) -> Json:
    """The entries of a JSON file by their dotted names: ``{"model.layers": 12, ...}``.

    Raises:
      FileNotFoundError, NotADirectoryError, DataError: as for `read_json`, or the file holds no
        object.
    """
    try:
        return flat(read_json(path))
    except (AttributeError, RecursionError):
        raise DataError(f"{path}: not a JSON object") from None


def read_format(path: str | Path, kind: str, form: str) -> Json:
    """The fields of a JSON file in one of the project's formats.

    Args:
      path: the file.
      kind: the noun for the file in messages.
      form: the required value of its field ``format``.

    Raises:
      ValueError: the file cannot be read, or has another format; the message names it.
    """
    try:
        fields = read_json(path)
    except OSError as error:
        raise ValueError(f"cannot read the {kind} {path}: {error.strerror or error}") from None
    if not isinstance(fields, dict) or fields.get("format") != form:
        raise ValueError(f'{path} is not a {kind}: it does not say "format": "{form}"')
    return fields


def is_whole(value: object, least: int = 0, most: int = 2**31 - 1) -> TypeGuard[int]:
    """Whether an entry of a file is an integer within these bounds."""
    return type(value) is int and least <= value <= most


def is_real(value: Any, least: float = -math.inf, below: float = math.inf) -> TypeGuard[float]:
    """Whether an entry of a file is a number within these bounds and not absurdly large."""
    return type(value) in (int, float) and least <= value < below and abs(value) < 1e300


def write_json_atomic(path: str | Path, obj: object) -> None:
    """Writes `obj` as readable JSON, atomically: readers see the old file or the complete new one.

    NumPy and JAX numbers, tuples and paths are accepted; non-finite numbers become strings, as in
    the metrics file.
    """
    text = json.dumps(plain(obj), indent=2, allow_nan=False) + "\n"
    write_atomic(Path(path), text.encode())


def plain(obj: Any) -> Any:
    """`obj` converted to the types that JSON has."""
    if isinstance(obj, dict):
        return {str(key): plain(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [plain(value) for value in obj]
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if hasattr(obj, "tolist"):  # a NumPy or JAX array or scalar
        return plain(np.asarray(obj).tolist())
    if isinstance(obj, float) and not math.isfinite(obj):
        return "NaN" if math.isnan(obj) else "Infinity" if obj > 0 else "-Infinity"
    return obj


def write_atomic(path: Path, data: bytes) -> None:
    """Writes `data` to a file next to `path`, syncs it to disk, and renames it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def overwrite_json(path: Path, entries: object) -> None:
    """Overwrites a small JSON file, without waiting for the disk; OSError if that fails.

    All versions are `_RECORD_BYTES` long, so a single system call replaces one with another:
    readers see a complete version, even after a kill.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.pwrite(file, json.dumps(entries).ljust(_RECORD_BYTES - 1).encode() + b"\n", 0)
    finally:
        os.close(file)


def flat(tree: Any, prefix: str = "") -> Json:
    """Nested dicts or ConfigDicts as a flat dict: ``{"model.layers": 12, ...}``."""
    result = {}
    for key, value in tree.items():
        if hasattr(value, "items"):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
