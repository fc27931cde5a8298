"""Turns sentence pairs into token ids for training: `decent-jax prepare translation`.

All cores read the input twice: once to clean, count and hash the pairs, which gives the vocabulary
and the duplicates; once to write the remaining pairs as ids. Results are taken in the order of the
input, so the output is the same byte for byte for any number of workers. Memory holds one hash per
pair and the distinct words, not the text.
"""

import argparse
import collections
import functools
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decent_jax.data import worker_pool
from decent_jax.data.prepared_folder import sha256_files
from decent_jax.data.translation import sentence_pairs, subwords
from decent_jax.data.translation.pair_folder import TranslationFolderWriter
from decent_jax.data.translation.sentence_pairs import Block, Source
from decent_jax.data.translation.subwords import Subwords, normalise
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import shown
from decent_jax.ground.progress import progress_bar

VOCAB_SIZE = 37120  # the reference's, for English and German
MAX_SUBWORDS = 156  # the reference's, which cuts longer sentences off

_RATIO, _SLACK = 2.0, 5  # the longer side has at most 2 times the shorter's subwords and 5
_COPIED_WORDS = 4  # names and numbers are equal in both languages, longer sentences are not
_MOST_WORDS = 8_000_000  # distinct ones in memory; above it, words seen only once are dropped

_BYTES: dict[str, Any] = {"unit": "B", "unit_scale": True}  # of progress

# The fate of a pair: a split, or the filter that drops it
_TRAIN, _VAL, _TEST, _EMPTY, _COPIED, _DUPLICATE, _HELD_OUT, _LONG, _RATIO_OFF = range(9)
_FILTERS = {
    "empty_side": _EMPTY,
    "untranslated": _COPIED,
    "duplicate": _DUPLICATE,
    "also_in_val_or_test": _HELD_OUT,
    "too_long": _LONG,
    "length_ratio": _RATIO_OFF,
}


def prepare(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    source_lang: str,
    target_lang: str,
    *,
    val: str | Path | None = None,
    test: str | Path | None = None,
    val_fraction: float = 0,
    test_fraction: float = 0,
    vocab_size: int = VOCAB_SIZE,
    workers: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Writes the prepared folder `out` from sentence pairs; `DESCRIPTION` lists what it reads.

    With several workers, a script must call this under `if __name__ == "__main__":`, because they
    are spawned.

    Training pairs are dropped when, normalised, a side is empty; both sides are the same text of
    four words or more; the pair occurred before; or is one of `val` or `test`; a side has more than
    156 subwords; or one side has more than twice the subwords of the other and 5. Pairs of a given
    `val` and `test` are dropped only for an empty side.

    Args:
      inputs: folders, prefixes of parallel files, tables.
      out: the folder to make.
      source_lang, target_lang: as in the names of the files, such as `"en"` and `"de"`.
      val, test: prefixes or tables; None takes those that an input folder holds.
      val_fraction, test_fraction: share of the training pairs, chosen by a hash of the source
        sentence, to use as the split where there is no `val` or `test`.
      vocab_size: ids of the joint vocabulary, with 4 special ones and 256 bytes.
      workers: processes; None means one per core, and only this one for a few megabytes.
      seed: chooses the pairs of the fractions.
      overwrite: replace a folder that an earlier call made, once the new one is whole.
      progress: show progress bars on stderr.

    Returns:
      The manifest: pairs, tokens and hashes of each split, hashes of the inputs and of the
      vocabulary, and for each filter how many pairs it dropped.

    Raises:
      DataError: the arguments or the data are wrong; one sentence.
      OSError: the output cannot be written, for instance because the disk is full.
    """
    inputs = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    _check_arguments(inputs, source_lang, target_lang, val_fraction, test_fraction)
    subwords.check_size(vocab_size)
    languages = source_lang, target_lang
    sources = sentence_pairs.find_inputs(inputs, languages, val, test)
    share = _Share(val_fraction, test_fraction, seed)
    _check_splits(sources, share)
    streams = [
        (split, source) for split in ("test", "val", "train") for source in getattr(sources, split)
    ]
    total = sum(source.size for _, source in streams)
    workers = worker_pool.how_many(workers, 1 if total < worker_pool.SMALL_BYTES else None)
    with TranslationFolderWriter(out, languages, overwrite=overwrite) as writer:
        with progress_bar(total, progress, desc="reading", **_BYTES) as bar:
            survey = _survey(streams, share, workers, bar)
        _check_survey(survey, sources, share)
        if progress:
            print(f"learning {vocab_size} subwords from {len(survey.words)} words", file=sys.stderr)
        vocabulary = subwords.train(survey.words, vocab_size)
        with progress_bar(total, progress, desc="encoding", **_BYTES) as bar:
            dropped = _encode(streams, survey.fates, vocabulary, writer, workers, bar)
        if not writer.pairs["train"]:
            raise DataError(f"no pair of the train split is left ({_list(dropped)})")
        files = list(dict.fromkeys(file for _, source in streams for file in source.files))
        hashes = dict(zip(files, sha256_files(files, workers), strict=True))
        return writer.commit(
            vocabulary,
            filters=dropped,
            max_subwords=MAX_SUBWORDS,
            seed=seed,
            val_fraction=val_fraction or None,
            test_fraction=test_fraction or None,
            inputs=[
                {
                    "split": split,
                    "name": source.name,
                    "pairs": survey.counts[source],
                    "sha256": {file.name: hashes[file] for file in source.files},
                }
                for split, source in streams
            ],
        )


class _Share(NamedTuple):
    """Which pairs of the training input to use for validation and test."""

    val: float
    test: float
    seed: int

    def fate(self, source: str) -> int:
        """Depends on the source alone: a sentence with several translations is in one split."""
        key = hashlib.blake2b(source.encode(), digest_size=8, key=str(self.seed).encode()[:64])
        draw = int.from_bytes(key.digest(), "big") / 2**64
        return _VAL if draw < self.val else _TEST if draw < self.val + self.test else _TRAIN


class _Survey(NamedTuple):
    """Results of the first reading: `fates` has an array (pairs,) uint8 for each stream."""

    fates: list[np.ndarray]
    words: dict[str, int]
    counts: dict[Source, int]


class _Task(NamedTuple):
    """A block of a stream, for a worker."""

    stream: int
    split: str
    block: Block
    fates: np.ndarray | None = None  # uint8, of the first reading


def _survey(streams: list[tuple[str, Source]], share: _Share, workers: int, bar) -> _Survey:
    words: collections.Counter[str] = collections.Counter()
    found: list[tuple[np.ndarray, np.ndarray]] = []  # hashes and fates of each block
    counts = [0] * len(streams)
    tasks = (
        _Task(i, split, block)
        for i, (split, source) in enumerate(streams)
        for block in source.blocks()
    )
    work = functools.partial(_survey_block, share=share)
    with worker_pool.results(work, tasks, workers) as surveyed:
        for task, (own_hashes, own_fates, own_words) in surveyed:
            found.append((own_hashes, own_fates))
            counts[task.stream] += len(own_fates)
            words.update(own_words)
            if len(words) > _MOST_WORDS:
                words = collections.Counter({w: n for w, n in words.items() if n > 1})
            bar.update(task.block.read)
    hashes, fates = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    _drop_repeated(hashes, fates, np.repeat([split == "train" for split, _ in streams], counts))
    sizes = dict(zip([source for _, source in streams], counts, strict=True))
    return _Survey(np.split(fates, np.cumsum(counts)[:-1]), dict(words), sizes)


def _survey_block(task: _Task, share: _Share) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """(hash of each pair (n,) uint64, its fate (n,) uint8, how often each training word occurs)."""
    hashes = np.zeros(len(task.block.source), np.uint64)
    fates = np.zeros(len(task.block.source), np.uint8)
    words: collections.Counter[str] = collections.Counter()
    for i, (source, target) in enumerate(_normalised(task.block)):
        pair = hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8)
        hashes[i] = int.from_bytes(pair.digest(), "little")
        fates[i] = _first_fate(source, target, task.split, share)
        if fates[i] == _TRAIN:
            words.update(source.split(" "))
            words.update(target.split(" "))
    return hashes, fates, dict(words)


def _first_fate(source: str, target: str, split: str, share: _Share) -> int:
    if not source or not target:
        return _EMPTY
    if split != "train":
        return {"val": _VAL, "test": _TEST}[split]
    if source == target and source.count(" ") + 1 >= _COPIED_WORDS:
        return _COPIED
    return share.fate(source) if share.val or share.test else _TRAIN


def _drop_repeated(hashes: np.ndarray, fates: np.ndarray, training: np.ndarray) -> None:
    """Marks training pairs that occurred before or are held out; arrays (pairs,).

    64 bits suffice: among 36 million pairs, any two different ones share a hash with a probability
    of 1 in 28000.
    """
    candidates = np.flatnonzero(training & (fates < _EMPTY))
    _, first = np.unique(hashes[candidates], return_index=True)
    fates[np.delete(candidates, first)] = _DUPLICATE
    fates[candidates[np.isin(hashes[candidates], hashes[~training])]] = _HELD_OUT


def _encode(
    streams: list[tuple[str, Source]],
    fates: list[np.ndarray],
    vocabulary: Subwords,
    writer: TranslationFolderWriter,
    workers: int,
    bar,
) -> dict[str, int]:
    """Writes the pairs; returns how many each filter dropped."""
    totals = np.zeros(_RATIO_OFF + 1, np.int64)
    work = functools.partial(_encode_block, vocabulary=vocabulary)
    with worker_pool.results(work, _encode_tasks(streams, fates), workers) as encoded:
        for task, (own, parts) in encoded:
            totals += np.bincount(own, minlength=len(totals))
            for part in parts:
                writer.add(*part)
            bar.update(task.block.read)
    return {name: int(totals[number]) for name, number in _FILTERS.items()}


def _encode_tasks(streams: list[tuple[str, Source]], fates: list[np.ndarray]) -> Iterator[_Task]:
    for i, (split, source) in enumerate(streams):
        start = 0
        for block in source.blocks():
            stop = start + len(block.source)
            if stop <= len(fates[i]):
                yield _Task(i, split, block, fates[i][start:stop])
            start = stop
        if start != len(fates[i]):
            raise DataError(f"{source.files[0]}: was changed while it was being read")


def _encode_block(task: _Task, vocabulary: Subwords):
    """(the final fates, what to write: (split, ids, (n, 2) lengths, text) of each split)."""
    assert task.fates is not None
    fates = task.fates.copy()
    kept = np.flatnonzero(fates < _EMPTY)
    pairs = list(_normalised(task.block))
    ids = [vocabulary.encode_normalised([pairs[i][side] for i in kept.tolist()]) for side in (0, 1)]
    lengths = np.array([[len(x) for x in side] for side in ids], np.int64).T.reshape(-1, 2)
    if task.split == "train":
        longer, shorter = lengths.max(1, initial=0), lengths.min(1, initial=1 << 30)
        fates[kept[longer > _RATIO * shorter + _SLACK]] = _RATIO_OFF
        fates[kept[longer > MAX_SUBWORDS]] = _LONG
    parts = []
    for number, split in enumerate(("train", "val", "test")):
        chosen = np.flatnonzero(fates[kept] == number)
        if len(chosen):
            flat = [token for i in chosen.tolist() for side in ids for token in side[i]]
            text = None
            if split != "train":
                text = [[_line(side[i]) for i in kept[chosen].tolist()] for side in task.block[:2]]
            parts.append((split, np.array(flat, np.uint16), lengths[chosen], text))
    return fates, parts


def _normalised(block: Block) -> Iterator[tuple[str, str]]:
    for i, sides in enumerate(zip(block.source, block.target, strict=True)):
        try:
            yield normalise(sides[0].decode()), normalise(sides[1].decode())
        except UnicodeDecodeError as error:
            place = block.places[0 if error.object is sides[0] else 1]
            raise DataError(f"{place}, line {block.line + i}: invalid UTF-8") from None


def _line(sentence: bytes) -> str:
    """The original sentence on one line, which BLEU compares with."""
    return " ".join(sentence.decode().removeprefix("\ufeff").split())


def _check_arguments(inputs, source_lang, target_lang, val_fraction, test_fraction) -> None:
    if not inputs:
        raise DataError("no input given")
    for language in (source_lang, target_lang):
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", language):
            raise DataError(f"a language is named like en or de, got {shown(language)}")
    if source_lang == target_lang:
        raise DataError(f"source and target are the same language, {source_lang!r}")
    for name, value in {"val_fraction": val_fraction, "test_fraction": test_fraction}.items():
        if not 0 <= value < 1:
            raise DataError(f"{name} must be at least 0 and less than 1, got {value}")
    if val_fraction + test_fraction >= 1:
        raise DataError("val_fraction and test_fraction together leave nothing to train on")


def _check_splits(sources: sentence_pairs.Inputs, share: _Share) -> None:
    for split, other in (("val", "validation"), ("test", "test")):
        given = getattr(sources, split)
        if given and getattr(share, split):
            raise DataError(
                f"there are {other} pairs ({given[0].name}), so --{split}_fraction has no part"
            )
    if not sources.val and not share.val:
        raise DataError(
            "there are no validation pairs (newstest2013 in WMT14's dev.tgz); pass --val PREFIX, or"
            " --val_fraction F to take a share of the training pairs"
        )


def _check_survey(survey: _Survey, sources: sentence_pairs.Inputs, share: _Share) -> None:
    fates = np.concatenate(survey.fates)
    counts = np.bincount(fates, minlength=_RATIO_OFF + 1)
    for split, number in (("train", _TRAIN), ("val", _VAL), ("test", _TEST)):
        if counts[number]:
            continue
        if split != "train" and getattr(share, split):
            raise DataError(
                f"none of {len(fates)} pairs fell into the {split} split with --{split}_fraction"
                f" {getattr(share, split):g}; choose a larger one"
            )
        if getattr(sources, split):
            dropped = {name: int(counts[number]) for name, number in _FILTERS.items()}
            raise DataError(f"no pair of the {split} split is left ({_list(dropped)})")


def _list(dropped: dict[str, int]) -> str:
    found = ", ".join(f"{count} {name}" for name, count in dropped.items() if count)
    return f"dropped: {found or 'none'}"


# --- The command, see `decent_jax.commands.prepare` -----------------------------------------------

DESCRIPTION = """\
Turns sentence pairs into token ids of a joint vocabulary of subwords: OUT/train.ids and so on,
OUT/vocabulary.model and OUT/manifest.json; for validation and test pairs it keeps the text too.

PATH is a prefix (data/train for data/train.en and data/train.de, each also as .gz), a .tsv or
.tsv.gz with the two sides in its first two columns, or a folder: of files named train, val and
test, of WMT14's archives as downloaded (training-parallel-*.tgz, dev.tgz for newstest2013,
test-full.tgz for newstest2014), or of TFDS wmt14_translate stored as array_record.

Empty, untranslated and repeated pairs are left out of training, those of val and test, and those
with a side that is too long or far longer than the other; the manifest counts them.
"""
EXAMPLE = """\
example, WMT14 from the original archives:
  decent-jax prepare translation --source_lang en --target_lang de \\
      --input wmt14_archives/ --out data/wmt14_ende

OUT appears when it is whole. After a kill, start the same command again.
"""
INTERRUPTED = "nothing was written"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `prepare` that only translation has."""
    add = parser.add_argument
    add("--source_lang", required=True, metavar="EN", help="the language to translate from")
    add("--target_lang", required=True, metavar="DE", help="the language to translate to")
    for split, name in (("val", "validation"), ("test", "test")):
        group = parser.add_mutually_exclusive_group()
        group.add_argument(
            f"--{split}", metavar="PATH", help=f"prefix or table of the {name} pairs"
        )
        group.add_argument(
            f"--{split}_fraction",
            type=float,
            default=0,
            metavar="F",
            help=f"take a share of the training pairs as {name} pairs",
        )
    add(
        "--vocab_size",
        type=int,
        default=VOCAB_SIZE,
        metavar="N",
        help=f"subwords of the joint vocabulary (default: {VOCAB_SIZE})",
    )
    add("--seed", type=int, default=0, help="chooses the pairs of the fractions (default: 0)")


def report(manifest: dict[str, Any]) -> Iterator[str]:
    """What the command prints about a finished folder."""
    for split, entry in manifest["splits"].items():
        tokens = " ".join(f"{count:>14,} {name}" for name, count in entry["tokens"].items())
        yield f"{split:5} {entry['pairs']:>12,} pairs {tokens} tokens"
    if "test" not in manifest["splits"]:
        yield "no test pairs: none were given"
    yield f"{_list(manifest['filters'])}; vocabulary of {manifest['vocab_size']}"
