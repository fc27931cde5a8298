"""SwarmSGD: random pairs of replicas average, after different numbers of local steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName, RoundId
from decent_jax.gossip.codecs import FIRST_DISTANCE, GROW, SHRINK, SLACK, Codec, Lattice
from decent_jax.gossip.permute import barrier
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import trees, validation
from decent_jax.optim.method_wrapper import Local, Stepped, method
from decent_jax.optim.registry import BOTH, Numbers, Pairwise, Parts, model_bytes, register
from decent_jax.topology import Schedule


class SwarmState(NamedTuple):
    """The ``own`` state of `swarm`."""

    y: jax.Array | None  # shape=(), dtype=float32: reach of the lattice; None without one
    published: PyTree  # S, like params: the last snapshot; None when blocking


def swarm(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "awc",
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
    distance: float = FIRST_DISTANCE,
) -> optax.GradientTransformationExtraArgs:
    r"""Random pairs average; in between, every replica makes local steps.

    In a round in which i averages with j (a replica without a partner only makes its local step):

    .. math::
        \text{atc (blocking):}\quad & y_i = x_i + \Delta_i(x_i), \qquad
            x_i \leftarrow y_i + \tfrac12 \big(Q(y_j) - Q(y_i)\big) \\
        \text{awc (non-blocking):}\quad & y_i = x_i + \Delta_i(x_i), \qquad
            x_i \leftarrow y_i + \tfrac12 \big(Q(S_j) - Q(S_i)\big), \qquad S_i \leftarrow x_i

    S is the snapshot that a replica published after its last average. The message has been known
    since then, so no replica waits, and the local steps since then are added to the average. Both
    orders preserve the mean over replicas exactly, with any Q. The number of local steps between
    averages is fixed with ``mix_every``. It is geometric with ``random_matching(probability=1/H)``,
    in which a pair averages with probability 1/H per step. With ``active`` it is arbitrary: a
    replica with ``active=False`` makes no update in that step.

    A replica whose parameters are not finite takes its partner's parameters. With a lattice and
    "atc" it cannot decode these and stays as it is; its partners ignore it.

    It sends one message per average (8 or 16 bits per parameter with a lattice) and, with
    ``combine="awc"``, stores one copy of the parameters (S).

    Args:
      inner: the local optimizer; its state stays local.
      schedule: pairs in every round, such as ``random_matching`` (of an r-regular graph with
        ``degree=r``), ``hypercube`` or ``ring``.
      combine: ``"awc"`` averages published snapshots, and ``"atc"`` averages this step's
        parameters.
      axis_name: as in `decentralized`.
      codec: a `decent_jax.gossip.codecs.Lattice`; None sends parameters uncompressed.
      distance: reach of the lattice at the first average, see `decent_jax.gossip.codecs`.

    Raises:
      ValueError: a schedule that does not consist of pairs, or another codec.

    References:
      Nadiradze et al., `Asynchronous Decentralized SGD with Quantized and Local Updates
      <https://arxiv.org/abs/1910.12308>`_, 2021, Algorithms 1 and 2; Davies et al., `New Bounds for
      Distributed Mean Estimation <https://arxiv.org/abs/2002.09268>`_, 2021.
    """
    validation.combine(combine)
    if not isinstance(codec, Lattice | None):
        name = type(codec).__name__.lower()
        raise ValueError(f"swarm needs codec lattice8, lattice16 or float32, got {name}")
    validation.matchings("swarm", schedule)
    blocking = combine == "atc"
    exchange = functools.partial(_exchange_coded, codec) if codec else _exchange

    def step(params: PyTree, own: SwarmState, round: RoundId, local: Local) -> Stepped:
        update, inner, ok = local(params)
        x = trees.add(params, update)
        if round is None or not schedule.rounds[int(gossip.number(round))].sends:
            return x, own, inner, ok
        mine, y = x if blocking else own.published, own.y
        fine = trees.all_finite(mine)
        receive = functools.partial(
            gossip.receive, schedule=schedule, round=round, axis_name=axis_name
        )
        theirs, decoded, read, averages, weight, y = exchange(receive, mine, fine, y)
        pull = trees.scale(0.5, optax.tree.sub(theirs, decoded))
        after = trees.add(x, optax.tree.where(averages, pull, optax.tree.zeros_like(pull)))
        is_lost = ~(fine if blocking else trees.all_finite(x))
        x = optax.tree.where(is_lost & read & (weight > 0), theirs, after)
        publishes = (weight > 0) & (read | ~is_lost)
        published = None if blocking else optax.tree.where(publishes, x, own.published)
        return x, SwarmState(y, published), inner, ok

    def own(params: PyTree) -> SwarmState:
        y = jnp.float32(distance) if codec else None
        return SwarmState(y, None if blocking else trees.copy(params))

    return method(inner, step, own, axis_name)


Receive = Callable[[PyTree], list[tuple[PyTree, jax.Array]]]  # `gossip.receive` of a round
Exchanged = tuple[PyTree, PyTree, jax.Array, jax.Array, jax.Array, PyTree]


def _exchange(receive: Receive, mine: PyTree, fine: jax.Array, y: PyTree) -> Exchanged:
    """The exchange of a pair: (the partner's snapshot, the replica's, whether the partner's is
    finite, whether the two average, the pair's weight, the lattice's reach in the next round)."""
    (((theirs, read), weight),) = receive((mine, fine))
    return theirs, mine, read, read & fine & (weight > 0), weight, y


def _exchange_coded(
    codec: Lattice, receive: Receive, mine: PyTree, fine: jax.Array, y: PyTree
) -> Exchanged:
    """`_exchange` of both snapshots as the lattice decodes them."""
    leaves, structure = jax.tree.flatten(mine)
    lattice = codec.reaching(y, _largest(mine))
    # A non-finite side marks a non-finite snapshot, whatever its points decode to.
    lattice = dataclasses.replace(lattice, side=jnp.where(fine, lattice.side, jnp.nan))
    # The barrier keeps XLA from rounding the snapshot again, differently from the message.
    sent = barrier([lattice.encode(x) for x in leaves])
    ((received, weight),) = receive(sent)
    decoded, theirs = (
        structure.unflatten(map(lattice.decode, message, leaves)) for message in (sent, received)
    )
    both_fine = fine & jnp.isfinite(received[0][2])
    read = trees.all_finite(theirs) & both_fine
    (((read_by_them,), _),) = receive((read,))
    averages = read & read_by_them & (weight > 0)
    nearer = jnp.maximum(SLACK * _largest(optax.tree.sub(theirs, mine)), SHRINK * y)
    # Only the sender that was not decoded widens its lattice; if the receiver did so too, one
    # failure would cause others.
    farther = jnp.where(read_by_them | ~both_fine, y, GROW * y)
    y = jnp.where(weight > 0, jnp.where(averages, nearer, farther), y)
    return theirs, decoded, read, averages, weight, y


def _pairwise(numbers: Numbers) -> Pairwise:
    """The equivalent of a round of `swarm` for an asynchronous peer."""
    return lambda x, own, snapshot, pull: (trees.add(x, pull), own)


def _sent(params: PyTree, parts: Parts, numbers: Numbers) -> float:
    if not isinstance(parts.codec, Lattice):
        return model_bytes(params, parts, numbers)
    return sum(x.size for x in jax.tree.leaves(params)) * parts.codec.bits / 8


def _largest(tree: PyTree) -> jax.Array:
    each = [jnp.abs(x).max() for x in jax.tree.leaves(tree) if x.size]
    return jnp.stack(each).max().astype(jnp.float32)


register("swarm", swarm, orders=BOTH, copies=1, sent=_sent, pairwise=_pairwise)
