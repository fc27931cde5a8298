"""Cross-entropy against optax, in value, gradient and memory."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refuses

from decent_jax.models.pieces import cross_entropy


def random_case(dtype, shape=(3, 5, 17)):
    logits = 4 * jax.random.normal(jax.random.key(0), shape, dtype)
    return logits, jax.random.randint(jax.random.key(1), shape[:-1], 0, shape[-1])


def reference(logits, targets, eps):
    labels = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype), eps)
    return optax.softmax_cross_entropy(logits, labels)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float64", 1e-14)])
def test_equals_optax(dtype, rtol, eps):
    with jax.enable_x64(dtype == "float64"):
        logits, targets = random_case(dtype)
        weights = jax.random.normal(jax.random.key(2), targets.shape, dtype)

        @partial(jax.jit, static_argnums=1)
        def values(logits, loss):
            each, backward = jax.vjp(lambda x: loss(x, targets, eps), logits)
            return each, (weights * each).sum(), backward(weights)[0]

        results = (values(logits, loss) for loss in (cross_entropy, reference))
        for got, wanted in zip(*results, strict=True):
            assert got.dtype == dtype
            assert np.abs(got - wanted).max() / np.abs(wanted).max() < 3 * rtol


def value_and_grad(loss, *args, **options):
    """Of the loss ``loss(logits, *args)``, summed, at ``logits``; one program."""
    total = jax.value_and_grad(lambda x, *rest: loss(x, *rest, **options).sum())
    return jax.jit(total)(*args)


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_bfloat16_logits(eps):
    """The loss is that of the same numbers in float32; the gradient is it, rounded once."""
    logits, targets = random_case("bfloat16")
    got, grad = value_and_grad(cross_entropy, logits, targets, label_smoothing=eps)
    wide = logits.astype(jnp.float32)
    wanted, wide_grad = value_and_grad(reference, wide, targets, eps=eps)
    assert got.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    assert float(got) == pytest.approx(float(wanted), rel=1e-6)
    np.testing.assert_allclose(grad.astype(jnp.float32), wide_grad, rtol=2**-8, atol=1e-6)


def test_large_logits_stay_finite():
    logits = jnp.array([[1e4, 0.0, -1e4]], jnp.bfloat16)
    loss, grad = value_and_grad(cross_entropy, logits, jnp.array([1]))
    assert float(loss) == float(logits[0, 0])
    np.testing.assert_array_equal(grad.astype(jnp.float32), [[1.0, -1.0, 0.0]])


def test_target_beyond_the_classes_is_nan():
    assert np.isnan(cross_entropy(jnp.zeros((1, 4)), jnp.array([4]))[0])


def test_residuals_are_narrow():
    """Between forward and backward: the logits as they came, and float32 only per position."""
    logits, targets = random_case("bfloat16")
    _, backward = jax.vjp(lambda x: cross_entropy(x, targets, 0.1), logits)
    kept = [leaf for leaf in jax.tree.leaves(backward) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {(leaf.dtype.name, leaf.shape) for leaf in kept} == {
        ("bfloat16", logits.shape),
        ("float32", targets.shape),
    }


def test_compiled_gradient_writes_float32_logits_at_most_once(users_hlo):
    """Outside fusions, whose insides live in registers. The CPU's reductions want a float32 copy
    in the forward pass; the gradient must come from the narrow logits straight."""
    logits, targets = random_case("bfloat16", (256, 512))
    grad = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, targets, 0.1).mean()))
    hlo = grad.lower(logits).compile().as_text()
    entry = hlo[hlo.index("\nENTRY ") :]
    wide = re.findall(r"(%\S+) = f32\[256,512\]", entry)
    gradient = re.findall(r"= bf16\[256,512\]\S* fusion\((.*?)\)", entry)
    assert len(wide) <= 1 and len(gradient) == 1
    assert not set(wide) & set(gradient[0].split(", "))


def test_errors():
    with refuses((2,), (3,)):
        cross_entropy(jnp.zeros((3, 4)), jnp.zeros(2, jnp.int32))
