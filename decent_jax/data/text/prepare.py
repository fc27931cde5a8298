"""Turns text into `train.bin` and `val.bin`: `decent-jax prepare text`.

All cores read and tokenize documents, which are then written in the order of the inputs, so the
output is the same byte for byte for any number of workers. Memory does not grow with the corpus.
A hash of a document's text and the seed decides its split: copies of a document stay together.
"""

import argparse
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.data import worker_pool
from decent_jax.data.prepared_folder import sha256_files
from decent_jax.data.text import documents, tokenizers
from decent_jax.data.text.documents import Chunk, Source
from decent_jax.data.text.token_folder import SPLITS, TokenFolderWriter
from decent_jax.data.text.tokenizers import Tokenizer
from decent_jax.ground.errors import DataError
from decent_jax.ground.progress import progress_bar

_LISTED_FILES = 1000  # a manifest names at most this many inputs


def prepare(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    tokenizer: str = "gpt2",
    *,
    tokenizer_path: str | Path | None = None,
    val_fraction: float = 0.0005,
    val_inputs: str | Path | Iterable[str | Path] = (),
    text_field: str = "text",
    workers: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Writes the prepared folder `out` from text; `DESCRIPTION` lists the formats it reads.

    With several workers, a script must call this under `if __name__ == "__main__":`, because they
    are spawned. Empty documents are left out. With `val_inputs`, training documents that occur in
    the validation set are left out too.

    Args:
      inputs: files and folders.
      out: the folder to make.
      tokenizer: `"gpt2"`, `"bytes"`, or the path of a tokenizer.json of Hugging Face.
      tokenizer_path: folder with GPT-2's `encoder.json` and `vocab.bpe`; None downloads them.
      val_fraction: share of the documents, in (0, 1), that `val.bin` receives; of a single text
        file, which is one document, its last part.
      val_inputs: files and folders for `val.bin`; `val_fraction` is then ignored.
      text_field: the JSON field, parquet column or TFDS feature with the text.
      workers: processes; None means one per core, and only this one for a few megabytes.
      seed: chooses the validation documents.
      overwrite: replace a folder that an earlier call made, once the new one is whole.
      progress: show a progress bar on stderr.

    Returns:
      The manifest: documents, tokens and hashes of each split, hashes of the inputs, tokenizer.

    Raises:
      DataError: the arguments or the data are wrong; one sentence.
      OSError: the output cannot be written, for instance because the disk is full.
    """
    inputs, val_inputs = _paths(inputs), _paths(val_inputs)
    if not inputs:
        raise DataError("no input given")
    if not 0 < val_fraction < 1:
        raise DataError(f"val_fraction must lie between 0 and 1, got {val_fraction}")
    codec = tokenizers.load(tokenizer, tokenizer_path)
    sources = documents.find_sources(inputs)
    val_sources = documents.find_sources(val_inputs, validation=True)
    _check_sources(sources, val_sources, text_field)

    total = sum(source.size for source in sources + val_sources)
    workers = worker_pool.how_many(workers, 1 if total < worker_pool.SMALL_BYTES else None)
    chunks = itertools.chain(
        documents.chunks(val_sources, text_field), documents.chunks(sources, text_field)
    )
    names = documents.distinct_names(sources) | documents.distinct_names(val_sources)
    held_out = set(val_sources)
    by_position = len(sources) == 1 and sources[0].kind == "txt" and not val_sources
    split_of = _Splitter(None if val_sources else val_fraction, by_position)
    work = functools.partial(_work, tokenizer=codec, field=text_field, seed=seed)
    with (
        TokenFolderWriter(out, codec, overwrite=overwrite) as writer,
        worker_pool.results(work, _tasks(chunks), workers) as results,
        progress_bar(total, progress, unit="B", unit_scale=True, desc="tokenizing") as bar,
    ):
        for task, encoded in results:
            bar.update(sum(chunk.read for chunk in task))
            for source, digest, ids in encoded:
                role = "val" if source in held_out else "train"
                for split, part in split_of(digest, ids, role):
                    writer.add(split, part, names[source])
        _check_counts(writer.documents, val_fraction, bool(val_sources))
        return writer.commit(
            seed=seed,
            val_fraction=None if val_sources else val_fraction,
            text_field=text_field,
            empty_documents_left_out=split_of.empty,
            validation_documents_left_out_of_train=split_of.dropped,
            inputs=_summary(sources, workers),
            val_inputs=_summary(val_sources, workers),
        )


class _Splitter:
    """Decides where a document goes: all of it to "train" or "val", or nowhere.

    Where there is one document, the text of a single file, its last part is for validation.
    """

    def __init__(self, val_fraction: float | None, by_position: bool):
        self._val_fraction, self._by_position = val_fraction, by_position
        self._validation: set[bytes] = set()
        self.empty = 0
        self.dropped = 0

    def __call__(self, digest: bytes, ids: np.ndarray, role: str) -> list[tuple[str, np.ndarray]]:
        """[(split, ids)], empty for nowhere."""
        if not len(ids):
            self.empty += 1
            return []
        if self._val_fraction is None:
            if role == "val":
                self._validation.add(digest)
            elif digest in self._validation:
                self.dropped += 1
                return []
            return [(role, ids)]
        if self._by_position and len(ids) > 1:
            cut = min(max(round(len(ids) * (1 - self._val_fraction)), 1), len(ids) - 1)
            return [("train", ids[:cut]), ("val", ids[cut:])]
        draw = int.from_bytes(digest[:8], "big") / 2**64
        return [("val" if draw < self._val_fraction else "train", ids)]


def _tasks(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """The chunks, those of small files together."""
    task: list[Chunk] = []
    for chunk in chunks:
        task.append(chunk)
        size = sum(chunk.read for chunk in task)
        if chunk.source.kind != "txt" or size >= documents.CHUNK_BYTES or len(task) == 256:
            yield task
            task = []
    if task:
        yield task


def _work(
    task: list[Chunk], *, tokenizer: Tokenizer, field: str, seed: int
) -> list[tuple[Source, bytes, np.ndarray]]:
    """The source, a digest and the ids of each document."""
    encoded = []
    for chunk in task:
        for text in documents.documents(chunk, field):
            # as the bytes tokenizer does, so that the split is the same for all tokenizers
            text = tokenizers.valid_unicode(text.replace("\0", ""))
            digest = hashlib.blake2b(text.encode(), digest_size=16, key=str(seed).encode()[:64])
            encoded.append((chunk.source, digest.digest(), tokenizer.encode(text)))
    return encoded


def _paths(given: str | Path | Iterable[str | Path]) -> list[Path]:
    return [Path(given)] if isinstance(given, str | Path) else [Path(path) for path in given]


def _check_sources(sources: list[Source], val_sources: list[Source], field: str) -> None:
    trained = {(source.path.resolve(), source.split) for source in sources}
    for source in val_sources:
        if (source.path.resolve(), source.split) in trained:
            raise DataError(f"{source.path}: is both in the training and the validation input")
    for source in sources + val_sources:
        documents.check_source(source, field)


def _check_counts(counts: dict[str, int], val_fraction: float, given: bool) -> None:
    count = sum(counts.values())
    if not count:
        raise DataError("the input has no document with any text")
    empty = next((split for split in SPLITS if not counts[split]), None)
    if empty and given:
        where = {"val": "the validation input", "train": "the training input, less the validation"}
        raise DataError(f"{where[empty]} has no document with any text")
    if empty:
        name, way = {"val": ("validation", "larger"), "train": ("training", "smaller")}[empty]
        raise DataError(
            f"the {name} split is empty: none of {count} documents fell into it with"
            f" --val_fraction {val_fraction:g}; choose a {way} one, or pass --val_input"
        )


def _summary(sources: list[Source], workers: int) -> dict[str, Any]:
    """The manifest's entry for inputs; one hash covers all of them."""
    files = [file for source in sources for file in documents.hashed_files(source)]
    hashes = sha256_files([path for _, path in files], workers)
    sizes = [path.stat().st_size for _, path in files]
    entries = [
        {"name": name, "bytes": size, "sha256": sha256}
        for (name, _), size, sha256 in zip(files, sizes, hashes, strict=True)
    ]
    lines = "".join(f"{entry['sha256']}  {entry['name']}\n" for entry in entries)
    return {
        "files": len(files),
        "bytes": sum(sizes),
        "sha256_of_list": hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest(),
        "list": entries[:_LISTED_FILES],
    }


# --- The command, see `decent_jax.commands.prepare` -----------------------------------------------

DESCRIPTION = """\
Tokenizes text into OUT/train.bin and OUT/val.bin (uint16, or uint32 for a vocabulary beyond
65,536; each document followed by the end-of-text id), with OUT/manifest.json and the tokenizer's
files. OUT/sources.json records which tokens come from which input file, for replicas that train on
different sources (config.data.partition=dirichlet).

Reads .txt (a file is a document), .jsonl (a line is a document), both also as .gz, .parquet and
.arrow (a row is a document), folders of these, data sets that Hugging Face's datasets saved, and
prepared TFDS folders stored as array_record.
"""
EXAMPLE = """\
example, 1 % of the documents of a folder of .jsonl.gz files for validation:
  decent-jax prepare text --input corpus/ --out data/corpus \\
      --tokenizer gpt2 --tokenizer_path gpt2_bpe/ --val_fraction 0.01

OUT appears when it is whole. After a kill, start the same command again.
"""
INTERRUPTED = "nothing was written"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `prepare` that only text has."""
    add = parser.add_argument
    add(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="gpt2, bytes (of UTF-8), or FILE.json: a tokenizer.json of Hugging Face",
    )
    add(
        "--tokenizer_path",
        metavar="DIR",
        help="folder with GPT-2's encoder.json and vocab.bpe (default: download them)",
    )
    val = parser.add_mutually_exclusive_group()
    val.add_argument(
        "--val_fraction",
        type=float,
        default=0.0005,
        metavar="F",
        help="share of the documents, or of a single text file, that goes to val.bin "
        "(default: 0.0005)",
    )
    val.add_argument(
        "--val_input",
        dest="val_inputs",
        nargs="+",
        default=[],
        metavar="PATH",
        help="read val.bin's documents here",
    )
    add(
        "--text_field",
        default="text",
        metavar="NAME",
        help="JSON field, parquet column or TFDS feature with the text (default: text)",
    )
    add("--seed", type=int, default=0, help="chooses the validation documents (default: 0)")


def report(manifest: dict[str, Any]) -> Iterator[str]:
    """What the command prints about a finished folder."""
    for split, entry in manifest["splits"].items():
        yield f"{split:5} {entry['documents']:>12,} documents {entry['tokens']:>16,} tokens"
