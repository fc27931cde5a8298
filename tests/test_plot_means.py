"""Runs that differ in their seed as one line: means, bands and axes."""

import json

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from test_plot import make_run, size_of_png

from decent_jax.commands import plot as command
from decent_jax.ground.json_files import write_json_atomic
from decent_jax.ground.run_folder import load_run
from decent_jax.plots import runs as plot_means


def sweep_of(folder, *, seeds=(0, 1, 2), schedules=("ring", "one_peer_exp"), sent=1000):
    """Runs whose loss is 2 + seed, from step 1 to 60; the validation loss 2.2 + 8 exp(-s / 10)."""
    runs = []
    for schedule in schedules:
        for seed in seeds:
            run = make_run(
                folder / f"{schedule}{seed}",
                config={"schedule": schedule, "seed": seed, "log": {"every": seed}},
                train__loss=lambda s, seed=seed: 2.0 + seed,
                train__consensus_distance_relative=lambda s, seed=seed: 0.01 * (seed + 1),
                perf__wall_time_s=lambda s, seed=seed: (1 + seed) * s,
            )
            write_json_atomic(run / "summary.json", {"bytes_sent_per_step": sent})
            runs.append(run)
    return runs


def test_a_curve_is_the_mean_over_seeds(tmp_path):
    runs = [load_run(run) for run in sweep_of(tmp_path)]
    curves = plot_means.curves_of(runs)
    assert list(curves) == ["eval/loss", plot_means.CONSENSUS]
    assert [made.label for made in curves["eval/loss"]] == ["ring", "one_peer_exp"]
    ring = curves[plot_means.CONSENSUS][0]
    assert ring.runs == 3 and len(ring.steps) == 60
    np.testing.assert_allclose(ring.mean, 0.02)
    np.testing.assert_allclose(ring.deviation, 0.01)  # of 0.01, 0.02, 0.03 with n - 1
    np.testing.assert_allclose(ring.seconds, 2 * ring.steps)
    np.testing.assert_allclose(ring.sent, 1000 * ring.steps)


def test_only_steps_that_all_seeds_have(tmp_path):
    whole, short = make_run(tmp_path / "a", config={"seed": 0}), tmp_path / "b"
    make_run(short, steps=10, config={"seed": 1})
    curves = plot_means.curves_of([load_run(whole), load_run(short)])
    (loss,) = curves["train/loss"]  # a single validation of one run is no curve
    assert loss.steps.tolist() == list(range(1, 11))
    assert loss.sent is None  # no summary
    write_json_atomic(short / "summary.json", {"bytes_sent_per_step": 1000})
    (loss,) = plot_means.curves_of([load_run(whole), load_run(short)])["train/loss"]
    assert loss.sent is None  # of one seed it is not known


def test_panels_and_labels(tmp_path):
    curves = plot_means.curves_of([load_run(run) for run in sweep_of(tmp_path)])
    figure = plot_means.draw_means(curves)
    assert [axes.get_xlabel() for axes in figure.axes] == [
        *("step", "training time (s)", "sent per replica (kB)", "step")
    ]
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        *["Validation loss"] * 3,
        "Consensus distance",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "ring (3 seeds)",
        "one_peer_exp (3 seeds)",
    ]
    assert all(len(axes.lines) == len(axes.collections) == 2 for axes in figure.axes)
    FigureCanvasAgg(figure).draw()  # makes the layout
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("name", ["mean.png", "mean.pdf", "mean.svg"])
def test_the_command(name, tmp_path, capsys):
    runs = sweep_of(tmp_path, seeds=(0, 1), schedules=("ring",), sent=None)
    out = tmp_path / name
    assert command.main([*map(str, runs), "--out", str(out), "--mean"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    if name == "mean.png":
        size_of_png(out)
    else:
        assert out.read_bytes().lstrip()[:5] in (b"%PDF-", b"<?xml")


def test_runs_without_a_loss_are_refused(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "other": 2}) + "\n")
    assert command.main([str(tmp_path), "--mean"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
