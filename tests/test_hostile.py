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

ROOT = Path(__file__).resolve().parents[1]
NINES = "9" * 5000

TRAIN = [  # what follows "train.py --config CONFIG --workdir RUN/run --config."
    ("gamma=2.5", "gamma must be in [0, 1], got 2.5"),
    ("algorithm=decentralized_sgd --config.gamma=2", "gamma must be in [0, 1], got 2"),
    ("algorithm=NINES", "algorithm must have at most 4096 characters"),
    ("algorithm=all_reduce --config.mix_every=3", "leave combine empty and mix_every at 1"),
    ("algorithm=all_reduce --config.combine=then", "leave combine empty and mix_every at 1"),
    ("schedule=NINES", "schedule must have at most 4096 characters"),
    ("schedule=random_matching(rounds=1000000000)", "1000000000 rounds of 4 replicas needs"),
    ("schedule=random_matching(rounds=NINES)", "schedule must have at most 4096 characters"),
    ("schedule=periodic_average(ring,every=1000000000)", "1000000000 rounds of 4 replicas needs"),
    ("schedule=NESTED", "has 1300 characters; write at most 300"),
    ("num_replicas=30000 --config.batch_size=30000", "a schedule of 30000 replicas needs"),
    ("mesh.simulate=1000000", "mesh.simulate = 1000000 needs 4000000 threads"),
    ("data.workers=100000", "data.workers"),
    ("batch_size=400000000", "batch_size must be at most 400, the number of training examples"),
    ("model.width=1048576", "the state of 4 replicas needs at least"),
    ("model.width=1000000000", "model.width must be at most 1048576"),
    ("model.vocab_size=1000000000000", "model.vocab_size must be at most"),
    ("model.context=1000000000", "model.context must be at most"),
    ("model.dropout=nan", "model.dropout"),
    ("epochs=inf", "epochs must be finite, got inf"),
    ("epochs=1e12", "epochs"),
    ("epochs=1e-9", "1e-09 epochs are less than a step"),
    ("seed=1000000000000000000000000000000", "seed must be at most"),
    ("seed=NINES", "seed must be of type int"),
    ("steps=2147483648", "steps must be at most 2147483647"),
    ("lr_schedule.name=cosine --config.lr_schedule.warmup=200%", "does not fit into"),
    ("lr_schedule.warmup=NINES", "lr_schedule.warmup must be"),
    ("eval.every=99999999999999999999", "eval.every must be at most"),
    ("checkpoint.every=1e5", "checkpoint.every must be a number of steps"),
    ("cluster.process_id=2", "cluster needs coordinator, num_processes and process_id"),
    ("cluster.num_processes=-1", "cluster.num_processes must not be negative"),
    ("NINES=1", "the config has no field '999"),
    ("data.path=NINES", "data.path"),
    ("model.init_from=" + 300 * "x", "File name too long"),
    ("model.dtype=float64", "model.dtype float64 needs the variable JAX_ENABLE_X64=1"),
    ("task=..", "task: '..' is not the dotted path of a module"),
    (
        "algorithm=decentralized_sgd --config.optimizer.name=.adam",
        "optimizer.name '.adam' cannot be",
    ),
]
DEEP = "[" * 100_000
PICTURES = "train.py --config quickstart_images --workdir RUN/new --config.data.train_images=64"
PICTURES += " --config.data.val_images=64"
OF_TRAIN = "train.py --config CONFIG --workdir RUN/new"
WEIGHTS = "--config.model.init_from=RUN/run/m.safetensors"
OTHER = [
    ("config.json no UTF-8", "train", "config.json is damaged"),
    ("config.json a folder", "train", "config.json is damaged"),
    ("config.json nested", "train", "config.json is damaged|with another config"),
    ("config.json empty", "train", "holds a run with another config (.*; and [0-9]+ more)"),
    ("config.json replicas a list", "train", "holds a run with another config"),
    ("config.json a long text", "train", "holds a run with another config"),
    ("metrics.jsonl binary", "train", "metrics.jsonl line 1 is not a JSON object with a step"),
    ("metrics.jsonl a step of 400 digits", "train", "metrics.jsonl line 1 is not"),
    ("metrics.jsonl a folder", "train", "metrics.jsonl is a folder"),
    ("a workdir that is a file", "train", "cannot be written"),
    ("a long workdir", f"train.py --config CONFIG --workdir {300 * 'x'}", "cannot be written"),
    ("a placeholder", "train.py --config RUN/run/c.py --workdir RUN/new", "RequiredValueError"),
    ("nothing but an archive", "train --config.schedule=RUN/run/g.npy", "is no .npy file"),
    ("matrices of terabytes", "train --config.schedule=RUN/run/g.npy", "is no .npy file"),
    ("a stranger's checkpoint", "train", r"4/thesis\.txt: was not made by this package"),
    ("a stranger's best", "train", r"4/thesis\.txt: was not made by this package"),
    ("weights empty", f"train {WEIGHTS}", r"m\.safetensors cannot be read"),
    ("weights of a huge header", f"train {WEIGHTS}", r"m\.safetensors cannot be read"),
    ("no flags", "train.py", r"arguments are required: --config \(train.py --help"),
    ("an unknown flag", "train.py --config CONFIG --workdir RUN/run --NINES", "unknown argument"),
    ("a config file that is none", "train.py --config NINES --workdir RUN/run", "no config file"),
    ("long", "preflight --save RUN/n.json --repeats NINES", "argument --repeats: invalid int"),
    ("inf", "preflight --save RUN/n.json --megabytes inf", "--megabytes must be from 0.01"),
    ("often", "preflight --save RUN/n.json --repeats 999999999", "--repeats must be from 1 to"),
    ("folder", "preflight --save RUN", "is a folder"),
    (
        "none",
        "supervise --processes 0 -- train.py",
        "--processes: must be a whole number from 1 to 1024",
    ),
    (
        "a million",
        "supervise --processes 1000000 -- train.py",
        "--processes: must be a whole number from 1 to 1024",
    ),
    (
        "again",
        "supervise --processes 2 --again -1 -- train.py",
        "--again: must be a whole number from 0",
    ),
    ("check", "supervise --processes 2 -- train.py --config CONFIG --check", "starts no run"),
    ("three", f"supervise --processes 3 -- {OF_TRAIN}", "num_replicas: 4 cannot be spread"),
    ("no name", f"supervise --hosts a,,b -- {OF_TRAIN}", "--hosts must be names between commas"),
    ("no command", f"supervise --hosts a --via nothing -- {OF_TRAIN}", "there is no command"),
    ("nothing", "supervise --processes 2", "say what to start after --"),
    ("no file", "supervise --processes 2 -- nothing.py", "say what to start after --"),
    ("fewest 0", "supervise --processes 2 --fewest 0 -- train.py", "--fewest must be from 1 to 2"),
    ("via", f"supervise --hosts a --via 'ssh {{x}}' -- {OF_TRAIN}", "--via"),
    ("quotes", f'supervise --hosts a --via "ssh \'" -- {OF_TRAIN}', "--via"),
]
OTHER += [
    ("config.json empty", "sample --workdir RUN/run", "holds no run"),
    ("config.json no task", "sample --workdir RUN/run", "task must be one of"),
    ("config.json wrong type", "sample --workdir RUN/run", "config.json: model.width must be of"),
    ("nan", "sample --workdir RUN/run --temperature nan", "--temperature must be finite"),
    ("many", "sample --workdir RUN/run --tokens 999999999999", "--tokens must be at most 1000000"),
    ("digits", "sample --workdir RUN/run --seed NINES", "argument --seed: invalid int value"),
    ("seed", "sample --workdir RUN/run --seed 9999999999999999999", "--seed must be at most"),
    ("metrics.jsonl a list", "export --workdir RUN/a --out RUN/run/m.safetensors", "another run"),
    ("metrics.jsonl a step of 400 digits", "plot RUN/run", "metrics.jsonl line 1 is not a JSON"),
    ("metrics.jsonl a folder", "plot RUN/run", "metrics.jsonl"),
    ("out", "plot RUN/run --out RUN", "is a folder; name a file in it"),
    ("micro-batches", "train --config.pipeline.stages=1 --config.pipeline.micro_batches=0", "must"),
    ("pictures", f"{PICTURES} --config.batch_size=800", "batch_size must be at most 64"),
    ("plan deep", "train --config.cluster.plan=RUN/run/plan", "is not a plan: it is nested"),
    ("plan name", "train --config.cluster.plan=RUN/run/plan", "is not a plan: the name of its"),
    ("plan a list", "train --config.cluster.plan=RUN/run/plan", "plan"),
    ("plan a folder", "train --config.cluster.plan=RUN", "cannot read the plan"),
    ("SLURM", "train", "SLURM_NTASKS must hold whole numbers, got 'two'"),
    (
        "devices",
        "train --config.num_replicas=2 --config.cluster.coordinator=h:1 "
        "--config.cluster.num_processes=2 --config.cluster.process_id=1",
        "JAX_LOCAL_DEVICE_IDS must hold whole numbers, got 'a'",
    ),
]
PLACEHOLDER = b"""
from ml_collections import ConfigDict, config_dict
def get_config():
    return ConfigDict({"steps": config_dict.required_placeholder(int)})
"""
HEADER = (
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (4, 1000000, 1000000)}".ljust(118) + b"\n"
)
BOMB = b"\x93NUMPY\x01\x00" + len(HEADER).to_bytes(2, "little") + HEADER
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
    "nothing but an archive": {"g.npy": b"PK\x05\x06" + bytes(18)},
    "matrices of terabytes": {"g.npy": BOMB},
    "plan deep": {"plan": DEEP.encode()},
    "plan a list": {"plan": b"[1]"},
    "plan name": {
        "plan": b'{"format": "decent_jax.plan/1", "devices": ["a"], "schedule": {"name": []}}'
    },
    "metrics.jsonl binary": {"metrics.jsonl": b"\x80\n{}\n"},
    "metrics.jsonl a list": {"metrics.jsonl": b"[]\n{}\n"},
    "metrics.jsonl a step of 400 digits": {"metrics.jsonl": b'{"step": %s}\n{}\n' % (b"9" * 400)},
    "metrics.jsonl a folder": {"metrics.jsonl": None},
    "a stranger's checkpoint": {"checkpoints/4/thesis.txt": b"my thesis"},
    "a stranger's best": {"best/4/thesis.txt": b"my thesis"},
    "weights empty": {"m.safetensors": b""},
    "weights of a huge header": {"m.safetensors": b"\xff" * 8 + b"{}"},
}
ROWS = [(row, f"train --config.{row}", re.escape(words)) for row, words in TRAIN] + OTHER


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
@pytest.mark.parametrize(("name", "command", "words"), ROWS, ids=[row[0][:50] for row in ROWS])
def test_one_sentence(name, command, words, commands, config_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 * 10**9)
    monkeypatch.setattr(machine, "most_threads", lambda: 30_000)
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
    assert_refused(commands[program], arguments, words, tmp_path, capsys)


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
