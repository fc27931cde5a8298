"""Hostile input: parsers by hypothesis, and a few whole commands of every kind.

A command of `ROWS` ends with one short sentence that names it, exit code 2, and nothing lost. A row
is (what lies in the folder of the command, command, words of the sentence). In a command, CONFIG is
a small config file, NINES a number of 5,000 digits. test_damaged_files has the readers of files.
"""

import gzip
import itertools
import os
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused, refuses

from decent_jax import replicas, topology
from decent_jax.commands import export
from decent_jax.commands import main as command
from decent_jax.ground import fields, machine
from decent_jax.ground.command_line import check_replaceable
from decent_jax.ground.errors import ConfigError
from decent_jax.train import config as config_lib
from decent_jax.train import experiment

ROOT = Path(__file__).resolve().parents[2]

# --- Fields, flags, schedules ---------------------------------------------------------------------

NUMBERS = ["1" + 30 * "0", "9" * 5000, "", "\x1b[31m", "2147483648", "5e-324", "1e400", "1e16"]
NUMBERS += str.split("inf -inf nan -1 None [1] 0x10 ٣ 200% -3 epochs")
TASKS = ["language_modeling", "image_classification", "translation"]
TABLES = {task: config_lib.fields_of(task) for task in TASKS}
PLACES = [(task, name) for task, table in TABLES.items() for name in table]
TEXTS = st.sampled_from(NUMBERS) | st.text(max_size=20) | st.floats().map(str)


@settings(max_examples=250)
@given(st.sampled_from(PLACES), TEXTS)
def test_a_text_for_a_field_is_a_value_in_its_bounds_or_refused(place, text):
    task, name = place
    field = TABLES[task][name]
    try:
        value = fields.parse(field, name, text)
        field.check(name, value)
    except ConfigError as error:
        assert name in str(error) and len(str(error)) <= 280 and str(error).isprintable()
        return
    assert field.duration or type(value) is type(field.default)
    if type(value) in (int, float):
        bound = max(fields.LARGEST.values()) if field.at_most is None else field.at_most
        assert -bound <= value <= bound


@settings(max_examples=100)
@given(st.sampled_from([name for task, name in PLACES if task == TASKS[0]]), TEXTS)
def test_a_config_with_such_a_value_is_right_or_refused_before_it_trains(name, text):
    config, table = config_lib.default_config(), TABLES[TASKS[0]]
    try:
        value = fields.parse(table[name], name, text)
        *sections, last = name.split(".")
        group = config[sections[0]] if sections else config
        with group.unlocked():
            group[last] = value
        config_lib.check(config_lib.parse(config))
    except (ConfigError, TypeError) as error:  # ml_collections says the type of a field
        assert type(error) is TypeError or (str(error).isprintable() and len(str(error)) <= 600)


def test_random_out_exists_for_every_number_of_replicas():
    for n, seed in itertools.product((2, 3, 5, 8, 16, 17, 24, 48, 128), range(3)):
        topology.make(f"random_out(seed={seed})", n)


def test_the_schedules_that_a_refusal_suggests_exist():
    suggested = set()
    for name, n, replicas_per_node in itertools.product(topology.NAMES, range(2, 17), (1, 2, 3)):
        try:
            topology.make(name, n, replicas_per_node=replicas_per_node)
        except ValueError as error:
            words = set(re.findall(r"\w+", str(error).partition("; use ")[2]))
            for other in words & set(topology.NAMES):
                suggested.add(other)
                topology.make(other, n, replicas_per_node=replicas_per_node)
    assert {"one_peer_exp", "hypercube", "ring", "bidirectional_ring"} <= suggested


def test_batches_are_compared_with_this_machine(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**6)
    examples = [np.zeros(1000, np.float32)] * 100
    experiment.check_batch(tiny.waves(batch_size=20), examples, 1)
    with refuses("batch_size 100", "1.00MB", error=ConfigError):
        experiment.check_batch(tiny.waves(batch_size=100), examples, 1)
    experiment.check_batch(tiny.waves(batch_size=60), examples, 2)
    with refuses("batch_size 60", "1.20MB", error=ConfigError):  # two processes share the machine
        experiment.check_batch(tiny.waves(batch_size=60), examples, 2, together=2)


def test_states_of_processes_of_one_machine_are_compared_with_it_together(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**6)
    placement, state = replicas.place(2, jax.devices()[:1]), np.zeros(100_000, np.float32)
    experiment.check_state(placement, state)
    with refuses("4 replicas", "1.60MB", error=ConfigError):
        experiment.check_state(placement, state, together=2)


# --- Whole commands -------------------------------------------------------------------------------

NINES = "9" * 5000
RUN, TRAIN = "train --config CONFIG --workdir run", "train --config CONFIG --workdir run --config."
CLUSTER = "--network nvlink_25gbe --nodes 2 --devices_per_node 2"
TEXT = "text --input in --out out --tokenizer bytes --val_fraction 0.3"
ROWS = [
    # What fits a field and no machine, no schedule or no run.
    ({}, f"{TRAIN}schedule='random_matching(rounds=1000000000)'", "schedule 1000000000"),
    ({}, f"{TRAIN}schedule='{'hierarchical(' * 100}'", "schedule 1300"),
    ({}, f"{TRAIN}batch_size=400000000", "batch_size 400"),
    ({}, f"{TRAIN}model.width=1048576", "state 4"),
    ({}, f"{TRAIN}epochs=1e-9", "epochs 1e-09"),
    ({}, f"{TRAIN}model.dtype=float64", "model.dtype float64 JAX_ENABLE_X64"),
    ({}, f"{TRAIN}NINES=1", "config 999"),
    ({}, "train --config NINES --workdir run", "config 999"),
    ({}, f"train --config CONFIG --workdir {300 * 'x'}", "--workdir"),
    ({}, f"{TRAIN}model.init_from={300 * 'x'}", "xxx"),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "two"}, RUN, "SLURM_NTASKS 'two'"),
    # Files.
    ({"run": "a file"}, RUN, "--workdir"),
    ({"run/config.json": None}, RUN, "config.json"),
    ({"run/metrics.jsonl": "[]\n{}\n"}, "export --workdir a --out run/m.safetensors", "a"),
    ({"m.safetensors": "\xff" * 8 + "{}"}, f"{TRAIN}model.init_from=m.safetensors", "m.safetens"),
    ({"in/a.jsonl.gz": gzip.compress(b"a" * (3 << 19))}, f"prepare {TEXT}", "a.jsonl.gz 1"),
    ({"in/a.txt.gz": gzip.compress(b"a" * (4 << 20))}, f"prepare {TEXT}", "a.txt.gz"),
    # Flags.
    ({}, "preflight --save n.json --repeats NINES", "--repeats"),
    ({}, "supervise --processes 1000000 -- train.py", "--processes"),
    ({}, "supervise --hosts a,,b -- TRAIN.PY --config CONFIG --workdir new", "--hosts"),
    ({}, 'supervise --hosts a --via "ssh \'" -- TRAIN.PY --config CONFIG --workdir n', "--via"),
    ({}, "supervise --processes 2 -- nothing.py", "start --"),
    ({}, f"planner place {CLUSTER} --parameters 1e6 --time_limit_s inf", "--time_limit_s"),
    ({"in/a.txt": "text"}, f"prepare {TEXT} --workers 100000", "workers 100000"),
    ({}, "peers replay --workdir run", "run peers"),
    # A file of the user's where a command would write.
    (
        {"mine.png": "my thesis", "run/metrics.jsonl": '{"step": 1}\n{"step": 2}\n'},
        "plot run --out mine.png",
        "--out mine.png",
    ),
    ({"a/tokenizer.json": "{}"}, "export --workdir run --out a/x.safetensors", "tokenizer.json"),
    (
        {"y.safetensors": '12345678{"__metadata__":{"format":"pt"},"mine":{}}'},
        "export --workdir run --out y.safetensors",
        "y.safetensors",
    ),
]
IDS = [f"{k} {', '.join(files)[:20]} {line[:40]}" for k, (files, line, _) in enumerate(ROWS)]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, tiny_data):
    return tiny.write_config(tmp_path_factory.mktemp("hostile") / "config.py", tiny_data)


@pytest.mark.timeout(60)  # what is not refused may take for ever
@pytest.mark.parametrize(("files", "line", "named"), ROWS, ids=IDS)
def test_one_sentence(files, line, named, config_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 32 << 20 if "gz" in named else 8 * 10**9)
    monkeypatch.setattr("decent_jax.data.text.documents.LONGEST_LINE", 1 << 18)
    monkeypatch.chdir(tmp_path)
    for path, content in files.items():
        if path.isupper():
            monkeypatch.setenv(path, content)
            continue
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (tmp_path / path).mkdir()
        else:
            (tmp_path / path).write_bytes(
                content if isinstance(content, bytes) else content.encode()
            )
    line = line.replace("NINES", NINES).replace("CONFIG", str(config_file))
    line = line.replace("TRAIN.PY", str(ROOT / "train.py"))
    assert_refused(shlex.split(line), named, tmp_path, capsys)


def assert_refused(arguments, named, folder, capsys):
    """The command returns 2 after one short line that names each of the words of ``named``.

    All files in ``folder`` are still there, as they were, and only hidden ones are new.
    """

    def snapshot():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before, there = snapshot(), set(folder.rglob("*"))
    capsys.readouterr()
    try:
        code = command.main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, ""), said
    [line] = said.err.splitlines()
    assert not [word for word in named.split() if word not in line], line
    assert len(line.replace(str(folder), "")) <= 300 and line.isprintable(), len(line)
    assert before.items() <= snapshot().items()
    new = set(folder.rglob("*")) - there
    assert not [path for path in new if "/." not in str(path.relative_to(folder.parent))]


# --- what a command may replace: a file of this package, nothing without an end -------------------


@pytest.mark.parametrize("check", [check_replaceable, lambda path, _: export.export("run", path)])
def test_only_regular_files_are_replaced(check, tmp_path):
    """Opening a pipe that nobody writes into waits for ever; a link to nothing makes a file."""
    pipe, link = tmp_path / "pipe.safetensors", tmp_path / "link.safetensors"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "elsewhere" / "x")
    for path in (pipe, link):
        with refused("--out", path):
            check(path, "--out")


def test_no_export_writes_beside_itself_through_a_link(tmp_path):
    out = tmp_path / "model.safetensors"
    (tmp_path / "config.json").symlink_to(tmp_path / "thesis.json")
    for content in (b"", b'12345678{"__metadata__":{"step":"1","which":"last"}'):
        out.write_bytes(content)
        with refused("--out", out):
            export.export("run", out)
    assert not (tmp_path / "thesis.json").exists()
    out.write_bytes(b"")  # which makes what is beside it nobody's
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("mine")
    with refused("--out", out):
        export.export("run", out)
