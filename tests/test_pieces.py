"""What GPT-2 and the Transformer share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decent_jax.models import gpt2, pieces, transformer


def test_dropout_keeps_the_mean():
    x = pieces.dropout(jnp.ones((200, 200)), 0.25, jax.random.key(0))
    np.testing.assert_allclose(np.unique(x), [0.0, 1 / 0.75], rtol=1e-6)
    assert float(x.mean()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    "model", [gpt2.PRESETS["small"], transformer.PRESETS["base"]], ids=["gpt2", "transformer"]
)
def test_attention_choice(model, monkeypatch):
    assert pieces.implementation(model) == "xla"  # on CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert pieces.implementation(model) == "cudnn"
    assert pieces.implementation(dataclasses.replace(model, dtype="float32")) == "xla"
    four_wide = dataclasses.replace(model, heads=model.width // 4)
    assert pieces.implementation(four_wide) == "xla"
    assert pieces.implementation(dataclasses.replace(model, attention="xla")) == "xla"
