"""The model a run left behind: its parameters, its shape, and what is needed to use it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from decent_jax.data import subwords
from decent_jax.data.subwords import Subwords
from decent_jax.data.tokenizers import Tokenizer
from decent_jax.errors import DataError
from decent_jax.models import gpt2, resnet, transformer
from decent_jax.progress import announce
from decent_jax.train import ConfigError


class SavedModel(NamedTuple):
    """What `load` returns."""

    params: Any  # nested dict of float32 host arrays, no replica dimension
    config: gpt2.GPT2Config
    tokenizer: Tokenizer | None  # None: trained on token files that do not say
    step: int


class SavedTranslationModel(NamedTuple):
    """What `load_translation_model` returns."""

    params: Any  # nested dict of float32 host arrays, no replica dimension
    config: transformer.TransformerConfig
    vocabulary: Subwords
    step: int


class SavedImageModel(NamedTuple):
    """What `load_image_model` returns."""

    params: Any  # nested dict of float32 host arrays, no replica dimension
    statistics: Any  # of batch norm, likewise; those it was evaluated with
    config: resnet.ResNetConfig
    class_names: tuple[str, ...] | None  # None: the folder of images is not here
    step: int


def add_arguments(parser) -> None:
    """The flags by which `export` and `sample` choose a model."""
    parser.add_argument("--workdir", required=True, metavar="DIR", help="of a training run")
    parser.add_argument(
        "--which",
        choices=("last", "best"),
        default="last",
        help="the consensus of the newest checkpoint, or the one with the best validation loss",
    )


def read_config(workdir: str | Path) -> ConfigDict:
    """The config of a run; raises ConfigError where ``workdir`` holds none."""
    try:
        return ConfigDict(json.loads((Path(workdir) / "config.json").read_text()))
    except (OSError, ValueError):
        raise ConfigError(f"{workdir} holds no run: there is no readable config.json") from None


def load(workdir: str | Path, which: str = "last") -> SavedModel:
    """The consensus model of a run of the language-modelling task.

    Raises:
      ConfigError: ``workdir`` holds no such run, or its checkpoints cannot be read.
    """
    from decent_jax.tasks import language_modeling
    from decent_jax.train import checkpoint

    config = read_config(workdir)
    if config.task != "language_modeling":
        raise ConfigError(
            f"{workdir} is a run of the task {config.task!r}, not of a language model"
        )
    try:
        model, tokenizer = language_modeling.model_and_tokenizer(config, Path(workdir))
        params, meta = checkpoint.restore_model(workdir, which)
    except (DataError, checkpoint.CheckpointError) as error:
        raise ConfigError(str(error)) from None
    return SavedModel(params, model, tokenizer, meta["step"])


def load_translation_model(workdir: str | Path, which: str = "last") -> SavedTranslationModel:
    """The consensus model of a run of the translation task.

    Raises:
      ConfigError: ``workdir`` holds no such run, its checkpoints or its vocabulary cannot be read.
    """
    from decent_jax.tasks import translation
    from decent_jax.train import checkpoint

    config = read_config(workdir)
    if config.task != "translation":
        raise ConfigError(f"{workdir} is a run of the task {config.task!r}, not of translation")
    try:
        vocabulary = subwords.load(workdir)
        params, meta = checkpoint.restore_model(workdir, which)
    except (DataError, checkpoint.CheckpointError) as error:
        raise ConfigError(str(error)) from None
    model = translation.model_config(config, vocabulary.size)
    return SavedTranslationModel(params, model, vocabulary, meta["step"])


def load_image_model(workdir: str | Path, which: str = "last") -> SavedImageModel:
    """The consensus model of a run of the image-classification task, as it was evaluated.

    Where the run recomputes its batch-norm statistics, they are recomputed here, from the same
    training batches; that needs the images.

    Raises:
      ConfigError: ``workdir`` holds no such run, its checkpoints cannot be read, or images that
        are needed are missing.
    """
    from decent_jax.data import generated_images
    from decent_jax.tasks import image_classification
    from decent_jax.train import checkpoint

    config = read_config(workdir)
    if config.task != "image_classification":
        raise ConfigError(f"{workdir} is a run of the task {config.task!r}, not of images")
    try:
        params, statistics, step = _consensus(Path(workdir), which)
    except checkpoint.CheckpointError as error:
        raise ConfigError(str(error)) from None
    recomputes = config.model.batch_norm_consensus == "recompute"
    if config.data.path == image_classification.GENERATED and not recomputes:
        names = generated_images.CLASS_NAMES  # without drawing all the pictures
    else:
        try:
            task = image_classification.make(config, Path(workdir), announce)
            names = task.class_names
            statistics = _evaluated_with(task, config, params, statistics)
        except DataError as error:
            if recomputes:
                raise ConfigError(
                    f"this run's batch-norm statistics are recomputed from its images, and {error}"
                ) from None
            names = None
    model = image_classification.model_config(config, params["fc"]["bias"].shape[-1])
    return SavedImageModel(params, statistics, model, names and tuple(names), step)


def _consensus(workdir: Path, which: str) -> tuple[Any, Any, int]:
    """(params, model_state, step): the mean of the replicas."""
    import jax

    from decent_jax import replicas
    from decent_jax.train import checkpoint

    if which == "best":
        params, meta = checkpoint.restore_model(workdir, which)
        folder = workdir.absolute() / checkpoint.BEST / str(meta["step"])
        return params, checkpoint.read_item(folder / "model_state"), meta["step"]
    stacked, state, step = load_replicas(workdir)
    return *jax.device_get(jax.jit(replicas.consensus_mean)((stacked, state))), step


class SavedReplicas(NamedTuple):
    """What `load_replicas` returns."""

    params: Any  # of host arrays (n, ...)
    model_state: Any  # likewise, such as the statistics of batch norm
    step: int


def load_replicas(workdir: str | Path, step: int | None = None) -> SavedReplicas:
    """Every replica's own model, of the newest checkpoint or that of ``step``.

    Raises:
      CheckpointError: it cannot be read, or there is none.
    """
    from decent_jax.train import checkpoint

    if step is None:  # the newest that is whole
        step = checkpoint.restore_model(workdir, "last")[1]["step"]
    folder = Path(workdir).absolute() / checkpoint.FOLDER / str(step)
    return SavedReplicas(
        checkpoint.read_item(folder / "params"),
        checkpoint.read_item(folder / "rest", "model_state"),
        step,
    )


def _evaluated_with(task, config, params, statistics) -> Any:
    """What `Evaluator.consensus_state` makes of the mean of the replicas' statistics."""
    import jax

    from decent_jax import replicas
    from decent_jax.train.evaluation import Evaluator

    evaluator = Evaluator(
        task,
        replicas.place(config.num_replicas, jax.local_devices()[:1]),
        config.eval.batch_size or config.batch_size,
        config.eval.batches,
        config.data.workers,
    )
    return jax.device_get(evaluator.consensus_state(params, statistics))
