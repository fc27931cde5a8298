"""The cost of reading photographs, compared with Pillow, torchvision, OpenCV and libjpeg-turbo.

    python benchmarks/images.py --images FOLDER [--count 400] [--repeats 9] [--batches 20]

FOLDER is what config.data.path may be; FOLDER/train is used. Three measurements in one run:

train     Random-resized crops of 176 pixels, mirrored, from the same files in memory and with the
          same boxes. One thread; images per second of CPU time, so that other work on the machine
          does not count. torchvision draws its own boxes, from the same distribution.
eval      Centre crops of 224 pixels of pictures whose shorter side is 256.
pipeline  decent_jax.data.loader.train_batches with 1 to 4 threads, and with 1 and 2 worker
          processes: images per second by the clock, files read from the disk, on all cores.

decent_jax is the function of the pipeline. "bare scaled decode" only decodes at the size which that
function chooses, without crop and resize: an upper bound for any pipeline that decodes in this way.
"bare decode" decodes the whole picture. Repetitions take all ways in turn, so that a noisy machine
hits all alike; numbers are medians (lowest to highest), ratios are those of medians.

"apart from Pillow" is the difference of the pixels, of 255, on average over all images and in the
99th percentile of the images: once on these files, once on a smooth gradient, on which filters
agree and only geometry differs.

Prints a JSON line per row to standard output, and tables.
"""

import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import commands
import cv2
import numpy as np
import simplejpeg
from PIL import Image

from decent_jax.data import loader
from decent_jax.data.images import crops, image_folder, jpeg
from decent_jax.data.images.crops import Box
from decent_jax.ground.errors import DataError

TRAIN, EVAL, RESIZE = 176, 224, 256  # pixels
BATCH, WARMUP = 64, 8  # images a batch; batches before the clock starts, more than are read ahead
PIPELINES = {
    "1 thread": {"prefetch": 1},
    "2 threads": {"prefetch": 2},
    "4 threads": {"prefetch": 4},
    "1 worker process": {"workers": 1},
    "2 worker processes": {"workers": 2},
}
NOT_INSTALLED = "not installed"


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
    parser.add_argument("--batches", type=int, default=20, help="of the pipeline, a repetition")
    parsed = parser.parse_args(arguments)
    for name in ("count", "repeats", "batches"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(parsed, name)}")

    files = image_folder.open_images(parsed.images, "train")
    pictures = read(files, parsed.count)
    gradient = smooth_picture()
    for part, ways in (("train", train_ways()), ("eval", eval_ways())):
        random = np.random.default_rng(0)
        jobs = [job(part, random, data) for data in pictures]
        controls = [job(part, random, gradient) for _ in range(50)]
        seconds = measure(ways | bare_ways(), jobs, parsed.repeats)
        report(part, seconds, len(jobs), differences(ways, jobs), differences(ways, controls))
    report_pipeline(measure_pipeline(files, parsed.repeats, parsed.batches))


# --- pictures -------------------------------------------------------------------------------------


def read(files, count: int) -> list[bytes]:
    """Some of the files, spread evenly; only JPEG files that all libraries show the same way up."""
    chosen = np.unique(np.linspace(0, len(files) - 1, count).astype(int))
    pictures = [files[int(i)].data for i in chosen]
    plain = [data for data in pictures if _is_plain(jpeg.read_header(data))]
    if not plain:
        raise DataError(f"{files.path} holds no plain JPEG file")
    print(
        f"{len(plain)} images of {statistics.mean(map(len, plain)) / 1e3:.0f} KB on average; "
        f"{len(pictures) - len(plain)} left out (turned, CMYK or no JPEG); {os.cpu_count()} cores, "
        f"of which {os.getloadavg()[0]:.1f} were at work before",
        file=sys.stderr,
    )
    return plain


def _is_plain(header: jpeg.Header) -> bool:
    return header.turbo and header.orientation == 1


def smooth_picture(height: int = 600, width: int = 800) -> bytes:
    """A JPEG file of gradients: across, down, and both."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    pixels = np.stack([x, y, (x + y) / 2], axis=-1) * 255
    return simplejpeg.encode_jpeg(pixels.round().astype(np.uint8), quality=98)


def job(part: str, random: np.random.Generator, data: bytes) -> Job:
    height, width, *_ = jpeg.read_header(data)
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
        header = jpeg.read_header(job.data)
        return cv2.flip(crops.crop(job.data, job.box, TRAIN, header=header), 1)

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


def bare_ways() -> dict[str, Way]:
    """Only decode, with the settings of `jpeg`."""

    def scaled(job: Job) -> np.ndarray:
        return simplejpeg.decode_jpeg(
            job.data,
            "RGB",
            fastupsample=True,
            min_height=-(-job.height // job.shrink),
            min_width=-(-job.width // job.shrink),
        )

    def whole(job: Job) -> np.ndarray:
        return simplejpeg.decode_jpeg(job.data, "RGB", fastupsample=True)

    return {"bare scaled decode": scaled, "bare decode": whole}


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


class Difference(NamedTuple):
    """From Pillow, of 255."""

    mean: float
    p99: float  # of the images' means


def differences(ways: dict[str, Way | None], jobs: list[Job]) -> dict[str, Difference]:
    result = {}
    wanted = [ways["pillow"](job).astype(int) for job in jobs]
    for name in ("decent_jax", "opencv"):
        made = (ways[name](job) for job in jobs)
        means = [np.abs(a - b).mean() for a, b in zip(made, wanted, strict=True)]
        result[name] = Difference(float(np.mean(means)), float(np.quantile(means, 0.99)))
    return result


def measure_pipeline(files, repeats: int, batches: int) -> dict[str, list[float]]:
    """Seconds of this many batches, for each pipeline and repetition."""
    source = crops.TrainImages(files, TRAIN)
    seconds = {name: [] for name in PIPELINES}
    for repeat in range(repeats):
        for name, options in PIPELINES.items():
            with loader.train_batches(
                source, seed=repeat, num_replicas=1, batch_size=BATCH, **options
            ) as pipeline:
                for _ in range(WARMUP):
                    next(pipeline)
                began = time.perf_counter()
                for _ in range(batches):
                    next(pipeline)
                seconds[name].append((time.perf_counter() - began) / batches)
    return seconds


# --- reporting ------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """Images per second."""

    median: float
    lowest: float
    highest: float


def rates(seconds: list[float], images: int) -> Rates:
    return Rates(images / statistics.median(seconds), images / max(seconds), images / min(seconds))


def report(
    part: str,
    seconds: dict[str, list[float]],
    images: int,
    apart: dict[str, Difference],
    apart_smooth: dict[str, Difference],
) -> None:
    pillow = rates(seconds["pillow"], images).median
    bare = rates(seconds["bare scaled decode"], images).median
    _say(
        f"\n{part:<20}{'images/s of a core':>28}{'of Pillow':>11}{'of bare scaled':>16}"
        f"{'apart from Pillow':>20}{'on a gradient':>16}"
    )
    for name, own in seconds.items():
        row = {"part": part, "way": name}
        if not own:
            print(json.dumps(row | {"images_per_s": None, "reason": NOT_INSTALLED}))
            _say(f"{name:<20}{NOT_INSTALLED:>28}")
            continue
        rate = rates(own, images)
        row |= {
            "images_per_s": rate.median,
            "images_per_s_lowest": rate.lowest,
            "images_per_s_highest": rate.highest,
            "of_pillow": rate.median / pillow,
            "of_bare_scaled_decode": rate.median / bare,
        }
        line = (
            f"{name:<20}{_spread(rate):>28}{rate.median / pillow:>11.2f}{rate.median / bare:>16.2f}"
        )
        if name in apart:
            row |= {
                "apart_mean": apart[name].mean,
                "apart_p99": apart[name].p99,
                "apart_mean_smooth": apart_smooth[name].mean,
                "apart_p99_smooth": apart_smooth[name].p99,
            }
            line += "{:>11.2f} (p99 {:.1f}){:>7.2f} (p99 {:.1f})".format(
                *apart[name], *apart_smooth[name]
            )
        print(json.dumps(row))
        _say(line)


def report_pipeline(seconds: dict[str, list[float]]) -> None:
    one = rates(seconds["1 thread"], BATCH).median
    _say(f"\n{'pipeline':<20}{'images/s':>28}{'of 1 thread':>13}")
    for name, own in seconds.items():
        rate = rates(own, BATCH)
        row = {
            "part": "pipeline",
            "way": name,
            "images_per_s": rate.median,
            "images_per_s_lowest": rate.lowest,
            "images_per_s_highest": rate.highest,
            "of_1_thread": rate.median / one,
        }
        print(json.dumps(row))
        _say(f"{name:<20}{_spread(rate):>28}{rate.median / one:>13.2f}")


def _spread(rate: Rates) -> str:
    return f"{rate.median:.0f} ({rate.lowest:.0f} to {rate.highest:.0f})"


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DataError as error:
        print(f"images.py: {error}", file=sys.stderr)
        sys.exit(2)
