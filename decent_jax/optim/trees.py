"""Trees of arrays: arithmetic that keeps dtypes, and the guard against what is not finite.

What is not finite is rejected where it arises, and never mixed in: an update from a loss or a
gradient that is not finite is rejected, single numbers of it that overflow are left out, and
neighbours ignore parameters that are not finite. This costs one pass over the gradients and one
over the parameters, and no message but a flag with each mix.

`optax.apply_if_finite` is the same idea for one model. It checks the whole update before it writes
any of it, under a ``lax.cond``, stops the counts of learning-rate schedules, and cannot bring back
parameters that are not finite.

For other arithmetic there is `optax.tree`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from decent_jax.gossip.permute import squared_norm


def add(tree: Any, *others: Any) -> Any:
    """The sum of trees of equal structure, in the dtypes of the first."""
    return jax.tree.map(lambda x, *rest: jnp.asarray(sum(rest, x), x.dtype), tree, *others)


def scale(factor: Any, tree: Any) -> Any:
    """``factor * tree`` in the tree's dtypes."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def copy(tree: Any) -> Any:
    """Equal arrays in buffers of their own: a donated state must not hold one array twice."""
    return jax.tree.map(jnp.array, tree)


def apply_updates(params: Any, updates: Any) -> Any:
    """``params + updates``, where a parameter that is not finite counts as zero.

    Methods compute their updates from the same zeros, so a replica whose parameters were not
    finite continues from its neighbours' average. Otherwise equal to `optax.apply_updates`.
    """
    return optax.apply_updates(jax.tree.map(finite_or_zero, params), updates)


def all_finite(tree: Any) -> jax.Array:
    """() bool."""
    # Not by the largest magnitude, which is faster: XLA's CPU loses a NaN in it (jaxlib 0.10.2).
    # Not by isfinite: XLA would compute it once for this and for `finite_or_zero`, and keep it
    # till then.
    return _all((jnp.abs(leaf) < jnp.inf).all() for leaf in jax.tree.leaves(tree))


def acceptable(gradient: Any, value: jax.Array | None) -> jax.Array:
    """() bool: finite loss, finite norm of the gradient (its square must not overflow)."""
    flags = [jnp.isfinite(squared_norm(g)) for g in jax.tree.leaves(gradient)]
    if value is not None:
        flags.append(jnp.isfinite(value))
    return _all(flags)


def unspoiled(update: Any) -> jax.Array:
    """() bool: the smallest array is finite, and no other small one lacks a finite number.

    Small are arrays of up to 256 numbers, and those that hold 1/64 of all. Several, since the
    smallest may be frozen; and no more, since to read an array of an update writes it out before
    it is applied.
    """
    leaves = sorted((x for x in jax.tree.leaves(update) if x.size), key=lambda x: x.size)
    total, held, flags = sum(x.size for x in leaves), 0, [all_finite(leaves[:1])]
    for x in leaves[1:]:
        held += x.size
        if x.size <= 256 or 64 * held <= total:
            flags.append((jnp.abs(x) < jnp.inf).any())
    return _all(flags)


def with_own_keys(state: Any, replica: Callable[[], jax.Array]) -> Any:
    """An optimizer's state whose random keys, equal at first, are those of this replica.

    Keys are arrays of a key type, and those of uint32 in a field whose name ends in "key".
    """

    def own(path, x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            number = replica()
            return jax.vmap(lambda key: jax.random.fold_in(key, number))(x.ravel()).reshape(x.shape)
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if x.dtype == jnp.uint32 and x.ndim == 1 and name.endswith("key"):
            return jax.random.fold_in(x, replica())
        return x

    return jax.tree_util.tree_map_with_path(own, state)


def _all(flags: Iterable[jax.Array]) -> jax.Array:
    """The conjunction as a reduction of negations, which XLA computes once.

    XLA fuses a chain of ``and``, and a plain reduction of a stack, which it turns into such a
    chain, into each of its uses: flags of all arrays into the update of each array. That took two
    thirds of the time to compile a step of 65 arrays.
    """
    flags = list(flags)
    return ~(~jnp.stack(flags)).any() if flags else jnp.array(True)


def select(ok: jax.Array, new: Any, old: Any) -> Any:
    """``new`` where ok, else ``old``; counts of learning-rate schedules always go on."""
    counts, injected = optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState

    def kept(new, old):
        if isinstance(new, counts):
            return new
        if isinstance(new, injected):
            return new._replace(inner_state=select(ok, new.inner_state, old.inner_state))
        return jnp.where(ok, new, old)

    return jax.tree.map(kept, new, old, is_leaf=lambda x: isinstance(x, (counts, injected)))


def finite_or_zero(x: jax.Array) -> jax.Array:
    """``x`` with zeros where it is not finite."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
