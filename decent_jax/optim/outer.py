"""DiLoCo and NoLoCo: an outer step after many local steps."""

import dataclasses
import operator
from typing import Annotated

import jax
import optax

from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec
from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import trees, validation
from decent_jax.optim.method_wrapper import Feedback, Mixing
from decent_jax.optim.outer_steps import Arrays, Departure, Message, descend, movement, outer_steps
from decent_jax.optim.registry import ADAM_FIRST, Numbers, Pairwise, Parts, model_bytes, register
from decent_jax.topology import Schedule

_DECAY = 0.95  # MuLoCo's beta: the decay of the error that a replica adds to its next message


@dataclasses.dataclass(frozen=True)
class OuterSGD:
    """The outer optimizer of the papers: Nesterov momentum in `diloco`, heavy-ball in `noloco`."""

    learning_rate: Annotated[float, "learning rate of the outer optimizer; beta in NoLoCo"] = 0.7
    momentum: Annotated[float, "momentum, or -1 for the paper's: 0.9 (DiLoCo), 0.5 (NoLoCo)"] = -1.0

    def optimizer(self, *, nesterov: bool) -> optax.GradientTransformation:
        """The optax transformation: DiLoCo's with ``nesterov``, else NoLoCo's.

        Raises:
          ValueError: a number out of range.
        """
        papers = 0.9 if nesterov else 0.5
        momentum = papers if self.momentum == -1 else self.momentum
        validation.not_negative("outer.learning_rate", self.learning_rate)
        validation.below_one("outer.momentum", momentum)
        return optax.sgd(self.learning_rate, momentum, nesterov)


def diloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
    *,
    fragments: Annotated[int, "parts of the model, averaged in turn"] = 1,
    delay: Annotated[int, "steps that a message overlaps, below mix_every"] = 0,
    carry: Annotated[bool, "keep the progress made while a message is in flight"] = False,
    outer: OuterSGD | optax.GradientTransformation = OuterSGD(),
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo: many local steps, then an outer optimizer step on their average movement.

    The parameters are cut, in order, into ``fragments`` parts of about equal size. Round r of the
    schedule averages fragment ``r % fragments``, so each fragment is averaged once in ``fragments``
    rounds. With ``theta`` the outer parameters (equal on all replicas), x the
    replica's parameters after its step t, and ``tau`` = ``delay``:

    .. math::
        \delta = \theta - \tfrac1n \textstyle\sum_j x_j^{(t - \tau)}, \qquad
        \theta \leftarrow \mathrm{outer}(\theta, \delta), \qquad
        x_i \leftarrow \theta

    A message overlaps ``delay`` steps (`decent_jax.optim.Delayed`). The progress of a replica in
    these steps is lost, unless ``carry`` adds it to ``theta``: ``theta + x_i^(t) - x_i^(t - tau)``,
    the merge of LOSCAR.

    With a ``codec`` the movements are sent in low precision, with error feedback (MuLoCo's, and
    with sparse formats SparseLoCo's):

    .. math::
        e_i \leftarrow 0.95\, e_i + \theta - x_i, \qquad q_i = Q(e_i), \qquad
        e_i \leftarrow e_i - q_i, \qquad \delta = Q\Big(\tfrac1n \textstyle\sum_j q_j\Big)

    where the mean, with the same bits for all replicas, is encoded once more
    (`decent_jax.gossip.groups.coded_means`), except with sparse formats. This stores e, one more
    copy of the parameters.

    With ``outer = optax.sgd(1.0)`` and one fragment it is local SGD; with Muon inside, it is
    MuLoCo.

    It sends one message of a fragment's size per round and stores the outer parameters (``theta``),
    the outer optimizer's state (one copy for momentum), and one more copy while a message is in
    flight.

    Args:
      inner: the local optimizer, AdamW in the papers; its state stays local.
      schedule: ``complete``, with a round for every fragment (`decent_jax.topology.repeat`).
      axis_name: as in `decentralized`.
      codec: message format; None: float32.
      fragments: parts of the model, averaged in turn (F); 1 is DiLoCo, more is streaming DiLoCo.
      delay: steps that a message overlaps, fewer than from one round to the next.
      carry: whether a replica keeps the progress that it makes while the message is in flight.
      outer: the outer optimizer: the paper's, or another optax transformation.

    Raises:
      ValueError: a number out of range, a schedule without global averages or with too few rounds,
        more fragments than arrays.

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, Algorithm 1;
      `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025, Algorithm 2; `MuLoCo
      <https://arxiv.org/abs/2505.23725>`_, 2025 (the feedback, from the authors' code as
      described); `LOSCAR <https://arxiv.org/abs/2605.20866>`_, 2026.
    """
    validation.averages("diloco", schedule)
    optimizer = outer.optimizer(nesterov=True) if isinstance(outer, OuterSGD) else outer
    mixing = Mixing(schedule, axis_name, codec, "diloco")
    feedback = None if codec is None else Feedback(axis_name, codec, _DECAY)

    def init(theta: Arrays) -> PyTree:
        e = () if feedback is None else optax.tree.zeros_like(theta)
        return optimizer.init(theta), e

    def outer_step(theta: Arrays, x: Arrays, state: PyTree, at: Departure) -> Message:
        momentum, e = state
        if feedback is None:
            delta = optax.tree.sub(theta, mixing(x, at.round, at.count, at.between))
        else:
            delta, e = feedback.mean(movement(theta, x), e, at.count, at.between.arrays)
        theta, momentum = descend(optimizer, delta, theta, momentum)
        return theta, (momentum, e)

    return outer_steps(inner, mixing, init, outer_step, fragments, delay, carry)


def noloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
    *,
    fragments: Annotated[int, "parts of the model, averaged in turn"] = 1,
    delay: Annotated[int, "steps that a message overlaps, below mix_every"] = 0,
    carry: Annotated[bool, "keep the progress made while a message is in flight"] = False,
    outer: OuterSGD = OuterSGD(),
) -> optax.GradientTransformationExtraArgs:
    r"""NoLoCo: `diloco` in which replicas average with neighbours, such as a random partner.

    Every replica has its own outer parameters ``theta_i`` and momentum:

    .. math::
        m_i \leftarrow \mu\, m_i + \eta \Big(\sum_j W_{ij} x_j - \theta_i\Big), \qquad
        \theta_i \leftarrow \theta_i + m_i, \qquad x_i \leftarrow \theta_i

    The paper writes the bracket as the pair's mean movement, ``sum_j W_ij (x_j - theta_j)``, plus
    a pull towards the pair's mean, ``sum_j W_ij theta_j - theta_i``, and sends both. Its code
    multiplies both by ``eta``, so their sum is enough: one message per round instead of two.
    On ``complete`` it is `diloco` with heavy-ball momentum. With
    ``mu = 0, eta = 1`` the outer parameters are the neighbours' mean, and with a
    round in every step it is then D-PSGD.

    It sends one message of a fragment's size per round and stores two copies of the parameters
    (``theta`` and m; one more while a message is in flight). Valid on every doubly stochastic
    schedule, and between peers, which have no schedule (`decent_jax.peers`).

    Args:
      inner, axis_name, fragments, delay, carry: as in `diloco`.
      schedule: a schedule with a round for every fragment; ``random_matching`` in the paper.
      codec: as in `decentralized`.
      outer: the outer optimizer, with learning rate eta (beta in the paper) and momentum mu
        (alpha).

    References:
      Kolehmainen et al., `NoLoCo <https://arxiv.org/abs/2506.10911>`_, 2025, equations as in the
      authors' code.
    """
    mixing = Mixing(schedule, axis_name, codec, "noloco")
    optimizer = outer.optimizer(nesterov=False)

    def outer_step(theta: Arrays, x: Arrays, m: PyTree, at: Departure) -> Message:
        mean = mixing(x, at.round, at.count, at.between)
        return descend(optimizer, optax.tree.sub(theta, mean), theta, m)

    return outer_steps(inner, mixing, optimizer.init, outer_step, fragments, delay, carry)


def _noloco_pairwise(numbers: Numbers) -> Pairwise:
    """The outer step on the whole model in a pairwise average of peers, with LOSCAR's merge.

    The snapshot S was sent several steps ago; the local progress since then, x - S, is added to the
    new outer parameters.
    """
    outer = OuterSGD(numbers["learning_rate"], numbers["momentum"]).optimizer(nesterov=False)

    def average(x: PyTree, own: PyTree, snapshot: PyTree, pull: PyTree) -> tuple[PyTree, PyTree]:
        sent, pulls = jax.tree.leaves(snapshot), jax.tree.leaves(pull)
        theta = jax.tree.leaves(own.theta)
        delta = optax.tree.sub(theta, trees.add(sent, pulls))
        theta, m = descend(outer, delta, theta, own.states[0])
        pull = optax.tree.sub(theta, sent)
        theta, pull = (jax.tree.unflatten(jax.tree.structure(x), tree) for tree in (theta, pull))
        return trees.add(x, pull), own._replace(theta=theta, states=(m,))

    return average


def _bytes_of_fragment(params: PyTree, parts: Parts, numbers: Numbers) -> float:
    return model_bytes(params, parts, numbers) / numbers["fragments"]


_IN_FRAGMENTS: Json = {
    "section": "outer",
    "optimizers": ADAM_FIRST,
    "copies": 2,
    "phases": operator.itemgetter("fragments"),
    "sent": _bytes_of_fragment,
}
register("diloco", diloco, **_IN_FRAGMENTS)
register("noloco", noloco, **_IN_FRAGMENTS, pairwise=_noloco_pairwise)
