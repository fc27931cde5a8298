"""Curves of synthetic runs: panels, labels, and one sentence where there is nothing to draw."""

import json
import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from decent_jax.commands import plot as command
from decent_jax.ground.json_files import write_json_atomic
from decent_jax.ground.run_folder import SCORES, RunFolder, label_runs, load_run, smoothed
from decent_jax.plots import network
from decent_jax.plots import runs as plot
from decent_jax.train.metrics import MetricWriter

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


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def size_of_png(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_one_run(tmp_path, capsys):
    run = make_run(tmp_path / "my_run")
    assert command.main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'curves.png'}\n{run / 'report.html'}\n"
    width, height = size_of_png(run / "curves.png")
    assert width > height > 800
    figure = figure_of(run)
    first = ["Loss by step", "Loss by time", "Consensus distance"]
    assert titles(figure) == [*first, "Tokens per second"]
    assert [len(axes.lines) for axes in figure.axes] == [3, 3, 1, 2]
    assert figure.axes[1].get_xlim() == pytest.approx((0.5, 30), abs=0.5)  # seconds
    assert figure.axes[2].get_yscale() == "log"
    assert figure.get_suptitle() == "my_run: gossip, ring, 8 replicas"
    assert [text.get_text() for text in figure.axes[0].texts] == ["train 2.020", "validation 2.220"]


def test_a_step_as_a_gantt_chart_by_hand():
    """The last of two steps, of replicas 2 and 0 of three; what began before it is cut off."""
    events = [("forward", 0, 1, 1.0, 1.5), ("communicate", 2, 1, 0.5, 2.0), ("wait", 1, 1, 1, 2)]
    events.append(("backward", 0, 0, 0.0, 1.0))
    ends = np.array([[0.5, 0.5, 0.5], [1.0, 1.0, 1.0], [2.0, 2.0, 2.5]])
    figure = network.draw_gantt({"ring": (events, ends)}, ["a", "b", "c"], [2, 0], steps=1)
    (axes,) = figure.axes
    spans = [found.get_paths()[0].get_extents().extents for found in axes.collections]
    wanted = [(0, 0.6, 500, 1), (0, 0.02, 1000, 0.38), (1500, -0.42, 1500, 0.4)]
    np.testing.assert_allclose(spans, [*wanted, (1000, 0.58, 1000, 1.4)])
    assert axes.get_xlim() == (0, 1515) and axes.get_title(loc="left") == "ring"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "a"]
    assert axes.get_xlabel() == "milliseconds (2 of 3 replicas)"


def test_a_run_of_peers_has_a_lane_for_each(tmp_path):
    """Peer 0 trains throughout, peer 1 dies and is replaced, peer 2 joins late."""
    folder = make_run(tmp_path / "run", perf__wall_time_s=None)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        s = row["step"]
        alive = {0: True, 1: s < 20 or s > 30, 2: s > 40}
        for k in (k for k in alive if alive[k]):
            row |= {f"peers/{k}/steps": 4.0 * s, f"peers/{k}/stale": float(s % 5)}
            row[f"peers/{k}/incarnation"] = float(k == 1 and s > 30)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lanes = figure_of(folder).axes[-1]
    assert lanes.get_title(loc="left") == "Peers"
    marks = {(line.get_marker(), *line.get_xydata()[0].tolist()) for line in lanes.lines}
    marks = {mark for mark in marks if mark[0] in ">X"}
    assert marks == {("X", 19.0, 1.0), (">", 31.0, 1.0), (">", 41.0, 2.0)}
    assert [text.get_text() for text in lanes.texts] == ["240 steps"] * 3
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["peer 0", "peer 1", "peer 2"]


def test_several_runs_are_compared_under_their_differences(tmp_path, monkeypatch, capsys):
    runs = [
        make_run(tmp_path / "a", config={"algorithm": "all_reduce"}),
        make_run(tmp_path / "b", steps=30, config={"optimizer": {"learning_rate": 3e-4}}),
        make_run(tmp_path / "c", config={"schedule": "one_peer_exp"}),
    ]
    figure = figure_of(*runs)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "all_reduce",
        "gossip, ring, learning rate 0.0003",
        "gossip, one_peer_exp",
    ]
    assert len({handle.get_color() for handle in legend.get_lines()}) == 3
    assert [len(axes.lines) for axes in figure.axes] == [9, 9, 3, 6]
    monkeypatch.chdir(tmp_path)
    assert command.main([str(run) for run in runs]) == 0
    assert capsys.readouterr().out == "comparison.png\ncomparison.html\n"
    size_of_png(tmp_path / "comparison.png")


def test_equal_settings_are_labelled_by_folder_and_odd_names_are_drawn(tmp_path):
    names = ["_hidden", "cost $1 $2"] + [f"run_{i}" for i in range(7)]
    runs = [load_run(make_run(tmp_path / name, steps=2)) for name in names]
    label_runs(runs)
    assert [run.label for run in runs] == names
    out = plot.plot_runs([tmp_path / name for name in names], tmp_path / "new folder" / "c.png")
    size_of_png(out)
    plot.draw(runs)
    assert len({(run.colour, run.dashes) for run in runs}) == 9


def test_labels_say_what_was_trained_and_not_where():
    cosine = {"seed": 0, "lr_schedule.name": "cosine", "log.every": 1, "workdir": "/a"}
    constant = cosine | {"lr_schedule.name": "constant", "log.every": 9, "workdir": "/b"}
    cosine["eval.every"], constant["eval.every"] = 30, 1000
    runs = [
        RunFolder(Path(name), [], settings) for name, settings in (("a", cosine), ("b", constant))
    ]
    label_runs(runs)
    assert [run.label for run in runs] == ["cosine", "constant"]
    label_runs(runs[:1])
    assert runs[0].label == "a: seed 0"


def test_runs_of_different_configs_are_labelled_by_folder_and_preset():
    """Not by the prompt of the samples, nor by the first numbers that happen to differ."""
    code = {"model.preset": "small", "data.prompt": "import ", "num_replicas": 8, "steps": 100}
    code |= {"batch_size": 64, "learning_rate": 0.003, "model.layers": 6, "optimizer.b2": 0.99}
    book = {"model.preset": "llama_125m", "data.prompt": "The game", "num_replicas": 8, "steps": 9}
    book |= {"batch_size": 8, "learning_rate": 0.01, "model.layers": 12, "optimizer.b2": 0.95}
    paths = Path("runs/code"), Path("runs/book")
    runs = [RunFolder(path, [], made) for path, made in zip(paths, (code, book), strict=True)]
    label_runs(runs)
    assert [run.label for run in runs] == [
        "code: small, batch size 64, learning rate 0.003",
        "book: llama_125m, batch size 8, learning rate 0.01",
    ]
    runs = [RunFolder(Path(f"{name}/run"), [], made) for name, made in (("a", code), ("b", book))]
    label_runs(runs)
    assert [run.label.partition(":")[0] for run in runs] == ["a/run", "b/run"]


def test_missing_metrics_leave_their_panel_out(tmp_path):
    names = ("train__consensus_distance", "train__consensus_distance_relative")
    names += ("perf__wall_time_s", "perf__tokens_per_s")
    run = make_run(tmp_path / "a", **dict.fromkeys(names))
    figure = figure_of(run)
    assert titles(figure) == ["Loss by step", "Step time"]
    one = make_run(tmp_path / "b", steps=1, **dict.fromkeys(names))
    size_of_png(plot.plot_runs([one]))


def test_runs_with_different_metrics_share_the_one_that_all_have(tmp_path):
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", perf__tokens_per_s=None, train__consensus_distance_relative=None)
    figure = figure_of(a, b)
    assert titles(figure)[-1] == "Step time"
    assert figure.axes[2].get_title(loc="right") == ""  # absolute distances


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


def test_the_steep_start_does_not_flatten_the_rest(tmp_path):
    figure = figure_of(make_run(tmp_path / "a", steps=400, train__loss=lambda s: 2 + 900 / s**2))
    assert figure.axes[0].get_ylim()[1] < 4


def test_end_labels_keep_apart(tmp_path):
    runs = [make_run(tmp_path / f"{i}", config={"seed": i}) for i in range(5)]
    axes = figure_of(*runs).axes[0]
    heights = sorted(text.xy[1] for text in axes.texts)
    assert len(heights) == 5 and min(np.diff(heights)) > 0.06 and heights[-1] <= 1


def test_smoothing():
    values = np.array([10.0, 4.0, np.nan, 2.0, 4.0, 2.0])
    np.testing.assert_allclose(smoothed(values, window=2), [10, 7, np.nan, 3, 8 / 3, 3])
    np.testing.assert_array_equal(smoothed(values), values)  # too short to smooth


def test_drawing_leaves_the_backend_and_the_settings_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    plot.plot_runs([make_run(tmp_path / "a", steps=3)])
    assert dict(matplotlib.rcParams) == before


def test_what_cannot_be_drawn_is_one_sentence_and_exit_2(tmp_path, capsys):
    good = make_run(tmp_path / "good", steps=3)
    (tmp_path / "bare").mkdir()
    MetricWriter(tmp_path / "empty").close()
    with MetricWriter(tmp_path / "other") as writer:
        writer.write(1, {"mine": 1.0})
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "metrics.jsonl").write_text("x\n{}\n" + json.dumps({"step": 1}) + "\n")
    for arguments in (["good", "absent"], ["bare"], ["empty"], ["other"], ["damaged"]):
        assert command.main([str(tmp_path / argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert str(tmp_path / arguments[-1]) in error and error.count("\n") == 1
    assert command.main([str(good), "--out", str(tmp_path / "curves.xyz")]) == 2
    assert "xyz" in capsys.readouterr().err
    run = make_run(tmp_path / "a_run")
    assert command.main([str(run), "--out", "/proc/nowhere/a.png"]) == 2
    error = capsys.readouterr().err
    assert "'/proc/nowhere'" in error and "Errno" not in error
    assert command.main([]) == 2
    assert "RUN" in capsys.readouterr().err


def test_scores_of_images_and_translations_get_a_panel(tmp_path):
    run = make_run(tmp_path / "a")
    with MetricWriter(run, start_step=60) as writer:
        writer.write(60, {"eval/top1": 0.75, "eval/bleu": 21.5})
    figure = figure_of(run)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    words = [panels[name].texts[0].get_text() for name, _ in SCORES.values()]
    assert words == ["75.0", "21.5"]


def test_a_legend_stays_inside_the_figure(tmp_path):
    runs = [
        make_run(tmp_path / f"{i}", config={"schedule": f"hierarchical(complete, graph_{i})" * 2})
        for i in range(3)
    ]
    figure = figure_of(*runs)
    FigureCanvasAgg(figure).draw()  # makes the layout
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_what_rounding_leaves_of_all_reduce_does_not_stretch_the_axis(tmp_path):
    gossip = make_run(tmp_path / "a")
    name = "train__consensus_distance_relative"
    exact = make_run(tmp_path / "b", config={"algorithm": "all_reduce"}, **{name: lambda s: 6e-8})
    axes = figure_of(gossip, exact).axes[2]
    low, high = axes.get_ylim()
    assert 1e-5 < low < 0.03 / 60 and 0.03 < high < 0.1


# --- runs that differ in their seed as one line ---------------------------------------------------


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
    curves = plot.curves_of(runs)
    assert list(curves) == ["eval/loss", plot.CONSENSUS]
    assert [made.label for made in curves["eval/loss"]] == ["ring", "one_peer_exp"]
    ring = curves[plot.CONSENSUS][0]
    assert ring.runs == 3 and len(ring.steps) == 60
    np.testing.assert_allclose(ring.mean, 0.02)
    np.testing.assert_allclose(ring.deviation, 0.01)  # of 0.01, 0.02, 0.03 with n - 1
    np.testing.assert_allclose(ring.seconds, 2 * ring.steps)
    np.testing.assert_allclose(ring.sent, 1000 * ring.steps)


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


def test_panels_and_labels(tmp_path):
    curves = plot.curves_of([load_run(run) for run in sweep_of(tmp_path)])
    figure = plot.draw_means(curves)
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
