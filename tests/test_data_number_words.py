"""Number words against what grammars and dictionaries say, and read back by another grammar."""

import json

import pytest

from decent_jax.data import number_words
from decent_jax.data.number_words import (
    build,
    english,
    english_ordinal,
    english_year,
    german,
    german_before_noun,
    german_ordinal,
    german_year,
    pairs,
    parse_german,
    parse_german_ordinal,
    sentences,
    split_of,
    write_files,
)
from decent_jax.data.translation_files import TranslationPairs
from decent_jax.errors import DataError

BY_HAND = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    2: ("two", "zwei"),
    3: ("three", "drei"),
    4: ("four", "vier"),
    5: ("five", "fünf"),
    6: ("six", "sechs"),
    7: ("seven", "sieben"),
    8: ("eight", "acht"),
    9: ("nine", "neun"),
    10: ("ten", "zehn"),
    11: ("eleven", "elf"),
    12: ("twelve", "zwölf"),
    13: ("thirteen", "dreizehn"),
    14: ("fourteen", "vierzehn"),
    15: ("fifteen", "fünfzehn"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    18: ("eighteen", "achtzehn"),
    19: ("nineteen", "neunzehn"),
    20: ("twenty", "zwanzig"),
    21: ("twenty-one", "einundzwanzig"),
    30: ("thirty", "dreißig"),
    36: ("thirty-six", "sechsunddreißig"),
    40: ("forty", "vierzig"),
    50: ("fifty", "fünfzig"),
    60: ("sixty", "sechzig"),
    67: ("sixty-seven", "siebenundsechzig"),
    70: ("seventy", "siebzig"),
    76: ("seventy-six", "sechsundsiebzig"),
    80: ("eighty", "achtzig"),
    90: ("ninety", "neunzig"),
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
ORDINALS = {
    1: ("first", "erste"),
    2: ("second", "zweite"),
    3: ("third", "dritte"),
    4: ("fourth", "vierte"),
    5: ("fifth", "fünfte"),
    6: ("sixth", "sechste"),
    7: ("seventh", "siebte"),
    8: ("eighth", "achte"),
    9: ("ninth", "neunte"),
    10: ("tenth", "zehnte"),
    11: ("eleventh", "elfte"),
    12: ("twelfth", "zwölfte"),
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


def test_what_is_said_without_one():
    assert parse_german("hundert") == 100 and parse_german("hunderteins") == 101
    assert parse_german("tausend") == 1000 and parse_german("tausendhundert") == 1100


WRONG = ["", "ein", "sechszehn", "siebenzehn", "siebenzig", "dreizig", "zweizehn", "undzwanzig"]
WRONG += [
    "einundzehn",
    "einsundzwanzig",
    "zwanzigeins",
    "nullhundert",
    "einshundert",
    "hundertnull",
]
WRONG += ["einstausend", "zehnhundert", "elfhunderttausend", "hunderthundert", "tausendtausend"]
WRONG += ["Eins", "ein hundert", "einhundert ", "eine Million", "erste"]


@pytest.mark.parametrize("text", WRONG)
def test_no_german_numbers(text):
    with pytest.raises(ValueError, match="is no German number"):
        parse_german(text)


@pytest.mark.parametrize("text", ["einste", "eintausendeinste", "dreite", "siebente", "achtte"])
def test_no_german_ordinals(text):
    with pytest.raises(ValueError, match="is no German"):
        parse_german_ordinal(text)


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
        for parse in (
            parse_german,
            lambda w: parse_german(w, before_noun=True),
            parse_german_ordinal,
        ):
            try:
                found.append(parse(word))
                break
            except ValueError:
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
