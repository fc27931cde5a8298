"""Bias-corrected methods, which converge to the optimum however the replicas' data differ."""

import dataclasses
from typing import NamedTuple

import optax

from decent_jax.gossip import AxisName, RoundId
from decent_jax.gossip.codecs import Codec
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import trees, validation
from decent_jax.optim.method_wrapper import Local, Mixing, Stepped, filled, method
from decent_jax.optim.registry import BOTH, register
from decent_jax.topology import Schedule


class DiffusionState(NamedTuple):
    """The ``own`` state of `exact_diffusion` and `d2`."""

    psi: PyTree  # like params: the adapted parameters of the last step


def exact_diffusion(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    mix_every: int = 1,
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Exact diffusion: adapts, corrects by the change of the last combination, and combines.

    With ``W_bar = (I + W)/2`` and ``Delta_i`` the update of ``inner``:

    .. math::
        \psi_i^{+} = x_i + \Delta_i(x_i), \qquad \phi_i = \psi_i^{+} + x_i - \psi_i, \qquad
        x_i \leftarrow \sum_j \bar W_{ij} \phi_j, \qquad \psi_i \leftarrow \psi_i^{+}

    with ``psi_i = x_i`` before the first step. It sends one message per step and stores one copy of
    the parameters (psi). With ``optax.sgd`` at a fixed learning rate the limit is the optimum of
    the average loss. The arguments are as in `decentralized`; ``mix_every`` is the number of steps
    from one round to the next.

    Raises:
      ValueError: with this schedule and ``mix_every``, the disagreement would grow. ``mix_every=1``
        suits static undirected graphs, ``one_peer_exp`` and ``hypercube``; with 8 replicas,
        ``hypercube`` allows 2 and ``bidirectional_ring`` 4.

    References:
      Yuan et al., `Exact Diffusion, Part I <https://arxiv.org/abs/1702.05122>`_, 2018.
    """
    mixing = Mixing(schedule, axis_name, codec, "exact_diffusion")
    validation.stable_diffusion("exact_diffusion", schedule, mix_every)
    return _diffusion(inner, mixing, half=True)


def d2(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    axis_name: AxisName = "replica",
    mix_every: int = 1,
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""D2: `exact_diffusion` with W in place of (I + W) / 2; if stable, consensus is twice as fast.

    .. math:: x^{+} = W \big(2 x - x^{-} - \eta (g - g^{-})\big), \qquad x^{1} = W (x - \eta g)

    (with ``optax.sgd``; another ``inner`` has its own update). The arguments are as in
    `exact_diffusion`.

    Raises:
      ValueError: W changes, is not symmetric, or has an eigenvalue below -1/3 (close to it, d2
        warns).

    References:
      Tang et al., `D2 <https://arxiv.org/abs/1803.07068>`_, 2018, Algorithm 1.
    """
    mixing = Mixing(schedule, axis_name, codec, "d2")
    validation.static_and_symmetric("d2", schedule, mix_every)
    validation.eigenvalues_above_minus_a_third("d2", schedule)
    return _diffusion(inner, mixing, half=False)


def _diffusion(
    inner: optax.GradientTransformation, mixing: Mixing, half: bool
) -> optax.GradientTransformationExtraArgs:
    def step(params: PyTree, own: DiffusionState, round: RoundId, local: Local) -> Stepped:
        if round is None and not half:
            raise ValueError("d2 mixes in every step; use mix_every=1")
        update, inner, ok = local(params)
        psi = trees.add(params, update)
        phi = trees.add(psi, optax.tree.sub(params, own.psi))
        mixed = x = mixing(phi, round, local.count)
        if half:
            x = trees.scale(0.5, trees.add(phi, mixed))
        # A replica that is not finite restarts from the neighbours' average.
        fine = trees.all_finite(phi)
        x, psi = optax.tree.where(fine, (x, psi), (mixed, mixed))
        return x, DiffusionState(psi), inner, ok

    own = filled(DiffusionState, trees.copy)
    return method(inner, step, own, mixing.axis_name)


class TrackingState(NamedTuple):
    """The ``own`` state of `gradient_tracking`; both fields are shaped like the parameters."""

    g: PyTree  # the last finite gradient
    q: PyTree  # the tracked average gradient


def gradient_tracking(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    combine: str = "awc",
    axis_name: AxisName = "replica",
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Every replica tracks the average gradient and steps along it.

    .. math::
        \text{awc:}\quad & q_i \leftarrow \sum_j W_{ij} q_j + g_i - g_i^{-}, \qquad
            x_i \leftarrow \sum_j W_{ij} x_j + \Delta_i(q_i) \\
        \text{atc:}\quad & q_i \leftarrow \sum_j W_{ij} (q_j + g_j - g_j^{-}), \qquad
            x_i \leftarrow \sum_j W_{ij} \big(x_j + \Delta_j(q_j)\big)

    with ``q = g^- = 0`` before the first step, so that always ``sum_i q_i = sum_i g_i``. The
    messages of "awc" are known at the start of the step. Both forms send two messages per step and
    store two arrays of the parameters' size (q and the last gradient). ``inner`` sees q: clipping
    in it clips q. Valid on every doubly stochastic schedule; the arguments are those of
    `decentralized`.

    Unlike in DIGing, q is mixed by the round of the step that uses it, not by the previous round;
    this makes no difference on a schedule with one round. The limit is the same on all schedules,
    but the range of stable learning rates is not.

    With Muon as ``inner``, tracking precedes orthogonalization. This order is necessary: the
    average gradient and the average of orthogonalized local gradients vanish at different points.
    "awc" is then SUDA-Muon with tracking as its backbone. "atc", without Nesterov momentum, is
    DeMuon on static graphs, where momentum before tracking (theirs) and after it (ours) are equal.

    References:
      Di Lorenzo and Scutari, `NEXT <https://arxiv.org/abs/1602.00591>`_, 2016; Nedic et al.,
      `DIGing <https://arxiv.org/abs/1607.03218>`_, 2017; `DeMuon
      <https://arxiv.org/abs/2510.01377>`_, 2025; `SUDA-Muon <https://arxiv.org/abs/2604.23980>`_,
      2026.
    """
    validation.combine(combine)
    mixing = Mixing(schedule, axis_name, codec, "gradient_tracking")

    def step(params: PyTree, own: TrackingState, round: RoundId, local: Local) -> Stepped:
        # A non-finite gradient changes nothing: the sum of q remains that of the last finite ones.
        fine = trees.acceptable(local.grads, None)
        g = optax.tree.where(fine, local.grads, own.g)
        change = optax.tree.sub(g, own.g)
        if combine == "awc":
            # Separate flags: q of a replica whose x is lost still counts in the sum.
            x = mixing(params, round, local.count)
            q = trees.add(mixing(own.q, round, local.count, nth=1), change)
        else:
            x = params
            q = mixing(trees.add(own.q, change), round, local.count, nth=1)
        tracked = dataclasses.replace(local, grads=q, active=local.active & fine)
        update, inner, ok = tracked(x)
        x = trees.add(x, update)
        if combine == "atc":
            x = mixing(x, round, local.count)
        return x, TrackingState(g, q), inner, ok

    return method(inner, step, filled(TrackingState), axis_name)


register("exact_diffusion", exact_diffusion, copies=1)
register("d2", d2, copies=1)
register("gradient_tracking", gradient_tracking, orders=BOTH, messages=2, copies=2)
