"""ImageNet in small: five classes, six training and three validation images each.

As in the real one, one image is grey, one is CMYK, one is a PNG named .JPEG.
"""

import functools
import io

import numpy as np
from PIL import Image

WNIDS = ("n01440764", "n01443537", "n02119789", "n03000134", "n12998815")
TRAIN_IMAGES, VAL_IMAGES = 6, 3  # of a class


@functools.cache
def images():
    """{"train": {(wnid, file name): bytes}, "val": ...} in the order in which records come."""
    rng = np.random.default_rng(0)
    train = {
        (wnid, f"{wnid}_{number}.JPEG"): _drawn(rng)
        for wnid in WNIDS
        for number in sorted(rng.choice(20000, TRAIN_IMAGES, replace=False).tolist(), key=str)
    }
    names = list(train)
    train[names[1]] = _drawn(rng, mode="L")
    train[names[8]] = _drawn(rng, mode="CMYK")
    train[names[20]] = _drawn(rng, kind="PNG")
    wnids = rng.permutation(np.repeat(WNIDS, VAL_IMAGES)).tolist()
    val = {(w, f"ILSVRC2012_val_{i:08}.JPEG"): _drawn(rng) for i, w in enumerate(wnids, 1)}
    return {"train": train, "val": dict(sorted(val.items()))}


def records(split):
    """What every layout has to give: (data, label, name), in order."""
    return [
        (data, WNIDS.index(wnid), f"{split}/{wnid}/{name}")
        for (wnid, name), data in images()[split].items()
    ]


def write_folders(path, splits=("train", "val"), val="val"):
    """PATH/train/WNID/NAME.JPEG."""
    for split in splits:
        for (wnid, name), data in images()[split].items():
            folder = path / (val if split == "val" else "train") / wnid
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return path


def _drawn(rng, mode="RGB", kind="JPEG"):
    width, height = rng.integers(20, 60, 2).tolist()
    colours = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
    picture = colours.resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    return encoded(picture, kind, quality=85)


def encoded(picture, kind="JPEG", **options):
    """The bytes of a file of an image or an array."""
    file = io.BytesIO()
    picture = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    picture.save(file, kind, **options)
    return file.getvalue()
