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
