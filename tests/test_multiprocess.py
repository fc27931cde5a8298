"""Four real processes on this machine, over gloo: the numbers of one process; one of them dies."""

import contextlib
import json
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
from several import cluster_flags, free_port

from decent_jax import topology, train
from decent_jax.errors import PEER_LOST
from decent_jax.topology.plan_file import Plan
from decent_jax.train import checkpoint

ROOT = Path(__file__).resolve().parents[1]
PROCESSES, STEPS = 4, 12
# A checkpoint in every step makes the steps long enough to die in.
FLAGS = [f"--config.steps={STEPS}", "--config.checkpoint.every=1", "--config.eval.every=6"]
FLAGS += ["--config.cluster.heartbeat_s=5", "--config.checkpoint.keep=3"]
FLAGS += ["--config.mesh.devices=0"]
CHANGES = {"steps": STEPS, "eval": {"every": 6}}
BOUND_S = 40  # seconds within which the others end after one has died

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


# What train.py does, several times in the same processes.
SEVERAL_RUNS = """
import json, sys
from decent_jax.train import flags, run

for argv in json.loads(sys.argv[1]):
    run(*flags.parse(argv + sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def start(tiny_data, tmp_path_factory, compile_once):
    """Starts the processes of one run or of several, and kills those that still run at the end."""
    folder = tmp_path_factory.mktemp("processes")
    path = tiny.write_config(folder / "config_file.py", tiny_data)
    started = []

    def start(*workdirs_and_flags, count=PROCESSES, environment=None):
        runs = [
            ["--config", str(path), *flags, "--workdir", str(workdir)]
            for workdir, flags in workdirs_and_flags
        ]
        program = [str(ROOT / "train.py"), *runs[0]]
        if len(runs) > 1:
            program = ["-c", SEVERAL_RUNS, json.dumps(runs)]
        port = free_port()
        group = []
        for index in range(count):
            with (folder / f"{len(started)}.txt").open("w") as words:
                process = subprocess.Popen(
                    [sys.executable, *program, *cluster_flags(port, count, index)],
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


LAYOUTS = {
    # Reduce-scatter, permutes of parts and all-gather, two replicas per node.
    "hierarchical": {"schedule": "hierarchical", "local_size": 2},
    # Bytes swapped in pairs.
    "int8": {"schedule": "hypercube", "comm_dtype": "int8"},
}
FEW_STEPS = 6


@pytest.fixture(scope="module")
def together(start, tmp_path_factory):
    """(folder of the runs, output of the processes): four processes train three times.

    In the first run, "whole", the replicas live where a plan puts them, out of the order of the
    processes.
    """
    folder = tmp_path_factory.mktemp("together")
    here = [f"{socket.gethostname()}/{k}" for k in (2, 0, 3, 1)]
    Plan(tuple(here), topology.make("one_peer_exp", 4)).save(folder / "plan.json")
    runs = [(folder / "whole", [*FLAGS, f"--config.cluster.plan={folder / 'plan.json'}"])]
    for name, changes in LAYOUTS.items():
        few = [*FLAGS, f"--config.steps={FEW_STEPS}", "--config.checkpoint.every=3"]
        runs.append((folder / name, few + [f"--config.{k}={v}" for k, v in changes.items()]))
    group = start(*runs)
    codes = finish(group, 300)
    words = [process.words.read_text() for process in group]
    assert codes == [0] * PROCESSES, "\n".join(words)
    return folder, words


@pytest.mark.parametrize("name", LAYOUTS)
def test_several_processes_give_the_losses_of_one(name, together, tiny_data, tmp_path):
    alone = tiny.config(tiny_data, steps=FEW_STEPS, eval={"every": 6}, **LAYOUTS[name])
    wanted = tiny.losses(tiny.run(alone, tmp_path / "alone"))
    np.testing.assert_allclose(tiny.losses(together[0] / name), wanted, rtol=1e-5)


def test_shards_of_replicas_in_two_processes(start, alone, tmp_path):
    """Four replicas of two devices each; the consensus model is evaluated over all eight."""
    flags = [*FLAGS, "--config.mesh.fsdp=2"]
    together = tmp_path / "together"
    group = start((together, flags), count=2, environment={"JAX_NUM_CPU_DEVICES": "4"})
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


def test_four_processes_give_the_model_of_one(together, alone):
    folder, words = together
    whole = folder / "whole"
    np.testing.assert_allclose(tiny.losses(whole), tiny.losses(alone), rtol=1e-5)
    for row, other in zip(tiny.rows(whole), tiny.rows(alone), strict=True):
        assert row.keys() == other.keys()
        if "eval/loss" in row:
            assert row["eval/loss"] == pytest.approx(other["eval/loss"], rel=1e-5)
    params, meta = checkpoint.restore_model(
        whole, "last"
    )  # as export and sample do, in one process
    assert meta["step"] == STEPS and all(map(np.all, map(np.isfinite, jax.tree.leaves(params))))
    # Only process 0 writes, and prints where every replica lives.
    assert "process 0 of 4 (coordinator localhost:" in words[0]
    for line in ("0         2        ", "3         1        "):
        assert line in words[0]
    for silent in words[1:]:
        assert "step 1/" not in silent and "validation" not in silent and "process" not in silent
    assert len(words[0].splitlines()) > 30


def test_one_of_four_processes_dies_and_all_resume(start, together, tmp_path):
    """The others end with a sentence; all start again, to the state of the undisturbed run."""
    whole = together[0] / "whole"
    flags = [*FLAGS, f"--config.cluster.plan={together[0] / 'plan.json'}"]
    folder = tmp_path / "run"
    group = start((folder, flags))
    wait_for_rows(group, folder, 4)
    group[2].send_signal(signal.SIGKILL)
    began = time.monotonic()
    codes = finish(group, BOUND_S)
    print(f"\nthe others ended after {time.monotonic() - began:.1f} s with {codes}")
    assert codes == [PEER_LOST, PEER_LOST, -signal.SIGKILL, PEER_LOST]
    sentence = f"train.py: process 2 ({socket.gethostname()}) was lost: no sign of life for 5 s; "
    for k in (0, 1, 3):
        last = group[k].words.read_text().splitlines()[-1]
        assert last == f"{sentence}the same command resumes from the last checkpoint"
        assert "Traceback" not in group[k].words.read_text()
    assert tiny.saved_steps(folder)[-1] < STEPS

    group = start((folder, flags))
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
    group = start((folder, FLAGS), count=2)
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
