"""Every combination of some settings: folders, what is trained, and what the table says."""

import csv
import json
import os
import signal
from pathlib import Path

import pytest
import tiny
from refusals import refused

from decent_jax.commands import sweep


@pytest.fixture
def config(tmp_path):
    return str(tiny.write_config(tmp_path / "config_file.py"))


def ends(arguments, log, signals, loss=0.5, **more):
    """Stands in for a process that trains: what a run leaves behind."""
    from decent_jax.train import flags

    trained, workdir = flags.parse(arguments)
    if trained.schedule == "auto":  # settled by the run
        trained.update(schedule="one_peer_exp", local_size=2)
    (Path(workdir) / "config.json").write_text(json.dumps(trained.to_dict()))
    summary = {"steps": trained.steps, "final": {"eval/loss": loss}, "bytes_sent_per_step": 4096}
    (Path(workdir) / "summary.json").write_text(json.dumps(summary | more))
    return 0


def never(*_):
    raise AssertionError("nothing is left to train")


def table(out):
    with (out / "table.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_combination_has_a_folder(config):
    over = ["seed=0,1", "config.schedule=ring,base_k(max_degree=2)", "optimizer.b1=0.9"]
    runs = sweep.combinations(config, over, Path("out"), ["--config.steps=5"])
    assert [run.folder.name for run in runs] == [
        "seed=0,schedule=ring,b1=0.9",
        "seed=0,schedule=base_k-max_degree=2-,b1=0.9",
        "seed=1,schedule=ring,b1=0.9",
        "seed=1,schedule=base_k-max_degree=2-,b1=0.9",
    ]
    assert (runs[1].config.schedule, runs[1].config.steps) == ("base_k(max_degree=2)", 5)
    assert [run.config.seed for run in runs] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("over", "value"),
    [
        (["seed"], "seed"),
        (["seed=0,,1"], "seed=0,,1"),
        (["seed=0,0"], "seed=0,0"),
        (["seed=0", "config.seed=1"], "config.seed=1"),
        (["schedule=base_k(max_degree=2),base_k[max_degree=2]"], None),
    ],
)
def test_what_cannot_be_swept_over(over, value, config, monkeypatch):
    monkeypatch.setattr(sweep.config_lib, "validate", lambda config: None)
    with refused("--over", over if value is None else value):
        sweep.combinations(config, over, Path("out"))


@pytest.mark.parametrize(
    ("over", "field", "value"),
    [
        ("num_replicas=4,3", "batch_size", 8),
        ("schedule=ring,stars", "schedule", "stars"),
        ("peers.use=false,true", "algorithm", "accum_adam"),
        ("pipeline.stages=0,2", "task", "toys.waves"),
    ],
)
def test_all_runs_are_checked_before_the_first(over, field, value, config, tmp_path, capsys):
    """As the run itself would, whatever trains it."""
    out = tmp_path / "out"
    with refused(field, value):
        sweep.combinations(config, [over], out)
    assert sweep.main(["--config", config, "--over", over, "--out", str(out)], never) == 2
    assert field in capsys.readouterr().err and not out.exists()


def test_a_run_is_trained_once_and_stands_in_the_table(config, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--config", config, "--over", "schedule=ring,auto", "--over", "seed=0"]
    flags += ["--out", str(out), "--config.steps=2"]
    assert sweep.main(flags, ends) == 0
    rows = table(out)
    assert [row["state"] for row in rows] == ["done", "done"]
    assert [(row["steps"], row["validation_loss"]) for row in rows] == 2 * [("2", "0.5")]
    capsys.readouterr()
    assert sweep.main(flags, never) == 0
    assert "| ring | 0 | done | 2 |" in capsys.readouterr().out


def test_results_of_other_settings_are_no_results(config, tmp_path, capsys):
    """More steps: the runs go on. Another experiment: its folder is refused. In no table."""
    out = tmp_path / "out"
    flags = ["--config", config, "--over", "seed=0,1", "--out", str(out)]
    assert sweep.main([*flags, "--config.steps=2"], ends) == 0
    more = [*flags, "--config.steps=6"]
    assert sweep.main(more, lambda *_: 1) == 1  # a run that fails does not stop the others
    said = capsys.readouterr().err
    assert all(str(out / f"seed={seed}" / "log.txt") in said for seed in (0, 1))
    assert [(row["state"], row["steps"]) for row in table(out)] == 2 * [("not done", "")]
    trained = []

    def go_on(arguments, log, signals):
        trained.append(arguments[-1])
        more = {"best_eval_loss": 0.125, "training_seconds": 7.5}
        return ends(arguments, log, signals, loss=0.25, **more)

    assert sweep.main(more, go_on) == 0
    assert trained == [str(out / "seed=0"), str(out / "seed=1")]
    of = ("steps", "validation_loss", "best_validation_loss", "training_seconds")
    found = [tuple(row[name] for name in of) for row in table(out)]
    assert found == 2 * [("6", "0.25", "0.125", "7.5")]
    capsys.readouterr()
    assert sweep.main([*more, "--config.learning_rate=0.5"], never) == 2
    said = capsys.readouterr().err
    assert "learning_rate: 0.01 -> 0.5" in said and str(out / "seed=0") in said


@pytest.mark.slow
def test_a_run_is_trained_by_a_process_of_its_own(config, tmp_path, compile_once, monkeypatch):
    """The one real run here; its output is in its log."""
    for name, value in compile_once.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "out"
    flags = ["--config", config, "--over", "seed=3", "--out", str(out), "--config.steps=2"]
    assert sweep.main(flags) == 0
    (row,) = table(out)
    assert (row["state"], row["steps"], row["folder"]) == ("done", "2", str(out / "seed=3"))
    assert float(row["validation_loss"]) > 0 and (out / "seed=3" / "log.txt").stat().st_size


def test_a_signal_ends_the_sweep(config, tmp_path, capsys):
    trained = []

    def signalled(arguments, log, signals):
        trained.append(arguments[-1])
        os.kill(os.getpid(), signal.SIGTERM)
        return 143

    out = tmp_path / "out"
    flags = ["--config", config, "--over", "seed=0,1", "--out", str(out)]
    assert sweep.main(flags, signalled) == 143
    assert trained == [str(out / "seed=0")]


def test_a_signal_reaches_the_process_of_a_run(tmp_path, config):
    """It ends as train.py does, whatever it was doing."""

    class Received:
        received = signal.SIGTERM

    flags = ["--config", config, "--workdir", str(tmp_path / "run"), "--config.data.pause=60"]
    assert sweep.train_in_a_process(flags, tmp_path / "log.txt", Received()) in (143, -15)


def test_the_table_has_only_what_was_measured(config, tmp_path, capsys):
    out, losses = tmp_path / "out", iter([1.0, "NaN"])

    def trained(arguments, log, signals):
        loss = next(losses, None)
        more = {"interrupted": True} if loss is None else {"loss": loss}
        return ends(arguments, log, signals, **more)

    flags = ["--config", config, "--over", "seed=0,1,2", "--out", str(out)]
    assert sweep.main(flags, trained) == 0
    said = capsys.readouterr().out
    assert "| 0 | done | 12 | 1.0 | | | 4096 |" in said and "| 2 | not done |" in said
    assert "| 1 | done | 12 | NaN |" in said
