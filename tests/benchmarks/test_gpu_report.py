"""benchmarks/gpu_report.py checks itself on CPUs, with tiny models."""

import argparse
import importlib
import json
import subprocess
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
UPDATES = [
    f"{name}, {how}" for name in ("adamw", "accum_adamw") for how in ("guarded", "unguarded")
]
NAMES = {
    "update": ["copy", *UPDATES],
    "gpt2": ["plain optax", "all_reduce", "gossip", "gossip, 8 replicas", "gossip, 64 sequences"],
    "formats": ["bfloat16", "float8", "int8", "int4"],
    "resnet50": ["plain optax", "all_reduce"],
    "trace": ["gossip"],
    "messages": ["no messages", "one_peer_exp", "all_reduce", "one_peer_exp 0", "hypercube 0"],
}


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_report")


@pytest.mark.parametrize("part", NAMES)
def test_a_part_measures_all_that_it_names(report, part, tmp_path):
    rows = list(report.PARTS[part](argparse.Namespace(tiny=True, out=tmp_path)))
    assert [row["name"] for row in rows] == NAMES[part]
    assert all(x > 0 for row in rows for name, x in row.items() if name != "name")
    by_name = {row["name"]: row for row in rows}
    if part == "update":  # 0.1 million numbers are read and written
        assert by_name["copy"]["gigabytes"] == pytest.approx(2 * 4 * 1e5 / 1e9, rel=0.03)
    if part == "formats":  # of float32: with a number per row of 768 and more
        sent = [by_name[name]["gigabytes"] for name in ("bfloat16", "int8", "int4")]
        assert [sent[0] / x for x in sent] == pytest.approx([1, 2, 4], rel=0.02)
    if part in ("gpt2", "resnet50"):
        plain = by_name["plain optax"]["ms"]
        ratios = [row["of_plain_optax"] for row in rows]
        examples = [4.0 if row["name"] == "gossip, 64 sequences" else 1.0 for row in rows]
        times = [row["ms"] / each for row, each in zip(rows, examples, strict=True)]
        assert ratios == pytest.approx([ms / plain for ms in times])
    if part == "trace":
        assert any(path.suffix == ".pb" for path in (tmp_path / "trace").rglob("*"))


def test_the_time_per_token_is_that_of_the_model_and_the_peak(report, monkeypatch):
    monkeypatch.setattr(report, "peak", lambda devices: 1e6)

    class Step:
        seconds, units, compile_s = [3.0, 0.5, 0.4], 100, [1.0, 2.0]

    row = report.row_of("a", Step, "tokens", 2000.0, [])
    assert row == {"name": "a", "ms": 500, "tokens_per_s": 200, "mfu": 0.4, "compile_s": 3.0}


PART = """
import sys
print('{"name": "a", "ms": 1.5}', flush=True)
if "formats" in sys.argv:
    sys.exit("out of memory")
"""


def test_a_part_that_fails_or_has_no_time_left_is_named_and_the_others_go_on(
    report, tmp_path, monkeypatch, capsys
):
    stand_in = tmp_path / "part.py"
    stand_in.write_text(PART)
    monkeypatch.setattr(report, "__file__", str(stand_in))
    machine = subprocess.CompletedProcess([], 0, '{"device": "a card"}\n')
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda argv, **kw: machine if argv[1] == "-c" else run(argv, **kw)
    )
    assert report.main(["--out", str(tmp_path), "--parts", "formats,gpt2"]) == 1
    rows = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert rows[0] == {"device": "a card"}
    assert [row["part"] for row in rows[1:]] == ["formats", "formats", "gpt2"]
    assert "out of memory" in rows[2]["failure"] and "failure" not in rows[3]
    page = (tmp_path / "report.md").read_text()
    assert "| a | 1.5 |" in page and "out of memory" in page and page in capsys.readouterr().out


def test_what_is_refused(report, capsys):
    for arguments in (["--parts", "gpt3"], ["--minutes", "0"]):
        with pytest.raises(SystemExit) as stopped:
            report.main(arguments)
        assert stopped.value.code == 2 and arguments[1] in capsys.readouterr().err
