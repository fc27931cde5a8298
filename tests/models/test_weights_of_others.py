"""Weights of others: what a ``config.json`` says is followed, or refused by name.

``tests/data/weights`` holds files that transformers saved, with its logits; ``make.py`` made them.
"""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny
from datafiles import DATA
from hypothesis import given
from hypothesis import strategies as st
from networks import assert_close
from refusals import refuses
from test_transformer_weights import SOURCE, TARGET_IN, saved

from decent_jax import tasks
from decent_jax.ground.errors import DataError
from decent_jax.ground.progress import announce
from decent_jax.models import decoders, hf_config, transformer, weights
from decent_jax.models.gpt2 import GPT2Config
from decent_jax.models.llama import LlamaConfig

pytestmark = pytest.mark.usefixtures("compile_once")
FOLDER = DATA / "weights"
SIZES = {"vocab_size": 24, "context": 16, "layers": 2, "width": 16, "dtype": "float32"}
LLAMA = LlamaConfig(**SIZES, heads=4, kv_heads=2, hidden=24)
GPT2 = GPT2Config(**SIZES, heads=2)
MODELS = {
    "gpt2": GPT2,
    "gpt2_untied": dataclasses.replace(GPT2, tied=False),
    "llama_2": dataclasses.replace(LLAMA, tied=False, rope_theta=1e4, norm_epsilon=1e-6),
    "llama_3": LLAMA,
}


def logits_of(config, params, tokens):
    return jax.jit(decoders.apply, static_argnums=0)(config, params, tokens)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    config = MODELS[name]
    params = weights.load_decoder(FOLDER / name / "model.safetensors", config)
    config = dataclasses.replace(config, remat=name == "llama_3")
    with np.load(FOLDER / name / "logits.npz") as wanted:
        assert_close(logits_of(config, params, wanted["tokens"]), wanted["logits"])


@pytest.fixture
def changed(tmp_path):
    """A function that copies a folder with its config.json or its tensors changed."""

    def change(name, said=None, tensors=None):
        folder = shutil.copytree(FOLDER / name, tmp_path / "weights", dirs_exist_ok=True)
        path = folder / "model.safetensors"
        beside = folder / "config.json"
        beside.unlink() if said is None else beside.write_text(
            json.dumps({k: v for k, v in (read(name) | said).items() if v != "absent"})
        )
        if tensors is not None:
            safetensors.numpy.save_file(tensors(safetensors.numpy.load_file(path)), path)
        return path

    return change


def read(name):
    return json.loads((FOLDER / name / "config.json").read_text())


LLAMA_3_ROPE = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("name", "said", "named"),
    [
        ("gpt2", {"activation_function": "gelu"}, ("activation_function", "gelu")),
        ("gpt2", {"activation_function": "relu"}, ("activation_function", "relu")),
        ("gpt2", {"scale_attn_weights": False}, ("scale_attn_weights",)),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx",)),
        ("gpt2", {"layer_norm_epsilon": 1e-6}, ("layer_norm_epsilon", "1e-06")),
        ("gpt2", {"n_head": 4}, ("n_head", "--config.model.heads=4")),
        ("gpt2", {"n_head": "absent"}, ("n_head", "--config.model.heads=12")),
        ("gpt2", {"n_layer": 3, "n_embd": 8}, ("model.layers=3", "model.width=8")),
        ("gpt2", {"n_inner": 48}, ("n_inner", "48")),
        ("gpt2", {"is_causal": False}, ("is_causal",)),
        ("gpt2", {"tie_word_embeddings": False}, ("--config.model.tied=False",)),
        ("gpt2", {"model_type": "gpt_neo"}, ("model_type", "gpt_neo", "gpt2")),
        ("gpt2", {"model_type": "absent"}, ("model_type", None)),
        ("gpt2", {"quantization_config": {"bits": 4}}, ("quantization_config",)),
        ("llama_3", {"model_type": "mistral"}, ("mistral", "llama")),
        ("llama_3", {"rope_parameters": LLAMA_3_ROPE}, ("rope_type", "llama3")),
        (
            "llama_3",
            {"rope_parameters": "absent", "rope_scaling": {"type": "linear", "factor": 2}},
            ("rope_type", "linear"),
        ),
        ("llama_3", {"rope_parameters": "absent"}, ("rope_theta", "model.rope_theta=10000.0")),
        (
            "llama_3",
            {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
            ("partial_rotary_factor",),
        ),
        ("llama_3", {"rms_norm_eps": 1e-6}, ("--config.model.norm_epsilon=1e-06",)),
        ("llama_3", {"num_attention_heads": 2, "head_dim": None}, ("--config.model.heads=2",)),
        ("llama_3", {"num_key_value_heads": "absent"}, ("--config.model.kv_heads=4",)),
        ("llama_3", {"head_dim": 8}, ("head_dim",)),
        ("llama_3", {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ("llama_3", {"attention_bias": True}, ("attention_bias",)),
        ("llama_3", {"sliding_window": 4096}, ("sliding_window",)),
        ("llama_3", {"logits_scaling": 8.0}, ("logits_scaling",)),
        ("llama_3", {"tie_word_embeddings": "absent"}, ("--config.model.tied=False",)),
        ("gpt2", {"rope_theta": 1e4}, ("rope_theta", "10000.0")),
        ("gpt2", {"num_key_value_heads": 1}, ("num_key_value_heads",)),
        ("llama_3", {"n_embd": 16}, ("n_embd",)),
        ("llama_3", {"is_causal": False}, ("is_causal",)),
        ("llama_3", {"rope_parameters": {"rope_theta": 5e5, "factor": 8.0}}, ("factor", "8.0")),
        (
            "llama_3",
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}, "rope_theta": 5e5},
            ("full_attention",),
        ),
    ],
)
def test_another_model_is_refused_by_name(changed, name, said, named):
    with refuses("config.json", *named):
        weights.load_decoder(changed(name, said), MODELS[name])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt2", {"activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.3, "n_inner": 64}),
        ("gpt2", {"torch_dtype": "float16", "eos_token_id": 7, "use_cache": False, "n_ctx": 16}),
        ("llama_3", {"hidden_act": "swish", "rope_theta": 5e5, "rope_parameters": "absent"}),
        ("llama_3", {"rope_theta": 5e5, "rope_scaling": None, "max_position_embeddings": 9}),
        ("llama_3", {"head_dim": None, "pretraining_tp": 2, "sliding_window": None}),
        ("gpt2", {"_num_labels": 1, "output_past": True, "tokenizer_class": "GPT2Tokenizer"}),
        ("gpt2", {"gradient_checkpointing": True, "output_attentions": True, "num_labels": 1}),
        ("gpt2", {"n_special": 0, "predict_special_tokens": True}),  # gpt2-medium
        ("llama_3", {"is_llama_config": True, "transformers.js_config": {}, "is_causal": True}),
        ("llama_3", {"transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True}),
        ("llama_3", {"max_length": 4096, "temperature": 0.6, "top_p": 0.9, "do_sample": True}),
    ],
)
def test_what_changes_nothing_is_accepted(changed, name, said):
    weights.load_decoder(changed(name, said), MODELS[name])


def with_nan(tensors):
    tensors["transformer.h.0.ln_1.weight"][3] = math.nan
    return tensors


HEAD, WTE = "lm_head.weight", "transformer.wte.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t | {WTE: np.tile(t[WTE], (2, 1))}, ("wte.weight", "model.vocab_size=48")),
        (with_nan, ("transformer.h.0.ln_1.weight", "finite")),
        (lambda t: t | {HEAD: 2 * t[WTE]}, (HEAD, "model.tied=False")),
        (lambda t: t | {"wte.weight": t[WTE]}, ("'wte.weight' twice",)),
        (lambda t: t | {WTE: np.int8(t[WTE])}, (WTE, "I8")),
        (lambda t: {f"model.{k}": x for k, x in t.items()}, ("has no tensor", "it has model.")),
    ],
)
def test_tensors_that_cannot_be_meant(changed, change, named):
    with refuses("model.safetensors", *named):
        weights.load_decoder(changed("gpt2", tensors=change), GPT2)


@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.0.mlp.c_fc.bias"])
@pytest.mark.parametrize(
    ("kind", "bits"),
    [("F4", 4), ("F6_E2M3", 6), ("F8_E4M3", 8), ("F8_E8M0", 8), ("U16", 16), ("C64", 64)],
)
def test_tensors_of_a_kind_that_numpy_does_not_know(changed, kind, bits, name):
    """A bias, too, which a model without biases reads to see whether it is 0."""
    path = changed("gpt2", {})
    tensors = safetensors.numpy.load_file(path)
    parts = {key: ("F32", x.shape, x.tobytes()) for key, x in tensors.items()}
    parts[name] = kind, tensors[name].shape, bytes(tensors[name].size * bits // 8)
    header, data = {}, b""
    for key, (dtype, shape, own) in parts.items():
        places = [len(data), len(data) + len(own)]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": places}
        data += own
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with refuses("model.safetensors", name, kind):
        weights.load_decoder(path, dataclasses.replace(GPT2, bias="wte" in name))


def test_names_of_a_compiled_module(changed):
    path = changed("gpt2", tensors=lambda t: {f"_orig_mod.{k}": x for k, x in t.items()})
    found = weights.load_decoder(path, GPT2)
    wanted = weights.load_decoder(FOLDER / "gpt2" / "model.safetensors", GPT2)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_run_names_all_settings_that_would_agree(tiny_data, tmp_path):
    path = str(FOLDER / "gpt2_untied" / "model.safetensors")
    config = tiny.config(tiny_data, model={"init_from": path})
    with refuses("model.init_from", "model.layers=2", "model.tied=False", error=DataError):
        tasks.find("language_modeling").make(config, tmp_path, announce)


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name in ("gpt2", "llama_3") for text in ("[]", "{", "null", "\xff")]
    + [("gpt2", {key: value}) for key in ("n_embd", "n_head", "model_type") for value in (None, [])]
    + [("gpt2", {"activation_function": ["gelu_new"]})]
    + [("llama_3", {"rope_parameters": value}) for value in ("linear", [1])]
    + [("llama_3", {"num_attention_heads": value}) for value in (0, None, "4")],
    ids=str,
)
def test_a_config_that_is_none(changed, name, text):
    """In one sentence that names the file, whatever kinds its values have."""
    path = changed(name, text if isinstance(text, dict) else {})
    if not isinstance(text, dict):
        path.with_name("config.json").write_bytes(text.encode("latin-1"))
    with refuses("config.json", error=(ValueError, DataError)):
        weights.load_decoder(path, MODELS[name])


def test_a_config_with_a_mark_of_its_encoding_is_read(changed):
    path = changed("gpt2", {})
    path.with_name("config.json").write_text(json.dumps(read("gpt2")), "utf-8-sig")
    weights.load_decoder(path, GPT2)


def test_a_config_that_a_link_misses_is_not_taken_for_none(changed):
    path = changed("gpt2", None)
    path.with_name("config.json").symlink_to(path.parent / "blob")
    with pytest.raises(OSError):
        weights.load_decoder(path, GPT2)


# --- Ties, shards, frequencies -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "table"), [("gpt2", WTE), ("llama_3", "model.embed_tokens.weight")]
)
def test_of_tied_tables_either_may_be_stored(changed, name, table):
    def renamed(tensors):
        return {HEAD if key == table else key: x for key, x in tensors.items()}

    found = weights.load_decoder(changed(name, {}, renamed), MODELS[name])
    wanted = weights.load_decoder(FOLDER / name / "model.safetensors", MODELS[name])
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_an_own_output_layer_is_loaded_whatever_config_json_says_of_ties(changed):
    """The refusal with tied=True names tied=False, which must not lead back."""
    path = changed("gpt2", {"tie_word_embeddings": True}, lambda t: t | {HEAD: 2 * t[WTE]})
    with refuses("model.tied=False"):
        weights.load_decoder(path, GPT2)
    found = weights.load_decoder(path, MODELS["gpt2_untied"])
    np.testing.assert_array_equal(found["lm_head"]["embedding"], 2 * found["wte"]["embedding"])


@pytest.fixture
def sharded(changed):
    """A function that spreads a file over two, and changes their tensors and the index."""

    def spread(change=lambda one, other, place: None):
        path = changed("gpt2", {})
        tensors = safetensors.numpy.load_file(path)
        names = sorted(tensors)
        shards = [{name: tensors[name] for name in names[i::2]} for i in (0, 1)]
        place = {name: f"{i}.safetensors" for i in (0, 1) for name in shards[i]}
        change(*shards, place)
        for i in (0, 1):
            safetensors.numpy.save_file(shards[i], path.with_name(f"{i}.safetensors"))
        index = path.with_name("model.safetensors.index.json")
        index.write_text(json.dumps({"weight_map": place}))
        return index

    return spread


def stale(one, other, place):
    """A later shard brings tensors of an earlier one anew, or the other way round."""
    other |= {name: 0 * x for name, x in list(one.items())[:3]}
    one |= {name: 0 * x for name, x in list(other.items())[:3] if name not in one}


def misplaced(one, other, place):
    place[min(one)] = "1.safetensors"


@pytest.mark.parametrize("change", [lambda *_: None, stale, misplaced])
def test_shards_hold_what_the_index_says(sharded, change):
    found = weights.load_decoder(sharded(change), GPT2)
    wanted = weights.load_decoder(FOLDER / "gpt2" / "model.safetensors", GPT2)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{"),
        *(f'{{"weight_map": {{"a": "{name}"}}}}' for name in ("../0.safetensors", "/a", "x/0", "")),
    ],
)
def test_an_index_that_is_none(sharded, text):
    index = sharded()
    index.write_text(text)
    with refuses("index.json", error=(ValueError, DataError)):
        weights.load_decoder(index, GPT2)


def test_a_shard_that_was_not_fetched_is_named(sharded):
    index = sharded()
    index.with_name("1.safetensors").unlink()
    with refuses("1.safetensors", "cannot be read"):
        weights.load_decoder(index, GPT2)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    "content", [LFS, b"PK\x03\x04" + bytes(90), b"GGUF" + bytes(90), b""], ids=list("lpg0")
)
def test_a_file_of_another_kind_says_how_it_begins(changed, content):
    path = changed("gpt2", {})
    path.write_bytes(content)
    with refuses("model.safetensors", repr(content[:4])[:-1]):
        weights.load_decoder(path, GPT2)


INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.mark.parametrize(("base", "scale"), [(1e4, 1.0), (1e6, 1.0), (1e4, 0.25)])
def test_rotary_frequencies_in_the_file_are_those_of_the_model(changed, base, scale):
    """Of a file without a config.json they are all that says how it was trained."""
    stored = (scale * base ** -(np.arange(2) / 2)).astype(np.float32)
    path = changed("llama_2", None, lambda t: t | {INV_FREQ: stored})
    if (base, scale) == (1e4, 1.0):
        weights.load_decoder(path, MODELS["llama_2"])
        return
    with refuses(INV_FREQ, "rope_theta"):
        weights.load_decoder(path, MODELS["llama_2"])


heads = st.sampled_from([1, 2, 4])
ours = st.one_of(
    st.builds(GPT2Config, tied=st.booleans(), layers=heads, heads=heads, width=st.just(16)),
    st.builds(
        LlamaConfig,
        tied=st.booleans(),
        heads=st.just(4),
        kv_heads=heads,
        rope_theta=st.floats(1e3, 1e7),
        norm_epsilon=st.floats(1e-9, 1e-3),
    ),
)


@given(ours)
def test_what_an_export_says_is_read_again(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("export") / "config.json"
    path.write_text(json.dumps(hf_config.describe(config)))
    hf_config.check(path, config)
    with refuses("tie_word_embeddings"):
        hf_config.check(path, dataclasses.replace(config, tied=not config.tied))


@pytest.mark.parametrize(("name", "norm"), [("marian", "post"), ("pegasus", "pre")])
def test_a_translator_is_the_one_that_transformers_read(tmp_path, name, norm):
    config, params, tensors = saved(tmp_path, norm)
    assert hf_config.describe(config) == read(name)
    with np.load(FOLDER / name / "export.npz") as wanted:
        assert tensors.keys() == set(wanted) - {"logits"}
        for key, x in tensors.items():
            np.testing.assert_array_equal(x[: len(wanted[key])], wanted[key])
        real = TARGET_IN != transformer.PAD
        logits = jax.jit(transformer.apply, static_argnums=0)(config, params, SOURCE, TARGET_IN)
        assert_close(logits[real], wanted["logits"][real])
