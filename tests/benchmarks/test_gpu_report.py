"""The report and the session of a GPU, at the size of a rehearsal and without one."""

import argparse
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from several import lives

from benchmarks.speed import gpu_report


@pytest.mark.slow
def test_a_plain_loop_beside_ours():
    first, *others = gpu_report.PARTS["resnet50"](argparse.Namespace(tiny=True))
    assert first["of_plain_optax"] == 1 and others
    for row in others:
        (unit,) = (key for key in row if key.endswith("_per_s"))
        assert row["of_plain_optax"] == pytest.approx(first[unit] / row[unit])


PYTHON = """#!/bin/sh
case "$*" in
    *machine*) echo 'a warning'; echo '{"device": "X", "jax": "1"}' ;;
    *"--only gpt2"*) echo '{"name": "plain", "ms": 1.23456}'; echo 'no row' ;;
    *"--only update"*) echo '{"name": "half", "ms": 2}'; echo 'out of | memory' >&2; exit 3 ;;
    *) exec sleep 100 ;;
esac
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """In place of the processes of parts."""
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(path))


@pytest.mark.usefixtures("python")
def test_a_part_that_fails_keeps_its_rows_and_does_not_stop_the_others(tmp_path):
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--parts", "update,gpt2", "--minutes", "1"]
    assert gpu_report.main(arguments) == 1
    rows = [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]
    assert rows[0] == {"device": "X", "jax": "1"}
    assert [(row["part"], row.get("name")) for row in rows[1:]] == [
        *(("update", "half"), ("update", None), ("gpt2", "plain"))
    ]
    page = (out / "report.md").read_text()
    assert rows[2]["failure"] in page and "out of | memory" in rows[2]["failure"]
    assert "| plain | 1.235 |" in page.splitlines()
    assert gpu_report.main(["--out", str(out), "--parts", "gpt2"]) == 0


@pytest.mark.usefixtures("python")
def test_a_part_that_takes_too_long_is_ended(tmp_path):
    """And one for which no time is left does not begin."""
    parsed = SimpleNamespace(out=tmp_path, tiny=True)
    (row,) = gpu_report.run_part("trace", parsed, 1, "")
    assert row["part"] == "trace" and row["failure"]
    (row,) = gpu_report.run_part("update", parsed, -1, "")  # which would leave a row
    assert row["part"] == "update" and row["failure"]


# --- gpu_session.sh, for a GPU that is there for some minutes -------------------------------------

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
