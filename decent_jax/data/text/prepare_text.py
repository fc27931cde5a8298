"""Turns text into `train.bin` and `val.bin`: `decent-jax prepare text`.

Memory use does not grow with the corpus. A hash of a document's text decides its split, so all
copies of a document are in the same split.
"""

import argparse
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from decent_jax.data import worker_pool
from decent_jax.data.prepared_folder import LISTED_FILES, chosen
from decent_jax.data.reading import as_paths
from decent_jax.data.text import documents, tokenizers
from decent_jax.data.text.documents import Chunk, DocumentSource
from decent_jax.data.text.token_folder import SPLITS, TokenFolderWriter
from decent_jax.data.text.tokenizers import Tokenizer
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import Json

_MOST_CHUNKS = 256  # the most chunks that a worker process receives at once

# The source, a digest of the text and the ids of a document.
Encoded = tuple[DocumentSource, bytes, np.ndarray]


def prepare(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    tokenizer: str = "gpt2",
    *,
    end_of_text: str | None = None,
    val: float | str | Path | Iterable[str | Path] = 0.0005,
    text_field: str = "text",
    workers: int | None = None,
    overwrite: bool = False,
) -> Json:
    """Writes the prepared folder `out` from text; `DESCRIPTION` lists the formats of `inputs`.

    With several workers, a script must call this under `if __name__ == "__main__":`, because they
    are spawned. Empty documents are left out. If `val` names files, training documents that occur
    in them are left out too.

    Args:
      inputs: files and folders.
      out: the folder to make.
      tokenizer: `"chars"` for the characters of `inputs`; otherwise as for `tokenizers.load`.
      end_of_text: the token that ends a document, if a tokenizer.json leaves it ambiguous.
      val: share of the documents, in (0, 1), for `val.bin`, or the files and folders of the
        validation documents. A single text file is one document, whose last part is taken.
      text_field: the JSON field or parquet column with the text.
      workers: number of processes; None means one per core, or only this one for a few megabytes.
      overwrite: whether to replace an earlier call's folder, once the new one is complete.

    Returns:
      The manifest: for each split its hash and the numbers of documents and tokens; the names of
      the inputs; and the tokenizer.

    Raises:
      DataError: the arguments or the data are wrong; the message is one sentence.
      OSError: the output cannot be written, for instance because the disk is full.
    """
    val_fraction, files = (val, []) if isinstance(val, int | float) else (None, as_paths(val))
    if val_fraction is not None and not 0 < val_fraction < 1:
        raise DataError(f"val_fraction must lie between 0 and 1, got {val_fraction}")
    of_inputs = tokenizer == "chars" and end_of_text is None
    codec = None if of_inputs else tokenizers.load(tokenizer, end_of_text)
    sources, other = documents.find_sources(as_paths(inputs))
    held_out, more = documents.find_sources(files)
    if not sources:
        raise DataError("no input given")
    documents.check_sources(sources, held_out, text_field)
    codec = codec or _of_characters(sources, text_field)
    total = sum(source.size for source in sources + held_out)
    workers = worker_pool.how_many(workers, small=total < worker_pool.SMALL_BYTES)
    work = functools.partial(_encode, tokenizer=codec, field=text_field)
    split_of = _by_hash(sources, val_fraction) if val_fraction else _of_given(held_out)
    left_out = {"empty": 0, "in validation": 0}
    with TokenFolderWriter(out, codec, overwrite=overwrite) as folder:

        def add(task: list[Chunk], encoded: list[Encoded]) -> int:
            for source, digest, ids in encoded:
                parts = split_of(source, digest, ids) if len(ids) else {}
                left_out["in validation" if len(ids) else "empty"] += not parts
                for split, part in parts.items():
                    folder.add(split, part)
            return sum(chunk.read for chunk in task)

        tasks = _tasks(documents.chunks(held_out + sources, text_field))
        worker_pool.encode(tasks, work, add, workers=workers, total=total, desc="tokenizing")
        _check_counts(folder.documents, val_fraction)
        return folder.commit(
            val_fraction=val_fraction,
            text_field=text_field,
            empty_documents_left_out=left_out["empty"],
            validation_documents_left_out_of_train=left_out["in validation"],
            inputs=[source.name for source in sources][:LISTED_FILES],
            val_inputs=[source.name for source in held_out][:LISTED_FILES],
            left_out=dict(other + more),
        )


def _of_characters(sources: list[DocumentSource], field: str) -> Tokenizer:
    """A tokenizer of all characters in the sources; reads the sources once."""
    characters: set[str] = set()
    for chunk in documents.chunks(sources, field):
        characters.update(*documents.documents(chunk, field))
    return tokenizers.CharTokenizer("".join(characters))


def _of_given(held_out: list[DocumentSource]) -> Callable:
    """Returns a function that assigns the parts of a document to splits, by its source.

    A training document that equals a validation document is assigned to no split. Validation
    documents must therefore come first.
    """
    validation, seen = set(held_out), set()

    def split_of(source: DocumentSource, digest: bytes, ids: np.ndarray) -> dict[str, np.ndarray]:
        if source in validation:
            seen.add(digest)
            return {"val": ids}
        return {} if digest in seen else {"train": ids}

    return split_of


def _by_hash(sources: list[DocumentSource], val_fraction: float) -> Callable:
    """Returns a function that assigns a document to a split, by a hash of its text.

    A single text file is cut in two instead, and its last part is for validation.
    """
    single = len(sources) == 1 and sources[0].kind == "txt"

    def split_of(source: DocumentSource, digest: bytes, ids: np.ndarray) -> dict[str, np.ndarray]:
        if single and len(ids) > 1:
            cut = min(max(round(len(ids) * (1 - val_fraction)), 1), len(ids) - 1)
            return {"train": ids[:cut], "val": ids[cut:]}
        return {"val" if chosen(digest, val_fraction) else "train": ids}

    return split_of


def _tasks(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Lists of consecutive chunks; those of small files are grouped."""
    task: list[Chunk] = []
    for chunk in chunks:
        task.append(chunk)
        size = sum(chunk.read for chunk in task)
        small = chunk.source.kind == "txt" and size < documents.CHUNK_BYTES
        if not small or len(task) == _MOST_CHUNKS:
            yield task
            task = []
    if task:
        yield task


def _encode(task: list[Chunk], *, tokenizer: Tokenizer, field: str) -> list[Encoded]:
    encoded = []
    for chunk in task:
        for text in documents.documents(chunk, field):
            # as the bytes tokenizer does, so that the split is the same for all tokenizers
            text = tokenizers.valid_unicode(text.replace("\0", ""))
            digest = hashlib.blake2b(text.encode(), digest_size=16, key=b"0").digest()
            try:
                encoded.append((chunk.source, digest, tokenizer.encode(text)))
            except DataError as error:
                raise DataError(f"{chunk.source.path}: {error}") from None
    return encoded


def _check_counts(counts: dict[str, int], val_fraction: float | None) -> None:
    if not any(counts.values()):
        raise DataError("the input has no document with any text")
    for split in SPLITS:
        if counts[split]:
            continue
        if val_fraction is None:
            where = {"val": "validation input", "train": "training input, less the validation"}
            raise DataError(f"the {where[split]} has no document with any text")
        raise DataError(
            f"the {split} split is empty: none of {sum(counts.values())} documents fell into it"
            f" with --val_fraction {val_fraction:g}; choose another one, or pass --val_input"
        )


# --- The command, see `decent_jax.commands.prepare` -----------------------------------------------

DESCRIPTION = """\
Tokenizes text into OUT/train.bin and OUT/val.bin (uint16, or uint32 for a vocabulary beyond
65,536; each document ends with the end-of-text id), with OUT/manifest.json and the tokenizer's
files.

Reads .txt (one document per file), .jsonl and .ndjson (one per line), all also as .gz, .bz2, .xz
or .zst, .parquet (one per row), and folders of these. Other files in the folders are only counted.
"""
EXAMPLE = """\
example, a folder of .jsonl.gz files with 1% of the documents for validation:
  decent-jax prepare text --input corpus/ --out data/corpus \\
      --tokenizer gpt2 --val_fraction 0.01

OUT appears when it is complete. After a kill, start the same command again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `prepare` that only text has."""
    add, one_of = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    kinds = "gpt2 (downloaded), bytes (of UTF-8), chars (of the input), FILE.json (a Hugging"
    kinds += " Face tokenizer.json), or an earlier OUT, whose tokenizer is used"
    add("--tokenizer", required=True, metavar="NAME", help=kinds)
    end = "the token of FILE.json that ends a document (default: its special one, or the eos_token"
    end += " of the tokenizer_config.json next to it)"
    add("--end_of_text", metavar="TOKEN", help=end)
    share = "fraction of the documents, or of a single text file, for val.bin (%(default)s)"
    one_of("--val_fraction", dest="val", type=float, default=0.0005, metavar="F", help=share)
    read = "files or folders with the documents of val.bin, instead of a fraction"
    one_of("--val_input", dest="val", nargs="+", metavar="PATH", help=read)
    field = "JSON field or parquet column with the text (%(default)s)"
    add("--text_field", default="text", metavar="NAME", help=field)


def report(manifest: Json) -> Iterator[str]:
    """The lines that the command prints about a finished folder."""
    for split, entry in manifest["splits"].items():
        share = 100 * entry["unknown"] / entry["tokens"]
        more = f", {share:.2g}% of them unknown to the tokenizer" if share else ""
        yield f"{split:5} {entry['documents']:>12,} documents {entry['tokens']:>16,} tokens{more}"
