"""SwarmSGD: replicas meet in random pairs, after different numbers of local steps."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.optim import guard, require
from decent_jax.optim.declaration import BOTH, Method, Parts, model_bytes, register
from decent_jax.topology import Schedule

# y grows much faster than it shrinks, since one of many partners may be far.
_GROW, _SHRINK, _SLACK = 4.0, 0.97, 2.0


@dataclasses.dataclass(frozen=True)
class Lattice:
    r"""Position-aware quantisation: the receiver decodes relative to its own parameters.

    With side s and q colours x is sent as ``c = round(x / s) mod q``, and decoded as
    the multiple of s congruent to c that is nearest to the receiver's own z: exact to s / 2 where
    ``|x - z| <= s (q - 1) / 2``, however large x is (Davies et al. 2021, cubic lattice).
    A checksum of the integers detects when it was not; then the pair does not average.

    s follows the distance: ``s = 2 y / (q - 1)``, where y becomes the larger of 0.97 y and
    twice the largest difference at a meeting, and 4 y after a message that the partner could not
    decode. s travels with the message.

    bits: 8 or 16 per parameter.
    distance: y before the first meeting.
    """

    bits: int = 8
    distance: float = 1e-3

    def __post_init__(self):
        if self.bits not in (8, 16):
            raise ValueError(f"bits must be 8 or 16, got {self.bits}")

    @property
    def colours(self) -> int:
        """q, the number of values a colour has."""
        return 2**self.bits

    def side(self, tree: Any, y: jax.Array) -> jax.Array:
        """s, float32 (): for the distance y, and so large that x / s is exact in float32."""
        least = jnp.maximum(_largest(tree) * 2.0**-21, jnp.finfo(jnp.float32).tiny)
        return jnp.maximum(2 * y / (self.colours - 1), least).astype(jnp.float32)

    def points(self, tree: Any, side: jax.Array) -> Any:
        """The nearest multiples of ``side``, as integers (int32)."""

        def rounded(x):
            return jnp.round(x.astype(jnp.float32) / side).astype(jnp.int32)

        # The barrier keeps XLA from rounding the own copy again, and differently from what is sent.
        return jax.lax.optimization_barrier(jax.tree.map(rounded, tree))

    def encode(self, points: Any, side: jax.Array) -> tuple:
        """The message: (colours of every array, checksum, side)."""
        kind = jnp.uint8 if self.bits == 8 else jnp.uint16
        colours = jax.tree.map(lambda k: jnp.mod(k, self.colours).astype(kind), points)
        return colours, _checksum(points), side

    def decode(self, message: tuple, own: Any) -> tuple[Any, jax.Array]:
        """(the points nearest to ``own`` with these colours; () bool, whether they were sent)."""
        colours, checksum, side = message

        def read(c, z):  # z is not rounded: that would take half a side from the distance
            scaled, c = z.astype(jnp.float32) / side, c.astype(jnp.int32)
            quotient = jnp.round((scaled - c) / self.colours).astype(jnp.int32)
            return self.colours * quotient + c

        points = jax.tree.map(read, colours, own)
        return points, _checksum(points) == checksum


def places(points: Any, side: jax.Array, like: Any) -> Any:
    """The points as parameters, in the dtypes of ``like``."""
    return jax.tree.map(lambda k, x: (k * side).astype(x.dtype), points, like)


class SwarmState(NamedTuple):
    """Own state of `swarm`."""

    y: jax.Array | None  # shape=(), dtype=float32: the distance of `Lattice`; None without one
    published: Any  # S, like params: the copy of the last meeting; None when blocking


def swarm(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "with",
    axis_name: AxisName = "replica",
    lattice: Lattice | None = None,
    *,
    bits: int = 32,
) -> optax.GradientTransformationExtraArgs:
    r"""Pairs average at their meetings; between them every replica makes its own local steps.

    In a round in which i meets j (a replica without a partner only makes its local step):

    .. math::
        \text{then (blocking):}\quad & y_i = x_i + \Delta_i(x_i), \qquad
            x_i \leftarrow y_i + \tfrac12 \big(Q(y_j) - Q(y_i)\big) \\
        \text{with (non-blocking):}\quad & y_i = x_i + \Delta_i(x_i), \qquad
            x_i \leftarrow y_i + \tfrac12 \big(Q(S_j) - Q(S_i)\big), \qquad S_i \leftarrow x_i

    S is the copy a replica published at the end of its last meeting. The message is known since
    then, so no replica waits, and the local steps made since are added to the average. Both orders
    keep the mean over replicas exactly, with any Q. Local steps between meetings: fixed with
    ``mix_every``; geometric with ``random_matching(meet=1/H)``, in which a pair meets with
    probability 1/H per step; any numbers with ``active`` (a replica with ``active=False`` makes no
    update in that step).

    A replica whose parameters are not finite takes its partner's copy. With a lattice and "then" it
    cannot decode one, and stays as it is; the others ignore it.

    One message per meeting (8 or 16 bits per parameter with a lattice); one copy of the parameters
    (S) with ``combine="with"``.

    Args:
      inner: the local optimizer; its state stays local.
      schedule: of pairs in every round, such as ``random_matching`` (of an r-regular graph with
        ``degree=r``), ``hypercube``, ``ring``.
      combine: ``"with"`` averages what was published, ``"then"`` the parameters of this step.
      axis_name: as in `decentralized`.
      lattice: quantises the messages; None: `Lattice` of these bits, or none.
      bits: 8, 16 or 32 per parameter; 32 sends parameters as they are.

    Raises:
      ValueError: a schedule that is not made of pairs, or other bits.

    References:
      Nadiradze et al., `Asynchronous Decentralized SGD with Quantized and Local Updates
      <https://arxiv.org/abs/1910.12308>`_, 2021, Algorithms 1 and 2; Davies et al., `New Bounds for
      Distributed Mean Estimation <https://arxiv.org/abs/2002.09268>`_, 2021.
    """
    require.combine(combine)
    if bits not in (8, 16, 32):
        raise ValueError(f"swarm.bits must be 8, 16 or 32 (not quantised), got {bits}")
    require.matchings("swarm", schedule)
    if lattice is None and bits < 32:
        lattice = Lattice(bits)
    blocking = combine == "then"

    def step(params, own, round, local):
        update, inner, ok = local(params)
        x = guard.add(params, update)
        if round is None or not schedule.rounds[gossip.number(round)].sends:
            return x, own, inner, ok
        mine, y = x if blocking else own.published, own.y
        fine = guard.all_finite(mine)
        if lattice is None:
            (theirs, read), weight = _receive((mine, fine), round)
            decoded, meets = mine, read & fine & (weight > 0)
        else:
            # A side that is not finite says that the copy is not, whatever its points decode to.
            side = jnp.where(fine, lattice.side(mine, y), jnp.nan)
            points = lattice.points(mine, side)
            decoded = places(points, side, mine)
            message, weight = _receive(lattice.encode(points, side), round)
            both_fine = fine & jnp.isfinite(message[2])
            points, read = lattice.decode(message, mine)
            read &= both_fine
            theirs = places(points, message[2], mine)
            (read_by_them,), _ = _receive((read,), round)
            meets = read & read_by_them & (weight > 0)
            nearer = jnp.maximum(_SLACK * _largest(optax.tree.sub(theirs, mine)), _SHRINK * y)
            # Only the sender that was not decoded widens its lattice; if the receiver did, too, one
            # failure would cause others.
            farther = jnp.where(read_by_them | ~both_fine, y, _GROW * y)
            y = jnp.where(weight > 0, jnp.where(meets, nearer, farther), y)
        pull = guard.scale(0.5, optax.tree.sub(theirs, decoded))
        after = guard.add(x, optax.tree.where(meets, pull, optax.tree.zeros_like(pull)))
        is_lost = ~(fine if blocking else guard.all_finite(x))
        x = optax.tree.where(is_lost & read & (weight > 0), theirs, after)
        publishes = (weight > 0) & (read | ~is_lost)
        published = None if blocking else optax.tree.where(publishes, x, own.published)
        return x, SwarmState(y, published), inner, ok

    def _receive(tree, round):
        return gossip.receive(tree, schedule, round, axis_name)[0]

    def own(params):
        y = None if lattice is None else jnp.float32(lattice.distance)
        return SwarmState(y, None if blocking else guard.copy(params))

    return guard.method(inner, step, own)


def _add_half(x: Any, own: SwarmState, copy: Any, half: Any) -> tuple[Any, SwarmState]:
    """What a peer without a common step does in place of a round of `swarm`."""
    return guard.add(x, half), own


def _sent(params: Any, parts: Parts, own: Mapping[str, Any]) -> float:
    if own["bits"] == 32:
        return model_bytes(params, parts, own)
    return sum(x.size for x in jax.tree.leaves(params)) * own["bits"] / 8


def _largest(tree: Any) -> jax.Array:
    each = [jnp.abs(x).max() for x in jax.tree.leaves(tree) if x.size]
    return jnp.stack(each).max().astype(jnp.float32)


def _checksum(points: Any) -> jax.Array:
    """() uint32 that wraps: the integers times odd multipliers that depend on their place."""
    total = jnp.uint32(0)
    for salt, k in enumerate(jax.tree.leaves(points)):
        place = jax.lax.iota(jnp.uint32, k.size) + jnp.uint32(salt * 7919)
        odd = (place * jnp.uint32(2654435761)) | jnp.uint32(1)
        total += (k.reshape(-1).astype(jnp.uint32) * odd).sum(dtype=jnp.uint32)
    return total


register(
    Method(
        "swarm",
        swarm,
        orders=BOTH,
        copies=lambda parts, own: int((parts.combine or "with") == "with"),
        sent=_sent,
        meeting=lambda own: _add_half,
    )
)
