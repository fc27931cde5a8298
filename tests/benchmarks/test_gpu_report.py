"""The report of a GPU, at the size of a rehearsal and without one: its rows and its page."""

import argparse
import json
from types import SimpleNamespace

import jax
import pytest

from benchmarks.speed import gpu_report


def rows_of(name):
    return list(gpu_report.PARTS[name](argparse.Namespace(tiny=True)))


def test_formats_of_messages():
    rows = {row["name"]: row for row in rows_of("formats")}
    assert {"bfloat16", "int8", "int4"} <= set(rows)
    numbers = 8 * 768
    assert rows["bfloat16"]["gigabytes"] == pytest.approx(2 * numbers / 1e9)
    assert rows["int4"]["gigabytes"] < rows["int8"]["gigabytes"] < 1.1 * numbers / 1e9
    assert all(row["encode_ms"] > 0 and row["decode_ms"] > 0 for row in rows.values())


@pytest.mark.slow
def test_a_plain_loop_beside_ours():
    first, *others = rows_of("resnet50")
    assert first["of_plain_optax"] == 1 and others
    for row in others:
        (unit,) = (key for key in row if key.endswith("_per_s"))
        assert row["of_plain_optax"] == pytest.approx(first[unit] / row[unit])


def test_a_row_has_the_median_and_the_share_of_the_peak(monkeypatch):
    variant = SimpleNamespace(seconds=[9.0, 1.0, 2.0], units=100, compile_s=[3.0, 4.0])
    monkeypatch.setattr(gpu_report, "peak", lambda devices: 500.0)
    row = gpu_report.row_of("a", variant, "tokens", 2.0, jax.devices())
    wanted = {"name": "a", "ms": 2000, "tokens_per_s": 50, "mfu": 0.2, "compile_s": 7}
    assert row == pytest.approx(wanted)


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


@pytest.mark.parametrize("wrong", [["--parts", "gpt3"], ["--minutes", "0"], ["--parts", ""]])
def test_wrong_arguments_begin_nothing(tmp_path, wrong):
    with pytest.raises(SystemExit) as left:
        gpu_report.main(["--out", str(tmp_path / "out"), *wrong])
    assert left.value.code == 2 and not (tmp_path / "out").exists()
