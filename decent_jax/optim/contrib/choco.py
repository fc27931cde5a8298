"""CHOCO: replicas send compressed differences from public copies of their parameters."""

from typing import Annotated, NamedTuple

import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName, RoundId
from decent_jax.gossip.codecs import Codec, Int8
from decent_jax.gossip.sparse import TopK
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import trees, validation
from decent_jax.optim.method_wrapper import Local, Mixing, Stepped, filled, method
from decent_jax.optim.registry import Numbers, Parts, coded_bytes, register
from decent_jax.topology import Schedule


class ChocoState(NamedTuple):
    """The ``own`` state of `choco`; both fields are shaped like the parameters."""

    s: PyTree  # sum_j W_ij x_hat_j, over the neighbours and the replica itself
    x_hat: PyTree  # the replica's own public copy


def choco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    same_init: bool = True,
    seed: int = 0,
    *,
    compressor: Annotated[str, '"top_k" or "int8"'] = "top_k",
    fraction: Annotated[float, 'share of each array that "top_k" sends, in (0, 1]'] = 0.1,
    gamma: Annotated[float, "consensus step size"] = 0.2,
) -> optax.GradientTransformationExtraArgs:
    r"""CHOCO-SGD: gossip of public copies of the parameters, which compressed messages correct.

    With ``x_hat_i`` the public copy of replica i, C the compressor and ``Delta_i`` the
    update of ``inner``:

    .. math::
        y_i &= x_i + \Delta_i(x_i), \qquad q_i = C(y_i - \hat x_i) \\
        \hat x_i &\leftarrow \hat x_i + q_i, \qquad
        s_i \leftarrow s_i + \sum_j W_{ij} q_j \quad (= \sum_j W_{ij} \hat x_j) \\
        x_i &\leftarrow y_i + \gamma (s_i - \hat x_i)

    The residual of C stays in ``y - x_hat`` and is sent later, so consensus is reached with
    any C if ``gamma`` is small enough; the mean is preserved at every step. Only
    ``q_i`` is sent, and s accumulates the messages, so the graph must be static. It sends one
    compressed message per step and stores two copies of the parameters (``x_hat_i`` and ``s_i``).

    Args:
      inner, schedule, axis_name: as in `decentralized`.
      same_init: whether all replicas start with the same parameters, which are then the first
        public copies; otherwise these start at zero, as in the paper.
      seed: seed of the stochastic rounding of ``"int8"``.
      compressor: C, ``"top_k"`` or ``"int8"``.
      fraction: share of each array that ``"top_k"`` sends, in (0, 1].
      gamma: consensus step size, in (0, 1]; a coarser C needs a smaller one, or the method
        diverges. Of 0.02, 0.05, 0.1, 0.2, 0.3 and 0.5, on a ring of 8 without gradients, 0.3 was
        the largest that converged for the top 10%, and 0.05 for the top 1%.

    Raises:
      ValueError: a number out of range, or a schedule that changes or averages in groups.

    References:
      Koloskova et al., `CHOCO-SGD <https://arxiv.org/abs/1902.00340>`_, 2019, Algorithm 2, with the
      gradient step first.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"choco.gamma must be above 0 and at most 1, got {gamma}")
    codec = compressor_of(compressor, fraction, seed)
    validation.static_messages("choco", schedule)
    mixing = Mixing(schedule, axis_name, codec, "choco")

    def step(params: PyTree, own: ChocoState, round: RoundId, local: Local) -> Stepped:
        update, inner, ok = local(params)
        y = trees.add(params, update)
        if round is None:
            return y, own, inner, ok
        # A replica that is not finite sends zeros, so that its public copy does not change, and
        # continues from the average of the public copies.
        gap = optax.tree.sub(y, own.x_hat)
        fine = trees.all_finite(gap)
        gap = optax.tree.where(fine, gap, optax.tree.zeros_like(gap))
        mixed_q, q = gossip.mix_coded(
            gap, schedule, round, axis_name, codec, mixing.key(local.count)
        )
        x_hat = trees.add(own.x_hat, q)
        s = trees.add(own.s, mixed_q)
        x = trees.add(y, trees.scale(gamma, optax.tree.sub(s, x_hat)))
        x = optax.tree.where(fine, x, s)
        return x, ChocoState(s, x_hat), inner, ok

    begin = trees.copy if same_init else optax.tree.zeros_like
    return method(inner, step, filled(ChocoState, begin), axis_name)


def compressor_of(name: str, fraction: float, seed: int = 0) -> Codec:
    """The compressor of this name, with noise from ``seed``."""
    if not 0 < fraction <= 1:
        raise ValueError(f"choco.fraction must be above 0 and at most 1, got {fraction}")
    named = {"top_k": TopK(fraction), "int8": Int8(seed)}
    if name not in named:
        raise ValueError(f"choco.compressor must be one of {', '.join(named)}, got {name!r}")
    return named[name]


def _choco_bytes(params: PyTree, parts: Parts, numbers: Numbers) -> float:
    return coded_bytes(params, compressor_of(numbers["compressor"], numbers["fraction"]))


register("choco", choco, copies=2, sent=_choco_bytes)
