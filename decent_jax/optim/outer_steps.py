"""Local steps, and in every round an outer step on a part of the parameters.

A method gives a `Rule`; `Streaming` says how its messages travel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decent_jax import gossip
from decent_jax.optim import frame, require, trees

Arrays = list[jax.Array]


class Rule(NamedTuple):
    """How the outer parameters of one fragment move; theta, x and results are lists of arrays.

    init: from theta to the rule's state of this fragment.
    step: ``(theta, x, state, mix, key, after) -> (theta, state)`` with x the replica's parameters
      as sent, ``mix`` a round of averaging with others, a key for formats that are random, and
      ``after`` as in `decent_jax.gossip.mean_coded`; ``mix`` has the last two already.
    """

    init: Callable[[Arrays], Any]
    step: Callable[
        [Arrays, Arrays, Any, Callable[[Arrays], Arrays], jax.Array | None, Any], tuple[Any, Any]
    ]


class OuterState(NamedTuple):
    """Own state of a method with outer steps."""

    theta: Any  # like params: the outer parameters
    states: tuple[Any, ...]  # the rule's state of each fragment
    # shape=() each: updates since a fragment departed; None unless used
    steps: tuple[Any, ...] | None = None


class Message(NamedTuple):
    """What a round gives: the outer step of a fragment, or the average that it will take."""

    theta: Arrays
    state: Any  # of the rule; None with the average
    steps: jax.Array | None  # those that it counts


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How messages of an outer step travel; the numbers are those of `decent_jax.optim.diloco`."""

    mix_every: int = 1
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    carry: bool = False
    weighted: bool = False
    eager: bool = False

    def check(self, method: str) -> None:
        """Raises ValueError for a number out of range."""
        if self.fragments < 1:
            raise ValueError(f"{method}.fragments must be at least 1, got {self.fragments}")
        if not 0 <= self.delay < max(self.mix_every, 1):
            raise ValueError(
                f"{method}.delay must be below mix_every, which is {self.mix_every}, and at least "
                f"0, got {self.delay}"
            )
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"{method}.alpha must be in [0, 1], got {self.alpha}")
        if self.eager and (not self.delay or self.carry or self.weighted):
            raise ValueError(
                f"{method}.eager=True needs a {method}.delay, and neither {method}.carry nor "
                f"{method}.weighted, got {self.delay}, {self.carry} and {self.weighted}"
            )

    def merged(self, theta: Arrays, now: Arrays, late: Arrays) -> Arrays:
        """``alpha x^(t) + (1 - alpha) theta``; with ``carry`` theta + x^(t) - x^(t - delay)."""
        carries = self.carry and self.delay
        if not (carries or self.alpha):
            return theta
        new = trees.add(theta, optax.tree.sub(now, late)) if carries else theta
        new = [self.alpha * a + (1 - self.alpha) * b for a, b in zip(now, new, strict=True)]
        # A replica that is not finite has nothing to keep.
        return optax.tree.where(trees.all_finite((now, late)), new, theta)


def outer_steps(
    inner: optax.GradientTransformation,
    mixing: frame.Mixing,
    rule: Rule,
    streaming: Streaming = Streaming(),
) -> optax.GradientTransformationExtraArgs:
    """Local steps, and in every round the rule on one fragment; with a delay a `frame.Delayed`.

    The rule's step depends only on the parameters that are sent and the method's own state, so all
    of it may take place while local steps are made; what they give is merged when it arrives.
    """
    streaming.check(mixing.method)
    fragments, delay = streaming.fragments, streaming.delay
    require.phases(f"{mixing.method} with {fragments} fragments", mixing.schedule, fragments)

    def fragment(round, tree):
        f = gossip.number(round) % fragments
        return f, fragments_of(tree, fragments)[f]

    def depart(late, own, count, round, after=None):
        f, which = fragment(round, late)
        theta, late = _taken(own.theta, which), _taken(late, which)
        steps = own.steps and own.steps[f]
        count = count + max(delay - 1, 0)  # at the update that has the round

        def mix(tree):
            if steps is None:
                return mixing(tree, round, count, between=after)
            return _weighted_average(mixing, tree, steps, theta, round, count, after)

        if streaming.eager:
            return Message(mix(late), None, steps)
        key = mixing.key(count)
        return Message(*rule.step(theta, late, own.states[f], mix, key, after), steps)

    def arrive(x, own, late, message, round):
        f, which = fragment(round, x)
        now, late = _taken(x, which), _taken(late, which)
        theta, state = message.theta, message.state
        if streaming.eager:
            average = _with_own_share_of_now(theta, now, late, 1 / mixing.schedule.num_replicas)
            theta = _taken(own.theta, which)
            theta, state = rule.step(theta, now, own.states[f], lambda x: average, None, None)
        new = streaming.merged(theta, now, late)
        states = (*own.states[:f], state, *own.states[f + 1 :])
        steps = own.steps
        if steps is not None:
            steps = (*steps[:f], steps[f] - message.steps, *steps[f + 1 :])
        own = OuterState(_replaced(own.theta, which, theta), states, steps)
        return _replaced(x, which, new), own

    def step(params, own, round, local):
        if round is not None and delay > 1:
            raise ValueError(
                f"{mixing.method}.delay={delay}: a message travels beside {delay} updates, each "
                "with round=None; tx.depart begins it before them, tx.arrive ends it after them"
            )
        update, inner, ok = local(params)
        x, before = trees.add(params, update), own
        if streaming.weighted:
            own = own._replace(steps=tuple(k + ok for k in own.steps))
        if round is not None:
            late, its = (params, before) if delay else (x, own)
            message = depart(late, its, local.count, round)
            x, own = arrive(x, own, late, message, round)
        return x, own, inner, ok

    def own(params):
        states = [rule.init(_taken(params, which)) for which in fragments_of(params, fragments)]
        steps = tuple(jnp.zeros((), float) for _ in states) if streaming.weighted else None
        return OuterState(trees.copy(params), tuple(states), steps)

    tx = frame.method(inner, step, own)
    if not delay:
        return tx
    delayed = frame.Delayed(*tx)
    delayed.delay, delayed.depart, delayed.arrive = delay, depart, arrive
    delayed.resting = ("theta", "states")
    return delayed


def _weighted_average(
    mixing: frame.Mixing,
    tree: Arrays,
    steps: jax.Array,
    old: Arrays,
    round: Any,
    count: jax.Array,
    between: Any,
) -> Arrays:
    """``sum_j W_ij k_j x_j / sum_j W_ij k_j`` with the steps k; ``old`` where nobody made any."""
    total, weight = mixing((trees.scale(steps, tree), steps), round, count, between=between)
    known = weight > 0
    average = trees.scale(1 / jnp.where(known, weight, 1), total)
    return optax.tree.where(known, average, old)


def _with_own_share_of_now(average: Arrays, now: Arrays, late: Arrays, share: float) -> Arrays:
    """The average with ``now`` for ``late``; a replica that is not finite takes it as it is."""
    newer = trees.add(average, trees.scale(share, optax.tree.sub(now, late)))
    return optax.tree.where(trees.all_finite((now, late)), newer, average)


def fragments_of(params: Any, count: int) -> list[list[int]]:
    """The numbers of the leaves in each fragment: consecutive, of about equal size."""
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


def _taken(tree: Any, which: list[int]) -> list[jax.Array]:
    """The leaves of these numbers."""
    leaves = jax.tree.leaves(tree)
    return [leaves[k] for k in which]


def _replaced(tree: Any, which: list[int], new: list[jax.Array]) -> Any:
    """The tree with new leaves at these numbers."""
    leaves, structure = jax.tree.flatten(tree)
    for k, leaf in zip(which, new, strict=True):
        leaves[k] = leaf
    return structure.unflatten(leaves)
