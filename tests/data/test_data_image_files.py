"""Layouts of images give the same records, as `prepare images` does; damage; generated pictures."""

import json
import pickle
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import mini_imagenet as mini
import numpy as np
import pytest
from refusals import refuses

from decent_jax.commands.prepare import main
from decent_jax.data.images import array_records, image_folder
from decent_jax.data.images.generated_images import GeneratedImages
from decent_jax.data.images.image_folder import EncodedImage, open_images
from decent_jax.data.images.prepare_images import prepare
from decent_jax.data.prepared_folder import sha256_file
from decent_jax.ground.errors import DataError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return mini.write_folders(tmp_path_factory.mktemp("folders"))


SHARD = 4000  # bytes, which seven or eight of these images have


@pytest.fixture(scope="module")
def prepared(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_records, "SHARD_BYTES", SHARD)
        prepare(folders, out, workers=1)
    return out


def records(folder, split):
    source = open_images(folder, split)
    return [source[i] for i in range(len(source))]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("layout", ["folders", "prepared"])
def test_both_layouts_give_the_same_records(layout, split, request):
    source = open_images(request.getfixturevalue(layout), split)
    wanted = [EncodedImage(*record) for record in mini.records(split)]
    assert [source[i] for i in range(len(source))] == wanted
    assert source.class_names == mini.WNIDS and source.left_out == {}
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [record.label for record in wanted]
    copy = pickle.loads(pickle.dumps(source))
    assert repr(copy) == repr(source) and len(pickle.dumps(copy)) < 5000
    with ThreadPoolExecutor(8) as pool:  # files are opened by several threads at once
        order = np.random.default_rng(0).integers(0, len(source), 500)
        assert list(pool.map(copy.__getitem__, order)) == [wanted[i] for i in order]
    for index in (len(source), -1):
        with pytest.raises(IndexError):
            source[index]


# --- what a folder holds besides: read, or counted ------------------------------------------------


def kinds_of_pictures():
    picture = np.random.default_rng(0).integers(0, 256, (9, 8, 3), np.uint8)
    kinds = dict.fromkeys(("jpg", "JPEG", "jpe", "jfif"), "JPEG")
    kinds |= {"png": "PNG", "webp": "WEBP", "bmp": "BMP", "gif": "GIF", "tif": "TIFF"}
    kinds |= {"TIFF": "TIFF", "ppm": "PPM"}
    for end, kind in kinds.items():
        yield f"{end}.{end}", mini.encoded(picture, kind)


def test_every_picture_that_pillow_decodes_is_read(tmp_path):
    pictures = dict(kinds_of_pictures())
    own = mini.write_folders(tmp_path / "in") / "train" / mini.WNIDS[0]
    for name, data in pictures.items():
        (own / name).write_bytes(data)
    manifest = prepare(tmp_path / "in", tmp_path / "out", workers=1)
    entry = manifest["splits"]["train"]
    assert (entry["records"], entry["bad"]) == (30 + len(pictures), 0)
    found = {x.name.rpartition("/")[2]: x.data for x in records(tmp_path / "out", "train")}
    assert found | pictures == found


LEFT_OUT = {
    "train/{0}/notes.txt": ".txt",
    "train/{0}/Thumbs.DB": ".db",
    "train/{0}/a.heic": ".heic",
    "train/{0}/more/README": "without a suffix",
    "train/{0}/.hidden.jpg": "hidden",
    "train/{0}/.cache/a.jpg": "hidden",
    "train/.cache/a.jpg": "hidden",
    "train/a.jpg": "picture outside of a class",
    "train/list.csv.gz": ".csv.gz",
    "val/b.png": "picture outside of a class",
    "val/{1}/boxes.txt": ".txt",
    "test/a.jpg": "folder test",
    "labels.json": ".json",
}


def test_what_is_not_read_is_counted(tmp_path, capsys):
    folder = mini.write_folders(tmp_path / "in")
    for name in LEFT_OUT:
        path = folder / name.format(*mini.WNIDS)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (folder / "train" / mini.WNIDS[0] / "gone.jpg").symlink_to("nowhere")
    wanted = Counter([*LEFT_OUT.values(), ".jpg"])
    given = ["images", "--input", str(folder), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(given) == 0
    assert array_records.read_manifest(tmp_path / "out")["left_out"] == wanted
    said = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("left out"))
    for kind, count in wanted.items():
        assert f"{count} {kind}" in said
    assert records(tmp_path / "out", "train") == mini.records("train")


def test_subfolders_and_links_of_a_class_are_read_once(tmp_path):
    folder = mini.write_folders(tmp_path / "in")
    own = folder / "train" / mini.WNIDS[0]
    first, second, *_ = sorted(own.iterdir())
    (own / "deep/er").mkdir(parents=True)
    first.rename(own / "deep/er" / first.name)
    (tmp_path / "elsewhere").mkdir()
    second.rename(tmp_path / "elsewhere/é\udce9.jpg")  # a name that is no UTF-8
    (own / "link").symlink_to(tmp_path / "elsewhere")
    (own / "again").symlink_to(tmp_path / "elsewhere")
    (own / "loop").symlink_to(own)
    (folder / "train" / mini.WNIDS[1]).rename(tmp_path / "class")
    (folder / "train" / mini.WNIDS[1]).symlink_to(tmp_path / "class")
    found = records(folder, "train")
    assert Counter(x.data for x in found) == Counter(data for data, *_ in mini.records("train"))
    names = [x.name.removeprefix(f"train/{mini.WNIDS[0]}/") for x in found[:6]]
    assert names == sorted(names)
    assert {"again/é\udce9.jpg", f"deep/er/{first.name}"} < set(names)


def test_tiny_imagenets_layout(tmp_path):
    wanted = {}
    for split, number in (("train", 3), ("val", 2)):
        for i, (data, label, _) in enumerate(mini.records(split)[:: 6 // number]):
            own = tmp_path / split / ("" if split == "val" else mini.WNIDS[label]) / "images"
            own.mkdir(parents=True, exist_ok=True)
            (own / f"{split}_{i}.JPEG").write_bytes(data)
            wanted[split, data] = label
            table = own.parent / ("val_annotations.txt" if split == "val" else "boxes.txt")
            with table.open("a") as file:
                file.write(f"{split}_{i}.JPEG\t{mini.WNIDS[label]}\t0\t0\t62\t62\n")
    (tmp_path / "val/images/unknown.JPEG").write_bytes(b"")
    (tmp_path / "wnids.txt").write_bytes(b"")
    train, val = (records(tmp_path, split) for split in ("train", "val"))
    found = {("train", x.data): x.label for x in train}
    assert found | {("val", x.data): x.label for x in val} == wanted
    assert open_images(tmp_path, "train").left_out == {".txt": 6}
    assert sum(open_images(tmp_path, "val").left_out.values()) == 1
    (tmp_path / "val/images/val_0.JPEG").unlink()
    with refuses("val_annotations.txt", 1, error=DataError):
        open_images(tmp_path, "val")


def test_a_class_may_be_absent_in_val(tmp_path):
    path = mini.write_folders(tmp_path, val="validation")
    shutil.rmtree(path / "validation" / mini.WNIDS[1])
    source = open_images(path, "val")
    assert source.class_names == mini.WNIDS
    assert np.bincount(source.labels).tolist() == [3, 0, 3, 3, 3]


# --- errors: what is done to a good folder, and what is said when a split is opened ---


def empty(folder):
    for file in folder.iterdir():
        file.rename(file.with_suffix(".heic"))


def add_classes(path):
    for i in range(5):
        shutil.copytree(path / "val" / mini.WNIDS[0], path / "val" / f"n9999{i}")


def deeper(path):
    """One level of folders too many, which hold the classes."""
    for split in ("train", "val"):
        (path / split).rename(path / "moved")
        (path / split).mkdir()
        (path / "moved").rename(path / split / "images")


def remove(*names):
    def change(path):
        for name in names:
            shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()

    return change


def write(name, change):
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


CASES = {  # what is done to class folders, the split that is opened, what the refusal names
    "path": (shutil.rmtree, "train", "in:"),
    "layout": (remove("train", "val"), "train", "in:"),
    "no val": (remove("val"), "val", "in:", "validation"),
    "no train": (remove("train"), "val", "in:", "training"),
    "no class": (remove(*(f"train/{n}" for n in mini.WNIDS)), "train", "in/train"),
    "empty class": (lambda p: empty(p / "train/n02119789"), "train", "n02119789", "6 .heic"),
    "unknown classes": (add_classes, "val", "in/val:", "n99990, n99991, n99992 and 2"),
    "one class": (deeper, "train", "in/train", "only one class, images"),
    "one class, val": (deeper, "val", "in/train", "only one class, images"),
    "two val": (lambda p: shutil.copytree(p / "val", p / "validation"), "val", "val, validation"),
    "table": (lambda p: (p / "val/val_annotations.txt").write_text("a b"), "val", "line 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named_in_one_sentence(case, tmp_path):
    damage, split, *named = CASES[case]
    path = mini.write_folders(tmp_path / "in")
    open_images(path, split)
    damage(path)
    with refuses(tmp_path, *named, error=DataError):
        open_images(path, split)


def shard(change):
    return write("train-00000.array_record", change)


def manifest(**changes):
    def change(data):
        return json.dumps(json.loads(data) | changes).encode()

    return write("manifest.json", change)


PREPARED = {
    "shard missing": (remove("train-00000.array_record"), "train-00000"),
    "shard cut short": (shard(lambda data: data[:-1]), "train-00000"),
    "shard too long": (shard(lambda data: data + b"x"), "train-00000"),
    "something else": (manifest(format="decent_jax tokens 1"), "decent_jax tokens 1"),
    "without splits": (manifest(splits={}), "manifest.json"),
    "other classes": (manifest(class_names=["a"]), "manifest.json"),
}


@pytest.mark.parametrize("case", PREPARED)
def test_damage_of_a_prepared_folder(case, tmp_path, prepared):
    damage, named = PREPARED[case]
    path = shutil.copytree(prepared, tmp_path / "prepared")
    damage(path)
    with refuses(named, error=DataError):
        open_images(path, "train")


def test_damage_that_shows_when_it_is_read(tmp_path, prepared):
    path = shutil.copytree(prepared, tmp_path / "prepared")
    data = mini.records("train")[2][0]
    shard(lambda old: old.replace(data[-30:-10], bytes(20)))(path)
    source = open_images(path, "train")
    assert source[1] == mini.records("train")[1]
    with refuses("train-00000", "record 2 ", error=DataError):
        source[2]
    assert source[3] == mini.records("train")[3]
    path = mini.write_folders(tmp_path / "folders")
    source = open_images(path, "train")
    (path / mini.records("train")[2][2]).unlink()
    with refuses(mini.records("train")[2][2], error=DataError):
        source[2]


# --- prepare images -------------------------------------------------------------------------------


def test_the_manifest(prepared):
    """Of the records that the layouts above have."""
    manifest = json.loads((prepared / "manifest.json").read_text())
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
            path = prepared / f"{split}-{i:05}.array_record"
            assert shard["file"] == path.name and shard["bytes"] == path.stat().st_size
            assert shard["sha256"] == sha256_file(path)
            own = [next(sizes[split]) for _ in range(shard["records"])]
            assert sum(own[:-1]) < SHARD and (sum(own) >= SHARD or shard is entry["shards"][-1])
            names.add(path.name)
        assert i > 0 and sum(shard["records"] for shard in entry["shards"]) == entry["records"]
    assert {path.name for path in prepared.iterdir()} == names
    assert [path.name for path in prepared.parent.iterdir()] == ["out"]


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
        labels = open_images(out, split).labels
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


# --- generated pictures: a function of seed, split and index alone --------------------------------


@pytest.fixture(scope="module")
def source():
    return GeneratedImages("train", 600)


def test_known_picture(source):
    """Drawn the same on every machine, up to the rounding of sines."""
    assert source.labels[:10].tolist() == [2, 6, 9, 5, 7, 3, 8, 0, 1, 4]
    wanted = [[74, 0, 96], [255, 187, 202], [219, 169, 247], [255, 127, 207]]
    np.testing.assert_allclose(source.images[0, 16, ::8], wanted, atol=1)


def test_splits_seeds_and_indices_differ(source):
    pictures = np.concatenate(
        [
            source.images,
            GeneratedImages("val", 600).images,
            GeneratedImages("train", 600, seed=1).images,
        ]
    )
    assert len({picture.tobytes() for picture in pictures}) == 1800
    # Not only other noise: what differs from the mean picture is uncorrelated.
    rest = pictures[:, ::4, ::4].astype(np.float32).mean(axis=-1).reshape(3, 600, 64)
    rest = (rest - rest.mean(axis=1, keepdims=True)).reshape(3, -1)
    correlation = np.corrcoef(rest)
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 0.05
