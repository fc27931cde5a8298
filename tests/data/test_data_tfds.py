"""Folders of images that TFDS prepared as array_record."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from mini_imagenet import encoded
from refusals import refuses

from decent_jax.data.images import prepare_images
from decent_jax.data.images.image_folder import open_images
from decent_jax.ground.errors import DataError

CLASSES, SHARDS = ("cat", "dog", "eel"), 2


def picture(k):
    pixels = np.random.default_rng(k).integers(0, 255, (9, 8, 3), np.uint8)
    return {"image": encoded(pixels), "label": k % 3, "file_name": f"{k}.jpg"}


IMAGES = {
    "train": [picture(k) for k in range(12)],
    "validation": [picture(k) for k in range(20, 24)],
}
TEXTS = {"train": [{"text": f"Größe {k}"} for k in range(5)]}
FEATURES = {
    "images": {
        "image": tfds.features.Image(encoding_format="jpeg"),
        "label": tfds.features.ClassLabel(names=CLASSES),
        "file_name": tfds.features.Text(),
    },
    "texts": {"text": tfds.features.Text()},
}
DATA = {"images": IMAGES, "texts": TEXTS}


class MiniSets(tfds.core.GeneratorBasedBuilder):
    """Of `DATA`; its config's name says which."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in DATA]  # noqa: RUF012

    def _info(self):
        features = tfds.features.FeaturesDict(FEATURES[self.builder_config.name])
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, download_manager):
        data = DATA[self.builder_config.name]
        return {split: self._generate_examples(rows) for split, rows in data.items()}

    def _generate_examples(self, rows):
        yield from enumerate(rows)


def write(path, name):
    """The version folder."""
    made = MiniSets(data_dir=path, config=name, file_format="array_record")
    config = tfds.download.DownloadConfig(num_shards=SHARDS)
    made.download_and_prepare(download_config=config)
    return Path(made.data_path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name), name) for name in DATA}


def test_images_are_the_stored_bytes_in_tfds_order(folders):
    for split, theirs in (("train", "train"), ("val", "validation")):
        images = open_images(folders["images"], split)
        assert images.layout == "TFDS" and images.class_names == CLASSES
        wanted = {row["image"]: row for row in IMAGES[theirs]}
        got = [images[k] for k in range(len(images))]
        assert {image.data for image in got} == wanted.keys() and len(got) == len(wanted)
        for image, label in zip(got, images.labels, strict=True):
            row = wanted[image.data]
            assert image.label == label == row["label"]
            assert image.name == f"{split}/{CLASSES[label]}/{row['file_name']}"


def test_prepare_packs_them(folders, tmp_path):
    prepare_images.prepare(folders["images"], tmp_path / "out", workers=1)
    packed, images = (open_images(p, "train") for p in (tmp_path / "out", folders["images"]))
    assert [packed[k].data for k in range(12)] == [images[k].data for k in range(12)]


def test_what_cannot_be_read_is_refused_by_its_name(folders, tmp_path):
    with refuses("'image'", error=DataError):
        open_images(folders["texts"], "train")
    other = tmp_path / "1.0.0"
    shutil.copytree(folders["images"], other)
    info = other / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with refuses("tfrecord", error=DataError):
        open_images(other, "train")


def test_a_damaged_shard_is_named(tmp_path):
    folder = write(tmp_path, "images")
    shard = next(iter(sorted(folder.glob("*-train.*"))))
    shard.write_bytes(shard.read_bytes()[:-100])
    with refuses("train", "prepare", error=DataError):
        images = open_images(folder, "train")
        assert len(images.labels)
