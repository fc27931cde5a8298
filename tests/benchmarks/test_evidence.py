"""The plan of benchmarks/evidence.py: which runs in which order, what is left, what is refused.

And what benchmarks/evidence_figure.py makes of their records.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from decent_jax.ground.errors import DataError
from decent_jax.train import config as config_lib
from decent_jax.train import flags

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
names = ("evidence", "evidence_figure")
evidence, figure = map(importlib.import_module, names)
sys.path.remove(str(ROOT / "benchmarks"))


# --- The list -------------------------------------------------------------------------------------


def fields_of(piece):
    return dict(piece.changes)


def test_the_records_are_of_runs_of_the_list_with_the_fields_that_it_has_today():
    listed = {p.name: [p.config, fields_of(p)] for p in evidence.pieces()}
    found = {}
    for path in figure.RECORDS.glob("*/summary.json"):
        summary = json.loads(path.read_text())
        found[path.parent.name] = [summary["config"], summary["changes"]]
    assert found and found == {name: listed.get(name) for name in found}


def test_every_command_is_a_good_config_but_for_its_data(tmp_path, tiny_data):
    """The first of each config: seeds and lengths change nothing that is refused."""
    for piece in {piece.config: piece for piece in evidence.pieces()}.values():
        config, workdir = flags.parse(piece.command(tmp_path)[1:])
        assert config.data.path == str(tmp_path / "data" / piece.data)
        assert workdir == str(tmp_path / "runs" / piece.name)
        config.data.path = "numbers" if config.task == "translation" else str(tiny_data)
        if config.task == "language_modeling":
            config.model.context = 8
        config_lib.validate(config)
        for name, value in piece.changes:
            assert config_lib.flat(config)[name] == value


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
