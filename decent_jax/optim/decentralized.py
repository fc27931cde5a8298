"""Wrappers that turn a local optimizer into one replica's part of a distributed one.

Both wrappers guard the parameters: an update that is not finite is rejected where it arises, and
parameters that are not finite are never mixed in by a neighbour. It costs one pass over the
gradients and one over the parameters, and no message but a flag beside each mix.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.topology import Schedule


class GuardedState(NamedTuple):
    """State of `decentralized` and `all_reduce`."""

    inner: Any
    skipped: jax.Array  # shape=(), dtype=int32: updates rejected since the start
    failing: jax.Array  # shape=(), dtype=int32: updates rejected in a row until now


def decentralized(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "with",
    axis_name: AxisName = "replica",
) -> optax.GradientTransformationExtraArgs:
    r"""Local optimizer steps, and one round of averaging with neighbours in place of all-reduce.

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
    (weight decay applies to them). ``"then"`` (adapt-then-combine) sends the result of the update.

    ``update`` takes ``round`` (required), a static Python int in ``[0, schedule.period)`` from
    ``schedule.round_at(step)``, or None for a step without communication; and optionally ``value``,
    this replica's loss. A local update is rejected when the loss, the norm of the gradient or the
    update is not finite: the parameters are then only mixed, and the state of ``inner`` stays, but
    for the counts of learning-rate schedules, which go on with the step.

    Apply the result with `decent_jax.optim.apply_updates` (or `optax.apply_updates`, which cannot
    bring back a replica whose parameters are not finite).

    Args:
      inner: any optax transformation; clipping belongs in here.
      schedule: of as many replicas as the axes hold.
      combine: ``"with"`` or ``"then"``.
      axis_name: see `decent_jax.gossip.mix`.

    Returns:
      A transformation whose state is a `GuardedState`; ``init`` communicates nothing.

    Raises:
      ValueError: an unknown ``combine``.
      TypeError: an ``update`` without ``round``.

    Example:
      Four replicas on one device, each drawn to its own target, agree on the mean of the targets:

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
      ...     one = jax.vmap(lambda *args: step(*args, schedule.round_at(t)), axis_name="replica")
      ...     x, state = one(x, state, targets)
      >>> [f"{value:.1f}" for value in x]
      ['2.0', '2.0', '2.0', '2.0']

    References:
      Wang et al., `From Promise to Practice <https://arxiv.org/abs/2410.11998>`_, 2025,
      Algorithms 1 and 3. Unlike Decent-DP the first step mixes, clipping is of the whole replica,
      and a rejected step rejects the whole update, not a bucket's.
    """
    if combine not in ("with", "then"):
        raise ValueError(f"combine must be 'with' or 'then', got {combine!r}")
    inner = optax.with_extra_args_support(inner)

    def mix(params, round):
        return gossip.mix(params, schedule, round, axis_name, finite=_all_finite(params))

    def update(updates, state, params=None, *, round: int | None, value=None, **extra):
        if params is None:
            raise ValueError(
                "decentralized mixes parameters and got none; call "
                "update(grads, state, params, round=schedule.round_at(step))"
            )
        before = mix(params, round) if combine == "with" else params
        local, new_inner = inner.update(updates, state.inner, before, value=value, **extra)
        ok = _acceptable(updates, local, value)
        local = jax.tree.map(lambda u: jnp.where(ok, u, jnp.zeros_like(u)), local)
        after = optax.apply_updates(before, local)
        if combine == "then":
            after = mix(after, round)
        change = jax.tree.map(lambda new, old: new - _or_zero(old), after, params)
        return change, _advance(state, new_inner, ok)

    return optax.GradientTransformationExtraArgs(_guarded_init(inner), update)


def all_reduce(
    inner: optax.GradientTransformation, axis_name: AxisName = "replica"
) -> optax.GradientTransformationExtraArgs:
    r"""The baseline: every replica applies ``inner`` to the mean gradient.

    .. math:: g = \frac1n \sum_i \nabla f_i(x), \qquad x \leftarrow x + \Delta(g)

    Replicas that begin equal stay equal. ``inner`` clips the mean gradient. A mean that is not
    finite is rejected by all replicas alike, as in `decentralized`, whose extra arguments are
    accepted so that the two can be swapped (``round`` is ignored).
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, *, round=None, value=None, **extra):
        del round
        updates = gossip.mean(updates, axis_name)
        if value is not None:
            value = gossip.mean(value, axis_name)
        local, new_inner = inner.update(updates, state.inner, params, value=value, **extra)
        ok = _acceptable(updates, local, value)
        local = jax.tree.map(lambda u: jnp.where(ok, u, jnp.zeros_like(u)), local)
        return local, _advance(state, new_inner, ok)

    return optax.GradientTransformationExtraArgs(_guarded_init(inner), update)


def apply_updates(params: Any, updates: Any) -> Any:
    """``params + updates``, where a parameter that is not finite counts as zero.

    `decentralized` computes its updates from the same zeros, so a replica whose parameters were
    not finite continues from its neighbours' average. Otherwise equal to `optax.apply_updates`.
    """
    return optax.apply_updates(jax.tree.map(_or_zero, params), updates)


def _guarded_init(inner: optax.GradientTransformation) -> Callable[[Any], GuardedState]:
    def init(params):
        return GuardedState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    return init


def _advance(state: GuardedState, new_inner: Any, ok: jax.Array) -> GuardedState:
    return GuardedState(
        _select(ok, new_inner, state.inner),
        state.skipped + jnp.where(ok, 0, 1),
        jnp.where(ok, 0, state.failing + 1),
    )


def _select(ok: jax.Array, new: Any, old: Any) -> Any:
    """``new`` where ok, else ``old``; counts of learning-rate schedules always go on."""

    def choose(new, old):
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        if _is_injected(new):
            return new._replace(inner_state=_select(ok, new.inner_state, old.inner_state))
        return jnp.where(ok, new, old)

    def whole(node):
        return isinstance(node, optax.ScaleByScheduleState) or _is_injected(node)

    return jax.tree.map(choose, new, old, is_leaf=whole)


def _is_injected(node: Any) -> bool:
    """The state of `optax.inject_hyperparams`."""
    return isinstance(node, tuple) and {"hyperparams", "inner_state"} <= set(
        getattr(node, "_fields", ())
    )


def _acceptable(gradient: Any, update: Any, value: jax.Array | None) -> jax.Array:
    """Finite loss, finite norm of the gradient (its square must not overflow), finite update."""
    ok = _all_finite(update)
    for g in jax.tree.leaves(gradient):
        wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        ok &= jnp.isfinite(jnp.square(wide).sum())
    return ok if value is None else ok & jnp.isfinite(value)


def _all_finite(tree: Any) -> jax.Array:
    ok = jnp.array(True)
    for leaf in jax.tree.leaves(tree):
        ok &= jnp.isfinite(leaf).all()
    return ok


def _or_zero(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
