"""Our GPT-2 against Hugging Face's, and weights of decoders to and from files.

``data/golden/gpt2_tiny.npz`` was made by torch 2.13.0 and transformers 5.23.0, in float64, stored
as float32::

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=32, n_layer=2, n_head=2,
        n_embd=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).double()
    # every parameter += 0.1 * randn_like, rounded to float32
    tokens, targets = randint(0, 96, (2, 32)), randint(0, 96, (2, 32))
    logits = model(tokens).logits
    loss = cross_entropy(logits, targets)  # mean; loss.backward() for the grad/... arrays

with ``param/NAME`` for every named parameter and ``grad/NAME`` for some.
"""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from datafiles import DATA
from networks import drawn
from refusals import refuses
from trees import assert_equal

from decent_jax.models import decoders, gpt2, llama, weights
from decent_jax.models.pieces import cross_entropy

TINY = gpt2.GPT2Config(vocab_size=96, context=32, layers=2, heads=2, width=32, dtype="float32")
NO_BIAS = dataclasses.replace(TINY, bias=False, dropout=0.1, remat=True)
LLAMA = llama.LlamaConfig(
    vocab_size=96, context=32, layers=2, heads=4, kv_heads=2, width=32, hidden=24, dtype="float32"
)
pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture(scope="module")
def golden():
    with np.load(DATA / "golden/gpt2_tiny.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def published(golden):
    """Tensors as a published file has them: names without prefix, masks among them."""
    tensors = {
        name.removeprefix("param/transformer."): value
        for name, value in golden.items()
        if name.startswith("param/")
    }
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = np.tri(32, dtype=np.float32)[None, None]
        tensors[f"h.{layer}.attn.masked_bias"] = np.float32([-1e4])
    return tensors


@pytest.fixture
def file(published, tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(published, path)
    return path


def relative_error(got, wanted):
    return float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))


def test_equals_transformers(golden, file):
    params = weights.load_decoder(file, TINY)

    def loss_fn(params):
        logits = decoders.apply(TINY, params, golden["tokens"])
        return cross_entropy(logits, jnp.asarray(golden["targets"])).mean(), logits

    (loss, logits), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    assert relative_error(logits, golden["logits"]) < 1e-5
    assert float(loss) == pytest.approx(float(golden["loss"]), rel=1e-6)
    block = grads["h"]["0"]["attn"], grads["h"]["1"]
    for name, got in {
        "wte.weight": grads["wte"]["embedding"],
        "wpe.weight": grads["wpe"]["embedding"],
        "h.0.attn.c_attn.weight": block[0]["c_attn"]["kernel"],
        "h.0.attn.c_proj.bias": block[0]["c_proj"]["bias"],
        "h.1.mlp.c_fc.weight": block[1]["mlp"]["c_fc"]["kernel"],
        "h.1.ln_2.weight": block[1]["ln_2"]["scale"],
        "ln_f.bias": grads["ln_f"]["bias"],
    }.items():
        assert relative_error(got, golden[f"grad/{name}"]) < 1e-5, name


def test_prefix_and_head_are_accepted(published, file, tmp_path):
    tensors = {f"transformer.{name}": value for name, value in published.items()}
    tensors["lm_head.weight"] = published["wte.weight"]
    prefixed = tmp_path / "prefixed.safetensors"
    safetensors.numpy.save_file(tensors, prefixed)
    params = [weights.load_decoder(path, TINY) for path in (file, prefixed)]
    assert_equal(*params)


def test_half_precision_files_load(published, tmp_path):
    path = tmp_path / "half.safetensors"
    tensors = {k: np.asarray(jnp.asarray(v, jnp.bfloat16)) for k, v in published.items()}
    safetensors.numpy.save_file(tensors, path)
    params = weights.load_decoder(path, TINY)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert relative_error(params["wte"]["embedding"], published["wte.weight"]) < 2**-8


def test_padded_vocabulary(golden, published, file):
    """Padding tokens take less than an equal share, also where all other logits are far below 0,
    as they are in the published models."""
    published = {**published, "wte.weight": published["wte.weight"] - 5 * np.ones((96, 32), "f")}
    published["ln_f.bias"] = published["ln_f.bias"] + 1  # every logit falls by 5 * 32 or so
    safetensors.numpy.save_file(published, file)
    losses, embeddings = [], []
    for vocab_size in (96, 128):
        config = dataclasses.replace(TINY, vocab_size=vocab_size)
        params = weights.load_decoder(file, config)
        logits = jax.jit(decoders.apply, static_argnums=0)(config, params, golden["tokens"])
        losses.append(cross_entropy(logits, jnp.asarray(golden["targets"])).mean())
        embeddings.append(params["wte"]["embedding"])
    assert logits.max() < -50
    assert 0 < losses[1] - losses[0] <= np.log(128 / 96)
    assert embeddings[1].shape == (128, 32)
    np.testing.assert_array_equal(embeddings[1][:96], embeddings[0])


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (NO_BIAS, {"h.1.mlp.c_proj.weight": [128, 32], "ln_f.bias": [32]}),
        (dataclasses.replace(TINY, tied=False), {"transformer.ln_f.bias": [32]}),
        (LLAMA, {"model.layers.1.mlp.down_proj.weight": [32, 24]}),
        (dataclasses.replace(LLAMA, tied=False), {"lm_head.weight": [96, 32]}),
    ],
)
def test_round_trip(tmp_path, config, shapes):
    params = drawn(decoders, config)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"an older file")
    weights.save_decoder(path, params, config, {"step": "7"})
    again = weights.load_decoder(path, config)
    assert_equal(again, params)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    beside = tmp_path / "model.safetensors.index.json"
    beside.write_text(json.dumps({"weight_map": {"anything": "model.safetensors"}}))
    assert path.stat().st_mode == beside.stat().st_mode  # readable by whom the umask lets
    again = weights.load_decoder(beside, config)
    assert_equal(again, params)
    with safetensors.safe_open(path, framework="numpy") as stored:
        about = stored.metadata()
        assert about["step"] == "7" and about["format"] == "pt"
        # `transformers` wants all biases of a GPT-2, and a Llama's matrices transposed.
        assert {name: stored.get_slice(name).get_shape() for name in shapes} == shapes


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"an older file")

    def full(file):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with refuses("disk full", error=OSError):
        weights.save_decoder(path, drawn(decoders, TINY), TINY, {})
    assert path.read_bytes() == b"an older file"
    assert list(tmp_path.iterdir()) == [path]


ATTENTION, EXTRA = "h.0.attn.c_attn.weight", "h.2.ln_1.weight"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"h.1.ln_2.bias": None}, ("h.1.ln_2.bias",)),
        ({ATTENTION: np.zeros((96, 32), np.float32)}, (ATTENTION, (96, 32), (32, 96))),
        ({EXTRA: np.zeros(32, np.float32)}, (EXTRA,)),
        ({"wte.weight": np.zeros((97, 32), np.float32)}, ("wte.weight", (97, 32), (96, 32))),
    ],
)
def test_wrong_files_are_named(published, tmp_path, changes, named):
    tensors = {name: x for name, x in (published | changes).items() if x is not None}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path)
    with refuses(path, *named):
        weights.load_decoder(path, TINY)


def test_save_refuses_stacked_parameters(tmp_path):
    params = jax.tree.map(lambda x: x[None], drawn(decoders, TINY))
    with refuses("h.0.attn.c_attn.bias", (1, 96)):
        weights.save_decoder(tmp_path / "x.safetensors", params, TINY, {})
