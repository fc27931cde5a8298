"""`prepare images` end to end: the same bytes for any input, shards, broken images."""

import json

import mini_imagenet as mini
import pytest
from refusals import refuses

from decent_jax.commands.prepare import main
from decent_jax.data.images import array_records, image_folder
from decent_jax.data.images.prepare_images import prepare
from decent_jax.data.prepared_folder import sha256_file
from decent_jax.ground.errors import DataError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return mini.write_folders(tmp_path_factory.mktemp("folders"))


SHARD = 4000  # bytes, which seven or eight of these images have


def records(out, split):
    source = image_folder.open_images(out, split)
    return [source[i] for i in range(len(source))]


def test_manifest_and_records(tmp_path, folders, monkeypatch):
    monkeypatch.setattr(array_records, "SHARD_BYTES", SHARD)
    manifest = prepare(folders, tmp_path / "out", workers=1)
    assert manifest == json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["class_names"] == list(mini.WNIDS)
    names = {"manifest.json", "bad_files.jsonl"}
    sizes = {
        split: (len(array_records.pack_record(*record)) for record in mini.records(split))
        for split in ("train", "val")
    }
    for split in ("train", "val"):
        entry = manifest["splits"][split]
        assert entry["records"] == len(mini.images()[split]) and entry["bad"] == 0
        assert entry["class_counts"] == [entry["records"] // 5] * 5
        for i, shard in enumerate(entry["shards"]):
            path = tmp_path / "out" / f"{split}-{i:05}.array_record"
            assert shard["file"] == path.name and shard["bytes"] == path.stat().st_size
            assert shard["sha256"] == sha256_file(path)
            own = [next(sizes[split]) for _ in range(shard["records"])]
            assert sum(own[:-1]) < SHARD and (sum(own) >= SHARD or shard is entry["shards"][-1])
            names.add(path.name)
        assert i > 0 and sum(shard["records"] for shard in entry["shards"]) == entry["records"]
        assert records(tmp_path / "out", split) == mini.records(split)
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def break_images(path, names):
    """The first is empty, the second is text, all others are cut in the middle."""
    mini.write_folders(path)
    for number, name in enumerate(names):
        data = (path / name).read_bytes()
        (path / name).write_bytes({0: b"", 1: b"no image"}.get(number, data[: len(data) // 2]))
    return path


def test_broken_images_are_left_out(tmp_path, capsys):
    bad = [mini.records("train")[i][2] for i in (5, 6, 20)] + [mini.records("val")[3][2]]
    path = break_images(tmp_path / "in", bad)
    out = tmp_path / "out"
    arguments = ["--input", str(path), "--out", str(out), "--workers", "2"]
    assert main(["images", *arguments]) == 0
    assert "3 broken left out" in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "bad_files.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == bad
    assert [line["reason"] for line in lines][:2] == ["is empty", "is not an image"]
    assert all(line["reason"].startswith("cannot be decoded") for line in lines[2:])
    manifest = array_records.read_manifest(out)
    assert [manifest["splits"][split]["bad"] for split in ("train", "val")] == [3, 1]
    for split in ("train", "val"):
        wanted = [record for record in mini.records(split) if record[2] not in bad]
        assert records(out, split) == wanted
        labels = image_folder.open_images(out, split).labels
        assert labels.tolist() == [label for _, label, _ in wanted]
        whole = image_folder.whole_images(path, split)  # a run reads the same of the folder itself
        assert [whole[i] for i in range(len(whole))] == wanted
        assert whole.labels.tolist() == labels.tolist()
        (count,) = (n for kind, n in whole.left_out.items() if f"broken {split}" in kind)
        assert count == manifest["splits"][split]["bad"]


def test_a_class_whose_images_are_all_broken_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(image_folder, "MOST_BAD", 0.5)
    names = [name for _, label, name in mini.records("train") if label == 2]
    path = break_images(tmp_path / "in", names)
    given = ["images", "--input", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(given) == 0
    splits = array_records.read_manifest(tmp_path / "out")["splits"]
    assert splits["train"]["classes_all_broken"] == [mini.WNIDS[2]]
    assert splits["val"]["classes_all_broken"] == []
    assert any(mini.WNIDS[2] in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("workers", [1, 2])
def test_too_many_broken_images(tmp_path, workers):
    bad = [mini.records("train")[i][2] for i in (1, 2, 3, 4, 7)]
    path = break_images(tmp_path / "in", bad)
    with refuses(5, 45, *bad[:3], error=DataError):
        prepare(path, tmp_path / "out", workers=workers)
    with refuses(5, 30, *bad[:3], error=DataError):
        image_folder.whole_images(path, "train")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_a_full_disk(tmp_path, folders, monkeypatch, capsys):
    class Full:
        def __init__(self, path, options):
            self.close = lambda: None

        def write(self, record):
            raise RuntimeError("write() failed: No space left on device; writing x; at byte 0")

    monkeypatch.setattr(array_records, "ArrayRecordWriter", Full)
    out = tmp_path / "out"
    assert main(["images", "--input", str(folders), "--out", str(out), "--workers", "1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("cannot be written (write() failed: No space left on device)")
    assert not out.exists()
