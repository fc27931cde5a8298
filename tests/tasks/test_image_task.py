"""Image classification: its numbers, its config, and runs of a few steps."""

import contextlib
import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import mini_imagenet
import numpy as np
import pytest
import small_runs
import tiny
from PIL import Image
from refusals import refused, refuses
from tiny import rows
from trees import assert_close, assert_equal

from decent_jax import cpu, replicas, train
from decent_jax.data import loader
from decent_jax.data.images import crops, generated_images, image_folder, prepare_images
from decent_jax.ground.errors import ConfigError
from decent_jax.models import resnet
from decent_jax.replicas import TrainState
from decent_jax.tasks import image_classification as task_lib
from decent_jax.train import TrainingFailed, saved_model
from decent_jax.train import config as config_lib
from decent_jax.train.evaluation import Evaluator

SOURCES = {"data__train_images": 40, "data__val_images": 21}


def tiny_config(**changes):
    """Pictures of 16 pixels."""
    changes = small_runs.RESNET | SOURCES | changes
    return small_runs.config("image_classification", **changes)


def make_task(**changes):
    config = tiny_config(**changes)
    sources = [
        generated_images.GeneratedImages(split, count, size=16)
        for split, count in (("train", 40), ("val", 21))
    ]
    return task_lib.ImageClassification(config, *sources)


pytestmark = pytest.mark.usefixtures("compile_once")
augment = jax.jit(task_lib.augment, static_argnames=("flip", "shift"))


def jitted(task):
    """``task.loss`` and ``task.evaluate``, compiled."""
    return jax.jit(task.loss), jax.jit(task.evaluate)


def batch_of(source, indices):
    return {"image": source.images[indices], "label": source.labels[indices]}


@pytest.fixture(scope="module")
def task():
    return make_task()


@pytest.fixture(scope="module")
def model(task):
    """Parameters and statistics, none at its initial value."""
    params, _ = jax.jit(task.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32), params)
    statistics = jax.jit(task.moments)(params, batch_of(task.train_source, np.arange(40)))
    return params, task.from_moments(statistics)


# --- Numbers ------------------------------------------------------------------------------------


def test_normalize():
    images = np.zeros((1, 1, 2, 3), np.uint8)
    images[0, 0, 1] = 255
    normalized = task_lib.normalize(images)
    assert normalized.dtype == jnp.float32
    np.testing.assert_allclose(normalized[0, 0, 0], [-2.1179, -2.0357, -1.8044], atol=1e-4)
    np.testing.assert_allclose(normalized[0, 0, 1], [2.2489, 2.4286, 2.64], atol=1e-4)


def test_augment_mirrors_half_and_shifts_uniformly():
    images = jnp.arange(1.0, 26).reshape(1, 5, 5, 1).repeat(400, axis=0)
    plain = np.asarray(images[0, :, :, 0])
    padded = np.pad(plain, 1), np.pad(plain[:, ::-1], 1)
    augmented = augment(jax.random.key(0), images, flip=True, shift=1)
    counts = {}
    for image in np.asarray(augmented[..., 0]):
        found = [
            (mirrored, i, j)
            for mirrored in (0, 1)
            for i in range(3)
            for j in range(3)
            if np.array_equal(image, padded[mirrored][i : i + 5, j : j + 5])
        ]
        assert len(found) == 1
        counts[found[0]] = counts.get(found[0], 0) + 1
    assert len(counts) == 18 and min(counts.values()) > 5
    assert 160 < sum(count for (mirrored, *_), count in counts.items() if mirrored) < 240


def test_what_moves_in_may_be_the_mirror_image():
    images = jnp.arange(1.0, 26).reshape(1, 5, 5, 1).repeat(100, axis=0)
    padded = np.pad(np.asarray(images[0, :, :, 0]), 2, mode="reflect")
    moved = task_lib.augment(jax.random.key(0), images, flip=False, shift=2, border="reflect")
    places = {(i, j): padded[i : i + 5, j : j + 5].tobytes() for i in range(5) for j in range(5)}
    found = {np.asarray(image[..., 0]).tobytes() for image in moved}
    assert found <= {*places.values()} and len(found) > 20


def test_six_views_are_weighted_as_published():
    images = np.random.default_rng(0).normal(size=(3, 6, 6, 2)).astype(np.float32)
    weights = np.random.default_rng(1).normal(size=(6 * 6 * 2, 4)).astype(np.float32)

    def logits_of(images):
        return images.reshape(len(images), -1) @ weights

    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    views = [padded[:, 2:, 2:], padded[:, :-2, :-2], images, images]
    wanted = sum(logits_of(x) + logits_of(x[:, :, ::-1]) for x in views) / 8
    assert_close(task_lib.logits_of_views(logits_of, jnp.asarray(images)), wanted, 1e-5)


def test_ranks():
    logits = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 7, 50)
    order = np.argsort(-logits, axis=1)
    wanted = [
        int(np.flatnonzero(row == label)[0]) for row, label in zip(order, labels, strict=True)
    ]
    np.testing.assert_array_equal(task_lib.ranks_of(logits, labels), wanted)
    equal = task_lib.ranks_of(jnp.zeros((3, 4)), jnp.array([0, 1, 3]))
    np.testing.assert_array_equal(equal, [0, 1, 3])  # as argmax, which takes the first
    broken = jnp.array([[jnp.nan, 1.0, 2.0], [jnp.nan, jnp.nan, jnp.nan]])
    np.testing.assert_array_equal(task_lib.ranks_of(broken, jnp.array([0, 0])) > 0, [True, True])


def numpy_metrics(task, params, statistics, source):
    """Sums over a source, from the logits alone, in float64."""
    images = task_lib.normalize(source.images)
    logits = jax.jit(resnet.logits_of, static_argnums=0)(task.config, params, statistics, images)
    logits = np.asarray(logits, np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    top = np.argsort(-log_p, axis=1)
    right = top == source.labels[:, None]
    losses = -log_p[np.arange(len(log_p)), source.labels]
    return {
        "loss": losses.mean(),
        "top1": right[:, 0].mean(),
        "top5": right[:, :5].sum() / len(right),
    }


def test_evaluate_equals_numpy_and_leaves_padding_out(task, model):
    source = task.eval_source
    batch = batch_of(source, np.arange(21))
    padded = {name: np.concatenate([x, np.zeros_like(x[:3])]) for name, x in batch.items()}
    weights = np.concatenate([np.ones(21), np.zeros(3)]).astype(np.float32)
    sums = jitted(task)[1](*model, padded, weights)
    assert float(sums["count"]) == 21
    wanted = numpy_metrics(task, *model, source)
    assert 0 < wanted["top1"] < wanted["top5"] < 1
    for name, value in wanted.items():
        assert float(sums[name]) / 21 == pytest.approx(value, rel=1e-5)


def test_loss_of_a_known_batch(model):
    """Cross-entropy with smoothed labels, of the training logits."""
    task = make_task(model__label_smoothing=0.2, data__flip=False)
    batch = batch_of(task.train_source, np.arange(8))
    key = jax.random.key(0)
    loss, new = jitted(task)[0](*model, batch, key)
    images = task_lib.normalize(batch["image"])
    train_logits = jax.jit(resnet.train_logits, static_argnums=0)
    logits, statistics = train_logits(task.config, *model, images)
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    wanted = 0.8 * np.eye(10)[batch["label"]] + 0.02
    assert float(loss) == pytest.approx(-(wanted * log_p).sum(axis=1).mean(), rel=1e-5)
    assert_close(new, statistics)
    other, _ = jitted(make_task(data__shift=2))[0](*model, batch, key)
    assert abs(float(other) - float(loss)) > 1e-3  # augmented


def test_a_batch_that_is_not_finite_leaves_the_statistics(task, model):
    params, statistics = model
    batch = batch_of(task.train_source, np.arange(8))
    params = {**params, "conv1": {"kernel": params["conv1"]["kernel"].at[0, 0, 0, 0].set(jnp.nan)}}
    train_logits = jax.jit(resnet.train_logits, static_argnums=0)
    _, broken = train_logits(task.config, params, statistics, task_lib.normalize(batch["image"]))
    assert not np.isfinite(broken["bn1"]["mean"]).all()
    _, new = jitted(task)[0](params, statistics, batch, jax.random.key(0))
    assert_equal(new, statistics)


# --- The consensus model ------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_recomputed_statistics(model, devices):
    """Those of the first training batches, whatever the replicas' are, on any number of devices."""
    task = make_task(model__batch_norm_consensus="recompute", model__batch_norm_batches=5)
    params, _ = model
    evaluator = Evaluator(
        tiny_config(batch_size=8), task, replicas.place(2, jax.devices()[:devices])
    )
    wrong = jax.tree.map(lambda x: x * jnp.nan, model[1])
    got = evaluator.consensus_state(params, wrong)
    # Five batches of 8 are the 40 training images, once each: the first batch norm's statistics do
    # not depend on how they are batched.
    kernel = params["conv1"]["kernel"]
    inputs = cpu.conv(task_lib.normalize(task.train_source.images), kernel)
    np.testing.assert_allclose(
        got["bn1"]["mean"], inputs.mean(axis=(0, 1, 2)), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(got["bn1"]["var"], inputs.var(axis=(0, 1, 2)), rtol=1e-4)
    again = evaluator.consensus_state(params, wrong)
    assert_close(got, again)
    result = evaluator.consensus(params, wrong)
    for name, value in numpy_metrics(task, params, got, task.eval_source).items():
        assert result[name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_worst_and_the_mean_replica(model, devices):
    """Each on every validation image, with its own statistics; the consensus model is another."""
    task, n = make_task(), 2
    placement = replicas.place(n, jax.devices()[:devices])
    evaluator = Evaluator(tiny_config(batch_size=8, eval__replicas=True), task, placement)
    rng = np.random.default_rng(4)
    own = [jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), model) for _ in range(n)]
    own = [jax.tree.map(lambda x: np.abs(x, dtype=np.float32), pair) for pair in own]
    stacked = jax.tree.map(lambda *x: np.stack(x), *own)
    params, statistics = jax.device_put(stacked, placement.stacked)
    got = evaluator.of_replicas(TrainState(params, statistics, None))
    each = [numpy_metrics(task, *pair, task.eval_source) for pair in own]
    losses, top1 = ([x[name] for x in each] for name in ("loss", "top1"))
    wanted = {
        "loss_worst": max(losses),
        "loss_mean": np.mean(losses),
        "top1_worst": min(top1),
        "top1_mean": np.mean(top1),
    }
    assert abs(losses[0] - losses[1]) > 1e-3
    assert {name: got[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


# --- A run --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, policies",
    [("decentralized_adam", ("mix", "average")), ("all_reduce", ("mix",))],
    ids=["decentralized_adam", "all_reduce"],
)
def test_a_run_and_mixed_statistics(algorithm, policies, tmp_path):
    """Where every round is a whole average all replicas keep the same statistics; else they differ.

    The replicas' batches differ, so nothing but mixing makes them equal.
    """
    for policy in policies:
        config = tiny_config(steps=1, model__batch_norm_consensus=policy, eval__batches=1)
        config.algorithm, config.schedule = algorithm, "complete"
        config.combine = "" if algorithm == "all_reduce" else "atc"
        folder = tiny.run(config, tmp_path / policy)
        statistics = [x for name, x in tiny.saved(folder, 1).items() if "model_state" in name]
        assert statistics
        spread = max(np.abs(x - x[:1]).max() for x in statistics)
        assert spread < 1e-6 if policy == "mix" else spread > 1e-4
        summary = json.loads((folder / "summary.json").read_text())
        assert {"eval/loss", "eval/top1", "eval/top5"} <= summary["final"].keys()
        assert summary["parameters"] == resnet.num_params(make_task().config)
        assert "perf/examples_per_s" in rows(folder)[0]
        best = saved_model.TrainedRun(folder, "best")
        assert best.step == 1 and jax.tree.leaves(best.model_state)


# --- Configs ------------------------------------------------------------------------------------


def test_presets_and_changes():
    config = train.default_config("image_classification")
    config_lib.validate(config)
    assert config.model.batch_norm_consensus == "average"
    assert task_lib.model_config(config, 1000) == resnet.PRESETS["resnet50"]
    config.model.update(blocks="2, 3", width=8, small_images=True, dtype="float32")
    wanted = resnet.ResNetConfig((2, 3), True, 8, 10, True, dtype="float32")
    assert task_lib.model_config(config, 10) == wanted
    config = tiny_config()
    assert task_lib.model_config(config, 10) == dataclasses.replace(
        resnet.PRESETS["tiny"], blocks=(1,), width=4, num_classes=10, dtype="float32"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.path", "x"),
        ("data.eval_resize", 12),
        ("data.shift", 17),
        ("model.blocks", "2,x"),
        ("model.blocks", "2,0"),
        ("model.dtype", "int8"),
        ("data.partition", "sorted"),
        ("data.alternate", True),  # of a folder only
        ("data.eval_views", 2),
        ("data.border", "wrap"),
    ],
)
def test_config_errors(field, value):
    with refused(field):
        config_lib.validate(tiny_config(**{field.replace(".", "__"): value}))


@pytest.mark.parametrize(
    ("field", "value"), [("model.blocks", "1,1"), ("model.small_images", True)]
)
def test_what_airbench_does_not_have_is_refused(field, value):
    given = {"model__preset": "airbench94", "model__blocks": "", field.replace(".", "__"): value}
    with refused(field):
        config_lib.validate(tiny_config(**given))


# --- Photographs of a folder ----------------------------------------------------------------------


def config_of(path, **changes):
    """Crops of 16 pixels."""
    data = {"data__path": str(path), "data__eval_size": 24}
    changes = small_runs.RESNET | data | {"batch_size": 4} | changes
    return small_runs.config("image_classification", **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return mini_imagenet.write_folders(tmp_path_factory.mktemp("mini"))


def first_epoch(path):
    """Every batch of one epoch, 2 replicas with 3 images each."""
    source = crops.TrainImages(image_folder.open_images(path, "train"), 16)
    steps = len(source) // 6
    with loader.train_batches(source, seed=0, num_replicas=2, batch_size=6) as batches:
        return [jax.tree.map(np.array, next(batches)) for _ in range(steps)]


AIRBENCH = {
    "model__preset": "airbench94",
    "model__blocks": "",
    "model__batch_norm_consensus": "recompute",
    "model__batch_norm_batches": 3,
    "data__alternate": True,
    "data__border": "reflect",
    "data__shift": 1,
    "data__eval_views": 6,
    "eval__replicas": True,
    "optimizer__name": "decent_jax.models.airbench.optimizer",
    "learning_rate": 0.24,
}


def test_the_whitening_reads_each_image_once(monkeypatch):
    """Of fewer than it wants, and none of the batches after them."""
    read, get = [], generated_images.GeneratedImages.__getitem__

    def noted(source, index):
        read.append(int(index))
        return get(source, index)

    monkeypatch.setattr(generated_images.GeneratedImages, "__getitem__", noted)
    task = make_task(model__preset="airbench94", model__blocks="")
    assert task.whitening.shape[:3] == (2, 2, 3) and sorted(read) == list(range(40))


@pytest.mark.slow
def test_a_run_of_airbench_keeps_its_whitening(folders, tmp_path):
    config = config_of(folders, steps=3, eval__every=0, **AIRBENCH)
    config.lr_schedule.update(name="linear", warmup=0, end_factor=0.0)
    config.algorithm = "gossiped_momentum"
    folder = tiny.run(config, tmp_path / "run")
    rates = [row["train/learning_rate"] for row in rows(folder) if "train/learning_rate" in row]
    np.testing.assert_allclose(rates, [0.24, 0.16, 0.08], rtol=1e-6)
    final = json.loads((folder / "summary.json").read_text())["final"]
    assert 0 <= final["eval/top1_worst"] <= final["eval/top1_mean"] <= 1
    assert final["eval/loss_worst"] >= final["eval/loss_mean"]
    trained = saved_model.TrainedRun(folder)
    task = task_lib.make(trained.config, trained.workdir, contextlib.nullcontext)
    kernel = trained.params["whiten"]["kernel"]
    np.testing.assert_array_equal(kernel, task.whitening)
    assert float(np.abs(kernel).max()) > 0.1
    with refuses("airbench94", error=ConfigError):
        task_lib.export(trained, tmp_path / "model.safetensors")


@pytest.mark.slow
def test_a_run_on_photographs_learns_and_resumes_bit_by_bit(folders, tmp_path):
    def run(name):
        config = config_of(folders, steps=2, checkpoint__every=1)
        folder = tiny.run(config, tmp_path / name)
        return json.loads((folder / "summary.json").read_text())

    whole = run("whole")
    assert whole["classes"] == 5 and whole["train_images"] == 30 and whole["val_images"] == 15
    assert 0 <= whole["final"]["eval/top1"] <= whole["final"]["eval/top5"] == 1
    small_runs.killed_after(1, tmp_path / "whole", tmp_path / "parts")
    parts = run("parts")
    tiny.assert_same_state(tmp_path / "whole", tmp_path / "parts", 2)
    for name in ("eval/loss", "eval/top1", "eval/top5", "eval/consensus_distance"):
        assert parts["final"][name] == whole["final"][name]  # so the statistics are restored too


def test_a_damaged_image_ends_a_run_in_one_sentence_with_a_checkpoint(folders, tmp_path):
    """Found in the third of four steps; packing leaves it out, with the reason."""
    folder = tmp_path / "data"
    mini_imagenet.write_folders(folder)
    source = crops.TrainImages(image_folder.open_images(folder, "train"), 16)
    config = config_of(folder, seed=1)
    victim = name_of_an_image_of_step(source, config, 2)
    path = folder / "train" / victim.split("/")[-2] / victim.split("/")[-1]
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "PNG")
    path.write_bytes(picture.getvalue().replace(b"IDAT", b"IDAX"))  # between its ends
    with refuses(victim, "prepare", error=TrainingFailed):
        tiny.run(config, tmp_path / "run")
    assert tiny.saved_steps(tmp_path / "run")
    packed = tmp_path / "packed"
    prepare_images.prepare(folder, packed, workers=1)
    (bad,) = [json.loads(line) for line in (packed / "bad_files.jsonl").read_text().splitlines()]
    assert bad["name"] == victim
    source = crops.TrainImages(image_folder.open_images(packed, "train"), 16)
    assert len(source) == 29 and len(first_epoch(packed)) == 4  # which decodes them


def test_training_says_what_a_folder_holds_besides(tmp_path):
    folder, said = mini_imagenet.write_folders(tmp_path / "in"), []
    for name in ("train/notes.txt", "val/.DS_Store", "labels.json"):
        (folder / name).write_bytes(b"")

    @contextlib.contextmanager
    def announce(message):
        said.append(message)
        yield

    task_lib.make(config_of(folder), tmp_path, announce)
    assert all(kind in said[-1] for kind in ("1 .txt", "1 hidden", "1 .json"))


def test_too_few_images_for_a_batch_are_refused(folders, tmp_path):
    with refused("batch_size", 32):
        tiny.run(config_of(folders, batch_size=32), tmp_path)


def name_of_an_image_of_step(source, config, step):
    """A photograph that libjpeg-turbo decodes, and that no earlier step reads."""
    seen = []

    class Names(crops.TrainImages):
        def augment(self, record, random):
            return {"name": np.array(record.name), "size": np.int32(len(record.data))}

    with loader.train_batches(
        Names(source.files, 16), seed=config.seed, num_replicas=2, batch_size=4, prefetch=0
    ) as batches:
        for _ in range(step):
            seen += next(batches)["name"].ravel().tolist()
        names = next(batches)["name"].ravel().tolist()
    files = {source[i].name: source[i].data for i in range(len(source))}
    return next(
        name
        for name in names
        if name not in seen and Image.open(io.BytesIO(files[name])).format == "JPEG"
    )
