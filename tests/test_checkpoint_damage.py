"""Checkpoints that are damaged: told, put aside, and the one before used."""

# ruff: noqa: F401, F811  (fixtures of another module)

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_checkpoint import assert_equals, config, copy, data_files, truncate, whole

from decent_jax.train import CheckpointError, ConfigError, checkpoint
from decent_jax.train.experiment import open_experiment
from decent_jax.train.synchronous import init

pytestmark = pytest.mark.usefixtures("compile_once")


def empty(folder, step):
    data_files(folder, step, "rest")[0].write_bytes(b"")


def flip_bits_of_params(folder, step):
    flip(data_files(folder, step, "params")[0])


def flip(path):
    """A bit in every 1000 bytes: tensorstore may leave an array in the file twice, and read one."""
    data = bytearray(path.read_bytes())
    for place in range(500, len(data), 1000):
        data[place] ^= 0x40
    path.write_bytes(data)


def delete_meta(folder, step):
    shutil.rmtree(folder / "checkpoints" / str(step) / "meta")


def change_meta(folder, step):
    path = data_files(folder, step, "meta")[0]
    text = path.read_text()
    assert '"step": 20' in text
    path.write_text(text.replace('"step": 20', '"step": 10'))


def delete_everything(folder, step):
    for path in (folder / "checkpoints" / str(step)).rglob("*"):
        if path.is_file():
            path.unlink()


def parameters_of_another_step(folder, step):
    """Files that can be read, and hold something else: the checksums alone can tell."""
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints / str(step) / "params")
    shutil.copytree(checkpoints / "16" / "params", checkpoints / str(step) / "params")


def copy_of_another_step(folder, step):
    """Whole, with checksums that are right: only the step that it names can tell."""
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints / str(step))
    shutil.copytree(checkpoints / "16", checkpoints / str(step))


DAMAGES = [parameters_of_another_step, copy_of_another_step, truncate, empty, flip_bits_of_params]
DAMAGES += [delete_meta, change_meta, delete_everything]


@pytest.fixture(scope="module")
def restore(whole):
    """Restores the newest checkpoint of a folder: (state, meta, what the user reads)."""
    with open_experiment(config(), whole) as (experiment, _):
        shapes = jax.eval_shape(lambda: init(experiment))

    def restore(folder, like=lambda shapes: shapes):
        said, checkpoints = [], checkpoint.Checkpointer(folder, 3)
        found = checkpoints.restore_newest(like(shapes), experiment.placement, 3, said.append)
        checkpoints.close()
        return *found, "\n".join(said)

    return restore


@pytest.fixture(scope="module")
def step_16(whole, restore, tmp_path_factory):
    """What is in that checkpoint."""
    folder = tmp_path_factory.mktemp("before") / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "20")
    state, meta, said = restore(folder)
    assert meta["step"] == 16 and not said
    return state, meta


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_the_checkpoint_before_a_damaged_one_is_used(copy, restore, step_16, damage):
    folder = copy()
    damage(folder, 20)
    *found, said = restore(folder)
    jax.tree.map(np.testing.assert_array_equal, tuple(found), step_16)
    assert "the checkpoint of step 20 is damaged: " in said
    assert f"the checkpoint of step 20 was moved to {folder / 'damaged'}" in said
    assert (folder / "damaged" / "20").is_dir()


def test_a_checksum_notices_numbers_that_changed_places():
    numbers = jnp.arange(8, dtype=jnp.float32)
    assert checkpoint._checksums([numbers]) != checkpoint._checksums([numbers[::-1]])


def test_two_damaged_checkpoints_and_one_damaged_before(copy, whole, capsys):
    folder = copy()
    (folder / "damaged" / "20").mkdir(parents=True)
    truncate(folder, 20)
    flip_bits_of_params(folder, 16)
    tiny.run(config(), folder)
    assert "resuming after step 12" in capsys.readouterr().err
    assert sorted(p.name for p in (folder / "damaged").iterdir()) == ["16", "20", "20-2"]
    assert_equals(folder, whole)


def test_no_checkpoint_that_can_be_read(copy):
    folder = copy()
    truncate(folder, 20)
    delete_meta(folder, 16)
    flip_bits_of_params(folder, 12)
    with pytest.raises(CheckpointError) as failure:
        tiny.run(config(), folder)
    sentence = str(failure.value)
    assert sentence.startswith(f"no checkpoint in {folder / 'checkpoints'} can be read: step 20 (")
    assert "step 16 (" in sentence and "step 12 (" in sentence and "\n" not in sentence
    assert tiny.saved_steps(folder) == [12, 16, 20]  # nothing was moved or overwritten


def test_a_checkpoint_of_another_optimizer(copy, restore):
    def of_another(state):
        return state._replace(opt_state=state.opt_state._replace(inner=()))

    with pytest.raises(CheckpointError, match=r"step 20 \(another optimizer, or .* --workdir\)"):
        restore(copy(), of_another)


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", '{"task": '), ("metrics.jsonl", "x\ny\n")]
)
def test_damaged_records_are_a_sentence(copy, name, text):
    folder = copy()
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name}.*(is damaged|is not a JSON object)"):
        tiny.run(config(), folder)
