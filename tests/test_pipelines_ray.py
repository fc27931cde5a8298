"""Pipelines on a real Ray: 2 stages x 2 replicas, resumed bit by bit, and killed."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tiny
from pipeline_threads import Threads
from test_pipelines import config_of

from decent_jax import saved_model, topology
from decent_jax.topology.plan_file import Plan

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4

CONFIG = """
import sys
sys.path.insert(0, {folder!r})
import test_pipelines

def get_config():
    return test_pipelines.config_of({data!r}, 2, 2, steps={steps}, **{changes!r})
"""
CHANGES = {
    "algorithm": "decentralized_sgd",
    "model": {"layers": 2, "dropout": 0.0},
    "checkpoint": {"every": "2", "keep": 3, "every_minutes": 0.0},
}


@pytest.fixture(scope="module")
def start(tmp_path_factory, tiny_data, compile_once, cache_folder):
    """``start(workdir, *flags)`` starts `train.py`."""
    path = tmp_path_factory.mktemp("pipelines") / "config.py"
    own = {"folder": str(ROOT / "tests"), "data": str(tiny_data), "changes": CHANGES}
    path.write_text(CONFIG.format(**own, steps=STEPS))
    env = os.environ | compile_once | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}

    def start(workdir, *flags):
        words = [sys.executable, "train.py", "--config", str(path), "--workdir", str(workdir)]
        with open(f"{workdir}.txt", "w") as output:
            process = subprocess.Popen(
                [*words, *flags], cwd=ROOT, env=env, stdout=output, stderr=output
            )
        process.words = Path(f"{workdir}.txt")
        return process

    return start


@pytest.fixture(scope="module")
def workdir(start, tmp_path_factory):
    """A run that has ended, placed by a plan for this machine."""
    workdir = tmp_path_factory.mktemp("run") / "whole"
    plan = workdir.with_name("plan.json")
    names = tuple(f"{socket.gethostname()}/{k}" for k in range(4))
    Plan(names, topology.make("one_peer_exp", 2), stages=2, layers=(1, 1)).save(plan)
    process = start(workdir, f"--config.cluster.plan={plan}")
    assert process.wait(200) == 0, process.words.read_text()
    return workdir


def arrays(workdir, step):
    found = {}
    for path in (workdir / "checkpoints" / str(step)).glob("*.npz"):
        with np.load(path) as stored:
            found |= {(path.name, name): stored[name] for name in stored.files}
    return found


def test_processes_train_as_threads_do_and_as_without_stages(workdir, tiny_data, tmp_path):
    with Threads(config_of(tiny_data, 2, 2, **CHANGES), tmp_path) as threads:
        span = threads.train(0, STEPS)[-1]
    rows = tiny.rows(workdir)
    wanted = [losses.mean() for losses in span.losses]
    np.testing.assert_allclose([row["train/loss"] for row in rows], wanted, rtol=1e-5)
    summary = tiny.summary(workdir)
    assert summary["steps"] == STEPS and summary["pipeline"]["layers"] == [1, 1]
    assert summary["final"]["eval/loss"] == pytest.approx(rows[-1]["eval/loss"])
    assert (workdir / "curves.png").exists()
    run = saved_model.Run(workdir)
    assert run.step == STEPS and run.params["h"].keys() == {"0", "1"}
    assert saved_model.Run(workdir, "best").params["wte"]["embedding"].shape == (256, 16)
    assert saved_model.load(workdir).step == STEPS


def test_a_resumed_run_has_the_same_bits(workdir, start, tmp_path):
    """As a kill behind the checkpoint of step 2 would have left the folder."""
    copy = tmp_path / "resumed"
    shutil.copytree(workdir, copy)
    for path in (copy / "checkpoints").iterdir():
        if int(path.name) > 2:
            shutil.rmtree(path)
    shutil.rmtree(copy / "best")
    process = start(copy)
    assert process.wait(200) == 0, process.words.read_text()
    assert "resuming after step 2" in process.words.read_text()
    ours, theirs = arrays(copy, STEPS), arrays(workdir, STEPS)
    assert ours.keys() == theirs.keys() and len({name for name, _ in ours}) == 4
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=str(name))
    assert tiny.losses(copy).tolist() == tiny.losses(workdir).tolist()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "was killed; the same"),
        (signal.SIGSTOP, "has been silent for cluster.heartbeat_s (8 s); the same"),
    ],
)
def test_a_lost_stage_is_named_and_nothing_is_left(number, words, start, tmp_path):
    process = start(tmp_path / "lost", "--config.steps=1000000", "--config.cluster.heartbeat_s=8")
    rows = tmp_path / "lost" / "metrics.jsonl"
    ends = time.monotonic() + 200
    while not (rows.exists() and rows.read_text()):
        assert time.monotonic() < ends and process.poll() is None, process.words.read_text()
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    cells = {}
    for child in children:
        with contextlib.suppress(psutil.Error, OSError):
            cells[Path(os.readlink(f"/proc/{child.pid}/fd/1")).name] = child
    os.kill(cells["0-1.txt"].pid, number)
    began = time.monotonic()
    while "train.py: " not in process.words.read_text():
        assert time.monotonic() < began + 8 + 8, "it is named later than heartbeat_s"
        time.sleep(0.1)
    assert process.wait(60) == 1
    assert f"train.py: stage 1 of replica 0 {words}" in process.words.read_text()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
