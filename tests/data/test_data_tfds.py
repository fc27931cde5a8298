"""Folders of images that TFDS prepared as array_record."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from mini_imagenet import encoded
from refusals import refuses

from decent_jax.data.images.image_folder import open_images
from decent_jax.ground.errors import DataError

CLASSES, SHARDS = ("cat", "dog", "eel"), 2


def picture(k):
    pixels = np.random.default_rng(k).integers(0, 255, (9, 8, 3), np.uint8)
    return {"image": encoded(pixels), "label": k % 3, "file_name": f"{k}.jpg"}


IMAGES = {"train": range(12), "validation": range(20, 24)}
IMAGES = {split: [picture(k) for k in numbers] for split, numbers in IMAGES.items()}


class MiniSet(tfds.core.GeneratorBasedBuilder):
    """Of `IMAGES`."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names=CLASSES),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, download_manager):
        return {split: self._generate_examples(rows) for split, rows in IMAGES.items()}

    def _generate_examples(self, rows):
        yield from enumerate(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The version folder."""
    made = MiniSet(data_dir=tmp_path_factory.mktemp("mini"), file_format="array_record")
    config = tfds.download.DownloadConfig(num_shards=SHARDS)
    made.download_and_prepare(download_config=config)
    return Path(made.data_path)


def test_images_are_the_stored_bytes_in_tfds_order(folder):
    for split, theirs in (("train", "train"), ("val", "validation")):
        images = open_images(folder, split)
        assert images.layout == "TFDS" and images.class_names == CLASSES
        wanted = {row["image"]: row for row in IMAGES[theirs]}
        got = [images[k] for k in range(len(images))]
        assert {image.data for image in got} == wanted.keys() and len(got) == len(wanted)
        for image, label in zip(got, images.labels, strict=True):
            row = wanted[image.data]
            assert image.label == label == row["label"]
            assert image.name == f"{split}/{CLASSES[label]}/{row['file_name']}"


@pytest.mark.parametrize(
    ("file", "before", "after", "named"),
    [
        ("features.json", '"image"', '"picture"', "'image'"),
        ("dataset_info.json", "array_record", "tfrecord", "tfrecord"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(folder, tmp_path, file, before, after, named):
    other = shutil.copytree(folder, tmp_path / "1.0.0")
    (other / file).write_text((other / file).read_text().replace(before, after, 1))
    with refuses(named, error=DataError):
        open_images(other, "train")


def test_a_damaged_shard_is_named(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "1.0.0")
    shard = next(iter(sorted(other.glob("*-train.*"))))
    shard.write_bytes(shard.read_bytes()[:-100])
    with refuses("train", "prepare", error=DataError):
        images = open_images(other, "train")
        assert len(images.labels)
