"""Sentence pairs from parallel files.

A source always yields its pairs in the same blocks of undecoded lines. Only a line feed ends a
line. Web text is full of other characters that Python may treat as line ends, such as a lone
carriage return; each of them would shift all pairs that follow.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from decent_jax.data.reading import PACKED, kind_of, one_sentence, opened, read_line
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import check_regular

BLOCK_LINES = 5000
_LONGEST_SENTENCE = 1 << 17  # bytes; a block has 5000 sentences

_SPLIT_NAMES = {
    "train": ("train",),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test",),
}


class Lines(NamedTuple):
    """Some pairs of a source, as UTF-8 without line ends.

    `places` are the names of the two sides for messages, `line` is the number of the first line,
    and `read` is the number of bytes that the progress bar counts.
    """

    source: list[bytes]
    target: list[bytes]
    places: tuple[str, str]
    line: int
    read: int


class PairSource:
    """Sentence pairs in two files, one sentence per line.

    Attributes:
      name: the source's name in the manifest, which is the same on every machine.
      files: the file of sources and the file of targets.
      size: the size of both files in bytes, for the progress bar.
    """

    def __init__(self, source: Path, target: Path):
        self.files = source, target
        self.name = f"{source.name} {target.name}"
        self.size = 0
        for path in self.files:
            with one_sentence(path):
                check_regular(path)
                self.size += path.stat().st_size

    def blocks(self) -> Iterator[Lines]:
        """All pairs in blocks; DataError if they cannot be read."""
        places = str(self.files[0]), str(self.files[1])
        counts, read = [0, 0], 0
        with _lines(self.files[0]) as (sources, raw1), _lines(self.files[1]) as (targets, raw2):
            pairs = itertools.zip_longest(sources, targets)
            while some := list(itertools.islice(pairs, BLOCK_LINES)):
                two = [[x for x in side if x is not None] for side in zip(*some, strict=True)]
                before, read = read, raw1.tell() + raw2.tell()
                if counts[0] == counts[1] and len(two[0]) == len(two[1]):
                    yield Lines(two[0], two[1], places, counts[0] + 1, read - before)
                counts = [count + len(side) for count, side in zip(counts, two, strict=True)]
        for place, count in zip(places, counts, strict=True):
            if not count:
                raise DataError(f"{place}: is empty")
        if counts[0] != counts[1]:
            raise DataError(
                f"{places[0]} has {counts[0]} lines and {places[1]} has {counts[1]}; both must"
                " have one line per pair"
            )


@contextlib.contextmanager
def _lines(path: Path):
    """`with _lines(path) as (lines, raw)`: an iterator of bytes, and the file on the disk."""

    def lines(file) -> Iterator[bytes]:
        with one_sentence(path):  # or the context of the other side, also open, would name its path
            for number in itertools.count(1):
                line = read_line(file, _LONGEST_SENTENCE, f"{path}, line {number}")
                if not line:
                    return
                yield line.removesuffix(b"\n")

    with one_sentence(path), opened(path) as (file, raw):
        yield lines(file), raw


class Inputs(NamedTuple):
    """The sources of each split."""

    train: list[PairSource]
    val: list[PairSource]
    test: list[PairSource]


def find_inputs(
    inputs: Iterable[str | Path],
    languages: tuple[str, str],
    val: str | Path | None = None,
    test: str | Path | None = None,
) -> Inputs:
    """The sources that the paths name.

    A path is a prefix: `train` for `train.en` and `train.de`, each plain or compressed. A path in
    ``inputs`` may also be a folder of such files, which may include validation and test pairs.

    Args:
      inputs: the paths of the training pairs.
      languages: the codes of the source and the target language.
      val, test: paths that replace the folders' validation and test pairs.

    Raises:
      DataError: a path names nothing readable, a side is missing, or a file is given twice.
    """
    result = Inputs([], [], [])
    for path in map(Path, inputs):
        chosen = (
            _folder(path, languages) if path.is_dir() else Inputs([_one(path, languages)], [], [])
        )
        for sources, more in zip(result, chosen, strict=True):
            sources += more
    for split, path in {"val": val, "test": test}.items():
        if path is not None:
            getattr(result, split)[:] = [_one(Path(path), languages)]
    seen: set = set()
    for source in itertools.chain(*result):
        key = tuple(file.resolve() for file in source.files)
        if key in seen:
            raise DataError(f"{source.files[0]}: is given twice")
        seen.add(key)
    return result


def left_out(inputs: Iterable[str | Path], sources: Inputs) -> Counter[str]:
    """The numbers of files of each kind in the folders of ``inputs`` that are not read."""
    read = {file.resolve() for source in itertools.chain(*sources) for file in source.files}
    return Counter(
        f"folder {path.name}" if path.is_dir() else kind_of(path.name)
        for folder in map(Path, inputs)
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if path.resolve() not in read
    )


def _folder(path: Path, languages) -> Inputs:
    splits = []
    for names in _SPLIT_NAMES.values():
        prefixes = [path / name for name in names if _sides(path / name, languages)]
        splits.append([_one(prefix, languages) for prefix in prefixes[:1]])
    if not splits[0]:
        names = ", ".join(f"train.{language}" for language in languages)
        raise DataError(f"{path}: holds no training pairs ({names}, each plain or compressed)")
    return Inputs(*splits)


def _one(path: Path, languages) -> PairSource:
    sides = _sides(path, languages)
    if len(sides) == 2:
        return PairSource(*sides)
    names = " and ".join(f"{path}.{language}" for language in languages)
    there = f"of these only {sides[0].name}" if sides else "neither"
    raise DataError(
        f"{path}: no sentence pairs; expected {names}, plain or compressed, but {there} is there"
    )


def _sides(prefix: Path, languages) -> list[Path]:
    """The files of the two languages that exist."""
    sides = []
    for language in languages:
        files = (prefix.with_name(f"{prefix.name}.{language}{packed}") for packed in PACKED)
        sides += [file for file in files if file.exists()][:1]
    return sides
