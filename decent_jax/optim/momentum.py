"""Momentum that knows of the neighbours: gossiped, quasi-global, and DecentLaM's."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from decent_jax.gossip import AxisName
from decent_jax.gossip.wire import Wire
from decent_jax.optim import guard, require
from decent_jax.optim.accum_adam import bias_correction
from decent_jax.optim.decentralized import Mixing
from decent_jax.topology import Schedule


def gossiped_momentum(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    *,
    wire: Wire | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adapt-then-combine in which the momentum is averaged like the parameters.

    With heavy-ball momentum inside (``optax.sgd(lr, momentum)``):

    .. math::
        u_i = \beta m_i + g_i, \qquad m_i \leftarrow \sum_j W_{ij} u_j, \qquad
        x_i \leftarrow \sum_j W_{ij} (x_j - \eta u_j)

    In any other ``inner`` the first moment (``trace`` of `optax.trace`, ``mu`` of Adam) takes the
    place of m; second moments stay local. Two messages of the model's size a step, no memory.
    Valid on every doubly stochastic schedule; a fixed point is as far from the optimum as the
    disagreement of m makes it (less than with local momentum).

    References:
      Ying et al., `Exponential Graph <https://arxiv.org/abs/2110.13363>`_, 2021, DmSGD; Yu et al.,
      `On the Linear Speedup of Communication Efficient Momentum SGD
      <https://arxiv.org/abs/1905.03817>`_, 2019, Algorithm 2.
    """
    require.doubly_stochastic("gossiped_momentum", schedule)
    mixing = Mixing(schedule, axis_name, wire)

    def step(params, own, round, local):
        moved = guard.add(params, local(params))

        def mix_momentum(node):
            for name in _MOMENTA:
                if name in getattr(node, "_fields", ()):
                    mixed = mixing(getattr(node, name), round, local.count)
                    return node._replace(**{name: mixed})
            return node

        local.inner = jax.tree.map(mix_momentum, local.inner, is_leaf=_has_momentum)
        return mixing(moved, round, local.count), own

    tx = guard.method(inner, step)

    def init(params):
        state = tx.init(params)
        if not any(map(_has_momentum, jax.tree.leaves(state.inner, is_leaf=_has_momentum))):
            raise ValueError(
                "gossiped_momentum needs an optimizer with momentum, such as "
                "optax.sgd(lr, momentum=0.9) or optax.adam(lr); without any use decentralized"
            )
        return state

    return optax.GradientTransformationExtraArgs(init, tx.update)


_MOMENTA = ("trace", "mu")


def _has_momentum(node: Any) -> bool:
    return any(name in getattr(node, "_fields", ()) for name in _MOMENTA)


def quasi_global_sgd(
    learning_rate: optax.ScalarOrSchedule,
    schedule: Schedule,
    momentum: float = 0.9,
    mu: float = 0.9,
    axis_name: AxisName = "replica",
    *,
    gradient: optax.GradientTransformation | None = None,
    wire: Wire | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Quasi-global momentum: the momentum follows how the mixed model really moved.

    .. math::
        x_i^{+} = \sum_j W_{ij} \big(x_j - \eta (g_j + \beta m_j)\big), \qquad
        m_i \leftarrow \mu m_i + (1 - \mu) (x_i - x_i^{+}) / \eta

    One message a step, one copy of the parameters (m). A step with :math:`\eta = 0` leaves m.
    Valid on every doubly stochastic schedule, with local steps (``round=None``) too.

    Args:
      learning_rate: :math:`\eta`, a float or an optax schedule of the step.
      schedule, axis_name, wire: as in `decentralized`.
      momentum: :math:`\beta`.
      mu: :math:`\mu`; the paper takes it equal to :math:`\beta`.
      gradient: what is done to g first: clipping, L2 decay.

    References:
      Lin et al., `Quasi-Global Momentum <https://arxiv.org/abs/2102.04761>`_, 2021, Algorithm 1
      (heavy-ball form).
    """
    require.doubly_stochastic("quasi_global", schedule)
    mixing = Mixing(schedule, axis_name, wire)

    def step(params, own, round, local):
        rate = guard.rate_at(learning_rate, local.count)
        heading = guard.add(local(params), guard.scale(momentum, own["momentum"]))
        after = mixing(guard.add(params, guard.scale(-rate, heading)), round, local.count)
        moved = guard.subtract(params, after)
        kept = _towards(own["momentum"], moved, mu, rate)
        return after, {"momentum": kept}

    def own(params):
        return {"momentum": guard.zeros(params)}

    return guard.method(gradient or optax.identity(), step, own)


def _towards(momentum, moved, mu, rate):
    """``mu m + (1 - mu) moved / rate``, or m where the rate is 0."""
    rate = jnp.asarray(rate)
    stands = rate == 0

    def one(m, d):
        by = jnp.where(stands, jnp.ones_like(rate), rate).astype(m.dtype)
        return jnp.where(stands, m, jnp.asarray(mu, m.dtype) * m + (1 - mu) * d / by)

    return jax.tree.map(one, momentum, moved)


def quasi_global_adam(
    learning_rate: optax.ScalarOrSchedule,
    schedule: Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    axis_name: AxisName = "replica",
    *,
    gradient: optax.GradientTransformation | None = None,
    wire: Wire | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam whose moments follow the normalised movement of the mixed model (QG-DAdam).

    At step k = 1, 2, ...

    .. math::
        \tilde m &= \beta_1 m + g, \quad \tilde v = \beta_2 v + (1-\beta_2) g^2, \quad
        u = \frac{\tilde m}{1-\beta_1^k} \Big/ \Big(\sqrt{\tilde v / (1-\beta_2^k)} + \epsilon\Big),
        \quad x_i^{+} = \sum_j W_{ij} (x_j - \eta u_j) \\
        d &= (x - x^{+}) / (\lVert x - x^{+} \rVert_2 + 10^{-8}), \quad
        m \leftarrow \beta_1 m + (1-\beta_1) d, \quad v \leftarrow \beta_2 v + (1-\beta_2) d^2

    with the norm over all parameters of a replica. g enters with weight 1, as in the authors' code
    and experiments, so good learning rates are smaller than Adam's. One message a step; two copies
    of the parameters (m, v). Arguments as in `quasi_global_sgd`.

    References:
      Lin et al., `Quasi-Global Momentum <https://arxiv.org/abs/2102.04761>`_, 2021, QG-DAdam.
    """
    require.doubly_stochastic("quasi_global", schedule)
    mixing = Mixing(schedule, axis_name, wire)

    def step(params, own, round, local):
        rate = guard.rate_at(learning_rate, local.count)
        g = local(params)
        first_scale = 1 / bias_correction(b1, local.count + 1)
        second_scale = 1 / bias_correction(b2, local.count + 1)
        second = _moment(b2, own["nu"], g, 2)

        def descend(m, v, g):
            m, v = (b1 * m + g) * first_scale, v * second_scale
            change = -jnp.asarray(rate, m.dtype) * m / (jnp.sqrt(v) + eps)
            return jnp.where(local.ok, change, 0)  # old moments push nobody on by themselves

        change = jax.tree.map(descend, own["mu"], second, g)
        after = mixing(guard.add(params, change), round, local.count)
        moved = guard.subtract(params, after)
        heading = guard.scale(1 / (optax.tree.norm(moved) + 1e-8), moved)
        return after, {
            "mu": _moment(b1, own["mu"], heading, 1),
            "nu": _moment(b2, own["nu"], heading, 2),
        }

    def own(params):
        return {"mu": guard.zeros(params), "nu": guard.zeros(params)}

    return guard.method(gradient or optax.identity(), step, own)


def _moment(decay, moment, value, order):
    return jax.tree.map(lambda m, x: decay * m + (1 - decay) * x**order, moment, value)


def decentlam(
    learning_rate: optax.ScalarOrSchedule,
    schedule: Schedule,
    momentum: float = 0.9,
    axis_name: AxisName = "replica",
    *,
    gradient: optax.GradientTransformation | None = None,
    wire: Wire | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""DecentLaM: momentum SGD without the bias that local momentum adds to decentralized SGD.

    .. math::
        \tilde g_i = \frac1\eta \Big(x_i - \sum_j W_{ij} (x_j - \eta g_j)\Big), \qquad
        m_i \leftarrow \beta m_i + \tilde g_i, \qquad x_i \leftarrow x_i - \eta m_i

    Its limit is that of D-PSGD. One message a step, one copy of the parameters (m). Only on static
    symmetric schedules: elsewhere the momentum of the disagreement diverges. A step with
    :math:`\eta = 0` mixes and leaves m. Arguments as in `quasi_global_sgd`.

    References:
      Yuan et al., `DecentLaM <https://arxiv.org/abs/2104.11981>`_, 2021, Algorithm 2.
    """
    require.static_and_symmetric("decentlam", schedule)
    mixing = Mixing(schedule, axis_name, wire)

    def step(params, own, round, local):
        if round is None:
            raise ValueError("decentlam mixes in every step; use mix_every=1")
        rate = jnp.asarray(guard.rate_at(learning_rate, local.count))
        stands = rate == 0
        by = jnp.where(stands, jnp.ones_like(rate), rate)
        adapted = guard.add(params, guard.scale(-rate, local(params)))
        mixed = mixing(adapted, round, local.count)
        pseudo = guard.scale(1 / by, guard.subtract(params, mixed))
        heading = guard.add(guard.scale(momentum, own["momentum"]), pseudo)
        after = guard.add(params, guard.scale(-rate, heading))
        return guard.choose(stands, (mixed, own), (after, {"momentum": heading}))

    def own(params):
        return {"momentum": guard.zeros(params)}

    return guard.method(gradient or optax.identity(), step, own)
