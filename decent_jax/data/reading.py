"""Reads files as bytes, and reports every failure in one sentence."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from decent_jax.ground import extras
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import format_bytes
from decent_jax.ground.json_files import Json


def as_paths(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """One path or several as a list."""
    return [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]


def files_below(
    folder: str | Path, reads: Callable[[str], object], left_out: Counter[str]
) -> Iterator[str]:
    """The files in a folder and its subfolders whose names ``reads`` accepts.

    Links are followed, and each real folder is read once. Other files are counted in ``left_out``,
    by `kind_of`.

    Returns:
      Paths within the folder; each folder's files are sorted by name.

    Raises:
      DataError: a folder cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})")

    seen = {os.path.realpath(folder)}
    for here, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        hidden = [name for name in folders if name.startswith(".")]
        below = {}
        for name in sorted(set(folders).difference(hidden)):
            if (real := os.path.realpath(os.path.join(here, name))) not in seen:
                seen.add(real)
                below[name] = real
        folders[:] = below
        left_out.update({"hidden": len(hidden)} if hidden else {})
        for name in sorted(files):
            path = os.path.join(here, name)
            if name.startswith(".") or not reads(name) or not os.path.isfile(path):
                left_out[kind_of(name)] += 1
            else:
                yield os.path.relpath(path, folder)


def kind_of(name: str) -> str:
    """The kind under which an unread file is counted, usually its suffix.

    >>> [kind_of(name) for name in ("a.CSV", "b.c.json.bz2", "README", ".DS_Store")]
    ['.csv', '.json.bz2', 'without a suffix', 'hidden']
    """
    if name.startswith("."):
        return "hidden"
    root, suffix = os.path.splitext(name.lower())
    if suffix in (".br", ".bz2", ".gz", ".lz4", ".xz", ".zip", ".zst"):
        suffix = os.path.splitext(root)[1] + suffix
    return suffix or "without a suffix"


def counted(left_out: dict[str, int]) -> str:
    """The counts of kinds as text, the largest first; at most 20 kinds are named.

    >>> counted({".csv": 1, ".bz2": 3})
    '3 .bz2, 1 .csv'
    """
    kinds = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(kinds) - 20} other kinds" if len(kinds) > 20 else ""
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds[:20]) + more


@contextlib.contextmanager
def one_sentence(place: str | Path) -> Iterator[None]:
    """A context that turns errors of reading a file into a DataError that names `place`."""
    try:
        yield
    except EOFError:
        raise DataError(
            f"{place}: the compressed file is cut short; fetch or compress it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{place}: not a valid compressed file ({error})") from None
    except OSError as error:
        where = error.filename or place
        raise DataError(f"{where}: cannot be read ({error.strerror or error})") from None


@contextlib.contextmanager
def entries_of(path: str | Path, otherwise: str) -> Iterator[None]:
    """A context that raises DataError(`otherwise`) if an entry of a JSON file is missing or bad."""
    try:
        yield
    except DataError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, MemoryError):
        raise DataError(f"{path}: {otherwise}") from None


def objects_within(tree: object) -> Iterator[Json]:
    """The objects within the content of a JSON file, the outermost first."""
    if isinstance(tree, dict):
        yield tree
        tree = list(tree.values())
    for inner in tree if isinstance(tree, list) else ():
        yield from objects_within(inner)


PACKED = ("", ".gz", ".bz2", ".xz", ".zst")  # last suffixes of files that `opened` can read


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """`with opened(path) as (file, raw)`: the decompressed content, and the file itself.

    The suffix determines the compression; .zst needs pyarrow, from the extra ``text``.
    """
    with open(path, "rb") as raw:
        if (open_packed := _OPEN.get(path.suffix.lower())) is None:
            yield raw, raw
            return
        with open_packed(raw) as file:
            yield file, raw


def _open_zst(raw: IO[bytes]) -> io.BufferedReader:
    extras.need("text", "pyarrow")
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))


_OPEN: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


def read_at_most(file: IO[bytes], most: int, place: str | Path) -> bytes:
    """The remaining bytes of a file; DataError if there are more than `most`.

    The limit matters because a small compressed file may decompress to more than fits into memory.

    >>> import io
    >>> read_at_most(io.BytesIO(b"four"), 4, "text.gz")
    b'four'
    """
    parts, left = [], most
    while part := file.read(1 << 20):
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise DataError(f"{place}: unpacks to more than {format_bytes(most)}; split it")
    return b"".join(parts)


def read_line(file: IO[bytes], most: int, place: str) -> bytes:
    """The next line with its line end, b"" after the last; DataError if it exceeds `most` bytes."""
    line = file.readline(most + 1)
    if len(line) > most:
        raise DataError(f"{place}: is longer than {format_bytes(most)}; split it or remove it")
    return line


def short(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters, or the error's type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
