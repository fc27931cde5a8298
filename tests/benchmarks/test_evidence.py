"""The plan of benchmarks/evidence.py: which runs in which order, what is left, what is refused.

And what benchmarks/evidence_figure.py makes of their records.
"""

import fcntl
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refuses

from decent_jax import replicas
from decent_jax.ground.errors import DataError
from decent_jax.train import config as config_lib
from decent_jax.train import flags

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
names = ("evidence", "evidence_figure", "one_slow", "variant")
evidence, figure, one_slow, variant = map(importlib.import_module, names)
sys.path.remove(str(ROOT / "benchmarks"))


# --- The list -------------------------------------------------------------------------------------


def fields_of(piece):
    return dict(piece.changes)


def test_the_main_arms_come_first_and_in_pairs_of_a_seed():
    """Whenever the script is stopped, what has finished can be compared, but for one run."""
    pieces = evidence.pieces()
    rates = [piece for piece in pieces if "-rate" in piece.name and piece.config in evidence.MAIN]
    assert len(rates) == 2 * len(evidence.RATES)
    first = pieces[:14] + rates
    for gossip, all_reduce in zip(first[::2], first[1::2], strict=True):
        assert gossip.changes == all_reduce.changes and gossip.task == all_reduce.task
        assert "all_reduce" in all_reduce.config and "all_reduce" not in gossip.config
    assert [p.task for p in pieces[:14:2]] == ["cifar10"] * 4 + ["multi30k_en_de"] * 3
    assert [fields_of(p)["seed"] for p in pieces[:14:2]] == [0, 0, 1, 2, 0, 1, 2]


def test_every_other_arm_has_an_all_reduce_of_its_length_and_data():
    """And of its seed: Adam beside Adam, the rest beside the same network trained by SGD; what
    sends few bits, beside one that sends all.
    """
    pieces = evidence.pieces()
    assert len({piece.name for piece in pieces}) == len(pieces)
    compared = {(piece.config, piece.changes) for piece in pieces}
    for piece in pieces:
        if piece.config.endswith(":peers"):
            continue  # beside `swarm`; its task is another one
        own = "_adam" if "accum_adam" in piece.config and piece.task == "cifar10" else ""
        changes = tuple(change for change in piece.changes if change[0] != "comm_dtype")
        assert (f"{piece.task}:all_reduce{own}", changes) in compared, piece.name


def test_one_peer_sleeps_as_long_as_it_works():
    """Steps of 3 and 5 seconds, of which the slow one makes 6 and 10; values and gradients stay.

    Not as long as it compiled, 60 seconds: in a short run it would sleep until the others are done.
    """
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    def loss(params, model_state, batch, key):
        return (params * batch).sum(), model_state

    slow = one_slow.slowed(loss, clock=lambda: now[0], sleep=sleep)
    step = jax.jit(jax.value_and_grad(slow, has_aux=True))
    for seconds in (60.0, 3.0, 5.0):
        now[0] += seconds
        (value, state), gradient = step(jnp.arange(3.0), {"a": 1}, jnp.full(3, 2.0), None)
        assert float(value) == 6 and int(state["a"]) == 1
        np.testing.assert_array_equal(gradient, [2, 2, 2])
    assert slept == [3, 5]


def test_the_grid_of_rates_has_a_seed_that_nothing_else_has():
    with_rate = [p for p in evidence.pieces() if "-rate" in p.name]
    seeds = {fields_of(piece)["seed"] for piece in with_rate}
    others = {fields_of(p)["seed"] for p in evidence.pieces() if p not in with_rate}
    assert len(seeds) == 1 and not seeds & others


def test_the_records_are_of_runs_of_the_list_with_the_fields_that_it_has_today():
    listed = {p.name: [p.config, fields_of(p)] for p in evidence.pieces()}
    found = {}
    for path in figure.RECORDS.glob("*/summary.json"):
        summary = json.loads(path.read_text())
        found[path.parent.name] = [summary["config"], summary["changes"]]
    assert found and found == {name: listed.get(name) for name in found}


@pytest.mark.parametrize("piece", evidence.pieces(), ids=lambda piece: piece.name)
def test_every_command_is_a_good_config_but_for_its_data(piece, tmp_path, tiny_data):
    config, workdir = flags.parse(piece.command(tmp_path)[1:])
    assert config.data.path == str(tmp_path / "data" / piece.data)
    assert workdir == str(tmp_path / "runs" / piece.name)
    config.data.path = "numbers" if config.task == "translation" else str(tiny_data)
    if config.task == "language_modeling":
        config.model.context = 8
    config_lib.validate(config)
    for name, value in piece.changes:
        assert config_lib.flat(config)[name] == value


def test_a_step_of_translation_can_be_timed(tmp_path):
    """Its task keeps a vocabulary in the folder it is given, which step_time.py names by a str."""
    config = flags.load(str(ROOT / "configs" / "multi30k_en_de.py:accum_adam"))
    config.data.path = "numbers"
    parts = variant.Parts.of(config, str(tmp_path), replicas.place(8), range(8))
    assert {len(array) for array in jax.tree.leaves(parts.batch)} == {8}


# --- What is left ---------------------------------------------------------------------------------

TRAIN = """
import json, os, pathlib, sys
flags = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
workdir.mkdir(parents=True, exist_ok=True)
row = {"step": 3, "perf/wall_time_s": 3600.0, "eval/top1": 0.5}
cores = sorted(os.sched_getaffinity(0))
(workdir / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
if flags["config.seed"] in sys.argv[0].partition("bad-")[2]:
    sys.exit(1)
(workdir / "summary.json").write_text(json.dumps({"final": {"eval/top1": 0.5}, "cores": cores}))
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose train.py ends at once; two runs of a config."""
    checkout = tmp_path / "checkout-bad-1"
    checkout.mkdir()
    (checkout / "train.py").write_text(TRAIN)
    monkeypatch.setattr(evidence, "CHECKOUT", checkout)
    monkeypatch.setattr(evidence, "POLL_S", 0.01)
    return [evidence.piece("cifar10:ring", seed, epochs=8.0) for seed in (0, 1)]


def test_what_finished_is_recorded_and_not_done_again(checkout, tmp_path):
    root = tmp_path / "root"
    good, bad = checkout
    with (tmp_path / "lock").open("w") as lock:
        here = ["--config.mesh.loop=False"]
        assert evidence.train(root, checkout, [{0}], lock, here) == [bad]
    assert evidence.left(root, checkout) == [bad]
    record = root / "records" / good.name
    summary = json.loads((record / "summary.json").read_text())
    assert summary["final"] == {"eval/top1": 0.5} and summary["cores"] == [0]
    assert len(summary["commits"]) == 1
    assert str(tmp_path) not in summary["command"]  # no path of this machine
    assert "--config=configs/cifar10.py:ring" in summary["command"]
    assert summary["command"].endswith(" --config.mesh.loop=False")
    assert (record / "metrics.jsonl").read_text() == (
        root / "runs" / good.name / "metrics.jsonl"
    ).read_text()
    done, begun, count = evidence.listing(root, checkout).splitlines()
    assert re.fullmatch(rf"done +{good.name} +step 3, 1.00 h +eval/top1 0.5", done)
    assert begun.startswith("begun") and bad.name in begun
    assert count == "1 of 2 done"


STARTED = """
import sys
from pathlib import Path
root, checkout, benchmarks = sys.argv[1:]
sys.path.insert(0, benchmarks)
import evidence
evidence.CHECKOUT, evidence.POLL_S = Path(checkout), 0.01
evidence.check = lambda *_: None
evidence.pieces = lambda: [evidence.piece("cifar10:ring", 0)]
sys.exit(evidence.main(["--root", root]))
"""
WAITING = """
import time
import pathlib
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_after_a_kill_its_runs_end_before_others_begin(checkout, tmp_path):
    """The run goes on without the script, which then refuses to start beside it."""
    root, folder = tmp_path / "root", evidence.CHECKOUT
    root.mkdir()
    (folder / "train.py").write_text(WAITING + TRAIN)
    benchmarks = str(ROOT / "benchmarks")
    command = [sys.executable, "-c", STARTED, str(root), str(folder), benchmarks]
    options = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as first:
        assert first.stdout.readline() == "cifar10-ring-seed0 ...\n"  # it has started the run
        first.kill()
    second = subprocess.run(command, capture_output=True, timeout=100, **options)
    assert second.returncode == 2 and "works in" in second.stderr
    (folder / "go").touch()
    with (root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the run
    assert (root / "runs" / "cifar10-ring-seed0" / "summary.json").exists()
    third = subprocess.run(command, capture_output=True, timeout=100, **options)
    assert third.returncode == 0, third.stderr
    assert evidence.finished(root, "cifar10-ring-seed0")


def test_a_record_without_a_summary_is_not_finished(checkout, tmp_path):
    """As a kill between the two copies leaves it."""
    good, _ = checkout
    (tmp_path / "records" / good.name).mkdir(parents=True)
    (tmp_path / "records" / good.name / "metrics.jsonl").touch()
    assert not evidence.finished(tmp_path, good.name)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ("cifar10:ring", "cifar10"),
        ("multi30k_en_de:swarm", "multi30k"),
        ("us_gov_web_text:muon", "us_gov_web_text/train.bin"),
    ],
)
def test_missing_data_is_one_sentence(config, missing, tmp_path):
    with refuses(tmp_path / "data" / missing, error=DataError):
        evidence.check(tmp_path, [evidence.piece(config, 0)])


def test_another_set_of_images_is_not_cifar10(tmp_path):
    from PIL import Image

    for split, name in itertools.product(("train", "val"), evidence.CIFAR10):
        folder = tmp_path / "data" / "cifar10" / split / name
        folder.mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(folder / "0.png")
    with refuses("50,000", "10 of airplane", error=DataError):
        evidence.check(tmp_path, [evidence.piece("cifar10:ring", 0)])


def test_another_vocabulary_is_refused(tmp_path, tiny_data):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "us_gov_web_text").symlink_to(tiny_data)
    with refuses("vocabulary of 256", "4096", error=DataError):
        evidence.check(tmp_path, [evidence.piece("us_gov_web_text:muon", 0)])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--at_once", "0"], "--at_once"),
        (["--at_once", "100000"], "--at_once"),
        (["--onyl", "ring"], "--onyl"),
        (["--only", "nowhere"], "--only nowhere"),
    ],
)
def test_bad_arguments_end_the_command(arguments, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        evidence.main(["--root", str(tmp_path), *arguments])
    assert stop.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize(("at_once", "places"), [(1, [{0, 1, 2, 3, 4}]), (2, [{0, 2, 4}, {1, 3}])])
def test_runs_share_the_cores(at_once, places, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    monkeypatch.setattr(evidence, "check", lambda *_: None)
    monkeypatch.setattr(evidence, "train", lambda *them: given.append(them) or [])
    arguments = ["--root", str(tmp_path), "--only", "ring", "--at_once", str(at_once)]
    assert evidence.main([*arguments, "--config.mesh.loop=False"]) == 0
    ((_, waiting, own, _, here),) = given
    assert own == places and here == ["--config.mesh.loop=False"]
    assert {"ring" in piece.name for piece in waiting} == {True}


def test_some_pieces_can_be_chosen(tmp_path, capsys):
    assert evidence.main(["--root", str(tmp_path), "--list", "--only", "dirichlet"]) == 0
    *chosen, count = capsys.readouterr().out.splitlines()
    assert count == "0 of 8 done" and all("dirichlet" in line for line in chosen)


def test_bad_data_ends_the_command_before_anything_runs(tmp_path, capsys):
    assert evidence.main(["--root", str(tmp_path)]) == 2
    assert re.fullmatch(r"evidence.py: .*cifar10.*\n", capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()


# --- Tables and the figure ------------------------------------------------------------------------


def write_record(folder, config, changes, final, rows=(), **entries):
    """A record; `rows` are (step, metric, value)."""
    name = f"{config.replace(':', '-')}-{len(list(folder.glob('*')))}"
    (folder / name).mkdir(parents=True)
    lines = [json.dumps({"step": step, metric: value}) + "\n" for step, metric, value in rows]
    (folder / name / "metrics.jsonl").write_text("".join(lines))
    summary = {"config": config, "changes": changes, "training_seconds": 7200.0}
    summary |= {"devices": "1 x cpu"} | entries
    summary["final"] = {"eval/consensus_distance": 0.25, "eval/loss": 1.0} | final
    (folder / name / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def records(tmp_path):
    """Three seeds of all-reduce, two of gossip, at 8 epochs; another length; two tasks more."""
    for arm, accuracies in (("all_reduce", (0.9, 0.91, 0.95)), ("momentum_sgd", (0.89, 0.92))):
        for seed, top1 in enumerate(accuracies):
            changes = {"seed": seed, "epochs": 8.0}
            rows = [(10, "eval/top1", top1 - 0.2), (20, "eval/top1", top1)]
            write_record(tmp_path, f"cifar10:{arm}", changes, {"eval/top1": top1}, rows)
    write_record(tmp_path, "cifar10:ring", {"seed": 0, "epochs": 4.0}, {"eval/top1": 0.5})
    rows = [(100, "eval/bleu", 20.0), (200, "eval/bleu", 34.0)]
    write_record(tmp_path, "multi30k_en_de:accum_adam", {"seed": 0}, {}, rows, test={"bleu": 35.5})
    for arm, factor in (("all_reduce", 1.0), ("muon", 0.98)):
        rows = [(1000, "eval/loss", 4 * factor), (2000, "eval/loss", 3 * factor)]
        changes = {"seed": 0}
        write_record(tmp_path, f"us_gov_web_text:{arm}", changes, {"eval/loss": 3 * factor}, rows)
    return figure.load(tmp_path)


def cells(records, task):
    rows = figure.table(records, task).splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_means_standard_deviations_and_gaps_of_common_seeds(records):
    """92 ± 2.646 of 90, 91, 95; the gaps of seeds 0 and 1 are -1 and 1, their mean 0 ± 1.414."""
    ring, all_reduce, gossip = cells(records, "cifar10")
    assert ring[:5] == ["`ring`", "epochs=4.0", "0", "50.00", ""]  # nothing to compare it with
    assert all_reduce[:3] == ["`all_reduce`", "epochs=8.0", "0, 1, 2"]
    assert all_reduce[3:6] == ["92.00 ± 2.65", "", "0.25 ± 0"]
    assert all_reduce[7:] == ["120.0 ± 0.0, 1 x cpu"]
    assert gossip[2:5] == ["0, 1", "90.50 ± 2.12", "+0.00 ± 1.41"]
    assert cells(records, "multi30k_en_de")[0][3] == "35.50"
    assert cells(records, "us_gov_web_text")[1][3:5] == ["2.940", "-0.060"]


def test_steps_to_a_goal_are_those_of_its_first_crossing(tmp_path):
    """80% lies a quarter of the way from 100 to 300, from the first evaluation on, nowhere."""
    curves = [(0.77, 0.89, 0.75, 0.95), (0.85, 0.9, 0.9, 0.9), (0.5, 0.6, 0.7, 0.79)]
    for seed, curve in enumerate(curves):
        rows = [(step, "eval/top1", x) for step, x in zip((100, 300, 500, 700), curve, strict=True)]
        arm = "swarm" if seed == 2 else "ring"
        write_record(tmp_path, f"cifar10:{arm}", {"seed": seed}, {"eval/top1": curve[-1]}, rows)
    write_record(tmp_path, "us_gov_web_text:ring", {"seed": 0}, {})
    found = figure.load(tmp_path)
    assert [row[6] for row in cells(found, "cifar10")] == ["125 (150, 100)", ""]
    assert cells(found, "us_gov_web_text")[0][6] == ""  # it has no goal


def test_minutes_are_averaged_over_the_seeds_of_a_device(tmp_path):
    """A GPU's minutes say nothing of a CPU's."""
    for seed, (minutes, device) in enumerate([(80, "cpu"), (90, "cpu"), (6, "H100")]):
        changes, took = {"seed": seed}, {"training_seconds": 60.0 * minutes, "devices": device}
        write_record(tmp_path, "cifar10:ring", changes, {"eval/top1": 0.5}, **took)
    (row,) = cells(figure.load(tmp_path), "cifar10")
    assert row[-1] == "85.0 ± 7.1, cpu; 6.0, H100"


def test_the_curves_of_the_figure(records):
    gossip, all_reduce = figure.learning_panel(records, "cifar10").curves
    assert list(gossip.x) == [4, 8] == list(all_reduce.x)
    assert list(gossip.y) == pytest.approx([70.5, 90.5])
    (bleu,) = figure.learning_panel(records, "multi30k_en_de").curves  # its length is the config's
    assert (list(bleu.x), list(bleu.y)) == ([100, 200], [20, 34])
    seeds, mean, _ = figure.budget_panel(records).curves
    assert list(seeds.y) == pytest.approx([-1, 1]) and list(mean.y) == pytest.approx([0])
    (muon,) = figure.language_panel(records).curves
    assert list(muon.x) == [2.048, 4.096]
    assert list(muon.y) == pytest.approx([-2, -2])


def test_accuracy_against_minutes(records, tmp_path):
    """Steps 10 and 20, of 6 and 12 seconds on slow links; one that was not measured is left out."""
    assert figure.step_times(tmp_path) == {}
    rows = [("one_peer_exp", "26mbit", 6.0), ("all_reduce", "26mbit", 12.0), ("all_reduce", "x", 1)]
    names = ("algorithm", "network", "step_time_s")
    lines = [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows]
    (tmp_path / "step_times.jsonl").write_text("".join(lines))
    times = figure.step_times(tmp_path)
    gossip, all_reduce = figure.time_panel(records, "cifar10", times).curves
    assert list(gossip.x) == [1, 2] and list(all_reduce.x) == [2, 4]
    assert list(gossip.y) == pytest.approx([70.5, 90.5])
    del times["26mbit", "one_peer_exp"]
    (only,) = figure.time_panel(records, "cifar10", times).curves
    assert only.label.startswith("all_reduce")


@pytest.mark.parametrize(
    ("task", "goal", "words"),
    [
        ("cifar10", 80, r"CIFAR-10 to 80% in (\d+) minutes, not (\d+),"),
        ("multi30k_en_de", 30, r"Multi30k to 30 BLEU in (\d+), not (\d+),"),
    ],
)
def test_minutes_to_a_result_are_those_that_the_readme_has(task, goal, words):
    times = figure.step_times(figure.RECORDS)
    panel = figure.time_panel(figure.load(figure.RECORDS), task, times)
    minutes = {
        curve.label.partition(",")[0]: np.interp(goal, curve.y, curve.x) for curve in panel.curves
    }
    short, long = re.search(words, (ROOT / "README.md").read_text()).groups()
    assert f"{minutes['alternating_exp_ring']:.0f}" == short
    assert f"{minutes['all_reduce']:.0f}" == long


def test_the_figure_is_drawn_of_what_there_is(records, tmp_path, capsys):
    assert figure.draw(records, tmp_path / "figure.png", {}).stat().st_size > 10_000
    only = [record for record in records if record.arm == "ring"]
    assert figure.draw(only, tmp_path / "none.png", {}) is None
    assert figure.main(["--records", str(tmp_path / "nowhere")]) == 0
    assert capsys.readouterr().out.startswith("no record in ")
