"""A replica whose parameters are lost comes back from those of others, and harms nobody."""

import dataclasses
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decent_jax import optim, topology
from decent_jax.gossip import codecs
from decent_jax.gossip.codecs import Codec, Lattice

N, LOST = 8, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A method with its numbers; ``returns`` is False where the replica cannot come back."""

    method: str
    schedule: str = "bidirectional_ring"
    combine: str = ""
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    returns: bool = True
    codec: Codec | None = None


CASES = {
    "swarm, blocking": Case("swarm", "hypercube", "atc"),
    "swarm": Case("swarm", "hypercube", "awc"),
    "swarm, lattice": Case("swarm", "hypercube", "awc", codec=Lattice(8)),
    "swarm, blocking, lattice": Case("swarm", "hypercube", "atc", codec=Lattice(8), returns=False),
    "quasi_global_sgd": Case("quasi_global_sgd"),
    "exact_diffusion": Case("exact_diffusion"),
    "d2": Case("d2", "star"),
    "choco": Case("choco"),
    "diloco": Case("diloco", "complete"),
    "noloco": Case("noloco"),
    "sparseloco": Case("sparseloco", "complete", numbers={"density": 1.0}),
    "noloco, carry": Case("noloco", numbers={"carry": True, "delay": 1}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_lost_replica_comes_back(case):
    """Two of its three numbers become NaN after step 3; 40 steps later all is finite and learns."""
    schedule = topology.make(case.schedule, N)
    numbers = {"momentum": 0.5, "b1": 0.9, "b2": 0.99, "eps": 1e-3}
    inner = optax.sgd(0.05, momentum=0.5)
    given = {
        "mix_every": 1 + case.numbers.get("delay", 0),
        "combine": case.combine,
        "numbers": case.numbers,
        "codec": case.codec,
        "optimizer": numbers,
    }
    tx = harness.build(case.method, schedule, inner, 0.05, **given)
    targets = jnp.arange(N * 3.0).reshape(N, 3) / 10
    lost = jnp.zeros((N, 3), bool).at[LOST, :2].set(True)

    def step(carry, t):
        def own(x, state, target, lost):
            for r in range(schedule.period):
                updates, state = tx.update(x - target, state, x, round=r)
                x = optim.apply_updates(x, updates)
            return jnp.where((t == 3) & lost, jnp.nan, x), state

        x, state = carry
        return jax.vmap(own, axis_name="replica")(x, state, targets, lost), None

    @jax.jit
    def run():
        x = jnp.full((N, 3), 4.0)
        return jax.lax.scan(step, (x, jax.vmap(tx.init)(x)), jnp.arange(40))[0]

    x, state = run()
    others = np.arange(N) != LOST
    rows = others | case.returns
    assert np.isfinite(x[rows]).all() and np.isfinite(x[LOST]).all() == case.returns
    assert all(np.isfinite(leaf[rows]).all() for leaf in jax.tree.leaves(state.own))
    assert (state.skipped[others] == 0).all()
    assert np.abs(x[rows] - 1.15).max() < 2  # from 4; the mean of the targets is 1.15
    if case.returns:
        assert state.skipped[LOST] <= schedule.period + 1


@pytest.mark.parametrize("combine", ["awc", "atc"])
def test_tracked_gradients_keep_their_sum(combine):
    """sum_i q_i = sum_i g_i, also where a replica's parameters or its gradient were lost.

    Such a replica makes no update of its own, and is counted, though what it tracks is finite.
    """
    schedule = topology.make("bidirectional_ring", N)
    tx = optim.contrib.gradient_tracking(optax.sgd(0.1, momentum=0.9), schedule, combine)
    x = jnp.square(jnp.arange(2.0 * N)).reshape(N, 2)
    state = jax.vmap(tx.init)(x)
    one = harness.step_of(tx, lambda x, lost: jnp.where(lost, jnp.nan, x), 0)
    step = harness.on_stack(one, "vmap", N)
    for t in range(5):
        lost, before = (jnp.arange(N) == 5) & (t == 4), optax.tree.get(state.inner, "trace")
        x, state = step(x.at[LOST].set(jnp.nan) if t == 2 else x, state, lost)
    np.testing.assert_allclose(
        harness.own(state, "q").sum(0), harness.own(state, "g").sum(0), rtol=1e-5
    )
    assert state.skipped.tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    kept = (optax.tree.get(state.inner, "trace") == before).all(1)
    assert kept.tolist() == lost.tolist()


def test_a_lost_replica_takes_the_whole_average():
    """With a consensus factor, too, and where the replica still has finite numbers."""
    tx = optim.decentralized(optax.sgd(0.0), topology.make("complete", 4), gamma=0.1)
    x = jnp.zeros((4, 2)).at[LOST].set(jnp.array([jnp.nan, 100.0]))
    step = harness.on_stack(harness.step_of(tx, jnp.zeros_like, 0), "vmap", 4)
    np.testing.assert_array_equal(step(x, jax.vmap(tx.init)(x))[0], np.zeros((4, 2)))


@pytest.mark.parametrize("method", ["gradient_tracking", "gossiped_momentum"])
def test_messages_of_a_step_have_noise_of_their_own(method):
    """Two equal arrays are rounded to 8 bits at random, and differently."""
    tx = harness.build(
        method,
        topology.make("hypercube", 2),
        optax.sgd(0.0, momentum=1.0),
        combine="atc",
        codec=codecs.Int8(),
    )
    x = jnp.stack([jnp.linspace(1, 2, 50), jnp.zeros(50)])
    state = jax.vmap(tx.init)(x)
    x, state = harness.on_stack(harness.step_of(tx, lambda x: x, 0), "vmap", 2)(x, state)
    is_tracking = method == "gradient_tracking"
    sent = harness.own(state, "q") if is_tracking else optax.tree.get(state.inner, "trace")
    np.testing.assert_allclose(sent, x, atol=0.02)
    assert (np.abs(sent - x) > 1e-3).sum() > 10
