"""Image classification on photographs of a folder: runs of a few steps, with airbench94, too."""

import contextlib
import json

import mini_imagenet
import numpy as np
import pytest
import small_runs
import tiny
from refusals import refused, refuses
from tiny import rows

from decent_jax.ground.errors import ConfigError
from decent_jax.tasks import image_classification as task_lib
from decent_jax.train import saved_model

pytestmark = pytest.mark.usefixtures("compile_once")


def config_of(path, **changes):
    """Crops of 16 pixels."""
    data = {"data__path": str(path), "data__eval_size": 24}
    changes = small_runs.RESNET | data | {"batch_size": 4} | changes
    return small_runs.config("image_classification", **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return mini_imagenet.write_folders(tmp_path_factory.mktemp("mini"))


AIRBENCH = {
    "model__preset": "airbench94",
    "model__blocks": "",
    "model__batch_norm_consensus": "recompute",
    "model__batch_norm_batches": 3,
    "data__alternate": True,
    "data__border": "reflect",
    "data__shift": 1,
    "data__eval_views": 6,
    "optimizer__name": "decent_jax.models.airbench.optimizer",
    "learning_rate": 0.24,
}


@pytest.mark.slow
def test_a_run_of_airbench_keeps_its_whitening(folders, tmp_path):
    config = config_of(folders, steps=3, eval__every=0, **AIRBENCH)
    config.lr_schedule.update(name="linear", warmup=0, end_factor=0.0)
    config.algorithm = "gossiped_momentum"
    folder = tiny.run(config, tmp_path / "run")
    rates = [row["train/learning_rate"] for row in rows(folder) if "train/learning_rate" in row]
    np.testing.assert_allclose(rates, [0.24, 0.16, 0.08], rtol=1e-6)
    trained = saved_model.TrainedRun(folder)
    task = task_lib.make(trained.config, trained.workdir, contextlib.nullcontext)
    kernel = trained.params["whiten"]["kernel"]
    np.testing.assert_array_equal(kernel, task.whitening)
    assert float(np.abs(kernel).max()) > 0.1
    with refuses("airbench94", error=ConfigError):
        task_lib.export(trained, tmp_path / "model.safetensors")


@pytest.mark.slow
def test_a_run_on_photographs_learns_and_resumes_bit_by_bit(folders, tmp_path):
    def run(name):
        config = config_of(folders, steps=2, checkpoint__every=1)
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


def test_training_says_what_a_folder_holds_besides(tmp_path):
    folder, said = mini_imagenet.write_folders(tmp_path / "in"), []
    for name in ("train/notes.txt", "val/.DS_Store", "labels.json"):
        (folder / name).write_bytes(b"")

    @contextlib.contextmanager
    def announce(message):
        said.append(message)
        yield

    task_lib.make(config_of(folder), tmp_path, announce)
    assert all(kind in said[-1] for kind in ("1 .txt", "1 hidden", "1 .json"))


def test_too_few_images_for_a_batch_are_refused(folders, tmp_path):
    with refused("batch_size", 32):
        tiny.run(config_of(folders, batch_size=32), tmp_path)
