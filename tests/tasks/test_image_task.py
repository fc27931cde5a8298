"""Image classification: its numbers, its config, and runs of a few steps."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
import tiny
from refusals import refused
from tiny import rows
from trees import assert_close, assert_equal

from decent_jax import cpu, replicas, train
from decent_jax.data.images import generated_images
from decent_jax.models import resnet
from decent_jax.replicas import TrainState
from decent_jax.tasks import image_classification as task_lib
from decent_jax.train import config as config_lib
from decent_jax.train import saved_model
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
    ("preset", "field", "value"),
    [
        ("airbench94", "model.blocks", "1,1"),
        ("airbench94", "model.small_images", True),
        ("vgg11", "model.small_images", True),
        ("vgg11", "model.batch_norm_consensus", "recompute"),
        ("vgg11", "model.batch_norm_consensus", "mix"),
    ],
)
def test_what_a_network_does_not_have_is_refused(preset, field, value):
    given = {"model__preset": preset, "model__blocks": "", field.replace(".", "__"): value}
    with refused(field):
        config_lib.validate(tiny_config(**given))


def test_a_network_without_batch_norm_has_dropout_in_training_only():
    """A dropped input of a linear layer gives its row no gradient; the key decides which."""
    task = make_task(model__preset="vgg11", model__blocks="", model__width=4)
    params, state = jax.jit(task.init)(jax.random.key(0))
    batch = batch_of(task.train_source, np.arange(1))
    assert state == {}
    gradient = jax.jit(jax.grad(task.loss, has_aux=True))
    dropped = []
    for key in map(jax.random.key, range(8)):
        rows, new = gradient(params, state, batch, key)
        assert new == {}
        dropped.append((np.asarray(rows["fc2"]["kernel"]) == 0).all(axis=1))
    assert len({row.tobytes() for row in dropped}) == 8 and not np.all(dropped, axis=0).all()
    evaluate = jitted(task)[1]
    first, again = (evaluate(params, state, batch, np.ones(1)) for _ in range(2))
    assert_equal(first, again)


def test_the_whitening_reads_each_image_once(monkeypatch):
    """Of fewer than it wants, and none of the batches after them."""
    read, get = [], generated_images.GeneratedImages.__getitem__

    def noted(source, index):
        read.append(int(index))
        return get(source, index)

    monkeypatch.setattr(generated_images.GeneratedImages, "__getitem__", noted)
    task = make_task(model__preset="airbench94", model__blocks="")
    assert task.whitening.shape[:3] == (2, 2, 3) and sorted(read) == list(range(40))
