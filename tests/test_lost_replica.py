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

N, LOST = 8, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A method with its numbers; ``returns`` is False where the replica cannot come back."""

    method: str
    schedule: str = "bidirectional_ring"
    combine: str = ""
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    returns: bool = True


CASES = {
    "swarm, blocking": Case("swarm", "hypercube", "then"),
    "swarm": Case("swarm", "hypercube", "with"),
    "swarm, lattice": Case("swarm", "hypercube", "with", {"bits": 8}),
    "swarm, blocking, lattice": Case("swarm", "hypercube", "then", {"bits": 8}, returns=False),
    "quasi_global_sgd": Case("quasi_global_sgd"),
    "quasi_global_adam": Case("quasi_global_adam"),
    "decentlam": Case("decentlam"),
    "exact_diffusion": Case("exact_diffusion"),
    "d2": Case("d2", "star"),
    "choco": Case("choco"),
    "diloco, alpha": Case("diloco", "complete", numbers={"alpha": 0.5}),
    "noloco, alpha": Case("noloco", numbers={"alpha": 0.5}),
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
