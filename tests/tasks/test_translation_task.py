"""The translation task: what a token weighs, scores, a run from files to BLEU, bad input."""

import io
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mini_pairs
import numpy as np
import pytest
import safetensors.numpy
import small_runs
import tiny
from networks import drawn
from odd_text import PERFECT
from refusals import refused, refuses
from tiny import rows
from trees import assert_equal

from decent_jax import train
from decent_jax.commands import export, sample, translate
from decent_jax.data import loader
from decent_jax.data.translation import prepare_translation, subwords
from decent_jax.data.translation.pair_folder import TranslationPairs, pad_block
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.models import transformer
from decent_jax.tasks import translation as task_lib
from decent_jax.tasks import translator
from decent_jax.train import config as config_lib
from decent_jax.train import saved_model

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 240
EXPORTED = ("config.json", "generation_config.json", "tokenizer.json")

pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture(scope="module", autouse=True)
def one_width():
    """Sources of one width compile one beam search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translator, "_WIDTHS", (64,))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    files, out = mini_pairs.write_files(root / "files"), root / "prepared"
    prepare_translation.prepare(files, out, ("en", "de"), vocab_size=320, workers=1)
    return out


def config_of(path, **changes):
    """A Transformer of one layer."""
    model = {"preset": "tiny", "layers": 1, "width": 16, "heads": 2, "ff": 16, "dtype": "float32"}
    model = {f"model__{name}": value for name, value in model.items()}
    data = {"data__path": str(path), "data__shapes": 2, "data__bleu_sentences": 3, "data__beam": 2}
    sizes = {"batch_size": TOKENS, "steps": 2}
    return small_runs.config("translation", **sizes | model | data | changes)


def make_task(folder, **changes):
    return task_lib.Translation(config_of(folder, **changes), folder)


def test_what_a_token_weighs_and_how_much_is_padding(folder):
    """The mean over replicas of their losses is the mean over all real target tokens."""
    task, measured = make_task(folder), []
    blocks = task.train_source.train_blocks(2, TOKENS, 0)
    for step in range(blocks.steps):
        own = [blocks[2 * step + replica] for replica in range(2)]
        assert all(set(block) == {"source", "target", "share"} for block in own)
        assert own[0]["source"].shape == own[1]["source"].shape
        tokens = [np.count_nonzero(block["target"][:, 1:]) for block in own]
        for block in own:
            real = block["target"][:, 1] > 0
            np.testing.assert_allclose(block["share"], 2 / sum(tokens) * real, rtol=1e-6)
        stacked = {name: np.stack([block[name] for block in own]) for name in own[0]}
        measured.append(task.measure(stacked)["data/padding_fraction"])
    assert np.mean(measured) == pytest.approx(blocks.batches.padding_fraction, abs=0.1)
    assert all(0 <= share < 1 for share in measured)


def test_loss_of_a_known_batch(folder):
    """Label-smoothed cross-entropy in float64, over real tokens alone, each with its share."""
    task = make_task(folder, model__dropout=0.0, model__label_smoothing=0.2)
    block = task.train_source.train_blocks(2, TOKENS, 0)[3]
    params = drawn(transformer, task.config)

    @jax.jit
    def both(params):
        logits = transformer.apply(task.config, params, block["source"], block["target"][:, :-1])
        return task.loss(params, {}, block, jax.random.key(1)), jax.nn.log_softmax(logits)

    (loss, new_state), log_p = both(params)
    assert new_state == {}
    log_p = np.asarray(log_p, np.float64)
    total = 0.0
    for row, share in enumerate(block["share"]):
        for place, token in enumerate(block["target"][row, 1:]):
            if token:
                right, mean = log_p[row, place, token], log_p[row, place].mean()
                total -= float(share) * (0.8 * right + 0.2 * mean)
    assert float(loss) == pytest.approx(total, rel=1e-5)
    np.testing.assert_array_equal(block["share"] > 0, block["target"][:, 1] > 0)


def test_evaluation_counts_each_token_once(folder):
    """For 1 and 3 replicas the same sums, those of a plain loop over the pairs."""
    task = make_task(folder, data__shapes=1)
    params = drawn(transformer, task.config)
    pairs = task.eval_source.pairs
    # Padded to one length; test_transformer proves that it is not seen.
    block = pad_block(pairs, np.arange(len(pairs)), *(pairs.lengths.max(axis=0) + np.array([0, 2])))
    apply = jax.jit(transformer.apply, static_argnums=0)
    logits = apply(task.config, params, block["source"], block["target"][:, :-1])
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    loss = right = count = 0
    for row, (_, target) in zip(log_p, (pairs[i] for i in range(len(pairs))), strict=True):
        for place, token in enumerate([*target, 3]):
            loss -= row[place, token]
            right += row[place].argmax() == token
            count += 1
    evaluate = jax.jit(jax.vmap(task.evaluate, in_axes=(None, None, 0, 0)))
    for n in (1, 3):
        total = {"loss": 0.0, "accuracy": 0.0, "count": 0.0}
        source = task.eval_source
        with loader.eval_batches(source, num_replicas=n, batch_size=TOKENS * n) as batches:
            for block, weights in batches:
                assert weights.shape == block["source"].shape[:2]
                sums = evaluate(params, {}, block, weights)
                total = {name: total[name] + float(sums[name].sum()) for name in total}
        assert total["count"] == count
        assert total["loss"] == pytest.approx(loss, rel=1e-5)
        assert total["accuracy"] == right


def test_batches_seek_and_do_not_depend_on_who_reads(folder):
    source = make_task(folder).train_source
    options = {"seed": 0, "num_replicas": 2, "batch_size": TOKENS, "prefetch": 0}
    with loader.train_batches(source, **options) as batches:
        whole = [next(batches) for _ in range(12)]
    with loader.train_batches(source, start_step=9, **options) as batches:
        assert_equal(next(batches), whole[9])
    with loader.train_batches(source, replicas=[1], **options) as batches:
        own = next(batches)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[1]), own, whole[0])
    assert loader.steps_per_epoch(source, TOKENS, 2, 0) == source.train_blocks(2, TOKENS, 0).steps


# --- Scores -------------------------------------------------------------------------------------


def test_bleu_and_its_signature():
    references = ["the cat sat on the mat today", "there is a house in the city"]
    assert translator.bleu(references, references, "de")[0] == pytest.approx(100)
    score, signature = translator.bleu(["a dog", "nothing"], references, "de")
    assert score < 5 and "tok:13a" in signature and "version:" in signature


@pytest.mark.parametrize("language", PERFECT)
def test_a_perfect_translation_scores_all_points(language):
    """Whatever its signs, and without spaces too; a half of it scores less."""
    references = PERFECT[language]
    vocabulary = subwords.train({"some": 3, "words": 2}, 270)
    perfect = [vocabulary.decode(vocabulary.encode(text)) for text in references]
    assert translator.bleu(perfect, references, language)[0] == pytest.approx(100)
    halves = [text[: len(text) // 2] for text in perfect]
    assert 0 <= translator.bleu(halves, references, language)[0] < 90


@pytest.mark.parametrize("language", ["ja", "jpn", "ko_KR"])
def test_a_language_whose_package_is_missing_is_refused(language, folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.setitem(sys.modules, "mecab_ko", None)
    copy = shutil.copytree(folder, tmp_path / "data")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["languages"][1] = language
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with refuses("data.path", repr(language), "pip install", error=ConfigError):
        config_lib.validate(config_of(copy))


@pytest.mark.parametrize("name", ["val.en", "test.de", "test.ids"])
def test_a_folder_that_would_end_the_run_late_is_refused_at_the_start(name, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "data")
    data = (copy / name).read_bytes()
    for damaged in (data[:-1], data[:-2] + b"x\n"):
        (copy / name).write_bytes(damaged)
        with refused("data.path", str(copy)):
            config_lib.validate(config_of(copy))
    (copy / name).unlink()
    with refused("data.path", str(copy)):
        config_lib.validate(config_of(copy))


def test_validation_scores_translations_by_their_references(folder, monkeypatch):
    """BLEU takes points off for their shortness, and the other way round for other reasons."""
    task = make_task(folder)
    references = task.eval_source.pairs.sentences(1)[:3]
    halves = [" ".join(words.split()[: len(words.split()) // 2 + 2]) for words in references]
    monkeypatch.setattr(task, "translator", lambda params, sources, pause: halves)
    wanted = translator.bleu(halves, references, "de")[0]
    assert task.score({})["bleu"] == wanted != translator.bleu(references, halves, "de")[0]
    # The last ones are of the test set, as are what is shown and the scores at the end.
    pairs = TranslationPairs(folder, "test")
    sources, references = map(pairs.sentences, (0, 1))
    monkeypatch.setattr(task, "translator", lambda params, given, **_: given)
    shown = [
        f"source: {s}\nours: {s}\nreference: {r}" for s, r in zip(sources, references, strict=True)
    ]
    assert task.demonstrate({}, {}) == "\n".join(shown[:5])
    found = task.test({})
    assert (found["split"], found["sentences"]) == ("test", len(sources))
    assert found["bleu"] == round(translator.bleu(sources, references, "de")[0], 2)


def test_translations_stand_where_their_sentences_stood(folder, monkeypatch):
    """By a search that returns its sources: several batches, the longest sentences first."""
    task, asked = make_task(folder), []

    def search(config, params, source, **options):
        asked.append((source.shape, options))
        return SimpleNamespace(tokens=source[:, None])

    monkeypatch.setattr(translator.beam_search, "beam_search", search)
    sentences = [x for name in ("val", "test") for x in TranslationPairs(folder, name).sentences(0)]
    sentences[3], sentences[7] = "", " ".join(sentences[:9])
    encode, decode = task.vocabulary.encode, task.vocabulary.decode
    assert task.translator({}, sentences) == [decode(encode(x)) for x in sentences]
    options = {"beam": 2, "alpha": 0.6, "max_extra": 50}
    longest = len(encode(sentences[7]))
    shapes = [(32, -(-longest // 64) * 64), (32, 64)]
    assert asked == [(shape, options) for shape in shapes] and longest > 128


# --- A run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A run of 2 steps, and the same killed after the first and resumed.

    Without dropout, for which a third more would be compiled; test_checkpoint has it on.
    """
    root = tmp_path_factory.mktemp("run")
    tiny.run(config_of(folder, model__dropout=0.0, checkpoint__every=1), root / "whole")
    small_runs.killed_after(1, root / "whole", root / "parts")
    tiny.run(config_of(folder, model__dropout=0.0), root / "parts")
    return root


@pytest.mark.slow
def test_a_run_resumes_bit_by_bit(run):
    tiny.assert_same_state(run / "whole", run / "parts", 2)
    steps = [row for row in rows(run / "whole") if "train/loss" in row]
    assert all(0 <= row["data/padding_fraction"] < 1 for row in steps)
    summary = json.loads((run / "whole" / "summary.json").read_text())
    assert {"eval/loss", "eval/accuracy", "eval/bleu"} <= summary["final"].keys()
    assert 1 <= len(summary["shapes"]) <= 2 and summary["vocabulary"] == 320
    test = summary["test"]
    assert 0 <= test["bleu"] <= 100 and "tok:13a" in test["bleu_signature"]


@pytest.mark.slow
def test_translate_reads_lines_and_prints_as_many(run, folder, tmp_path, capsys, monkeypatch):
    sentences = TranslationPairs(folder, "val").sentences(0)[:3]
    text = tmp_path / "in.txt"
    text.write_text("\n".join([sentences[0], "", *sentences[1:]]) + "\n")
    arguments = ["--workdir", str(run / "whole"), "--beam", "2"]
    assert translate.main([*arguments, "--input", str(text)]) == 0
    printed = capsys.readouterr().out.split("\n")
    assert len(printed) == 5 and printed[1] == "" and printed[-1] == ""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    monkeypatch.setattr(translate, "_AT_A_TIME", 3)
    assert translate.main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.split("\n") == printed and "\n4 sentences, " in said.err
    for data, named in ((b"a\nb \xff c\n", "line 2"), ("a\n".encode("utf-16"), "line 1")):
        text.write_bytes(data)
        assert translate.main([*arguments, "--input", str(text)]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert named in said and str(text) in said
        for errors in ("strict", "surrogateescape"):  # as Python chooses by the locale
            stdin = io.TextIOWrapper(io.BytesIO(data), "utf-8", errors)
            monkeypatch.setattr("sys.stdin", stdin)
            assert translate.main(arguments) == 2
            said = capsys.readouterr().err.splitlines()[-1]
            assert named in said and "standard input" in said
    assert translate.main([*arguments, "--beam", "0"]) == 2
    assert "beam must be at least 1, got 0" in capsys.readouterr().err
    assert translate.main(["--workdir", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert sample.main(["--workdir", str(run / "whole")]) == 2
    refusal = "is a run of the task 'translation', which cannot continue a prompt"
    assert refusal in capsys.readouterr().err
    model = saved_model.load(run / "whole")
    assert model.step == 2 and model.vocabulary.size == 320


@pytest.mark.slow
def test_what_is_exported_is_the_model(run, tmp_path):
    path = export.export(run / "whole", tmp_path / "out" / "model.safetensors")
    model = saved_model.load(run / "whole")
    table = safetensors.numpy.load_file(path)["model.shared.weight"]
    np.testing.assert_array_equal(table[:, 0], model.params["shared"]["embedding"][:, 0])
    written = {name: json.loads(path.with_name(name).read_text()) for name in EXPORTED}
    assert written["config.json"]["architectures"] == ["MarianMTModel"]
    assert written["generation_config.json"]["decoder_start_token_id"] == transformer.START
    assert len(written["tokenizer.json"]["model"]["vocab"]) == model.vocabulary.size


@pytest.mark.slow
def test_the_vocabulary_of_another_run_is_refused(run, folder):
    """As if the data had been prepared anew, with other subwords, under a run that goes on."""
    subwords.train({"new": 30, "words": 20}, 280).save(run / "parts")
    with refuses("data.path", run / "parts", error=ConfigError):
        train.run(config_of(folder, model__dropout=0.0), run / "parts")


# --- Config -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.width", 15),
        ("micro_batches", 2),
        ("data.path", ""),
        ("data.path", "nowhere"),
        ("data.partition", "dirichlet"),
    ],
)
def test_config_errors(folder, field, value):
    with refused(field, value):
        config_lib.validate(config_of(folder, **{field.replace(".", "__"): value}))


def test_numbers_that_fit_no_pair(folder):
    lengths = TranslationPairs(folder, "train").lengths
    fewest = math.ceil(lengths.sum() + len(lengths) / 2) / len(lengths)
    with refuses("batch_size", f"at least {math.ceil(fewest)} ", "got 2", error=DataError):
        make_task(folder, batch_size=2)
    with refuses("12000 subwords", 1024, error=ConfigError):
        make_task(folder).translator(None, ["a short one", "word " * 3000])


def test_a_line_without_an_end_is_refused_by_the_name_of_its_file(folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config_of(folder).to_dict()))
    assert translate.main(["--workdir", str(tmp_path), "--input", "/dev/zero"]) == 2
    said = capsys.readouterr().err
    assert "/dev/zero" in said and said.count("\n") == 1


def test_flops_and_throughput_count_real_tokens(folder):
    task = make_task(folder)
    pairs = task.train_source.pairs
    real = pairs.lengths.sum(dtype=int) + len(pairs)  # the end of each target too
    steps = task.blocks.steps
    assert task.units_per_example * TOKENS * steps == pytest.approx(real)
    mean = pairs.lengths.mean(axis=0) + np.array([0, 1])
    a_pair = transformer.flops_per_pair(task.config, *mean)
    assert task.flops_per_example * TOKENS * steps == pytest.approx(a_pair * len(pairs))
    assert jnp.isfinite(task.flops_per_example)
