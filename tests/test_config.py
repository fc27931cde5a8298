"""What a user can get wrong in a config or on the command line, and the sentence that answers."""

import errno
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from decent_jax import fields, json_files, train
from decent_jax.optim import METHODS
from decent_jax.train import ConfigError, flags, loop
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib

ROOT = Path(__file__).resolve().parents[1]


def load_command():
    """The file train.py as a module."""
    spec = importlib.util.spec_from_file_location("train_command", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


command = load_command()


@pytest.fixture
def call(tmp_path, tiny_data, capsys, monkeypatch):
    """train.py with the tiny config: (exit code, stderr); training itself is an error."""

    def never(self):
        raise AssertionError("training began")

    monkeypatch.setattr(loop._Trainer, "train", never)
    path = tiny.write_config(tmp_path / "tiny_config.py", tiny_data)

    def call(*arguments, config=path, workdir=tmp_path / "run"):
        argv = ["--config", str(config), *arguments]
        code = command.main(argv + (["--workdir", str(workdir)] if workdir else []))
        return code, capsys.readouterr().err

    return call


def one_sentence(err: str) -> str:
    assert err.startswith("train.py: ") and err.count("\n") == 1, err
    assert "Traceback" not in err and len(err) < 500
    return err.removeprefix("train.py: ").strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # names
        (["num_replica=4"], "the config has no field 'num_replica'; did you mean 'num_replicas'?"),
        (["model.layer=4"], "the config has no field 'model.layer'; did you mean 'model.layers'?"),
        (["xyzzy=4"], "the config has no field 'xyzzy'; train.py --show prints them all"),
        (["mesh=4"], "the config has no field 'mesh'.*"),
        # types
        (["num_replicas=four"], "num_replicas must be of type int (such as 8), got 'four'"),
        (["steps=1e3"], "steps must be of type int (such as 1000), got '1e3'"),
        (["learning_rate=fast"], "learning_rate must be of type float (such as 0.001), got 'fast'"),
        (["model.bias=maybe"], "model.bias must be of type bool (such as True), got 'maybe'"),
        (["model.bias="], "model.bias must be of type bool (such as True), got ''"),
        # choices
        (
            ["task=chess"],
            "task must be one of language_modeling, image_classification, translation, got 'chess'",
        ),
        (
            ["algorithm=adam"],
            f"algorithm must be one of {', '.join(METHODS)}, got 'adam'",
        ),
        (["combine=without"], "combine must be one of with, then or left empty, got 'without'"),
        (
            ["lr_schedule.name=linear"],
            "lr_schedule.name must be one of cosine, inverse_sqrt, step, constant, got 'linear'",
        ),
        (
            ["model.preset=tiny"],
            "model.preset must be one of small, medium, large, xl, got 'tiny'",
        ),
        (["model.dtype=int8"], "model.dtype must be .*got 'int8'"),
        (["model.attention=flash"], "model.attention must be .*got 'flash'"),
        (["schedule=stars"], "schedule: unknown schedule .*'stars'"),
        (["schedule=base_k(max_degree"], "schedule: .*cannot be read where it ends"),
        (["schedule=base_k(degree=2)"], "schedule: base_k has no parameter 'degree'; it takes .*"),
        (["schedule=base_k(max_degree=0)"], "schedule: base_k: max_degree must .*1, got 0"),
        (["schedule=hierarchical"], "schedule: hierarchical needs .*4 replicas with local_size 1"),
        # numbers
        (["num_replicas=0"], "num_replicas must be at least 1, got 0"),
        (["accum_steps=0"], "accum_steps must be at least 1, got 0"),
        (["mix_every=0"], "mix_every must be at least 1, got 0"),
        (["batch_size=0"], "batch_size must be at least 1, got 0"),
        (["micro_batches=0"], "micro_batches must be at least 1, got 0"),
        (["local_size=0"], "local_size must be at least 1, got 0"),
        (["log.every=0"], "log.every must be at least 1, got 0"),
        (["checkpoint.keep=0"], "checkpoint.keep must be at least 1, got 0"),
        (["max_failing_steps=0"], "max_failing_steps must be at least 1, got 0"),
        (["seed=-1"], "seed must not be negative, got -1"),
        (["steps=0"], "steps must be at least 1 (or epochs above 0), got 0"),
        (["steps=-5"], "steps must not be negative, got -5"),
        (["learning_rate=-0.1"], "learning_rate must not be negative, got -0.1"),
        (["learning_rate=nan"], "learning_rate must not be negative, got nan"),
        (["optimizer.b1=1"], "optimizer.b1 must be in [0, 1), got 1.0"),
        (["eval.ema_decay=1.5"], "eval.ema_decay must be in [0, 1), got 1.5"),
        (["epochs=0.001"], "0.001 epochs are less than a step, 50 are one epoch"),
        (["cluster.timeout_s=0"], "cluster.timeout_s must be at least 1, got 0"),
        # combinations
        (
            ["batch_size=10"],
            "batch_size 10 cannot be shared out over 4 replicas; use a multiple of 4",
        ),
        (
            ["eval.batch_size=6"],
            "eval.batch_size 6 cannot be shared out over 4 replicas; use a multiple of 4",
        ),
        (
            ["micro_batches=3"],
            "a replica's 2 examples (batch_size 8 over 4 replicas) cannot be cut into 3 "
            "micro_batches",
        ),
        (["num_replicas=6", "batch_size=12", "schedule=hypercube"], "schedule: hypercube .*got 6"),
        (["num_replicas=3", "batch_size=12", "schedule=ring"], "schedule: ring .*3"),
        (["schedule=alternating_exp_ring"], "schedule: alternating_exp_ring .*local_size.*1"),
        (["schedule=alternating_exp_ring", "local_size=3"], "schedule: .*3"),
        (["model.heads=3"], "model.*width.*16.*heads.*3|model.*heads.*3.*width.*16"),
        (["model.vocab_size=100"], "model.vocab_size 100 is smaller than the tokenizer's 256"),
        (["lr_schedule.name=cosine", "lr_schedule.warmup=13"], ".*warmup of 13 steps .*run of 12"),
        (
            ["lr_schedule.name=cosine", "lr_schedule.warmup=1 epoch"],
            "lr_schedule.warmup of 50 steps does not fit into a run of 12",
        ),
        (["mesh.devices=3"], "mesh.devices 3 must .*4 replicas"),
        (["mesh.devices=16", "num_replicas=16", "batch_size=16"], "mesh.devices 16 must .*most 8"),
        (["mesh.simulate=3"], "mesh.simulate = 3 must be set before jax starts.*8 devices"),
        # durations
        (["eval.every=often"], "eval.every must be a number of steps, .*got 'often'"),
        (["eval.every=1.5"], "eval.every must be a number of steps, .*got '1.5'"),
        (["checkpoint.every=-1"], "checkpoint.every must be a number of steps, .*got '-1'"),
        (["checkpoint.every=5 hours"], "checkpoint.every must be .*got '5 hours'"),
        (["lr_schedule.warmup="], "lr_schedule.warmup must be a number of steps, .*got ''"),
        # data
        (["data.path="], "data.path is empty: name a folder .*'stdlib'"),
        (["data.path=/nowhere"], "data.path: there is no folder '/nowhere'"),
        (["data.path=/"], ".*manifest.json"),
        (["model.context=1000"], ".*val.bin: 161 tokens are too few .*1001"),
        (
            ["model.init_from=/no.safetensors"],
            "model.init_from: there is no file '/no.safetensors'",
        ),
        # cluster
        (["cluster.coordinator=localhost:1"], "cluster needs .* got 'localhost:1', 0 and -1"),
        (["cluster.num_processes=2"], "cluster needs .* got '', 2 and -1"),
        (
            ["cluster.coordinator=a:1", "cluster.num_processes=2", "cluster.process_id=2"],
            "cluster needs .* got 'a:1', 2 and 2",
        ),
        (
            ["cluster.coordinator=a:1", "cluster.num_processes=3", "cluster.process_id=0"],
            "4 replicas cannot be spread evenly over 3 processes",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_one_sentence_before_anything_begins(call, tmp_path, arguments, message):
    code, err = call(*(f"--config.{argument}" for argument in arguments))
    before_the_folder = "epoch" not in " ".join(arguments)  # for those, the data is opened first
    if not before_the_folder:
        err = err[err.index("train.py: ") :]  # behind the table of devices
    sentence = one_sentence(err)
    assert code == 2
    if ".*" in message:
        assert re.fullmatch(f"{message}.*", sentence), sentence
    else:
        assert sentence == message
    assert not (tmp_path / "run" / "config.json").exists()
    assert not (before_the_folder and (tmp_path / "run").exists())


def test_a_full_disk_names_the_folder(call, tmp_path, monkeypatch):
    """What was written to a file that was open does not say which."""

    def write(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loop._Trainer, "train", write)
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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def get_config(): raise KeyError('boom')", "broken.py: KeyError: boom$"),
        ("def get_config(): return {'steps': 3}", r"get_config\(\) must return a ConfigDict, got"),
        ("x = 1", r"has no function get_config\(\)"),
        ("def get_config(:", r"SyntaxError: invalid syntax"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "from decent_jax import train\n"
            "def get_config():\n    c = train.default_config()\n    c.stepz = 3\n    return c",
            'AttributeError: Key "stepz" does not exist .*locked. Did you mean "steps" instead of',
        ),
        (
            "from decent_jax import train\n"
            "def get_config():\n    c = train.default_config()\n    c.steps = 'x'\n    return c",
            "steps|int",
        ),
        (
            "import ml_collections\n"
            "def get_config(): return ml_collections.ConfigDict({'steps': 3})",
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: --config (train.py --help shows how)"),
        (["--config", "/no/file.py"], "there is no config file '/no/file.py'"),
        (["--config", "/tmp"], "there is no config file '/tmp'"),
        (
            ["--config", "CONFIG"],
            "--workdir DIR is missing: the folder for metrics and checkpoints",
        ),
        (["--config", "CONFIG", "--steps=3"], "unknown argument '--steps=3' (train.py --help"),
        (["--config", "CONFIG", "extra"], "unknown argument 'extra' (train.py --help shows how)"),
        (["--config", "CONFIG", "--config.steps"], "--config.steps needs a value: --config.steps="),
        (["--config", "CONFIG:fast", "--workdir", "w"], "get_config() takes 0 positional"),
        (["--config", "TEXT", "--workdir", "w"], "is not a Python file"),
    ],
)
def test_a_command_line_that_does_not_work(tiny_data, tmp_path, capsys, argv, message):
    path = str(tiny.write_config(tmp_path / "c.py", tiny_data))
    text = tmp_path / "notes.txt"
    text.write_text("")
    argv = [arg.replace("CONFIG", path).replace("TEXT", str(text)) for arg in argv]
    assert command.main(argv) == 2
    assert message in one_sentence(capsys.readouterr().err)
    assert not Path("w").exists()


def test_show_prints_every_field_and_help_the_way(tiny_data, tmp_path, capsys):
    path = str(tiny.write_config(tmp_path / "c.py", tiny_data))
    with pytest.raises(SystemExit) as left:
        command.main(["--config", path, "--config.steps=77", "--show"])
    assert left.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    values = [line.partition("  # ")[0].rstrip() for line in shown]
    assert "steps = 77" in values and "model.dtype = 'float32'" in values
    assert any(line.endswith("  # updates of each replica") for line in shown)
    assert len(shown) == len(json_files.flat(train.default_config()))
    with pytest.raises(SystemExit) as left:
        command.main(["--help"])
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


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (0, 0),
        (7, 7),
        ("7", 7),
        ("7 steps", 7),
        ("1 step", 1),
        ("2 epochs", 100),
        ("0.5 epochs", 25),
        ("5%", 20),
        (" 5 % ", 20),
        ("0.1%", 1),  # 0.4 steps: at least one
        ("0 epochs", 0),
    ],
)
def test_durations(value, steps):
    assert fields.in_steps("x", value, steps_per_epoch=50, steps=400) == steps


@pytest.mark.parametrize("value", [-1, "-1", 1.5, True, None, "", "5 %%", "epochs", "1e3", [3]])
def test_what_is_no_duration(value):
    with pytest.raises(ConfigError, match=r"eval\.every must be a number of steps"):
        fields.parse_duration("eval.every", value)


def test_types_are_checked_in_a_config_made_by_hand(tiny_data):
    config = tiny.config(tiny_data)
    with config.ignore_type():
        config.batch_size = 8.0
    with pytest.raises(ConfigError, match=r"batch_size must be of type int .*got 8\.0"):
        config_lib.validate(config)
    config = tiny.config(tiny_data)
    with config.ignore_type():
        config.batch_size = True
    with pytest.raises(ConfigError, match=r"batch_size must be of type int .*got True"):
        config_lib.validate(config)
    config = tiny.config(tiny_data)
    with config.ignore_type():
        config.learning_rate = 1  # an int is as good as a float
    config_lib.validate(config)


def test_loggers_that_are_not_installed_are_told_before_training(call, monkeypatch):
    monkeypatch.setattr(config_lib.importlib.util, "find_spec", lambda name: None)
    code, err = call("--config.log.wandb=true")
    assert code == 2
    assert one_sentence(err) == (
        "log.wandb needs wandb: pip install 'decent_jax[wandb]', or set it to False"
    )


def test_all_reduce_does_not_mind_the_schedule(tiny_data):
    config = tiny.config(tiny_data, num_replicas=6, batch_size=12, schedule="hypercube")
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


def test_schedules_with_parameters(tiny_data):
    config = tiny.config(tiny_data, num_replicas=6, batch_size=12)
    for name in ("base_k(max_degree=2)", "random_regular(degree=3, seed=4)"):
        config.schedule = name
        config_lib.validate(config)
        assert config_lib.make_schedule(config).name == name
    config.schedule, config.local_size = "hierarchical(complete, base_k)", 2
    assert config_lib.make_schedule(config).period == 3


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_every_config_loads_and_is_valid_but_for_its_data(path, tiny_data):
    config = flags.load(str(path))
    made = ("stdlib", "generated", "numbers")
    if not Path(config.data.path).is_dir() and config.data.path not in made:
        config.data.path = "numbers" if config.task == "translation" else str(tiny_data)
        if config.task == "language_modeling":
            config.model.context = tiny.CONTEXT
    config_lib.validate(config)
    words = path.read_text()
    assert words.startswith('"""') and "Source" in words.split('"""')[1]


def test_a_field_newer_than_the_run_does_not_stop_its_resume(tiny_data):
    """It had its default; another value is a change like any other."""
    new = json_files.flat(tiny.config(tiny_data))
    old = {name: value for name, value in new.items() if name != "comm_dtype"}
    assert config_lib.refused_changes(old, new) == []
    changed = config_lib.refused_changes(old, {**new, "comm_dtype": "int8"})
    assert changed == ["comm_dtype: 'float32' -> 'int8'"]


IMAGENET_ARMS = {
    "resnet50_imagenet": ("accum_adam", "decentralized_adam", "all_reduce", "momentum_sgd"),
    "resnet50_imagenet_expgraph": ("one_peer_exp", "static_exp", "ring", "all_reduce"),
    "clothing_images": ("all_reduce", "accum_adam", "accum_adam_ring", "momentum_sgd"),
}


@pytest.mark.parametrize(
    ("name", "arm"), [(name, arm) for name, arms in IMAGENET_ARMS.items() for arm in arms]
)
def test_the_arms_of_the_image_configs(name, arm, tmp_path):
    config = flags.load(f"{ROOT}/configs/{name}.py:{arm}")
    config.data.path = str(tmp_path)
    config_lib.validate(config)
    assert (config.algorithm == "all_reduce") == (arm == "all_reduce")
    assert not config.optimizer.decoupled  # L2, as published
    if name != "clothing_images":
        local = flags.load(f"{ROOT}/configs/{name}.py:{arm},runlocal")
        config_lib.validate(local)
        assert local.algorithm == config.algorithm
    with pytest.raises(config_lib.ConfigError, match=f"{name} takes .*, got 'sgd'"):
        flags.load(f"{ROOT}/configs/{name}.py:sgd")


def test_the_published_settings_of_resnet50():
    """REFERENCE.md, E2: per-step cosine to 1e-5 over 112,590 steps, decay 2^-15, labels 0.1."""
    config = flags.load(f"{ROOT}/configs/resnet50_imagenet.py:accum_adam")
    epoch = -(-1_281_167 // config.batch_size)
    steps = round(config.epochs * epoch)
    assert (epoch, steps) == (1252, 112_680)  # the reference leaves out the last, partial batch
    warmup = fields.in_steps("warmup", config.lr_schedule.warmup, epoch, steps)
    rate = step_lib.learning_rate(config, steps, warmup, [])
    assert warmup == 5 * epoch
    assert float(rate(warmup)) == pytest.approx(1.5e-3)
    assert float(rate(steps)) == pytest.approx(1e-5)
    assert config.optimizer.weight_decay == 1 / 32768
    assert config.accum_steps == 8 and config.model.label_smoothing == 0.1


def test_the_learning_rate_of_the_exponential_graph_paper():
    config = flags.load(f"{ROOT}/configs/resnet50_imagenet_expgraph.py:one_peer_exp")
    epoch = 1252
    drops = config_lib.drops_in_steps(config, epoch, 90 * epoch)
    assert drops == [30 * epoch, 60 * epoch, 80 * epoch]
    rate = step_lib.learning_rate(config, 90 * epoch, 5 * epoch, drops)
    for at, wanted in ((0, 0.4 / (5 * epoch)), (5 * epoch - 1, 0.4), (30 * epoch - 1, 0.4)):
        assert float(rate(at)) == pytest.approx(wanted)
    for at, wanted in ((30 * epoch, 0.04), (60 * epoch, 0.004), (80 * epoch, 0.0004)):
        assert float(rate(at)) == pytest.approx(wanted)


def test_drops_are_durations(tiny_data):
    config = tiny.config(tiny_data, lr_schedule={"name": "step", "drops": "50%, 3"})
    config_lib.validate(config)
    assert config_lib.drops_in_steps(config, 10, 12) == [3, 6]
    config.lr_schedule.drops = ""
    assert config_lib.drops_in_steps(config, 10, 12) == []
    config.lr_schedule.drops = "3 weeks"
    with pytest.raises(
        config_lib.ConfigError, match=r"each of lr_schedule\.drops must be a number"
    ):
        config_lib.validate(config)


@pytest.mark.parametrize("name", ["transformer_wmt14_ende", "transformer_wmt14_enfr"])
@pytest.mark.parametrize(
    ("arguments", "peak", "betas", "window"),
    [
        ("all_reduce", 7e-4, (0.9, 0.98), None),
        ("decentralized_adam,8", 2.0e-3, (0.974, 0.999), None),
        ("decentralized_adam", 2.8e-3, (0.974, 0.999), None),
        ("decentralized_adam,32", 3.8e-3, (0.974, 0.999), None),
        ("8,accum_adam", 8e-4, (0.9, 0.999), 4),
        ("accum_adam", 7e-4, (0.9, 0.999), 8),
    ],
)
def test_the_published_settings_of_wmt14(name, arguments, peak, betas, window):
    """REFERENCE.md, E1."""
    config = flags.load(f"{ROOT}/configs/{name}.py:{arguments}")
    assert config.model.preset == ("big" if name.endswith("fr") else "base")
    assert config.learning_rate == peak
    assert (config.optimizer.b1, config.optimizer.b2) == betas
    assert window is None or config.accum_steps == window
    rate = step_lib.learning_rate(config, config.steps, 4000, [])
    for step in (0, 1999, 3999, 99_999):  # the published formula
        factor = 0.99 * (step + 1) / 4000 + 0.01 if step < 4000 else (4000 / (step + 1)) ** 0.5
        assert float(rate(step)) == pytest.approx(peak * factor, rel=1e-5)
    local = flags.load(f"{ROOT}/configs/{name}.py:{arguments},runlocal")
    config_lib.validate(local)
    assert (local.data.path, local.algorithm) == ("numbers", config.algorithm)
    with pytest.raises(config_lib.ConfigError, match="takes one of each of base, big"):
        flags.load(f"{ROOT}/configs/{name}.py:{arguments},huge")
