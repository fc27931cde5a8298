"""The export of a Transformer: its file read as Marian and Pegasus are, and its tokenizer."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from networks import assert_close, drawn
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


def read_as_published(tensors, config, source, target_in):
    """Marian's and Pegasus's forward pass in NumPy, by their names, of one pair without padding.

    Returns:
      Its logits, and the weights of the cross attention ``(layers, heads, T, S)``.
    """
    p = {name.removeprefix("model."): np.float64(value) for name, value in tensors.items()}
    table, heads = p["shared.weight"], config["encoder_attention_heads"]
    post = config["model_type"] == "marian"

    def linear(name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-5)
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    recorded = []

    def attend(name, x, memory, side=None):
        query, key, value = (
            np.stack(np.split(linear(f"{name}.{part}_proj", y), heads, -1))
            for part, y in (("q", x), ("k", memory), ("v", memory))
        )
        scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
        if side == "decoder":  # what has been written so far
            scores[:, *np.triu_indices(len(x), 1)] = -np.inf
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        recorded.extend([weights] * (side is None))
        return linear(f"{name}.out_proj", np.concatenate(list(weights @ value), -1))

    def feed_forward(name, x):
        return linear(f"{name}.fc2", np.maximum(linear(f"{name}.fc1", x), 0))

    def add(name, x, branch):
        return norm(name, x + branch(x)) if post else x + branch(norm(name, x))

    def stack(side, tokens, memory=None):
        x = table[tokens] * np.sqrt(config["d_model"])
        x = x + p[f"{side}.embed_positions.weight"][: len(tokens)]
        for i in range(config[f"{side}_layers"]):
            at = f"{side}.layers.{i}"
            of_self = f"{at}.self_attn"
            x = add(f"{of_self}_layer_norm", x, lambda h, n=of_self: attend(n, h, h, side))
            if memory is not None:
                of = f"{at}.encoder_attn"
                x = add(f"{of}_layer_norm", x, lambda h, n=of: attend(n, h, memory))
            x = add(f"{at}.final_layer_norm", x, lambda h, n=at: feed_forward(n, h))
        return x if post else norm(f"{side}.layer_norm", x)

    hidden = stack("decoder", target_in, stack("encoder", source))
    return hidden @ table.T + p["final_logits_bias"], np.array(recorded)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_file_gives_our_logits_and_attention(tmp_path, norm):
    """Sentence by sentence and without padding: so padding has no influence on ours."""
    config, params, tensors = saved(tmp_path, norm)
    hf = hf_config.describe(config)

    @jax.jit
    def both(params):
        args = config, params, SOURCE, TARGET_IN
        return transformer.apply(*args), transformer.attention_weights(*args)

    logits, looked = both(params)
    for b, (source, target_in) in enumerate(zip(SOURCE, TARGET_IN, strict=True)):
        source, target_in = source[source != PAD], target_in[target_in != PAD]
        wanted, wanted_weights = read_as_published(tensors, hf, source, target_in)
        assert_close(logits[b, : len(target_in)], wanted)
        assert_close(looked[b, :, :, : len(target_in), : len(source)], wanted_weights)
        assert not np.any(looked[b, ..., len(source) :])
    assert float(looked[0].std()) > 0.05  # a uniform attention would prove nothing
    del params["shared"]
    with refuses("'model.shared.weight'"):
        weights.save_transformer(tmp_path / "other", params, config, {})


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
