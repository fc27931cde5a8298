"""The model a run left behind: its parameters, its shape, its tokenizer."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from decent_jax.data.tokenizers import DataError, Tokenizer
from decent_jax.models import gpt2
from decent_jax.train import ConfigError


class SavedModel(NamedTuple):
    """What `load` returns."""

    params: Any  # nested dict of float32 host arrays, no replica dimension
    config: gpt2.GPT2Config
    tokenizer: Tokenizer | None  # None: trained on token files that do not say
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


def load(workdir: str | Path, which: str = "last") -> SavedModel:
    """The consensus model of a run of the language-modelling task.

    Raises:
      ConfigError: ``workdir`` holds no such run, or its checkpoints cannot be read.
    """
    from decent_jax.tasks import language_modeling
    from decent_jax.train import checkpoint

    workdir = Path(workdir)
    try:
        config = ConfigDict(json.loads((workdir / "config.json").read_text()))
    except (OSError, ValueError):
        raise ConfigError(f"{workdir} holds no run: there is no readable config.json") from None
    if config.task != "language_modeling":
        raise ConfigError(
            f"{workdir} is a run of the task {config.task!r}, not of a language model"
        )
    try:
        model, tokenizer = language_modeling.model_and_tokenizer(config, workdir)
        params, meta = checkpoint.restore_model(workdir, which)
    except (DataError, checkpoint.CheckpointError) as error:
        raise ConfigError(str(error)) from None
    return SavedModel(params, model, tokenizer, meta["step"])
