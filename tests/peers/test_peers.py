"""Peers on a real Ray: kills, silences, joins, resizes, and a replay bit by bit."""

import json
import os
import signal
from pathlib import Path

import pytest
from several import by_output, children_of, nothing_is_left, until

from decent_jax import peers, train
from decent_jax.commands import main as command
from decent_jax.ground import extras
from decent_jax.peers.__main__ import main
from decent_jax.train.config import parse

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "train.py"

CONFIG = """
import sys, types
from decent_jax import train

sys.modules["decent_jax.plots.runs"] = types.SimpleNamespace(plot_runs=lambda paths: None)

def get_config():
    config = train.default_config("points.task")
    config.trainer = "peers"
    config.algorithm = "swarm"
    config.codec = "int8"  # drawn by the seed: a replay in another format has other bits
    config.optimizer.name = "adam"
    config.num_replicas = 2
    config.batch_size = 8
    config.steps = 100000
    config.learning_rate = 0.03
    config.mix_every = 2
    config.lr_schedule.name = "constant"
    config.lr_schedule.warmup = 10
    config.log.every = 20
    config.eval.every = 40
    config.data.sleep_s = 0.02  # the replay makes the same steps without it
    config.data.prefetch = 2
    config.checkpoint.every = 0
    config.checkpoint.every_minutes = 0.05
    config.peers.silent_s = 2.0
    config.peers.exchange_s = 8.0  # on busy machines a message may take seconds
    config.peers.max_lag = 10
    return config
"""


@pytest.fixture(scope="module")
def variables(tmp_path_factory, compile_once):
    """Of the environment of `train.py`; its config is ``config.py`` in the folder PEERS_TEST."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "points").mkdir()
    (folder / "points" / "__init__.py").touch()
    (folder / "points" / "task.py").write_text("from peers_task import *  # noqa\n")
    (folder / "config.py").write_text(CONFIG)
    paths = [str(ROOT), str(ROOT / "tests" / "support"), str(folder)]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PEERS_TEST": str(folder)}
    return compile_once | own | {"RAY_USAGE_STATS_ENABLED": "0"}


def train_py(variables, workdir, **fields):
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()]
    return [TRAIN, "--config", f"{variables['PEERS_TEST']}/config.py", "--workdir", workdir, *flags]


def actors(process):
    """{rank: process} of the peers, by their log file."""
    found = by_output(process).items()
    return {path.parent.name: child for path, child in found if path.name == "log.txt"}


def words_of(workdir, rank):
    return (workdir / "peers" / rank / "log.txt").read_text()


def events(workdir, rank, generation=0):
    path = workdir / "peers" / rank / f"events-{generation}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def made(workdir, rank, generation=0):
    """The steps that it has made."""
    return sum("rate" in event for event in events(workdir, rank, generation))


def newest(workdir, rank):
    """The last generation of a peer; on a busy machine one may lag, and so join, once more."""
    return max(int(p.stem[7:]) for p in (workdir / "peers" / rank).glob("events-*.jsonl"))


def is_silent(said, name):
    """By what was said last: on a busy machine it may have been silent, and be back."""
    silent = said.rfind(f"{name} is silent")
    return silent > max(said.rfind(f"{name} is back"), said.rfind(f"{name} trains again"))


def living(workdir):
    return {f"{rank}.{newest(workdir, rank)}" for rank in "012"}


def both_sides_are_in_the_logs(workdir):
    """In these logs an average has two pulls, of the same versions, unless one side was killed."""
    pulls = {}
    alive = living(workdir)
    for path in (workdir / "peers").glob("*/events-*.jsonl"):
        me = f"{path.parent.name}.{path.stem[7:]}"
        for line in map(json.loads, path.read_text().splitlines()):
            if "average" in line:
                mine, theirs = (me, line["mine"]), (line["with"], line["theirs"])
                pulls.setdefault(line["average"], []).append((mine, theirs))
    whole = [sides for sides in pulls.values() if len(sides) == 2]
    assert len(whole) > 20 and all(a == b[::-1] for a, b in whole)
    alone = [sides[0] for sides in pulls.values() if len(sides) == 1]
    # With one that was killed, or stopped and begun anew.
    assert not any({mine[0], theirs[0]} <= alive for mine, theirs in alone)
    assert {mine[0] for sides in whole for mine, _ in sides} >= alive


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "peers"


@pytest.mark.slow
def test_a_run_in_which_everything_happens(start_process, variables, workdir):
    """One is killed, one joins, one is stopped and returns, one leaves; then Ctrl-C."""
    process = start_process(train_py(variables, workdir), **variables)
    trains = lambda k, n=0: len(events(workdir, k, n)) > 15  # noqa: E731
    until(lambda: trains("0") and trains("1"), process)
    peers = actors(process)
    assert len(peers) == 2
    # Only those who know a token that no file has may use this Ray.
    (raylet,) = [child for child in children_of(process) if child.name() == "raylet"]
    own = raylet.environ()
    assert own["RAY_AUTH_MODE"] == "token" and len(own["RAY_AUTH_TOKEN"]) == 64
    by_then = events(workdir, "0")[-1]["t"]
    peers["1"].kill()
    # One more joins.
    assert main(["resize", "--workdir", str(workdir), "--count", "3"]) == 0
    until(lambda: trains("1", 1) and trains("2"), process)
    start, own = events(workdir, "1", 1)[0], max(e.get("t", 0) for e in events(workdir, "1"))
    # It goes on from the step at which the killed one was last heard, which may be earlier than
    # its last, with the state of one that trains now.
    donor = start["origin"]
    assert start["start"] <= own + 1 and donor["when"] == "boundary"
    assert donor["peer"] == "2.0" or (donor["peer"] == "0.0" and donor["t"] >= by_then > 0)
    # One is silent for longer than max_lag allows.
    peers = actors(process)
    steps = made(workdir, "0")
    peers["1"].suspend()
    until(lambda: is_silent(process.words.read_text(), "peer 1"), process)
    until(lambda: made(workdir, "0") > steps + 50, process)
    peers["1"].resume()
    until(lambda: newest(workdir, "1") > 1 and trains("1", newest(workdir, "1")), process)
    assert "a new peer replaces it" in words_of(workdir, "1")
    assert "peer 1 has lagged too far behind; 2 continue" in process.words.read_text()
    # One leaves in good order.
    actors(process)["2"].terminate()
    until(lambda: "peer 2 has left" in process.words.read_text(), process)
    # On a busy machine peer 1 may have been replaced once more: Ctrl-C would end who only joins.
    until(lambda: trains("1", newest(workdir, "1")), process)
    children = children_of(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130, process.words.read_text()
    nothing_is_left(children)
    said = process.words.read_text()
    assert "raylet" not in said  # Ray's own words on the dead
    assert "replicas  process" not in said  # peers are not replicas of this process
    assert "peer 1 was killed" in said
    assert "the same command resumes" in said
    rows = [line for line in words_of(workdir, "0").splitlines() if line.startswith("step ")]
    # How many steps a peer makes depends on the others, so it cannot say what is left.
    assert rows and not any(row.endswith(" left") for row in rows)
    both_sides_are_in_the_logs(workdir)


@pytest.mark.slow
def test_it_resumes_with_another_number(start_process, variables, workdir, capsys):
    steps = json.loads((workdir / "peers.json").read_text())["step"]
    fields = {"peers__count": 1, "steps": steps + 20, "data__sleep_s": 0.0}
    # `train.py` dies while its peer starts, and Ray and its actors with it.
    process = start_process(train_py(variables, workdir, **fields), **variables)
    until(lambda: "0" in actors(process), process)
    children = children_of(process)
    reporting = [child for child in children if child.name().endswith("Agent")]
    assert len(reporting) == 2
    process.kill()
    for agent in reporting:  # else Ray's tries for 60 s to tell a process that is gone
        agent.kill()
    nothing_is_left(children)
    assert command.main(["status", str(workdir)]) == 0
    assert "stopped before its end" in capsys.readouterr().out
    generation = newest(workdir, "0") + 1
    process = start_process(train_py(variables, workdir, **fields), **variables)
    assert process.wait(500) == 0, process.words.read_text()
    assert events(workdir, "0", generation)[0]["origin"]["when"] == "checkpoint"
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["steps"] == steps + 20 and len(summary["peers"]["ranks"]) == 3
    assert summary["final"]["eval/loss"] < 1.0
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})


def test_the_replay_of_both_is_bit_identical(workdir, variables, monkeypatch, capsys):
    """That it notices a log which says otherwise is in test_peers_law, as are the other formats."""
    monkeypatch.syspath_prepend(variables["PEERS_TEST"])
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    config["data"]["sleep_s"] = 0.0
    path.write_text(json.dumps(config))
    code = main(["replay", "--workdir", str(workdir)])
    said = capsys.readouterr().out
    assert code == 0 and "every parameter is identical" in said, said
    ended = [line for line in said.splitlines() if line.endswith("snapshots: identical")]
    assert len(ended) == 4  # all three of the first session, whom Ctrl-C lets end, and one
    assert sum(" 0 pairwise averages" not in line for line in ended) >= 3


def test_no_ray_is_one_sentence(monkeypatch):
    config = train.default_config()
    config.trainer, config.algorithm, config.data.path = "peers", "swarm", "stdlib"
    find = extras.importlib.util.find_spec
    monkeypatch.setattr(
        extras.importlib.util, "find_spec", lambda name: None if name == "ray" else find(name)
    )
    with pytest.raises(extras.Unavailable, match=r"pip install 'decent_jax\[peers\]'"):
        peers.run(parse(config), "run")
