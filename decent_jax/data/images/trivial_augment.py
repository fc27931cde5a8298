"""TrivialAugment, the wide space: one random operation of random strength per image.

Müller & Hutter, "TrivialAugment: Tuning-free Yet State-of-the-Art Data Augmentation" (ICCV 2021,
arXiv:2103.10158). Operations and strengths are those of torchvision's TrivialAugmentWide on PIL
images: nearest pixels, black outside.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

BINS = 31


class Operation(NamedTuple):
    """`apply(image, strength)` with one of `strengths`; if `signed`, of either sign."""

    name: str
    apply: Callable[[Image.Image, float], Image.Image]
    strengths: np.ndarray = np.zeros(1)
    signed: bool = False


def trivial_augment(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The image after a random operation; operations and strengths are equally likely.

    Args:
      image: (H, W, 3) uint8.
      random: this draws from it two or three times.

    Returns:
      (H, W, 3) uint8, read-only.
    """
    operation = OPERATIONS[random.integers(len(OPERATIONS))]
    strength = float(random.choice(operation.strengths))
    if operation.signed and random.random() < 0.5:
        strength = -strength
    return np.asarray(operation.apply(Image.fromarray(image), strength))


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """The pixel at (x, y) becomes that at (a x + b y + c, d x + e y + f) of `image`."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=(0, 0, 0)
    )


def _rotate(image: Image.Image, degrees: float) -> Image.Image:
    """Anticlockwise."""
    return image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=(0, 0, 0))


def _enhance(enhancer) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, strength: enhancer(image).enhance(1 + strength)


_UP_TO_1 = np.linspace(0, 0.99, BINS)
_PIXELS = np.arange(BINS) * 32 // (BINS - 1)
_DEGREES = np.linspace(0, 135, BINS)
_BITS = 8 - np.linspace(0, 6, BINS).round().astype(int)
_THRESHOLDS = np.linspace(255, 0, BINS)

OPERATIONS = (
    Operation("Identity", lambda image, _: image),
    Operation("ShearX", lambda image, s: _affine(image, 1, s, 0, 0, 1, 0), _UP_TO_1, True),
    Operation("ShearY", lambda image, s: _affine(image, 1, 0, 0, s, 1, 0), _UP_TO_1, True),
    Operation("TranslateX", lambda image, s: _affine(image, 1, 0, -s, 0, 1, 0), _PIXELS, True),
    Operation("TranslateY", lambda image, s: _affine(image, 1, 0, 0, 0, 1, -s), _PIXELS, True),
    Operation("Rotate", _rotate, _DEGREES, True),
    Operation("Brightness", _enhance(ImageEnhance.Brightness), _UP_TO_1, True),
    Operation("Color", _enhance(ImageEnhance.Color), _UP_TO_1, True),
    Operation("Contrast", _enhance(ImageEnhance.Contrast), _UP_TO_1, True),
    Operation("Sharpness", _enhance(ImageEnhance.Sharpness), _UP_TO_1, True),
    Operation("Posterize", lambda image, s: ImageOps.posterize(image, int(s)), _BITS),
    Operation("Solarize", ImageOps.solarize, _THRESHOLDS),  # type: ignore (any number will do)
    Operation("AutoContrast", lambda image, _: ImageOps.autocontrast(image)),
    Operation("Equalize", lambda image, _: ImageOps.equalize(image)),
)
