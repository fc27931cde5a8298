"""The metrics file: what is in it after a crash, a resume and numbers that are not finite."""

import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest

from decent_jax.ground.json_files import write_json_atomic
from decent_jax.train import metrics
from decent_jax.train.metrics import MetricWriter, read_metrics


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


def test_a_fresh_start_in_a_used_folder_and_a_file_of_one_torn_line(tmp_path):
    write_rows(tmp_path, [10, 20])
    MetricWriter(tmp_path).close()
    assert steps_of(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    write_rows(tmp_path, [1, 2])
    assert steps_of(tmp_path) == [1, 2]


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


def test_a_quiet_writer_writes_nothing(tmp_path):
    with MetricWriter(tmp_path / "run", quiet=True) as writer:
        writer.write(1, {"a": 1.0})
    assert os.listdir(tmp_path) == []


def test_a_row_averages_the_finite_losses_of_its_steps():
    """Against float64 NumPy: five steps of four replicas, some of them without a loss."""
    rng = np.random.default_rng(0)
    loss, norm = rng.uniform(1, 30, (2, 5, 4)).astype(np.float32)
    loss[[2, 3, 3, 3], [3, 0, 1, 3]] = np.nan
    zeros = np.zeros(4, np.int32)
    last = {"learning_rate": np.float32(0.1), "skipped": zeros, "failing": zeros}
    sums = None
    for t in range(5):
        sums = metrics._add(sums, {"loss": loss[t], "grad_norm": norm[t]})
    row = metrics._summarize(sums, last)
    exact, of_replicas = loss.astype(float), np.nanmean(loss.astype(float), axis=0)
    wanted = {
        "loss": np.nanmean(exact),
        "loss_max": of_replicas.max(),
        "loss_min": of_replicas.min(),
        "grad_norm": norm.astype(float)[np.isfinite(exact)].mean(),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(row[name], value, rtol=1e-6, err_msg=name)
