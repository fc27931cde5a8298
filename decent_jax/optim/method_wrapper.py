"""Turns one step of a method into a transformation, with its guard and its communication.

A method is one function, ``step(params, own, round, local)``, passed to `method`; it calls
``local`` once for the local update, and `Mixing` to communicate.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName, RoundId
from decent_jax.gossip.codecs import Codec
from decent_jax.gossip.permute import ReplicaAxis
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import trees, validation
from decent_jax.topology import Schedule

_LEFT_OUT: Any = object()
Updated = tuple[PyTree, PyTree]  # the update, and the state
OfParams = Callable[[PyTree], PyTree]


class GuardedState(NamedTuple):
    """State of every method."""

    inner: PyTree  # state of the local optimizer
    # shape=(), dtype=int32: updates so far, including the rejected ones
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    # shape=(), dtype=int32: updates rejected, or made without their non-finite numbers (optax:
    # total_notfinite)
    skipped: jax.Array
    # shape=(), dtype=int32: such updates in a row, up to the last one (optax: notfinite_count)
    failing: jax.Array
    own: PyTree  # the method's own state, a NamedTuple; () for most


class LocalState(NamedTuple):
    """The local optimizer's state after an update."""

    inner: PyTree
    is_whole: jax.Array  # shape=(), dtype=bool: all numbers of the update are finite


# The result of a step: the new parameters, the method's own state, the state of the local
# optimizer, and whether the update is accepted.
Stepped = tuple[PyTree, PyTree, LocalState, jax.Array]


@dataclasses.dataclass(frozen=True)
class Local:
    """A replica's local update in one step: ``update, inner, ok = local(params)`` computes it.

    grads: the gradients passed to ``update``.
    value: the loss, or None.
    mixed: the result of `Method.early`, computed before the gradient, or None.
    active: () bool, whether this replica makes an update in this step.
    state: the method's state before the step.
    optimizer: the local optimizer.
    extra: further arguments of its ``update``.
    replica: a function that returns this replica's index; None: all replicas make the same update.
    """

    grads: PyTree
    value: jax.Array | None
    mixed: PyTree
    active: jax.Array | bool
    state: GuardedState
    optimizer: optax.GradientTransformationExtraArgs
    extra: dict[str, object]
    replica: Callable[[], jax.Array] | None = None

    @property
    def count(self) -> jax.Array:
        """() int32, the 0-based number of this update."""
        return self.state.count

    def __call__(self, params: PyTree) -> tuple[PyTree, LocalState, jax.Array]:
        """The local optimizer's update at ``params``; zeros if rejected, or if not active.

        The update must be accepted or rejected before anything is written, so every array we check
        costs one more pass over memory. We check the gradient, whose norm we need anyway, and the
        smallest arrays of the update, which reveal a bad learning rate or moment even if one of
        them is frozen. Any other non-finite number becomes 0 and is counted afterwards, so mixing,
        moments, decay and this check are one pass. Checking the whole update first moved 18 instead
        of 10 times the bytes of the parameters in decentralized Adam, and needed one more copy of
        the parameters (`benchmarks/speed/programs.py`).

        Returns:
          The update, like ``params``; the new state of the local optimizer; and () bool, whether
          the update is accepted.
        """
        old = self.state.inner
        options = self.extra if self.value is None else {"value": self.value, **self.extra}
        state = old if self.replica is None else trees.with_own_keys(old, self.replica)
        with _needs_no_more():
            change, inner = self.optimizer.update(self.grads, state, params, **options)
        ok = trees.acceptable(self.grads, self.value)
        ok &= trees.unspoiled(change) & self.active

        def accepted(u: jax.Array) -> jax.Array:
            return jnp.where(ok & jnp.isfinite(u), u, jnp.zeros_like(u))

        update = jax.tree.map(accepted, change)
        return update, LocalState(trees.select(ok, inner, old), trees.all_finite(change)), ok


@contextlib.contextmanager
def _needs_no_more() -> Generator[None]:
    """Turns errors of an optimizer that needs more arguments (`optax.lbfgs`) into a TypeError."""
    try:
        yield
    except (TypeError, AttributeError, ValueError) as error:
        raise TypeError(
            f"the local optimizer needs more than parameters, gradient and loss ({error}); give "
            "update() what it lacks, or use another one, such as optax.adamw"
        ) from error


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Messages that overlap ``delay`` updates and are merged after them.

    The caller makes these updates between ``depart`` and ``arrive``, with ``round=None``, which
    leaves the method's own state unchanged. Both functions are for one replica. With
    ``mix_every=H`` a message departs after t updates if ``(t + delay) % H == 0``, and its round is
    that of the last update that it overlaps, ``schedule.round_at(t + delay - 1, H)``.

    delay: number of overlapped updates, from 1 to H - 1. With 1, ``update(..., round=round)`` alone
      also works.
    depart: ``(late, own, count, round, after=None)`` returns the message of a round, from the
      current parameters, the method's own state and the ``count`` in its `GuardedState`. Only this
      call communicates. ``after`` are arrays that the updates compute, for which the second stage
      of a group mean waits; see `decent_jax.gossip.Between`.
    arrive: ``(params, own, late, message, round)`` returns the parameters and the method's own
      state after the updates, with the message merged; ``late`` are the parameters at departure.
    """

    delay: int
    depart: Callable[..., PyTree]
    arrive: Callable[[PyTree, PyTree, PyTree, PyTree, RoundId], tuple[PyTree, PyTree]]


Early = Callable[[PyTree, PyTree, RoundId], PyTree]


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class Method(optax.GradientTransformationExtraArgs):
    """A method: optax's pair of ``init`` and ``update``, and messages that overlap computation.

    A wrapper of optax, such as `optax.chain`, keeps the pair and drops the other fields. The
    result is then the same, but ``update`` communicates, and no computation overlaps its messages.

    early: ``(params, state, round)`` returns the result of a round if it does not depend on the
      current gradient: the mixed parameters, and in `gossiped_momentum` also the moments.
      ``update(..., round=round, mixed=mixed)`` uses it instead of mixing, with the same result, and
      communicates nothing. If only parameters are sent, without ``codec`` and ``gamma``,
      `decent_jax.gossip.mix_on` computes the same ``mixed``.
    delayed: messages that overlap one or more updates.
    """

    early: Early | None = None
    delayed: Delayed | None = None

    def __new__(cls, init: Any, update: Any, early: Any = None, delayed: Any = None) -> "Method":
        method = super().__new__(cls, init, update)
        vars(method).update(early=early, delayed=delayed)
        return method


def as_method(transformation: optax.GradientTransformation) -> Method:
    """The transformation as a `Method`; a plain transformation overlaps no messages."""
    if isinstance(transformation, Method):
        return transformation
    return Method(*optax.with_extra_args_support(transformation))


def method(
    inner: optax.GradientTransformation | None,
    step: Callable[[PyTree, PyTree, RoundId, Local], Stepped],
    own: OfParams = lambda params: (),
    axis_name: AxisName | None = "replica",
    early: Early | None = None,
    delayed: Delayed | None = None,
) -> optax.GradientTransformationExtraArgs:
    """A method, built from one step that is written for one replica.

    A replica that makes no update in a step, because the update is rejected or the replica is not
    active, moves only by mixing and by outer steps that all replicas take, never by momentum.

    Args:
      inner: the local optimizer, which computes in float32 for parameters of fewer bits; None
        passes gradients through.
      step: ``step(params, own, round, local) -> (new params, new own, inner, ok)``, the last two as
        ``local(params)`` returns them.
      own: a function from the parameters to the initial state of the method.
      axis_name: the replica axis; replicas then draw different random numbers. None: all replicas
        make the same update, and nothing else moves their parameters.
      early, delayed: fields of the `Method`.

    Returns:
      A transformation with a `GuardedState`. Its ``update`` takes ``round`` (required); ``value``,
      this replica's loss; ``active``, False for a replica that makes no local update in this step;
      ``mixed``, see `Method`; and ``replica``, the replica's index if there is no replica axis.
    """
    validation.is_transformation(inner)
    optimizer = _in_float32(optax.with_extra_args_support(inner or optax.identity()))
    check = functools.lru_cache(functools.partial(validation.mixes, optimizer))  # cached: it traces

    def init(params: PyTree) -> GuardedState:
        gossip.mixable(params)  # refuses arrays that cannot be mixed, naming them
        if axis_name is not None:
            arrays, structure = jax.tree.flatten(params)
            kinds = (jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in arrays)
            check(structure, *kinds)
        # Separate buffers, because a donated state must not hold an array twice.
        count, skipped, failing = (jnp.zeros((), jnp.int32) for _ in range(3))
        with _needs_no_more():
            optimizer_state = optimizer.init(params)
        return GuardedState(optimizer_state, count, skipped, failing, own(params))

    def update(
        updates: PyTree,
        state: GuardedState,
        params: PyTree = None,
        *,
        round: RoundId = _LEFT_OUT,
        value: jax.Array | None = None,
        active: jax.Array | bool = True,
        mixed: PyTree = None,
        replica: Any = None,
        **extra: PyTree,
    ) -> Updated:
        _check_call(params, round)

        def number() -> jax.Array:
            assert axis_name is not None
            return ReplicaAxis.over(axis_name).replica() if replica is None else replica

        which = None if axis_name is None else number
        local = Local(updates, value, mixed, active, state, optimizer, extra, which)
        after, own_state, (inner, is_whole), ok = step(params, state.own, round, local)

        def moved(new: jax.Array, old: jax.Array) -> jax.Array:
            return new - trees.finite_or_zero(old)

        change = jax.tree.map(moved, after, params)
        failed = ~(ok & is_whole) & active
        count, skipped = state.count + 1, state.skipped + jnp.where(failed, 1, 0)
        failing = jnp.where(failed, state.failing + 1, 0)
        return change, GuardedState(inner, count, skipped, failing, own_state)

    return Method(init, update, early, delayed)


def _in_float32(
    optimizer: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, in float32 for 16-bit parameters, because in bfloat16 0.999 would be 1."""

    def init(params: PyTree) -> PyTree:
        return optimizer.init(trees.wide(params))

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree) -> Updated:
        return optimizer.update(trees.wide(grads), state, trees.wide(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_call(params: PyTree, round: RoundId) -> None:
    how = "call update(grads, state, params, round=schedule.round_at(step))"
    if params is None:
        raise ValueError(f"update needs the parameters, which replicas mix, got None; {how}")
    if round is _LEFT_OUT:
        raise TypeError(f"update needs a round; {how}, or round=None for a step without one")
    gossip.number(round)  # refuses a traced round before a method uses it


@dataclasses.dataclass(frozen=True)
class Mixing:
    """The communication of a method: its schedule, axis and message format.

    method: its name, for error messages.
    rows: whether a replica's weights must sum to 1.
    """

    schedule: Schedule
    axis_name: AxisName
    codec: Codec | None = None
    method: str = "the method"
    rows: bool = True

    def __post_init__(self) -> None:
        validation.is_schedule(self.method, self.schedule)
        if self.rows:
            validation.row_stochastic(self.method, self.schedule)
        validation.no_lattice(self.method, self.codec)
        if self.codec is not None:
            gossip.check_coded(self.schedule)

    def __call__(
        self,
        tree: PyTree,
        round: RoundId,
        count: jax.Array,
        after: PyTree | gossip.Between = None,
        nth: int = 0,
    ) -> PyTree:
        """One round of `decent_jax.gossip.mix`, which ignores replicas that are not finite.

        ``nth`` counts the calls of a step, so that each draws its own random numbers.
        """
        return gossip.mix(
            tree,
            self.schedule,
            round,
            self.axis_name,
            finite=trees.all_finite(tree),
            codec=self.codec,
            key=self.key(count, nth),
            after=after,
        )

    def key(self, count: jax.Array, nth: int = 0) -> jax.Array | None:
        """The key of this codec, see `key_of`."""
        return key_of(self.codec, count, nth)


def key_of(codec: Codec | None, count: jax.Array, nth: int = 0) -> jax.Array | None:
    """The codec's PRNG key for step ``count``, equal on all replicas; None without a codec."""
    if codec is None:
        return None
    words = jnp.array([codec.seed % 2**32 ^ codec.seed >> 32, nth], jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")  # pyright: ignore
    return jax.random.fold_in(key, count)  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Feedback:
    r"""Error feedback: the error left by each message, times beta, is added to the next message.

    .. math::
        e_i \leftarrow \beta e_i + x_i, \qquad q_i = Q(e_i), \qquad e_i \leftarrow e_i - q_i,
        \qquad \text{mean of the } q_j

    codec: Q.
    decay: beta.
    """

    axis_name: AxisName
    codec: Codec
    decay: float = 1.0

    def mean(self, x: PyTree, e: PyTree, count: jax.Array, between: PyTree = None) -> Updated:
        """`decent_jax.gossip.mean_coded` of q, equal on all replicas, and the new e."""
        key = key_of(self.codec, count)
        e = trees.add(trees.scale(self.decay, e), x)
        mean, q = gossip.mean_coded(e, self.axis_name, self.codec, key, between)
        return mean, optax.tree.sub(e, q)


def no_rounds(
    tx: optax.GradientTransformationExtraArgs, replica: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """The method without rounds: its ``update`` ignores ``round``. For ``replica`` see `method`."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree) -> Updated:
        return tx.update(updates, state, params, **extra | {"round": None, "replica": replica})

    return Method(tx.init, update)


def filled(state: PyTree, fill: OfParams = optax.tree.zeros_like) -> OfParams:
    """A function that returns a method's initial state, with ``fill(params)`` in every field."""
    return lambda params: state._make(fill(params) for _ in state._fields)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: jax.Array) -> float | jax.Array:
    """The learning rate of the 0-based update ``count``."""
    return learning_rate(count) if callable(learning_rate) else learning_rate
