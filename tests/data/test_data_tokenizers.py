"""Tokenizers there and back, and GPT-2's ids against values known from elsewhere."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from datafiles import gpt2_json
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from test_data_tokenizer_json import words
from tokenizers import Tokenizer

from decent_jax.commands.prepare import main
from decent_jax.data.text import tokenizers
from decent_jax.data.text.prepare_text import prepare
from decent_jax.ground.errors import DataError


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return tokenizers.load(str(gpt2_json(tmp_path_factory.mktemp("gpt2"))))


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = tokenizers.load("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids.shape == (len(text.replace("\0", "").encode()),)
    assert tokenizer.decode(ids) == text.replace("\0", "")
    assert tokenizer.end_of_text not in ids


SHAKESPEARES = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@given(st.text(), st.text())
def test_characters_round_trip(text, more):
    tokenizer = tokenizers.CharTokenizer(text + more)
    ids = tokenizer.encode(text)
    known = sorted(set(text + more) - {"\0"})
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (len(known) + 1, len(known))
    assert ids.tolist() == [known.index(x) for x in text if x != "\0"]
    assert tokenizer.decode(ids) == text.replace("\0", "")
    assert tokenizer.end_of_text not in ids and ids.dtype == tokenizer.dtype


def test_characters_have_nanogpts_ids():
    """Of tiny Shakespeare, as in its author's lectures: 65 characters."""
    tokenizer = tokenizers.CharTokenizer(SHAKESPEARES[::-1])
    assert tokenizer.encode("hii there").tolist() == [46, 47, 47, 1, 58, 46, 43, 56, 43]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (66, 65)
    assert len(tokenizers.CharTokenizer("".join(map(chr, range(32, 70_000)))).dtype.name) == 6


@pytest.mark.parametrize(("unknown", "code"), [("\t", "U+0009"), ("🙂", "U+1F642")])
def test_an_unknown_character_is_named(unknown, code, tmp_path, capsys):
    """In the validation text, in a prompt, and in a text with the characters of another."""
    (tmp_path / "train.txt").write_text(SHAKESPEARES)
    (tmp_path / "val.txt").write_text(f"To be {unknown}, or not")
    given = ["text", "--tokenizer", "chars", "--input", str(tmp_path / "train.txt")]
    given += ["--out", str(tmp_path / "out")]
    assert main([*given, "--val_input", str(tmp_path / "val.txt")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert all(x in said for x in ("val.txt", code, " 65 ")) and not (tmp_path / "out").exists()
    assert main([*given, "--val_fraction", "0.3"]) == 0
    for text in unknown, "\ud800":
        with refuses("U+", error=DataError):
            tokenizers.from_manifest(tmp_path / "out").encode(text)
    with refuses("val.txt", code, error=DataError):
        prepare(tmp_path / "val.txt", tmp_path / "b", str(tmp_path / "out"))


def test_characters_of_another_folder(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef" * 9)
    (tmp_path / "b.txt").write_text("fed" * 9)
    prepare(tmp_path / "a.txt", tmp_path / "a", "chars", val=0.5)
    first = tokenizers.from_manifest(tmp_path / "a")
    prepare(tmp_path / "b.txt", tmp_path / "b", str(tmp_path / "a"), val=0.5)
    second = tokenizers.from_manifest(tmp_path / "b")
    assert first.to_json() == second.to_json() and second.vocab_size == 7
    ids = np.fromfile(tmp_path / "b/val.bin", "<u2")
    assert second.decode(ids[:-1]) in "fed" * 9 and ids[-1] == 6
    with refuses("--end_of_text", error=DataError):
        prepare(tmp_path / "a.txt", tmp_path / "c", "chars", end_of_text="a")
    with refuses("chars.json", error=DataError):
        tokenizers.load("chars")


@pytest.mark.parametrize("content", [b"", b"abc", b"[1]", b"7", b"\xff", b"null", b'"ab'])
def test_files_that_hold_no_characters(content, tmp_path):
    entry = tokenizers.CharTokenizer("abc").to_json()
    (tmp_path / "manifest.json").write_text(json.dumps({"tokenizer": entry}))
    (tmp_path / "chars.json").write_bytes(content)
    with refuses("chars.json", error=DataError):
        tokenizers.load(str(tmp_path))
    (tmp_path / "chars.json").unlink()
    with refuses("chars.json", error=DataError):
        tokenizers.load(str(tmp_path))


def test_gpt2_known_ids(gpt2):
    # as published in many places for GPT-2
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    assert gpt2.encode(" Hello, I'm a language model").tolist() == [
        18435, 11, 314, 1101, 257, 3303, 2746,
    ]  # fmt: skip
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50257, 50256)
    assert gpt2.decode([50256]) == "<|endoftext|>"
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_lone_surrogates_and_torn_characters(name, gpt2):
    tokenizer = gpt2 if name == "gpt2" else tokenizers.load(name)
    text = json.loads('"\\ud83d\\ude42 and \\ud800"') + "\ud83d\ude42"
    assert tokenizer.decode(tokenizer.encode(text)) == "🙂 and �🙂"
    assert "�" in tokenizer.decode(tokenizer.encode("🙂")[:1])


def test_a_million_white_characters(gpt2):
    text = "a" + " \n" * 500_000 + "b"
    assert gpt2.decode(gpt2.encode(text)) == text


@pytest.mark.parametrize("bad", [-1, 256, 60000])
def test_unknown_id_is_named(bad):
    with refuses(bad):
        tokenizers.load("bytes").decode([65, bad])


def test_gpt2_is_downloaded_or_refused_in_one_sentence(monkeypatch, tmp_path):
    made = Tokenizer.from_file(str(gpt2_json(tmp_path)))
    downloads = Mock(side_effect=[made, ConnectionError("no route\nto host")])
    hub = SimpleNamespace(from_str=Tokenizer.from_str, from_pretrained=downloads)
    monkeypatch.setattr("tokenizers.Tokenizer", hub)  # the class of the library
    assert tokenizers.load("gpt2").encode("Hello world").tolist() == [15496, 995]
    with refuses("--tokenizer FILE.json", error=DataError):
        tokenizers.load("gpt2")


def test_from_manifest(tmp_path):
    with refuses(tmp_path, "manifest.json", error=DataError):
        tokenizers.from_manifest(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"tokenizer": tokenizers.load("bytes").to_json()}))
    assert tokenizers.from_manifest(tmp_path).name == "bytes"
    named = tokenizers.load(str(words(tmp_path / "words.json", special=["</s>"])))
    manifest.write_text(json.dumps({"tokenizer": named.to_json()}))
    named.save_files(tmp_path)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path, moved)
    assert tokenizers.from_manifest(moved).decode(named.encode("to be")) == "to be"
    manifest.write_text("{}")
    with refuses(manifest, error=DataError):
        tokenizers.from_manifest(tmp_path)
    entry = named.to_json()
    entry["files"]["tokenizer.json"] = "0" * 64
    manifest.write_text(json.dumps({"tokenizer": entry}))
    with refuses("tokenizer.json", error=DataError):
        tokenizers.from_manifest(tmp_path)
    for name in ("gpt2", "", ".", str(moved)):
        manifest.write_text(json.dumps({"tokenizer": entry | {"name": name}}))
        with refuses(manifest, repr(name), error=DataError):
            tokenizers.from_manifest(tmp_path)
    with refuses("--end_of_text", moved, error=DataError):
        tokenizers.load(str(moved), "a")
    assert tokenizers.load(str(moved)).to_json() == named.to_json()
