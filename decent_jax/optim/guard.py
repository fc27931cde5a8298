"""The state that all methods share, and one replica's own update, rejected where not finite.

Every method guards the parameters: an update from a loss or a gradient that is not finite is
rejected where it arises, single numbers of it that overflow are left out, and neighbours never mix
in parameters that are not finite. This costs one pass over the gradients and one over the
parameters, and no message but a flag with each mix.

`optax.apply_if_finite` is the same idea for one model. It checks the whole update before it writes
any of it, under a ``lax.cond``, stops the counts of learning-rate schedules, and cannot bring back
parameters that are not finite.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.groups import squared_norm


class GuardedState(NamedTuple):
    """State of every method."""

    inner: Any  # state of the local optimizer
    # shape=(), dtype=int32: updates so far, including the rejected ones
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    skipped: jax.Array  # shape=(), dtype=int32: rejected updates (optax: total_notfinite)
    failing: jax.Array  # shape=(), dtype=int32: the last ones in a row (optax: notfinite_count)
    own: Any  # the method's own state, a NamedTuple; () for most


class LocalUpdate(NamedTuple):
    """One replica's own update."""

    update: Any  # like params: zeros where it is rejected
    inner: Any  # the local optimizer's state after it
    ok: jax.Array  # shape=(), dtype=bool: whether it is accepted


@dataclasses.dataclass(frozen=True)
class Local:
    """Makes one replica's own update in one step: ``update, inner, ok = local(params)``.

    grads: the gradients as they came.
    count: () int32, the 0-based number of this update.
    mixed: parameters that the caller mixed before the gradient was known, or None.
    value: the loss, or None.
    active: () bool, whether this replica makes an update in this step; None: it does.
    inner: the local optimizer's state before the step.
    optimizer: the local optimizer.
    extra: further arguments for it.
    """

    grads: Any
    count: jax.Array
    mixed: Any
    value: jax.Array | None
    active: jax.Array | None
    inner: Any
    optimizer: optax.GradientTransformationExtraArgs
    extra: dict[str, Any]

    def __call__(
        self, params: Any, grads: Any = None, value: Any = None, fine: Any = True
    ) -> LocalUpdate:
        """The local optimizer's update at ``params``; zeros where it is rejected, or not fine.

        The update must be accepted or rejected before anything is written, so every array we check
        costs one more pass over memory. We check the gradient, whose norm we need anyway, and the
        smallest array of the update, which shows what spoils all of it (a learning rate, a moment).
        Other numbers that are not finite are left out one by one; Adam with ``eps`` above 0 has
        none if the norm of the gradient is finite. So mixing, moments, decay and check are one
        pass, on GPUs one kernel per array. Checking the whole update first moved 18 instead of 10
        times the bytes of the parameters in decentralized Adam, and held one more copy of them
        (`benchmarks/gpu_program.py`).

        Args:
          params: where the update is taken.
          grads, value: in place of the replica's own.
          fine: () bool, a further condition.
        """
        grads = self.grads if grads is None else grads
        value = self.value if value is None else value
        change, inner = self.optimizer.update(grads, self.inner, params, value=value, **self.extra)
        ok = acceptable(grads, value) & all_finite(_smallest(change)) & fine
        ok = ok if self.active is None else ok & self.active
        update = jax.tree.map(
            lambda u: jnp.where(ok & jnp.isfinite(u), u, jnp.zeros_like(u)), change
        )
        return LocalUpdate(update, _select(ok, inner, self.inner), ok)

    def mean_value(self, axis_name: AxisName) -> jax.Array | None:
        """The loss, averaged over all replicas."""
        return None if self.value is None else gossip.mean(self.value, axis_name)


Step = Callable[[Any, Any, Any, Local], tuple[Any, Any, Any, jax.Array]]


def method(
    inner: optax.GradientTransformation,
    step: Step,
    own: Callable[[Any], Any] = lambda params: (),
) -> optax.GradientTransformationExtraArgs:
    """A method from one step of it, the code of one replica.

    Args:
      inner: the local optimizer.
      step: ``step(params, own, round, local) -> (new params, new own, inner, ok)``, the last two as
        ``local(params)`` returns them.
      own: the method's own state at the start, from the parameters.

    Returns:
      A transformation with a `GuardedState`. Its ``update`` takes ``round`` (required), ``value``,
      this replica's loss, ``active``, False for a replica that makes no update of its own in this
      step, and ``mixed``, see `EarlyMixing`.
    """
    optimizer = optax.with_extra_args_support(inner)

    def init(params):
        zero = jnp.zeros((), jnp.int32)
        return GuardedState(optimizer.init(params), zero, zero, zero, own(params))

    def update(updates, state, params=None, *, round, value=None, active=None, mixed=None, **extra):
        if params is None:
            raise ValueError(
                "replicas mix parameters and got none; call "
                "update(grads, state, params, round=schedule.round_at(step))"
            )
        local = Local(updates, state.count, mixed, value, active, state.inner, optimizer, extra)
        after, kept, inner, ok = step(params, state.own, round, local)
        change = jax.tree.map(lambda new, old: new - _or_zero(old), after, params)
        failed = ~ok if active is None else ~ok & active
        return change, GuardedState(
            inner,
            state.count + 1,
            state.skipped + jnp.where(failed, 1, 0),
            jnp.where(failed, state.failing + 1, 0),
            kept,
        )

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore (round is required)


class EarlyMixing(optax.GradientTransformationExtraArgs):
    """A method whose messages depend only on the old parameters, so the caller may send them early.

    ``mix(params, count, round)``, ``count`` of the state, gives the mixed parameters of a round;
    ``update(..., round=round, mixed=mixed)`` uses them instead of mixing, with the same result, and
    communicates nothing.
    """

    mix: Callable[[Any, jax.Array, Any], Any]

    def __new__(
        cls,
        tx: optax.GradientTransformationExtraArgs,
        mix: Callable[[Any, jax.Array, Any], Any],
    ) -> "EarlyMixing":
        self = super().__new__(cls, *tx)
        self.mix = mix
        return self


def apply_updates(params: Any, updates: Any) -> Any:
    """``params + updates``, where a parameter that is not finite counts as zero.

    Methods compute their updates from the same zeros, so a replica whose parameters were not
    finite continues from its neighbours' average. Otherwise equal to `optax.apply_updates`.
    """
    return optax.apply_updates(jax.tree.map(_or_zero, params), updates)


def add(tree: Any, *others: Any) -> Any:
    """The sum of trees of equal structure, in the dtypes of the first."""
    return jax.tree.map(lambda x, *rest: jnp.asarray(sum(rest, x), x.dtype), tree, *others)


def subtract(a: Any, b: Any) -> Any:
    """``a - b``."""
    return jax.tree.map(lambda a, b: a - b, a, b)


def scale(factor: Any, tree: Any) -> Any:
    """``factor * tree`` in the tree's dtypes."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def choose(condition: jax.Array, a: Any, b: Any) -> Any:
    """``a`` where the scalar condition holds, else ``b``."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def zeros(tree: Any) -> Any:
    """Zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def copy(tree: Any) -> Any:
    """Equal arrays in buffers of their own: a donated state must not hold one array twice."""
    return jax.tree.map(jnp.array, tree)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    """The learning rate of the 0-based update ``count``."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def divisor(rate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(whether the rate is 0, the rate or 1 in its place): for updates divided by the rate."""
    is_zero = rate == 0
    return is_zero, jnp.where(is_zero, jnp.ones_like(rate), rate)


def all_finite(tree: Any) -> jax.Array:
    """() bool."""
    # Not by the largest magnitude, which is faster: XLA's CPU loses a NaN in it (jaxlib 0.10.2).
    # Not by isfinite: XLA would compute it once for this and for `_or_zero`, and keep it till then.
    return _all((jnp.abs(leaf) < jnp.inf).all() for leaf in jax.tree.leaves(tree))


def acceptable(gradient: Any, value: jax.Array | None) -> jax.Array:
    """() bool: finite loss, finite norm of the gradient (its square must not overflow)."""
    flags = [jnp.isfinite(squared_norm(g)) for g in jax.tree.leaves(gradient)]
    if value is not None:
        flags.append(jnp.isfinite(value))
    return _all(flags)


def _smallest(tree: Any) -> Any:
    """The array with the fewest numbers, among those that have any."""
    return min((x for x in jax.tree.leaves(tree) if x.size), key=lambda x: x.size, default=())


def _all(flags: Iterable[jax.Array]) -> jax.Array:
    """The conjunction as a reduction of negations, which XLA computes once.

    XLA fuses a chain of ``and``, and a plain reduction of a stack, which it turns into such a
    chain, into each of its uses: flags of all arrays into the update of each array. That took two
    thirds of the time to compile a step of 65 arrays.
    """
    flags = list(flags)
    return ~(~jnp.stack(flags)).any() if flags else jnp.array(True)


def _select(ok: jax.Array, new: Any, old: Any) -> Any:
    """``new`` where ok, else ``old``; counts of learning-rate schedules always go on."""

    def select(new, old):
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        if _is_injected(new):
            return new._replace(inner_state=_select(ok, new.inner_state, old.inner_state))
        return jnp.where(ok, new, old)

    def whole(node):
        return isinstance(node, optax.ScaleByScheduleState) or _is_injected(node)

    return jax.tree.map(select, new, old, is_leaf=whole)


def _is_injected(node: Any) -> bool:
    """Whether this is the state of `optax.inject_hyperparams`."""
    return isinstance(node, tuple) and {"hyperparams", "inner_state"} <= set(
        getattr(node, "_fields", ())
    )


def _or_zero(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
