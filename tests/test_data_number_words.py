"""Number words against what grammars and dictionaries say, and read back by another grammar."""

import functools
import json

import pytest

from decent_jax.data.translation import number_words
from decent_jax.data.translation.number_words import (
    build,
    english,
    english_ordinal,
    english_year,
    german,
    german_before_noun,
    german_ordinal,
    german_year,
    pairs,
    sentences,
    split_of,
    write_files,
)
from decent_jax.data.translation.pair_folder import TranslationPairs
from decent_jax.errors import DataError

# --- The grammar of German numbers, written down a second time -----------------------------------

_ONES = {"zwei": 2, "drei": 3, "vier": 4, "fünf": 5, "sechs": 6, "sieben": 7, "acht": 8, "neun": 9}
_TEENS = {"zehn": 10, "elf": 11, "zwölf": 12, "dreizehn": 13, "vierzehn": 14, "fünfzehn": 15}
_TEENS |= {"sechzehn": 16, "siebzehn": 17, "achtzehn": 18, "neunzehn": 19}
_TENS = {"zwanzig": 20, "dreißig": 30, "vierzig": 40, "fünfzig": 50, "sechzig": 60}
_TENS |= {"siebzig": 70, "achtzig": 80, "neunzig": 90}
_UNDER_20 = _ONES | _TEENS
_FIRST_TO_19TH = {"erste": 1, "zweite": 2, "dritte": 3, "vierte": 4, "fünfte": 5, "sechste": 6}
_FIRST_TO_19TH |= {"siebte": 7, "achte": 8, "neunte": 9}
_FIRST_TO_19TH |= {f"{word}te": n for word, n in _TEENS.items()}


def _parse_hundreds(text: str, one: str, counts: dict[str, int]) -> int:
    hundreds, word, rest = text.partition("hundert")
    if not word:
        return _parse_below_100(text, one)
    return 100 * (counts | {"ein": 1})[hundreds] + (_parse_below_100(rest, one) if rest else 0)


def _parse_below_100(text: str, one: str) -> int:
    if text == one:
        return 1
    ones, word, tens = text.partition("und")
    return (_ONES | {"ein": 1})[ones] + _TENS[tens] if word else (_UNDER_20 | _TENS)[text]


def parse_german(text: str, *, before_noun: bool = False) -> int:
    """The number that a German word says, years such as "elfhundert" included.

    With `before_noun` a last one is spelled "ein", otherwise "eins". KeyError for another spelling.
    """
    one = "ein" if before_noun else "eins"
    if text == "null":
        return 0
    thousands, word, rest = text.partition("tausend")
    if word:
        above = 1000 * _parse_hundreds(thousands, "ein", _ONES)
        return above + (_parse_hundreds(rest, one, _ONES) if rest else 0)
    years = {name: n for name, n in _UNDER_20.items() if n != 10}  # "elfhundert"
    return _parse_hundreds(text, one, years)


def parse_german_ordinal(text: str) -> int:
    """The number that "erste", "zweite" ... say; KeyError for any other spelling."""
    for ending in sorted(_FIRST_TO_19TH, key=len, reverse=True):  # "dreizehnte" before "zehnte"
        above = text.removesuffix(ending)
        if above != text and (not above or above.endswith(("hundert", "tausend"))):
            return (parse_german(above) if above else 0) + _FIRST_TO_19TH[ending]
    stem = text.removesuffix("ste")
    number = parse_german(stem, before_noun=True)
    if stem == text or 0 < number % 100 < 20:
        raise KeyError(text)
    return number


# --- The tests -----------------------------------------------------------------------------------

words = str.split
ENGLISH = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty twenty-one thirty thirty-six forty fifty sixty"
    " sixty-seven seventy seventy-six eighty ninety"
)
GERMAN = words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn"
    " sechzehn siebzehn achtzehn neunzehn zwanzig einundzwanzig dreißig sechsunddreißig vierzig"
    " fünfzig sechzig siebenundsechzig siebzig sechsundsiebzig achtzig neunzig"
)
BELOW_100 = [*range(22), 30, 36, 40, 50, 60, 67, 70, 76, 80, 90]
BY_HAND = dict(zip(BELOW_100, zip(ENGLISH, GERMAN, strict=True), strict=True)) | {
    100: ("one hundred", "einhundert"),
    101: ("one hundred and one", "einhunderteins"),
    116: ("one hundred and sixteen", "einhundertsechzehn"),
    121: ("one hundred and twenty-one", "einhunderteinundzwanzig"),
    700: ("seven hundred", "siebenhundert"),
    1000: ("one thousand", "eintausend"),
    1001: ("one thousand and one", "eintausendeins"),
    1100: ("one thousand one hundred", "eintausendeinhundert"),
    1984: ("one thousand nine hundred and eighty-four", "eintausendneunhundertvierundachtzig"),
    11_017: ("eleven thousand and seventeen", "elftausendsiebzehn"),
    21_000: ("twenty-one thousand", "einundzwanzigtausend"),
    101_000: ("one hundred and one thousand", "einhunderteintausend"),
    101_101: (
        "one hundred and one thousand one hundred and one",
        "einhunderteintausendeinhunderteins",
    ),
    427_003: (
        "four hundred and twenty-seven thousand and three",
        "vierhundertsiebenundzwanzigtausenddrei",
    ),
    999_999: (
        "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
}
FIRST = words("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
ERSTE = words("erste zweite dritte vierte fünfte sechste siebte achte neunte zehnte elfte zwölfte")
ORDINALS = dict(enumerate(zip(FIRST, ERSTE, strict=True), 1)) | {
    13: ("thirteenth", "dreizehnte"),
    16: ("sixteenth", "sechzehnte"),
    17: ("seventeenth", "siebzehnte"),
    19: ("nineteenth", "neunzehnte"),
    20: ("twentieth", "zwanzigste"),
    21: ("twenty-first", "einundzwanzigste"),
    30: ("thirtieth", "dreißigste"),
    33: ("thirty-third", "dreiunddreißigste"),
    88: ("eighty-eighth", "achtundachtzigste"),
    100: ("one hundredth", "einhundertste"),
    101: ("one hundred and first", "einhunderterste"),
    107: ("one hundred and seventh", "einhundertsiebte"),
    112: ("one hundred and twelfth", "einhundertzwölfte"),
    1000: ("one thousandth", "eintausendste"),
    1003: ("one thousand and third", "eintausenddritte"),
}
YEARS = {
    1100: ("eleven hundred", "elfhundert"),
    1101: ("eleven oh one", "elfhunderteins"),
    1492: ("fourteen ninety-two", "vierzehnhundertzweiundneunzig"),
    1616: ("sixteen sixteen", "sechzehnhundertsechzehn"),
    1789: ("seventeen eighty-nine", "siebzehnhundertneunundachtzig"),
    1905: ("nineteen oh five", "neunzehnhundertfünf"),
    1984: ("nineteen eighty-four", "neunzehnhundertvierundachtzig"),
    2000: ("two thousand", "zweitausend"),
    2005: ("two thousand and five", "zweitausendfünf"),
    2010: ("twenty ten", "zweitausendzehn"),
    2099: ("twenty ninety-nine", "zweitausendneunundneunzig"),
}


def test_by_hand():
    assert {n: (english(n), german(n)) for n in BY_HAND} == BY_HAND
    assert {n: (english_ordinal(n), german_ordinal(n)) for n in ORDINALS} == ORDINALS
    assert {year: (english_year(year), german_year(year)) for year in YEARS} == YEARS
    before_noun = {1: "ein", 21: "einundzwanzig", 101: "einhundertein", 1001: "eintausendein"}
    assert {n: german_before_noun(n) for n in before_noun} == before_noun


def test_all_numbers_are_read_back():
    for n in [*range(12_000), *range(12_000, 1_000_000, 97)]:
        assert parse_german(german(n)) == n
        assert parse_german(german_before_noun(n), before_noun=True) == n
        assert n == 0 or parse_german_ordinal(german_ordinal(n)) == n
    assert all(parse_german(german_year(year)) == year for year in range(1100, 2100))
    some = range(0, 1_000_000, 37)
    assert len({english(n) for n in some}) == len(some)


def test_out_of_range():
    for say, n in ((english, -1), (german, 1_000_000), (english_ordinal, 0), (german_ordinal, 0)):
        with pytest.raises(ValueError, match="number words go from"):
            say(n)
    for say in (english_year, german_year):
        for year in (1099, 2100):
            with pytest.raises(ValueError, match="go from 1100 to 2,099"):
                say(year)
    with pytest.raises(ValueError, match="must be one of train, val, test"):
        next(sentences("dev", seed=0))


def numbers_in(german_sentence):
    """All numbers of a sentence, whatever the template."""
    found = []
    for word in german_sentence.split():
        if word == "einen":
            found.append(1)
        before_noun = functools.partial(parse_german, before_noun=True)
        for parse in (parse_german, before_noun, parse_german_ordinal):
            try:
                found.append(parse(word))
                break
            except KeyError:
                pass
    return found


def test_splits_share_no_number():
    for split in number_words.SPLITS:
        drawn = pairs(split, 1500, seed=4)
        assert drawn == pairs(split, 1500, seed=4) != pairs(split, 1500, seed=5)
        for _, de in drawn:
            found = numbers_in(de)
            assert found and all(split_of(n) == split for n in found), de
    shares = [split_of(n) for n in range(20_000)]
    assert 0.03 < shares.count("val") / 20_000 < 0.07 > shares.count("test") / 20_000 > 0.03
    assert set(shares[:100]) == {"train"}


def test_every_template_says_the_same_in_both_languages():
    said = pairs("train", 4000, seed=0)
    german_of = {english(n): german(n) for n in BY_HAND}
    starts = ("the price is ", "the ", "it was in the year ")
    assert {next((s for s in starts if en.startswith(s)), "") for en, _ in said} == {*starts, ""}
    checked = 0
    for en, de in said:
        if en in german_of:
            assert german_of[en] == de
            checked += 1
        elif " than " in en:
            a, b = numbers_in(de)
            assert en == f"{english(a)} is {'more' if a > b else 'less'} than {english(b)}"
            assert ("mehr" in de) == (a > b)
        elif "euro" in en:
            (n,) = numbers_in(de)
            assert en == f"the price is {english(n)} euro{'s' if n > 1 or n == 0 else ''}"
        elif "page" in en:
            (n,) = numbers_in(de)
            assert en == f"the {english_ordinal(n)} page"
        elif "year" in en:
            (n,) = numbers_in(de)
            assert en == f"it was in the year {english_year(n)}"
        elif " as " not in en:
            assert numbers_in(de) == [n for n in numbers_in(de) if english(n) == en]
    assert checked


def test_files(tmp_path):
    write_files(tmp_path, train=60, val=20, test=10, seed=0)
    for split, count in (("train", 60), ("val", 20), ("test", 10)):
        sides = [(tmp_path / f"{split}.{lang}").read_text().splitlines() for lang in ("en", "de")]
        found = list(zip(*sides, strict=True))
        assert len(set(found)) == len(found) == count
        assert found[0] == next(sentences(split, seed=0))


def test_the_quickstarts_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(number_words, "_COUNTS", {"train": 800, "val": 30, "test": 30})
    manifest = build(tmp_path / "data")
    train = TranslationPairs(tmp_path / "data", "train")
    assert len(train) == manifest["splits"]["train"]["pairs"] == 800
    assert manifest["vocab_size"] == 400 and not any(manifest["filters"].values())
    before = (tmp_path / "data/manifest.json").stat().st_ino
    assert build(tmp_path / "data") == manifest
    assert (tmp_path / "data/manifest.json").stat().st_ino == before  # found, not made
    (tmp_path / "data/train.ids").write_bytes(b"")
    assert build(tmp_path / "data") == manifest  # made again, the same
    monkeypatch.setattr(number_words, "_COUNTS", {"train": 700, "val": 30, "test": 30})
    assert build(tmp_path / "data")["splits"]["train"]["pairs"] == 700
    (tmp_path / "other").mkdir()
    (tmp_path / "other/manifest.json").write_text(json.dumps({"format": "another"}))
    with pytest.raises(DataError, match="is no prepared translation folder"):
        build(tmp_path / "other")
