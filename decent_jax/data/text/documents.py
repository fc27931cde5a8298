"""Text files as streams of documents: .txt, .jsonl (both also .gz), .parquet, .arrow, TFDS folders.

A folder that Hugging Face's ``datasets`` saved (``save_to_disk``) is one of .arrow files.

`chunks`, in the reading process, cuts the inputs into pieces of about a megabyte; `documents`, in a
worker, turns a piece into texts. Neither holds more than a few pieces. Only a .txt file, which is
one document, is held whole. JSON lines are read by hand: pyarrow's reader cannot name a wrong line.
"""

import collections
import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from decent_jax.data import tfds_folder
from decent_jax.data.reading import entries_of, one_sentence, opened, read_at_most, read_line, short
from decent_jax.ground import extras, machine
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import shorten, shown
from decent_jax.ground.json_files import check_regular, read_json

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 28  # bytes: of a document in a .jsonl file
ROWS = 256  # of a parquet or TFDS chunk
_COPIES = 4  # of a chunk: with its dictionary, as a list, encoded, and on its way to a worker

_KINDS = {
    ".txt": "txt",
    ".txt.gz": "txt",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_NAMED = (".md", ".py", ".html", ".rst", ".tex")  # text, too, but only where the file is named
_READABLE = ".txt, .txt.gz, .jsonl, .jsonl.gz, .parquet or .arrow"


@dataclasses.dataclass(frozen=True)
class DocumentSource:
    """One file, or one split of a prepared TFDS folder.

    `name` is its name in the manifest: no machine's path, the same on every machine.
    """

    path: Path
    kind: str  # "txt", "jsonl", "parquet", "arrow" or "tfds"
    name: str
    size: int
    split: str = ""  # of a TFDS folder


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some documents of a source, or the one of a .txt file.

    `data` is None (txt), bytes (jsonl), strings (parquet, arrow) or a range (tfds); `row` is the
    first line or record, `offset` the first byte, `read` the bytes of progress.
    """

    source: DocumentSource
    data: Any
    read: int
    row: int = 0
    offset: int = 0


def find_sources(inputs: Iterable[Path], *, validation: bool = False) -> list[DocumentSource]:
    """The readable files under `inputs`, folders in sorted order, each file once.

    From a TFDS folder, or one of Hugging Face's with several splits, this takes the split `train`;
    with `validation`, the first of `validation`, `test` and `train` that exists. It skips hidden
    files and folders.

    Raises:
      DataError: a missing path, a file of another kind, or a folder without a readable file.
    """
    found: dict[tuple, DocumentSource] = {}
    for given in inputs:
        if given.is_dir():
            sources = list(_walk(given, validation))
            if not sources:
                raise DataError(
                    f"{given}: holds no {_READABLE} file and no prepared TFDS folder; of other "
                    f"kinds of text name the files: {given}/*{_NAMED[0]}"
                )
        elif given.exists():
            kind = _kind(given) or ("txt" if given.suffix.lower() in _NAMED else None)
            if kind is None:
                raise DataError(f"{given}: not a {_READABLE} file, nor one of {', '.join(_NAMED)}")
            sources = [_file(given, given.name, kind)]
        else:
            raise DataError(f"{given}: no such file or folder")
        for source in sources:  # one that is given twice is read once
            found.setdefault((source.path.resolve(), source.split), source)
    return list(found.values())


def check_sources(
    sources: list[DocumentSource], held_out: list[DocumentSource], field: str
) -> None:
    """Reads the beginning of each source.

    Raises:
      DataError: its documents cannot be read, or a source is both in `sources` and `held_out`.
    """
    trained = {(source.path.resolve(), source.split) for source in sources}
    for source in held_out:
        if (source.path.resolve(), source.split) in trained:
            raise DataError(f"{source.path}: is both in the training and the validation input")
    for source in sources + held_out:
        if source.kind == "txt":
            with one_sentence(source.path), open(source.path, "rb"):
                continue
        for chunk in itertools.islice(chunks([source], field), 1):
            documents(chunk, field)


def chunks(sources: list[DocumentSource], field: str) -> Iterator[Chunk]:
    """The documents of the sources, in order."""
    for source in sources:
        with one_sentence(source.path):
            yield from _CHUNKERS[source.kind](source, field)


def documents(chunk: Chunk, field: str) -> list[str]:
    """The texts of a chunk; DataError names the file and the line, record or byte that is bad."""
    path = chunk.source.path
    with one_sentence(path):
        if chunk.source.kind == "txt":
            with opened(path) as (file, _):
                text = _decode(read_at_most(file, _most_text(), path), path, 0)
            return [text.removeprefix("\ufeff")]
        if chunk.source.kind == "jsonl":
            text = _decode(chunk.data, path, chunk.offset).removeprefix("\ufeff")
            lines = enumerate(text.split("\n"), chunk.row)
            return [_json_text(line, path, row, field) for row, line in lines if line.strip()]
        if chunk.source.kind in ("parquet", "arrow"):
            for row, text in enumerate(chunk.data, chunk.row):
                if text is None:
                    raise DataError(f"{path}, row {row}: column {field!r} is null")
            return chunk.data
        records = tfds_folder.read(path, chunk.source.split, chunk.data)
        return [
            _decode(record[field], f"{path}, record {i}", 0)
            for i, record in zip(chunk.data, records, strict=True)
        ]


def distinct_names(sources: list[DocumentSource]) -> dict[DocumentSource, str]:
    """The names of sources; the second source of a name becomes "NAME (2)"."""
    count: collections.Counter[str] = collections.Counter()
    names = {}
    for source in sources:
        count[source.name] += 1
        repeated = f" ({count[source.name]})" if count[source.name] > 1 else ""
        names[source] = source.name + repeated
    return names


def hashed_files(sources: list[DocumentSource]) -> list[tuple[str, Path]]:
    """(name in the manifest, path) of the files of sources."""
    found = []
    for source in sources:
        files = tfds_folder.files(source.path, source.split) if source.kind == "tfds" else ()
        found += [(f"{source.name}/{file.name}", file) for file in files] or [
            (source.name, source.path)
        ]
    return found


def _walk(folder: Path, validation: bool) -> Iterator[DocumentSource]:
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
        if "dataset_dict.json" in files:
            folders[:] = [_split_of(here, folders, validation)]
        if "state.json" in files and "dataset_info.json" in files:
            files = _saved_by_datasets(here)
        for file in sorted(files):
            path = here / file
            kind = _kind(path)
            if not file.startswith(".") and kind and path.is_file():
                yield _file(path, str(relative / file), kind)


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for suffix, kind in _KINDS.items() if name.endswith(suffix)), None)


def _file(path: Path, name: str, kind: str) -> DocumentSource:
    with one_sentence(path):
        check_regular(path)
        return DocumentSource(path, kind, name, path.stat().st_size)


def _tfds_source(folder: Path, name: str, validation: bool) -> DocumentSource:
    split = _split_of(folder, tfds_folder.open_builder(folder).info.splits, validation)
    size = sum(file.stat().st_size for file in tfds_folder.files(folder, split)[:-1])
    return DocumentSource(folder, "tfds", name, size, split)


def _saved_by_datasets(folder: Path) -> list[str]:
    """The files of a data set; others in its folder are what `datasets` has cached there."""
    damaged = "not the state.json of a saved data set; save it again"
    content = read_json(folder / "state.json", damaged)
    with entries_of(folder / "state.json", damaged):
        return [str(file["filename"]) for file in content["_data_files"]]


def _split_of(folder: Path, splits: Iterable[str], validation: bool) -> str:
    wanted = ("validation", "test", "train") if validation else ("train",)
    split = next((split for split in wanted if split in splits), None)
    if split is None:
        raise DataError(f"{folder}: has no split {wanted[0]!r}, only {', '.join(splits) or 'none'}")
    return split


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


def _row_chunks(source: DocumentSource, field: str) -> Iterator[Chunk]:
    """Of a parquet or Arrow file, column by column, of which each ends at a byte of the file."""
    extras.need("text", "pyarrow")
    import pyarrow as pa

    columns = {"parquet": _parquet_columns, "arrow": _arrow_columns}[source.kind]
    row = read = 0
    try:
        for column, end in columns(source, field):
            for part in _parts(column):
                yield Chunk(source, part.to_pylist(), end - read, row)
                row, read = row + len(part), end
    except UnicodeDecodeError:
        raise DataError(f"{source.path}: invalid UTF-8 after row {row}") from None
    except (pa.ArrowException, OSError) as error:
        place = f"{source.path}: cannot be read after row {row}"
        raise DataError(f"{place} ({short(error)})") from None


def _parquet_columns(source: DocumentSource, field: str) -> Iterator[tuple[Any, int]]:
    """Up to `ROWS` rows at once, but few of long texts, which this machine has to hold."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(source.path) as file:
        _check_column(source.path, file.schema_arrow, field)
        found = _columns(file.metadata, field)
    sizes = [column.total_uncompressed_size / max(column.num_values, 1) for column in found]
    rows = max(min(int(_most_text() / _COPIES / max([1, *sizes])), ROWS), 1)
    encodings = str([column.encodings for column in found])
    # Texts that many rows share take their place once, until `_parts` cuts the rows.
    shared = "DICTIONARY" in encodings and "DELTA" not in encodings  # which Arrow cannot mix
    row = 0
    with pq.ParquetFile(source.path, read_dictionary=[field] if shared else None) as file:
        for batch in file.iter_batches(batch_size=rows, columns=[field]):
            row += len(batch)
            yield batch.column(0), source.size * row // file.metadata.num_rows


def _arrow_columns(source: DocumentSource, field: str) -> Iterator[tuple[Any, int]]:
    """Of a file of either format, one per batch: ``datasets`` writes a thousand rows into each."""
    import pyarrow as pa

    with open(source.path, "rb") as raw:
        is_stream = raw.read(6) != b"ARROW1"
        raw.seek(0)
        reader = pa.ipc.open_stream(raw) if is_stream else pa.ipc.open_file(raw)
        _check_column(source.path, reader.schema, field)
        count = 0 if is_stream else reader.num_record_batches
        batches = reader if is_stream else map(reader.get_batch, range(count))
        for number, batch in enumerate(batches, 1):
            batch.column(field).validate(full=True)  # offsets beyond the end crash Arrow
            end = raw.tell() if is_stream else source.size * number // count
            yield batch.column(field), end


def _columns(metadata: Any, field: str) -> list[Any]:
    """What the footer of a parquet file says of a column, for each row group."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = (group.column(k) for group in groups for k in range(group.num_columns))
    return [column for column in columns if column.path_in_schema == field]


def _parts(column: Any) -> list[Any]:
    """The column; one with a dictionary, which says a text once for all rows, in pieces."""
    import pyarrow.compute as pc

    if not hasattr(column, "dictionary"):
        return [column]
    lengths = pc.call_function("binary_length", [column.dictionary])
    longest = pc.call_function("max", [lengths]).as_py() or 1
    rows = max(_most_text() // _COPIES // longest, 1)
    return [column.slice(k, rows) for k in range(0, len(column), rows)]


def _tfds_chunks(source: DocumentSource, field: str) -> Iterator[Chunk]:
    _check_feature(source.path, field)
    total = len(tfds_folder.records(source.path, source.split))
    for row in range(0, total, ROWS):
        stop = min(row + ROWS, total)
        read = source.size * stop // total - source.size * row // total
        yield Chunk(source, range(row, stop), read, row)


_CHUNKERS = {
    "txt": _text_chunk,
    "jsonl": _jsonl_chunks,
    "parquet": _row_chunks,
    "arrow": _row_chunks,
    "tfds": _tfds_chunks,
}


def _most_text() -> int:
    """Bytes that are held at once, such as of a .txt file: as text, as bytes and as tokens."""
    return machine.memory_bytes() // 16


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
    found = shorten(", ".join(map(repr, names)) or f"no {kind}", 100)
    return DataError(f"{place}: no {kind} {shown(field)}, only {found}; see --text_field")


def _check_column(path: Path, schema: Any, field: str) -> None:
    import pyarrow as pa

    if field not in schema.names:
        raise _lacks(path, "column", field, schema.names)
    if schema.names.count(field) > 1:
        raise DataError(f"{path}: several columns are called {field!r}; leave one")
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{path}: column {field!r} holds {kind}, not strings")


def _check_feature(folder: Path, field: str) -> None:
    import tensorflow_datasets as tfds

    features = tfds_folder.open_builder(folder).info.features
    if field not in features:
        raise _lacks(folder, "feature", field, features)
    if not isinstance(features[field], tfds.features.Text):
        raise DataError(f"{folder}: feature {field!r} is not text")
