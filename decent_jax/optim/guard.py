"""What all methods are made of, and the two that need no more: `decentralized` and `all_reduce`.

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
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec
from decent_jax.gossip.permute import squared_norm
from decent_jax.optim import require
from decent_jax.optim.declaration import ADAM_FIRST, BOTH, Method, register
from decent_jax.topology import Schedule


class GuardedState(NamedTuple):
    """State of every method."""

    inner: Any  # state of the local optimizer
    # shape=(), dtype=int32: updates so far, including the rejected ones
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    skipped: jax.Array  # shape=(), dtype=int32: rejected updates (optax: total_notfinite)
    failing: jax.Array  # shape=(), dtype=int32: the last ones in a row (optax: notfinite_count)
    own: Any  # the method's own state, a NamedTuple; () for most


@dataclasses.dataclass(frozen=True)
class Local:
    """Makes one replica's own update in one step: ``update, inner, ok = local(params)``.

    grads: the gradients as they came.
    value: the loss, or None.
    mixed: parameters that the caller mixed before the gradient was known, or None.
    active: () bool, whether this replica makes an update in this step.
    state: the method's state before the step.
    optimizer: the local optimizer.
    extra: further arguments for it.
    """

    grads: Any
    value: jax.Array | None
    mixed: Any
    active: jax.Array | bool
    state: GuardedState
    optimizer: optax.GradientTransformationExtraArgs
    extra: dict[str, Any]

    @property
    def count(self) -> jax.Array:
        """() int32, the 0-based number of this update."""
        return self.state.count

    def __call__(self, params: Any) -> tuple[Any, Any, jax.Array]:
        """The local optimizer's update at ``params``; zeros where it is rejected, or not active.

        The update must be accepted or rejected before anything is written, so every array we check
        costs one more pass over memory. We check the gradient, whose norm we need anyway, and the
        smallest array of the update, which shows what spoils all of it (a learning rate, a moment).
        Other numbers that are not finite are left out one by one; Adam with ``eps`` above 0 has
        none if the norm of the gradient is finite. So mixing, moments, decay and check are one
        pass, on GPUs one kernel per array. Checking the whole update first moved 18 instead of 10
        times the bytes of the parameters in decentralized Adam, and held one more copy of them
        (`benchmarks/gpu_program.py`).

        Returns:
          The update, like ``params``; the local optimizer's state after it; and () bool, whether it
          is accepted.
        """
        old = self.state.inner
        given = self.extra if self.value is None else {"value": self.value, **self.extra}
        change, inner = self.optimizer.update(self.grads, old, params, **given)
        ok = acceptable(self.grads, self.value) & all_finite(_smallest(change)) & self.active
        update = jax.tree.map(
            lambda u: jnp.where(ok & jnp.isfinite(u), u, jnp.zeros_like(u)), change
        )
        return update, _select(ok, inner, old), ok


def method(
    inner: optax.GradientTransformation | None,
    step: Callable[[Any, Any, Any, Local], tuple[Any, Any, Any, jax.Array]],
    own: Callable[[Any], Any] = lambda params: (),
) -> optax.GradientTransformationExtraArgs:
    """A method from one step of it, the code of one replica.

    A replica that makes no update in a step, because it is rejected or not active, is moved by
    mixing and by an outer step that all replicas take, and never by a momentum.

    Args:
      inner: the local optimizer; None leaves gradients as they are.
      step: ``step(params, own, round, local) -> (new params, new own, inner, ok)``, the last two as
        ``local(params)`` returns them.
      own: the method's own state at the start, from the parameters.

    Returns:
      A transformation with a `GuardedState`. Its ``update`` takes ``round`` (required), ``value``,
      this replica's loss, ``active``, False for a replica that makes no update of its own in this
      step, and ``mixed``, see `EarlyMixing`.
    """
    if inner is not None and not (hasattr(inner, "init") and hasattr(inner, "update")):
        made = getattr(inner, "__name__", None)
        hint = f"; call it: {made}(...)" if made else ", such as optax.adamw(1e-3)"
        raise TypeError(f"the local optimizer must be an optax transformation, got {inner!r}{hint}")
    optimizer = optax.with_extra_args_support(inner or optax.identity())

    def init(params):
        gossip.mixable(params)  # refuses the arrays that it must not get, by their names
        # Arrays of their own: a donated state must not hold one twice.
        count, skipped, failing = (jnp.zeros((), jnp.int32) for _ in range(3))
        return GuardedState(optimizer.init(params), count, skipped, failing, own(params))

    def update(
        updates, state, params=None, *, round=LEFT_OUT, value=None, active=True, mixed=None, **extra
    ):
        how = "call update(grads, state, params, round=schedule.round_at(step))"
        if params is None:
            raise ValueError(f"replicas mix parameters and got none; {how}")
        if round is LEFT_OUT:
            raise TypeError(f"update needs a round; {how}, or round=None for a step without one")
        gossip.number(round)  # refuses a traced one before a method looks at it
        local = Local(updates, value, mixed, active, state, optimizer, extra)
        after, kept, inner, ok = step(params, state.own, round, local)
        change = jax.tree.map(lambda new, old: new - _or_zero(old), after, params)
        failed = ~ok & active
        return change, GuardedState(
            inner,
            state.count + 1,
            state.skipped + jnp.where(failed, 1, 0),
            jnp.where(failed, state.failing + 1, 0),
            kept,
        )

    return optax.GradientTransformationExtraArgs(init, update)


LEFT_OUT: Any = object()


class EarlyMixing(optax.GradientTransformationExtraArgs):
    """A method whose messages depend only on the old parameters, so the caller may send them early.

    ``mix(params, count, round)``, with ``count`` from the state, gives the mixed parameters of a
    round; ``update(..., round=round, mixed=mixed)`` uses them instead of mixing, with the same
    result, and communicates nothing. It takes ``mixed`` as it is: `decent_jax.gossip.mix_on` gives
    the same for a method without ``codec`` and ``gamma``.
    """

    mix: Callable[[Any, jax.Array, Any], Any]


@dataclasses.dataclass(frozen=True)
class Mixing:
    """The communication of a method: over which schedule and axis, and in which format.

    method: its name, in messages.
    rows: whether a replica's weights must sum to 1.
    """

    schedule: Schedule
    axis_name: AxisName
    codec: Codec | None = None
    method: str = "the method"
    rows: bool = True

    def __post_init__(self):
        require.is_schedule(self.method, self.schedule)
        if self.rows:
            require.row_stochastic(self.method, self.schedule)
        if self.codec is not None:
            gossip.check_coded(self.schedule, self.codec)

    def __call__(
        self, tree: Any, round: Any, count: jax.Array, after: Any = None, nth: int = 0
    ) -> Any:
        """One round of `decent_jax.gossip.mix`, which ignores replicas that are not finite.

        ``nth`` counts the calls of a step, so that each draws its own random numbers.
        """
        return gossip.mix(
            tree,
            self.schedule,
            round,
            self.axis_name,
            finite=all_finite(tree),
            codec=self.codec,
            key=self.key(count, nth),
            after=after,
        )

    def key(self, count: jax.Array, nth: int = 0) -> jax.Array | None:
        """The key of step ``count``, the same on all replicas; None where nothing is coded."""
        return None if self.codec is None else jax.random.fold_in(jax.random.key(nth), count)


def decentralized(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "with",
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
    *,
    gamma: Annotated[optax.ScalarOrSchedule, "consensus factor, in [0, 1]; 1: the mix"] = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Local optimizer steps, and one round of averaging with neighbours instead of all-reduce.

    Replica i holds its own ``x_i`` and its own state of ``inner``; only parameters are sent.
    With ``W`` the matrix of the round and ``Delta_i(.)`` the update of ``inner``,
    whose gradient is always taken at ``x_i``:

    .. math::
        \text{with:}\quad \hat x_i = \sum_j W_{ij} x_j, \qquad
            x_i \leftarrow \hat x_i + \Delta_i(\hat x_i)
        \qquad\qquad
        \text{then:}\quad x_i \leftarrow \sum_j W_{ij} \big(x_j + \Delta_j(x_j)\big)

    ``"with"`` (adapt-with-combine) sends parameters that are known when the step begins, so the
    messages travel during the forward and backward pass; ``inner`` sees the mixed parameters
    (weight decay applies to them). ``"then"`` (adapt-then-combine) sends the result of the update,
    so no computation can hide it.

    `optax.MultiSteps` belongs inside: ``MultiSteps(decentralized(...), k)`` mixes in every step but
    keeps only every k-th result, so it may use only one of the rounds ``round_at(t)``.

    ``update`` takes ``round`` (required), a static Python int in ``[0, schedule.period)`` from
    ``schedule.round_at(step)``, or None for a step without communication; and optionally ``value``,
    this replica's loss. A local update is rejected when the loss, the norm of the gradient or the
    update of the smallest array is not finite: the parameters are then only mixed, and the state of
    ``inner`` stays, except for the counts of learning-rate schedules, which advance with the step.
    Other numbers of an update that are not finite are left out.

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
      codec: format of the messages, see `decent_jax.gossip.codecs`.
      gamma: consensus factor ``gamma``, a number or an optax schedule of the step:
        ``(1-gamma) x_i + gamma sum_j W_ij x_j`` instead of the mix (DSGD-AC,
        arXiv 2602.02899, takes the learning rate over its peak, to a power).

    Returns:
      A transformation whose state is a `GuardedState`; ``init`` communicates nothing. With
      ``"with"`` it is an `EarlyMixing`.

    Raises:
      ValueError: an unknown ``combine``; a negative gamma; a schedule on which not every replica's
        weights sum to 1.
      TypeError: an ``update`` without ``round``, or with a traced one.

    Example:
      Four replicas on one device, each with its own target, agree on the mean of the targets:

      >>> import jax, jax.numpy as jnp, optax
      >>> from decent_jax import optim, topology
      >>> schedule = topology.make("one_peer_exp", 4)
      >>> tx = optim.decentralized(optax.sgd(0.01), schedule)
      >>> def step(x, state, target, round):
      ...     updates, state = tx.update(x - target, state, x, round=round)
      ...     return optim.apply_updates(x, updates), state
      >>> def all_steps(*args, round):
      ...     return jax.vmap(lambda *own: step(*own, round), axis_name="replica")(*args)
      >>> run = jax.jit(all_steps, static_argnames="round")
      >>> x, targets = jnp.zeros(4), jnp.array([0.0, 1.0, 2.0, 5.0])
      >>> state = jax.vmap(tx.init)(x)
      >>> for t in range(1000):
      ...     x, state = run(x, state, targets, round=schedule.round_at(t))
      >>> [f"{value:.1f}" for value in x]
      ['2.0', '2.0', '2.0', '2.0']

    References:
      Wang et al., `From Promise to Practice <https://arxiv.org/abs/2410.11998>`_, 2025,
      Algorithms 1 and 3. Unlike Decent-DP the first step mixes, clipping is of the whole replica,
      and a rejected step rejects the whole update, not a bucket's.
    """
    require.combine(combine)
    require.not_negative("gamma", gamma)
    mixing = Mixing(schedule, axis_name, codec, "decentralized")

    def mix(params, round, count, after=None):
        mixed = mixing(params, round, count, after)
        if round is None or (isinstance(gamma, float | int) and gamma == 1):
            return mixed
        kept = add(params, scale(rate_at(gamma, count), optax.tree.sub(mixed, params)))
        # A replica that is not finite takes all of its neighbours' average.
        return optax.tree.where(all_finite(params), kept, mixed)

    def adapt_with_combine(params, own, round, local):
        x_hat = local.mixed
        if x_hat is None:
            x_hat = mix(params, round, local.count, after=local.grads)
        update, inner, ok = local(x_hat)
        return add(x_hat, update), own, inner, ok

    def adapt_then_combine(params, own, round, local):
        update, inner, ok = local(params)
        return mix(add(params, update), round, local.count), own, inner, ok

    if combine == "then":
        return method(inner, adapt_then_combine)
    early = EarlyMixing(*method(inner, adapt_with_combine))
    early.mix = lambda params, count, round: mix(params, round, count)
    return early


def all_reduce(
    inner: optax.GradientTransformation, axis_name: AxisName = "replica"
) -> optax.GradientTransformationExtraArgs:
    r"""The baseline: every replica applies ``inner`` to the mean gradient.

    .. math:: g = \frac1n \sum_i \nabla f_i(x), \qquad x \leftarrow x + \Delta(g)

    Replicas that begin equal stay equal. With ``active`` of ``update`` the mean is that over the
    active replicas, and all take the update. ``inner`` clips the mean gradient. A mean that is not
    finite is rejected by all replicas alike, as in `decentralized`, whose extra arguments are
    accepted so that the two can be swapped (``round`` is ignored).
    """

    def step(params, own, round, local):
        given, active = (local.grads, local.value), local.active
        if active is not True:
            share = gossip.mean(jnp.asarray(active, jnp.float32), axis_name)
            zeros = optax.tree.zeros_like(given)
            given, active = scale(1 / share, optax.tree.where(active, given, zeros)), share > 0
        mean, value = gossip.mean(given, axis_name)
        local = dataclasses.replace(local, grads=mean, value=value, active=active)
        update, inner, ok = local(params)
        return add(params, update), own, inner, ok

    return no_rounds(method(inner, step))


def no_rounds(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The method as in steps without a round, whatever ``round`` says."""

    def update(updates, state, params=None, **given):
        return tx.update(updates, state, params, **given | {"round": None})

    return optax.GradientTransformationExtraArgs(tx.init, update)


register(Method("all_reduce", all_reduce, ADAM_FIRST, BOTH))
register(Method("decentralized_adam", decentralized, ("adam",), BOTH, section=""))
register(Method("accum_adam", decentralized, ("accum_adam",), BOTH, section=""))
register(Method("decentralized_sgd", decentralized, ("sgd", "muon"), BOTH, section=""))


def apply_updates(params: Any, updates: Any) -> Any:
    """``params + updates``, where a parameter that is not finite counts as zero.

    Methods compute their updates from the same zeros, so a replica whose parameters were not
    finite continues from its neighbours' average. Otherwise equal to `optax.apply_updates`.
    """
    return optax.apply_updates(jax.tree.map(_or_zero, params), updates)


def add(tree: Any, *others: Any) -> Any:
    """The sum of trees of equal structure, in the dtypes of the first."""
    return jax.tree.map(lambda x, *rest: jnp.asarray(sum(rest, x), x.dtype), tree, *others)


def scale(factor: Any, tree: Any) -> Any:
    """``factor * tree`` in the tree's dtypes."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def copy(tree: Any) -> Any:
    """Equal arrays in buffers of their own: a donated state must not hold one array twice."""
    return jax.tree.map(jnp.array, tree)


def filled(state: Any, fill: Callable[[Any], Any] = optax.tree.zeros_like) -> Callable[[Any], Any]:
    """A method's own state at the start: a NamedTuple with ``fill(params)`` in every field."""
    return lambda params: state._make(fill(params) for _ in state._fields)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    """The learning rate of the 0-based update ``count``."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def divisor(rate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(whether the rate is 0, the rate or then 1): for updates that are divided by the rate."""
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
    counts, injected = optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState

    def select(new, old):
        if isinstance(new, counts):
            return new
        if isinstance(new, injected):
            return new._replace(inner_state=_select(ok, new.inner_state, old.inner_state))
        return jnp.where(ok, new, old)

    return jax.tree.map(select, new, old, is_leaf=lambda x: isinstance(x, (counts, injected)))


def _or_zero(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
