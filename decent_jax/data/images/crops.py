"""Training crops and evaluation crops of encoded images, made by the processes that read them.

Decoding does no more than necessary: libjpeg-turbo decodes at the smallest scale (1, 1/2, 1/4 or
1/8) that still gives the crop enough pixels, and one bilinear resize gives it its final size. As in
*From Promise to Practice*, the resize does not antialias: it samples a crop of up to twice the
final size without averaging. (Pillow's bilinear filter averages: pixels differ by 1.8 of 255 on
average.)
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import cv2
import numpy as np

from decent_jax.data.images import jpeg
from decent_jax.data.images.image_folder import Mirrored
from decent_jax.ground.errors import DataError

AREA = (0.08, 1.0)  # range of a training crop's area, as a share of the picture's area
RATIO = (3 / 4, 4 / 3)  # range of a training crop's aspect ratio, width / height
_TRIES = 10

cv2.setNumThreads(0)  # pictures are processed in parallel, not the rows of a picture


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


class TrainImages:
    """Encoded records by index; `augment` turns them into training images.

    Args:
      files: records with `data`, `label` and `name`, such as `image_folder.ImageFiles`.
      size: height and width of a training image, in pixels.
      whole: whether to take the largest centred square instead of a random part, for small images
        that are shifted later.
      alternate: seed that selects about half of the images, which are mirrored in epochs 0, 2, ...;
        the other half is mirrored in epochs 1, 3, ... None mirrors no image.

    Attributes:
      fixed: whether `augment` uses no random numbers, so a record always gives the same image.
      numbers: the number of valid indices; those from ``len(self)`` on give mirrored images.
    """

    def __init__(self, files, size: int, *, whole: bool = False, alternate: int | None = None):
        self.files, self.size, self.whole = files, size, whole
        self.class_names = files.class_names
        self.fingerprint = getattr(files, "fingerprint", 0)
        self.fixed, self.numbers = whole, len(files)
        self._half = None
        if alternate is not None:
            self._half = np.random.default_rng(alternate).integers(0, 2, len(files))
            self.numbers *= 2

    @property
    def labels(self) -> np.ndarray:
        """The labels of the records, (N,) int64."""
        return self.files.labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int):
        mirrored, index = divmod(number, len(self))
        record = self.files[index]
        return Mirrored(*record) if mirrored else record

    def of_epoch(self, index: int, epoch: int) -> int:
        """The index to read for image `index` in this epoch: its own or its mirror image's."""
        mirrored = self._half is not None and not (epoch - self._half[index]) % 2
        return index + mirrored * len(self)

    def __repr__(self) -> str:
        return f"TrainImages({self.files!r}, size={self.size})"

    def augment(self, record, random: np.random.Generator) -> dict[str, np.ndarray | np.int32]:
        """A crop of the record: `{"image": (size, size, 3) uint8, "label": () int32}`.

        Raises:
          DataError: the file is damaged.
        """
        with _naming(record.name):
            if self.whole:
                image = centre_crop(record.data, self.size, self.size)
            else:
                header = jpeg.read_header(record.data)
                box = random_box(random, header.height, header.width)
                image = crop(record.data, box, self.size, header=header)
        image = image[:, ::-1] if isinstance(record, Mirrored) else image
        return {"image": image, "label": np.int32(record.label)}


class EvalImages:
    """Centre crops of encoded records: `{"image": (size, size, 3) uint8, "label": () int32}`.

    The crops are in a fixed random order, so the first ones are a sample of all classes.

    Args:
      files: as for `TrainImages`.
      size: height and width of an image, in pixels.
      resize: length of the picture's shorter side before the crop, in pixels, at least `size`.
    """

    def __init__(self, files, size: int, resize: int):
        self.files, self.size, self.resize = files, size, resize
        self.class_names = files.class_names
        self.fingerprint = getattr(files, "fingerprint", 0)
        self.order = np.random.default_rng(0).permutation(len(files))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, np.ndarray | np.int32]:
        record = self.files[int(self.order[index])]
        with _naming(record.name):
            image = centre_crop(record.data, self.size, self.resize)
        return {"image": image, "label": np.int32(record.label)}

    def __repr__(self) -> str:
        return f"EvalImages({self.files!r}, size={self.size}, resize={self.resize})"


def random_box(random: np.random.Generator, height: int, width: int) -> Box:
    """A random box in a picture, with an area share in `AREA` and an aspect ratio in `RATIO`.

    If none of ten draws fits into the picture, the result is the largest centred box with an
    allowed ratio. Ratios are log-uniform, as in torchvision's RandomResizedCrop (Szegedy et al.,
    2015).
    """
    low, high = np.log(RATIO)
    for _ in range(_TRIES):
        area = height * width * random.uniform(*AREA)
        ratio = math.exp(random.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(random.integers(0, height - h + 1))
            return Box(top, int(random.integers(0, width - w + 1)), h, w)
    ratio = min(max(width / height, RATIO[0]), RATIO[1])
    w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def crop(data: bytes, box: Box, size: int, *, header: jpeg.Header | None = None) -> np.ndarray:
    """The part `box` of an image file, resized to (size, size, 3) uint8.

    Raises:
      ValueError: see `jpeg.decode`.
    """
    shrink = shrink_for(min(box.height, box.width), size)
    pixels = jpeg.decode(data, shrink=shrink, header=header)
    rows, columns = (
        _shrunk(start, length, shrink, whole)
        for start, length, whole in zip(box[:2], box[2:], pixels.shape, strict=False)
    )
    return cv2.resize(pixels[rows, columns], (size, size), interpolation=cv2.INTER_LINEAR)


def centre_crop(data: bytes, size: int, resize: int) -> np.ndarray:
    """Resizes an image's shorter side to `resize` and returns the centre, (size, size, 3) uint8.

    Positions agree with torchvision's Resize and CenterCrop to within a fraction of a pixel. Only
    the pixels of the crop are computed.

    Raises:
      ValueError: see `jpeg.decode`.
    """
    header = jpeg.read_header(data)
    short = min(header.height, header.width)
    shrink = shrink_for(short, resize)
    pixels = jpeg.decode(data, shrink=shrink, header=header)
    steps, starts = [], []  # per output pixel to the right and down, in decoded pixels
    for side in (header.width, header.height):
        resized = int(resize * side / short)
        steps.append(side / resized / shrink)
        starts.append((round((resized - size) / 2) + 0.5) * steps[-1] - 0.5)
    matrix = np.array([[steps[0], 0, starts[0]], [0, steps[1], starts[1]]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(
        pixels, matrix, (size, size), flags=flags, borderMode=cv2.BORDER_REPLICATE
    )


def shrink_for(side: int, size: int) -> int:
    """The largest divisor in `jpeg.SHRINKS` that leaves `side` at least `size` pixels, or 1."""
    return next(k for k in jpeg.SHRINKS if k == 1 or side >= k * size)


def _shrunk(start: int, length: int, shrink: int, whole: int) -> slice:
    """The pixels of the shrunk picture, at least one, for `length` pixels from `start`."""
    first = min(round(start / shrink), whole - 1)
    return slice(first, min(max(round((start + length) / shrink), first + 1), whole))


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """A context that turns a ValueError into a DataError about the image of this name."""
    try:
        yield
    except ValueError as error:
        raise DataError(
            f"{name} {error}; `decent-jax prepare images` packs a data set without"
            " its damaged files"
        ) from None
