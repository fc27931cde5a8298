"""What a user can get wrong in a config or on the command line, and the sentence that answers."""

import errno
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from decent_jax import train
from decent_jax.commands import main as command
from decent_jax.commands import saved_model
from decent_jax.ground import fields, json_files
from decent_jax.train import ConfigError, flags, loop, setup
from decent_jax.train import config as config_lib

ROOT = Path(__file__).resolve().parents[1]


def main(argv):
    """As train.py does."""
    return command.train(argv, "train.py")


@pytest.fixture
def call(tmp_path, tiny_data, capsys, monkeypatch):
    """train.py with the tiny config: (exit code, stderr); training itself is an error."""

    def never(experiment, work):
        raise AssertionError("training began")

    monkeypatch.setattr(loop, "train_and_evaluate", never)
    path = tiny.write_config(tmp_path / "tiny_config.py", tiny_data)

    def call(*arguments, config=path, workdir=tmp_path / "run"):
        argv = ["--config", str(config), *arguments]
        code = main(argv + (["--workdir", str(workdir)] if workdir else []))
        return code, capsys.readouterr().err

    return call


def one_sentence(err: str) -> str:
    assert err.startswith("train.py: ") and err.count("\n") == 1, err
    assert "Traceback" not in err and len(err) < 500
    return err.removeprefix("train.py: ").strip()


# What is set, and the whole sentence, or one with ".*" for what the eye need not check; a line that
# is indented continues the one before.
WRONG = """
# names
num_replica=4 | the config has no field 'num_replica'; did you mean 'num_replicas'?
model.layer=4 | the config has no field 'model.layer'; did you mean 'model.layers'?
xyzzy=4 | the config has no field 'xyzzy'; --show prints them all
mesh=4 | the config has no field 'mesh'.*
# types
num_replicas=four | num_replicas must be of type int (such as 8), got 'four'
steps=1e3 | steps must be of type int (such as 1000), got '1e3'
learning_rate=fast | learning_rate must be of type float (such as 0.001), got 'fast'
model.bias=maybe | model.bias must be of type bool (such as True), got 'maybe'
model.bias= | model.bias must be of type bool (such as True), got ''
# choices
task=chess | task must be one of language_modeling, .*, got 'chess'; .*, such as 'mypackage.chess'
algorithm=adam | algorithm must be one of all_reduce, .*, swarm, got 'adam'
combine=without | combine must be one of with, then or left empty, got 'without'
lr_schedule.name=linear | lr_schedule.name must be one of cosine, inverse_sqrt, step, constant,
  got 'linear'
model.preset=tiny | model.preset must be one of small, .*, llama_8b, got 'tiny'
model.dtype=int8 | model.dtype must be .*got 'int8'
model.attention=flash | model.attention must be .*got 'flash'
schedule=stars | schedule: unknown schedule .*'stars'
schedule=base_k(max_degree | schedule: .*cannot be read; write a name
schedule=base_k(degree=2) | schedule: base_k has no parameter 'degree'; it takes .*
schedule=base_k(max_degree=0) | schedule: base_k of .*: max_degree must .*1, got 0
schedule=hierarchical | schedule: hierarchical of 4 replicas: needs .*, got local_size 1
# numbers
num_replicas=0 | num_replicas must be at least 1, got 0
accum_steps=4 | accum_steps is called optimizer.window now: .* set micro_batches
seed=-1 | seed must not be negative, got -1
steps=0 | steps must be at least 1 (or epochs above 0), got 0
steps=-5 | steps must not be negative, got -5
learning_rate=-0.1 | learning_rate must not be negative, got -0.1
learning_rate=nan | learning_rate must be finite, got nan
optimizer.b1=1 | optimizer.b1 must be in [0, 1), got 1.0
eval.ema_decay=1.5 | eval.ema_decay must be in [0, 1), got 1.5
epochs=0.001 | 0.001 epochs are less than a step, 50 are one epoch
# combinations
batch_size=10 | batch_size 10 cannot be shared out over 4 replicas; use a multiple of 4, or another
  num_replicas
eval.batch_size=6 | eval.batch_size 6 cannot be shared out over 4 replicas; use a multiple of 4,
  or another num_replicas
micro_batches=3 | a replica's 2 examples (batch_size 8 over 4 replicas) cannot be cut into 3
  micro_batches
num_replicas=6 batch_size=12 schedule=hypercube | schedule: hypercube of 6 .*: needs a power of two
num_replicas=3 batch_size=12 schedule=ring | schedule: ring .*3
schedule=alternating_exp_ring | schedule: alternating_exp_ring .*local_size.*1
schedule=alternating_exp_ring local_size=3 | schedule: .*3
model.heads=3 | model.*width.*16.*heads.*3|model.*heads.*3.*width.*16
model.vocab_size=100 | model.vocab_size 100 is smaller than the tokenizer's 256
lr_schedule.name=cosine lr_schedule.warmup=13 | .*warmup of 13 steps .*run of 12
lr_schedule.name=cosine 'lr_schedule.warmup=1 epoch' | lr_schedule.warmup of 50 steps does not fit
  into a run of 12
mesh.devices=3 | mesh.devices 3 must .*4 replicas
mesh.devices=16 num_replicas=16 batch_size=16 | mesh.devices 16 must .*most 8
mesh.simulate=3 | mesh.simulate = 3 must be set before jax starts.*8 devices
eval.every=often | eval.every must be a number of steps, .*got 'often'
eval.every=1.5 | eval.every must be a number of steps, .*got '1.5'
checkpoint.every=-1 | checkpoint.every must be a number of steps, .*got '-1'
'checkpoint.every=5 hours' | checkpoint.every must be .*got '5 hours'
lr_schedule.warmup= | lr_schedule.warmup must be a number of steps, .*got ''
data.path= | data.path is empty: name a folder .*'stdlib'
data.path=/nowhere | data.path: there is no folder '/nowhere'; make it with .*
data.path=/ | .*manifest.json
model.context=1000 | .*val.bin: 161 tokens are too few .*1001
model.init_from=/no.safetensors | model.init_from: there is no file '/no.safetensors'
cluster.coordinator=localhost:1 | cluster needs .* got 'localhost:1', 0 and -1
cluster.num_processes=2 | cluster needs .* got '', 2 and -1
cluster.coordinator=a:1 cluster.num_processes=2 cluster.process_id=2 | cluster needs .* got 'a:1',
  2 and 2
cluster.coordinator=a:1 cluster.num_processes=3 cluster.process_id=0 | 4 replicas cannot be spread
  evenly over 3 processes
mesh.fsdp=2 mesh.devices=4 | .*need 8 devices, got mesh.devices 4
mesh.fsdp=4 batch_size=16 mesh.devices=0 | .*need 16 devices, got 8; a device cannot hold
mesh.fsdp=2 mesh.devices=8 batch_size=12 | a replica's 3 examples .* over mesh.fsdp 2 devices
mesh.fsdp=2 mesh.devices=8 batch_size=24 micro_batches=2 | a replica's 6 examples .* in 2
  micro_batches cannot be shared out over mesh.fsdp 2.*
mesh.fsdp=2 mesh.devices=8 schedule=hierarchical local_size=2 | hierarchical averages in nodes,
  whose replicas must be of one device.*
# methods: the sentences are their own (test_methods.py); here, that they arrive
algorithm=d2 schedule=bidirectional_ring mix_every=2 | .*with mix_every=2
schedule=random_out(seed=2) | schedule random_out is for algorithm push_sum, .*needs another.*
schedule=complete comm_dtype=int8 | complete averages in groups.*
comm_dtype=fp8 | comm_dtype must be one of float32, bfloat16, int8, got 'fp8'
algorithm=decentralized_adam optimizer.name=sgd | .*works with optimizer.name adam, got 'sgd'
algorithm=quasi_global_sgd | .*quasi_global_sgd adds weight decay to the gradient
algorithm=gradient_tracking gamma=0.5 | gamma is not a number of algorithm gradient_tracking
algorithm=gradient_tracking max_consensus_distance=0.5 | max_consensus_distance averages parameters
  only, and gradient_tracking keeps.*
algorithm=swarm schedule=ring swarm.bits=4 | .*swarm.bits must be 8
"""


def cases(table):
    lines = [line for line in table.replace("\n  ", " ").strip().splitlines() if line[0] != "#"]
    rows = [line.partition(" | ")[::2] for line in lines]
    return [pytest.param(shlex.split(words), message, id=words) for words, message in rows]


@pytest.mark.parametrize(("arguments", "message"), cases(WRONG))
def test_a_wrong_value_is_one_sentence_before_anything_begins(
    call, tmp_path, monkeypatch, arguments, message
):
    names = {argument.partition("=")[0] for argument in arguments}
    needs_data = "epoch" in " ".join(arguments)  # of the data, which is opened first
    if not needs_data and not any(name.startswith("mesh.") for name in names):
        # No other process is waited for, nor asked to wait.
        monkeypatch.setattr(setup.cluster, "start", None)
    code, err = call(*(f"--config.{argument}" for argument in arguments))
    if needs_data:
        err = err[err.index("train.py: ") :]  # behind the table of devices
    sentence = one_sentence(err)
    assert code == 2
    if ".*" in message:
        assert re.fullmatch(f"{message}.*", sentence), sentence
    else:
        assert sentence == message
    assert not (tmp_path / "run" / "config.json").exists()
    assert not (not needs_data and (tmp_path / "run").exists())


def test_a_full_disk_names_the_folder(call, tmp_path, monkeypatch):
    """What was written to a file that was open does not say which."""

    def write(experiment, work):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loop, "train_and_evaluate", write)
    code, err = call()
    assert code == 1 and one_sentence(err[err.index("train.py: ") :]) == (
        "OSError: [Errno 28] No space left on device, with --workdir "
        f"{tmp_path / 'run'}; once mended, the same command continues"
    )


def test_a_flag_may_be_two_words_and_take_any_spelling_of_a_bool(tiny_data, tmp_path):
    path = tiny.write_config(tmp_path / "c.py", tiny_data)
    argv = ["--config", str(path), "--workdir", "w", "--config.steps", "7", "--config.seed=3"]
    argv += ["--config.model.bias=TRUE", "--config.mesh.loop=0", "--config.eval.every=5%"]
    argv += ["--config.data.prompt", "a = b", "--config.checkpoint.every=2 epochs"]
    config, workdir = flags.parse(argv)
    assert (config.steps, config.seed, workdir) == (7, 3, "w")
    assert (config.model.bias, config.mesh.loop) == (True, False)
    assert (config.eval.every, config.checkpoint.every) == ("5%", "2 epochs")
    assert config.data.prompt == "a = b"
    config_lib.validate(config)


MADE = "from decent_jax import train as t\ndef get_config(): c = t.default_config(); {}; return c"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (MADE.format("c.accum_steps = 2"), r"accum_steps is called optimizer\.window now: "),
        ("def get_config(): raise KeyError('boom')", "broken.py: KeyError: boom$"),
        ("def get_config(): return {'steps': 3}", r"get_config\(\) must return a ConfigDict, got"),
        ("x = 1", r"has no function get_config\(\)"),
        ("def get_config(:", r"SyntaxError: invalid syntax"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys\nsys.exit(7)", "SystemExit: 7"),
        (
            MADE.format("c.stepz = 3"),
            'AttributeError: Key "stepz" does not exist .*locked. Did you mean "steps" instead of',
        ),
        (MADE.format("c.steps = 'x'"), "steps|int"),
        (
            "from ml_collections import ConfigDict as C\ndef get_config(): return C({'steps': 3})",
            "the config has no field '.*'; begin with default_config",
        ),
    ],
)
def test_a_config_file_that_does_not_work(call, tmp_path, source, message):
    path = tmp_path / "broken.py"
    path.write_text(source)
    code, err = call(config=path)
    assert code == 2
    assert re.search(message, one_sentence(err)), err


COMMAND_LINES = """
--workdir w | the following arguments are required: --config (train.py --help shows how)
--config /no/file.py | there is no config file '/no/file.py'
--config /tmp | there is no config file '/tmp'
--config CONFIG | --workdir DIR is missing: the folder for metrics and checkpoints
--config CONFIG --steps=3 | unknown argument '--steps=3' (--help
--config CONFIG extra | unknown argument 'extra' (--help shows how)
--config CONFIG --config.steps | --config.steps needs a value: --config.steps=
--config CONFIG:fast --workdir w | get_config() takes 0 positional
--config TEXT --workdir w | notes.txt has no function get_config()
"""


@pytest.mark.parametrize(("argv", "message"), cases(COMMAND_LINES))
def test_a_command_line_that_does_not_work(tiny_data, tmp_path, capsys, argv, message):
    path, text = tiny.write_config(tmp_path / "c.py", tiny_data), tmp_path / "notes.txt"
    text.write_text("")
    argv = [arg.replace("CONFIG", str(path)).replace("TEXT", str(text)) for arg in argv]
    assert main(argv) == 2
    assert message in one_sentence(capsys.readouterr().err)
    assert not Path("w").exists()


def test_show_prints_every_field_and_help_the_way(tiny_data, tmp_path, capsys):
    path = str(tiny.write_config(tmp_path / "c.py", tiny_data))
    with pytest.raises(SystemExit) as left:
        main(["--config", path, "--config.steps=77", "--show"])
    assert left.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    values = [line.partition("  # ")[0].rstrip() for line in shown]
    assert "steps = 77" in values and "model.dtype = 'float32'" in values
    assert any(line.endswith("  # updates of each replica") for line in shown)
    assert len(shown) == len(json_files.flat(train.default_config()))
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    words = capsys.readouterr().out
    assert "--config.NAME=VALUE" in words and "--workdir" in words and "resume" in words


def test_the_command_itself_exits_with_2_and_without_a_traceback(tiny_data, tmp_path):
    path = tiny.write_config(tmp_path / "c.py", tiny_data)
    argv = [sys.executable, str(ROOT / "train.py"), "--config", str(path)]
    done = subprocess.run(
        [*argv, "--config.batch_size=9", "--workdir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert one_sentence(done.stderr).startswith("batch_size 9 cannot be shared out over 4")
    assert done.stdout == "" and not (tmp_path / "run").exists()


COUNTS = "optimizer.window mix_every batch_size micro_batches local_size log.every checkpoint.keep"
COUNTS += " max_failing_steps mesh.fsdp cluster.timeout_s"


@pytest.mark.parametrize("name", COUNTS.split())
def test_nothing_counts_to_zero(name):
    with pytest.raises(ConfigError, match=f"^{name} must be at least 1, got 0$"):
        config_lib.FIELDS[name].check(name, 0)


def test_durations():
    """Of 400 steps, 50 per epoch; all but 0 are at least one step."""
    wanted = {"0, 0 epochs": 0, "7, 7 steps": 7, "1 step, 0.1%": 1, "2 epochs, 25%": 100}
    for values, steps in (wanted | {"0.5 epochs": 25, "5%,  5 % ": 20}).items():
        for value in values.split(","):
            assert fields.in_steps("x", value, steps_per_epoch=50, steps=400) == steps
    assert [fields.in_steps("x", value, 50, 400) for value in (0, 7)] == [0, 7]


@pytest.mark.parametrize("value", [-1, "-1", 1.5, True, None, "", "5 %%", "epochs", "1e3", [3]])
def test_what_is_no_duration(value):
    with pytest.raises(ConfigError, match=r"eval\.every must be a number of steps"):
        fields.parse_duration("eval.every", value)


@pytest.mark.parametrize("value", [8.0, True])
def test_types_are_checked_in_a_config_made_by_hand(tiny_data, value):
    config = tiny.config(tiny_data)
    with config.ignore_type():
        config.learning_rate = 1  # an int is as good as a float
        config_lib.validate(config)
        config.batch_size = value
    with pytest.raises(ConfigError, match=f"batch_size must be of type int .*got {value}"):
        config_lib.validate(config)


def test_loggers_that_are_not_installed_are_told_before_training(call, monkeypatch):
    monkeypatch.setattr(config_lib.importlib.util, "find_spec", lambda name: None)
    code, err = call("--config.log.wandb=true")
    assert code == 2
    assert one_sentence(err) == (
        "log.wandb needs wandb: pip install 'decent_jax[wandb]', or set it to False"
    )


def test_all_reduce_does_not_mind_the_schedule():
    config = tiny.waves(num_replicas=6, batch_size=12, schedule="hypercube")
    with pytest.raises(ConfigError, match="hypercube"):
        config_lib.validate(config)
    config.algorithm = "all_reduce"
    config_lib.validate(config)
    config.schedule = "hierarchical(complete, ring)"  # of 6 nodes with one replica
    config_lib.validate(config)
    for nonsense in ("hypercubes", "base_k(degree=2)", "base_k(max_degree=2"):
        config.schedule = nonsense
        with pytest.raises(ConfigError, match="schedule: "):
            config_lib.validate(config)


def test_schedules_with_parameters():
    config = tiny.waves(num_replicas=6, batch_size=12)
    for name in ("base_k(max_degree=2)", "random_regular(degree=3, seed=4)"):
        config.schedule = name
        assert config_lib.resolve(config)[0].name == name
    config.schedule, config.local_size = "hierarchical(complete, base_k)", 2
    assert config_lib.resolve(config)[0].period == 3


def test_a_field_newer_than_the_run_does_not_stop_its_resume():
    """It had its default; another value is a change like any other."""
    new = json_files.flat(tiny.waves())
    old = {name: value for name, value in new.items() if name != "comm_dtype"}
    assert config_lib.refused_changes(old, new) == []
    changed = config_lib.refused_changes(old, {**new, "comm_dtype": "int8"})
    assert changed == ["comm_dtype: 'float32' -> 'int8'"]


def test_a_field_with_another_name_than_in_the_run(tmp_path):
    """A run folder from before the name: it resumes, and its model is found."""
    new = json_files.flat(tiny.waves())
    old = {"accum_steps" if name == "optimizer.window" else name: v for name, v in new.items()}
    assert old["accum_steps"] == 3 and config_lib.refused_changes(old, new) == []
    changed = config_lib.refused_changes(old, {**new, "optimizer.window": 5})
    assert changed == ["optimizer.window: 3 -> 5"]
    nested = tiny.waves().to_dict()
    nested["accum_steps"] = nested["optimizer"].pop("window")
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert saved_model.Run(tmp_path).config.optimizer.window == 3


def test_drops_are_durations():
    config = tiny.waves(lr_schedule={"name": "step", "drops": "50%, 3"})
    config_lib.validate(config)
    assert config_lib.drops_in_steps(config, 10, 12) == [3, 6]
    config.lr_schedule.drops = ""
    assert config_lib.drops_in_steps(config, 10, 12) == []
    config.lr_schedule.drops = "3 weeks"
    with pytest.raises(ConfigError, match=r"each of lr_schedule\.drops must be a number"):
        config_lib.validate(config)
