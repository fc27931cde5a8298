"""SparseLoCo: outer steps along the largest components of the replicas' movements."""

from typing import Annotated

import optax

from decent_jax.gossip import AxisName
from decent_jax.gossip.sparse import ChunkedTopK
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import validation
from decent_jax.optim.method_wrapper import Feedback, Mixing
from decent_jax.optim.outer_steps import Arrays, Departure, Message, movement, outer_steps
from decent_jax.optim.registry import ADAM_FIRST, Numbers, Parts, coded_bytes, register
from decent_jax.topology import Schedule


def sparseloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    same_init: bool = True,
    *,
    density: Annotated[float, "share of every chunk that is sent, in (0, 1]"] = 1 / 64,
    chunk: Annotated[int, "numbers per chunk"] = 4096,
    decay: Annotated[float, "decay of the residual, in [0, 1]"] = 0.95,
) -> optax.GradientTransformationExtraArgs:
    r"""SparseLoCo: DiLoCo with sparse messages and error feedback.

    With ``theta`` the outer parameters, equal on all replicas, and C the codec that sends the
    largest numbers of every chunk in 2 bits each (`decent_jax.gossip.sparse.ChunkedTopK`):

    .. math::
        e_i \leftarrow \beta e_i + \theta - x_i, \qquad q_i = C(e_i), \qquad
        e_i \leftarrow e_i - q_i, \qquad
        \theta \leftarrow \theta - \tfrac1n \textstyle\sum_j q_j, \qquad
        x_i \leftarrow \theta

    The residual of C stays in e and is sent later; e also acts as momentum, so there is no outer
    momentum. It is `diloco` with this codec and ``outer = optax.sgd(1.0)``.

    Encoded messages cannot be added in transit, so every replica receives all others' messages and
    sends its own n - 1 times. At the published settings, these are fewer bytes than those of a
    float32 average if n is below 280. It stores two copies of the parameters (``theta`` and e).

    Args:
      inner, axis_name: as in `diloco`.
      schedule: ``complete``. On another graph the replicas' ``theta`` would drift apart, because
        only movements are sent; `choco` corrects this with the same compressor.
      same_init: must be True, for the same reason.
      density: the share of every chunk that is sent, in (0, 1].
      chunk: the number of parameters per chunk.
      decay: the decay beta of the residual, in [0, 1].

    References:
      Sarfi et al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025, equations from a
      transcription. The 2-bit code is ours: signs and two magnitudes per chunk.
    """
    validation.averages("sparseloco", schedule)
    if not same_init:
        raise ValueError(
            "sparseloco exchanges only movements, so replicas that start apart stay apart; use "
            "same_init=True, or noloco"
        )
    validation.share("sparseloco.decay", decay)
    feedback = Feedback(axis_name, ChunkedTopK(density, chunk), decay)

    def outer_step(theta: Arrays, x: Arrays, e: PyTree, at: Departure) -> Message:
        delta, e = feedback.mean(movement(theta, x), e, at.count, at.between.arrays)
        return optax.tree.sub(theta, delta), e

    mixing, init = Mixing(schedule, axis_name, method="sparseloco"), optax.tree.zeros_like
    return outer_steps(inner, mixing, init, outer_step)


def _sparse_bytes(params: PyTree, parts: Parts, numbers: Numbers) -> float:
    """Bytes of n / 2 messages: a replica sends n - 1, and an average counts as 2 (n - 1) / n."""
    codec = ChunkedTopK(numbers["density"], numbers["chunk"])
    return parts.schedule.num_replicas / 2 * coded_bytes(params, codec)


register("sparseloco", sparseloco, optimizers=ADAM_FIRST, copies=2, sent=_sparse_bytes)
