"""DiLoCo and streaming DiLoCo against the oracle, and what they refuse.

test_oracles holds the oracle against torchft's and MaxText's runs.
"""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from decent_jax import optim, topology
from decent_jax.optim.outer_steps import fragments_of

pytestmark = pytest.mark.usefixtures("x64")
N, LR = 4, 0.1


def complete(n, fragments=1):
    return topology.repeat(topology.make("complete", n), fragments)


def problem(steps=22, d=4):
    """Equal replicas (n, d), and for every step each one's (a, b): the gradient is a (x - b)."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.2, 1, (N, 1)), rng.normal(size=(steps, N, d))
    return np.tile(rng.normal(size=(1, d)), (N, 1)), a, b


def split(rows):
    return {"one": jnp.asarray(rows[:, :2]), "two": jnp.asarray(rows[:, 2:])}


def joined(x):
    return np.concatenate([x["one"], x["two"]], axis=1)


def run(tx, schedule, mix_every):
    """(parameters, state) after every step."""
    x0, a, b = problem()
    data = [(a[:, 0], split(rows)) for rows in b]

    def gradient(x, given):
        a, b = given
        return jax.tree.map(lambda x, b: a * (x - b), x, b)

    return harness.trajectory(tx, gradient, schedule, split(x0), data, mix_every)


@pytest.mark.parametrize(
    ("fragments", "mix_every", "delay", "momentum"),
    [(1, 4, 0, 0.9), (1, 5, 3, 0.5), (2, 3, 2, 0.9), (2, 3, 0, 0.0)],
)
def test_is_the_recursion(fragments, mix_every, delay, momentum):
    """Nesterov outside; replicas with gradients of their own. Parameters and the outer ones."""
    x0, a, b = problem()
    outer = []
    numbers = {"outer_lr": 0.7, "outer_momentum": momentum, "nesterov": True, "delay": delay}
    wanted = oracles.run(
        "diloco",
        lambda t: None,
        lambda x, t: a * (x - b[t]),
        x0,
        len(b),
        LR,
        sync_every=mix_every * fragments,
        fragments=[[0, 1], [2, 3]] if fragments == 2 else None,
        record=outer,
        **numbers,
    )
    schedule = complete(N, fragments)
    outside = optax.sgd(0.7, momentum or None, nesterov=bool(momentum))
    options = {"fragments": fragments, "delay": delay}
    tx = optim.diloco(optax.sgd(LR), schedule, outer=outside, **options)
    history = run(tx, schedule, mix_every)
    oracles.assert_same(np.stack([joined(x) for x, _ in history]), wanted)
    whole = np.stack([joined(harness.own(state, "theta")) for _, state in history])
    oracles.assert_same(whole, outer)


# --- fragments -------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_fragments_are_all_of_it_in_order(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    fragments = fragments_of([np.zeros(size) for size in sizes], count)
    assert [k for part in fragments for k in part] == list(range(len(sizes)))
    assert len(fragments) == count and all(fragments)


def test_equal_arrays_are_cut_evenly():
    assert fragments_of([np.zeros(5)] * 6, 3) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fragments": 2}, ("2 fragments", "topology.repeat")),
        ({"fragments": 0}, ("fragments", 0)),
        ({"delay": -1}, ("delay", -1)),
    ],
)
def test_refusals(options, named):
    with refuses(*named):
        optim.diloco(optax.sgd(1.0), complete(4), **options)


def test_rounds_that_are_the_same_cannot_be_counted():
    """`Schedule.round_at` gives the first of them, so that a fragment would never be averaged."""
    schedule = topology.make("periodic_average(one_peer_exp, every=2)", 8)
    assert [schedule.round_at(t) for t in range(6)] == [0, 1, 2, 1, 4, 1]
    with refuses(6, "same", "topology.repeat"):
        optim.noloco(optax.adam(1.0), schedule, fragments=6)
    optim.noloco(optax.adam(1.0), topology.repeat(schedule, 6), fragments=6)


def test_more_fragments_than_arrays():
    tx = optim.diloco(optax.sgd(1.0), complete(2, 3), fragments=3)
    with refuses("3 fragments", 1):
        tx.init(jnp.zeros(4))
