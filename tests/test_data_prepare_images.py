"""`prepare images` end to end: the same bytes for any input, broken images, finished shards."""

import json
import os

import mini_imagenet as mini
import pytest

from decent_jax.commands.prepare import main
from decent_jax.data.images import array_records, image_folder, jpeg
from decent_jax.data.images import prepare as prepare_images
from decent_jax.data.images.prepare import prepare
from decent_jax.data.prepared_folder import sha256_file
from decent_jax.ground.errors import DataError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return mini.write_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def prepared(folders, tmp_path_factory):
    """Five shards of train and three of val."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare(folders, out, shards=5, workers=1)
    return out


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def records(out, split):
    source = image_folder.open_images(out, split)
    return [source[i] for i in range(len(source))]


def test_manifest_and_records(tmp_path, folders):
    manifest = prepare(folders, tmp_path / "out", shards=4, workers=1)
    assert manifest == json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["class_names"] == list(mini.WNIDS)
    names = {"manifest.json", "bad_files.jsonl"}
    for split, count in (("train", 4), ("val", 2)):
        entry = manifest["splits"][split]
        assert entry["records"] == len(mini.images()[split]) and entry["bad"] == 0
        assert entry["class_counts"] == [entry["records"] // 5] * 5
        assert [s["file"] for s in entry["shards"]] == [
            f"{split}-{i:05}-of-{count:05}.array_record" for i in range(count)
        ]
        for shard in entry["shards"]:
            path = tmp_path / "out" / shard["file"]
            assert shard["bytes"] == path.stat().st_size
            assert shard["sha256"] == sha256_file(path)
        names |= {shard["file"] for shard in entry["shards"]}
        assert records(tmp_path / "out", split) == mini.records(split)
    assert manifest["total"]["records"] == 45 and manifest["total"]["bad"] == 0
    assert set(contents(tmp_path / "out")) == names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_record():
    record = array_records.pack_record(b"image", 258, "é")
    assert record == b"\x02\x01\x00\x00" + b"\x02\x00" + b"\xc3\xa9" + b"image"
    assert array_records.unpack_record(record) == (b"image", 258, "é")


def test_workers_and_layouts_do_not_change_a_byte(tmp_path, folders, prepared):
    prepare(mini.write_archives(tmp_path / "in"), tmp_path / "tar", shards=5, workers=2)
    assert contents(prepared) == contents(tmp_path / "tar")


def test_how_many_shards(folders, monkeypatch):
    images = {split: image_folder.open_images(folders, split) for split in ("train", "val")}

    def counts(shards=None):
        tasks = prepare_images._tasks(images, shards)
        for split, files in images.items():
            indices = [i for t in tasks if t.split == split for i in range(t.start, t.stop)]
            assert indices == list(range(len(files)))
        return [sum(task.split == split for task in tasks) for split in images]

    assert counts() == [1, 1]
    assert counts(shards=4) == [4, 2]
    assert counts(shards=99) == [30, 15]  # an image each
    monkeypatch.setattr(prepare_images, "_FEW_IMAGES", 3)
    assert counts() == [10, 5]
    monkeypatch.setattr(prepare_images, "_SHARD_BYTES", 1200)  # about two images
    assert 10 < counts()[0] < 30


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
    arguments = ["--input", str(path), "--out", str(out), "--workers", "2", "--shards", "3"]
    assert main(["images", *arguments, "--max_bad", "0.1"]) == 0
    assert (
        "train           27 images          0.4 MB, 3 broken left out\n" in capsys.readouterr().out
    )
    lines = [json.loads(line) for line in (out / "bad_files.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == bad
    assert [line["reason"] for line in lines][:2] == ["is empty", "is no image"]
    assert all(line["reason"].startswith("cannot be decoded") for line in lines[2:])
    manifest = array_records.read_manifest(out)
    assert [manifest["splits"][split]["bad"] for split in ("train", "val")] == [3, 1]
    assert manifest["total"]["bad"] == 4
    for split in ("train", "val"):
        wanted = [record for record in mini.records(split) if record[2] not in bad]
        assert records(out, split) == wanted
        labels = image_folder.open_images(out, split).labels
        assert labels.tolist() == [label for _, label, _ in wanted]


@pytest.mark.parametrize("workers", [1, 2])
def test_too_many_broken_images(tmp_path, workers):
    bad = [mini.records("train")[i][2] for i in (1, 2, 3, 4)]
    path = break_images(tmp_path / "in", bad)
    out = tmp_path / "out"
    with pytest.raises(DataError) as error:
        prepare(path, out, shards=1, workers=workers, max_bad=0.08)
    said = str(error.value)
    assert said.startswith(
        f"at least 4 of 45 images are broken, more than the share 0.08 that --max_bad allows"
        f" ({bad[0]} is empty; {bad[1]} is no image; {bad[2]} cannot be decoded"
    )
    assert bad[3] not in said and said.endswith("; fetch them again or allow more")
    assert not out.exists()
    assert not (tmp_path / ".out.unfinished/manifest.json").exists()
    prepare(path, out, shards=1, workers=1, max_bad=0.1)
    assert len(records(out, "train")) == 26


def test_a_split_without_a_whole_image(tmp_path):
    path = mini.write_folders(tmp_path / "in")
    for file in (path / "val").glob("*/*"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match="none of the 15 images of 'val' is whole"):
        prepare(path, tmp_path / "out", workers=1, max_bad=0.5)
    assert not (tmp_path / "out").exists()


def test_bad_arguments(tmp_path, folders, capsys):
    out = ["--out", str(tmp_path / "out")]
    given = ["--input", str(folders), *out]
    prepared = tmp_path / "prepared"
    prepare(folders, prepared, workers=1)
    tfds_folder = mini.write_tfds(tmp_path / "tfds")
    cases = {
        "shards must be at least 1, got 0": [*given, "--shards", "0"],
        "max_bad must be at least 0 and less than 1, got 1.0": [*given, "--max_bad", "1"],
        "/nowhere: no such folder; give the folder": ["--input", "/nowhere", *out],
        "is a prepared folder already, which training reads": ["--input", str(prepared), *out],
        "is a TFDS folder already, which training reads": ["--input", str(tfds_folder), *out],
    }
    capsys.readouterr()  # what TFDS said
    for sentence, arguments in cases.items():
        assert main(["images", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith("prepare images: ") and sentence in said and said.count("\n") == 1
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk(tmp_path, folders, monkeypatch, capsys):
    class Full:
        def __init__(self, path, options):
            self.close = lambda: None

        def write(self, record):
            raise RuntimeError("write() failed: No space left on device; writing x; at byte 0")

    monkeypatch.setattr(prepare_images, "ArrayRecordWriter", Full)
    out = tmp_path / "out"
    assert main(["images", "--input", str(folders), "--out", str(out), "--workers", "1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("cannot be written (write() failed: No space left on device)")
    assert not out.exists()


# --- going on after a kill ---


@pytest.fixture
def checked(monkeypatch):
    """The images that were decoded."""
    seen = []
    decode = jpeg.decode

    def counting(data):
        seen.append(data)
        return decode(data)

    monkeypatch.setattr(jpeg, "decode", counting)
    return seen


def stop_half_way(path, out, monkeypatch):
    """Leaves two shards of train finished, of five of six images each."""
    make = prepare_images._make_shard

    def stopping(task, **keywords):
        if task.shard == 2:
            raise KeyboardInterrupt
        return make(task, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_images, "_make_shard", stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare(path, out, shards=5, workers=1)
    assert len(list(out.with_name(f".{out.name}.unfinished").glob("*.json"))) == 2


def test_finished_shards_are_not_made_again(tmp_path, folders, prepared, checked, monkeypatch):
    stop_half_way(folders, tmp_path / "out", monkeypatch)
    assert len(checked) == 12
    prepare(folders, tmp_path / "out", shards=5, workers=1)
    assert len(checked) == 45
    assert contents(tmp_path / "out") == contents(prepared)


CHANGES = ("touched", "renamed", "shard", "sidecar", "half a sidecar", "count")


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_is_made_again(tmp_path, checked, monkeypatch, what):
    path = mini.write_folders(tmp_path / "in")
    stop_half_way(path, tmp_path / "out", monkeypatch)
    shard = tmp_path / ".out.unfinished/train-00001-of-00005.array_record"
    image = path / mini.records("train")[8][2]
    again, shards = 6, 5
    if what == "touched":
        os.utime(image, ns=(1, 1))
    elif what == "renamed":
        image.rename(image.with_name(image.name.replace(".JPEG", "x.JPEG")))
    elif what == "shard":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif what == "sidecar":
        prepare_images.sidecar_of(shard).unlink()
    elif what == "half a sidecar":
        prepare_images.sidecar_of(shard).write_text('{"key"')
    else:
        again, shards = 12, 3
    checked.clear()
    prepare(path, tmp_path / "out", shards=shards, workers=1)
    assert len(checked) == 33 + again
    for split in ("train", "val"):
        assert records(tmp_path / "out", split) == records(path, split)
    assert len(list((tmp_path / "out").glob("train-*"))) == shards
