"""The export of a Transformer: its file read as Marian and Pegasus are, and its tokenizer."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from networks import drawn
from odd_text import ODD, SAME
from refusals import refuses

from decent_jax.data.translation import subwords
from decent_jax.models import hf_config, transformer, weights
from decent_jax.models.transformer import PAD, TransformerConfig

pytestmark = pytest.mark.usefixtures("compile_once")
TINY = TransformerConfig(
    vocab_size=20, width=16, heads=2, layers=2, ff=24, dropout=0.0, dtype="float32"
)
SOURCE = np.array([[5, 9, 4, 12, 3], [7, 6, 3, 0, 0], [8, 0, 0, 0, 0]], np.int32)
TARGET_IN = np.array([[2, 11, 4, 4], [2, 13, 0, 0], [2, 5, 19, 0]], np.int32)


def saved(tmp_path, norm):
    """(config, its parameters, the tensors of its file)."""
    config = dataclasses.replace(TINY, norm=norm)
    params = drawn(transformer, config)
    path = tmp_path / "model.safetensors"
    weights.save_transformer(path, params, config, {"step": "3"})
    return config, params, safetensors.numpy.load_file(path)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_transformers_loads_it_without_a_warning(tmp_path, norm):
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs torch and transformers")
    config, params, _ = saved(tmp_path, norm)
    hf = hf_config.describe(config)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    model, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(SOURCE),
            attention_mask=torch.tensor(SOURCE != PAD),
            decoder_input_ids=torch.tensor(TARGET_IN),
        ).logits
    ours = transformer.apply(config, params, SOURCE, TARGET_IN)
    real = TARGET_IN != PAD
    np.testing.assert_allclose(ours[real], logits.numpy()[real], atol=3e-5)


WORDS = {"new": 30, "words": 20, "Größe": 9, "über": 5, "newer": 4, "wordsworth": 3, "aaaa": 3}
VOCABULARY = subwords.train(WORDS, 300)
FILES = subwords.hf_files(VOCABULARY, 64)


@pytest.fixture(scope="module")
def read():
    """The tokenizer as the library `tokenizers` reads it."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    made = tokenizers.Tokenizer.from_str(FILES["tokenizer.json"].decode())
    made.encode_special_tokens = True  # as tokenizer_config.json says
    return made


@pytest.mark.parametrize(
    "text", [*SAME, "newwords aaaaaaa Größer ☃ <s></s>", "", "\u00b4\u00b4 ''"]
)
def test_the_tokenizer_makes_our_ids(read, text):
    assert read.encode(text).ids == VOCABULARY.encode(text).tolist()


@given(st.text(st.sampled_from([*ODD, *"newordsüa "])))
def test_any_text_has_our_ids_there_and_comes_back(read, text):
    ids = VOCABULARY.encode(text).tolist()
    assert read.encode(text).ids == ids
    assert read.decode([2, *ids, 3, 0]) == VOCABULARY.decode(ids)


def test_transformers_reads_the_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer(["new words </s>", "Größe"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    wanted = [VOCABULARY.encode(text).tolist() for text in ("new words </s>", "Größe")]
    pad = [0] * (len(wanted[0]) - len(wanted[1]))
    assert batch["input_ids"] == [wanted[0], wanted[1] + pad]
    assert tokenizer.decode([2, *wanted[0], 3], skip_special_tokens=True) == "new words </s>"
    assert tokenizer.eos_token_id == subwords.END


def test_attention_is_of_the_words_of_a_sentence_alone():
    """Its logits are those of transformers, see test_weights_of_others."""
    params = drawn(transformer, TINY)
    looked = jax.jit(transformer.attention_weights, static_argnums=0)(
        TINY, params, SOURCE, TARGET_IN
    )
    assert looked.shape == (3, TINY.layers, TINY.heads, 4, 5)
    np.testing.assert_allclose(looked.sum(-1), 1, rtol=1e-5)
    for b, length in enumerate((SOURCE != PAD).sum(axis=1)):
        assert not np.any(looked[b, ..., length:])
    assert float(looked[0].std()) > 0.05  # a uniform attention would prove nothing


def test_a_model_without_one_of_its_arrays_is_not_saved(tmp_path):
    params = drawn(transformer, TINY)
    del params["shared"]
    with refuses("'model.shared.weight'"):
        weights.save_transformer(tmp_path / "other", params, TINY, {})
