"""Tasks of other packages: found, trained, loaded, exported; and what is no task."""

import json

import pytest
import small_runs
import tiny
from refusals import refused
from test_checkpoint_damage import flip_bits

from decent_jax import tasks
from decent_jax.commands import export, sample, translate
from decent_jax.ground.errors import ConfigError
from decent_jax.train import config as config_lib
from decent_jax.train import saved_model


def line_config(task, **changes):
    changes = {"steps": 2, "learning_rate": 0.1, "lr_schedule__warmup": 0} | changes
    return small_runs.config(task, **changes)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """`line_task` as ``lines.task``, a module of a package that decent_jax does not know."""
    package = tmp_path / "lines"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "task.py").write_text("from line_task import *  # noqa\n")
    (package / "empty.py").write_text("FIELDS = {}\n")
    (package / "list.py").write_text("FIELDS = ['model.x']\nvalidate = make = print\n")
    (package / "number.py").write_text("FIELDS = {}\nvalidate, make = 5, print\n")
    (package / "broken.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    return "lines.task"


def test_a_task_of_another_package(outside, tmp_path, capsys):
    """Two steps, from 0 towards 3; then its functions answer the commands."""
    run = tiny.run(line_config(outside), tmp_path / "run")
    losses = [row["eval/loss"] for row in tiny.rows(run) if "eval/loss" in row]
    slope = saved_model.load(run)
    assert 0 < slope < 3
    assert losses[-1] < 9 * sum(i * i for i in range(64)) / 64**3  # that of slope 0
    assert json.loads((run / "summary.json").read_text())["points"] == 64
    assert f"y = {slope:.2f} x" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    path = export.export(run, tmp_path / "out" / "line.safetensors")
    assert float(path.read_text()) == slope
    assert json.loads(path.with_name("config.json").read_text()) == {"step": 2}
    for command, refusal in ((sample, "continue a prompt"), (translate, "translate")):
        assert command.main(["--workdir", str(run)]) == 2
        assert f"of the task 'lines.task', which cannot {refusal}" in capsys.readouterr().err


def test_a_damaged_model_is_not_exported(outside, tmp_path, capsys):
    run = tiny.run(line_config(outside), tmp_path / "run")
    out = tmp_path / "out" / "line.safetensors"
    for which, folder in (("best", run / "best" / "2"), ("last", run / "checkpoints" / "2")):
        flip_bits(folder)
        capsys.readouterr()
        arguments = ["--workdir", str(run), "--which", which, "--out", str(out)]
        assert export.main(arguments) == 2
        assert f"no checkpoint in {folder.parent} can be read: step 2" in capsys.readouterr().err
        assert not out.exists()


def test_a_registered_name(outside):
    tasks.register("line", outside)
    config = line_config("line")
    config_lib.validate(config)
    assert tasks.find("line") is tasks.find(outside) and config.data.points == 64


def test_a_task_says_what_may_change(outside):
    old = config_lib.flat(line_config(outside))
    assert config_lib.refused_changes(old, old | {"data.shown": 2, "data.prefetch": 0}) == []
    assert config_lib.refused_changes(old, old | {"data.points": 8}) == ["data.points: 64 -> 8"]


WRONG = ("chess", "lines.chess", "no_package.chess", "lines.empty", "lines.list", "lines.number")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_task(outside, name):
    with refused("task", name):
        tasks.find(name)


def test_an_import_that_fails_inside_a_task_is_not_hidden(outside):
    with pytest.raises(ConfigError) as refusal:
        tasks.find("lines.broken")
    assert "a_module_that_is_missing" in str(refusal.value)
