"""Outer steps with momentum of the whole movement (GASLoC), and of sparse messages (SparseLoCo)."""

from collections.abc import Mapping
from typing import Annotated, Any

import optax

from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec
from decent_jax.gossip.sparse import ChunkedTopK
from decent_jax.optim import finite, frame, require, trees
from decent_jax.optim.declaration import ADAM_FIRST, Method, Parts, coded_bytes, register
from decent_jax.optim.outer import Rule, along_coded_movements, outer_steps
from decent_jax.topology import Schedule


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
    mixing = frame.Mixing(schedule, axis_name, codec, "gasloc")
    if not 0 < alpha <= 1:
        raise ValueError(f"gasloc.alpha must be above 0 and at most 1, got {alpha}")
    require.not_negative("gasloc.eta", eta)
    require.below_one("gasloc.gamma", gamma)

    def step(theta, x, before, mix, key):
        y = trees.add(trees.scale(1 - eta, theta), trees.scale(eta, x))
        mixed = mix(y)
        fine = finite.all_finite(y)  # else the neighbours' average is all there is
        pull = trees.scale(alpha, optax.tree.sub(mixed, y))
        moved = trees.scale(gamma, optax.tree.sub(y, before))
        after = optax.tree.where(fine, trees.add(y, pull, moved), mixed)
        return after, optax.tree.where(fine, y, mixed)

    return outer_steps(inner, mixing, Rule(trees.copy, step))


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
    With a density of 1 and 32 bits nothing is dropped: it is `diloco` without outer momentum. It is
    the rule of `diloco` with a codec, and this codec.

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
    require.not_negative("sparseloco.outer_learning_rate", outer_learning_rate)
    outer, codec = optax.sgd(outer_learning_rate), ChunkedTopK(density, chunk, bits)
    rule = along_coded_movements(outer, codec, axis_name, decay, "sparseloco")
    mixing = frame.Mixing(schedule, axis_name, method="sparseloco")
    return outer_steps(inner, mixing, rule)


def _sparse_bytes(params: Any, parts: Parts, own: Mapping[str, Any]) -> float:
    """Each of n - 1 others receives the message; an average counts as 2 (n - 1) / n models."""
    codec = ChunkedTopK(own["density"], own["chunk"], own["bits"])
    return parts.schedule.num_replicas / 2 * coded_bytes(params, codec)


register(Method("gasloc", gasloc, ADAM_FIRST, copies=2))
register(Method("sparseloco", sparseloco, ADAM_FIRST, copies=2, sent=_sparse_bytes))
