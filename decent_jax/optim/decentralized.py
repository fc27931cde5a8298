"""Gossip instead of all-reduce, in both orders, and the all-reduce it is compared with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.wire import Wire
from decent_jax.optim import guard, require
from decent_jax.optim.declaration import BOTH, Method
from decent_jax.topology import Schedule


class Mixing:
    """The communication of a method: over which schedule and axis, and in which format."""

    def __init__(self, schedule: Schedule, axis_name: AxisName, wire: Wire | None, seed: int = 0):
        if wire is not None:
            gossip.check_coded(schedule)
        self.schedule, self.axis_name, self.wire, self.seed = schedule, axis_name, wire, seed

    def __call__(self, tree: Any, round: Any, count: jax.Array, after: Any = None) -> Any:
        """One round of `decent_jax.gossip.mix`, which ignores replicas that are not finite."""
        if round is None:
            return tree
        return gossip.mix(
            tree,
            self.schedule,
            round,
            self.axis_name,
            finite=guard.all_finite(tree),
            wire=self.wire,
            key=self.key(count),
            after=after,
        )

    def key(self, count: jax.Array) -> jax.Array | None:
        """The key of step ``count``, the same on all replicas; None where nothing is coded."""
        return None if self.wire is None else jax.random.fold_in(jax.random.key(self.seed), count)


def decentralized(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "with",
    axis_name: AxisName = "replica",
    wire: Wire | None = None,
    *,
    gamma: optax.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Local optimizer steps, and one round of averaging with neighbours instead of all-reduce.

    Replica i holds its own :math:`x_i` and its own state of ``inner``; only parameters are sent.
    With :math:`W` the matrix of the round and :math:`\Delta_i(\cdot)` the update of ``inner``,
    whose gradient is always taken at :math:`x_i`:

    .. math::
        \text{with:}\quad \hat x_i = \sum_j W_{ij} x_j, \qquad
            x_i \leftarrow \hat x_i + \Delta_i(\hat x_i)
        \qquad\qquad
        \text{then:}\quad x_i \leftarrow \sum_j W_{ij} \big(x_j + \Delta_j(x_j)\big)

    ``"with"`` (adapt-with-combine) sends parameters that are known when the step begins, so the
    messages travel during the forward and backward pass; ``inner`` sees the mixed parameters
    (weight decay applies to them). ``"then"`` (adapt-then-combine) sends the result of the update,
    so nothing is computed meanwhile.

    ``update`` takes ``round`` (required), a static Python int in ``[0, schedule.period)`` from
    ``schedule.round_at(step)``, or None for a step without communication; and optionally ``value``,
    this replica's loss. A local update is rejected when the loss, the norm of the gradient or the
    update of the smallest array is not finite: the parameters are then only mixed, and the state of
    ``inner`` stays, but for the counts of learning-rate schedules, which go on with the step. Other
    numbers of an update that are not finite are left out.

    Apply the result with `decent_jax.optim.apply_updates` (or `optax.apply_updates`, which cannot
    bring back a replica whose parameters are not finite).

    With ``inner = optax.sgd(lr)`` this is D-PSGD (Lian et al. 2017; "then" is also called
    adapt-then-combine or DSGD), with momentum inside DmSGD with local momentum, with
    `optax.adamw` or `accum_adamw` decentralized and Accumulated Adam; over ``complete`` every H
    steps local SGD, and over ``periodic_average(..., every=H)`` Gossip-PGA (Chen et al. 2021).

    Args:
      inner: any optax transformation; clipping belongs in here.
      schedule: of as many replicas as the axes hold; every replica's weights sum to 1.
      combine: ``"with"`` or ``"then"``.
      axis_name: see `decent_jax.gossip.mix`.
      wire: format of the messages, see `decent_jax.gossip.wire`.
      gamma: consensus factor :math:`\gamma`, a number or an optax schedule of the step:
        :math:`(1-\gamma) x_i + \gamma \sum_j W_{ij} x_j` instead of the mix (DSGD-AC,
        arXiv 2602.02899, takes the learning rate over its peak, to a power).

    Returns:
      A transformation whose state is a `GuardedState`; ``init`` communicates nothing. With
      ``"with"`` it is an `EarlyMixing`.

    Raises:
      ValueError: an unknown ``combine``; a negative gamma; a schedule on which not every replica's
        weights sum to 1.
      TypeError: an ``update`` without ``round``.

    Example:
      Four replicas on one device, each with its own target, agree on the mean of the targets:

      >>> import jax, jax.numpy as jnp, optax
      >>> from decent_jax import optim, topology
      >>> schedule = topology.make("one_peer_exp", 4)
      >>> tx = optim.decentralized(optax.sgd(0.01), schedule)
      >>> def step(x, state, target, round):
      ...     updates, state = tx.update(x - target, state, x, round=round)
      ...     return optim.apply_updates(x, updates), state
      >>> x, targets = jnp.zeros(4), jnp.array([0.0, 1.0, 2.0, 5.0])
      >>> state = jax.vmap(tx.init)(x)
      >>> for t in range(1000):
      ...     run = jax.vmap(lambda *args: step(*args, schedule.round_at(t)), axis_name="replica")
      ...     x, state = run(x, state, targets)
      >>> [f"{value:.1f}" for value in x]
      ['2.0', '2.0', '2.0', '2.0']

    References:
      Wang et al., `From Promise to Practice <https://arxiv.org/abs/2410.11998>`_, 2025,
      Algorithms 1 and 3. Unlike Decent-DP the first step mixes, clipping is of the whole replica,
      and a rejected step rejects the whole update, not a bucket's.
    """
    require.combine(combine)
    require.not_negative(gamma=gamma)
    require.row_stochastic("decentralized", schedule)
    mixing = Mixing(schedule, axis_name, wire)

    def mix(params, round, count, after=None):
        mixed = mixing(params, round, count, after)
        if round is None or (not callable(gamma) and gamma == 1.0):
            return mixed
        factor = guard.rate_at(gamma, count)

        def part(x, mixed):  # a replica that is not finite takes all of its neighbours' average
            kept = x + jnp.asarray(factor, x.dtype) * (mixed - x)
            return jnp.where(jnp.isfinite(x), kept, mixed)

        return jax.tree.map(part, params, mixed)

    def adapt_with_combine(params, own, round, local):
        x_hat = local.mixed
        if x_hat is None:
            x_hat = mix(params, round, local.count, after=local.grads)
        update, inner, ok = local(x_hat)
        return guard.add(x_hat, update), own, inner, ok

    def adapt_then_combine(params, own, round, local):
        update, inner, ok = local(params)
        return mix(guard.add(params, update), round, local.count), own, inner, ok

    if combine == "then":
        return guard.method(inner, adapt_then_combine)
    tx = guard.method(inner, adapt_with_combine)
    return guard.EarlyMixing(tx, lambda params, count, round: mix(params, round, count))


def all_reduce(
    inner: optax.GradientTransformation, axis_name: AxisName = "replica"
) -> optax.GradientTransformationExtraArgs:
    r"""The baseline: every replica applies ``inner`` to the mean gradient.

    .. math:: g = \frac1n \sum_i \nabla f_i(x), \qquad x \leftarrow x + \Delta(g)

    Replicas that begin equal stay equal. ``inner`` clips the mean gradient. A mean that is not
    finite is rejected by all replicas alike, as in `decentralized`, whose extra arguments are
    accepted so that the two can be swapped (``round`` is ignored).
    """

    def step(params, own, round, local):
        del round
        mean = gossip.mean(local.grads, axis_name)
        update, inner, ok = local(params, mean, local.mean_value(axis_name))
        return guard.add(params, update), own, inner, ok

    tx = guard.method(inner, step)

    def update(updates, state, params=None, *, round=None, **extra):
        return tx.update(updates, state, params, round=round, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


DECENTRALIZED_ADAM = Method(
    "decentralized_adam", decentralized, optimizers=("adam",), orders=BOTH, section=""
)
ACCUM_ADAM = dataclasses.replace(DECENTRALIZED_ADAM, name="accum_adam", optimizers=("accum_adam",))
DECENTRALIZED_SGD = dataclasses.replace(
    DECENTRALIZED_ADAM, name="decentralized_sgd", optimizers=("sgd",)
)
ALL_REDUCE = Method(
    "all_reduce",
    all_reduce,
    optimizers=("adam", "sgd", "accum_adam"),
    orders=BOTH,
    any_wire=False,
)
