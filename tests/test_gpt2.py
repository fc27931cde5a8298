"""GPT-2: the model against itself, under every transform, and against published counts."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from decent_jax.models import gpt2
from decent_jax.models.losses import cross_entropy

TINY = gpt2.GPT2Config(vocab_size=40, context=16, layers=2, heads=2, width=16, dtype="float32")
N = 8
pytestmark = pytest.mark.usefixtures("compile_once")
apply = jax.jit(gpt2.apply, static_argnums=0)
init = jax.jit(gpt2.init, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    return init(TINY, jax.random.key(0))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, 16), 0, TINY.vocab_size)


def loss_fn(config, params, tokens, rng=None):
    logits = gpt2.apply(config, params, tokens, rng)
    return cross_entropy(logits[:, :-1], tokens[:, 1:]).mean()


def assert_close(got, wanted, rtol=1e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.max(np.abs(g - w)) <= rtol * np.max(np.abs(w))


@pytest.mark.parametrize(
    ("name", "changes", "count"),
    [
        ("small", {}, 124439808),
        ("medium", {}, 354823168),
        ("large", {}, 774030080),
        pytest.param("xl", {}, 1557611200, marks=pytest.mark.slow),
        ("small", {"vocab_size": 50304, "bias": False}, 124373760),
    ],
)
def test_published_parameter_counts(name, changes, count):
    assert gpt2.num_params(dataclasses.replace(gpt2.PRESETS[name], **changes)) == count


def test_the_count_is_that_of_the_initial_parameters(params):
    leaves = jax.tree.leaves(params)
    assert gpt2.num_params(TINY) == sum(leaf.size for leaf in leaves)
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)


def test_init_scales():
    config = dataclasses.replace(TINY, width=64, layers=8)
    params = init(config, jax.random.key(3))
    block = params["h"]["7"]
    assert type(params["h"]) is dict
    for kernel, std in [
        (params["wte"]["embedding"], 0.02),
        (params["wpe"]["embedding"], 0.02),
        (block["attn"]["c_attn"]["kernel"], 0.02),
        (block["mlp"]["c_fc"]["kernel"], 0.02),
        (block["attn"]["c_proj"]["kernel"], 0.02 / 4),
        (block["mlp"]["c_proj"]["kernel"], 0.02 / 4),
    ]:
        assert float(kernel.std()) == pytest.approx(std, rel=0.08)
    assert float(jnp.abs(block["mlp"]["c_fc"]["bias"]).max()) == 0
    assert float(block["ln_1"]["scale"].min()) == 1


def test_no_biases_anywhere():
    params = jax.eval_shape(
        partial(gpt2.init, dataclasses.replace(TINY, bias=False)), jax.random.key(0)
    )
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert names == {"embedding", "kernel", "scale"}


def test_decay_mask_is_by_kind(params):
    mask = gpt2.decay_mask(params)
    stacked = gpt2.decay_mask(jax.tree.map(lambda x: jnp.stack([x, x]), params))
    assert mask == stacked == jax.tree.map(lambda x: x.ndim == 2, params)


def test_flops_per_token():
    config = gpt2.PRESETS["small"]
    wanted = 6 * (124439808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert gpt2.flops_per_token(config, 1024) == wanted


# --- Behaviour ----------------------------------------------------------------------------------


def test_shapes_and_dtypes(params, tokens):
    for dtype in ("bfloat16", "float32"):
        logits = apply(dataclasses.replace(TINY, dtype=dtype), params, tokens)
        assert logits.shape == (2, 16, 40) and logits.dtype == dtype


def test_causal(params, tokens):
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % TINY.vocab_size)
    before, after = (apply(TINY, params, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert bool((jnp.abs(before[:, 9:] - after[:, 9:]).max(-1) > 0).all())


def test_bfloat16_is_close_to_float32(params, tokens):
    half = dataclasses.replace(TINY, dtype="bfloat16")
    loss = jax.jit(jax.value_and_grad(loss_fn, argnums=1), static_argnums=0)
    (wide_loss, wide), (half_loss, narrow) = (loss(c, params, tokens) for c in (TINY, half))
    assert float(half_loss) == pytest.approx(float(wide_loss), rel=1e-3)
    assert_close(narrow, wide, rtol=0.05)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(narrow))


def test_gradient_of_a_frequent_token_is_summed_in_float32(params):
    """2048 times one token: a bfloat16 sum of equal terms would stop growing at 256 of them."""
    half = dataclasses.replace(TINY, dtype="bfloat16")
    tokens = jnp.full((128, 16), 7)

    def embedded(params):
        model = gpt2.merge(half, params)
        return model.embed(tokens, jnp.arange(16)).astype(jnp.float32).sum()

    grads = jax.grad(embedded)(params)
    np.testing.assert_array_equal(grads["wte"]["embedding"][7], 2048.0)
    np.testing.assert_array_equal(grads["wpe"]["embedding"], 128.0)


def test_remat_gives_the_same_gradients(params, tokens):
    grad = jax.jit(jax.value_and_grad(loss_fn, argnums=1), static_argnums=0)
    rng = jax.random.key(5)
    results = [
        grad(dataclasses.replace(TINY, dropout=0.3, remat=remat), params, tokens, rng)
        for remat in (False, True)
    ]
    assert_close(*results)
    config = dataclasses.replace(TINY, remat=True)
    jaxpr = str(jax.make_jaxpr(lambda p: gpt2.apply(config, p, tokens))(params))
    assert len(re.findall(r"= (remat|checkpoint)", jaxpr)) == TINY.layers


def test_dropout(params, tokens):
    config = dataclasses.replace(TINY, dropout=0.2)
    plain = apply(TINY, params, tokens)
    a, a_again, b = (apply(config, params, tokens, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(a, a_again)
    assert float(jnp.abs(a - b).max()) > 0
    np.testing.assert_array_equal(apply(config, params, tokens), plain)  # no key: evaluation
    np.testing.assert_array_equal(apply(TINY, params, tokens, jax.random.key(1)), plain)


def test_dropout_attention_is_the_same_attention(params, tokens):
    """At a vanishing rate nothing is dropped, and the explicit form must equal the fused one."""
    config = dataclasses.replace(TINY, dropout=1e-9)
    got = apply(config, params, tokens, jax.random.key(0))
    assert_close(got, apply(TINY, params, tokens))


def test_loss_decreases(params, tokens):
    tx = optax.adam(3e-2)

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(partial(loss_fn, TINY))(params, tokens)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    losses = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=60)[1])(params)
    assert float(losses[0]) == pytest.approx(np.log(40), rel=0.03)  # untrained: uniform
    assert float(losses[-1]) < 0.1


# --- Transforms ---------------------------------------------------------------------------------


ONE = dataclasses.replace(TINY, layers=1)  # compiles faster


@pytest.fixture(scope="module")
def replicated():
    keys = jax.random.split(jax.random.key(2), N)
    stacked = jax.jit(jax.vmap(partial(gpt2.init, ONE)))(keys)
    tokens = jax.random.randint(jax.random.key(3), (N, 2, 12), 0, ONE.vocab_size)
    return stacked, tokens, jax.random.split(jax.random.key(4), N)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"dropout": 0.2, "remat": True}, marks=pytest.mark.slow)]
)
def test_transforms_agree(replicated, mesh8, changes):
    """A loop over replicas == vmap == lax.map == shard_map over 8 devices, loss and gradients."""
    config = dataclasses.replace(ONE, **changes)
    grad = jax.value_and_grad(partial(loss_fn, config))
    pick = jax.jit(lambda i: grad(*jax.tree.map(lambda x: x[i], replicated)))
    loop = jax.tree.map(lambda *x: jnp.stack(x), *[pick(i) for i in range(N)])
    vmapped = jax.jit(jax.vmap(grad))(*replicated)
    mapped = jax.jit(lambda args: jax.lax.map(lambda a: grad(*a), args))(replicated)

    def per_device(*args):
        local = jax.tree.map(lambda x: x[0], args)
        return jax.tree.map(lambda x: x[None], grad(*local))

    sharded = jax.jit(
        jax.shard_map(per_device, mesh=mesh8, in_specs=P("replica"), out_specs=P("replica"))
    )(*replicated)
    for other in (vmapped, mapped, jax.device_get(sharded)):
        assert_close(other, loop)


def test_vmapped_init_is_init_of_each_key(replicated):
    one = init(ONE, jax.random.split(jax.random.key(2), N)[3])
    assert_close(jax.tree.map(lambda x: x[3], replicated[0]), one, rtol=1e-6)


# --- Errors -------------------------------------------------------------------------------------


def test_longer_than_the_context(params):
    with pytest.raises(ValueError, match="17 tokens do not fit the context of 16"):
        gpt2.apply(TINY, params, jnp.zeros((1, 17), jnp.int32))


def test_tokens_must_be_a_matrix(params):
    with pytest.raises(ValueError, match=r"\(batch, time\), got \(5,\)"):
        gpt2.apply(TINY, params, jnp.zeros(5, jnp.int32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 30, "heads": 4}, "width 30 is not divisible by heads 4"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dtype": "int8"}, "dtype must be one of .*, got 'int8'"),
        ({"attention": "flash"}, "attention must be one of auto, xla, cudnn, got 'flash'"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        gpt2.GPT2Config(**changes)
