"""Small forms of two benchmarks of the planner: what their tables and pictures are made of."""

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from decent_jax import topology
from decent_jax.planner import network, placement

BENCHMARKS = str(Path(__file__).resolve().parents[1] / "benchmarks")


@pytest.fixture
def benchmark(request, monkeypatch):
    """One of them, on the networks and sizes of the test."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module(request.param)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("benchmark", ["planner_scaling"], indirect=True)
def test_a_step_with_more_replicas(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "SIZES", (8, 16, 32))
    monkeypatch.setattr(benchmark, "MODELS", {"GPT-2 124M": benchmark.MODELS["GPT-2 124M"]})
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "scaling.png"
    assert benchmark.main(["--json", str(rows), "--out", str(picture)]) == 0
    seconds = {
        (row["network"], row["algorithm"], row["num_replicas"]): row["step_time_s"]
        for row in rows_of(rows)
    }
    names, titles = benchmark.ALGORITHMS, benchmark.NETWORKS
    # On a single machine nothing is hierarchical and nothing alternates.
    within = [name for name in names if "hierarchical" not in name and "alternating" not in name]
    cases = [*itertools.product(titles, within, [8]), *itertools.product(titles, names, [16, 32])]
    assert sorted(seconds) == sorted(cases)
    alone = benchmark.workload("GPT-2 124M").compute_s
    assert min(seconds.values()) > alone
    for title in titles:
        seldom = seconds[title, "one_peer_exp, every 8 steps", 32]
        assert seldom < seconds[title, "one_peer_exp", 32]
    assert picture.stat().st_size > 10_000
    assert f"a replica alone {alone:.3f} s a step" in capsys.readouterr().out


@pytest.mark.parametrize("benchmark", ["planner_scaling"], indirect=True)
@pytest.mark.parametrize("name", ["one_peer_exp", "alternating_exp_ring"])
def test_rounds_without_matrices_are_those_of_the_schedule(benchmark, name):
    wanted = topology.make(name, 32, local_size=8)
    found = benchmark.rounds_only(name, 32, 8)
    for one, other in zip(found.rounds, wanted.rounds, strict=True):
        assert one.group_size == other.group_size
        np.testing.assert_array_equal(one.self_weights, other.self_weights)
        for send, its in zip(one.sends, other.sends, strict=True):
            np.testing.assert_array_equal(send.sources, its.sources)
            np.testing.assert_array_equal(send.weights, its.weights)


@pytest.mark.parametrize("benchmark", ["placement"], indirect=True)
def test_searches_of_some_hundredths_of_a_second(benchmark, monkeypatch, tmp_path, capsys):
    regions = network.regions({"Oregon": 3, "Virginia": 3, "Frankfurt": 2})
    small = regions, placement.Job(2, 4, 1e9, 1e7)
    problems = {"case 2": small, "64 in 10 regions": small}
    monkeypatch.setattr(benchmark, "stage_problems", lambda: problems)
    monkeypatch.setattr(benchmark, "gossip_problems", lambda: {"3 regions": (regions, 2)})
    assert benchmark.main(["--seconds=0.02", "--seeds=1", f"--out={tmp_path}"]) == 0
    rows = rows_of(tmp_path / "placement.jsonl")
    stages = [row for row in rows if row["table"] == "stages"]
    gossip = [row for row in rows if row["table"] == "gossip"]
    assert len(stages) == 2 and len(gossip) == 4 * 2
    for row in stages:
        assert sorted(itertools.chain(*row["stages"])) == list(range(8))
        assert row["lower_bound_s"] <= row["total_s"] == row["total_of_emitted_pipelines_s"]
    for own, placed in zip(gossip[::2], gossip[1::2], strict=True):
        assert own["schedule"] == placed["schedule"] and own["order"] == "own"
        assert placed["disagreement_s"] <= own["disagreement_s"]
        assert sorted(placed["device_of_replica"]) == own["device_of_replica"] == list(range(8))
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert len(pictures) == 1 + 2 + 1 and "convergence.png" in pictures
    assert "| 64 in 10 regions | 2 x 4 of 8 |" in capsys.readouterr().out
