"""Any optimizer of optax inside `decentralized`: it mixes, or is refused in a sentence."""

import inspect
import itertools
import warnings

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refuses

from decent_jax import optim, replicas, topology

N = 4
RING = topology.make("bidirectional_ring", N)
NEEDS = {"noise_multiplier": 0.0, "seed": 0, "key": 0, "base_optimizer": optax.sgd(0.01)}


def optimizers():
    """Of optax and optax.contrib, those that take a learning rate, by name."""
    found = {}
    for module in (optax, optax.contrib):
        for name, make in inspect.getmembers(module, inspect.isfunction):
            takes = inspect.signature(make).parameters
            if "learning_rate" not in takes or name.startswith(("_", "scale_by_")):
                continue
            required = [p.name for p in takes.values() if p.default is p.empty]
            given = {key: NEEDS.get(key, 1.0) for key in required} | {"learning_rate": 0.01}
            with warnings.catch_warnings(action="ignore"):  # that a key will be needed one day
                found[name] = make(**given)
    return found


def start():
    """Parameters whose gradient is zero, and parameters that each replica draws to a target."""
    x = np.random.default_rng(0).normal(size=(N, 3))
    return {"still": jnp.asarray(3 * x, jnp.float32), "own": jnp.zeros((N, 2, 2))}


TARGETS = jnp.array([0.0, 1.0, 2.0, 5.0])


def loss(x, target):
    return 0.5 * jnp.square(x["own"] - target).sum()


def run(txs, steps):
    """Parameters and state after so many steps of each, in one program."""
    tx = harness.together(txs)

    def step(carry, _):
        def own(xs, state, target):
            updates, after = {}, {}
            for key, x in xs.items():
                value, grads = jax.value_and_grad(loss)(x, target)
                updates[key], after[key] = txs[key].update(
                    grads, state[key], x, round=0, value=value
                )
            return optim.apply_updates(xs, updates), after

        return jax.vmap(own, axis_name="replica")(*carry, TARGETS), None

    @jax.jit
    def all_steps(x):
        return jax.lax.scan(step, (x, jax.vmap(tx.init)(x)), length=steps)[0]

    return all_steps(dict.fromkeys(txs, start()))


def test_an_optimizer_mixes_or_is_refused():
    """Zero gradients bring replicas to their mean; with targets of their own they stay together.

    In both orders in turn, of which test_methods has the recursions.
    """
    accepted, refused = {}, {}
    for (name, inner), combine in zip(
        optimizers().items(), itertools.cycle(["awc", "atc"]), strict=False
    ):
        tx = optim.decentralized(inner, RING, combine)
        try:
            x = jax.tree.map(lambda x: x[0], start())
            state = jax.eval_shape(tx.init, x)
            jax.eval_shape(lambda x, s, i=inner: i.update(x, s.inner, x, value=0.0), x, state)
            accepted[name] = tx
        except (TypeError, ValueError) as error:
            refused[name] = str(error)
    assert {"adamw", "muon", "noisy_sgd", "dog", "lamb"} <= set(accepted)
    assert {"cocob", "madgrad", "schedule_free_sgd", "prodigy", "dadapt_adamw", "rprop"} <= set(
        refused
    )
    assert set(refused) - {"lbfgs", "sophia", "dpsgd"} == {
        name for name, why in refused.items() if "local optimizer" in why
    }
    x, _ = run(accepted, 300)
    mean = start()["still"].mean(0, keepdims=True)
    for name, found in x.items():
        noise = 0.1 if name in ("noisy_sgd", "dpsgd") else 0.01
        scale = 0.8 if name in ("fromage", "lion", "adamaxw", "adamw", "nadamw") else 1.0
        apart = np.abs(found["still"] - found["still"].mean(0, keepdims=True)).max()
        assert apart < noise, (name, apart)
        far = np.abs(found["still"] - mean).max() / np.abs(mean).max()
        assert far < 1 - scale + noise, (name, far)
    spread = {name: np.ptp(np.asarray(found["own"]), axis=0).max() for name, found in x.items()}
    assert not {name: far for name, far in spread.items() if far > 1.5}  # of the targets 5


def test_an_optimizer_computes_in_float32_for_narrow_parameters():
    """A rate of 0.999 is 1 in bfloat16, and a second moment would never decay."""
    x = jax.tree.map(lambda x: x[0].astype("bfloat16"), start())
    for name, inner in optimizers().items():
        try:
            state = jax.eval_shape(optim.decentralized(inner, RING).init, x)
        except (TypeError, ValueError):
            continue  # refused above
        floats = [s for s in jax.tree.leaves(state) if jnp.issubdtype(s.dtype, jnp.floating)]
        assert all(s.dtype == jnp.float32 for s in floats), name
    tx = optim.decentralized(optax.adam(0.01), RING)
    state, large = tx.init(x), jax.tree.map(jnp.ones_like, x)
    step = jax.jit(lambda state, grads: tx.update(grads, state, x, round=None, replica=0)[1])
    for grads in [large, *[jax.tree.map(jnp.zeros_like, x)] * 999]:
        state = step(state, grads)
    np.testing.assert_allclose(state.inner[0].nu["own"], 0.001 * 0.999**999, rtol=1e-3)


def sgd_from(start, first):
    """Gradient descent on a copy of the parameters, to which it sets them."""

    def update(grads, state, params):
        count, kept = state
        kept = jax.tree.map(lambda k, x: first(count, k, x), kept, params)
        after = jax.tree.map(lambda k, g: k - 0.1 * g, kept, grads)
        return jax.tree.map(jnp.subtract, after, params), (count + 1, after)

    return optax.GradientTransformation(lambda x: (jnp.int32(0), jax.tree.map(start, x)), update)


def kept(count, k, x):
    return k


SETS = {
    "a sum": sgd_from(lambda x: x + 0.0, kept),
    "at first": sgd_from(jnp.zeros_like, lambda t, k, x: jnp.where(t == 0, x, k)),
    "rounded": sgd_from(lambda x: x.astype(jnp.float16).astype(x.dtype) * 1, kept),
    "constant": optax.stateless(lambda u, p: jax.tree.map(lambda x: 1.0 - x, p)),
}
AROUND = {
    "alone": lambda tx: tx,
    "jit": lambda tx: optax.GradientTransformation(tx.init, jax.jit(tx.update)),
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx, optax.scale(1.0)),
    "guarded": lambda tx: optax.apply_if_finite(tx, 3),
    "masked": lambda tx: optax.masked(tx, {"still": False, "own": True}),
    "in turns": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}


PAIRS = [*((name, "alone") for name in SETS), *(("constant", around) for around in AROUND)]
PAIRS += [("a sum", "jit"), ("at first", "masked"), ("rounded", "in turns")]
PAIRS = [*dict.fromkeys(PAIRS)]


@pytest.mark.parametrize(("name", "around"), PAIRS)
def test_an_optimizer_that_sets_the_parameters_is_refused(name, around):
    """Whatever it keeps, and whatever is around it: it would take back what mixing did."""
    tx = AROUND[around](SETS[name])
    x = jax.tree.map(lambda x: x[0], start())
    with refuses("parameters", "all_reduce"):
        optim.decentralized(tx, RING).init(x)
    optim.all_reduce(tx).init(x)


@pytest.mark.parametrize("around", [lambda init: init, jax.jit], ids=["plain", "jit"])
def test_an_optimizer_that_keeps_a_copy_is_refused(around):
    """Also where a helper of its own, under `jax.jit`, makes the copy."""
    init = around(lambda x: jax.tree.map(jnp.array, x))
    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    with refuses("copy of the parameters", "all_reduce"):
        optim.decentralized(tx, RING).init(jax.tree.map(lambda x: x[0], start()))


DOES_NOT_SET = {
    "decay": optax.adamw(0.1, weight_decay=0.5),
    "projection": optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "trust ratio": optax.lamb(0.1, weight_decay=0.5),
    "proximal": optax.stateless(lambda u, p: jax.tree.map(lambda g, x: -0.1 * (g + x), u, p)),
}


@pytest.mark.parametrize("name", DOES_NOT_SET)
def test_an_optimizer_that_moves_the_parameters_is_not(name):
    optim.decentralized(DOES_NOT_SET[name], RING).init(jax.tree.map(lambda x: x[0], start()))


@pytest.mark.parametrize(
    "inner",
    [
        optax.lbfgs(0.1),
        optax.contrib.sophia(0.1),
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    ],
    ids=["lbfgs", "sophia", "line search"],
)
def test_an_optimizer_that_needs_more_is_one_sentence(inner):
    """In a loop of the user's own; a named one in a config is refused at the start."""
    tx = optim.decentralized(inner, RING)
    state = jax.eval_shape(jax.vmap(tx.init), start())
    one = jax.vmap(lambda x, s: tx.update(x, s, x, round=0, value=0.0), axis_name="replica")
    with refuses("local optimizer", "optax.adamw", error=TypeError):
        jax.eval_shape(one, start(), state)


def bad_from(step):
    return lambda t: jnp.where(t >= step, jnp.nan, 0.1)


def frozen(label, where):
    """Trained by Adam whose rate is NaN from step 2 on, but for the arrays ``where``."""
    labels = {key: "f" if key in where else "t" for key in ("a", "b", "scalar")}
    bad = optax.adam(bad_from(2))
    if label == "partition":
        return optax.partition({"t": bad, "f": optax.set_to_zero()}, labels)
    return optax.chain(
        bad, optax.masked(optax.set_to_zero(), {k: v == "f" for k, v in labels.items()})
    )


@pytest.mark.parametrize(
    ("label", "where"),
    [("partition", ("a",)), *((k, ("scalar", "b")) for k in ("partition", "masked"))],
    ids=str,
)
def test_an_update_that_is_not_finite_is_seen_beside_frozen_arrays(label, where):
    params = {"a": jnp.ones((N, 8, 2)), "b": jnp.ones((N, 3)), "scalar": jnp.ones(N)}
    tx = optim.decentralized(frozen(label, where), RING)
    one = jax.vmap(harness.step_of(tx, _ones, 0), axis_name="replica")
    step, x, state = jax.jit(one), params, jax.vmap(tx.init)(params)
    for _ in range(2):
        x, state = step(x, state)
    before = x
    for _ in range(3):
        x, state = step(x, state)
    assert state.skipped.tolist() == state.failing.tolist() == [3] * N
    jax.tree.map(np.testing.assert_array_equal, x, before)
    moments = jax.tree.leaves(state.inner)
    assert all(np.isfinite(leaf).all() for leaf in moments)


def _ones(x):
    return jax.tree.map(jnp.ones_like, x)


NOISE = {
    "noisy_sgd": optax.noisy_sgd(0.1, eta=1.0, gamma=0.0, key=jax.random.key(5)),
    "raw key": optax.GradientTransformation(
        lambda params: {"my_key": jax.random.PRNGKey(5)},
        lambda updates, state, params=None: (
            jax.random.normal(jax.random.fold_in(state["my_key"], 1), updates.shape),
            {"my_key": jax.random.split(state["my_key"])[0]},
        ),
    ),
    "inside": optax.partition(
        {"all": optax.chain(optax.add_noise(1.0, 0.0, key=jax.random.key(0)), optax.sgd(0.1))},
        "all",
    ),
}


@pytest.mark.parametrize("inner", NOISE.values(), ids=NOISE)
def test_replicas_draw_noise_of_their_own(inner):
    """Also after they were made equal; with all_reduce they draw the same, as they must."""

    def drawn(tx, state):
        one = jax.vmap(lambda x, s: tx.update(x, s, x, round=None), axis_name="replica")
        return jax.jit(one)(jnp.zeros((N, 500)), state)

    tx = optim.decentralized(inner, RING)
    state = replicas.broadcast(tx.init(jnp.zeros(500)), N)
    first, state = drawn(tx, state)
    second, _ = drawn(tx, replicas.resize(state, N))
    rows = np.corrcoef(np.concatenate([first, second]))
    assert np.abs(rows - np.eye(2 * N)).max() < 0.2
    plain = optim.all_reduce(inner)
    same, _ = drawn(plain, replicas.broadcast(plain.init(jnp.zeros(500)), N))
    assert (same == same[:1]).all() and (same[0] != 0).any()
