"""Text files as streams of documents: .txt, .jsonl (both also compressed), .parquet.

`chunks`, in the reading process, cuts the inputs into chunks of about a megabyte; `documents`, in a
worker, turns a chunk into texts. Neither holds more than a few chunks in memory. The exception is
a .txt file: it is one document, which is held whole. JSON lines are parsed here, because pyarrow's
reader cannot name a bad line.
"""

import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from decent_jax.data.reading import (
    PACKED,
    counted,
    files_below,
    one_sentence,
    opened,
    read_at_most,
    read_line,
    short,
)
from decent_jax.ground import extras, machine
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import shorten, shown
from decent_jax.ground.json_files import check_regular

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 28  # bytes of a line, and thus of a document, in a .jsonl file
ROWS = 256  # rows per parquet chunk

_LINES = (".jsonl", ".ndjson", ".jsonlines")  # suffixes of the same format
_KINDS = {
    **{f".txt{packed}": "txt" for packed in PACKED},
    **{f"{name}{packed}": "jsonl" for name in _LINES for packed in PACKED},
    ".parquet": "parquet",
}
_NAMED = (".md", ".py", ".html", ".rst", ".tex")  # read as .txt, if the file itself is given
_READABLE = f".txt, .jsonl (also {', '.join(_LINES[1:])}; {', '.join(PACKED[1:])}) or .parquet"


@dataclasses.dataclass(frozen=True)
class DocumentSource:
    """One file of documents, with its size in bytes.

    `name` is the file's name in the manifest, which is the same on every machine.
    """

    path: Path
    kind: str  # "txt", "jsonl" or "parquet"
    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some documents of a source, or the single document of a .txt file.

    `data` is None (txt), bytes (jsonl) or strings (parquet); `row` is the number of the first line
    or row, `offset` is the position of the first byte, and `read` is the number of bytes that the
    progress bar counts.
    """

    source: DocumentSource
    data: Any
    read: int
    row: int = 0
    offset: int = 0


def find_sources(inputs: Iterable[Path]) -> tuple[list[DocumentSource], Counter[str]]:
    """The readable files under `inputs`, each file once, a folder's files in sorted order.

    Returns:
      The files, and for each kind the number of files in the folders that are not read.

    Raises:
      DataError: a path is missing, a suffix is unsupported, or a folder has no readable file.
    """
    by_path: dict[Path, DocumentSource] = {}
    left_out: Counter[str] = Counter()
    for place in inputs:
        if place.is_dir():
            own: Counter[str] = Counter()
            name = Path(os.path.abspath(place)).name
            sources = [
                _file(place / path, f"{name}/{path}", _KINDS[_suffix(path)])
                for path in files_below(place, _suffix, own)
            ]
            if not sources:
                there = f" (there are {counted(own)})" if own else ""
                raise DataError(
                    f"{place}: holds no {_READABLE} file{there}; for other kinds of text, name the"
                    f" files: {place}/*{_NAMED[0]}"
                )
            left_out += own
        elif place.exists():
            kind = _KINDS.get(_suffix(place.name))
            if kind is None and place.suffix.lower() not in _NAMED:
                raise DataError(f"{place}: not a {_READABLE} file, nor one of {', '.join(_NAMED)}")
            sources = [_file(place, place.name, kind or "txt")]
        else:
            raise DataError(f"{place}: no such file or folder")
        for source in sources:  # a file that is given twice is read once
            by_path.setdefault(source.path.resolve(), source)
    return list(by_path.values()), left_out


def check_sources(
    sources: list[DocumentSource], held_out: list[DocumentSource], field: str
) -> None:
    """Checks sources by reading the beginning of each.

    Raises:
      DataError: documents cannot be read, or a source is in both `sources` and `held_out`.
    """
    trained = {source.path.resolve() for source in sources}
    for source in held_out:
        if source.path.resolve() in trained:
            raise DataError(f"{source.path}: is both in the training and the validation input")
    for source in sources + held_out:
        if source.kind == "txt":
            with one_sentence(source.path), open(source.path, "rb"):
                continue
        for chunk in itertools.islice(chunks([source], field), 1):
            documents(chunk, field)


def chunks(sources: list[DocumentSource], field: str) -> Iterator[Chunk]:
    """The chunks of the sources, in order; `field` names the field that holds a record's text."""
    for source in sources:
        with one_sentence(source.path):
            yield from _CHUNKERS[source.kind](source, field)


def documents(chunk: Chunk, field: str) -> list[str]:
    """The texts of a chunk; a DataError names the file and the bad line, row or byte."""
    path = chunk.source.path
    with one_sentence(path):
        if chunk.source.kind == "txt":
            with opened(path) as (file, _):
                most = machine.memory_bytes() // 16  # held as bytes, text and tokens at once
                text = _decode(read_at_most(file, most, path), path, 0)
            return [text.removeprefix("\ufeff")]
        if chunk.source.kind == "jsonl":
            text = _decode(chunk.data, path, chunk.offset)
            lines = enumerate(text.split("\n"), chunk.row)
            return [_json_text(line, path, row, field) for row, line in lines if line.strip()]
        for row, text in enumerate(chunk.data, chunk.row):
            if text is None:
                raise DataError(f"{path}, row {row}: column {field!r} is null")
        return chunk.data


def _suffix(name: str) -> str:
    """The suffix that decides how a file is read, or "" if it is not read."""
    return next((suffix for suffix in _KINDS if name.lower().endswith(suffix)), "")


def _file(path: Path, name: str, kind: str) -> DocumentSource:
    with one_sentence(path):
        check_regular(path)
        return DocumentSource(path, kind, name, path.stat().st_size)


def _text_chunk(source: DocumentSource, field: str) -> Iterator[Chunk]:
    yield Chunk(source, None, source.size)


def _jsonl_chunks(source: DocumentSource, field: str) -> Iterator[Chunk]:
    row, offset, read = 1, 0, 0
    with opened(source.path) as (file, raw):
        while block := file.read(CHUNK_BYTES):
            line = row + block.count(b"\n")
            block += read_line(file, LONGEST_LINE, f"{source.path}, line {line}")
            yield Chunk(source, block, raw.tell() - read, row, offset)
            row += block.count(b"\n")
            offset += len(block)
            read = raw.tell()


def _parquet_chunks(source: DocumentSource, field: str) -> Iterator[Chunk]:
    extras.need("text", "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = read = 0
    try:
        with pq.ParquetFile(source.path) as file:
            _check_column(source.path, file.schema_arrow, field)
            for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
                end = source.size * (row + len(batch)) // file.metadata.num_rows
                yield Chunk(source, batch.column(0).to_pylist(), end - read, row)
                row, read = row + len(batch), end
    except UnicodeDecodeError:
        raise DataError(f"{source.path}: invalid UTF-8 after row {row}") from None
    except (pa.ArrowException, OSError) as error:
        place = f"{source.path}: cannot be read after row {row}"
        raise DataError(f"{place} ({short(error)})") from None


_CHUNKERS = {
    "txt": _text_chunk,
    "jsonl": _jsonl_chunks,
    "parquet": _parquet_chunks,
}


def _decode(data: bytes, path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: invalid UTF-8 at byte {offset + error.start}") from None


def _json_text(line: str, path: Path, row: int, field: str) -> str:
    try:
        record = json.loads(line.removeprefix("\ufeff"))  # each of several joined files has a mark
    except json.JSONDecodeError as error:
        why = f"{error.msg} at column {error.colno}"
        raise DataError(f"{path}, line {row}: not valid JSON ({why})") from None
    except (ValueError, RecursionError) as error:  # for instance a number of 5000 digits
        raise DataError(f"{path}, line {row}: not readable JSON ({short(error)})") from None
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {row}: not a JSON object")
    if field not in record:
        raise _lacks(f"{path}, line {row}", "field", field, record)
    if not isinstance(record[field], str):
        raise DataError(f"{path}, line {row}: field {field!r} is not a string")
    return record[field]


def _lacks(place: Path | str, kind: str, field: str, names: Iterable[str]) -> DataError:
    there = shorten(", ".join(map(repr, names)) or f"no {kind}", 100)
    return DataError(f"{place}: no {kind} {shown(field)}, only {there}; see --text_field")


def _check_column(path: Path, schema: Any, field: str) -> None:
    import pyarrow as pa

    if field not in schema.names:
        raise _lacks(path, "column", field, schema.names)
    if (count := schema.names.count(field)) > 1:
        raise DataError(f"{path}: has {count} columns {field!r}; rename all but one of them")
    kind = schema.field(field).type
    held = kind.value_type if pa.types.is_dictionary(kind) else kind
    if held not in (pa.string(), pa.large_string(), pa.string_view()):
        raise DataError(f"{path}: column {field!r} holds {kind}, not strings")
