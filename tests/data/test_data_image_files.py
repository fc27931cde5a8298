"""Every layout of images gives the same records, every damage is named; generated pictures."""

import json
import pickle
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor

import mini_imagenet as mini
import numpy as np
import pytest
from refusals import refuses

from decent_jax.data.images import array_records, generated_images
from decent_jax.data.images.generated_images import CLASS_NAMES, GeneratedImages
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
        "prepared": path / "prepared",
    }


ORDERED = ("folders", "validation", "flat", "archives", "prepared")


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("layout", ORDERED)
def test_every_layout_gives_the_same_records(layouts, layout, split):
    source = open_images(layouts[layout], split)
    wanted = [EncodedImage(*record) for record in mini.records(split)]
    assert [source[i] for i in range(len(source))] == wanted
    assert source.class_names == mini.WNIDS
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [record.label for record in wanted]


@pytest.mark.parametrize("layout", ["folders", "flat", "archives", "prepared"])
def test_pickling_and_threads(layouts, layout):
    source = open_images(layouts[layout], "val")
    alone = [source[i] for i in range(len(source))]
    copy = pickle.loads(pickle.dumps(source))
    assert repr(copy) == repr(source) and len(pickle.dumps(copy)) < 5000
    with ThreadPoolExecutor(8) as pool:  # files are opened by several threads at once
        order = np.random.default_rng(0).integers(0, len(source), 500)
        assert list(pool.map(copy.__getitem__, order)) == [alone[i] for i in order]


def test_index_and_repr(layouts):
    source = open_images(layouts["folders"], "val")
    assert source[np.int32(14)] == mini.records("val")[14]
    for index in (15, -1):
        with pytest.raises(IndexError):
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


def add_classes(path):
    for i in range(5):
        shutil.copytree(path / "val" / mini.WNIDS[0], path / "val" / f"n9999{i}")


def end_between_members(data):
    """The tar file ends after its first member, without the blocks that mark the end."""
    size = int(data[124:135], 8)
    return data[: 512 + -(-size // 512) * 512]


KIT = mini.DEVKIT
TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"


def archives(path):
    return mini.write_archives(path)


def kit(*ids):
    """Another ground truth."""
    return lambda path: mini.write_devkit(path, ids=[1] * 14 + list(ids))


def remove(*names):
    def change(path):
        for name in names:
            shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()

    return change


def write(name, change):
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


def replace_train(*names):
    return write(TRAIN, lambda _: mini.tar_bytes(dict.fromkeys(names, b"")))


def damage_meta(path):
    mini.write_devkit(path, packed=False)
    write(f"{KIT}/data/meta.mat", lambda data: data[:200])(path)


CASES = {  # what is made, what is done to it, the split that is opened, what the refusal names
    "path": (folders, shutil.rmtree, "train", "in:"),
    "layout": (folders, remove("train", "val"), "train", "in:"),
    "no val": (folders, remove("val"), "val", "in:", "validation"),
    "no train": (folders, remove("train"), "val", "in:", "training"),
    "no class": (folders, remove(*(f"train/{n}" for n in mini.WNIDS)), "train", "in/train"),
    "empty class": (folders, lambda p: empty(p / "train/n02119789"), "train", "class n02119789"),
    "empty val": (flat, lambda p: empty(p / "val"), "val", "in/val"),
    "unknown classes": (folders, add_classes, "val", "in/val:", "n99990, n99991, n99992 and 2"),
    "no such class": (
        flat,
        lambda p: (p / "train/n12998815").rename(p / "train/n13000000"),
        "val",
        "in/val:",
        "n12998815",
    ),
    "no kit": (flat, remove(f"{KIT}.tar.gz"), "val", "in:", f"{KIT}.tar.gz"),
    "kit cut": (flat, write(f"{KIT}.tar.gz", lambda data: data[:300]), "val", f"{KIT}.tar.gz:"),
    "meta.mat": (flat, damage_meta, "val", "in:", KIT),
    "too few": (flat, remove("val/ILSVRC2012_val_00000007.JPEG"), "val", "in/val:", 14, 15),
    "too many": (archives, kit(1, 1), "val", "img_val.tar:", 15, 16),
    "an id without a class": (flat, kit(77), "val", "in:", KIT, 77),
    "tar cut": (archives, write(TRAIN, lambda data: data[:-20000]), "train", "img_train.tar:"),
    "tar cut between members": (archives, write(TRAIN, end_between_members), "train", TRAIN),
    "no classes": (
        archives,
        write(TRAIN, lambda _: mini.tar_bytes({"a.jpg": b""})),
        "train",
        "a.jpg",
    ),
    "no images": (archives, write(TRAIN, lambda _: mini.tar_bytes({"a.txt": b""})), "train", TRAIN),
    "no images, for val": (archives, write(TRAIN, lambda _: mini.tar_bytes({})), "val", TRAIN),
    "nested tar cut": (archives, truncate_nested, "train", "img_train.tar, n03000134.tar:"),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named_in_one_sentence(case, tmp_path):
    make, damage, split, *named = CASES[case]
    path = make(tmp_path / "in")
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
def test_damage_of_a_prepared_folder(case, tmp_path, layouts):
    damage, named = PREPARED[case]
    path = shutil.copytree(layouts["prepared"], tmp_path / "prepared")
    damage(path)
    with refuses(named, error=DataError):
        open_images(path, "train")


def test_damage_that_shows_when_it_is_read(tmp_path, layouts):
    path = shutil.copytree(layouts["prepared"], tmp_path / "prepared")
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

    path = mini.write_archives(tmp_path / "archives")
    source = open_images(path, "val")
    write(VAL, lambda data: data[:2000])(path)
    with refuses("img_val.tar:", "val/", error=DataError):
        [source[i] for i in range(len(source))]


# --- generated pictures: a function of seed, split and index alone --------------------------------


@pytest.fixture(scope="module")
def source():
    return GeneratedImages("train", 600)


def test_records(source):
    assert len(source) == 600
    record = source[7]
    assert record["image"].shape == (32, 32, 3) and record["image"].dtype == np.uint8
    assert record["label"].shape == () and record["label"].dtype == np.int32
    np.testing.assert_array_equal(record["image"], source.images[7])
    assert record["label"] == source.labels[7]
    with pytest.raises(IndexError):
        source[600]
    with pytest.raises(ValueError):
        source.images[0] = 0
    with pytest.raises(ValueError):
        source.labels[0] = 0


def test_the_first_records_do_not_depend_on_how_many_there_are(source):
    for count in (1, 253):  # less than a chunk, and across two
        fewer = GeneratedImages("train", count)
        np.testing.assert_array_equal(fewer.images, source.images[:count])
        np.testing.assert_array_equal(fewer.labels, source.labels[:count])


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


def test_classes_are_balanced(source):
    assert source.class_names == CLASS_NAMES and len(set(CLASS_NAMES)) == 10
    tens = np.sort(source.labels.reshape(-1, 10), axis=1)
    np.testing.assert_array_equal(tens, np.broadcast_to(np.arange(10), tens.shape))
    assert len({tuple(ten) for ten in source.labels.reshape(-1, 10).tolist()}) > 50  # shuffled


@pytest.mark.parametrize("label", range(10))
def test_shapes_fit_the_unit_circle(label):
    """So that they lie inside the picture wherever they are put."""
    u, v = np.meshgrid(*[np.linspace(-1.5, 1.5, 301, dtype=np.float32)] * 2)
    inside = generated_images._SHAPES[label](u, v) < 0
    assert np.hypot(u, v)[inside].max() <= 1.01
    assert 0.15 < inside.sum() * 0.01**2 / np.pi < 0.85  # neither a trace nor everything
