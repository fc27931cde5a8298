"""Turns text into ``train.bin`` and ``val.bin`` for training: ``python -m ...prepare_text``.

Documents are read, tokenized by all cores and written in the order of the inputs, so the output
is the same byte for byte for any number of workers. Memory does not grow with the corpus. Which
split a document falls into is a hash of its text and the seed: copies of a document stay together.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from decent_jax.data import text_inputs, tokenizers, worker_pool
from decent_jax.data.prepared_folder import check_out, sha256_file
from decent_jax.data.token_files import KIND, SPLITS, TokenFolderWriter, read_manifest
from decent_jax.errors import DataError
from decent_jax.progress import progress_bar

_LISTED_FILES = 1000  # a manifest names at most so many inputs
_SMALL_BYTES = 8 << 20  # below, starting workers takes longer than the work


def prepare(
    inputs: Iterable[str | Path],
    out: str | Path,
    tokenizer: str = "gpt2",
    *,
    tokenizer_path: str | Path | None = None,
    val_fraction: float = 0.0005,
    val_inputs: Iterable[str | Path] = (),
    text_field: str = "text",
    workers: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> dict:
    """Writes the prepared folder ``out`` from text; see ``--help`` for the formats read.

    With several workers, a script must call this under ``if __name__ == "__main__":``, for they
    are spawned. Empty documents are left out. With ``val_inputs``, training documents that occur
    in the validation set are left out too.

    Args:
      inputs: files and folders.
      out: the folder to make.
      tokenizer: ``"gpt2"`` or ``"bytes"``.
      tokenizer_path: folder with GPT-2's ``encoder.json`` and ``vocab.bpe``; None downloads them.
      val_fraction: share of the documents, in (0, 1), that ``val.bin`` receives.
      val_inputs: files and folders for ``val.bin``; then ``val_fraction`` has no part.
      text_field: the JSON field, parquet column or TFDS feature with the text.
      workers: processes; None means one a core, and none but this one for a few megabytes.
      seed: chooses the validation documents.
      overwrite: replace a folder that an earlier call made, once the new one is whole.
      progress: show a progress bar on stderr.

    Returns:
      The manifest: documents, tokens and hashes of each split, hashes of the inputs, tokenizer.

    Raises:
      DataError: anything wrong with the arguments or the data, as one sentence.
      OSError: the output cannot be written, for instance a full disk.
    """
    inputs, val_inputs = _paths(inputs), _paths(val_inputs)
    if not inputs:
        raise DataError("no input given")
    if not 0 < val_fraction < 1:
        raise DataError(f"val_fraction must lie between 0 and 1, got {val_fraction}")
    if workers is not None and workers < 1:
        raise DataError(f"workers must be at least 1, got {workers}")
    check_out(Path(os.path.abspath(out)), KIND, read_manifest, overwrite=overwrite)
    codec = tokenizers.load(tokenizer, tokenizer_path)
    sources = text_inputs.find_sources(inputs)
    val_sources = text_inputs.find_sources(val_inputs, validation=True)
    _check_sources(sources, val_sources, text_field)

    total = sum(source.size for source in sources + val_sources)
    if workers is None:
        workers = 1 if total < _SMALL_BYTES else worker_pool.cores()
    chunks = itertools.chain(
        (("val", chunk) for chunk in text_inputs.chunks(val_sources, text_field)),
        (("train", chunk) for chunk in text_inputs.chunks(sources, text_field)),
    )
    names = text_inputs.distinct_names(sources) | text_inputs.distinct_names(val_sources)
    split_of = _Splitter(None if val_sources else val_fraction)
    files = {"train": [], "val": []}
    with (
        TokenFolderWriter(out, codec, overwrite=overwrite) as writer,
        _results(chunks, workers, codec.name, writer.folder, text_field, seed) as results,
        progress_bar(total, progress, unit="B", unit_scale=True, desc="tokenizing") as bar,
    ):
        for role, chunk, result in results:
            bar.update(chunk.read)
            if isinstance(result, Encoded):
                origins = text_inputs.document_sources(chunk)
                for source, (digest, ids) in zip(origins, result, strict=False):
                    split = split_of(digest, ids, role)
                    if split:
                        writer.add(split, ids, names[source])
            else:
                files[role] += result
        _check_counts(writer.documents, val_fraction, bool(val_sources))
        return writer.commit(
            seed=seed,
            val_fraction=None if val_sources else val_fraction,
            text_field=text_field,
            empty_documents_left_out=split_of.empty,
            validation_documents_left_out_of_train=split_of.dropped,
            inputs=_summary(files["train"]),
            val_inputs=_summary(files["val"]),
        )


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The documents of a chunk: a digest each, and their tokens end to end (uint16)."""

    digests: list[bytes]
    lengths: list[int]
    tokens: np.ndarray

    def __iter__(self) -> Iterator[tuple[bytes, np.ndarray]]:
        ends = list(itertools.accumulate(self.lengths))
        for digest, length, end in zip(self.digests, self.lengths, ends, strict=True):
            yield digest, self.tokens[end - length : end]


class _Splitter:
    """Says where a document goes: "train", "val" or "" for nowhere."""

    def __init__(self, val_fraction: float | None):
        self._val_fraction = val_fraction
        self._validation: set[bytes] = set()
        self.empty = 0
        self.dropped = 0

    def __call__(self, digest: bytes, ids: np.ndarray, role: str) -> str:
        if not len(ids):
            self.empty += 1
            return ""
        if self._val_fraction is not None:
            draw = int.from_bytes(digest[:8], "big") / 2**64
            return "val" if draw < self._val_fraction else "train"
        if role == "val":
            self._validation.add(digest)
        elif digest in self._validation:
            self.dropped += 1
            return ""
        return role


def _work(chunk, *, tokenizer, field: str, seed: int):
    """The documents of a chunk, encoded; or [name, bytes, sha256] of each file of a hash chunk."""
    if chunk.kind == "hash":
        files = [f for source in chunk.data for f in text_inputs.hashed_files(source)]
        with text_inputs.one_sentence(chunk.source.path):
            return [[name, path.stat().st_size, sha256_file(path)] for name, path in files]
    digests, encoded = [], [np.zeros(0, np.uint16)]
    for text in text_inputs.documents(chunk, field):
        text = tokenizers.valid_unicode(text.replace("\0", ""))  # NULs: as the bytes tokenizer
        digest = hashlib.blake2b(text.encode(), digest_size=16, key=str(seed).encode()[:64])
        digests.append(digest.digest())
        encoded.append(tokenizer.encode(text))
    lengths = [len(ids) for ids in encoded[1:]]
    return Encoded(digests, lengths, np.concatenate(encoded))


_work_here = None  # in a worker process: _work with its keywords


def _start_worker(name: str, folder: Path, field: str, seed: int) -> None:
    global _work_here
    _work_here = functools.partial(_work, tokenizer=_load(name, folder), field=field, seed=seed)


def _work_in_worker(chunk):
    return _work_here(chunk)


def _load(name: str, folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.load(name, folder if name != "bytes" else None)


@contextlib.contextmanager
def _results(chunks, workers: int, name: str, folder: Path, field: str, seed: int):
    """Iterator of (role, chunk, result) in the order of ``chunks``, pairs (role, chunk)."""
    if workers == 1:
        work = functools.partial(_work, tokenizer=_load(name, folder), field=field, seed=seed)
        yield ((role, chunk, work(chunk)) for role, chunk in chunks)
        return
    with worker_pool.open_pool(workers, _start_worker, name, folder, field, seed) as pool:
        yield _in_order(pool, chunks, 2 * workers)


def _in_order(pool, chunks, most: int):
    pending = collections.deque()
    for role, chunk in chunks:
        pending.append((role, chunk, pool.submit(_work_in_worker, chunk)))
        if len(pending) == most:
            role, chunk, future = pending.popleft()
            yield role, chunk, future.result()
    for role, chunk, future in pending:
        yield role, chunk, future.result()


def _paths(given: Iterable[str | Path]) -> list[Path]:
    return [Path(given)] if isinstance(given, str | Path) else [Path(path) for path in given]


def _check_sources(sources, val_sources, field: str) -> None:
    trained = {(source.path.resolve(), source.split) for source in sources}
    for source in val_sources:
        if (source.path.resolve(), source.split) in trained:
            raise DataError(f"{source.path}: is both in the training and the validation input")
    if len(sources) == 1 and sources[0].kind == "txt" and not val_sources:
        raise DataError(
            f"{sources[0].path}: a .txt file is one document, which cannot be split; cut it in two"
            " files and pass one as --val_input"
        )
    for source in sources + val_sources:
        text_inputs.check_source(source, field)


def _check_counts(documents: dict[str, int], val_fraction: float, given: bool) -> None:
    count = sum(documents.values())
    if not count:
        raise DataError("the input has no document with any text")
    empty = next((split for split in SPLITS if not documents[split]), None)
    if empty and given:
        where = {"val": "the validation input", "train": "the training input, less the validation"}
        raise DataError(f"{where[empty]} has no document with any text")
    if empty:
        name, way = {"val": ("validation", "larger"), "train": ("training", "smaller")}[empty]
        raise DataError(
            f"the {name} split is empty: none of {count} documents fell into it with"
            f" --val_fraction {val_fraction:g}; choose a {way} one, or pass --val_input"
        )


def _summary(files: list[list]) -> dict:
    """``files`` as [name, bytes, sha256] in the order read; the sum's hash covers all of them."""
    lines = "".join(f"{sha256}  {name}\n" for name, _, sha256 in files)
    return {
        "files": len(files),
        "bytes": sum(size for _, size, _ in files),
        "sha256_of_list": hashlib.sha256(lines.encode()).hexdigest(),
        "list": [
            {"name": name, "bytes": size, "sha256": sha256}
            for name, size, sha256 in files[:_LISTED_FILES]
        ],
    }


_DESCRIPTION = """\
Tokenizes text into OUT/train.bin and OUT/val.bin (uint16, each document followed by the
end-of-text id), with OUT/manifest.json and the tokenizer's files beside them. OUT/sources.json
keeps which tokens are from which input file, for replicas that train on different sources
(config.data.partition=dirichlet).

Reads .txt (a file is a document), .jsonl (a line is a document), both also as .gz, .parquet (a
row is a document), folders of these, and prepared TFDS folders stored as array_record.
"""
_EXAMPLE = """\
example, 1 % of the documents of a folder of .jsonl.gz files for validation:
  python -m decent_jax.data.prepare_text --input corpus/ --out data/corpus \\
      --tokenizer gpt2 --tokenizer_path gpt2_bpe/ --val_fraction 0.01

OUT appears when it is whole. A run that was killed is simply started again.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m decent_jax.data.prepare_text",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files and folders to read")
    add("--out", required=True, metavar="DIR", help="the folder to make")
    add("--tokenizer", required=True, choices=tokenizers.NAMES, help="GPT-2's, or UTF-8 bytes")
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
        help="share of the documents that go to val.bin (default: 0.0005)",
    )
    val.add_argument(
        "--val_input", nargs="+", default=[], metavar="PATH", help="read val.bin's documents here"
    )
    add(
        "--text_field",
        default="text",
        metavar="NAME",
        help="JSON field, parquet column or TFDS feature with the text (default: text)",
    )
    add("--workers", type=int, metavar="N", help="processes (default: one a core)")
    add("--seed", type=int, default=0, help="chooses the validation documents (default: 0)")
    add("--overwrite", action="store_true", help="replace OUT where it is an earlier result")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0, 2 for bad input, 130 when interrupted."""
    args = _parser().parse_args(argv)
    with worker_pool.terminated_politely():
        try:
            manifest = prepare(
                args.input,
                args.out,
                args.tokenizer,
                tokenizer_path=args.tokenizer_path,
                val_fraction=args.val_fraction,
                val_inputs=args.val_input,
                text_field=args.text_field,
                workers=args.workers,
                seed=args.seed,
                overwrite=args.overwrite,
                progress=True,
            )
        except (DataError, FileExistsError) as error:
            print(f"prepare_text: {error}", file=sys.stderr)
            return 2
        except OSError as error:  # of the output: a full disk, say
            print(f"prepare_text: {args.out}: {error.strerror or error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("prepare_text: interrupted; nothing was written", file=sys.stderr)
            return 130
    for split, entry in manifest["splits"].items():
        print(f"{split:5} {entry['documents']:>12,} documents {entry['tokens']:>16,} tokens")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
