"""Training on photographs of a folder, through the same door as everything else."""

import io
import json

import jax
import mini_imagenet
import numpy as np
import pytest
import small_runs
import tiny
from PIL import Image
from refusals import refuses

from decent_jax.data import loader
from decent_jax.data.images import crops, image_folder, prepare_images
from decent_jax.ground.errors import ConfigError
from decent_jax.train import TrainingFailed

pytestmark = pytest.mark.usefixtures("compile_once")


def config_of(path, **changes):
    """Crops of 16 pixels."""
    data = {"data__path": str(path), "data__eval_size": 24}
    changes = small_runs.RESNET | data | {"batch_size": 4} | changes
    return small_runs.config("image_classification", **changes)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """The same images as class folders, as ImageNet's archives, and packed by us."""
    root = tmp_path_factory.mktemp("mini")
    for name, write in (
        ("folders", mini_imagenet.write_folders),
        ("archives", mini_imagenet.write_archives),
    ):
        (root / name).mkdir()
        write(root / name)
    prepare_images.prepare(root / "archives", root / "packed", workers=1)
    return {path.name: path for path in root.iterdir() if path.is_dir()}


def first_epoch(path):
    """Every batch of one epoch, 2 replicas with 3 images each."""
    source = crops.TrainImages(image_folder.open_images(path, "train"), 16)
    steps = len(source) // 6
    with loader.train_batches(source, seed=0, num_replicas=2, batch_size=6) as batches:
        return [jax.tree.map(np.array, next(batches)) for _ in range(steps)]


def test_an_epoch_is_the_same_in_every_layout(layouts):
    """Labels and pixels of random crops: what is read decides, not where it is stored."""
    wanted = first_epoch(layouts["folders"])
    assert sorted(np.concatenate([batch["label"].ravel() for batch in wanted])) == sorted(
        list(range(5)) * mini_imagenet.TRAIN_IMAGES
    )
    for name in ("archives", "packed"):
        jax.tree.map(np.testing.assert_array_equal, first_epoch(layouts[name]), wanted)


@pytest.mark.slow
def test_a_run_on_photographs_learns_and_resumes_bit_by_bit(layouts, tmp_path):
    def run(name):
        config = config_of(layouts["archives"], steps=2, checkpoint__every=1)
        folder = tiny.run(config, tmp_path / name)
        return json.loads((folder / "summary.json").read_text())

    whole = run("whole")
    assert whole["classes"] == 5 and whole["train_images"] == 30 and whole["val_images"] == 15
    assert 0 <= whole["final"]["eval/top1"] <= whole["final"]["eval/top5"] == 1
    small_runs.killed_after(1, tmp_path / "whole", tmp_path / "parts")
    parts = run("parts")
    tiny.assert_same_state(tmp_path / "whole", tmp_path / "parts", 2)
    for name in ("eval/loss", "eval/top1", "eval/top5", "eval/consensus_distance"):
        assert parts["final"][name] == whole["final"][name]  # so the statistics are restored too


def test_a_damaged_image_ends_a_run_in_one_sentence_with_a_checkpoint(layouts, tmp_path):
    """Found in the third of four steps; packing leaves it out, with the reason."""
    folder = tmp_path / "data"
    mini_imagenet.write_folders(folder)
    source = crops.TrainImages(image_folder.open_images(folder, "train"), 16)
    config = config_of(folder, seed=1)
    victim = name_of_an_image_of_step(source, config, 2)
    path = folder / "train" / victim.split("/")[-2] / victim.split("/")[-1]
    path.write_bytes(path.read_bytes()[:-100])
    with refuses(victim, "truncated", "prepare", error=TrainingFailed):
        tiny.run(config, tmp_path / "run")
    assert tiny.saved_steps(tmp_path / "run")
    packed = tmp_path / "packed"
    prepare_images.prepare(folder, packed, workers=1)
    (bad,) = [json.loads(line) for line in (packed / "bad_files.jsonl").read_text().splitlines()]
    assert bad["name"] == victim and "truncated" in bad["reason"]
    source = crops.TrainImages(image_folder.open_images(packed, "train"), 16)
    assert len(source) == 29 and len(first_epoch(packed)) == 4  # which decodes them


def test_too_few_images_for_a_batch_are_refused(layouts, tmp_path):
    with refuses(30, 32, error=ConfigError):
        tiny.run(config_of(layouts["folders"], batch_size=32), tmp_path)


def name_of_an_image_of_step(source, config, step):
    """A photograph that libjpeg-turbo decodes, and that no earlier step reads."""
    seen = []

    class Names(crops.TrainImages):
        def augment(self, record, random):
            return {"name": np.array(record.name), "size": np.int32(len(record.data))}

    with loader.train_batches(
        Names(source.files, 16), seed=config.seed, num_replicas=2, batch_size=4, prefetch=0
    ) as batches:
        for _ in range(step):
            seen += next(batches)["name"].ravel().tolist()
        names = next(batches)["name"].ravel().tolist()
    files = {source[i].name: source[i].data for i in range(len(source))}
    return next(
        name
        for name in names
        if name not in seen and Image.open(io.BytesIO(files[name])).format == "JPEG"
    )
