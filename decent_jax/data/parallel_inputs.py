"""Sentence pairs from where they lie: parallel files, tables, WMT14's archives, TFDS folders.

A source gives its pairs as blocks of undecoded lines, always the same; nothing is unpacked. Lines
end at a line feed and nowhere else: web text is full of other characters that Python's text files
would take for an end, and one of them shifts all pairs that follow.
"""

import contextlib
import functools
import gzip
import html
import itertools
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from decent_jax.errors import DataError

BLOCK_LINES = 5000

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
_SEGMENT = re.compile(rb"<seg[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)  # it is no proper XML


class Block(NamedTuple):
    """Some pairs of a source, as UTF-8 without line ends.

    ``places`` are what to call the two sides in a message and ``line`` is the number of the first;
    ``read`` is the bytes of progress.
    """

    source: list[bytes]
    target: list[bytes]
    places: tuple[str, str]
    line: int
    read: int


class Source:
    """Pairs that lie together.

    Attributes:
      name: what the manifest calls it: no machine's path, the same wherever the data lies.
      files: the files it is read from.
      size: in bytes, for progress.
    """

    name: str
    files: tuple[Path, ...]
    size: int

    def blocks(self) -> Iterator[Block]:
        """All pairs; DataError where they cannot be had."""
        raise NotImplementedError


class Inputs(NamedTuple):
    """Where the pairs of each split are from."""

    train: list[Source]
    val: list[Source]
    test: list[Source]


def find_inputs(inputs, languages: tuple[str, str], val=None, test=None) -> Inputs:
    """The sources behind paths; ``languages`` are of the source and target side.

    A path is a prefix (``train`` for ``train.en`` and ``train.de``, each also as ``.gz``), a table
    (``.tsv`` or ``.tsv.gz``: the two sides are the first two columns) or, for training, a folder:
    of such files, of WMT14's archives, or prepared by TFDS; folders bring validation and test pairs
    along. ``val`` and ``test`` are paths that replace those.

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


def _folder(path: Path, languages) -> Inputs:
    if (path / "dataset_info.json").exists():
        return _tfds_folder(path, languages)
    if any((path / archive).exists() for archive in _WMT14):
        return _archive_folder(path, languages)
    splits = []
    for names in _SPLIT_NAMES.values():
        prefixes = [path / name for name in names if _sides(path / name, languages)]
        tables = [path / f"{name}{end}" for name in names for end in (".tsv", ".tsv.gz")]
        tables = [table for table in tables if table.exists()]
        splits.append([_one(found, languages) for found in [*prefixes, *tables][:1]])
    if not splits[0]:
        names = ", ".join(f"train.{language}" for language in languages)
        raise DataError(
            f"{path}: holds no training pairs ({names}, each also as .gz, or train.tsv), none of"
            " WMT14's archives, and was not prepared by TFDS"
        )
    return Inputs(*splits)


def _one(path: Path, languages) -> Source:
    if path.name.endswith((".tsv", ".tsv.gz")):
        if not path.exists():
            raise DataError(f"{path}: no such file")
        return _Table(path)
    sides = _sides(path, languages)
    if len(sides) == 2:
        return _Pair(*(_Side(side) for side in sides))
    if sides:
        missing = next(x for x in languages if f".{x}" not in sides[0].suffixes[-2:])
        raise DataError(f"{path}.{missing}: no such file, nor with .gz, beside {sides[0].name}")
    for language in languages:
        for end in (f".{language}", f".{language}.gz"):
            if path.name.endswith(end) and path.exists():
                prefix = str(path).removesuffix(end)
                raise DataError(f"{path}: is one side of the pairs; pass both as {prefix}")
    if path.exists():
        raise DataError(
            f"{path}: not a prefix of parallel files, a .tsv file or, for training, a folder"
        )
    names = " or ".join(f"{path}.{language}" for language in languages)
    raise DataError(f"{path}: no such file or folder, and no {names} either, plain or as .gz")


def _sides(prefix: Path, languages) -> list[Path]:
    """The files of the languages that there are."""
    found = []
    for language in languages:
        plain = prefix.with_name(f"{prefix.name}.{language}")
        packed = plain.with_name(f"{plain.name}.gz")
        found += [file for file in (plain, packed) if file.exists()][:1]
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

    def source(archive: str, member: str) -> Source:
        names = [
            member.replace("OTHER", other).replace("LANG", language).replace("SIDE", side)
            for language, side in zip(languages, ("src", "ref"), strict=True)
        ]
        return _Pair(*(_Side(path / archive, name) for name in names))

    tests = [archive for archive in _TESTS if (path / archive).exists()][:1]
    return Inputs(
        [source(archive, member) for archive, member in training.items()],
        [source(_DEV, _DEV_MEMBER)] if (path / _DEV).exists() else [],
        [source(archive, _TEST_MEMBER) for archive in tests],
    )


def _tfds_folder(path: Path, languages) -> Inputs:
    import tensorflow_datasets as tfds

    try:
        info = tfds.builder_from_directory(path).info
        there, features = set(info.splits), info.features
    except Exception as error:
        raise DataError(f"{path}: not a readable TFDS folder ({_short(error)})") from None
    if missing := [language for language in languages if language not in features]:
        names = ", ".join(map(repr, features))
        raise DataError(f"{path}: has no sentences in {missing[0]!r}, only {names}")
    if "train" not in there:
        raise DataError(f"{path}: has no split 'train', only {', '.join(sorted(there)) or 'none'}")
    names = [{"val": "validation"}.get(split, split) for split in Inputs._fields]
    return Inputs(
        *([_Tfds(path, info.full_name, name, languages)] if name in there else [] for name in names)
    )


class _Side:
    """The lines of a file, or of a member of an archive."""

    def __init__(self, path: Path, member: str = ""):
        self.path = path
        self.member = member
        self.place = f"{path}, {member}" if member else str(path)
        self.name = f"{path.name}/{member}" if member else path.name

    @contextlib.contextmanager
    def open(self):
        """``with side.open() as (lines, raw)``: an iterator of bytes, and the file on the disk."""
        with contextlib.ExitStack() as stack, _one_sentence(self.place):
            raw = stack.enter_context(open(self.path, "rb"))
            file = raw
            if self.path.name.endswith((".gz", ".tgz")):
                file = stack.enter_context(gzip.GzipFile(fileobj=raw))
            if self.member:
                file = self._find_member(stack, file)
                if self.member.endswith(".gz"):
                    file = stack.enter_context(gzip.GzipFile(fileobj=file))
            yield self._lines(file), raw

    def _find_member(self, stack, file):
        # a stream: in a compressed archive there is no way but from the beginning
        archive = stack.enter_context(tarfile.open(fileobj=file, mode="r|"))  # noqa: SIM115
        for member in archive:
            if member.isfile() and member.name.rpartition("/")[2] == self.member:
                return archive.extractfile(member)
        raise DataError(f"{self.path}: holds no {self.member}; is it cut short? fetch it again")

    def _lines(self, file) -> Iterator[bytes]:
        if self.member.endswith(".sgm"):
            for segment in _SEGMENT.findall(file.read()):
                try:
                    text = html.unescape(segment.decode())
                except UnicodeDecodeError:
                    text = None
                yield segment if text is None else " ".join(text.split()).encode()
            return
        for line in file:
            yield line.removesuffix(b"\n")


class _Pair(Source):
    """Two files, or two members of archives, line by line."""

    def __init__(self, source: _Side, target: _Side):
        self.sides = source, target
        self.files = tuple(dict.fromkeys(side.path for side in self.sides))
        self.name = f"{source.name} {target.name}"
        self.size = sum(side.path.stat().st_size for side in self.sides)

    def blocks(self) -> Iterator[Block]:
        places = tuple(side.place for side in self.sides)
        counts, read = [0, 0], 0
        with self.sides[0].open() as (sources, raw1), self.sides[1].open() as (targets, raw2):
            while True:
                two = []
                for place, lines in zip(places, (sources, targets), strict=True):
                    with _one_sentence(place):
                        two.append(list(itertools.islice(lines, BLOCK_LINES)))
                if len(two[0]) != len(two[1]) or not two[0]:
                    break
                before, read = read, raw1.tell() + raw2.tell()
                yield Block(*two, places, counts[0] + 1, read - before)
                counts = [count + len(two[0]) for count in counts]
            rests = zip(places, (sources, targets), two, strict=True)
            for side, (place, lines, block) in enumerate(rests):
                with _one_sentence(place):
                    counts[side] += len(block) + sum(1 for _ in lines)
        for place, count in zip(places, counts, strict=True):
            if not count:
                raise DataError(f"{place}: is empty")
        if counts[0] != counts[1]:
            raise DataError(
                f"{places[0]} has {counts[0]} lines and {places[1]} has {counts[1]}; the two sides"
                " must have a line each for every pair"
            )


class _Table(Source):
    """A file with the two sides in its first two columns."""

    def __init__(self, path: Path):
        self.files = (path,)
        self.name = path.name
        self.size = path.stat().st_size
        self.side = _Side(path)

    def blocks(self) -> Iterator[Block]:
        path, read, line = self.side.path, 0, 1
        with self.side.open() as (lines, raw):
            while block := list(itertools.islice(lines, BLOCK_LINES)):
                columns = [row.split(b"\t", 2) for row in block]
                short = next((i for i, row in enumerate(columns) if len(row) < 2), None)
                if short is not None:
                    raise DataError(f"{path}, line {line + short}: has no tab between two columns")
                before, read = read, raw.tell()
                sides = ([row[i] for row in columns] for i in range(2))
                yield Block(*sides, (str(path),) * 2, line, read - before)
                line += len(block)
        if line == 1:
            raise DataError(f"{path}: is empty")


class _Tfds(Source):
    """One split of a folder prepared by TFDS, read without TensorFlow."""

    def __init__(self, folder: Path, full_name: str, split: str, languages):
        self.folder, self.split, self.languages = folder, split, languages
        self.files = (*sorted(folder.glob(f"*-{split}.*")), folder / "features.json")
        self.name = f"{full_name}, split {split}"
        self.size = sum(file.stat().st_size for file in self.files)

    def blocks(self) -> Iterator[Block]:
        records = _tfds_records(self.folder, self.split)
        total = len(records)
        if not total:
            raise DataError(f"{self.folder}: its split {self.split!r} is empty")
        place = f"{self.folder}, split {self.split}"
        for start in range(0, total, BLOCK_LINES):
            stop = min(start + BLOCK_LINES, total)
            try:
                block = records.__getitems__(list(range(start, stop)))
            except Exception as error:  # array_record's own kinds
                where = f"records {start} to {stop - 1}"
                raise DataError(f"{place}: cannot read {where} ({_short(error)})") from None
            sides = ([record[language] for record in block] for language in self.languages)
            read = self.size * stop // total - self.size * start // total
            yield Block(*sides, (place,) * 2, start + 1, read)


@functools.lru_cache(maxsize=4)
def _tfds_records(folder: Path, split: str):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(folder)
    try:
        return builder.as_data_source(split=split)
    except NotImplementedError:
        raise DataError(
            f"{folder}: stored as {builder.info.file_format.value}; only array_record is read"
            " without TensorFlow: prepare it again with file_format='array_record'"
        ) from None


@contextlib.contextmanager
def _one_sentence(place):
    """Turns what reading can raise into a DataError that says where."""
    try:
        yield
    except EOFError:
        raise DataError(f"{place}: the compressed file is cut short; fetch it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{place}: not a valid gzip file ({error})") from None
    except tarfile.TarError as error:
        raise DataError(f"{place}: the archive is cut short or damaged ({error})") from None
    except OSError as error:
        where = error.filename or place
        raise DataError(f"{where}: cannot be read ({error.strerror or error})") from None


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
