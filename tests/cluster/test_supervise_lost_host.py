"""Supervised runs that lose a process or a host with its memory, and go on."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
from several import by_output, free_port, lives, until, wait_for_rows
from test_supervise import ROOT, SUPERVISE

from decent_jax.checkpoints import in_memory
from decent_jax.train import saved_model


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_is_killed_and_all_go_on_from_memory_then_one_is_left_out(
    start_process, tmp_path, compile_once
):
    """At the second death, before any progress, half of the replicas end."""
    path, workdir = tiny.write_config(tmp_path / "config_file.py"), tmp_path / "run"
    changes = {"num_replicas": 4, "batch_size": 8, "schedule": "static_exp", "steps": 16}
    changes |= {"recovery.every": 2, "checkpoint.every": 0, "log.every": 1, "mesh.devices": 0}
    changes["data.pause"] = 0.25  # time to die in
    flags = ["--config", path, "--workdir", workdir]
    flags += [f"--config.{name}={value}" for name, value in changes.items()]
    supervise = [*SUPERVISE, 2, "--again", 0, "--", ROOT / "train.py"]
    process = start_process([*supervise, *flags], **compile_once)
    wait_for_rows([process], workdir, 5)
    second = workdir / "process-1.log"
    by_output(process)[second].kill()
    until(lambda: "resuming after step" in process.words.read_text(), process)
    by_output(process)[second].kill()
    assert process.wait(timeout=300) == 0, process.words.read_text()[-3000:]
    words = process.words.read_text()
    assert "Traceback" not in words and words.count("died of SIGKILL") == 2
    resumed = list(map(int, re.findall(r"resuming after step (\d+)", words)))
    assert 3 <= resumed[0] <= resumed[1] < 16
    assert not any(step % 2 for step in resumed)  # copies, not checkpoints
    summary = tiny.summary(workdir)
    assert (summary["num_replicas"], summary["processes"], summary["steps"]) == (2, 1, 16)
    assert [row["step"] for row in tiny.rows(workdir)] == list(range(1, 17))
    # The data goes on where the last copy was: no example is left out.
    meta = saved_model.load_replicas(workdir, 16).meta
    assert meta["examples"] == 8 * resumed[1] + 4 * (16 - resumed[1])
    assert not list(Path("/dev/shm").glob(f"*/{in_memory.folder_of(workdir).parent.name}"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_is_lost_with_its_memory_and_a_spare_one_takes_its_place(
    start_process, tmp_path, compile_once
):
    """Its replicas come from the memory of the next host: nothing is lost."""
    path, workdir = tiny.write_config(tmp_path / "config_file.py"), tmp_path / "run"
    changes = {"num_replicas": 4, "batch_size": 8, "schedule": "static_exp", "steps": 9}
    changes |= {"checkpoint.every": 0, "log.every": 1, "mesh.devices": 0}
    changes |= {"recovery.every": 2, "recovery.mirror": True, "data.pause": 0.25}
    tiny.run(tiny.waves(steps=9, schedule="static_exp"), tmp_path / "undisturbed")
    flags = ["--config", path, "--workdir", workdir]
    flags += [f"--config.{name}={value}" for name, value in changes.items()]
    hosts = ["--hosts", "a=localhost,b=localhost", "--spares", "c=localhost", "--via"]
    hosts += [f"""sh -c 'test ! -e {tmp_path}/{{host}} && eval "$0"'"""]
    supervise = [*SUPERVISE[:-1], *hosts, "--port", free_port(), "--", ROOT / "train.py"]
    process = start_process([*supervise, *flags], **compile_once)
    wait_for_rows([process], workdir, 5)
    lost = by_output(process)[workdir / "process-1.log"]
    (tmp_path / "b").touch()
    lost.parent().kill()
    until(lambda: not lives(lost), process)  # it may be writing a copy
    memory = Path("/dev/shm", f"decent_jax-{os.getuid()}", in_memory.folder_of(workdir).parent.name)
    shutil.rmtree(memory / "b")
    assert process.wait(timeout=300) == 0, process.words.read_text()[-3000:]
    words = process.words.read_text()
    assert "Traceback" not in words and "c takes the place of b" in words
    assert int(re.findall(r"resuming after step (\d+)", words)[0]) >= 3
    assert tiny.summary(workdir)["num_replicas"] == 4
    losses = tiny.losses(workdir), tiny.losses(tmp_path / "undisturbed")
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert not memory.exists()
