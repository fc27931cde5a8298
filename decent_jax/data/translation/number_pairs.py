"""The translation quickstart's corpus: numbers in English and German words, without a download.

Each pair is the same sentence in both languages, with numbers up to 999,999: counts, prices,
ordinals, years. The two languages order the digits differently ("twenty-one", "einundzwanzig"), and
German writes a number as one word. The task is therefore not trivial, yet every answer can be
checked. num2words spells the numbers.

>>> english(427_003), english(21, "ordinal")
('four hundred and twenty-seven thousand and three', 'twenty-first')
>>> german(427_003), german(21, "ordinal")
('vierhundertsiebenundzwanzigtausenddrei', 'einundzwanzigste')
>>> next(sentences("train", seed=0))
('it was in the year twelve hundred', 'es war im Jahr zwölfhundert')
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from num2words import num2words

from decent_jax.data.prepared_folder import find_or_make
from decent_jax.data.translation import prepare_translation
from decent_jax.data.translation.pair_folder import is_whole, read_manifest
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import Json

SPLITS = ("train", "val", "test")
LARGEST = 999_999

_SMALL = 100  # all smaller numbers are for training, because larger ones are built from them
_COUNTS = {"train": 40_000, "val": 500, "test": 500}  # pairs of the quickstart
_VOCAB_SIZE = 400


@functools.cache  # num2words takes 0.3 ms per number
def english(n: int, to: str = "cardinal") -> str:
    """``n``, from 0 to 999,999, in English words; ``to`` is "cardinal" or "ordinal"."""
    rest = n % 1000
    if n < 1000 or not rest:
        return num2words(n, to=to)
    return english(n - rest) + (" and " if rest < 100 else " ") + english(rest, to)


@functools.cache
def german(n: int, to: str = "cardinal") -> str:
    """``n`` in German words, as for `english`; an ordinal has the form that follows "die"."""
    rest = n % 1000
    if to == "ordinal" and n % 100 == 0:
        return german(n) + "ste"  # num2words has "hundertste", without "ein"
    if n < 1000 or not rest:  # num2words has "dreihunderteinstausend"
        return num2words(n, to=to, lang="de").replace("einstausend", "eintausend")
    return german(n - rest) + german(rest, to)


def split_of(n: int) -> str:
    """The split of ``n``: "train" for small numbers and for about 18 of 20 larger ones."""
    if n < _SMALL:
        return "train"
    part = hashlib.blake2b(str(n).encode(), digest_size=8).digest()[0] % 20
    return {0: "val", 1: "test"}.get(part, "train")


def sentences(split: str, *, seed: int) -> Iterator[tuple[str, str]]:
    """Endless distinct pairs (English, German), drawn with ``seed``.

    All numbers of a sentence belong to ``split``, so no number of one split occurs in another.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split),)))
    seen = set()

    def draw(start: int = 0, stop: int = LARGEST + 1) -> int:
        while True:  # the square favours shorter numbers
            n = start + int((stop - start) * rng.random() ** 2)
            if split_of(n) == split:
                return n

    while True:
        pair = _TEMPLATES[rng.integers(len(_TEMPLATES))](draw)
        if pair not in seen:
            seen.add(pair)
            yield pair


def build(out: str | Path) -> Json:
    """The manifest of the quickstart's prepared folder ``out``, which is created if necessary.

    Creating it takes a few seconds. Several processes may call this function at the same time.

    Raises:
      DataError: ``out`` exists and is not such a folder.
    """
    out = Path(os.path.abspath(out))
    return find_or_make(out, lambda: _found(out), lambda overwrite: _make(out, overwrite))


def _make(out: Path, overwrite: bool) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, **_COUNTS, seed=0)
        return prepare_translation.prepare(
            [folder], out, ("en", "de"), vocab_size=_VOCAB_SIZE, workers=1, overwrite=overwrite
        )


def _found(out: Path) -> Json | None:
    """The manifest of ``out``, or None unless it is an intact quickstart folder of this version."""
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
    """Writes ``train.en``, ``train.de`` and so on for `decent-jax prepare`; returns ``folder``.

    Args:
      folder: the folder to write to.
      train, val, test: numbers of distinct pairs.
      seed: determines the pairs.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in {"train": train, "val": val, "test": test}.items():
        for language, text in zip(("en", "de"), _texts(split, count, seed), strict=True):
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
    return folder


def _texts(split: str, count: int, seed: int = 0) -> list[str]:
    pairs = islice(sentences(split, seed=seed), count)
    return ["".join(f"{line}\n" for line in lines) for lines in zip(*pairs, strict=True)]


def _count(draw: Callable[..., int]) -> tuple[str, str]:
    n = draw()
    return english(n), german(n)


def _price(draw: Callable[..., int]) -> tuple[str, str]:
    n = draw()
    if n == 1:
        return "the price is one euro", "der Preis beträgt einen Euro"
    many = german(n)[: -1 if n % 100 == 1 else None]  # "hundertein Euro"
    return f"the price is {english(n)} euros", f"der Preis beträgt {many} Euro"


def _ordinal(draw: Callable[..., int]) -> tuple[str, str]:
    n = draw(1)
    return f"the {english(n, 'ordinal')} page", f"die {german(n, 'ordinal')} Seite"


def _year(draw: Callable[..., int]) -> tuple[str, str]:
    year = draw(1100, 2100)
    words = num2words(year, to="year").replace("oh-", "oh ")
    return f"it was in the year {words}", f"es war im Jahr {num2words(year, to='year', lang='de')}"


def _comparison(draw: Callable[..., int]) -> tuple[str, str]:
    a, b = draw(0, 1000), draw(0, 1000)
    more, mehr = ("more than", "mehr als") if a > b else ("less than", "weniger als")
    if a == b:
        more, mehr = "as much as", "so viel wie"
    return f"{english(a)} is {more} {english(b)}", f"{german(a)} ist {mehr} {german(b)}"


_TEMPLATES = (_count, _count, _price, _ordinal, _year, _comparison)
