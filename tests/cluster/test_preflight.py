"""`decent-jax preflight` names differences and measures links for the planner."""

import itertools
import re

import jax
import numpy as np
import pytest
import tiny
from refusals import refuses
from several import free_port, said, slurm

from decent_jax.cluster import preflight
from decent_jax.commands import preflight as command
from decent_jax.ground.errors import ConfigError
from decent_jax.planner import __main__ as planner
from decent_jax.planner import network


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_rounds_hold_every_ordered_pair_once_and_nobody_twice(count):
    rounds = preflight.rounds_of_pairs(count)
    assert len(rounds) <= 2 * count
    for pairs in rounds:
        taking_part = [process for pair in pairs for process in pair]
        assert len(set(taking_part)) == len(taking_part)
    assert sorted(itertools.chain(*rounds)) == list(itertools.permutations(range(count), 2))


def test_links_that_are_slower_one_way(tmp_path):
    latency, bandwidth = np.full((3, 3), 5e-5), np.full((3, 3), 1e9)
    np.fill_diagonal(latency, 0)
    np.fill_diagonal(bandwidth, np.inf)
    bandwidth[2, 1] = 0.5e9
    command.save(latency, bandwidth, ["a/0", "b/0", "b/1"], tmp_path / "n.json")
    found = network.load(tmp_path / "n.json")
    assert found.names == ("a/0", "b/0", "b/1") and found.node.tolist() == [0, 1, 1]
    np.testing.assert_array_equal(found.latency_s, latency)
    np.testing.assert_array_equal(found.bandwidth_bytes_per_s, np.minimum(bandwidth, bandwidth.T))
    report = preflight.report(latency, bandwidth, ["a/0", "b/0", "c/0"])
    assert "slowest link: 4.00 Gbit/s, c/0 -> b/0 (median of all links 8.00 Gbit/s)" in report


def test_links_from_the_seconds_until_an_answer():
    """There and back: twice the latency. The bytes take 2 ms one way, and less than noise back."""
    short, long = 1e-4 * np.array([[0, 4], [6, 0]]), 1e-4 * np.array([[0, 24], [5, 0]])
    latency, bandwidth = preflight.links(short, long, 2_000_000)
    np.testing.assert_allclose(latency, [[0, 2e-4], [2e-4, 0]])
    np.testing.assert_allclose(bandwidth, [[np.inf, 1e9], [2e6 / 5e-5, np.inf]])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--megabytes=0"], "--megabytes must be at least 0.01, got 0.0"),
        (["--repeats=0"], "--repeats must be at least 1, got 0"),
        (["--save=no/such/folder.json"], "--save must be in an existing folder, got 'no/such"),
        (["--config.cluster.num_processes=3"], "cluster.process_id must be from 0 to num_proc"),
        (["--config.ray.address=localhost:1"], "ray.address must reach Ray"),
        ([], "one process (no coordinator in the config, no launcher detected): there is nothing"),
    ],
)
def test_mistakes_are_a_sentence(capsys, arguments, sentence):
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"decent-jax preflight: {sentence}") and error.count("\n") == 1


@pytest.mark.slow
def test_two_processes_that_slurm_starts(start_process, tmp_path, tiny_data, capsys):
    """They agree, measure the links between different processes, and the planner reads the file."""
    path, port = tiny.write_config(tmp_path / "config_file.py", tiny_data), free_port()
    saved = tmp_path / "network.json"
    flags = ["-m", "decent_jax.commands.main", "preflight", "--config", path, "--save", saved]
    flags += ["--config.num_replicas=2", "--config.batch_size=8", "--megabytes=0.5"]
    group = [start_process(flags, **slurm(port, 2, index)) for index in range(2)]
    assert [process.wait(timeout=300) for process in group] == [0] * 2, said(group[0])
    assert said(group[1]) == ""
    words = said(group[0])
    assert words.startswith("process 0 of 2 (SLURM)\n")
    assert re.search(
        r"^2 processes agree: Python .*, config [0-9a-f]{12}, 1 x cpu each$", words, re.M
    )
    assert "measuring 2 links in 2 rounds" in words
    assert re.search(r"^(\S+) by \S+ \(lo\) to \1$", words, re.M)
    assert re.search(r"^slowest link: .* Gbit/s, \S+/\d -> \S+/\d \(median", words, re.M)
    found = network.load(saved)
    assert found.num_devices == 2 and found.num_nodes == 1
    model = ["--parameters=1e6", "--compute_s=0.1"]
    assert planner.main(["predict", "--network", str(saved), *model]) == 0
    assert "one_peer_exp" in capsys.readouterr().out


def test_processes_with_different_devices(monkeypatch):
    monkeypatch.setattr(preflight.jax, "process_count", lambda: 2)
    devices = jax.devices()
    monkeypatch.setattr(
        preflight.jax, "local_devices", lambda process_index: devices[: process_index + 1]
    )
    with refuses("devices: 1 on process 0 (a), 2 on process 1 (b)", error=ConfigError):
        preflight.check_devices(["a", "b"])
    monkeypatch.setattr(preflight.jax, "local_devices", lambda process_index: devices[:2])
    assert preflight.check_devices(["a", "b"]) == [devices[0]] * 2
