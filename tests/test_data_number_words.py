"""Number words against what grammars and dictionaries say, and the sentences made of them."""

import json

import pytest
from refusals import refuses

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
from decent_jax.ground.errors import DataError

words = str.split
BY_HAND = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    7: ("seven", "sieben"),
    12: ("twelve", "zwölf"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    21: ("twenty-one", "einundzwanzig"),
    30: ("thirty", "dreißig"),
    67: ("sixty-seven", "siebenundsechzig"),
    101: ("one hundred and one", "einhunderteins"),
    700: ("seven hundred", "siebenhundert"),
    1001: ("one thousand and one", "eintausendeins"),
    1100: ("one thousand one hundred", "eintausendeinhundert"),
    21_000: ("twenty-one thousand", "einundzwanzigtausend"),
    101_101: (
        "one hundred and one thousand one hundred and one",
        "einhunderteintausendeinhunderteins",
    ),
    999_999: (
        "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
}
FIRST = words("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
ERSTE = words("erste zweite dritte vierte fünfte sechste siebte achte neunte zehnte elfte zwölfte")
ORDINALS = dict(enumerate(zip(FIRST, ERSTE, strict=True), 1)) | {
    19: ("nineteenth", "neunzehnte"),
    20: ("twentieth", "zwanzigste"),
    33: ("thirty-third", "dreiunddreißigste"),
    101: ("one hundred and first", "einhunderterste"),
    112: ("one hundred and twelfth", "einhundertzwölfte"),
    1000: ("one thousandth", "eintausendste"),
    1003: ("one thousand and third", "eintausenddritte"),
}
YEARS = {
    1100: ("eleven hundred", "elfhundert"),
    1101: ("eleven oh one", "elfhunderteins"),
    1984: ("nineteen eighty-four", "neunzehnhundertvierundachtzig"),
    2000: ("two thousand", "zweitausend"),
    2005: ("two thousand and five", "zweitausendfünf"),
    2010: ("twenty ten", "zweitausendzehn"),
}


def test_by_hand():
    assert {n: (english(n), german(n)) for n in BY_HAND} == BY_HAND
    assert {n: (english_ordinal(n), german_ordinal(n)) for n in ORDINALS} == ORDINALS
    assert {year: (english_year(year), german_year(year)) for year in YEARS} == YEARS
    before_noun = {1: "ein", 21: "einundzwanzig", 101: "einhundertein", 1001: "eintausendein"}
    assert {n: german_before_noun(n) for n in before_noun} == before_noun


@pytest.mark.parametrize("say", [english, german, english_ordinal, german_ordinal])
def test_different_numbers_are_different_words(say):
    some = range(1, 1_000_000, 37)
    assert len({say(n) for n in some}) == len(some)


def test_splits_share_no_number(monkeypatch):
    templates = (lambda draw: draw(), lambda draw: draw(1100, 2100))
    monkeypatch.setattr(number_words, "_TEMPLATES", templates)
    for split in number_words.SPLITS:
        drawn = pairs(split, 1500, seed=4)
        assert drawn == pairs(split, 1500, seed=4) != pairs(split, 1500, seed=5)
        assert {split_of(n) for n in drawn} == {split}
    shares = [split_of(n) for n in range(20_000)]
    assert 0.03 < shares.count("val") / 20_000 < 0.07 > shares.count("test") / 20_000 > 0.03
    assert set(shares[:100]) == {"train"}


@pytest.mark.parametrize(
    ("template", "drawn", "both"),
    [
        ("_count", [21], ("twenty-one", "einundzwanzig")),
        ("_price", [1], ("the price is one euro", "der Preis beträgt einen Euro")),
        ("_price", [21], ("the price is twenty-one euros", "der Preis beträgt einundzwanzig Euro")),
        ("_price", [0], ("the price is zero euros", "der Preis beträgt null Euro")),
        ("_ordinal", [3], ("the third page", "die dritte Seite")),
        (
            "_year",
            [2005],
            ("it was in the year two thousand and five", "es war im Jahr zweitausendfünf"),
        ),
        ("_comparison", [5, 1], ("five is more than one", "fünf ist mehr als eins")),
        ("_comparison", [1, 5], ("one is less than five", "eins ist weniger als fünf")),
        ("_comparison", [5, 5], ("five is as much as five", "fünf ist so viel wie fünf")),
    ],
)
def test_every_template_says_the_same_in_both_languages(template, drawn, both):
    make, numbers = getattr(number_words, template), iter(drawn)
    assert make in number_words._TEMPLATES
    assert make(lambda *_: next(numbers)) == both


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
    with refuses(tmp_path / "other", error=DataError):
        build(tmp_path / "other")
