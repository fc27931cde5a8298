"""Packs labelled images into a few large files: ``python -m decent_jax.data.prepare_images``.

Training reads images in random order. From a million small files, on a file server or a hard disk,
that is slow; from ArrayRecord shards it is not. Each image is decoded once to find out whether it
is whole, and stored byte for byte as it was.

A shard is one task of one process, so the output is the same byte for byte for any number of
workers. Finished shards wait in a hidden folder beside the output, which the output is renamed
from; a run that was killed finds them there when it is started again.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import as_completed
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

import decent_jax
from decent_jax.data import image_shards, jpeg, worker_pool
from decent_jax.data.image_files import SPLITS, ImageFiles, open_images
from decent_jax.data.prepared_folder import check_out, sha256_file
from decent_jax.errors import DataError
from decent_jax.json_files import write_json_atomic
from decent_jax.progress import progress_bar

BAD_FILES = "bad_files.jsonl"

_SHARD_BYTES = 256 << 20
_FEW_SHARDS = 16  # a small data set has as many, so that all cores have something to do,
_FEW_IMAGES = 100  # unless they hold fewer images than this
_SAMPLE = 1000  # images whose sizes are looked at
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
    """Writes the prepared folder ``out``; see ``--help`` for the layouts read.

    With several workers, a script must call this under ``if __name__ == "__main__":``, for they
    are spawned. Finished shards of a run that failed stay in ``.NAME.unfinished`` beside ``out``.

    Args:
      source: the folder with the images.
      out: the folder to make.
      shards: files of ``train``, and of ``val`` in proportion; None means some 256 MB a file, but
        for little data up to 16 files.
      workers: processes; None means one a core.
      max_bad: share of the images, in [0, 1), that may be broken; they are left out.
      overwrite: replace a folder that an earlier call made, once the new one is whole.
      progress: show a progress bar on stderr.

    Returns:
      The manifest: class names, and of each split images, bytes, broken images and shards.

    Raises:
      DataError: anything wrong with the arguments or the data, as one sentence.
      OSError: the output cannot be written, for instance a full disk.
    """
    if shards is not None and shards < 1:
        raise DataError(f"shards must be at least 1, got {shards}")
    if workers is not None and workers < 1:
        raise DataError(f"workers must be at least 1, got {workers}")
    if not 0 <= max_bad < 1:
        raise DataError(f"max_bad must be at least 0 and less than 1, got {max_bad}")
    out = Path(os.path.abspath(out))
    check_out(out, image_shards.KIND, image_shards.read_manifest, overwrite=overwrite)
    images = {split: _open_source(source, split) for split in SPLITS}
    tasks = _tasks(images, shards)
    if workers is None:
        workers = min(worker_pool.cores(), len(tasks))
    total = sum(map(len, images.values()))
    made: dict[_Task, dict] = {}
    with (
        image_shards.unfinished_folder(out) as folder,
        _results(tasks, images, folder, workers) as results,
        progress_bar(total, progress, unit=" images", desc="packing") as bar,
    ):
        image_shards.keep_only(folder, [task.file for task in tasks])
        for task, result in results:
            made[task] = result
            bar.update(task.stop - task.start)
            _check_bad([bad for entry in made.values() for bad in entry["bad"]], total, max_bad)
        manifest = _manifest(images, [made[task] for task in tasks])
        _write_lines(folder / BAD_FILES, [bad for task in tasks for bad in made[task]["bad"]])
        image_shards.put_in_place(out, folder, manifest, overwrite)
    return manifest


class _Task(NamedTuple):
    """One shard: the images ``start`` to ``stop`` of a split."""

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


def _make_shard(task: _Task, *, images: dict[str, ImageFiles], folder: Path, stopped) -> dict:
    """Makes a shard unless it is there already; returns what its sidecar says."""
    files = images[task.split]
    key = _key(task, files)
    path = folder / task.file
    sidecar = image_shards.sidecar_of(path)
    if found := _finished(path, sidecar, key):
        return found
    sidecar.unlink(missing_ok=True)
    bad = []
    counts = np.zeros(len(files.class_names), np.int64)
    with _writing(path) as write:
        for index in range(task.start, task.stop):
            if stopped():
                raise KeyboardInterrupt
            data, label, name = files[index]
            try:
                jpeg.check(data)
            except ValueError as error:
                bad.append({"name": name, "reason": str(error)})
                continue
            write(image_shards.pack_record(data, label, name))
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
    return json.loads(sidecar.read_text())  # the same as a run that finds it


def _key(task: _Task, files: ImageFiles) -> str:
    """A hash of what a shard is made of: it changes with any of its images."""
    key = hashlib.sha256()
    fixed = (image_shards.FORMAT, _WRITER, files.class_names, task)
    key.update(repr(fixed).encode("utf-8", "surrogateescape"))
    for index in range(task.start, task.stop):
        line = f"{files.name(index)}\0{files.stamp(index)}\n"
        key.update(line.encode("utf-8", "surrogateescape"))
    return key.hexdigest()


def _finished(path: Path, sidecar: Path, key: str) -> dict | None:
    """What the sidecar of a shard says, if the shard is whole and made of the same images."""
    try:
        found = json.loads(sidecar.read_text())
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
def _writing(path: Path):
    """``with _writing(path) as write:``; the shard is on the disk afterwards."""
    writer = None
    try:
        writer = ArrayRecordWriter(str(path), _WRITER)
        try:
            yield writer.write
        finally:
            writer.close()
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
        "format": image_shards.FORMAT,
        "class_names": list(class_names),
        "splits": splits,
        "total": {
            name: sum(entry[name] for entry in splits.values())
            for name in ("records", "bytes", "bad")
        },
        "bad_files": BAD_FILES,
        "versions": {
            "decent_jax": decent_jax.__version__,
            "python": platform.python_version(),
            "array_record": metadata.version("array_record"),
        },
    }


def _write_lines(path: Path, entries: list[dict]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


_make_here = None  # in a worker process: _make_shard with its keywords


def _start_worker(images, folder: Path, stop) -> None:
    global _make_here
    _make_here = functools.partial(_make_shard, images=images, folder=folder, stopped=stop.is_set)


def _make_in_worker(task: _Task) -> dict:
    return _make_here(task)


@contextlib.contextmanager
def _results(tasks: list[_Task], images, folder: Path, workers: int):
    """Iterator of (task, what its sidecar says), in any order."""
    if workers == 1:
        make = functools.partial(_make_shard, images=images, folder=folder, stopped=lambda: False)
        yield ((task, make(task)) for task in tasks)
        return
    stop = multiprocessing.get_context("spawn").Event()
    with worker_pool.open_pool(workers, _start_worker, images, folder, stop) as pool:
        try:
            yield _as_completed(pool, tasks)
        finally:
            stop.set()


def _as_completed(pool, tasks: list[_Task]) -> Iterator[tuple[_Task, dict]]:
    futures = {pool.submit(_make_in_worker, task): task for task in tasks}
    for future in as_completed(futures):
        yield futures[future], future.result()


_DESCRIPTION = """\
Packs the images of PATH into OUT/train-*.array_record and OUT/val-*.array_record for training,
with OUT/manifest.json. Each image is decoded once as a check and stored as it is; broken ones are
left out and listed in OUT/bad_files.jsonl.

Reads class folders (PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg) and archives: ImageNet's
ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar beside ILSVRC2012_devkit_t12.tar.gz as they
were fetched, not unpacked, or train.tar and val.tar with members CLASS/NAME.jpg.
"""
_EXAMPLE = """\
example, ImageNet from the original archives:
  python -m decent_jax.data.prepare_images --input imagenet_archives/ --out data/imagenet

OUT appears when it is whole, and needs as much space as the images. A run that was killed is
simply started again: it goes on after the shards that are finished, in .OUT.unfinished beside OUT.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m decent_jax.data.prepare_images",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", required=True, metavar="PATH", help="the folder with the images")
    add("--out", required=True, metavar="DIR", help="the folder to make")
    add(
        "--shards",
        type=int,
        metavar="N",
        help="files of train, and of val in proportion (default: some 256 MB a file)",
    )
    add("--workers", type=int, metavar="N", help="processes (default: one a core)")
    add(
        "--max_bad",
        type=float,
        default=0.01,
        metavar="F",
        help="share of the images that may be broken (default: 0.01)",
    )
    add("--overwrite", action="store_true", help="replace OUT where it is an earlier result")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0, 2 for bad input, 130 when interrupted."""
    args = _parser().parse_args(argv)
    with worker_pool.terminated_politely():
        try:
            manifest = prepare(
                args.input,
                args.out,
                shards=args.shards,
                workers=args.workers,
                max_bad=args.max_bad,
                overwrite=args.overwrite,
                progress=True,
            )
        except DataError as error:
            print(f"prepare_images: {error}", file=sys.stderr)
            return 2
        except OSError as error:  # of the output: a full disk, say
            print(f"prepare_images: {args.out}: {error.strerror or error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(
                "prepare_images: interrupted; the same command goes on after the finished shards",
                file=sys.stderr,
            )
            return 130
    for split, entry in manifest["splits"].items():
        bad = f", {entry['bad']:,} broken left out" if entry["bad"] else ""
        print(f"{split:5} {entry['records']:>12,} images {entry['bytes'] / 1e6:>12,.1f} MB{bad}")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
