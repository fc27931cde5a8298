"""ResNets in files with torchvision's names, and the export of runs.

``tests/data/weights/resnet`` holds what torchvision makes of our files; a second forward pass here
knows nothing but the file.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import small_runs
import tiny
from datafiles import DATA
from networks import assert_close, numpy_resnet, shapes_of
from refusals import refuses

from decent_jax import train
from decent_jax.commands import export
from decent_jax.data.images import generated_images
from decent_jax.models import resnet, weights
from decent_jax.train import ConfigError, saved_model

pytestmark = pytest.mark.usefixtures("compile_once")
BOTTLENECK = resnet.ResNetConfig((1, 2), width=4, num_classes=5, dtype="float32")
BASIC = resnet.ResNetConfig((2, 1, 1), bottleneck=False, width=6, num_classes=3, dtype="float32")
SMALL = dataclasses.replace(BASIC, small_images=True)


IMAGES = np.random.default_rng(1).normal(size=(2, 33, 26, 3)).astype(np.float32)


def random_model(config, seed=0, spread=0.3):
    """Parameters and statistics, no two alike."""
    rng = np.random.default_rng(seed)
    params, statistics = jax.tree.map(
        lambda x: rng.normal(0, spread, x.shape).astype(np.float32), shapes_of(resnet, config)
    )
    # Positive, as variances are; means may be anything.
    return params, jax.tree.map(lambda x: np.abs(x) + 0.1, statistics)


def test_as_many_tensors_as_in_torchvision(tmp_path):
    """Their names are those that the forward pass below reads."""
    config = resnet.PRESETS["resnet50"]
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes_of(resnet, config))
    weights.save_resnet(tmp_path / "x.safetensors", *zeros, config, 3, {})
    stored = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert len(stored) == 320
    for name, x in stored.items():
        counts = name.endswith("num_batches_tracked")
        assert x.dtype == (np.int64 if counts else np.float32)
        assert not counts or x == 3


def test_architecture():
    changed = {"num_classes": 7, "dtype": "float32", "momentum": 0.5}
    for name, preset in resnet.PRESETS.items():
        wanted = None if name == "tiny" else name
        assert weights.architecture(dataclasses.replace(preset, **changed)) == wanted
    for other in ({"width": 32}, {"small_images": True}, {"blocks": (2, 2, 2)}):
        preset = resnet.PRESETS["resnet18"]
        assert weights.architecture(dataclasses.replace(preset, **other)) is None


@pytest.mark.parametrize("config", [BOTTLENECK, BASIC, SMALL], ids=["bottleneck", "basic", "small"])
def test_a_forward_pass_of_the_file_gives_our_logits(config, tmp_path):
    model = random_model(config)
    weights.save_resnet(tmp_path / "model.safetensors", *model, config, 0, {})
    ours = jax.jit(resnet.logits_of, static_argnums=0)(config, *model, IMAGES)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    wanted = numpy_resnet(tensors, IMAGES)
    assert np.abs(ours - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_our_logits_are_those_of_torchvision():
    """Of resnet18; ``tests/data/weights/make.py`` also found those of resnet50."""
    config = dataclasses.replace(resnet.PRESETS["resnet18"], dtype="float32")
    model = random_model(config, spread=0.05)
    ours = jax.jit(resnet.logits_of, static_argnums=0)(config, *model, IMAGES)
    with np.load(DATA / "weights/resnet/logits.npz") as wanted:
        assert_close(ours[:, :8], wanted["resnet18"])


# --- Export -------------------------------------------------------------------------------------


def images_config(policy):
    """A learning rate too high, so that the best is not the last."""
    return small_runs.config(
        "image_classification",
        **small_runs.RESNET,
        learning_rate=3e-2,
        lr_schedule__warmup=3,
        model__batch_norm_consensus=policy,
        model__batch_norm_batches=3,
        data__train_images=40,
        data__val_images=21,
        eval__every=1,
    )


@pytest.fixture(scope="module", params=["average", "recompute"])
def run(request, tmp_path_factory):
    """(folder, policy) of a run."""
    folder = tmp_path_factory.mktemp(request.param)
    return tiny.run(images_config(request.param), folder), request.param


@pytest.mark.slow
@pytest.mark.parametrize("which", ["last", "best"])
def test_what_is_exported_is_what_was_evaluated(run, which, tmp_path, capsys):
    workdir, _ = run
    path = tmp_path / "model.safetensors"
    arguments = ["--workdir", str(workdir), "--out", str(path), "--which", which]
    assert export.main(arguments) == 0
    assert capsys.readouterr().out == f"wrote {path} and {tmp_path / 'config.json'}\n"
    described = json.loads((tmp_path / "config.json").read_text())
    losses = {row["step"]: row["eval/loss"] for row in tiny.rows(workdir) if "eval/loss" in row}
    step = 4 if which == "last" else min(losses, key=losses.get)
    assert which == "last" or step < 4  # else the best would be the last
    assert (described["step"], described["which"]) == (step, which)
    assert described["architecture"] is None and described["small_images"]
    assert described["class_names"] == list(generated_images.CLASS_NAMES)
    assert (described["image_size"], described["resize"]) == (16, None)

    val = generated_images.GeneratedImages("val", 21, size=16)
    images = (val.images / 255 - described["mean"]) / described["std"]
    logits = numpy_resnet(safetensors.numpy.load_file(path), images)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -log_p[np.arange(21), val.labels].mean()
    assert loss == pytest.approx(losses[step], rel=1e-5)


@pytest.mark.slow
def test_without_the_images(run, tmp_path):
    """What is recomputed needs them; else only the names of the classes are missing."""
    workdir, policy = run
    text = (workdir / "config.json").read_text()
    config = json.loads(text)
    config["data"]["path"] = str(tmp_path / "gone")
    (workdir / "config.json").write_text(json.dumps(config))
    try:
        if policy == "recompute":
            with refuses("gone", error=ConfigError):
                saved_model.load(workdir)
        else:
            model = saved_model.load(workdir)
            assert model.class_names is None and model.config.num_classes == 10
    finally:
        (workdir / "config.json").write_text(text)


@pytest.mark.slow
def test_the_replicas_of_a_run(run):
    workdir, _ = run
    saved = saved_model.load_replicas(workdir)
    assert saved.step == 4
    stored = tiny.saved(workdir, 4)
    np.testing.assert_array_equal(saved.params["fc"]["bias"], stored["params.fc.bias"])
    mean = saved.model_state["bn1"]["mean"]
    np.testing.assert_array_equal(mean, stored["model_state.bn1.mean"])
    assert isinstance(mean, np.ndarray) and mean.shape == (2, 4)
    with refuses("step 7", error=train.CheckpointError):
        saved_model.load_replicas(workdir, 7)


def test_export_says_what_is_wrong(tmp_path, capsys):
    def said(workdir, out):
        assert export.main(["--workdir", str(workdir), "--out", str(out)]) == 2
        return capsys.readouterr().err

    out = tmp_path / "model.safetensors"
    run = tmp_path / "run"
    run.mkdir()
    assert "must end in .safetensors, got" in said(run, tmp_path / "model.bin")
    assert "name another folder" in said(run, run / "model.safetensors")
    assert "holds no run" in said(run, out)
    config = images_config("average")
    (run / "config.json").write_text(config.to_json())
    assert "holds no checkpoint" in said(run, out)
    config.task = "toys.waves"
    (run / "config.json").write_text(config.to_json())
    assert "task 'toys.waves', which cannot be exported" in said(run, out)
    assert not out.exists() and not (tmp_path / "config.json").exists()
