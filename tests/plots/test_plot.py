"""Curves of synthetic runs: panels, labels, and one sentence where there is nothing to draw."""

import itertools
import json
import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from decent_jax.commands import plot as command
from decent_jax.ground.json_files import write_json_atomic
from decent_jax.ground.run_folder import SCORES, RunFolder, label_runs, load_run, smoothed
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
    return plot.draw(runs)


def size_of_png(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_a_diverged_run_and_a_distance_of_zero_are_labelled(tmp_path):
    run = make_run(
        tmp_path / "a",
        train__loss=lambda s: 3.0 if s <= 40 else math.nan,
        train__consensus_distance=lambda s: 0.0,
        train__consensus_distance_relative=lambda s: 0.0,
        perf__tokens_per_s=lambda s: math.nan,
    )
    figure = figure_of(run)
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert "train not finite" in words and "always 0" in words
    size_of_png(plot.plot_runs([run]))


def test_smoothing():
    values = np.array([10.0, 4.0, np.nan, 2.0, 4.0, 2.0])
    np.testing.assert_allclose(smoothed(values, window=2), [10, 7, np.nan, 3, 8 / 3, 3])
    np.testing.assert_array_equal(smoothed(values), values)  # too short to smooth


def test_only_steps_that_all_seeds_have(tmp_path):
    whole, short = make_run(tmp_path / "a", config={"seed": 0}), tmp_path / "b"
    make_run(short, steps=10, config={"seed": 1})
    curves = plot.curves_of([load_run(whole), load_run(short)])
    (loss,) = curves["train/loss"]  # a single validation of one run is no curve
    assert loss.steps.tolist() == list(range(1, 11))
    assert loss.sent is None  # no summary
    write_json_atomic(short / "summary.json", {"bytes_sent_per_step": 1000})
    (loss,) = plot.curves_of([load_run(whole), load_run(short)])["train/loss"]
    assert loss.sent is None  # of one seed it is not known


def test_one_run(tmp_path):
    """And a score, which has a panel of its own; the settings of matplotlib stay as they were."""
    before, run = dict(matplotlib.rcParams), make_run(tmp_path / "my_run")
    with MetricWriter(run, start_step=60) as writer:
        writer.write(60, {"eval/top1": 0.75})
    assert plot.plot_runs([run]) == run / "curves.png"
    size_of_png(run / "curves.png")
    assert dict(matplotlib.rcParams) == before
    figure = figure_of(run)
    panels = [axes.get_title(loc="left") for axes in figure.axes]
    losses, last = ["Loss by step", "Loss by time"], ["Consensus distance", "Tokens per second"]
    assert panels == [*losses, SCORES["eval/top1"][0], *last]
    assert [len(axes.lines) for axes in figure.axes] == [3, 3, 1, 1, 2]
    assert figure.axes[1].get_xlim() == pytest.approx((0.5, 30), abs=0.5)  # seconds
    assert figure.axes[3].get_yscale() == "log"
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert {"train 2.020", "validation 2.220", "75.0"} <= {*words}


def test_several_runs_are_compared_under_their_differences(tmp_path):
    changes = ({"algorithm": "all_reduce"}, {"optimizer": {"learning_rate": 3e-4}}, {})
    runs = [make_run(tmp_path / f"{i}", config=made) for i, made in enumerate(changes)]
    make_run(runs[2], perf__wall_time_s=None, perf__tokens_per_s=None)
    figure = figure_of(*runs)
    (legend,) = figure.legends
    labels = ["all_reduce", "gossip, learning rate 0.0003", "gossip"]
    assert [text.get_text() for text in legend.get_texts()] == labels
    assert len({handle.get_color() for handle in legend.get_lines()}) == 3
    panels = {axes.get_title(loc="left"): len(axes.lines) for axes in figure.axes}
    wanted = {"Loss by step": 9, "Loss by time": 6, "Consensus distance": 3, "Step time": 6}
    assert panels == wanted  # the speed that all of them have


def test_runs_of_different_configs_are_labelled_by_folder_and_preset():
    """Not by where and how often they write, nor by the first numbers that happen to differ."""
    code = {"model.preset": "small", "data.prompt": "import ", "num_replicas": 8, "steps": 100}
    code |= {"batch_size": 64, "learning_rate": 0.003, "model.layers": 6, "optimizer.b2": 0.99}
    book = {"model.preset": "llama_125m", "data.prompt": "The game", "num_replicas": 8, "steps": 9}
    book |= {"batch_size": 8, "learning_rate": 0.01, "model.layers": 12, "optimizer.b2": 0.95}
    same = {"seed": 0, "log.every": 1, "workdir": "/a"}
    for made, labels in (
        ((code, book), ["x: small, batch size 64, learning rate 0.003", "y: llama_125m, batch"]),
        ((same, same | {"seed": 1, "log.every": 9, "workdir": "/b"}), ["seed 0", "seed 1"]),
        ((same, same), ["x", "y"]),
    ):
        runs = [RunFolder(Path(name), [], each) for name, each in zip("xy", made, strict=True)]
        label_runs(runs)
        assert all(run.label.startswith(label) for run, label in zip(runs, labels, strict=True))


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


@pytest.mark.parametrize("name", ["mean.png", "mean.pdf"])
def test_the_mean_over_seeds(name, tmp_path, capsys):
    runs = []
    for schedule, seed in itertools.product(("ring", "one_peer_exp"), range(3)):
        changes = {
            "train__consensus_distance_relative": lambda s, seed=seed: 0.01 * (seed + 1),
            "perf__wall_time_s": lambda s, seed=seed: (1 + seed) * s,
        }
        config = {"schedule": schedule, "seed": seed, "log": {"every": seed}}
        runs.append(make_run(tmp_path / f"{schedule}{seed}", config=config, **changes))
        write_json_atomic(runs[-1] / "summary.json", {"bytes_sent_per_step": 1000})
    curves = plot.curves_of([load_run(run) for run in runs])
    assert list(curves) == ["eval/loss", plot.CONSENSUS]
    assert [made.label for made in curves["eval/loss"]] == ["ring", "one_peer_exp"]
    ring = curves[plot.CONSENSUS][0]
    assert ring.runs == 3 and len(ring.steps) == 60
    np.testing.assert_allclose(ring.mean, 0.02)
    np.testing.assert_allclose(ring.deviation, 0.01)  # of 0.01, 0.02, 0.03 with n - 1
    np.testing.assert_allclose(ring.seconds, 2 * ring.steps)
    np.testing.assert_allclose(ring.sent, 1000 * ring.steps)
    figure = plot.draw_means(curves)
    panels = [axes.get_title(loc="left") for axes in figure.axes]
    assert panels == [*["Validation loss"] * 3, "Consensus distance"]
    assert all(len(axes.lines) == len(axes.collections) == 2 for axes in figure.axes)
    out = tmp_path / name
    assert command.main([*map(str, runs), "--out", str(out), "--mean"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    assert out.read_bytes()[:5] in (b"%PDF-", b"\x89PNG\r")
