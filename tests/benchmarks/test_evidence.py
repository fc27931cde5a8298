"""What benchmarks/evidence makes of its records, and that the pages have these numbers."""

import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence import figure, methods, trainings
from decent_jax.train import config as config_lib
from decent_jax.train import flags

ROOT = Path(__file__).resolve().parents[2]
README, ALGORITHMS = ((ROOT / page).read_text() for page in ("README.md", "docs/algorithms.md"))
RESULTS = "\n".join(
    path.read_text() for path in [ROOT / "docs/results.md", *sorted(ROOT.glob("docs/log/*.md"))]
)


@pytest.mark.filterwarnings("ignore:d2 on bidirectional_ring")  # as published
def test_every_command_is_a_good_config_but_for_its_data(tmp_path, tiny_data):
    """The first of each config: seeds and lengths change nothing that is refused."""
    for piece in {piece.config: piece for piece in trainings.pieces()}.values():
        config, workdir = flags.parse(piece.command(tmp_path)[1:])
        folder = Path(config.data.path)
        assert folder.parent == tmp_path / "data" and f" {folder.name}" in trainings.__doc__
        assert workdir == str(tmp_path / "runs" / piece.name)
        config.data.path = "numbers" if config.task == "translation" else str(tiny_data)
        if config.task == "language_modeling":
            config.model.context = 8
        config_lib.validate(config)
        for name, value in piece.changes:
            assert config_lib.values_of(config)[name] == value


# --- The pages have the numbers of the records ----------------------------------------------------

RECORDS = figure.load(figure.RECORDS)
MAIN = ("all_reduce", "momentum_sgd", "momentum_sgd_atc")
RELAYSGD, SHORT = ("exponential", "ring", "ring_quasi_global"), {"epochs": 10.0, "model.width": 16}


def of(task, arm, **setting):
    """The records of an arm, a seed each."""
    return figure.arms(RECORDS, task)[tuple(sorted(setting.items())), arm]


@pytest.mark.parametrize(
    ("task", "arm", "setting", "form"),
    [
        *(("cifar10", arm, {"epochs": 15.0}, ".2f") for arm in MAIN[:2]),
        *(("cifar10", arm, {"epochs": 15.0, "learning_rate": 0.2}, ".2f") for arm in MAIN),
        *(("cifar10", arm, {"epochs": 15.0, "learning_rate": 0.4}, ".2f") for arm in MAIN[::2]),
        *(("cifar10", arm, {"epochs": 8.0}, ".1f") for arm in ("all_reduce", "ring", "swarm")),
        *(("multi30k_en_de", arm, {}, ".2f") for arm in ("all_reduce", "accum_adam", "swarm")),
        *(("us_gov_web_text", arm, {}, ".3f") for arm in ("all_reduce", "accum_adam")),
        *(("cifar10_fast", arm, {}, ".2f") for arm in ("all_reduce", "gossip")),
        ("cifar10_fast", "gossiped_momentum", {}, ".2f"),
        *(("cifar10_relaysgd", f"{arm},0.01", SHORT, ".1f") for arm in RELAYSGD),
        *(("shakespeare", arm, {}, ".3f") for arm in trainings.NANOGPT),
        ("shakespeare", "all_reduce", {"learning_rate": 4e-3}, ".3f"),
        ("shakespeare", "gossiped_momentum", {"learning_rate": 4e-3}, ".3f"),
        ("us_gov_web_text", "gossiped_momentum", {}, ".3f"),
    ],
)
def test_results_at_the_end(task, arm, setting, form):
    assert figure.spread([record.value for record in of(task, arm, **setting)], form) in RESULTS


@pytest.mark.parametrize(("arm", "gap"), [("momentum_sgd", "0.68"), ("momentum_sgd_atc", "0.28")])
def test_gaps_are_means_and_deviations_of_the_differences_of_seeds(arm, gap):
    setting = (("epochs", 15.0), ("learning_rate", 0.2))
    gaps = [-x for x in figure.gaps(figure.arms(RECORDS, "cifar10"), setting, arm)]
    assert (
        len(gaps) == 3 and figure.spread(gaps) in RESULTS and f"{statistics.mean(gaps):.2f}" == gap
    )


@pytest.mark.parametrize("arm", MAIN)
def test_distances_and_losses_on_the_way(arm):
    """After 600 steps at 0.1, and of the last 250 at 0.2."""
    losses = [
        record.summary["loss_of_the_last_250_steps"]
        for record in of("cifar10", arm, epochs=15.0, learning_rate=0.2)
    ]
    assert f"| {statistics.mean(losses):.3f} |" in RESULTS
    if arm == "momentum_sgd":
        (record,) = of("cifar10", arm, epochs=8.0)
        training = record.summary["training"]
        at_600 = training["train/consensus_distance_relative"][training["step"].index(600)]
        assert f"| {at_600:.2%} of the norm of the parameters |" in RESULTS


def test_steps_to_a_goal_lie_between_two_evaluations():
    """80% lies a quarter of the way from 100 to 300; and those of the page."""
    evaluations = {"step": [100, 300, 500], "eval/top1": [0.77, 0.89, 0.75]}
    record = figure.Record({"config": "cifar10:ring", "evaluations": evaluations})
    assert record.steps_to_goal() == 150
    for arm in MAIN[:2]:
        steps = [record.steps_to_goal() for record in of("cifar10", arm, epochs=15.0)]
        assert f"| {', '.join(f'{x:.0f}' for x in steps)} |" in RESULTS


@pytest.mark.parametrize(
    ("task", "goal", "words"),
    [
        ("cifar10", 80, r"CIFAR-10, 80% top-1 \| 26 Mbit/s \| (\d+) \|.*\| \**(\d+)\**: 2.7"),
        ("multi30k_en_de", 30, r"Multi30k, 30 BLEU \| 50 Mbit/s \| (\d+) \|.*\| (\d+): 2.1"),
    ],
)
def test_minutes_to_a_result_are_those_of_the_pages(task, goal, words):
    panel = figure.time_panel(RECORDS, task, figure.step_times(figure.RECORDS))
    minutes = {
        curve.label.partition(",")[0]: np.interp(goal, curve.y, curve.x) for curve in panel.curves
    }
    long, short = re.search(words, RESULTS).groups()
    assert f"{minutes['alternating_exp_ring']:.0f}" == short
    assert f"{minutes['all_reduce']:.0f}" == long
    if task == "multi30k_en_de":
        assert f"minutes to 30 BLEU on links of 50 Mbit/s | {short} | {long} |" in README


def test_losses_against_bytes_are_those_of_the_page():
    rows = [
        json.loads(line) for line in (figure.RECORDS / "methods.jsonl").read_text().splitlines()
    ]
    for of_size in methods.by_size(rows).values():
        for label, mine in methods.best_rows(of_size).items():
            written = (", ".join(f"{row['loss']:.{digits}f}" for row in mine) for digits in (2, 3))
            assert any(f"| {losses} |" in ALGORITHMS for losses in written), label
