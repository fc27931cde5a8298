"""The command line of train.py, and config files: what works, and how mistakes are answered."""

import errno
import os
import re
import sys
from pathlib import Path

import pytest
import tiny
from refusals import refused
from test_config import main, one_sentence, train_py  # noqa: F401 (a fixture)

from decent_jax import train
from decent_jax.ground import json_files
from decent_jax.train import config as config_lib
from decent_jax.train import flags, loop

ROOT = Path(__file__).resolve().parents[1]


def test_a_full_disk_names_the_folder(call, tmp_path, monkeypatch):
    """What was written to a file that was open does not say which."""

    def write(runner, work):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loop, "train", write)
    code, err = call()
    assert code == 1 and one_sentence(err[err.index("train.py: ") :]) == (
        "OSError: [Errno 28] No space left on device, with --workdir "
        f"{tmp_path / 'run'}; once mended, the same command continues"
    )


def test_a_flag_takes_any_spelling_of_a_bool(tiny_data, tmp_path):
    path = tiny.write_config(tmp_path / "c.py", tiny_data)
    argv = ["--config", str(path), "--workdir", "w", "--config.steps=7", "--config.seed=3"]
    argv += ["--config.model.bias=TRUE", "--config.mesh.loop=0", "--config.eval.every=5%"]
    argv += ["--config.data.prompt=a = b", "--config.checkpoint.every=2 epochs"]
    config, workdir = flags.parse(argv)
    assert (config.steps, config.seed, workdir) == (7, 3, "w")
    assert (config.model.bias, config.mesh.loop) == (True, False)
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
            "the config has no field '.*'; begin with default_config",
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
FIELDS, validate, make = line_task.FIELDS, line_task.validate, line_task.make
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
    config = flags.load(str(tmp_path / "mine.py"))
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
    assert any("combine" in line and "('with', 'then', '')" in line for line in shown)
    assert len(shown) == len(json_files.flat(train.default_config()))
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    words = capsys.readouterr().out
    assert "--config.NAME=VALUE" in words and "--workdir" in words and "resume" in words
