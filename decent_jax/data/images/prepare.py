"""Packs labelled images into a few large files: `decent-jax prepare images`.

Training reads images in random order. Reading a million small files that way is slow on a file
server or a hard disk; reading ArrayRecord shards is not. Each image is decoded once to check that
it is whole, and stored byte for byte as it was.

A shard is one task of one process, so the output is the same byte for byte for any number of
workers. Finished shards wait in a hidden folder in the folder of the output, which becomes the
output by a rename; after a kill, the next run finds them there.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from decent_jax.data import worker_pool
from decent_jax.data.images import array_records, jpeg
from decent_jax.data.images.array_records import KIND
from decent_jax.data.images.image_folder import SPLITS, ImageFiles, open_images
from decent_jax.data.prepared_folder import Draft, check_out, sha256_file, versions
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import read_json, write_json_atomic
from decent_jax.ground.progress import progress_bar

BAD_FILES = "bad_files.jsonl"

_SHARD_BYTES = 256 << 20
_FEW_SHARDS = 16  # a small data set gets this many, so that all cores have something to do,
_FEW_IMAGES = 100  # unless they would hold fewer images than this
_SAMPLE = 1000  # images whose sizes are read
_WRITER = "group_size:1,uncompressed"  # random access; JPEG does not compress any further


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    shards: int | None = None,
    workers: int | None = None,
    max_bad: float = 0.01,
    overwrite: bool = False,
    progress: bool = False,
) -> dict:
    """Writes the prepared folder `out`; `DESCRIPTION` lists the layouts it reads.

    With several workers, a script must call this under `if __name__ == "__main__":`, because they
    are spawned. Finished shards of a run that failed stay in `.NAME.unfinished` next to `out`.

    Args:
      source: the folder with the images.
      out: the folder to make.
      shards: files of `train`, and of `val` in proportion; None means some 256 MB per file, but
        for little data up to 16 files.
      workers: processes; None means one per core.
      max_bad: share of the images, in [0, 1), that may be broken; they are left out.
      overwrite: replace a folder that an earlier call made, once the new one is whole.
      progress: show a progress bar on stderr.

    Returns:
      The manifest: class names, and of each split images, bytes, broken images and shards.

    Raises:
      DataError: the arguments or the data are wrong; one sentence.
      OSError: the output cannot be written, for instance because the disk is full.
    """
    if shards is not None and shards < 1:
        raise DataError(f"shards must be at least 1, got {shards}")
    if not 0 <= max_bad < 1:
        raise DataError(f"max_bad must be at least 0 and less than 1, got {max_bad}")
    check_out(Path(os.path.abspath(out)), KIND, overwrite=overwrite)
    images = {split: _open_source(source, split) for split in SPLITS}
    tasks = _tasks(images, shards)
    workers = worker_pool.how_many(workers, len(tasks))
    total = sum(map(len, images.values()))
    made: list[dict[str, Any]] = []
    bad: list[dict[str, str]] = []
    with Draft(out, KIND, overwrite=overwrite, resume=True) as draft:
        draft.keep_only({name for task in tasks for name in (task.file, f"{task.file}.json")})
        make = functools.partial(_make_shard, images=images, folder=draft.folder)
        with (
            worker_pool.results(make, tasks, workers) as results,
            progress_bar(total, progress, unit=" images", desc="packing") as bar,
        ):
            for task, result in results:
                made.append(result)
                bad += result["bad"]
                bar.update(task.stop - task.start)
                _check_bad(bad, total, max_bad)
        manifest = _manifest(images, made)
        lines = "".join(json.dumps(entry) + "\n" for entry in bad)
        (draft.folder / BAD_FILES).write_text(lines)
        for task in tasks:
            sidecar_of(draft.folder / task.file).unlink()
        draft.publish(manifest)
    return manifest


def sidecar_of(shard: Path) -> Path:
    """The file in an unfinished folder that says that a shard is finished, and from what."""
    return shard.with_name(f"{shard.name}.json")


class _Task(NamedTuple):
    """One shard: the images `start` to `stop` of a split."""

    split: str
    shard: int
    of: int
    start: int
    stop: int

    @property
    def file(self) -> str:
        return f"{self.split}-{self.shard:05}-of-{self.of:05}.array_record"


def _open_source(source, split: str) -> ImageFiles:
    images = open_images(source, split)
    if images.layout in ("prepared", "TFDS"):
        raise DataError(
            f"{source}: is a {images.layout} folder already, which training reads as it is; give"
            " class folders or archives"
        )
    return images


def _tasks(images: dict[str, ImageFiles], shards: int | None) -> list[_Task]:
    tasks = []
    for split, files in images.items():
        if shards is None:
            wanted = max(_bytes(files) / _SHARD_BYTES, min(_FEW_SHARDS, len(files) / _FEW_IMAGES))
        else:
            wanted = shards * len(files) / len(images["train"])
        count = min(math.ceil(wanted), len(files))
        bounds = [len(files) * i // count for i in range(count + 1)]
        tasks += [_Task(split, i, count, *bounds[i : i + 2]) for i in range(count)]
    return tasks


def _bytes(files: ImageFiles) -> float:
    """The size of all images, estimated from some."""
    sample = np.linspace(0, len(files) - 1, min(_SAMPLE, len(files))).astype(int)
    return float(np.mean([files.stamp(i).size for i in sample])) * len(files)


def _make_shard(task: _Task, *, images: dict[str, ImageFiles], folder: Path) -> dict[str, Any]:
    """Makes a shard unless it exists already; returns the content of its sidecar."""
    files = images[task.split]
    key = _key(task, files)
    path = folder / task.file
    sidecar = sidecar_of(path)
    if found := _finished(path, sidecar, key):
        return found
    sidecar.unlink(missing_ok=True)
    bad = []
    counts = np.zeros(len(files.class_names), np.int64)
    with _writing(path) as write:
        for index in range(task.start, task.stop):
            if worker_pool.stopped():
                raise KeyboardInterrupt
            data, label, name = files[index]
            try:
                jpeg.decode(data)
            except ValueError as error:
                bad.append({"name": name, "reason": str(error)})
                continue
            write(array_records.pack_record(data, label, name))
            counts[label] += 1
    result = {
        "key": key,
        "shard": {
            "file": task.file,
            "records": int(counts.sum()),
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
        },
        "class_counts": {int(label): int(counts[label]) for label in np.flatnonzero(counts)},
        "bad": bad,
    }
    write_json_atomic(sidecar, result)
    return read_json(sidecar)  # as a later run reads it


def _key(task: _Task, files: ImageFiles) -> str:
    """A hash that changes with any of a shard's images."""
    key = hashlib.sha256()
    fixed = (KIND.format, _WRITER, files.class_names, task)
    key.update(repr(fixed).encode("utf-8", "surrogateescape"))
    for index in range(task.start, task.stop):
        line = f"{files.name(index)}\0{files.stamp(index)}\n"
        key.update(line.encode("utf-8", "surrogateescape"))
    return key.hexdigest()


def _finished(path: Path, sidecar: Path, key: str) -> dict | None:
    """The content of a shard's sidecar, if the shard is whole and of the same images."""
    try:
        found = read_json(sidecar)
        shard = found["shard"]
        whole = (
            found["key"] == key
            and path.stat().st_size == shard["bytes"]
            and sha256_file(path) == shard["sha256"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if whole else None


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Callable[[bytes], None]]:
    """`with _writing(path) as write:`; the shard is on the disk afterwards."""
    try:
        with contextlib.closing(ArrayRecordWriter(str(path), _WRITER)) as writer:
            yield writer.write
    except RuntimeError as error:  # array_record's only kind
        reason = str(error).partition(";")[0]
        raise OSError(f"{path}: cannot be written ({reason})") from None
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _check_bad(bad: list[dict], total: int, max_bad: float) -> None:
    if len(bad) <= max_bad * total:
        return
    first = "; ".join(f"{entry['name']} {entry['reason']}" for entry in bad[:3])
    raise DataError(
        f"at least {len(bad)} of {total} images are broken, more than the share {max_bad:g} that"
        f" --max_bad allows ({first}); fetch them again or allow more"
    )


def _manifest(images: dict[str, ImageFiles], made: list[dict]) -> dict:
    """The manifest from the sidecars of all shards, which are in order."""
    class_names = images["train"].class_names
    splits = {}
    for split in SPLITS:
        entries = [entry for entry in made if entry["shard"]["file"].startswith(f"{split}-")]
        counts = np.zeros(len(class_names), np.int64)
        for entry in entries:
            for label, count in entry["class_counts"].items():
                counts[int(label)] += count
        if not counts.any():
            raise DataError(f"none of the {len(images[split])} images of {split!r} is whole")
        shards = [entry["shard"] for entry in entries]
        splits[split] = {
            "records": int(counts.sum()),
            "bytes": sum(shard["bytes"] for shard in shards),
            "bad": sum(len(entry["bad"]) for entry in entries),
            "class_counts": counts.tolist(),
            "shards": shards,
        }
    return {
        "format": KIND.format,
        "class_names": list(class_names),
        "splits": splits,
        "total": {
            name: sum(entry[name] for entry in splits.values())
            for name in ("records", "bytes", "bad")
        },
        "bad_files": BAD_FILES,
        "versions": versions("array_record"),
    }


# --- The command, see `decent_jax.commands.prepare` -----------------------------------------------

DESCRIPTION = """\
Packs the images of PATH into OUT/train-*.array_record and OUT/val-*.array_record for training,
with OUT/manifest.json. Each image is decoded once as a check and stored as it is; broken ones are
left out and listed in OUT/bad_files.jsonl.

Reads class folders (PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg) and archives: ImageNet's
ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar with ILSVRC2012_devkit_t12.tar.gz as they were
downloaded, not unpacked, or train.tar and val.tar with members CLASS/NAME.jpg.
"""
EXAMPLE = """\
example, ImageNet from the original archives:
  decent-jax prepare images --input imagenet_archives/ --out data/imagenet

OUT appears when it is whole, and needs as much space as the images. After a kill, start the same
command again: it goes on after the shards that are finished, in .OUT.unfinished next to OUT.
"""
INTERRUPTED = "the same command goes on after the finished shards"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `prepare` that only images have."""
    parser.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="files of train, and of val in proportion (default: some 256 MB per file)",
    )
    parser.add_argument(
        "--max_bad",
        type=float,
        default=0.01,
        metavar="F",
        help="share of the images that may be broken (default: 0.01)",
    )


def report(manifest: dict[str, Any]) -> Iterator[str]:
    """What the command prints about a finished folder."""
    for split, entry in manifest["splits"].items():
        bad = f", {entry['bad']:,} broken left out" if entry["bad"] else ""
        yield f"{split:5} {entry['records']:>12,} images {entry['bytes'] / 1e6:>12,.1f} MB{bad}"
