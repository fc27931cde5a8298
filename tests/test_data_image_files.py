"""Every layout of images gives the same records; every damage is named in one sentence."""

import gzip
import json
import pickle
import re
import shutil
import sys
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import mini_imagenet as mini
import numpy as np
import pytest
import tensorflow_datasets as tfds

from decent_jax.data.images import array_records
from decent_jax.data.images.image_folder import EncodedImage, open_images
from decent_jax.data.images.prepare_images import prepare
from decent_jax.ground.errors import DataError


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """The folder of each layout."""
    path = tmp_path_factory.mktemp("layouts")
    flat = mini.write_flat_val(mini.write_folders(path / "flat", splits=["train"]))
    mini.write_devkit(flat, packed=False)
    folders = mini.write_folders(path / "folders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_records, "SHARD_BYTES", 4000)
        prepare(folders, path / "prepared", workers=1)
    return {
        "folders": folders,
        "validation": mini.write_folders(path / "validation", val="validation"),
        "flat": flat,
        "archives": mini.write_archives(path / "archives"),
        "tars": mini.write_tars(path / "tars"),
        "long tars": mini.write_tars(path / "long_tars", "./", format=tarfile.PAX_FORMAT),
        "prepared": path / "prepared",
        "tfds": mini.write_tfds(path / "tfds"),
        "tfds above": path / "tfds",
    }


ORDERED = ("folders", "validation", "flat", "archives", "tars", "long tars", "prepared")


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("layout", ORDERED)
def test_every_layout_gives_the_same_records(layouts, layout, split):
    source = open_images(layouts[layout], split)
    wanted = [EncodedImage(*record) for record in mini.records(split)]
    assert [source[i] for i in range(len(source))] == wanted
    assert source.class_names == mini.WNIDS
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [record.label for record in wanted]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("layout", ["tfds", "tfds above"])
def test_tfds_gives_the_same_records_in_its_order(layouts, layout, split):
    source = open_images(layouts[layout], split)
    assert Counter(source[i] for i in range(len(source))) == Counter(mini.records(split))
    assert source.class_names == mini.WNIDS
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [source[i].label for i in range(len(source))]
    assert "tensorflow" not in sys.modules


def test_tfds_records_are_what_tfds_itself_reads(layouts):
    source = open_images(layouts["tfds"], "val")
    theirs = tfds.builder_from_directory(layouts["tfds"]).as_data_source(
        "validation", decoders={"image": tfds.decode.SkipDecoding()}
    )
    assert len(theirs) == len(source)
    for own, record in zip(map(source.__getitem__, range(len(source))), theirs, strict=True):
        assert (own.data, own.label) == (record["image"], record["label"])


def test_tfds_without_file_names(tmp_path):
    source = open_images(mini.write_tfds(tmp_path, mini.WithoutNames), "train")
    assert re.fullmatch(r"train/n\d+/record-0000007", source[7].name)


@pytest.mark.parametrize("layout", ["folders", "flat", "archives", "prepared", "tfds"])
def test_pickling_and_threads(layouts, layout):
    source = open_images(layouts[layout], "val")
    alone = [source[i] for i in range(len(source))]
    copy = pickle.loads(pickle.dumps(source))
    assert repr(copy) == repr(source) and len(pickle.dumps(copy)) < 5000
    with ThreadPoolExecutor(8) as pool:  # files are opened by several threads at once
        order = np.random.default_rng(0).integers(0, len(source), 500)
        assert list(pool.map(copy.__getitem__, order)) == [alone[i] for i in order]


def test_few_shards_stay_open(layouts, monkeypatch):
    monkeypatch.setattr(array_records, "_OPEN_FILES", 2)
    source = open_images(layouts["prepared"], "train")
    with ThreadPoolExecutor(8) as pool:
        order = np.random.default_rng(0).integers(0, len(source), 500)
        names = list(pool.map(lambda i: source[i].name, order))
    assert names == [mini.records("train")[i][2] for i in order]


def test_index_and_repr(layouts):
    source = open_images(layouts["folders"], "val")
    assert source[np.int32(14)] == mini.records("val")[14]
    for index in (15, -1):
        with pytest.raises(IndexError, match=f"image {index} of 15"):
            source[index]
    with pytest.raises(TypeError):
        source[0.5]
    assert repr(source) == (
        f"ImageFiles({str(layouts['folders'])!r}, 'val', class folders: 15 images of 5 classes)"
    )


def test_what_is_passed_over_and_what_is_not(tmp_path):
    folder = mini.write_folders(tmp_path / "in") / "train" / mini.WNIDS[0]
    for name in (".hidden.jpg", "notes.txt", "Thumbs.db"):
        (folder / name).write_bytes(b"")
    (tmp_path / "in/train/.cache").mkdir()
    (tmp_path / "in/train/SHA256SUMS").write_bytes(b"")
    assert len(open_images(tmp_path / "in", "train")) == 30
    for name in ("A.JPG", "a.png", "z.Jpeg", "é\udce9.jpg"):  # also a name that is no UTF-8
        (folder / name).write_bytes(name.encode("utf-8", "surrogateescape"))
    source = open_images(tmp_path / "in", "train")
    found = {image.name: image for image in map(source.__getitem__, range(10))}
    assert len(source) == 34 and list(found) == sorted(found)
    assert found[f"train/{mini.WNIDS[0]}/é\udce9.jpg"].data == b"\xc3\xa9\xe9.jpg"


def test_a_class_may_be_absent_in_val(tmp_path, layouts):
    path = mini.write_folders(tmp_path)
    shutil.rmtree(path / "val" / mini.WNIDS[1])
    source = open_images(path, "val")
    assert source.class_names == mini.WNIDS
    assert np.bincount(source.labels).tolist() == [3, 0, 3, 3, 3]


def test_splits_in_different_layouts(tmp_path):
    mini.write_archives(tmp_path)
    mini.write_folders(tmp_path, splits=["train"])
    (tmp_path / "ILSVRC2012_img_train.tar").unlink()
    source = open_images(tmp_path, "val")
    assert [source[i] for i in range(len(source))] == mini.records("val")


# --- errors: what is done to a good folder, and what is said when a split is opened ---


def folders(path):
    return mini.write_folders(path)


def flat(path):
    mini.write_devkit(mini.write_flat_val(mini.write_folders(path, splits=["train"])))
    return path


def edit(file, change):
    file.write_bytes(change(file.read_bytes()))


def tar(name, *files):
    return lambda path: (path / name).write_bytes(mini.tar_bytes(dict.fromkeys(files, b"")))


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


def truncate_nested(path):
    """The archive is whole, the archive of one class in it is not."""
    archive = path / "ILSVRC2012_img_train.tar"
    with tarfile.open(archive) as file:
        members = {name: file.extractfile(name).read() for name in file.getnames()}
    members["n03000134.tar"] = members["n03000134.tar"][:3000]
    archive.write_bytes(mini.tar_bytes(members))


def rename_class(path, split, old, new):
    (path / split / old).rename(path / split / new)


def add_classes(path):
    for i in range(5):
        shutil.copytree(path / "val" / mini.WNIDS[0], path / "val" / f"n9999{i}")


def end_between_members(data):
    """The tar file ends after its first member, without the blocks that mark the end."""
    size = int(data[124:135], 8)
    return data[: 512 + -(-size // 512) * 512]


def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


KIT = mini.DEVKIT
TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
CASES = {
    "path missing": (folders, shutil.rmtree, "train", "in:"),
    "no layout": (
        folders,
        lambda p: (shutil.rmtree(p / "train"), shutil.rmtree(p / "val")),
        "train",
        "in:",
    ),
    "no val": (folders, lambda p: shutil.rmtree(p / "val"), "val", "in: .*validation"),
    "no train": (folders, lambda p: shutil.rmtree(p / "train"), "val", "in: .*training"),
    "no class folder": (
        folders,
        lambda p: [shutil.rmtree(p / "train" / wnid) for wnid in mini.WNIDS],
        "train",
        "in/train",
    ),
    "empty class": (
        folders,
        lambda p: empty(p / "train/n02119789"),
        "train",
        "train, class n02119789",
    ),
    "empty val": (flat, lambda p: empty(p / "val"), "val", "in/val"),
    "unknown classes": (folders, add_classes, "val", "in/val: .*n99990, n99991, n99992 and 2 more"),
    "unknown class in flat val": (
        flat,
        lambda p: rename_class(p, "train", "n12998815", "n13000000"),
        "val",
        "in/val: .*n12998815",
    ),
    "no devkit": (flat, lambda p: (p / f"{KIT}.tar.gz").unlink(), "val", f"in: .*{KIT}.tar.gz"),
    "devkit cut short": (
        flat,
        lambda p: edit(p / f"{KIT}.tar.gz", lambda data: data[:300]),
        "val",
        f"{KIT}.tar.gz: .*cut short",
    ),
    "devkit of something else": (
        flat,
        lambda p: tarfile.open(p / f"{KIT}.tar.gz", "w:gz").close(),
        "val",
        f"{KIT}.tar.gz: .*{KIT}/data/",
    ),
    "meta.mat damaged": (
        flat,
        lambda p: (
            mini.write_devkit(p, packed=False),
            edit(p / KIT / "data/meta.mat", lambda data: data[:200]),
        ),
        "val",
        f"in: {KIT}",
    ),
    "an image too few": (
        flat,
        lambda p: (p / "val/ILSVRC2012_val_00000007.JPEG").unlink(),
        "val",
        "in/val: .*14 .* 15",
    ),
    "a line too many": (
        mini.write_archives,
        lambda p: mini.write_devkit(p, ids=[1] * 16),
        "val",
        "img_val.tar: .*15 .* 16",
    ),
    "an id without a class": (
        flat,
        lambda p: mini.write_devkit(p, ids=[1] * 14 + [77]),
        "val",
        f"in: {KIT} .*77",
    ),
    "no number": (
        flat,
        lambda p: mini.write_devkit(p, ids=[1] * 14 + ["dog"]),
        "val",
        f"in: {KIT} .*dog",
    ),
    "tar cut short": (
        mini.write_archives,
        lambda p: edit(p / TRAIN, lambda data: data[:-20000]),
        "train",
        "img_train.tar: .*cut short",
    ),
    "tar cut short between members": (
        mini.write_archives,
        lambda p: edit(p / VAL, end_between_members),
        "val",
        "img_val.tar: .*cut short",
    ),
    "nested tar cut short": (
        mini.write_archives,
        truncate_nested,
        "train",
        "img_train.tar, n03000134.tar: .*cut short",
    ),
    "tar empty": (
        mini.write_tars,
        lambda p: (p / "train.tar").write_bytes(b""),
        "train",
        "train.tar: .*empty",
    ),
    "tar without images": (mini.write_tars, tar("train.tar", "a/b.txt"), "train", "train.tar:"),
    "tar without images, for val": (
        mini.write_tars,
        tar("train.tar", "a/b.txt"),
        "val",
        "train.tar:",
    ),
    "tar of an empty class": (
        mini.write_archives,
        lambda p: (p / TRAIN).write_bytes(mini.tar_bytes({"n1.tar": mini.tar_bytes({})})),
        "train",
        "img_train.tar, class n1",
    ),
    "tar without classes": (
        mini.write_tars,
        tar("train.tar", "a/b.jpg", "c.jpg"),
        "train",
        "train.tar: .*c.jpg",
    ),
    "tar too deep": (
        mini.write_tars,
        tar("train.tar", "x/a/b.jpg"),
        "train",
        "train.tar: .*x/a/b.jpg",
    ),
    "tar compressed": (
        mini.write_tars,
        lambda p: edit(p / "train.tar", gzip.compress),
        "train",
        "train.tar:",
    ),
    "tar damaged": (
        mini.write_tars,
        lambda p: edit(p / "train.tar", lambda data: data[:100] + b"\7" + data[101:]),
        "train",
        "train.tar:",
    ),
    "unknown class in a tar": (mini.write_tars, tar("val.tar", "n7/b.jpg"), "val", "val.tar: .*n7"),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named_in_one_sentence(case, tmp_path):
    make, damage, split, named = CASES[case]
    path = make(tmp_path / "in")
    open_images(path, split)
    damage(path)
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path))}.*{named}") as error:
        open_images(path, split)
    assert "\n" not in str(error.value)


def first_shard(path, split="train"):
    return path / f"{split}-00000.array_record"


PREPARED = {
    "shard missing": (lambda p: first_shard(p).unlink(), "train-00000"),
    "shard cut short": (lambda p: edit(first_shard(p), lambda data: data[:-1]), "train-00000"),
    "shard too long": (lambda p: edit(first_shard(p), lambda data: data + b"x"), "train-00000"),
    "manifest of something else": (
        lambda p: change_json(p / "manifest.json", format="decent_jax tokens 1"),
        "'decent_jax tokens 1', expected 'decent_jax images 1'",
    ),
    "manifest without splits": (
        lambda p: change_json(p / "manifest.json", splits={}),
        r"manifest\.json",
    ),
    "manifest with other classes": (
        lambda p: change_json(p / "manifest.json", class_names=["a"]),
        r"manifest\.json",
    ),
}


@pytest.mark.parametrize("case", PREPARED)
def test_damage_of_a_prepared_folder(case, tmp_path, layouts):
    damage, named = PREPARED[case]
    path = shutil.copytree(layouts["prepared"], tmp_path / "prepared")
    damage(path)
    with pytest.raises(DataError, match=named):
        open_images(path, "train")


def test_damage_that_shows_when_it_is_read(tmp_path, layouts):
    path = shutil.copytree(layouts["prepared"], tmp_path / "prepared")
    data = mini.records("train")[2][0]
    edit(first_shard(path), lambda shard: shard.replace(data[-30:-10], bytes(20)))
    source = open_images(path, "train")
    assert source[1] == mini.records("train")[1]
    with pytest.raises(DataError, match=r"train-00000.* record 2 "):
        source[2]
    assert source[3] == mini.records("train")[3]
    with pytest.raises(ValueError, match="3 bytes are no record"):
        array_records.unpack_record(b"abc")

    path = mini.write_folders(tmp_path / "folders")
    source = open_images(path, "train")
    (path / mini.records("train")[2][2]).unlink()
    with pytest.raises(DataError, match=mini.records("train")[2][2]):
        source[2]

    path = mini.write_archives(tmp_path / "archives")
    source = open_images(path, "val")
    edit(path / VAL, lambda data: data[:2000])
    with pytest.raises(DataError, match=r"img_val\.tar: .*cut short, val/"):
        [source[i] for i in range(len(source))]


def without_labels(path):
    content = json.loads((path / "features.json").read_text())
    del content["featuresDict"]["features"]["label"]
    (path / "features.json").write_text(json.dumps(content))


def tfds_shard(path):
    return path / "mini_imagenet-train.array_record-00001-of-00002"


TFDS = {
    "shard missing": (lambda p: tfds_shard(p).unlink(), "00001-of-00002"),
    "shard cut short": (lambda p: edit(tfds_shard(p), lambda data: data[:-100]), "00001-of-00002"),
    "tfrecord": (lambda p: change_json(p / "dataset_info.json", fileFormat="tfrecord"), "tfrecord"),
    "no splits": (lambda p: change_json(p / "dataset_info.json", splits=[]), "train"),
    "no image classification": (without_labels, "'label'"),
    "damaged": (lambda p: (p / "features.json").write_text("{"), "5.1.0"),
    "two versions": (lambda p: shutil.copytree(p, p.with_name("5.2.0")), "5.1.0, 5.2.0"),
}


@pytest.mark.parametrize("case", TFDS)
def test_damage_of_a_tfds_folder(case, tmp_path):
    damage, named = TFDS[case]
    path = mini.write_tfds(tmp_path)
    damage(path)
    with pytest.raises(DataError, match=named):
        open_images(path.parent, "train")


def test_damage_of_a_tfds_record(tmp_path):
    path = mini.write_tfds(tmp_path)
    (path / "label.labels.txt").write_text("a\nb\n")
    features = (path / "features.json").read_text()
    (path / "features.json").write_text(features.replace('"numClasses": "5"', '"numClasses": "2"'))
    source = open_images(path, "train")
    with pytest.raises(DataError, match=r"00000-of-00002: .*record \d+ "):
        [source[i] for i in range(len(source))]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.tar"):
        open_images(tmp_path / "a.tar", "train")
