"""Pipelines on a real Ray: 2 stages x 2 replicas, killed, and resumed bit by bit."""

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import tiny
from pipeline_threads import Threads
from several import by_output, children_of, nothing_is_left, starting, until
from test_pipelines import config_of

from decent_jax import topology
from decent_jax.plan.plan_file import Plan
from decent_jax.train import saved_model

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4

CHANGES = {
    "algorithm": "decentralized_sgd",
    "model": {"layers": 2, "dropout": 0.0},
    "checkpoint": {"every": "2", "keep": 1000, "every_minutes": 0.0},
}


@pytest.fixture(scope="module")
def start(tmp_path_factory, tiny_data, compile_once, cache_folder):
    """``start(workdir, steps, *flags)`` starts `train.py`."""
    folder = tmp_path_factory.mktemp("pipelines")
    path = tiny.write(config_of(str(tiny_data), 2, 2, **CHANGES), folder / "config.py")
    env = compile_once | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    with starting(folder) as start_process:

        def start(workdir, steps, *flags):
            words = [ROOT / "train.py", "--config", path, "--workdir", workdir, *flags]
            return start_process([*words, f"--config.steps={steps}"], **env)

        yield start


@pytest.fixture(scope="module")
def killed(start, tmp_path_factory):
    """A run placed by a plan for this machine, of which a stage was killed after some steps."""
    workdir = tmp_path_factory.mktemp("run") / "killed"
    plan = workdir.with_name("plan.json")
    names = tuple(f"{socket.gethostname()}/{k}" for k in range(4))
    Plan(names, topology.make("one_peer_exp", 2), stages=2).save(plan)
    process = start(workdir, 1_000_000, f"--config.cluster.plan={plan}")
    until((workdir / "checkpoints" / str(STEPS + 2)).exists, process)
    children = children_of(process)
    by_output(process)[workdir / "workers" / "0-1.txt"].kill()
    assert process.wait(300) == 1
    return workdir, process.words.read_text(), children


@pytest.fixture(scope="module")
def workdir(killed, start):
    """The same, resumed to its end as if it had been killed behind the checkpoint of step 2."""
    workdir = killed[0].with_name("resumed")
    shutil.copytree(killed[0], workdir)
    for path in (workdir / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > 2:
            shutil.rmtree(path)
    process = start(workdir, STEPS)
    assert process.wait(500) == 0, process.words.read_text()
    assert "resuming after step 2" in process.words.read_text()
    return workdir


@pytest.mark.slow
def test_a_killed_stage_is_named_and_nothing_is_left(killed):
    _, words, children = killed
    assert "train.py: stage 1 of replica 0 was killed; the same" in words
    assert "resumes from the checkpoint of step" in words
    nothing_is_left(children)


def arrays(workdir, step):
    """{name: (n, ...)} of all stages."""
    parts = ("stage-0", "stage-1")
    return {f"{part} {k}": x for part in parts for k, x in tiny.saved(workdir, step, part).items()}


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(workdir, killed):
    ours, theirs = arrays(workdir, STEPS), arrays(killed[0], STEPS)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=str(name))
    assert tiny.losses(workdir).tolist() == tiny.losses(killed[0])[:STEPS].tolist()


def test_processes_train_as_threads_do_and_as_without_stages(workdir, tiny_data, tmp_path):
    with Threads(config_of(tiny_data, 2, 2, **CHANGES), tmp_path) as threads:
        span = threads.train(0, STEPS)[-1]
    rows = tiny.rows(workdir)
    wanted = [losses.mean() for losses in span.losses]
    np.testing.assert_allclose([row["train/loss"] for row in rows], wanted, rtol=1e-5)
    summary = tiny.summary(workdir)
    assert summary["steps"] == STEPS and summary["pipeline"]["layers"] == [1, 1]
    assert summary["final"]["eval/loss"] == pytest.approx(rows[-1]["eval/loss"])
    run = saved_model.TrainedRun(workdir)
    assert run.step == STEPS and run.params["h"].keys() == {"0", "1"}
    assert saved_model.TrainedRun(workdir, "best").params["wte"]["embedding"].shape == (256, 16)
    assert saved_model.load(workdir).step == STEPS
