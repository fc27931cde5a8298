"""Both tokenizers there and back, and GPT-2's ids against values known from elsewhere."""

import json
import pickle
import shutil

import numpy as np
import pytest
from datafiles import gpt2_files
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from decent_jax.data.text import tokenizers
from decent_jax.data.text.prepare_text import prepare
from decent_jax.data.text.token_folder import TokenWindows
from decent_jax.ground.errors import DataError


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return tokenizers.load("gpt2", gpt2_files(tmp_path_factory.mktemp("gpt2")))


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = tokenizers.load("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids.shape == (len(text.replace("\0", "").encode()),)
    assert tokenizer.decode(ids) == text.replace("\0", "")
    assert tokenizer.end_of_text not in ids


@settings(max_examples=200)
@given(st.text() | st.text("<|endoftext|> \n\t'lé你🙂"))
def test_gpt2_round_trip(gpt2, text):
    ids = gpt2.encode(text)
    assert ids.dtype == np.uint16 and ids.ndim == 1
    assert gpt2.decode(ids) == text
    assert gpt2.end_of_text not in ids


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
    # more than tiktoken's stack bears in one piece
    text = "a" + " \n" * 500_000 + "b"
    assert gpt2.decode(gpt2.encode(text)) == text


@pytest.mark.parametrize("bad", [-1, 256, 60000])
def test_unknown_id_is_named(bad):
    with refuses(bad):
        tokenizers.load("bytes").decode([65, bad])


def test_no_download_is_one_sentence(monkeypatch):
    def offline(*args):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("tiktoken.load.read_file_cached", offline)
    with refuses("--tokenizer_path", error=DataError):
        tokenizers.load("gpt2")


def test_bad_folders(gpt2, tmp_path):
    with refuses("'bpe'", error=DataError):
        tokenizers.load("bpe")
    with refuses("none/encoder.json", error=DataError):
        tokenizers.load("gpt2", tmp_path / "none")
    gpt2.save_files(tmp_path)
    merges = gpt2.files["vocab.bpe"].decode().split("\n")
    merges[3], merges[4] = merges[4], merges[3]
    (tmp_path / "vocab.bpe").write_text("\n".join(merges))
    with refuses("vocab.bpe", error=DataError):
        tokenizers.load("gpt2", tmp_path)


def read_by_transformers(tokenizer, folder):
    """`AutoTokenizer` of the files beside an exported model."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    for name, content in tokenizer.hf_files().items():
        (folder / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_gpt2_is_read_by_transformers(gpt2, tmp_path):
    read = read_by_transformers(gpt2, tmp_path)
    text = "Gossip, don't all-reduce!  naïve"
    assert read(text)["input_ids"] == gpt2.encode(text).tolist()
    assert read.eos_token_id == gpt2.end_of_text


def small_tokenizer(path, size=0, end="</s>"):
    """A tokenizer.json of words, with `size` words that no text has."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    words = ["<unk>", "to", "be", "or", "not", *(f"w{i}" for i in range(size))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([end])
    made.save(str(path))
    return path


@pytest.mark.parametrize(("size", "dtype"), [(0, "uint16"), (70_000, "uint32")])
def test_a_tokenizer_of_hugging_face(tmp_path, size, dtype):
    """Prepared, read back, and the folder needs nothing else; ids beyond 65,535 survive."""
    path = small_tokenizer(tmp_path / "words.json", size)
    last = f"w{size - 1}" if size else "not"
    (tmp_path / "book.txt").write_text(f"to be or not to be </s> {last} or {last}")
    manifest = prepare(tmp_path / "book.txt", tmp_path / "out", str(path), val_fraction=0.3)
    assert manifest["dtype"] == f"{dtype}, little-endian"
    tokenizer = tokenizers.from_manifest(tmp_path / "out")
    assert tokenizer.vocab_size == 6 + size and tokenizer.end_of_text == 5 + size
    windows = TokenWindows(tmp_path / "out" / "val.bin", 3)
    assert windows.num_tokens == 4  # and the end of the text
    assert windows[0].tolist() == [4 + size, 3, 4 + size, tokenizer.end_of_text]
    train = TokenWindows(tmp_path / "out" / "train.bin", 7)[0]
    assert tokenizer.end_of_text not in train[:-1].tolist()  # the text of the separator is text
    assert pickle.loads(pickle.dumps(tokenizer)).encode("be not").tolist() == [2, 4]
    assert read_by_transformers(tokenizer, tmp_path)("be not")["input_ids"] == [2, 4]
    with refuses(99_999):
        tokenizer.decode([99_999])


MERGES = {"type": "BPE", "vocab": {"</s>": 0, "a": 1, "aa": 2}, "merges": ["a a", "aa a"]}


def test_files_that_are_no_tokenizer(tmp_path):
    path = small_tokenizer(tmp_path / "words.json", end="stop")
    with refuses(path, "</s>", error=DataError):
        tokenizers.load(str(path))
    for content in ("{}", json.dumps({"model": MERGES})):
        path.write_text(content)
        with refuses(path, error=DataError):
            tokenizers.load(str(path))
    with refuses("none.json", error=DataError):
        tokenizers.load(str(tmp_path / "none.json"))


def test_a_tokenizer_s_padding_and_truncation_are_left_out(tmp_path):
    """They are for batches; a document has the tokens that it has."""
    path = small_tokenizer(tmp_path / "words.json")
    wanted = tokenizers.load(str(path)).encode("to be or not").tolist()
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    cut = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    saved = json.loads(path.read_text()) | {"padding": padding, "truncation": cut}
    path.write_text(json.dumps(saved))
    assert tokenizers.load(str(path)).encode("to be or not").tolist() == wanted


def test_from_manifest(gpt2, tmp_path):
    with refuses(tmp_path, "manifest.json", error=DataError):
        tokenizers.from_manifest(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"tokenizer": tokenizers.load("bytes").to_json()}))
    assert tokenizers.from_manifest(tmp_path).name == "bytes"
    manifest.write_text(json.dumps({"tokenizer": gpt2.to_json()}))
    gpt2.save_files(tmp_path)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path, moved)
    assert tokenizers.from_manifest(moved).decode([15496, 995]) == "Hello world"
    manifest.write_text("{}")
    with refuses(manifest, error=DataError):
        tokenizers.from_manifest(tmp_path)
    entry = gpt2.to_json()
    entry["files"]["vocab.bpe"] = "0" * 64
    manifest.write_text(json.dumps({"tokenizer": entry}))
    with refuses("vocab.bpe", error=DataError):
        tokenizers.from_manifest(tmp_path)
