"""Mutated real files at their readers: a result, or one short sentence that names the file."""

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses

from decent_jax import topology
from decent_jax.checkpoints import on_disk
from decent_jax.ground import json_files, run_folder
from decent_jax.ground.errors import CheckpointError, ConfigError, DataError, RunError
from decent_jax.models.gpt2 import GPT2Config
from decent_jax.models.weights import load_decoder
from decent_jax.monitor import goodput, goodput_file
from decent_jax.peers import events, peer_run
from decent_jax.plan import plan_file
from decent_jax.planner import network
from decent_jax.train import config as config_lib
from decent_jax.train import saved_model, workdir
from decent_jax.train.config import parse

ROWS = [{"step": k, "train/loss": 2.5 / (k + 1), "perf/wall_time_s": float(k)} for k in range(4)]
METRICS = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PEERS = {"step": 9, "seconds": 1.5, "best": 2.5, "streams": 8, "batch": 2}
PEERS |= {"peers": {"0": {"steps": 1, "alive": True}, "1": {"steps": 2, "alive": False}}}
START = {"start": 2, "origin": {"peer": "0.0", "t": 2, "when": "boundary"}}
AVERAGE = {"t": 2, "average": "a", "with": "1.0", "mine": 0, "theirs": 1, "sides": [1.0, 0.0]}
EVENTS = [
    START,
    AVERAGE,
    {"t": 2, "version": 1, "crc": 5},
    {"t": 2, "rate": 9},
    {"end": 3, "crc": 7},
]
SPENT = dict.fromkeys(("steps", *goodput_file.CAUSES), 1.5)
CONFIG = config_lib.default_config()  # which no reader changes
ON_PEERS = config_lib.default_config()
ON_PEERS.update(batch_size=8, num_replicas=4)
META = {"step": 4, "num_replicas": 1, "examples": 8, "seconds": 1.5, "best": 2.5}


def real_files(folder):
    """{name: the bytes of a file as the package writes it}"""
    plan_file.Plan(("a/0", "b/0"), topology.make("one_peer_exp", 2)).save(folder / "plan.json")
    network.from_matrices(np.full((3, 3), 1e-5), np.full((3, 3), 1e9)).save(folder / "network.json")
    draft = on_disk.draft_of(folder / "checkpoints", 4)
    draft.mkdir(parents=True)
    on_disk.finish(draft, META, keep=1)
    return {
        "peers.json": json.dumps(PEERS).encode(),
        "events-0.jsonl": "".join(json.dumps(event) + "\n" for event in EVENTS).encode(),
        "network.json": (folder / "network.json").read_bytes(),
        "4/meta.json": (folder / "checkpoints" / "4" / "meta.json").read_bytes(),
        "checkpoints/run.json": (folder / "checkpoints" / "run.json").read_bytes(),
        "config.json": json.dumps(CONFIG.to_dict()).encode(),
        "metrics.jsonl": METRICS,
        "goodput.json": json.dumps({"seconds": SPENT, "date": 9.5, "ended": False}).encode(),
        "plan.json": (folder / "plan.json").read_bytes(),
    }


def read_run(path):
    run = run_folder.load_run(path.parent)
    run_folder.label_runs([run])
    run.series("train/loss", x="time")


def resume(path):
    workdir.check_config(path.parent, parse(CONFIG))
    workdir.check_metrics(path.parent)


def goodput_of_time(path):
    clock = goodput.Clock()
    clock.resume(None, goodput_file.read(path))
    goodput_file.describe(clock.spent())


def read_manifest(path):
    peer_run.known_steps(path.parent, peer_run.read_manifest(path.parent, ON_PEERS))


def read_meta(path):
    try:
        on_disk.read_meta(path.parent)
    except ValueError as error:  # of whom `first_whole` names the checkpoint
        raise CheckpointError(f"{path}: {error}") from None


READERS = {
    "config.json": (resume, lambda path: saved_model.TrainedRun(path.parent)),
    "metrics.jsonl": (resume, read_run),
    "goodput.json": (goodput_of_time,),
    "plan.json": (plan_file.load,),
    "peers.json": (read_manifest,),
    "events-0.jsonl": (lambda path: list(events.read(path)),),
    "network.json": (network.load,),
    "4/meta.json": (read_meta,),
    "checkpoints/run.json": (lambda path: on_disk.run_of(path.parents[1]),),
}
NUMBERS = [b"1e999", b"-1", b"0", b"9" * 5000, b"1e400", b"NaN", b"2.5", b"9" * 20, b"-Infinity"]
VALUES = [*NUMBERS, b"null", b"[]", b"{}", b'""', b"true", b"[" * 20_000, b'"\\u001b[31m"', b"\xff"]


@st.composite
def mutated(draw, original):
    """The file cut short, with bytes changed, or with one of its values replaced."""
    kind = draw(st.sampled_from(["cut", "bytes", "value", "twice", "other"]))
    where = draw(st.integers(0, len(original)))
    if kind == "cut":
        return original[:where]
    if kind == "bytes":
        return original[:where] + draw(st.binary(max_size=8)) + original[where + 2 :]
    if kind == "twice":
        return original[:where] + original
    value = draw(st.sampled_from(VALUES))
    if kind == "other":
        return value
    ends = [k for k, byte in enumerate(original) if byte in b",}]\n"]
    end = draw(st.sampled_from(ends))
    begin = max(original.rfind(b": ", 0, end), original.rfind(b", ", 0, end)) + 2
    return original[:begin] + value + original[end:]


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(name, tmp_path):
    original = real_files(tmp_path)[name]
    folder = tmp_path / "run"
    path = folder / name
    path.parent.mkdir(parents=True)

    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(mutated(original))
    def check(content):
        path.write_bytes(content)
        for read in READERS[name]:
            try:
                read(path)
            except (CheckpointError, ConfigError, DataError, RunError) as error:
                assert str(error).isprintable() and len(str(error)) <= 600
                assert path.name in str(error) or str(folder)[:20] in str(error), error
            except ValueError as error:  # `ConfigError` around it shortens it
                assert str(path) in str(error) and type(error) is ValueError

    path.write_bytes(original)
    for read in READERS[name]:
        read(path)
    check()


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.jsonl", lambda path: run_folder.load_run(path.parent)),
        ("network.json", network.load),
        ("model.safetensors", lambda path: load_decoder(path, GPT2Config())),
    ],
)
def test_pipes_that_nobody_writes_into_are_refused(name, read, tmp_path):
    """Opening one would wait for ever."""
    os.mkfifo(tmp_path / name)
    with refuses("pipe", name, error=(OSError, ValueError, RunError)):
        read(tmp_path / name)


def test_files_without_an_end(tmp_path):
    """A device, which is refused, and a pipe of a shell, which is read up to a bound."""
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with refuses("device", "zero.json", error=OSError):
        json_files.read_bytes(tmp_path / "zero.json", 1000)
    ours, theirs = os.pipe()
    with os.fdopen(ours), os.fdopen(theirs, "wb") as file:
        file.write(b"x" * 2000)
        file.flush()
        with refuses(1000, error=OSError):
            json_files.read_bytes(f"/dev/fd/{ours}", 1000)


def test_a_record_replaces_a_longer_one_whole(tmp_path):
    path = tmp_path / "record.json"
    for entries in ({"seconds": 1234567.891, "host": "a"}, {}):
        json_files.overwrite_json(path, entries)
        assert json_files.read_json(path) == entries


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError, DataError, RunError])
@pytest.mark.parametrize("length", [10, 300, 4000])
def test_a_long_path_costs_no_word_of_the_sentence(kind, length):
    path = "/" + "x" * length + "/config.json"
    words = "--workdir {} holds another run (seed: 1 -> 2), from {}; take another --workdir"
    said = str(kind(words.format(path, path)))
    assert len(said) <= kind.longest
    for part in ("--workdir /x", "json holds another run (seed: 1 -> 2), from /x"):
        assert part in said
    assert said.endswith("config.json; take another --workdir")
