"""The core of DiLoCo, NoLoCo and SparseLoCo: local steps, with an outer step in every round.

An outer step moves one fragment of the parameters; its message can overlap local steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax

from decent_jax import gossip
from decent_jax.gossip import RoundId
from decent_jax.ground.pytree import PyTree
from decent_jax.optim import trees, validation
from decent_jax.optim.method_wrapper import Delayed, Local, Mixing, Stepped, method

Arrays = list[jax.Array]
Message = tuple[Arrays, PyTree]  # theta of a fragment, and the state of its outer steps


class OuterState(NamedTuple):
    """The ``own`` state of a method with outer steps."""

    theta: PyTree  # like params: the outer parameters
    states: tuple[PyTree, ...]  # for each fragment, the state of its outer steps


class Departure(NamedTuple):
    """The round of a departing message, and the number of the update that has this round."""

    round: RoundId
    # shape=(), dtype=int32
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    between: gossip.Between  # arrays for which the second stage of a group mean waits


def outer_steps(
    inner: optax.GradientTransformation,
    mixing: Mixing,
    init: Callable[[Arrays], PyTree],
    outer_step: Callable[[Arrays, Arrays, PyTree, Departure], Message],
    fragments: int = 1,
    delay: int = 0,
    carry: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """A method of local steps, with an outer step on one fragment in every round.

    Args:
      inner: the local optimizer.
      mixing: the communication of the method.
      init: a function from a fragment's theta to the state of its outer steps.
      outer_step: ``(theta, x, state, departure) -> (theta, state)`` of a fragment, with x the
        replica's parameters as sent. It depends on nothing else, so the whole outer step can
        overlap local steps.
      fragments, delay, carry: as in `decent_jax.optim.diloco`.

    Raises:
      ValueError: a number out of range, or a schedule with too few rounds.
    """
    _check(mixing, fragments, delay)

    def fragment(round: RoundId, tree: PyTree) -> tuple[int, list[int]]:
        f = int(gossip.number(round)) % fragments
        return f, fragments_of(tree, fragments)[f]

    def depart(
        late: PyTree, own: OuterState, count: jax.Array, round: RoundId, after: PyTree = None
    ) -> Message:
        f, which = fragment(round, late)
        theta, late = take_leaves(own.theta, which), take_leaves(late, which)
        count = count + max(delay - 1, 0)  # of the update that has the round
        departure = Departure(round, count, gossip.Between(after))
        return outer_step(theta, late, own.states[f], departure)

    def arrive(
        x: PyTree, own: OuterState, late: PyTree, message: Message, round: RoundId
    ) -> tuple[PyTree, OuterState]:
        f, which = fragment(round, x)
        now, late = take_leaves(x, which), take_leaves(late, which)
        theta, state = message
        new = with_progress(theta, late, now) if carry and delay else theta
        states = (*own.states[:f], state, *own.states[f + 1 :])
        return put_leaves(x, which, new), OuterState(put_leaves(own.theta, which, theta), states)

    def step(params: PyTree, own: OuterState, round: RoundId, local: Local) -> Stepped:
        if round is not None and delay > 1:
            raise ValueError(
                f"outer.delay={delay}: a message overlaps {delay} updates, each with "
                "round=None; call tx.delayed.depart before and tx.delayed.arrive after them"
            )
        update, inner, ok = local(params)
        x = trees.add(params, update)
        if round is not None:
            late = params if delay else x
            message = depart(late, own, local.count, round)
            x, own = arrive(x, own, late, message, round)
        return x, own, inner, ok

    def own(params: PyTree) -> OuterState:
        parts = [take_leaves(params, which) for which in fragments_of(params, fragments)]
        return OuterState(trees.copy(params), tuple(map(init, parts)))

    delayed = Delayed(delay, depart, arrive) if delay else None
    return method(inner, step, own, mixing.axis_name, delayed=delayed)


def with_progress(theta: Arrays, late: Arrays, now: Arrays) -> Arrays:
    """theta plus the replica's progress from ``late`` to ``now``, if both of these are finite."""
    progressed = trees.add(theta, optax.tree.sub(now, late))
    return optax.tree.where(trees.all_finite((now, late)), progressed, theta)


def descend(
    outer: optax.GradientTransformation, delta: Arrays, theta: Arrays, state: PyTree
) -> Message:
    """(theta after a step of the outer optimizer along delta, the optimizer's new state)."""
    change, state = outer.update(delta, state, theta)
    return optax.apply_updates(theta, change), state


def movement(theta: Arrays, x: Arrays) -> Arrays:
    """``theta - x``, or zeros if it is not finite, so that only the kept error is sent."""
    moved = optax.tree.sub(theta, x)
    return optax.tree.where(trees.all_finite(moved), moved, optax.tree.zeros_like(moved))


def _check(mixing: Mixing, fragments: int, delay: int) -> None:
    if fragments < 1:
        raise ValueError(f"outer.fragments must be at least 1, got {fragments}")
    validation.not_negative("outer.delay", delay)
    validation.phases(f"{mixing.method} with {fragments} fragments", mixing.schedule, fragments)


def fragments_of(params: PyTree, count: int) -> list[list[int]]:
    """The indices of the leaves in each fragment: consecutive, of about equal size."""
    sizes = np.array([leaf.size for leaf in jax.tree.leaves(params)])
    if count > len(sizes):
        raise ValueError(
            f"{count} fragments are more than the {len(sizes)} arrays of the parameters"
        )
    middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    wanted = np.minimum((middle * count).astype(int), count - 1).tolist()
    of = [0]
    for k in range(1, len(sizes)):  # a large array may fill several fragments; leave none empty
        of.append(min(max(wanted[k], count - len(sizes) + k), of[-1] + 1))
    return [np.flatnonzero(np.equal(of, k)).tolist() for k in range(count)]


def take_leaves(tree: PyTree, which: list[int]) -> list[jax.Array]:
    """The leaves with these indices."""
    leaves = jax.tree.leaves(tree)
    return [leaves[k] for k in which]


def put_leaves(tree: PyTree, which: list[int], new: list[jax.Array]) -> PyTree:
    """The tree with new leaves at these indices."""
    leaves, structure = jax.tree.flatten(tree)
    for k, leaf in zip(which, new, strict=True):
        leaves[k] = leaf
    return structure.unflatten(leaves)
