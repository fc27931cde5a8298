"""Folders that Hugging Face's `datasets` saved: Arrow files, as text for `prepare`."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from decent_jax.data.text import token_folder, tokenizers
from decent_jax.data.text.documents import chunks, documents, find_sources
from decent_jax.data.text.prepare_text import prepare
from decent_jax.ground import machine
from decent_jax.ground.errors import DataError

TEXTS = [f"document {k}, with an é" for k in range(25)]


def save(folder, texts, column="text", files=2):
    """As `datasets.save_to_disk` does: a stream per file, batches, and a state that names them."""
    folder.mkdir(parents=True)
    table = pa.table({"id": list(range(len(texts))), column: texts})
    names = [f"data-{k:05}-of-{files:05}.arrow" for k in range(files)]
    size = -(-len(texts) // files)
    for k, name in enumerate(names):
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table.slice(k * size, size), max_chunksize=4)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def read(path, **options):
    sources = find_sources([path], **options)
    found = list(chunks(sources, "text"))
    size = sum(source.size for source in sources)
    assert size - 8 * len(sources) <= sum(chunk.read for chunk in found) <= size  # but the ends
    return [text for chunk in found for text in documents(chunk, "text")]


def test_a_saved_data_set_without_what_is_cached_beside_it(tmp_path):
    folder = save(tmp_path / "set", TEXTS)
    (folder / "cache-1f.arrow").write_bytes((folder / "data-00000-of-00002.arrow").read_bytes())
    assert read(folder) == TEXTS
    prepare([folder], tmp_path / "out", "bytes", val_fraction=0.2)
    tokenizer = tokenizers.load("bytes")
    tokens = token_folder.TokenWindows(tmp_path / "out" / "train.bin", 4).num_tokens
    kept = json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"]
    assert kept["train"]["documents"] + kept["val"]["documents"] == len(TEXTS)
    whole = sum(len(tokenizer.encode(text)) + 1 for text in TEXTS)
    assert tokens + kept["val"]["tokens"] == whole


def test_of_several_splits_training_takes_train_and_validation_another(tmp_path):
    for split, texts in (("test", ["t"]), ("train", TEXTS), ("validation", ["v", "w"])):
        save(tmp_path / "all" / split, texts, files=1)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert read(tmp_path / "all") == TEXTS
    assert read(tmp_path / "all", validation=True) == ["v", "w"]


def test_a_single_file_of_the_other_format(tmp_path):
    path, table = tmp_path / "one.arrow", pa.table({"text": TEXTS})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    assert [text for c in chunks(find_sources([path]), "text") for text in c.data] == TEXTS


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_parquet_files_without_a_dictionary(encoding, tmp_path):
    table, path = pa.table({"text": TEXTS}), tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, use_dictionary=False, column_encoding=encoding)
    assert read(path) == TEXTS


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_dictionary_is_unpacked_in_pieces_that_the_machine_can_hold(kind, tmp_path, monkeypatch):
    """Twenty rows of one text of a megabyte take a file of a megabyte, or less."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: 64 << 20)
    path, texts = tmp_path / f"a.{kind}", pa.array([2**20 * "x"] * 20)
    if kind == "parquet":
        pa.parquet.write_table(pa.table({"text": texts}), path, use_dictionary=True)
    else:
        table = pa.table({"text": texts.dictionary_encode()})
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    found = list(chunks(find_sources([path]), "text"))
    assert {len(text) for chunk in found for text in chunk.data} == {2**20}
    assert sum(len(chunk.data) for chunk in found) == 20 and max(len(c.data) for c in found) <= 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("column", "no column 'text', only 'id', 'body'; see --text_field"),
        ("kind", "column 'text' holds int64, not strings"),
        ("null", "row 5: column 'text' is null"),
        ("cut", "cannot be read after row"),
        ("no arrow", "cannot be read after row 0"),
        ("state", r"state\.json: not the state.json of a saved data set; save it again"),
        ("no train", "has no split 'train', only test"),
    ],
)
def test_what_cannot_be_read(name, words, tmp_path):
    texts = {"kind": [1, 2], "null": [*TEXTS[:5], None, *TEXTS[5:]]}.get(name, TEXTS)
    folder = save(tmp_path / "set", texts, "body" if name == "column" else "text", files=1)
    file = folder / "data-00000-of-00001.arrow"
    if name == "cut":
        file.write_bytes(file.read_bytes()[:-700])
    elif name == "no arrow":
        file.write_bytes(b"no arrow" * 9)
    elif name == "state":
        (folder / "state.json").write_text('{"_data_files": 3}')
    elif name == "no train":
        folder.rename(tmp_path / "test")
        (tmp_path / "dataset_dict.json").write_text("{}")
        folder = tmp_path
    with pytest.raises(DataError, match=words):
        prepare([folder], tmp_path / "out", "bytes", val_fraction=0.2)
