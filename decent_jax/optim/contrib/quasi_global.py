"""Quasi-global momentum, which follows the movement of the mixed model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax.gossip import AxisName, RoundId
from decent_jax.gossip.codecs import Codec
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import trees, validation
from decent_jax.optim.method_wrapper import Local, Mixing, Stepped, filled, method, rate_at
from decent_jax.optim.registry import register
from decent_jax.topology import Schedule


class MomentumState(NamedTuple):
    """The ``own`` state of `quasi_global_sgd`."""

    m: PyTree  # like params


def quasi_global_sgd(
    learning_rate: optax.ScalarOrSchedule,
    schedule: Schedule,
    momentum: float = 0.9,
    axis_name: AxisName = "replica",
    gradient: optax.GradientTransformation | None = None,
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Gossip SGD whose momentum follows the movement of the mixed model.

    .. math::
        x_i^{+} = \sum_j W_{ij} \big(x_j - \eta (g_j + \beta m_j)\big), \qquad
        m_i \leftarrow \beta m_i + (1 - \beta) (x_i - x_i^{+}) / \eta

    It sends one message per step and stores one copy of the parameters (m), which a step with ``eta
    = 0`` does not change. Valid on every doubly stochastic schedule and with local steps.

    Args:
      learning_rate: ``eta``, a float or an optax schedule of the step.
      schedule, axis_name, codec: as in `decentralized`.
      momentum: ``beta``, in [0, 1); also the decay of m, which the paper calls ``mu``.
      gradient: an optax transformation of g, applied first, such as clipping or L2 decay.

    References:
      Lin et al., `Quasi-Global Momentum <https://arxiv.org/abs/2102.04761>`_, 2021, Algorithm 1
      (heavy-ball form).
    """
    mixing = Mixing(schedule, axis_name, codec, "quasi_global")
    validation.below_one("momentum", momentum)

    def step(params: PyTree, own: MomentumState, round: RoundId, local: Local) -> Stepped:
        rate = rate_at(learning_rate, local.count)
        g, inner, ok = local(params)
        descent = trees.add(g, trees.scale(jnp.where(ok, momentum, 0), own.m))
        after = mixing(trees.add(params, trees.scale(-rate, descent)), round, local.count)
        is_zero = jnp.asarray(rate) == 0
        divisor = jnp.where(is_zero, 1, rate)

        def follow(m: jax.Array, d: jax.Array) -> jax.Array:
            new = jnp.asarray(momentum, m.dtype) * m + (1 - momentum) * d / divisor.astype(m.dtype)
            # A replica that is not finite has no movement for its momentum to follow.
            return jnp.where(is_zero | ~jnp.isfinite(d), m, new)

        m = jax.tree.map(follow, own.m, optax.tree.sub(params, after))
        return after, MomentumState(m), inner, ok

    return method(gradient, step, filled(MomentumState), axis_name)


register("quasi_global_sgd", quasi_global_sgd, optimizers=("sgd",), copies=1)
