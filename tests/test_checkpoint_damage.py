"""Checkpoints that are damaged: told, put aside, and the one before used."""

# ruff: noqa: F401, F811  (fixtures of other modules)

import shutil

import jax.numpy as jnp
import pytest
import tiny
from test_checkpoint import assert_equals, config, copy, data_files, truncate, whole
from test_train import no_plot

from decent_jax import train
from decent_jax.train import CheckpointError, ConfigError, checkpoint

pytestmark = pytest.mark.usefixtures("compile_once", "no_plot")


def empty(folder, step):
    data_files(folder, step, "rest")[0].write_bytes(b"")


def flip_a_byte_of_params(folder, step):
    flip(data_files(folder, step, "params")[0])


def flip_a_byte_of_the_optimizer(folder, step):
    flip(data_files(folder, step, "rest")[0])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def delete_a_file(folder, step):
    data_files(folder, step, "params")[0].unlink()


def delete_the_parameters(folder, step):
    shutil.rmtree(folder / "checkpoints" / str(step) / "params")


def delete_meta(folder, step):
    shutil.rmtree(folder / "checkpoints" / str(step) / "meta")


def change_meta(folder, step):
    path = data_files(folder, step, "meta")[0]
    text = path.read_text()
    assert '"step": 20' in text
    path.write_text(text.replace('"step": 20', '"step": 10'))


def cut_meta(folder, step):
    path = data_files(folder, step, "meta")[0]
    path.write_text(path.read_text()[:50])


def delete_everything(folder, step):
    for path in (folder / "checkpoints" / str(step)).rglob("*"):
        if path.is_file():
            path.unlink()


def parameters_of_another_step(folder, step):
    """Files that can be read, and hold something else: the checksums alone can tell."""
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints / str(step) / "params")
    shutil.copytree(checkpoints / "16" / "params", checkpoints / str(step) / "params")


DAMAGES = [
    parameters_of_another_step,
    truncate,
    empty,
    flip_a_byte_of_params,
    flip_a_byte_of_the_optimizer,
    delete_a_file,
]
DAMAGES += [delete_the_parameters, delete_meta, change_meta, cut_meta, delete_everything]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_the_checkpoint_before_a_damaged_one_is_used(config, copy, whole, damage, capsys):
    folder = copy()
    damage(folder, 20)
    train.run(config(), folder)
    said = capsys.readouterr().err
    assert "the checkpoint of step 20 is damaged: " in said
    assert f"the checkpoint of step 20 was moved to {folder / 'damaged'}" in said
    assert "resuming after step 16" in said
    assert (folder / "damaged" / "20").is_dir()
    assert_equals(folder, whole)


def test_a_checksum_notices_numbers_that_changed_places():
    numbers = jnp.arange(8, dtype=jnp.float32)
    assert checkpoint._checksums([numbers]) != checkpoint._checksums([numbers[::-1]])


def test_two_damaged_checkpoints_and_one_damaged_before(config, copy, whole, capsys):
    folder = copy()
    (folder / "damaged" / "20").mkdir(parents=True)
    truncate(folder, 20)
    flip_a_byte_of_params(folder, 16)
    train.run(config(), folder)
    assert "resuming after step 12" in capsys.readouterr().err
    assert sorted(p.name for p in (folder / "damaged").iterdir()) == ["16", "20", "20-2"]
    assert_equals(folder, whole)


def test_no_checkpoint_that_can_be_read(config, copy):
    folder = copy()
    truncate(folder, 20)
    delete_meta(folder, 16)
    flip_a_byte_of_params(folder, 12)
    with pytest.raises(CheckpointError) as failure:
        train.run(config(), folder)
    sentence = str(failure.value)
    assert sentence.startswith(f"no checkpoint in {folder / 'checkpoints'} can be read: step 20 (")
    assert "step 16 (" in sentence and "step 12 (" in sentence and "\n" not in sentence
    assert tiny.saved_steps(folder) == [12, 16, 20]  # nothing was moved or overwritten


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", '{"task": '), ("metrics.jsonl", "x\ny\n")]
)
def test_damaged_records_are_a_sentence(config, copy, name, text):
    folder = copy()
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name}.*(is damaged|is not a JSON object)"):
        train.run(config(), folder)


def test_a_half_written_checkpoint_is_not_taken_for_one(config, copy, whole):
    """What a killed save leaves: a folder under orbax's temporary name."""
    folder = copy(step=16)
    half = folder / "checkpoints" / "18.orbax-checkpoint-tmp"
    shutil.copytree(folder / "checkpoints" / "16" / "params", half / "params")
    train.run(config(), folder)
    assert_equals(folder, whole)
