"""The parts that all models share: checks, the functional adapter, layers, attention, the loss."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]  # nested dicts of arrays
Config = Any  # GPT2Config and others, in modules that import this one

_LAYER_NORM_EPSILON = 1e-5


# --- Checks of a config ---------------------------------------------------------------------------


def check(config: Config) -> None:
    """Raises ValueError if ``heads`` does not divide ``width``, or float64 is not enabled."""
    if config.width % config.heads:
        raise ValueError(f"width {config.width} is not divisible by heads {config.heads}")
    check_dtype(config)


def check_dtype(config: Config) -> None:
    """Raises ValueError if activations are float64 and float64 is not enabled."""
    if config.dtype == "float64" and not jax.config.values["jax_enable_x64"]:
        raise ValueError("dtype float64 needs JAX_ENABLE_X64=1 in the environment; or use float32")


# --- The functional adapter -----------------------------------------------------------------------


def init(module: Callable[..., nnx.Module], config: Config, key: jax.Array) -> Params:
    """The initial parameters of ``module(config)``, drawn with ``key``."""
    return nnx.to_pure_dict(nnx.state(module(config, rngs=nnx.Rngs(key)), nnx.Param))


def merge(module: Callable[..., nnx.Module], config: Config, *states: Params) -> Any:
    """The module around its parameters (and statistics); to be used within one trace."""
    return nnx.merge(_abstract(module, config)[0], *map(nnx.State, states), copy=True)


def shapes(module: Callable[..., nnx.Module], config: Config, kind: type = nnx.Param) -> Params:
    """Shapes and dtypes of the parameters, or of another kind of variable; computes nothing."""
    return nnx.to_pure_dict(nnx.filter_state(_abstract(module, config)[1], kind))


@functools.cache
def _abstract(module: Callable[..., nnx.Module], config: Config) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))


def count(tree: Params) -> int:
    """The number of elements in all arrays of ``tree``, which may come from `shapes`."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def decay_mask(params: Params) -> Params:
    """The weight-decay mask: True for matrices (embeddings and kernels), False for biases and
    the scales of norms. It depends on names only, so stacked parameters give the same mask."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )


@jax.checkpoint
def remat_call(layer: Callable[..., jax.Array], *args: object) -> jax.Array:
    """``layer(*args)``, keeping only ``args`` for the backward pass; works under any transform."""
    return layer(*args)


# --- Layers ---------------------------------------------------------------------------------------


def layer_norm(config: Config, rngs: nnx.Rngs, *, bias: bool = True) -> nnx.LayerNorm:
    """A LayerNorm over ``config.width``, with statistics in float32."""
    return nnx.LayerNorm(
        config.width,
        epsilon=_LAYER_NORM_EPSILON,
        use_bias=bias,
        use_fast_variance=False,  # E[x^2] - E[x]^2 cancels: GPT-2 has hidden values in the hundreds
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def dropout(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Sets a share ``rate`` of ``x`` to 0 and scales up all other values; ``x`` without a key."""
    if rng is None:
        return x
    keep = jax.random.bernoulli(rng, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def fold_in(rng: jax.Array | None, data: int) -> jax.Array | None:
    """The key for use number ``data``; None without a key."""
    return None if rng is None else jax.random.fold_in(rng, data)


def implementation(config: Config) -> Any:
    """The kernel of `jax.nn.dot_product_attention`: "xla" or "cudnn"."""
    if config.attention != "auto":
        return config.attention
    head_dim = config.width // config.heads
    fits = config.dtype in ("bfloat16", "float16") and head_dim % 8 == 0 and head_dim <= 128
    device = jax.sharding.get_abstract_mesh().abstract_device  # may be absent from this machine
    gpu = "NVIDIA" in device.device_kind if device else jax.default_backend() == "gpu"
    return "cudnn" if fits and gpu else "xla"


def attention(
    config: Config,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None = None,
    *,
    causal: bool = False,
    rng: jax.Array | None = None,
) -> jax.Array:
    """Scaled dot-product attention, ``(B, T, heads, D)``.

    Args:
      config: a config with the kernel (``attention``) and the rate of dropout (``dropout``).
      query: ``(B, T, heads, D)``.
      key, value: ``(B, S, kv_heads, D)``; ``kv_heads`` divides ``heads``.
      lengths: ``(B,)`` int32, at least 1, the number of visible keys of each sentence; None means
        all. A mask would not do: cuDNN turns it into a ``(B, heads, T, S)`` bias, and refuses it
        for odd T or S.
      causal: whether position t attends only to keys 0 to t.
      rng: key for dropout of the probabilities, which are then materialized, at a cost in time and
        memory.
    """
    if rng is not None:
        weights = attention_weights(query, key, lengths, causal=causal)
        return weighted(dropout(weights, config.dropout, rng), value)
    kernel = implementation(config)
    # If XLA shards a replica over devices (mesh.fsdp), it cannot partition cuDNN's kernel, so each
    # device runs the kernel on its own examples.
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh.auto_axes if kernel == "cudnn" else ()
    if len(query) % math.prod(mesh.shape[axis] for axis in axes):
        kernel, axes = "xla", ()

    def attend(query, key, value, lengths):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=causal,
            key_value_seq_lengths=lengths,
            implementation=kernel,
        )

    if axes:
        specs = {"in_specs": P(axes), "out_specs": P(axes), "axis_names": set(axes)}
        attend = jax.shard_map(attend, **specs, check_vma=False)
    return attend(query, key, value, lengths)


def attention_weights(
    query: jax.Array, key: jax.Array, lengths: jax.Array | None = None, *, causal: bool = False
) -> jax.Array:
    """The probabilities ``(B, heads, T, S)``, float32, which `attention` does not return."""
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
    scores /= math.sqrt(query.shape[-1])
    positions = jnp.arange(key.shape[1])
    if lengths is not None:
        seen = positions[None] < lengths[:, None]
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    if causal:
        seen = positions[None] <= jnp.arange(query.shape[1])[:, None]
        scores = jnp.where(seen[None, None], scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)


def weighted(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Values ``(B, S, heads, D)`` summed by weights ``(B, heads, T, S)``: ``(B, T, heads, D)``."""
    return jnp.einsum("bhts,bshd->bthd", weights.astype(value.dtype), value)


def cross_entropy(logits: jax.Array, targets: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Softmax cross-entropy of every position, in nats.

    ``loss = (1 - eps) * (-logp[target]) + eps * mean_v(-logp[v])`` with ``logp`` the log-softmax
    of ``logits`` and ``eps`` the label smoothing; the total weight of the target is therefore
    ``1 - eps + eps / V``.

    Logits are the largest array of a language model: ``B * T * V``, 6.6 GB in float32 for a
    batch of 32 GPT-2 sequences. The plain formula on bfloat16 logits keeps a float32 copy (or the
    float32 probabilities) from the forward to the backward pass and makes a second one for the
    gradient. Here the forward pass reduces in float32 as it reads. It keeps only the logits in
    their own dtype and one float32 log-sum-exp per position, and one elementwise expression writes
    the gradient in the logits' dtype. (XLA's CPU kernels do convert the logits once, for the
    forward reductions; the backward pass does not read that copy.)

    Args:
      logits: ``(..., V)``, bfloat16, float16, float32 or float64.
      targets: ``(...)`` integers in ``[0, V)``; the loss of any other target is NaN. To ignore a
        position, give it any valid target and multiply its loss by 0.
      label_smoothing: ``eps`` in ``[0, 1)``, a Python float.

    Returns:
      ``(...)`` float32 (float64 for float64 logits).

    Raises:
      ValueError: ``targets`` is not shaped like ``logits`` without its last axis.

    Example:
      >>> import jax.numpy as jnp
      >>> print(cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])))
      [1.3862944 1.3862944]
    """
    return _cross_entropy(logits, targets, label_smoothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits, targets, label_smoothing) -> jax.Array:
    return _cross_entropy_forward(logits, targets, label_smoothing)[0]


def _cross_entropy_forward(logits, targets, label_smoothing):
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets of shape {targets.shape} do not fit logits of shape {logits.shape}: "
            f"expected {logits.shape[:-1]}"
        )
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    # Each `astype` is fused into the reduction or gather that reads it.
    log_normalizer = jax.nn.logsumexp(logits.astype(wide), axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill")[..., 0]
    loss = log_normalizer - (1.0 - label_smoothing) * picked.astype(wide)
    if label_smoothing:
        loss -= label_smoothing * jnp.mean(logits, axis=-1, dtype=wide)
    return loss, (logits, log_normalizer, targets)


def _cross_entropy_backward(label_smoothing, residuals, cotangent):
    logits, log_normalizer, targets = residuals
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits.astype(log_normalizer.dtype) - log_normalizer[..., None])
    wanted = (1.0 - label_smoothing) * (classes == targets[..., None])
    wanted += label_smoothing / logits.shape[-1]
    gradient = (probabilities - wanted) * cotangent[..., None]
    return gradient.astype(logits.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
