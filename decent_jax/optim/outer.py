"""An outer optimizer over many local steps: SlowMo, DiLoCo and streaming DiLoCo."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.wire import Wire
from decent_jax.optim import guard, require
from decent_jax.optim.decentralized import Mixing
from decent_jax.optim.declaration import Method, model_bytes
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
    wire: Wire | None = None,
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
      schedule, axis_name, wire: as in `decentralized`.
      learning_rate: :math:`\eta`, that of ``inner`` (an average at :math:`\eta = 0` leaves u).
      alpha: slow learning rate, at least 0.
      beta: slow momentum, in [0, 1).

    References:
      Wang et al., `SlowMo <https://arxiv.org/abs/1910.00643>`_, 2020, Algorithm 1.
    """
    require.not_negative("slowmo.alpha", alpha)
    require.below_one("slowmo.beta", beta)
    require.doubly_stochastic("slowmo", schedule)
    require.averages("slowmo", schedule, always=False)
    mixing = Mixing(schedule, axis_name, wire)

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
        x, u = guard.choose(is_zero, (x, own.u), (jumped, u))
        return x, SlowmoState(u, x), inner, ok

    def own(params):
        return SlowmoState(optax.tree.zeros_like(params), guard.copy(params))

    return guard.method(inner, step, own)


class DilocoState(NamedTuple):
    """Own state of `diloco`."""

    theta: Any  # like params: the outer parameters
    sent: Any  # like params: x of step t - delay, under way; None for a delay of 0 or 1
    states: tuple  # the outer optimizer's state of each fragment


def diloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    outer: optax.GradientTransformation | None = None,
    axis_name: AxisName = "replica",
    mix_every: int = 1,
    *,
    fragments: int = 1,
    delay: int = 0,
    alpha: float = 0.0,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo: local optimizers for many steps, then an outer one on their average movement.

    The parameters are cut into ``fragments`` of about equal size along their order. Round r of the
    schedule averages fragment ``r % fragments``, so each is averaged every ``fragments *
    mix_every`` steps. With :math:`\theta` the outer parameters (equal on all replicas), x the
    replica's own after its step t, and :math:`\tau` = ``delay``:

    .. math::
        \delta = \theta - \tfrac1n \textstyle\sum_j x_j^{(t - \tau)}, \qquad
        \theta \leftarrow \mathrm{outer}(\theta, \delta), \qquad
        x_i \leftarrow \alpha\, x_i^{(t)} + (1 - \alpha)\, \theta

    A delay of 1 sends the parameters that are known when the step begins, so the message travels
    during it; a longer one sends those of an earlier step, of which a copy is kept. With
    ``outer = optax.sgd(1.0)`` and one fragment it is local SGD; with ``optax.sgd(alpha, momentum)``
    and a fixed learning rate SlowMo on local steps.

    One message of a fragment's size every ``mix_every`` steps. It keeps the parameters
    (:math:`\theta`), the outer optimizer's state (one copy for momentum), and for a delay above 1
    one copy more.

    Args:
      inner: the local optimizer, AdamW in the papers; its state stays local.
      schedule: ``complete``, with a round for every fragment (`decent_jax.topology.repeat`).
      outer: the outer optimizer; None: SGD with Nesterov momentum and the two numbers below.
      axis_name: as in `decentralized`.
      mix_every: steps between two rounds in the caller's loop; needed for ``delay``.
      fragments: parts of the model, averaged in turn (F); 1 is DiLoCo, more is streaming DiLoCo.
      delay: steps that a message takes, less than ``mix_every``.
      alpha: the share of its own parameters that a replica keeps, in [0, 1].
      outer_learning_rate, outer_momentum: of the outer optimizer, as in the papers.

    Raises:
      ValueError: a number out of range, a schedule without whole averages or rounds enough, more
        fragments than arrays.

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, Algorithm 1, and
      `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025, Algorithm 2.
    """
    require.averages("diloco", schedule, always=True)
    if fragments < 1 or schedule.period % fragments:
        raise ValueError(
            f"diloco with {fragments} fragments needs a schedule with a round for each, got one of "
            f"{schedule.period}; use topology.repeat(schedule, {fragments})"
        )
    if not 0 <= delay <= max(mix_every - 1, 0):
        raise ValueError(f"delay must be from 0 to mix_every - 1 = {mix_every - 1}, got {delay}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    require.not_negative("diloco.outer_learning_rate", outer_learning_rate)
    require.below_one("diloco.outer_momentum", outer_momentum)
    outer = outer or optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    mixing = Mixing(schedule, axis_name, None)

    def step(params, own, round, local):
        update, inner, ok = local(params)
        x, sent = guard.add(params, update), own.sent
        if delay > 1:  # from now on the parameters of this step are under way
            is_due = (local.count + 1 + delay) % mix_every == 0
            sent = guard.choose(is_due, x, own.sent)
        if round is None:
            return x, own._replace(sent=sent), inner, ok
        late = (x, params, own.sent)[min(delay, 2)]  # x of step t - delay
        f = gossip.number(round) % fragments
        which = _fragments(params, fragments)[f]
        theta = _taken(own.theta, which)
        delta = optax.tree.sub(theta, mixing(_taken(late, which), round, local.count))
        change, state = outer.update(delta, own.states[f], theta)
        theta: Any = optax.apply_updates(theta, change)
        new = theta
        if alpha:
            pairs = zip(_taken(x, which), theta, strict=True)
            new = [alpha * a + (1 - alpha) * b for a, b in pairs]
        states = (*own.states[:f], state, *own.states[f + 1 :])
        own = DilocoState(_replaced(own.theta, which, theta), sent, states)
        return _replaced(x, which, new), own, inner, ok

    def own(params):
        states = [outer.init(_taken(params, which)) for which in _fragments(params, fragments)]
        sent = guard.copy(params) if delay > 1 else None
        return DilocoState(guard.copy(params), sent, tuple(states))

    return guard.method(inner, step, own)


def _taken(tree: Any, which: list[int]) -> list[jax.Array]:
    """The leaves of these numbers."""
    leaves = jax.tree.leaves(tree)
    return [leaves[k] for k in which]


def _replaced(tree: Any, which: list[int], new: list[jax.Array]) -> Any:
    """The tree with new leaves at these numbers."""
    leaves, structure = jax.tree.flatten(tree)
    for k, leaf in zip(which, new, strict=True):
        leaves[k] = leaf
    return structure.unflatten(leaves)


def _fragments(params: Any, count: int) -> list[list[int]]:
    """The numbers of the leaves in each fragment: consecutive, of about equal size."""
    sizes = np.array([leaf.size for leaf in jax.tree.leaves(params)])
    if count > len(sizes):
        raise ValueError(
            f"{count} fragments are more than the {len(sizes)} arrays of the parameters"
        )
    middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    of = np.minimum((middle * count).astype(int), count - 1)
    for k in range(count):  # a large array may fill several fragments; leave none empty
        of[k] = min(of[k], k)
        of[-1 - k] = max(of[-1 - k], count - 1 - k)
    of = np.maximum.accumulate(of)
    for k in range(1, len(of)):
        of[k] = min(of[k], of[k - 1] + 1)
    return [np.flatnonzero(of == k).tolist() for k in range(count)]


def _sent(params, wire, numbers):
    return model_bytes(params, wire, numbers) / numbers["fragments"]


SLOWMO = Method("slowmo", slowmo, copies=2, any_wire=False)
DILOCO = Method(
    "diloco",
    diloco,
    optimizers=("adam", "sgd", "accum_adam"),
    copies=lambda parts, numbers: 2 + (numbers["delay"] > 1),
    any_wire=False,
    sent=_sent,
)
