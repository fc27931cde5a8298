"""Translation with a Transformer, on a prepared folder of sentence pairs or spelled-out numbers."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.data.translation import number_pairs, subwords
from decent_jax.data.translation.pair_folder import PairBlocks, TranslationPairs
from decent_jax.ground import fields
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.fields import changeable, dtype_of_activations, setting, size_of_preset
from decent_jax.ground.progress import announce as announce_on_stderr
from decent_jax.models import hf_config, transformer, weights
from decent_jax.models.pieces import Params, cross_entropy
from decent_jax.tasks import Task, TaskConfig, TaskData, TrainedRun, check_iid, impossible_model
from decent_jax.tasks.translator import ALPHA, BEAM, Translator, bleu, bleu_of

NUMBERS = "numbers"

_SHOWN = 5  # translations shown after training


# ``config.batch_size`` is the number of source tokens, and of target tokens, over all replicas.
@dataclass(frozen=True)
class Model:
    """The settings of the Transformer."""

    preset: str = setting("base", "shape of the Transformer", choices=tuple(transformer.PRESETS))
    layers: int = size_of_preset("layers of the encoder and of the decoder, each")
    heads: int = size_of_preset("attention heads per layer")
    width: int = size_of_preset("size of the residual stream", 2**20)
    ff: int = size_of_preset("size of the feed-forward layers", 2**20)
    norm: str = setting(
        "post", "post: as published; pre: needs no warm-up to train deep", choices=("post", "pre")
    )
    dropout: float = setting(0.1, "dropout rate", at_least=0, below=1)
    dtype: str = dtype_of_activations("dtype of activations; parameters are float32")
    remat: bool = setting(False, "recompute layers in the backward pass: less memory")
    attention: str = setting(
        "auto", "auto: cudnn where it can, else xla", choices=("auto", "xla", "cudnn")
    )
    label_smoothing: float = setting(
        0.1, "smoothing in the training loss; the validation loss has none", at_least=0, below=1
    )


@dataclass(frozen=True)
class Data(TaskData):
    """The settings of the sentence pairs."""

    path: str = changeable(
        "",
        'folder made by `decent-jax prepare translation`; "numbers": numbers spelled '
        "out in English and German",
    )
    shapes: int = setting(16, "maximum number of batch shapes, each compiled per round", at_least=1)
    bleu_sentences: int = changeable(
        200, "validation sentences translated at every evaluation; 0: none", at_least=0
    )
    beam: int = changeable(4, "beam width", at_least=1, at_most=2**10)


class Config(TaskConfig):
    """The config of a run of this task."""

    model: Model
    data: Data


def validate(config: Config) -> None:
    """Raises ConfigError for missing data or an impossible shape."""
    data = config.data
    if config.micro_batches != 1:
        why = (
            "must be 1 for translation, whose batches have several shapes; use a smaller batch_size"
        )
        raise ConfigError.about("micro_batches", config.micro_batches, why)
    check_iid(config)
    if not data.path:
        why = f"must be a folder made by `decent-jax prepare translation`, or {NUMBERS!r}"
        raise ConfigError.about("data.path", data.path, why)
    size = 1000
    if data.path != NUMBERS:
        try:
            size = _open(data.path)[0].vocabulary.size
        except DataError as error:
            raise ConfigError(f"data.path: {error}", field="data.path", value=data.path) from None
    model_config(config, size)


def model_config(config: Config, vocab_size: int) -> transformer.TransformerConfig:
    """The model that ``config.model`` describes, for a vocabulary with this many subwords."""
    model = config.model
    preset = transformer.PRESETS[model.preset]
    try:
        return dataclasses.replace(
            preset,
            vocab_size=vocab_size,
            **{
                n: getattr(model, n) or getattr(preset, n)
                for n in ("layers", "heads", "width", "ff")
            },
            **{n: getattr(model, n) for n in ("norm", "dropout", "dtype", "remat", "attention")},
        )
    except ValueError as error:
        raise impossible_model(config, error) from None


def make(config: Config, workdir: Path, announce: Callable) -> "Translation":
    """Returns the task; builds the corpus of numbers in ``workdir`` if the config names it.

    Raises:
      DataError: the data cannot be used; the message is one sentence.
    """
    folder = Path(config.data.path)
    if config.data.path == NUMBERS:
        folder = Path(workdir) / "data"
        with announce("spelling out numbers"):
            number_pairs.build(folder)
    with announce(f"choosing the shapes of batches of {config.batch_size} tokens"):
        task = Translation(config, folder)
    _keep_vocabulary(task.vocabulary, workdir)
    return task


def _open(folder: str | Path) -> tuple[TranslationPairs, TranslationPairs]:
    """The training and validation pairs; DataError, also if the final test would be impossible."""
    train, val = TranslationPairs(folder, "train"), TranslationPairs(folder, "val")
    splits = {"train": train, "val": val}
    for name in train.manifest["splits"]:
        (splits.get(name) or TranslationPairs(folder, name)).check()
    bleu_of(train.languages[1])
    return train, val


def _check_batch(config: Config, train: TranslationPairs) -> None:
    """Raises DataError if a batch has less than one pair of average length per replica."""
    side = (float(train.lengths.mean(dtype=np.float64)) * 2 + 1) / 2
    if config.batch_size < config.num_replicas * side:
        raise DataError(
            f"batch_size must be at least {math.ceil(config.num_replicas * side)} tokens, a pair "
            f"of average length for each of {config.num_replicas} replicas, got {config.batch_size}"
        )


def _keep_vocabulary(vocabulary: subwords.Subwords, workdir: Path) -> None:
    """Copies the vocabulary into a new run; DataError if a resumed run has a different one."""
    if not (workdir / subwords.FILE).exists():
        vocabulary.save(workdir)
    elif subwords.load(workdir).sha256 != vocabulary.sha256:
        raise DataError(
            f"data.path: its vocabulary is not the one with which the run in {workdir} began; give "
            "the folder of that run, or take another --workdir"
        )


class Translation(Task):
    """Translation; see `decent_jax.tasks.Task`.

    A batch is ``{"source": int32 (B, S), "target": int32 (B, T), "share": float32 (B,)}``, padded
    with 0; ``share`` is the weight of each token of the row in the loss, 0 for an empty row. Losses
    are in nats per target token, including the end token.
    """

    unit = "tokens"

    def __init__(self, config: Config, folder: Path):
        train, val = _open(folder)
        _check_batch(config, train)
        self.train_source = BucketedPairs(train, config.data.shapes)
        self.eval_source = BucketedPairs(val, config.data.shapes)
        self.vocabulary = train.vocabulary
        self.languages = train.languages
        self.config = model_config(config, self.vocabulary.size)
        self.label_smoothing = config.model.label_smoothing
        self.translator = Translator(self.config, self.vocabulary, config.data.beam)
        self.blocks = self.train_source.train_blocks(
            config.num_replicas, config.batch_size, config.seed
        )
        # Throughput and FLOPs count the real tokens of an average step.
        real = train.lengths.sum(axis=0, dtype=np.int64) + np.array([0, len(train)])
        steps = self.blocks.steps
        self.units_per_example = float(real.sum()) / steps / config.batch_size
        mean = [float(x) / len(train) for x in real]
        self.flops_per_example = (
            transformer.flops_per_pair(self.config, *mean) * len(train) / steps / config.batch_size
        )
        self.some = min(config.data.bleu_sentences, len(val))

    def init(self, key):
        return transformer.init(self.config, key), {}

    def loss(self, params, model_state, batch, key):
        rng = key if self.config.dropout else None
        wanted = batch["target"][:, 1:]
        logits = transformer.apply(
            self.config, params, batch["source"], batch["target"][:, :-1], rng
        )
        losses = cross_entropy(logits, wanted, self.label_smoothing)
        shares = jnp.where(wanted != transformer.PAD, batch["share"][:, None], 0)
        return (losses * shares).sum(), model_state

    def evaluate(self, params, model_state, batch, weights):
        wanted = batch["target"][:, 1:]
        logits = transformer.apply(self.config, params, batch["source"], batch["target"][:, :-1])
        real = (wanted != transformer.PAD) * weights[:, None]
        right = logits.argmax(axis=-1) == wanted
        sums = {"loss": cross_entropy(logits, wanted), "accuracy": right}
        return {name: (x * real).sum() for name, x in sums.items()} | {"count": real.sum()}

    def measure(self, block):
        """``data/padding_fraction``: the share of padding in a batch's sources and targets."""
        sides = block["source"], block["target"][..., 1:]
        places = sum(side.size for side in sides)
        return {"data/padding_fraction": 1 - sum(np.count_nonzero(s) for s in sides) / places}

    def score(self, params, pause=lambda: None):
        """``bleu`` of the first ``data.bleu_sentences`` validation sentences."""
        if not self.some:
            return {}
        pairs = self.eval_source.pairs
        sources, references = (pairs.sentences(side)[: self.some] for side in (0, 1))
        translations = self.translator(jax.device_put(params), sources, pause=pause)
        return {"bleu": bleu(translations, references, self.languages[1])[0]}

    def summary(self):
        return {
            "parameters": transformer.num_params(self.config),
            "languages": list(self.languages),
            "vocabulary": self.vocabulary.size,
            "vocabulary_sha256": self.vocabulary.sha256,
            "train_pairs": len(self.train_source),
            "val_pairs": len(self.eval_source),
            "shapes": [list(shape) for shape in self.blocks.batches.shapes],
            "padding_fraction": round(self.blocks.batches.padding_fraction, 4),
        }

    def test(self, params):
        """Scores of the test set, or of the validation set if there is no test set."""
        pairs = self._test_pairs()
        sources, references = (pairs.sentences(side) for side in (0, 1))
        translations = self.translator(jax.device_put(params), sources, progress=True)
        score, signature = bleu(translations, references, self.languages[1])
        return {
            "split": pairs.split,
            "sentences": len(sources),
            "bleu": round(score, 2),
            "bleu_signature": signature,
        }

    def demonstrate(self, params, model_state):
        """Some translations, each with its source and its reference."""
        pairs = self._test_pairs()
        sources, references = (pairs.sentences(side)[:_SHOWN] for side in (0, 1))
        translations = self.translator(jax.device_put(params), sources)
        lines = []
        for triple in zip(sources, translations, references, strict=True):
            lines += map(": ".join, zip(("source", "ours", "reference"), triple, strict=True))
        return "\n".join(lines)

    def _test_pairs(self) -> TranslationPairs:
        pairs = self.eval_source.pairs
        with_test = "test" in pairs.manifest["splits"]
        return TranslationPairs(pairs.folder, "test") if with_test else pairs


class TrainedTranslator(NamedTuple):
    """A trained model with its vocabulary, from `load`."""

    params: Params  # nested dict of float32 host arrays, no replica dimension
    config: transformer.TransformerConfig
    vocabulary: subwords.Subwords
    step: int


def load(run: TrainedRun) -> TrainedTranslator:
    """The consensus model of a run; raises DataError if its vocabulary cannot be read."""
    vocabulary = subwords.load(run.workdir)
    config = model_config(run.config, vocabulary.size)
    return TrainedTranslator(run.params, config, vocabulary, run.step)


def export(run: TrainedRun, out: Path) -> str:
    """Writes the weights, the tokenizer and the beam-search settings for `transformers`.

    Returns the ``config.json`` that `transformers` reads.
    """
    model = load(run)
    origin = {"step": str(model.step), "which": run.which}
    weights.save_transformer(out, model.params, model.config, origin)
    generation = hf_config.SPECIAL_IDS | {
        "num_beams": BEAM,
        "length_penalty": ALPHA,
        "max_new_tokens": subwords.LONGEST,
        "suppress_tokens": [transformer.PAD, transformer.START],
    }
    files = subwords.hf_files(model.vocabulary, subwords.LONGEST)
    files["generation_config.json"] = (json.dumps(generation, indent=2) + "\n").encode()
    for name, content in files.items():
        out.with_name(name).write_bytes(content)
    return json.dumps(hf_config.describe(model.config), indent=2) + "\n"


def translator(run: TrainedRun, beam: int) -> Callable[[list[str]], list[str]]:
    """A function that translates a list of sentences with the consensus model of a run.

    Raises:
      ConfigError: ``beam`` is out of range.
    """
    fields.table(Data)["beam"].check("beam", beam)
    with announce_on_stderr("loading the model"):
        model = load(run)
    return functools.partial(Translator(model.config, model.vocabulary, beam), model.params)


class BucketedPairs:
    """A source of pairs that forms its own batches, see `decent_jax.data.loader`.

    Args:
      pairs: the pairs of a split.
      shapes: the maximum number of batch shapes.
    """

    def __init__(self, pairs: TranslationPairs, shapes: int):
        self.pairs, self.shapes = pairs, shapes

    def __len__(self) -> int:
        return len(self.pairs)

    @functools.cache  # noqa: B019 (sources live as long as the run)
    def train_blocks(self, num_replicas: int, tokens: int, seed: int) -> "TrainBlocks":
        """Training batches, shuffled and endless."""
        return TrainBlocks(
            self.pairs, tokens=tokens, num_replicas=num_replicas, seed=seed, shapes=self.shapes
        )

    @functools.cache  # noqa: B019
    def eval_blocks(self, num_replicas: int, tokens: int) -> PairBlocks:
        """Evaluation batches, with each pair once."""
        return PairBlocks(
            self.pairs,
            tokens=tokens,
            num_replicas=num_replicas,
            shapes=self.shapes,
            evaluation=True,
        )


class TrainBlocks(PairBlocks):
    """`PairBlocks` with ``share``, the weight of each token of a row, instead of ``weight``.

    A replica's loss is the sum over its real target tokens, divided by the mean number of such
    tokens per replica, so each token of a step has the same weight.
    """

    def block(self, step: int, replica: int) -> dict[str, np.ndarray]:
        """The block of a replica at a step, with ``share``."""
        block, replicas = super().block(step, replica), self.batches.num_replicas
        rows = np.concatenate([self.indices(step, r) for r in range(replicas)])
        rows = rows[rows >= 0]
        tokens = self.pairs.lengths[rows, 1].sum(dtype=np.int64) + len(rows)  # with end tokens
        block["share"] = block.pop("weight") / np.float32(max(tokens / replicas, 1))
        return block
