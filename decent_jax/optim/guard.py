"""What all methods share: the state, and one replica's own update, rejected where not finite.

Every method guards the parameters: an update from a loss or a gradient that is not finite is
rejected where it arises, single numbers of it that overflow are left out, and parameters that are
not finite are never mixed in by a neighbour. It costs one pass over the gradients and one over the
parameters, and no message but a flag beside each mix.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip


class GuardedState(NamedTuple):
    """State of every method."""

    inner: Any  # of the local optimizer
    count: jax.Array  # shape=(), dtype=int32: updates so far, the rejected ones too
    skipped: jax.Array  # shape=(), dtype=int32: updates rejected since the start
    failing: jax.Array  # shape=(), dtype=int32: updates rejected in a row until now
    own: Any  # what the method keeps besides; () for most


class Local:
    """One replica's own update in one step; a method calls it once.

    Attributes:
      grads: the gradients as they came.
      count: () int32, the 0-based number of this update.
      inner: the state of the local optimizer, new once the update was made.
      mixed: parameters that were mixed before the gradient was known, or None.
      ok: () bool, whether the update is accepted; then False leaves parameters and state alone.
    """

    def __init__(self, inner, grads, state, value, active, mixed, extra):
        self._optimizer, self._value, self._active, self._extra = inner, value, active, extra
        self.grads, self.count, self.inner, self.mixed = grads, state.count, state.inner, mixed

    def __call__(self, params: Any, grads: Any = None, value: Any = None, fine: Any = True) -> Any:
        """The local optimizer's update at ``params``; zeros where it is rejected, or not fine.

        Whether it is accepted must be known before the first number is written, so what is looked
        at decides how often memory is read: here the gradient, whose norm is needed anyway, and of
        the update its smallest array, which shows what spoils all of it (a learning rate, a
        moment). Single numbers that are not finite elsewhere are left out; Adam with ``eps`` above
        0 has none where the norm of the gradient is finite. So mixing, moments, decay and check are
        one pass, on GPUs one kernel an array. To look at the whole update first moved 18 instead of
        10 times the bytes of the parameters in decentralized Adam, and held one more copy of them
        (`benchmarks/gpu_program.py`).
        """
        grads = self.grads if grads is None else grads
        value = self._value if value is None else value
        change, inner = self._optimizer.update(
            grads, self.inner, params, value=value, **self._extra
        )
        self.finite = acceptable(grads, value) & all_finite(_smallest(change)) & fine
        self.ok = self.finite if self._active is None else self.finite & self._active
        self.inner = _select(self.ok, inner, self.inner)
        return jax.tree.map(
            lambda u: jnp.where(self.ok & jnp.isfinite(u), u, jnp.zeros_like(u)), change
        )

    def never(self) -> jax.Array:
        """() bool, False, but not known before the gradient is: whether its norm is negative."""
        return (jnp.stack([_square(g) for g in jax.tree.leaves(self.grads)]) < 0).any()

    def mean_value(self, axis_name):
        """The loss, averaged over all replicas."""
        return None if self._value is None else gossip.mean(self._value, axis_name)

    def state(self, old: GuardedState, own: Any) -> GuardedState:
        """The method's state after the update."""
        failed = ~self.finite if self._active is None else ~self.finite & self._active
        return GuardedState(
            self.inner,
            old.count + 1,
            old.skipped + jnp.where(failed, 1, 0),
            jnp.where(failed, old.failing + 1, 0),
            own,
        )


def method(
    inner: optax.GradientTransformation,
    step: Callable[[Any, Any, Any, Local], tuple[Any, Any]],
    own: Callable[[Any], Any] = lambda params: (),
) -> optax.GradientTransformationExtraArgs:
    """A method from one step of it, ``step(params, own, round, local) -> (new params, new own)``.

    The transformation's ``update`` takes ``round`` (required), ``value``, this replica's loss,
    ``active``, False for a replica that makes no update of its own in this step, and ``mixed``,
    see `EarlyMixing`.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        zero = jnp.zeros((), jnp.int32)
        return GuardedState(inner.init(params), zero, zero, zero, own(params))

    def update(updates, state, params=None, *, round, value=None, active=None, mixed=None, **extra):
        if params is None:
            raise ValueError(
                "replicas mix parameters and got none; call "
                "update(grads, state, params, round=schedule.round_at(step))"
            )
        local = Local(inner, updates, state, value, active, mixed, extra)
        after, kept = step(params, state.own, round, local)
        change = jax.tree.map(lambda new, old: new - _or_zero(old), after, params)
        return change, local.state(state, kept)

    return optax.GradientTransformationExtraArgs(init, update)


class EarlyMixing(optax.GradientTransformationExtraArgs):
    """A method whose messages are known when the step begins, for those who send them themselves.

    ``mix(params, count, round)``, ``count`` of the state, gives the mixed parameters of a round;
    ``update(..., round=round, mixed=mixed)`` uses them in place of mixing, with the same result,
    and communicates nothing.
    """

    mix: Callable[[Any, jax.Array, Any], Any]

    def __new__(cls, tx: optax.GradientTransformationExtraArgs, mix):
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
    """The sum of trees alike, in the dtypes of the first."""
    return jax.tree.map(lambda x, *rest: sum(rest, x).astype(x.dtype), tree, *others)


def subtract(one: Any, other: Any) -> Any:
    """``one - other``."""
    return jax.tree.map(lambda a, b: a - b, one, other)


def scale(factor: Any, tree: Any) -> Any:
    """``factor * tree`` in the tree's dtypes."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def choose(condition: jax.Array, one: Any, other: Any) -> Any:
    """``one`` where the scalar condition holds, else ``other``."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


def copy(tree: Any) -> Any:
    """Equal arrays in buffers of their own: a donated state must not hold one array twice."""
    return jax.tree.map(jnp.array, tree)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    """The learning rate of the 0-based update ``count``."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def all_finite(tree: Any) -> jax.Array:
    """() bool."""
    # Not by the largest magnitude, which is faster: XLA's CPU loses a NaN in it (jaxlib 0.10.2).
    # Not by isfinite: XLA would compute it once for this and for `_or_zero`, and keep it till then.
    return _all((jnp.abs(leaf) < jnp.inf).all() for leaf in jax.tree.leaves(tree))


def acceptable(gradient: Any, value: jax.Array | None) -> jax.Array:
    """Finite loss, finite norm of the gradient (its square must not overflow)."""
    flags = [jnp.isfinite(_square(g)) for g in jax.tree.leaves(gradient)]
    if value is not None:
        flags.append(jnp.isfinite(value))
    return _all(flags)


def _square(x: jax.Array) -> jax.Array:
    """() float: the squared norm."""
    return jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))).sum()


def _smallest(tree: Any) -> Any:
    """The array with the fewest numbers, of those that have any."""
    return min((x for x in jax.tree.leaves(tree) if x.size), key=lambda x: x.size, default=())


def _all(flags: Iterable[jax.Array]) -> jax.Array:
    """The conjunction as a reduction of negations, which XLA computes once.

    A chain of ``and``, and a plain reduction of a stack, which XLA turns into such a chain, is
    fused into each of its uses: flags of all arrays into the update of each array. That took two
    thirds of the time to compile a step of 65 arrays.
    """
    flags = list(flags)
    return ~(~jnp.stack(flags)).any() if flags else jnp.array(True)


def _select(ok: jax.Array, new: Any, old: Any) -> Any:
    """``new`` where ok, else ``old``; counts of learning-rate schedules always go on."""

    def one(new, old):
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        if _is_injected(new):
            return new._replace(inner_state=_select(ok, new.inner_state, old.inner_state))
        return jnp.where(ok, new, old)

    def whole(node):
        return isinstance(node, optax.ScaleByScheduleState) or _is_injected(node)

    return jax.tree.map(one, new, old, is_leaf=whole)


def _is_injected(node: Any) -> bool:
    """The state of `optax.inject_hyperparams`."""
    return isinstance(node, tuple) and {"hyperparams", "inner_state"} <= set(
        getattr(node, "_fields", ())
    )


def _or_zero(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
