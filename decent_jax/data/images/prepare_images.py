"""Packs labelled images into a few large files: `decent-jax prepare images`.

Training reads images in random order. Reading a million small files that way is slow on a file
server or a hard disk; reading ArrayRecord shards is not. Each image is decoded once to check that
it is whole, and stored byte for byte as it was.
"""

import argparse
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from decent_jax.data import worker_pool
from decent_jax.data.images import jpeg
from decent_jax.data.images.array_records import ImageFolderWriter
from decent_jax.data.images.image_folder import (
    SPLITS,
    EncodedImage,
    ImageFiles,
    check_bad,
    open_images,
)
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import Json

_TOGETHER = 32  # images per task, so that a worker returns some megabytes at a time
_FEW_IMAGES = 1000  # starting workers takes longer than decoding fewer images


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
) -> Json:
    """Writes the prepared folder `out`; `DESCRIPTION` lists the layouts that `source` may have.

    With several workers, a script must call this under `if __name__ == "__main__":`, because they
    are spawned. Broken images, at most a tenth of all, are left out.

    Args:
      source: the folder with the images.
      out: the folder to make.
      workers: number of processes; None means one per core, or only this one for a few images.
      overwrite: whether to replace an earlier call's folder, once the new one is complete.

    Returns:
      The manifest: class names, and for each split its shards and the numbers of images, bytes and
      broken images.

    Raises:
      DataError: the arguments or the data are wrong; the message is one sentence.
      OSError: the output cannot be written, for instance because the disk is full.
    """
    images = {split: _open_source(source, split) for split in SPLITS}
    total = sum(map(len, images.values()))
    workers = worker_pool.how_many(workers, small=total < _FEW_IMAGES)
    with ImageFolderWriter(out, images["train"].class_names, overwrite=overwrite) as folder:

        def add(task: _Range, checked: list[tuple[EncodedImage, str]]) -> int:
            for image, reason in checked:
                if reason:
                    folder.bad.append({"name": image.name, "reason": reason})
                else:
                    folder.add(task.split, image)
            check_bad([f"{entry['name']} {entry['reason']}" for entry in folder.bad], total)
            return len(checked)

        work = functools.partial(_check, images=images)
        options = {"workers": workers, "total": total, "desc": "packing", "unit": " images"}
        worker_pool.encode(_tasks(images), work, add, **options)
        left_out = Counter(images["train"].left_out) + Counter(images["val"].left_out)
        return folder.commit(dict(left_out))


class _Range(NamedTuple):
    """The images `start` to `stop` of a split."""

    split: str
    start: int
    stop: int


def _open_source(source: str | Path, split: str) -> ImageFiles:
    images = open_images(source, split)
    if images.layout == "prepared":
        raise DataError(
            f"{source}: is prepared already, and training reads it as it is; give class folders"
        )
    return images


def _tasks(images: dict[str, ImageFiles]) -> Iterator[_Range]:
    for split, files in images.items():
        for start in range(0, len(files), _TOGETHER):
            yield _Range(split, start, min(start + _TOGETHER, len(files)))


def _check(task: _Range, images: dict[str, ImageFiles]) -> list[tuple[EncodedImage, str]]:
    """Each image of a task, with the reason why it is broken, or ""."""
    checked = []
    for index in range(task.start, task.stop):
        image, reason = images[task.split][index], ""
        try:
            jpeg.decode(image.data)
        except ValueError as error:
            image, reason = image._replace(data=b""), str(error)
        checked.append((image, reason))
    return checked


# --- The command, see `decent_jax.commands.prepare` -----------------------------------------------

DESCRIPTION = """\
Packs the images of PATH into OUT/train-*.array_record and OUT/val-*.array_record for training,
with OUT/manifest.json. Each image is decoded once as a check and stored as it is; broken ones are
left out and listed in OUT/bad_files.jsonl.

Reads class folders (PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg, or any other format that
Pillow decodes) and TFDS folders stored as array_record. Files of other kinds are only counted.
"""
EXAMPLE = """\
example, a folder of photographs:
  decent-jax prepare images --input photographs/ --out data/photographs

OUT appears when it is complete, and needs as much space as the images. After a kill, start the same
command again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: `prepare` has no arguments that only images have."""


def report(manifest: Json) -> Iterator[str]:
    """The lines that the command prints about a finished folder."""
    for split, entry in manifest["splits"].items():
        bad = f", {entry['bad']:,} broken left out" if entry["bad"] else ""
        yield f"{split:5} {entry['records']:>12,} images {entry['bytes'] / 1e6:>12,.1f} MB{bad}"
        if entry["classes_all_broken"]:
            yield f"{split:5} no whole image of {', '.join(entry['classes_all_broken'])}"
