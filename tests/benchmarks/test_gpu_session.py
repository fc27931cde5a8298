"""The script for a GPU that is there for some minutes: what it does without one."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_session.sh"
PARTS = ["checks", "small", "fast", "resnet", "report"]


def start(*arguments, **variables):
    return subprocess.run(
        [SCRIPT, *arguments], env=os.environ | variables, capture_output=True, text=True
    )


@pytest.mark.parametrize("data", [[], ["nowhere"]], ids=["no data", "data that is not there"])
def test_wrong_arguments_begin_nothing(tmp_path, data):
    done = start(tmp_path / "out", *[tmp_path / name for name in data])
    assert done.returncode == 2 and done.stderr
    assert not (tmp_path / "out" / "parts.tsv").exists()


def test_no_part_begins_after_the_time(tmp_path):
    done = start(tmp_path, "--tiny", GPU_SESSION_S="0")
    assert done.returncode == 1
    lines = (tmp_path / "parts.tsv").read_text().splitlines()
    assert [line.split("\t") for line in lines] == [[name, "not begun", "0"] for name in PARTS]


def test_parts_that_fail_do_not_stop_the_others(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    done = start(tmp_path / "out", "--tiny", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    lines = (tmp_path / "out" / "parts.tsv").read_text().splitlines()
    assert [line.split("\t")[:2] for line in lines] == [[name, "3"] for name in PARTS]


def lives(number):
    """Whether this process runs; one that nobody has waited for yet does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_nothing_of_a_part_outlives_its_time(tmp_path):
    stubborn = tmp_path / "python"
    stubborn.write_text(f"#!/bin/sh\ntrap '' TERM\necho $$ >> {tmp_path}/started\nsleep 60\n")
    stubborn.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = start(tmp_path / "out", "--tiny", PATH=path, GPU_SESSION_S="1")
    assert done.returncode == 1
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 1 and not lives(started[0])
    assert (tmp_path / "out" / "parts.tsv").read_text().count("not begun") == 4
