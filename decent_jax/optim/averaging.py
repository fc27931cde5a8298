"""Gossip of parameters, with or without momentum, and the all-reduce baseline."""

import dataclasses
import operator
from typing import Annotated

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName, RoundId
from decent_jax.gossip.codecs import Codec
from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import method_wrapper, trees, validation
from decent_jax.optim.method_wrapper import Local, Method, Mixing, Stepped, method
from decent_jax.optim.registry import ADAM_FIRST, BOTH, Numbers, Parts, model_bytes, register
from decent_jax.topology import Schedule


def decentralized(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "awc",
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
    *,
    gamma: Annotated[optax.ScalarOrSchedule, "consensus step size, in [0, 1]; 1: the mix"] = 1.0,
    mix_rounds: Annotated[int | None, "rounds per mixing step, one after the other"] = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Local optimizer steps with one round of neighbour averaging instead of all-reduce.

    Replica i holds its own ``x_i`` and its own state of ``inner``; only parameters are sent.
    With ``W`` the matrix of the round and ``Delta_i(.)`` the update of ``inner``,
    whose gradient is always taken at ``x_i``:

    .. math::
        \text{awc:}\quad \hat x_i = \sum_j W_{ij} x_j, \qquad
            x_i \leftarrow \hat x_i + \Delta_i(\hat x_i)
        \qquad\qquad
        \text{atc:}\quad x_i \leftarrow \sum_j W_{ij} \big(x_j + \Delta_j(x_j)\big)

    ``"awc"`` (adapt with combine) sends the parameters from before the step, so the messages
    travel during the forward and backward pass; ``inner`` sees the mixed parameters (weight decay
    applies to them). ``"atc"`` (adapt then combine) sends the updated parameters, so the
    communication is exposed.

    `optax.MultiSteps` belongs inside: ``MultiSteps(decentralized(...), k)`` mixes in every step but
    keeps only every k-th result, so if the period divides k, only one round ever takes effect.

    ``update`` takes ``round`` (required), a static Python int in ``[0, schedule.period)`` from
    ``schedule.round_at(step)``, or None for a step without communication; and optionally ``value``,
    this replica's loss. A local update is rejected if the loss, the norm of the gradient or the
    update of the smallest array is not finite. The parameters are then only mixed, and the state of
    ``inner`` is kept, except for the counts of learning-rate schedules, which advance with the
    step. Other non-finite numbers of an update become 0.

    Apply the result with `decent_jax.optim.apply_updates` (or `optax.apply_updates`, with which a
    replica whose parameters became NaN never recovers).

    Special cases are D-PSGD (``inner = optax.sgd(lr)``; Lian et al. 2017; "atc" is also called
    DSGD), DmSGD with local momentum (momentum in ``inner``), decentralized Adam (`optax.adamw`),
    Accumulated Adam (`accum_adamw`), local SGD (over ``complete`` every H steps) and Gossip-PGA
    (over ``periodic_average(..., every=H)``; Chen et al. 2021).

    Args:
      inner: any optax transformation; clipping belongs here.
      schedule: a schedule for as many replicas as the axes hold, with rows that sum to 1.
      combine: ``"awc"`` or ``"atc"``.
      axis_name: see `decent_jax.gossip.mix`.
      codec: message format, see `decent_jax.gossip.codecs`.
      gamma: consensus step size, a number or an optax schedule of the step:
        ``(1-gamma) x_i + gamma sum_j W_ij x_j`` instead of the mix (DSGD-AC,
        arXiv 2602.02899, uses a power of the learning rate over its peak).
      mix_rounds: k, rounds per mixing step, None for one: ``round=r`` stands for rounds ``k r`` to
        ``k r + k - 1`` of the schedule, modulo its period; W is their product.

    Returns:
      A transformation whose state is a `GuardedState`; ``init`` communicates nothing. With
      ``"awc"`` it is a `Method` with ``early``.

    Raises:
      ValueError: an unknown ``combine``; a negative gamma; a schedule in which some replica's
        weights do not sum to 1; with several ``mix_rounds``, a period that repeats a round.
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
      Algorithms 1 and 3. Unlike in Decent-DP, the first step mixes, clipping applies to the whole
      gradient, and a rejected step rejects the whole update, not only one bucket's.
    """
    validation.combine(combine)
    validation.not_negative("gamma", gamma)
    times = validation.mix_rounds(mix_rounds, schedule)
    mixing = Mixing(schedule, axis_name, codec, "decentralized")

    def mix(params: PyTree, round: RoundId, count: jax.Array, after: PyTree = None) -> PyTree:
        rounds, mixed = [round], params
        if times > 1 and not (round is None or isinstance(round, gossip.Simulated)):
            first, period = times * operator.index(round), schedule.period
            if round in range(period):  # otherwise `mixing` raises the error
                rounds = [(first + k) % period for k in range(times)]
        for k, r in enumerate(rounds):
            mixed = mixing(mixed, r, count, after, nth=k)
        if round is None or (isinstance(gamma, float | int) and gamma == 1):
            return mixed
        partly = trees.add(
            params, trees.scale(method_wrapper.rate_at(gamma, count), optax.tree.sub(mixed, params))
        )
        # A replica that is not finite takes its neighbours' average, whatever gamma is.
        return optax.tree.where(trees.all_finite(params), partly, mixed)

    def adapt_with_combine(params: PyTree, own: PyTree, round: RoundId, local: Local) -> Stepped:
        x_hat = local.mixed
        if x_hat is None:
            x_hat = mix(params, round, local.count, after=local.grads)
        update, inner, ok = local(x_hat)
        return trees.add(x_hat, update), own, inner, ok

    def adapt_then_combine(params: PyTree, own: PyTree, round: RoundId, local: Local) -> Stepped:
        update, inner, ok = local(params)
        return mix(trees.add(params, update), round, local.count), own, inner, ok

    def early(params: PyTree, state: PyTree, round: RoundId) -> PyTree:
        return mix(params, round, state.count)

    if combine == "atc":
        return method(inner, adapt_then_combine, axis_name=axis_name)
    return method(inner, adapt_with_combine, axis_name=axis_name, early=early)


def gossiped_momentum(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "atc",
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Gossip in which the momentum is averaged like the parameters.

    With heavy-ball momentum inside (``optax.sgd(lr, momentum)``):

    .. math::
        \text{atc:}\quad u_i = \beta m_i + g_i, \qquad m_i \leftarrow \sum_j W_{ij} u_j, \qquad
            x_i \leftarrow \sum_j W_{ij} (x_j - \eta u_j)
        \\
        \text{awc:}\quad m_i \leftarrow \beta \sum_j W_{ij} m_j + g_i, \qquad
            x_i \leftarrow \sum_j W_{ij} x_j - \eta m_i

    In any other ``inner`` the first moment (``trace`` of `optax.trace`, ``mu`` of Adam) plays the
    role of m; second moments stay local. It sends two messages of the model's size per step; those
    of ``"awc"`` travel during the forward and backward pass. Valid on every doubly stochastic
    schedule; the arguments are those of `decentralized`. The disagreement of m determines the
    distance of a fixed point from the optimum, which is smaller than with local momentum.

    It also averages gradient noise, of variance sigma^2, before Adam divides by the root of a
    second moment. Over ``one_peer_exp``, with eight replicas and b1 = 0.9, the variance of m is
    0.011 sigma^2 ("atc") or 0.019 sigma^2 ("awc"), against 0.053 sigma^2 for local momentum and
    0.007 sigma^2 with `all_reduce`. Adam then needs a second moment that remembers a thousand steps
    (b2 = 0.999); see docs/log/2026-11-26-web-prose.md.

    References:
      Ying et al., `Exponential Graph <https://arxiv.org/abs/2110.13363>`_, 2021, DmSGD; Yu et al.,
      `On the Linear Speedup of Communication Efficient Momentum SGD
      <https://arxiv.org/abs/1905.03817>`_, 2019, Algorithm 2.
    """
    validation.combine(combine)
    mixing = Mixing(schedule, axis_name, codec, "gossiped_momentum")
    parts = ("trace", "mu")

    def named(node: PyTree) -> str:
        return next((name for name in parts if name in getattr(node, "_fields", ())), "")

    def has_one(node: PyTree) -> bool:
        return named(node) != ""

    def moments(inner: PyTree) -> list[PyTree]:
        nodes = jax.tree.leaves(inner, is_leaf=has_one)
        return [getattr(node, named(node)) for node in nodes if has_one(node)]

    def put_back(inner: PyTree, mixed: list[PyTree]) -> PyTree:
        left = iter(mixed)

        def replaced(node: PyTree) -> PyTree:
            return node._replace(**{named(node): next(left)}) if has_one(node) else node

        return jax.tree.map(replaced, inner, is_leaf=has_one)

    def mix_both(
        params: PyTree, inner: PyTree, round: RoundId, count: jax.Array, after: PyTree = None
    ) -> tuple[PyTree, list[PyTree]]:
        mixed = [mixing(m, round, count, after, nth=1) for m in moments(inner)]
        return mixing(params, round, count, after), mixed

    def adapt_with_combine(params: PyTree, own: PyTree, round: RoundId, local: Local) -> Stepped:
        old = local.state.inner
        x_hat, mixed = local.mixed or mix_both(params, old, round, local.count, local.grads)
        state = local.state._replace(inner=put_back(old, mixed))
        update, inner, ok = dataclasses.replace(local, state=state)(x_hat)
        return trees.add(x_hat, update), own, inner, ok

    def adapt_then_combine(params: PyTree, own: PyTree, round: RoundId, local: Local) -> Stepped:
        update, inner, ok = local(params)
        x, mixed = mix_both(trees.add(params, update), inner, round, local.count)
        return x, own, put_back(inner, mixed), ok

    def early(params: PyTree, state: PyTree, round: RoundId) -> PyTree:
        return mix_both(params, state.inner, round, state.count)

    step = adapt_with_combine if combine == "awc" else adapt_then_combine
    tx = method(inner, step, axis_name=axis_name)

    def init(params: PyTree) -> PyTree:
        state = tx.init(params)
        if not moments(state.inner):
            raise ValueError(
                "gossiped_momentum needs an optimizer with momentum, such as "
                "optax.sgd(lr, momentum=0.9) or optax.adam(lr); without momentum, use decentralized"
            )
        return state

    return Method(init, tx.update, early if combine == "awc" else None)


def all_reduce(
    inner: optax.GradientTransformation,
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The baseline: every replica applies ``inner`` to the mean gradient.

    .. math:: g = \frac1n \sum_i \nabla f_i(x), \qquad x \leftarrow x + \Delta(g)

    Replicas that start equal stay equal. With the argument ``active`` of ``update``, the mean is
    over the active replicas, and all replicas take the update. ``inner`` clips the mean gradient.
    All replicas reject a mean that is not finite. ``update`` takes the same arguments as with
    `decentralized`, so that the two can be swapped, and ignores ``round``.

    With a ``codec`` the gradients are sent in its format (`decent_jax.gossip.groups.coded_means`),
    with error feedback: with Q the rounding,

    .. math::
        e_i \leftarrow e_i + \nabla f_i(x), \qquad q_i = Q(e_i), \qquad
        e_i \leftarrow e_i - q_i, \qquad g = Q\Big(\tfrac1n \textstyle\sum_i q_i\Big)

    which stores one more array of the parameters' size, e. A rejected step does not change e.

    References:
      Seide et al., 1-bit SGD, 2014; Karimireddy et al., `Error Feedback Fixes SignSGD
      <https://arxiv.org/abs/1901.09847>`_, 2019, Algorithm 2 with the learning rate outside.
    """
    validation.no_lattice("all_reduce", codec)

    def not_a_number(x: jax.Array) -> jax.Array:
        return jnp.full_like(x, jnp.nan)

    def averaged(values: PyTree, error: PyTree, count: jax.Array) -> tuple[PyTree, PyTree]:
        if codec is None:
            return gossip.mean(values, axis_name), error
        sound = trees.acceptable(values, None)
        all_sound = gossip.mean(sound.astype(jnp.float32), axis_name) == 1
        sent = optax.tree.where(sound, values, optax.tree.zeros_like(values))
        mean, rest = method_wrapper.Feedback(axis_name, codec).mean(sent, error, count)
        lost = jax.tree.map(not_a_number, mean)  # rejected by all
        return optax.tree.where(all_sound, (mean, rest), (lost, error))

    def step(params: PyTree, own: PyTree, round: RoundId, local: Local) -> Stepped:
        sums, active = (local.grads, local.value), local.active
        if active is not True:
            share = gossip.mean(jnp.asarray(active, jnp.float32), axis_name)
            zeros = optax.tree.zeros_like(sums)
            sums = trees.scale(1 / share, optax.tree.where(active, sums, zeros))
            active = share > 0
        mean, own = averaged(sums[0], own, local.count)
        value = gossip.mean(sums[1], axis_name)
        local = dataclasses.replace(local, grads=mean, value=value, active=active)
        update, inner, ok = local(params)
        return trees.add(params, update), own, inner, ok

    def own(params: PyTree) -> PyTree:
        return () if codec is None else optax.tree.zeros_like(params)

    return method_wrapper.no_rounds(method(inner, step, own, axis_name=None))


def _bytes_of_rounds(params: PyTree, parts: Parts, numbers: Numbers) -> float:
    return (numbers["mix_rounds"] or 1) * model_bytes(params, parts, numbers)


register("all_reduce", all_reduce, optimizers=ADAM_FIRST, orders=BOTH)
_GOSSIP: Json = {
    "orders": BOTH,
    "section": "",
    "sent": _bytes_of_rounds,
}
register("decentralized_adam", decentralized, optimizers=("adam",), **_GOSSIP)
register("accum_adam", decentralized, optimizers=("accum_adam",), **_GOSSIP)
register("decentralized_sgd", decentralized, optimizers=("sgd", "muon"), **_GOSSIP)
register("gossiped_momentum", gossiped_momentum, orders=("atc", "awc"), messages=2)
