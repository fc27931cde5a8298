"""A tokenizer.json of somebody else: one end per document, and nothing lost without a word."""

import json
import pickle

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from decent_jax.commands.prepare import main
from decent_jax.data.text import token_folder, tokenizers
from decent_jax.data.text.prepare_text import prepare
from decent_jax.ground.errors import DataError

CORPUS = ["the fox and the dog", "dogs </s> foxes, and a <b> time", "Été </S> naïve 🙂"] * 3
ENDS = ("</s>", "<|endoftext|>", "[EOS]")


OTHERS = ("metaspace", "Unigram", "WordPiece", "WordLevel")
PLAIN = dict.fromkeys(("begins", "padded", "dropout", "ignore_merges", "normalizer"), False)
PLAIN |= {"in_model": True, "special": True}


def built(kind, end, **options):
    """A tokenizer.json of a kind, as its content; its model may know the end, too."""
    models, trainers, before = hf.models, hf.trainers, hf.pre_tokenizers
    special = ["<unk>", end] if options["in_model"] else ["<unk>"]
    more = {"vocab_size": 320, "special_tokens": special, "show_progress": False}
    if kind == "byte-level":
        made = hf.Tokenizer(models.BPE(ignore_merges=options["ignore_merges"]))
        made.pre_tokenizer = before.ByteLevel(add_prefix_space=False)
        made.decoder = hf.decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=before.ByteLevel.alphabet(), **more)
    elif kind == "Unigram":
        made = hf.Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **more)
    else:
        name, split = ("BPE", "Metaspace") if kind == "metaspace" else (kind, "WhitespaceSplit")
        made = hf.Tokenizer(getattr(models, name)(unk_token="<unk>"))
        made.pre_tokenizer = getattr(before, split)()
        trainer = trainers.BpeTrainer if name == "BPE" else getattr(trainers, f"{name}Trainer")
        trainer = trainer(**more)
    if options["normalizer"]:
        made.normalizer = getattr(hf.normalizers, options["normalizer"])()
    made.train_from_iterator([*CORPUS, *(f"w {end} {x}" for x in CORPUS)], trainer)
    (made.add_special_tokens if options["special"] else made.add_tokens)([end])
    if options["begins"]:
        made.post_processor = hf.processors.TemplateProcessing(
            single="<unk> $A", special_tokens=[("<unk>", made.token_to_id("<unk>"))]
        )
    if options["padded"]:
        made.enable_padding(length=9)
        made.enable_truncation(3)
    saved = json.loads(made.to_str())
    if options["dropout"] and "dropout" in saved["model"]:
        saved["model"]["dropout"] = 0.5
    return json.dumps(saved).encode()


def exported(tokenizer):
    """What `AutoTokenizer` makes of the exported files."""
    files = tokenizer.hf_files()
    made = hf.Tokenizer.from_str(files["tokenizer.json"].decode())
    made.encode_special_tokens = json.loads(files["tokenizer_config.json"])["split_special_tokens"]
    return made


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["byte-level", *OTHERS]),
    st.sampled_from(ENDS),
    st.fixed_dictionaries(
        {
            name: st.booleans()
            for name in ("in_model", "special", "begins", "padded", "dropout", "ignore_merges")
        }
        | {"normalizer": st.sampled_from([None, "Lowercase", "NFKC"])}
    ),
    st.lists(st.text("the fox </s>SENDOF|[]T<>😀é\n", max_size=30), max_size=4),
)
def test_a_document_has_one_end_and_the_export_the_same_ids(kind, end, options, texts):
    """Also where the text holds the end, in this spelling or in one that is normalized to it."""
    texts = [*texts, end, f"a {end}b", f"{end} {end.upper()}{end}", end.translate({60: "\uff1c"})]
    content = built(kind, end, **options)
    tokenizer = tokenizers.HFTokenizer(content, end)
    bare = json.dumps(json.loads(content) | {"post_processor": None}).encode()
    assert tokenizers.HFTokenizer(bare, end).files == tokenizer.files  # nothing before a text
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.files == tokenizer.files and again.end_of_text == tokenizer.end_of_text
    assert tokenizer.decode([tokenizer.end_of_text]).strip() == end
    other = exported(tokenizer)
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.end_of_text not in ids
        assert other.encode(text).ids == ids == again.encode(text).tolist()
        if kind == "byte-level" and options["normalizer"] is None:
            assert tokenizer.decode(ids) == text


def test_without_an_end_in_the_text_the_ids_are_the_files_own():
    for kind in ("byte-level", *OTHERS):
        content = built(kind, "</s>", **PLAIN)
        wanted = hf.Tokenizer.from_str(content.decode())
        for text in ("the fox and a dog", "naïve < / s >", ""):
            assert tokenizers.HFTokenizer(content).encode(text).tolist() == wanted.encode(text).ids


def words(path, *tokens, special=(), more=0):
    """A tokenizer.json of words, in a file."""
    names = ["<unk>", "to", "be", "or", "not", *tokens, *(f"w{i}" for i in range(more))]
    made = hf.Tokenizer(hf.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(special))
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))
    return path


# words, special tokens, eos_token of tokenizer_config.json, --end_of_text: the end, or what a
# refusal names
WHICH = {
    "one special": ([], ["</s>"], None, None, "</s>"),
    "special before plain": (["</s>"], ["<eos>"], None, None, "<eos>"),
    "plain, alone": (["</s>"], ["[BOS]"], None, None, "</s>"),
    "configured": ([], ["[EOS]", "[BOS]"], "[EOS]", None, "[EOS]"),
    "configured as an object": ([], ["[EOS]"], {"content": "[EOS]"}, None, "[EOS]"),
    "configured against plain": (["</s>"], ["<end>"], "<end>", None, "<end>"),
    "named against all": (["not"], ["</s>", "<eos>"], "<eos>", "</s>", "</s>"),
    "two special": ([], ["</s>", "<eos>"], None, None, ("</s>, <eos>", "--end_of_text")),
    "two plain": (["</s>", "<eos>"], [], None, None, ("</s>, <eos>", "--end_of_text")),
    "contradiction": ([], ["</s>", "<end>"], "<end>", None, ("</s>", "<end>")),
    "configured, unknown": ([], ["</s>"], "<end>", None, ("</s>", "<end>")),
    "none": ([], ["<end>"], None, None, ("</s>", "--end_of_text")),
    "named, unknown": ([], ["</s>"], None, "<end>", ("<end>",)),
}


@pytest.mark.parametrize("case", WHICH)
def test_which_token_ends_a_document(case, tmp_path):
    plain, special, eos, named, wanted = WHICH[case]
    path = words(tmp_path / "tokenizer.json", *dict.fromkeys(plain), special=special)
    if eos:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    if isinstance(wanted, tuple):
        with refuses(path, *wanted, error=DataError):
            tokenizers.load(str(path), end_of_text=named)
    else:
        found = tokenizers.load(str(path), end_of_text=named)
        assert found.decode([found.end_of_text]) == wanted


@pytest.mark.parametrize(("more", "dtype"), [(0, "uint16"), (70_000, "uint32")])
def test_a_tokenizer_of_hugging_face(tmp_path, more, dtype, capsys):
    """Prepared, read back, and the folder needs nothing else; ids beyond 65,535 survive."""
    path = words(tmp_path / "words.json", special=["<end>"], more=more)
    last = f"w{more - 1}" if more else "not"
    (tmp_path / "book.txt").write_text(f"to be or not to be <end> {last} or {last}")
    out = tmp_path / "out"
    given = ["text", "--input", str(tmp_path / "book.txt"), "--out", str(out), "--val_fraction=0.3"]
    assert main([*given, "--tokenizer", "gpt2", "--end_of_text", "<end>"]) == 2
    assert main([*given, "--tokenizer", str(path), "--end_of_text", "<end>"]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["dtype"] == f"{dtype}, little-endian"
    tokenizer = tokenizers.from_manifest(out)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (6 + more, 5 + more)
    ids = np.fromfile(out / "train.bin", dtype), np.fromfile(out / "val.bin", dtype)
    assert [(x == tokenizer.end_of_text).sum() for x in ids] == [1, 1]
    assert tokenizer.decode(ids[1]).split() == [last, "or", last, "<end>"]
    with refuses(99_999):
        tokenizer.decode([99_999])


def test_an_end_that_cannot_be_kept_out_is_refused_with_its_file(tmp_path):
    path = words(tmp_path / "words.json", "#")
    (tmp_path / "a.txt").write_text("to be # or not")
    with refuses("a.txt", "'#'", "--end_of_text", error=DataError):
        prepare(tmp_path / "a.txt", tmp_path / "out", str(path), end_of_text="#")


# --- What a vocabulary lacks ---------------------------------------------------------------------


def pairs(level=None, **options):
    """A tokenizer.json of byte pair encoding that knows the letters of "the fox"."""
    before = hf.pre_tokenizers.Metaspace()
    if level is not None:
        before = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = hf.Tokenizer(hf.models.BPE(**options))
    made.pre_tokenizer = before
    ascii = [f"<0x{i:02X}>" for i in range(128) if options.get("byte_fallback")]
    affixes = {key: x for key, x in options.items() if key.endswith(("prefix", "suffix"))}
    trainer = hf.trainers.BpeTrainer(
        special_tokens=["</s>", *ascii],
        initial_alphabet=level or [],
        show_progress=False,
        **affixes,
    )
    made.train_from_iterator(["the fox and the fox"] * 3, trainer)
    saved = json.loads(made.to_str())
    saved["added_tokens"] = saved["added_tokens"][:1]
    return json.dumps(saved).encode()


LEVEL = hf.pre_tokenizers.ByteLevel.alphabet()
LACKING = {
    "characters": {},
    "bytes": {"byte_fallback": True},
    "bytes of a level that is not whole": {"level": []},
    "bytes within a word": {"level": LEVEL, "continuing_subword_prefix": "##"},
    "bytes at the end of a word": {"level": LEVEL, "end_of_word_suffix": "</w>"},
}


@pytest.mark.parametrize("options", LACKING.values(), ids=LACKING)
@given(st.text("the fox", max_size=20), st.sampled_from("é日🙂"), st.text("the fox", max_size=20))
def test_no_character_is_dropped_in_silence(options, before, lacked, after):
    """Byte pair encoding without unk_token leaves out what its vocabulary lacks."""
    content = pairs(**options)
    tokenizer = tokenizers.HFTokenizer(content)
    own, text = hf.Tokenizer.from_str(content.decode()), before + after
    try:
        assert tokenizer.encode(text).tolist() == own.encode(text).ids
    except DataError:
        assert len(options) > 1  # as of "eht", of which "##" has no "h"
    named = [] if len(options) > 1 else [repr(lacked)]
    with refuses(*named, "unk_token", error=DataError):
        pickle.loads(pickle.dumps(tokenizer)).encode(f"{before}{lacked} {after}")


@pytest.mark.parametrize("kind", OTHERS)
def test_unknown_tokens_are_counted(kind, tmp_path, capsys):
    """In the manifest and in what `prepare` says, of each split."""
    path = tmp_path / "words.json"
    path.write_bytes(built(kind, "</s>", **PLAIN))
    lines = [json.dumps({"text": f"the fox \u65e5 \u672c {i}"}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    given = ["text", "--input", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "o")]
    assert main([*given, "--tokenizer", str(path), "--val_fraction", "0.3"]) == 0
    said, splits = capsys.readouterr().out, token_folder.read_manifest(tmp_path / "o")["splits"]
    tokenizer = tokenizers.from_manifest(tmp_path / "o")
    for split, entry in splits.items():
        ids = np.fromfile(tmp_path / "o" / f"{split}.bin", tokenizer.dtype)
        unknown = [i for i in ids.tolist() if "<unk>" in tokenizer.decode([i])]
        assert entry["unknown"] == len(unknown) > 0
        assert f"{100 * len(unknown) / len(ids):.2g}%" in said


MERGES = {"type": "BPE", "vocab": {"</s>": 0, "a": 1, "aa": 2}, "merges": ["a a", "aa a"]}


@pytest.mark.parametrize("content", ["{}", "[]", "", "\xff", json.dumps({"model": MERGES})])
def test_files_that_are_no_tokenizer(content, tmp_path):
    path = tmp_path / "words.json"
    with refuses("'bpe'", error=DataError):
        tokenizers.load("bpe")
    with refuses("words.json", error=DataError):
        tokenizers.load(str(path))
    path.write_text(content, encoding="latin-1")
    with refuses(path, error=DataError):
        tokenizers.load(str(path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with refuses("tokenizer_config.json", error=DataError):
        tokenizers.load(str(words(tmp_path / "tokenizer.json", special=["</s>"])))
