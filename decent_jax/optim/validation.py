"""Checks of the schedules, numbers and optimizers of methods; each error names its cause."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr, Literal

from decent_jax.gossip.codecs import Codec, Lattice
from decent_jax.ground.format import shown
from decent_jax.ground.pytree import PyTree
from decent_jax.topology import Schedule

_TOLERANCE = 1e-9
_D2_BOUND = -1 / 3


def not_negative(name: str, value: object) -> None:
    """Requires a number of at least 0; a schedule or a traced value passes."""
    if isinstance(value, float | int) and not value >= 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def below_one(name: str, value: object) -> None:
    """Requires a number in [0, 1); a schedule or a traced value passes."""
    if isinstance(value, float | int) and not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def share(name: str, value: object) -> None:
    """Requires a number in [0, 1]; a schedule or a traced value passes."""
    if isinstance(value, float | int) and not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def combine(order: str) -> None:
    """Requires a known combine order."""
    if order not in ("awc", "atc"):
        raise ValueError(f"combine must be 'awc' or 'atc', got {order!r}")


def no_lattice(method: str, codec: Codec | None) -> None:
    """Requires a codec whose messages several neighbours can decode, or None."""
    if isinstance(codec, Lattice):
        raise ValueError(f"{method} sends no lattice; use codec int8, or algorithm swarm")


def is_transformation(inner: object) -> None:
    """Requires a local optimizer (not the function that makes it), or None."""
    if inner is not None and not (hasattr(inner, "init") and hasattr(inner, "update")):
        name = getattr(inner, "__name__", None)
        hint = f"; call it: {name}(...)" if name else ", such as optax.adamw(1e-3)"
        raise TypeError(f"the local optimizer must be an optax transformation, got {inner!r}{hint}")


# Optimizers that keep the initial parameters only to measure the distance from them.
_MEASURE = (optax.contrib.DoGState, optax.contrib.DoWGState)
# Optimizers that estimate their learning rate from gradients that must vanish at the optimum, where
# a replica's own gradient does not vanish.
_ESTIMATE = (
    optax.contrib.DAdaptAdamWState,
    optax.contrib.ProdigyState,
    optax.ScaleByRpropState,
)


def mixes(
    optimizer: optax.GradientTransformationExtraArgs, structure: PyTree, *leaves: PyTree
) -> None:
    """Requires a local optimizer that continues from mixed parameters of these shapes.

    An optimizer that keeps a copy of the parameters restores them from it and undoes the mixing.
    """

    def is_special(x: PyTree) -> bool:
        return isinstance(x, _MEASURE + _ESTIMATE)

    def checked(x: PyTree) -> PyTree:
        if isinstance(x, _ESTIMATE):
            raise ValueError(
                f"{type(x).__name__.removesuffix('State')} estimates its learning rate, which "
                "grows without bound if replicas have different gradients; use all_reduce, or "
                "another local optimizer, such as optax.adamw"
            )
        return () if isinstance(x, _MEASURE) else x

    def state(params: PyTree) -> PyTree:
        return jax.tree.map(checked, optimizer.init(params), is_leaf=is_special)

    program, shape = jax.make_jaxpr(state, return_shape=True)(  # pyright: ignore
        structure.unflatten(leaves)
    )
    origins = _origins(program.jaxpr, [_PARAMS] * len(program.jaxpr.invars))
    for (path, _), origin in zip(jax.tree_util.tree_leaves_with_path(shape), origins, strict=True):
        if origin == _PARAMS:
            raise ValueError(
                "the local optimizer keeps a copy of the parameters "
                f"({jax.tree_util.keystr(path)}), which mixing would not update; use another one, "
                "such as optax.adamw, or all_reduce"
            )
    if _sets(optimizer, structure, leaves):
        raise ValueError(
            "the local optimizer sets the parameters: its update is a stored value minus the "
            "parameters, which undoes the mixing; use another one, such as optax.adamw, or "
            "all_reduce"
        )


def _sets(optimizer: optax.GradientTransformation, structure: PyTree, leaves: PyTree) -> bool:
    """Whether an update is some value minus the parameters, according to its program."""

    def update(params: list[PyTree], gradients: list[PyTree], loss: jax.Array) -> list[PyTree]:
        params, gradients = structure.unflatten(params), structure.unflatten(gradients)
        change, _ = optimizer.update(gradients, optimizer.init(params), params, value=loss)
        return jax.tree.leaves(change)

    try:
        program = jax.make_jaxpr(update)(leaves, leaves, jnp.float32(0)).jaxpr  # pyright: ignore
    except Exception:  # it needs more arguments, and its first update raises the error
        return False
    others = len(program.invars) - len(leaves)
    return _DIFFERENCE in _origins(program, [_PARAMS] * len(leaves) + [""] * others)


# Origins of an array: the parameters, something minus the parameters, or, if "", anything else.
_PARAMS, _DIFFERENCE = "x", "y - x"
# Primitives that pass on their first operand.
_HAND_ON = ("copy", "copy_p", "convert_element_type", "reshape", "broadcast_in_dim", "squeeze")


def _origins(program: Jaxpr, of_inputs: list[str]) -> list[str]:
    """The origin of each output of a program, given those of its inputs, ``of_inputs``."""
    known: dict[object, str] = dict(zip(program.invars, of_inputs, strict=False))

    def of(variables: list[PyTree]) -> list[str]:
        return ["" if isinstance(x, Literal) else known.get(x, "") for x in variables]

    for eqn in program.eqns:
        name, operands = eqn.primitive.name, of(eqn.invars)
        branches: tuple[PyTree, ...] = eqn.params.get("branches", ())
        inner: PyTree = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        results = [""] * len(eqn.outvars)
        if branches or inner is not None:
            bodies = [getattr(body, "jaxpr", body) for body in branches or (inner,)]
            of_inputs = operands[1:] if branches else operands
            results = map(max, *[_origins(body, of_inputs) for body in bodies], results)
        elif name in _HAND_ON:
            results = operands[:1]
        elif (name == "sub" and operands[1] == _PARAMS) or (
            name in ("mul", "div", "select_n") and _DIFFERENCE in operands
        ):
            results = [_DIFFERENCE]
        known.update(zip(eqn.outvars, results, strict=False))
    return of(program.outvars)


def is_schedule(method: str, schedule: object) -> None:
    """Requires a schedule, not the name of a schedule."""
    if not isinstance(schedule, Schedule):
        name = shown(schedule) if isinstance(schedule, str) else "name"
        raise TypeError(
            f"{method} needs a schedule, got {shown(schedule)}; use topology.make({name}, n)"
        )


def row_stochastic(method: str, schedule: Schedule) -> None:
    """Requires that every replica's weights sum to 1; a sender's shares always do."""
    if any(np.abs(rnd.matrix.sum(1) - 1).max() > _TOLERANCE for rnd in schedule.rounds):
        raise ValueError(
            f"{method} averages, but on {schedule.name} the weights that a replica gives do not "
            "sum to 1; use push_sum there, or a doubly stochastic schedule such as one_peer_exp"
        )


def static_and_symmetric(method: str, schedule: Schedule, mix_every: int = 1) -> None:
    """Requires the same symmetric mixing matrix in every step."""
    if schedule.period > 1 or mix_every > 1:
        what = f"mix_every={mix_every}" if mix_every > 1 else schedule.name
        raise ValueError(
            f"{method} needs the same mixing matrix in every step and diverges with {what}; use a "
            "static graph such as bidirectional_ring, or exact_diffusion or gradient_tracking"
        )
    matrix = schedule.matrix(0)
    if np.abs(matrix - matrix.T).max() > _TOLERANCE:
        raise ValueError(
            f"{method} needs a symmetric mixing matrix, which {schedule.name} lacks; use an "
            "undirected graph such as bidirectional_ring, or gradient_tracking"
        )


def stable_diffusion(method: str, schedule: Schedule, mix_every: int = 1) -> None:
    """Requires that the disagreement of ``x+ = (I + W)/2 (2 x - x-)`` does not grow over a period.

    This is exact diffusion without gradients. On a symmetric static W the disagreement always
    shrinks; otherwise its growth is computed from the eigenvalues of a period acting on (x, x-).
    """
    eye = np.eye(schedule.num_replicas)
    period = np.eye(2 * len(eye))
    steps = schedule.period * mix_every
    for t in range(steps):
        r = schedule.round_at(t, mix_every)
        half = (eye + (eye if r is None else schedule.matrix(r))) / 2
        period = np.block([[2 * half, -half], [eye, 0 * eye]]) @ period
    growth = float(np.abs(np.linalg.eigvals(period)).max()) ** (1 / steps)
    if growth > 1 + 1e-4:  # 1 is a double eigenvalue, split by rounding
        how = f" with mix_every={mix_every}" if mix_every > 1 else ""
        raise ValueError(
            f"{method} diverges on {schedule.name}{how}: its disagreement grows by {growth:.4f} "
            "per step; mix in every step over a static graph such as bidirectional_ring, or use "
            "gradient_tracking"
        )


def static_messages(method: str, schedule: Schedule) -> None:
    """Requires a single round, which sends messages and averages no groups."""
    is_schedule(method, schedule)
    if schedule.period > 1 or schedule.rounds[0].group_size > 1:
        what = "changes them" if schedule.period > 1 else "averages in groups"
        raise ValueError(
            f"{method} keeps a sum of coded messages of fixed neighbours, and {schedule.name} "
            f"{what}; use a static graph such as bidirectional_ring or static_exp"
        )


def eigenvalues_above_minus_a_third(method: str, schedule: Schedule) -> None:
    """Requires eigenvalues of W above -1/3; warns within 1e-6 of this bound (Tang 2018)."""
    smallest = float(np.linalg.eigvalsh(schedule.matrix(0)).min())
    if smallest < _D2_BOUND - 1e-6:
        raise ValueError(
            f"{method} diverges on {schedule.name} with {schedule.num_replicas} replicas, whose "
            f"smallest eigenvalue {smallest:.6f} is below -1/3; use exact_diffusion"
        )
    if smallest < _D2_BOUND + 1e-6:
        warnings.warn(
            f"{method} on {schedule.name}: the smallest eigenvalue is -1/3, the bound of its "
            "stability; exact_diffusion has no such bound",
            stacklevel=3,
        )


def averages(method: str, schedule: Schedule) -> None:
    """Requires rounds that average over all replicas at once, as those of ``complete`` do."""
    is_schedule(method, schedule)
    n = schedule.num_replicas
    if n > 1 and any(rnd.group_size != n for rnd in schedule.rounds):
        raise ValueError(
            f"{method} needs rounds that average all replicas at once, which {schedule.name} does "
            "not have; use schedule=complete"
        )


def phases(method: str, schedule: Schedule, count: int) -> None:
    """Requires a multiple of ``count`` distinct rounds, for methods that treat them differently."""
    distinct = len({id(rnd) for rnd in schedule.rounds}) == schedule.period
    if count > 1 and (schedule.period % count or not distinct):
        has = schedule.period if distinct else f"{schedule.period}, some of them the same"
        raise ValueError(
            f"{method} needs a schedule whose number of rounds is a multiple of {count}, got "
            f"{has}; use topology.repeat(schedule, {count})"
        )


def mix_rounds(count: int | None, schedule: Schedule) -> int:
    """The rounds per mixing step, 1 for None; several require that a period repeats no round."""
    if isinstance(count, jax.Array):  # optax.inject_hyperparams turns numbers into arrays
        raise ValueError(
            'mix_rounds must be an int: give inject_hyperparams static_args="mix_rounds"'
        )
    count = 1 if count is None else count
    if count < 1:
        raise ValueError(f"mix_rounds must be at least 1, got {count}")
    if count > 1 and len({id(rnd) for rnd in schedule.rounds}) < schedule.period:
        raise ValueError(
            f"mix_rounds must be 1, got {count}: {schedule.name} repeats a round within its period"
        )
    return count


def matchings(method: str, schedule: Schedule) -> None:
    """Requires that in every round replicas average in pairs, 1/2 each, or are idle."""
    is_schedule(method, schedule)
    for rnd in schedule.rounds:
        off = rnd.matrix - np.diag(np.diag(rnd.matrix))
        pairs = np.isin(off, (0.0, 0.5)).all() and (off == off.T).all()
        if not pairs or (off > 0).sum(1).max() > 1 or rnd.group_size > 1:
            raise ValueError(
                f"{method} averages pairs of replicas, and {schedule.name} is not made of pairs; "
                "use random_matching"
            )
