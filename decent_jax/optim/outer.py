"""An outer step over many local steps: DiLoCo, its gossip relatives, and sparse messages.

All of them are `_outer`: local steps, then a rule that moves the outer parameters, in fragments and
with messages that may take a while. A `Rule` is one method's own part of this.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec
from decent_jax.gossip.sparse import ChunkedTopK
from decent_jax.optim import guard, require
from decent_jax.optim.declaration import (
    ADAM_FIRST,
    Meet,
    Method,
    Parts,
    coded_bytes,
    model_bytes,
    register,
)
from decent_jax.topology import Schedule

Arrays = list[jax.Array]


class Rule(NamedTuple):
    """How the outer parameters of one fragment move; theta, x and results are lists of arrays.

    init: from theta to the rule's state of this fragment.
    step: ``(theta, x, state, mix) -> (theta, state)`` with x the replica's parameters as sent, and
      ``mix`` a round of averaging with others.
    """

    init: Callable[[Arrays], Any]
    step: Callable[[Arrays, Arrays, Any, Callable[[Arrays], Arrays]], tuple[Any, Any]]


class OuterState(NamedTuple):
    """Own state of the methods of this file."""

    theta: Any  # like params: the outer parameters
    sent: Any  # like params: x of step t - delay, under way; None for a delay of 0 or 1
    states: tuple  # the rule's state of each fragment
    steps: tuple | None = None  # shape=() each: updates since a fragment's round; None unless used


def diloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    outer: optax.GradientTransformation | None = None,
    axis_name: AxisName = "replica",
    mix_every: int = 1,
    *,
    fragments: Annotated[int, "parts of the model, averaged in turn"] = 1,
    delay: Annotated[int, "steps that a message takes, less than mix_every"] = 0,
    alpha: Annotated[float, "share of its own parameters that a replica keeps, in [0, 1]"] = 0.0,
    carry: Annotated[
        bool, "True: a replica keeps what it learned while the message travelled"
    ] = False,
    weighted: Annotated[bool, "True: replicas that made more updates count for more"] = False,
    outer_learning_rate: Annotated[float, "of the outer optimizer"] = 0.7,
    outer_momentum: Annotated[float, "of the outer optimizer, in [0, 1)"] = 0.9,
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

    A delay of 1 sends the parameters that are known when the step begins, so the message travels
    during it; a longer one sends those of an earlier step, of which a copy is kept. What a replica
    learned in these steps is lost with ``alpha = 0``; ``carry`` adds it to ``theta``:
    ``theta + x_i^(t) - x_i^(t - tau)``, the merge of LOSCAR.

    ``weighted`` counts a replica's movement by the updates that it made since the last round, where
    these differ (``active`` of ``update``, rejected updates): the weights of Decoupled DiLoCo,
    tokens times tokens per step, for steps of equally many tokens.

    With ``outer = optax.sgd(1.0)`` and one fragment it is local SGD; with ``optax.sgd(alpha,
    momentum)`` and a fixed learning rate SlowMo on local steps; with Muon inside MuLoCo.

    One message of a fragment's size every ``mix_every`` steps. It keeps the parameters
    (``theta``), the outer optimizer's state (one copy for momentum), and for a delay above 1
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
      carry: whether a replica keeps what it learned while the message travelled.
      weighted: whether replicas that made more updates count for more.
      outer_learning_rate: that of the outer optimizer, as in the papers.
      outer_momentum: that of the outer optimizer, as in the papers.

    Raises:
      ValueError: a number out of range, a schedule without whole averages or with too few rounds,
        more fragments than arrays.

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, Algorithm 1;
      `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025, Algorithm 2; `Decoupled DiLoCo
      <https://arxiv.org/abs/2604.21428>`_, 2026; `LOSCAR <https://arxiv.org/abs/2605.20866>`_,
      2026.
    """
    require.averages("diloco", schedule, always=True)
    require.not_negative("diloco.outer_learning_rate", outer_learning_rate)
    require.below_one("diloco.outer_momentum", outer_momentum)
    outer = outer or optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    mixing = guard.Mixing(schedule, axis_name, method="diloco")
    given = (mix_every, fragments, delay, alpha, carry, weighted)
    return _outer(inner, mixing, _towards_average(outer), *given)


def noloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    mix_every: int = 1,
    codec: Codec | None = None,
    *,
    fragments: Annotated[int, "parts of the model, averaged in turn"] = 1,
    delay: Annotated[int, "steps that a message takes, less than mix_every"] = 0,
    alpha: Annotated[float, "share of its own parameters that a replica keeps, in [0, 1]"] = 0.0,
    carry: Annotated[
        bool, "True: a replica keeps what it learned while the message travelled"
    ] = False,
    weighted: Annotated[bool, "True: replicas that made more updates count for more"] = False,
    outer_learning_rate: Annotated[float, "factor of the movement; beta in the paper"] = 0.7,
    outer_momentum: Annotated[
        float, "factor of the last movement, in [0, 1); alpha in the paper"
    ] = 0.5,
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

    One message of a fragment's size every ``mix_every`` steps, two copies of the parameters
    (``theta`` and m; three with a delay above 1). Valid on every doubly stochastic schedule,
    and between peers, which have none (`decent_jax.peers.rule`).

    Args:
      inner, axis_name, mix_every, fragments, delay, alpha, carry, weighted: as in `diloco`.
      schedule: ``random_matching`` in the paper; with a round for every fragment.
      codec: as in `decentralized`.
      outer_learning_rate: the factor eta of the movement, beta in the paper.
      outer_momentum: the factor mu of the last movement, alpha in the paper, in [0, 1).

    References:
      Kolehmainen et al., `NoLoCo <https://arxiv.org/abs/2506.10911>`_, 2025, equations as in the
      authors' code.
    """
    mixing = guard.Mixing(schedule, axis_name, codec, "noloco")
    require.not_negative("noloco.outer_learning_rate", outer_learning_rate)
    require.below_one("noloco.outer_momentum", outer_momentum)
    rule = _towards_average(optax.sgd(outer_learning_rate, outer_momentum))
    given = (mix_every, fragments, delay, alpha, carry, weighted)
    return _outer(inner, mixing, rule, *given)


def _noloco_meeting(numbers: Mapping[str, Any]) -> Meet:
    """The rule on the whole model at a meeting of peers, with LOSCAR's merge.

    The copy S was on its way since it was published; what the peer learned meanwhile, x - S, is
    added to the new outer parameters.
    """
    outer = optax.sgd(numbers["outer_learning_rate"], numbers["outer_momentum"])
    rule = _towards_average(outer)

    def meet(x, own, copy, half):
        sent, half = jax.tree.leaves(copy), jax.tree.leaves(half)
        theta, state = rule.step(
            jax.tree.leaves(own.theta), sent, own.states[0], lambda tree: guard.add(tree, half)
        )
        pull = optax.tree.sub(theta, sent)
        theta, pull = (jax.tree.unflatten(jax.tree.structure(x), tree) for tree in (theta, pull))
        return guard.add(x, pull), own._replace(theta=theta, states=(state,))

    return meet


def gasloc(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
    *,
    alpha: Annotated[float, "averaging step size, in (0, 1]"] = 1.0,
    eta: Annotated[float, "outer learning rate"] = 0.7,
    gamma: Annotated[float, "outer momentum, in [0, 1)"] = 0.5,
) -> optax.GradientTransformationExtraArgs:
    r"""GASLoC: local steps, an averaging step with neighbours, and momentum of the whole movement.

    With ``x_i`` the parameters after the local steps, ``theta_i`` those before them:

    .. math::
        y_i = \theta_i + \eta\, (x_i - \theta_i), \qquad
        \theta_i \leftarrow y_i + \alpha \Big(\sum_j W_{ij} y_j - y_i\Big)
            + \gamma\, (y_i - y_i^{-}), \qquad x_i \leftarrow \theta_i

    with ``y^-`` the y of the last round, at first ``theta``. I - W is the weighted
    Laplacian of the round's graph. With ``gamma = 0, alpha = eta = 1`` it is local SGD over
    the schedule, with ``mix_every=1`` D-PSGD.

    One message per round, two copies of the parameters (``theta`` and y). Valid on every
    doubly stochastic schedule.

    Args:
      inner, schedule, axis_name, codec: as in `decentralized`.
      alpha: averaging step size, in (0, 1].
      eta: outer learning rate.
      gamma: outer momentum, in [0, 1). The default and that of ``eta`` are NoLoCo's numbers.

    References:
      `GASLoC <https://arxiv.org/abs/2606.11081>`_, 2026, equations from a transcription.
    """
    mixing = guard.Mixing(schedule, axis_name, codec, "gasloc")
    if not 0 < alpha <= 1:
        raise ValueError(f"gasloc.alpha must be above 0 and at most 1, got {alpha}")
    require.not_negative("gasloc.eta", eta)
    require.below_one("gasloc.gamma", gamma)

    def step(theta, x, before, mix):
        y = guard.add(guard.scale(1 - eta, theta), guard.scale(eta, x))
        mixed = mix(y)
        fine = guard.all_finite(y)  # else the neighbours' average is all there is
        pull = guard.scale(alpha, optax.tree.sub(mixed, y))
        moved = guard.scale(gamma, optax.tree.sub(y, before))
        after = optax.tree.where(fine, guard.add(y, pull, moved), mixed)
        return after, optax.tree.where(fine, y, mixed)

    return _outer(inner, mixing, Rule(guard.copy, step))


def sparseloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    identical_start: bool = True,
    *,
    density: Annotated[float, "part of every chunk that is sent, in (0, 1]"] = 1 / 64,
    chunk: Annotated[int, "numbers per chunk"] = 4096,
    bits: Annotated[int, "2 or 32, per number sent"] = 2,
    decay: Annotated[float, "share of what was not sent that is kept, in [0, 1]"] = 0.95,
    outer_learning_rate: Annotated[float, "factor of the movement"] = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""SparseLoCo: DiLoCo whose messages are the largest parts of the movement, with feedback.

    With ``theta`` the outer parameters, equal on all replicas, and C the largest numbers of
    every chunk in 2 bits each (`decent_jax.gossip.sparse.ChunkedTopK`):

    .. math::
        e_i \leftarrow \beta e_i + \theta - x_i, \qquad q_i = C(e_i), \qquad
        e_i \leftarrow e_i - q_i, \qquad
        \theta \leftarrow \theta - \eta\, \tfrac1n \textstyle\sum_j q_j, \qquad
        x_i \leftarrow \theta

    What C drops stays in e and is sent later; e is also the momentum, so there is none outside.
    With a density of 1 and 32 bits nothing is dropped: it is `diloco` without outer momentum.

    Coded messages cannot be added on their way, so every replica receives those of all others, and
    sends its own n - 1 times: fewer bytes than a float32 average where n is below 280 at the
    published numbers. Two copies of the parameters (``theta`` and e).

    Args:
      inner, axis_name: as in `diloco`.
      schedule: ``complete``. On another graph ``theta`` would drift apart, since replicas
        exchange movements only; `choco` corrects this with the same compressor.
      identical_start: must be True, for the same reason.
      density: the share of every chunk that is sent, in (0, 1].
      chunk: numbers per chunk.
      bits: 2 or 32 per number sent.
      decay: the share beta of what was not sent that is kept, in [0, 1].
      outer_learning_rate: the factor eta of the movement.

    References:
      Sarfi et al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025, equations from a
      transcription. The 2-bit code is ours: signs and two magnitudes per chunk.
    """
    require.averages("sparseloco", schedule, always=True)
    if not identical_start:
        raise ValueError(
            "sparseloco exchanges movements only, so replicas that begin apart stay apart; use "
            "identical_start=True, or noloco"
        )
    if not 0 <= decay <= 1:
        raise ValueError(f"sparseloco.decay must be in [0, 1], got {decay}")
    require.not_negative("sparseloco.outer_learning_rate", outer_learning_rate)
    codec = ChunkedTopK(density, chunk, bits)

    def step(theta, x, e, mix):
        moved = optax.tree.sub(theta, x)
        moved = optax.tree.where(guard.all_finite(moved), moved, optax.tree.zeros_like(moved))
        e = guard.add(guard.scale(decay, e), moved)
        mean, sent = gossip.mean_coded(e, axis_name, codec)
        theta = guard.add(theta, guard.scale(-outer_learning_rate, mean))
        return theta, optax.tree.sub(e, sent)

    mixing = guard.Mixing(schedule, axis_name, method="sparseloco")
    return _outer(inner, mixing, Rule(optax.tree.zeros_like, step))


def _towards_average(outer: optax.GradientTransformation) -> Rule:
    """The outer optimizer, on the way from the average back to theta."""

    def step(theta, x, state, mix):
        change, state = outer.update(optax.tree.sub(theta, mix(x)), state, theta)
        return optax.apply_updates(theta, change), state

    return Rule(outer.init, step)


def _outer(
    inner: optax.GradientTransformation,
    mixing: guard.Mixing,
    rule: Rule,
    mix_every: int = 1,
    fragments: Annotated[int, "parts of the model, averaged in turn"] = 1,
    delay: Annotated[int, "steps that a message takes, less than mix_every"] = 0,
    alpha: Annotated[float, "share of its own parameters that a replica keeps, in [0, 1]"] = 0.0,
    carry: Annotated[
        bool, "True: a replica keeps what it learned while the message travelled"
    ] = False,
    weighted: Annotated[bool, "True: replicas that made more updates count for more"] = False,
) -> optax.GradientTransformationExtraArgs:
    """Local steps, and the rule on one fragment per round; numbers as in `diloco`."""
    if fragments < 1:
        raise ValueError(f"{mixing.method}.fragments must be at least 1, got {fragments}")
    require.phases(f"{mixing.method} with {fragments} fragments", mixing.schedule, fragments)
    if not 0 <= delay <= max(mix_every - 1, 0):
        raise ValueError(f"delay must be from 0 to mix_every - 1 = {mix_every - 1}, got {delay}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")

    def step(params, own, round, local):
        update, inner, ok = local(params)
        x, sent, steps = guard.add(params, update), own.sent, own.steps
        if weighted:
            steps = tuple(count + ok for count in steps)
        if delay > 1:  # from now on the parameters of this step are under way
            is_due = (local.count + 1 + delay) % mix_every == 0
            sent = optax.tree.where(is_due, x, own.sent)
        if round is None:
            return x, own._replace(sent=sent, steps=steps), inner, ok
        f = gossip.number(round) % fragments
        which = fragments_of(params, fragments)[f]
        now, late = (_taken(tree, which) for tree in (x, (x, params, own.sent)[min(delay, 2)]))
        old = _taken(own.theta, which)

        def mix(tree):
            if not weighted:
                return mixing(tree, round, local.count)
            total, weight = mixing((guard.scale(steps[f], tree), steps[f]), round, local.count)
            known = weight > 0
            average = guard.scale(1 / jnp.where(known, weight, 1), total)
            return optax.tree.where(known, average, old)

        theta, state = rule.step(old, late, own.states[f], mix)
        new = guard.add(theta, optax.tree.sub(now, late)) if carry and delay else theta
        if alpha:
            new = [alpha * a + (1 - alpha) * b for a, b in zip(now, new, strict=True)]
        if alpha or (carry and delay):  # a replica that is not finite has nothing to keep
            new = optax.tree.where(guard.all_finite((now, late)), new, theta)
        states = (*own.states[:f], state, *own.states[f + 1 :])
        if weighted:
            steps = (*steps[:f], jnp.zeros_like(steps[f]), *steps[f + 1 :])
        own = OuterState(_replaced(own.theta, which, theta), sent, states, steps)
        return _replaced(x, which, new), own, inner, ok

    def own(params):
        states = [rule.init(_taken(params, which)) for which in fragments_of(params, fragments)]
        sent = guard.copy(params) if delay > 1 else None
        steps = tuple(jnp.zeros((), float) for _ in states) if weighted else None
        return OuterState(guard.copy(params), sent, tuple(states), steps)

    return guard.method(inner, step, own)


def fragments_of(params: Any, count: int) -> list[list[int]]:
    """The numbers of the leaves in each fragment: consecutive, of about equal size."""
    sizes = np.array([leaf.size for leaf in jax.tree.leaves(params)])
    if count > len(sizes):
        raise ValueError(
            f"{count} fragments are more than the {len(sizes)} arrays of the parameters"
        )
    middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    wanted = np.minimum((middle * count).astype(int), count - 1).tolist()
    of = [0]
    for k in range(1, len(sizes)):  # a large array may fill several fragments; leave none empty
        of.append(min(max(wanted[k], count - len(sizes) + k), of[-1] + 1))
    return [np.flatnonzero(np.equal(of, k)).tolist() for k in range(count)]


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


def _sparse_bytes(params: Any, parts: Parts, own: Mapping[str, Any]) -> float:
    """Each of n - 1 others receives the message; an average counts as 2 (n - 1) / n models."""
    codec = ChunkedTopK(own["density"], own["chunk"], own["bits"])
    return parts.schedule.num_replicas / 2 * coded_bytes(params, codec)


_IN_FRAGMENTS: dict[str, Any] = {
    "copies": lambda parts, own: 2 + (own["delay"] > 1),
    "phases": lambda own: own["fragments"],
    "sent": lambda params, parts, own: model_bytes(params, parts, own) / own["fragments"],
}
register(Method("diloco", diloco, ADAM_FIRST, **_IN_FRAGMENTS))
register(Method("noloco", noloco, ADAM_FIRST, **_IN_FRAGMENTS, meeting=_noloco_meeting))
register(Method("gasloc", gasloc, ADAM_FIRST, copies=2))
register(Method("sparseloco", sparseloco, ADAM_FIRST, copies=2, sent=_sparse_bytes))
