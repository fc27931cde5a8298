"""`prepare text` end to end: every format and every message."""

import bz2
import gzip
import hashlib
import json
import lzma
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datafiles import DATA, gpt2_json
from refusals import refuses

from decent_jax.commands.prepare import main
from decent_jax.data.text import token_folder, tokenizers
from decent_jax.data.text.prepare_text import prepare
from decent_jax.ground.errors import DataError

TEXTS = [f"document {i}: " + "é🙂 words\r\n" * (i % 7 + 1) for i in range(40)]


def write_jsonl(path, texts, field="text"):
    lines = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    data = lines.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def texts_of(out, split):
    tokenizer = tokenizers.from_manifest(out)
    ids = np.fromfile(out / f"{split}.bin", "<u2")
    assert ids[-1] == tokenizer.end_of_text
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)]


def test_every_format_gives_the_same_documents(tmp_path):
    """The same are held out in any order and however often they occur; copies stay together."""
    write_jsonl(tmp_path / "a/x.jsonl", TEXTS[:20])
    write_jsonl(tmp_path / "a/deeper/y.jsonl.gz", TEXTS[20:])
    twice = (TEXTS + TEXTS)[::-1]
    table = pa.table({"id": list(range(len(twice))), "text": twice})
    (tmp_path / "b.parquet").write_bytes(parquet(table))
    (tmp_path / "c").mkdir()
    for i, text in enumerate(TEXTS):
        data, end = (text.encode(), "") if i % 2 else (gzip.compress(text.encode()), ".gz")
        (tmp_path / f"c/{i:02}.txt{end}").write_bytes(data)
    held_out = []
    for given, texts in {"a": TEXTS, "b.parquet": twice, "c": TEXTS}.items():
        out = tmp_path / "out" / given
        manifest = prepare([tmp_path / given], out, "bytes", val=0.3)
        train, val = texts_of(out, "train"), texts_of(out, "val")
        held_out.append({*val})
        assert held_out[-1] == held_out[0] and 4 <= len(held_out[0]) <= 20
        assert sorted(train) == sorted(x for x in texts if x not in held_out[0])
        assert sorted(val) == sorted(x for x in texts if x in held_out[0])
        if given == "b.parquet":  # same order too
            assert train == [x for x in texts if x not in held_out[0]]
        entry = manifest["splits"]["val"]
        data = (out / "val.bin").read_bytes()
        assert entry["documents"] == len(val) and entry["bytes"] == len(data) == entry["tokens"] * 2
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert manifest == json.loads((out / "manifest.json").read_text())
        assert str(tmp_path) not in (out / "manifest.json").read_text()
        if given == "a":
            assert manifest["inputs"] == ["a/x.jsonl", "a/deeper/y.jsonl.gz"]


PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": pa.Codec("zstd").compress,
}
READ = {  # a file of one document: its name, and how it is packed
    f"{name}.{packed}".rstrip("."): packed
    for name in ("a.txt", "b.jsonl", "c.ndjson", "d.JSONLINES")
    for packed in ("", *PACK)
}
LEFT_OUT = {
    "e.csv": ".csv",
    "deep/f.json": ".json",
    "g.jsonl.lz4": ".jsonl.lz4",
    "h.md": ".md",
    "README": "without a suffix",
    ".i.txt": "hidden",
    ".git/j.txt": "hidden",
    "k.txt.zip": ".txt.zip",
}


def test_a_folder_is_read_or_counted(tmp_path, capsys):
    """Packed files, other names of JSON lines, links; each real folder and file once."""
    folder, wanted = tmp_path / "in", []
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, packed in READ.items():
        wanted.append(f"document of {name} é")
        text = wanted[-1] if ".txt" in name else json.dumps({"text": wanted[-1]}) + "\n"
        data = text.encode()
        data = PACK[packed](data) if packed else data
        (folder / name).write_bytes(bytes(data))
    for name in LEFT_OUT:
        (folder / name).write_bytes(b"{}")
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "again.txt").symlink_to("a.txt")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.txt").write_text("linked")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "link too").symlink_to(tmp_path / "elsewhere")
    (folder / "deep/loop").symlink_to(folder)
    out = tmp_path / "out"
    given = ["--input", str(folder), "--out", str(out), "--tokenizer", "bytes"]
    assert main(["text", *given, "--val_fraction", "0.3"]) == 0
    assert sorted(texts_of(out, "train") + texts_of(out, "val")) == sorted([*wanted, "linked"])
    counts = Counter([*LEFT_OUT.values(), ".txt"])
    assert token_folder.read_manifest(out)["left_out"] == counts
    said = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("left out"))
    assert all(f"{count} {kind}" in said for kind, count in counts.items())


@pytest.mark.parametrize("packed", PACK)
def test_a_packed_file_that_is_cut_or_no_such_file(packed, tmp_path):
    data = bytes(PACK[packed](json.dumps({"text": "a" * 5000 + "é"}).encode() * 3))
    for content in (data[:-9], data[: len(data) // 2], b'{"text": "a"}\n'):
        (tmp_path / f"x.jsonl.{packed}").write_bytes(content)
        with refuses(f"x.jsonl.{packed}", error=DataError):
            prepare([tmp_path / f"x.jsonl.{packed}"], tmp_path / "out", "bytes")


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
)
def test_every_kind_of_strings_of_parquet(kind, tmp_path):
    table = pa.table({"id": [1, 2, 3], "text": pa.array(["a", "b", "é"]).cast(kind)})
    (tmp_path / "x.parquet").write_bytes(parquet(table))
    prepare([tmp_path / "x.parquet"], tmp_path / "out", "bytes", val=0.5)
    found = texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "val")
    assert sorted(found) == ["a", "b", "é"]


def test_gpt2_on_real_text_and_by_itself_afterwards(tmp_path):
    posts = DATA / "web_text/posts.jsonl"
    out, file = tmp_path / "out", gpt2_json(tmp_path)
    prepare([posts], out, str(file), val=0.3)
    file.unlink()
    wanted = [json.loads(line)["text"] for line in posts.read_text("utf-8").splitlines()]
    assert sorted(texts_of(out, "train") + texts_of(out, "val")) == sorted(wanted)
    ids = np.fromfile(out / "val.bin", "<u2")
    assert ids.max() == 50256 and token_folder.is_whole(out)
    # the same documents are held out whatever the tokenizer
    prepare([posts], tmp_path / "bytes", "bytes", val=0.3)
    assert texts_of(tmp_path / "bytes", "val") == texts_of(out, "val")


def test_a_single_text_is_split_by_position(tmp_path):
    (tmp_path / "book.txt").write_text("abcdefghij")
    manifest = prepare(tmp_path / "book.txt", tmp_path / "out", "bytes", val=0.2)
    assert texts_of(tmp_path / "out", "train") == ["abcdefgh"]
    assert texts_of(tmp_path / "out", "val") == ["ij"]
    assert manifest["splits"]["val"]["documents"] == 1
    prepare(tmp_path / "book.txt", tmp_path / "small", "bytes")  # at least one token for each
    assert texts_of(tmp_path / "small", "val") == ["j"]


def test_val_input_keeps_its_documents_out_of_train(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [*TEXTS[:20], ""])
    b = write_jsonl(tmp_path / "b.jsonl", [*TEXTS[18:25], "\0"])
    manifest = prepare([a], tmp_path / "out", "bytes", val=[b], workers=2)
    assert texts_of(tmp_path / "out", "train") == TEXTS[:18]
    assert texts_of(tmp_path / "out", "val") == TEXTS[18:25]
    assert manifest["validation_documents_left_out_of_train"] == 2
    assert manifest["empty_documents_left_out"] == 2


def test_separators_and_odd_characters_in_the_text(tmp_path):
    texts = ["a\0b", "<|endoftext|>", "\ud800", "\ufeffx", "line\u2028line\x85line\rline"]
    a = write_jsonl(tmp_path / "a.jsonl", texts)
    lines = b"\xef\xbb\xbf" + a.read_bytes().replace(b"\n", b"\r\n") + b"\n\n"
    a.write_bytes(2 * lines)  # as of two files, each with a mark of its encoding
    b = write_jsonl(tmp_path / "b.jsonl", ["held out"])
    prepare([a], tmp_path / "out", "bytes", val=[b])
    assert texts_of(tmp_path / "out", "train") == 2 * ["ab", "<|endoftext|>", "�", *texts[3:]]


def test_other_kinds_of_text_are_read_where_they_are_named(tmp_path):
    """Not in a folder, whose README.md is no document of it."""
    folder, held_out = tmp_path / "in", tmp_path / "val.txt"
    folder.mkdir()
    for path, text in {"in/a.md": "# One", "in/b.py": "b = 2", "in/c.txt": "three"}.items():
        (tmp_path / path).write_text(text)
    held_out.write_text("four")
    prepare([folder / "a.md", folder / "b.py"], tmp_path / "named", "bytes", val=[held_out])
    assert texts_of(tmp_path / "named", "train") == ["# One", "b = 2"]
    prepare([folder], tmp_path / "all", "bytes", val=[held_out])
    assert texts_of(tmp_path / "all", "train") == ["three"]


def one_byte(byte):
    """A parquet column of one text of one byte."""
    buffers = [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(byte)]
    return pa.table({"text": pa.Array.from_buffers(pa.string(), 1, buffers)})


def parquet(table, damaged=False):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=7)
    data = sink.getvalue().to_pybytes()
    return data[:50] + b"\xff" * 900 + data[950:] if damaged else data


def twice():
    return pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])


CASES = {  # the file, its content, what the refusal names
    "missing path": ("none.jsonl", None, "none.jsonl"),
    "extension": ("x.csv", b"a,b", "x.csv"),
    "no readable file": ("folder/x.md", b"a", "folder", "1 .md"),
    "bad json": ("x.jsonl", b'{"text": "a"}\n\n{"text" "b"}\n', "x.jsonl, line 3"),
    "no object": ("x.jsonl", b'{"text": "a"}\n[1]\n', "line 2"),
    "missing field": ("x.jsonl", b'{"text": "a"}\n{"b": 1}', "line 2:", "'text'", "'b'"),
    "not a string": ("x.jsonl", b'{"text": null}', "line 1:", "'text'"),
    "utf-8 in json": ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "byte 24"),
    "utf-8 in text": ("folder/x.txt", b"ab\xe9 c", "x.txt:", "byte 2"),
    "no parquet": ("x.parquet", b"abc", "x.parquet"),
    "null in parquet": ("x.parquet", parquet(pa.table({"text": ["a", None]})), "row 1", "'text'"),
    "bytes in parquet": ("x.parquet", parquet(pa.table({"text": [b"a"]})), "'text'", "binary"),
    "two columns": ("x.parquet", parquet(twice()), "2 columns 'text'"),
    "no column": ("x.parquet", parquet(pa.table({"body": ["a"]})), "'text'", "'body'"),
    "utf-8 in parquet": ("x.parquet", parquet(one_byte(b"\xff")), "row 0"),
    "damaged parquet": ("x.parquet", parquet(pa.table({"text": TEXTS}), True), "x.parquet"),
    "empty validation": ("x.jsonl", b'{"text": "a"}\n', "val split", "1 documents"),
    "empty file": ("x.jsonl", b"", "no document"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case, tmp_path):
    name, data, *named = CASES[case]
    path = tmp_path / name
    if data is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        if "utf-8 in text" in case:
            (path.parent / "y.txt").write_text("fine")
    given = path.parent if path.parent != tmp_path else path
    with refuses(*named, error=DataError):
        prepare([given], tmp_path / "out", "bytes")
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_bad_input_is_found_in_a_later_chunk(tmp_path, monkeypatch, packed):
    monkeypatch.setattr("decent_jax.data.text.documents.CHUNK_BYTES", 100)
    path = write_jsonl(tmp_path / f"x.jsonl{packed}", TEXTS)
    data = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    for bad, named in ((b"{]\n", "line 41: "), (b'"\xff"\n', f"byte {len(data) + 1}")):
        path.write_bytes(gzip.compress(data + bad) if packed else data + bad)
        with refuses(named, error=DataError):
            prepare([path], tmp_path / "out", "bytes", val=0.3)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"val": 0}, ("val_fraction", 0)),
        ({"val": "a.jsonl"}, ("a.jsonl",)),
        ({"val": 1e-9}, ("val_fraction 1e-09", "40 documents")),
        ({"val": 1 - 1e-9}, ("train split", "val_fraction 1")),
    ],
)
def test_bad_arguments(given, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with refuses(*named, error=DataError):
        prepare("a.jsonl", "out", **{"tokenizer": "bytes", **given})
    assert not (tmp_path / "out").exists()
