"""What benchmarks/speed/gpu_report.py makes of its measurements, with tiny models on CPUs."""

import argparse

import pytest

from benchmarks.speed import gpu_report as report


def test_a_part_measures_all_that_it_names(tmp_path):
    """Bytes are those of float32 in another format, with a number per row of 768 and more."""
    rows = list(report.PARTS["formats"](argparse.Namespace(tiny=True, out=tmp_path)))
    sent = {row["name"]: row["gigabytes"] for row in rows}
    assert all(x > 0 for row in rows for name, x in row.items() if name != "name")
    for name, times in (("bfloat16", 1), ("int8", 2), ("int4", 4)):
        assert sent["bfloat16"] / sent[name] == pytest.approx(times, rel=0.02)


def test_the_time_per_token_is_that_of_the_model_and_the_peak(monkeypatch):
    monkeypatch.setattr(report, "peak", lambda devices: 1e6)

    class Step:
        seconds, units, compile_s = [3.0, 0.5, 0.4], 100, [1.0, 2.0]

    row = report.row_of("a", Step, "tokens", 2000.0, [])
    assert row == {"name": "a", "ms": 500, "tokens_per_s": 200, "mfu": 0.4, "compile_s": 3.0}
