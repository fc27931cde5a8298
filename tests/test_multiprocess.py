"""Four real processes on this machine, over gloo: the numbers of one process; one of them dies."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from decent_jax import topology, train
from decent_jax.errors import PEER_LOST
from decent_jax.topology.plan_file import Plan
from decent_jax.train import checkpoint

ROOT = Path(__file__).resolve().parents[1]
PROCESSES, STEPS = 4, 20
# A checkpoint a step makes the steps long enough to die in.
FLAGS = [f"--config.steps={STEPS}", "--config.checkpoint.every=1", "--config.eval.every=10"]
FLAGS += ["--config.cluster.heartbeat_s=10", "--config.checkpoint.keep=3"]
FLAGS += ["--config.mesh.devices=0"]
CHANGES = {"steps": STEPS, "eval": {"every": 10}}
BOUND_S = 40  # by which the others have ended after one has died

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture
def start(tiny_data, tmp_path, compile_once):
    """Starts the processes of one run; all that is left of them at the end is killed."""
    path = tiny.write_config(tmp_path / "config_file.py", tiny_data)
    started = []

    def start(workdir, count=PROCESSES, flags=FLAGS, environment=None):
        port = free_port()
        group = []
        for index in range(count):
            argv = [sys.executable, str(ROOT / "train.py"), "--config", str(path), *flags]
            argv += ["--workdir", str(workdir), f"--config.cluster.coordinator=localhost:{port}"]
            argv += [f"--config.cluster.num_processes={count}"]
            argv += [f"--config.cluster.process_id={index}"]
            with (tmp_path / f"{len(started)}.txt").open("w") as words:
                process = subprocess.Popen(
                    argv,
                    env=os.environ | compile_once | (environment or {}),
                    stdout=words,
                    stderr=words,
                )
            process.words = Path(words.name)
            started.append(process)
            group.append(process)
        return group

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def finish(group, timeout):
    """Exit codes; every process must end in time."""
    end = time.monotonic() + timeout
    return [process.wait(timeout=max(end - time.monotonic(), 0.1)) for process in group]


def wait_for_rows(group, workdir, count, timeout=240):
    end = time.monotonic() + timeout
    while time.monotonic() < end and all(process.poll() is None for process in group):
        with contextlib.suppress(FileNotFoundError):
            if (workdir / "metrics.jsonl").read_text().count("\n") >= count:
                return
        time.sleep(0.01)
    raise AssertionError("\n".join(process.words.read_text()[-3000:] for process in group))


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny_data, compile_once):
    """The run of one process with one device."""
    return tiny.run(tiny.config(tiny_data, **CHANGES), tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize(
    "changes",
    [
        # Reduce-scatter, permutes of parts and all-gather, two replicas a node.
        {"schedule": "hierarchical", "local_size": 2},
        # Bytes swapped in pairs.
        {"schedule": "hypercube", "comm_dtype": "int8"},
    ],
    ids=str,
)
def test_several_processes_give_the_losses_of_one(changes, start, tiny_data, tmp_path):
    steps = 6
    alone = tiny.config(tiny_data, steps=steps, eval={"every": 3}, **changes)
    wanted = tiny.losses(tiny.run(alone, tmp_path / "alone"))
    flags = [*FLAGS, f"--config.steps={steps}", "--config.eval.every=3"]
    flags += [f"--config.{name}={value}" for name, value in changes.items()]
    group = start(tmp_path / "together", flags=flags)
    codes = finish(group, 300)
    assert codes == [0] * PROCESSES, "\n".join(process.words.read_text() for process in group)
    np.testing.assert_allclose(tiny.losses(tmp_path / "together"), wanted, rtol=1e-5)


def test_shards_of_replicas_in_two_processes(start, alone, tmp_path):
    """Four replicas of two devices each; the consensus model is evaluated over all eight."""
    flags = [*FLAGS, "--config.mesh.fsdp=2"]
    together = tmp_path / "together"
    group = start(together, count=2, flags=flags, environment={"JAX_NUM_CPU_DEVICES": "4"})
    codes = finish(group, 300)
    words = [process.words.read_text() for process in group]
    assert codes == [0, 0], "\n".join(words)
    assert "a replica is sharded over 2 devices" in words[0]
    np.testing.assert_allclose(tiny.losses(together), tiny.losses(alone), rtol=1e-5)
    for row, other in zip(tiny.rows(together), tiny.rows(alone), strict=True):
        if "eval/loss" in row:
            assert row["eval/loss"] == pytest.approx(other["eval/loss"], rel=1e-5)
    params, meta = checkpoint.restore_model(together, "last")
    wanted, _ = checkpoint.restore_model(alone, "last")
    assert meta["step"] == STEPS
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_four_processes_and_the_death_of_one(start, alone, tmp_path):
    """The losses of one process; one dies, the others end; all start again, to the same end.

    The replicas live where a plan puts them, out of the order of the processes.
    """
    here = [f"{socket.gethostname()}/{k}" for k in (2, 0, 3, 1)]
    Plan(tuple(here), topology.make("one_peer_exp", 4)).save(tmp_path / "plan.json")
    flags = [*FLAGS, f"--config.cluster.plan={tmp_path / 'plan.json'}"]
    whole = tmp_path / "whole"
    group = start(whole, flags=flags)
    codes = finish(group, 300)
    words = [process.words.read_text() for process in group]
    assert codes == [0] * PROCESSES, "\n".join(words)
    np.testing.assert_allclose(tiny.losses(whole), tiny.losses(alone), rtol=1e-5)
    for row, other in zip(tiny.rows(whole), tiny.rows(alone), strict=True):
        assert row.keys() == other.keys()
        if "eval/loss" in row:
            assert row["eval/loss"] == pytest.approx(other["eval/loss"], rel=1e-5)
    params, meta = checkpoint.restore_model(
        whole, "last"
    )  # as export and sample do, in one process
    assert meta["step"] == STEPS and all(map(np.all, map(np.isfinite, jax.tree.leaves(params))))
    # One writes, and says where every replica lives.
    assert "process 0 of 4 (coordinator localhost:" in words[0]
    for line in ("0         2        ", "3         1        "):
        assert line in words[0]
    for silent in words[1:]:
        assert "step 1/" not in silent and "validation" not in silent and "process" not in silent
    assert len(words[0].splitlines()) > 30

    folder = tmp_path / "run"
    group = start(folder, flags=flags)
    wait_for_rows(group, folder, 4)
    group[2].send_signal(signal.SIGKILL)
    began = time.monotonic()
    codes = finish(group, BOUND_S)
    print(f"\nthe others ended after {time.monotonic() - began:.1f} s with {codes}")
    assert codes == [PEER_LOST, PEER_LOST, -signal.SIGKILL, PEER_LOST]
    sentence = f"train.py: process 2 ({socket.gethostname()}) was lost: no sign of life for 10 s; "
    for k in (0, 1, 3):
        last = group[k].words.read_text().splitlines()[-1]
        assert last == f"{sentence}the same command resumes from the last checkpoint"
        assert "Traceback" not in group[k].words.read_text()
    assert tiny.saved_steps(folder)[-1] < STEPS

    group = start(folder, flags=flags)
    codes = finish(group, 300)
    words = "\n".join(process.words.read_text() for process in group)
    assert codes == [0] * PROCESSES, words
    assert "resuming after step" in words
    tiny.assert_same_state(folder, whole, STEPS)
    assert [row["step"] for row in tiny.rows(folder)] == list(range(1, STEPS + 1))
    np.testing.assert_array_equal(tiny.losses(folder), tiny.losses(whole))


def test_sigterm_to_one_of_two_saves_in_both(start, tmp_path, tiny_data):
    """The processes agree to stop and save one checkpoint; a single process resumes it."""
    folder = tmp_path / "run"
    group = start(folder, count=2)
    wait_for_rows(group, folder, 4)
    group[1].send_signal(signal.SIGTERM)
    codes = finish(group, 120)
    words = "\n".join(process.words.read_text() for process in group)
    assert codes == [143, 143], words
    assert "Traceback" not in words
    step = tiny.saved_steps(folder)[-1]
    assert f"interrupted after step {step}; a checkpoint is saved" in words
    summary = train.run(tiny.config(tiny_data, **CHANGES, checkpoint={"keep": 3}), folder)
    assert summary["steps"] == STEPS


def test_a_coordinator_that_is_not_there(start, tmp_path):
    """A process that waits in vain says so and ends with an error, in the time it was given."""
    lonely = start(tmp_path / "run", flags=[*FLAGS, "--config.cluster.timeout_s=2"])[:2]
    lonely[0].kill()
    assert lonely[1].wait(timeout=120) == 2
    assert "train.py: process 0 " in lonely[1].words.read_text()
    assert not (tmp_path / "run").exists()
