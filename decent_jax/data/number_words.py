"""The translation quickstart's corpus: numbers in English and German words, without a download.

Each pair says numbers up to 999,999 in a sentence of either language: as counts, prices, ordinals,
years. The two languages put the same digits in another order ("twenty-one", "einundzwanzig") and
German writes them in one word, so there is something to translate, and every answer is exact:
:func:`parse_german` reads German back by its grammar, not by looking up what was written.

>>> english(427_003)
'four hundred and twenty-seven thousand and three'
>>> german(427_003)
'vierhundertsiebenundzwanzigtausenddrei'
>>> parse_german("vierhundertsiebenundzwanzigtausenddrei")
427003
>>> pairs("train", 1, seed=0)
[('it was in the year twelve hundred', 'es war im Jahr zwölfhundert')]
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from decent_jax.data import prepare_translation
from decent_jax.data.translation_files import is_whole, read_manifest
from decent_jax.errors import DataError

SPLITS = ("train", "val", "test")
LARGEST = 999_999

_ENGLISH = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_ENGLISH_TENS = [
    "-",
    "-",
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
]
_ENGLISH_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_GERMAN = [
    "null",
    "ein",
    "zwei",
    "drei",
    "vier",
    "fünf",
    "sechs",
    "sieben",
    "acht",
    "neun",
    "zehn",
    "elf",
    "zwölf",
    "dreizehn",
    "vierzehn",
    "fünfzehn",
    "sechzehn",
    "siebzehn",
    "achtzehn",
    "neunzehn",
]
_GERMAN_TENS = [
    "-",
    "-",
    "zwanzig",
    "dreißig",
    "vierzig",
    "fünfzig",
    "sechzig",
    "siebzig",
    "achtzig",
    "neunzig",
]
_GERMAN_ORDINALS = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}
_YEARS = range(1100, 2100)
_SMALL = 100  # below, all numbers are for training: they hold every word there is
_PARTS = 20  # one of them is for validation and one for test
_COUNTS = {"train": 40_000, "val": 500, "test": 500}  # pairs of the quickstart
_VOCAB_SIZE = 400


def english(n: int) -> str:
    """``n`` in words as in British English; ValueError unless 0 <= n <= 999,999."""
    _check(n)
    if n < 20:
        return _ENGLISH[n]
    if n < 100:
        tens, ones = divmod(n, 10)
        return _ENGLISH_TENS[tens] + (f"-{_ENGLISH[ones]}" if ones else "")
    if n < 1000:
        hundreds, rest = divmod(n, 100)
        return f"{_ENGLISH[hundreds]} hundred" + (f" and {english(rest)}" if rest else "")
    thousands, rest = divmod(n, 1000)
    link = " and" if rest < 100 else ""
    return f"{english(thousands)} thousand" + (f"{link} {english(rest)}" if rest else "")


def german(n: int) -> str:
    """``n`` in words, as when counting; ValueError unless 0 <= n <= 999,999."""
    return german_before_noun(n) + ("s" if n % 100 == 1 else "")


def german_before_noun(n: int) -> str:
    """As :func:`german`, but "ein", "hundertein": without the "s" that only a lone number has."""
    _check(n)
    if n < 20:
        return _GERMAN[n]
    if n < 100:
        tens, ones = divmod(n, 10)
        return (f"{_GERMAN[ones]}und" if ones else "") + _GERMAN_TENS[tens]
    size, word = (100, "hundert") if n < 1000 else (1000, "tausend")
    count, rest = divmod(n, size)
    return german_before_noun(count) + word + (german_before_noun(rest) if rest else "")


def english_ordinal(n: int) -> str:
    """ "first", "twenty-first"; ValueError unless 1 <= n <= 999,999."""
    _check(n, 1)
    head, last = re.fullmatch(r"(.*?)([a-z]+)", english(n)).groups()
    if last in _ENGLISH_ORDINALS:
        return head + _ENGLISH_ORDINALS[last]
    return head + (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")


def german_ordinal(n: int) -> str:
    """ "erste", "einundzwanzigste", as after "die"; ValueError unless 1 <= n <= 999,999."""
    _check(n, 1)
    above, last = n - n % 100, n % 100
    if not 0 < last < 20:
        return german_before_noun(n) + "ste"
    head = german_before_noun(above) if above else ""
    return head + _GERMAN_ORDINALS.get(last, _GERMAN[last] + "te")


def english_year(year: int) -> str:
    """ "nineteen eighty-four"; "two thousand and five"; ValueError unless 1100 <= year <= 2099."""
    _check(year, _YEARS.start, _YEARS.stop - 1)
    century, rest = divmod(year, 100)
    if century == 20 and rest < 10:
        return english(year)
    if not rest:
        return f"{english(century)} hundred"
    return f"{english(century)} {'oh ' if rest < 10 else ''}{english(rest)}"


def german_year(year: int) -> str:
    """ "neunzehnhundertvierundachtzig"; ValueError unless 1100 <= year <= 2099."""
    _check(year, _YEARS.start, _YEARS.stop - 1)
    if year >= 2000:
        return german(year)
    century, rest = divmod(year, 100)
    return f"{german(century)}hundert" + (german(rest) if rest else "")


def parse_german(text: str, *, before_noun: bool = False) -> int:
    """The number that a German word says, years such as "elfhundert" included.

    "hundert" and "tausend" may stand without "ein", as is usual in speech. With ``before_noun`` a
    last one is spelled "ein", otherwise "eins". ValueError for any other spelling.
    """
    try:
        return _parse(text, "ein" if before_noun else "eins")
    except KeyError:
        raise ValueError(f"{text!r} is no German number up to {LARGEST:,}") from None


def parse_german_ordinal(text: str) -> int:
    """The number that "erste", "zweite" ... say; ValueError for any other spelling."""
    for ending in sorted(_FIRST_TO_19TH, key=len, reverse=True):  # "dreizehnte" before "zehnte"
        above = text.removesuffix(ending)
        if above != text and (not above or above.endswith(("hundert", "tausend"))):
            return (parse_german(above) if above else 0) + _FIRST_TO_19TH[ending]
    stem = text.removesuffix("ste")
    if stem == text or 0 < parse_german(stem, before_noun=True) % 100 < 20:
        raise ValueError(f"{text!r} is no German ordinal up to {LARGEST:,}")
    return parse_german(stem, before_noun=True)


def split_of(n: int) -> str:
    """The split that ``n`` belongs to: "train" for small ones, else of 20 numbers 18."""
    if n < _SMALL:
        return "train"
    part = hashlib.blake2b(str(n).encode(), digest_size=8).digest()[0] % _PARTS
    return {0: "val", 1: "test"}.get(part, "train")


def sentences(split: str, *, seed: int) -> Iterator[tuple[str, str]]:
    """Pairs (English, German) without end, drawn by ``seed``; may repeat.

    All numbers of a sentence are of ``split``, so no number of one split occurs in another.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split),)))

    def draw(start: int = 0, stop: int = LARGEST + 1) -> int:
        while True:  # more of the shorter numbers than there are among all
            n = start + int((stop - start) * rng.random() ** 2)
            if split_of(n) == split:
                return n

    while True:
        yield _TEMPLATES[rng.integers(len(_TEMPLATES))](draw)


def pairs(split: str, count: int, *, seed: int) -> list[tuple[str, str]]:
    """The first ``count`` of :func:`sentences`."""
    return list(islice(sentences(split, seed=seed), count))


def build(out: str | Path) -> dict:
    """Makes the prepared folder ``out`` of the quickstart, or finds it there; its manifest.

    Takes some seconds. Processes may call it at the same time: one folder wins.

    Raises:
      DataError: ``out`` is something else.
    """
    out = Path(os.path.abspath(out))
    if (manifest := _found(out)) is not None:
        return manifest
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_files(folder, **_COUNTS, seed=0)
            return prepare_translation.prepare(
                [folder], out, "en", "de", vocab_size=_VOCAB_SIZE, workers=1, overwrite=True
            )
    except (DataError, OSError):  # perhaps because another process was faster
        if (manifest := _found(out)) is not None:
            return manifest
        raise


def _found(out: Path) -> dict | None:
    """The manifest of ``out`` where it is the quickstart's, whole and of this version."""
    try:
        splits = read_manifest(out)["splits"]
        hashes = [file["sha256"] for file in splits["val"]["text"]]
    except (DataError, KeyError, TypeError):
        return None
    # the validation pairs stand for all: they change when anything above does
    wanted = [hashlib.sha256(text.encode()).hexdigest() for text in _texts("val", _COUNTS["val"])]
    same = hashes == wanted and splits["train"]["pairs"] == _COUNTS["train"]
    return read_manifest(out) if same and is_whole(out) else None


def write_files(folder: str | Path, *, train: int, val: int, test: int, seed: int) -> Path:
    """Writes ``train.en``, ``train.de`` and so on, so many distinct pairs each; returns ``folder``.

    ``prepare_translation`` reads the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in {"train": train, "val": val, "test": test}.items():
        for language, text in zip(("en", "de"), _texts(split, count, seed), strict=True):
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
    return folder


def _texts(split: str, count: int, seed: int = 0) -> list[str]:
    chosen = islice(_distinct(sentences(split, seed=seed)), count)
    return ["".join(f"{line}\n" for line in lines) for lines in zip(*chosen, strict=True)]


def _distinct(drawn: Iterator) -> Iterator:
    seen = set()
    for pair in drawn:
        if pair not in seen:
            seen.add(pair)
            yield pair


def _count(draw):
    n = draw()
    return english(n), german(n)


def _price(draw):
    n = draw()
    if n == 1:
        return "the price is one euro", "der Preis beträgt einen Euro"
    return f"the price is {english(n)} euros", f"der Preis beträgt {german_before_noun(n)} Euro"


def _ordinal(draw):
    n = draw(1)
    return f"the {english_ordinal(n)} page", f"die {german_ordinal(n)} Seite"


def _year(draw):
    year = draw(_YEARS.start, _YEARS.stop)
    return f"it was in the year {english_year(year)}", f"es war im Jahr {german_year(year)}"


def _comparison(draw):
    a, b = draw(0, 1000), draw(0, 1000)
    if a == b:
        return (
            f"{english(a)} is as much as {english(b)}",
            f"{german(a)} ist so viel wie {german(b)}",
        )
    words = ("more", "mehr") if a > b else ("less", "weniger")
    return (
        f"{english(a)} is {words[0]} than {english(b)}",
        f"{german(a)} ist {words[1]} als {german(b)}",
    )


_TEMPLATES = (_count, _count, _price, _ordinal, _year, _comparison)


def _check(n: int, smallest: int = 0, largest: int = LARGEST) -> None:
    if not smallest <= n <= largest:
        raise ValueError(f"number words go from {smallest} to {largest:,}, got {n}")


# The grammar, written down a second time so that it checks the words above

_ONES = {"zwei": 2, "drei": 3, "vier": 4, "fünf": 5, "sechs": 6, "sieben": 7, "acht": 8, "neun": 9}
_TEENS = {"zehn": 10, "elf": 11, "zwölf": 12, "dreizehn": 13, "vierzehn": 14, "fünfzehn": 15}
_TEENS |= {"sechzehn": 16, "siebzehn": 17, "achtzehn": 18, "neunzehn": 19}
_TENS = {"zwanzig": 20, "dreißig": 30, "vierzig": 40, "fünfzig": 50, "sechzig": 60}
_TENS |= {"siebzig": 70, "achtzig": 80, "neunzig": 90}
_UNDER_20 = _ONES | _TEENS
_FIRST_TO_19TH = {"erste": 1, "zweite": 2, "dritte": 3, "vierte": 4, "fünfte": 5, "sechste": 6}
_FIRST_TO_19TH |= {"siebte": 7, "achte": 8, "neunte": 9}
_FIRST_TO_19TH |= {f"{word}te": n for word, n in _TEENS.items()}


def _parse(text: str, one: str) -> int:
    """KeyError for what is none; ``one`` is how a single one at the end is spelled."""
    if text == "null":
        return 0
    thousands, word, rest = text.partition("tausend")
    if word:
        count = _parse_hundreds(thousands, "ein", _ONES) if thousands else 1
        return 1000 * count + (_parse_hundreds(rest, one, _ONES) if rest else 0)
    years = {name: n for name, n in _UNDER_20.items() if n != 10}  # "elfhundert"
    return _parse_hundreds(text, one, years)


def _parse_hundreds(text: str, one: str, counts: dict[str, int]) -> int:
    hundreds, word, rest = text.partition("hundert")
    if not word:
        return _parse_below_100(text, one)
    count = (counts | {"ein": 1, "": 1})[hundreds]
    return 100 * count + (_parse_below_100(rest, one) if rest else 0)


def _parse_below_100(text: str, one: str) -> int:
    if text == one:
        return 1
    ones, word, tens = text.partition("und")
    if word:
        return (_ONES | {"ein": 1})[ones] + _TENS[tens]
    return (_UNDER_20 | _TENS)[text]
