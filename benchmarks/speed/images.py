"""The cost of reading photographs, beside Pillow's.

    python benchmarks/speed/images.py --images FOLDER [--count 400] [--repeats 9]

FOLDER is what config.data.path may be; FOLDER/train is used. Two measurements in one run, images
per second of CPU time in one thread, so that other work on the machine does not count:

train     Random-resized crops of 176 pixels, mirrored, from the same files in memory and with the
          same boxes.
eval      Centre crops of 224 pixels of pictures whose shorter side is 256.

"bare" only decodes at the size which the pipeline chooses, without crop and resize: an upper bound
for any pipeline that decodes in this way. Repetitions take all ways in turn, so that a noisy
machine hits all alike; numbers are medians. Prints a Markdown table for each; "apart" is the mean
difference of the pixels from Pillow's, of 255.
"""

import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import simplejpeg
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax.data.images import crops, image_folder
from decent_jax.data.images.crops import Box
from decent_jax.ground.errors import DataError

TRAIN, EVAL, RESIZE = 176, 224, 256  # pixels
EXIF_ORIENTATION = 0x0112


class Job(NamedTuple):
    """An encoded picture, the part of it that a training crop shows, and the scale to decode at."""

    data: bytes
    height: int
    width: int
    box: Box
    shrink: int


def job(part: str, random: np.random.Generator, data: bytes) -> Job:
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    box = crops.random_box(random, height, width)
    sides, size = ((box.height, box.width), TRAIN) if part == "train" else ((height, width), RESIZE)
    return Job(data, height, width, box, crops.shrink_for(min(sides), size))


def read(files, count: int) -> list[bytes]:
    """Some of the files, spread evenly; only JPEG files that all libraries show the same way up."""
    chosen = np.unique(np.linspace(0, len(files) - 1, count).astype(int))
    pictures = [data for i in chosen if is_plain(data := files[int(i)].data)]
    if not pictures:
        raise DataError(f"{files.path} holds no plain JPEG file")
    size = statistics.mean(map(len, pictures)) / 1e3
    print(f"{len(pictures)} of {len(chosen)} images, of {size:.0f} KB on average", file=sys.stderr)
    return pictures


def is_plain(data: bytes) -> bool:
    with Image.open(io.BytesIO(data)) as image:
        upright = image.getexif().get(EXIF_ORIENTATION, 1) == 1
        return image.format == "JPEG" and image.mode == "RGB" and upright


# --- Ways to read them, (size, size, 3) uint8 -----------------------------------------------------


def ours_train(job: Job) -> np.ndarray:
    return cv2.flip(crops.crop(job.data, job.box, TRAIN), 1)


def ours_eval(job: Job) -> np.ndarray:
    return crops.centre_crop(job.data, EVAL, RESIZE)


def pillow_train(job: Job) -> np.ndarray:
    top, left, height, width = job.box
    with Image.open(io.BytesIO(job.data)) as image:
        part = image.convert("RGB").crop((left, top, left + width, top + height))
    part = part.resize((TRAIN, TRAIN), Image.Resampling.BILINEAR)
    return np.asarray(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT))


def pillow_eval(job: Job) -> np.ndarray:
    short = min(job.height, job.width)
    height, width = (int(RESIZE * side / short) for side in (job.height, job.width))
    left, top = round((width - EVAL) / 2), round((height - EVAL) / 2)
    with Image.open(io.BytesIO(job.data)) as image:
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + EVAL, top + EVAL)))


def bare(job: Job) -> np.ndarray:
    """Only decodes, as `decent_jax.data.images.jpeg` does it."""
    height, width = -(-job.height // job.shrink), -(-job.width // job.shrink)
    least = {"min_height": height, "min_width": width}
    return simplejpeg.decode_jpeg(job.data, "RGB", fastupsample=True, **least)


WAYS: dict[str, dict[str, Callable[[Job], np.ndarray]]] = {
    "train": {"decent_jax": ours_train, "Pillow": pillow_train, "bare": bare},
    "eval": {"decent_jax": ours_eval, "Pillow": pillow_eval, "bare": bare},
}


def measured(part: str, jobs: list[Job], repeats: int) -> dict[str, float]:
    """Images per second of CPU time, for each way."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS[part]}
    for repeat in range(1 + repeats):
        for name, way in WAYS[part].items():
            began = time.process_time()
            for one in jobs:
                way(one)
            if repeat > 0:  # the first is to warm up
                seconds[name].append(time.process_time() - began)
    return {name: len(jobs) / statistics.median(own) for name, own in seconds.items()}


def table(part: str, jobs: list[Job], repeats: int) -> str:
    rates, ways = measured(part, jobs, repeats), WAYS[part]
    pairs = ((ways["decent_jax"](one), ways["Pillow"](one).astype(int)) for one in jobs)
    apart = statistics.mean(float(np.abs(a - b).mean()) for a, b in pairs)
    lines = [f"| {part} | images/s per core | of Pillow | of bare | apart |", "|---" * 5 + "|"]
    for name, rate in rates.items():
        cells = [f"{rate:.0f}", *(f"{rate / rates[base]:.2f}" for base in ("Pillow", "bare"))]
        cells.append(f"{apart:.1f}" if name == "decent_jax" else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__, allow_abbrev=False)
    parser.add_argument("--images", required=True, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=400, help="images in memory")
    parser.add_argument("--repeats", type=int, default=9)
    parsed = parser.parse_args(arguments)
    for name in ("count", "repeats"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(parsed, name)}")
    pictures = read(image_folder.open_images(parsed.images, "train"), parsed.count)
    for part in WAYS:
        random = np.random.default_rng(0)
        jobs = [job(part, random, data) for data in pictures]
        print(table(part, jobs, parsed.repeats))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DataError as error:
        print(f"images.py: {error}", file=sys.stderr)
        sys.exit(2)
