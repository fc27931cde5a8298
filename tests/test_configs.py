"""The files of configs/: they load, their arms are as published, and they may be varied."""

from pathlib import Path

import pytest
import tiny
from refusals import refused

from decent_jax.ground import fields
from decent_jax.train import config as config_lib
from decent_jax.train import flags
from decent_jax.train import step as step_lib

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_every_config_loads_and_is_valid_but_for_its_data(path, tiny_data):
    config = flags.load(str(path))
    made = ("stdlib", "generated", "numbers")
    if not Path(config.data.path).is_dir() and config.data.path not in made:
        config.data.path = "numbers" if config.task == "translation" else str(tiny_data)
        if config.task == "language_modeling":
            config.model.context = tiny.CONTEXT
    config_lib.validate(config)
    words = path.read_text()
    assert words.startswith('"""') and "Source" in words.split('"""')[1]


IMAGENET_ARMS = {
    "resnet50_imagenet": ("accum_adam", "decentralized_adam", "all_reduce", "momentum_sgd"),
    "resnet50_imagenet_expgraph": ("one_peer_exp", "static_exp", "ring", "all_reduce"),
    "clothing_images": ("all_reduce", "accum_adam", "accum_adam_ring", "momentum_sgd"),
}


@pytest.mark.parametrize(
    ("name", "arm"), [(name, arm) for name, arms in IMAGENET_ARMS.items() for arm in arms]
)
def test_the_arms_of_the_image_configs(name, arm, tmp_path):
    config = flags.load(f"{ROOT}/configs/{name}.py:{arm}")
    config.data.path = str(tmp_path)
    config_lib.validate(config)
    assert (config.algorithm == "all_reduce") == (arm == "all_reduce")
    assert not config.optimizer.decoupled  # L2, as published
    if name != "clothing_images":
        local = flags.load(f"{ROOT}/configs/{name}.py:{arm},runlocal")
        config_lib.validate(local)
        assert local.algorithm == config.algorithm
    with refused("--config FILE:ARGUMENTS", "sgd"):
        flags.load(f"{ROOT}/configs/{name}.py:sgd")


def test_the_published_settings_of_resnet50():
    """REFERENCE.md, E2: per-step cosine to 1e-5 over 112,590 steps, decay 2^-15, labels 0.1."""
    config = flags.load(f"{ROOT}/configs/resnet50_imagenet.py:accum_adam")
    epoch = -(-1_281_167 // config.batch_size)
    steps = round(config.epochs * epoch)
    assert (epoch, steps) == (1252, 112_680)  # the reference leaves out the last, partial batch
    warmup = fields.in_steps("warmup", config.lr_schedule.warmup, epoch, steps)
    rate = step_lib.learning_rate(config, steps, warmup, [])
    assert warmup == 5 * epoch
    assert float(rate(warmup)) == pytest.approx(1.5e-3)
    assert float(rate(steps)) == pytest.approx(1e-5)
    assert config.optimizer.weight_decay == 1 / 32768
    assert config.optimizer.window == 8 and config.model.label_smoothing == 0.1


def test_the_learning_rate_of_the_exponential_graph_paper():
    config = flags.load(f"{ROOT}/configs/resnet50_imagenet_expgraph.py:one_peer_exp")
    epoch = 1252
    drops = config_lib.drops_in_steps(config, epoch, 90 * epoch)
    assert drops == [30 * epoch, 60 * epoch, 80 * epoch]
    rate = step_lib.learning_rate(config, 90 * epoch, 5 * epoch, drops)
    for at, wanted in ((0, 0.4 / (5 * epoch)), (5 * epoch - 1, 0.4), (30 * epoch - 1, 0.4)):
        assert float(rate(at)) == pytest.approx(wanted)
    for at, wanted in ((30 * epoch, 0.04), (60 * epoch, 0.004), (80 * epoch, 0.0004)):
        assert float(rate(at)) == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["transformer_wmt14_ende", "transformer_wmt14_enfr"])
@pytest.mark.parametrize(
    ("arguments", "peak", "betas", "window"),
    [
        ("all_reduce", 7e-4, (0.9, 0.98), None),
        ("decentralized_adam,8", 2.0e-3, (0.974, 0.999), None),
        ("decentralized_adam", 2.8e-3, (0.974, 0.999), None),
        ("decentralized_adam,32", 3.8e-3, (0.974, 0.999), None),
        ("8,accum_adam", 8e-4, (0.9, 0.999), 4),
        ("accum_adam", 7e-4, (0.9, 0.999), 8),
    ],
)
def test_the_published_settings_of_wmt14(name, arguments, peak, betas, window):
    """REFERENCE.md, E1."""
    config = flags.load(f"{ROOT}/configs/{name}.py:{arguments}")
    assert config.model.preset == ("big" if name.endswith("fr") else "base")
    assert config.learning_rate == peak
    assert (config.optimizer.b1, config.optimizer.b2) == betas
    assert window is None or config.optimizer.window == window
    rate = step_lib.learning_rate(config, config.steps, 4000, [])
    for step in (0, 1999, 3999, 99_999):  # the published formula
        factor = 0.99 * (step + 1) / 4000 + 0.01 if step < 4000 else (4000 / (step + 1)) ** 0.5
        assert float(rate(step)) == pytest.approx(peak * factor, rel=1e-5)
    local = flags.load(f"{ROOT}/configs/{name}.py:{arguments},runlocal")
    config_lib.validate(local)
    assert (local.data.path, local.algorithm) == ("numbers", config.algorithm)
    with refused("--config FILE:ARGUMENTS"):
        flags.load(f"{ROOT}/configs/{name}.py:{arguments},huge")
