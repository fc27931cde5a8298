r"""Adam whose second moment is that of the first moment; tried for gossip (docs/results.md).

    m_t = b1 m_{t-1} + (1 - b1) g_t        m'_t = m_t / (1 - b1^t)
    v_t = b2 v_{t-1} + (1 - b2) m'_t^2     v'_t = v_t / (1 - b2^t)
    x_t = x_{t-1} - rate m'_t / (sqrt(v'_t) + eps)

All-reduce squares the mean of n gradients, a replica that gossips its own, which is n times as
noisy. The square of a mean over time is less so: for noise its expectation is (1 - b1) / (1 + b1)
of that of g^2: 1/19 with b1 = 0.9, 1/9 with 0.8, where a mean of eight replicas has 1/8.

Use it by --config.optimizer.name="benchmarks.smoothed_adam.adamw()"; the checkout must be in
PYTHONPATH.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class SmoothedState(NamedTuple):
    """Moments like the parameters; count: () int32."""

    count: jax.Array
    mu: Any
    nu: Any


def scale_by_smoothed_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """The direction m' / (sqrt(v') + eps)."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return SmoothedState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(grads, state, params=None):
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        m = optax.tree.bias_correction(mu, b1, count)
        nu = optax.tree.update_moment(m, state.nu, b2, 2)
        v = optax.tree.bias_correction(nu, b2, count)
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), m, v)
        return direction, SmoothedState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """With decoupled weight decay; arguments as of `optax.adamw`."""
    return optax.chain(
        scale_by_smoothed_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
