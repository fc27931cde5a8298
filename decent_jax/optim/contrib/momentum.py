"""Moments averaged seldom (DES-LOC), quasi-global momentum, DecentLaM."""

import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec
from decent_jax.optim import finite, frame, require, trees
from decent_jax.optim.accum_adam import bias_correction, moment
from decent_jax.optim.declaration import Method, model_bytes, register
from decent_jax.optim.momentum import with_moments
from decent_jax.topology import Schedule

_MOST_PHASES = 16


def des_loc(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    *,
    first: Annotated[int, "rounds per average of the first moments"] = 3,
    second: Annotated[int, "rounds per average of the second moments"] = 6,
) -> optax.GradientTransformationExtraArgs:
    r"""DES-LOC: Adam's moments are averaged, too, but less often than the parameters.

    Adapt-then-combine; with ``mix_every=K`` the parameters are averaged every K steps, the first
    moments every ``first`` K, the second moments every ``second`` K:

    .. math::
        x_i \leftarrow \sum_j W_{ij} (x_j + \Delta_j), \qquad
        m_i \leftarrow \sum_j W_{ij} m_j, \qquad v_i \leftarrow \sum_j W_{ij} v_j

    The moments take the rounds of the schedule in turn, too, each at its own pace. With ``first =
    1`` and no second moments it is `gossiped_momentum`. 1 + 1 / ``first`` + 1 / ``second`` messages
    of the model's size per round on average, no memory. Valid on every doubly stochastic schedule.

    Messages are float32: a coded difference can take more from a small second moment than it has.

    With ``second`` larger than ``first``, a coordinate whose gradients on a replica were tiny
    so far (rectifiers, rare tokens) has a tiny v there, and moves by m / sqrt(v), up to m /
    eps, once m, but not yet v, has been averaged: a GPT-2 of 10M parameters, whose replicas saw
    128 tokens per step, diverged. Equal periods bound the move, since v is then averaged along
    with m.

    Args:
      inner: Adam or Accumulated Adam, or another with states called ``mu`` and ``nu``.
      schedule: ``complete`` in the paper; with a number of rounds that ``first`` and ``second``
        divide, since they differ (`decent_jax.topology.repeat`).
      axis_name: as in `decentralized`.
      first: rounds per average of the first moments.
      second: rounds per average of the second moments.

    Raises:
      ValueError: a number out of range, a schedule with too few rounds, an optimizer without second
        moments.

    References:
      Iacob et al., `DES-LOC <https://arxiv.org/abs/2505.22549>`_, 2026, periods from a
      transcription.
    """
    mixing = frame.Mixing(schedule, axis_name, method="des_loc")
    for name, rounds in (("first", first), ("second", second)):
        if not 1 <= rounds <= _MOST_PHASES:
            raise ValueError(f"des_loc.{name} must be from 1 to {_MOST_PHASES}, got {rounds}")
    phases = math.lcm(first, second)
    require.phases(f"des_loc with first {first} and second {second}", schedule, phases)
    return with_moments(
        inner,
        mixing,
        {"mu": first, "nu": second},
        2,
        "des_loc averages both moments of Adam: use optax.adam(lr) or accum_adam; with momentum "
        "alone use gossiped_momentum",
    )


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


class AdamState(NamedTuple):
    """Own state of `quasi_global_adam`; both are shaped like the parameters."""

    m: Any  # first moment
    v: Any  # second moment


def quasi_global_adam(
    learning_rate: optax.ScalarOrSchedule,
    schedule: Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    axis_name: AxisName = "replica",
    gradient: optax.GradientTransformation | None = None,
    codec: Codec | None = None,
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
    and experiments, so good learning rates are smaller than Adam's. One message per step; two
    copies of the parameters (m, v). Arguments as in `quasi_global_sgd`.

    References:
      Lin et al., `Quasi-Global Momentum <https://arxiv.org/abs/2102.04761>`_, 2021, QG-DAdam.
    """
    mixing = frame.Mixing(schedule, axis_name, codec, "quasi_global")
    require.below_one("b1", b1)
    require.below_one("b2", b2)
    require.not_negative("eps", eps)

    def step(params, own, round, local):
        rate = frame.rate_at(learning_rate, local.count)
        g, inner, ok = local(params)
        m_scale = 1 / bias_correction(b1, local.count + 1)
        v_scale = 1 / bias_correction(b2, local.count + 1)
        v_tilde = moment(b2, own.v, g, 2)

        def descend(m, v, g):
            m, v = (b1 * m + g) * m_scale, v * v_scale
            change = -jnp.asarray(rate, m.dtype) * m / (jnp.sqrt(v) + eps)
            return jnp.where(ok, change, 0)  # old moments alone move no parameters

        change = jax.tree.map(descend, own.m, v_tilde, g)
        after = mixing(trees.add(params, change), round, local.count)
        moved = optax.tree.sub(params, after)
        norm = optax.tree.norm(moved)
        d = trees.scale(1 / (norm + 1e-8), moved)
        moments = AdamState(moment(b1, own.m, d, 1), moment(b2, own.v, d, 2))
        # A replica that is not finite moves by no number that its moments could follow.
        return after, optax.tree.where(jnp.isfinite(norm), moments, own), inner, ok

    return frame.method(gradient, step, frame.filled(AdamState))


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
        only_mixes = is_zero | ~ok | ~finite.all_finite(adapted)
        after, m = optax.tree.where(only_mixes, (mixed, own.m), (after, m))
        return after, MomentumState(m), inner, ok

    return frame.method(gradient, step, frame.filled(MomentumState))


register(
    Method(
        "des_loc",
        des_loc,
        optimizers=("adam", "accum_adam"),
        phases=lambda own: math.lcm(own["first"], own["second"]),
        sent=lambda params, parts, own: (
            model_bytes(params, parts, own) * (1 + 1 / own["first"] + 1 / own["second"])
        ),
    )
)
register(
    Method(
        "quasi_global_sgd", quasi_global_sgd, optimizers=("sgd",), copies=1, section="quasi_global"
    )
)
register(Method("quasi_global_adam", quasi_global_adam, optimizers=("adam",), copies=2))
register(Method("decentlam", decentlam, optimizers=("sgd",), copies=1))
