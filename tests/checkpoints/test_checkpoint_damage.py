"""Checkpoints that are damaged or another run's: refused by every reader, and the one before used.

Most are of a state of a few arrays, which no run has trained. A bit is flipped in the largest file
of arrays, at many places: whoever reads must notice, or read the same numbers.
"""

# ruff: noqa: F401, F811  (fixtures of another module)

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from damage import cut_short, flip_bits, largest
from refusals import refuses
from test_checkpoint import assert_equals, config, copy, whole
from trees import assert_close, assert_equal

from decent_jax import replicas, topology
from decent_jax.checkpoints import arrays, on_disk
from decent_jax.checkpoints.on_disk import Checkpointer
from decent_jax.ground.errors import CheckpointError, ConfigError
from decent_jax.optim import METHODS, Parts
from decent_jax.replicas import TrainState
from decent_jax.train import saved_model

pytestmark = pytest.mark.usefixtures("compile_once")

SCHEDULES = {"push_sum": "random_out"}
META = {"num_replicas": 4, "examples": 12, "seconds": 1.0}


def state_of(n=4, add=0.0, method="decentralized_sgd", inner=None, params=None):
    """A state of n replicas in which no two arrays are equal."""
    schedule = topology.make(SCHEDULES.get(method, "bidirectional_ring"), n)
    tx = METHODS[method].build(Parts(schedule, 0.1, inner or optax.sgd(0.1, momentum=0.9)))
    if params is None:
        noise = np.random.default_rng(0).normal(size=(n, 40, 30))  # which no file holds in less
        params = {"a": {"w": jnp.asarray(noise, jnp.float32), "b": jnp.zeros((n, 3))}}
        params["c"] = [jnp.zeros((n, 2))]
    rows = jnp.arange(float(n))
    state = TrainState(params, {"mean": rows}, jax.vmap(tx.init)(params))
    return jax.tree.map(
        lambda x: x + jnp.asarray(add, x.dtype) if x.dtype == "float32" else x, state
    )


def write(folder, *steps, best=()):
    """Checkpoints whose parameters are the step plus 0.5, and best models likewise."""
    writer = Checkpointer(folder, 3)
    for step in steps:
        writer.save(step, state_of(add=step + 0.5), META)
    for step in best:
        one = replicas.take(state_of(add=step + 0.5), 0)
        writer.save_best(step, one.params, one.model_state, {"eval_loss": 1.0})
    writer.close()
    return folder


def restore(folder, like=None, n=4):
    """(state, meta, what the user reads) of the newest checkpoint."""
    said, reader = [], Checkpointer(folder, 3)
    shapes = jax.eval_shape(lambda: state_of(n) if like is None else like)
    found = reader.restore_newest(shapes, replicas.place(n, jax.devices()[:1]), 1, said.append)
    reader.close()
    return *found, "\n".join(said)


@pytest.fixture(scope="module")
def written(tmp_path_factory, compile_once):
    return write(tmp_path_factory.mktemp("written"), 1, 2, best=[2])


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


# --- kinds of damage ------------------------------------------------------------------------------


def delete_arrays(step):
    shutil.rmtree(step / "state")


def delete_meta(step):
    (step / "meta.json").unlink()


def change_meta(step):
    text = (step / "meta.json").read_text()
    (step / "meta.json").write_text(text.replace('"seconds": 1.0', '"seconds": 2.0'))


def arrays_of_another_step(step):
    """Files that can be read, and hold something else: the checksums alone can tell."""
    shutil.rmtree(step / "state")
    shutil.copytree(step.with_name("1") / "state", step / "state")


def copy_of_another_step(step):
    """Whole, with checksums that are right: only the step that it names can tell."""
    shutil.rmtree(step)
    shutil.copytree(step.with_name("1"), step)


def of_another_run(step):
    """Whole, and of this step: only the identity of the run can tell."""
    other = write(step.parents[2] / "other", 2, best=[2])
    shutil.rmtree(step)
    shutil.copytree(other / step.parent.name / "2", step)


DAMAGES = [arrays_of_another_step, copy_of_another_step, of_another_run, cut_short]
DAMAGES += [flip_bits, delete_arrays, delete_meta, change_meta]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_the_checkpoint_before_a_damaged_one_is_read(folder, damage, caplog):
    """By a run that goes on, and by whoever wants the last model."""
    damage(folder / "checkpoints" / "2")
    params, model_state, meta = saved_model.restore_model(folder, "last")
    assert meta["step"] == 1 and "the checkpoint of step 2 is damaged" in caplog.text
    mean = jax.tree.map(lambda x: x.mean(axis=0), state_of(add=1.5).params)
    assert_close(params, mean, rtol=1e-6, atol=0)
    assert model_state["mean"] == 3.0
    assert saved_model.load_replicas(folder).step == 1
    with pytest.raises(CheckpointError):
        saved_model.load_replicas(folder, 2)
    assert tiny.saved_steps(folder) == [1, 2]  # whoever reads moves nothing
    state, meta, said = restore(folder)
    assert meta["step"] == 1 and "the checkpoint of step 2 is damaged: " in said
    assert_equal(state, state_of(add=1.5))


@pytest.mark.parametrize("damage", [of_another_run, flip_bits], ids=lambda f: f.__name__)
def test_a_damaged_best_model_is_refused(folder, damage):
    assert saved_model.restore_model(folder, "best")[2]["step"] == 2
    damage(folder / "best" / "2")
    with refuses("step 2 (", error=CheckpointError):
        saved_model.restore_model(folder, "best")


@pytest.mark.parametrize(("which", "name"), [("best", "best"), ("last", "checkpoints")])
def test_no_flipped_bit_changes_a_number_without_a_word(folder, which, name):
    shutil.rmtree(folder / "checkpoints" / "1")
    whole = saved_model.restore_model(folder, which)[:2]
    path = largest(folder / name / "2" / "state")
    data, noticed = path.read_bytes(), 0
    for place in range(0, len(data), len(data) // 24):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        path.write_bytes(flipped)
        try:
            assert_equal(saved_model.restore_model(folder, which)[:2], whole)
        except CheckpointError:
            noticed += 1
    assert noticed > 4


def test_a_run_that_has_no_checkpoint_is_refused(tmp_path):
    for which in ("last", "best"):
        with refuses(tmp_path, error=CheckpointError):
            saved_model.restore_model(tmp_path, which)


# --- runs -----------------------------------------------------------------------------------------


def test_no_checkpoint_that_can_be_read(copy):
    folder = copy()
    cut_short(folder / "checkpoints" / "20")
    delete_meta(folder / "checkpoints" / "16")
    flip_bits(folder / "checkpoints" / "12")
    steps = (f"step {step} (" for step in (20, 16, 12))
    with refuses(folder / "checkpoints", *steps, error=CheckpointError):
        tiny.run(config(), folder)
    assert tiny.saved_steps(folder) == [12, 16, 20]  # nothing was moved or overwritten


# --- what a checkpoint holds ----------------------------------------------------------------------


def test_a_checkpoint_of_another_optimizer_says_so(folder):
    adam = state_of(inner=optax.adam(0.1))
    for other in (adam, state_of(inner=optax.sgd(0.1))):  # which would leave an array out
        with refuses("step 2 (", "another optimizer", error=CheckpointError):
            restore(folder, other)


def test_replicas_of_push_sum_count_by_their_weights(tmp_path):
    state = state_of(method="push_sum")
    weights = jnp.array([1.0, 2.0, 0.5, 0.5])
    own = state.opt_state.own._replace(w=weights)
    rows = jnp.arange(8.0).reshape(4, 2)
    params = {"c": rows}
    writer = Checkpointer(tmp_path, 1)
    state = state._replace(params=params, opt_state=state.opt_state._replace(own=own))
    writer.save(3, state, META)
    writer.close()
    found, _, _ = saved_model.restore_model(tmp_path, "last")
    np.testing.assert_allclose(found["c"], weights @ rows / 4, rtol=1e-6)


@pytest.mark.parametrize("n", [4, 2])
def test_random_keys_and_complex_numbers_are_restored(n, tmp_path):
    """Of optimizers that draw, such as `optax.noisy_sgd`; on other replicas they keep the key."""
    inner = optax.noisy_sgd(0.1, key=jax.random.key(3))

    def complex_of(n):
        return state_of(n, inner=inner, params={"a": jnp.full((n, 3), 1 + 2j)})

    writer = Checkpointer(tmp_path, 1)
    writer.save(3, complex_of(4)._replace(model_state={}), META)
    writer.close()
    wanted = complex_of(n)._replace(model_state={})
    restored, _, said = restore(tmp_path, wanted, n)
    assert_equal(*(jax.tree.map(bits, tree) for tree in (restored, wanted)))
    assert (f"4 replicas and this run {n}" in said) is (n != 4)


def bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_skipped_updates_keep_their_sum_when_replicas_change(tmp_path):
    """The count of 4 replicas is not multiplied by the new number."""
    state = state_of()
    skipped = jnp.array([0, 3, 0, 1], jnp.int32)
    writer = Checkpointer(tmp_path, 1)
    writer.save(3, state._replace(opt_state=state.opt_state._replace(skipped=skipped)), META)
    writer.close()
    restored, _, _ = restore(tmp_path, n=2)
    assert restored.opt_state.skipped.tolist() == [4, 0]


def test_a_checksum_notices_numbers_that_changed_places():
    """On the host as on a device."""
    for xp in (np, jnp):
        for dtype in ("float32", "bfloat16", "int8", "bool", "complex64"):
            x = xp.array([0, 1, 0, 0], dtype)
            assert arrays.checksums([x]) == arrays.checksums([jnp.asarray(x)])
            assert arrays.checksums([x]) != arrays.checksums([x[::-1]])
    wide = [np.array([2.0, 3.0]), np.array([3, 2**40])]
    assert arrays.checksums([wide[0]]) != arrays.checksums([wide[0][::-1]])
    assert arrays.checksums([wide[1]]) != arrays.checksums([wide[1] + 2**40])


def test_two_arrays_of_one_path_are_refused():
    """Only one of them would have a checksum."""
    with refuses("same path", error=CheckpointError):
        arrays.checksums({"a": {"b": np.zeros(2)}, "a/b": np.ones(2)})


def test_the_newest_are_kept_and_a_reader_sees_whole_ones_only(tmp_path):
    write(tmp_path, best=[9])  # of a session that was killed before its first checkpoint
    assert "no checkpoint" in on_disk.what_next(tmp_path)
    write(tmp_path, 1, 2, 3, 4, best=[1, 3])
    assert "the checkpoint of step 4" in on_disk.what_next(tmp_path)
    assert on_disk.steps(tmp_path / "checkpoints") == [2, 3, 4]
    assert on_disk.steps(tmp_path / "best") == [3]
    assert not list(tmp_path.glob("*/.*"))
