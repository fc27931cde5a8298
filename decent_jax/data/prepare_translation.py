"""Turns sentence pairs into token ids for training: ``python -m ...prepare_translation``.

The input is read twice by all cores: once to clean, count and hash the pairs, which gives the
vocabulary and the duplicates; once to write what is left as ids. Results are taken in the order of
the input, so the output is the same byte for byte for any number of workers. Of each pair a hash
stays in memory, of the text only the distinct words.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decent_jax.data import parallel_inputs, subwords, worker_pool
from decent_jax.data.parallel_inputs import Block, Source
from decent_jax.data.prepared_folder import check_out, sha256_file
from decent_jax.data.subwords import normalise
from decent_jax.data.translation_files import KIND, TranslationFolderWriter, read_manifest
from decent_jax.errors import DataError
from decent_jax.progress import progress_bar

VOCAB_SIZE = 37120  # the reference's, for English and German
MAX_SUBWORDS = 156  # the reference's, which cuts longer sentences off

_RATIO, _SLACK = 2.0, 5  # the longer side has at most 2 times the shorter's subwords and 5
_COPIED_WORDS = 4  # names and numbers are equal in both languages, sentences of so many words not
_MOST_WORDS = 8_000_000  # distinct ones in memory; beyond, those seen once so far are forgotten
_SMALL_BYTES = 8 << 20  # below, starting workers takes longer than the work

_BYTES = {"unit": "B", "unit_scale": True}  # how progress is counted

# What becomes of a pair: a split, or the filter that drops it
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
    inputs: Iterable[str | Path],
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
) -> dict:
    """Writes the prepared folder ``out`` from sentence pairs; see ``--help`` for what is read.

    With several workers, a script must call this under ``if __name__ == "__main__":``, for they
    are spawned.

    Training pairs are dropped when, normalised, a side is empty; both sides are the same text of
    four words or more; the pair occurred before; or is one of ``val`` or ``test``; a side has more
    than 156 subwords; or one side has more than twice the subwords of the other and 5. Pairs of a
    given ``val`` and ``test`` are dropped for an empty side alone.

    Args:
      inputs: folders, prefixes of parallel files, tables.
      out: the folder to make.
      source_lang, target_lang: as in the names of the files, such as ``"en"`` and ``"de"``.
      val, test: prefixes or tables; None: those that an input folder brings along.
      val_fraction, test_fraction: share of the training pairs, chosen by a hash of the source
        sentence, that become the split in place of ``val`` or ``test``.
      vocab_size: ids of the joint vocabulary, with 4 special ones and 256 bytes.
      workers: processes; None means one a core, and none but this one for a few megabytes.
      seed: chooses the pairs of the fractions.
      overwrite: replace a folder that an earlier call made, once the new one is whole.
      progress: show progress bars on stderr.

    Returns:
      The manifest: pairs, tokens and hashes of each split, hashes of the inputs and of the
      vocabulary, and for each filter how many pairs it dropped.

    Raises:
      DataError: anything wrong with the arguments or the data, as one sentence.
      OSError: the output cannot be written, for instance a full disk.
    """
    inputs = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    _check_arguments(inputs, source_lang, target_lang, val_fraction, test_fraction, workers)
    check_out(Path(os.path.abspath(out)), KIND, read_manifest, overwrite=overwrite)
    languages = source_lang, target_lang
    sources = parallel_inputs.find_inputs(inputs, languages, val, test)
    share = _Share(val_fraction, test_fraction, seed)
    _check_splits(sources, share)
    streams = [
        (split, source) for split in ("test", "val", "train") for source in getattr(sources, split)
    ]
    total = sum(source.size for _, source in streams)
    if workers is None:
        workers = 1 if total < _SMALL_BYTES else worker_pool.cores()
    with (
        TranslationFolderWriter(out, languages, overwrite=overwrite) as writer,
        _pool(workers) as run,
    ):
        with progress_bar(total, progress, desc="reading", **_BYTES) as bar:
            survey = _survey(run, streams, share, bar)
        _check_survey(survey, sources, share)
        if progress:
            print(f"learning {vocab_size} subwords from {len(survey.words)} words", file=sys.stderr)
        vocabulary = subwords.train(survey.words, vocab_size)
        vocabulary.save(writer.folder)
        with progress_bar(total, progress, desc="encoding", **_BYTES) as bar:
            dropped = _encode(run, streams, survey.fates, writer, bar)
        if not writer.pairs["train"]:
            raise DataError(f"no pair of the train split is left ({_list(dropped)})")
        files = {file: (file,) for _, source in streams for file in source.files}
        hashes = dict(run(sha256_file, files.items()))
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
    """Which pairs of the training input are for validation and test."""

    val: float
    test: float
    seed: int

    def fate(self, source: str) -> int:
        """By the source alone: a sentence with several translations is in one split."""
        key = hashlib.blake2b(source.encode(), digest_size=8, key=str(self.seed).encode()[:64])
        draw = int.from_bytes(key.digest(), "big") / 2**64
        return _VAL if draw < self.val else _TEST if draw < self.val + self.test else _TRAIN


class _Survey(NamedTuple):
    """What the first reading found: ``fates`` has an array (pairs,) uint8 for each stream."""

    fates: list[np.ndarray]
    words: dict[str, int]
    counts: dict[Source, int]


def _survey(run, streams, share: _Share, bar) -> _Survey:
    words: collections.Counter = collections.Counter()
    hashes, fates, counts = [], [], {}
    for split, source in streams:
        found, surveyed = [], run(_survey_block, ((b, (b, split, share)) for b in source.blocks()))
        for block, (own_hashes, own_fates, own_words) in surveyed:
            found.append((own_hashes, own_fates))
            words.update(own_words)
            if len(words) > _MOST_WORDS:
                words = collections.Counter({w: n for w, n in words.items() if n > 1})
            bar.update(block.read)
        hashes.append(np.concatenate([pair[0] for pair in found]))
        fates.append(np.concatenate([pair[1] for pair in found]))
        counts[source] = len(fates[-1])
    training = [i for i, (split, _) in enumerate(streams) if split == "train"]
    held_out = [hashes[i] for i in range(len(streams)) if i not in training]
    _drop_repeated(
        [hashes[i] for i in training],
        [fates[i] for i in training],
        np.concatenate([np.zeros(0, np.uint64), *held_out]),
    )
    return _Survey(fates, dict(words), counts)


def _survey_block(block: Block, split: str, share: _Share):
    """(hash of each pair (n,) uint64, its fate (n,) uint8, how often each training word occurs)."""
    hashes = np.zeros(len(block.source), np.uint64)
    fates = np.zeros(len(block.source), np.uint8)
    words: collections.Counter = collections.Counter()
    for i, (source, target) in enumerate(_normalised(block)):
        pair = hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8)
        hashes[i] = int.from_bytes(pair.digest(), "little")
        fates[i] = _first_fate(source, target, split, share)
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


def _drop_repeated(hashes: list[np.ndarray], fates: list[np.ndarray], held_out) -> None:
    """Marks pairs that occurred before or are held out. 64 bits: at 36 million pairs, the chance
    that two different ones share a hash at all is 1 in 28000."""
    if not hashes:
        return
    candidates = [np.flatnonzero(own < _EMPTY) for own in fates]
    everything = np.concatenate([own[at] for own, at in zip(hashes, candidates, strict=True)])
    _, first = np.unique(everything, return_index=True)
    repeated = np.ones(len(everything), bool)
    repeated[first] = False
    forbidden = np.isin(everything, held_out)
    ends = np.cumsum([len(at) for at in candidates])[:-1]
    parts = zip(np.split(repeated, ends), np.split(forbidden, ends), strict=True)
    for own, at, (again, known) in zip(fates, candidates, parts, strict=True):
        own[at[again]] = _DUPLICATE
        own[at[known]] = _HELD_OUT


def _encode(run, streams, fates: list[np.ndarray], writer, bar) -> dict[str, int]:
    """Writes the pairs; returns how many each filter dropped."""
    totals = np.zeros(_RATIO_OFF + 1, np.int64)
    for (split, source), fate in zip(streams, fates, strict=True):
        filtered = split == "train"
        tasks = _encode_tasks(source, fate, str(writer.folder), filtered)
        for block, (own, parts) in run(_encode_block, tasks):
            totals += np.bincount(own, minlength=len(totals))
            for part in parts:
                writer.add(*part)
            bar.update(block.read)
    return {name: int(totals[number]) for name, number in _FILTERS.items()}


def _encode_tasks(source: Source, fate: np.ndarray, folder: str, filtered: bool):
    start = 0
    for block in source.blocks():
        own = fate[start : start + len(block.source)]
        if len(own) < len(block.source):
            break
        yield block, (block, own, folder, filtered)
        start += len(own)
    else:
        if start == len(fate):
            return
    raise DataError(f"{source.files[0]}: was changed while it was being read")


def _encode_block(block: Block, fates: np.ndarray, folder: str, filtered: bool):
    """(the fates in the end, what to write: (split, ids, (n, 2) lengths, text) of each split)."""
    vocabulary = _vocabulary(folder)
    fates = fates.copy()
    kept = np.flatnonzero(fates < _EMPTY)
    pairs = list(_normalised(block))
    ids = [vocabulary.encode_normalised([pairs[i][side] for i in kept.tolist()]) for side in (0, 1)]
    lengths = np.array([[len(x) for x in side] for side in ids], np.int64).T.reshape(-1, 2)
    if filtered:
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
                text = [[_line(side[i]) for i in kept[chosen].tolist()] for side in block[:2]]
            parts.append((split, np.array(flat, np.uint16), lengths[chosen], text))
    return fates, parts


@functools.lru_cache(maxsize=1)
def _vocabulary(folder: str) -> subwords.Subwords:
    return subwords.load(folder)  # of this run alone: the folder's name is random


def _normalised(block: Block) -> Iterator[tuple[str, str]]:
    for i, sides in enumerate(zip(block.source, block.target, strict=True)):
        try:
            yield normalise(sides[0].decode()), normalise(sides[1].decode())
        except UnicodeDecodeError as error:
            place = block.places[0 if error.object is sides[0] else 1]
            raise DataError(f"{place}, line {block.line + i}: invalid UTF-8") from None


def _line(sentence: bytes) -> str:
    """As it is, on one line: what BLEU compares with."""
    return " ".join(sentence.decode().removeprefix("\ufeff").split())


def _check_arguments(inputs, source_lang, target_lang, val_fraction, test_fraction, workers):
    if not inputs:
        raise DataError("no input given")
    for language in (source_lang, target_lang):
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", language):
            raise DataError(f"a language is named like en or de, got {language!r}")
    if source_lang == target_lang:
        raise DataError(f"source and target are the same language, {source_lang!r}")
    for name, value in {"val_fraction": val_fraction, "test_fraction": test_fraction}.items():
        if not 0 <= value < 1:
            raise DataError(f"{name} must be at least 0 and less than 1, got {value}")
    if val_fraction + test_fraction >= 1:
        raise DataError("val_fraction and test_fraction together leave nothing to train on")
    if workers is not None and workers < 1:
        raise DataError(f"workers must be at least 1, got {workers}")


def _check_splits(sources: parallel_inputs.Inputs, share: _Share) -> None:
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


def _check_survey(survey: _Survey, sources: parallel_inputs.Inputs, share: _Share) -> None:
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


@contextlib.contextmanager
def _pool(workers: int):
    """``run(function, tasks)``: an iterator of (key, result) in the order of the (key, arguments)
    in ``tasks``, worked on by so many processes."""
    if workers == 1:
        yield lambda function, tasks: ((key, function(*args)) for key, args in tasks)
        return
    with worker_pool.open_pool(workers) as pool:
        yield functools.partial(_in_order, pool, 2 * workers)


def _in_order(pool, most: int, function, tasks):
    pending: collections.deque = collections.deque()
    for key, args in tasks:
        pending.append((key, pool.submit(function, *args)))
        if len(pending) == most:
            key, future = pending.popleft()
            yield key, future.result()
    for key, future in pending:
        yield key, future.result()


_DESCRIPTION = """\
Turns sentence pairs into token ids of a joint vocabulary of subwords: OUT/train.ids and so on,
OUT/vocabulary.model and OUT/manifest.json; of validation and test pairs the text is kept too.

PATH is a prefix (data/train for data/train.en and data/train.de, each also as .gz), a .tsv or
.tsv.gz with the two sides in its first two columns, or a folder: of train, val and test files so
named, of WMT14's archives as they were fetched (training-parallel-*.tgz, dev.tgz for newstest2013,
test-full.tgz for newstest2014), or of TFDS wmt14_translate stored as array_record.

Empty, untranslated and repeated pairs are left out of training, those of val and test, and those
with a side that is too long or far longer than the other; the manifest counts them.
"""
_EXAMPLE = """\
example, WMT14 from the original archives:
  python -m decent_jax.data.prepare_translation --source_lang en --target_lang de \\
      --input wmt14_archives/ --out data/wmt14_ende

OUT appears when it is whole. A run that was killed is simply started again.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m decent_jax.data.prepare_translation",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="what to read")
    add("--out", required=True, metavar="DIR", help="the folder to make")
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
    add("--workers", type=int, metavar="N", help="processes (default: one a core)")
    add("--seed", type=int, default=0, help="chooses the pairs of the fractions (default: 0)")
    add("--overwrite", action="store_true", help="replace OUT where it is an earlier result")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0, 2 for bad input, 130 when interrupted."""
    args = vars(_parser().parse_args(argv))
    inputs, out = args.pop("input"), args.pop("out")
    with worker_pool.terminated_politely():
        try:
            manifest = prepare(inputs, out, **args, progress=True)
        except (DataError, FileExistsError) as error:
            print(f"prepare_translation: {error}", file=sys.stderr)
            return 2
        except OSError as error:  # of the output: a full disk, say
            print(f"prepare_translation: {out}: {error.strerror or error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("prepare_translation: interrupted; nothing was written", file=sys.stderr)
            return 130
    for split, entry in manifest["splits"].items():
        tokens = " ".join(f"{count:>14,} {name}" for name, count in entry["tokens"].items())
        print(f"{split:5} {entry['pairs']:>12,} pairs {tokens} tokens")
    if "test" not in manifest["splits"]:
        print("no test pairs: none were given")
    print(f"{_list(manifest['filters'])}; vocabulary of {manifest['vocab_size']}")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
