"""Trees of arrays: arithmetic that keeps dtypes, and the guard against non-finite numbers.

Non-finite numbers are rejected where they arise and never mixed in: an update with a non-finite
loss or gradient is rejected, single numbers that overflow become 0 and the update is counted, and
neighbours ignore parameters that are not finite. This costs one pass over the gradients, one over
the parameters, one flag per message, and on CPUs a copy of the update.

`optax.apply_if_finite` is the same idea for one model. It checks the whole update before it writes
any of it (under a ``lax.cond``), stops the counts of learning-rate schedules, and cannot restore
parameters that are not finite.

`optax.tree` has other arithmetic.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import optax

from decent_jax.gossip.permute import at_least_float32, squared_norm
from decent_jax.ground.pytree import PyTree


def add(tree: PyTree, *others: PyTree) -> PyTree:
    """The sum of trees of equal structure, in the dtypes of the first."""

    def total(x: jax.Array, *rest: jax.Array) -> jax.Array:
        return jnp.asarray(sum(rest, x), x.dtype)

    return jax.tree.map(total, tree, *others)


def scale(factor: float | jax.Array, tree: PyTree) -> PyTree:
    """``factor * tree`` in the tree's dtypes."""

    def scaled(x: jax.Array) -> jax.Array:
        return jnp.asarray(factor, x.dtype) * x

    return jax.tree.map(scaled, tree)


def wide(tree: PyTree) -> PyTree:
    """The tree with floats of fewer than 32 bits as float32."""

    def widened(x: jax.Array) -> jax.Array:
        floats = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.asarray(x, at_least_float32(x)) if floats else x

    return jax.tree.map(widened, tree)


def copy(tree: PyTree) -> PyTree:
    """Equal arrays in new buffers, because a donated state must not hold an array twice."""
    return jax.tree.map(jnp.array, tree)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """``params + updates``, where a parameter that is not finite counts as zero.

    Methods compute their updates from the same zeros, so a replica whose parameters were not finite
    continues from its neighbours' average. For finite parameters this is `optax.apply_updates`.
    """
    return optax.apply_updates(jax.tree.map(finite_or_zero, params), updates)


def all_finite(tree: PyTree) -> jax.Array:
    """() bool: whether every number in the tree is finite."""
    # The largest magnitude would be faster, but XLA's CPU compiler loses a NaN in it (jaxlib
    # 0.10.2). XLA would compute `isfinite` once for this and for `finite_or_zero`, and would keep
    # the result in memory in between.
    return _all((jnp.abs(leaf) < jnp.inf).all() for leaf in jax.tree.leaves(tree))


def acceptable(gradient: PyTree, value: jax.Array | None) -> jax.Array:
    """() bool: whether the loss and the squared norm of the gradient are finite."""
    flags = [jnp.isfinite(squared_norm(g)) for g in jax.tree.leaves(gradient)]
    if value is not None:
        flags.append(jnp.isfinite(value))
    return _all(flags)


def unspoiled(update: PyTree) -> jax.Array:
    """() bool: whether the smallest array is finite, and no other small array is all non-finite.

    An array is small if it has at most 256 numbers, or if the arrays up to its size, without the
    smallest, together hold at most 1/64 of the update. We check several because the smallest may be
    frozen. We check no larger ones because reading an array of an update forces XLA to write it out
    before it is applied.
    """
    leaves = sorted(filter(jnp.size, jax.tree.leaves(update)), key=jnp.size)
    total, held, flags = sum(x.size for x in leaves), 0, [all_finite(leaves[:1])]
    for x in leaves[1:]:
        held += x.size
        if x.size <= 256 or 64 * held <= total:
            flags.append((jnp.abs(x) < jnp.inf).any())
    return _all(flags)


def with_own_keys(state: PyTree, replica: Callable[[], jax.Array]) -> PyTree:
    """An optimizer's state in which the random keys, initially equal, become this replica's own.

    Keys are arrays of a key type, and uint32 arrays in a field whose name ends in "key".
    """

    def own(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.vmap(jax.random.fold_in, (0, None))(x.ravel(), replica()).reshape(x.shape)
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if x.dtype == jnp.uint32 and x.ndim == 1 and name.endswith("key"):
            return jax.random.fold_in(x, replica())
        return x

    return jax.tree_util.tree_map_with_path(own, state)


def _all(flags: Iterable[jax.Array]) -> jax.Array:
    """The conjunction as a reduction of negations, which XLA computes once.

    XLA fuses a chain of ``and`` into each of its uses, and turns a plain reduction of a stack into
    such a chain. The update of each array then computed the flags of all arrays, which took two
    thirds of the time to compile a step of 65 arrays.
    """
    flags = list(flags)
    return ~(~jnp.stack(flags)).any() if flags else jnp.array(True)


def select(ok: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """``new`` if ok, else ``old``; counts of learning-rate schedules always advance."""
    counts, injected = optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState

    def always_advances(node: PyTree) -> bool:
        return isinstance(node, counts | injected)

    def selected(new: PyTree, old: PyTree) -> PyTree:
        if isinstance(new, counts):
            return new
        if isinstance(new, injected):
            return new._replace(inner_state=select(ok, new.inner_state, old.inner_state))
        return jnp.where(ok, new, old)

    return jax.tree.map(selected, new, old, is_leaf=always_advances)


def finite_or_zero(x: jax.Array) -> jax.Array:
    """``x`` with zeros where it is not finite."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
