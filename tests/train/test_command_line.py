"""The command line of train.py, config files, those of configs/: how mistakes are answered."""

import errno
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import tiny
from refusals import refused
from several import finish, until
from test_config import main, one_sentence, train_py  # noqa: F401 (a fixture)

from decent_jax import train
from decent_jax.ground import fields, json_files
from decent_jax.train import config as config_lib
from decent_jax.train import flags, loop
from decent_jax.train import step as step_lib

ROOT = Path(__file__).resolve().parents[2]


def test_a_full_disk_names_the_folder(call, tmp_path, monkeypatch):
    """What was written to a file that was open does not say which."""

    def write(runner, work):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loop, "train", write)
    code, err = call()
    assert code == 1 and one_sentence(err[err.index("train.py: ") :]) == (
        "OSError: [Errno 28] No space left on device, with --workdir "
        f"{tmp_path / 'run'}; once fixed, the same command resumes"
    )


def test_a_flag_takes_any_spelling_of_a_bool(tiny_data, tmp_path):
    path = tiny.write_config(tmp_path / "c.py", tiny_data)
    argv = ["--config", str(path), "--workdir", "w", "--config.steps=7", "--config.seed=3"]
    argv += [
        "--config.model.bias=TRUE",
        "--config.mesh.sequential_replicas=0",
        "--config.eval.every=5%",
    ]
    argv += ["--config.data.prompt=a = b", "--config.checkpoint.every=2 epochs"]
    config, workdir = flags.parse(argv)
    assert (config.steps, config.seed, workdir) == (7, 3, "w")
    assert (config.model.bias, config.mesh.sequential_replicas) == (True, False)
    assert (config.eval.every, config.checkpoint.every) == ("5%", "2 epochs")
    assert config.data.prompt == "a = b"
    config_lib.validate(config)


MADE = "from decent_jax import train as t\ndef get_config(): c = t.default_config(); {}; return c"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def get_config(): raise KeyError('boom')", "broken.py: KeyError: boom$"),
        ("def get_config(): return {'steps': 3}", r"get_config\(\) must return a ConfigDict, got"),
        ("x = 1", r"has no function get_config\(\)"),
        ("def get_config(:", r"SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(7)", "SystemExit: 7"),
        ("raise GeneratorExit", "GeneratorExit"),
        (
            "class Mute(Exception):\n def __str__(self): raise self\nraise Mute",
            "Mute: it cannot be printed",
        ),
        (
            "from ml_collections import ConfigDict as C\ndef get_config(): return C({1: {2: 3}})",
            "the config has no field",
        ),
        (
            MADE.format("c.stepz = 3"),
            'AttributeError: Key "stepz" does not exist .*locked. Did you mean "steps" instead of',
        ),
        (
            "from ml_collections import ConfigDict as C\ndef get_config(): return C({'steps': 3})",
            "the config has no field '.*'; start from default_config",
        ),
        (MADE.format("c.unlock(); c.log = c"), "the config contains itself"),
        (
            "from ml_collections.config_dict import required_placeholder as p\n"
            + MADE.format("c.unlock(); c.steps = p(int)"),
            "the config has a placeholder",
        ),
    ],
)
def test_a_config_file_that_does_not_work(call, tmp_path, source, message):
    path = tmp_path / "broken.py"
    path.write_text(source)
    code, err = call(config=path)
    assert code == 2
    assert re.search(message, one_sentence(err)), err


TASK = """
import line_task
from line_task import *  # noqa
"""


def test_a_config_file_imports_the_modules_beside_it(call, tmp_path, monkeypatch):
    """A task among them may be called by its bare name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.chdir(ROOT)
    (tmp_path / "my_settings.py").write_text("STEPS = 7")
    (tmp_path / "my_task.py").write_text(TASK)
    source = "import my_settings\nfrom decent_jax import train\n"
    source += "def get_config(): return train.default_config('my_task')"
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.py"
    link.symlink_to(tmp_path / "mine.py")
    config = flags.load(str(link))
    assert config.task == "my_task" and sys.modules["my_settings"].STEPS == 7
    assert os.environ["PYTHONPATH"].split(os.pathsep) == ["elsewhere", str(tmp_path)]  # for actors
    with refused("task", "my_tusk"):
        config_lib.default_config("my_tusk")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--workdir w", "--config"),
        ("--config /no/file.py", "/no/file.py"),
        ("--config CONFIG", "--workdir"),
        ("--config CONFIG --config.steps", "--config.NAME=VALUE"),
        ("--config CONFIG:fast --workdir w", "get_config() takes 0 positional"),
        ("--config TEXT --workdir w", "get_config()"),
    ],
)
def test_a_command_line_that_does_not_work(tiny_data, tmp_path, capsys, argv, words):
    path, text = tiny.write_config(tmp_path / "c.py", tiny_data), tmp_path / "notes.txt"
    text.write_text("")
    argv = [arg.replace("CONFIG", str(path)).replace("TEXT", str(text)) for arg in argv.split()]
    assert main(argv) == 2
    assert words in one_sentence(capsys.readouterr().err)
    assert not Path("w").exists()


def test_show_prints_every_field_and_help_the_way(tiny_data, tmp_path, capsys):
    path = str(tiny.write_config(tmp_path / "c.py", tiny_data))
    with pytest.raises(SystemExit) as left:
        main(["--config", path, "--config.steps=77", "--show"])
    assert left.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    values = [line.partition("  # ")[0].rstrip() for line in shown]
    assert "steps = 77" in values and "model.dtype = 'float32'" in values
    # What docs/config.md has, too: meaning, bounds, and whether a resumed run may change it.
    steps = "(at least 0; a resumed run may change it)"
    assert any(line.endswith(f"  # updates of each replica {steps}") for line in shown)
    assert any("combine" in line and "('awc', 'atc', '')" in line for line in shown)
    assert len(shown) == len(json_files.flat(train.default_config()))
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    words = capsys.readouterr().out
    assert "--config.NAME=VALUE" in words and "--workdir" in words and "resume" in words


# --- the files of configs/ ------------------------------------------------------------------------


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
    assert config.optimizer.accum_steps == 8 and config.model.label_smoothing == 0.1


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
    assert window is None or config.optimizer.accum_steps == window
    rate = step_lib.learning_rate(config, config.steps, 4000, [])
    for step in (0, 1999, 3999, 99_999):  # the published formula
        factor = 0.99 * (step + 1) / 4000 + 0.01 if step < 4000 else (4000 / (step + 1)) ** 0.5
        assert float(rate(step)) == pytest.approx(peak * factor, rel=1e-5)
    local = flags.load(f"{ROOT}/configs/{name}.py:{arguments},runlocal")
    config_lib.validate(local)
    assert (local.data.path, local.algorithm) == ("numbers", config.algorithm)
    with refused("--config FILE:ARGUMENTS"):
        flags.load(f"{ROOT}/configs/{name}.py:{arguments},huge")


SLOW_CONFIG = """
import hashlib, os, sys, time

def get_config():
    child = os.fork()  # its signals are its own
    if not child:
        time.sleep(600)
    os.kill(child, 15)
    os.waitpid(child, 0)
    print("begun", flush=True)
    {wait}
"""


@pytest.mark.parametrize(
    "wait",
    ["time.sleep(600)", "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"],
    ids=["in Python", "in C"],
)
def test_a_run_that_sigterm_ends_before_it_begins_says_so(wait, tmp_path, start_process):
    path = tmp_path / "slow.py"
    path.write_text(SLOW_CONFIG.format(wait=wait))
    run = start_process([ROOT / "train.py", "--config", path, "--workdir", tmp_path / "run"])
    until(lambda: "begun" in run.words.read_text(), run)
    run.send_signal(signal.SIGTERM)
    words = finish([run], [143], 60).splitlines()
    assert words[-1].startswith("train.py: interrupted") and "Traceback" not in " ".join(words)
    assert not (tmp_path / "run").exists()


def test_the_handlers_of_a_caller_are_its_own_again(call):
    before = signal.getsignal(signal.SIGTERM)
    assert call("--config.no_such=3")[0] == 2
    assert signal.getsignal(signal.SIGTERM) is before
