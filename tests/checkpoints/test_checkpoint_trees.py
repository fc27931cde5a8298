"""Any tree of parameters and state is saved and restored, or refused before the first step."""

import json

import jax.numpy as jnp
import pytest
import small_runs
import tiny
import tree_task
from refusals import refused, refuses

from decent_jax import train
from decent_jax.checkpoints import arrays
from decent_jax.train import saved_model


def config(tree, **changes):
    made = train.default_config("tree_task")
    made.update_from_flattened_dict(
        {
            **{"num_replicas": 2, "batch_size": 4, "steps": 4, "model.tree": tree},
            **{"mesh.devices": 1, "eval.every": 0, "log.every": 2},
            **{"checkpoint.every": 2, "lr_schedule.name": "constant", "learning_rate": 0.05},
            **changes,
        }
    )
    return made


def sums(workdir, step):
    return json.loads((workdir / f"checkpoints/{step}/meta.json").read_text())["checksums"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tree": "dots"}, ("['h']['b']", "['h.b']", "params.h.b")),
        ({"tree": "slashes"}, ("['h']['b']", "['h/b']", "params.h.b")),
        ({"tree": "empty"}, ("['adapter']['w']", "(0, 4)")),
        ({"state": "empty"}, ("['seen']", "(0,)")),
        ({"state": "int4"}, ("['seen']", "int4")),
        ({"state": "uint2"}, ("['seen']", "uint2")),
        ({"state": "float4"}, ("['seen']", "float4_e2m1fn")),
        ({"state": "count", "mixes": True}, ("['seen']", "int32")),
        ({"state": "any", "mixes": True}, ("['model_state']", "key<")),
        ({"state": "count", "after": "grows"}, ("['seen']", "int32 of shape (4,)", "(2,)")),
        ({"state": "count", "after": "casts"}, ("['seen']", "float32", "int32")),
        ({"state": "count", "after": "loses"}, ("['seen']", "missing")),
        ({"state": "count", "after": "adds"}, ("['more']", "missing")),
    ],
)
def test_what_cannot_be_saved_is_refused_first(tmp_path, changes, named):
    """Or what a loss gives back instead of the model state that it was given."""
    changed = {f"model.{name}": value for name, value in changes.items()}
    for start in (lambda made: train.run(made, tmp_path / "run"), train.dry_run):
        with refuses(*named, error=train.ConfigError):
            start(config("plain", **changed))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_arrays_of_every_kind_train_and_resume_bit_by_bit(tmp_path):
    """In the model state and in that of the optimizer; also evaluated, and with more replicas.

    The optimizer has an array without elements, too, which is not saved.
    """
    changes = {"model.state": "any", "eval.every": 1, "eval.replicas": True}
    changes |= {"algorithm": "decentralized_sgd", "optimizer.name": "tree_task.with_any_arrays"}
    whole = tiny.run(config("haiku", **changes), tmp_path / "whole")
    saved = sums(whole, 4)[arrays.STATE]
    assert sum("kinds" in name for name in saved) == 2 * len(tree_task.KINDS)
    assert not any("projector" in name for name in saved)
    for replicas in (2, 4):
        cut = small_runs.killed_after(2, whole, tmp_path / f"{replicas}")
        tiny.run(config("haiku", **changes, num_replicas=replicas), cut)
        assert (sums(cut, 4)["state"] == saved) == (replicas == 2)
    for which in ("best", "last"):
        run = saved_model.TrainedRun(whole, which)
        assert [x.dtype for x in run.model_state["kinds"]] == list(tree_task.KINDS)


def test_a_model_state_may_be_none(tmp_path):
    tiny.run(config("plain", **{"model.state": "none"}), tmp_path)
    assert saved_model.TrainedRun(tmp_path).model_state is None


CHANGED = {
    "dtype": lambda slope: {"slope": slope.astype(jnp.bfloat16)},
    "shape": lambda slope: {"slope": jnp.full((3,), slope)},
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_task_whose_arrays_have_changed_is_told_from_damage(tmp_path, name, monkeypatch):
    """orbax would convert a dtype, after which the checksums differ as of a damaged file."""
    tiny.run(config("plain"), tmp_path)
    monkeypatch.setitem(tree_task.TREES, "plain", CHANGED[name])
    with refuses("params/slope is float32 of shape ()", "--workdir", error=train.CheckpointError):
        tiny.run(config("plain", steps=6), tmp_path)


@pytest.mark.parametrize("name", ["a[1]", "a\\b", "gs://bucket/run", "file:///tmp/run"])
def test_a_folder_from_which_nothing_could_be_read_is_refused(tmp_path, name, monkeypatch):
    """tensorstore wrote checkpoints to the first two and read none; a URL became a folder here."""
    monkeypatch.chdir(tmp_path)
    with refused("--workdir"):
        train.run(config("plain"), name)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_an_odd_name_is_resumed(tmp_path):
    folder = tmp_path / "-a b%25#c?d{e}*ü 日:\n'$f'"
    tiny.run(config("plain", steps=2), folder)
    tiny.run(config("plain", steps=4), folder)
    assert tiny.saved_steps(folder) == [2, 4]
