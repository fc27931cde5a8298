"""An outer step over many local steps: DiLoCo and NoLoCo.

Both are `outer_steps`: local steps, then a `Rule` that moves the outer parameters. `Streaming` cuts
these into fragments, and lets messages take a while.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec
from decent_jax.optim import finite, frame, require, trees
from decent_jax.optim.declaration import ADAM_FIRST, Meet, Method, model_bytes, register
from decent_jax.topology import Schedule

Arrays = list[jax.Array]


class Rule(NamedTuple):
    """How the outer parameters of one fragment move; theta, x and results are lists of arrays.

    init: from theta to the rule's state of this fragment.
    step: ``(theta, x, state, mix, key) -> (theta, state)`` with x the replica's parameters as sent,
      ``mix`` a round of averaging with others, and a key for formats that are random.
    """

    init: Callable[[Arrays], Any]
    step: Callable[
        [Arrays, Arrays, Any, Callable[[Arrays], Arrays], jax.Array | None], tuple[Any, Any]
    ]


class OuterState(NamedTuple):
    """Own state of the methods of this file."""

    theta: Any  # like params: the outer parameters
    sent: Any  # like params: x of step t - delay, under way; None for a delay of 0 or 1
    states: tuple[Any, ...]  # the rule's state of each fragment
    steps: tuple[Any, ...] | None = (
        None  # shape=() each: updates since a fragment's round; None unless used
    )


def diloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    outer: optax.GradientTransformation | None = None,
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

    A delay of 1 sends the parameters that are known when the step begins, so the message travels
    during it; a longer one sends those of an earlier step, of which a copy is kept. What a replica
    learned in these steps is lost with ``alpha = 0``; ``carry`` adds it to ``theta``:
    ``theta + x_i^(t) - x_i^(t - tau)``, the merge of LOSCAR.

    ``weighted`` counts a replica's movement by the updates that it made since the last round, where
    these differ (``active`` of ``update``, rejected updates): the weights of Decoupled DiLoCo,
    tokens times tokens per step, for steps of equally many tokens.

    With a ``codec`` the movements travel in few bits, with error feedback (MuLoCo's, and with
    sparse formats SparseLoCo's):

    .. math::
        e_i \leftarrow \beta e_i + \theta - x_i, \qquad q_i = Q(e_i), \qquad
        e_i \leftarrow e_i - q_i, \qquad \delta = Q\Big(\tfrac1n \textstyle\sum_j q_j\Big)

    where the mean of integers or floats is coded once more, the same for all
    (`decent_jax.gossip.coded_means`). It keeps e, one copy more.

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
      codec: format of the messages; None: float32.
      fragments: parts of the model, averaged in turn (F); 1 is DiLoCo, more is streaming DiLoCo.
      delay: steps that a message takes, less than ``mix_every``.
      alpha: the share of its own parameters that a replica keeps, in [0, 1].
      carry: whether a replica keeps what it learned while the message travelled.
      weighted: whether replicas that made more updates count for more.
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
      2026.
    """
    require.averages("diloco", schedule, always=True)
    require.not_negative("diloco.outer_learning_rate", outer_learning_rate)
    require.below_one("diloco.outer_momentum", outer_momentum)
    outer = outer or optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    mixing = frame.Mixing(schedule, axis_name, codec, "diloco")
    streaming = Streaming(mix_every, fragments, delay, alpha, carry, weighted)
    rule = _towards_average(outer)
    if codec is not None:
        if weighted:
            raise ValueError(
                "diloco.weighted=True sends a weighted sum, which is not coded: set it to False, "
                "or comm_dtype='float32'"
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
    mixing = frame.Mixing(schedule, axis_name, codec, "noloco")
    require.not_negative("noloco.outer_learning_rate", outer_learning_rate)
    require.below_one("noloco.outer_momentum", outer_momentum)
    rule = _towards_average(optax.sgd(outer_learning_rate, outer_momentum))
    streaming = Streaming(mix_every, fragments, delay, alpha, carry, weighted)
    return outer_steps(inner, mixing, rule, streaming)


def _noloco_meeting(numbers: Mapping[str, Any]) -> Meet:
    """The rule on the whole model at a meeting of peers, with LOSCAR's merge.

    The copy S was on its way since it was published; what the peer learned meanwhile, x - S, is
    added to the new outer parameters.
    """
    outer = optax.sgd(numbers["outer_learning_rate"], numbers["outer_momentum"])
    rule = _towards_average(outer)

    def meet(x, own, copy, half):
        sent, half = jax.tree.leaves(copy), jax.tree.leaves(half)
        theta = jax.tree.leaves(own.theta)
        theta, state = rule.step(theta, sent, own.states[0], lambda x: trees.add(x, half), None)
        pull = optax.tree.sub(theta, sent)
        theta, pull = (jax.tree.unflatten(jax.tree.structure(x), tree) for tree in (theta, pull))
        return trees.add(x, pull), own._replace(theta=theta, states=(state,))

    return meet


def _towards_average(outer: optax.GradientTransformation) -> Rule:
    """The outer optimizer, on the way from the average back to theta."""

    def step(theta, x, state, mix, key):
        change, state = outer.update(optax.tree.sub(theta, mix(x)), state, theta)
        return optax.apply_updates(theta, change), state

    return Rule(outer.init, step)


def along_coded_movements(
    outer: optax.GradientTransformation,
    codec: Codec,
    axis_name: AxisName,
    decay: float,
    method: str,
) -> Rule:
    """The outer optimizer along the mean of coded movements, with error feedback.

    theta must be the same on all replicas. One that is not finite sends what it had not sent yet.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"{method}.decay must be in [0, 1], got {decay}")

    def init(theta):
        return outer.init(theta), optax.tree.zeros_like(theta)

    def step(theta, x, state, mix, key):
        state, error = state
        moved = optax.tree.sub(theta, x)
        moved = optax.tree.where(finite.all_finite(moved), moved, optax.tree.zeros_like(moved))
        mean, error = frame.mean_with_feedback(moved, error, decay, axis_name, codec, key)
        change, state = outer.update(mean, state, theta)
        return optax.apply_updates(theta, change), (state, error)

    return Rule(init, step)


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How messages of an outer step travel; the numbers are those of `diloco`."""

    mix_every: int = 1
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    carry: bool = False
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.fragments < 1:
            raise ValueError(f"fragments must be at least 1, got {self.fragments}")
        latest = max(self.mix_every - 1, 0)
        if not 0 <= self.delay <= latest:
            raise ValueError(f"delay must be from 0 to mix_every - 1 = {latest}, got {self.delay}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {self.alpha}")

    def under_way(self, x: Any, own: OuterState, count: jax.Array) -> Any:
        """The copy that travels for several steps: x of the step ``delay`` before the next round.

        None where a message takes one step or none.
        """
        if self.delay < 2:
            return None
        departs = (count + 1 + self.delay) % self.mix_every == 0
        return optax.tree.where(departs, x, own.sent)

    def arriving(self, x: Any, params: Any, own: OuterState) -> Any:
        """``x^(t - delay)``, for x after step t and ``params`` before it."""
        if self.delay == 0:
            return x
        return params if self.delay == 1 else own.sent

    def merged(self, theta: Arrays, now: Arrays, late: Arrays) -> Arrays:
        """``alpha x^(t) + (1 - alpha) theta``; with ``carry`` theta + x^(t) - x^(t - delay)."""
        carries = self.carry and self.delay
        if not (carries or self.alpha):
            return theta
        new = trees.add(theta, optax.tree.sub(now, late)) if carries else theta
        new = [self.alpha * a + (1 - self.alpha) * b for a, b in zip(now, new, strict=True)]
        # A replica that is not finite has nothing to keep.
        return optax.tree.where(finite.all_finite((now, late)), new, theta)


def outer_steps(
    inner: optax.GradientTransformation,
    mixing: frame.Mixing,
    rule: Rule,
    streaming: Streaming = Streaming(),
) -> optax.GradientTransformationExtraArgs:
    """Local steps, and in every round the rule on one fragment of the parameters."""
    count = streaming.fragments
    require.phases(f"{mixing.method} with {count} fragments", mixing.schedule, count)

    def step(params, own, round, local):
        update, inner, ok = local(params)
        x = trees.add(params, update)
        late = streaming.arriving(x, params, own)
        sent = streaming.under_way(x, own, local.count)
        steps = tuple(k + ok for k in own.steps) if streaming.weighted else None
        if round is None:
            return x, own._replace(sent=sent, steps=steps), inner, ok
        f = gossip.number(round) % count
        which = fragments_of(params, count)[f]
        theta, now, late = (_taken(tree, which) for tree in (own.theta, x, late))

        def mix(tree):
            if steps is None:
                return mixing(tree, round, local.count)
            return _weighted_average(mixing, tree, steps[f], theta, round, local.count)

        key = mixing.key(local.count)
        new_theta, state = rule.step(theta, late, own.states[f], mix, key)
        x = _replaced(x, which, streaming.merged(new_theta, now, late))
        states = (*own.states[:f], state, *own.states[f + 1 :])
        if steps is not None:
            steps = (*steps[:f], jnp.zeros_like(steps[f]), *steps[f + 1 :])
        own = OuterState(_replaced(own.theta, which, new_theta), sent, states, steps)
        return x, own, inner, ok

    def own(params):
        states = [rule.init(_taken(params, which)) for which in fragments_of(params, count)]
        sent = trees.copy(params) if streaming.delay > 1 else None
        steps = tuple(jnp.zeros((), float) for _ in states) if streaming.weighted else None
        return OuterState(trees.copy(params), sent, tuple(states), steps)

    return frame.method(inner, step, own)


def _weighted_average(
    mixing: frame.Mixing, tree: Arrays, steps: jax.Array, old: Arrays, round: Any, count: jax.Array
) -> Arrays:
    """``sum_j W_ij k_j x_j / sum_j W_ij k_j`` with the steps k; ``old`` where nobody made any."""
    total, weight = mixing((trees.scale(steps, tree), steps), round, count)
    known = weight > 0
    average = trees.scale(1 / jnp.where(known, weight, 1), total)
    return optax.tree.where(known, average, old)


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


_IN_FRAGMENTS: dict[str, Any] = {
    "copies": 2,
    "phases": lambda own: own["fragments"],
    "sent": lambda params, parts, own: model_bytes(params, parts, own) / own["fragments"],
}
register(Method("diloco", diloco, ADAM_FIRST, **_IN_FRAGMENTS))
register(Method("noloco", noloco, ADAM_FIRST, **_IN_FRAGMENTS, meeting=_noloco_meeting))
