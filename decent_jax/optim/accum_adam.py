"""Accumulated Adam: Adam whose moments take one averaged gradient per window of steps."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from decent_jax.gossip.permute import at_least_float32
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import validation


class ScaleByAccumAdamState(NamedTuple):
    """State of `scale_by_accum_adam`; ``mu``, ``nu`` and ``window`` are shaped like the params.

    They are at least float32, because in bfloat16 b2 = 0.999 would be 1 and v would never decay.
    """

    # shape=(), dtype=int32: steps taken
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree  # first moment of the completed windows
    nu: PyTree  # second moment of the completed windows
    window: PyTree  # sum of g / accum_steps over the window so far; None when accum_steps == 1


def scale_by_accum_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, accum_steps: int | jax.Array = 4
) -> optax.GradientTransformation:
    r"""Rescales gradients by Adam moments that are committed once per ``accum_steps`` steps.

    At step ``t = 1, 2, ...`` with gradient ``g``, ``s`` = ``accum_steps`` and
    ``k = ceil(t / s)``, the update and the state are

    .. math::
        A &\leftarrow A + g/s \\
        \tilde m &= \beta_1 m + (1-\beta_1) g, \quad \tilde v = \beta_2 v + (1-\beta_2) g^2 \\
        u &= \frac{\tilde m}{1-\beta_1^k} \Big/
             \Big(\sqrt{\tilde v / (1-\beta_2^k)} + \epsilon\Big) \\
        \text{if } s \mid t: \quad
        m &\leftarrow \beta_1 m + (1-\beta_1) A, \quad v \leftarrow \beta_2 v + (1-\beta_2) A^2,
        \quad A \leftarrow 0

    so the moments take a window's mean gradient, as if from a batch s times as large, and every
    step still moves the parameters. ``accum_steps=1`` is Adam, without the memory for A.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the square root, after bias correction.
      accum_steps: length of the window; about half the number of replicas in the published runs.

    Returns:
      A transformation whose state is a `ScaleByAccumAdamState`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from decent_jax import optim
      >>> tx = optim.accum_adamw(0.1, accum_steps=2)
      >>> params = jnp.array([1.0, -2.0])
      >>> state = tx.init(params)
      >>> for _ in range(4):
      ...     updates, state = tx.update(2 * params, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> [f"{x:.4f}" for x in params]
      ['0.6027', '-1.6009']

    References:
      Wang et al., `From Promise to Practice <https://arxiv.org/abs/2410.11998>`_, 2025,
      Algorithm 4 (which prints beta_1 where the committed second moment takes beta_2).
    """
    validation.below_one("b1", b1)
    validation.below_one("b2", b2)
    validation.not_negative("eps", eps)
    is_static = not isinstance(accum_steps, jax.Array)  # `optax.inject_hyperparams` traces it
    if is_static and (accum_steps < 1 or accum_steps != int(accum_steps)):
        raise ValueError(f"accum_steps must be a whole number of at least 1, got {accum_steps}")
    is_adam = is_static and accum_steps == 1

    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x, at_least_float32(x))

    def init(params: PyTree) -> ScaleByAccumAdamState:
        mu, nu, window = (jax.tree.map(zeros, params) for _ in range(3))
        return ScaleByAccumAdamState(jnp.zeros((), jnp.int32), mu, nu, None if is_adam else window)

    def update(
        updates: PyTree, state: ScaleByAccumAdamState, params: PyTree = None
    ) -> tuple[PyTree, ScaleByAccumAdamState]:
        g = jax.tree.map(_cast, updates, state.mu)
        count = jnp.asarray(optax.safe_increment(state.count))
        windows = (count + accum_steps - 1) // accum_steps
        mu, nu = moment(b1, state.mu, g, 1), moment(b2, state.nu, g, 2)
        m_scale, v_scale = (1 / bias_correction(b, windows) for b in (b1, b2))

        def direction_of(m: jax.Array, v: jax.Array) -> jax.Array:
            return _cast(m_scale, m) * m / (jnp.sqrt(v * _cast(v_scale, v)) + _cast(eps, v))

        direction = jax.tree.map(direction_of, mu, nu)
        if is_adam:
            return direction, ScaleByAccumAdamState(count, mu, nu, None)

        def accumulated(a: jax.Array, g: jax.Array) -> jax.Array:
            return a + g / _cast(accum_steps, a)

        window = jax.tree.map(accumulated, state.window, g)
        ended = (
            moment(b1, state.mu, window, 1),
            moment(b2, state.nu, window, 2),
            optax.tree.zeros_like(window),
        )
        closes = count % accum_steps == 0
        return direction, ScaleByAccumAdamState(
            count, *optax.tree.where(closes, ended, (state.mu, state.nu, window))
        )

    return optax.GradientTransformation(init, update)


def accum_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    accum_steps: int = 4,
) -> optax.GradientTransformationExtraArgs:
    r"""Accumulated Adam with decoupled weight decay.

    With ``u`` from `scale_by_accum_adam`, ``x <- (1 - eta lambda) x - eta u``: the decay is
    multiplied by the learning rate, as in `optax.adamw`. Inside `decentralized` with
    ``combine="awc"``, x on the right is the mixed parameter, as in Decent-DP.

    Args:
      learning_rate: a float or an optax schedule of the step (not of the window).
      b1, b2, eps, accum_steps: see `scale_by_accum_adam`.
      weight_decay: ``lambda``.
      mask: a pytree of bools, True where the decay applies, or a callable from parameters to one.

    Returns:
      The transformation. Under `optax.inject_hyperparams` a callable mask must be static
      (``static_args="mask"``); everything else works unchanged.

    Raises:
      ValueError: a beta outside [0, 1), a negative eps, or accum_steps < 1.
    """
    return optax.chain(
        scale_by_accum_adam(b1, b2, eps, accum_steps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def accum_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    accum_steps: int = 4,
) -> optax.GradientTransformationExtraArgs:
    r"""Accumulated Adam with L2 regularization.

    First ``g <- g + lambda x``, so the decay enters the moments and the window; then come
    `scale_by_accum_adam` and the learning rate. The arguments are as in `accum_adamw`.
    """
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask),
        scale_by_accum_adam(b1, b2, eps, accum_steps),
        optax.scale_by_learning_rate(learning_rate),
    )


def drop_window(state: PyTree, accum_steps: int) -> PyTree:
    """An optimizer state (nested in any way) without a partial window of accumulated gradients.

    A change of the number of replicas needs this, because the windows of different replicas hold
    different gradients: ``window`` becomes zero, and ``count`` returns to the last completed
    window. Adam has no windows.
    """

    def is_adam(node: PyTree) -> bool:
        return isinstance(node, ScaleByAccumAdamState)

    def drop(node: PyTree) -> PyTree:
        if not is_adam(node) or node.window is None:
            return node
        window = jax.tree.map(jnp.zeros_like, node.window)
        return node._replace(count=node.count - node.count % accum_steps, window=window)

    return jax.tree.map(drop, state, is_leaf=is_adam)


def moment(decay: float | jax.Array, old: PyTree, value: PyTree, order: int) -> PyTree:
    """``decay * old + (1 - decay) * value ** order``, leaf by leaf, in the dtypes of ``old``.

    The square of a complex number is its squared magnitude.
    """

    def mixed(m: jax.Array, g: jax.Array) -> jax.Array:
        g = jnp.abs(g) if order == 2 and jnp.iscomplexobj(g) else g
        return _cast(decay, m) * m + _cast(1 - decay, m) * g**order

    return jax.tree.map(mixed, old, value)


def bias_correction(decay: float | jax.Array, count: jax.Array) -> jax.Array:
    """``1 - decay ** count``, with ``expm1``, because a float32 power would lose digits."""
    if isinstance(decay, float | int):
        log = math.log(decay) if decay > 0 else -math.inf
    else:
        log = jnp.log(decay)
    return -jnp.expm1(count * log)


def _cast(value: float | jax.Array, like: jax.Array) -> jax.Array:
    return jnp.asarray(value, like.dtype)
