"""Translation with a Transformer, on a prepared folder of sentence pairs or spelled-out numbers."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from decent_jax.data import number_words, subwords
from decent_jax.data.translation_files import PairBlocks, TranslationPairs
from decent_jax.errors import ConfigError, DataError
from decent_jax.models import transformer
from decent_jax.models.losses import cross_entropy
from decent_jax.tasks.translator import Translator, bleu, meteor

NUMBERS = "numbers"
AVERAGES = ("all", "replica")

_SHOWN = 5  # translations at the end


def default_model() -> ConfigDict:
    """The base model; zeros are the preset's."""
    model = ConfigDict()
    model.preset = "base"  # tiny, small, base, big
    model.layers = 0  # of the encoder, and as many of the decoder
    model.heads = 0
    model.width = 0
    model.ff = 0
    model.norm = "post"  # "post": as published; "pre": needs no warm-up to train deep
    model.dropout = 0.1
    model.dtype = "bfloat16"  # of activations; parameters are float32
    model.remat = False  # recompute layers in the backward pass: less memory
    model.attention = "auto"  # cudnn where it can, else xla
    model.label_smoothing = 0.1  # of the training loss; the validation loss has none
    # A replica's loss is its sum over real target tokens, divided by their number: "all": the mean
    # over replicas, so that each token weighs the same; "replica": the replica's own.
    model.loss_average = "all"
    return model


def default_data() -> ConfigDict:
    """A folder made by ``python -m decent_jax.data.prepare_translation``.

    ``config.batch_size`` counts the tokens of sources, and as many of targets, over all replicas.
    """
    data = ConfigDict()
    data.path = ""  # that folder; "numbers": numbers spelled out in English and German
    data.shapes = 16  # of batches, at most; each compiles once for every round
    data.prefetch = 4  # batches read ahead
    data.bleu_sentences = 200  # of the validation set, at every evaluation; 0: none
    data.beam = 4
    return data


def validate(config: ConfigDict) -> None:
    """Raises ConfigError for data that do not exist, or a shape that cannot be."""
    model, data = config.model, config.data
    if model.preset not in transformer.PRESETS:
        known = ", ".join(transformer.PRESETS)
        raise ConfigError(f"model.preset must be one of {known}, got {model.preset!r}")
    if model.loss_average not in AVERAGES:
        raise ConfigError(
            f"model.loss_average must be one of {', '.join(AVERAGES)}, got {model.loss_average!r}"
        )
    for name, least in (("shapes", 1), ("bleu_sentences", 0), ("beam", 1)):
        if data[name] < least:
            raise ConfigError(f"data.{name} must be at least {least}, got {data[name]}")
    if not 0 <= model.label_smoothing < 1:
        raise ConfigError(f"model.label_smoothing must be in [0, 1), got {model.label_smoothing}")
    if config.micro_batches != 1:
        raise ConfigError(
            "micro_batches must be 1 for translation, whose batches have several shapes; use a "
            f"smaller batch_size, got {config.micro_batches}"
        )
    if data.partition != "iid":
        raise ConfigError("data.partition must be 'iid' for translation: pairs have no labels")
    if not data.path:
        raise ConfigError(
            "data.path is empty: name a folder made by `python -m "
            f"decent_jax.data.prepare_translation`, or {NUMBERS!r}"
        )
    size = 1000
    if data.path != NUMBERS:
        try:
            size = TranslationPairs(data.path, "train").vocabulary.size
        except DataError as error:
            raise ConfigError(f"data.path: {error}") from None
    model_config(config, size)


def model_config(config: ConfigDict, vocab_size: int) -> transformer.TransformerConfig:
    """The model that ``config.model`` describes, for a vocabulary of so many subwords."""
    model = config.model
    preset = transformer.PRESETS[model.preset]
    try:
        return dataclasses.replace(
            preset,
            vocab_size=vocab_size,
            **{n: model[n] or getattr(preset, n) for n in ("layers", "heads", "width", "ff")},
            **{n: model[n] for n in ("norm", "dropout", "dtype", "remat", "attention")},
        )
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def make(config: ConfigDict, workdir: Path, announce) -> "Translation":
    """The task; builds the corpus of numbers in ``workdir`` where it is asked for.

    Raises:
      DataError: what is wrong with the data, as one sentence.
    """
    folder = Path(config.data.path)
    if config.data.path == NUMBERS:
        folder = Path(workdir) / "data"
        with announce("spelling out numbers"):
            number_words.build(folder)
    with announce(f"choosing the shapes of batches of {config.batch_size} tokens"):
        task = Translation(config, folder)
    _keep_vocabulary(task.vocabulary, workdir)
    return task


def _keep_vocabulary(vocabulary: subwords.Subwords, workdir: Path) -> None:
    """A run has its own copy, to translate with and to find out whether its data are others'."""
    if not (workdir / subwords.FILE).exists():
        vocabulary.save(workdir)
    elif subwords.load(workdir).sha256 != vocabulary.sha256:
        raise DataError(
            f"data.path: its vocabulary is not the one that the run in {workdir} began with; name "
            "the folder of that run, or take another --workdir"
        )


class Translation:
    """See `decent_jax.tasks.Task`; losses are nats a target token, the end counted.

    A batch is ``{"source": int32 (B, S), "target": int32 (B, T), "share": float32 (B,)}``, padded
    with 0; ``share`` is what a token of the row weighs in the loss, 0 of an empty row.
    """

    unit = "tokens"
    mixes_state = False

    def __init__(self, config: ConfigDict, folder: Path):
        train, val = (TranslationPairs(folder, split) for split in ("train", "val"))
        self.train_source = Source(train, config.data.shapes, config.model.loss_average)
        self.eval_source = Source(val, config.data.shapes)
        self.vocabulary = train.vocabulary
        self.languages = train.languages
        self.config = model_config(config, self.vocabulary.size)
        self.label_smoothing = config.model.label_smoothing
        self.translator = Translator(self.config, self.vocabulary, config.data.beam)
        blocks = self.train_source.train_blocks(config.num_replicas, config.batch_size, config.seed)
        self.blocks = blocks.pairs
        # Throughput and FLOPs are those of real tokens, of an average step.
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

    def load_params(self):
        return None

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

    def decay_mask(self, params):
        return transformer.decay_mask(params)

    def measure(self, block):
        """``data/padding_fraction``, of sources and targets as the model reads them."""
        sides = block["source"], block["target"][..., 1:]
        places = sum(side.size for side in sides)
        return {"data/padding_fraction": 1 - sum(np.count_nonzero(s) for s in sides) / places}

    def score(self, params):
        """``bleu`` of the first validation sentences."""
        if not self.some:
            return {}
        pairs = self.eval_source.pairs
        sources, references = (pairs.sentences(side)[: self.some] for side in (0, 1))
        return {"bleu": bleu(self.translator(jax.device_put(params), sources), references)[0]}

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
        """Scores of the test set, or of the validation set where there is no other."""
        pairs = self._test_pairs()
        sources, references = (pairs.sentences(side) for side in (0, 1))
        translations = self.translator(jax.device_put(params), sources, progress=True)
        score, signature = bleu(translations, references)
        result = {
            "split": pairs.split,
            "sentences": len(sources),
            "bleu": round(score, 2),
            "bleu_signature": signature,
        }
        found = meteor(translations, references, self.languages[1])
        if found is None:
            return result | {"meteor_needs": "python -m nltk.downloader wordnet"}
        return result | {"meteor": round(found[0], 4), "meteor_matches": found[1]}

    def demonstrate(self, params, model_state):
        """Some translations."""
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


class Source:
    """Pairs that cut their batches themselves, see `decent_jax.data.loader`.

    Args:
        pairs: of a split.
        shapes: of batches, at most.
        average: "all" or "replica", see `default_model`.
    """

    def __init__(self, pairs: TranslationPairs, shapes: int, average: str = "all"):
        self.pairs, self.shapes, self.average = pairs, shapes, average

    def __len__(self) -> int:
        return len(self.pairs)

    @functools.cache  # noqa: B019 (sources live as long as the run)
    def train_blocks(self, num_replicas: int, tokens: int, seed: int) -> "SharedBlocks":
        """Shuffled, without end."""
        blocks = PairBlocks(
            self.pairs, tokens=tokens, num_replicas=num_replicas, seed=seed, shapes=self.shapes
        )
        return SharedBlocks(blocks, self.average)

    @functools.cache  # noqa: B019
    def eval_blocks(self, num_replicas: int, tokens: int) -> PairBlocks:
        """Each pair once."""
        return PairBlocks(
            self.pairs,
            tokens=tokens,
            num_replicas=num_replicas,
            shapes=self.shapes,
            evaluation=True,
        )


class SharedBlocks:
    """`PairBlocks` with ``share`` in the place of ``weight``: what a token of a row weighs."""

    def __init__(self, pairs: PairBlocks, average: str):
        self.pairs, self.average, self.steps = pairs, average, pairs.steps

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        block = self.pairs[index]
        n = self.pairs.batches.num_replicas
        step, replica = divmod(index, n)
        counted = range(n) if self.average == "all" else [replica]
        tokens = sum(self._target_tokens(step, r) for r in counted) / len(counted)
        block["share"] = block.pop("weight") / np.float32(max(tokens, 1))
        return block

    def _target_tokens(self, step: int, replica: int) -> int:
        """Of a replica's real rows, the end counted."""
        rows = self.pairs.indices(step, replica)
        rows = rows[rows >= 0]
        return int(self.pairs.pairs.lengths[rows, 1].sum(dtype=np.int64)) + len(rows)
