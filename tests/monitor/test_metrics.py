"""The metrics file: what is in it after a crash, a resume and numbers that are not finite."""

import json
import math
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from decent_jax import replicas
from decent_jax.ground.json_files import write_json_atomic
from decent_jax.ground.run_folder import read_metrics
from decent_jax.monitor.goodput import Clock
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.train.rows import Rows


def write_rows(workdir, steps):
    with MetricWriter(workdir) as writer:
        for step in steps:
            writer.write(step, {"train/loss": step / 10})


def steps_of(workdir):
    return [row["step"] for row in read_metrics(workdir)]


def test_scalars_of_every_kind_become_short_plain_numbers(tmp_path):
    scalars = {"python": 2.5, "int": 3, "bool": True, "numpy": np.float32(2.3)}
    scalars |= {"jax": jnp.float32(2.3), "bfloat16": jnp.bfloat16(0.5), "one": np.array([[4]])}
    with MetricWriter(tmp_path) as writer:
        writer.write(jnp.int32(10), scalars | {"any key, with spaces/µ": 1})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    words = '{"step": 10, "python": 2.5, "int": 3, "bool": 1, "numpy": 2.3, "jax": 2.3, '
    assert line.startswith(words) and json.loads(line) == json.loads(
        words + '"bfloat16": 0.5, "one": 4, "any key, with spaces/µ": 1}'
    )


def test_numbers_that_are_not_finite_are_strict_json_and_come_back(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": jnp.float32(-jnp.inf)})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_the_same_step_is_one_row_and_the_later_value_stands(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"a": 1.0})
        writer.write(2, {"a": 0.123456789, "b": 1.0})
        writer.write(2, {"a": 2.0})  # the merged row is shorter than the first
        writer.write(2, {"c": 3.0})
        writer.write(3, {"a": 3.0})
    assert read_metrics(tmp_path) == [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 2.0, "b": 1.0, "c": 3.0},
        {"step": 3, "a": 3.0},
    ]


def test_a_resumed_run_drops_the_torn_line_and_the_rows_past_its_step(tmp_path):
    write_rows(tmp_path, [10, 20, 30, 40])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "train/lo')
    assert steps_of(tmp_path) == [10, 20, 30, 40]
    with MetricWriter(tmp_path, start_step=20) as writer:
        assert steps_of(tmp_path) == [10, 20]
        writer.write(20, {"eval/loss": 5.0})  # the restored step can still be completed
        writer.write(25, {"train/loss": 1.0})
    assert read_metrics(tmp_path) == [
        {"step": 10, "train/loss": 1.0},
        {"step": 20, "train/loss": 2.0, "eval/loss": 5.0},
        {"step": 25, "train/loss": 1.0},
    ]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"loss": np.float64(1.5), "best": math.inf, "shape": (1, np.int32(2))})
    assert json.loads(path.read_text()) == {"loss": 1.5, "best": "Infinity", "shape": [1, 2]}
    before = path.read_text()
    with path.open() as reader:  # which goes on with the file that it has opened
        write_json_atomic(path, {"loss": 2.5})
        assert reader.read() == before
    before = path.read_text()
    with pytest.raises(TypeError):
        write_json_atomic(path, {"loss": object()})
    write_json_atomic(tmp_path / "config.json", {"path": tmp_path, 3: jnp.arange(2)})
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {"path": str(tmp_path), "3": [0, 1]}
    assert path.read_text() == before
    assert sorted(os.listdir(tmp_path)) == ["config.json", "summary.json"]


def test_a_row_by_hand(tmp_path):
    """Two steps of ten seconds, one of them without a loss, of a run that had other replicas."""
    now, notes, shown = [0.0], [], []
    clock, config = (
        Clock(lambda: now[0]),
        tiny.waves(num_replicas=2, batch_size=8, log={"every": 12}),
    )
    task = SimpleNamespace(unit="tokens", units_per_example=3, flops_per_example=100.0)
    place = replicas.place(2, jax.devices()[:1])
    runner = SimpleNamespace(
        experiment=SimpleNamespace(config=config, task=task, placement=place),
        measured=lambda done, steps, seconds: {"done": done, "steps": steps, "s": seconds},
        **{"evaluate": print, "consensus": lambda: replicas.Consensus(0.5, 0.25)},
    )
    progress = SimpleNamespace(note=notes.append, update=lambda *given: shown.append(given))
    with MetricWriter(tmp_path) as writer:
        report = Rows(runner, clock, writer, progress, 12, lambda: "")
        with clock.of("compiling"):
            now[0] = 5.0
        row = {"skipped": [1, 0, 2, 0]}
        report.resume(10, {"num_replicas": 4, "batch_size": 8, "row": row})
        clock.begin_row()
        for t in range(2):
            own = {
                "loss": jnp.float32([4 * t + 1, 7 if t else np.nan]),
                "grad_norm": jnp.float32([t, 2]),
            }
            own |= {"skipped": jnp.int32([3, 2 * t]), "failing": jnp.int32([t, 3])}
            own |= {"learning_rate": jnp.float32(0.5 - t / 4), "measured": {"data/x": t}}
            report.add([own])
            now[0] += 10.0
            clock.waited_for_data(1.5)
            report.settle()
    losses = {"loss": 13 / 3, "loss_min": 3.0, "loss_max": 7.0, "grad_norm": 1.0}
    losses |= {"learning_rate": 0.25, "skipped_updates": 5}
    losses |= {"consensus_distance": 0.5, "consensus_distance_relative": 0.25}
    speed = {"step_time_s": 10.0, "data_wait_s": 1.5, "wall_time_s": 20.0}
    speed |= {"tokens_per_s": 8 * 3 * 2 / 20, "wall_time_s": 20.0}
    wanted = {f"train/{name}": x for name, x in losses.items()}
    wanted |= {f"perf/{name}": x for name, x in speed.items()} | {"goodput": 17 / 25}
    wanted |= {
        "step": 12,
        "done": 12,
        "steps": 2,
        "s": 20.0,
        "replicas/0/loss": 3.0,
        "replicas/1/loss": 7.0,
    }
    assert read_metrics(tmp_path) == [pytest.approx(wanted | {"data/x": 0.5})]
    bar = pytest.approx({"loss": 13 / 3, "consensus": 0.25, "tokens/s": 2.4})
    assert shown == [(11,), (12, bar)] and report.step_s == 10.0
    (note,) = notes
    assert all(words in note for words in ("step 12: 2 updates", "replica 1", "5 since"))
