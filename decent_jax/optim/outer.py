"""Outer steps over many local ones, as `outer_steps` makes them: DiLoCo and NoLoCo."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec
from decent_jax.optim import frame, require, trees
from decent_jax.optim.declaration import ADAM_FIRST, Meet, Method, model_bytes, register
from decent_jax.optim.outer_steps import Rule, Streaming, outer_steps
from decent_jax.topology import Schedule


def diloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    outer: optax.GradientTransformation | None = None,
    axis_name: AxisName = "replica",
    mix_every: int = 1,
    codec: Codec | None = None,
    *,
    fragments: Annotated[int, "parts of the model, averaged in turn"] = 1,
    delay: Annotated[int, "steps beside which a message travels, below mix_every"] = 0,
    alpha: Annotated[float, "share of its own parameters that a replica keeps, in [0, 1]"] = 0.0,
    carry: Annotated[
        bool, "True: a replica keeps what it learned while the message travelled"
    ] = False,
    weighted: Annotated[bool, "True: replicas that made more updates count for more"] = False,
    eager: Annotated[
        bool, "True: with a delay, a replica's own share of the average is as it is now"
    ] = False,
    outer_learning_rate: Annotated[float, "of the outer optimizer"] = 0.7,
    outer_momentum: Annotated[float, "of the outer optimizer, in [0, 1)"] = 0.9,
    decay: Annotated[
        float, "share of what a coded message lost that is kept for the next, in [0, 1]"
    ] = 0.95,
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo: local optimizers for many steps, then an outer one on their average movement.

    The parameters are cut into ``fragments`` of about equal size along their order. Round r of the
    schedule averages fragment ``r % fragments``, so each is averaged every ``fragments *
    mix_every`` steps. With ``theta`` the outer parameters (equal on all replicas), x the
    replica's own after its step t, and ``tau`` = ``delay``:

    .. math::
        \delta = \theta - \tfrac1n \textstyle\sum_j x_j^{(t - \tau)}, \qquad
        \theta \leftarrow \mathrm{outer}(\theta, \delta), \qquad
        x_i \leftarrow \alpha\, x_i^{(t)} + (1 - \alpha)\, \theta

    A message with a delay travels beside that many steps (`decent_jax.optim.Delayed`). What a
    replica learned in them is lost with ``alpha = 0``; ``carry`` adds it to ``theta``:
    ``theta + x_i^(t) - x_i^(t - tau)``, the merge of LOSCAR. ``eager`` puts the replica's own new
    parameters into the average when it comes, where the others' are those of the message:

    .. math::
        \delta_i = \theta_i - \tfrac1n \Big(
            x_i^{(t)} + \textstyle\sum_{j \ne i} x_j^{(t - \tau)} \Big)

    Then every replica has a theta of its own, which the next average draws to the others'.

    ``weighted`` counts a replica's movement by the updates that it made since it was last sent,
    where these differ (``active`` of ``update``, rejected updates): the weights of Decoupled
    DiLoCo, tokens times tokens per step, for steps of equally many tokens.

    With a ``codec`` the movements travel in few bits, with error feedback (MuLoCo's, and with
    sparse formats SparseLoCo's):

    .. math::
        e_i \leftarrow \beta e_i + \theta - x_i, \qquad q_i = Q(e_i), \qquad
        e_i \leftarrow e_i - q_i, \qquad \delta = Q\Big(\tfrac1n \textstyle\sum_j q_j\Big)

    where the mean of integers or floats is coded once more, the same for all
    (`decent_jax.gossip.groups.coded_means`). It keeps e, one copy more.

    With ``outer = optax.sgd(1.0)`` and one fragment it is local SGD; with ``optax.sgd(alpha,
    momentum)`` and a fixed learning rate SlowMo on local steps; with Muon inside MuLoCo.

    One message of a fragment's size every ``mix_every`` steps. It keeps the parameters
    (``theta``) and the outer optimizer's state (one copy for momentum), and needs one copy more
    while a message travels.

    Args:
      inner: the local optimizer, AdamW in the papers; its state stays local.
      schedule: ``complete``, with a round for every fragment (`decent_jax.topology.repeat`).
      outer: the outer optimizer; None: SGD with Nesterov momentum and the two numbers below.
      axis_name: as in `decentralized`.
      mix_every: steps between two rounds in the caller's loop; needed for ``delay``.
      codec: format of the messages; None: float32.
      fragments: parts of the model, averaged in turn (F); 1 is DiLoCo, more is streaming DiLoCo.
      delay: steps beside which a message travels, less than ``mix_every``.
      alpha: the share of its own parameters that a replica keeps, in [0, 1].
      carry: whether a replica keeps what it learned while the message travelled.
      weighted: whether replicas that made more updates count for more.
      eager: whether a replica's own share of a late average is as it is now; not with ``carry``,
        ``weighted`` or a codec.
      outer_learning_rate: that of the outer optimizer, as in the papers.
      outer_momentum: that of the outer optimizer, as in the papers.
      decay: the share beta of what a coded message lost that is kept for the next, in [0, 1].

    Raises:
      ValueError: a number out of range, a schedule without whole averages or with too few rounds,
        more fragments than arrays.

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, Algorithm 1;
      `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025, Algorithm 2; `Decoupled DiLoCo
      <https://arxiv.org/abs/2604.21428>`_, 2026; `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
      (the feedback, from the authors' code as described); `LOSCAR <https://arxiv.org/abs/2605.20866>`_,
      2026; `eager updates <https://arxiv.org/abs/2502.12996>`_, 2025, there for movements that are
      late by a whole block, here for parameters as above.
    """
    require.averages("diloco", schedule, always=True)
    require.not_negative("diloco.outer_learning_rate", outer_learning_rate)
    require.below_one("diloco.outer_momentum", outer_momentum)
    outer = outer or optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    mixing = frame.Mixing(schedule, axis_name, codec, "diloco")
    streaming = Streaming(mix_every, fragments, delay, alpha, carry, weighted, eager)
    rule = towards_average(outer)
    if codec is not None:
        for name, given in {"weighted": weighted, "eager": eager}.items():
            if given:
                raise ValueError(
                    f"diloco.{name}=True needs parameters, and coded movements are sent: set it to "
                    "False, or comm_dtype='float32'"
                )
        rule = along_coded_movements(outer, codec, axis_name, decay, "diloco")
    return outer_steps(inner, mixing, rule, streaming)


def noloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    mix_every: int = 1,
    codec: Codec | None = None,
    *,
    fragments: Annotated[int, "parts of the model, averaged in turn"] = 1,
    delay: Annotated[int, "steps beside which a message travels, below mix_every"] = 0,
    alpha: Annotated[float, "share of its own parameters that a replica keeps, in [0, 1]"] = 0.0,
    carry: Annotated[
        bool, "True: a replica keeps what it learned while the message travelled"
    ] = False,
    weighted: Annotated[bool, "True: replicas that made more updates count for more"] = False,
    outer_learning_rate: Annotated[float, "factor of the movement; beta in the paper"] = 0.7,
    outer_momentum: Annotated[
        float, "factor of the last movement, in [0, 1); alpha in the paper"
    ] = 0.5,
    buffer: Annotated[
        int,
        "movements from one change of the momentum to the next (Delayed Nesterov); 0: heavy ball",
    ] = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""NoLoCo: `diloco` that averages with neighbours, such as a random partner, instead of all.

    Every replica has outer parameters ``theta_i`` and a momentum of its own:

    .. math::
        m_i \leftarrow \mu\, m_i + \eta \Big(\sum_j W_{ij} x_j - \theta_i\Big), \qquad
        \theta_i \leftarrow \theta_i + m_i, \qquad x_i \leftarrow \theta_i

    The paper writes the bracket as the pair's mean movement, ``sum_j W_ij (x_j - theta_j)``, plus
    a pull towards the pair's mean, ``sum_j W_ij theta_j - theta_i``, and sends both. Its code gives
    both the factor ``eta``, so their sum is enough: one message
    per round instead of two. On ``complete`` it is `diloco` with heavy-ball momentum. With
    ``mu = 0, eta = 1`` the outer parameters are the neighbours' mean, and with
    ``mix_every=1`` it is then D-PSGD.

    With ``buffer`` the bracket goes through `delayed_nesterov` instead, for replicas or peers whose
    messages come late.

    One message of a fragment's size every ``mix_every`` steps, two copies of the parameters
    (``theta`` and m; one more while a message travels). Valid on every doubly stochastic schedule,
    and between peers, which have none (`decent_jax.peers.rule`).

    Args:
      inner, axis_name, mix_every, fragments, delay, alpha, carry, weighted: as in `diloco`.
      schedule: ``random_matching`` in the paper; with a round for every fragment.
      codec: as in `decentralized`.
      outer_learning_rate: the factor eta of the movement, beta in the paper.
      outer_momentum: the factor mu of the last movement, alpha in the paper, in [0, 1).
      buffer: N of `delayed_nesterov`, the movements per change of the momentum; 0: heavy ball.

    References:
      Kolehmainen et al., `NoLoCo <https://arxiv.org/abs/2506.10911>`_, 2025, equations as in the
      authors' code.
    """
    mixing = frame.Mixing(schedule, axis_name, codec, "noloco")
    require.not_negative("noloco.outer_learning_rate", outer_learning_rate)
    require.below_one("noloco.outer_momentum", outer_momentum)
    rule = towards_average(_noloco_outer(outer_learning_rate, outer_momentum, buffer))
    streaming = Streaming(mix_every, fragments, delay, alpha, carry, weighted)
    return outer_steps(inner, mixing, rule, streaming)


def _noloco_outer(rate: float, momentum: float, buffer: int) -> optax.GradientTransformation:
    if buffer < 0:
        raise ValueError(f"noloco.buffer must be at least 0, got {buffer}")
    return delayed_nesterov(rate, momentum, buffer) if buffer else optax.sgd(rate, momentum)


class DelayedNesterovState(NamedTuple):
    """State of `delayed_nesterov`."""

    # shape=(), dtype=int32: movements so far
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    m: Any  # like params: the momentum
    waiting: Any  # like params: the sum of movements that it does not have yet


def delayed_nesterov(
    learning_rate: float, momentum: float, buffer: int
) -> optax.GradientTransformation:
    r"""Delayed Nesterov: every movement counts at once, and the momentum after N of them.

    With ``delta`` the movements, which may come from others late and one by one, and N =
    ``buffer``:

    .. math::
        D &\leftarrow D + \delta \\
        \text{at every N-th:}\quad m &\leftarrow \mu m + D / N, \qquad
            \theta \leftarrow \theta - \eta\, (\mu m + \delta / N), \qquad D \leftarrow 0 \\
        \text{else:}\quad \theta &\leftarrow \theta - \eta\, \delta / N

    An ordinary momentum moves again and again along directions that are out of date by then. With
    N = 1 it is Nesterov momentum.

    References:
      Liu et al., `Asynchronous Local-SGD <https://arxiv.org/abs/2401.09135>`_, 2024, with the
      momentum not spread over the steps between (c = 0).
    """

    def init(params):
        zeros = optax.tree.zeros_like
        return DelayedNesterovState(jnp.zeros((), jnp.int32), zeros(params), zeros(params))

    def update(updates, state, params=None):
        del params
        count, share = state.count + 1, trees.scale(1 / buffer, updates)
        waiting = trees.add(state.waiting, share)
        due = count % buffer == 0
        moved = trees.add(trees.scale(momentum, state.m), waiting)
        jump = trees.add(share, trees.scale(momentum, moved))
        m = optax.tree.where(due, moved, state.m)
        change = trees.scale(-learning_rate, optax.tree.where(due, jump, share))
        waiting = optax.tree.where(due, optax.tree.zeros_like(waiting), waiting)
        return change, DelayedNesterovState(count, m, waiting)

    return optax.GradientTransformation(init, update)


def _noloco_meeting(numbers: Mapping[str, Any]) -> Meet:
    """The rule on the whole model at a meeting of peers, with LOSCAR's merge.

    The copy S was on its way since it was published; what the peer learned meanwhile, x - S, is
    added to the new outer parameters.
    """
    given = numbers["outer_learning_rate"], numbers["outer_momentum"], numbers["buffer"]
    rule = towards_average(_noloco_outer(*given))

    def meet(x, own, copy, half):
        sent, half = jax.tree.leaves(copy), jax.tree.leaves(half)
        theta = jax.tree.leaves(own.theta)
        theta, state = rule.step(
            theta, sent, own.states[0], lambda x: trees.add(x, half), None, None
        )
        pull = optax.tree.sub(theta, sent)
        theta, pull = (jax.tree.unflatten(jax.tree.structure(x), tree) for tree in (theta, pull))
        return trees.add(x, pull), own._replace(theta=theta, states=(state,))

    return meet


def towards_average(outer: optax.GradientTransformation) -> Rule:
    """The outer optimizer, on the way from the average back to theta."""

    def step(theta, x, state, mix, key, after):
        change, state = outer.update(optax.tree.sub(theta, mix(x)), state, theta)
        return optax.apply_updates(theta, change), state

    return Rule(outer.init, step)


def along_coded_movements(
    outer: optax.GradientTransformation,
    codec: Codec,
    axis_name: AxisName,
    decay: float,
    method: str,
    clipped: bool = False,
) -> Rule:
    """The outer optimizer along the mean of coded movements, with error feedback.

    theta must be the same on all replicas; ``clipped`` as in `decent_jax.gossip.mean_coded`. A
    replica that is not finite sends what it had not sent yet.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"{method}.decay must be in [0, 1], got {decay}")

    def init(theta):
        return outer.init(theta), optax.tree.zeros_like(theta)

    def step(theta, x, state, mix, key, after):
        state, error = state
        moved = optax.tree.sub(theta, x)
        moved = optax.tree.where(trees.all_finite(moved), moved, optax.tree.zeros_like(moved))
        given = decay, axis_name, codec, key, after, clipped
        mean, error = frame.mean_with_feedback(moved, error, *given)
        change, state = outer.update(mean, state, theta)
        return optax.apply_updates(theta, change), (state, error)

    return Rule(init, step)


_IN_FRAGMENTS: dict[str, Any] = {
    "copies": 2,
    "phases": lambda own: own["fragments"],
    "sent": lambda params, parts, own: model_bytes(params, parts, own) / own["fragments"],
}
register(Method("diloco", diloco, ADAM_FIRST, **_IN_FRAGMENTS))
register(Method("noloco", noloco, ADAM_FIRST, **_IN_FRAGMENTS, meeting=_noloco_meeting))
