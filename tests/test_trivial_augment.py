"""TrivialAugment: every operation against its definition in NumPy, and what is drawn."""

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from decent_jax.data.images import trivial_augment as module
from decent_jax.data.images.trivial_augment import BINS, OPERATIONS, trivial_augment

BY_NAME = {operation.name: operation for operation in OPERATIONS}

# Smallest and largest strength and whether either sign is drawn: Mueller & Hutter 2021, table of
# the wide space; factors of Brightness to Sharpness are 1 + strength.
WIDE = {
    "Identity": (0, 0, False),
    "ShearX": (0, 0.99, True),
    "ShearY": (0, 0.99, True),
    "TranslateX": (0, 32, True),
    "TranslateY": (0, 32, True),
    "Rotate": (0, 135, True),
    "Brightness": (0, 0.99, True),
    "Color": (0, 0.99, True),
    "Contrast": (0, 0.99, True),
    "Sharpness": (0, 0.99, True),
    "Posterize": (2, 8, False),
    "Solarize": (0, 255, False),
    "AutoContrast": (0, 0, False),
    "Equalize": (0, 0, False),
}


def picture(height=40, width=50, seed=0):
    """Uneven in every channel, and no value at an end of its range."""
    noise = np.random.default_rng(seed).beta(2, 5, (height, width, 3))
    return (20 + noise * [180, 120, 220]).astype(np.uint8)


def apply(name, strength, image):
    return np.asarray(BY_NAME[name].apply(module.Image.fromarray(image), strength))


def moved(image, source_y, source_x):
    """The pixels at these (H, W) places of ``image``, black where there is none."""
    height, width, _ = image.shape
    found = image[source_y.clip(0, height - 1), source_x.clip(0, width - 1)]
    inside = (source_y.clip(0, height - 1) == source_y) & (source_x.clip(0, width - 1) == source_x)
    return np.where(inside[..., None], found, 0)


def places(image):
    return np.mgrid[: image.shape[0], : image.shape[1]]


def floor(x):
    return np.floor(x).astype(int)


@pytest.mark.parametrize("strength", [0, 0.25, -0.25, 0.5, -0.75, 0.875])
def test_shears(strength):
    image = picture()
    y, x = places(image)
    wanted = moved(image, y, floor(x + 0.5 + strength * (y + 0.5)))
    np.testing.assert_array_equal(apply("ShearX", strength, image), wanted)
    wanted = moved(image, floor(y + 0.5 + strength * (x + 0.5)), x)
    np.testing.assert_array_equal(apply("ShearY", strength, image), wanted)


@pytest.mark.parametrize("pixels", [0, 1, -1, 17, -32, 32])
def test_translations(pixels):
    image = picture()
    y, x = places(image)
    np.testing.assert_array_equal(apply("TranslateX", pixels, image), moved(image, y, x - pixels))
    np.testing.assert_array_equal(apply("TranslateY", pixels, image), moved(image, y - pixels, x))


def test_rotations():
    image = picture(50, 50)
    for turns in range(-2, 3):
        wanted = np.rot90(image, turns)
        np.testing.assert_array_equal(apply("Rotate", 90 * turns, image), wanted)
    image = picture(40, 50)
    for degrees in (13.5, -121.5, 31.5, 126):
        angle = np.deg2rad(degrees)
        y, x = places(image)
        up, right = 20 - (y + 0.5), x + 0.5 - 25  # from the centre; where it was before it turned
        before_right = np.cos(angle) * right + np.sin(angle) * up
        before_up = np.cos(angle) * up - np.sin(angle) * right
        wanted = moved(image, floor(20 - before_up), floor(25 + before_right))
        made = apply("Rotate", degrees, image)
        assert (made != wanted).any(axis=-1).mean() < 0.005  # sources at the edge of a pixel


def blended(image, without, strength):
    """Away from ``without``, or towards it where the strength is negative."""
    return (without + (1 + strength) * (image - without)).clip(0, 255)


def grey(image):
    """Luma of ITU-R 601."""
    return (image @ np.array([0.299, 0.587, 0.114]))[..., None]


def smoothed(image):
    """As Pillow smooths: the edges stay."""
    smooth = image.copy()
    parts = [np.roll(image, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    smooth[1:-1, 1:-1] = ((sum(parts) + 4 * image) / 13)[1:-1, 1:-1]
    return smooth


WITHOUT = {
    "Brightness": lambda image: 0,
    "Color": grey,
    "Contrast": lambda image: grey(image).mean(),
    "Sharpness": smoothed,
}


@pytest.mark.parametrize("strength", [-0.99, -0.5, 0, 0.33, 0.99])
@pytest.mark.parametrize("name", WITHOUT)
def test_blends(name, strength):
    image = picture().astype(float)
    wanted = blended(image, WITHOUT[name](image), strength)
    atol = 1 if name == "Brightness" else 1.5
    np.testing.assert_allclose(apply(name, strength, picture()), wanted, atol=atol)


@pytest.mark.parametrize("bits", range(2, 9))
def test_posterize(bits):
    step = 2 ** (8 - bits)
    np.testing.assert_array_equal(apply("Posterize", bits, picture()), picture() // step * step)


@pytest.mark.parametrize("threshold", [0, 8.5, 100, 255])
def test_solarize(threshold):
    image = picture()
    wanted = np.where(image < threshold, image, 255 - image)
    np.testing.assert_array_equal(apply("Solarize", threshold, image), wanted)


def test_contrast_by_itself():
    """AutoContrast stretches each channel, Equalize makes its values equally frequent."""
    image = picture().astype(float)
    low, high = image.min(axis=(0, 1)), image.max(axis=(0, 1))
    made = apply("AutoContrast", 0, picture())
    np.testing.assert_allclose(made, (image - low) / (high - low) * 255, atol=1)
    for channel in np.moveaxis(apply("Equalize", 0, picture(400, 500)), -1, 0):
        assert np.abs(np.quantile(channel, [0.25, 0.5, 0.75]) - [64, 128, 191]).max() < 5


def test_the_wide_space():
    assert list(BY_NAME) == list(WIDE)
    for name, operation in BY_NAME.items():
        low, high, signed = WIDE[name]
        assert (min(operation.strengths), max(operation.strengths)) == (low, high), name
        assert operation.signed == signed, name
        assert len(operation.strengths) == (BINS if high else 1), name
        even = np.linspace(
            operation.strengths[0], operation.strengths[-1], len(operation.strengths)
        )
        apart = np.abs(operation.strengths - even).max()
        assert apart < (1 if name.startswith(("Translate", "Posterize")) else 1e-9), name
    assert Counter(BY_NAME["Posterize"].strengths.tolist()) == {
        8: 3, 7: 5, 6: 5, 5: 5, 4: 5, 3: 5, 2: 3,
    }  # fmt: skip


@pytest.fixture
def drawn(monkeypatch):
    """Counts (name, strength) instead of applying."""
    counts = Counter()

    def counting(operation):
        def apply(image, strength):
            counts[operation.name, strength] += 1
            return image

        return operation._replace(apply=apply)

    monkeypatch.setattr(module, "OPERATIONS", tuple(map(counting, OPERATIONS)))
    return counts


def test_all_operations_and_strengths_are_equally_likely(drawn):
    random, image, draws = np.random.default_rng(0), np.zeros((1, 1, 3), np.uint8), 28_000
    for _ in range(draws):
        trivial_augment(image, random)
    names = Counter()
    for (name, _), count in drawn.items():
        names[name] += count
    assert set(names) == set(BY_NAME)
    assert stats.chisquare(list(names.values())).pvalue > 0.01
    for name, operation in BY_NAME.items():
        found = {strength: count for (own, strength), count in drawn.items() if own == name}
        signs = (1, -1) if operation.signed else (1,)
        assert set(found) == {float(s * x) for x in operation.strengths for s in signs}, name
        if operation.signed:  # 0 has no sign
            assert stats.chisquare([n for s, n in found.items() if s]).pvalue > 1e-3, name


def test_shape_dtype_and_the_same_numbers_again():
    image = picture(30, 20)  # which stays as it is
    results = [
        [trivial_augment(image, random) for _ in range(200)]
        for random in (np.random.default_rng(3), np.random.default_rng(3), np.random.default_rng(4))
    ]
    for made in results[0]:
        assert made.shape == image.shape and made.dtype == np.uint8
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])
    np.testing.assert_array_equal(image, picture(30, 20))
