"""ImageNet in small: five classes, six training and three validation images each, in every layout.

As in the real one, one image is grey, one is CMYK, one is a PNG named .JPEG, and the ids of the
development kit are not in the order of the wnids.
"""

import functools
import io
import tarfile

import numpy as np
import scipy.io
from PIL import Image

WNIDS = ("n01440764", "n01443537", "n02119789", "n03000134", "n12998815")
TRAIN_IMAGES, VAL_IMAGES = 6, 3  # of a class
DEVKIT = "ILSVRC2012_devkit_t12"

_IDS = {"n02119789": 1, "n12998815": 2, "n01443537": 3, "n03000134": 4, "n01440764": 5}
_GROUP = ("n00001740", 6)  # an inner node of WordNet, with an id but without images


@functools.cache
def images():
    """{"train": {(wnid, file name): bytes}, "val": ...} in the order in which records come."""
    rng = np.random.default_rng(0)
    train = {
        (wnid, f"{wnid}_{number}.JPEG"): _jpeg(rng)
        for wnid in WNIDS
        for number in sorted(rng.choice(20000, TRAIN_IMAGES, replace=False).tolist(), key=str)
    }
    names = list(train)
    train[names[1]] = _jpeg(rng, mode="L")
    train[names[8]] = _jpeg(rng, mode="CMYK")
    train[names[20]] = _encoded(_picture(rng, "RGB"), "PNG")
    wnids = rng.permutation(np.repeat(WNIDS, VAL_IMAGES)).tolist()
    val = {(w, f"ILSVRC2012_val_{i:08}.JPEG"): _jpeg(rng) for i, w in enumerate(wnids, 1)}
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


def write_flat_val(path):
    """PATH/val/NAME.JPEG, as ImageNet's archive unpacks."""
    (path / "val").mkdir(parents=True)
    for (_, name), data in images()["val"].items():
        (path / "val" / name).write_bytes(data)
    return path


def write_archives(path):
    """The three files of ImageNet, with members in no order."""
    path.mkdir(parents=True, exist_ok=True)
    outer = {}
    for wnid in reversed(WNIDS):
        own = {name: data for (w, name), data in images()["train"].items() if w == wnid}
        outer[f"{wnid}.tar"] = tar_bytes(dict(reversed(own.items())))
    (path / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(outer))
    flat = {name: data for (_, name), data in images()["val"].items()}
    (path / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes(flat))
    write_devkit(path)
    return path


def write_devkit(path, *, packed=True, ids=None):
    """The devkit with its two files that matter; ``ids`` replaces those of the ground truth."""
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    synsets = [*((number, wnid) for wnid, number in _IDS.items()), _GROUP[::-1]]
    table = np.array([[(n, w, f"words of {w}", 0)] for n, w in synsets], dtype=fields)
    meta = io.BytesIO()
    scipy.io.savemat(meta, {"synsets": table})
    if ids is None:
        by_file = sorted((name, wnid) for wnid, name in images()["val"])
        ids = [_IDS[wnid] for _, wnid in by_file]
    files = {
        f"{DEVKIT}/data/meta.mat": meta.getvalue(),
        f"{DEVKIT}/data/ILSVRC2012_validation_ground_truth.txt": "".join(
            f"{number}\n" for number in ids
        ).encode(),
    }
    if packed:
        with tarfile.open(path / f"{DEVKIT}.tar.gz", "w:gz") as archive:
            _add(archive, files)
    else:
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)


def tar_bytes(members):
    """An uncompressed tar file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        _add(archive, members)
    return file.getvalue()


def _add(archive, members):
    for name, data in members.items():
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))


def _jpeg(rng, mode="RGB"):
    return _encoded(_picture(rng, mode), "JPEG", quality=85)


def _picture(rng, mode):
    width, height = rng.integers(20, 60, 2).tolist()
    colours = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
    return colours.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def _encoded(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()
