"""`decent-jax train --check`: what each kind of run takes; nothing is left behind."""

import os
import re

import pytest
import tiny

from decent_jax import train
from decent_jax.commands import main as command
from decent_jax.ground import machine
from decent_jax.peers.peer_run import Place, open_peer
from decent_jax.train import ConfigError

pytestmark = pytest.mark.usefixtures("compile_once")


def test_it_says_what_a_run_takes_and_leaves_nothing(tiny_data, tmp_path, capsys, monkeypatch):
    path = tiny.write_config(tmp_path / "tiny_config.py", tiny_data)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert command.main(["train", "--config", str(path), "--check", "--config.batch_size=9"]) == 2
    assert "batch_size" in capsys.readouterr().err
    assert command.main(["train", "--config", str(path), "--check"]) == 0
    said = capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    assert "the config is good for 12 steps; 2 rounds to compile" in said
    (ms,) = re.findall(r"a step takes (\S+) ms here, 12 of them \S+ s", said)
    assert 0 < float(ms) < 60_000
    (kept,) = re.findall(r"keeps (\S+) MB of parameters and optimizer", said)
    (state,) = re.findall(r"a step: .* MB of memory per device \((\S+) of state", said)
    assert float(state) == pytest.approx(4 * float(kept), rel=0.02)  # of four replicas, and a batch


def test_both_kinds_of_step_are_compiled_and_weighted(capsys):
    """With mix_every=4, three of four steps send nothing."""
    train.dry_run(tiny.waves(mix_every=4))
    said = capsys.readouterr().err
    assert "compiling the step (round 0)" in said
    assert "compiling the step (without communication)" in said
    mean, sends, silent = map(
        float, re.findall(r"takes (\S+) ms .*\((\S+) ms with .* (\S+) ms without\)", said)[0]
    )
    assert mean == pytest.approx((sends + 3 * silent) / 4, rel=0.02)  # printed with three digits


def test_a_peer_is_tried_with_its_share_of_the_batch(capsys):
    config = tiny.waves(algorithm="swarm", peers={"use": True}, steps=100)
    config.optimizer.name = "sgd"
    train.dry_run(config)
    said = capsys.readouterr().err
    assert "over peers" in said and "the config is good for 100 steps" in said


def test_only_a_peers_own_batch_must_fit_into_its_memory(tmp_path, monkeypatch):
    """Four peers share 400 examples of 8 bytes; with one batch read ahead each holds two."""
    config = tiny.waves(algorithm="swarm", peers={"use": True}, num_replicas=4, batch_size=400)
    config.optimizer.name, config.data.prefetch = "sgd", 1
    needed = []
    monkeypatch.setattr(machine, "check_memory", lambda size, what: needed.append((size, what)))
    with open_peer(Place(config.to_dict(), str(tmp_path), 0, 0, None, 4)) as (experiment, _):
        assert experiment.config.batch_size == 100
    assert [size for size, what in needed if "batch_size" in what] == [2 * 100 * 8]


def test_a_state_that_does_not_fit_is_refused_before_it_is_allocated(tiny_data, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 50 if "PAGES" in name else 4096)
    with pytest.raises(ConfigError) as refused:
        train.dry_run(tiny.config(tiny_data))
    assert "4 replicas" in str(refused.value) and "205kB" in str(refused.value)
