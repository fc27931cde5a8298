"""Messages of a part of the numbers: CHOCO, SPARTA alone and before DiLoCo, SparseLoCo."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import optax

from decent_jax import gossip
from decent_jax.gossip import AxisName
from decent_jax.gossip.codecs import Codec, Int8
from decent_jax.gossip.sparse import ChunkedTopK, RandomK, TopK
from decent_jax.optim import averaging, frame, require, trees
from decent_jax.optim.declaration import (
    ADAM_FIRST,
    BOTH,
    Method,
    Parts,
    coded_bytes,
    model_bytes,
    register,
)
from decent_jax.optim.outer import along_coded_movements, towards_average
from decent_jax.optim.outer_steps import Streaming, outer_steps
from decent_jax.topology import Schedule


class ChocoState(NamedTuple):
    """The method's own state; both are shaped like the parameters."""

    s: Any  # sum_j W_ij x_hat_j, over the neighbours and oneself
    x_hat: Any  # the replica's own public copy


def choco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    identical_start: bool = True,
    *,
    compressor: Annotated[str, '"top_k" or "int8"'] = "top_k",
    fraction: Annotated[float, 'part of each array that "top_k" sends, in (0, 1]'] = 0.1,
    gamma: Annotated[float, "consensus step size"] = 0.2,
) -> optax.GradientTransformationExtraArgs:
    r"""Replicas know each other by public copies, which they correct by compressed messages.

    With ``x_hat_i`` the public copy of replica i, C the compressor and ``Delta_i`` the
    update of ``inner``:

    .. math::
        y_i &= x_i + \Delta_i(x_i), \qquad q_i = C(y_i - \hat x_i) \\
        \hat x_i &\leftarrow \hat x_i + q_i, \qquad
        s_i \leftarrow s_i + \sum_j W_{ij} q_j \quad (= \sum_j W_{ij} \hat x_j) \\
        x_i &\leftarrow y_i + \gamma (s_i - \hat x_i)

    What C drops stays in ``y - x_hat`` and is sent later, so consensus is reached however
    coarse C is, if ``gamma`` is small enough; the mean is kept at every step. Only
    ``q_i`` travels: s is kept and corrected, so the graph must be static. One compressed
    message per step, two copies of the parameters (``x_hat_i`` and ``s_i``).

    Args:
      inner, schedule, axis_name: as in `decentralized`.
      identical_start: public copies begin at the parameters, which are then the same on all
        replicas; False: at zero, as in the paper.
      compressor: C, ``"top_k"`` or ``"int8"``.
      fraction: how much of each array ``"top_k"`` sends, in (0, 1].
      gamma: consensus step size; the coarser C, the smaller, and too large diverges. On a ring of 8
        without gradients the largest that converged of 0.02, 0.05, 0.1, 0.2, 0.3, 0.5 was 0.3 for
        the top 10%, and 0.05 for the top 1%.

    Raises:
      ValueError: a number out of range, or a schedule that changes or averages in groups.

    References:
      Koloskova et al., `CHOCO-SGD <https://arxiv.org/abs/1902.00340>`_, 2019, Algorithm 2, with the
      gradient step first.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"choco.gamma must be above 0 and at most 1, got {gamma}")
    codec = compressor_of(compressor, fraction)
    require.static_messages("choco", schedule)
    mixing = frame.Mixing(schedule, axis_name, codec, "choco")

    def step(params, own, round, local):
        update, inner, ok = local(params)
        y = trees.add(params, update)
        if round is None:
            return y, own, inner, ok
        # A replica that is not finite sends zeros, so that its public copy stays as it was, and
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

    begin = trees.copy if identical_start else optax.tree.zeros_like
    return frame.method(inner, step, frame.filled(ChocoState, begin))


def compressor_of(name: str, fraction: float) -> Codec:
    """The format of that name."""
    if not 0 < fraction <= 1:
        raise ValueError(f"choco.fraction must be above 0 and at most 1, got {fraction}")
    named = {"top_k": TopK(fraction), "int8": Int8()}
    if name not in named:
        raise ValueError(f"choco.compressor must be one of {', '.join(named)}, got {name!r}")
    return named[name]


def sparta(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "with",
    axis_name: AxisName = "replica",
    *,
    fraction: Annotated[float, "part of each array that is averaged, in (0, 1]"] = 0.005,
) -> optax.GradientTransformationExtraArgs:
    r"""`decentralized` that averages a random part of the parameters, another in every step.

    With S the numbers of each array that all replicas draw from the same key in this step:

    .. math:: x_{i,S} \leftarrow \sum_j W_{ij} x_{j,S}

    in the order of ``combine``; the others stay. What is sent is averaged exactly, and on average
    every parameter has its turn every 1 / ``fraction`` steps, so replicas reach consensus without
    error feedback. One message of this fraction per step, no memory.

    Args:
      inner, combine, axis_name: as in `decentralized`.
      schedule: ``complete`` in the source; any whose rows sum to 1.
      fraction: part of each array that is averaged, in (0, 1]; 0.0005 to 0.005 in the source.

    References:
      EXO, SPARTA, 2025; here from its abstract.
    """
    codec = _places("sparta", fraction)
    return averaging.decentralized(inner, schedule, combine, axis_name, codec)


def _places(method: str, fraction: float) -> RandomK:
    if not 0 < fraction <= 1:
        raise ValueError(f"{method}.fraction must be above 0 and at most 1, got {fraction}")
    return RandomK(fraction)


class OuterState(NamedTuple):
    """Own state of `sparta_diloco`."""

    theta: Any  # like params, the same on all replicas
    outer: Any  # the outer optimizer's state


def sparta_diloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    *,
    fraction: Annotated[float, "part of each array that every round averages, in (0, 1]"] = 0.005,
    outer_every: Annotated[int, "rounds from one outer step to the next"] = 10,
    outer_learning_rate: Annotated[float, "of the outer optimizer"] = 0.7,
    outer_momentum: Annotated[float, "of the outer optimizer, in [0, 1)"] = 0.9,
) -> optax.GradientTransformationExtraArgs:
    r"""`sparta` in every round, and in some of them the outer step of `diloco` after it.

    With S the numbers that all replicas draw in this round, and in every ``outer_every``-th:

    .. math::
        x_{i,S} \leftarrow \tfrac1n \textstyle\sum_j x_{j,S}, \qquad
        \theta \leftarrow \mathrm{outer}\big(\theta,\ \theta - \tfrac1n \textstyle\sum_j x_j\big),
        \qquad x_i \leftarrow \theta

    What SPARTA averages keeps replicas together between the outer steps, which can then be seldom.
    Per round one message of ``fraction``, and 1 / ``outer_every`` of a whole one; two copies of the
    parameters (``theta`` and the outer momentum).

    Args:
      inner, axis_name: as in `decentralized`.
      schedule: ``complete``, with ``outer_every`` rounds (`decent_jax.topology.repeat`).
      fraction: part of each array that every round averages, in (0, 1].
      outer_every: rounds from one outer step to the next.
      outer_learning_rate, outer_momentum: of the outer SGD with Nesterov momentum.

    References:
      EXO, SPARTA, 2025, and the strategy SPARTA + DiLoCo of their code (EXO Gym).
    """
    codec = _places("sparta_diloco", fraction)
    if outer_every < 1:
        raise ValueError(f"sparta_diloco.outer_every must be at least 1, got {outer_every}")
    require.not_negative("sparta_diloco.outer_learning_rate", outer_learning_rate)
    require.below_one("sparta_diloco.outer_momentum", outer_momentum)
    require.averages("sparta_diloco", schedule, always=True)
    require.phases("sparta_diloco", schedule, outer_every)
    part = frame.Mixing(schedule, axis_name, codec, "sparta_diloco")
    whole = frame.Mixing(schedule, axis_name, method="sparta_diloco")
    outer = optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    rule = towards_average(outer)

    def step(params, own, round, local):
        update, inner, ok = local(params)
        x, r = trees.add(params, update), gossip.number(round)
        x = part(x, round, local.count)
        if r is None or (r + 1) % outer_every:
            return x, own, inner, ok

        def mix(tree):
            return whole(tree, round, local.count)

        theta, state = rule.step(own.theta, x, own.outer, mix, None, None)
        return theta, OuterState(theta, state), inner, ok

    return frame.method(
        inner, step, lambda params: OuterState(trees.copy(params), outer.init(params))
    )


def sparseloco(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    identical_start: bool = True,
    mix_every: int = 1,
    *,
    density: Annotated[float, "part of every chunk that is sent, in (0, 1]"] = 1 / 64,
    chunk: Annotated[int, "numbers per chunk"] = 4096,
    bits: Annotated[int, "2 or 32, per number sent"] = 2,
    decay: Annotated[float, "share of what was not sent that is kept, in [0, 1]"] = 0.95,
    outer_learning_rate: Annotated[float, "factor of the movement"] = 1.0,
    clipped: Annotated[bool, "True: no message counts for more than their median norm"] = False,
    delay: Annotated[int, "steps beside which a message travels, below mix_every"] = 0,
    carry: Annotated[
        bool, "True: a replica keeps what it learned while the message travelled"
    ] = False,
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

    ``clipped`` shortens what every replica sends of an array to the median of their norms, so that
    no replica of many leads the others astray:

    .. math:: q_j \leftarrow q_j \min\Big(1,\ \frac{\mathrm{median}_k |q_k|}{|q_j| + 10^{-8}}\Big)

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
      clipped: whether messages are clipped, as in Covenant-72B.
      mix_every, delay, carry: as in `diloco`.

    References:
      Sarfi et al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025, equations from a
      transcription. The 2-bit code is ours: signs and two magnitudes per chunk. `Covenant-72B
      <https://arxiv.org/abs/2603.08163>`_, 2026, for the clipping.
    """
    require.averages("sparseloco", schedule, always=True)
    if not identical_start:
        raise ValueError(
            "sparseloco exchanges movements only, so replicas that begin apart stay apart; use "
            "identical_start=True, or noloco"
        )
    require.not_negative("sparseloco.outer_learning_rate", outer_learning_rate)
    outer, codec = optax.sgd(outer_learning_rate), ChunkedTopK(density, chunk, bits)
    rule = along_coded_movements(outer, codec, axis_name, decay, "sparseloco", clipped)
    mixing = frame.Mixing(schedule, axis_name, method="sparseloco")
    return outer_steps(inner, mixing, rule, Streaming(mix_every, delay=delay, carry=carry))


def _sparse_bytes(params: Any, parts: Parts, own: Mapping[str, Any]) -> float:
    """Each of n - 1 others receives the message; an average counts as 2 (n - 1) / n models."""
    codec = ChunkedTopK(own["density"], own["chunk"], own["bits"])
    return parts.schedule.num_replicas / 2 * coded_bytes(params, codec)


def _choco_bytes(params: Any, parts: Parts, own: Mapping[str, Any]) -> float:
    return coded_bytes(params, compressor_of(own["compressor"], own["fraction"]))


def _sparta_bytes(params: Any, parts: Parts, own: Mapping[str, Any]) -> float:
    return coded_bytes(params, RandomK(own["fraction"]))


def _sparta_diloco_bytes(params: Any, parts: Parts, own: Mapping[str, Any]) -> float:
    return _sparta_bytes(params, parts, own) + model_bytes(params, parts, own) / own["outer_every"]


register(Method("choco", choco, copies=2, sent=_choco_bytes))
register(Method("sparta", sparta, ADAM_FIRST, BOTH, sent=_sparta_bytes))
register(
    Method(
        "sparta_diloco",
        sparta_diloco,
        ADAM_FIRST,
        copies=2,
        sent=_sparta_diloco_bytes,
        phases=lambda own: own["outer_every"],
    )
)
register(Method("sparseloco", sparseloco, ADAM_FIRST, copies=2, sent=_sparse_bytes))
