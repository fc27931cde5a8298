"""The cost of reading photographs, compared with Pillow, torchvision, OpenCV and libjpeg-turbo.

    python benchmarks/speed/images.py --images FOLDER [--count 400] [--repeats 9]

FOLDER is what config.data.path may be; FOLDER/train is used. Two measurements in one run, images
per second of CPU time in one thread, so that other work on the machine does not count:

train     Random-resized crops of 176 pixels, mirrored, from the same files in memory and with the
          same boxes. torchvision draws its own boxes, from the same distribution.
eval      Centre crops of 224 pixels of pictures whose shorter side is 256.

decent_jax is the function of the pipeline. "bare scaled decode" only decodes at the size which that
function chooses, without crop and resize: an upper bound for any pipeline that decodes in this way.
Repetitions take all ways in turn, so that a noisy machine hits all alike; numbers are medians.
"apart" is the mean difference of the pixels from Pillow's, of 255, and, in brackets, that of a
smooth gradient, on which filters agree and only geometry differs. Prints a Markdown table for each.
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


Way = Callable[[Job], object]


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
    gradient = smooth_picture()
    for part, ways in (("train", train_ways()), ("eval", eval_ways())):
        random = np.random.default_rng(0)
        jobs = [job(part, random, data) for data in pictures]
        controls = [job(part, random, gradient) for _ in range(50)]
        seconds = measure(ways | {"bare scaled decode": bare}, jobs, parsed.repeats)
        print(table(part, seconds, len(jobs), apart(ways, jobs), apart(ways, controls)))


# --- pictures -------------------------------------------------------------------------------------


def read(files, count: int) -> list[bytes]:
    """Some of the files, spread evenly; only JPEG files that all libraries show the same way up."""
    chosen = np.unique(np.linspace(0, len(files) - 1, count).astype(int))
    pictures = [data for i in chosen if _is_plain(data := files[int(i)].data)]
    if not pictures:
        raise DataError(f"{files.path} holds no plain JPEG file")
    size = statistics.mean(map(len, pictures)) / 1e3
    print(f"{len(pictures)} of {len(chosen)} images, of {size:.0f} KB on average", file=sys.stderr)
    return pictures


def _is_plain(data: bytes) -> bool:
    with Image.open(io.BytesIO(data)) as image:
        upright = image.getexif().get(EXIF_ORIENTATION, 1) == 1
        return image.format == "JPEG" and image.mode == "RGB" and upright


def smooth_picture(height: int = 600, width: int = 800) -> bytes:
    """A JPEG file of gradients: across, down, and both."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    pixels = np.stack([x, y, (x + y) / 2], axis=-1) * 255
    return simplejpeg.encode_jpeg(pixels.round().astype(np.uint8), quality=98)


def job(part: str, random: np.random.Generator, data: bytes) -> Job:
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    box = crops.random_box(random, height, width)
    if part == "train":
        shrink = crops.shrink_for(min(box.height, box.width), TRAIN)
    else:
        shrink = crops.shrink_for(min(height, width), RESIZE)
    return Job(data, height, width, box, shrink)


# --- ways to read them ----------------------------------------------------------------------------


def train_ways() -> dict[str, Way | None]:
    """Each makes (TRAIN, TRAIN, 3) uint8 from a job, except torchvision; None: not installed."""

    def ours(job: Job) -> np.ndarray:
        return cv2.flip(crops.crop(job.data, job.box, TRAIN), 1)

    def pillow(job: Job) -> np.ndarray:
        top, left, height, width = job.box
        image = _pillow(job).crop((left, top, left + width, top + height))
        image = image.resize((TRAIN, TRAIN), Image.Resampling.BILINEAR)
        return np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))

    def opencv(job: Job) -> np.ndarray:
        top, left, height, width = job.box
        part = _opencv(job)[top : top + height, left : left + width]
        return cv2.flip(cv2.resize(part, (TRAIN, TRAIN)), 1)

    return {
        "decent_jax": ours,
        "pillow": pillow,
        "torchvision": _torchvision(
            lambda v2: [v2.RandomResizedCrop(TRAIN), v2.RandomHorizontalFlip(1.0)]
        ),
        "opencv": opencv,
    }


def eval_ways() -> dict[str, Way | None]:
    """Each makes (EVAL, EVAL, 3) uint8 from a job."""

    def ours(job: Job) -> np.ndarray:
        return crops.centre_crop(job.data, EVAL, RESIZE)

    def pillow(job: Job) -> np.ndarray:
        height, width, left, top = _resized(job)
        image = _pillow(job).resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image.crop((left, top, left + EVAL, top + EVAL)))

    def opencv(job: Job) -> np.ndarray:
        height, width, left, top = _resized(job)
        return cv2.resize(_opencv(job), (width, height))[top : top + EVAL, left : left + EVAL]

    return {
        "decent_jax": ours,
        "pillow": pillow,
        "torchvision": _torchvision(lambda v2: [v2.Resize(RESIZE), v2.CenterCrop(EVAL)]),
        "opencv": opencv,
    }


def bare(job: Job) -> np.ndarray:
    """Only decodes, as `decent_jax.data.images.jpeg` does it."""
    height, width = -(-job.height // job.shrink), -(-job.width // job.shrink)
    least = {"min_height": height, "min_width": width}
    return simplejpeg.decode_jpeg(job.data, "RGB", fastupsample=True, **least)


def _pillow(job: Job) -> Image.Image:
    with Image.open(io.BytesIO(job.data)) as image:
        return image.convert("RGB")


def _opencv(job: Job) -> np.ndarray:
    pixels = cv2.imdecode(np.frombuffer(job.data, np.uint8), cv2.IMREAD_COLOR)
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _resized(job: Job) -> tuple[int, int, int, int]:
    """Height and width after torchvision's Resize, left and top of its CenterCrop after that."""
    short = min(job.height, job.width)
    height, width = (int(RESIZE * side / short) for side in (job.height, job.width))
    return height, width, round((width - EVAL) / 2), round((height - EVAL) / 2)


def _torchvision(transforms) -> Way | None:
    try:
        import torch
        import torchvision.transforms as library
    except ImportError:
        return None
    torch.set_num_threads(1)
    composed = library.Compose([*transforms(library), library.PILToTensor()])
    return lambda job: composed(_pillow(job))


# --- measuring ------------------------------------------------------------------------------------


def measure(ways: dict[str, Way | None], jobs: list[Job], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of all jobs, for each way and repetition; empty where a way is None."""
    seconds = {name: [] for name in ways}
    for repeat in range(1 + repeats):
        for name, way in ways.items():
            if way is None:
                continue
            began = time.process_time()
            for job in jobs:
                way(job)
            if repeat > 0:  # the first is to warm up
                seconds[name].append(time.process_time() - began)
    return seconds


def apart(ways: dict[str, Way | None], jobs: list[Job]) -> dict[str, float]:
    """The mean difference of pixels from Pillow's, of 255."""
    wanted = [ways["pillow"](job).astype(int) for job in jobs]
    return {
        name: statistics.mean(
            float(np.abs(ways[name](job) - pixels).mean())
            for job, pixels in zip(jobs, wanted, strict=True)
        )
        for name in ("decent_jax", "opencv")
    }


def table(
    part: str,
    seconds: dict[str, list[float]],
    images: int,
    differences: dict[str, float],
    on_gradient: dict[str, float],
) -> str:
    """Markdown; a way that is not installed has no numbers."""
    rates = {name: images / statistics.median(own) for name, own in seconds.items() if own}
    lines = [f"| {part} | images/s per core | of Pillow | of bare scaled decode | apart |"]
    lines.append("|---" * 5 + "|")
    for name in seconds:
        cells = [name, "not installed", "", "", ""]
        if rate := rates.get(name):
            ratios = (rate / rates[other] for other in ("pillow", "bare scaled decode"))
            cells[1:4] = [f"{rate:.0f}", *(f"{ratio:.2f}" for ratio in ratios)]
        if name in differences:
            cells[4] = f"{differences[name]:.1f} ({on_gradient[name]:.1f})"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DataError as error:
        print(f"images.py: {error}", file=sys.stderr)
        sys.exit(2)
