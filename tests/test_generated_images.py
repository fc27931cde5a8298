"""Generated pictures: a function of seed, split and index alone."""

import numpy as np
import pytest

from decent_jax.data.images import generated_images
from decent_jax.data.images.generated_images import CLASS_NAMES, GeneratedImages


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
