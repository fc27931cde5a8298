"""`prepare translation` end to end: every layout, filters, messages."""

import gzip
import json
import lzma
import pickle
import shutil

import mini_pairs
import pytest
from refusals import refuses

from decent_jax.commands.prepare import main
from decent_jax.data.translation import pair_folder, sentence_pairs, subwords
from decent_jax.data.translation.number_pairs import write_files
from decent_jax.data.translation.pair_folder import PairBlocks, TranslationPairs
from decent_jax.data.translation.prepare_translation import prepare
from decent_jax.data.translation.subwords import normalize
from decent_jax.ground.errors import DataError

VOCAB = 350


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return mini_pairs.write_files(tmp_path_factory.mktemp("pairs") / "packed")


@pytest.fixture(scope="module")
def prepared(packed):
    out = packed.parent / "prepared"
    prepare(packed, out, ("en", "de"), vocab_size=VOCAB)
    return out


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts_of(folder, split):
    pairs = TranslationPairs(folder, split)
    return [tuple(map(pairs.vocabulary.decode, pair)) for pair in pairs]


def normalized(pairs):
    return [(normalize(a), normalize(b)) for a, b in pairs]


def test_from_files_to_blocks(packed, prepared):
    manifest = pair_folder.read_manifest(prepared)
    training = normalized(mini_pairs.training_pairs())
    wanted = list(dict.fromkeys(training))
    assert texts_of(prepared, "train") == wanted
    assert manifest["filters"]["duplicate"] == len(training) - len(wanted) > 0
    for split, part in (("val", "dev"), ("test", "test")):
        raw = mini_pairs.pairs(part)
        pairs = TranslationPairs(prepared, split)
        assert texts_of(prepared, split) == normalized(raw)
        assert [pairs.sentences(side) for side in (0, 1)] == [
            list(x) for x in zip(*raw, strict=True)
        ]
    assert "“" in raw[0][0] and "&" in raw[0][0]  # kept as it is
    names = [stream["name"] for stream in manifest["streams"]]
    assert names == [f"{x}.en.gz {x}.de.gz" for x in ("test", "valid", "train")]
    sizes = [stream["pairs"] for stream in manifest["streams"]]
    assert sizes == [mini_pairs.SIZES["test"], mini_pairs.SIZES["dev"], len(training)]
    text = (prepared / "manifest.json").read_text()
    assert str(packed) not in text and manifest == json.loads(text)
    assert pair_folder.is_whole(prepared)
    train = TranslationPairs(prepared, "train")
    blocks = PairBlocks(train, tokens=400, num_replicas=2, shapes=3)
    seen = []
    for step in range(blocks.steps):
        for replica in range(2):
            block = blocks[2 * step + replica]
            for source, target, weight in zip(*block.values(), strict=True):
                if weight:
                    end = list(target).index(subwords.END)
                    assert target[0] == subwords.START and not target[end + 1 :].any()
                    sides = train.vocabulary.decode(source), train.vocabulary.decode(target)
                    seen.append(sides)
                else:
                    assert not source.any() and not target.any()
    assert sorted(seen) == sorted(wanted)


def test_every_layout_gives_the_same_bytes(tmp_path, packed, prepared):
    """Packed files, plain files, prefixes; de to en turns the sides round."""
    files = mini_pairs.write_files(tmp_path / "files", end="")
    parts = [
        mini_pairs.write_pairs(tmp_path / part, mini_pairs.pairs(part))
        for part in ("europarl", "commoncrawl", "nc")
    ]
    held = {"val": files / "valid", "test": packed / "test"}
    wanted = contents(prepared)
    for name, given_input, more in (("files", files, {}), ("parts", parts, held)):
        out = tmp_path / "out" / name
        prepare(given_input, out, ("en", "de"), vocab_size=VOCAB, **more)
        found = contents(out)
        del found["manifest.json"]
        assert found == {n: data for n, data in wanted.items() if n != "manifest.json"}, name
    prepare(packed, tmp_path / "deen", ("de", "en"), vocab_size=VOCAB)
    turned = contents(tmp_path / "deen")
    for name in ("vocabulary.model", "test.en", "test.de"):
        assert turned[name] == wanted[name]
    assert texts_of(tmp_path / "deen", "train") == [x[::-1] for x in texts_of(prepared, "train")]


def test_filters_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(sentence_pairs, "BLOCK_LINES", 7)
    good = [(f"the number {i} is here", f"die Zahl {i} ist da") for i in range(30)]
    bad = {
        "empty_side": [("", "leer"), ("empty", " \u200b\t"), ("", "")],
        "untranslated": [("this is left untranslated", "this is left untranslated")],
        "duplicate": [good[3], ("the number 4  is here ", "die Zahl 4 ist da")],
        "also_in_val_or_test": [("good morning", "guten Morgen"), ("good night", "gute Nacht")],
        "too_long": [(" ".join(map(str, range(90))), " ".join(map(str, range(90))) + " x")],
        "length_ratio": [("yes", "ja " + "und nein " * 12)],
    }
    fine = [("Tom Smith", "Tom Smith"), ("the number 4 is here", "die Zahl 5 ist da")]
    pairs = good + [pair for group in bad.values() for pair in group] + fine
    table = mini_pairs.write_pairs(tmp_path / "train", pairs)
    val = [("good morning", "guten Morgen"), ("", "leer"), ("y", "x " * 400)]
    mini_pairs.write_pairs(tmp_path / "val", val)
    mini_pairs.write_pairs(tmp_path / "test", [("good night", "gute Nacht")] * 2)
    more = {"val": tmp_path / "val", "test": tmp_path / "test", "vocab_size": 330}
    manifest = prepare(table, tmp_path / "out", ("en", "de"), **more)
    counts = {name: len(group) for name, group in bad.items()}
    counts["empty_side"] += 1  # of the validation pairs, from which nothing else is dropped
    assert manifest["filters"] == counts
    assert texts_of(tmp_path / "out", "train") == good + fine
    assert texts_of(tmp_path / "out", "val") == normalized([val[0], val[2]])
    assert TranslationPairs(tmp_path / "out", "val").sentences(0) == ["good morning", "y"]
    assert len(TranslationPairs(tmp_path / "out", "test")) == 2
    assert sum(counts.values()) + len(good + fine) + 2 + 2 == len(pairs) + len(val) + 2


@pytest.mark.parametrize(("split", "side"), [("val", 1), ("test", 0)])
def test_a_sentence_too_long_to_translate_is_refused_with_its_line(split, side, tmp_path):
    pairs = [(f"sentence number {i}", f"Satz Nummer {i}") for i in range(60)]
    table = mini_pairs.write_pairs(tmp_path / "train", pairs)
    held = {name: mini_pairs.write_pairs(tmp_path / name, pairs[:2]) for name in ("val", "test")}
    for length in (1000, 1100):
        long = ["Satz", "Satz"]
        long[side] = "x " * (length // 2)  # of two subwords each
        more = [*pairs[:2], ("", ""), tuple(long), ("a", "a")]
        mini_pairs.write_pairs(held[split], more)
        if length < subwords.LONGEST:
            prepare(table, tmp_path / "out", ("en", "de"), vocab_size=300, **held)
    with refuses(f"{split}.{('en', 'de')[side]}, line 4", 1100, error=DataError):
        prepare(table, tmp_path / "more", ("en", "de"), vocab_size=300, **held)


def test_what_a_folder_holds_besides_is_counted(tmp_path, capsys):
    folder = mini_pairs.write_files(tmp_path / "in", end="")
    packed = lzma.compress((folder / "valid.de").read_bytes())
    (folder / "valid.de").unlink()
    (folder / "valid.de.xz").write_bytes(packed)
    for name in ("train2.en", "train.fr", "test.en.zst", ".hidden"):
        (folder / name).write_bytes(b"")
    (folder / "old").mkdir()
    given = ["--input", str(folder), "--out", str(tmp_path / "out"), "--vocab_size", str(VOCAB)]
    assert main(["translation", *given, "--source_lang", "en", "--target_lang", "de"]) == 0
    wanted = {".en": 1, ".fr": 1, ".en.zst": 1, "hidden": 1, "folder old": 1}
    manifest = pair_folder.read_manifest(tmp_path / "out")
    assert manifest["left_out"] == wanted and manifest["languages"] == ["en", "de"]
    assert "1 .en.zst" in capsys.readouterr().out


def test_a_share_of_the_training_pairs(tmp_path):
    pairs = [(f"sentence number {i // 2}", f"Satz Nummer {i}") for i in range(400)]
    table = mini_pairs.write_pairs(tmp_path / "all", pairs)
    out = tmp_path / "out"
    prepare(table, out, ("en", "de"), vocab_size=300, val=0.1)
    train, val = texts_of(out, "train"), texts_of(out, "val")
    assert sorted(train + val) == sorted(pairs) and 10 < len(val) < 80
    assert not {en for en, _ in train} & {en for en, _ in val}
    assert TranslationPairs(out, "val").sentences(1) == [de for _, de in val]
    with refuses("'test'", "train, val", error=DataError):
        TranslationPairs(out, "test")


def test_no_training_pair_is_left_whatever_the_share(tmp_path):
    same = dict.fromkeys(("train.en", "train.de"), "a b c d\ne f g h\n")
    write_plain(tmp_path / "in", {"val.en": None, "val.de": None} | same)
    with refuses("train split", "2 untranslated", error=DataError):
        prepare(tmp_path / "in", tmp_path / "out", ("en", "de"), vocab_size=300, val=0.5)


def test_a_vocabulary_that_is_not_that_of_the_ids(prepared, tmp_path):
    own = pair_folder.read_manifest(prepared)["vocab_sha256"]
    assert TranslationPairs(prepared, "val").vocabulary.sha256 == own
    mixed = shutil.copytree(prepared, tmp_path / "mixed")
    subwords.train({"other": 3, "words": 4}, 275).save(mixed)
    with refuses("vocabulary.model", error=DataError):
        _ = TranslationPairs(mixed, "val").vocabulary
    assert not pair_folder.is_whole(mixed)
    damaged = shutil.copytree(prepared, tmp_path / "damaged")
    (damaged / "train.ids").write_bytes(bytes((damaged / "train.ids").stat().st_size))
    assert not pair_folder.is_whole(damaged)
    (damaged / "vocabulary.model").write_bytes(b"no model")
    with refuses("vocabulary.model", error=DataError):
        _ = TranslationPairs(damaged, "val").vocabulary


@pytest.mark.parametrize(
    ("file", "fill", "named"),
    [
        ("train.offsets", b"\x7f" * 8, "offsets"),
        ("train.lengths", b"\1\0", "lengths"),
        ("train.ids", b"\xff\xff", 65535),
    ],
)
def test_files_that_do_not_fit_together(prepared, tmp_path, file, fill, named):
    TranslationPairs(prepared, "train").check()
    path = shutil.copytree(prepared, tmp_path / "damaged") / file
    path.write_bytes(fill * (path.stat().st_size // len(fill)))
    with refuses("'train'", named, error=DataError):
        TranslationPairs(path.parent, "train").check()


def test_reader(prepared, tmp_path):
    pairs = TranslationPairs(prepared, "train")
    copy = pickle.loads(pickle.dumps(pairs))
    assert len(copy) == len(pairs.lengths) and copy.languages == ("en", "de")
    for i in (0, len(pairs) - 1):
        sides = pairs[i]
        assert [len(side) for side in sides] == pairs.lengths[i].tolist()
        assert all((a == b).all() for a, b in zip(sides, copy[i], strict=True))
    for i in (-1, len(pairs)):
        with pytest.raises(IndexError):
            pairs[i]
    with refuses("'train'", error=DataError):
        pairs.sentences(0)
    with refuses("manifest.json", error=DataError):
        TranslationPairs(tmp_path, "train")
    torn = shutil.copytree(prepared, tmp_path / "torn")
    manifest = json.loads((prepared / "manifest.json").read_text())
    train = manifest["splits"]["train"]
    for splits in ("none", {"train": {"ids": 3}}, {"train": train | {"pairs": 7}}):
        (torn / "manifest.json").write_text(json.dumps(manifest | {"splits": splits}))
        with refuses(torn, error=DataError):
            TranslationPairs(torn, "train")


def gz(text):
    return gzip.compress(text.encode(), mtime=0)


PLAIN = {"train.en": "a b\nc d\ne f\n", "train.de": "u v\nw x\ny z\n"}
PLAIN |= {"val.en": "g\n", "val.de": "h\n"}
# what is changed in the folder (None: removed), what the refusal names
LONG_WORDS = {"train.en": 5000 * "a" + "\n", "train.de": 5000 * "b" + "\n"}
NO_SIDES = {"train.en": None, "train.de": None}
CASES = {
    "unequal": ({"train.de": "u\nv\n"}, "train.en has 3", "train.de has 2"),
    "empty file": ({"train.de": ""}, "train.de"),
    "only empty sides": ({"train.de": "\n\n \n"}, "train split", "3 empty"),
    "no val left": ({"val.de": "\n"}, "val split", "1 empty"),
    "utf-8": ({"train.de": b"u\nv \xff w\nx\n"}, "train.de, line 2"),
    "utf-16": ({"val.en": "g".encode("utf-16")}, "val.en, line 1"),
    "long words": (LONG_WORDS, "4192 bytes"),
    "truncated": ({"train.en": None, "train.en.gz": gz("a b\n" * 99)[:-9]}, "train.en.gz"),
    "missing language": ({"train.de": None}, "train: ", "only train.en"),
    "nothing": (NO_SIDES, "train.en, train.de"),
    "no val": ({"val.de": None, "val.en": None}, "--val PREFIX"),
    "too large": ({}, "vocabulary of 300"),
}


def write_plain(folder, changes):
    folder.mkdir()
    for name, data in (PLAIN | changes).items():
        if data is not None:
            (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case, tmp_path):
    changes, *named = CASES[case]
    write_plain(tmp_path / "in", changes)
    before = sorted(tmp_path.rglob("*"))
    with refuses(*named, error=DataError):
        prepare(tmp_path / "in", tmp_path / "out", ("en", "de"), vocab_size=300)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "keywords", "named"),
    [
        ([], {}, ("input",)),
        (["none"], {}, ("none.en", "none.de")),
        (["train", "train"], {"val": "val"}, ("train.en",)),
        (["train"], {"val": "train"}, ("train.en",)),
        (["."], {"val": 0.1}, ("--val_fraction",)),
        (["train"], {"val": 1.0}, ("val_fraction", 1.0)),
        (["train"], {"val": 1e-9}, ("--val_fraction 1e-09", "3 pairs")),
        (["."], {"vocab_size": 260}, ("--vocab_size 260",)),
        (["."], {"vocab_size": 70_000}, ("--vocab_size 70000",)),
        (["."], {"vocab_size": 262}, (262,)),
        (["."], {"languages": ("en", "en")}, ("'en'",)),
        (["."], {"languages": ("en", "../x")}, ("../x",)),
        (["."], {"languages": "en"}, ("'en'",)),
        (["."], {"languages": ("en", "de", "fr")}, ("fr",)),
    ],
)
def test_bad_arguments(given, keywords, named, tmp_path, monkeypatch):
    write_plain(tmp_path / "in", {})
    monkeypatch.chdir(tmp_path / "in")
    with refuses(*named, error=DataError):
        prepare(given, "../out", **{"languages": ("en", "de")} | keywords)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_input_that_changes_while_it_is_read(tmp_path, monkeypatch):
    write_files(tmp_path / "in", train=120, val=10, test=10, seed=0)
    learn = subwords.train

    def train_and_append(words, size):
        with (tmp_path / "in/train.en").open("a") as en, (tmp_path / "in/train.de").open("a") as de:
            en.write("one more\n")
            de.write("eins mehr\n")
        return learn(words, size)

    monkeypatch.setattr(subwords, "train", train_and_append)
    with refuses("train.en", error=DataError):
        prepare(tmp_path / "in", tmp_path / "out", ("en", "de"), vocab_size=300)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
