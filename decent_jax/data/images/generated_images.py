"""Generated pictures of ten shapes among clutter, so that no download is needed.

A picture shows one of ten shapes (`CLASS_NAMES`), of any size, angle and position, in a colour
lighter than the gradient background. Noise and random lines and dots are painted on top. Colours do
not depend on the class, and mirroring or rotating a picture does not change its class.

Picture i of a split depends only on `(seed, split, i)` and the size: Philox, a counter-based
generator, gives every index its own random numbers. The splits use different keys, so no picture is
in two of them.
"""

import numpy as np

CLASS_NAMES = tuple(str.split("disc ring square frame triangle star cross crescent bars pill"))

_CLUTTER = 6  # lines and dots per picture
_NOISE = 0.25  # peak to peak; colours range from 0 to 1
_CHUNK = 250  # pictures drawn at a time: some megabytes of intermediate results
_SCALARS = 64  # random numbers per picture, besides its noise


class GeneratedImages:
    """Records `{"image": uint8 (size, size, 3), "label": int32 ()}` by index.

    All pictures are drawn at once (about 0.2 ms each) and kept in memory (`3 * size**2` bytes
    each). The classes are balanced: records `10 * k` to `10 * k + 9` contain one picture of each
    class.

    Args:
      split: `"train"` or `"val"`.
      num_records: N; a larger N only appends records.
      seed: any integer >= 0; use the same seed for both splits.
      size: height and width in pixels, at least 16.

    Attributes:
      images: (N, size, size, 3) uint8, read-only.
      labels: (N,) int32, read-only, indices into `class_names`.
      class_names: the names of the classes.

    Example:
      >>> source = GeneratedImages("val", 20)
      >>> len(source), source[3]["image"].shape, np.bincount(source.labels).tolist()
      (20, (32, 32, 3), [2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """

    class_names = CLASS_NAMES

    def __init__(self, split: str, num_records: int, *, seed: int = 0, size: int = 32):
        self.labels = _labels(seed, split, num_records)
        self.images = np.empty((num_records, size, size, 3), np.uint8)
        for start in range(0, num_records, _CHUNK):
            part = slice(start, start + _CHUNK)
            self.images[part] = _draw(seed, split, start, self.labels[part], size)
        for array in (self.images, self.labels):
            array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"image": self.images[index], "label": self.labels[index]}

    def __repr__(self) -> str:
        # grain's representation includes the source's; arrays would fill the screen
        return f"GeneratedImages({len(self)} pictures of {self.images.shape[1]} pixels)"


def _labels(seed: int, split: str, count: int) -> np.ndarray:
    """(count,) int32: the first labels of a split, one permutation of the classes after another."""
    classes = len(CLASS_NAMES)
    draws = _random(seed, split, "labels", 0, -(-count // classes), classes)
    return np.argsort(draws, axis=1).ravel()[:count].astype(np.int32)


def _draw(seed: int, split: str, start: int, labels: np.ndarray, size: int) -> np.ndarray:
    """Pictures `start, start + 1, ...` of the split, (B, size, size, 3) uint8."""
    count = len(labels)
    scalars = _unit(_random(seed, split, "picture", start, count, _SCALARS))
    noise = _random(seed, split, f"noise {size}", start, count, -(-3 * size * size // 8))
    draw = iter(scalars.T[:, :, None, None])  # each (B, 1, 1), in the order of use
    grid = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    x, y = grid[None, None, :], grid[None, :, None]

    ground = 0.5 * _colour(draw)
    canvas = _fade(draw, x, y, ground)
    canvas = _paint(canvas, _shapes(draw, x, y, labels, size), _lighter(draw, ground))
    for _ in range(_CLUTTER):
        canvas = _paint(canvas, _stroke(draw, x, y, size), _colour(draw))
    noise = noise.view(np.uint8)[:, : 3 * size * size].reshape(canvas.shape)
    canvas += _NOISE * (noise.astype(np.float32) / 255 - 0.5)
    return (np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8)


# --- Random numbers by index --------------------------------------------------------------------


def _random(
    seed: int, split: str, purpose: str, start: int, count: int, numbers: int
) -> np.ndarray:
    """(count, numbers) uint64; row k depends on `start + k` but not on the other rows."""
    words = [seed, *split.encode(), 0, *purpose.encode()]
    key = np.random.SeedSequence(words).generate_state(2, np.uint64)
    blocks = -(-numbers // 4)  # a Philox counter stands for four numbers
    generator = np.random.Philox(key=key, counter=start * blocks)
    return generator.random_raw(4 * blocks * count).reshape(count, 4 * blocks)[:, :numbers]


def _unit(bits: np.ndarray) -> np.ndarray:
    """uint64 numbers as float32 in [0, 1)."""
    return (bits >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


# --- Painting: arrays are (B, H, W) or broadcast to it ------------------------------------------


def _paint(canvas: np.ndarray, coverage: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """`colour` (B, 1, 1, 3) over `canvas` (B, H, W, 3) where `coverage` (B, H, W) is 1."""
    return canvas + coverage[..., None] * (colour - canvas)


def _coverage(distance: np.ndarray, size: int) -> np.ndarray:
    """The share of each pixel inside a shape; `distance` is negative inside, in picture widths."""
    return np.clip(0.5 - distance * size, 0, 1)


def _colour(draw) -> np.ndarray:
    """(B, 1, 1, 3): random colours."""
    return np.stack([next(draw) for _ in range(3)], axis=-1)


def _lighter(draw, colour: np.ndarray) -> np.ndarray:
    """A random colour that is lighter in each channel, by at least a third of the range."""
    return colour + 0.35 + (0.65 - colour) * _colour(draw)


def _fade(draw, x, y, colour: np.ndarray) -> np.ndarray:
    """(B, H, W, 3): `colour`, up to 0.15 lighter or darker towards the edges."""
    angle, slope = 2 * np.pi * next(draw), 0.3 * next(draw)
    return colour + (slope * (x * np.cos(angle) + y * np.sin(angle)))[..., None]


def _stroke(draw, x, y, size: int) -> np.ndarray:
    """The coverage of a thin line of random length; the shortest lines are dots."""
    centre_x, centre_y, angle, half = (next(draw) for _ in range(4))
    u, v = _turned(x - centre_x + 0.5, y - centre_y + 0.5, 2 * np.pi * angle)
    return _coverage(_segment(u, v, 0.15 * half) - 0.02, size)


def _shapes(draw, x, y, labels: np.ndarray, size: int) -> np.ndarray:
    """The coverage of each picture's shape, rotated and entirely inside the picture."""
    radius = 0.22 + 0.2 * next(draw)
    shift_x, shift_y = ((0.5 - radius) * (2 * next(draw) - 1) for _ in range(2))
    u, v = _turned((x - shift_x) / radius, (y - shift_y) / radius, 2 * np.pi * next(draw))
    distance = np.empty_like(u)
    for label in np.unique(labels):
        mine = labels == label
        distance[mine] = _SHAPES[label](u[mine], v[mine])
    return _coverage(distance * radius, size)


def _turned(x, y, angle):
    cos, sin = np.cos(angle), np.sin(angle)
    return x * cos + y * sin, y * cos - x * sin


# --- Signed distances from shapes that fit the unit circle --------------------------------------


def _disc(u, v):
    return np.hypot(u, v) - 0.9


def _ring(u, v):
    return np.abs(np.hypot(u, v) - 0.75) - 0.2


def _square(u, v):
    return np.maximum(np.abs(u), np.abs(v)) - 0.7


def _frame(u, v):
    return np.abs(np.maximum(np.abs(u), np.abs(v)) - 0.55) - 0.16


def _triangle(u, v):
    sides = [u * np.cos(a) + v * np.sin(a) for a in 2 * np.pi * np.arange(3, dtype=np.float32) / 3]
    return np.maximum.reduce(sides) - 0.5


def _star(u, v):
    """A five-pointed star, folded onto half a point, which is bounded by one straight edge."""
    half = np.float32(np.pi / 5)
    angle = np.abs((np.arctan2(v, u) + half) % (2 * half) - half)
    radius = np.hypot(u, v)
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    notch_x, notch_y = 0.42 * np.cos(half), 0.42 * np.sin(half)
    length = np.hypot(1 - notch_x, notch_y)
    return ((x - 1) * notch_y + y * (1 - notch_x)) / length


def _cross(u, v):
    u, v = np.abs(u), np.abs(v)
    return np.minimum(np.maximum(u - 0.95, v - 0.25), np.maximum(v - 0.95, u - 0.25))


def _crescent(u, v):
    return np.maximum(np.hypot(u, v) - 0.95, 0.75 - np.hypot(u - 0.5, v))


def _bars(u, v):
    return np.maximum(np.abs(np.abs(v) - 0.5) - 0.22, np.abs(u) - 0.65)


def _pill(u, v):
    return _segment(u, v, 0.6) - 0.35


def _segment(u, v, half):
    """The distance from the part of the u axis that is within `half` of 0."""
    return np.hypot(np.maximum(np.abs(u) - half, 0), v)


_SHAPES = (_disc, _ring, _square, _frame, _triangle, _star, _cross, _crescent, _bars, _pill)
