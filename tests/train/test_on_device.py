"""Records that stay on the devices: the same ones, the same numbers, the same checkpoints."""

import jax
import mini_imagenet
import numpy as np
import pytest
import tiny
from refusals import refuses
from trees import assert_equal

from decent_jax.data import loader, partition
from decent_jax.data.images import crops, generated_images, image_folder
from decent_jax.data.text import token_folder
from decent_jax.train.stepper import Stepper

pytestmark = pytest.mark.usefixtures("compile_once")


def photographs(folder, **options):
    path = str(mini_imagenet.write_folders(folder))
    return crops.TrainImages(image_folder.open_images(path, "train"), 16, **options)


SOURCES = {
    "pictures": lambda _: generated_images.GeneratedImages("train", 30, size=16),
    "windows of tokens": lambda folder: token_folder.TokenWindows(
        tiny.write_data(folder / "text") / "train.bin", tiny.CONTEXT
    ),
    "photographs": lambda folder: photographs(folder, whole=True),
    "photographs, mirrored in turn": lambda folder: photographs(folder, whole=True, alternate=3),
}


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("own", [False, True], ids=["iid", "partition"])
@pytest.mark.parametrize("name", SOURCES)
def test_the_records_are_those_that_a_host_reads(tmp_path, name, own, start):
    source = SOURCES[name](tmp_path)
    if own and not hasattr(source, "labels"):
        pytest.skip("tokens have no labels")
    each = 3
    shares = own and partition.for_run(
        source, num_replicas=2, batch_size=2 * each, alpha=0.5, seed=4
    )
    how = {"seed": 5, "num_replicas": 2, "batch_size": 2 * each, "start_step": start}
    records = loader.all_records(source)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(records))
    assert size == loader.bytes_of_all(source)
    sources = source, loader.Numbers(source)
    if shares:
        sources = [loader.Partitioned(source, shares) for source in sources]
    with (
        loader.train_batches(sources[0], **how) as wanted,
        loader.train_batches(sources[1], **how) as numbers,
    ):
        for _ in range(2 * len(source) // (2 * each) + 1):  # more than two epochs
            taken = next(numbers)
            assert taken.shape == (2, each) and taken.dtype == np.int32
            assert_equal(jax.tree.map(lambda x, k=taken: x[k], records), next(wanted))


def test_mirrored_photographs_have_numbers_of_their_own(tmp_path):
    source = photographs(tmp_path, whole=True, alternate=3)
    assert source.numbers == 2 * len(source) == 60
    image = loader.all_records(source)["image"]
    np.testing.assert_array_equal(image[30:], image[:30, :, ::-1])
    seen = [{source.of_epoch(k, epoch) for epoch in range(4)} for k in range(30)]
    assert seen == [{k, k + 30} for k in range(30)]


# --- Runs -----------------------------------------------------------------------------------------

RUNS = {
    "all_reduce": {"algorithm": "all_reduce"},
    "two devices, seldom": {"schedule": "ring", "mix_every": 3, "mesh": {"devices": 2}},
    "in turn": {"mesh": {"sequential_replicas": True}, "micro_batches": 2},  # one_peer_exp
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_measures_the_same(tmp_path, name):
    """In programs of four steps, and of one where an evaluation or the end comes sooner."""
    common = {"steps": 15, "log": {"every": 4}, "eval": {"every": 6}} | RUNS[name]
    wanted = tiny.measured(tiny.run(tiny.waves(**common), tmp_path / "host"))
    got = tiny.measured(
        tiny.run(tiny.waves(**common, data={"on_device": True}), tmp_path / "device")
    )
    assert [row["step"] for row in got] == [row["step"] for row in wanted]
    assert len({row["train/loss"] for row in got if "train/loss" in row}) == 4
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            np.testing.assert_allclose(one[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_a_resumed_run_ends_with_the_same_state(tmp_path):
    config = tiny.waves(
        steps=16,
        schedule="one_peer_exp",
        log={"every": 4},
        checkpoint={"every": 6},
        data={"on_device": True},
    )
    tiny.run(config, tmp_path / "whole")
    config.steps = 6
    tiny.run(config, tmp_path / "parts")
    config.steps = 16
    tiny.run(config, tmp_path / "parts")
    whole, parts = (tiny.saved(tmp_path / name, 16) for name in ("whole", "parts"))
    assert_equal(parts, whole)


def test_several_steps_are_one_program(tmp_path, monkeypatch):
    made = []
    step = Stepper.step
    monkeypatch.setattr(Stepper, "step", lambda *args: made.append(step(*args)) or made[-1])
    tiny.run(tiny.waves(steps=10, log={"every": 4}, data={"on_device": True}), tmp_path)
    assert list(map(len, made)) == [4, 4, 1, 1]
    assert tiny.rows(tmp_path)[-1]["step"] == 10


REFUSED = {
    "sharded replicas": ({"mesh": {"fsdp": 2}}, "mesh.fsdp"),
    "peers": ({"trainer": "peers", "algorithm": "swarm"}, "trainer peers"),
    "delayed messages": (
        {"algorithm": "noloco", "mix_every": 4, "outer": {"delay": 3}},
        "overlap several steps",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_stay_on_the_devices(tmp_path, name):
    changes, why = REFUSED[name]
    with refuses("data.on_device", why):
        tiny.run(tiny.waves(**changes, data={"on_device": True}), tmp_path)


def test_records_that_are_drawn_anew(tmp_path):
    data = tiny.write_data(tmp_path / "text")
    config = tiny.config(data)
    config.data.on_device = config.data.shifted = True
    with refuses("data.on_device", "ShiftedWindows"):
        tiny.run(config, tmp_path / "run")
    assert not loader.is_fixed(photographs(tmp_path / "photographs"))


def test_a_damaged_record_is_told_before_the_first_step(tmp_path):
    with refuses("point 17 is damaged"):
        tiny.run(tiny.waves(data={"on_device": True, "damaged": 17}), tmp_path)
