"""Every combination of some settings: folders, a real run, a SLURM array, the table."""

import csv
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from decent_jax.commands import main as command
from decent_jax.commands import sweep
from decent_jax.ground.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    return str(tiny.write_config(tmp_path / "config_file.py"))


def ended(folder, loss, **more):
    folder.mkdir(parents=True)
    summary = {"steps": 12, "final": {"eval/loss": loss}, "bytes_sent_per_step": 4096} | more
    (folder / "summary.json").write_text(json.dumps(summary))


def test_every_combination_has_a_folder():
    over = ["seed=0,1", "config.schedule=ring,base_k(max_degree=2)", "optimizer.b1=0.9"]
    runs = sweep.runs_of(over, Path("out"))
    assert [run.folder.name for run in runs] == [
        "seed=0,schedule=ring,b1=0.9",
        "seed=0,schedule=base_k-max_degree=2-,b1=0.9",
        "seed=1,schedule=ring,b1=0.9",
        "seed=1,schedule=base_k-max_degree=2-,b1=0.9",
    ]
    assert runs[1].arguments("quickstart", ["--config.steps=5"]) == [
        *("--config", "quickstart", "--config.steps=5", "--config.seed=0"),
        *("--config.schedule=base_k(max_degree=2)", "--config.optimizer.b1=0.9"),
        *("--workdir", "out/seed=0,schedule=base_k-max_degree=2-,b1=0.9"),
    ]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (["seed"], "--over takes NAME=VALUE,VALUE,..., got 'seed'"),
        (["seed=0,,1"], "--over takes NAME=VALUE"),
        (["seed=0,0"], "seed or one of its values occurs twice"),
        (["seed=0", "config.seed=1"], "seed or one of its values occurs twice"),
        (["schedule=base_k(max_degree=2),base_k[max_degree=2]"], "would have the same folder"),
        ([f"{name}={','.join(map(str, range(30)))}" for name in "abc"], "asks for 27000 runs"),
    ],
)
def test_what_cannot_be_swept_over(over, words):
    with pytest.raises(ConfigError) as refused:
        sweep.runs_of(over, Path("out"))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ("num_replicas=4,3", "num_replicas=3: batch_size 8 cannot be shared out over 3"),
        ("accum_steps=2", "accum_steps=2: accum_steps is called optimizer.window now"),
        ("schedule=ring,stars", "schedule=stars: schedule: unknown schedule"),
    ],
)
def test_all_runs_are_checked_before_the_first(over, words, config, tmp_path, capsys):
    out = tmp_path / "out"
    assert sweep.main(["--config", config, "--over", over, "--out", str(out)]) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


STAND_IN = """#!/bin/sh
# Greeted as a supervised run is, it keeps its arguments and what it would have measured.
read greeting && [ "$greeting" = supervised ] && [ "$DECENT_JAX_SUPERVISED" = 1 ] || exit 1
for last; do :; done
echo "$@" > "$last/arguments"
echo '{"steps": 2, "final": {"eval/loss": 0.5}}' > "$last/summary.json"
"""


def stand_in(monkeypatch, tmp_path, text):
    program = tmp_path / "stand_in"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_a_run_is_trained_once_and_stands_in_the_table(config, tmp_path, capsys, monkeypatch):
    """By a process of its own; the other run of the sweep has ended before."""
    out = tmp_path / "out"
    flags = ["--config", config, "--over", "schedule=ring,one_peer_exp", "--over", "seed=0"]
    flags += ["--out", str(out), "--config.steps=2"]
    ended(out / "schedule=ring,seed=0", 0.25)
    stand_in(monkeypatch, tmp_path, STAND_IN)
    assert sweep.main(flags) == 0
    with (out / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["done", "done"]
    assert [(row["steps"], row["validation_loss"]) for row in rows] == [
        ("12", "0.25"),
        ("2", "0.5"),
    ]
    given = (Path(rows[1]["folder"]) / "arguments").read_text().split()
    assert given == [
        *("-m", "decent_jax.commands.main", "train", "--config", config, "--config.steps=2"),
        *("--config.schedule=one_peer_exp", "--config.seed=0", "--workdir", rows[1]["folder"]),
    ]
    capsys.readouterr()
    monkeypatch.setattr(sys, "executable", "false")  # nothing is left to train
    assert sweep.main(flags) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["ring", "0", "done", "12"]


def test_the_program_that_a_run_starts_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command.py", "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(command.__file__, run_name="__main__")
    assert not left.value.code and "usage: decent-jax COMMAND" in capsys.readouterr().out


def test_a_run_that_fails_does_not_stop_the_others(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    out = tmp_path / "out"
    assert sweep.main(["--config", config, "--over", "seed=0,1", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert all(f"a run failed; see {out}/seed={seed}/log.txt" in said for seed in (0, 1))


def test_a_signal_reaches_the_run_and_ends_the_sweep(config, tmp_path, capsys, monkeypatch):
    """A stand-in for a run tells its parent to end, and waits for its own SIGTERM."""
    waits = "while true; do sleep 0.05; done\n"
    saves = "#!/bin/sh\ntrap 'echo saved; exit 143' TERM\nkill -TERM $PPID\n"
    stand_in(monkeypatch, tmp_path, saves + waits)
    out = tmp_path / "out"
    assert sweep.main(["--config", config, "--over", "seed=0,1", "--out", str(out)]) == 143
    assert (out / "seed=0" / "log.txt").read_text().splitlines()[-1] == "saved"
    assert not (out / "seed=1").exists()
    assert "interrupted; the same command continues" in capsys.readouterr().err


def test_the_table_has_means_over_seeds(config, tmp_path, capsys):
    out = tmp_path / "out"
    for seed, loss in ((0, 1.0), (1, 1.5)):
        ended(out / f"seed={seed},schedule=ring", loss)
    ended(out / "seed=0,schedule=one_peer_exp", "NaN")
    ended(out / "seed=1,schedule=one_peer_exp", 2.0, interrupted=True)
    flags = ["--config", config, "--over", "seed=0,1", "--over", "schedule=ring,one_peer_exp"]
    assert sweep.main([*flags, "--out", str(out), "--table"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "ring", "done", "12", "1.0000", "4096"] in lines
    assert ["0", "one_peer_exp", "done", "12", "4096"] in lines  # no number where none is
    assert ["1", "one_peer_exp", "not", "begun"] in lines
    assert ["ring", "2", "1.2500", "0.3536"] in lines and ["one_peer_exp", "0"] in lines


def test_a_slurm_array_runs_every_combination(config, tmp_path):
    """bash reads the script; an srun of the test prints what it would start."""
    out, script = tmp_path / "out folder", tmp_path / "sweep.sbatch"
    over = ["--over", "seed=0,1", "--over", "schedule=hierarchical(complete, one_peer_exp)"]
    common = ["--config.local_size=2", "--config.data.pause=0.5"]
    flags = ["--config", config, *over, "--out", str(out), "--slurm", str(script), *common]
    assert sweep.main(flags) == 0
    assert "#SBATCH --array=0-1\n" in script.read_text()
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    told = subprocess.run(
        ["bash", script], env={"PATH": path, "SLURM_ARRAY_TASK_ID": "1"}, capture_output=True
    )
    run = sweep.runs_of([over[1], over[3]], out)[1]
    started = told.stdout.decode().splitlines()
    assert started[1:4] == ["-m", "decent_jax.commands.main", "train"]
    assert started[4:] == run.arguments(config, common)
