"""Crops of photographs: which part, where its pixels lie, and the same batches from any reader."""

import jax
import mini_imagenet as mini
import numpy as np
import pytest
from refusals import refuses

from decent_jax.data import loader
from decent_jax.data.images import crops, jpeg
from decent_jax.data.images.crops import Box, EvalImages, TrainImages
from decent_jax.data.images.image_folder import EncodedImage, open_images
from decent_jax.ground.errors import DataError

# --- which part -----------------------------------------------------------------------------------


def draws(height, width, count=5000):
    """(count, 4) boxes."""
    random = np.random.default_rng(0)
    return np.array([crops.random_box(random, height, width) for _ in range(count)])


@pytest.mark.parametrize("size", [(400, 533), (533, 400), (256, 256), (90, 1000), (3, 2), (1, 1)])
def test_random_boxes_lie_in_the_picture(size):
    top, left, height, width = draws(*size, count=1000).T
    assert (np.minimum(top, left) >= 0).all() and (np.minimum(height, width) >= 1).all()
    assert (top + height <= size[0]).all() and (left + width <= size[1]).all()


def test_random_boxes_are_of_the_area_and_ratio_wanted():
    _, _, height, width = draws(600, 700).T
    area, ratio = height * width / (600 * 700), width / height
    assert area.min() > 0.079 and area.max() < 1.001
    assert ratio.min() > 0.745 and ratio.max() < 1.342
    small = area < 0.5  # which fit with any ratio
    assert distance_from_uniform(area[small], 0.08, 0.5) < 1.63
    assert distance_from_uniform(np.log(ratio[small]), *np.log([3 / 4, 4 / 3])) < 1.63


def distance_from_uniform(values, low, high):
    """By Kolmogorov and Smirnov: above 1.63 for one uniform sample of a hundred."""
    ranks = np.arange(len(values) + 1) / len(values)
    there = (np.sort(values) - low) / (high - low)
    return np.sqrt(len(values)) * max((ranks[1:] - there).max(), (there - ranks[:-1]).max())


@pytest.mark.parametrize(
    "size, wanted",
    [
        ((1, 1000), Box(0, 499, 1, 1)),
        ((1000, 1), Box(499, 0, 1, 1)),
        ((10, 1000), Box(0, 493, 10, 13)),
        ((1000, 10), Box(493, 0, 13, 10)),
    ],
)
def test_where_no_draw_fits_the_centre_is_taken(size, wanted):
    assert {Box(*box) for box in draws(*size, count=100).tolist()} == {wanted}


# --- where the pixels lie -------------------------------------------------------------------------


def encoded(pixels, format="JPEG"):
    exact = {"quality": 100, "keep_rgb": True} if format == "JPEG" else {}
    return mini.encoded(pixels, format, **exact)


SLOPE = 0.23  # levels a pixel


def gradient(height, width):
    """Red grows to the right, green downwards, blue falls to the right."""
    y, x = np.mgrid[:height, :width]
    return np.stack([SLOPE * x, SLOPE * y, 200 - SLOPE * x], axis=-1).round().astype(np.uint8)


def analytic(box, size):
    """`gradient` at the centres of the pixels of a crop."""
    y = box.top + (np.arange(size) + 0.5) * box.height / size - 0.5
    x = box.left + (np.arange(size) + 0.5) * box.width / size - 0.5
    y, x = np.meshgrid(y.clip(0), x.clip(0), indexing="ij")
    return np.stack([SLOPE * x, SLOPE * y, 200 - SLOPE * x], axis=-1)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("shrink", jpeg.SHRINKS)
def test_the_geometry_of_crops(shrink, format):
    data, size, random = encoded(gradient(601, 797), format), 64, np.random.default_rng(0)
    header = jpeg.read_header(data)
    smallest, offsets = shrink * size, []
    for _ in range(12):
        sides = random.integers(smallest, min(2 * smallest, 601), 2) if shrink < 8 else (530, 570)
        height, width = (int(side) for side in sides)
        top, left = random.integers(0, 602 - height), random.integers(0, 798 - width)
        box = Box(int(top), int(left), height, width)
        assert crops.shrink_for(min(height, width), size) == shrink
        made = crops.crop(data, box, size, header=header)
        assert made.shape == (size, size, 3) and made.dtype == np.uint8
        np.testing.assert_allclose(made, analytic(box, size), atol=2)
        offsets.append((made - analytic(box, size)).mean(axis=(0, 1)))
    assert np.abs(np.mean(offsets, axis=0)).max() < 0.5  # to no side


@pytest.mark.parametrize(
    ("shape", "size", "resize"),
    [
        ((200, 267), 112, 128),
        ((267, 200), 88, 116),
        ((128, 128), 128, 128),
        ((511, 383), 128, 128),
        ((1100, 1400), 112, 128),
        ((110, 131), 88, 116),
    ],
)
def test_centre_crops_are_those_of_resize_and_centre_crop(shape, size, resize):
    """torchvision: Resize(resize), whose longer side is rounded down, and CenterCrop(size)."""
    slope = 200 / max(shape)
    y, x = np.mgrid[: shape[0], : shape[1]]
    pixels = np.stack([slope * x, slope * y, 0 * x], axis=-1).round().astype(np.uint8)
    made = crops.centre_crop(encoded(pixels), size, resize)
    for axis, side in enumerate(shape):
        resized = int(resize * side / min(shape))
        places = (round((resized - size) / 2) + np.arange(size) + 0.5) * side / resized - 0.5
        wanted = slope * places.clip(0, side - 1)
        got = made[..., 1 - axis].mean(axis=1 - axis)
        np.testing.assert_allclose(got, wanted, atol=1.1)  # both are rounded
        assert abs((got - wanted).mean()) < 0.15  # a shift of a pixel would be some 0.2


# --- sources --------------------------------------------------------------------------------------

SIZE, BATCH, REPLICAS = 24, 6, 2  # 30 images: an epoch is 5 steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """JPEG files of all kinds: grey, CMYK, one that is a PNG."""
    return mini.write_folders(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def source(folder):
    return TrainImages(open_images(folder, "train"), SIZE)


def test_a_training_image_is_a_crop_alone():
    """Not mirrored: devices do that."""
    data = encoded(gradient(300, 400))
    files = FewFiles([EncodedImage(data, 3, "train/a/b.jpg")])
    source = TrainImages(files, 32)
    for seed in range(10):
        made = source.augment(source[0], np.random.default_rng(seed))["image"]
        box = crops.random_box(np.random.default_rng(seed), 300, 400)
        np.testing.assert_array_equal(made, crops.crop(data, box, 32))
        assert (made[:, 0, 0] < made[:, -1, 0]).all()


def test_a_whole_training_image_is_the_record_itself():
    """Of a record as small as a training image, pixel by pixel; of a larger one its centre."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
    wide = encoded(gradient(40, 60))
    records = [EncodedImage(encoded(pixels, "PNG"), 3, "train/a/b.png")]
    source = TrainImages(
        FewFiles([*records, EncodedImage(wide, 1, "train/a/c.jpg")]), 32, whole=True
    )
    for seed in range(3):
        made = source.augment(source[0], np.random.default_rng(seed))
        np.testing.assert_array_equal(made["image"], pixels)
        made = source.augment(source[1], np.random.default_rng(seed))
        np.testing.assert_array_equal(made["image"], crops.centre_crop(wide, 32, 32))


def test_images_are_mirrored_in_every_other_epoch(folder):
    """Half of them in the first, the others in the second; the third is the first again."""
    files = open_images(folder, "train")
    source, plain = (TrainImages(files, SIZE, whole=True, alternate=x) for x in (7, None))
    one = {"seed": 0, "num_replicas": REPLICAS, "batch_size": BATCH}
    steps = len(files) // BATCH

    def epochs(source, processes):
        parts = []
        for replicas in np.split(np.arange(REPLICAS), processes):
            with loader.train_batches(source, replicas=replicas, **one) as batches:
                parts.append(np.stack([next(batches)["image"] for _ in range(3 * steps)]))
        return np.concatenate(parts, 1).reshape(3, len(files), SIZE, SIZE, 3)

    def by_image(epoch):
        """{the image, whichever way round: whether it is mirrored}"""
        same = {x.tobytes(): x for x in whole}
        return {
            (key if (key := x.tobytes()) in same else x[:, ::-1].tobytes()): key not in same
            for x in epoch
        }

    whole = [plain.augment(plain[i], np.random.default_rng(0))["image"] for i in range(len(files))]
    seen = epochs(source, 1)
    np.testing.assert_array_equal(seen, epochs(source, 2))
    first, second, third = map(by_image, seen)
    assert len(first) == len(files) and 0.2 < np.mean([*first.values()]) < 0.8
    assert second == {image: not mirrored for image, mirrored in first.items()}
    assert third == first and not any(by_image(epochs(plain, 1)[0]).values())


class FewFiles(list):
    """Records in memory."""

    class_names = ("a", "b", "c", "d")
    labels = property(lambda records: np.array([record.label for record in records]))


def test_evaluation_images(folder):
    source = EvalImages(open_images(folder, "val"), SIZE, 28)
    assert len(source) == 15
    assert source.class_names == mini.WNIDS
    records = list(mini.records("val"))
    labels = [int(source[index]["label"]) for index in range(15)]
    assert sorted(labels) == sorted(label for _, label, _ in records)  # each once,
    assert len(set(labels[:5])) > 2  # and the first ones of several classes
    for index, position in enumerate(source.order):
        (data, label, _), record = records[position], source[index]
        wanted = crops.centre_crop(data, SIZE, 28)
        np.testing.assert_array_equal(record["image"], wanted)
        assert record["image"].shape == (SIZE, SIZE, 3) and record["image"].dtype == np.uint8
        assert record["label"] == label and record["label"].dtype == np.int32


def batches(source, steps, **options):
    """The first ``steps``; two replicas unless the options say otherwise."""
    options = {"num_replicas": REPLICAS, "batch_size": BATCH, "seed": 1, "prefetch": 0} | options
    with loader.train_batches(source, **options) as iterator:
        return [next(iterator) for _ in range(steps)]


@pytest.fixture(scope="module")
def wanted(source):
    """Eight steps, across an epoch, read in the calling thread."""
    made = batches(source, 8)
    for batch in made:
        assert batch["image"].shape == (REPLICAS, BATCH // REPLICAS, SIZE, SIZE, 3)
        assert batch["image"].dtype == np.uint8
        assert batch["label"].shape == (REPLICAS, BATCH // REPLICAS)
        assert batch["label"].dtype == np.int32
    return made


def assert_equal(made, wanted):
    assert len(made) == len(wanted)
    jax.tree.map(np.testing.assert_array_equal, made, wanted)


def test_any_reader_gives_the_same_batches(source, wanted):
    """In threads, from a later step on, one replica alone, and as other replicas."""
    assert_equal(batches(source, 8, prefetch=4), wanted)
    assert_equal(batches(source, 3, start_step=5), wanted[5:])
    assert_equal(batches(source, 8, replicas=[1]), jax.tree.map(lambda x: x[1:], wanted))
    trees = batches(source, 8, num_replicas=3), wanted
    flat = [jax.tree.map(lambda x: x.reshape(BATCH, *x.shape[2:]), tree) for tree in trees]
    assert_equal(*flat)


@pytest.mark.slow
def test_worker_processes_give_the_same_batches(source, wanted):
    assert_equal(batches(source, 5, workers=2, prefetch=2, start_step=3), wanted[3:])


# --- damaged files --------------------------------------------------------------------------------


def test_a_damaged_file_is_named(tmp_path):
    folder, name = mini.write_folders(tmp_path / "images"), mini.records("train")[0][2]
    (folder / name).write_bytes((folder / name).read_bytes()[:-100])  # the first of training
    source = TrainImages(open_images(folder, "train"), SIZE)
    with refuses(name, "truncated", "prepare", error=DataError):
        source.augment(source[0], np.random.default_rng(0))
    for options in ({}, {"prefetch": 2}):
        with refuses(name, error=DataError):
            batches(source, 5, **options)
    with refuses(name, error=DataError):
        list(EvalImages(open_images(folder, "train"), SIZE, SIZE))
