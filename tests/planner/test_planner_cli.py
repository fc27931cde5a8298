"""The planner's commands: what they print and write, and one sentence for every mistake."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from decent_jax import train
from decent_jax.optim import METHODS
from decent_jax.plan import plan_file
from decent_jax.planner import __main__ as cli
from decent_jax.planner import network, predict, recommend
from decent_jax.planner.runtime import Workload
from decent_jax.train import flags

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpt2_openwebtext.py"
CLUSTER = ["--network", "nvlink_25gbe", "--devices_per_node", "4"]
TWO = [*CLUSTER, "--nodes", "2"]
MODEL = ["--parameters", "124e6", "--compute_s", "0.2"]
PLACED = ["--parameters", "1e6"]
STAGES = ["--stages", "2", "--replicas", "4", "--pipeline_bytes", "1e6"]


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def works(capsys, *arguments):
    """What the command prints."""
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    return out


def refused(capsys, *arguments):
    """The sentence on stderr; nothing else may be printed."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("decent-jax planner: ")
    assert err.count("\n") == 1 and "Traceback" not in err
    return err


def work_of(parameters=124e6, compute_s=0.2, **others):
    """As the flags say it: a third of the compute is forward."""
    return Workload(4 * parameters, compute_s / 3, 2 * compute_s / 3, **others)


def test_predict_reads_compute_times_from_a_run(capsys, tmp_path):
    """Without the first row, which compiles; the mean of 4 steps varies half as much as a step."""
    times = 0.2 * np.exp(0.05 * np.random.default_rng(0).standard_normal(60))
    times[0] = 9.0
    rows = [{"step": 4 * k, "perf/step_time_s": time} for k, time in enumerate(times)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 240}]))
    command = ["predict", *CLUSTER, "--nodes", 2, "--parameters", "1e6", "--trace", tmp_path]
    row = works(capsys, *command).splitlines()[2]  # of all_reduce
    step, compute, _, stragglers = map(float, re.findall(r"\d+\.\d", row)[:4])
    assert compute == pytest.approx(1e3 * times[1:].mean(), abs=0.1)
    assert stragglers == pytest.approx(200 * 0.1 * 1.42, rel=0.25)  # E max of 8
    assert step > compute + stragglers - 0.2
    for text, named in (("{}\n", "0 rows"), ("torn {\n{}\n", "line 1")):
        file.write_text(text)
        err = refused(capsys, *command)
        assert named in err and str(tmp_path) in err


HURRY = ["--time_limit_s", "0.2"]


def printed_fields(out):
    lines = re.findall(r"^    config\.(\S+) = (.*)$", out, re.M)
    return {name: json.loads(value) for name, value in lines}


CONFIG_OF = """
from decent_jax import train
def get_config():
    config = train.default_config("language_modeling")
    config.batch_size = config.eval.batch_size = config.num_replicas = {replicas}
    config.data.path, config.algorithm, config.model.vocab_size = {path!r}, {algorithm!r}, 256
    return config
"""


@pytest.mark.filterwarnings("ignore:d2 on")
@pytest.mark.parametrize("algorithm", METHODS)
def test_train_takes_what_is_recommended_for_a_config_and_its_plan(capsys, tmp_path, algorithm):
    """Of any method, before its data are there."""
    name, path = tmp_path / "mine.py", tmp_path / "plan.json"
    name.write_text(CONFIG_OF.format(replicas=4, path="", algorithm=algorithm))
    network.preset("nvlink_25gbe", 2, 2).save(tmp_path / "network.json")
    _, out, _ = run(
        capsys,
        *("recommend", "--network", tmp_path / "network.json", "--config", name),
        *("--compute_s", 1e-9, "--codecs", "int8,float32", "--mix_every", "1,2", *HURRY),
        *("--schedules", "complete,bidirectional_ring,hierarchical,random_matching"),
        *("--plan", path),
    )
    config = flags.load(str(name))
    config.data.path = "stdlib"
    config.update_from_flattened_dict(printed_fields(out))
    train.validate(config)
    assert path.exists() == (config.algorithm != "all_reduce")
    if path.exists():
        config.cluster.plan = str(path)
        train.validate(config)


@pytest.mark.parametrize("arguments", [[], ["--stages", "2", "--replicas", "2"]], ids=len)
def test_train_takes_the_plan_of_place_with_the_fields_that_are_printed(
    capsys, tmp_path, arguments
):
    path = tmp_path / "plan.json"
    command = ["place", *CLUSTER, "--nodes", 1, "--parameters", "1e6", *HURRY, "--plan", path]
    out = works(capsys, *command, *arguments, *(["--pipeline_bytes", "1e6"] if arguments else []))
    config = train.default_config("language_modeling")
    config.data.path, config.model.preset = "stdlib", "small"
    config.batch_size = config.eval.batch_size = 4
    flags.override_all(config, re.findall(r"--config\.\S+", out))
    assert config.cluster.plan == str(path)
    train.validate(config)


def test_recommend_refuses_configs_that_it_cannot_make_trainable(capsys, tmp_path):
    name = tmp_path / "three.py"
    name.write_text(CONFIG_OF.format(replicas=3, path="stdlib", algorithm="diloco"))
    command = ["recommend", *TWO, "--compute_s", 1, "--config"]
    assert "batch_size" in refused(capsys, *command, name)  # 8 devices
    for given in ("quickstart_peers", "quickstart_pipelines"):
        assert given in refused(capsys, *command, given)


def two_sites(tmp_path):
    """Four machines each, two by two in turn: two rounds of one_peer_exp must cross."""
    whole = network.preset("dtfm_case3").take([0, 1, 32, 33, 2, 3, 34, 35])
    whole.save(tmp_path / "network.json")
    return whole


def test_recommend_prints_and_writes_what_is_recommended(capsys, tmp_path):
    """The plan names every device once, in an order that makes the step no longer."""
    path, whole, work = tmp_path / "plan.json", two_sites(tmp_path), work_of(500e6, 2)
    names, codecs = ["one_peer_exp", "bidirectional_ring"], ["float32", "int8"]
    out = works(
        capsys,
        *("recommend", "--network", tmp_path / "network.json", "--parameters", "500e6"),
        *("--compute_s", 2, "--schedules", ",".join(names), "--codecs", ",".join(codecs)),
        *("--mix_every", "1,3", "--plan", path, *HURRY),
    )
    found = recommend.choices(whole, work, schedules=names, codecs=codecs, mix_every=(1, 3))
    best, gossip = found[0], found[0].algorithm
    assert len(found) == 9
    assert out.startswith(recommend.format_table(found)) and best.prediction.label in out
    assert printed_fields(out) == recommend.config_fields(best)
    plan = plan_file.load(path)
    assert (plan.schedule.name, plan.mix_every) == (gossip.name, gossip.mix_every)
    listed, placed = (
        predict.step_s(whole.take(order), work, gossip)
        for order in (range(8), plan.device_order(whole.names))
    )
    assert placed <= 1.001 * listed
    expected = {"step_s": placed, "step_s_in_the_order_of_the_network": listed}
    expected["label"] = best.prediction.label
    assert plan.expected == pytest.approx(expected)


def test_all_reduce_follows_no_plan(capsys, tmp_path):
    arguments = ["recommend", "--network", "pcie_100gb_ib", "--nodes", 1, "--devices_per_node", 4]
    arguments += ["--parameters", "1e6", "--compute_s", 1, "--plan", tmp_path / "plan.json"]
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert "For all_reduce" in out
    assert "all_reduce" in err and err.count("\n") == 1
    assert not (tmp_path / "plan.json").exists()


def test_the_examples_of_the_help_run(capsys, tmp_path, monkeypatch):
    """Every command in the help, on a network of its own, parses and ends well."""
    monkeypatch.chdir(tmp_path)
    network.preset("nvlink_25gbe", 4, 4).save("network.json")
    (tmp_path / "configs").symlink_to(CONFIG.parent)
    (tmp_path / "runs" / "alone").mkdir(parents=True)
    (tmp_path / "runs" / "alone" / "metrics.jsonl").write_text(
        "".join(f'{{"step": {k}, "perf/step_time_s": 0.{10 + k % 7}}}\n' for k in range(9))
    )
    text = "".join(run.__doc__ for run in cli.COMMANDS.values()).replace("\\\n", " ")
    commands = re.findall(r"^ *decent-jax planner (.*)$", text, re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        searches = command.startswith(("place", "recommend"))
        hurry = ["--time_limit_s", "0.1"] if searches else []
        code, _, err = run(capsys, *command.split(), *hurry)
        assert (code, err) == (0, ""), command


def test_planning_does_not_import_jax():
    code = (
        "import sys; from decent_jax.planner import __main__ as cli; "
        "cli.main('recommend --network pcie_25gbe --nodes 2 --devices_per_node 2 --parameters 1e6 "
        "--compute_s 0.1'.split()); import decent_jax.planner.search; "
        "print({'jax', 'networkx', 'matplotlib', 'scipy.stats'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "For " in done.stdout, done.stderr
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["predict"], "--network"),
        (["predict", *CLUSTER, *MODEL], "--nodes"),
        (["predict", *TWO, "--parameters", "1e6"], "--compute_s"),
        (["predict", *TWO, *PLACED, "--compute_s", "-1"], "--compute_s"),
        (["predict", *TWO, *MODEL, "--trace", "x"], "--trace"),
        (["recommend", *TWO, *MODEL, "--codecs", "int3"], "--codecs"),
        (["recommend", *TWO, *MODEL, "--schedules", "web"], "'web'"),
        (["recommend", *TWO, *MODEL, "--plan", "nowhere/plan.json"], "nowhere"),
        (["place", *TWO, *PLACED, "--stages", "2"], "--replicas"),
        (["place", *CLUSTER, "--nodes", "1", *PLACED, *STAGES], "8 devices"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else None,
)
def test_bad_flags_are_one_sentence_that_names_them(capsys, arguments, named):
    assert named in refused(capsys, *arguments)
