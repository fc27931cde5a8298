"""An outer optimizer over many local steps: SlowMo, DiLoCo and streaming DiLoCo."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.wire import Wire
from decent_jax.optim import guard, require
from decent_jax.optim.decentralized import Mixing
from decent_jax.topology import Schedule


def slowmo(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    learning_rate: optax.ScalarOrSchedule,
    alpha: float = 1.0,
    beta: float = 0.7,
    axis_name: AxisName = "replica",
    *,
    wire: Wire | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Slow momentum over whatever happens between two averages of all replicas.

    Every step is adapt-then-combine. After a round that averages all replicas (``complete`` every
    H steps, or those of ``periodic_average(one_peer_exp, every=H)``), with :math:`\bar x` the
    average and :math:`x_0` the parameters after the one before:

    .. math::
        u \leftarrow \beta u + (x_0 - \bar x) / \eta, \qquad
        x \leftarrow x_0 - \alpha \eta u

    One message a step (that of the schedule), two copies of the parameters (:math:`x_0`, u), equal
    on all replicas if they begin equal. :math:`\beta = 0, \alpha = 1` is `decentralized`.

    Args:
      inner: the local optimizer; its state is kept over an average (the paper's "maintain").
      schedule, axis_name, wire: as in `decentralized`.
      learning_rate: :math:`\eta`, that of ``inner`` (an average at :math:`\eta = 0` leaves u).
      alpha: slow learning rate.
      beta: slow momentum.

    References:
      Wang et al., `SlowMo <https://arxiv.org/abs/1910.00643>`_, 2020, Algorithm 1.
    """
    require.doubly_stochastic("slowmo", schedule)
    require.averages("slowmo", schedule, always=False)
    mixing = Mixing(schedule, axis_name, wire)

    def step(params, own, round, local):
        after = mixing(guard.add(params, local(params)), round, local.count)
        which = gossip.number(round)
        if which is None or schedule.rounds[which].group_size != schedule.num_replicas:
            return after, own
        rate = jnp.asarray(guard.rate_at(learning_rate, local.count))
        stands = rate == 0
        by = jnp.where(stands, jnp.ones_like(rate), rate)
        moved = guard.scale(1 / by, guard.subtract(own["start"], after))
        slow = guard.add(guard.scale(beta, own["slow"]), moved)
        jumped = guard.add(own["start"], guard.scale(-alpha * rate, slow))
        after, slow = guard.choose(stands, (after, own["slow"]), (jumped, slow))
        return after, {"start": after, "slow": slow}

    def own(params):
        return {"start": guard.copy(params), "slow": guard.zeros(params)}

    return guard.method(inner, step, own)


def diloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    outer: optax.GradientTransformation | None = None,
    axis_name: AxisName = "replica",
    *,
    fragments: int = 1,
    mix_every: int = 1,
    delay: int = 0,
    alpha: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo: local optimizers for many steps, and an outer one on how far they came.

    The parameters are cut into ``fragments`` of about equal size along their order; round r of the
    schedule is about fragment ``r % fragments``, so each is averaged every ``fragments *
    mix_every`` steps. With :math:`\theta` the outer parameters (equal on all replicas), x the
    replica's own after its step t, and :math:`\tau` = ``delay``:

    .. math::
        \delta = \theta - \tfrac1n \textstyle\sum_j x_j^{(t - \tau)}, \qquad
        \theta \leftarrow \mathrm{outer}(\theta, \delta), \qquad
        x_i \leftarrow \alpha\, x_i^{(t)} + (1 - \alpha)\, \theta

    A delay of 1 sends what is known when the step begins, so the message travels during it; a
    longer one sends what has been ready for as long (a copy of the parameters is kept for it). With
    ``outer = optax.sgd(1.0)`` and one fragment it is local SGD; with ``optax.sgd(alpha, momentum)``
    and a fixed learning rate SlowMo on local steps.

    One message of a fragment's size every ``mix_every`` steps; the parameters (:math:`\theta`) and
    the outer optimizer's state (one copy for momentum), and one copy more for a delay above 1.

    Args:
      inner: the local optimizer, AdamW in the papers; its state stays local.
      schedule: ``complete``, with a round for every fragment (`decent_jax.topology.repeat`).
      outer: `optax.sgd(0.7, momentum=0.9, nesterov=True)` where None, as in the papers.
      axis_name: as in `decentralized`.
      fragments: F; 1 is DiLoCo, more is streaming DiLoCo.
      mix_every: steps between two rounds, as the caller's loop has it; needed for ``delay``.
      delay: steps that a message takes, less than ``mix_every``.
      alpha: how much of its own parameters a replica keeps, in [0, 1].

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
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    mixing = Mixing(schedule, axis_name, None)

    def step(params, own, round, local):
        after = guard.add(params, local(params))
        kept = dict(own)
        if delay > 1:  # the step whose parameters are sent `delay` steps later
            due = (local.count + 1 + delay) % mix_every == 0
            kept["sent"] = guard.choose(due, after, own["sent"])
        if round is None:
            return after, kept
        ready = {0: after, 1: params}.get(delay, own.get("sent"))
        leaves, structure = jax.tree.flatten(after)
        outers = jax.tree.leaves(own["outer"])
        fragment = gossip.number(round) % fragments
        which = _fragments(after, fragments)[fragment]
        mean = mixing([jax.tree.leaves(ready)[k] for k in which], round, local.count)
        old = [outers[k] for k in which]
        change, state = outer.update(guard.subtract(old, mean), own["states"][fragment], old)
        for k, new in zip(which, optax.apply_updates(old, change), strict=True):
            leaves[k] = new if alpha == 0 else alpha * leaves[k] + (1 - alpha) * new
            outers[k] = new
        states = list(own["states"])
        states[fragment] = state
        kept |= {"outer": structure.unflatten(outers), "states": tuple(states)}
        return structure.unflatten(leaves), kept

    def own(params):
        leaves = jax.tree.leaves(params)
        states = [outer.init([leaves[k] for k in which]) for which in _fragments(params, fragments)]
        kept = {"outer": guard.copy(params), "states": tuple(states)}
        return kept | ({"sent": guard.copy(params)} if delay > 1 else {})

    return guard.method(inner, step, own)


def _fragments(params: Any, count: int) -> list[list[int]]:
    """The numbers of the leaves in each fragment: consecutive, of about equal size."""
    sizes = np.array([leaf.size for leaf in jax.tree.leaves(params)])
    if count > len(sizes):
        raise ValueError(
            f"{count} fragments are more than the {len(sizes)} arrays of the parameters"
        )
    middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    of = np.minimum((middle * count).astype(int), count - 1)
    for k in range(count):  # none is empty: a large array may have filled several
        of[k] = min(of[k], k)
        of[-1 - k] = max(of[-1 - k], count - 1 - k)
    of = np.maximum.accumulate(of)
    for k in range(1, len(of)):
        of[k] = min(of[k], of[k - 1] + 1)
    return [np.flatnonzero(of == k).tolist() for k in range(count)]
