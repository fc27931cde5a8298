"""The translation quickstart's corpus: numbers in English and German words, without a download.

Each pair has numbers up to 999,999 in a sentence of either language: counts, prices, ordinals,
years. The two languages order the digits differently ("twenty-one", "einundzwanzig") and German
writes a number as one word, so there is something to translate, and every answer can be checked.
(The num2words library gets some German numbers wrong: "dreihunderteinstausend".)

>>> english(427_003)
'four hundred and twenty-seven thousand and three'
>>> german(427_003)
'vierhundertsiebenundzwanzigtausenddrei'
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
from typing import Any

import numpy as np

from decent_jax.data.prepared_folder import find_or_make
from decent_jax.data.translation import prepare_translation
from decent_jax.data.translation.pair_folder import is_whole, read_manifest
from decent_jax.ground.errors import DataError

SPLITS = ("train", "val", "test")
LARGEST = 999_999

_words = str.split
_ENGLISH = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen"
)
_ENGLISH_TENS = _words("- - twenty thirty forty fifty sixty seventy eighty ninety")
_ENGLISH_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth"}
_ENGLISH_ORDINALS |= {"eight": "eighth", "nine": "ninth", "twelve": "twelfth"}
_GERMAN = _words(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn"
    " sechzehn siebzehn achtzehn neunzehn"
)
_GERMAN_TENS = _words("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_GERMAN_ORDINALS = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}
_YEARS = range(1100, 2100)
_SMALL = 100  # smaller numbers are all for training: they contain every word there is
_PARTS = 20  # one for validation, one for test, the others for training
_COUNTS = {"train": 40_000, "val": 500, "test": 500}  # pairs of the quickstart
_VOCAB_SIZE = 400


def english(n: int) -> str:
    """`n`, from 0 to 999,999, in words as in British English."""
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
    """`n` in words, as when counting."""
    return german_before_noun(n) + ("s" if n % 100 == 1 else "")


def german_before_noun(n: int) -> str:
    """Like `german`, but "ein", "hundertein": without the "s" that only a lone number has."""
    if n < 20:
        return _GERMAN[n]
    if n < 100:
        tens, ones = divmod(n, 10)
        return (f"{_GERMAN[ones]}und" if ones else "") + _GERMAN_TENS[tens]
    size, word = (100, "hundert") if n < 1000 else (1000, "tausend")
    count, rest = divmod(n, size)
    return german_before_noun(count) + word + (german_before_noun(rest) if rest else "")


def english_ordinal(n: int) -> str:
    """ "first", "twenty-first"."""
    head, last = re.findall(r"^(.*?)([a-z]+)$", english(n))[0]
    if last in _ENGLISH_ORDINALS:
        return head + _ENGLISH_ORDINALS[last]
    return head + (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")


def german_ordinal(n: int) -> str:
    """ "erste", "einundzwanzigste", as after "die"."""
    above, last = n - n % 100, n % 100
    if not 0 < last < 20:
        return german_before_noun(n) + "ste"
    head = german_before_noun(above) if above else ""
    return head + _GERMAN_ORDINALS.get(last, _GERMAN[last] + "te")


def english_year(year: int) -> str:
    """ "nineteen eighty-four"; "two thousand and five"; from 1100 to 2099."""
    century, rest = divmod(year, 100)
    if century == 20 and rest < 10:
        return english(year)
    if not rest:
        return f"{english(century)} hundred"
    return f"{english(century)} {'oh ' if rest < 10 else ''}{english(rest)}"


def german_year(year: int) -> str:
    """ "neunzehnhundertvierundachtzig"; from 1100 to 2099."""
    if year >= 2000:
        return german(year)
    century, rest = divmod(year, 100)
    return f"{german(century)}hundert" + (german(rest) if rest else "")


def split_of(n: int) -> str:
    """The split of `n`: "train" for small numbers and for 18 of 20 larger ones."""
    if n < _SMALL:
        return "train"
    part = hashlib.blake2b(str(n).encode(), digest_size=8).digest()[0] % _PARTS
    return {0: "val", 1: "test"}.get(part, "train")


def sentences(split: str, *, seed: int) -> Iterator[tuple[str, str]]:
    """Endless pairs (English, German), drawn with `seed`; may repeat.

    All numbers of a sentence belong to `split`, so no number of one split occurs in another.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split),)))

    def draw(start: int = 0, stop: int = LARGEST + 1) -> int:
        while True:  # the square favours shorter numbers
            n = start + int((stop - start) * rng.random() ** 2)
            if split_of(n) == split:
                return n

    while True:
        yield _TEMPLATES[rng.integers(len(_TEMPLATES))](draw)


def pairs(split: str, count: int, *, seed: int) -> list[tuple[str, str]]:
    """The first `count` of `sentences`."""
    return list(islice(sentences(split, seed=seed), count))


def build(out: str | Path) -> dict[str, Any]:
    """The manifest of the quickstart's prepared folder `out`, which this makes if necessary.

    Takes some seconds. Several processes may call it at the same time.

    Raises:
      DataError: `out` is something else.
    """
    out = Path(os.path.abspath(out))
    return find_or_make(out, lambda: _found(out), lambda overwrite: _make(out, overwrite))


def _make(out: Path, overwrite: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, **_COUNTS, seed=0)
        return prepare_translation.prepare(
            [folder], out, "en", "de", vocab_size=_VOCAB_SIZE, workers=1, overwrite=overwrite
        )


def _found(out: Path) -> dict[str, Any] | None:
    """The manifest of `out` where that is the quickstart's, whole and of this version."""
    try:
        splits = read_manifest(out)["splits"]
        hashes = [file["sha256"] for file in splits["val"]["text"]]
    except (DataError, KeyError, TypeError):
        return None
    # the validation pairs change when anything in this module does
    wanted = [hashlib.sha256(text.encode()).hexdigest() for text in _texts("val", _COUNTS["val"])]
    same = hashes == wanted and splits["train"]["pairs"] == _COUNTS["train"]
    return read_manifest(out) if same and is_whole(out) else None


def write_files(folder: str | Path, *, train: int, val: int, test: int, seed: int) -> Path:
    """Writes `train.en`, `train.de` and so on for `decent_jax.commands.prepare`; returns `folder`.

    Args:
      folder: where.
      train, val, test: numbers of distinct pairs.
      seed: chooses them.
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
    more, mehr = ("more than", "mehr als") if a > b else ("less than", "weniger als")
    if a == b:
        more, mehr = "as much as", "so viel wie"
    return f"{english(a)} is {more} {english(b)}", f"{german(a)} ist {mehr} {german(b)}"


_TEMPLATES = (_count, _count, _price, _ordinal, _year, _comparison)
