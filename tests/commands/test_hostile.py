"""Hostile input through the real commands: one short sentence that names it, and exit code 2.

A row is (name, command, words of the sentence). In a command, CONFIG is a small config file, RUN
the folder of the row (`FILES` says what is in it), NINES is a number of 5,000 digits. All commands
run in this process, which has imported everything once.
"""

import itertools
import json
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
import tiny
from hostile import assert_refused

from decent_jax import topology
from decent_jax.commands import export, plot, preflight, sample, supervise
from decent_jax.ground import fields, machine
from decent_jax.ground.errors import ConfigError
from decent_jax.train import config as config_lib
from decent_jax.train import experiment

ROOT = Path(__file__).resolve().parents[2]
NINES = "9" * 5000

TRAIN = [  # what follows "train.py --config CONFIG --workdir RUN/run --config."
    ("gamma=2.5", "gamma 2.5"),
    ("algorithm=decentralized_sgd --config.gamma=2", "gamma 2"),
    ("algorithm=NINES", "algorithm 4096"),
    ("algorithm=all_reduce --config.mix_every=3", "mix_every 3"),
    ("algorithm=all_reduce --config.combine=then", "combine then"),
    ("schedule=NINES", "schedule 4096"),
    ("schedule=random_matching(rounds=1000000000)", "schedule 1000000000"),
    ("schedule=random_matching(rounds=NINES)", "schedule 4096"),
    ("schedule=periodic_average(ring,every=1000000000)", "schedule 1000000000"),
    ("schedule=NESTED", "schedule 1300"),
    ("num_replicas=30000 --config.batch_size=30000", "schedule 30000"),
    ("data.workers=100000", "data.workers"),
    ("batch_size=400000000", "batch_size 400"),
    ("model.width=1048576", "state 4"),
    ("model.width=1000000000", "model.width 1048576"),
    ("model.vocab_size=1000000000000", "model.vocab_size"),
    ("model.context=1000000000", "model.context"),
    ("model.dropout=nan", "model.dropout"),
    ("epochs=inf", "epochs inf"),
    ("epochs=1e12", "epochs"),
    ("epochs=1e-9", "epochs 1e-09"),
    ("seed=1000000000000000000000000000000", "seed"),
    ("seed=NINES", "seed"),
    ("steps=2147483648", "steps 2147483647"),
    ("lr_schedule.name=cosine --config.lr_schedule.warmup=200%", "lr_schedule.warmup 12"),
    ("lr_schedule.warmup=NINES", "lr_schedule.warmup"),
    ("eval.every=99999999999999999999", "eval.every"),
    ("checkpoint.every=1e5", "checkpoint.every"),
    ("cluster.process_id=2", "cluster process_id 2"),
    ("cluster.num_processes=-1", "cluster.num_processes"),
    ("NINES=1", "config 999"),
    ("data.path=NINES", "data.path"),
    ("model.init_from=" + 300 * "x", "xxx"),
    ("model.dtype=float64", "model.dtype float64 JAX_ENABLE_X64"),
    ("task=..", "task .."),
    ("algorithm=decentralized_sgd --config.optimizer.name=.adam", "optimizer.name .adam"),
]
DEEP = "[" * 100_000
PICTURES = "train.py --config quickstart_images --workdir RUN/new --config.data.train_images=64"
PICTURES += " --config.data.val_images=64"
OF_TRAIN = "train.py --config CONFIG --workdir RUN/new"
WEIGHTS = "--config.model.init_from=RUN/run/m.safetensors"
OTHER = [
    ("config.json no UTF-8", "train", "config.json"),
    ("config.json a folder", "train", "config.json"),
    ("config.json nested", "train", "run config"),
    ("config.json empty", "train", "config more"),
    ("config.json replicas a list", "train", "run config"),
    ("config.json a long text", "train", "run config"),
    ("metrics.jsonl binary", "train", "metrics.jsonl 1"),
    ("metrics.jsonl a step of 400 digits", "train", "metrics.jsonl 1"),
    ("metrics.jsonl a folder", "train", "metrics.jsonl"),
    ("a workdir that is a file", "train", "--workdir"),
    ("a long workdir", f"train.py --config CONFIG --workdir {300 * 'x'}", "--workdir"),
    ("a placeholder", "train.py --config RUN/run/c.py --workdir RUN/new", "RequiredValueError"),
    ("weights empty", f"train {WEIGHTS}", "m.safetensors"),
    ("weights of a huge header", f"train {WEIGHTS}", "m.safetensors"),
    ("no flags", "train.py", "--config"),
    ("an unknown flag", "train.py --config CONFIG --workdir RUN/run --NINES", "--999"),
    ("a config file that is none", "train.py --config NINES --workdir RUN/run", "config 999"),
    ("long", "preflight --save RUN/n.json --repeats NINES", "--repeats"),
    ("inf", "preflight --save RUN/n.json --megabytes inf", "--megabytes inf"),
    ("often", "preflight --save RUN/n.json --repeats 999999999", "--repeats 999999999"),
    ("folder", "preflight --save RUN", "--save"),
    ("none", "supervise --processes 0 -- train.py", "--processes"),
    ("a million", "supervise --processes 1000000 -- train.py", "--processes"),
    ("again", "supervise --processes 2 --again -1 -- train.py", "--again"),
    ("check", "supervise --processes 2 -- train.py --config CONFIG --check", "--check"),
    ("three", f"supervise --processes 3 -- {OF_TRAIN}", "num_replicas 4"),
    ("no name", f"supervise --hosts a,,b -- {OF_TRAIN}", "--hosts"),
    ("no command", f"supervise --hosts a --via nothing -- {OF_TRAIN}", "--via nothing"),
    ("nothing", "supervise --processes 2", "start --"),
    ("no file", "supervise --processes 2 -- nothing.py", "start --"),
    ("via", f"supervise --hosts a --via 'ssh {{x}}' -- {OF_TRAIN}", "--via"),
    ("quotes", f'supervise --hosts a --via "ssh \'" -- {OF_TRAIN}', "--via"),
]
OTHER += [
    ("config.json empty", "sample --workdir RUN/run", "run config.json"),
    ("config.json no task", "sample --workdir RUN/run", "task"),
    ("config.json wrong type", "sample --workdir RUN/run", "config.json model.width"),
    ("nan", "sample --workdir RUN/run --temperature nan", "--temperature"),
    ("many", "sample --workdir RUN/run --tokens 999999999999", "--tokens 1000000"),
    ("digits", "sample --workdir RUN/run --seed NINES", "--seed"),
    ("seed", "sample --workdir RUN/run --seed 9999999999999999999", "--seed"),
    ("metrics.jsonl a list", "export --workdir RUN/a --out RUN/run/m.safetensors", "run"),
    ("metrics.jsonl a step of 400 digits", "plot RUN/run", "metrics.jsonl 1"),
    ("metrics.jsonl a folder", "plot RUN/run", "metrics.jsonl"),
    ("out", "plot RUN/run --out RUN", "--out"),
    (
        "micro-batches",
        "train --config.pipeline.stages=1 --config.pipeline.micro_batches=0",
        "pipeline.micro_batches 0",
    ),
    ("pictures", f"{PICTURES} --config.batch_size=800", "batch_size 64"),
    ("plan deep", "train --config.cluster.plan=RUN/run/plan", "run/plan"),
    ("plan name", "train --config.cluster.plan=RUN/run/plan", "run/plan"),
    ("plan a list", "train --config.cluster.plan=RUN/run/plan", "run/plan"),
    ("plan a folder", "train --config.cluster.plan=RUN", "plan"),
    ("SLURM", "train", "SLURM_NTASKS 'two'"),
    (
        "devices",
        "train --config.num_replicas=2 --config.cluster.coordinator=h:1 "
        "--config.cluster.num_processes=2 --config.cluster.process_id=1",
        "JAX_LOCAL_DEVICE_IDS 'a'",
    ),
]
PLACEHOLDER = b"""
from ml_collections import ConfigDict, config_dict
def get_config():
    return ConfigDict({"steps": config_dict.required_placeholder(int)})
"""
VARIABLES = {
    "SLURM": {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "two"},
    "devices": {"JAX_LOCAL_DEVICE_IDS": "0,a"},
}
FILES = {  # what is in RUN/run
    "config.json no UTF-8": {"config.json": b"\xff\xfe"},
    "config.json a folder": {"config.json": None},
    "config.json empty": {"config.json": b"{}"},
    "config.json replicas a list": {"config.json": b'{"num_replicas": [4]}'},
    "config.json a long text": {"config.json": json.dumps({"schedule": "x" * 9999}).encode()},
    "config.json no task": {"config.json": b'{"task": "x"}'},
    "config.json wrong type": {
        "config.json": b'{"task": "language_modeling", "model": {"width": []}}'
    },
    "config.json nested": {"config.json": b'{"a":' * 900 + b"1" + b"}" * 900},
    "a placeholder": {"c.py": PLACEHOLDER},
    "plan deep": {"plan": DEEP.encode()},
    "plan a list": {"plan": b"[1]"},
    "plan name": {
        "plan": b'{"format": "decent_jax.plan/1", "devices": ["a"], "schedule": {"name": []}}'
    },
    "metrics.jsonl binary": {"metrics.jsonl": b"\x80\n{}\n"},
    "metrics.jsonl a list": {"metrics.jsonl": b"[]\n{}\n"},
    "metrics.jsonl a step of 400 digits": {"metrics.jsonl": b'{"step": %s}\n{}\n' % (b"9" * 400)},
    "metrics.jsonl a folder": {"metrics.jsonl": None},
    "weights empty": {"m.safetensors": b""},
    "weights of a huge header": {"m.safetensors": b"\xff" * 8 + b"{}"},
}
ROWS = [(row, f"train --config.{row}", named) for row, named in TRAIN] + OTHER


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, tiny_data):
    return tiny.write_config(tmp_path_factory.mktemp("hostile") / "config.py", tiny_data)


@pytest.fixture(scope="module")
def commands():
    return {
        "train.py": runpy.run_path(str(ROOT / "train.py"))["main"],
        "supervise": supervise.main,
        "preflight": preflight.main,
        "export": export.main,
        "plot": plot.main,
        "sample": sample.main,
    }


@pytest.mark.timeout(60)  # what is not refused may take for ever
@pytest.mark.parametrize(("name", "command", "named"), ROWS, ids=[row[0][:50] for row in ROWS])
def test_one_sentence(name, command, named, commands, config_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 * 10**9)
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    if name.startswith("a workdir that is a file"):
        run.write_text("")
    for path, content in FILES.get(name, {}).items():
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).mkdir() if content is None else (run / path).write_bytes(content)
    for variable, value in VARIABLES.get(name, {}).items():
        monkeypatch.setenv(variable, value)
    command = re.sub(r"^train(?= |$)", "train.py --config CONFIG --workdir RUN/run", command)
    program, *arguments = shlex.split(
        command.replace("(rounds", "\\(rounds")
        .replace(")", "\\)")
        .replace("average(", "average\\(")
    )
    for short, text in (
        ("NINES", NINES),
        ("NESTED", ("hierarchical(" * 100)),
        ("CONFIG", str(config_file)),
        ("RUN", str(tmp_path)),
    ):
        arguments = [argument.replace(short, text) for argument in arguments]
    assert_refused(commands[program], arguments, named, tmp_path, capsys)


HOSTILE = ["1" + 30 * "0", "-" + 30 * "9", "9" * 4000, NINES, "", "\x1b[31m"]
HOSTILE += str.split("inf -inf nan 1e30 -1 None [1] 0x10 1e400 ٣ 5000000000 1e16")


@pytest.mark.parametrize("task", ["language_modeling", "image_classification", "translation"])
def test_every_number_of_a_config_is_in_range_or_refused(task):
    table = config_lib.fields_of(task)
    for name, field in table.items():
        if type(field.default) not in (int, float, bool) and not field.duration:
            continue
        for text in HOSTILE:
            try:
                value = fields.parse(field, name, text)
                field.check(name, value)
            except ConfigError as error:
                assert name in str(error) and len(str(error)) <= 280, (name, text)
                assert str(error).isprintable()
            else:
                bound = max(fields.LARGEST.values()) if field.at_most is None else field.at_most
                assert field.duration or -bound <= value <= bound, (name, text)


def test_batches_are_compared_with_this_machine(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**6)
    examples = [np.zeros(1000, np.float32)] * 100
    experiment.check_batch(tiny.waves(batch_size=20), examples, 1)
    with pytest.raises(ConfigError, match=r"batch_size 100, with data\.prefetch [0-9]+, needs at"):
        experiment.check_batch(tiny.waves(batch_size=100), examples, 1)


def test_random_out_exists_for_every_number_of_replicas():
    for n in (2, 3, 5, 8, 16, 17, 24, 32, 48, 64, 128):
        for seed in range(3):
            topology.make(f"random_out(seed={seed})", n)


def test_the_schedules_that_a_refusal_suggests_exist():
    suggested = set()
    for name, n, local_size in itertools.product(topology.NAMES, range(2, 17), (1, 2, 3)):
        try:
            topology.make(name, n, local_size=local_size)
        except ValueError as error:
            words = set(re.findall(r"\w+", str(error).partition("; use ")[2]))
            for other in words & set(topology.NAMES):
                suggested.add(other)
                topology.make(other, n, local_size=local_size)
    assert {"one_peer_exp", "hypercube", "ring", "bidirectional_ring"} <= suggested
