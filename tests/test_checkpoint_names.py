"""Checkpoints from when the own state of a method was a dict, restored into its NamedTuple."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decent_jax import replicas, topology
from decent_jax.optim import METHODS, Parts
from decent_jax.train.checkpoint import Checkpointer
from decent_jax.train.step import TrainState

# As they were written: {key: field now}, of the keys that there were.
BEFORE = {
    "choco": {"public": "x_hat", "around": "s"},
    "diloco": {"outer": "theta", "states": "states"},
    "gradient_tracking": {"tracked": "q", "gradient": "g"},
    "quasi_global_adam": {"mu": "m", "nu": "v"},
    "push_sum": {"weight": "w"},
    "swarm": {"published": "published"},
}
SCHEDULES = {"diloco": "complete", "push_sum": "random_out", "swarm": "hypercube"}


def round_trip(folder, saved, like, n=4):
    """What is restored, with the shapes of ``like``, for n replicas of the 4 that are saved."""
    placement = replicas.place(4, jax.devices()[:1])
    meta = {"num_replicas": 4, "config": {"eval.ema_decay": 0.0}}
    meta |= {"examples": 12, "seconds": 1.0, "best": float("inf")}
    writer = Checkpointer(folder, 1)
    writer.save(3, jax.device_put(saved, placement.stacked), meta)
    writer.close()
    reader = Checkpointer(folder, 1)
    placement = replicas.place(n, jax.devices()[:1])
    restored, _ = reader.restore_newest(jax.eval_shape(lambda: like), placement, 1)
    reader.close()
    return restored


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("before", [True, False])
def test_states_are_restored(name, before, tmp_path):
    n = 4
    schedule = topology.make(SCHEDULES.get(name, "bidirectional_ring"), n)
    tx = METHODS[name].build(Parts(schedule, 0.1, optax.sgd(0.1)))
    opt_state = jax.vmap(tx.init)({"a": jnp.zeros((n, 2)), "b": jnp.zeros((n, 3))})
    leaves, structure = jax.tree.flatten(TrainState({"a": jnp.ones((n, 2))}, {}, opt_state, None))
    state = structure.unflatten([x + k for k, x in enumerate(leaves)])  # no two are equal

    saved = state
    if before:
        own = {old: getattr(state.opt_state.own, new) for old, new in BEFORE[name].items()}
        saved = state._replace(opt_state=state.opt_state._replace(own=own))
    restored = round_trip(tmp_path, saved, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


@pytest.mark.parametrize("n", [4, 2])
def test_random_keys_and_complex_numbers_are_restored(n, tmp_path):
    """Of optimizers that draw, such as `optax.noisy_sgd`; on other replicas they keep the key."""
    tx = METHODS["decentralized_sgd"].build(
        Parts(topology.make("ring", 4), 0.1, optax.noisy_sgd(0.1, key=jax.random.key(3)))
    )

    def state_of(n):
        params = {"a": jnp.full((n, 3), 1 + 2j)}
        return TrainState(params, {}, jax.vmap(tx.init)(params), None)

    restored = round_trip(tmp_path, state_of(4), state_of(n), n)
    jax.tree.map(
        lambda got, wanted: np.testing.assert_array_equal(*map(bits, (got, wanted))),
        restored,
        state_of(n),
    )


def bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
