"""Momentum of what mixing really moved: quasi-global, DecentLaM, GASLoC, SlowMo."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec
from decent_jax.optim import frame, require, trees
from decent_jax.optim.declaration import ADAM_FIRST, Method, register
from decent_jax.optim.outer_steps import Rule, Streaming, outer_steps
from decent_jax.topology import Schedule


class MomentumState(NamedTuple):
    """Own state of `quasi_global_sgd` and `decentlam`."""

    m: Any  # like params


def quasi_global_sgd(
    learning_rate: optax.ScalarOrSchedule,
    schedule: Schedule,
    momentum: float = 0.9,
    axis_name: AxisName = "replica",
    gradient: optax.GradientTransformation | None = None,
    codec: Codec | None = None,
    *,
    mu: Annotated[float, "share of the momentum that is kept, in [0, 1)"] = 0.9,
) -> optax.GradientTransformationExtraArgs:
    r"""Quasi-global momentum: the momentum follows the movement of the mixed model.

    .. math::
        x_i^{+} = \sum_j W_{ij} \big(x_j - \eta (g_j + \beta m_j)\big), \qquad
        m_i \leftarrow \mu m_i + (1 - \mu) (x_i - x_i^{+}) / \eta

    One message per step, one copy of the parameters (m). A step with ``eta = 0`` leaves m.
    Valid on every doubly stochastic schedule, with local steps (``round=None``) too.

    Args:
      learning_rate: ``eta``, a float or an optax schedule of the step.
      schedule, axis_name, codec: as in `decentralized`.
      momentum: ``beta``, in [0, 1).
      gradient: applied to g first, such as clipping or L2 decay.
      mu: share of the momentum that is kept, in [0, 1); the paper takes it equal to ``beta``.

    References:
      Lin et al., `Quasi-Global Momentum <https://arxiv.org/abs/2102.04761>`_, 2021, Algorithm 1
      (heavy-ball form).
    """
    mixing = frame.Mixing(schedule, axis_name, codec, "quasi_global")
    require.below_one("momentum", momentum)
    require.below_one("quasi_global.mu", mu)

    def step(params, own, round, local):
        rate = frame.rate_at(learning_rate, local.count)
        g, inner, ok = local(params)
        descent = trees.add(g, trees.scale(jnp.where(ok, momentum, 0), own.m))
        after = mixing(trees.add(params, trees.scale(-rate, descent)), round, local.count)
        is_zero, divisor = frame.divisor(jnp.asarray(rate))

        def follow(m, d):
            new = jnp.asarray(mu, m.dtype) * m + (1 - mu) * d / divisor.astype(m.dtype)
            # A replica that is not finite moves by no number that its momentum could follow.
            return jnp.where(is_zero | ~jnp.isfinite(d), m, new)

        m = jax.tree.map(follow, own.m, optax.tree.sub(params, after))
        return after, MomentumState(m), inner, ok

    return frame.method(gradient, step, frame.filled(MomentumState))


def decentlam(
    learning_rate: optax.ScalarOrSchedule,
    schedule: Schedule,
    momentum: float = 0.9,
    axis_name: AxisName = "replica",
    mix_every: int = 1,
    gradient: optax.GradientTransformation | None = None,
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""DecentLaM: momentum SGD without the bias that local momentum adds to decentralized SGD.

    .. math::
        \tilde g_i = \frac1\eta \Big(x_i - \sum_j W_{ij} (x_j - \eta g_j)\Big), \qquad
        m_i \leftarrow \beta m_i + \tilde g_i, \qquad x_i \leftarrow x_i - \eta m_i

    Its limit is that of D-PSGD. One message per step, one copy of the parameters (m). Only on
    static symmetric schedules: elsewhere the momentum of the disagreement diverges. A step with
    ``eta = 0`` mixes and leaves m. Arguments as in `quasi_global_sgd`.

    References:
      Yuan et al., `DecentLaM <https://arxiv.org/abs/2104.11981>`_, 2021, Algorithm 2.
    """
    mixing = frame.Mixing(schedule, axis_name, codec, "decentlam")
    require.static_and_symmetric("decentlam", schedule, mix_every)
    require.below_one("momentum", momentum)

    def step(params, own, round, local):
        if round is None:
            raise ValueError("decentlam mixes in every step; use mix_every=1")
        rate = jnp.asarray(frame.rate_at(learning_rate, local.count))
        is_zero, divisor = frame.divisor(rate)
        g, inner, ok = local(params)
        adapted = trees.add(params, trees.scale(-rate, g))
        mixed = mixing(adapted, round, local.count)
        g_tilde = trees.scale(1 / divisor, optax.tree.sub(params, mixed))
        m = trees.add(trees.scale(momentum, own.m), g_tilde)
        after = trees.add(params, trees.scale(-rate, m))
        only_mixes = is_zero | ~ok | ~trees.all_finite(adapted)
        after, m = optax.tree.where(only_mixes, (mixed, own.m), (after, m))
        return after, MomentumState(m), inner, ok

    return frame.method(gradient, step, frame.filled(MomentumState))


def gasloc(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    mix_every: int = 1,
    codec: Codec | None = None,
    *,
    alpha: Annotated[float, "averaging step size, in (0, 1]"] = 1.0,
    eta: Annotated[float, "outer learning rate"] = 0.7,
    gamma: Annotated[float, "outer momentum, in [0, 1)"] = 0.5,
    delay: Annotated[int, "steps beside which a message travels, below mix_every"] = 0,
    carry: Annotated[
        bool, "True: a replica keeps what it learned while the message travelled"
    ] = False,
) -> optax.GradientTransformationExtraArgs:
    r"""GASLoC: local steps, an averaging step with neighbours, and momentum of the whole movement.

    With ``x_i`` the parameters after the local steps, ``theta_i`` those before them:

    .. math::
        y_i = \theta_i + \eta\, (x_i - \theta_i), \qquad
        \theta_i \leftarrow y_i + \alpha \Big(\sum_j W_{ij} y_j - y_i\Big)
            + \gamma\, (y_i - y_i^{-}), \qquad x_i \leftarrow \theta_i

    with ``y^-`` the y of the last round, at first ``theta``. I - W is the weighted
    Laplacian of the round's graph. With ``gamma = 0, alpha = eta = 1`` it is local SGD over
    the schedule, with ``mix_every=1`` D-PSGD.

    One message per round, two copies of the parameters (``theta`` and y). Valid on every
    doubly stochastic schedule.

    Args:
      inner, schedule, axis_name, codec: as in `decentralized`.
      mix_every, delay, carry: as in `decent_jax.optim.diloco`; with a delay ``x_i`` above is what
        was sent.
      alpha: averaging step size, in (0, 1].
      eta: outer learning rate.
      gamma: outer momentum, in [0, 1). The default and that of ``eta`` are NoLoCo's numbers.

    References:
      `GASLoC <https://arxiv.org/abs/2606.11081>`_, 2026, equations from a transcription.
    """
    mixing = frame.Mixing(schedule, axis_name, codec, "gasloc")
    if not 0 < alpha <= 1:
        raise ValueError(f"gasloc.alpha must be above 0 and at most 1, got {alpha}")
    require.not_negative("gasloc.eta", eta)
    require.below_one("gasloc.gamma", gamma)

    def step(theta, x, before, mix, key, after):
        y = trees.add(trees.scale(1 - eta, theta), trees.scale(eta, x))
        mixed = mix(y)
        fine = trees.all_finite(y)  # else the neighbours' average is all there is
        pull = trees.scale(alpha, optax.tree.sub(mixed, y))
        moved = trees.scale(gamma, optax.tree.sub(y, before))
        after = optax.tree.where(fine, trees.add(y, pull, moved), mixed)
        return after, optax.tree.where(fine, y, mixed)

    return outer_steps(
        inner, mixing, Rule(trees.copy, step), Streaming(mix_every, delay=delay, carry=carry)
    )


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
        is_zero, divided = frame.divisor(rate)
        moved = trees.scale(1 / divided, optax.tree.sub(own.x_0, x))
        u = trees.add(trees.scale(beta, own.u), moved)
        jumped = trees.add(own.x_0, trees.scale(-alpha * rate, u))
        x, u = optax.tree.where(is_zero, (x, own.u), (jumped, u))
        return x, SlowmoState(u, x), inner, ok

    return frame.method(
        inner, step, lambda params: SlowmoState(optax.tree.zeros_like(params), trees.copy(params))
    )


register(Method("quasi_global_sgd", quasi_global_sgd, ("sgd",), copies=1, section="quasi_global"))
register(Method("decentlam", decentlam, ("sgd",), copies=1))
register(Method("gasloc", gasloc, ADAM_FIRST, copies=2))
register(Method("slowmo", slowmo, copies=2))
