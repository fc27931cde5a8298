"""Turns sentence pairs into token ids for training: `decent-jax prepare translation`.

The input is read twice. The first reading cleans, counts and hashes the pairs, which gives the
vocabulary and the duplicates; the second writes the remaining pairs as ids. Memory holds one hash
per pair and the distinct words, not the text.
"""

import argparse
import collections
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decent_jax.data import worker_pool
from decent_jax.data.prepared_folder import chosen
from decent_jax.data.reading import as_paths
from decent_jax.data.translation import sentence_pairs, subwords
from decent_jax.data.translation.pair_folder import SPLITS, TranslationFolderWriter
from decent_jax.data.translation.sentence_pairs import Lines, PairSource
from decent_jax.data.translation.subwords import Subwords, normalize
from decent_jax.ground.errors import DataError
from decent_jax.ground.format import shown
from decent_jax.ground.json_files import Json
from decent_jax.ground.progress import announce

VOCAB_SIZE = 37120  # as in From Promise to Practice, for English and German
MAX_SUBWORDS = 156  # as in the same paper, which truncates longer sentences

_RATIO, _SLACK = 2.0, 5  # the longer side has at most 2 times the shorter's subwords plus 5
_COPIED_WORDS = 4  # equal sides of fewer words may be names or numbers
_MOST_WORDS = 8_000_000  # distinct words in memory; beyond, words seen only once are dropped

# The fate of a pair: a split, as in `SPLITS`, or the filter that drops it
_TRAIN, _VAL, _TEST, _EMPTY, _COPIED, _DUPLICATE, _HELD_OUT, _LONG, _RATIO_OFF = range(9)
_FILTERS: tuple[str, ...] = (
    "empty_side",
    "untranslated",
    "duplicate",
    "also_in_val_or_test",
    "too_long",
    "length_ratio",
)

Streams = list[tuple[str, PairSource]]  # (split, source) in the order of reading


def prepare(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    languages: Sequence[str],
    *,
    val: str | Path | float | None = None,
    test: str | Path | None = None,
    vocab_size: int = VOCAB_SIZE,
    workers: int | None = None,
    overwrite: bool = False,
) -> Json:
    """Writes the prepared folder `out` from sentence pairs; `DESCRIPTION` lists the formats.

    With several workers, a script must call this under `if __name__ == "__main__":`, because they
    are spawned.

    A training pair is dropped if, after normalization, a side is empty; both sides are the same
    text of four or more words; the pair repeats an earlier one, or one of `val` or `test`; a side
    has more than 156 subwords; or one side has more than twice the other's subwords plus 5. Pairs
    of `val` and `test` are dropped only if a side is empty; a side of more than 1024 subwords is an
    error.

    Args:
      inputs: folders, or prefixes of parallel files.
      out: the folder to make.
      languages: the languages to translate from and to, as in the file names: `("en", "de")`.
      val, test: prefixes; None takes the pairs that an input folder holds. A number `val` is the
        share of the training pairs to use for validation, chosen by a hash of the source sentence.
      vocab_size: number of ids in the joint vocabulary, including 4 special ones and 256 bytes.
      workers: number of processes; None means one per core, or only this one for a few megabytes.
      overwrite: whether to replace an earlier call's folder, once the new one is complete.

    Returns:
      The manifest: pairs, tokens and hashes of each split, names of the inputs, the vocabulary's
      hash, and the number of pairs that each filter dropped.

    Raises:
      DataError: the arguments or the data are wrong; the message is one sentence.
      OSError: the output cannot be written, for instance because the disk is full.
    """
    prefix, val_fraction = (None, val) if isinstance(val, int | float) else (val, 0)
    languages = _checked_languages(languages)
    subwords.check_size(vocab_size)
    sources = sentence_pairs.find_inputs(as_paths(inputs), languages, prefix, test)
    _check_splits(sources, val_fraction)
    streams = [(split, source) for split in SPLITS[::-1] for source in getattr(sources, split)]
    total = sum(source.size for _, source in streams)
    workers = worker_pool.how_many(workers, small=total < worker_pool.SMALL_BYTES)
    options: Json = {"workers": workers, "total": total}
    with TranslationFolderWriter(out, languages, overwrite=overwrite) as folder:
        survey = _Survey(streams)
        look = functools.partial(_survey_lines, val_fraction=val_fraction)
        worker_pool.encode(_tasks(streams), look, survey.add, desc="reading", **options)
        survey.finish()
        _check_survey(survey, sources, val_fraction)
        learning = f"learning {vocab_size} subwords from {len(survey.words)} words"
        with announce(learning, brief=False):
            vocabulary = subwords.train(survey.words, vocab_size)
        dropped = _encode(_tasks(streams, survey.fates), folder, vocabulary, options)
        if not folder.pairs["train"]:
            raise DataError(f"no pair of the train split is left ({_list(dropped)})")
        return folder.commit(
            vocabulary,
            filters=dropped,
            max_subwords=MAX_SUBWORDS,
            val_fraction=val_fraction or None,
            left_out=dict(sentence_pairs.left_out(as_paths(inputs), sources)),
            streams=[
                {"split": split, "name": source.name, "pairs": len(own)}
                for (split, source), own in zip(streams, survey.fates, strict=True)
            ],
        )


class _Part(NamedTuple):
    """A worker's task: lines of a stream."""

    stream: int
    split: str
    lines: Lines
    fates: np.ndarray | None = None  # uint8, from the first reading


def _encode(
    tasks: Iterable[_Part], folder: TranslationFolderWriter, vocabulary: Subwords, options: Json
) -> dict[str, int]:
    """Writes the pairs as subwords; returns the number of pairs that each filter dropped."""
    fates = np.zeros(_RATIO_OFF + 1, np.int64)

    def add(task: _Part, encoded: tuple[np.ndarray, list[tuple]]) -> int:
        fates[:] += np.bincount(encoded[0], minlength=len(fates))
        for part in encoded[1]:
            folder.add(*part)
        return task.lines.read

    work = functools.partial(_encode_lines, vocabulary=vocabulary)
    worker_pool.encode(tasks, work, add, desc="encoding", **options)
    return dict(zip(_FILTERS, fates[_EMPTY:].tolist(), strict=True))


def _tasks(streams: Streams, fates: list[np.ndarray] | None = None) -> Iterator[_Part]:
    """All lines, in the second reading with their fates; DataError if a file has changed."""
    for i, (split, source) in enumerate(streams):
        start = 0
        for lines in source.blocks():
            stop = start + len(lines.source)
            if fates is None or stop <= len(fates[i]):
                yield _Part(i, split, lines, None if fates is None else fates[i][start:stop])
            start = stop
        if fates is not None and start != len(fates[i]):
            raise DataError(f"{source.files[0]}: was changed while it was being read")


class _Survey:
    """Results of the first reading.

    Attributes:
      fates: for each stream, (pairs,) uint8, the split of each pair or the filter that drops it.
      words: the number of occurrences of each word in the training pairs.
    """

    def __init__(self, streams: Streams):
        self.streams = streams
        self.words: collections.Counter[str] = collections.Counter()
        self._counts = [0] * len(streams)
        self._found: list[tuple[np.ndarray, np.ndarray]] = []  # hashes and fates of each task

    def add(self, task: _Part, looked: tuple[np.ndarray, np.ndarray, dict[str, int]]) -> int:
        hashes, fates, words = looked
        self._found.append((hashes, fates))
        self._counts[task.stream] += len(fates)
        self.words.update(words)
        if len(self.words) > _MOST_WORDS:
            self.words = collections.Counter({w: n for w, n in self.words.items() if n > 1})
        return task.lines.read

    def finish(self) -> None:
        hashes, fates = (np.concatenate(arrays) for arrays in zip(*self._found, strict=True))
        training = np.repeat([split == "train" for split, _ in self.streams], self._counts)
        _drop_repeated(hashes, fates, training)
        self.fates = np.split(fates, np.cumsum(self._counts)[:-1])


def _survey_lines(
    task: _Part, val_fraction: float
) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """(hash of each pair (n,) uint64, its fate (n,) uint8, how often each training word occurs)."""
    hashes = np.zeros(len(task.lines.source), np.uint64)
    fates = np.zeros(len(task.lines.source), np.uint8)
    words: collections.Counter[str] = collections.Counter()
    for i, (source, target) in enumerate(_normalized(task.lines)):
        pair = hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8)
        hashes[i] = int.from_bytes(pair.digest(), "little")
        fates[i] = _first_fate(source, target, task.split, val_fraction)
        if fates[i] == _TRAIN:
            words.update(source.split(" "))
            words.update(target.split(" "))
    return hashes, fates, dict(words)


def _first_fate(source: str, target: str, split: str, val_fraction: float) -> int:
    if not source or not target:
        return _EMPTY
    if split != "train":
        return SPLITS.index(split)
    if source == target and source.count(" ") + 1 >= _COPIED_WORDS:
        return _COPIED
    if not val_fraction:
        return _TRAIN
    # a hash of the source alone, so that all translations of a sentence are in one split
    digest = hashlib.blake2b(source.encode(), digest_size=8, key=b"0").digest()
    return _VAL if chosen(digest, val_fraction) else _TRAIN


def _drop_repeated(hashes: np.ndarray, fates: np.ndarray, training: np.ndarray) -> None:
    """Marks training pairs that repeat an earlier or a held-out pair; all arrays are (pairs,).

    64 bits suffice: the probability of any collision among 36 million different pairs is 1 in
    28000.
    """
    candidates = np.flatnonzero(training & (fates < _EMPTY))
    _, first = np.unique(hashes[candidates], return_index=True)
    fates[np.delete(candidates, first)] = _DUPLICATE
    fates[candidates[np.isin(hashes[candidates], hashes[~training])]] = _HELD_OUT


def _encode_lines(task: _Part, vocabulary: Subwords) -> tuple[np.ndarray, list[tuple]]:
    """(final fates, [(split, ids, (n, 2) lengths, text) to write, for each split])."""
    assert task.fates is not None
    fates = task.fates.copy()
    remaining = np.flatnonzero(fates < _EMPTY)
    pairs = list(_normalized(task.lines))
    ids = [
        vocabulary.encode_normalized([pairs[i][side] for i in remaining.tolist()])
        for side in (0, 1)
    ]
    lengths = np.array([[len(x) for x in side] for side in ids], np.int64).T.reshape(-1, 2)
    if task.split == "train":
        longer, shorter = lengths.max(1, initial=0), lengths.min(1, initial=1 << 30)
        fates[remaining[longer > _RATIO * shorter + _SLACK]] = _RATIO_OFF
        fates[remaining[longer > MAX_SUBWORDS]] = _LONG
    elif (long := np.argwhere(lengths > subwords.LONGEST)).size:
        row, side = long[0].tolist()
        raise DataError(
            f"{task.lines.places[side]}, line {task.lines.line + remaining[row]}: has"
            f" {lengths[row, side]} subwords, more than {subwords.LONGEST}; split the pair or take"
            " it out"
        )
    parts = []
    for number, split in enumerate(SPLITS):
        own = np.flatnonzero(fates[remaining] == number)
        if len(own):
            flat = [token for i in own.tolist() for side in ids for token in side[i]]
            text = None
            if split != "train":
                text = [
                    [_line(side[i]) for i in remaining[own].tolist()] for side in task.lines[:2]
                ]
            parts.append((split, np.array(flat, np.uint16), lengths[own], text))
    return fates, parts


def _normalized(lines: Lines) -> Iterator[tuple[str, str]]:
    for i, sides in enumerate(zip(lines.source, lines.target, strict=True)):
        try:
            yield normalize(sides[0].decode()), normalize(sides[1].decode())
        except UnicodeDecodeError as error:
            place = lines.places[0 if error.object == sides[0] else 1]  # the error holds a copy
            raise DataError(f"{place}, line {lines.line + i}: invalid UTF-8") from None


def _line(sentence: bytes) -> str:
    """The original sentence on one line, as a reference for BLEU."""
    return " ".join(sentence.decode().removeprefix("\ufeff").split())


def _checked_languages(languages: Sequence[str]) -> tuple[str, str]:
    for language in languages:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", language):
            raise DataError(f"a language is named like en or de, got {shown(language)}")
    if isinstance(languages, str) or len(languages) != 2:
        raise DataError(f"languages must be two names, such as ('en', 'de'), got {languages!r}")
    source, target = languages
    if source == target:
        raise DataError(f"source and target are the same language, {source!r}")
    return source, target


def _check_splits(sources: sentence_pairs.Inputs, val_fraction: float) -> None:
    if not 0 <= val_fraction < 1:
        raise DataError(f"val_fraction must be at least 0 and less than 1, got {val_fraction}")
    if not sources.train:
        raise DataError("no input given")
    if sources.val and val_fraction:
        name = sources.val[0].name
        raise DataError(f"there are validation pairs ({name}), so --val_fraction does not apply")
    if not sources.val and not val_fraction:
        raise DataError(
            "there are no validation pairs; pass --val PREFIX, or --val_fraction F to take a share"
            " of the training pairs"
        )


def _check_survey(survey: _Survey, sources: sentence_pairs.Inputs, val_fraction: float) -> None:
    counts = np.bincount(np.concatenate(survey.fates), minlength=_RATIO_OFF + 1)
    if val_fraction and counts[_TRAIN] and not counts[_VAL]:
        raise DataError(
            f"none of {counts.sum()} pairs fell into the val split with --val_fraction"
            f" {val_fraction:g}; choose a larger one"
        )
    for split, count in zip(SPLITS, counts, strict=False):
        if getattr(sources, split) and not count:
            dropped = dict(zip(_FILTERS, counts[_EMPTY:].tolist(), strict=True))
            raise DataError(f"no pair of the {split} split is left ({_list(dropped)})")


def _list(dropped: dict[str, int]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in dropped.items() if count)
    return f"dropped: {counts or 'none'}"


# --- The command, see `decent_jax.commands.prepare` -----------------------------------------------

DESCRIPTION = """\
Turns sentence pairs into token ids of a joint vocabulary of subwords: OUT/train.ids and so on,
OUT/vocabulary.model and OUT/manifest.json. The text of validation and test pairs is kept, too.

PATH is a prefix (data/train for data/train.en and data/train.de, each also as .gz, .bz2, .xz or
.zst), or a folder of files named train, val and test.

Training leaves out pairs that are untranslated, repeated or also in val or test, and pairs with a
side that is empty, too long or far longer than the other side. The manifest counts them.
"""
EXAMPLE = """\
example, WMT14 from its unpacked archives:
  decent-jax prepare translation --source_lang en --target_lang de \\
      --input training/europarl-v7.de-en commoncrawl.de-en training/news-commentary-v9.de-en \\
      --val newstest2013 --test newstest2014 --out data/wmt14_ende

OUT appears when it is complete. After a kill, start the same command again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `prepare` that only translation has."""
    add, one_of = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--source_lang", required=True, metavar="EN", help="the language to translate from")
    add("--target_lang", required=True, metavar="DE", help="the language to translate to")
    one_of("--val", metavar="PATH", help="prefix of the validation pairs")
    share = "fraction of the training pairs to use as validation pairs"
    one_of("--val_fraction", dest="val", type=float, metavar="F", help=share)
    add("--test", metavar="PATH", help="prefix of the test pairs")
    size = "number of subwords in the joint vocabulary (%(default)s)"
    add("--vocab_size", type=int, default=VOCAB_SIZE, metavar="N", help=size)


def report(manifest: Json) -> Iterator[str]:
    """The lines that the command prints about a finished folder."""
    for split, entry in manifest["splits"].items():
        tokens = " ".join(f"{count:>14,} {name}" for name, count in entry["tokens"].items())
        yield f"{split:5} {entry['pairs']:>12,} pairs {tokens} tokens"
    if "test" not in manifest["splits"]:
        yield "no test pairs: none were given"
    yield f"{_list(manifest['filters'])}; vocabulary of {manifest['vocab_size']}"
