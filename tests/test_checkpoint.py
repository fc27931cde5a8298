"""Resuming: bit-identical after every kind of end; what happens to a damaged checkpoint.

Every interrupted run is compared with one uninterrupted run of the same config: parameters,
moments, the window of accumulated gradients (of 3 steps, so most checkpoints cut one), counts, and
the rows of metrics.jsonl. Dropout is on, so the random state is compared, too.
"""

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from test_train import no_plot, send_signal_at  # noqa: F401

from decent_jax import train
from decent_jax.train import ConfigError, checkpoint, loop

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
CHANGES = {"steps": STEPS, "eval": {"every": 5}, "checkpoint": {"every": 4, "keep": 3}}

pytestmark = pytest.mark.usefixtures("compile_once", "no_plot")


@pytest.fixture
def config(tiny_data):
    def config(**changes):
        merged = {name: dict(v) if isinstance(v, dict) else v for name, v in CHANGES.items()}
        for name, value in changes.items():
            merged[name] = merged.get(name, {}) | value if isinstance(value, dict) else value
        return tiny.config(tiny_data, **merged)

    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_data, compile_once):
    """The uninterrupted run."""
    return tiny.run(tiny.config(tiny_data, **CHANGES), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the finished run, as if it had been killed after ``step``."""

    def copy(step=STEPS, name="run"):
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        for later in [s for s in tiny.saved_steps(folder) if s > step]:
            shutil.rmtree(folder / "checkpoints" / str(later))
        return folder

    return copy


def assert_equals(folder, whole):
    """The same end, and the same rows, each step once."""
    tiny.assert_same_state(folder, whole, STEPS)
    rows, wanted = tiny.rows(folder), tiny.rows(whole)
    assert [row["step"] for row in rows] == [row["step"] for row in wanted] == list(range(1, 21))
    for row, other in zip(rows, wanted, strict=True):
        for row_, other_ in ((row, other), (other, row)):
            for name, value in row_.items():
                assert name.startswith("perf/") or other_[name] == value, (row["step"], name)
    assert summary_of(folder)["final"] == summary_of(whole)["final"]
    assert summary_of(folder)["best_eval_loss"] == summary_of(whole)["best_eval_loss"]
    best = [sorted(p.name for p in (f / "best").iterdir()) for f in (folder, whole)]
    assert best[0] == best[1]


def data_files(folder, step, item):
    """The files of a checkpoint item, the largest first."""
    files = [p for p in (folder / "checkpoints" / str(step) / item).rglob("*") if p.is_file()]
    return sorted(files, key=lambda p: -p.stat().st_size)


def truncate(folder, step):
    path = data_files(folder, step, "params")[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_then_the_same_command(config, whole, tmp_path, monkeypatch, capsys):
    """Stopped twice, in the middle of a window of 3 steps."""
    for step in (7, 14):
        with monkeypatch.context() as patch:
            send_signal_at(patch, step, signal.SIGTERM)
            with pytest.raises(train.Interrupted, match=f"after step {step}; a checkpoint"):
                train.run(config(), tmp_path / "run")
        assert tiny.saved_steps(tmp_path / "run")[-1] == step
        assert summary_of(tmp_path / "run")["interrupted"] is True
    window = tiny.saved(tmp_path / "run", 14)
    assert any(np.any(value) for name, value in window.items() if "window" in name)
    train.run(config(), tmp_path / "run")
    assert "resuming after step 14" in capsys.readouterr().err
    assert "interrupted" not in summary_of(tmp_path / "run")
    assert_equals(tmp_path / "run", whole)


def test_rows_of_steps_that_were_lost_are_replaced(config, copy, whole):
    """Killed after step 20 had been logged, before its checkpoint was there."""
    folder = copy(step=16)
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "train/lo')  # torn
    train.run(config(), folder)
    assert_equals(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"devices": 4}, {"devices": 2, "loop": True}])
def test_resuming_on_other_devices(config, copy, whole, changes):
    folder = copy(step=16)
    train.run(config(mesh=changes), folder)
    np.testing.assert_allclose(tiny.losses(folder), tiny.losses(whole), rtol=1e-5)


def test_a_finished_run_is_left_alone_and_can_be_extended(config, copy, whole, tmp_path, capsys):
    folder = copy()
    summary = train.run(config(), folder)
    said = capsys.readouterr().err
    assert "the run has already ended: 20 of 20 steps are done" in said
    assert "compiling the step" not in said
    assert summary["final"] == summary_of(whole)["final"]
    assert_equals(folder, whole)

    train.run(config(steps=26), folder)
    train.run(config(steps=26), tmp_path / "longer")
    assert tiny.saved_steps(folder)[-1] == 26
    tiny.assert_same_state(folder, tmp_path / "longer", 26)
    assert [row["step"] for row in tiny.rows(folder)] == list(range(1, 27))


def test_fewer_steps_than_are_done_is_an_end_too(config, copy, capsys):
    folder = copy()
    summary = train.run(config(steps=10), folder)
    assert "the run has already ended: 20 of 10 steps are done" in capsys.readouterr().err
    assert summary["steps"] == 20
    assert tiny.saved_steps(folder)[-1] == 20
    assert tiny.rows(folder)[-1]["step"] == 20


def test_the_newest_checkpoints_and_the_best_are_kept(config, whole, tmp_path):
    assert tiny.saved_steps(whole) == [12, 16, 20]
    train.run(config(checkpoint={"keep": 1, "every": 1}, steps=5), tmp_path / "run")
    assert tiny.saved_steps(tmp_path / "run") == [5]


def test_best_models_of_steps_to_come_are_forgotten(config, copy, whole, monkeypatch):
    losses = {r["step"]: r["eval/loss"] for r in tiny.rows(whole) if "eval/loss" in r}
    assert losses[20] < losses[15]
    folder = copy(step=16)
    assert [p.name for p in (folder / "best").iterdir() if p.name.isdigit()] == ["20"]
    send_signal_at(monkeypatch, 17, signal.SIGTERM)
    with pytest.raises(train.Interrupted):
        train.run(config(), folder)
    assert not [p.name for p in (folder / "best").iterdir() if p.name.isdigit()]
    monkeypatch.undo()
    tiny.run(config(), folder)
    assert_equals(folder, whole)


def test_best_is_the_consensus_model_of_the_lowest_loss(config, tmp_path, monkeypatch):
    seen = iter([3.0, 1.0, 2.0, 4.0])
    consensus = loop.Evaluator.consensus

    def made_up(self, *args):
        return consensus(self, *args) | {"loss": next(seen)}

    monkeypatch.setattr(loop.Evaluator, "consensus", made_up)
    summary = train.run(config(checkpoint={"every": 5, "keep": 9}), tmp_path / "run")
    assert (summary["best_eval_loss"], summary["final"]["eval/loss"]) == (1.0, 4.0)
    params, meta = checkpoint.restore_model(tmp_path / "run", "best")
    assert meta["step"] == 10 and meta["eval_loss"] == 1.0
    stacked = tiny.saved(tmp_path / "run", 10)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        wanted = stacked["params" + jax.tree_util.keystr(path)].mean(axis=0)
        np.testing.assert_allclose(leaf, wanted, atol=1e-7)
    _, meta = checkpoint.restore_model(tmp_path / "run", "last")
    assert meta["step"] == 20


def test_checkpoints_by_time(config, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.Checkpointer, "minutes_since_save", lambda self: 2.0)
    changes = {"every": 0, "every_minutes": 1.5, "keep": 9}
    train.run(config(steps=3, checkpoint=changes), tmp_path / "run")
    assert tiny.saved_steps(tmp_path / "run") == [1, 2, 3]
    changes["every_minutes"] = 3.0
    train.run(config(steps=3, checkpoint=changes), tmp_path / "other")
    assert tiny.saved_steps(tmp_path / "other") == [3]


@pytest.mark.slow
def test_averages_past_the_bound_are_repeated_by_a_resumed_run(config, tmp_path, monkeypatch):
    """The bound is acted on at the step it is measured at, whether or not a checkpoint is due."""
    changes = {"max_consensus_distance": 1e-3, "checkpoint": {"every": 0}, "log": {"every": 1}}
    train.run(config(**changes), tmp_path / "whole")
    send_signal_at(monkeypatch, 3, signal.SIGTERM)
    with pytest.raises(train.Interrupted):
        train.run(config(**changes), tmp_path / "run")
    monkeypatch.undo()
    tiny.run(config(**changes), tmp_path / "run")
    tiny.assert_same_state(tmp_path / "run", tmp_path / "whole", STEPS)


@pytest.mark.slow
def test_a_moving_average_can_begin_and_end_in_a_resumed_run(config, copy, whole):
    folder = copy(step=16)
    summary = train.run(config(eval={"ema_decay": 0.5}), folder)
    assert summary["final"]["eval/ema_loss"] != summary["final"]["eval/loss"]
    np.testing.assert_array_equal(tiny.losses(folder), tiny.losses(whole))
    summary = train.run(config(steps=22), folder)
    assert "eval/ema_loss" not in summary["final"]


# --- another number of replicas -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 8])
def test_another_number_of_replicas_continues_from_the_mean(config, copy, n, monkeypatch, capsys):
    folder = copy(step=16)
    before = tiny.saved(folder, 16)
    states = []
    restore = loop._Trainer._restore_or_init

    def spy(trainer):
        step = restore(trainer)
        states.append(jax.device_get(trainer.state))
        return step

    monkeypatch.setattr(loop._Trainer, "_restore_or_init", spy)
    summary = train.run(config(num_replicas=n), folder)
    said = capsys.readouterr().err
    assert f"the checkpoint has 4 replicas and this run {n}: every replica continues from" in said
    assert "an unfinished window of gradients is dropped" in said
    state = states[0]._asdict()
    params = {"params": state.pop("params"), "rest": state}
    checked = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        name = name.replace("['params']", "params", 1).replace("['rest']", "rest", 1)
        for attribute in ("inner", "mu", "nu", "window", "count", "skipped", "failing"):
            name = name.replace(f".{attribute}", f"['{attribute}']")
        old, leaf = before[name], np.asarray(leaf)
        assert leaf.shape == (n, *old.shape[1:])
        if "window" in name:
            wanted = np.zeros_like(old[0])
            checked.add("window" if old.any() else "")
        elif name == "rest['opt_state']['inner'][1][0]['count']":
            assert old.tolist() == [16] * 4
            wanted = 15  # of the last window that was whole
            checked.add("count")
        elif np.issubdtype(old.dtype, np.integer):
            wanted = old[0]
        else:
            wanted = old.mean(axis=0)
            checked |= {kind for kind in ("params", "mu", "nu") if kind in name}
        for replica in leaf:
            np.testing.assert_allclose(replica, wanted, rtol=1e-5, atol=1e-8, err_msg=name)
    assert {"params", "mu", "nu", "window", "count"} <= checked
    assert summary["steps"] == STEPS and summary["num_replicas"] == n
    losses = tiny.losses(folder)
    assert np.isfinite(losses).all() and losses[17] < losses[0] - 1


def test_skipped_updates_keep_their_sum_when_replicas_change(config, copy, whole, capsys):
    """The count of 4 replicas is not multiplied by the new number, nor told as new."""
    folder = copy(step=16)

    def spoiled(self, step, like, placement, original=checkpoint.Checkpointer._restore):
        state, meta = original(self, step, like, placement)
        skipped = jax.device_put(np.array([0, 3, 0, 1], np.int32), state.opt_state.skipped.sharding)
        return state._replace(opt_state=state.opt_state._replace(skipped=skipped)), meta

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, "_restore", spoiled)
        train.run(config(num_replicas=2), folder)
    assert tiny.rows(folder)[-1]["train/skipped_updates"] == 4
    assert "not finite" not in capsys.readouterr().err


# --- another config, another run ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 0.02}, "learning_rate: 0.01 -> 0.02"),
        ({"seed": 3}, "seed: 0 -> 3"),
        ({"batch_size": 16}, "batch_size: 8 -> 16"),
        ({"algorithm": "all_reduce"}, "algorithm: 'accum_adam' -> 'all_reduce'"),
        ({"accum_steps": 4, "combine": "then"}, "accum_steps: 3 -> 4; combine: '' -> 'then'"),
        ({"model": {"width": 32}}, "model.width: 16 -> 32"),
        ({"optimizer": {"b1": 0.8}}, "optimizer.b1: 0.9 -> 0.8"),
        ({"lr_schedule": {"warmup": "5%"}}, "lr_schedule.warmup: 2 -> '5%'"),
    ],
    ids=str,
)
def test_resuming_as_another_experiment_is_refused(config, copy, changes, words):
    folder = copy()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError) as refused:
        train.run(config(**changes), folder)
    sentence = str(refused.value)
    assert f"holds a run with another config ({words}); take another --workdir" in sentence
    assert "change only num_replicas, schedule, local_size, " in sentence
    after = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    assert {p: t for p, t in after.items() if p.name != ".lock"} == {
        p: t for p, t in before.items() if p.name != ".lock"
    }


def test_changes_that_are_allowed(config, copy):
    folder = copy(step=16)
    changes = {"schedule": "ring", "log": {"every": 2}, "max_failing_steps": 7}
    changes |= {"eval": {"every": 3}, "checkpoint": {"keep": 1}}
    train.run(config(**changes), folder)
    assert json.loads((folder / "config.json").read_text())["schedule"] == "ring"
    assert tiny.saved_steps(folder) == [20]


def test_one_run_a_folder(config, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / ".lock").open("a+") as lock:
        lock.write("process 42 on elsewhere\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError) as refused:
            train.run(config(), folder)
    assert str(refused.value) == (
        f"another run (process 42 on elsewhere) is writing to {folder}; wait for it or take "
        "another --workdir"
    )
    assert [path.name for path in folder.iterdir()] == [".lock"]


# --- the command, killed --------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, tiny_data, compile_once):
    """Starts train.py with the config of this module; what still runs at the end is killed."""
    path = tiny.write_config(tmp_path / "config_file.py", tiny_data)
    started = []

    def start(workdir, *flags, under=()):
        argv = [*under, sys.executable, str(ROOT / "train.py"), "--config", str(path)]
        argv += ["--workdir", str(workdir), f"--config.steps={STEPS}", "--config.eval.every=5"]
        argv += ["--config.checkpoint.every=4", "--config.checkpoint.keep=3", *flags]
        # Eight devices, as in the process of the tests: the same executables from the cache.
        environment = os.environ | compile_once | {"JAX_NUM_CPU_DEVICES": "8"}
        process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        process.stderr.close()


def wait_for_rows(process, workdir, count, timeout=120):
    """Until metrics.jsonl has ``count`` rows."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if (workdir / "metrics.jsonl").read_text().count("\n") >= count:
                return
        time.sleep(0.01)
    raise AssertionError(f"{process.poll()}: {process.stderr.read()}")


def finish(process):
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return process.returncode, err


SLOW_STEPS = "--config.checkpoint.every=1"  # a checkpoint a step: time to be hit by a signal


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_saves_at_a_signal_and_resumes(command, config, whole, tmp_path, number, code):
    folder = tmp_path / "run"
    process = command(folder, SLOW_STEPS)
    wait_for_rows(process, folder, 3)
    process.send_signal(number)
    returned, err = finish(process)
    assert returned == code, err
    said = err.splitlines()[-1]
    step = tiny.saved_steps(folder)[-1]
    assert step < STEPS
    assert said == (
        f"train.py: interrupted after step {step}; a checkpoint is saved, the same command resumes"
    )
    train.run(config(), folder)
    assert_equals(folder, whole)


@pytest.mark.slow
def test_kill_9_again_and_again_then_the_same_result(command, config, whole, tmp_path):
    folder, steps = tmp_path / "run", random.Random(os.getpid())
    process = command(folder, SLOW_STEPS)
    wait_for_rows(process, folder, steps.randint(3, 10))
    process.kill()
    process.wait()
    before = tiny.saved_steps(folder)
    code, err = finish(command(folder))
    assert code == 0, err
    assert not before or f"resuming after step {before[-1]}" in err
    assert_equals(folder, whole)


@pytest.mark.slow
def test_ctrl_c_twice_leaves_at_once(command, tmp_path):
    """The first is remembered until the step is done; the second does not wait."""
    folder = tmp_path / "run"
    process = command(folder, "--config.steps=1000000", "--config.log.every=1")
    wait_for_rows(process, folder, 1)
    os.kill(process.pid, signal.SIGSTOP)  # both arrive before a step can end
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    began = time.monotonic()
    process.wait(timeout=30)
    assert time.monotonic() - began < 5
    assert process.returncode in (-signal.SIGINT, -signal.SIGTERM)


@pytest.mark.slow
def test_the_command_says_that_no_checkpoint_can_be_read(command, copy):
    folder = copy()
    for step in (12, 16, 20):
        truncate(folder, step)
    code, err = finish(command(folder))
    assert code == 1
    (said,) = [line for line in err.splitlines() if line.startswith("train.py: ")]
    assert said.startswith(f"train.py: no checkpoint in {folder / 'checkpoints'} can be read: step")


@pytest.mark.slow
def test_a_disk_that_is_full_is_a_sentence(command, tmp_path):
    """No file may grow past 16 kB, as if there was no room for more."""
    process = command(tmp_path / "run", under=["bash", "-c", 'ulimit -f 16; exec "$@"', "bash"])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    (said,) = [line for line in err.splitlines() if line.startswith("train.py: ")]
    assert said.startswith(f"train.py: a checkpoint could not be written to {tmp_path / 'run'}: ")
    assert "File too large" in said


def test_a_workdir_that_is_a_file(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--workdir .*file cannot be written: File exists"):
        train.run(config(), tmp_path / "file")
    with pytest.raises(ConfigError, match=r"--workdir .*run cannot be written: Not a directory"):
        train.run(config(), tmp_path / "file" / "run")


def test_a_workdir_that_may_not_be_written(config, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"--workdir .*run cannot be written: Permission denied"):
        train.run(config(), tmp_path / "run")
