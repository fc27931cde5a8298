"""The Llama decoder: against formulas and `transformers` on random weights, and a run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from networks import count_of, drawn
from refusals import refused
from trees import assert_equal

from decent_jax import tasks
from decent_jax.ground.progress import announce
from decent_jax.models import decoders, hf_config, llama, weights
from decent_jax.models.pieces import cross_entropy
from decent_jax.train import config as config_lib
from decent_jax.train import saved_model

pytestmark = pytest.mark.usefixtures("compile_once")
TINY = llama.LlamaConfig(
    vocab_size=37,
    context=12,
    layers=2,
    heads=4,
    kv_heads=2,
    width=16,
    hidden=24,
    rope_theta=100.0,
    dtype="float32",
    init_std=0.3,
)
TOKENS = np.random.default_rng(0).integers(0, 37, (2, 12))


def llama_config(data, **changes):
    shape = {"layers": 1, "heads": 4, "kv_heads": 2, "hidden": 24}
    model = {"preset": "llama_125m", "dropout": 0.0, **shape}
    return tiny.config(data, model=model, schedule="complete", steps=2, log={"every": 2}, **changes)


@pytest.mark.slow
def test_a_run_trains_is_exported_and_begins_another(tiny_data, tmp_path):
    tiny.run(llama_config(tiny_data), tmp_path / "run")
    run = saved_model.TrainedRun(tmp_path / "run")
    out = tmp_path / "model.safetensors"
    hf = json.loads(run.call("export", "be exported", out))
    assert hf["model_type"] == "llama" and hf["num_key_value_heads"] == 2
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert set(generation.values()) == {hf["eos_token_id"]} and "pad_token_id" in generation
    model = saved_model.load(tmp_path / "run")
    assert model.config.hidden == 24
    config = llama_config(tiny_data)
    config.model.init_from = str(out)
    task = tasks.find("language_modeling").make(config, tmp_path, announce)
    assert_equal(task.load_params(), model.params)
    batch = jnp.asarray(TOKENS[:, :9])
    loss, _ = jax.jit(task.loss)(model.params, {}, batch, jax.random.key(0))
    assert np.isfinite(loss)


@pytest.mark.parametrize(
    ("field", "model"),
    [
        ("model.dropout", {"preset": "llama_1b", "dropout": 0.1}),
        ("model.hidden", {"preset": "small", "dropout": 0.0, "hidden": 9}),
        ("model.width", {"preset": "llama_1b", "dropout": 0.0, "heads": 3}),
        ("model.heads", {"preset": "llama_1b", "dropout": 0.0, "kv_heads": 3}),
        ("model.init_std", {"preset": "llama_1b", "dropout": 0.0, "init_std": 0.0}),
        ("model.preset", {"preset": "llama", "dropout": 0.0}),
    ],
)
def test_models_that_a_config_cannot_have(tiny_data, field, model):
    with refused(field):
        config_lib.validate(tiny.config(tiny_data, model=model))


def test_presets_are_the_published_shapes():
    sizes = {name: count_of(decoders, config) for name, config in llama.PRESETS.items()}
    assert sizes["llama_1b"] == 1_235_814_400  # Llama 3.2 1B
    assert sizes["llama_3b"] == 3_212_749_824  # Llama 3.2 3B
    assert sizes["llama_8b"] == 8_030_261_248  # Llama 3 8B
    tied, own = (dataclasses.replace(TINY, tied=tied) for tied in (True, False))
    assert decoders.flops_per_token(tied, 8) == decoders.flops_per_token(own, 8)


def test_logits_and_loss_are_those_of_transformers(tmp_path):
    """And `AutoModelForCausalLM` reads the export without a warning."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs torch and transformers")
    for tied in (True, False):
        config = dataclasses.replace(TINY, tied=tied)
        params = drawn(decoders, config)
        weights.save_decoder(tmp_path / "model.safetensors", params, config, {})
        (tmp_path / "config.json").write_text(json.dumps(hf_config.describe(config)))
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
        assert not any(report.values()), report
        tokens = torch.tensor(TOKENS)
        with torch.no_grad():
            wanted = model(tokens, labels=tokens)
        logits = decoders.apply(config, params, jnp.asarray(TOKENS))
        np.testing.assert_allclose(logits, wanted.logits.numpy(), atol=3e-5)
        loss = cross_entropy(logits[:, :-1], jnp.asarray(TOKENS[:, 1:])).mean()
        assert float(loss) == pytest.approx(float(wanted.loss), abs=2e-6)
