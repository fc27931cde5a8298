"""Curves of synthetic runs: panels, labels, and one sentence where there is nothing to draw."""

import itertools
import json
import math

import matplotlib
import numpy as np
import pytest

from decent_jax.commands import plot as command
from decent_jax.ground.json_files import write_json_atomic
from decent_jax.ground.run_folder import SCORES, label_runs, load_run, smoothed
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.plots import runs as plot

CONFIG = {"algorithm": "gossip", "schedule": "ring", "num_replicas": 8, "workdir": "/x"}


def make_run(folder, *, steps=60, config=None, **changes):
    """A run with every metric; a change to None leaves one out, a function replaces its values."""
    metrics = {
        "train/loss": lambda s: 2 + 8 * math.exp(-s / 10),
        "train/loss_min": lambda s: 1.9 + 8 * math.exp(-s / 10),
        "train/loss_max": lambda s: 2.1 + 8 * math.exp(-s / 10),
        "train/consensus_distance": lambda s: 3.0 / s,
        "train/consensus_distance_relative": lambda s: 0.03 / s,
        "perf/tokens_per_s": lambda s: 80_000 + s,
        "perf/step_time_s": lambda s: 0.5,
        "perf/wall_time_s": lambda s: 0.5 * s,
    }
    metrics |= {name.replace("__", "/"): value for name, value in changes.items()}
    with MetricWriter(folder) as writer:
        for s in range(1, steps + 1):
            writer.write(s, {name: f(s) for name, f in metrics.items() if f})
            if s % 20 == 0:
                writer.write(s, {"eval/loss": 2.2 + 8 * math.exp(-s / 10)})
    write_json_atomic(folder / "config.json", CONFIG | (config or {}))
    return folder


def figure_of(*folders):
    runs = [load_run(folder) for folder in folders]
    label_runs(runs)
    return plot.draw([[run] for run in runs])


def panels_of(figure):
    """The number of lines of each panel by its title; loss is drawn against steps and time."""
    return [(axes.get_title(loc="left").partition(":")[0], len(axes.lines)) for axes in figure.axes]


CONSENSUS, SECONDS = "Consensus distance, relative to the mean's norm", "Seconds per step"


def test_a_diverged_run_and_a_distance_of_zero_are_drawn(tmp_path):
    run = make_run(
        tmp_path / "a",
        train__loss=lambda s: 3.0 if s <= 40 else math.nan,
        train__consensus_distance_relative=lambda s: 0.0,
        perf__step_time_s=lambda s: math.nan,
    )
    assert panels_of(figure_of(run)) == [("Loss", 2), ("Loss", 2), (CONSENSUS, 1)]
    plot.plot_runs([run])


def test_smoothing():
    values = np.array([10.0, 4.0, np.nan, 2.0, 4.0, 2.0])
    np.testing.assert_allclose(smoothed(values, window=2), [10, 7, np.nan, 3, 8 / 3, 3])
    np.testing.assert_array_equal(smoothed(values), values)  # too short to smooth


def test_only_steps_that_all_seeds_have(tmp_path):
    whole, short = make_run(tmp_path / "a", config={"seed": 0}), tmp_path / "b"
    make_run(short, steps=10, config={"seed": 1})
    for _ in range(2):
        (group,) = plot.groups_of([load_run(whole), load_run(short)])
        loss = plot.curve(group, "train/loss")
        assert loss.steps.tolist() == list(range(1, 11))
        assert loss.sent is None  # no summary; and then of one seed it is not known
        assert plot.curve(group, "eval/loss") is None
        write_json_atomic(short / "summary.json", {"bytes_sent_per_step": 1000})


def test_one_run(tmp_path):
    """And a score, which has a panel of its own; the settings of matplotlib stay as they were."""
    before, run = dict(matplotlib.rcParams), make_run(tmp_path / "my_run")
    with MetricWriter(run, start_step=60) as writer:
        writer.write(60, {"eval/top1": 0.75})
    assert plot.plot_runs([run]) == run / "curves.png"
    assert (run / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert dict(matplotlib.rcParams) == before
    figure = figure_of(run)
    losses, last = [("Loss", 2), ("Loss", 2)], [(CONSENSUS, 1), (SECONDS, 1)]
    assert panels_of(figure) == [*losses, (SCORES["eval/top1"][0], 1), *last]
    assert figure.axes[1].get_xlim() == pytest.approx((0.5, 30), abs=0.5)  # seconds
    assert figure.axes[2].lines[0].get_ydata().tolist() == [75.0]
    assert figure.axes[3].get_yscale() == "log"


def test_several_runs_are_compared_under_their_differences(tmp_path):
    changes = ({"algorithm": "all_reduce"}, {"optimizer": {"learning_rate": 3e-4}}, {})
    runs = [make_run(tmp_path / f"{i}", config=made) for i, made in enumerate(changes)]
    make_run(runs[2], perf__wall_time_s=None)
    figure = figure_of(*runs)
    (legend,) = figure.legends
    labels = ["all_reduce", "gossip, learning rate 0.0003", "gossip"]
    assert [text.get_text() for text in legend.get_texts()] == labels
    assert len({handle.get_color() for handle in legend.get_lines()}) == 3
    wanted = [("Loss", 6), ("Loss", 4), (CONSENSUS, 3), (SECONDS, 3)]
    assert panels_of(figure) == wanted  # two have the time of their steps


def test_what_cannot_be_drawn_is_one_sentence_and_exit_2(tmp_path, capsys):
    good = make_run(tmp_path / "good", steps=3)
    with MetricWriter(tmp_path / "other") as writer:
        writer.write(1, {"mine": 1.0})
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "metrics.jsonl").write_text("x\n{}\n" + json.dumps({"step": 1}) + "\n")
    for names in (["good", "absent"], ["other"], ["damaged"]):
        assert command.main([str(tmp_path / name) for name in names]) == 2
        error = capsys.readouterr().err
        assert str(tmp_path / names[-1]) in error and error.count("\n") == 1
    for arguments, named in (
        ([good, "--out", tmp_path / "curves.xyz"], "xyz"),
        ([good, "--out", "/proc/nowhere/a.png"], "'/proc/nowhere'"),
        ([tmp_path / "other", "--mean"], str(tmp_path / "other")),
        ([], "RUN"),
    ):
        assert command.main([*map(str, arguments)]) == 2
        assert named in capsys.readouterr().err


def test_the_mean_over_seeds(tmp_path, capsys):
    runs = []
    for schedule, seed in itertools.product(("ring", "one_peer_exp"), range(3)):
        changes = {
            "train__consensus_distance_relative": lambda s, seed=seed: 0.01 * (seed + 1),
            "perf__wall_time_s": lambda s, seed=seed: (1 + seed) * s,
        }
        config = {"schedule": schedule, "seed": seed, "log": {"every": seed}}
        runs.append(make_run(tmp_path / f"{schedule}{seed}", config=config, **changes))
        write_json_atomic(runs[-1] / "summary.json", {"bytes_sent_per_step": 1000})
    groups = plot.groups_of([load_run(run) for run in runs])
    assert [group[0].label for group in groups] == ["ring", "one_peer_exp"]
    ring = plot.curve(groups[0], plot.CONSENSUS)
    assert len(groups[0]) == 3 and len(ring.steps) == 60
    np.testing.assert_allclose(ring.mean, 0.02)
    np.testing.assert_allclose(ring.deviation, 0.01)  # of 0.01, 0.02, 0.03 with n - 1
    np.testing.assert_allclose(ring.seconds, 2 * ring.steps)
    np.testing.assert_allclose(ring.sent, 1000 * ring.steps)
    figure = plot.draw(groups)
    assert panels_of(figure) == [*[("Loss", 4)] * 3, (CONSENSUS, 2), (SECONDS, 2)]
    assert all(len(axes.lines) == len(axes.collections) for axes in figure.axes)
    out = tmp_path / "mean.pdf"
    assert command.main([*map(str, runs), "--out", str(out), "--mean"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    assert out.read_bytes()[:5] == b"%PDF-"
