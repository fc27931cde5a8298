"""The quickstart's text: the running interpreter's standard library, which needs no download.

Documents are the `.py` sources of the standard library and the prose topics of Python's `help()`
(`pydoc_data.topics`), as bytes. These are left out:

- installed packages: `site-packages`, `dist-packages`;
- test suites: folders `test`, `tests`, `idle_test` and the like, files `test_*.py`;
- tables and generated files: `encodings`, `lib2to3` (grammars), `pydoc_data` (its topics are
  separate documents), `_sysconfigdata*.py` and `config-*` (they describe one machine);
- `__pycache__`, `lib-dynload`, `ensurepip` (wheels), hidden folders;
- sources that are not UTF-8 or are empty, and copies of an earlier source.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from decent_jax.data.prepared_folder import find_or_make
from decent_jax.data.text import token_folder, tokenizers
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import Json

VAL_FRACTION = 0.05

_FOLDERS_OUT = re.compile(
    r"(.*_)?tests?|(site|dist)-packages|__pycache__|lib-dynload|ensurepip|encodings|lib2to3"
    r"|pydoc_data|config-.*|\..*"
)
_FILES_OUT = re.compile(r"test_.*|_sysconfigdata.*")


def build(out_dir: str | Path) -> Json:
    """The manifest of the corpus's prepared folder `out_dir`, which is created if necessary.

    Creating it takes about a second. An intact folder from this interpreter's library is kept; a
    folder from another interpreter is replaced. Several processes may call this function at the
    same time.

    Returns:
      A manifest like that of `decent-jax prepare text`, with the entry `corpus_sha256`, a hash of
      the documents.

    Raises:
      DataError: `out_dir` exists and is not such a folder, or the interpreter has no sources.
    """
    out = Path(os.path.abspath(out_dir))
    files = list(_source_files())
    fingerprint = _fingerprint(files)
    return find_or_make(
        out,
        lambda: _found(out, fingerprint),
        lambda overwrite: _write(out, files, fingerprint, overwrite),
    )


def _write(
    out: Path, files: list[tuple[str, Path, int]], fingerprint: str, overwrite: bool
) -> Json:
    tokenizer = tokenizers.load("bytes")
    corpus, seen = hashlib.sha256(), set()
    with token_folder.TokenFolderWriter(out, tokenizer, overwrite=overwrite) as writer:
        for name, text in _documents(files):
            ids = tokenizer.encode(text)
            digest = hashlib.sha256(ids.tobytes()).digest()
            if not len(ids) or digest in seen:
                continue
            seen.add(digest)
            corpus.update(hashlib.sha256(name.encode()).digest() + digest)
            writer.add(_split(name), ids)
        if not all(writer.documents.values()):
            raise DataError("this Python has no sources of its standard library")
        return writer.commit(
            corpus="standard library",
            corpus_sha256=corpus.hexdigest(),
            source_fingerprint=fingerprint,
            val_fraction=VAL_FRACTION,
        )


def _found(out: Path, fingerprint: str) -> Json | None:
    try:
        manifest = token_folder.read_manifest(out)
    except DataError:
        return None
    if manifest.get("source_fingerprint") != fingerprint or not token_folder.is_whole(out):
        return None
    return manifest


def _source_files() -> Iterator[tuple[str, Path, int]]:
    """(name, path, bytes) of the sources, in sorted order; names are relative, with slashes."""
    root = Path(sysconfig.get_path("stdlib"))
    for here, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not _FOLDERS_OUT.fullmatch(f))
        for file in sorted(files):
            if file.endswith(".py") and not _FILES_OUT.fullmatch(file):
                path = Path(here, file)
                if path.is_file():
                    yield path.relative_to(root).as_posix(), path, path.stat().st_size


def _documents(files: list[tuple[str, Path, int]]) -> Iterator[tuple[str, str]]:
    for name, path, _ in files:
        try:
            yield name, path.read_bytes().decode()
        except (UnicodeDecodeError, OSError):
            continue
    with contextlib.suppress(ImportError):  # some distributions package it separately
        from pydoc_data.topics import topics

        for topic in sorted(topics):
            yield f"pydoc_data/topics/{topic}", topics[topic]


def _fingerprint(files: list[tuple[str, Path, int]]) -> str:
    entries = [sys.version, [(name, size) for name, _, size in files]]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _split(name: str) -> str:
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return "val" if draw < VAL_FRACTION else "train"
