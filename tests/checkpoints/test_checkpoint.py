"""Resuming: bit-identical after every kind of end; what happens to a damaged checkpoint.

Every interrupted run is compared with one uninterrupted run of the same config: parameters,
moments, the window of accumulated gradients (of 3 steps, so most checkpoints cut one), counts, and
the rows of metrics.jsonl. Dropout is on, so the random state is compared, too.
"""

import fcntl
import json
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from refusals import refuses

from decent_jax.cluster import watch
from decent_jax.cluster.supervise import PLACE
from decent_jax.monitor.goodput import Clock
from decent_jax.train import ConfigError, Interrupted, saved_model
from decent_jax.train.config import parse
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.synchronous import Synchronous
from decent_jax.train.workdir import open_workdir

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
WAVES = 5000  # so many that most bytes of a checkpoint are parameters and moments
CHANGES = {"steps": STEPS, "eval": {"every": 5}, "checkpoint": {"every": 4, "keep": 3}}
CHANGES |= {"model": {"waves": WAVES}}

pytestmark = pytest.mark.usefixtures("compile_once")


def config(**changes):
    """The config of this module with more changes."""
    merged = {name: dict(v) if isinstance(v, dict) else v for name, v in CHANGES.items()}
    for name, value in changes.items():
        merged[name] = merged.get(name, {}) | value if isinstance(value, dict) else value
    return tiny.waves(**merged)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compile_once):
    """The uninterrupted run."""
    return tiny.run(config(), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the finished run, as if it had been killed after ``step``."""

    def copy(step=STEPS):
        folder = tmp_path / "run"
        shutil.copytree(whole, folder)
        for later in [s for s in tiny.saved_steps(folder) if s > step]:
            shutil.rmtree(folder / "checkpoints" / str(later))
        return folder

    return copy


def assert_equals(folder, whole):
    """The same end, and the same rows, each step once."""
    tiny.assert_same_state(folder, whole, STEPS)
    assert tiny.measured(folder) == tiny.measured(whole)
    rows, wanted = tiny.rows(folder), tiny.rows(whole)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row.keys() for row in rows] == [row.keys() for row in wanted]
    ours, theirs = tiny.summary(folder), tiny.summary(whole)
    assert ours["final"] == theirs["final"] and ours["best_eval_loss"] == theirs["best_eval_loss"]
    assert best_steps(folder) == best_steps(whole)


def best_steps(folder):
    return [path.name for path in (folder / "best").iterdir() if path.name.isdigit()]


# --- resuming -------------------------------------------------------------------------------------


def interrupt(folder, step, **changes):
    """Trains until a signal comes after ``step`` steps."""
    there = tiny.saved_steps(folder) if (folder / "checkpoints").exists() else [0]
    signals = tiny.SignalAfter(step - there[-1], signal.SIGTERM)
    with pytest.raises(Interrupted):
        tiny.run(config(**changes), folder, signals=signals)
    assert tiny.saved_steps(folder)[-1] == step
    assert tiny.summary(folder)["interrupted"] is True


@pytest.mark.slow
def test_a_signal_then_the_same_command(whole, tmp_path, capsys):
    """Stopped twice, in the middle of a window of 3 steps."""
    folder = tmp_path / "run"
    interrupt(folder, 7)
    interrupt(folder, 14)
    window = tiny.saved(folder, 14)
    assert any(np.any(value) for name, value in window.items() if "window" in name)
    tiny.run(config(), folder)
    assert "resuming after step 14" in capsys.readouterr().err
    assert "interrupted" not in tiny.summary(folder)
    assert_equals(folder, whole)


def test_rows_of_steps_that_were_lost_are_replaced(copy, whole):
    """Killed after step 20 had been logged, before its checkpoint was there."""
    folder = copy(step=16)
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "train/lo')  # torn
    half = folder / "checkpoints" / ".18.draft"  # what a killed save leaves, and a killed removal
    shutil.copytree(folder / "checkpoints" / "16" / "state", half / "state")
    shutil.copytree(folder / "best" / "20" / "state", folder / "best" / ".15.old" / "state")
    tiny.run(config(), folder)
    assert_equals(folder, whole)
    assert not half.exists() and not list((folder / "best").glob(".*"))


def test_a_finished_run_is_left_alone_and_can_be_extended(copy, whole, tmp_path, capsys):
    """Nor do fewer steps than are done change it."""
    folder = copy()
    for steps in (STEPS, 10):
        tiny.run(config(steps=steps), folder)
        said = capsys.readouterr().err
        assert f"the run has already ended: 20 of {steps} steps are done" in said
        assert "compiling the step" not in said
        assert tiny.summary(folder)["steps"] == STEPS
        assert_equals(folder, whole)

    tiny.run(config(steps=26), folder)
    longer = tiny.run(config(steps=26), tmp_path / "longer")
    assert tiny.saved_steps(folder)[-1] == 26
    tiny.assert_same_state(folder, longer, 26)
    assert [row["step"] for row in tiny.rows(folder)] == list(range(1, 27))


def test_best_is_the_consensus_model_of_the_lowest_loss(tmp_path, monkeypatch):
    seen = iter([3.0, 1.0, 2.0, 4.0])
    consensus = Evaluator.consensus

    def made_up(self, *args):
        return consensus(self, *args) | {"loss": next(seen)}

    monkeypatch.setattr(Evaluator, "consensus", made_up)
    folder = tiny.run(config(checkpoint={"every": 5, "keep": 9}), tmp_path / "run")
    summary = tiny.summary(folder)
    assert (summary["best_eval_loss"], summary["final"]["eval/loss"]) == (1.0, 4.0)
    params, _, meta = saved_model.restore_model(folder, "best")
    assert meta["step"] == 10 and meta["eval_loss"] == 1.0
    stacked = tiny.saved(folder, 10)
    for path, leaf in jax.tree_util.tree_leaves_with_path({"params": params}):
        wanted = stacked[jax.tree_util.keystr(path, simple=True, separator=".")].mean(axis=0)
        np.testing.assert_allclose(leaf, wanted, atol=1e-7)
    assert saved_model.restore_model(folder, "last")[2]["step"] == STEPS


def test_the_best_so_far_is_forgotten_with_its_model(tmp_path, monkeypatch):
    """After the model of step 10 the run goes on from step 8, and then step 10 is not as good."""
    seen = iter([2.0, 1.0, 3.0, 4.0, 5.0])
    consensus = Evaluator.consensus

    def made_up(self, *args):
        return consensus(self, *args) | {"loss": next(seen)}

    monkeypatch.setattr(Evaluator, "consensus", made_up)
    interrupt(tmp_path, 11)
    shutil.rmtree(tmp_path / "checkpoints" / "11")
    tiny.run(config(), tmp_path)
    assert best_steps(tmp_path) == ["10"]
    assert tiny.summary(tmp_path)["best_eval_loss"] == 3.0


def test_checkpoints_by_time(tmp_path):
    """On a clock by which each step takes two minutes."""
    for minutes, wanted in ((4.0, [2, 4, 5]), (99.0, [5])):
        saving = {"every": 0, "every_minutes": minutes, "keep": 9}
        signals = tiny.SignalAfter(-1, signal.SIGTERM)  # which never comes
        clock = Clock(lambda signals=signals: 120.0 * signals.looks)
        settings = config(steps=5, checkpoint=saving)
        folder = tiny.run(settings, tmp_path / f"{minutes}", clock=clock, signals=signals)
        assert tiny.saved_steps(folder) == wanted


def test_more_steps_compile_nothing_more(tmp_path, programs):
    """A function that is jitted anew at every call would be compiled at every call."""
    changes = {"eval": {"every": 2}, "checkpoint": {"every": 2}}

    def compiled(steps):
        programs.clear()
        tiny.run(config(**changes, steps=steps), tmp_path / f"{steps}")
        return sorted(programs)

    compiled(3)  # what this process has not yet compiled
    assert compiled(4) == compiled(12)


# --- another number of replicas -------------------------------------------------------------------


def test_another_number_of_replicas_continues_from_the_mean(copy, monkeypatch, capsys):
    """More of them; test_supervise has fewer, with a smaller batch."""
    n = 8
    states, restore = [], Synchronous.restore

    def spy(runner):
        found = restore(runner)
        states.append(jax.tree_util.tree_leaves_with_path(jax.device_get(runner.state)))
        return found

    monkeypatch.setattr(Synchronous, "restore", spy)
    folder = copy(step=16)
    tiny.run(config(steps=16), folder)  # which are done: it is restored and that is all
    tiny.run(config(num_replicas=n), folder)
    said = capsys.readouterr().err
    assert f"the checkpoint has 4 replicas and this run {n}: every replica continues from" in said
    assert "an unfinished window of gradients is dropped" in said
    checked = set()
    for (path, old), (_, new) in zip(*states, strict=True):
        name = jax.tree_util.keystr(path)
        assert new.shape == (n, *old.shape[1:])
        if ".window" in name:
            wanted = np.zeros_like(old[0])
            checked |= {"window"} if old.any() else set()
        elif name == ".opt_state.inner[1][0].count":
            assert old.tolist() == [16] * 4
            wanted = 15  # of the last window that was whole
            checked.add("count")
        elif np.issubdtype(old.dtype, np.integer):
            wanted = old[0]
        else:
            wanted = old.mean(axis=0)
            checked |= {kind for kind in (".params", ".mu", ".nu") if kind in name}
        for replica in new:
            np.testing.assert_allclose(replica, wanted, rtol=1e-5, atol=1e-8, err_msg=name)
    assert checked == {".params", ".mu", ".nu", "window", "count"}
    summary = tiny.summary(folder)
    assert summary["steps"] == STEPS and summary["num_replicas"] == n
    assert np.isfinite(tiny.losses(folder)).all()


# --- another config, another run ------------------------------------------------------------------


def test_resuming_as_another_experiment_is_refused(copy):
    folder = copy()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    for changes, words in (
        ({"learning_rate": 0.02}, "learning_rate: 0.01 -> 0.02"),
        (
            {"optimizer": {"accum_steps": 4}, "combine": "atc"},
            "combine: '' -> 'atc'; optimizer.accum_steps: 3 -> 4",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            tiny.run(config(**changes), folder)
        sentence = str(refused.value)
        assert f"holds a run with another config ({words})" in sentence
        assert " change only num_replicas, " in sentence
    after = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    assert before.pop(folder / ".lock") and after.pop(folder / ".lock")
    assert after == before


def test_changes_that_are_allowed(copy):
    changes = {"schedule": "ring", "log": {"every": 2}}
    changes |= {"eval": {"every": 3}, "checkpoint": {"keep": 1}}
    folder = tiny.run(config(**changes), copy(step=16))
    assert json.loads((folder / "config.json").read_text())["schedule"] == "ring"
    assert tiny.saved_steps(folder) == [20]


def test_one_run_a_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").write_bytes(b"process 42 on \xff\xfe\n")  # of a host whose name is odd
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError) as refusal:
            tiny.run(config(), folder)
    assert refusal.value.field == "--workdir" and "process 42" in str(refusal.value)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_supervised_process_waits_for_the_one_whose_place_it_takes(tmp_path, monkeypatch):
    """A host without a network holds the folder until it notices that it is alone."""
    monkeypatch.setenv(PLACE, "spare")
    (tmp_path / ".lock").touch()
    held = (tmp_path / ".lock").open()
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr("decent_jax.train.workdir.time.sleep", lambda seconds: held.close())
    with open_workdir(tmp_path, parse(tiny.waves())):
        assert held.closed


@pytest.mark.parametrize("lacks", ["its folder", "its meta"])
def test_processes_go_on_from_a_step_that_all_can_read(tmp_path, monkeypatch, capsys, lacks):
    """Of step 4, another process does not see the folder yet, or cannot read what is in it."""
    tiny.run(config(steps=4, checkpoint={"every": 2}), tmp_path / "run")
    asked = []

    def gathered(value):
        if lacks == "its folder" and isinstance(value, list):
            return [value, [2]]
        if lacks == "its meta" and value is False and not asked:  # "I could not read it"
            asked.append(value)
            return [value, True]
        return [value]

    monkeypatch.setattr(watch, "gather", gathered)
    tiny.run(config(steps=8), tmp_path / "run")
    assert "resuming after step 2\n" in capsys.readouterr().err
    assert [row["step"] for row in tiny.rows(tmp_path / "run")] == list(range(1, 9))


def test_other_data_than_before_are_refused(tmp_path, monkeypatch):
    tiny.run(config(steps=4), tmp_path / "run")
    monkeypatch.setenv("EXTRA_POINTS", "-20")
    with refuses("the training data: 400 records", "step 4", "380 records", error=ConfigError):
        tiny.run(config(steps=8), tmp_path / "run")
    assert tiny.saved_steps(tmp_path / "run") == [4]
