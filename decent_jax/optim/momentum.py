"""Momentum that takes neighbours into account: gossiped, and SlowMo's."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec
from decent_jax.optim import frame, require, trees
from decent_jax.optim.declaration import Method, register
from decent_jax.topology import Schedule


def gossiped_momentum(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adapt-then-combine in which the momentum is averaged like the parameters.

    With heavy-ball momentum inside (``optax.sgd(lr, momentum)``):

    .. math::
        u_i = \beta m_i + g_i, \qquad m_i \leftarrow \sum_j W_{ij} u_j, \qquad
        x_i \leftarrow \sum_j W_{ij} (x_j - \eta u_j)

    In any other ``inner`` the first moment (``trace`` of `optax.trace`, ``mu`` of Adam) takes the
    place of m; second moments stay local. Two messages of the model's size per step, no memory.
    Valid on every doubly stochastic schedule. The disagreement of m decides how far a fixed point
    is from the optimum (less far than with local momentum).

    References:
      Ying et al., `Exponential Graph <https://arxiv.org/abs/2110.13363>`_, 2021, DmSGD; Yu et al.,
      `On the Linear Speedup of Communication Efficient Momentum SGD
      <https://arxiv.org/abs/1905.03817>`_, 2019, Algorithm 2.
    """
    return with_moments(
        inner,
        frame.Mixing(schedule, axis_name, codec, "gossiped_momentum"),
        {"trace": 1, "mu": 1},
        1,
        "gossiped_momentum needs an optimizer with momentum, such as optax.sgd(lr, momentum=0.9) "
        "or optax.adam(lr); without any use decentralized",
    )


def with_moments(
    inner: optax.GradientTransformation,
    mixing: frame.Mixing,
    every: dict[str, int],
    least: int,
    needs: str,
) -> optax.GradientTransformationExtraArgs:
    """Adapt-then-combine in which parts of the local optimizer's state are mixed, too.

    every: by the name of a part, the rounds of the parameters per message of it.
    least: how many of these parts the optimizer must have.
    needs: the message about an optimizer that has fewer.
    """

    def named(node: Any) -> list[str]:
        return [name for name in every if name in getattr(node, "_fields", ())]

    def due(round: Any, k: int) -> Any:
        if round is None or k == 1:
            return round
        nth, rest = divmod(gossip.number(round) + 1, k)
        return None if rest else nth - 1

    def step(params, own, round, local):
        update, inner, ok = local(params)

        def mix_parts(node):
            for nth, name in enumerate(named(node), start=1):
                part, r = getattr(node, name), due(round, every[name])
                part = mixing(part, r, local.count, nth=nth)
                node = node._replace(**{name: part})
            return node

        inner = jax.tree.map(mix_parts, inner, is_leaf=lambda node: bool(named(node)))
        return mixing(trees.add(params, update), round, local.count), own, inner, ok

    tx = frame.method(inner, step)

    def init(params):
        state: Any = tx.init(params)
        nodes = jax.tree.leaves(state.inner, is_leaf=lambda node: bool(named(node)))
        found = {name for node in nodes for name in named(node)}
        if len(found) < least:
            raise ValueError(needs)
        return state

    return optax.GradientTransformationExtraArgs(init, tx.update)


class SlowmoState(NamedTuple):
    """Own state of `slowmo`; both are shaped like the parameters."""

    u: Any  # slow momentum
    x_0: Any  # the parameters after the last average


def slowmo(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    learning_rate: optax.ScalarOrSchedule,
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
    *,
    alpha: Annotated[float, "slow learning rate, at least 0"] = 1.0,
    beta: Annotated[float, "slow momentum, in [0, 1)"] = 0.7,
) -> optax.GradientTransformationExtraArgs:
    r"""Slow momentum over the steps between two averages of all replicas.

    Every step is adapt-then-combine. After a round that averages all replicas (``complete`` every
    H steps, or those of ``periodic_average(one_peer_exp, every=H)``), with ``x_bar`` the
    average and ``x_0`` the parameters after the one before:

    .. math::
        u \leftarrow \beta u + (x_0 - \bar x) / \eta, \qquad
        x \leftarrow x_0 - \alpha \eta u

    One message per step (that of the schedule), two copies of the parameters (``x_0``, u),
    equal on all replicas if they begin equal. ``beta = 0, alpha = 1`` is `decentralized`.

    Args:
      inner: the local optimizer; its state is kept over an average (the paper's "maintain").
      schedule, axis_name, codec: as in `decentralized`; an average is coded as ``x - x_0``.
      learning_rate: ``eta``, that of ``inner`` (an average at ``eta = 0`` leaves u).
      alpha: slow learning rate, at least 0.
      beta: slow momentum, in [0, 1).

    References:
      Wang et al., `SlowMo <https://arxiv.org/abs/1910.00643>`_, 2020, Algorithm 1.
    """
    require.not_negative("slowmo.alpha", alpha)
    require.below_one("slowmo.beta", beta)
    mixing = frame.Mixing(schedule, axis_name, codec, "slowmo")
    require.averages("slowmo", schedule, always=False)

    def step(params, own, round, local):
        update, inner, ok = local(params)
        x, r = trees.add(params, update), gossip.number(round)
        if r is None or schedule.rounds[r].group_size != schedule.num_replicas:
            return mixing(x, round, local.count), own, inner, ok
        if codec is None:
            x = mixing(x, round, local.count)
        else:
            moved = mixing(optax.tree.sub(x, own.x_0), round, local.count)
            x = trees.add(own.x_0, moved)
        rate = jnp.asarray(frame.rate_at(learning_rate, local.count))
        is_zero, divisor = frame.divisor(rate)
        moved = trees.scale(1 / divisor, optax.tree.sub(own.x_0, x))
        u = trees.add(trees.scale(beta, own.u), moved)
        jumped = trees.add(own.x_0, trees.scale(-alpha * rate, u))
        x, u = optax.tree.where(is_zero, (x, own.u), (jumped, u))
        return x, SlowmoState(u, x), inner, ok

    return frame.method(
        inner, step, lambda params: SlowmoState(optax.tree.zeros_like(params), trees.copy(params))
    )


register(Method("gossiped_momentum", gossiped_momentum, messages=2))
register(Method("slowmo", slowmo, copies=2))
