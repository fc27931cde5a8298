"""What of a function can be computed before some of its arguments are known."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

_SLACK = 1.1  # scalars and flags do not count


def split(fn: Callable, early: Any, late: Any) -> tuple[Callable, Callable]:
    """``fn(early, late)`` as ``first(early)``, which keeps what ``second(kept, late)`` needs.

    All that does not depend on ``late`` is computed first. Arrays that are larger than what they
    are made of, such as constants, are not kept but made again. Where more bytes would have to be
    kept than ``early`` has, nothing is computed first, and ``early`` is kept.

    Args:
      fn: a function of two trees of arrays, to be traced; it communicates nothing.
      early: arrays, or their shapes and dtypes.
      late: likewise.

    Returns:
      ``first`` and ``second``; kept is a list of arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> first, second = split(lambda x, y: jnp.exp(x).sum() * y, jnp.zeros(3), 2.0)
      >>> kept = first(jnp.zeros(3))
      >>> kept, second(kept, 2.0)
      ([Array(3., dtype=float32)], Array(6., dtype=float32))
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(early, late)
    jaxpr, structure = closed.jaxpr, jax.tree.structure(shape)
    given = jaxpr.invars[: len(jax.tree.leaves(early))]
    before, after = _by_when(jaxpr, given)
    after, kept = _made_again(jaxpr, given, before, after)
    if _nbytes(kept) > _SLACK * _nbytes(given):
        before, after, kept = [], jaxpr.eqns, given

    unnamed = jaxpr.debug_info._replace(arg_names=None, result_paths=None)

    def part(inputs, equations, outputs):
        part = core.Jaxpr(jaxpr.constvars, inputs, outputs, equations, jaxpr.effects, unnamed)
        return core.jaxpr_as_fun(core.ClosedJaxpr(part, closed.consts))

    first = part(given, before, kept)
    second = part([*kept, *jaxpr.invars[len(given) :]], after, jaxpr.outvars)
    return (
        lambda early: first(*jax.tree.leaves(early)),
        lambda kept, late: structure.unflatten(second(*kept, *jax.tree.leaves(late))),
    )


def _by_when(jaxpr, given) -> tuple[list, list]:
    """The equations that only need what is given (and constants), and the others."""
    known, parts = {*given, *jaxpr.constvars}, ([], [])
    for equation in jaxpr.eqns:
        late = not known.issuperset(_variables(equation.invars))
        parts[late].append(equation)
        if not late:
            known.update(equation.outvars)
    return parts


def _made_again(jaxpr, given, before, after) -> tuple[list, list]:
    """``after`` with those equations of ``before`` that enlarge, and what it needs of the rest."""
    least = {x: _nbytes([x]) for x in given}  # bytes to keep for a variable, or for what makes it
    enlarging = set()
    for k, equation in enumerate(before):
        inputs = sum(least.get(x, 0) for x in _variables(equation.invars))
        if inputs < _nbytes(equation.outvars):
            enlarging.add(k)
        least.update((x, min(inputs, _nbytes([x]))) for x in equation.outvars)
    own = {*jaxpr.constvars, *(x for equation in after for x in equation.outvars)}
    needed = _variables(x for equation in after for x in equation.invars)
    needed |= _variables(jaxpr.outvars)
    again = []
    for k, equation in reversed(list(enumerate(before))):
        if k in enlarging and needed.intersection(equation.outvars):
            again.insert(0, equation)
            own.update(equation.outvars)
            needed |= _variables(equation.invars)
    known = [*given, *(x for equation in before for x in equation.outvars)]
    kept = needed.intersection(known) - own
    # Results first and in their order, in which XLA looks for donated arrays to write them to.
    results = [x for x in jaxpr.outvars if not isinstance(x, core.Literal)]
    return [*again, *after], [x for x in dict.fromkeys([*results, *known]) if x in kept]


def _variables(atoms) -> set:
    return {x for x in atoms if not isinstance(x, core.Literal)}


def _nbytes(variables) -> int:
    return sum(x.aval.size * x.aval.dtype.itemsize for x in variables)
