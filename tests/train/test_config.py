"""What a user can get wrong in a config or on the command line, and how it is answered."""

import importlib.util
import os
import shlex
from pathlib import Path

import pytest
import tiny
from ml_collections.config_dict import required_placeholder
from refusals import refused

import decent_jax
from decent_jax import train
from decent_jax.commands import main as command
from decent_jax.ground import fields, json_files
from decent_jax.ground.errors import ConfigError
from decent_jax.train import config as config_lib
from decent_jax.train import experiment, loop

ROOT = Path(__file__).resolve().parents[2]


def main(argv):
    """As train.py does."""
    return command.train(argv, "train.py")


@pytest.fixture(name="call")
def train_py(tmp_path, tiny_data, capsys, monkeypatch):
    """train.py with the tiny config: (exit code, stderr); training itself is an error."""

    def never(runner, work):
        raise AssertionError("training began")

    monkeypatch.setattr(loop, "train", never)
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


# Arguments, and where they are not those of the first argument: the field and the value in the
# sentence. A value of "" is not looked for.
WRONG = """
# names
num_replica=4 | num_replica |
xyzzy=4 | xyzzy |
mesh=4 | mesh |
# types
num_replicas=four
model.bias=maybe
# choices
task=chess
algorithm=adam
combine=without
model.preset=tiny
schedule=stars
schedule=base_k(max_degree
schedule=base_k(degree=2) | schedule | degree
schedule=hierarchical | schedule | replicas_per_node must be
# numbers
steps=0
learning_rate=nan
optimizer.b1=1
# combinations
batch_size=10
eval.batch_size=6
micro_batches=3
num_replicas=6 batch_size=12 schedule=hypercube | schedule | hypercube of 6
schedule=alternating_exp_ring replicas_per_node=3 | schedule | 3
model.heads=3 | heads | 16
model.vocab_size=100
lr_schedule.name=cosine lr_schedule.warmup=13 | lr_schedule.warmup | 13
lr_schedule.name=cosine 'lr_schedule.warmup=1 epoch' | lr_schedule.warmup | 50
mesh.devices=3
mesh.devices=16 num_replicas=16 batch_size=16
eval.every=often
'checkpoint.every=5 hours'
data.path=
data.alpha=0
data.partition=dirichlet
data.path=/nowhere
data.path=/ | manifest.json |
model.context=1000 | tokens | 1001
model.init_from=/no.safetensors
cluster.coordinator=localhost:1 | cluster.process_id | -1
cluster.num_processes=2 | cluster.process_id | -1
cluster.coordinator=a:1 cluster.num_processes=2 cluster.process_id=2 | cluster.process_id | 2
cluster.coordinator=a:1 cluster.num_processes=3 cluster.process_id=0 | cluster.num_processes | 3
mesh.fsdp=2 mesh.devices=4 | mesh.devices | 4
mesh.fsdp=4 batch_size=16 mesh.devices=0 | devices | 16
mesh.fsdp=2 mesh.devices=8 batch_size=12 | mesh.fsdp | 2
mesh.fsdp=2 mesh.devices=8 batch_size=24 micro_batches=2 | mesh.fsdp | 2
mesh.fsdp=2 mesh.devices=8 schedule=hierarchical replicas_per_node=2 | schedule | hierarchical
# methods refuse by themselves (test_methods.py); here, that it arrives
algorithm=d2 schedule=bidirectional_ring mix_every=2 | mix_every | 2
algorithm=diloco schedule=complete mix_every=4 outer.delay=4 | outer.delay | 4
algorithm=noloco outer.delay=1 | outer.delay | 1
algorithm=noloco mix_every=4 outer.delay=-1 | outer.delay | -1
mix_every=13 | mix_every | 12
schedule=random_out(seed=2) | schedule | random_out
codec=float8 | float32, bfloat16, int8, int4, lattice8, lattice16 | float8
algorithm=sparta | sparseloco | sparta
sparta.fraction=0.1 | sparta.fraction | choco.fraction
algorithm=decentralized_adam optimizer.name=sgd | optimizer.name | sgd
algorithm=quasi_global_sgd | optimizer.weight_decay |
algorithm=gradient_tracking gamma=0.5 | gamma | 0.5
algorithm=diloco schedule=complete mix_every=4 outer.delay=2 mix_rounds=2 | mix_rounds | 2
algorithm=gossiped_momentum mix_rounds=3 | mix_rounds | 3
mix_rounds=0 | mix_rounds | 0
algorithm=gradient_tracking gamma_lr_exponent=0.5 | gamma_lr_exponent | 0.5
learning_rate=0.0 gamma_lr_exponent=0.5 | gamma_lr_exponent | 0.5
algorithm=swarm schedule=hypercube codec=int8 | codec | int8
codec=lattice8 | codec | swarm
algorithm=all_reduce codec=lattice8 | codec | swarm
swarm.bits=8 | swarm.bits |
# trainers of their own
trainer=peers algorithm=d2 schedule=bidirectional_ring | algorithm | d2
trainer=peers algorithm=swarm optimizer.name=sgd peers.start_s=4 | peers.start_s | 4
trainer=peers algorithm=swarm optimizer.name=sgd peers.silent_s=0.3 | peers.silent_s | 0.3
trainer=peers algorithm=swarm optimizer.name=sgd codec=int4 | codec | int4
trainer=peers algorithm=noloco optimizer.name=sgd outer.fragments=2 | outer.fragments | 2
trainer=pipelines pipeline.stages=2 pipeline.micro_batches=3 | pipeline.micro_batches | 3
trainer=pipelines pipeline.stages=2 micro_batches=2 | micro_batches | 2
trainer=pipelines pipeline.stages=2 model.preset=llama_125m | model.preset | llama_125m
trainer=pipelines pipeline.stages=2 algorithm=gradient_tracking | algorithm | gradient_tracking
"""

# The words that people see, whole; the only ones of this file.
GOLDEN = {
    "num_replica=4": "the config has no field 'num_replica'; did you mean 'num_replicas'?",
    "lr_schedule=cosine": "'lr_schedule' is a section of the config; set one of its fields, as "
    "'lr_schedule.name'",
    "xyzzy=4": "the config has no field 'xyzzy'; --show prints them all",
    "num_replicas=four": "num_replicas must be of type int (such as 8), got 'four'",
    "combine=without": "combine must be one of awc, atc or left empty, got 'without'",
    "steps=0": "steps must be at least 1 (or epochs above 0), got 0",
    "optimizer.b1=1": "optimizer.b1 must be in [0, 1), got 1.0",
    "batch_size=10": "batch_size must be a multiple of num_replicas, 4, got 10",
    "data.path=/nowhere": "data.path: there is no folder '/nowhere'; make it with `decent-jax "
    "prepare text`",
}


def cases(table):
    lines = [line for line in table.strip().splitlines() if line[0] != "#"]
    for line in lines:
        words, *expected = (part.strip() for part in line.split("|"))
        arguments = shlex.split(words)
        yield pytest.param(arguments, *(expected or arguments[0].split("=", 1)), id=words)


@pytest.mark.parametrize(("arguments", "field", "value"), list(cases(WRONG)))
def test_a_wrong_value_is_refused_before_anything_begins(
    call, tmp_path, monkeypatch, arguments, field, value
):
    """By the command as by `train.run`, which --check and the planner ask, too."""
    names = {argument.partition("=")[0] for argument in arguments}
    needs_data = "epoch" in " ".join(arguments)  # of the data, which is opened first
    if not needs_data and not any(name.startswith("mesh.") for name in names):
        # No other process is waited for, nor asked to wait.
        monkeypatch.setattr(experiment.cluster, "start", None)
    code, err = call(*(f"--config.{argument}" for argument in arguments))
    if needs_data:
        err = err[err.index("train.py: ") :]  # behind the table of devices
    sentence = one_sentence(err)
    assert code == 2
    assert field in sentence and value in sentence, sentence
    assert sentence == GOLDEN.get(" ".join(arguments), sentence)
    assert not (tmp_path / "run" / "config.json").exists()
    assert not (not needs_data and (tmp_path / "run").exists())


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"batch_size": 10}, "batch_size", 10),
        ({"schedule": "stars"}, "schedule", "stars"),
        ({"seed": -1}, "seed", -1),
        ({"algorithm": "all_reduce", "mix_every": 3}, "mix_every", 3),
        ({"algorithm": "noloco", "mix_every": 2, "outer": {"delay": 2}}, "outer.delay", 2),
        ({"trainer": "peers"}, "algorithm", "accum_adam"),
        ({"trainer": "pipelines"}, "task", "toys.waves"),
    ],
)
def test_a_refusal_carries_its_field_and_value(changes, field, value):
    """Whatever asks: a run or a dry run."""
    with refused(field, value):
        config_lib.validate(tiny.waves(**changes))
    with refused(field, value):
        train.dry_run(tiny.waves(**changes))


def test_what_trains_a_config_is_what_it_asks_for(monkeypatch, tmp_path):
    """Also for those who call `decent_jax.run` from Python."""
    asked = []
    for name in ("peers", "pipelines"):
        room = importlib.import_module(f"decent_jax.{name}")
        monkeypatch.setattr(room, "run", lambda config, workdir, name=name: asked.append(name))
    decent_jax.run(tiny.waves(trainer="peers"), tmp_path)
    decent_jax.run(tiny.waves(trainer="pipelines"), tmp_path)
    assert asked == ["peers", "pipelines"] and not any(tmp_path.iterdir())


def test_nothing_counts_to_zero():
    table = config_lib.fields_of("language_modeling")
    counts = "optimizer.accum_steps mix_every batch_size micro_batches replicas_per_node"
    for name in f"{counts} log.every mesh.fsdp checkpoint.keep cluster.timeout_s".split():
        with refused(name, 0):
            table[name].check(name, 0)


def test_the_largest_values_that_are_allowed():
    wave = {"steps": 12, "mix_every": 12, "recovery": {"every": 12}, "algorithm": "noloco"}
    wave |= {"lr_schedule": {"name": "cosine", "warmup": 12}, "outer": {"delay": 11}}
    wave |= {"data": {"workers": 32 * os.cpu_count()}, "num_replicas": 4, "batch_size": 8}
    config_lib.validate(tiny.waves(micro_batches=2, **wave))


def test_durations():
    """Of 400 steps, 50 per epoch; all but 0 are at least one step."""
    wanted = {"0, 0 epochs": 0, "7, 7 steps": 7, "1 step, 0.1%": 1, "2 epochs, 25%": 100}
    for values, steps in (wanted | {"0.5 epochs": 25, "5%,  5 % ": 20}).items():
        for value in values.split(","):
            assert fields.in_steps("x", value, steps_per_epoch=50, steps=400) == steps
    assert [fields.in_steps("x", value, 50, 400) for value in (0, 7)] == [0, 7]


def test_what_is_no_duration():
    for value in (-1, "-1", 1.5, True, None, "", "5 %%", "epochs", "1e3", [3]):
        with refused("eval.every", value):
            fields.parse_duration("eval.every", value)


def test_types_are_checked_in_a_config_made_by_hand(tiny_data):
    for value in (8.0, True):
        config = tiny.config(tiny_data)
        with config.ignore_type():
            config.learning_rate = 1  # an int is as good as a float
            config.batch_size = value
        with refused("batch_size", value):
            config_lib.validate(config)


def test_a_config_is_a_tree_of_values():
    config = tiny.waves()
    config.unlock()
    config.steps = required_placeholder(int)
    with pytest.raises(ConfigError, match="placeholder"):
        config_lib.validate(config)
    config.steps, config.log = 8, config
    with pytest.raises(ConfigError, match="contains itself"):
        config_lib.validate(config)


def test_all_reduce_does_not_mind_the_schedule():
    config = tiny.waves(num_replicas=6, batch_size=12, schedule="hypercube")
    with refused("schedule", "hypercube"):
        config_lib.validate(config)
    config.algorithm = "all_reduce"
    config_lib.validate(config)


def test_a_field_newer_than_the_run_does_not_stop_its_resume():
    """It had its default; another value is a change like any other."""
    new = json_files.flat(tiny.waves())
    old = {name: value for name, value in new.items() if name != "codec"}
    assert config_lib.refused_changes(old, new) == []
    images = json_files.flat(train.default_config("image_classification"))
    assert config_lib.refused_changes(images, images | {"data.path": "moved"}) == []
    changed = config_lib.refused_changes(old, {**new, "codec": "int8"})
    assert changed == ["codec: 'float32' -> 'int8'"]
    # A batch may follow the number of replicas.
    assert config_lib.refused_changes(new, {**new, "num_replicas": 2, "batch_size": 4}) == []
    assert config_lib.refused_changes(new, {**new, "num_replicas": 2, "batch_size": 6})


def test_drops_are_durations():
    config = tiny.waves(lr_schedule={"name": "step", "drops": "50%, 3"})
    config_lib.validate(config)
    assert config_lib.drops_in_steps(config, 10, 12) == [3, 6]
    config.lr_schedule.drops = ""
    assert config_lib.drops_in_steps(config, 10, 12) == []
    config.lr_schedule.drops = "3 weeks"
    with refused("each of lr_schedule.drops", "3 weeks"):
        config_lib.validate(config)


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"below": 1.0}, (-5.0, 0.0, 0.999), (1.0, 2.0, float("nan"), float("-inf"))),
        ({"below": 1.0, "at_least": 0.0}, (0.0, 0.5), (-0.1, 1.0)),
        ({"below": 0.0, "at_least": -2.0}, (-2.0, -0.1), (0.0, -2.1)),
        ({"above": -1.0, "below": 1.0}, (-0.9, 0.9), (-1.0, 1.0)),
        ({"above": 0.0, "at_most": 2.0}, (0.1, 2.0), (0.0, 2.1, float("inf"))),
    ],
)
def test_each_bound_of_a_field_holds_alone(bounds, good, bad):
    field = fields.Field(0.5, "a number", **bounds)
    for value in good:
        field.check("x", value)
    for value in bad:
        with refused("x"):
            field.check("x", value)


@pytest.mark.parametrize("text", ["1e-400", "-1e-400", "0.0001e-9999", "5e-324", "1e-40"])
def test_a_number_that_float32_would_take_for_0_is_refused(text):
    field = fields.Field(0.5, "a number", at_least=-1.0)
    with pytest.raises(ValueError, match=f"^x must be 0, or at least 1.2e-38 .* got '?{text}"):
        field.check("x", fields.parse(field, "x", text))


@pytest.mark.parametrize("text", ["0", "0.0", "-0e7", "0e-400", "1e-37"])
def test_0_is_a_number(text):
    field = fields.Field(0.5, "a number", at_least=-1.0)
    field.check("x", fields.parse(field, "x", text))
