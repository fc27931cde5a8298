"""Text files as streams of documents: .txt, .jsonl (both also .gz), .parquet, TFDS folders.

The reading process cuts its inputs into chunks of about a megabyte (:func:`chunks`), a worker
turns a chunk into documents (:func:`documents`); neither holds more than a few chunks. Only a
.txt file, which is one document, is held whole.
"""

import collections
import dataclasses
import functools
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from decent_jax.errors import DataError

CHUNK_BYTES = 1 << 20
ROWS = 256  # of a parquet or TFDS chunk

_KINDS = {
    ".txt": "txt",
    ".txt.gz": "txt",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
}
_READABLE = ".txt, .txt.gz, .jsonl, .jsonl.gz or .parquet"


@dataclasses.dataclass(frozen=True)
class Source:
    """One file, or one split of a prepared TFDS folder.

    ``name`` is what the manifest calls it: no machine's path, the same wherever the data lies.
    """

    path: Path
    kind: str  # "txt", "jsonl", "parquet" or "tfds"
    name: str
    size: int
    split: str = ""  # of a TFDS folder


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of work: some documents, or with kind "hash" files to hash.

    ``data`` is a list of sources (txt, hash), bytes (jsonl), strings (parquet) or a range (tfds);
    ``row`` is the first line or record, ``offset`` the first byte, ``read`` the bytes of progress.
    """

    kind: str
    source: Source
    data: Any
    read: int
    row: int = 0
    offset: int = 0


def find_sources(inputs, *, validation: bool = False) -> list[Source]:
    """The readable files under ``inputs``, folders in sorted order, each file once.

    Of a TFDS folder the split is ``train``; with ``validation`` the first there is of
    ``validation``, ``test`` and ``train``. Hidden files and folders are passed over.

    Raises:
      DataError: a missing path, a file of another kind, or a folder without a readable file.
    """
    found: dict[tuple, Source] = {}
    for given in map(Path, inputs):
        if given.is_dir():
            sources = list(_walk(given, validation))
            if not sources:
                raise DataError(f"{given}: holds no {_READABLE} file and no prepared TFDS folder")
        elif given.exists():
            if _kind(given) is None:
                raise DataError(f"{given}: not a {_READABLE} file")
            sources = [_file(given, given.name)]
        else:
            raise DataError(f"{given}: no such file or folder")
        for source in sources:
            found.setdefault((source.path.resolve(), source.split), source)
    return list(found.values())


def check_source(source: Source, field: str) -> None:
    """Reads the beginning of a source; DataError where its documents cannot be had."""
    with one_sentence(source.path):
        if source.kind == "txt":
            with open(source.path, "rb"):
                pass
        elif source.kind == "tfds":
            count = len(_tfds(source.path, source.split, field))
            documents(Chunk("tfds", source, range(min(count, 1)), 0), field)
        elif source.kind == "parquet":
            with _parquet(source.path, field):
                pass
        else:
            with _open(source.path) as (file, _):
                line = file.readline()
            documents(Chunk("jsonl", source, line, 0, row=1), field)


def chunks(sources: list[Source], field: str) -> Iterator[Chunk]:
    """The work in order: the documents of the sources, and after each its hash."""
    group: list[Source] = []
    for source in sources:
        if source.kind == "txt":
            group.append(source)
            if len(group) < ROWS and sum(s.size for s in group) < CHUNK_BYTES:
                continue
            yield from _text_chunks(group)
            group = []
        else:
            yield from _text_chunks(group)
            group = []
            with one_sentence(source.path):
                yield from _CHUNKERS[source.kind](source, field)
            yield Chunk("hash", source, [source], 0)
    yield from _text_chunks(group)


def documents(chunk: Chunk, field: str) -> list[str]:
    """The texts of a chunk; DataError says which file and line, record or byte is bad."""
    path = chunk.source.path
    with one_sentence(path):
        if chunk.kind == "txt":
            return [_read_text(source.path) for source in chunk.data]
        if chunk.kind == "jsonl":
            text = _decode(chunk.data, path, chunk.offset).removeprefix("\ufeff")
            lines = enumerate(text.split("\n"), chunk.row)
            return [_json_text(line, path, row, field) for row, line in lines if line.strip()]
        if chunk.kind == "parquet":
            for row, text in enumerate(chunk.data, chunk.row):
                if text is None:
                    raise DataError(f"{path}, row {row}: column {field!r} is null")
            return chunk.data
        records = _tfds_records(chunk, field)
        return [
            _decode(record[field], f"{path}, record {i}", 0)
            for i, record in zip(chunk.data, records, strict=True)
        ]


def document_sources(chunk: Chunk) -> Iterable[Source]:
    """The source of each document of a chunk, in order; it may go on beyond the last."""
    return chunk.data if chunk.kind == "txt" else itertools.repeat(chunk.source)


def distinct_names(sources: list[Source]) -> dict[Source, str]:
    """The names of sources; the second of the same name is called "NAME (2)"."""
    count = collections.Counter()
    names = {}
    for source in sources:
        count[source.name] += 1
        repeated = f" ({count[source.name]})" if count[source.name] > 1 else ""
        names[source] = source.name + repeated
    return names


def hashed_files(source: Source) -> list[tuple[str, Path]]:
    """(name in the manifest, path) of the files a source consists of."""
    if source.kind != "tfds":
        return [(source.name, source.path)]
    files = [*sorted(source.path.glob(f"*-{source.split}.*")), source.path / "features.json"]
    return [(f"{source.name}/{file.name}", file) for file in files]


def _walk(folder: Path, validation: bool) -> Iterator[Source]:
    name = Path(os.path.abspath(folder)).name

    def fail(error: OSError):
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})")

    for here, folders, files in os.walk(folder, onerror=fail):
        here = Path(here)
        relative = Path(name) / here.relative_to(folder)
        if "dataset_info.json" in files and "features.json" in files:
            folders.clear()
            yield _tfds_source(here, str(relative), validation)
            continue
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for file in sorted(files):
            path = here / file
            if not file.startswith(".") and _kind(path) and path.is_file():
                yield _file(path, str(relative / file))


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for suffix, kind in _KINDS.items() if name.endswith(suffix)), None)


def _file(path: Path, name: str) -> Source:
    return Source(path, _kind(path), name, path.stat().st_size)


def _tfds_source(folder: Path, name: str, validation: bool) -> Source:
    import tensorflow_datasets as tfds

    try:
        splits = tfds.builder_from_directory(folder).info.splits
    except Exception as error:
        raise DataError(f"{folder}: not a readable TFDS folder ({_short(error)})") from None
    wanted = ("validation", "test", "train") if validation else ("train",)
    split = next((split for split in wanted if split in splits), None)
    if split is None:
        raise DataError(f"{folder}: has no split {wanted[0]!r}, only {', '.join(splits) or 'none'}")
    size = sum(file.stat().st_size for file in folder.glob(f"*-{split}.*"))
    return Source(folder, "tfds", name, size, split)


def _text_chunks(group: list[Source]) -> Iterator[Chunk]:
    if group:
        yield Chunk("txt", group[0], group, sum(source.size for source in group))
        yield Chunk("hash", group[0], group, 0)


def _jsonl_chunks(source: Source, field: str) -> Iterator[Chunk]:
    row, offset, read = 1, 0, 0
    with _open(source.path) as (file, raw):
        while block := file.read(CHUNK_BYTES):
            block += file.readline()
            yield Chunk("jsonl", source, block, raw.tell() - read, row, offset)
            row += block.count(b"\n")
            offset += len(block)
            read = raw.tell()


def _parquet_chunks(source: Source, field: str) -> Iterator[Chunk]:
    import pyarrow as pa

    row = 0
    try:
        with _parquet(source.path, field) as file:
            total = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
                read = source.size * (row + len(batch)) // total - source.size * row // total
                yield Chunk("parquet", source, batch.column(0).to_pylist(), read, row)
                row += len(batch)
    except UnicodeDecodeError:
        raise DataError(f"{source.path}: invalid UTF-8 after row {row}") from None
    except pa.ArrowException as error:
        raise DataError(f"{source.path}: damaged after row {row} ({_short(error)})") from None


def _tfds_chunks(source: Source, field: str) -> Iterator[Chunk]:
    total = len(_tfds(source.path, source.split, field))
    for row in range(0, total, ROWS):
        stop = min(row + ROWS, total)
        read = source.size * stop // total - source.size * row // total
        yield Chunk("tfds", source, range(row, stop), read, row)


_CHUNKERS = {"jsonl": _jsonl_chunks, "parquet": _parquet_chunks, "tfds": _tfds_chunks}


class _open:
    """``with _open(path) as (file, raw)``: the bytes, unpacked where it is a .gz, and the file."""

    def __init__(self, path: Path):
        self._raw = open(path, "rb")  # noqa: SIM115
        packed = path.name.lower().endswith(".gz")
        self._file = gzip.GzipFile(fileobj=self._raw) if packed else self._raw

    def __enter__(self):
        return self._file, self._raw

    def __exit__(self, *exc_info):
        self._file.close()
        self._raw.close()


class one_sentence:
    """``with one_sentence(path):`` turns what reading can raise into a DataError naming it."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        path = self._path
        if isinstance(error, EOFError):
            raise DataError(f"{path}: truncated gzip file; fetch or compress it again") from None
        if isinstance(error, gzip.BadGzipFile | zlib.error):
            raise DataError(f"{path}: not a valid gzip file ({error})") from None
        if isinstance(error, OSError):
            where = error.filename or path
            raise DataError(f"{where}: cannot be read ({error.strerror or error})") from None
        return False


def _read_text(path: Path) -> str:
    with one_sentence(path), _open(path) as (file, _):
        return _decode(file.read(), path, 0).removeprefix("\ufeff")


def _decode(data: bytes, path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: invalid UTF-8 at byte {offset + error.start}") from None


def _json_text(line: str, path: Path, row: int, field: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at column {error.colno}"
        raise DataError(f"{path}, line {row}: not valid JSON ({why})") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, say
        raise DataError(f"{path}, line {row}: not readable JSON ({_short(error)})") from None
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {row}: not a JSON object")
    if field not in record:
        names = ", ".join(map(repr, record)) or "no field"
        raise DataError(f"{path}, line {row}: no field {field!r}, only {names}; see --text_field")
    if not isinstance(record[field], str):
        raise DataError(f"{path}, line {row}: field {field!r} is not a string")
    return record[field]


def _parquet(path: Path, field: str):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file ({_short(error)})") from None
    schema = file.schema_arrow
    if field not in schema.names:
        file.close()
        names = ", ".join(map(repr, schema.names))
        raise DataError(f"{path}: no column {field!r}, only {names}; see --text_field")
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        file.close()
        raise DataError(f"{path}: column {field!r} holds {kind}, not strings")
    return file


@functools.lru_cache(maxsize=4)
def _tfds(folder: Path, split: str, field: str):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(folder)
    features = builder.info.features
    if field not in features:
        names = ", ".join(map(repr, features))
        raise DataError(f"{folder}: no feature {field!r}, only {names}; see --text_field")
    if not isinstance(features[field], tfds.features.Text):
        raise DataError(f"{folder}: feature {field!r} is not text")
    try:
        return builder.as_data_source(split=split)
    except NotImplementedError:
        raise DataError(
            f"{folder}: stored as {builder.info.file_format.value}; only array_record is read"
            " without TensorFlow: prepare it again with file_format='array_record'"
        ) from None


def _tfds_records(chunk: Chunk, field: str) -> list[dict]:
    records = _tfds(chunk.source.path, chunk.source.split, field)
    try:
        return records.__getitems__(list(chunk.data))
    except Exception as error:  # array_record's own kinds
        where = f"records {chunk.data.start} to {chunk.data.stop - 1}"
        raise DataError(f"{chunk.source.path}: cannot read {where} ({_short(error)})") from None


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
