"""Next-token prediction with a GPT-2 or a Llama on a folder of tokens."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.data.reading import short
from decent_jax.data.text import stdlib_corpus, token_folder, tokenizers
from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.fields import changeable, dtype_of_activations, setting, size_of_preset
from decent_jax.ground.progress import announce as announce_on_stderr
from decent_jax.models import decoders, hf_config, weights
from decent_jax.models.pieces import Params, cross_entropy
from decent_jax.tasks import Task, TaskConfig, TaskData, TrainedRun, check_iid, impossible_model

STDLIB = "stdlib"
_STDLIB_VOCAB = 256  # bytes


@dataclass(frozen=True)
class Model:
    """The settings of the decoder; a size of 0 means the preset's."""

    preset: str = setting("small", "shape of the decoder", choices=tuple(decoders.PRESETS))
    layers: int = size_of_preset("blocks")
    heads: int = size_of_preset("attention heads per block")
    width: int = size_of_preset("size of the residual stream", 2**20)
    kv_heads: int = size_of_preset("key-value heads of a Llama")
    hidden: int = size_of_preset("width of a Llama's MLP", 2**20)
    rope_theta: float = setting(
        0.0, "base of the rotary frequencies of a Llama; 0: the preset's", at_least=0
    )
    norm_epsilon: float = setting(
        0.0, "added to the mean square in a Llama's norms; 0: the preset's", at_least=0, below=1
    )
    context: int = setting(1024, "tokens per training sequence", at_least=1, at_most=2**24)
    vocab_size: int = setting(
        0,
        "size of the vocabulary; 0: the tokenizer's; 50304 is faster than 50257 on GPUs",
        at_least=0,
        at_most=2**24,
    )
    tied: bool = setting(True, "True: tie the output layer to the embeddings if the preset does")
    bias: bool = setting(True, "biases in linear layers and LayerNorms of a GPT-2")
    dropout: float = setting(0.0, "dropout rate of a GPT-2", at_least=0, below=1)
    dtype: str = dtype_of_activations("dtype of activations; parameters are float32")
    remat: bool = setting(False, "recompute blocks in the backward pass: less memory")
    attention: str = setting(
        "auto", "auto: cudnn where it can, else xla", choices=("auto", "xla", "cudnn")
    )
    init_std: float = setting(
        0.02,
        "standard deviation of the initial weights; about width ** -0.5 for narrow models",
        above=0,
    )
    init_from: str = setting(
        "", "published weights: a .safetensors file, or the .index.json of a sharded one"
    )


@dataclass(frozen=True)
class Data(TaskData):
    """The settings of the token folder."""

    path: str = changeable(
        "",
        "folder made by `decent-jax prepare text`, with train.bin, val.bin and "
        'manifest.json; "stdlib": Python\'s standard library',
    )
    shifted: bool = setting(
        False, "training sequences start at any token; False: at multiples of model.context"
    )
    prompt: str = changeable("", "prompt of the sample at the end; empty: the start of a document")


class Config(TaskConfig):
    """The config of a run of this task."""

    model: Model
    data: Data


def validate(config: Config) -> None:
    """Raises ConfigError for a missing data folder, an impossible shape, a wrong vocabulary."""
    path, init_from = config.data.path, config.model.init_from
    check_iid(config)
    if init_from and not Path(init_from).is_file():
        raise ConfigError.about("model.init_from", init_from, "must be a file")
    _check_text("data.prompt", config.data.prompt)
    if not path:
        why = f"must be a folder made by `decent-jax prepare text`, or {STDLIB!r}"
        raise ConfigError.about("data.path", path, why)
    vocab_size = _STDLIB_VOCAB
    try:
        if path != STDLIB:
            vocab_size = _open(Path(path), config)[1]
        model_config(config, vocab_size)
    except DataError as error:
        raise ConfigError(f"data.path: {error}", field="data.path", value=path) from None


def _check_text(name: str, text: str) -> None:
    """Raises ConfigError if the shell passed an argument in an encoding other than UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError.about(name, ascii(text), "must be UTF-8") from None


def model_config(config: Config, tokenizer_vocab: int) -> decoders.Config:
    """The model that ``config.model`` describes, for a tokenizer with this many tokens."""
    model = config.model
    preset = decoders.PRESETS[model.preset]
    vocab_size = model.vocab_size or tokenizer_vocab
    if vocab_size < tokenizer_vocab:
        why = f"must be at least the tokenizer's {tokenizer_vocab}"
        raise ConfigError.about("model.vocab_size", vocab_size, why)
    has = {field.name for field in dataclasses.fields(preset)}
    for name in ("kv_heads", "hidden", "rope_theta", "norm_epsilon", "dropout"):
        value = getattr(model, name)
        if value and name not in has:
            why = f"must be 0, because the model of preset {model.preset!r} has none"
            raise ConfigError.about(f"model.{name}", value, why)
    # 0 means the preset's value
    shape = ("layers", "heads", "kv_heads", "width", "hidden", "rope_theta", "norm_epsilon")
    rest = ("context", "bias", "dropout", "dtype", "remat", "attention", "init_std")
    changes = {name: getattr(model, name) for name in shape if getattr(model, name)}
    changes |= {name: getattr(model, name) for name in rest if name in has}
    changes |= {} if model.tied else {"tied": False}
    try:
        return dataclasses.replace(preset, **changes, vocab_size=vocab_size)
    except ValueError as error:
        raise impossible_model(config, error) from None


def count_parameters(config: Config) -> tuple[int, int, int]:
    """Returns the numbers of parameters, token-embedding parameters, and rows of all arrays.

    The planner, which opens no data, calls this.

    Raises:
      ConfigError: the vocabulary size is known only from the data.
    """
    if not config.model.vocab_size and config.data.path != STDLIB:
        why = "comes from the data; give --parameters instead"
        raise ConfigError.about("model.vocab_size", 0, why)
    model = model_config(config, config.model.vocab_size or _STDLIB_VOCAB)
    shapes = [leaf.shape for leaf in jax.tree.leaves(decoders.shapes(model))]
    rows = sum(math.prod(shape[:-1]) for shape in shapes)
    return decoders.num_params(model), model.vocab_size * model.width, rows


def make(config: Config, workdir: Path, announce: Callable) -> "LanguageModeling":
    """Returns the task; builds the standard library's corpus in ``workdir`` if the config names it.

    Raises:
      DataError: the data cannot be used; the message is one sentence.
    """
    folder = _data_folder(config, workdir)
    if config.data.path == STDLIB:
        with announce("reading Python's standard library as the corpus"):
            stdlib_corpus.build(folder)
    task = LanguageModeling(config, folder)
    if task.init_from and not (Path(workdir) / "checkpoints").exists():
        with announce(f"reading {task.init_from}"):
            task.load_params()  # a damaged file is refused before the run starts
    return task


def _data_folder(config: Config, workdir: Path) -> Path:
    return Path(workdir) / "data" if config.data.path == STDLIB else Path(config.data.path)


class LanguageModeling(Task):
    """Next-token prediction; see `decent_jax.tasks.Task`.

    A batch consists of integer tokens (B, context + 1), and losses are in nats per token.

    Raises:
      DataError: ``folder`` cannot be used.
    """

    unit = "tokens"

    def __init__(self, config: Config, folder: Path):
        self.folder = folder
        context = config.model.context
        self.tokenizer, vocab_size, self.train_source, self.eval_source = _open(folder, config)
        self.config = model_config(config, vocab_size)
        self.init_from, self.prompt = config.model.init_from, config.data.prompt
        self.units_per_example = context
        self.flops_per_example = decoders.flops_per_token(self.config, context) * context
        for name in token_folder.SPLITS:
            token_folder.check_vocab(folder / f"{name}.bin", self.config.vocab_size)
        if self.tokenizer is not None:
            self.tokenizer.encode(self.prompt)  # an error is raised now, not after the last step

    def init(self, key):
        return decoders.init(self.config, key), {}

    def load_params(self):
        if not self.init_from:
            return None
        try:
            return weights.load_decoder(self.init_from, self.config)
        except Exception as error:  # safetensors has its own exception types
            why = f"{self.init_from} cannot be read ({short(error)})"
            if type(error) in (ValueError, DataError):  # a sentence that ends with the remedy
                why = str(error)
            raise DataError(f"model.init_from: {why}") from None

    def loss(self, params, model_state, batch, key):
        logits = decoders.apply(self.config, params, batch[:, :-1], key)
        return cross_entropy(logits, batch[:, 1:]).mean(), model_state

    def evaluate(self, params, model_state, batch, weights):
        logits = decoders.apply(self.config, params, batch[:, :-1])
        losses = cross_entropy(logits, batch[:, 1:]).mean(axis=1)
        return {"loss": (losses * weights).sum(), "count": weights.sum()}

    def summary(self):
        manifest = _manifest(self.folder)
        return {
            "parameters": decoders.num_params(self.config),
            "tokenizer": self.tokenizer.name if self.tokenizer else "unknown",
            "corpus_sha256": manifest.get("corpus_sha256", ""),
            "train_tokens": int(self.train_source.num_tokens),
            "val_tokens": int(self.eval_source.num_tokens),
        }

    def demonstrate(self, params, model_state):
        del model_state
        if self.tokenizer is None:
            return f"no sample: {self.folder} has no manifest.json that names its tokenizer"
        model = TrainedDecoder(params, self.config, self.tokenizer, step=0)
        return "a sample of the consensus model:\n" + _continue(model, self.prompt)[0]


# --- A trained model ----------------------------------------------------------------------------


class TrainedDecoder(NamedTuple):
    """A trained model with its tokenizer, from `load`."""

    params: Params  # nested dict of float32 arrays, no replica dimension
    config: decoders.Config
    tokenizer: tokenizers.Tokenizer | None  # None: the token folder names none
    step: int


def load(run: TrainedRun) -> TrainedDecoder:
    """The consensus model of a run; raises DataError if its token folder is missing."""
    return _saved(run, *_described(run))


def _described(run: TrainedRun) -> tuple[tokenizers.Tokenizer | None, decoders.Config]:
    """The tokenizer and the model of a run, without its checkpoint."""
    if not run.config.data.path:
        raise DataError(f"{run.workdir}/config.json names no data.path, so it is not complete")
    folder = _data_folder(run.config, run.workdir)
    tokenizer = _tokenizer(folder)
    return tokenizer, model_config(run.config, _vocab_size(tokenizer, folder, run.config))


def _saved(
    run: TrainedRun, tokenizer: tokenizers.Tokenizer | None, config: decoders.Config
) -> TrainedDecoder:
    wanted = jax.tree.map(lambda x: x.shape, decoders.shapes(config))
    if jax.tree.map(jnp.shape, run.params) != wanted:
        raise DataError(
            f"{run.workdir}: the checkpoint of step {run.step} holds another model than config.json"
            " describes"
        )
    return TrainedDecoder(run.params, config, tokenizer, run.step)


def export(run: TrainedRun, out: Path) -> str:
    """Writes the weights under published names, and the tokenizer if `transformers` supports it.

    Returns the ``config.json`` that `transformers` reads.
    """
    model = load(run)
    origin = {"step": str(model.step), "which": run.which}
    weights.save_decoder(out, model.params, model.config, origin)
    about = hf_config.describe(model.config)
    if model.tokenizer is not None:
        end = model.tokenizer.end_of_text
        ends = {"bos_token_id": end, "eos_token_id": end}
        about |= ends
        # Without a padding token, `generate` of `transformers` warns.
        generation = json.dumps({**ends, "pad_token_id": end}, indent=2)
        out.with_name("generation_config.json").write_text(generation + "\n")
        for name, content in model.tokenizer.hf_files().items():
            out.with_name(name).write_bytes(content)
    return json.dumps(about, indent=2) + "\n"


def sample(
    run: TrainedRun,
    *,
    prompt: str = "",
    tokens: int = 200,
    samples: int = 1,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> list[str]:
    """``samples`` continuations of the prompt, each including the prompt; see `decoders.generate`.

    Raises:
      ConfigError: ``top_k`` is out of range, or the samples do not fit this machine.
      DataError: there is no tokenizer to encode the prompt.
    """
    _check_text("--prompt", prompt)
    tokenizer, config = _described(run)
    if tokenizer is None:
        raise DataError("the run's token folder has no manifest.json that names its tokenizer")
    _check_memory(config, tokens, samples)
    if top_k > config.vocab_size:
        why = f"must be at most {config.vocab_size}, the model's vocabulary"
        raise ConfigError.about("top_k", top_k, why)
    with announce_on_stderr("loading the model"):
        model = _saved(run, tokenizer, config)
    with announce_on_stderr("sampling"):
        return _continue(model, prompt, tokens, samples, temperature, top_k, seed)


def _continue(
    model: TrainedDecoder, prompt: str, tokens=200, samples=1, temperature=0.8, top_k=0, seed=0
) -> list[str]:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    ids = jnp.asarray([tokenizer.end_of_text, *tokenizer.encode(prompt)], jnp.int32)
    drawn = decoders.generate(
        model.config,
        model.params,
        jnp.tile(ids[None], (samples, 1)),
        tokens,
        jax.random.key(seed),
        temperature,
        top_k,
    )
    # A padded vocabulary has ids without a token, which an untrained model may draw.
    rows = np.asarray(drawn)[:, 1:].tolist()
    return [tokenizer.decode([i for i in row if i < tokenizer.vocab_size]) for row in rows]


def _check_memory(config: decoders.Config, tokens: int, samples: int) -> None:
    """Raises ConfigError if this machine cannot hold the samples with their keys and values."""
    width = config.kv_heads * config.width // config.heads
    cache = 2 * config.layers * width * min(tokens, config.context)
    item = jnp.dtype(config.dtype).itemsize
    held = samples * (item * cache + 4 * (tokens + config.vocab_size))
    machine.check_memory(held, f"sampling {samples} times {tokens} tokens")


# --- The token folder ---------------------------------------------------------------------------


def _open(folder: Path, config: Config) -> tuple:
    """(tokenizer or None, vocabulary size, training windows, validation windows)."""
    tokenizer = _tokenizer(folder)
    size = _vocab_size(tokenizer, folder, config)
    trained = token_folder.ShiftedWindows if config.data.shifted else token_folder.TokenWindows

    def windows(kind: type[token_folder.TokenWindows], split: str) -> token_folder.TokenWindows:
        path = folder / f"{split}.bin"
        return kind(path, config.model.context, token_folder.token_type(path, size))

    return tokenizer, size, windows(trained, "train"), windows(token_folder.TokenWindows, "val")


def _manifest(folder: Path) -> dict:
    try:
        return token_folder.read_manifest(folder)
    except DataError:
        return {}


def _tokenizer(folder: str | Path) -> tokenizers.Tokenizer | None:
    """The manifest's tokenizer; None for a folder made by nanoGPT, which names none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {str(folder)!r}; make it with `decent-jax prepare text`"
        )
    if not (folder / "manifest.json").exists() and (folder / "train.bin").exists():
        return None
    return tokenizers.from_manifest(folder)


def _vocab_size(tokenizer: tokenizers.Tokenizer | None, folder: Path, config: Config) -> int:
    """The vocabulary size from tokenizer, nanoGPT's meta.pkl or config; DataError without these."""
    if tokenizer is not None:
        return tokenizer.vocab_size
    if size := token_folder.vocabulary_of(folder) or config.model.vocab_size:
        return size
    raise DataError(
        f"{folder} has neither manifest.json nor meta.pkl, which give the size of its vocabulary;"
        " set model.vocab_size, to 50257 for GPT-2's tokens"
    )
