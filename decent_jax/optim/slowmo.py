"""SlowMo: slow momentum over the steps between two averages of all replicas."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.optim import guard, require
from decent_jax.optim.declaration import Method, register
from decent_jax.topology import Schedule


class SlowmoState(NamedTuple):
    """Own state of `slowmo`; both are shaped like the parameters."""

    u: Any  # slow momentum
    x_0: Any  # the parameters after the last average


def slowmo(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    learning_rate: optax.ScalarOrSchedule,
    axis_name: AxisName = "replica",
    *,
    alpha: float = 1.0,
    beta: float = 0.7,
) -> optax.GradientTransformationExtraArgs:
    r"""Slow momentum over the steps between two averages of all replicas.

    Every step is adapt-then-combine. After a round that averages all replicas (``complete`` every
    H steps, or those of ``periodic_average(one_peer_exp, every=H)``), with :math:`\bar x` the
    average and :math:`x_0` the parameters after the one before:

    .. math::
        u \leftarrow \beta u + (x_0 - \bar x) / \eta, \qquad
        x \leftarrow x_0 - \alpha \eta u

    One message per step (that of the schedule), two copies of the parameters (:math:`x_0`, u),
    equal on all replicas if they begin equal. :math:`\beta = 0, \alpha = 1` is `decentralized`.

    Args:
      inner: the local optimizer; its state is kept over an average (the paper's "maintain").
      schedule, axis_name: as in `decentralized`.
      learning_rate: :math:`\eta`, that of ``inner`` (an average at :math:`\eta = 0` leaves u).
      alpha: slow learning rate, at least 0.
      beta: slow momentum, in [0, 1).

    References:
      Wang et al., `SlowMo <https://arxiv.org/abs/1910.00643>`_, 2020, Algorithm 1.
    """
    require.not_negative("slowmo.alpha", alpha)
    require.below_one("slowmo.beta", beta)
    mixing = guard.Mixing(schedule, axis_name, method="slowmo")
    require.averages("slowmo", schedule, always=False)

    def step(params, own, round, local):
        update, inner, ok = local(params)
        x = mixing(guard.add(params, update), round, local.count)
        r = gossip.number(round)
        if r is None or schedule.rounds[r].group_size != schedule.num_replicas:
            return x, own, inner, ok
        rate = jnp.asarray(guard.rate_at(learning_rate, local.count))
        is_zero, divisor = guard.divisor(rate)
        moved = guard.scale(1 / divisor, optax.tree.sub(own.x_0, x))
        u = guard.add(guard.scale(beta, own.u), moved)
        jumped = guard.add(own.x_0, guard.scale(-alpha * rate, u))
        x, u = optax.tree.where(is_zero, (x, own.u), (jumped, u))
        return x, SlowmoState(u, x), inner, ok

    return guard.method(
        inner, step, lambda params: SlowmoState(optax.tree.zeros_like(params), guard.copy(params))
    )


register(Method("slowmo", slowmo, copies=2))
