"""DeMo: momentum of which the fastest moving parts travel, as waves."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.fft

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import bytes_sent
from decent_jax.gossip.sparse import ChunkedTopK
from decent_jax.optim import frame, require, trees
from decent_jax.optim.declaration import Method, Parts, register
from decent_jax.topology import Schedule


class DemoState(NamedTuple):
    """Own state of `demo`."""

    d: Any  # like params: the momentum that a replica has not sent yet


def demo(
    learning_rate: optax.ScalarOrSchedule,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    gradient: optax.GradientTransformation | None = None,
    identical_start: bool = True,
    *,
    decay: Annotated[float, "share of the momentum that is kept, in [0, 1)"] = 0.999,
    chunk: Annotated[int, "longest side of a chunk"] = 64,
    kept: Annotated[int, "waves that are sent of a chunk"] = 32,
    weight_decay: Annotated[float, "decoupled, of all parameters"] = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Decoupled momentum: replicas send the largest waves of their momentum and keep the rest.

    An array is cut along its last two axes into chunks whose sides are the largest divisors of its
    own up to ``chunk``. With F their discrete cosine transform (orthonormal, type II) and
    C the ``kept`` largest numbers of every chunk:

    .. math::
        d_i \leftarrow \beta d_i + \eta g_i, \qquad q_i = C(F d_i), \qquad
        d_i \leftarrow d_i - F^{-1} q_i \qquad
        x \leftarrow (1 - \eta \lambda)\, x - \eta\, \mathrm{sign}(F^{-1} \bar q)

    where each number of ``q_bar`` is the mean of those replicas that sent it. All replicas take the
    same step, so they stay equal; only d is their own. One that makes no update sends nothing. This
    is an optimizer itself, with the learning rates of sign methods (Lion's, a tenth of Adam's).

    In every round a replica sends q to all others: 5.5 bytes for a wave of a chunk of 64 x 64,
    which is 0.04 bytes per parameter instead of 4. One copy of the parameters (d). Without a round
    the momentum grows and the parameters stay.

    Args:
      learning_rate: ``eta``, a float or an optax schedule of the step.
      schedule: ``complete``.
      axis_name: as in `decentralized`.
      gradient: applied to g first, such as clipping.
      identical_start: must be True, since replicas exchange movements only.
      decay: ``beta``, the share of the momentum that is kept, in [0, 1).
      chunk: longest side of a chunk.
      kept: waves that are sent of a chunk, or all of a smaller one.
      weight_decay: ``lambda``, decoupled, of all parameters.

    Raises:
      ValueError: a number out of range, replicas that begin apart, a schedule that does not average
        all of them.

    References:
      Peng et al., `DeMo <https://arxiv.org/abs/2411.19870>`_, 2024, with the means and sides of the
      authors' code. Arrays of more than two axes, which it does not take, are cut along the last
      two, and a wave is sent in 32 bits.
    """
    require.averages("demo", schedule, always=True)
    require.below_one("demo.decay", decay)
    require.not_negative("demo.weight_decay", weight_decay)
    for name, value in (("chunk", chunk), ("kept", kept)):
        if value < 1:
            raise ValueError(f"demo.{name} must be at least 1, got {value}")
    if not identical_start:
        raise ValueError(
            "demo exchanges movements only, so replicas that begin apart stay apart; use "
            "identical_start=True, or gossiped_momentum"
        )

    def sent_and_mean(d):
        """(F^-1 q_i, F^-1 q_bar) of one array."""
        waves = Waves.of(d.shape, chunk)
        given = axis_name, waves.codec(kept)
        mean, own = gossip.mean_coded(waves.forward(d), *given, among_senders=True)
        return waves.inverse(own), waves.inverse(mean)

    def step(params, own, round, local):
        rate = jnp.asarray(frame.rate_at(learning_rate, local.count))
        g, inner, ok = local(params)
        d = trees.add(trees.scale(decay, own.d), trees.scale(rate, g))
        d = optax.tree.where(ok, d, own.d)
        if gossip.number(round) is None:
            return params, DemoState(d), inner, ok
        offered = optax.tree.where(ok, d, optax.tree.zeros_like(d))
        leaves, structure = jax.tree.flatten(offered)
        pairs = [sent_and_mean(x) if x.size else (x, x) for x in leaves]
        sent, mean = (structure.unflatten(x) for x in zip(*pairs, strict=True))
        shrunk = trees.scale(1 - rate * weight_decay, params)
        x = trees.add(shrunk, trees.scale(-rate, jax.tree.map(jnp.sign, mean)))
        return x, DemoState(optax.tree.sub(d, sent)), inner, ok

    return frame.method(gradient, step, frame.filled(DemoState))


class Waves(NamedTuple):
    """The cosine transform of the chunks of arrays of one shape.

    >>> import jax.numpy as jnp
    >>> waves = Waves.of((6, 4), 3)
    >>> waves.sides, waves.forward(jnp.ones((6, 4))).shape
    ((3, 2), (4, 6))
    """

    shape: tuple[int, ...]
    sides: tuple[int, int]  # of a chunk

    @staticmethod
    def of(shape: tuple[int, ...], longest: int) -> "Waves":
        """Those with sides up to ``longest``."""
        rows, columns = (1, 1, *shape)[-2:]
        return Waves(shape, (_divisor(rows, longest), _divisor(columns, longest)))

    def codec(self, kept: int) -> ChunkedTopK:
        """The largest numbers of each chunk."""
        width = self.sides[0] * self.sides[1]
        return ChunkedTopK(min(kept, width) / width, width, bits=32)

    def forward(self, x: jax.Array) -> jax.Array:
        """An array to (chunks, numbers of a chunk)."""
        a, b = self.sides
        rows, columns = (1, 1, *self.shape)[-2:]
        cut = x.reshape(-1, rows // a, a, columns // b, b)
        waves = jnp.einsum("nyaxb,ka,lb->nyxkl", cut, *self._bases(x.dtype))
        return waves.reshape(-1, a * b)

    def inverse(self, waves: jax.Array) -> jax.Array:
        """The array of the chunks' numbers."""
        a, b = self.sides
        rows, columns = (1, 1, *self.shape)[-2:]
        cut = waves.reshape(-1, rows // a, columns // b, a, b)
        return jnp.einsum("nyxkl,ka,lb->nyaxb", cut, *self._bases(waves.dtype)).reshape(self.shape)

    def _bases(self, dtype: Any) -> list[jax.Array]:
        """Orthogonal matrices, a wave in each row."""
        return [
            jnp.asarray(scipy.fft.dct(np.eye(side), axis=0, norm="ortho"), dtype)
            for side in self.sides
        ]


def _divisor(side: int, longest: int) -> int:
    """The largest divisor up to ``longest``."""
    return max(k for k in range(1, min(side, longest) + 1) if side % k == 0)


def _demo_bytes(params: Any, parts: Parts, own: Mapping[str, Any]) -> float:
    """Each of n - 1 others receives the message; an average counts as 2 (n - 1) / n models."""
    return (
        parts.schedule.num_replicas
        / 2
        * sum(
            bytes_sent(Waves.of(leaf.shape, own["chunk"]).codec(own["kept"]), leaf.shape)
            for leaf in jax.tree.leaves(params)
            if leaf.size
        )
    )


register(Method("demo", demo, ("sgd",), copies=1, sent=_demo_bytes))
