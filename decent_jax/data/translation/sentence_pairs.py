"""Sentence pairs from parallel files, WMT14's archives and folders of TFDS.

A source gives its pairs as blocks of undecoded lines, always the same; nothing is unpacked. Only a
line feed ends a line: web text is full of other characters that Python's text files take for a line
end, and a single one shifts all pairs that follow.
"""

import contextlib
import gzip
import html
import html.entities
import itertools
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from decent_jax.data import tfds_folder
from decent_jax.data.reading import PACKED, kind_of, one_sentence, opened, read_at_most, read_line
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import check_regular

BLOCK_LINES = 5000
_LONGEST_SENTENCE = 1 << 17  # bytes; 5000 of them are a block
_LARGEST_SGM = 1 << 28  # WMT14's have a megabyte

# Of WMT14: archive -> members, where OTHER is the language that is not English.
# https://www.statmt.org/wmt14/translation-task.html
_TRAINING = {
    "training-parallel-europarl-v7.tgz": "europarl-v7.OTHER-en.LANG",
    "training-parallel-commoncrawl.tgz": "commoncrawl.OTHER-en.LANG",
    "training-parallel-nc-v9.tgz": "news-commentary-v9.OTHER-en.LANG",
}
_FRENCH_TRAINING = {
    "training-parallel-un.tgz": "undoc.2000.fr-en.LANG",
    "training-giga-fren.tar": "giga-fren.release2.fixed.LANG.gz",
}
_DEV, _DEV_MEMBER = "dev.tgz", "newstest2013-SIDE.LANG.sgm"
_TESTS, _TEST_MEMBER = ("test-full.tgz", "test-filtered.tgz"), "newstest2014-OTHERen-SIDE.LANG.sgm"
_WMT14 = {*_TRAINING, *_FRENCH_TRAINING, _DEV, *_TESTS}

_SPLIT_NAMES = {
    "train": ("train",),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test",),
}
_SEGMENT = re.compile(rb"<seg[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)  # SGML, not valid XML

_ENTITY = re.compile(r"&(#?\w+;)")


class Lines(NamedTuple):
    """Some pairs of a source, as UTF-8 without line ends.

    `places` are names of the two sides for messages, `line` is the number of the first line, `read`
    the bytes of progress.
    """

    source: list[bytes]
    target: list[bytes]
    places: tuple[str, str]
    line: int
    read: int


class _Side:
    """The lines of a file, or of a member of an archive."""

    def __init__(self, path: Path, member: str = ""):
        with one_sentence(path):
            check_regular(path)
        self.path = path
        self.member = member
        self.place = f"{path}, {member}" if member else str(path)
        self.name = f"{path.name}/{member}" if member else path.name

    @contextlib.contextmanager
    def open(self):
        """`with side.open() as (lines, raw)`: an iterator of bytes, and the file on the disk."""
        with contextlib.ExitStack() as stack, one_sentence(self.place):
            file, raw = stack.enter_context(opened(self.path))
            if self.member:
                file = self._find_member(stack, file)
                if self.member.endswith(".gz"):
                    file = stack.enter_context(gzip.GzipFile(fileobj=file))
            yield self._lines(file), raw

    def _find_member(self, stack, file):
        # a stream, because a compressed archive can only be read from the beginning
        archive = stack.enter_context(tarfile.open(fileobj=file, mode="r|"))  # noqa: SIM115
        for member in archive:
            if member.isfile() and member.name.rpartition("/")[2] == self.member:
                return archive.extractfile(member)
        raise DataError(f"{self.path}: holds no {self.member}; is it cut short? fetch it again")

    def _lines(self, file) -> Iterator[bytes]:
        with one_sentence(self.place):  # not that of the other side, which is open, too
            if self.member.endswith(".sgm"):
                for segment in _SEGMENT.findall(read_at_most(file, _LARGEST_SGM, self.place)):
                    try:
                        text = _ENTITY.sub(_sign, segment.decode())
                    except UnicodeDecodeError:
                        text = None
                    yield segment if text is None else " ".join(text.split()).encode()
                return
            for number in itertools.count(1):
                line = read_line(file, _LONGEST_SENTENCE, f"{self.place}, line {number}")
                if not line:
                    return
                yield line.removesuffix(b"\n")


def _sign(entity: re.Match) -> str:
    """The sign of a whole entity; `html.unescape` alone also makes one of "&copy=2"."""
    known = entity[1].startswith("#") or entity[1] in html.entities.html5
    return html.unescape(entity[0]) if known else entity[0]


class PairSource:
    """Two files, or two members of archives, line by line.

    Attributes:
      name: its name in the manifest: no machine's path, the same on every machine.
      files: the files that hold them.
      size: in bytes, for progress.
    """

    def __init__(self, source: _Side, target: _Side):
        self.sides = source, target
        self.files = tuple(dict.fromkeys(side.path for side in self.sides))
        self.name = f"{source.name} {target.name}"
        self.size = sum(side.path.stat().st_size for side in self.sides)

    def blocks(self) -> Iterator[Lines]:
        """All pairs; DataError where they cannot be read."""
        places = self.sides[0].place, self.sides[1].place
        counts, read = [0, 0], 0
        with self.sides[0].open() as (sources, raw1), self.sides[1].open() as (targets, raw2):
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
                f"{places[0]} has {counts[0]} lines and {places[1]} has {counts[1]}; the two sides"
                " must have a line each for every pair"
            )


class _TfdsPairs(PairSource):
    """One split of a folder prepared by TFDS."""

    def __init__(self, split: tfds_folder.Split, languages: tuple[str, str]):
        self._split, self._languages = split, languages
        self.files, self.name, self.size = split.files, split.name, split.size

    def blocks(self) -> Iterator[Lines]:
        """All pairs; DataError where they cannot be read."""
        total = len(self._split.records)
        for start, block in self._split.blocks(BLOCK_LINES):
            source, target = ([pair[language] for pair in block] for language in self._languages)
            read = self.size * len(block) // total
            yield Lines(source, target, (self.name, self.name), start + 1, read)


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
    """The sources that paths stand for.

    A path is a prefix (`train` for `train.en` and `train.de`, each plain or packed) or, for
    training, a folder: of such files, of WMT14's archives, or of TFDS (wmt14_translate). Folders
    may hold validation and test pairs too.

    Args:
      inputs: the paths.
      languages: of the source and the target side.
      val, test: paths that replace the folders' validation and test pairs.

    Raises:
      DataError: nothing readable is there, a side is missing, or a file is given twice.
    """
    found = Inputs([], [], [])
    for path in map(Path, inputs):
        given = (
            _folder(path, languages) if path.is_dir() else Inputs([_one(path, languages)], [], [])
        )
        for sources, more in zip(found, given, strict=True):
            sources += more
    for split, path in {"val": val, "test": test}.items():
        if path is not None:
            getattr(found, split)[:] = [_one(Path(path), languages)]
    seen: set = set()
    for source in itertools.chain(*found):
        key = (source.name, tuple(file.resolve() for file in source.files))
        if key in seen:
            raise DataError(f"{source.files[0]}: is given twice")
        seen.add(key)
    return found


def left_out(inputs: Iterable[str | Path], sources: Inputs) -> Counter[str]:
    """How many of each kind lie in the folders among ``inputs`` and are not of ``sources``."""
    read = {file.resolve() for source in itertools.chain(*sources) for file in source.files}
    return Counter(
        f"folder {path.name}" if path.is_dir() else kind_of(path.name)
        for folder in map(Path, inputs)
        if folder.is_dir() and not tfds_folder.is_tfds(folder)
        for path in sorted(folder.iterdir())
        if path.resolve() not in read
    )


def _folder(path: Path, languages) -> Inputs:
    if tfds_folder.is_tfds(path):
        kinds = dict.fromkeys(languages, "Text")
        splits: list[list[PairSource]] = [
            [_TfdsPairs(split, languages)]
            if (split := tfds_folder.open_split(path, (name,), kinds))
            else []
            for name in ("train", "validation", "test")
        ]
        if not splits[0]:
            raise DataError(f"{path}: has no split 'train'; prepare it with TFDS again")
        return Inputs(*splits)
    if any((path / archive).exists() for archive in _WMT14):
        return _archive_folder(path, languages)
    splits = []
    for names in _SPLIT_NAMES.values():
        prefixes = [path / name for name in names if _sides(path / name, languages)]
        splits.append([_one(prefix, languages) for prefix in prefixes[:1]])
    if not splits[0]:
        names = ", ".join(f"train.{language}" for language in languages)
        raise DataError(
            f"{path}: holds no training pairs ({names}, each plain or packed), none of WMT14's"
            " archives, and was not prepared by TFDS"
        )
    return Inputs(*splits)


def _one(path: Path, languages) -> PairSource:
    sides = _sides(path, languages)
    if len(sides) == 2:
        return PairSource(*(_Side(side) for side in sides))
    names = " and ".join(f"{path}.{language}" for language in languages)
    there = f"of these only {sides[0].name}" if sides else "neither"
    raise DataError(
        f"{path}: no sentence pairs; expected {names}, plain or packed, but {there} is there"
    )


def _sides(prefix: Path, languages) -> list[Path]:
    """The files of the languages, as far as they exist."""
    found = []
    for language in languages:
        files = (prefix.with_name(f"{prefix.name}.{language}{packed}") for packed in PACKED)
        found += [file for file in files if file.exists()][:1]
    return found


def _archive_folder(path: Path, languages) -> Inputs:
    other = next((language for language in languages if language != "en"), "")
    if "en" not in languages or other not in ("de", "fr"):
        raise DataError(
            f"{path}: WMT14's archives are read for en with de or fr, not for {'-'.join(languages)}"
        )
    training = _TRAINING | (_FRENCH_TRAINING if other == "fr" else {})
    if missing := [archive for archive in training if not (path / archive).exists()]:
        raise DataError(
            f"{path}: lacks {', '.join(missing)} of WMT14; fetch it, or unpack the others and pass"
            " their files as prefixes"
        )

    def source(archive: str, member: str) -> PairSource:
        names = [
            member.replace("OTHER", other).replace("LANG", language).replace("SIDE", side)
            for language, side in zip(languages, ("src", "ref"), strict=True)
        ]
        return PairSource(*(_Side(path / archive, name) for name in names))

    tests = [archive for archive in _TESTS if (path / archive).exists()][:1]
    return Inputs(
        [source(archive, member) for archive, member in training.items()],
        [source(_DEV, _DEV_MEMBER)] if (path / _DEV).exists() else [],
        [source(archive, _TEST_MEMBER) for archive in tests],
    )
