"""Commands that are stopped, killed or find no room leave a checkpoint and a sentence."""

# ruff: noqa: F401, F811  (a fixture of another module)

import os
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tiny
from refusals import refuses
from several import children_of, finish, nothing_is_left, wait_for_rows
from test_checkpoint import CHANGES, STEPS, WAVES, assert_equals, config, whole

from decent_jax.checkpoints import on_disk
from decent_jax.commands import main
from decent_jax.train import CheckpointError, saver
from decent_jax.train import signals as signals_lib

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture
def command(tmp_path, start_process, compile_once):
    """Starts train.py with the config of this module; what still runs at the end is killed."""
    path = tiny.write_config(tmp_path / "config_file.py")

    def start(*flags, under=()):
        argv = [*under, ROOT / "train.py", "--config", path, "--workdir", tmp_path / "run"]
        argv += [f"--config.steps={STEPS}", "--config.eval.every=5", "--config.checkpoint.keep=3"]
        # Eight devices, as in the process of the tests: the same executables from the cache.
        environment = compile_once | {"JAX_NUM_CPU_DEVICES": "8"}
        return start_process([*argv, f"--config.model.waves={WAVES}", *flags], **environment)

    return start


@pytest.mark.slow
def test_the_command_is_stopped_and_killed_again_and_again(command, whole, tmp_path):
    """Signals save a checkpoint, also two, which its readers get as well; kill -9 saves none."""
    folder, steps = tmp_path / "run", random.Random(os.getpid())
    slow = ["--config.data.pause=0.2", "--config.checkpoint.every=1"]  # time for a signal to come
    slow += ["--config.data.workers=1"]
    process = command(*slow, "--config.checkpoint.every=0")
    wait_for_rows([process], folder, 3)
    os.kill(process.pid, signal.SIGSTOP)  # both arrive before a step can end
    for each in [*children_of(process), process]:  # as a terminal does; the readers first
        each.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    said = finish([process], [130])
    saved = tiny.saved_steps(folder)[-1]
    assert "Traceback" not in said and "leaked" not in said  # shared memory of batches
    sentence = f"interrupted after step {saved}; a checkpoint is saved, the same command resumes"
    assert f"train.py: {sentence}" in said.splitlines()

    process = command(*slow)
    wait_for_rows([process], folder, len(tiny.rows(folder)) + steps.randint(1, 3))
    readers = children_of(process)
    process.kill()
    assert f"resuming after step {saved}" in finish([process], [-signal.SIGKILL])
    nothing_is_left(readers)
    assert saved <= tiny.saved_steps(folder)[-1] < STEPS
    tiny.run(config(), folder)
    assert_equals(folder, whole)
    spent = tiny.summary(folder)["goodput"]["seconds"]
    assert spent["lost"] >= 0 and spent["recovery"] > 0 and spent["start"] > 0


NO_ROOM = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_disk_that_is_full_is_a_sentence(command, tmp_path):
    """No file may grow past 64 kB, as if there was no room for more."""
    flags = ["--config.steps=40", "--config.eval.every=0", "--config.checkpoint.every=15"]
    said = finish([command(*flags, "--config.data.pause=0.1", under=["-c", NO_ROOM])], [1])
    assert "step 15/40" in said and "step 29/40" not in said  # at once, not at the next save
    (said,) = [line for line in said.splitlines() if line.startswith("train.py: ")]
    assert said.startswith(f"train.py: a checkpoint could not be written to {tmp_path / 'run'}: ")
    assert "File too large" in said


def test_a_folder_that_was_moved_away_is_not_made_anew(tmp_path, monkeypatch):
    save = saver.Saver.save

    def move_first(self, *args):
        (tmp_path / "run").rename(tmp_path / "away")
        save(self, *args)

    monkeypatch.setattr(saver.Saver, "save", move_first)
    with refuses("gone", error=CheckpointError):
        tiny.run(config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_error_is_not_hidden_by_that_of_the_last_checkpoint():
    fails = Mock(side_effect=CheckpointError("the disk is full"))
    for error in (ZeroDivisionError, CheckpointError):
        with pytest.raises(error), saver.Saver(None, SimpleNamespace(close=fails)):
            1 / (error is CheckpointError)


@pytest.mark.parametrize("folder", [".", "checkpoints", "best"])
def test_a_folder_without_permission_is_a_sentence(tmp_path, monkeypatch, folder):
    """Found before orbax begins, whose threads would wait. Root may always write: so pretended."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "best").mkdir()
    (tmp_path / ".lock").touch()
    on_disk.check_there(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / folder)
    with refuses(tmp_path / folder, "permission", error=CheckpointError):
        on_disk.check_there(tmp_path)
    if folder != ".":
        (tmp_path / folder).rmdir()
        (tmp_path / folder).touch()
        with refuses(tmp_path / folder, "not a folder", error=CheckpointError):
            on_disk.check_there(tmp_path)


def test_a_reader_that_dies_is_one_sentence_and_a_checkpoint(command, tmp_path):
    folder = tmp_path / "run"
    process = command(
        "--config.data.workers=1", "--config.data.pause=0.2", "--config.checkpoint.every=0"
    )
    wait_for_rows([process], folder, 2)
    reader = next(each for each in children_of(process) if "spawn_main" in str(each.cmdline()))
    reader.kill()
    said = finish([process], [1])
    assert "SIGKILL" in said and "data.workers" in said and "Traceback" not in said
    assert tiny.saved_steps(folder)[-1] >= 2
    assert f"resumes from the checkpoint of step {tiny.saved_steps(folder)[-1]}" in said


@pytest.mark.parametrize(
    ("signals", "ends"),
    [
        ("TERM@0 TERM@0", False),
        ("INT@0 TERM@0 TERM@9", False),  # launch/again.sh answers a terminal's Ctrl-C
        ("INT@0 INT@1", False),  # as a shell and a supervisor both pass it on
        ("TERM@0 INT@9", False),
        ("HUP@0", False),  # a terminal that is closed
        ("TERM@0 TERM@60", False),
        ("INT@0 INT@1 INT@3", True),
        ("TERM@0 INT@9 INT@12", True),
    ],
)
def test_only_one_more_ctrl_c_some_seconds_later_ends_at_once(signals, ends, monkeypatch):
    """Without a checkpoint, and so not with the code of one."""
    now, codes = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(signals_lib, "time", clock)
    monkeypatch.setattr(os, "_exit", codes.append)
    with signals_lib.Signals() as received:
        for word in signals.split():
            name, _, at = word.partition("@")
            now[0] = float(at)
            signal.raise_signal(signal.Signals[f"SIG{name}"])
    first = signals.partition("@")[0].replace("HUP", "TERM")
    assert received.received == signal.Signals[f"SIG{first}"]
    assert codes == ([1] if ends else [])


def test_a_run_that_nohup_started_does_not_hear_its_terminal_close():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_lib.Signals() as received:
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received.received is None


def test_a_run_whose_standard_streams_are_closed(tmp_path, monkeypatch, compile_once):
    """As cron and some launchers leave them."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    flags = ["--config", str(tiny.write_config(tmp_path / "config_file.py"))]
    assert main.train([*flags, "--workdir", str(tmp_path / "run"), "--config.steps=3"], "x") == 0
    assert tiny.saved_steps(tmp_path / "run") == [3]
