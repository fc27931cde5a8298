"""The script for a GPU that is there for some minutes: what it does without one."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest
from several import lives

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_session.sh"
PARTS = ["checks", "small", "fast", "resnet", "report"]


@pytest.fixture
def start(tmp_path):
    """Runs the script with another ``python``; returns its exit code and the rows of its table."""

    def run(*arguments, python, **variables):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{python}\n")
        path.chmod(0o755)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables
        command = [SCRIPT, tmp_path / "out", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        table = tmp_path / "out" / "parts.tsv"
        lines = table.read_text().splitlines() if table.exists() else []
        assert done.returncode == 0 or done.stderr or lines
        return done.returncode, [line.split("\t")[:2] for line in lines]

    return run


def test_parts_that_fail_do_not_stop_the_others_and_wrong_arguments_begin_nothing(start, tmp_path):
    for data in ([], [tmp_path / "nowhere"]):
        assert start(*data, python="exit 3") == (2, [])
    assert start("--tiny", python="exit 3") == (1, [[name, "3"] for name in PARTS])


@pytest.mark.slow
def test_nothing_of_a_part_outlives_its_time_and_no_other_begins_then(start, tmp_path):
    stubborn = f"trap '' TERM\necho $$ >> {tmp_path}/started\nsleep 60"
    code, rows = start("--tiny", python=stubborn, GPU_SESSION_S="1")
    assert code == 1 and rows[1:] == [[name, "not begun"] for name in PARTS[1:]]
    [started] = (tmp_path / "started").read_text().split()
    assert not any(one.pid == int(started) and lives(one) for one in psutil.process_iter())
