"""Next-token prediction with a GPT-2 on a folder of tokens."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from decent_jax.data import stdlib_corpus, token_files, tokenizers
from decent_jax.errors import ConfigError, DataError
from decent_jax.models import generate, gpt2, gpt2_weights
from decent_jax.models.losses import cross_entropy

STDLIB = "stdlib"
_SAMPLE_TOKENS = 200


def default_model() -> ConfigDict:
    """GPT-2 small in bfloat16; a shape of 0 is the preset's."""
    model = ConfigDict()
    model.preset = "small"  # small, medium, large, xl
    model.layers = 0  # 0: the preset's
    model.heads = 0
    model.width = 0
    model.context = 1024  # tokens a training sequence
    model.vocab_size = 0  # 0: the tokenizer's; 50304 is faster than 50257 on GPUs
    model.bias = True  # biases in linear layers and LayerNorms
    model.dropout = 0.0
    model.dtype = "bfloat16"  # of activations; parameters are float32
    model.remat = False  # recompute blocks in the backward pass: less memory
    model.attention = "auto"  # cudnn where it can, else xla
    model.init_std = 0.02  # of the initial weights; narrow models want about width ** -0.5
    model.init_from = ""  # published GPT-2 weights, a .safetensors file
    return model


def default_data() -> ConfigDict:
    """A folder made by ``python -m decent_jax.data.prepare_text``."""
    data = ConfigDict()
    data.path = ""  # folder with train.bin, val.bin, manifest.json; "stdlib": Python's own library
    data.prefetch = 4  # batches read ahead
    data.prompt = ""  # what the sample at the end continues; empty: begin a document
    return data


def validate(config: ConfigDict) -> None:
    """Raises ConfigError for a missing data folder, a shape that cannot be, a wrong vocabulary."""
    if config.model.preset not in gpt2.PRESETS:
        raise ConfigError(
            f"model.preset must be one of {', '.join(gpt2.PRESETS)}, got {config.model.preset!r}"
        )
    path, init_from = config.data.path, config.model.init_from
    if init_from and not Path(init_from).is_file():
        raise ConfigError(f"model.init_from: there is no file {init_from!r}")
    if not path:
        raise ConfigError(
            "data.path is empty: name a folder made by `python -m decent_jax.data.prepare_text`, "
            "or 'stdlib'"
        )
    vocab_size = 256
    try:
        if path != STDLIB:
            vocab_size = _vocab_size(_tokenizer(path))
            for name in token_files.SPLITS:
                windows = token_files.TokenWindows(Path(path) / f"{name}.bin", config.model.context)
                if name == "train" and config.data.partition != "iid":
                    _ = windows.labels
        model_config(config, vocab_size)
    except (DataError, ValueError) as error:
        raise ConfigError(f"{error}") from None


def model_config(config: ConfigDict, tokenizer_vocab: int) -> gpt2.GPT2Config:
    """The model that ``config.model`` describes, for a tokenizer of so many tokens."""
    model = config.model
    preset = gpt2.PRESETS[model.preset]
    vocab_size = model.vocab_size or tokenizer_vocab
    if vocab_size < tokenizer_vocab:
        raise ConfigError(
            f"model.vocab_size {vocab_size} is smaller than the tokenizer's {tokenizer_vocab}"
        )
    try:
        return dataclasses.replace(
            preset,
            layers=model.layers or preset.layers,
            heads=model.heads or preset.heads,
            width=model.width or preset.width,
            vocab_size=vocab_size,
            **{name: model[name] for name in ("context", "bias", "dropout", "dtype")},
            **{name: model[name] for name in ("remat", "attention", "init_std")},
        )
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def make(config: ConfigDict, workdir: Path, announce) -> "LanguageModeling":
    """The task; builds the standard library's corpus in ``workdir`` where it is asked for."""
    folder = _data_folder(config, workdir)
    if config.data.path == STDLIB:
        with announce("reading Python's standard library as the corpus"):
            stdlib_corpus.build(folder)
    return LanguageModeling(config, folder)


def model_and_tokenizer(
    config: ConfigDict, workdir: Path
) -> tuple[gpt2.GPT2Config, tokenizers.Tokenizer | None]:
    """What a run under ``config`` in ``workdir`` trains, and reads text with."""
    tokenizer = _tokenizer(_data_folder(config, workdir))
    return model_config(config, _vocab_size(tokenizer)), tokenizer


def _data_folder(config: ConfigDict, workdir: Path) -> Path:
    return Path(workdir) / "data" if config.data.path == STDLIB else Path(config.data.path)


class LanguageModeling:
    """See `decent_jax.tasks.Task`; a batch is tokens (B, context + 1), losses are nats a token."""

    unit = "tokens"
    mixes_state = False

    def __init__(self, config: ConfigDict, folder: Path):
        self.folder = folder
        self.tokenizer = _tokenizer(folder)
        self.config = model_config(config, _vocab_size(self.tokenizer))
        self.init_from = config.model.init_from
        self.prompt = config.data.prompt
        context = self.config.context
        self.units_per_example = context
        self.flops_per_example = gpt2.flops_per_token(self.config, context) * context
        self.train_source, self.eval_source = (
            token_files.TokenWindows(folder / f"{name}.bin", context) for name in token_files.SPLITS
        )
        for name in token_files.SPLITS:
            token_files.check_vocab(folder / f"{name}.bin", self.config.vocab_size)

    def init(self, key):
        return gpt2.init(self.config, key), {}

    def load_params(self):
        if not self.init_from:
            return None
        return gpt2_weights.load_safetensors(self.init_from, self.config)

    def loss(self, params, model_state, batch, key):
        rng = key if self.config.dropout else None
        logits = gpt2.apply(self.config, params, batch[:, :-1], rng)
        return cross_entropy(logits, batch[:, 1:]).mean(), model_state

    def evaluate(self, params, model_state, batch, weights):
        logits = gpt2.apply(self.config, params, batch[:, :-1])
        losses = cross_entropy(logits, batch[:, 1:]).mean(axis=1)
        return {"loss": (losses * weights).sum(), "count": weights.sum()}

    def decay_mask(self, params):
        return gpt2.decay_mask(params)

    def summary(self):
        manifest = _manifest(self.folder)
        return {
            "parameters": gpt2.num_params(self.config),
            "tokenizer": self.tokenizer.name if self.tokenizer else "gpt2",
            "corpus_sha256": manifest.get("corpus_sha256", ""),
            "train_tokens": int(self.train_source.num_tokens),
            "val_tokens": int(self.eval_source.num_tokens),
        }

    def demonstrate(self, params, model_state):
        del model_state
        if self.tokenizer is None:
            return f"no sample: {self.folder} has no manifest.json that names its tokenizer"
        ids = [self.tokenizer.end_of_text, *self.tokenizer.encode(self.prompt)]
        tokens = generate.generate(
            self.config,
            params,
            jnp.asarray([ids], jnp.int32),
            _SAMPLE_TOKENS,
            jax.random.key(0),
            0.8,
        )
        # A padded vocabulary has ids that stand for no token; an untrained model may draw them.
        drawn = [i for i in np.asarray(tokens)[0, 1:].tolist() if i < self.tokenizer.vocab_size]
        return "a sample of the consensus model:\n" + self.tokenizer.decode(drawn)


def _manifest(folder: Path) -> dict:
    try:
        return token_files.read_manifest(folder)
    except DataError:
        return {}


def _tokenizer(folder: str | Path) -> tokenizers.Tokenizer | None:
    """The manifest's; None for a folder of nanoGPT's, whose tokens are GPT-2's."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"data.path: there is no folder {str(folder)!r}")
    if not (folder / "manifest.json").exists() and (folder / "train.bin").exists():
        return None
    return tokenizers.from_manifest(folder)


def _vocab_size(tokenizer: tokenizers.Tokenizer | None) -> int:
    return tokenizer.vocab_size if tokenizer else gpt2.PRESETS["small"].vocab_size
