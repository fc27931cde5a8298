"""Push-sum: averages over graphs whose weights sum to 1 only at the sender."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax.gossip import AxisName, RoundId
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import trees
from decent_jax.optim.method_wrapper import Local, Mixing, Stepped, method
from decent_jax.optim.registry import register
from decent_jax.topology import Schedule


class PushSumState(NamedTuple):
    """The ``own`` state of `push_sum`."""

    w: jax.Array  # shape=(), dtype=float: the weight, 1 at the start


def push_sum(
    inner: optax.GradientTransformation, schedule: Schedule, axis_name: AxisName = "replica"
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic gradient push: averaging over directed graphs, with rows that need not sum to 1.

    With P column stochastic (``P_ij`` is the share of its parameters that j sends to i), biased
    parameters x, a weight w that starts at 1, and ``z = x / w``, the parameters of the model, at
    which gradients are taken:

    .. math::
        x_i \leftarrow \sum_j P_{ij} \big(x_j + \Delta_j(z_j)\big), \qquad
        w_i \leftarrow \sum_j P_{ij} w_j, \qquad z_i = x_i / w_i

    ``params`` are z; the state holds only w. It sends one message and one scalar per step. On a
    doubly stochastic schedule w stays 1, and this is `decentralized` with ``combine="atc"``. The
    weighted mean ``1/n sum_i w_i z_i`` moves as in SGD; it is the consensus model
    (`consensus_weights`). The arguments are those of `decentralized`.

    References:
      Assran et al., `Stochastic Gradient Push <https://arxiv.org/abs/1811.10792>`_, 2019,
      Algorithm 1.
    """
    mixing = Mixing(schedule, axis_name, rows=False)

    def step(params: PyTree, own: PushSumState, round: RoundId, local: Local) -> Stepped:
        update, inner, ok = local(params)
        x = trees.add(trees.scale(own.w, params), update)
        x, w = mixing((x, own.w), round, local.count)
        return trees.scale(1 / w, x), PushSumState(w), inner, ok

    def own(params: PyTree) -> PushSumState:
        return PushSumState(jnp.ones((), float))

    return method(inner, step, own, axis_name)


def consensus_weights(opt_state: PyTree) -> jax.Array | None:
    """The replicas' weights (n,) in the consensus model: w of `push_sum`; None: equal weights.

    Args:
      opt_state: a method's state, stacked over replicas.
    """
    own = getattr(opt_state, "own", None)
    return own.w if isinstance(own, PushSumState) else None


def with_equal_weights(own: PyTree) -> PyTree:
    """A method's ``own`` state for replicas that all hold the consensus model (weights 1)."""
    return own._replace(w=jnp.ones_like(own.w)) if isinstance(own, PushSumState) else own


register("push_sum", push_sum)
