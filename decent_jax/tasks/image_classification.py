"""Image classification with a ResNet, VGG-11 or airbench94, on photographs or generated images."""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.data import loader
from decent_jax.data.images import crops, generated_images, image_folder
from decent_jax.data.reading import counted
from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.fields import changeable, dtype_of_activations, setting, size_of_preset
from decent_jax.ground.progress import announce as announce_on_stderr
from decent_jax.models import airbench, resnet, vgg, weights
from decent_jax.models.pieces import Params, cross_entropy
from decent_jax.tasks import Task, TaskConfig, TaskData, TrainedRun, impossible_model
from decent_jax.tasks.augmentation import augment, logits_of_views, normalize

GENERATED = "generated"
CROPS = ("resized", "whole")
CONSENSUS = ("average", "recompute", "mix")
PRESETS = {**resnet.PRESETS, **airbench.PRESETS, **vgg.PRESETS}
Config = resnet.ResNetConfig | airbench.AirbenchConfig | vgg.VGGConfig

_WHITENED_IMAGES = 5000
_DROPOUT = 2  # folded into a step's key; 0 and 1 would give the keys that `augment` splits off it


@dataclass(frozen=True)
class Model:
    """The settings of the network."""

    preset: str = setting("resnet50", "shape of the network", choices=tuple(PRESETS))
    blocks: str = setting("", 'residual blocks per stage, such as "2,2,2,2"; empty: the preset\'s')
    width: int = size_of_preset("channels of the first stage")
    small_images: bool = setting(False, "stem for images of about 32 pixels; preset tiny has it")
    dtype: str = dtype_of_activations("dtype of activations; parameters and statistics are float32")
    label_smoothing: float = setting(
        0.1, "smoothing in the training loss; the validation loss has none", at_least=0, below=1
    )
    batch_norm_consensus: str = setting(
        "average",
        "average: the mean of the replicas' statistics; recompute: those of batch_norm_batches "
        "training batches with the consensus model; mix: the mean, and every round mixes them "
        "like parameters",
        choices=CONSENSUS,
    )
    batch_norm_batches: int = setting(16, "training batches that recompute reads", at_least=1)


@dataclass(frozen=True)
class Data(TaskData):
    """The settings of the images."""

    path: str = changeable(
        GENERATED,
        "folder with train/<class>/*.jpg, or made by TFDS or by `decent-jax prepare images`; "
        '"generated": pictures generated at the start',
    )
    image_size: int = setting(32, "side of a training image, in pixels", at_least=16, at_most=2**14)
    flip: bool = setting(True, "mirror half of the training images")
    shift: int = setting(0, "largest random shift, in pixels", at_least=0, at_most=2**14)
    border: str = setting(
        "zeros", "fill of the border that a shift leaves", choices=("zeros", "reflect")
    )
    eval_views: int = setting(
        1,
        "views of a validation image whose logits are averaged; 6: the image and its mirror image "
        "(half of the weight), and both shifted by a pixel in two directions",
        choices=(1, 6),
    )
    alternate: bool = setting(
        False, "mirror each training image in every second epoch, not at random"
    )
    crop: str = setting(
        "resized",
        "crop of training images; resized: a random 8% to 100% of the picture, resized; whole: the "
        "largest centred square, for small pictures, together with data.shift",
        choices=CROPS,
    )
    eval_size: int = setting(
        0, "side of the centre crop for evaluation; 0: image_size", at_least=0, at_most=2**14
    )
    eval_resize: int = setting(
        0,
        "pixels of the shorter side before that crop; 0: 8/7 of eval_size",
        at_least=0,
        at_most=2**14,
    )
    train_images: int = setting(20000, "number of generated training images", at_least=1)
    val_images: int = setting(2000, "number of generated validation images", at_least=1)


class ImageConfig(TaskConfig):
    """The config of a run of this task."""

    model: Model
    data: Data


def validate(config: ImageConfig) -> None:
    """Raises ConfigError for missing data, an impossible size or contradictory settings."""
    data = config.data
    size, resize = eval_sizes(data)
    if resize < size:
        why = f"must be at least the crop of {size} pixels (data.eval_size)"
        raise ConfigError.about("data.eval_resize", resize, why)
    generated = data.path == GENERATED
    if not generated and not Path(data.path).is_dir():
        why = (
            "must be a folder with train/<class>/*.jpg, or made by TFDS or by "
            f"`decent-jax prepare images`, or {GENERATED!r}"
        )
        raise ConfigError.about("data.path", data.path, why)
    if data.alternate and (generated or not data.flip):
        why = "must be False where data.flip is, and with data.path 'generated'"
        raise ConfigError.about("data.alternate", True, why)
    if data.shift > data.image_size:
        why = f"must be at most data.image_size, {data.image_size}"
        raise ConfigError.about("data.shift", data.shift, why)
    if generated:
        images = data.train_images + data.val_images
        machine.check_memory(
            3 * images * data.image_size**2,
            f"{images} images (data.train_images and val_images) of {data.image_size} pixels",
        )
    model_config(config, len(generated_images.CLASS_NAMES))


def model_config(config: ImageConfig, num_classes: int) -> Config:
    """The model that ``config.model`` describes, for ``num_classes`` classes."""
    model = config.model
    preset = PRESETS[model.preset]
    for name in ("blocks", "small_images"):
        value = getattr(model, name)
        if value and not hasattr(preset, name):
            why = f"must be left out, because the preset {model.preset!r} has none"
            raise ConfigError.about(f"model.{name}", value, why)
    if model.batch_norm_consensus != "average" and not hasattr(preset, "momentum"):
        why = f"must be 'average', because the preset {model.preset!r} has no batch norm"
        raise ConfigError.about("model.batch_norm_consensus", model.batch_norm_consensus, why)
    try:
        changes: Params = {name: getattr(model, name) for name in ("width", "small_images")}
        changes["blocks"] = _blocks(model.blocks)
        changes = {name: value for name, value in changes.items() if value}
        return dataclasses.replace(preset, **changes, num_classes=num_classes, dtype=model.dtype)
    except ValueError as error:
        raise impossible_model(config, error) from None


def _blocks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"blocks must be numbers such as '2,2,2,2', got {text!r}") from None


def eval_sizes(data: Data) -> tuple[int, int]:
    """The side of the evaluation crop, and the shorter side before the crop, in pixels.

    >>> names = "image_size", "eval_size", "eval_resize"
    >>> given = (32, 0, 0), (224, 0, 0), (224, 256, 0), (224, 256, 260)
    >>> [eval_sizes(Data(**dict(zip(names, sizes)))) for sizes in given]
    [(32, 37), (224, 256), (256, 293), (256, 260)]
    """
    size = data.eval_size or data.image_size
    return size, data.eval_resize or round(size * 8 / 7)


def make(config: ImageConfig, workdir: Path, announce: Callable) -> "ImageClassification":
    """Returns the task; generates the pictures, or opens the folder of images.

    Raises:
      DataError: the data cannot be used; the message is one sentence.
    """
    data = config.data
    if data.path != GENERATED:
        with announce(f"looking for the images of {data.path}"):
            train, val = (image_folder.whole_images(data.path, split) for split in ("train", "val"))
        if left_out := Counter(train.left_out) + Counter(val.left_out):
            with announce(f"leaving out {counted(left_out)}"):
                pass
        return ImageClassification(
            config,
            crops.TrainImages(
                train,
                data.image_size,
                whole=data.crop == "whole",
                alternate=config.seed if data.alternate else None,
            ),
            crops.EvalImages(val, *eval_sizes(data)),
        )
    with announce(f"drawing {data.train_images + data.val_images} pictures"):
        sources = [
            generated_images.GeneratedImages(split, count, size=data.image_size)
            for split, count in (("train", data.train_images), ("val", data.val_images))
        ]
    return ImageClassification(config, *sources)


class ImageClassification(Task):
    """Image classification; see `decent_jax.tasks.Task`.

    A batch is ``{"image": uint8 (B, H, W, 3), "label": int32 (B,)}``; losses are nats per image.

    Args:
      config: the run's config.
      train_source: examples of such batches by index, with ``class_names`` and ``labels``; or
        records that its method ``augment`` turns into such examples (see
        `decent_jax.data.loader`).
      eval_source: examples of such batches, from the validation set.
    """

    unit = "examples"
    units_per_example: float = 1

    def __init__(self, config: ImageConfig, train_source, eval_source):
        self.train_source, self.eval_source = train_source, eval_source
        self.class_names = train_source.class_names
        self.config = model_config(config, len(self.class_names))
        self.label_smoothing = config.model.label_smoothing
        self.flip = config.data.flip and not config.data.alternate
        self.shift, self.border = config.data.shift, config.data.border
        self.views = config.data.eval_views
        self.flops_per_example = float(resnet.flops_per_image(self.config, config.data.image_size))
        self.mixes_state = config.model.batch_norm_consensus == "mix"
        recomputes = config.model.batch_norm_consensus == "recompute"
        self.recompute_batches = config.model.batch_norm_batches if recomputes else 0

    @functools.cached_property
    def whitening(self) -> np.ndarray:
        """The kernel of ``airbench94``'s first layer, from at most 5,000 training images."""
        source = self.train_source
        size = min(_WHITENED_IMAGES, len(source))
        with loader.train_batches(source, seed=0, num_replicas=1, batch_size=size, prefetch=0) as x:
            return airbench.whitening(normalize(next(x)["image"][0]))

    def init(self, key):
        params, statistics = resnet.init(self.config, key)
        if "whiten" in params:
            params["whiten"]["kernel"] = jnp.asarray(self.whitening)
        return params, statistics

    def loss(self, params, model_state, batch, key):
        images = normalize(batch["image"])
        images = augment(key, images, flip=self.flip, shift=self.shift, border=self.border)
        rng = jax.random.fold_in(key, _DROPOUT)
        logits, new_state = resnet.train_logits(self.config, params, model_state, images, rng)
        loss = cross_entropy(logits, batch["label"], self.label_smoothing).mean()
        return loss, _unless_not_finite(new_state, model_state)

    def evaluate(self, params, model_state, batch, weights):
        images, labels = normalize(batch["image"]), batch["label"]

        def logits_of(images):
            return resnet.logits_of(self.config, params, model_state, images)

        logits = logits_of(images) if self.views == 1 else logits_of_views(logits_of, images)
        ranks = ranks_of(logits, labels)
        sums = {"loss": cross_entropy(logits, labels), "top1": ranks < 1, "top5": ranks < 5}
        return {name: (x * weights).sum() for name, x in sums.items()} | {"count": weights.sum()}

    def moments(self, params, batch):
        """Moments of one batch; see `decent_jax.tasks.RecomputesState`."""
        return resnet.batch_moments(self.config, params, normalize(batch["image"]))

    def from_moments(self, moments):
        return resnet.from_moments(moments)

    def summary(self):
        return {
            "parameters": resnet.num_params(self.config),
            "classes": len(self.class_names),
            "train_images": len(self.train_source),
            "val_images": len(self.eval_source),
        }


# --- On the device ------------------------------------------------------------------------------


def ranks_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The number of classes that rank before the label: 0 if the label ranks first.

    Among equal logits the lower index ranks first, as for ``argmax``, and a label whose logit is
    NaN ranks last.

    Args:
      logits: ``(B, C)``.
      labels: ``(B,)`` integers in ``[0, C)``.

    Returns:
      ``(B,)`` int32.
    """
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    before = jnp.arange(logits.shape[-1])[None] < labels[:, None]
    # Not `logits > own`: comparisons with NaN are False, so the label would rank first.
    return jnp.where(before, ~(logits < own), ~(logits <= own)).sum(axis=-1, dtype=jnp.int32)


def _unless_not_finite(new, old):
    """``new``, or ``old`` if ``new`` is not finite, from which statistics would never recover."""
    finite = jax.tree.map(lambda x: jnp.isfinite(x).all(), new)
    ok = jax.tree.reduce(jnp.logical_and, finite, jnp.array(True))
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


# --- A trained model ----------------------------------------------------------------------------


class TrainedClassifier(NamedTuple):
    """A trained model with its statistics, from `load`."""

    params: Params  # nested dict of float32 host arrays, no replica dimension
    statistics: Params  # the batch-norm statistics of the evaluation, in the same form
    config: Config
    class_names: tuple[str, ...] | None  # None: the folder of images is missing
    step: int


def load(run: TrainedRun) -> TrainedClassifier:
    """The consensus model of a run, as it was evaluated.

    If the run's evaluations recomputed batch-norm statistics, this function also recomputes them,
    from the same training batches, and therefore needs the images.

    Raises:
      ConfigError: the images are needed but missing.
    """
    params, statistics, names = run.params, run.model_state, None
    recomputes = run.config.model.batch_norm_consensus == "recompute"
    if run.config.data.path == GENERATED and not recomputes:
        names = generated_images.CLASS_NAMES  # without drawing the pictures
    else:
        try:
            task = make(run.config, run.workdir, announce_on_stderr)
            names = task.class_names
            statistics = run.evaluated_state(task)
        except DataError as error:
            if recomputes:
                raise ConfigError(
                    f"this run's batch-norm statistics are recomputed from its images, and {error}"
                ) from None
    config = model_config(run.config, params["fc"]["kernel"].shape[-1])
    return TrainedClassifier(params, statistics, config, names and tuple(names), run.step)


def export(run: TrainedRun, out: Path) -> str:
    """Writes the weights under torchvision's names; returns their ``config.json``."""
    preset = run.config.model.preset
    if preset not in resnet.PRESETS:
        why = "must be a ResNet: only its weights have published names; use the checkpoint instead"
        raise ConfigError.about("model.preset", preset, why)
    model, data = load(run), run.config.data
    assert isinstance(model.config, resnet.ResNetConfig)
    size, resize = eval_sizes(data)
    if data.path == GENERATED:
        size, resize = data.image_size, None  # pictures are generated at this size
    described = weights.describe_resnet(model.config, model.class_names, size, resize)
    about = {"step": str(model.step), "which": run.which}
    weights.save_resnet(out, model.params, model.statistics, model.config, model.step, about)
    described |= {"step": model.step, "which": run.which}
    return json.dumps(described, indent=2) + "\n"
